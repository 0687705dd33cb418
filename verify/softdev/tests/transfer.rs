// SPDX-License-Identifier: MIT
//! Every operation carries its payload unharmed, at every size and alignment, and touches nothing
//! beside it; by each of the ways that bytes can go.

mod roles;
mod verbs;

use rdma_sys::{ibv_wc_opcode, ibv_wr_opcode};
use roles::{effort, play, role, Links, Role};
use verbs::*;

/// Bytes around a target that must stay as they were.
const MARGIN: usize = 64;
const GUARD: u8 = 0xa5;

fn sizes() -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 1000, 1023, 1024, 1025];
    sizes.extend([4095, 4096, 4097, 8192, 16383, 16384, 16385, 65_537, 1 << 20, (1 << 20) + 13]);
    if effort(0, 1) == 1 {
        sizes.extend((1..=600).step_by(7));
    }
    sizes.push(64 << 20);
    sizes
}

const OPS: [ibv_wr_opcode::Type; 5] = [
    ibv_wr_opcode::IBV_WR_SEND,
    ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
    ibv_wr_opcode::IBV_WR_RDMA_WRITE,
    ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
    ibv_wr_opcode::IBV_WR_RDMA_READ,
];

fn takes_receive(op: ibv_wr_opcode::Type) -> bool {
    !matches!(op, ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_READ)
}

/// The cases of a run, the same on both sides: operation, size, offsets of source and target.
fn cases() -> Vec<(ibv_wr_opcode::Type, usize, usize, usize)> {
    let sends_only = std::env::var_os("FASTWAKE_SENDS_ONLY").is_some();
    let limit: usize = std::env::var("FASTWAKE_LIMIT").map_or(usize::MAX, |v| v.parse().expect("bytes"));
    let mut cases = Vec::new();
    for size in sizes().into_iter().filter(|&size| size <= limit) {
        for op in OPS {
            let one_sided =
                op >= ibv_wr_opcode::IBV_WR_RDMA_READ || op <= ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            if sends_only && one_sided {
                continue;
            }
            let offsets: &[(usize, usize)] =
                if size > 1 << 20 { &[(3, 61)] } else { &[(0, 0), (1, 0), (0, 5), (13, 4095)] };
            cases.extend(offsets.iter().map(|&(from, to)| (op, size, from, to)));
        }
    }
    cases
}

/// Three pieces of an uneven split, so that lists are walked.
fn split(len: usize) -> [(usize, usize); 3] {
    let a = len / 5;
    let b = len / 2;
    [(0, a), (a, b - a), (b, len - b)]
}

/// What is at the target before and after.
fn prepare(target: &mut [u8], len: usize, at: usize) {
    target[at..at + len + 2 * MARGIN].fill(GUARD);
}

fn check(target: &[u8], len: usize, at: usize, seed: u64, case: &str) {
    let mut want = vec![0; len];
    pattern(seed, &mut want);
    let found = &target[at + MARGIN..at + MARGIN + len];
    if let Some(i) = (0..len).find(|&i| found[i] != want[i]) {
        panic!("{case}: byte {i} of {len} differs");
    }
    assert!(target[at..at + MARGIN].iter().all(|&b| b == GUARD), "{case}: bytes before were touched");
    assert!(
        target[at + MARGIN + len..at + len + 2 * MARGIN].iter().all(|&b| b == GUARD),
        "{case}: bytes behind were touched"
    );
}

/// Role 0: has the target of sends and writes, and the source of reads.
fn passive(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(256, std::ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let memory = pages((64 << 20) + 16384);
    let mr = dev.mr(memory, ALL_RIGHTS);
    connect(links, 1, qp, &Conn::default());
    // SAFETY: a live region.
    links.tell(1, &[unsafe { (*mr).addr } as u64, unsafe { (*mr).rkey }.into()]);
    for (i, (op, size, _, to)) in cases().into_iter().enumerate() {
        let case = format!("op {op}, {size} bytes, case {i}");
        let read = op == ibv_wr_opcode::IBV_WR_RDMA_READ;
        prepare(memory, size, to);
        if read {
            pattern(i as u64, &mut memory[to + MARGIN..to + MARGIN + size]);
        }
        if takes_receive(op) {
            let pieces = split(size).map(|(start, len)| sge(mr, to + MARGIN + start, len));
            post_recv(qp, i as u64, &pieces);
        }
        links.meet(1);
        if takes_receive(op) {
            let wc = expect(cq, i as u64, OK);
            assert_eq!(wc.len as usize, size, "{case}");
            let imm =
                matches!(op, ibv_wr_opcode::IBV_WR_SEND_WITH_IMM | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
            assert_eq!(wc.imm, imm.then_some(0xabc0_0000 + i as u32), "{case}");
            let write = op == ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            let opcode =
                if write { ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM } else { ibv_wc_opcode::IBV_WC_RECV };
            assert_eq!(wc.opcode, opcode, "{case}");
        }
        links.meet(1);
        if !read {
            check(memory, size, to, i as u64, &case);
        }
    }
    assert_eq!(poll(cq), None);
}

/// Role 1: does everything.
fn active(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(256, std::ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let memory = pages((64 << 20) + 16384);
    let mr = dev.mr(memory, ALL_RIGHTS);
    connect(links, 0, qp, &Conn::default());
    let [addr, rkey] = links.hear::<2>(0);
    for (i, (op, size, from, to)) in cases().into_iter().enumerate() {
        let case = format!("op {op}, {size} bytes, case {i}");
        let read = op == ibv_wr_opcode::IBV_WR_RDMA_READ;
        prepare(memory, size, from);
        if !read {
            pattern(i as u64, &mut memory[from + MARGIN..from + MARGIN + size]);
        }
        links.meet(0);
        let pieces = split(size).map(|(start, len)| sge(mr, from + MARGIN + start, len));
        let inline = if size <= 256 && !read && i % 2 == 1 { INLINE } else { 0 };
        Send::new(i as u64, op, &pieces)
            .flags(SIGNALED | inline)
            .imm(0xabc0_0000 + i as u32)
            .remote(addr + (to + MARGIN) as u64, rkey as u32)
            .post(qp);
        if inline != 0 {
            // Taken at posting: the memory is the application's again.
            memory[from + MARGIN..from + MARGIN + size].fill(0);
        }
        let wc = expect(cq, i as u64, OK);
        let opcode = match op {
            ibv_wr_opcode::IBV_WR_RDMA_READ => ibv_wc_opcode::IBV_WC_RDMA_READ,
            ibv_wr_opcode::IBV_WR_SEND | ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => ibv_wc_opcode::IBV_WC_SEND,
            _ => ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        };
        assert_eq!(wc.opcode, opcode, "{case}");
        if read {
            check(memory, size, from, i as u64, &case);
        }
        links.meet(0);
    }
    assert_eq!(poll(cq), None);
}

#[test]
fn every_operation_carries_its_payload_through_moved_pages() {
    play("every_operation_carries_its_payload_through_moved_pages", &[role(passive), role(active)]);
}

#[test]
fn every_operation_carries_its_payload_by_system_calls() {
    let unmoved = |r: Role| r.env("FW_SOFT_MAP", "0");
    play(
        "every_operation_carries_its_payload_by_system_calls",
        &[unmoved(role(passive)), unmoved(role(active))],
    );
}

/// Forbids `process_vm_readv` and `process_vm_writev`, as container profiles do.
fn forbid_process_vm() {
    let step = |code: u32, jt, jf, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, libc::SYS_process_vm_readv as u32),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_process_vm_writev as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a filter of this frame, copied by the kernel.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

#[test]
fn sends_go_in_fragments_where_nothing_else_is_allowed() {
    let bare = |body| {
        role(body).env("FW_SOFT_MAP", "0").env("FASTWAKE_SENDS_ONLY", "1").env("FASTWAKE_LIMIT", "2000000")
    };
    play(
        "sends_go_in_fragments_where_nothing_else_is_allowed",
        &[
            bare(|links| {
                forbid_process_vm();
                passive(links);
            }),
            bare(|links| {
                forbid_process_vm();
                active(links);
            }),
        ],
    );
}

#[test]
fn reads_and_writes_of_moved_pages_need_no_system_call() {
    let role = |body| role(body).env("FASTWAKE_LIMIT", "70000");
    play(
        "reads_and_writes_of_moved_pages_need_no_system_call",
        &[
            role(|links| {
                forbid_process_vm();
                passive(links);
            }),
            role(|links| {
                forbid_process_vm();
                active(links);
            }),
        ],
    );
}

/// Atomics of both kinds, from two processes at once, on one word.
fn counter(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(64, std::ptr::null_mut());
    let memory = pages(4096);
    let mr = dev.mr(memory, ALL_RIGHTS);
    let mut qps = Vec::new();
    for other in 1..=2 {
        let qp = dev.qp(&Spec::on(cq));
        connect(links, other, qp, &Conn::default());
        // SAFETY: a live region.
        links.tell(other, &[unsafe { (*mr).addr } as u64, unsafe { (*mr).rkey }.into()]);
        qps.push(qp);
    }
    for other in 1..=2 {
        links.hear::<1>(other);
    }
    let word = |i: usize| u64::from_ne_bytes(memory[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    assert_eq!(word(1), 2 * 2000 * 3, "sums");
    assert_eq!(word(2), 2 * 500, "swaps that succeeded");
    for other in 1..=2 {
        links.tell(other, &[1]);
    }
}

fn counting(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(64, std::ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let memory = pages(4096);
    let mr = dev.mr(memory, ALL_RIGHTS);
    connect(links, 0, qp, &Conn::default());
    let [addr, rkey] = links.hear::<2>(0);
    let run = |op, at: u64, compare_add, swap| {
        Send::new(1, op, &[sge(mr, 16, 8)]).remote(addr + at, rkey as u32).atomic(compare_add, swap).post(qp);
        assert_eq!(expect(cq, 1, OK).len, 8);
        u64::from_ne_bytes(memory[16..24].try_into().expect("eight bytes"))
    };
    let mut last = 0;
    for _ in 0..2000 {
        let was = run(ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 3, 0);
        assert!(was >= last && was % 3 == 0);
        last = was;
    }
    let (mut done, mut seen) = (0, 0);
    while done < 500 {
        let was = run(ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP, 16, seen, seen + 1);
        if was == seen {
            done += 1;
            seen += 1;
        } else {
            seen = was;
        }
    }
    links.tell(0, &[1]);
    links.hear::<1>(0);
}

#[test]
fn atomics_of_two_processes_on_moved_pages_lose_nothing() {
    play(
        "atomics_of_two_processes_on_moved_pages_lose_nothing",
        &[role(counter), role(counting), role(counting)],
    );
}

#[test]
fn atomics_of_two_processes_by_system_calls_lose_nothing() {
    let unmoved = |body| role(body).env("FW_SOFT_MAP", "0");
    play(
        "atomics_of_two_processes_by_system_calls_lose_nothing",
        &[unmoved(counter), unmoved(counting), unmoved(counting)],
    );
}

/// Many messages without a look at each: unsignalled sends, a queue that overtakes its receiver.
fn flooded(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(256, std::ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let memory = pages(64 * 4096);
    let mr = dev.mr(memory, ALL_RIGHTS);
    connect(links, 1, qp, &Conn::default());
    let total = u64::from(effort(20_000, 1_000_000));
    let mut posted = 0;
    for got in 0..total {
        // Falls behind on purpose, now and then.
        while posted < total && posted - got < if got % 1000 < 500 { 60 } else { 2 } {
            post_recv(qp, posted, &[sge(mr, (posted % 64) as usize * 4096, 4096)]);
            posted += 1;
        }
        let wc = expect(cq, got, OK);
        let len = (got * 37 % 3000) as usize;
        assert_eq!(wc.len as usize, len);
        let at = (got % 64) as usize * 4096;
        let mut want = vec![0; len];
        pattern(got, &mut want);
        assert!(memory[at..at + len] == want[..], "message {got} of {len} bytes");
    }
    links.meet(1);
}

fn flooding(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(256, std::ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let memory = pages(64 * 4096);
    let mr = dev.mr(memory, ALL_RIGHTS);
    connect(links, 0, qp, &Conn::default());
    let total = u64::from(effort(20_000, 1_000_000));
    let mut outstanding = 0;
    for i in 0..total {
        let len = (i * 37 % 3000) as usize;
        let at = (i % 64) as usize * 4096;
        pattern(i, &mut memory[at..at + len]);
        let signal = i % 16 == 15 || i + 1 == total;
        Send::new(i, ibv_wr_opcode::IBV_WR_SEND, &[sge(mr, at, len)])
            .flags(if signal { SIGNALED } else { 0 })
            .post(qp);
        outstanding += u64::from(signal);
        while outstanding > 1 || (i + 1 == total && outstanding > 0) {
            assert_eq!(next(cq).status, OK);
            outstanding -= 1;
        }
    }
    links.meet(0);
}

#[test]
fn a_sender_that_overtakes_its_receiver_loses_nothing() {
    play("a_sender_that_overtakes_its_receiver_loses_nothing", &[role(flooded), role(flooding)]);
}

// SPDX-License-Identifier: MIT
//! What goes wrong goes wrong as the specification says: the status of each side, the state of each
//! QP, and not a byte touched without the right to.

mod roles;
mod verbs;

use rdma_sys::ibv_qp_state::*;
use rdma_sys::ibv_wc_status::*;
use rdma_sys::ibv_wr_opcode::*;
use rdma_sys::*;
use roles::{play, role, Links};
use std::ptr;
use verbs::*;

/// What the requester is to try in one case.
#[derive(Clone, Copy)]
struct Wrong {
    op: u32,
    /// Added to the address.
    offset: i64,
    len: usize,
    /// Added to the key.
    key: u32,
    /// Rights of the region, and of the QP.
    region: u32,
    qp: u32,
}

const REGION: usize = 8192;
const WRITE: u32 = 2;
const READ: u32 = 4;
const ATOMIC: u32 = 8;

fn wrongs() -> Vec<Wrong> {
    let right = Wrong { op: IBV_WR_RDMA_WRITE, offset: 0, len: 64, key: 0, region: 15, qp: 15 };
    let mut wrongs = Vec::new();
    for op in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD] {
        let len = if op == IBV_WR_ATOMIC_FETCH_AND_ADD { 8 } else { 64 };
        let needed = match op {
            IBV_WR_RDMA_READ => READ,
            IBV_WR_ATOMIC_FETCH_AND_ADD => ATOMIC,
            _ => WRITE,
        };
        let right = Wrong { op, len, ..right };
        wrongs.extend([
            Wrong { key: 1, ..right },
            Wrong { key: 0x100, ..right },
            Wrong { offset: -8, ..right },
            Wrong { offset: (REGION - len + 8) as i64, ..right },
            Wrong { offset: 1 << 40, ..right },
            Wrong { offset: i64::MIN, ..right },
            Wrong { region: 15 & !needed, ..right },
            Wrong { qp: 15 & !needed, ..right },
        ]);
    }
    wrongs
}

fn target(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(64, ptr::null_mut());
    for (i, wrong) in wrongs().into_iter().enumerate() {
        let qp = dev.qp(&Spec::on(cq));
        let memory = pages(REGION + 8192);
        memory.fill(0x77);
        let rights = if wrong.region & (WRITE | ATOMIC) != 0 { wrong.region } else { wrong.region & !1 };
        let mr = dev.mr(&mut memory[4096..4096 + REGION], rights);
        connect(links, 1, qp, &Conn { access: wrong.qp, ..Conn::default() });
        let receive = dev.mr(pages(4096), 1);
        post_recv(qp, 5, &[sge(receive, 0, 64)]);
        // SAFETY: a live region.
        links.tell(1, &[unsafe { (*mr).addr } as u64, unsafe { (*mr).rkey }.into()]);
        // The responder's QP fails, says so and flushes its receive.
        expect(cq, 5, FLUSHED);
        assert_eq!(state(qp), IBV_QPS_ERR, "case {i}");
        // SAFETY: a live context and QP; the event is filled in by the call.
        unsafe {
            let mut event = std::mem::zeroed();
            assert_eq!(ibv_get_async_event(dev.ctx, &mut event), 0);
            assert!(matches!(event.event_type, ibv_event_type::IBV_EVENT_QP_ACCESS_ERR), "case {i}");
            assert_eq!(event.element.qp, qp);
            ibv_ack_async_event(&mut event);
            assert_eq!(ibv_destroy_qp(qp), 0);
            assert_eq!(ibv_dereg_mr(mr), 0);
        }
        assert!(memory.iter().all(|&b| b == 0x77), "case {i}: a byte was touched");
        links.meet(1);
    }
}

fn requester(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(64, ptr::null_mut());
    let memory = pages(4096);
    let mr = dev.mr(memory, ALL_RIGHTS);
    for (i, wrong) in wrongs().into_iter().enumerate() {
        let qp = dev.qp(&Spec::on(cq));
        memory.fill(0x11);
        connect(links, 0, qp, &Conn::default());
        let [addr, rkey] = links.hear::<2>(0);
        // Unsignalled: a failing request completes all the same.
        Send::new(i as u64, wrong.op, &[sge(mr, 0, wrong.len)])
            .flags(0)
            .remote(addr.wrapping_add_signed(wrong.offset), (rkey as u32).wrapping_add(wrong.key))
            .atomic(1, 0)
            .post(qp);
        expect(cq, i as u64, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(state(qp), IBV_QPS_ERR, "case {i}");
        assert!(memory.iter().all(|&b| b == 0x11), "case {i}: own memory was touched");
        links.meet(0);
    }
}

#[test]
fn what_the_target_did_not_permit_touches_no_byte() {
    play("what_the_target_did_not_permit_touches_no_byte", &[role(target), role(requester)]);
}

#[test]
fn what_the_target_did_not_permit_touches_no_byte_by_system_calls() {
    let unmoved = |body| role(body).env("FW_SOFT_MAP", "0");
    play(
        "what_the_target_did_not_permit_touches_no_byte_by_system_calls",
        &[unmoved(target), unmoved(requester)],
    );
}

/// A pair of connected QPs, for each case anew. Calls `check` with both sides' objects.
fn pairs(
    links: &mut Links,
    other: usize,
    conn: Conn,
    cases: usize,
    check: impl Fn(&mut Links, usize, &Side),
) {
    let dev = open();
    let cq = dev.cq(64, ptr::null_mut());
    let memory = pages(1 << 16);
    let mr = dev.mr(memory, ALL_RIGHTS);
    for case in 0..cases {
        let qp = dev.qp(&Spec::on(cq));
        connect(links, other, qp, &conn);
        check(links, case, &Side { dev, cq, qp, mr });
        links.meet(other);
        // SAFETY: a live QP.
        assert_eq!(unsafe { ibv_destroy_qp(qp) }, 0);
        assert_eq!(poll(cq), None, "case {case}: destroying takes the completions along");
        links.meet(other);
    }
}

struct Side {
    dev: Dev,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    mr: *mut ibv_mr,
}

impl Side {
    fn bad_key(&self) -> ibv_sge {
        let mut sge = sge(self.mr, 0, 64);
        sge.lkey ^= 1;
        sge
    }
}

const LOCAL: usize = 6;

#[test]
fn a_wrong_local_list_fails_at_home_and_nowhere_else() {
    play(
        "a_wrong_local_list_fails_at_home_and_nowhere_else",
        &[
            role(|links| {
                pairs(links, 1, Conn::default(), LOCAL, |links, _, side| {
                    post_recv(side.qp, 1, &[sge(side.mr, 0, 4096)]);
                    links.meet(1);
                    links.meet(1);
                    assert_eq!(poll(side.cq), None);
                    assert_eq!(state(side.qp), IBV_QPS_RTS);
                });
            }),
            role(|links| {
                pairs(links, 0, Conn::default(), LOCAL, |links, case, side| {
                    links.meet(0);
                    let past_end = sge(side.mr, (1 << 16) - 32, 64);
                    let read_only = side.dev.mr(pages(4096), 0);
                    let (op, list, status) = match case {
                        0 => (IBV_WR_SEND, vec![side.bad_key()], IBV_WC_LOC_PROT_ERR),
                        1 => (IBV_WR_SEND, vec![sge(side.mr, 0, 8), past_end], IBV_WC_LOC_PROT_ERR),
                        2 => (IBV_WR_RDMA_WRITE, vec![side.bad_key()], IBV_WC_LOC_PROT_ERR),
                        3 => (IBV_WR_RDMA_READ, vec![sge(read_only, 0, 64)], IBV_WC_LOC_PROT_ERR),
                        4 => (IBV_WR_ATOMIC_FETCH_AND_ADD, vec![sge(side.mr, 0, 4)], IBV_WC_LOC_LEN_ERR),
                        _ => (IBV_WR_SEND, vec![sge(side.mr, 0, 0), side.bad_key()], IBV_WC_LOC_PROT_ERR),
                    };
                    Send::new(9, op, &list).flags(0).post(side.qp);
                    // One behind it is flushed, in order.
                    Send::new(10, IBV_WR_SEND, &[sge(side.mr, 0, 8)]).post(side.qp);
                    expect(side.cq, 9, status);
                    expect(side.cq, 10, FLUSHED);
                    assert_eq!(state(side.qp), IBV_QPS_ERR);
                    links.meet(0);
                });
            }),
        ],
    );
}

/// Lengths of message and receive, and whether the receive's key is wrong.
const RECEIVES: [(usize, usize, bool); 6] = [
    (65, 64, false),
    (16, 8, false),
    (5000, 4096, false),
    (60_000, 59_999, false),
    (16, 64, true),
    (9000, 9000, true),
];

#[test]
fn a_message_too_long_or_a_bad_receive_fails_on_both_sides() {
    play(
        "a_message_too_long_or_a_bad_receive_fails_on_both_sides",
        &[
            role(|links| {
                pairs(links, 1, Conn::default(), RECEIVES.len(), |links, case, side| {
                    let (_, room, bad) = RECEIVES[case];
                    let mut entry = sge(side.mr, 0, room);
                    entry.lkey ^= u32::from(bad);
                    post_recv(side.qp, 1, &[entry]);
                    post_recv(side.qp, 2, &[sge(side.mr, 0, 1 << 16)]);
                    links.meet(1);
                    expect(side.cq, 1, if bad { IBV_WC_LOC_PROT_ERR } else { IBV_WC_LOC_LEN_ERR });
                    expect(side.cq, 2, FLUSHED);
                    assert_eq!(state(side.qp), IBV_QPS_ERR);
                });
            }),
            role(|links| {
                pairs(links, 0, Conn::default(), RECEIVES.len(), |links, case, side| {
                    let (len, _, bad) = RECEIVES[case];
                    links.meet(0);
                    Send::new(7, IBV_WR_SEND, &[sge(side.mr, 0, len)]).flags(0).post(side.qp);
                    expect(side.cq, 7, if bad { IBV_WC_REM_OP_ERR } else { IBV_WC_REM_INV_REQ_ERR });
                    assert_eq!(state(side.qp), IBV_QPS_ERR);
                });
            }),
        ],
    );
}

#[test]
fn without_a_receive_a_send_waits_as_often_as_it_was_told() {
    play(
        "without_a_receive_a_send_waits_as_often_as_it_was_told",
        &[
            role(|links| {
                pairs(links, 1, Conn { min_rnr_timer: 14, ..Conn::default() }, 3, |links, case, side| {
                    match case {
                        // Never posts; then always; then only when the sender waits already.
                        0 => links.meet(1),
                        1 => {
                            post_recv(side.qp, 1, &[sge(side.mr, 0, 64)]);
                            links.meet(1);
                            expect(side.cq, 1, OK);
                        }
                        _ => {
                            links.meet(1);
                            links.meet(1);
                            post_recv(side.qp, 1, &[sge(side.mr, 0, 64)]);
                            expect(side.cq, 1, OK);
                        }
                    }
                });
            }),
            role(|links| {
                pairs(links, 0, Conn { rnr_retry: 3, ..Conn::default() }, 2, |links, case, side| {
                    links.meet(0);
                    Send::new(3, IBV_WR_SEND, &[sge(side.mr, 0, 64)]).flags(0).post(side.qp);
                    if case == 0 {
                        expect(side.cq, 3, IBV_WC_RNR_RETRY_EXC_ERR);
                        assert_eq!(state(side.qp), IBV_QPS_ERR);
                    } else {
                        Send::new(4, IBV_WR_RDMA_WRITE, &[sge(side.mr, 0, 0)]).post(side.qp);
                        expect(side.cq, 4, OK);
                    }
                });
                pairs(links, 0, Conn { rnr_retry: 7, ..Conn::default() }, 1, |links, _, side| {
                    links.meet(0);
                    Send::new(5, IBV_WR_SEND, &[sge(side.mr, 0, 64)]).post(side.qp);
                    assert_eq!(poll(side.cq), None);
                    links.meet(0);
                    expect(side.cq, 5, OK);
                });
            }),
        ],
    );
}

#[test]
fn a_send_to_a_qp_that_was_destroyed_runs_out_of_retries() {
    play(
        "a_send_to_a_qp_that_was_destroyed_runs_out_of_retries",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                connect(links, 1, qp, &Conn::default());
                // SAFETY: a live QP.
                assert_eq!(unsafe { ibv_destroy_qp(qp) }, 0);
                links.meet(1);
                links.meet(1);
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 0, qp, &Conn { timeout: 8, retry_cnt: 3, ..Conn::default() });
                links.meet(0);
                Send::new(1, IBV_WR_SEND, &[sge(mr, 0, 8)]).flags(0).post(qp);
                Send::new(2, IBV_WR_RDMA_READ, &[sge(mr, 0, 8)]).flags(0).post(qp);
                post_recv(qp, 3, &[sge(mr, 0, 8)]);
                expect(cq, 1, IBV_WC_RETRY_EXC_ERR);
                expect(cq, 2, FLUSHED);
                expect(cq, 3, FLUSHED);
                links.meet(0);
            }),
        ],
    );
}

#[test]
fn a_full_send_queue_refuses_and_says_which() {
    play(
        "a_full_send_queue_refuses_and_says_which",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(64, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 1, qp, &Conn::default());
                links.meet(1);
                for i in 0..9 {
                    post_recv(qp, i, &[sge(mr, 0, 64)]);
                }
                for i in 0..9 {
                    expect(cq, i, OK);
                }
                links.meet(1);
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(64, ptr::null_mut());
                let qp = dev.qp(&Spec { sends: 8, ..Spec::on(cq) });
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 0, qp, &Conn::default());
                let send = |i| Send::new(i, IBV_WR_SEND, &[sge(mr, 0, 64)]);
                for i in 0..8 {
                    send(i).flags(if i == 7 { SIGNALED } else { 0 }).post(qp);
                }
                assert_eq!(send(8).try_post(qp), libc::ENOMEM);
                links.meet(0);
                // Done, but room is only what was polled, as with hardware.
                expect(cq, 7, OK);
                send(8).post(qp);
                expect(cq, 8, OK);
                links.meet(0);
            }),
        ],
    );
}

#[test]
fn a_full_receive_queue_refuses() {
    play(
        "a_full_receive_queue_refuses",
        &[role(|_| {
            let dev = open();
            let cq = dev.cq(64, ptr::null_mut());
            let qp = dev.qp(&Spec { receives: 4, ..Spec::on(cq) });
            let mr = dev.mr(pages(4096), ALL_RIGHTS);
            assert_eq!(try_post_recv(qp, 0, &[sge(mr, 0, 8)]), libc::EINVAL, "in RESET");
            to_init(qp, 0);
            for i in 0..4 {
                post_recv(qp, i, &[sge(mr, 0, 8)]);
            }
            assert_eq!(try_post_recv(qp, 4, &[sge(mr, 0, 8)]), libc::ENOMEM);
            assert_eq!(try_post_recv(qp, 4, &vec![sge(mr, 0, 8); 17]), libc::ENOMEM);
            // In the error state all are flushed, in order, and so is what is posted then.
            assert_eq!(to_state(qp, IBV_QPS_ERR), 0);
            for i in 0..4 {
                expect(cq, i, FLUSHED);
            }
            post_recv(qp, 5, &[sge(mr, 0, 8)]);
            expect(cq, 5, FLUSHED);
            Send::new(6, IBV_WR_SEND, &[]).flags(0).post(qp);
            expect(cq, 6, FLUSHED);
            // And after a reset nothing of it is left.
            post_recv(qp, 7, &[sge(mr, 0, 8)]);
            assert_eq!(to_state(qp, IBV_QPS_RESET), 0);
            assert_eq!(poll(cq), None);
            assert_eq!(Send::new(8, IBV_WR_SEND, &[]).try_post(qp), libc::EINVAL, "in RESET");
        })],
    );
}

#[test]
fn too_much_inline_and_unknown_requests_are_refused() {
    play(
        "too_much_inline_and_unknown_requests_are_refused",
        &[role(|_| {
            let dev = open();
            let cq = dev.cq(64, ptr::null_mut());
            let qp = dev.qp(&Spec { sges: 2, ..Spec::on(cq) });
            let mr = dev.mr(pages(4096), ALL_RIGHTS);
            to_init(qp, 0);
            // SAFETY: a live QP.
            to_rtr(qp, unsafe { (*qp).qp_num }, 12);
            to_rts(qp, &Conn::default());
            let part = sge(mr, 0, 128);
            assert_eq!(Send::new(1, IBV_WR_SEND, &[part; 3]).try_post(qp), libc::EINVAL);
            assert_eq!(
                Send::new(1, IBV_WR_SEND, &[sge(mr, 0, 257)]).flags(INLINE).try_post(qp),
                libc::ENOMEM
            );
            assert_eq!(Send::new(1, IBV_WR_RDMA_READ, &[part]).flags(INLINE).try_post(qp), libc::EINVAL);
            assert_eq!(Send::new(1, IBV_WR_LOCAL_INV, &[]).try_post(qp), libc::EINVAL);
            assert_eq!(poll(cq), None, "refused requests leave no trace");
            // A QP connected to itself works.
            post_recv(qp, 2, &[sge(mr, 2048, 128)]);
            Send::new(3, IBV_WR_SEND, &[part]).flags(INLINE | SIGNALED).post(qp);
            let mut got = [next(cq).wr_id, next(cq).wr_id];
            got.sort_unstable();
            assert_eq!(got, [2, 3]);
        })],
    );
}

#[test]
fn registering_checks_memory_and_rights() {
    play(
        "registering_checks_memory_and_rights",
        &[role(|_| {
            let dev = open();
            let memory = pages(8192);
            // SAFETY: a live domain; the calls that could touch memory are refused.
            unsafe {
                let reg = |addr: *mut u8, len, rights| ibv_reg_mr(dev.pd, addr.cast(), len, rights);
                assert!(reg(memory.as_mut_ptr(), 64, 2).is_null(), "remote write without local write");
                assert_eq!(errno(), libc::EINVAL);
                assert!(reg(ptr::without_provenance_mut(4096), 64, 1).is_null(), "nothing mapped there");
                assert_eq!(errno(), libc::EFAULT);
                // The same memory many times, overlapping, freed in any order, keeps its contents.
                pattern(1, memory);
                let before = memory.to_vec();
                let a = reg(memory.as_mut_ptr(), 8192, 15);
                let b = reg(memory.as_mut_ptr().add(100), 5000, 15);
                let c = reg(memory.as_mut_ptr().add(4096), 4096, 15);
                assert!(!a.is_null() && !b.is_null() && !c.is_null());
                assert_ne!((*a).rkey, (*b).rkey);
                assert_eq!(ibv_dereg_mr(a), 0);
                assert_eq!(ibv_dereg_mr(c), 0);
                assert_eq!(ibv_dereg_mr(b), 0);
                assert!(memory == &before[..]);
            }
        })],
    );
}

#[test]
fn keys_name_the_address_that_was_asked_for() {
    play(
        "keys_name_the_address_that_was_asked_for",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(64, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let memory = pages(8192);
                // SAFETY: a live domain, memory of this process.
                let mr = unsafe { ibv_reg_mr_iova2(dev.pd, memory.as_mut_ptr().cast(), 8192, 0x10_0000, 15) };
                assert!(!mr.is_null());
                connect(links, 1, qp, &Conn::default());
                // SAFETY: a live region.
                let key = unsafe { (*mr).lkey };
                post_recv(qp, 1, &[ibv_sge { addr: 0x10_0000 + 128, length: 64, lkey: key }]);
                links.tell(1, &[0x10_0000, key.into()]);
                expect(cq, 1, OK);
                links.meet(1);
                assert_eq!(memory[64..128], [3; 64], "written");
                assert_eq!(memory[128..192], [4; 64], "received");
                assert_eq!(memory[192..], [0; 8000]);
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(64, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let memory = pages(4096);
                let mr = dev.mr(memory, ALL_RIGHTS);
                connect(links, 0, qp, &Conn::default());
                let [addr, key] = links.hear::<2>(0);
                memory[..64].fill(3);
                Send::new(1, IBV_WR_RDMA_WRITE, &[sge(mr, 0, 64)]).remote(addr + 64, key as u32).post(qp);
                expect(cq, 1, OK);
                memory[..64].fill(4);
                Send::new(2, IBV_WR_SEND, &[sge(mr, 0, 64)]).post(qp);
                expect(cq, 2, OK);
                links.meet(0);
            }),
        ],
    );
}

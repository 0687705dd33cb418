// SPDX-License-Identifier: MIT
//! Peers that die, leave, fork or are many: nothing hangs, and each gets a clear status.

mod roles;
mod verbs;

use rdma_sys::ibv_qp_state::*;
use rdma_sys::ibv_wc_status::*;
use rdma_sys::ibv_wr_opcode::*;
use rdma_sys::*;
use roles::{effort, play, play_in_small_shm, role, Links};
use std::ptr;
use std::time::Duration;
use verbs::*;

const BYTES: usize = 1 << 16;
/// Receives of the survivor have ids from here on, sends below.
const RECEIVE: u64 = 1 << 32;

/// Receives, and answers what it gets, for ever.
fn victim(links: &mut Links) {
    let dev = open();
    let channel = dev.channel();
    let cq = dev.cq(256, channel);
    let memory = dev.mr(pages(BYTES), ALL_RIGHTS);
    let qp = dev.qp(&Spec::on(cq));
    connect(links, 0, qp, &Conn::default());
    // SAFETY: a live region.
    links.tell(0, &[unsafe { (*memory).addr } as u64, unsafe { (*memory).rkey }.into()]);
    for i in 0..32 {
        post_recv(qp, i, &[sge(memory, 0, 8192)]);
    }
    links.meet(0);
    let asleep = std::env::var_os("FASTWAKE_ASLEEP").is_some();
    loop {
        // SAFETY: a live CQ.
        unsafe { ibv_req_notify_cq(cq, 0) };
        while let Some(wc) = poll(cq) {
            if wc.status == OK && wc.wr_id < 100 {
                post_recv(qp, wc.wr_id, &[sge(memory, 0, 8192)]);
                Send::new(200, IBV_WR_SEND, &[sge(memory, 0, wc.len as usize)]).try_post(qp);
            }
        }
        if asleep {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: a live channel.
            unsafe { ibv_get_cq_event(channel, &mut cq, &mut context) };
        }
    }
}

/// Sends to victims that are killed, each at another moment, and accounts for every request.
fn survivor(links: &mut Links) {
    let dev = open();
    let cq = dev.cq(512, ptr::null_mut());
    let memory = dev.mr(pages(BYTES), ALL_RIGHTS);
    for round in 0..effort(25, 2000) {
        let (mut child, mut link) =
            links.start("peers_killed_at_any_moment_leave_every_request_accounted_for", 1);
        let qp = dev.qp(&Spec::on(cq));
        connect(&mut link, 1, qp, &Conn::default());
        let [addr, rkey] = link.hear::<2>(1);
        for i in 0..32 {
            post_recv(qp, RECEIVE + i, &[sge(memory, 0, 8192)]);
        }
        link.meet(1);
        let pid = child.id();
        let delay = Duration::from_micros(u64::from(round) * 7919 % 3000);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            // SAFETY: a child of this process, not yet collected.
            unsafe { libc::kill(pid as i32, libc::SIGKILL) };
        });
        let (mut posted, mut completed, mut receives, mut i) = (0, 0, 32, 0);
        let mut failure = None;
        while failure.is_none() || completed < posted || receives > 0 {
            let (op, len) = match i % 5 {
                0 => (IBV_WR_SEND, 8),
                1 => (IBV_WR_SEND, 700),
                2 => (IBV_WR_SEND, 8192),
                3 => (IBV_WR_RDMA_WRITE, 20_000),
                _ => (IBV_WR_RDMA_READ, 100),
            };
            if failure.is_none() && posted - completed < 32 {
                Send::new(i, op, &[sge(memory, 16384, len)]).remote(addr, rkey as u32).post(qp);
                posted += 1;
                i += 1;
            }
            let wc = if failure.is_none() { poll(cq) } else { Some(next(cq)) };
            match wc {
                None => {}
                Some(wc) if wc.wr_id >= RECEIVE => {
                    receives -= 1;
                    if wc.status == OK {
                        post_recv(qp, wc.wr_id, &[sge(memory, 0, 8192)]);
                        receives += 1;
                    } else {
                        assert_eq!(wc.status, FLUSHED);
                    }
                }
                Some(wc) => {
                    completed += 1;
                    if wc.status != OK {
                        let first = failure.replace(wc.status).is_none();
                        let right =
                            if first { wc.status == IBV_WC_RETRY_EXC_ERR } else { wc.status == FLUSHED };
                        assert!(right, "round {round}: status {} (first: {first})", wc.status);
                    }
                }
            }
        }
        assert_eq!(state(qp), IBV_QPS_ERR);
        assert_eq!(poll(cq), None);
        killer.join().expect("killer");
        child.wait().expect("victim");
        // SAFETY: a live QP.
        assert_eq!(unsafe { ibv_destroy_qp(qp) }, 0);
    }
    // What the dead left is taken away when the next process comes.
    let (mut child, _link) = links.start("peers_killed_at_any_moment_leave_every_request_accounted_for", 2);
    assert!(child.wait().expect("the last one").success());
    let segments = std::fs::read_dir(&links.folder)
        .expect("folder")
        .filter(|e| e.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().ends_with(".seg")))
        .count();
    assert_eq!(segments, 1, "only this process is left");
}

#[test]
fn peers_killed_at_any_moment_leave_every_request_accounted_for() {
    play(
        "peers_killed_at_any_moment_leave_every_request_accounted_for",
        &[
            role(survivor),
            role(victim).on_demand(),
            role(|_| {
                open();
            })
            .on_demand(),
        ],
    );
}

#[test]
fn a_receiver_asleep_is_told_that_its_peer_was_killed() {
    play(
        "a_receiver_asleep_is_told_that_its_peer_was_killed",
        &[
            role(|links| {
                let dev = open();
                let channel = dev.channel();
                let cq = dev.cq(16, channel);
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 1, qp, &Conn::default());
                post_recv(qp, 1, &[sge(mr, 0, 8)]);
                // SAFETY: live objects; room for the results.
                unsafe {
                    assert_eq!(ibv_req_notify_cq(cq, 0), 0);
                    let [pid] = links.hear::<1>(1);
                    libc::kill(pid as i32, libc::SIGKILL);
                    let (mut got, mut context) = (ptr::null_mut(), ptr::null_mut());
                    assert_eq!(ibv_get_cq_event(channel, &mut got, &mut context), 0);
                }
                expect(cq, 1, FLUSHED);
                // The next send says why.
                Send::new(2, IBV_WR_SEND, &[]).post(qp);
                expect(cq, 2, IBV_WC_RETRY_EXC_ERR);
                Send::new(3, IBV_WR_SEND, &[]).post(qp);
                expect(cq, 3, FLUSHED);
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                connect(links, 0, qp, &Conn::default());
                links.tell(0, &[std::process::id().into()]);
                loop {
                    std::thread::sleep(Duration::from_secs(1));
                }
            })
            .killed(),
        ],
    );
}

#[test]
fn a_peer_that_exits_in_order_leaves_receives_posted() {
    play(
        "a_peer_that_exits_in_order_leaves_receives_posted",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                let (mut child, mut link) =
                    links.start("a_peer_that_exits_in_order_leaves_receives_posted", 1);
                connect(&mut link, 1, qp, &Conn { timeout: 8, retry_cnt: 1, ..Conn::default() });
                post_recv(qp, 1, &[sge(mr, 0, 8)]);
                post_recv(qp, 2, &[sge(mr, 0, 8)]);
                link.meet(1);
                assert!(child.wait().expect("peer").success());
                expect(cq, 1, OK);
                assert_eq!(state(qp), IBV_QPS_RTS);
                assert_eq!(poll(cq), None);
                Send::new(3, IBV_WR_SEND, &[]).post(qp);
                expect(cq, 3, IBV_WC_RETRY_EXC_ERR);
                expect(cq, 2, FLUSHED);
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                connect(links, 0, qp, &Conn::default());
                links.meet(0);
                Send::new(1, IBV_WR_SEND, &[]).post(qp);
                expect(cq, 1, OK);
            })
            .on_demand(),
        ],
    );
}

#[test]
fn a_forked_child_has_no_device_and_harms_nothing() {
    play(
        "a_forked_child_has_no_device_and_harms_nothing",
        &[role(|links| {
            let dev = open();
            let cq = dev.cq(16, ptr::null_mut());
            let qp = dev.qp(&Spec::on(cq));
            let memory = pages(8192);
            let mr = dev.mr(memory, ALL_RIGHTS);
            to_init(qp, ALL_RIGHTS);
            // SAFETY: a live QP.
            to_rtr(qp, unsafe { (*qp).qp_num }, 12);
            to_rts(qp, &Conn::default());
            memory.fill(1);
            post_recv(qp, 1, &[sge(mr, 0, 64)]);
            // SAFETY: the child only calls verbs and exits.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        let mut wc = std::mem::zeroed();
                        assert!(ibv_poll_cq(cq, 1, &mut wc) < 0);
                        assert_ne!(ibv_req_notify_cq(cq, 0), 0);
                        assert_ne!(Send::new(2, IBV_WR_SEND, &[]).try_post(qp), 0);
                        assert_ne!(try_post_recv(qp, 2, &[]), 0);
                        assert_ne!(ibv_destroy_qp(qp), 0);
                        assert_ne!(ibv_destroy_cq(cq), 0);
                        assert_ne!(ibv_dereg_mr(mr), 0);
                        assert_eq!(try_open().err(), Some(libc::EPERM));
                    }));
                    // Its writes do not reach the parent, moved pages or not.
                    memory.fill(2);
                    // By way of the exit handlers, which must not clean up.
                    libc::exit(if refused.is_ok() { 0 } else { 1 });
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                assert_eq!(status, 0, "a call of the child did not fail");
            }
            assert!(memory.iter().all(|&b| b == 1), "the child wrote to its parent's memory");
            assert_eq!(std::fs::read_dir(&links.folder).expect("folder").count(), 3, "seg, ctl, mem");
            Send::new(3, IBV_WR_SEND, &[sge(mr, 64, 64)]).post(qp);
            let mut got = [next(cq).wr_id, next(cq).wr_id];
            got.sort_unstable();
            assert_eq!(got, [1, 3]);
        })],
    );
}

/// Serves many clients on one CQ, in event mode.
fn server(links: &mut Links) {
    let clients = 63;
    let dev = open();
    let channel = dev.channel();
    let cq = dev.cq(4096, channel);
    let mr = dev.mr(pages(1 << 16), ALL_RIGHTS);
    let mut qps = Vec::new();
    for client in 1..=clients {
        let qp = dev.qp(&Spec { receives: 8, sends: 8, ..Spec::on(cq) });
        connect(links, client, qp, &Conn::default());
        for i in 0..8 {
            post_recv(qp, i, &[sge(mr, 0, 2048)]);
        }
        qps.push(qp);
    }
    for client in 1..=clients {
        links.tell(client, &[1]);
    }
    let total = clients as u64 * u64::from(effort(100, 2000));
    let (mut served, mut answered) = (0, 0);
    while served < total || answered < total {
        // SAFETY: live objects; room for the results.
        unsafe {
            assert_eq!(ibv_req_notify_cq(cq, 0), 0);
            let mut more = true;
            while more {
                more = false;
                while let Some(wc) = poll(cq) {
                    assert_eq!(wc.status, OK);
                    more = true;
                    if wc.wr_id == 100 {
                        answered += 1;
                        continue;
                    }
                    served += 1;
                    let qp = *qps.iter().find(|&&qp| (*qp).qp_num == wc.qp_num).expect("one of ours");
                    post_recv(qp, wc.wr_id, &[sge(mr, 0, 2048)]);
                    Send::new(100, IBV_WR_SEND, &[sge(mr, 4096, 1500)]).post(qp);
                }
            }
            if served < total || answered < total {
                let (mut got, mut context) = (ptr::null_mut(), ptr::null_mut());
                assert_eq!(ibv_get_cq_event(channel, &mut got, &mut context), 0);
                ibv_ack_cq_events(got, 1);
            }
        }
    }
    for client in 1..=clients {
        links.meet(client);
    }
}

fn client(links: &mut Links) {
    let dev = open();
    let channel = dev.channel();
    let cq = dev.cq(64, channel);
    let qp = dev.qp(&Spec { receives: 8, sends: 8, ..Spec::on(cq) });
    let mr = dev.mr(pages(1 << 16), ALL_RIGHTS);
    connect(links, 0, qp, &Conn::default());
    links.hear::<1>(0);
    for i in 0..u64::from(effort(100, 2000)) {
        post_recv(qp, 1, &[sge(mr, 0, 2048)]);
        // SAFETY: live objects; room for the results.
        unsafe {
            assert_eq!(ibv_req_notify_cq(cq, 0), 0);
            let len = if i % 2 == 0 { 16 } else { 1200 };
            Send::new(2, IBV_WR_SEND, &[sge(mr, 4096, len)]).post(qp);
            let (mut got, mut context) = (ptr::null_mut(), ptr::null_mut());
            assert_eq!(ibv_get_cq_event(channel, &mut got, &mut context), 0);
            ibv_ack_cq_events(got, 1);
        }
        let mut ids = [next(cq), next(cq)].map(|wc| {
            assert_eq!(wc.status, OK);
            wc.wr_id
        });
        ids.sort_unstable();
        assert_eq!(ids, [1, 2]);
    }
    links.meet(0);
}

#[test]
fn sixty_four_processes_fit_into_a_dev_shm_of_64_megabytes() {
    let mut roles = vec![role(server)];
    roles.extend((0..63).map(|_| role(client)));
    play_in_small_shm("sixty_four_processes_fit_into_a_dev_shm_of_64_megabytes", "64m", &roles);
}

#[test]
fn a_full_dev_shm_is_an_error_and_nothing_else() {
    play_in_small_shm(
        "a_full_dev_shm_is_an_error_and_nothing_else",
        "1m",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(64, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                to_init(qp, ALL_RIGHTS);
                // SAFETY: a live QP.
                to_rtr(qp, unsafe { (*qp).qp_num }, 12);
                to_rts(qp, &Conn::default());
                // Make CQs until there is no space; what is there goes on working.
                let mut made = Vec::new();
                loop {
                    let another = dev.try_cq(1024, ptr::null_mut());
                    if another.is_null() {
                        assert_eq!(errno(), libc::ENOMEM);
                        break;
                    }
                    made.push(another);
                }
                assert!(!made.is_empty() && made.len() < 16, "{} CQs of 64 KiB in 1 MiB", made.len());
                // Pages that cannot be moved stay where they are.
                let mr = dev.mr(pages(1 << 20), ALL_RIGHTS);
                for i in 0..100 {
                    post_recv(qp, 1, &[sge(mr, 0, 9000)]);
                    Send::new(2, IBV_WR_SEND, &[sge(mr, 65536, i * 90)]).post(qp);
                    assert_eq!((next(cq).status, next(cq).status), (OK, OK));
                }
                // Another process cannot open the device, and says so.
                let (mut child, _link) = links.start("a_full_dev_shm_is_an_error_and_nothing_else", 1);
                assert!(child.wait().expect("the other one").success());
                // Space given back is space again.
                // SAFETY: a live CQ.
                assert_eq!(unsafe { ibv_destroy_cq(made.pop().expect("one")) }, 0);
                assert!(!dev.try_cq(1024, ptr::null_mut()).is_null());
            }),
            role(|_| {
                assert_eq!(try_open().err(), Some(libc::ENOSPC));
            })
            .on_demand(),
        ],
    );
}

/// Becomes nobody, as an ordinary user is.
fn become_nobody() {
    const NOBODY: u32 = 65534;
    // SAFETY: plain calls. In a user namespace nobody is not there: then this user is ordinary.
    unsafe {
        if libc::geteuid() == 0 && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0 {
            assert_eq!(libc::setgroups(0, ptr::null()), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
        std::env::remove_var("FW_SOFT_DIR");
    }
}

fn nobody(links: &mut Links, other: usize) {
    become_nobody();
    let dev = open();
    let cq = dev.cq(64, ptr::null_mut());
    let qp = dev.qp(&Spec::on(cq));
    let mr = dev.mr(pages(1 << 16), ALL_RIGHTS);
    connect(links, other, qp, &Conn::default());
    for i in 0..200 {
        post_recv(qp, 1, &[sge(mr, 0, 30_000)]);
        links.meet(other);
        Send::new(2, IBV_WR_SEND, &[sge(mr, 30_000, i * 150)]).post(qp);
        let mut ids = [next(cq), next(cq)].map(|wc| {
            assert_eq!(wc.status, OK);
            wc.wr_id
        });
        ids.sort_unstable();
        assert_eq!(ids, [1, 2]);
        links.meet(other);
    }
}

#[test]
fn an_ordinary_user_needs_nothing_but_the_library() {
    play_in_small_shm(
        "an_ordinary_user_needs_nothing_but_the_library",
        "16m",
        &[role(|links| nobody(links, 1)), role(|links| nobody(links, 0))],
    );
}

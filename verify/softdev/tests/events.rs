// SPDX-License-Identifier: MIT
//! Completion channels and asynchronous events behave as they do natively.

mod roles;
mod verbs;

use rdma_sys::ibv_qp_state::*;
use rdma_sys::ibv_wr_opcode::*;
use rdma_sys::*;
use roles::{effort, play, role, Links};
use std::mem::zeroed;
use std::ptr;
use verbs::*;

fn arm(cq: *mut ibv_cq, solicited: bool) {
    // SAFETY: a live CQ.
    assert_eq!(unsafe { ibv_req_notify_cq(cq, solicited.into()) }, 0);
}

/// Whether an event can be read now.
fn readable(fd: i32) -> bool {
    let mut look = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&mut look, 1, 0) == 1 }
}

/// Waits for an event and acknowledges it.
fn event(channel: *mut ibv_comp_channel) -> *mut ibv_cq {
    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live channel; room for the results.
    unsafe {
        assert_eq!(ibv_get_cq_event(channel, &mut cq, &mut context), 0);
        assert_eq!(context, (*cq).cq_context);
        ibv_ack_cq_events(cq, 1);
    }
    cq
}

/// A QP connected to itself, sending to one CQ and receiving at another, both on one channel.
struct Own {
    dev: Dev,
    channel: *mut ibv_comp_channel,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    mr: *mut ibv_mr,
}

fn own() -> Own {
    let dev = open();
    let channel = dev.channel();
    let (send_cq, recv_cq) = (dev.cq(64, channel), dev.cq(64, channel));
    let qp = dev.qp(&Spec { recv_cq, ..Spec::on(send_cq) });
    let mr = dev.mr(pages(4096), ALL_RIGHTS);
    to_init(qp, ALL_RIGHTS);
    // SAFETY: a live QP.
    to_rtr(qp, unsafe { (*qp).qp_num }, 12);
    to_rts(qp, &Conn::default());
    Own { dev, channel, send_cq, recv_cq, qp, mr }
}

impl Own {
    fn fd(&self) -> i32 {
        // SAFETY: a live channel.
        unsafe { (*self.channel).fd }
    }

    /// One message to itself.
    fn message(&self, flags: u32) {
        post_recv(self.qp, 1, &[sge(self.mr, 0, 8)]);
        Send::new(2, IBV_WR_SEND, &[sge(self.mr, 8, 8)]).flags(flags).post(self.qp);
    }
}

#[test]
fn an_arm_gives_one_event_for_the_next_completion() {
    play(
        "an_arm_gives_one_event_for_the_next_completion",
        &[role(|_| {
            let own = own();
            own.message(SIGNALED);
            assert!(!readable(own.fd()), "not armed");
            arm(own.recv_cq, false);
            assert!(!readable(own.fd()), "completions present at the arm give no event");
            arm(own.recv_cq, false);
            own.message(SIGNALED);
            own.message(SIGNALED);
            assert_eq!(event(own.channel), own.recv_cq);
            assert!(!readable(own.fd()), "two arms, one event");
            // Drained first: the event still comes.
            arm(own.recv_cq, false);
            own.message(SIGNALED);
            while poll(own.recv_cq).is_some() {}
            assert_eq!(event(own.channel), own.recv_cq);
            // Order among the CQs of a channel is that of the events.
            while poll(own.send_cq).is_some() {}
            arm(own.recv_cq, false);
            arm(own.send_cq, false);
            own.message(SIGNALED);
            assert_eq!(event(own.channel), own.recv_cq);
            assert_eq!(event(own.channel), own.send_cq);
        })],
    );
}

#[test]
fn a_solicited_arm_fires_for_solicited_and_failed_receives_only() {
    play(
        "a_solicited_arm_fires_for_solicited_and_failed_receives_only",
        &[role(|_| {
            let own = own();
            arm(own.recv_cq, true);
            arm(own.send_cq, true);
            own.message(SIGNALED);
            assert!(!readable(own.fd()));
            own.message(SIGNALED | SOLICITED);
            assert_eq!(event(own.channel), own.recv_cq);
            assert!(!readable(own.fd()), "a solicited send is none for the sender");
            // Armed for all, it stays so when a solicited arm follows; the other way round it
            // becomes so.
            arm(own.recv_cq, false);
            arm(own.recv_cq, true);
            own.message(SIGNALED);
            assert_eq!(event(own.channel), own.recv_cq);
            arm(own.recv_cq, true);
            arm(own.recv_cq, false);
            own.message(SIGNALED);
            assert_eq!(event(own.channel), own.recv_cq);
            // A flush fires it, on both sides.
            arm(own.recv_cq, true);
            post_recv(own.qp, 1, &[sge(own.mr, 0, 8)]);
            assert_eq!(to_state(own.qp, IBV_QPS_ERR), 0);
            assert_eq!(event(own.channel), own.recv_cq);
            Send::new(3, IBV_WR_SEND, &[]).post(own.qp);
            assert_eq!(event(own.channel), own.send_cq);
        })],
    );
}

#[test]
fn a_send_on_a_qp_that_never_connected_fires_when_it_failed() {
    play(
        "a_send_on_a_qp_that_never_connected_fires_when_it_failed",
        &[role(|_| {
            for through_init in [false, true] {
                let dev = open();
                let channel = dev.channel();
                let cq = dev.cq(4, channel);
                let qp = dev.qp(&Spec { sends: 1, receives: 1, ..Spec::on(cq) });
                if through_init {
                    to_init(qp, 0);
                }
                assert_eq!(to_state(qp, IBV_QPS_ERR), 0);
                for i in 0..100 {
                    arm(cq, false);
                    Send::new(i, IBV_WR_SEND, &[]).post(qp);
                    assert_eq!(event(channel), cq);
                    expect(cq, i, FLUSHED);
                    assert_eq!(poll(cq), None);
                }
            }
        })],
    );
}

#[test]
fn a_channel_is_read_like_the_kernels() {
    play(
        "a_channel_is_read_like_the_kernels",
        &[role(|_| {
            let own = own();
            let fd = own.fd();
            let mut word = 0_u64;
            // SAFETY: descriptors of this process; reads into a word.
            unsafe {
                assert_eq!(libc::fcntl(fd, libc::F_GETFL) & libc::O_ACCMODE, libc::O_RDONLY);
                assert_eq!(libc::fcntl(fd, libc::F_GETFD) & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
                assert_eq!(libc::write(fd, (&raw const word).cast(), 8), -1);
                assert_eq!(errno(), libc::EBADF);
                // Raw: the same record, and it counts as read.
                arm(own.recv_cq, false);
                own.message(SIGNALED);
                assert_eq!(libc::read(fd, (&raw mut word).cast(), 8), 8);
                assert_eq!(word, own.recv_cq as u64);
                ibv_ack_cq_events(own.recv_cq, 1);
                // Not blocking: EAGAIN by errno.
                libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK);
                let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
                assert_eq!(ibv_get_cq_event(own.channel, &mut cq, &mut context), -1);
                assert_eq!(errno(), libc::EAGAIN);
                // The context handed out is the CQ's present one.
                arm(own.recv_cq, false);
                own.message(SIGNALED);
                (*own.recv_cq).cq_context = 0x77 as *mut _;
                assert_eq!(ibv_get_cq_event(own.channel, &mut cq, &mut context), 0);
                assert_eq!(context as usize, 0x77);
                ibv_ack_cq_events(cq, 1);
            }
        })],
    );
}

#[test]
fn objects_in_use_are_not_destroyed_and_unread_events_go_with_their_cq() {
    play(
        "objects_in_use_are_not_destroyed_and_unread_events_go_with_their_cq",
        &[role(|_| {
            let own = own();
            // SAFETY: live objects, destroyed in order.
            unsafe {
                arm(own.recv_cq, false);
                arm(own.send_cq, false);
                own.message(SIGNALED);
                assert_eq!(ibv_destroy_comp_channel(own.channel), libc::EBUSY);
                assert_eq!(ibv_destroy_cq(own.recv_cq), libc::EBUSY);
                assert_eq!(ibv_destroy_qp(own.qp), 0);
                // Its event was never read: nothing to wait for.
                assert_eq!(ibv_destroy_cq(own.recv_cq), 0);
                // That of the other one was left alone.
                assert_eq!(event(own.channel), own.send_cq);
                assert!(!readable(own.fd()));
                assert_eq!(ibv_destroy_comp_channel(own.channel), libc::EBUSY);
                assert_eq!(ibv_destroy_cq(own.send_cq), 0);
                assert_eq!(ibv_destroy_comp_channel(own.channel), 0);
                assert_eq!(ibv_dereg_mr(own.mr), 0);
                assert_eq!(ibv_dealloc_pd(own.dev.pd), 0);
                assert_eq!(ibv_close_device(own.dev.ctx), 0);
            }
        })],
    );
}

#[test]
fn destroying_a_cq_waits_for_the_acknowledgement() {
    play(
        "destroying_a_cq_waits_for_the_acknowledgement",
        &[role(|_| {
            let own = own();
            arm(own.recv_cq, false);
            own.message(SIGNALED);
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: live objects; the other thread acknowledges before it goes.
            unsafe {
                assert_eq!(ibv_get_cq_event(own.channel, &mut cq, &mut context), 0);
                assert_eq!(ibv_destroy_qp(own.qp), 0);
                let acknowledged = std::sync::atomic::AtomicBool::new(false);
                let address = cq as usize;
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        acknowledged.store(true, std::sync::atomic::Ordering::SeqCst);
                        ibv_ack_cq_events(address as *mut ibv_cq, 1);
                    });
                    assert_eq!(ibv_destroy_cq(cq), 0);
                    assert!(acknowledged.load(std::sync::atomic::Ordering::SeqCst));
                });
            }
        })],
    );
}

/// More events than a channel holds: they come when there is room.
#[test]
fn a_full_channel_loses_no_event() {
    const EVENTS: usize = 8192 + 500;
    play(
        "a_full_channel_loses_no_event",
        &[role(|_| {
            let own = own();
            for _ in 0..EVENTS {
                arm(own.recv_cq, false);
                own.message(0);
                assert!(poll(own.recv_cq).is_some());
                // Nobody polls the sends: all unsignalled but this one.
                Send::new(9, IBV_WR_RDMA_WRITE, &[]).post(own.qp);
                expect(own.send_cq, 9, OK);
            }
            for _ in 0..EVENTS {
                assert_eq!(event(own.channel), own.recv_cq);
            }
            assert!(!readable(own.fd()));
        })],
    );
}

/// Event mode both ways: no wake-up is lost, whatever the timing.
fn ping(links: &mut Links, other: usize, first: bool) {
    let dev = open();
    let channel = dev.channel();
    let cq = dev.cq(64, channel);
    let qp = dev.qp(&Spec::on(cq));
    let mr = dev.mr(pages(8192), ALL_RIGHTS);
    arm(cq, false);
    connect(links, other, qp, &Conn::default());
    for i in 0..32 {
        post_recv(qp, i, &[sge(mr, 0, 4000)]);
    }
    let rounds = u64::from(effort(5_000, 500_000));
    let send = |i: u64| {
        let len = if i.is_multiple_of(3) { 3000 } else { 8 };
        Send::new(1000, IBV_WR_SEND, &[sge(mr, 4096, len)])
            .flags(if i.is_multiple_of(4) { SIGNALED } else { 0 })
            .post(qp);
    };
    let (mut sent, mut received) = (0, 0);
    if first {
        send(sent);
        sent += 1;
    }
    while received < rounds || sent < rounds {
        event(channel);
        arm(cq, false);
        while let Some(wc) = poll(cq) {
            assert_eq!(wc.status, OK);
            if wc.wr_id < 1000 {
                received += 1;
                post_recv(qp, wc.wr_id, &[sge(mr, 0, 4000)]);
                if sent < rounds {
                    for _ in 0..sent % 50 {
                        std::hint::spin_loop();
                    }
                    send(sent);
                    sent += 1;
                }
            }
        }
    }
    links.meet(other);
}

#[test]
fn event_mode_loses_no_wake_up() {
    play(
        "event_mode_loses_no_wake_up",
        &[role(|links| ping(links, 1, true)), role(|links| ping(links, 0, false))],
    );
}

/// A sender that sleeps on its channel: its queue must go on without it.
#[test]
fn a_sender_asleep_goes_on_when_receives_are_posted() {
    play(
        "a_sender_asleep_goes_on_when_receives_are_posted",
        &[
            role(|links| {
                let dev = open();
                let cq = dev.cq(256, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(1 << 16), ALL_RIGHTS);
                connect(links, 1, qp, &Conn::default());
                for i in 0..u64::from(effort(300, 20_000)) {
                    links.meet(1);
                    for k in 0..16 {
                        post_recv(qp, i * 16 + k, &[sge(mr, 0, 1 << 16)]);
                    }
                    for k in 0..16 {
                        expect(cq, i * 16 + k, OK);
                    }
                }
            }),
            role(|links| {
                let dev = open();
                let channel = dev.channel();
                let cq = dev.cq(256, channel);
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(1 << 16), ALL_RIGHTS);
                connect(links, 0, qp, &Conn::default());
                for _ in 0..effort(300, 20_000) {
                    arm(cq, false);
                    for k in 0..16 {
                        Send::new(k, IBV_WR_SEND, &[sge(mr, 0, 700 * k as usize)])
                            .flags(if k == 15 { SIGNALED } else { 0 })
                            .post(qp);
                    }
                    links.meet(0);
                    event(channel);
                    expect(cq, 15, OK);
                }
            }),
        ],
    );
}

/// The next asynchronous event of a context, acknowledged: its kind.
fn async_event(dev: &Dev) -> (u32, usize) {
    // SAFETY: a live context; the event is filled in.
    unsafe {
        let mut event: ibv_async_event = zeroed();
        assert_eq!(ibv_get_async_event(dev.ctx, &mut event), 0);
        let about = event.element.qp as usize;
        ibv_ack_async_event(&mut event);
        (event.event_type as u32, about)
    }
}

#[test]
fn a_cq_that_overflows_fails_with_its_qps() {
    play(
        "a_cq_that_overflows_fails_with_its_qps",
        &[
            role(|links| {
                let dev = open();
                let recv_cq = dev.cq(4, ptr::null_mut());
                let send_cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec { recv_cq, ..Spec::on(send_cq) });
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 1, qp, &Conn::default());
                for i in 0..6 {
                    post_recv(qp, i, &[sge(mr, 0, 64)]);
                }
                links.meet(1);
                // SAFETY: a live context.
                let fd = unsafe { (*dev.ctx).async_fd };
                let mut look = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one pollfd.
                assert_eq!(unsafe { libc::poll(&mut look, 1, 60_000) }, 1, "async_fd becomes readable");
                assert_eq!(async_event(&dev), (ibv_event_type::IBV_EVENT_CQ_ERR as u32, recv_cq as usize));
                assert_eq!(async_event(&dev), (ibv_event_type::IBV_EVENT_QP_FATAL as u32, qp as usize));
                links.meet(1);
                // What was there is there; then the CQ fails to be polled.
                for i in 0..4 {
                    expect(recv_cq, i, OK);
                }
                // SAFETY: a live CQ; room for a completion.
                unsafe {
                    let mut wc = zeroed();
                    assert!(ibv_poll_cq(recv_cq, 1, &mut wc) < 0);
                }
                assert_eq!(state(qp), IBV_QPS_ERR);
                // SAFETY: live objects.
                unsafe {
                    assert_eq!(ibv_destroy_qp(qp), 0);
                    assert_eq!(ibv_destroy_cq(recv_cq), 0);
                }
            }),
            role(|links| {
                let dev = open();
                let cq = dev.cq(16, ptr::null_mut());
                let qp = dev.qp(&Spec::on(cq));
                let mr = dev.mr(pages(4096), ALL_RIGHTS);
                connect(links, 0, qp, &Conn::default());
                links.meet(0);
                for i in 0..5 {
                    Send::new(i, IBV_WR_SEND, &[sge(mr, 0, 64)]).post(qp);
                }
                for i in 0..4 {
                    expect(cq, i, OK);
                }
                assert_ne!(next(cq).status, OK);
                assert_eq!(state(qp), IBV_QPS_ERR);
                links.meet(0);
            }),
        ],
    );
}

#[test]
fn a_getter_can_be_cancelled() {
    extern "C" fn wait(channel: *mut libc::c_void) -> *mut libc::c_void {
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live channel; ends by cancellation.
        unsafe { ibv_get_cq_event(channel.cast(), &mut cq, &mut context) };
        ptr::null_mut()
    }
    extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> i32;
    }
    play(
        "a_getter_can_be_cancelled",
        &[role(|_| {
            let own = own();
            // SAFETY: a thread of this process, joined.
            unsafe {
                let mut thread = zeroed();
                assert_eq!(libc::pthread_create(&mut thread, ptr::null(), wait, own.channel.cast()), 0);
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert_eq!(pthread_cancel(thread), 0);
                let mut result = ptr::null_mut();
                assert_eq!(libc::pthread_join(thread, &mut result), 0);
                assert_eq!(result as isize, -1, "PTHREAD_CANCELED");
            }
        })],
    );
}

#[test]
fn states_are_gone_through_as_the_specification_says() {
    play(
        "states_are_gone_through_as_the_specification_says",
        &[role(|_| {
            let own = own();
            assert_eq!(state(own.qp), IBV_QPS_RTS);
            assert_eq!(to_state(own.qp, IBV_QPS_INIT), libc::EINVAL);
            assert_eq!(state(own.qp), IBV_QPS_RTS, "a refused change changes nothing");
            // Drained, nothing goes out; told of it.
            let mut a = attr();
            a.qp_state = IBV_QPS_SQD;
            a.en_sqd_async_notify = 1;
            let mask = ibv_qp_attr_mask::IBV_QP_STATE | ibv_qp_attr_mask::IBV_QP_EN_SQD_ASYNC_NOTIFY;
            // SAFETY: a live QP.
            assert_eq!(unsafe { ibv_modify_qp(own.qp, &mut a, mask.0 as i32) }, 0);
            assert_eq!(async_event(&own.dev).0, ibv_event_type::IBV_EVENT_SQ_DRAINED as u32);
            own.message(SIGNALED);
            assert_eq!(poll(own.send_cq), None);
            assert_eq!(poll(own.recv_cq), None);
            assert_eq!(to_state(own.qp, IBV_QPS_RTS), 0);
            expect(own.send_cq, 2, OK);
            expect(own.recv_cq, 1, OK);
            // SAFETY: a live QP; zeroed C structs.
            unsafe {
                let (mut a, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
                assert_eq!(ibv_query_qp(own.qp, &mut a, 0, &mut init), 0);
                assert_eq!((a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer), (14, 7, 7, 12));
                assert_eq!((a.dest_qp_num, a.path_mtu), ((*own.qp).qp_num, ibv_mtu::IBV_MTU_4096));
                assert_eq!((init.send_cq, init.recv_cq), (own.send_cq, own.recv_cq));
            }
            // Through reset it can be connected again.
            assert_eq!(to_state(own.qp, IBV_QPS_RESET), 0);
            to_init(own.qp, ALL_RIGHTS);
            // SAFETY: a live QP.
            to_rtr(own.qp, unsafe { (*own.qp).qp_num }, 12);
            to_rts(own.qp, &Conn::default());
            own.message(SIGNALED);
            expect(own.send_cq, 2, OK);
            expect(own.recv_cq, 1, OK);
        })],
    );
}

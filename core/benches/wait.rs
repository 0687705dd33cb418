// SPDX-License-Identifier: MIT
//! What FastWake adds to an event, in nanoseconds: wait, acknowledge, request and poll over a
//! provider that costs nothing, beside the same provider polled.
#![allow(missing_docs)]

use std::cell::Cell;
use std::ffi::{c_int, c_uint, c_void};
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion};
use fastwake::channel::{Channel, CQS};
use fastwake::clock;
use fastwake::cq::{Cq, Provider};
use fastwake::kernel_event::Kick;
use fastwake::lock::enable_barrier;
use fastwake::settings::{Idle, Serve};
use fastwake::wait::{Policy, Wait};
use fastwake::waiter::Waiter;
use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_wc};

thread_local! {
    /// The CQ that has a completion; null for none.
    static READY: Cell<*mut ibv_cq> = const { Cell::new(ptr::null_mut()) };
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, _room: c_int, wcs: *mut ibv_wc) -> c_int {
    if READY.get() != cq {
        return 0;
    }
    READY.set(ptr::null_mut());
    // SAFETY: the caller has room for one.
    unsafe { wcs.write(MaybeUninit::zeroed().assume_init()) };
    1
}

unsafe extern "C" fn req_notify_cq(_cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    0
}

unsafe extern "C" fn get_cq_event(
    _channel: *mut ibv_comp_channel,
    _cq: *mut *mut ibv_cq,
    _context: *mut *mut c_void,
) -> c_int {
    -1
}

unsafe extern "C" fn ack_cq_events(_cq: *mut ibv_cq, _n: c_uint) {}

struct Never;

impl Kick for Never {
    fn kick(&mut self) -> bool {
        false
    }
    fn settle(&mut self) {}
    fn cq(&self) -> *mut ibv_cq {
        ptr::null_mut()
    }
}

/// A served channel of two CQs, as ib_send_lat has it.
fn channel() -> (&'static Channel, [*mut ibv_cq; 2]) {
    clock::calibrate();
    enable_barrier();
    let real = Box::leak(Box::new(ibv_comp_channel { context: ptr::null_mut(), fd: -1, refcnt: 3 }));
    // SAFETY: leaked, so live for ever.
    let channel = unsafe { Channel::new(real, get_cq_event, ack_cq_events) };
    let cqs = [(); 2].map(|()| {
        // SAFETY: plain data; leaked, so live for ever.
        unsafe {
            let cq: &mut ibv_cq = Box::leak(Box::new(MaybeUninit::zeroed().assume_init()));
            cq.cqe = 16;
            let account = Cq::new(cq, Provider { poll: poll_cq, req_notify: req_notify_cq, peek: None });
            CQS.insert(cq, account);
            channel.add(account);
            account.request(false);
            ptr::from_mut(cq)
        }
    });
    channel.serve(|_| Some(Box::new(Never)));
    assert!(channel.is_served());
    (channel, cqs)
}

fn bench(c: &mut Criterion) {
    let (channel, cqs) = channel();
    let policy = Policy { serve: Serve::Always, idle: Idle::Busy };
    let waiter = Waiter::new();
    let mut wc = MaybeUninit::<ibv_wc>::uninit();
    c.bench_function("poll a ready completion", |b| {
        b.iter(|| {
            READY.set(cqs[1]);
            // SAFETY: room for one.
            unsafe { black_box(poll_cq(cqs[1], 1, wc.as_mut_ptr())) }
        });
    });
    c.bench_function("wait for, acknowledge, request and poll a ready completion", |b| {
        b.iter(|| {
            READY.set(cqs[1]);
            let cq = loop {
                // Where the bench is kept from its core, the watchdog takes the channel for deserted.
                match channel.wait(&waiter, policy) {
                    Wait::Event(cq) => break cq,
                    _ => channel.serve(|_| Some(Box::new(Never))),
                }
            };
            let account = CQS.get(cq).expect("a CQ of this channel");
            account.acknowledge(1);
            account.request(false);
            // SAFETY: room for one.
            unsafe { black_box(account.poll(1, wc.as_mut_ptr())) }
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = bench
}
criterion_main!(benches);

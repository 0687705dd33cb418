// SPDX-License-Identifier: MIT
//! A channel under FastWake against the channel that the application thinks it has.
//!
//! Random sequences of completions, requests, polls, waits, falls to kernel mode and returns from it
//! are played on both. Native behaviour is a dozen lines: a ring, an arm, a FIFO of events. Every
//! wait must give an event exactly where the native one would, and every poll the same completions.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;
use std::time::Duration;

use fastwake::channel::{Channel, CHANNELS, CQS};
use fastwake::cq::{Cq, Peek, Provider};
use fastwake::kernel_event::Kick;
use fastwake::settings::{Idle, Serve};
use fastwake::wait::{Policy, Wait};
use fastwake::waiter::Waiter;
use fastwake::{clock, watchdog};
use proptest::prelude::*;
use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_wc};

/// How often a request is for solicited completions only.
const SOLICITED: f64 = 0.03;

/// An arm as hardware keeps it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
enum Armed {
    #[default]
    No,
    Solicited,
    Next,
}

/// A CQ as hardware keeps it: rxe's rules, which VERBS programs rely on.
#[derive(Default, Debug)]
struct Ring {
    completions: VecDeque<u64>,
    armed: Armed,
}

impl Ring {
    fn arm(&mut self, solicited: bool) {
        if self.armed != Armed::Next {
            self.armed = if solicited { Armed::Solicited } else { Armed::Next };
        }
    }

    /// Adds a completion; true where it causes an event.
    fn complete(&mut self, id: u64, solicited: bool) -> bool {
        self.completions.push_back(id);
        let fires = self.armed == Armed::Next || (self.armed == Armed::Solicited && solicited);
        if fires {
            self.armed = Armed::No;
        }
        fires
    }
}

/// The hardware below FastWake, by the address of the CQ, and the descriptor that events go to.
static BELOW: Mutex<Option<HashMap<usize, (Ring, c_int)>>> = Mutex::new(None);

fn below<R>(cq: *mut ibv_cq, f: impl FnOnce(&mut Ring, c_int) -> R) -> R {
    let mut below = BELOW.lock().unwrap();
    let (ring, fd) = below.get_or_insert_default().get_mut(&(cq as usize)).expect("a CQ of this test");
    f(ring, *fd)
}

fn write_record(fd: c_int, cq: *mut ibv_cq) {
    let record = cq as u64;
    // SAFETY: eight bytes to read.
    assert_eq!(unsafe { libc::write(fd, (&raw const record).cast(), 8) }, 8);
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, wcs: *mut ibv_wc) -> c_int {
    below(cq, |ring, _| {
        let mut taken = 0;
        while taken < room {
            let Some(id) = ring.completions.pop_front() else { break };
            // SAFETY: plain data; the caller has room.
            unsafe {
                let mut wc: ibv_wc = MaybeUninit::zeroed().assume_init();
                wc.wr_id = id;
                wcs.add(taken as usize).write(wc);
            }
            taken += 1;
        }
        taken
    })
}

unsafe extern "C" fn peek(cq: *mut ibv_cq) -> c_int {
    below(cq, |ring, _| c_int::from(!ring.completions.is_empty()))
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited: c_int) -> c_int {
    below(cq, |ring, _| ring.arm(solicited != 0));
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    context: *mut *mut c_void,
) -> c_int {
    let mut record = 0u64;
    // SAFETY: the channel of this test; room for a record and for the results.
    unsafe {
        assert_eq!(libc::read((*channel).fd, (&raw mut record).cast(), 8), 8);
        *cq = record as *mut ibv_cq;
        *context = (**cq).cq_context;
    }
    0
}

unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, n: c_uint) {
    // SAFETY: a CQ of this test.
    unsafe { (*cq).comp_events_completed += n };
}

/// The private CQ: its events are written at will.
struct Private {
    cq: Box<ibv_cq>,
    fd: c_int,
}

// SAFETY: plain memory of this test.
unsafe impl Send for Private {}

impl Kick for Private {
    fn kick(&mut self) -> bool {
        write_record(self.fd, &mut *self.cq);
        true
    }

    fn settle(&mut self) {}

    fn cq(&self) -> *mut ibv_cq {
        ptr::from_ref(&*self.cq).cast_mut()
    }
}

fn new_cq(cqe: c_int) -> Box<ibv_cq> {
    // SAFETY: plain data.
    let mut cq: Box<ibv_cq> = Box::new(unsafe { MaybeUninit::zeroed().assume_init() });
    cq.cqe = cqe;
    cq
}

fn readable(fd: c_int) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

/// A channel of `count` CQs, twice: as FastWake keeps it, and as the application believes it is.
struct Pair {
    native: Vec<Ring>,
    events: VecDeque<usize>,
    cqs: Vec<(Box<ibv_cq>, &'static Cq)>,
    channel: &'static Channel,
    real: Box<ibv_comp_channel>,
    ends: [c_int; 2],
    policy: Policy,
    waiter: Waiter,
    next_id: u64,
    given: u32,
}

impl Pair {
    fn new(count: usize, cqe: c_int, serve: Serve, peek: Option<Peek>) -> Pair {
        let provider = Provider { poll: poll_cq, req_notify: req_notify_cq, peek };
        clock::calibrate();
        // The watchdog would send channels to kernel mode by the clock; here that is an operation.
        watchdog::configure(Duration::from_secs(1), None);
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let mut real =
            Box::new(ibv_comp_channel { context: ptr::null_mut(), fd: ends[0], refcnt: count as c_int + 1 });
        // SAFETY: the channel and its CQs live until `drop`.
        let channel = unsafe { Channel::new(&mut *real, get_cq_event, ack_cq_events) };
        let cqs = (0..count)
            .map(|_| {
                let mut cq = new_cq(cqe);
                BELOW
                    .lock()
                    .unwrap()
                    .get_or_insert_default()
                    .insert(&raw mut *cq as usize, (Ring::default(), ends[1]));
                // SAFETY: as above.
                let account = unsafe { Cq::new(&mut *cq, provider) };
                CQS.insert(&mut *cq, account);
                channel.add(account);
                (cq, account)
            })
            .collect();
        Pair {
            native: (0..count).map(|_| Ring::default()).collect(),
            events: VecDeque::new(),
            cqs,
            channel,
            real,
            ends,
            policy: Policy { serve, idle: Idle::Sleep },
            waiter: Waiter::new(),
            next_id: 0,
            given: 0,
        }
    }

    fn complete(&mut self, index: usize, solicited: bool) {
        self.next_id += 1;
        let id = self.next_id;
        if self.native[index].completions.len() as c_int >= self.cqs[index].0.cqe {
            return;
        }
        if self.native[index].complete(id, solicited) {
            self.events.push_back(index);
        }
        let cq: *mut ibv_cq = &mut *self.cqs[index].0;
        if let Some(fd) = below(cq, |ring, fd| ring.complete(id, solicited).then_some(fd)) {
            write_record(fd, cq);
        }
    }

    fn arm(&mut self, index: usize, solicited: bool) {
        self.native[index].arm(solicited);
        assert_eq!(self.cqs[index].1.request(solicited), 0);
    }

    fn poll(&mut self, index: usize, room: usize) {
        let mut wcs = [const { MaybeUninit::<ibv_wc>::uninit() }; 4];
        // SAFETY: room for four.
        let n = unsafe { self.cqs[index].1.poll(room as c_int, wcs.as_mut_ptr().cast()) };
        let native: Vec<u64> = self.native[index].completions.iter().copied().take(room).collect();
        // SAFETY: the first `n` were filled.
        let ours: Vec<u64> =
            wcs[..n as usize].iter().map(|wc| unsafe { wc.assume_init_ref() }.wr_id).collect();
        // A poll may return fewer than there are, but not none, and in order.
        assert_eq!(ours, native[..ours.len()]);
        assert_eq!(ours.is_empty(), native.is_empty());
        self.native[index].completions.drain(..ours.len());
    }

    /// Waits; `None` where the wait would block.
    fn ours(&mut self) -> Option<*mut ibv_cq> {
        loop {
            match self.channel.wait(&self.waiter, self.policy) {
                Wait::Event(cq) => return Some(cq),
                Wait::Serve => self
                    .channel
                    .serve(|_| Some(Box::new(Private { cq: new_cq(16), fd: self.ends[1] }) as Box<dyn Kick>)),
                Wait::Block if readable(self.ends[0]) => {
                    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
                    // SAFETY: the channel of this test, and room for the results.
                    unsafe { get_cq_event(&mut *self.real, &mut cq, &mut context) };
                    if let Some(cq) = self.channel.awake(&self.waiter, Some(cq)) {
                        return Some(cq);
                    }
                }
                Wait::Block => {
                    self.channel.awake(&self.waiter, None);
                    return None;
                }
                Wait::Again => {}
                wait => panic!("{wait:?}"),
            }
        }
    }

    fn wait(&mut self) {
        let ours = self.ours().map(|cq| {
            self.cqs.iter().position(|(real, _)| ptr::eq(&**real, cq)).expect("an event of this channel")
        });
        match ours {
            None => assert_eq!(self.events, [], "natively there is an event"),
            Some(index) => {
                // Events of different CQs may come in another order.
                let place = self.events.iter().position(|&i| i == index);
                assert!(place.is_some(), "natively there is no event of CQ {index}, but {:?}", self.events);
                self.events.remove(place.unwrap());
                self.given += 1;
                // SAFETY: a CQ of this test.
                unsafe { ack_cq_events(&mut *self.cqs[index].0, 1) };
            }
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        drop(self.channel.retire());
        for (cq, account) in &mut self.cqs {
            let real: *mut ibv_cq = &mut **cq;
            CQS.remove(real);
            self.channel.remove(account);
            self.channel.removed();
            account.forget();
            BELOW.lock().unwrap().get_or_insert_default().remove(&(real as usize));
        }
        CHANNELS.remove(self.channel.real());
        self.channel.forget();
        // SAFETY: the two ends are ours.
        self.ends.iter().for_each(|&fd| unsafe {
            libc::close(fd);
        });
    }
}

#[derive(Clone, Debug)]
enum Op {
    Complete(usize, bool),
    Arm(usize, bool),
    Poll(usize, usize),
    Wait,
    ToKernel,
    Serve,
}

fn op(cqs: usize) -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..cqs, any::<bool>()).prop_map(|(i, s)| Op::Complete(i, s)),
        6 => (0..cqs, prop::bool::weighted(SOLICITED)).prop_map(|(i, s)| Op::Arm(i, s)),
        4 => (0..cqs, 1usize..=4).prop_map(|(i, n)| Op::Poll(i, n)),
        6 => Just(Op::Wait),
        1 => Just(Op::ToKernel),
        1 => Just(Op::Serve),
    ]
}

fn play(cqs: usize, cqe: c_int, serve: Serve, peek: Option<Peek>, ops: &[Op]) {
    let mut pair = Pair::new(cqs, cqe, serve, peek);
    for op in ops {
        match *op {
            Op::Complete(index, solicited) => pair.complete(index, solicited),
            Op::Arm(index, solicited) => pair.arm(index, solicited),
            Op::Poll(index, room) => pair.poll(index, room),
            Op::Wait => pair.wait(),
            Op::ToKernel => pair.channel.to_kernel(),
            Op::Serve => pair
                .channel
                .serve(|_| Some(Box::new(Private { cq: new_cq(16), fd: pair.ends[1] }) as Box<dyn Kick>)),
        }
    }
    // Whatever happened, nothing is owed at the end.
    while !pair.events.is_empty() {
        pair.wait();
    }
    pair.wait();
    // The kernel counts what it reported and was read; what was acknowledged beyond that was made.
    let acked: u64 = pair.cqs.iter().map(|(cq, _)| u64::from(cq.comp_events_completed)).sum();
    let made: u64 = pair.cqs.iter().map(|(_, account)| account.made()).sum();
    assert!(acked >= made, "{acked} acknowledged, {made} made");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn one_cq_behaves_as_natively(ops in prop::collection::vec(op(1), 1..60), cqe in 2..=4) {
        play(1, cqe, Serve::Auto, None, &ops);
        play(1, cqe, Serve::Always, Some(peek), &ops);
    }

    #[test]
    fn three_cqs_of_one_channel_behave_as_natively(ops in prop::collection::vec(op(3), 1..80), cqe in 2..=4) {
        play(3, cqe, Serve::Auto, None, &ops);
        play(3, cqe, Serve::Always, Some(peek), &ops);
    }
}

// SPDX-License-Identifier: MIT
//! The kernel events of a channel: whose each one is, and how one is forced.
//!
//! An event that was read from the channel's descriptor is the application's, or the late answer to an
//! arm that FastWake has answered, or one that was forced: where an event is due that the hardware
//! does not report, a private CQ is made to report one in its place. Everything here happens under
//! the channel's lock, and events are read by the real `ibv_get_cq_event`, where providers keep state.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::Ordering;

use rdma_sys::ibv_cq;

use crate::arm::Verdict;
use crate::channel::{Channel, Inner, CQS};
use crate::counters::COUNTERS;
use crate::cq::Cq;
use crate::watchdog;

/// Makes the kernel report an event that the hardware does not: a private CQ on the channel, whose
/// completions it can cause at will.
pub trait Kick: Send {
    /// Causes one kernel event of the private CQ; false where that failed.
    fn kick(&mut self) -> bool;
    /// Takes what an event of the private CQ left behind, after it was read.
    fn settle(&mut self);
    /// The private CQ.
    fn cq(&self) -> *mut ibv_cq;
}

/// What is known of a kernel event that was read.
pub(crate) enum Record {
    /// The application's, as it came.
    Native(*mut ibv_cq),
    /// The application's, made by us and brought by the private CQ's event.
    Forced(&'static Cq),
    /// Nobody's.
    Swallowed,
}

impl Channel {
    /// Forces a kernel event if one is needed and none is unread. One at a time: hardware with arm
    /// sequence numbers takes no second arm of a CQ before the event of the first was read.
    pub(crate) fn kick_next(&self, inner: &mut Inner) {
        let needed = !inner.kicked && inner.cqs.iter().any(|cq| cq.kicked() > 0);
        let Some(kick) = inner.kick.as_mut().filter(|_| needed) else { return };
        inner.kicked = kick.kick();
        self.forced.store(inner.kicked, Ordering::Relaxed);
        if inner.kicked {
            COUNTERS.kicks.add(1);
            watchdog::noted();
        } else {
            log::error!("a kernel event could not be forced; a completion channel may miss a wake-up");
        }
    }

    /// The forced kernel event was read; returns the CQ whose event it brought, if one still waited.
    fn kick_read(&self, inner: &mut Inner) -> Option<&'static Cq> {
        inner.kicked = false;
        self.forced.store(false, Ordering::Relaxed);
        let kick = inner.kick.as_mut()?;
        kick.settle();
        let private = kick.cq();
        self.acknowledge(inner, private);
        // In the order that a sweep keeps, too: see `crate::wait`.
        let sends = inner.cqs.iter().filter(|cq| !cq.receives());
        let receives = inner.cqs.iter().filter(|cq| cq.receives());
        sends.chain(receives).find(|cq| cq.take_owed()).copied()
    }

    /// Finds out whether a bare read(2) took the forced kernel event: it is not there, and was not
    /// read here. The application had its event, and acknowledges it.
    pub(crate) fn kick_missed(&self, inner: &mut Inner) -> bool {
        // A thread counted asleep may have read it and not come to say so.
        let missed = inner.kicked
            && !self.asleep()
            && self.dropping.load(Ordering::Relaxed) == 0
            && !is_readable(self.fd());
        if missed {
            self.kick_read(inner);
            self.kick_next(inner);
        }
        missed
    }

    /// Decides whose a kernel event of the CQ `real` is, and acknowledges it unless it is the
    /// application's.
    pub(crate) fn record(&self, inner: &mut Inner, real: *mut ibv_cq) -> Record {
        if inner.kick.as_ref().is_some_and(|kick| kick.cq() == real) {
            let brought = self.kick_read(inner);
            self.kick_next(inner);
            return brought.map_or(Record::Swallowed, Record::Forced);
        }
        let verdict = match CQS.get(real) {
            Some(cq) => {
                // What solicited requests did to the arm is not in the ring.
                let ring_decides = inner.ever_served && !self.never.load(Ordering::Relaxed);
                cq.record(self.is_served(), ring_decides)
            }
            None => Verdict::Deliver,
        };
        if verdict == Verdict::Deliver {
            return Record::Native(real);
        }
        COUNTERS.hints.add(1);
        self.acknowledge(inner, real);
        Record::Swallowed
    }

    /// Reads the kernel events that are there and swallows them, up to the first that the
    /// application gets. The events of a served channel are only hints, so it may be put back.
    pub(crate) fn drain_kernel(&self, inner: &mut Inner) -> Option<&'static Cq> {
        while self.dropping.load(Ordering::Relaxed) == 0 && is_readable(self.fd()) {
            let (get, _) = inner.below?;
            let (mut real, mut context) = (ptr::null_mut(), ptr::null_mut());
            // A thread cancelled in here would leave the lock behind.
            // SAFETY: the channel is live while its account is, and the lock keeps it.
            if without_cancellation(|| unsafe { get(self.real(), &mut real, &mut context) }) != 0 {
                return None;
            }
            match self.record(inner, real) {
                Record::Native(real) => {
                    // One of ours from here on, that the kernel does not know of.
                    self.acknowledge(inner, real);
                    let cq = CQS.get(real)?;
                    cq.count_made();
                    return Some(cq);
                }
                Record::Forced(cq) => return Some(cq),
                Record::Swallowed => {}
            }
        }
        None
    }

    pub(crate) fn acknowledge(&self, inner: &Inner, real: *mut ibv_cq) {
        if let Some((_, ack)) = inner.below {
            // SAFETY: an event of this CQ was read, so the CQ cannot go before it is acknowledged.
            unsafe { ack(real, 1) };
        }
    }
}

/// Runs `f`, whose system calls may be cancellation points, with cancellation put off.
pub(crate) fn without_cancellation<R>(f: impl FnOnce() -> R) -> R {
    extern "C" {
        fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    }
    const DISABLE: c_int = 1;
    let mut old = 0;
    // SAFETY: room for the old state.
    unsafe { pthread_setcancelstate(DISABLE, &mut old) };
    let result = f();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(old, &mut old) };
    result
}

/// What poll(2) says of `fd` at once, past the hook of that name: this is our own question.
pub(crate) fn poll_fd(fd: c_int) -> i16 {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one pollfd, a time-out of nothing, no signal mask.
    unsafe { libc::syscall(libc::SYS_ppoll, &mut poll, 1, &zero, ptr::null::<u64>(), 8) };
    poll.revents
}

fn is_readable(fd: c_int) -> bool {
    poll_fd(fd) & libc::POLLIN != 0
}

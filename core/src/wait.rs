// SPDX-License-Identifier: MIT
//! A wait on a completion channel, from call to return.
//!
//! The caller is `ibv_get_cq_event`. Everything that may not return here (a blocking read, a signal
//! handler, cancellation) is the caller's to do: a wait comes back with a [`Wait`] that says what,
//! holding nothing, and is then called again. It never runs application code.

use std::sync::atomic::Ordering;

use rdma_sys::ibv_cq;

use crate::channel::{Channel, Inner, Mode};
use crate::clock;
use crate::counters::COUNTERS;
use crate::cq::Cq;
use crate::kernel_event::{poll_fd, Record};
use crate::lock::yield_core;
use crate::settings::{Idle, Serve};
use crate::waiter::Waiter;

/// Looks at all CQs between looks at the clock.
const SWEEPS: u32 = 16;
/// Sweeps before the loop begins to spare the core's other half: a pause takes as long as a look.
const EAGER: u32 = 64;
/// Nanoseconds between looks at the descriptor while kernel events may follow.
const HINT_NS: u64 = 5_000;
/// The longest such gap, where looks find nothing.
const HINT_MAX_NS: u64 = 1_000_000;

/// How waits are served; the settings' part of it.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// `FW_SERVE`; [`Serve::Never`] also where `FW_MODE` says so.
    pub serve: Serve,
    /// `FW_IDLE`.
    pub idle: Idle,
}

/// What a wait comes to. Nothing is held when the caller gets it.
#[derive(Debug)]
pub enum Wait {
    /// The event of this CQ, made by us.
    Event(*mut ibv_cq),
    /// Call [`Channel::serve`], then wait again.
    Serve,
    /// Call the real `ibv_get_cq_event`, then [`Channel::awake`].
    Block,
    /// A signal was put off or a thread cancelled: let it happen, then wait again.
    Attention,
    /// Wait again.
    Again,
    /// The channel was destroyed: the wait never ends.
    Gone,
}

impl Channel {
    /// Waits for an event. Signals are put off meanwhile; where one was, a wait that would sleep
    /// comes back with [`Wait::Attention`] instead. An event is returned all the same: natively, too,
    /// a read that has one returns it, and the handler runs then.
    #[inline]
    pub fn wait(&'static self, me: &Waiter, policy: Policy) -> Wait {
        let wait = me.undisturbed(|| {
            me.wake();
            match self.mode() {
                Mode::Served => self.wait_served(me, policy),
                Mode::Kernel => self.wait_kernel(me, policy),
                Mode::Gone => Wait::Gone,
            }
        });
        if me.wanted() && !matches!(wait, Wait::Event(_)) {
            // It may have counted itself among the sleepers.
            me.undisturbed(|| me.wake());
            return Wait::Attention;
        }
        wait
    }

    /// In kernel mode the kernel's way is taken, unless the thread really has to wait, or has come
    /// back to wait many times without, and the channel can be served instead.
    #[cold]
    fn wait_kernel(&'static self, me: &Waiter, policy: Policy) -> Wait {
        let wanted = match policy.serve {
            Serve::Never => false,
            Serve::Auto | Serve::Always => self.may_serve(clock::now()) && !is_nonblocking(self.fd()),
        };
        self.locked(|inner| {
            if self.mode() != Mode::Kernel {
                return Wait::Again;
            }
            let ready = inner.kicked || inner.cqs.iter().any(|cq| cq.kernel_event_ready());
            let promising = match policy.serve {
                Serve::Always => !inner.kicked,
                _ => !ready || inner.ready_waits >= inner.ready_patience,
            };
            inner.ready_waits = if ready { inner.ready_waits.saturating_add(1) } else { 0 };
            let serve = wanted && promising && inner.cqs.iter().any(|cq| cq.worth_a_look());
            if serve {
                return Wait::Serve;
            }
            // Under the lock, so that nobody starts to serve the channel of a sleeper.
            me.fall_asleep(self);
            Wait::Block
        })
    }

    #[inline]
    fn wait_served(&'static self, me: &Waiter, policy: Policy) -> Wait {
        let Some(seat) = me.seat.take() else {
            COUNTERS.no_seat.add(1);
            return self.wait_seatless(me);
        };
        let wait = if self.take_poll() {
            let wait = self.poll_loop(me, policy);
            self.polled.store(false, Ordering::Relaxed);
            self.lock.unlock();
            wait
        } else {
            self.shared_now();
            Wait::Again
        };
        seat.leave();
        wait
    }

    /// Without a seat there is one look, and then sleep.
    #[cold]
    fn wait_seatless(&'static self, me: &Waiter) -> Wait {
        if self.polled.load(Ordering::Relaxed) || self.asleep() {
            self.shared_now();
            return Wait::Again;
        }
        self.locked(|inner| match sweep(inner) {
            Some(cq) if self.mode() == Mode::Served => {
                self.inplace.bump();
                Wait::Event(cq.real())
            }
            Some(cq) => {
                cq.give_back();
                Wait::Again
            }
            None => self.sleep(inner, me, 0),
        })
    }

    /// Takes the lock to poll; false where another thread waits on this channel already.
    #[inline]
    fn take_poll(&self) -> bool {
        while !self.lock.try_lock() {
            if self.polled.load(Ordering::Relaxed) {
                return false;
            }
            yield_core();
        }
        // Between its looks a poller may have let the lock go to yield its core.
        if self.polled.load(Ordering::Relaxed) || self.asleep() {
            self.lock.unlock();
            return false;
        }
        self.polled.store(true, Ordering::Relaxed);
        true
    }

    /// Polls until there is an event, or a reason to leave. The caller took the lock, and has it again
    /// when this returns.
    #[inline]
    fn poll_loop(&'static self, me: &Waiter, policy: Policy) -> Wait {
        self.waits.bump();
        let mut since = 0;
        // SAFETY: the lock is held.
        let mut budget = unsafe { self.inner() }.expectation.budget(policy.idle);
        let mut sweeps = 0u32;
        let mut blocking = false;
        loop {
            if self.mode() != Mode::Served {
                return Wait::Again;
            }
            // SAFETY: the lock is held, and this reference is not used after it is let go below.
            let inner = unsafe { self.inner() };
            if let Some(cq) = sweep(inner) {
                self.inplace.bump();
                if since == 0 {
                    // A wait too short for the clock to be read.
                    inner.expectation.observe_short();
                } else {
                    inner.expectation.observe(clock::now() - since, false);
                }
                return Wait::Event(cq.real());
            }
            if me.wanted() {
                return Wait::Attention;
            }
            sweeps += 1;
            if sweeps.is_multiple_of(SWEEPS) || budget == 0 {
                let now = clock::now();
                if since == 0 {
                    since = now;
                    if !me.neighbours.begin(now) && policy.idle == Idle::Auto {
                        budget = 0;
                    }
                }
                let idle = !inner.cqs.iter().any(|cq| cq.worth_a_look());
                if idle || now - since >= budget {
                    match self.sleep(inner, me, since) {
                        // An event came meanwhile: the next sweep takes it.
                        Wait::Again => continue,
                        wait => return wait,
                    }
                }
                if let Some(wait) = self.hint(inner, me, now) {
                    return wait;
                }
                if me.neighbours.overdue(now) {
                    // Asked once: set later, it does not end a wait that has begun.
                    if !std::mem::replace(&mut blocking, true) && is_nonblocking(self.fd()) {
                        self.to_kernel_locked(inner);
                        return Wait::Again;
                    }
                    budget = self.yield_core(me, policy, budget);
                }
            }
            if me.neighbours.has_company() || policy.idle == Idle::Yield {
                budget = self.yield_core(me, policy, budget);
            } else if self.lock.wanted() {
                self.lock.lend();
            }
            if sweeps > EAGER {
                std::hint::spin_loop();
            }
        }
    }

    /// Yields the core with the lock let go; returns what is left to poll.
    fn yield_core(&self, me: &Waiter, policy: Policy, budget: u64) -> u64 {
        self.lock.unlock();
        let worth_it = me.neighbours.yield_once();
        self.lock.lock();
        if worth_it || policy.idle != Idle::Auto {
            budget
        } else {
            0
        }
    }

    /// Gives what is noted to the hardware and counts the thread among the sleepers, or finds that
    /// an event is there after all.
    fn sleep(&'static self, inner: &mut Inner, me: &Waiter, since: u64) -> Wait {
        if self.mode() != Mode::Served {
            return Wait::Again;
        }
        // Before the CQs are armed, each under its lock: a request that comes later goes to the
        // hardware by itself (see `arms_hardware`).
        me.fall_asleep(self);
        let ready = inner.cqs.iter().any(|cq| cq.arm_hardware());
        if ready {
            me.wake();
            return Wait::Again;
        }
        inner.asleep_since = since;
        Wait::Block
    }

    /// Looks at the descriptor when that is due: what the kernel says of arms that were answered
    /// already must not pile up, and only the kernel tells that the device is gone. The gap grows
    /// while nothing comes.
    #[inline]
    fn hint(&'static self, inner: &mut Inner, me: &Waiter, now: u64) -> Option<Wait> {
        if now < inner.hint_at || self.asleep() {
            return None;
        }
        let found = poll_fd(self.fd());
        inner.hint_gap = if found == 0 { (inner.hint_gap * 2).clamp(HINT_NS, HINT_MAX_NS) } else { HINT_NS };
        inner.hint_at = now + clock::ticks(inner.hint_gap);
        if found & libc::POLLIN != 0 {
            let cq = self.drain_kernel(inner)?;
            COUNTERS.slept.add(1);
            return Some(Wait::Event(cq.real()));
        }
        if found != 0 {
            // The real call says what it is.
            me.fall_asleep(self);
            return Some(Wait::Block);
        }
        None
    }

    /// The caller's real `ibv_get_cq_event` returned; `got` is the CQ whose event it read, if it
    /// did. Returns the CQ whose event the application gets.
    pub fn awake(&self, me: &Waiter, got: Option<*mut ibv_cq>) -> Option<*mut ibv_cq> {
        self.locked(|inner| {
            // Not before: who finds nobody asleep believes that nobody has read an event.
            me.wake();
            let real = got?;
            let served = self.is_served();
            let since = std::mem::take(&mut inner.asleep_since);
            if since != 0 {
                inner.expectation.observe(clock::now() - since, true);
            }
            let event = match self.record(inner, real) {
                Record::Native(real) => real,
                Record::Forced(cq) => cq.real(),
                Record::Swallowed => return None,
            };
            if served { &COUNTERS.slept } else { &COUNTERS.native }.add(1);
            Some(event)
        })
    }
}

/// Looks at every CQ once, beginning after the one that had the last event.
///
/// Natively events come in the order of their completions, over all CQs of the channel. Of completions
/// found together nobody knows the order, but for this: a send completes before what it asked for is
/// received. perftest relies on it, which waits for its send first. So a CQ of receives comes after
/// those without.
#[inline(always)]
fn sweep(inner: &mut Inner) -> Option<&'static Cq> {
    let count = inner.cqs.len();
    let mut index = inner.next;
    for _ in 0..count {
        let cq = inner.cqs[index];
        index = if index + 1 < count { index + 1 } else { 0 };
        if cq.look() {
            inner.next = index;
            if cq.receives() {
                if let Some(first) = inner.cqs.iter().find(|other| !other.receives() && other.look()) {
                    cq.give_back();
                    return Some(first);
                }
            }
            return Some(cq);
        }
    }
    None
}

/// Whether `O_NONBLOCK` is set on the open file.
fn is_nonblocking(fd: i32) -> bool {
    // SAFETY: F_GETFL only reads.
    unsafe { libc::fcntl(fd, libc::F_GETFL) & libc::O_NONBLOCK != 0 }
}

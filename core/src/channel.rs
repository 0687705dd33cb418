// SPDX-License-Identifier: MIT
//! A completion channel: who waits on it, in which mode it is, and how a wait goes.
//!
//! In **kernel mode** every request goes to the hardware and waits are the kernel's. A channel is
//! **served** once a thread really had to wait on it: requests are then only noted, and the waiter
//! polls the channel's CQs in place, on its own stack. Before it sleeps it gives what is noted to
//! the hardware, looks once more, and sleeps in the real `ibv_get_cq_event`. On a served channel a
//! kernel event is only a hint; the rings decide.
//!
//! One waiter at a time polls a channel. It holds the channel's lock meanwhile, and lends it to
//! whoever wants it. A second waiter sends the channel back to kernel mode, as do the watchdog
//! (requests that nobody watches), `fork`, and other ways to wait on the channel's descriptor.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicU8, Ordering};

use rdma_sys::{ibv_comp_channel, ibv_cq};

use crate::clock;
use crate::counters::{Counter, COUNTERS};
use crate::cq::Cq;
use crate::idle::Expectation;
use crate::kernel_event::{without_cancellation, Kick};
use crate::lock::Lock;
use crate::pool::Pool;
use crate::table::Table;
use crate::watchdog;

/// `ibv_get_cq_event` of the library below.
pub type GetCqEvent =
    unsafe extern "C" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
/// `ibv_ack_cq_events` of the library below.
pub type AckCqEvents = unsafe extern "C" fn(*mut ibv_cq, c_uint);

/// Nanoseconds that a channel stays in kernel mode after two threads waited on it at once.
const SHARED_NS: u64 = 100_000_000;

/// Waits that find their event there before the channel is served all the same; at first.
const READY_PATIENCE: u32 = 16;

/// The accounts of the application's CQs, by the CQ's address.
pub static CQS: Table<ibv_cq, Cq> = Table::new();
/// The accounts of its channels.
pub static CHANNELS: Table<ibv_comp_channel, Channel> = Table::new();

static POOL: Pool<Channel> = Pool::new();

/// Who answers requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Mode {
    /// The kernel.
    Kernel,
    /// Waiters that look.
    Served,
    /// Nobody: the channel was destroyed.
    Gone,
}

/// What is guarded by the lock.
pub(crate) struct Inner {
    pub(crate) cqs: Vec<&'static Cq>,
    /// Where the next sweep begins.
    pub(crate) next: usize,
    pub(crate) kick: Option<Box<dyn Kick>>,
    /// The channel was served at some time: kernel events may be late answers to older arms.
    pub(crate) ever_served: bool,
    /// A kernel event was forced and is not read yet.
    pub(crate) kicked: bool,
    /// Waits in kernel mode, one after the other, that found their event there, and how many of
    /// these make the channel worth serving: a program that polls the descriptor in a way that we
    /// cannot see looks the same, and is found out by the watchdog.
    pub(crate) ready_waits: u32,
    pub(crate) ready_patience: u32,
    pub(crate) expectation: Expectation,
    /// When the waiter that sleeps began to wait, in ticks; 0 where none does.
    pub(crate) asleep_since: u64,
    /// When the descriptor is looked at next, in ticks, and the gap after that, in nanoseconds.
    pub(crate) hint_at: u64,
    pub(crate) hint_gap: u64,
    pub(crate) below: Option<(GetCqEvent, AckCqEvents)>,
}

impl Default for Inner {
    fn default() -> Self {
        Inner {
            cqs: Vec::new(),
            next: 0,
            kick: None,
            ever_served: false,
            kicked: false,
            ready_waits: 0,
            ready_patience: READY_PATIENCE,
            expectation: Expectation::default(),
            asleep_since: 0,
            hint_at: 0,
            hint_gap: 0,
            below: None,
        }
    }
}

/// A completion channel.
pub struct Channel {
    pub(crate) lock: Lock,
    mode: AtomicU8,
    /// A waiter polls: it holds the lock, or yields its core and will take it again.
    pub(crate) polled: AtomicBool,
    /// Threads in the real `ibv_get_cq_event`.
    sleeping: AtomicI32,
    /// Never served: a CQ on it is out of our reach, solicited events are asked for, it is in an epoll
    /// set, or the private CQ could not be made.
    pub(crate) never: AtomicBool,
    /// Not served before this time: several threads wait on it.
    not_before: AtomicU64,
    /// CQs that are being destroyed: the kernel drops their unread events, so that what was seen on the
    /// descriptor may be gone, and a read would wait.
    pub(crate) dropping: AtomicI32,
    /// A kernel event was forced and may still be unread: the watchdog looks after it.
    pub(crate) forced: AtomicBool,
    /// Waits begun, so that the watchdog can tell a busy channel from a deserted one.
    pub(crate) waits: Counter,
    /// `waits` at the watchdog's last look.
    deserted_at: AtomicU64,
    real: AtomicPtr<ibv_comp_channel>,
    inner: UnsafeCell<Inner>,
    pub(crate) inplace: Counter,
}

// SAFETY: `inner` is touched under `lock` only; everything else is atomic.
unsafe impl Sync for Channel {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Channel {}

impl Default for Channel {
    fn default() -> Self {
        Channel {
            lock: Lock::new(),
            mode: AtomicU8::new(Mode::Gone as u8),
            polled: AtomicBool::new(false),
            sleeping: AtomicI32::new(0),
            never: AtomicBool::new(false),
            not_before: AtomicU64::new(0),
            dropping: AtomicI32::new(0),
            forced: AtomicBool::new(false),
            waits: Counter::new(),
            deserted_at: AtomicU64::new(u64::MAX),
            real: AtomicPtr::new(ptr::null_mut()),
            inner: UnsafeCell::new(Inner::default()),
            inplace: Counter::new(),
        }
    }
}

impl Channel {
    /// Starts to keep account of `real`; `get` and `ack` are the library's below.
    ///
    /// # Safety
    /// `real` is a live channel and stays live until [`Channel::forget`].
    pub unsafe fn new(real: *mut ibv_comp_channel, get: GetCqEvent, ack: AckCqEvents) -> &'static Channel {
        let channel = POOL.take();
        channel.locked(|inner| {
            *inner = Inner { below: Some((get, ack)), ..Inner::default() };
            channel.real.store(real, Ordering::Relaxed);
            channel.never.store(false, Ordering::Relaxed);
            channel.not_before.store(0, Ordering::Relaxed);
            channel.forced.store(false, Ordering::Relaxed);
            channel.deserted_at.store(u64::MAX, Ordering::Relaxed);
            channel.set_mode(Mode::Kernel);
        });
        CHANNELS.insert(real, channel);
        channel
    }

    /// Takes the lock and lends what it guards.
    pub(crate) fn locked<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        // SAFETY: the lock is held while the reference lives.
        self.lock.with(|| f(unsafe { self.inner() }))
    }

    /// What the lock guards.
    ///
    /// # Safety
    /// The caller holds the lock, and no other reference to this lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn inner(&self) -> &mut Inner {
        // SAFETY: as the caller says.
        unsafe { &mut *self.inner.get() }
    }

    /// The application's channel; null once it is destroyed.
    pub fn real(&self) -> *mut ibv_comp_channel {
        self.real.load(Ordering::Relaxed)
    }

    /// The channel's descriptor; -1 once it is destroyed.
    pub fn fd(&self) -> c_int {
        // SAFETY: live until `forget`, after which the pointer is null.
        unsafe { self.real().as_ref() }.map_or(-1, |real| real.fd)
    }

    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Relaxed) {
            0 => Mode::Kernel,
            1 => Mode::Served,
            _ => Mode::Gone,
        }
    }

    fn set_mode(&self, mode: Mode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// Whether the channel is served.
    pub fn is_served(&self) -> bool {
        self.mode() == Mode::Served
    }

    /// Whether requests go to the hardware. Asked under the CQ's lock: who leaves served mode or
    /// falls asleep takes that lock afterwards, so a request noted just before is found.
    #[inline]
    pub(crate) fn arms_hardware(&self) -> bool {
        self.mode() != Mode::Served || self.asleep()
    }

    /// Whether a thread sleeps in the real `ibv_get_cq_event`.
    #[inline]
    pub(crate) fn asleep(&self) -> bool {
        self.sleeping.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn sleepers(&self, change: i32) {
        self.sleeping.fetch_add(change, Ordering::SeqCst);
    }

    /// Adds a CQ that reports to this channel.
    pub fn add(&'static self, cq: &'static Cq) {
        cq.set_channel(Some(self));
        self.locked(|inner| inner.cqs.push(cq));
    }

    /// Takes a CQ out that is to be destroyed: afterwards no look touches its ring, and nobody reads the
    /// channel's events but who would wait for them, until [`Channel::removed`].
    pub fn remove(&self, cq: &Cq) {
        self.locked(|inner| {
            while self.kick_missed(inner) {}
            // Under the lock that every such read holds.
            self.dropping.fetch_add(1, Ordering::Relaxed);
            inner.cqs.retain(|other| !ptr::eq(*other, cq));
            inner.next = 0;
        });
    }

    /// The CQ that was taken out was destroyed, or was not.
    pub fn removed(&self) {
        self.dropping.fetch_sub(1, Ordering::Relaxed);
    }

    /// Never serves this channel: something is asked of it that looks cannot answer.
    pub fn never_serve(&self) {
        if !self.never.swap(true, Ordering::Relaxed) {
            self.to_kernel();
        }
    }

    /// Whether the channel may be served at `now`.
    pub(crate) fn may_serve(&self, now: u64) -> bool {
        !self.never.load(Ordering::Relaxed)
            && now >= self.not_before.load(Ordering::Relaxed)
            && !self.asleep()
    }

    /// Keeps the channel in kernel mode for a while: two threads wait on it.
    pub(crate) fn shared_now(&self) {
        COUNTERS.shared_channel.add(1);
        self.not_before.store(clock::now() + clock::ticks(SHARED_NS), Ordering::Relaxed);
        self.to_kernel();
    }

    /// Starts to serve the channel, if that can be done now. `make_kick` makes the private CQ where
    /// there is none yet; without it the channel is never served.
    pub fn serve(&self, make_kick: impl FnOnce(*mut ibv_comp_channel) -> Option<Box<dyn Kick>>) {
        let started = watchdog::start();
        self.locked(|inner| {
            if self.mode() != Mode::Kernel || !self.may_serve(clock::now()) {
                return;
            }
            if started && inner.kick.is_none() {
                inner.kick = without_cancellation(|| make_kick(self.real()));
            }
            // SAFETY: not destroyed, or the mode would say so.
            let reporting = unsafe { (*self.real()).refcnt };
            if inner.kick.is_none() || reporting != inner.cqs.len() as c_int + 1 {
                self.never.store(true, Ordering::Relaxed);
                return;
            }
            inner.hint_gap = 0;
            inner.ever_served = true;
            self.set_mode(Mode::Served);
            COUNTERS.to_served.add(1);
        });
    }

    /// Falls back to kernel mode: what is noted goes to the hardware, and the kernel is made to
    /// report the events that the hardware does not.
    pub fn to_kernel(&self) {
        self.locked(|inner| self.to_kernel_locked(inner));
    }

    /// The application waits on the descriptor in another way.
    pub fn waited_elsewhere(&self) {
        self.locked(|inner| {
            inner.ready_patience = u32::MAX;
            self.to_kernel_locked(inner);
        });
    }

    pub(crate) fn to_kernel_locked(&self, inner: &mut Inner) {
        if self.mode() != Mode::Served {
            return;
        }
        // Kernel events that nobody waits for would make the descriptor readable for nothing, and the
        // others would overtake those that are forced below.
        // Where a thread sleeps in the real call it reads them itself.
        let asleep = self.asleep();
        if !asleep {
            while let Some(cq) = self.drain_kernel(inner) {
                cq.give_back();
            }
        }
        // Before the CQs are settled, each under its lock: see `arms_hardware`.
        self.set_mode(Mode::Kernel);
        COUNTERS.to_kernel.add(1);
        if asleep {
            // What was noted was given to the hardware before it slept, or is now; it reads the rest.
            inner.cqs.iter().for_each(|cq| {
                cq.arm_hardware();
            });
            return;
        }
        inner.cqs.iter().for_each(|cq| cq.settle());
        self.kick_next(inner);
    }

    /// Whether the watchdog must stay awake for this channel.
    pub(crate) fn needs_watching(&self) -> bool {
        if self.forced.load(Ordering::Relaxed) {
            return true;
        }
        if self.mode() != Mode::Served || self.asleep() {
            return false;
        }
        if self.polled.load(Ordering::Relaxed) || !self.lock.try_lock() {
            return true;
        }
        // SAFETY: the lock is held.
        let unwatched = unsafe { self.inner() }.cqs.iter().any(|cq| cq.unwatched());
        self.lock.unlock();
        unwatched
    }

    /// One look of the watchdog; `act` where it looked once before, a moment ago.
    pub(crate) fn watch(&self, act: bool) -> Watch {
        if self.forced.load(Ordering::Relaxed) {
            // A bare read may have taken it, with more to come.
            if self.lock.try_lock() {
                // SAFETY: the lock is held.
                self.kick_missed(unsafe { self.inner() });
                self.lock.unlock();
            }
            return Watch::Busy;
        }
        if self.mode() != Mode::Served || self.asleep() {
            return Watch::Quiet;
        }
        // A channel whose waits go on is busy, and so is one that is polled now: it is not touched.
        let waits = self.waits.get();
        let deserted = self.deserted_at.swap(waits, Ordering::Relaxed) == waits;
        if self.polled.load(Ordering::Relaxed) {
            return Watch::Busy;
        }
        if !(act && deserted) {
            return Watch::Deserted;
        }
        if !self.lock.try_lock() {
            return Watch::Busy;
        }
        // SAFETY: the lock is held.
        let inner = unsafe { self.inner() };
        let watch = if self.polled.load(Ordering::Relaxed) {
            Watch::Busy
        } else {
            if inner.cqs.iter().any(|cq| cq.unwatched()) {
                COUNTERS.watchdog_arms.add(1);
                inner.ready_patience = inner.ready_patience.saturating_mul(8);
                self.to_kernel_locked(inner);
            }
            Watch::Quiet
        };
        self.lock.unlock();
        watch
    }

    /// The channel is about to be destroyed: from here on a waiter finds it gone, and nobody serves
    /// it. Returns the private CQ, which reports to it, too, for the caller to drop.
    pub fn retire(&self) -> Option<Box<dyn Kick>> {
        self.locked(|inner| {
            self.to_kernel_locked(inner);
            while self.kick_missed(inner) {}
            self.set_mode(Mode::Gone);
            inner.kicked = false;
            self.forced.store(false, Ordering::Relaxed);
            inner.kick.take()
        })
    }

    /// The channel was not destroyed after all.
    pub fn revive(&self) {
        self.locked(|_| self.set_mode(Mode::Kernel));
    }

    /// CQs that report to the channel, the private one not counted.
    pub fn reporting(&self) -> usize {
        self.locked(|inner| inner.cqs.len())
    }

    /// In a forked child: the CQ whose event the kernel event of the private CQ `real` brings. The
    /// child takes no lock: it is alone, and its parent may have held any of them.
    pub fn orphan(&self, real: *mut ibv_cq) -> Option<*mut ibv_cq> {
        // SAFETY: only this thread is left of the process that was forked.
        let inner = unsafe { self.inner() };
        inner.kick.as_ref().filter(|kick| kick.cq() == real)?;
        inner.cqs.iter().find(|cq| cq.has_owed()).map(|cq| cq.real())
    }

    /// Ends the account of a channel that is destroyed, and that [`CHANNELS`] does not have any more.
    /// A waiter finds it gone.
    pub fn forget(&'static self) {
        self.locked(|inner| {
            self.set_mode(Mode::Gone);
            self.forced.store(false, Ordering::Relaxed);
            self.real.store(ptr::null_mut(), Ordering::Relaxed);
            *inner = Inner::default();
        });
        COUNTERS.inplace.add(self.inplace.take());
        // A waiter that was left behind still holds the object; it is not used again.
        if !self.polled.load(Ordering::Relaxed) && !self.asleep() {
            POOL.give_back(self);
        }
    }

    /// Shows `f` every channel that is not destroyed.
    pub fn each(mut f: impl FnMut(&'static Channel)) {
        POOL.each(|channel| {
            if !channel.real().is_null() {
                f(channel);
            }
        });
    }

    /// Adds the counters of all live channels to those of the process; once, at exit.
    pub fn fold_counters() {
        POOL.each(|channel| COUNTERS.inplace.add(channel.inplace.take()));
    }
}

/// What the watchdog found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Nothing to watch: the next noted request wakes the watchdog.
    Quiet,
    /// Watched by a waiter that polls.
    Busy,
    /// Not watched right now, and not known for how long: to be looked at again soon.
    Deserted,
}

// SPDX-License-Identifier: MIT
//! What FastWake knows of a thread that waits.
//!
//! One per thread, in its thread-local storage. Only the thread itself and its signal handlers
//! touch it, but for the flags that other threads may raise. It is constant-initialised and has no
//! destructor, so that a signal handler may use it at any moment of the thread's life.

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{compiler_fence, AtomicBool, AtomicPtr, AtomicU32, Ordering};

use crate::channel::Channel;
use crate::lane::SeatHint;
use crate::neighbours::Neighbours;

/// Counts up whenever some thread is cancelled: a waiter that polls then tests for its own.
static CANCELS: AtomicU32 = AtomicU32::new(0);

/// A thread that waits.
pub struct Waiter {
    /// Whether the thread is where no application code may run: in the polling loop, above all.
    polling: AtomicBool,
    /// A signal was put off.
    attention: AtomicBool,
    cancels_seen: Cell<u32>,
    /// The channel whose count of sleepers holds this thread.
    asleep_on: AtomicPtr<Channel>,
    /// How this thread and the other runnable ones of its core get along.
    pub neighbours: Neighbours,
    /// Where it sat last.
    pub seat: SeatHint,
}

impl Waiter {
    /// A thread that has never waited.
    pub const fn new() -> Self {
        Waiter {
            polling: AtomicBool::new(false),
            attention: AtomicBool::new(false),
            cancels_seen: Cell::new(0),
            asleep_on: AtomicPtr::new(ptr::null_mut()),
            neighbours: Neighbours::new(),
            seat: SeatHint::new(),
        }
    }

    /// Runs `f`, which holds locks and therefore must not be left half way: signals that arrive
    /// meanwhile are put off.
    #[inline(always)]
    pub fn undisturbed<R>(&self, f: impl FnOnce() -> R) -> R {
        self.polling.store(true, Ordering::Relaxed);
        // The handler runs on this very thread: the compiler must keep the order, no more.
        compiler_fence(Ordering::SeqCst);
        let result = f();
        compiler_fence(Ordering::SeqCst);
        self.polling.store(false, Ordering::Relaxed);
        result
    }

    /// Whether a signal must be put off. For signal handlers of this thread.
    pub fn is_polling(&self) -> bool {
        self.polling.load(Ordering::Relaxed)
    }

    /// Tells the loop that a signal was put off. For signal handlers of this thread.
    pub fn raise_signal(&self) {
        self.attention.store(true, Ordering::Relaxed);
    }

    /// Whether a signal was put off; forgets it, and the cancellations seen so far.
    pub fn take_attention(&self) -> bool {
        // Acquire: pairs with the Release in `cancel_somebody`. Who sees the count sees the request.
        self.cancels_seen.set(CANCELS.load(Ordering::Acquire));
        self.attention.swap(false, Ordering::Relaxed)
    }

    /// Whether the loop must be left.
    #[inline(always)]
    pub fn wanted(&self) -> bool {
        self.attention.load(Ordering::Relaxed) || self.cancels_seen.get() != CANCELS.load(Ordering::Relaxed)
    }

    /// Counts this thread among the sleepers of `channel`.
    pub(crate) fn fall_asleep(&self, channel: &'static Channel) {
        self.asleep_on.store(ptr::from_ref(channel).cast_mut(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        channel.sleepers(1);
    }

    /// Takes this thread out of the count of sleepers, where it is in one.
    ///
    /// A thread that left a sleep by `siglongjmp` or cancellation stays counted until it waits again
    /// or ends: arms on that channel then go to the hardware, which is slow but never wrong.
    #[inline]
    pub fn wake(&self) {
        if self.asleep_on.load(Ordering::Relaxed).is_null() {
            return;
        }
        let channel = self.asleep_on.swap(ptr::null_mut(), Ordering::Relaxed);
        // SAFETY: channels live in a pool that is never freed.
        if let Some(channel) = unsafe { channel.as_ref() } {
            channel.sleepers(-1);
        }
    }
}

impl Default for Waiter {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes every waiter that polls leave its loop to test for cancellation.
pub fn cancel_somebody() {
    CANCELS.fetch_add(1, Ordering::Release);
}

// SPDX-License-Identifier: MIT
//! Getting along with the other runnable threads of the core.
//!
//! A waiter that polls keeps its core from everybody else who could run there: the worker it just
//! posted a semaphore to, the peer process it waits for. So it yields: after 2 µs and then at least every 20 µs, at once
//! after it woke somebody, and before every look while yields keep finding somebody to run. How long
//! a yield took tells who was there: nobody (it returned at once), somebody who gave the core back
//! (a few microseconds), or somebody who computes and kept it for a time slice. Against the last,
//! polling is no use: the kernel wakes a sleeper sooner than it would let a poller run.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock;
use crate::counters::COUNTERS;
use crate::lock::yield_core;

/// Nanoseconds between yields of a waiter that seems to be alone.
const EVERY: u64 = 20_000;
/// Nanoseconds of a wait before its first yield. Soon: whoever the thread woke before it waited, in
/// a way that we do not see, may need this core to answer.
const FIRST: u64 = 2_000;
/// A yield that took this many nanoseconds longer than the quickest one let somebody run.
const SOMEBODY: u64 = 700;
/// One that took this long let somebody compute.
const HOG: u64 = 300_000;
/// Yields that must return at once before the waiter believes that it is alone again.
const ALONE_AFTER: u32 = 16;
/// Waits spent asleep once somebody computed, before polling is tried again.
const HOG_WAITS: u32 = 64;

/// The quickest yield of this process, in ticks.
static QUICKEST: AtomicU64 = AtomicU64::new(u64::MAX);

/// What a thread knows of the others on its core.
pub struct Neighbours {
    /// Yields left before the waiter believes itself alone; 0 when it does.
    company: Cell<u32>,
    next: Cell<u64>,
    hog_waits: Cell<u32>,
}

impl Neighbours {
    /// Alone, as far as known.
    pub const fn new() -> Self {
        Neighbours { company: Cell::new(0), next: Cell::new(0), hog_waits: Cell::new(0) }
    }

    /// The thread woke another one, which may want this very core.
    #[inline]
    pub fn woke_one(&self) {
        self.company.set(self.company.get().max(1));
    }

    /// A wait begins at `now`. False where it had better sleep, because somebody computes here.
    pub(crate) fn begin(&self, now: u64) -> bool {
        self.next.set(now + clock::ticks(FIRST));
        let left = self.hog_waits.get();
        self.hog_waits.set(left.saturating_sub(1));
        left == 0
    }

    /// Whether the waiter should yield before its next look.
    #[inline(always)]
    pub(crate) fn has_company(&self) -> bool {
        self.company.get() != 0
    }

    /// Whether the time for a yield has come.
    #[inline]
    pub(crate) fn overdue(&self, now: u64) -> bool {
        now >= self.next.get()
    }

    /// Yields once. False where the waiter had better sleep.
    pub(crate) fn yield_once(&self) -> bool {
        let start = clock::now();
        yield_core();
        let end = clock::now();
        let took = end - start;
        self.next.set(end + clock::ticks(EVERY));
        COUNTERS.yields.add(1);
        let quickest = QUICKEST.load(Ordering::Relaxed);
        if took < quickest {
            QUICKEST.store(took, Ordering::Relaxed);
        }
        if took <= quickest.saturating_add(clock::ticks(SOMEBODY)) {
            self.company.set(self.company.get().saturating_sub(1));
            return true;
        }
        self.company.set(ALONE_AFTER);
        if took > clock::ticks(HOG) {
            self.hog_waits.set(HOG_WAITS);
            return false;
        }
        true
    }
}

impl Default for Neighbours {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_woke_another_has_company_until_a_yield_finds_nobody() {
        clock::calibrate();
        let neighbours = Neighbours::new();
        assert!(!neighbours.has_company());
        neighbours.woke_one();
        for _ in 0..100_000 {
            if !neighbours.has_company() {
                break;
            }
            neighbours.yield_once();
        }
        assert!(!neighbours.has_company());
    }

    #[test]
    fn a_yield_falls_due_after_its_time() {
        clock::calibrate();
        let neighbours = Neighbours::new();
        assert!(neighbours.begin(1_000));
        assert!(!neighbours.overdue(1_000) && neighbours.overdue(1_000 + clock::ticks(FIRST)));
    }

    #[test]
    fn after_somebody_computed_waits_sleep_for_a_while() {
        let neighbours = Neighbours::new();
        neighbours.hog_waits.set(2);
        assert_eq!([(); 3].map(|()| neighbours.begin(0)), [false, false, true]);
    }
}

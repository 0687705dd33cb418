// SPDX-License-Identifier: MIT
//! How long a waiter polls before it sleeps.
//!
//! Polling is worth it while the completion is expected sooner than the kernel could wake the
//! sleeper. The expectation is a moving average of what waits on this channel took; the cost of a
//! wake-up is measured when the first channel is served. Never polling longer than a few wake-ups
//! bounds what a wrong expectation costs.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock;
use crate::settings::Idle;

/// Nanoseconds of a kernel wake-up, until it is measured.
pub const WAKE: u64 = 8_000;
/// Polling is bounded by this many wake-ups. Two peers that both sleep, on one core, see waits of
/// three wake-ups: the bound must lie above that, or they would never find out that they could poll.
const PATIENCE: u64 = 5;

static WAKE_NS: AtomicU64 = AtomicU64::new(WAKE);
/// `FW_SPIN_US` in nanoseconds, or `u64::MAX` where the measured cost decides.
static SPIN_NS: AtomicU64 = AtomicU64::new(u64::MAX);
/// [`bound`] in ticks, for the polling loop; 0 until it was computed.
static BOUND_TICKS: AtomicU64 = AtomicU64::new(0);

/// Sets what a kernel wake-up costs, in nanoseconds, within reason.
pub fn set_wake_cost(ns: u64) {
    WAKE_NS.store(ns.clamp(2_000, 100_000), Ordering::Relaxed);
    BOUND_TICKS.store(clock::ticks(bound()), Ordering::Relaxed);
}

/// Sets the longest time to poll, in nanoseconds (`FW_SPIN_US`).
pub fn set_spin(ns: u64) {
    SPIN_NS.store(ns, Ordering::Relaxed);
    BOUND_TICKS.store(clock::ticks(bound()), Ordering::Relaxed);
}

/// The longest time to poll under [`Idle::Auto`], in nanoseconds.
pub fn bound() -> u64 {
    match SPIN_NS.load(Ordering::Relaxed) {
        u64::MAX => WAKE_NS.load(Ordering::Relaxed) * PATIENCE,
        ns => ns,
    }
}

#[inline]
fn bound_ticks() -> u64 {
    BOUND_TICKS.load(Ordering::Relaxed)
}

/// What a channel's waits have been like; under the channel's lock.
#[derive(Default)]
pub struct Expectation {
    /// Moving average of waits, in ticks.
    average: Cell<u64>,
}

impl Expectation {
    /// Ticks that a wait beginning now may poll; `u64::MAX` for ever.
    #[inline]
    pub fn budget(&self, idle: Idle) -> u64 {
        match idle {
            Idle::Busy | Idle::Yield => u64::MAX,
            Idle::Sleep => 0,
            Idle::Auto if self.average.get() > bound_ticks() => 0,
            Idle::Auto => bound_ticks(),
        }
    }

    /// A wait was over at once.
    #[inline(always)]
    pub fn observe_short(&self) {
        self.average.set(self.average.get() - self.average.get() / 4);
    }

    /// A wait took `ticks`, and ended by a kernel wake-up if `slept`.
    #[inline]
    pub fn observe(&self, ticks: u64, slept: bool) {
        let woken = if slept { clock::ticks(WAKE_NS.load(Ordering::Relaxed)) } else { 0 };
        // One long wait, however long, is forgotten after a few short ones.
        let ticks = ticks.saturating_sub(woken).min(bound_ticks() * 8);
        self.average.set(self.average.get() - self.average.get() / 4 + ticks / 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_make_waiters_sleep_and_short_ones_make_them_poll_again() {
        clock::calibrate();
        set_wake_cost(WAKE);
        let channel = Expectation::default();
        assert_eq!(channel.budget(Idle::Auto), clock::ticks(bound()));
        (0..8).for_each(|_| channel.observe(clock::ticks(1_000_000_000), true));
        assert_eq!(channel.budget(Idle::Auto), 0);
        (0..16).for_each(|_| channel.observe(clock::ticks(500), false));
        assert!(channel.budget(Idle::Auto) > 0);
    }

    #[test]
    fn peers_that_both_sleep_find_out_that_they_could_poll() {
        clock::calibrate();
        set_wake_cost(WAKE);
        let channel = Expectation::default();
        (0..8).for_each(|_| channel.observe(clock::ticks(1_000_000_000), true));
        (0..24).for_each(|_| channel.observe(clock::ticks(2 * WAKE), true));
        assert!(channel.budget(Idle::Auto) > 0);
    }

    #[test]
    fn busy_and_yield_never_sleep_and_sleep_never_polls() {
        let channel = Expectation::default();
        assert_eq!(
            [Idle::Busy, Idle::Yield, Idle::Sleep].map(|i| channel.budget(i)),
            [u64::MAX, u64::MAX, 0]
        );
    }
}

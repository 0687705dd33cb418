// SPDX-License-Identifier: MIT
//! What FastWake did in this process, counted.
//!
//! Events of the polling path are counted where they happen, by plain stores under the lock of
//! their CQ or channel, and folded in here when those go; the rest is counted here at once.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Zero.
    pub const fn new() -> Self {
        Counter(AtomicU64::new(0))
    }

    /// Adds `n`; any thread.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Adds one without a locked instruction. The caller holds the lock that guards the counter.
    #[inline(always)]
    pub fn bump(&self) {
        self.0.store(self.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The value, which becomes zero.
    pub fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// All counters of the process.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter),* }

        impl Counters {
            /// All zero.
            pub const fn new() -> Self {
                Counters { $($name: Counter::new()),* }
            }

            fn each(&self, mut f: impl FnMut(&'static str, u64) -> fmt::Result) -> fmt::Result {
                $(f(stringify!($name), self.$name.get())?;)*
                Ok(())
            }
        }
    };
}

counters! {
    /// Waits answered by a look at the ring, on the waiting thread, without a system call.
    inplace,
    /// Waits on a served channel answered by a kernel event, after the waiter had slept.
    slept,
    /// Waits on a channel in kernel mode.
    native,
    /// Events that FastWake made itself.
    made,
    /// Kernel events that were swallowed, because a made event had answered their arm.
    hints,
    /// Requests that were only noted.
    noted,
    /// Arms given to the hardware.
    hw_arms,
    /// Kernel events forced for a completion that the hardware would not report any more.
    kicks,
    /// Channels that became served.
    to_served,
    /// Channels that fell back to kernel mode.
    to_kernel,
    /// Waits that went to the kernel because every seat of their lane had a waiter that polls.
    no_seat,
    /// Waits that went to the kernel because another thread waits on the same channel.
    shared_channel,
    /// Times that a polling waiter yielded its core.
    yields,
    /// Times that the watchdog armed what nobody watched.
    watchdog_arms,
    /// Signals put off until a waiter had left its polling loop.
    deferred_signals,
}

/// The counters of this process.
pub static COUNTERS: Counters = Counters::new();

impl fmt::Display for Counters {
    /// `waits=… served=…`, then every counter, separated by spaces.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let served = self.inplace.get() + self.slept.get();
        write!(f, "waits={} served={served}", served + self.native.get())?;
        self.each(|name, value| write!(f, " {name}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_the_sum_of_how_they_were_answered() {
        let counters = Counters::new();
        counters.inplace.bump();
        counters.inplace.add(4);
        counters.slept.add(2);
        counters.native.add(1);
        assert!(counters.to_string().starts_with("waits=8 served=7 inplace=5 slept=2 native=1 made=0"));
    }
}

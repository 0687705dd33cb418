// SPDX-License-Identifier: MIT
//! Time for the polling loop: the time stamp counter, and its rate.
//!
//! A vDSO clock read costs about 25 ns, a counter read 8: the loop reads the counter and compares
//! it with deadlines that were converted once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Ticks of [`now`] per 1024 ns; 0 until [`calibrate`] ran.
static RATE: AtomicU64 = AtomicU64::new(0);

/// The time stamp counter.
#[inline(always)]
pub fn now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: rdtsc is unprivileged on every Linux that runs this (prctl(PR_SET_TSC) aside).
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: Linux makes the virtual counter readable from user space.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
        ticks
    }
}

/// Measures the counter's rate, once: about 100 µs.
pub fn calibrate() {
    if RATE.load(Ordering::Relaxed) != 0 {
        return;
    }
    let (start, ticks) = (Instant::now(), now());
    while start.elapsed() < Duration::from_micros(100) {
        std::hint::spin_loop();
    }
    let rate = (now() - ticks) * 1024 / start.elapsed().as_nanos() as u64;
    RATE.store(rate.max(1), Ordering::Relaxed);
}

/// Nanoseconds as ticks.
#[inline]
pub fn ticks(ns: u64) -> u64 {
    (ns as u128 * RATE.load(Ordering::Relaxed) as u128 / 1024) as u64
}

/// Ticks as nanoseconds.
#[inline]
pub fn nanos(ticks: u64) -> u64 {
    (ticks as u128 * 1024 / RATE.load(Ordering::Relaxed).max(1) as u128) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nanoseconds_survive_the_way_to_ticks_and_back() {
        calibrate();
        for ns in [0, 1_000, 20_000, 1_000_000_000_000] {
            let back = nanos(ticks(ns));
            assert!(back <= ns && ns - back <= ns / 500 + 2, "{ns} became {back}");
        }
    }
}

// SPDX-License-Identifier: MIT
//! The cycle counter that perftest measures by, and how fast it runs.
//!
//! perftest can report in cycles (`-C`). It then skips the clock calibration of its report (0.4 s
//! of spinning in every process, and wrong under load: `inf`, `nan`, exit status 1), and its
//! figures have a resolution of one cycle instead of 10 ns. The price is that the rate must be
//! known: it is measured here against the kernel's clock, once, over a tenth of a second and more.

use std::time::{Duration, Instant};

/// Reads the counter that perftest's `get_cycles` reads on this architecture.
#[cfg(target_arch = "x86_64")]
pub(crate) fn cycles() -> u64 {
    // SAFETY: RDTSC has no operands; user mode may execute it unless a process forbade it to itself
    // by PR_SET_TSC, which this one does not.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Reads the counter that perftest's `get_cycles` reads on this architecture.
#[cfg(target_arch = "aarch64")]
pub fn cycles() -> u64 {
    let count: u64;
    // SAFETY: CNTVCT_EL0 is readable in user mode under Linux, and reading it changes nothing.
    unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack)) };
    count
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("fastwaked knows the cycle counters of x86_64 and aarch64");

/// Shortest stretch of time over which the rate is measured: 100 ms make the reading error of the
/// two clocks, well under 1 µs, 10 ppm.
const STRETCH: Duration = Duration::from_millis(100);

/// A measurement of the counter's rate, begun at creation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Calibration {
    start: (Instant, u64),
}

impl Calibration {
    /// Begins to measure.
    pub(crate) fn begin() -> Self {
        Calibration { start: pair() }
    }

    /// Cycles per microsecond since the beginning; sleeps until that was 100 ms ago.
    pub(crate) fn per_us(&self) -> f64 {
        std::thread::sleep(STRETCH.saturating_sub(self.start.0.elapsed()));
        let end = pair();
        let us = end.0.duration_since(self.start.0).as_secs_f64() * 1e6;
        end.1.wrapping_sub(self.start.1) as f64 / us
    }
}

/// Both clocks as nearly at once as can be had: the tightest of a few readings, since an interrupt
/// may come between the two.
fn pair() -> (Instant, u64) {
    (0..16)
        .map(|_| {
            let (before, now, after) = (cycles(), Instant::now(), cycles());
            let width = after.wrapping_sub(before);
            (width, now, before.wrapping_add(width / 2))
        })
        .min_by_key(|(width, ..)| *width)
        .map(|(_, now, count)| (now, count))
        .unwrap_or_else(|| (Instant::now(), cycles()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_calibrations_agree() {
        let (a, b) = (Calibration::begin(), Calibration::begin());
        let (a, b) = (a.per_us(), b.per_us());
        assert!(a > 1.0, "a counter slower than 1 MHz: {a}");
        assert!((a / b - 1.0).abs() < 0.01, "{a} against {b}");
    }
}

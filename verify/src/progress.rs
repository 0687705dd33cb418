// SPDX-License-Identifier: MIT
//! The progress line of a comparison, on a terminal only.
//!
//! It is drawn between runs and never during one: a redraw wakes a core that is being measured.

use indicatif::{ProgressBar, ProgressStyle};

use crate::compare::rounds::{Run, Watch};
use crate::compare::sample::{Sample, Spoiled};
use crate::exec::PairOutput;

/// A line on standard error; invisible where that is no terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    rounds: u32,
}

impl Progress {
    /// A line for `rounds` rounds of `cells` runs each.
    pub(crate) fn new(rounds: u32, cells: usize) -> Self {
        let bar = ProgressBar::new(u64::from(rounds) * cells as u64);
        // The template is a constant; were it wrong, the default style would do.
        if let Ok(style) = ProgressStyle::with_template("{msg:<36} {wide_bar} {pos}/{len}  {eta} left") {
            bar.set_style(style.progress_chars("━╸─"));
        }
        Progress { bar, rounds }
    }
}

impl Watch for Progress {
    fn begins(&mut self, run: Run) {
        let again = if run.attempt > 0 { ", again" } else { "" };
        let (round, cell) = (run.round + 1, run.cell);
        self.bar
            .set_message(format!("round {round}/{}  {} {}{again}", self.rounds, cell.placement, cell.kind));
    }

    fn ended(&mut self, run: Run, _: &PairOutput, verdict: &Result<Sample, Spoiled>) {
        let will_repeat = matches!(verdict, Err(spoiled) if run.attempt < spoiled.repeats());
        if !will_repeat {
            self.bar.inc(1);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

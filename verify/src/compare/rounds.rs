// SPDX-License-Identifier: MIT
//! The rounds of a comparison: each cell once per round, repeated where that may help.
//!
//! Knows nothing of processes or output: an [`Executor`] runs, `sample` judges, a [`Watch`] shows
//! and records.

use std::collections::HashMap;

use super::cell::{order, Cell, Placement};
use super::sample::{judge, Sample, Spoiled};
use crate::exec::{Executor, PairOutput};
use crate::perftest::command::Figure;

/// What happened to one cell over all rounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// The sample of each round, in order; `None` where the run failed or was not made.
    pub samples: Vec<Option<Sample>>,
    /// Runs that failed for good.
    pub failed: u32,
    /// Runs that were repeated.
    pub repeated: u32,
    /// The last reason of a failed run.
    pub failure: Option<String>,
    /// Whether the cell failed in its first round and was left out from then on.
    pub given_up: bool,
}

/// Which run it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Round, from 0.
    pub round: u32,
    /// What runs.
    pub cell: Cell,
    /// Attempt, from 0.
    pub attempt: u32,
}

/// Sees the runs as they come: the progress line, and the recorder.
pub(crate) trait Watch {
    /// A run is about to begin.
    fn begins(&mut self, run: Run);
    /// A run has ended and been judged.
    fn ended(&mut self, run: Run, output: &PairOutput, verdict: &Result<Sample, Spoiled>);
}

/// Runs all rounds, or those that an interruption leaves time for: `stop` is asked before each run.
pub(crate) fn run(
    executor: &mut dyn Executor,
    figure: Figure,
    placements: &[Placement],
    rounds: u32,
    watches: &mut [&mut dyn Watch],
    stop: &dyn Fn() -> bool,
) -> HashMap<Cell, Tally> {
    let mut tallies: HashMap<Cell, Tally> = HashMap::new();
    for round in 0..rounds {
        for cell in order(figure, placements, round) {
            if stop() {
                return tallies;
            }
            let tally = tallies.entry(cell).or_default();
            if tally.given_up {
                tally.samples.push(None);
                continue;
            }
            let verdict = attempts(executor, figure, round, cell, tally, watches);
            match verdict {
                Ok(sample) => tally.samples.push(Some(sample)),
                Err(spoiled) => {
                    log::info!("{} {}: {spoiled}", cell.placement, cell.kind);
                    tally.samples.push(None);
                    tally.failed += 1;
                    tally.failure = Some(spoiled.to_string());
                    // What never worked will not work next time, and a hang costs its time-out.
                    tally.given_up = round == 0;
                }
            }
        }
    }
    tallies
}

fn attempts(
    executor: &mut dyn Executor,
    figure: Figure,
    round: u32,
    cell: Cell,
    tally: &mut Tally,
    watches: &mut [&mut dyn Watch],
) -> Result<Sample, Spoiled> {
    let mut attempt = 0;
    loop {
        let run = Run { round, cell, attempt };
        for watch in watches.iter_mut() {
            watch.begins(run);
        }
        let output = executor.run(cell);
        let verdict = judge(cell.kind, figure, &output, executor.cycles_per_us());
        for watch in watches.iter_mut() {
            watch.ended(run, &output, &verdict);
        }
        match verdict {
            Err(spoiled) if attempt < spoiled.repeats() => {
                log::info!("{} {} is repeated: {spoiled}", cell.placement, cell.kind);
                tally.repeated += 1;
                attempt += 1;
            }
            verdict => return verdict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cell::Kind;
    use super::super::sample::tests::{pair, report, side};
    use super::*;
    use crate::exec::process::End;

    const TWO: [Placement; 1] = [Placement::TwoCores];

    /// Answers each cell from a script: a function of the cell and of how often it ran before.
    struct Scripted<F> {
        script: F,
        ran: HashMap<Cell, u32>,
        log: Vec<Cell>,
    }

    impl<F: FnMut(Cell, u32) -> PairOutput> Executor for Scripted<F> {
        fn run(&mut self, cell: Cell) -> PairOutput {
            let before = self.ran.entry(cell).or_default();
            *before += 1;
            self.log.push(cell);
            (self.script)(cell, *before - 1)
        }

        fn cycles_per_us(&self) -> f64 {
            1000.0
        }
    }

    fn scripted<F: FnMut(Cell, u32) -> PairOutput>(script: F) -> Scripted<F> {
        Scripted { script, ran: HashMap::new(), log: Vec::new() }
    }

    fn good(cell: Cell) -> PairOutput {
        if cell.kind.is_raw() {
            pair(side("cycles median 100.0 p99 200.0 mean 100.0\n"))
        } else {
            pair(side(&report("500.00", "900.00")))
        }
    }

    fn polling(placement: Placement) -> Cell {
        Cell { kind: Kind::Polling, placement }
    }

    #[test]
    fn every_cell_runs_once_a_round_and_keeps_its_samples_in_order() {
        let mut executor = scripted(|cell, n| match cell.kind {
            Kind::Polling => pair(side(&report(&format!("{}.00", 100 * (n + 1)), "900.00"))),
            _ => good(cell),
        });
        let tallies = run(&mut executor, Figure::Latency, &TWO, 3, &mut [], &|| false);
        assert_eq!(executor.log.len(), 15);
        assert_eq!(tallies.len(), 5);
        let medians: Vec<_> =
            tallies[&polling(Placement::TwoCores)].samples.iter().flatten().map(|s| s.median_us).collect();
        assert_eq!(medians, [Some(0.1), Some(0.2), Some(0.3)]);
        // The kinds are interleaved: no round begins where the one before it began.
        assert_ne!(executor.log[0], executor.log[5]);
    }

    #[test]
    fn a_wrong_clock_is_repeated_and_counted_but_no_failure() {
        let mut executor = scripted(|cell, n| match (cell.kind, n) {
            (Kind::Polling, 0..=2) => pair(side(&report("inf", "900.00"))),
            _ => good(cell),
        });
        let tallies = run(&mut executor, Figure::Latency, &TWO, 2, &mut [], &|| false);
        let tally = &tallies[&polling(Placement::TwoCores)];
        assert_eq!((tally.repeated, tally.failed, tally.samples.iter().flatten().count()), (3, 0, 2));
    }

    #[test]
    fn what_fails_in_the_first_round_is_given_up_and_the_rest_goes_on() {
        let mut executor = scripted(|cell, _| match cell.kind {
            Kind::Event => {
                let mut pair = pair(side("Events feature not available on WRITE verb\n"));
                pair.client.end = End::Exited(1);
                pair
            }
            _ => good(cell),
        });
        let tallies = run(&mut executor, Figure::Latency, &TWO, 4, &mut [], &|| false);
        let cell = Cell { kind: Kind::Event, placement: Placement::TwoCores };
        let tally = &tallies[&cell];
        assert!(tally.given_up);
        assert_eq!((tally.failed, tally.repeated, executor.ran[&cell]), (1, 1, 2));
        assert!(tally.failure.as_deref().unwrap().contains("not available"), "{tally:?}");
        assert_eq!(tallies[&polling(Placement::TwoCores)].samples.iter().flatten().count(), 4);
    }

    #[test]
    fn a_later_failure_costs_one_round_only() {
        let mut executor = scripted(|cell, n| {
            let mut output = good(cell);
            if cell.kind == Kind::Polling && (1..=2).contains(&n) {
                output.client.end = End::TimedOut("running".into());
            }
            output
        });
        let tallies = run(&mut executor, Figure::Latency, &TWO, 3, &mut [], &|| false);
        let tally = &tallies[&polling(Placement::TwoCores)];
        let there: Vec<_> = tally.samples.iter().map(Option::is_some).collect();
        assert_eq!(there, [true, false, true]);
        assert_eq!((tally.failed, tally.repeated, tally.given_up), (1, 1, false));
    }

    #[test]
    fn nothing_runs_once_it_is_interrupted() {
        let runs = std::cell::Cell::new(0);
        let mut executor = scripted(|cell, _| {
            runs.set(runs.get() + 1);
            good(cell)
        });
        run(&mut executor, Figure::Latency, &TWO, 3, &mut [], &|| runs.get() == 2);
        assert_eq!(runs.get(), 2);
    }

    #[test]
    fn watches_see_every_attempt() {
        #[derive(Default)]
        struct Seen(u32, Vec<(u32, bool)>);
        impl Watch for Seen {
            fn begins(&mut self, _: Run) {
                self.0 += 1;
            }
            fn ended(&mut self, run: Run, _: &PairOutput, verdict: &Result<Sample, Spoiled>) {
                self.1.push((run.attempt, verdict.is_ok()));
            }
        }
        let mut executor = scripted(|cell, n| match (cell.kind, n) {
            (Kind::Polling, 0) => pair(side(&report("nan", "900.00"))),
            _ => good(cell),
        });
        let mut seen = Seen::default();
        run(&mut executor, Figure::Latency, &TWO, 1, &mut [&mut seen], &|| false);
        assert_eq!((seen.0, seen.1.len()), (6, 6));
        assert!(seen.1.contains(&(0, false)) && seen.1.contains(&(1, true)));
    }
}

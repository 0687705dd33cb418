// SPDX-License-Identifier: MIT
//! What a comparison runs: kinds, placements, and the order of each round.
//!
//! A round runs every kind once in every placement. Virtual CPUs move between a near and a far
//! placement, clocks and neighbours change: figures are therefore compared within a round only, the
//! kinds of one placement run one after the other, those that are compared next to each other, and
//! the order is rotated so that none of them always comes first.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::perftest::command::{Command, Figure};

/// A kind of run; the rows of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// A bare cache line between the same cores.
    RawShm,
    /// A bare pipe between the same cores.
    RawPipe,
    /// The stock program polling.
    Polling,
    /// The stock program in event mode.
    Event,
    /// The stock program in event mode under the shim.
    Fastwake,
}

impl Kind {
    /// Whether it is a baseline of ours and not perftest.
    pub(crate) fn is_raw(self) -> bool {
        matches!(self, Kind::RawShm | Kind::RawPipe)
    }

    /// Whether perftest gets `-e`.
    pub(crate) fn has_events(self) -> bool {
        matches!(self, Kind::Event | Kind::Fastwake)
    }

    /// Whether the shim is preloaded.
    pub(crate) fn has_shim(self) -> bool {
        self == Kind::Fastwake
    }

    /// Its name in tables, JSON and plots.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::RawShm => "raw-shm",
            Kind::RawPipe => "raw-pipe",
            Kind::Polling => "polling",
            Kind::Event => "event",
            Kind::Fastwake => "fastwake",
        }
    }
}

/// Where the two sides run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Placement {
    /// Both on one core.
    OneCore,
    /// On a core each.
    TwoCores,
    /// The client on another host.
    TwoHosts,
}

impl Placement {
    /// Its name in tables, JSON and plots.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Placement::OneCore => "one-core",
            Placement::TwoCores => "two-cores",
            Placement::TwoHosts => "two-hosts",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A kind in a placement: what is run once in each round, and one row of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Cell {
    /// What runs.
    pub kind: Kind,
    /// Where.
    pub placement: Placement,
}

/// The kinds of a placement, in the order of the table. Raw baselines are latencies between two
/// processes of one host: a bandwidth test and a second host have none.
pub(crate) fn kinds(figure: Figure, placement: Placement) -> Vec<Kind> {
    let mut kinds = Vec::new();
    if figure == Figure::Latency && placement != Placement::TwoHosts {
        kinds.extend([Kind::RawShm, Kind::RawPipe]);
    }
    kinds.extend([Kind::Polling, Kind::Event, Kind::Fastwake]);
    kinds
}

/// The order in which kinds run: each next to those that it is compared with.
const NEIGHBOURS: [Kind; 5] = [Kind::RawShm, Kind::Polling, Kind::Fastwake, Kind::Event, Kind::RawPipe];

/// The cells of round `round`, in the order in which they run.
pub(crate) fn order(figure: Figure, placements: &[Placement], round: u32) -> Vec<Cell> {
    let mut cells = Vec::new();
    for placement in rotated(placements, round) {
        let mut kinds = kinds(figure, placement);
        kinds.sort_by_key(|kind| NEIGHBOURS.iter().position(|k| k == kind));
        for kind in rotated(&kinds, round) {
            cells.push(Cell { kind, placement });
        }
    }
    cells
}

fn rotated<T: Copy>(items: &[T], by: u32) -> Vec<T> {
    let mut items = items.to_vec();
    if !items.is_empty() {
        let by = by as usize % items.len();
        items.rotate_left(by);
    }
    items
}

/// Iterations by default: enough for a steady 99th percentile, and about a quarter of a second of
/// measuring where each message costs a kernel wake-up.
const ITERATIONS: u32 = 10_000;
/// The same for bandwidth tests, which is perftest's own default.
const RATE_ITERATIONS: u32 = 5_000;
/// Most iterations of two processes that spin against each other on one core: each message then
/// takes a slice of the scheduler, 4 to 8 ms.
const SPINNING_ITERATIONS: u32 = 40;

/// How many iterations a run of this cell gets.
pub(crate) fn iterations(command: &Command, cell: Cell) -> u32 {
    let wanted = command.iterations.unwrap_or(match command.figure() {
        Figure::Latency => ITERATIONS,
        Figure::Rate => RATE_ITERATIONS,
    });
    if spins_on_one_core(command, cell) {
        wanted.min(SPINNING_ITERATIONS)
    } else {
        wanted
    }
}

/// Whether both sides of this cell spin on the same core for every single message.
pub(crate) fn spins_on_one_core(command: &Command, cell: Cell) -> bool {
    let both_spin = match cell.kind {
        Kind::RawShm => true,
        Kind::Polling => command.server_is_active() && command.figure() == Figure::Latency,
        Kind::RawPipe | Kind::Event | Kind::Fastwake => false,
    };
    both_spin && cell.placement == Placement::OneCore
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BOTH: [Placement; 2] = [Placement::TwoCores, Placement::OneCore];

    #[test]
    fn each_round_runs_every_cell_once() {
        for round in 0..12 {
            let cells = order(Figure::Latency, &BOTH, round);
            assert_eq!(cells.len(), 10);
            assert_eq!(cells.iter().collect::<HashSet<_>>().len(), 10);
        }
    }

    #[test]
    fn every_kind_comes_first_in_some_round() {
        let first: HashSet<Kind> =
            (0..5).map(|round| order(Figure::Latency, &[Placement::TwoCores], round)[0].kind).collect();
        assert_eq!(first.len(), 5);
    }

    #[test]
    fn the_kinds_of_a_placement_stand_together() {
        for round in 0..5 {
            let cells = order(Figure::Latency, &BOTH, round);
            assert!(cells[..5].iter().all(|c| c.placement == cells[0].placement), "{cells:?}");
        }
    }

    #[test]
    fn kinds_that_are_compared_run_next_to_each_other_in_most_rounds() {
        for (a, b) in
            [(Kind::Polling, Kind::Fastwake), (Kind::Fastwake, Kind::Event), (Kind::RawShm, Kind::Polling)]
        {
            let next = |round: &u32| {
                let cells = order(Figure::Latency, &[Placement::TwoCores], *round);
                cells.windows(2).any(|w| w[0].kind == a && w[1].kind == b)
            };
            assert_eq!((0..5).filter(next).count(), 4, "{a} {b}");
        }
    }

    #[test]
    fn bandwidth_tests_and_second_hosts_have_no_raw_baseline() {
        assert!(order(Figure::Rate, &BOTH, 0).iter().all(|c| !c.kind.is_raw()));
        assert!(order(Figure::Latency, &[Placement::TwoHosts], 0).iter().all(|c| !c.kind.is_raw()));
    }

    #[test]
    fn only_sides_that_spin_against_each_other_get_few_iterations() {
        let n = |line: &str, kind, placement| {
            iterations(
                &Command::parse(&line.split(' ').collect::<Vec<_>>()).unwrap(),
                Cell { kind, placement },
            )
        };
        assert_eq!(n("ib_send_lat", Kind::Polling, Placement::OneCore), SPINNING_ITERATIONS);
        assert_eq!(n("ib_send_lat -n 7", Kind::RawShm, Placement::OneCore), 7);
        assert_eq!(n("ib_send_lat", Kind::Polling, Placement::TwoCores), ITERATIONS);
        assert_eq!(n("ib_send_lat", Kind::Event, Placement::OneCore), ITERATIONS);
        assert_eq!(n("ib_read_lat -n 500", Kind::Polling, Placement::OneCore), 500);
        assert_eq!(n("ib_send_bw", Kind::Polling, Placement::OneCore), RATE_ITERATIONS);
    }
}

// SPDX-License-Identifier: MIT
//! Whether the yardstick is honest, and whether the goals are reached.
//!
//! A soft device could make event mode look bad or polling look good by being slow or by cheating.
//! So in the same round polling may cost at most 100 ns more than a bare cache line, and event mode
//! at most 3 µs more than a bare pipe; else the figures are of the device and not of waiting. The
//! goals hold on the soft device only: what they are stated for.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::cell::{spins_on_one_core, Cell, Kind, Placement};
use super::result::rounds_of;
use super::rounds::Tally;
use super::stats::{median, upper_quartile};
use crate::perftest::command::{Command, Figure};

/// A bound, and what was measured against it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    /// What is bounded.
    pub name: String,
    /// Where.
    pub placement: Placement,
    /// The figure: a difference in microseconds, or a ratio.
    pub value: f64,
    /// Its bound.
    pub limit: f64,
    /// Unit of both: `us` or `ratio`.
    pub unit: Unit,
    /// Whether the bound is a lower one.
    pub at_least: bool,
    /// Rounds that kept the bound by themselves.
    pub rounds_within: u32,
    /// Rounds that have the figure.
    pub rounds: u32,
    /// Whether it is kept on the whole.
    pub holds: bool,
}

/// Unit of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Unit {
    /// Microseconds.
    Us,
    /// None.
    Ratio,
}

/// Most that polling may cost over a bare cache line, in microseconds.
const POLLING_OVER_RAW_US: f64 = 0.1;
/// Most that event mode may cost over a bare pipe, in microseconds.
const EVENT_OVER_RAW_US: f64 = 3.0;
/// Most of event mode's latency that FastWake may take: on two cores, and on one.
const OF_EVENT_TWO_CORES: f64 = 1.0 / 25.0;
const OF_EVENT_ONE_CORE: f64 = 0.45;
/// Least of event mode's rate that FastWake must reach: in the median, and in the upper quartile.
const RATE_MEDIAN: f64 = 0.97;
const RATE_UPPER_QUARTILE: f64 = 1.0;

/// What FastWake may cost over polling: 5 %, or 25 ns where that is more.
fn allowance(polling_us: f64) -> f64 {
    (0.05 * polling_us).max(0.025)
}

/// The checks of the yardstick. A passive server (READ, ATOMIC) has no raw counterpart.
pub(crate) fn yardstick(
    command: &Command,
    placements: &[Placement],
    tallies: &HashMap<Cell, Tally>,
) -> Vec<Check> {
    if command.figure() != Figure::Latency || !command.server_is_active() {
        return Vec::new();
    }
    let mut checks = Vec::new();
    for &placement in placements {
        for (kind, raw, limit) in [
            (Kind::Polling, Kind::RawShm, POLLING_OVER_RAW_US),
            (Kind::Event, Kind::RawPipe, EVENT_OVER_RAW_US),
        ] {
            // Two sides that spin on one core measure the scheduler's slice, in both rows.
            if !spins_on_one_core(command, Cell { kind, placement }) {
                let rounds = rounds_of(tallies, Figure::Latency, placement, kind, raw);
                checks.extend(difference(&format!("{kind} - {raw}"), placement, &rounds, |_| limit));
            }
        }
    }
    checks
}

/// The goals. Those of latency are stated for SEND; a passive server wakes nobody.
pub(crate) fn goals(
    command: &Command,
    placements: &[Placement],
    tallies: &HashMap<Cell, Tally>,
) -> Vec<Check> {
    let figure = command.figure();
    if figure == Figure::Latency && !command.server_is_active() {
        return Vec::new();
    }
    let mut checks = Vec::new();
    for &placement in placements {
        let over = |other| rounds_of(tallies, figure, placement, Kind::Fastwake, other);
        let of_event: Vec<f64> = over(Kind::Event).iter().map(|(a, b)| a / b).collect();
        match (figure, placement) {
            (Figure::Latency, Placement::TwoCores) => {
                checks.extend(difference("fastwake - polling", placement, &over(Kind::Polling), allowance));
                checks.extend(ratio("fastwake/event", placement, &of_event, OF_EVENT_TWO_CORES));
            }
            (Figure::Latency, Placement::OneCore) => {
                checks.extend(ratio("fastwake/event", placement, &of_event, OF_EVENT_ONE_CORE));
            }
            (Figure::Latency, Placement::TwoHosts) => {}
            (Figure::Rate, _) => {
                let least = |name: &str, value: Option<f64>, limit: f64| {
                    value.map(|value| Check {
                        name: name.to_owned(),
                        placement,
                        value,
                        limit,
                        unit: Unit::Ratio,
                        at_least: true,
                        rounds_within: of_event.iter().filter(|r| **r >= limit).count() as u32,
                        rounds: of_event.len() as u32,
                        holds: value >= limit,
                    })
                };
                let (half, quarter) = (median(of_event.clone()), upper_quartile(of_event.clone()));
                checks.extend(least("fastwake/event", half, RATE_MEDIAN));
                checks.extend(least("fastwake/event, upper quartile", quarter, RATE_UPPER_QUARTILE));
            }
        }
    }
    checks
}

/// Checks that `a - b` is at most `limit(b)` in the median of the rounds.
fn difference(
    name: &str,
    placement: Placement,
    rounds: &[(f64, f64)],
    limit: impl Fn(f64) -> f64,
) -> Option<Check> {
    let excess: Vec<f64> = rounds.iter().map(|(a, b)| a - b - limit(*b)).collect();
    Some(Check {
        name: name.to_owned(),
        placement,
        value: median(rounds.iter().map(|(a, b)| a - b))?,
        limit: median(rounds.iter().map(|(_, b)| limit(*b)))?,
        unit: Unit::Us,
        at_least: false,
        rounds_within: excess.iter().filter(|e| **e <= 0.0).count() as u32,
        rounds: rounds.len() as u32,
        holds: median(excess)? <= 0.0,
    })
}

/// Checks that the median of `ratios` is at most `limit`.
fn ratio(name: &str, placement: Placement, ratios: &[f64], limit: f64) -> Option<Check> {
    let value = median(ratios.iter().copied())?;
    Some(Check {
        name: name.to_owned(),
        placement,
        value,
        limit,
        unit: Unit::Ratio,
        at_least: false,
        rounds_within: ratios.iter().filter(|r| **r <= limit).count() as u32,
        rounds: ratios.len() as u32,
        holds: value <= limit,
    })
}

#[cfg(test)]
mod tests {
    use super::super::result::tests::{comparison, good, tallies};
    use super::*;

    fn find<'a>(checks: &'a [Check], name: &str) -> &'a Check {
        checks.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no check {name}"))
    }

    #[test]
    fn a_good_run_on_two_cores_is_honest_and_reaches_its_goals() {
        let c = good();
        assert_eq!((c.yardstick.len(), c.goals.len()), (2, 2));
        assert!(c.yardstick.iter().chain(&c.goals).all(|check| check.holds), "{c:?}");
    }

    #[test]
    fn a_slow_device_is_not_honest() {
        let c = comparison(
            Placement::TwoCores,
            &[
                (Kind::RawShm, &[0.10, 0.10, 0.10]),
                (Kind::RawPipe, &[6.0, 6.0, 6.0]),
                (Kind::Polling, &[0.30, 0.15, 0.30]),
                (Kind::Event, &[9.5, 9.5, 8.0]),
            ],
        );
        let polling = find(&c.yardstick, "polling - raw-shm");
        assert!(!polling.holds);
        assert_eq!((polling.rounds_within, polling.rounds), (1, 3));
        assert!(!find(&c.yardstick, "event - raw-pipe").holds);
    }

    #[test]
    fn the_allowance_over_polling_is_the_greater_of_five_per_cent_and_25_ns() {
        let over = |polling: f64, fastwake: f64| {
            let c = comparison(
                Placement::TwoCores,
                &[(Kind::Polling, &[polling]), (Kind::Fastwake, &[fastwake])],
            );
            find(&c.goals, "fastwake - polling").holds
        };
        assert!(over(0.14, 0.164) && !over(0.14, 0.166));
        assert!(over(2.0, 2.099) && !over(2.0, 2.101));
    }

    #[test]
    fn on_one_core_only_the_sleeping_rows_are_checked() {
        let c = comparison(
            Placement::OneCore,
            &[
                (Kind::RawShm, &[4000.0]),
                (Kind::RawPipe, &[3.0]),
                (Kind::Polling, &[4000.0]),
                (Kind::Event, &[5.0]),
                (Kind::Fastwake, &[2.3]),
            ],
        );
        assert_eq!(c.yardstick.len(), 1);
        assert!(find(&c.yardstick, "event - raw-pipe").holds);
        assert!(!find(&c.goals, "fastwake/event").holds);
    }

    #[test]
    fn a_passive_server_has_neither_yardstick_nor_goals() {
        let command = Command::parse(&["ib_read_lat"]).unwrap();
        let t = tallies(Placement::TwoCores, &[(Kind::Event, &[1.0]), (Kind::Fastwake, &[1.0])]);
        assert!(goals(&command, &[Placement::TwoCores], &t).is_empty());
        assert!(yardstick(&command, &[Placement::TwoCores], &t).is_empty());
    }

    #[test]
    fn rates_must_not_fall() {
        let command = Command::parse(&["ib_send_bw"]).unwrap();
        // Latencies of 1/1.00 and 1/0.95: the rate falls to 95 %.
        let t = tallies(Placement::TwoCores, &[(Kind::Event, &[1.0]), (Kind::Fastwake, &[1.0 / 0.95])]);
        let checks = goals(&command, &[Placement::TwoCores], &t);
        assert!(checks.iter().all(|c| c.at_least && !c.holds), "{checks:?}");
        assert!(yardstick(&command, &[Placement::TwoCores], &t).is_empty());
    }
}

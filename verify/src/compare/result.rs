// SPDX-License-Identifier: MIT
//! The result of a comparison, in the form of its JSON.
//!
//! The form is documented in docs/FASTWAKED.md and kept stable: fields are added, never renamed or
//! removed. `runs` reads what earlier versions wrote.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::cell::{kinds, Cell, Kind, Placement};
use super::checks::{self, Check};
use super::rounds::Tally;
use super::stats::{median, spread};
use crate::fingerprint::Host;
use crate::perftest::command::{Command, Figure};

/// A whole comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Comparison {
    /// Name of the server's device.
    pub device: String,
    /// The server's host.
    pub host: Host,
    /// The client's, where it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_host: Option<Host>,
    /// The test, without the options that vary from row to row.
    pub command: String,
    /// Rounds that were run.
    pub rounds: u32,
    /// One for each kind and placement.
    pub rows: Vec<Row>,
    /// Taken round by round.
    pub ratios: Vec<Ratio>,
    /// Whether the yardstick is honest.
    #[serde(default)]
    pub yardstick: Vec<Check>,
    /// What was aimed at and what was reached; on the soft device only.
    #[serde(default)]
    pub goals: Vec<Check>,
}

/// A kind in a placement: medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Its kind.
    pub name: Kind,
    /// Where it ran.
    pub placement: Placement,
    /// Median latency, one way; null for bandwidth tests.
    pub median_us: Option<f64>,
    /// 99th percentile of the latency, one way; null for bandwidth tests.
    pub p99_us: Option<f64>,
    /// Messages per second.
    pub msgs_per_s: Option<f64>,
    /// CPU of the server in per cent of a core, over its whole run.
    pub cpu_server_pct: Option<f64>,
    /// CPU of the client likewise.
    pub cpu_client_pct: Option<f64>,
    /// Runs that failed for good.
    pub failed_runs: u32,
    /// Runs that were repeated.
    #[serde(default)]
    pub repeated_runs: u32,
    /// Smallest of what is compared: `median_us`, or `msgs_per_s` for bandwidth tests.
    #[serde(default)]
    pub min: Option<f64>,
    /// Largest likewise.
    #[serde(default)]
    pub max: Option<f64>,
    /// Share of the waits that the shim served, in per cent; null without counters.
    #[serde(default)]
    pub served_pct: Option<f64>,
    /// Why runs failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The ratio of two kinds in one placement, taken in each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ratio {
    /// Such as `fastwake/polling`.
    pub name: String,
    /// Where both ran.
    pub placement: Placement,
    /// Median of the rounds' ratios.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

/// The ratios that are taken, where both rows are there.
const RATIOS: &[(Kind, Kind)] = &[
    (Kind::Fastwake, Kind::Polling),
    (Kind::Fastwake, Kind::Event),
    (Kind::Event, Kind::Polling),
    (Kind::Polling, Kind::RawShm),
    (Kind::Event, Kind::RawPipe),
];

/// What a comparison was made with.
#[derive(Debug)]
pub(crate) struct Subject<'a> {
    /// The server's device.
    pub device: &'a str,
    /// Whether it is the soft device.
    pub soft: bool,
    /// The server's host.
    pub host: Host,
    /// The client's, where it is another one.
    pub client_host: Option<Host>,
    /// The test.
    pub command: &'a Command,
    /// Where it ran.
    pub placements: &'a [Placement],
    /// How often.
    pub rounds: u32,
}

/// Puts the result together.
pub(crate) fn summarize(subject: Subject<'_>, tallies: &HashMap<Cell, Tally>) -> Comparison {
    let figure = subject.command.figure();
    let mut rows = Vec::new();
    let mut ratios = Vec::new();
    for &placement in subject.placements {
        for kind in kinds(figure, placement) {
            if let Some(tally) = tallies.get(&Cell { kind, placement }) {
                rows.push(row(kind, placement, figure, tally));
            }
        }
        for &(over, under) in RATIOS {
            let per_round = rounds_of(tallies, figure, placement, over, under);
            if let Some(s) = spread(per_round.iter().map(|(a, b)| a / b)) {
                let name = format!("{over}/{under}");
                ratios.push(Ratio { name, placement, median: s.median, min: s.min, max: s.max });
            }
        }
    }
    let yardstick = checks::yardstick(subject.command, subject.placements, tallies);
    let goals =
        if subject.soft { checks::goals(subject.command, subject.placements, tallies) } else { Vec::new() };
    Comparison {
        device: subject.device.to_owned(),
        host: subject.host,
        client_host: subject.client_host,
        command: subject.command.display(),
        rounds: subject.rounds,
        rows,
        ratios,
        yardstick,
        goals,
    }
}

/// The compared figures of two kinds, of each round in which both have one.
pub(crate) fn rounds_of(
    tallies: &HashMap<Cell, Tally>,
    figure: Figure,
    placement: Placement,
    a: Kind,
    b: Kind,
) -> Vec<(f64, f64)> {
    let samples = |kind| tallies.get(&Cell { kind, placement }).map_or(&[][..], |t| &t.samples[..]);
    let compared = |s: &Option<super::sample::Sample>| s.as_ref().and_then(|s| s.compared(figure));
    samples(a).iter().zip(samples(b)).filter_map(|(a, b)| Some((compared(a)?, compared(b)?))).collect()
}

fn row(kind: Kind, placement: Placement, figure: Figure, tally: &Tally) -> Row {
    let samples = || tally.samples.iter().flatten();
    let compared = spread(samples().filter_map(|s| s.compared(figure)));
    let waits = samples().filter_map(|s| s.waits).reduce(|a, b| (a.0 + b.0, a.1 + b.1));
    Row {
        name: kind,
        placement,
        median_us: median(samples().filter_map(|s| s.median_us)),
        p99_us: median(samples().filter_map(|s| s.p99_us)),
        msgs_per_s: median(samples().map(|s| s.msgs_per_s)),
        cpu_server_pct: median(samples().map(|s| s.cpu_server_pct)),
        cpu_client_pct: median(samples().map(|s| s.cpu_client_pct)),
        failed_runs: tally.failed,
        repeated_runs: tally.repeated,
        min: compared.map(|s| s.min),
        max: compared.map(|s| s.max),
        served_pct: waits.filter(|w| w.0 > 0).map(|(all, served)| 100.0 * served as f64 / all as f64),
        failure: tally.failure.clone(),
    }
}

impl Comparison {
    /// Whether it compares rates, of which more is better, and not latencies.
    pub(crate) fn compares_rates(&self) -> bool {
        self.command.split_whitespace().next().is_some_and(|program| program.ends_with("_bw"))
    }

    /// What is wrong with the result as a whole: every kind of run that failed, with its reason.
    pub(crate) fn failures(&self) -> Vec<String> {
        self.rows
            .iter()
            .filter(|row| row.failed_runs > 0)
            .map(|row| {
                let why = row.failure.as_deref().unwrap_or("no reason is known");
                format!("{} {}: {} failed: {why}", row.name, row.placement, plural(row.failed_runs))
            })
            .collect()
    }
}

fn plural(runs: u32) -> String {
    if runs == 1 {
        "1 run".to_owned()
    } else {
        format!("{runs} runs")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::sample::Sample;
    use super::*;

    fn sample(us: f64) -> Option<Sample> {
        Some(Sample {
            median_us: Some(us),
            p99_us: Some(us * 3.0),
            msgs_per_s: 1e6 / us,
            cpu_server_pct: 90.0,
            cpu_client_pct: 95.0,
            waits: None,
        })
    }

    /// Tallies of one placement with these medians, in microseconds, per kind.
    pub(crate) fn tallies(placement: Placement, medians: &[(Kind, &[f64])]) -> HashMap<Cell, Tally> {
        medians
            .iter()
            .map(|(kind, medians)| {
                let samples = medians.iter().map(|us| if *us > 0.0 { sample(*us) } else { None }).collect();
                (Cell { kind: *kind, placement }, Tally { samples, ..Tally::default() })
            })
            .collect()
    }

    pub(crate) fn comparison(placement: Placement, medians: &[(Kind, &[f64])]) -> Comparison {
        let command = Command::parse(&["ib_send_lat", "-s", "64"]).unwrap();
        let subject = Subject {
            device: "fw_soft0",
            soft: true,
            host: Host { cpu: "A CPU".into(), cores: 2, cores_allowed: 2, ..Host::default() },
            client_host: None,
            command: &command,
            placements: &[placement],
            rounds: medians[0].1.len() as u32,
        };
        summarize(subject, &tallies(placement, medians))
    }

    /// A comparison as it goes well: three rounds on two cores.
    pub(crate) fn good() -> Comparison {
        comparison(
            Placement::TwoCores,
            &[
                (Kind::RawShm, &[0.10, 0.10, 0.11]),
                (Kind::RawPipe, &[6.0, 6.5, 7.0]),
                (Kind::Polling, &[0.14, 0.15, 0.14]),
                (Kind::Event, &[8.0, 9.0, 8.5]),
                (Kind::Fastwake, &[0.15, 0.16, 0.15]),
            ],
        )
    }

    #[test]
    fn ratios_are_taken_round_by_round_before_the_median() {
        // The machine gets ten times slower in the second round: the ratio does not move.
        let c = comparison(
            Placement::TwoCores,
            &[(Kind::Polling, &[1.0, 10.0, 1.0]), (Kind::Fastwake, &[1.1, 11.0, 1.2])],
        );
        assert_eq!(c.ratios.len(), 1);
        let r = &c.ratios[0];
        assert_eq!((r.name.as_str(), r.placement), ("fastwake/polling", Placement::TwoCores));
        assert!((r.median - 1.1).abs() < 1e-9 && (r.max - 1.2).abs() < 1e-9, "{r:?}");
    }

    #[test]
    fn a_round_without_one_of_the_two_has_no_ratio() {
        let c = comparison(
            Placement::OneCore,
            &[(Kind::Event, &[4.0, 0.0, 4.0]), (Kind::Fastwake, &[2.0, 100.0, 1.0])],
        );
        let r = &c.ratios[0];
        assert_eq!((r.min, r.max), (0.25, 0.5));
        assert_eq!(c.rows[0].median_us, Some(4.0));
    }

    #[test]
    fn rows_hold_medians_and_the_spread_over_the_rounds() {
        let c = good();
        let row = c.rows.iter().find(|r| r.name == Kind::Event).unwrap();
        assert_eq!((row.median_us, row.min, row.max), (Some(8.5), Some(8.0), Some(9.0)));
        assert_eq!((row.cpu_client_pct, row.failed_runs), (Some(95.0), 0));
    }

    #[test]
    fn the_json_has_the_documented_names() {
        let json = serde_json::to_value(good()).unwrap();
        for key in ["device", "host", "command", "rounds", "rows", "ratios"] {
            assert!(json.get(key).is_some(), "{key}");
        }
        let row = &json["rows"][0];
        assert_eq!((row["name"].as_str(), row["placement"].as_str()), (Some("raw-shm"), Some("two-cores")));
        for key in ["median_us", "p99_us", "msgs_per_s", "cpu_server_pct", "cpu_client_pct", "failed_runs"] {
            assert!(row[key].is_number(), "{key}");
        }
        let ratio = &json["ratios"][0];
        assert_eq!(ratio["name"].as_str(), Some("fastwake/polling"));
        for key in ["median", "min", "max"] {
            assert!(ratio[key].is_number(), "{key}");
        }
    }

    #[test]
    fn json_is_read_back_and_so_is_one_with_the_documented_fields_only() {
        let c = good();
        let text = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<Comparison>(&text).unwrap(), c);
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for extra in ["yardstick", "goals"] {
            json.as_object_mut().unwrap().remove(extra);
        }
        for extra in ["repeated_runs", "min", "max", "served_pct"] {
            json["rows"][0].as_object_mut().unwrap().remove(extra);
        }
        let read: Comparison = serde_json::from_value(json).unwrap();
        assert_eq!(read.rows[0].median_us, c.rows[0].median_us);
    }

    #[test]
    fn a_kind_that_failed_is_named_with_its_reason() {
        let mut c = good();
        assert!(c.failures().is_empty());
        c.rows[3].failed_runs = 2;
        c.rows[3].failure = Some("client hung".into());
        assert_eq!(c.failures(), ["event two-cores: 2 runs failed: client hung"]);
    }
}

// SPDX-License-Identifier: MIT
//! What changed between two recorded runs.
//!
//! A change counts when it cannot be explained by the spread of either run: each median lies
//! outside the other run's smallest-to-largest range, and the medians differ by more than 5 %. Ratios are compared whatever the hosts are, since both sides of a ratio come from the
//! same round on the same host. Absolute figures are compared only where the hosts' fingerprints
//! match; load and versions may differ.

use std::fmt::Write;

use anyhow::{bail, Result};

use crate::compare::result::Comparison;
use crate::compare::stats::Spread;
use crate::compare::table::figure;

/// Smallest relative difference of the medians that counts.
const LEAST: f64 = 0.05;

/// What a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Within the spread, or small.
    Same,
    /// Better beyond the spread.
    Improved,
    /// Worse beyond the spread.
    Regressed,
    /// Different beyond the spread, of a figure that has no better and worse.
    Differs,
}

/// One figure of both runs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Change {
    /// What it is.
    pub name: String,
    /// In the earlier run.
    pub a: Spread,
    /// In the later run.
    pub b: Spread,
    /// The verdict.
    pub verdict: Verdict,
}

/// All figures that both runs have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Diff {
    /// Ratios, then absolute figures.
    pub changes: Vec<Change>,
    /// Whether absolute figures were compared.
    pub same_machine: bool,
}

/// Compares two runs.
///
/// # Errors
/// They are of different tests or devices.
pub(crate) fn diff(a: &Comparison, b: &Comparison) -> Result<Diff> {
    if a.command != b.command {
        bail!("the runs are of different tests: '{}' and '{}'", a.command, b.command);
    }
    if a.device != b.device {
        bail!("the runs are of different devices: {} and {}", a.device, b.device);
    }
    let more_is_better = a.compares_rates();
    let mut changes = Vec::new();
    for x in &a.ratios {
        let Some(y) = b.ratios.iter().find(|y| y.name == x.name && y.placement == x.placement) else {
            continue;
        };
        let spread = |r: &crate::compare::result::Ratio| Spread { median: r.median, min: r.min, max: r.max };
        // How event mode compares with polling is a fact of the machine, not a merit of ours.
        let more = (x.name != "event/polling").then_some(more_is_better);
        changes.push(change(format!("{} {}", x.placement, x.name), spread(x), spread(y), more));
    }
    let same_machine = a.host.is_same_machine(&b.host)
        && match (&a.client_host, &b.client_host) {
            (None, None) => true,
            (Some(x), Some(y)) => x.is_same_machine(y),
            _ => false,
        };
    if same_machine {
        for x in &a.rows {
            let Some(y) = b.rows.iter().find(|y| y.name == x.name && y.placement == x.placement) else {
                continue;
            };
            let spread = |row: &crate::compare::result::Row| {
                let median = if more_is_better { row.msgs_per_s } else { row.median_us }?;
                Some(Spread { median, min: row.min?, max: row.max? })
            };
            if let (Some(a), Some(b)) = (spread(x), spread(y)) {
                let unit = if more_is_better { "messages/s" } else { "µs" };
                changes.push(change(
                    format!("{} {}, {unit}", x.placement, x.name),
                    a,
                    b,
                    Some(more_is_better),
                ));
            }
        }
    }
    Ok(Diff { changes, same_machine })
}

/// Judges one figure; `more_is_better` is `None` where neither is.
fn change(name: String, a: Spread, b: Spread, more_is_better: Option<bool>) -> Change {
    let outside = |v: f64, s: Spread| v < s.min || v > s.max;
    let beyond = outside(b.median, a) && outside(a.median, b) && relative(a, b).abs() > LEAST;
    let verdict = match (beyond, more_is_better) {
        (false, _) => Verdict::Same,
        (true, None) => Verdict::Differs,
        (true, Some(more)) if (b.median > a.median) == more => Verdict::Improved,
        (true, Some(_)) => Verdict::Regressed,
    };
    Change { name, a, b, verdict }
}

fn relative(a: Spread, b: Spread) -> f64 {
    b.median / a.median - 1.0
}

impl Diff {
    /// How many figures got worse beyond the spread.
    pub(crate) fn regressions(&self) -> usize {
        self.changes.iter().filter(|c| c.verdict == Verdict::Regressed).count()
    }

    /// Lays it out for people.
    pub(crate) fn render(&self, a: &str, b: &str) -> String {
        let mut out = format!("A {a}\nB {b}\n\n");
        let width = self.changes.iter().map(|c| c.name.chars().count()).max().unwrap_or(0);
        for c in &self.changes {
            let word = match c.verdict {
                Verdict::Same => "",
                Verdict::Improved => "improved",
                Verdict::Regressed => "REGRESSED",
                Verdict::Differs => "differs",
            };
            let show = |s: Spread| format!("{} ({} .. {})", figure(s.median), figure(s.min), figure(s.max));
            let per_cent = 100.0 * relative(c.a, c.b);
            let line = format!(
                "{:<width$}  {:>28}  {:>28}  {per_cent:>+7.1} %  {word}",
                c.name,
                show(c.a),
                show(c.b)
            );
            let _ = writeln!(out, "{}", line.trim_end());
        }
        if !self.same_machine {
            out.push_str("\nthe hosts differ: absolute figures are not compared\n");
        }
        let verdict = match self.regressions() {
            0 => "nothing regressed beyond the spread".to_owned(),
            1 => "1 figure regressed beyond the spread".to_owned(),
            n => format!("{n} figures regressed beyond the spread"),
        };
        let _ = writeln!(out, "\n{verdict}");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::cell::{Kind, Placement};
    use crate::compare::result::tests::{comparison, good};

    fn run(polling: &[f64], fastwake: &[f64]) -> Comparison {
        comparison(Placement::TwoCores, &[(Kind::Polling, polling), (Kind::Fastwake, fastwake)])
    }

    fn verdict_of(diff: &Diff, name: &str) -> Verdict {
        diff.changes.iter().find(|c| c.name.contains(name)).unwrap().verdict
    }

    #[test]
    fn a_ratio_that_got_worse_beyond_both_spreads_is_a_regression() {
        let (a, b) = (run(&[1.0, 1.0, 1.0], &[1.0, 1.1, 1.2]), run(&[1.0, 1.0, 1.0], &[1.3, 1.4, 1.5]));
        let worse = diff(&a, &b).unwrap();
        assert_eq!(verdict_of(&worse, "fastwake/polling"), Verdict::Regressed);
        assert_eq!(worse.regressions(), 2, "the ratio and the figure itself");
        assert!(worse.render("a", "b").contains("REGRESSED"));
        assert_eq!(verdict_of(&diff(&b, &a).unwrap(), "fastwake/polling"), Verdict::Improved);
    }

    #[test]
    fn a_median_within_the_others_spread_is_no_regression() {
        let a = run(&[1.0, 1.0, 1.0], &[1.0, 1.1, 1.5]);
        let b = run(&[1.0, 1.0, 1.0], &[1.3, 1.4, 1.5]);
        assert_eq!(diff(&a, &b).unwrap().regressions(), 0);
    }

    #[test]
    fn five_per_cent_is_noise_however_small_the_spread() {
        let (a, b) = (run(&[1.0; 3], &[1.0; 3]), run(&[1.0; 3], &[1.04; 3]));
        assert_eq!(diff(&a, &b).unwrap().regressions(), 0);
    }

    #[test]
    fn absolute_figures_of_different_hosts_are_not_compared() {
        let a = run(&[1.0; 3], &[1.0; 3]);
        let mut b = run(&[9.0; 3], &[9.0; 3]);
        b.host.kernel = "another".into();
        let different = diff(&a, &b).unwrap();
        assert!(!different.same_machine && different.changes.len() == 1);
        assert_eq!(different.regressions(), 0);
        b.host = a.host.clone();
        assert_eq!(diff(&a, &b).unwrap().regressions(), 2);
    }

    #[test]
    fn more_messages_are_better_and_polling_against_events_is_neither() {
        let rename = |mut c: Comparison, command: &str| {
            c.command = command.into();
            for row in &mut c.rows {
                (row.min, row.max) = (row.msgs_per_s, row.msgs_per_s);
            }
            c
        };
        let (slow, fast) = (run(&[1.0; 3], &[1.0; 3]), run(&[1.0; 3], &[0.5; 3]));
        let (slow, fast) = (rename(slow, "ib_send_bw"), rename(fast, "ib_send_bw"));
        assert_eq!(verdict_of(&diff(&slow, &fast).unwrap(), "messages/s"), Verdict::Same);
        assert_eq!(verdict_of(&diff(&slow, &fast).unwrap(), "fastwake, messages/s"), Verdict::Improved);
        let mut b = good();
        for r in b.ratios.iter_mut().filter(|r| r.name == "event/polling") {
            (r.median, r.min, r.max) = (r.median * 9.0, r.min * 9.0, r.max * 9.0);
        }
        let events = diff(&good(), &b).unwrap();
        assert_eq!((verdict_of(&events, "event/polling"), events.regressions()), (Verdict::Differs, 0));
    }

    #[test]
    fn runs_of_different_tests_cannot_be_compared() {
        let mut b = good();
        b.command = "ib_read_lat".into();
        assert!(diff(&good(), &b).is_err());
        let mut b = good();
        b.device = "mlx5_0".into();
        assert!(diff(&good(), &b).is_err());
    }
}

// SPDX-License-Identifier: MIT
//! The result as text: what `compare` and `runs show` print.

use std::fmt::Write;

use super::cell::Placement;
use super::checks::{Check, Unit};
use super::result::{Comparison, Row};
use crate::devices::SOFT_DEVICE;

/// Lays the whole result out.
pub(crate) fn render(c: &Comparison) -> String {
    let mut out = String::new();
    let rounds = if c.rounds == 1 { "1 round".to_owned() } else { format!("{} rounds", c.rounds) };
    let _ = writeln!(out, "{} on {}, {rounds}; medians of the rounds", c.command, c.device);
    let _ = writeln!(out, "host    {}", c.host.summary());
    if let Some(client) = &c.client_host {
        let _ = writeln!(out, "client  {}", client.summary());
    }
    if c.device == SOFT_DEVICE {
        let _ = writeln!(
            out,
            "device  soft: shared memory and a real kernel wake-up; no NIC, PCIe or interrupt is modelled"
        );
    }
    for placement in [Placement::TwoCores, Placement::OneCore, Placement::TwoHosts] {
        if c.rows.iter().any(|row| row.placement == placement) {
            out.push('\n');
            block(&mut out, c, placement);
        }
    }
    checks(&mut out, "yardstick", &c.yardstick, ["honest", "NOT HONEST"]);
    checks(&mut out, "goals", &c.goals, ["reached", "MISSED"]);
    let failures = c.failures();
    if !failures.is_empty() {
        out.push_str("\nfailed\n");
        for failure in failures {
            let _ = writeln!(out, "  {failure}");
        }
    }
    out
}

fn block(out: &mut String, c: &Comparison, placement: Placement) {
    let title = match placement {
        Placement::OneCore => "one-core (server and client share a core)",
        Placement::TwoCores => "two-cores (server and client on a core each)",
        Placement::TwoHosts => "two-hosts (the client on another host)",
    };
    let _ = writeln!(out, "{title}");
    let rates = c.compares_rates();
    let mut rows = vec![headings(rates)];
    rows.extend(c.rows.iter().filter(|r| r.placement == placement).map(|r| cells(r, rates)));
    lay_out(out, &rows);
    let ratios: Vec<_> = c.ratios.iter().filter(|r| r.placement == placement).collect();
    if !ratios.is_empty() {
        let mut rows = vec![["ratio, per round", "median", "min", "max"].map(str::to_owned).to_vec()];
        for r in ratios {
            rows.push(vec![r.name.clone(), figure(r.median), figure(r.min), figure(r.max)]);
        }
        lay_out(out, &rows);
    }
}

fn headings(rates: bool) -> Vec<String> {
    let figures: &[&str] = if rates {
        &["messages/s", "min", "max"]
    } else {
        &["median µs", "min", "max", "p99 µs", "messages/s"]
    };
    std::iter::once("")
        .chain(figures.iter().copied())
        .chain(["CPU server", "CPU client", "served", "repeated", "failed"])
        .map(str::to_owned)
        .collect()
}

fn cells(row: &Row, rates: bool) -> Vec<String> {
    let number = |v: Option<f64>| v.map_or("-".to_owned(), figure);
    let per_cent = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.0} %"));
    let rate = |v: Option<f64>| v.map_or("-".to_owned(), |v| group(v.round() as u64));
    let mut cells = vec![row.name.to_string()];
    if rates {
        cells.extend([rate(row.msgs_per_s), rate(row.min), rate(row.max)]);
    } else {
        cells.extend([row.median_us, row.min, row.max, row.p99_us].map(number));
        cells.push(rate(row.msgs_per_s));
    }
    let served = row.served_pct.map_or("-".to_owned(), |v| format!("{v:.1} %"));
    cells.extend([per_cent(row.cpu_server_pct), per_cent(row.cpu_client_pct), served]);
    cells.extend([row.repeated_runs.to_string(), row.failed_runs.to_string()]);
    cells
}

/// First column to the left, the others to the right, each as wide as its widest cell.
fn lay_out(out: &mut String, rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::from("  ");
        for (i, cell) in row.iter().enumerate() {
            let w = widths[i];
            let _ = if i == 0 { write!(line, "{cell:<w$}") } else { write!(line, "  {cell:>w$}") };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

fn checks(out: &mut String, title: &str, checks: &[Check], words: [&str; 2]) {
    if checks.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    let mut rows = Vec::new();
    for c in checks {
        let sign = if c.at_least { '≥' } else { '≤' };
        let value = |v| match c.unit {
            Unit::Us => format!("{} µs", figure(v)),
            Unit::Ratio => figure(v),
        };
        rows.push(vec![
            format!("{} {}", c.placement, c.name),
            value(c.value),
            format!("{sign} {}", value(c.limit)),
            words[usize::from(!c.holds)].to_owned(),
            format!("{} of {} rounds", c.rounds_within, c.rounds),
        ]);
    }
    lay_out(out, &rows);
}

/// A figure with as many digits as mean something: three decimals below ten, fewer above.
pub(crate) fn figure(v: f64) -> String {
    match v.abs() {
        a if a < 10.0 => format!("{v:.3}"),
        a if a < 100.0 => format!("{v:.2}"),
        a if a < 1000.0 => format!("{v:.1}"),
        _ => format!("{v:.0}"),
    }
}

/// A whole number in groups of three digits.
pub(crate) fn group(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::result::tests::good;
    use super::*;

    #[test]
    fn the_table_shows_rows_ratios_yardstick_and_goals() {
        let text = render(&good());
        let line = |start: &str| {
            text.lines()
                .find(|l| l.trim_start().starts_with(start))
                .unwrap_or_else(|| panic!("no {start} in\n{text}"))
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert!(line("raw-shm").starts_with("raw-shm 0.100 0.100 0.110 0.300"));
        assert!(line("fastwake/polling").contains("1.071"));
        assert!(line("two-cores polling").contains("≤ 0.100 µs honest 3 of 3 rounds"));
        assert!(line("two-cores fastwake/event").contains("reached"));
        assert!(text.contains("no NIC"));
    }

    #[test]
    fn failed_runs_are_shown_with_their_reason() {
        let mut c = good();
        (c.rows[4].failed_runs, c.rows[4].failure) = (1, Some("client hung".into()));
        assert!(render(&c).contains("fastwake two-cores: 1 run failed: client hung"));
    }

    #[test]
    fn missed_bounds_stand_out() {
        let mut c = good();
        (c.yardstick[0].holds, c.goals[0].holds) = (false, false);
        let text = render(&c);
        assert!(text.contains("NOT HONEST") && text.contains("MISSED"), "{text}");
    }

    #[test]
    fn figures_have_the_digits_that_mean_something() {
        assert_eq!([0.1404, 12.345, 123.45, 4012.3].map(figure), ["0.140", "12.35", "123.5", "4012"]);
        assert_eq!([7, 1234, 7_123_456].map(group), ["7", "1 234", "7 123 456"]);
    }
}

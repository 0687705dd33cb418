// SPDX-License-Identifier: MIT
//! One run, judged: its figures, or why it has none and whether it is worth repeating.

use std::fmt;

use super::cell::Kind;
use crate::exec::process::{End, SideOutput};
use crate::exec::PairOutput;
use crate::perftest::command::Figure;
use crate::perftest::output::{self, Unreadable};
use crate::raw;

/// The figures of one run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Median latency in microseconds, one way; of the whole operation for READ and ATOMIC.
    pub median_us: Option<f64>,
    /// 99th percentile likewise.
    pub p99_us: Option<f64>,
    /// Messages per second; for latency tests those of a ping-pong with one message under way.
    pub msgs_per_s: f64,
    /// CPU time of the server over its wall time, in per cent of a core.
    pub cpu_server_pct: f64,
    /// CPU time of the client likewise.
    pub cpu_client_pct: f64,
    /// Waits that both shims saw, and how many of them they served.
    pub waits: Option<(u64, u64)>,
}

impl Sample {
    /// The figure by which runs are compared: latency or rate.
    pub(crate) fn compared(&self, figure: Figure) -> Option<f64> {
        match figure {
            Figure::Latency => self.median_us,
            Figure::Rate => Some(self.msgs_per_s),
        }
    }
}

/// Why a run has no figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Spoiled {
    /// perftest's clock was off; an accident of the moment.
    Clock(String),
    /// A side hung and was killed.
    Hung(String),
    /// A side failed.
    Failed(String),
}

impl Spoiled {
    /// How often a run spoiled like this is repeated.
    pub(crate) fn repeats(&self) -> u32 {
        match self {
            Spoiled::Clock(_) => 3,
            Spoiled::Hung(_) | Spoiled::Failed(_) => 1,
        }
    }
}

impl fmt::Display for Spoiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spoiled::Clock(why) => write!(f, "perftest's clock was off ({why})"),
            Spoiled::Hung(why) | Spoiled::Failed(why) => f.write_str(why),
        }
    }
}

/// Judges what a run left behind. `cycles_per_us` is the rate of the client's cycle counter, in
/// whose cycles latencies are reported.
///
/// # Errors
/// Why it has no figures.
pub(crate) fn judge(
    kind: Kind,
    figure: Figure,
    pair: &PairOutput,
    cycles_per_us: f64,
) -> Result<Sample, Spoiled> {
    let report = figures(kind, figure, &pair.client.text, cycles_per_us);
    let both_succeeded = pair.server.end.is_success() && pair.client.end.is_success();
    match report {
        Ok((median_us, p99_us, msgs_per_s)) if both_succeeded => Ok(Sample {
            median_us,
            p99_us,
            msgs_per_s,
            cpu_server_pct: cpu(&pair.server),
            cpu_client_pct: cpu(&pair.client),
            waits: kind.has_shim().then(|| waits(pair)).flatten(),
        }),
        Err(Unreadable::Clock(why)) => Err(Spoiled::Clock(why)),
        _ if both_succeeded => {
            let why = report.err().map(|e| e.to_string()).unwrap_or_default();
            Err(Spoiled::Failed(format!("{why}; {}", said(pair))))
        }
        _ => Err(match clock_complaint(pair) {
            Some(why) => Spoiled::Clock(why),
            None if hung(&pair.server) || hung(&pair.client) => Spoiled::Hung(said(pair)),
            None => Spoiled::Failed(said(pair)),
        }),
    }
}

type Figures = (Option<f64>, Option<f64>, f64);

fn figures(kind: Kind, figure: Figure, text: &str, cycles_per_us: f64) -> Result<Figures, Unreadable> {
    let us = |cycles: f64| cycles / cycles_per_us;
    if kind.is_raw() {
        let raw = raw::parse(text).ok_or_else(|| Unreadable::Missing("no figures were printed".into()))?;
        return Ok((Some(us(raw.median)), Some(us(raw.p99)), 1e6 / us(raw.mean)));
    }
    match figure {
        Figure::Latency => {
            let l = output::latency(text)?;
            Ok((Some(us(l.median)), Some(us(l.p99)), 1e6 / us(l.mean)))
        }
        Figure::Rate => Ok((None, None, output::rate(text)?.per_second)),
    }
}

fn hung(side: &SideOutput) -> bool {
    matches!(side.end, End::TimedOut(_))
}

fn cpu(side: &SideOutput) -> f64 {
    100.0 * side.cpu_s / side.wall_s.max(1e-9)
}

fn clock_complaint(pair: &PairOutput) -> Option<String> {
    let complaint = |side: &SideOutput| output::clock_complaint(&side.text).map(str::to_owned);
    complaint(&pair.client).or_else(|| complaint(&pair.server))
}

/// How a run went wrong, if it did: how each side ended and what it said last.
pub(crate) fn hung_or_failed(pair: &PairOutput) -> Option<String> {
    let good = pair.server.end.is_success() && pair.client.end.is_success();
    (!good).then(|| said(pair))
}

fn said(pair: &PairOutput) -> String {
    let side = |name, side: &SideOutput| {
        let words = output::last_words(&side.text);
        match side.end {
            End::NotStarted(_) => format!("{name} {}", side.end),
            _ => format!("{name}: {}, last words: {words}", side.end),
        }
    };
    format!("{}; {}", side("client", &pair.client), side("server", &pair.server))
}

/// The waits of both sides and the served ones among them, from the shims' counters.
fn waits(pair: &PairOutput) -> Option<(u64, u64)> {
    let (client, server) = (&pair.client.shim_log, &pair.server.shim_log);
    let sum = |key| match (counter(client, key), counter(server, key)) {
        (None, None) => None,
        (a, b) => Some(a.unwrap_or(0) + b.unwrap_or(0)),
    };
    Some((sum("waits")?, sum("served")?))
}

/// A counter of the shim's last line `stats key=value …`.
pub(crate) fn counter(log: &str, key: &str) -> Option<u64> {
    let line = log.lines().rev().find(|line| line.split_whitespace().any(|word| word == "stats"))?;
    line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A side that printed `text` and succeeded, busy for half of two seconds.
    pub(in crate::compare) fn side(text: &str) -> SideOutput {
        SideOutput {
            end: End::Exited(0),
            text: text.into(),
            shim_log: String::new(),
            cpu_s: 1.0,
            wall_s: 2.0,
        }
    }

    /// perftest's report of a latency, in cycles.
    pub(in crate::compare) fn report(median: &str, p99: &str) -> String {
        let names = "t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] 99% 99.9%";
        format!(" #bytes #iterations {names}\n 2 1000 1.0 9.0 {median} {median} 0.1 {p99} 9.0\n----\n")
    }

    pub(in crate::compare) fn pair(client: SideOutput) -> PairOutput {
        PairOutput { server: side("waiting\n"), client }
    }

    fn verdict(pair: &PairOutput) -> Result<Sample, Spoiled> {
        judge(Kind::Fastwake, Figure::Latency, pair, 2000.0)
    }

    #[test]
    fn cycles_become_microseconds_and_cpu_a_share_of_the_wall() {
        let sample = verdict(&pair(side(&report("1000.00", "4000.00")))).unwrap();
        assert_eq!((sample.median_us, sample.p99_us), (Some(0.5), Some(2.0)));
        assert_eq!((sample.msgs_per_s, sample.cpu_client_pct), (2e6, 50.0));
        assert_eq!(sample.waits, None);
    }

    #[test]
    fn counters_of_both_shims_are_added() {
        let mut pair = pair(side(&report("1000.00", "4000.00")));
        pair.client.shim_log = "[warn] x\nstats pid=1 waits=10 served=9 made=9\n".into();
        pair.server.shim_log = "stats pid=2 waits=5 served=5 made=5\n".into();
        assert_eq!(verdict(&pair).unwrap().waits, Some((15, 14)));
        assert_eq!(counter(&pair.client.shim_log, "absent"), None);
    }

    #[test]
    fn a_wrong_clock_is_told_from_a_failure_whatever_the_exit_status() {
        let mut client = side(&report("inf", "4000.00"));
        assert!(matches!(verdict(&pair(client.clone())), Err(Spoiled::Clock(_))));
        client.end = End::Exited(1);
        assert!(matches!(verdict(&pair(client.clone())), Err(Spoiled::Clock(_))));
        client.text = "Can't produce a report\n".into();
        assert!(matches!(verdict(&pair(client)), Err(Spoiled::Clock(_))));
    }

    #[test]
    fn a_hang_and_a_failure_say_what_each_side_printed_last() {
        let mut pair = pair(side("connected\n----\n"));
        pair.client.end = End::TimedOut("running".into());
        let Err(Spoiled::Hung(why)) = verdict(&pair) else { panic!("not taken for hung") };
        assert!(why.contains("connected") && why.contains("waiting"), "{why}");
        pair.client.end = End::Exited(1);
        assert!(matches!(verdict(&pair), Err(Spoiled::Failed(_))));
    }

    #[test]
    fn a_report_of_a_run_that_failed_afterwards_does_not_count() {
        let mut pair = pair(side(&report("1000.00", "4000.00")));
        pair.server.end = End::Killed(11);
        assert!(matches!(verdict(&pair), Err(Spoiled::Failed(why)) if why.contains("signal 11")));
    }

    #[test]
    fn a_success_without_a_report_is_a_failure() {
        assert!(matches!(verdict(&pair(side("hello\n"))), Err(Spoiled::Failed(_))));
    }
}

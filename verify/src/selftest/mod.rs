// SPDX-License-Identifier: MIT
//! `fastwaked selftest`: does it work here? The context switch, the libraries, and a loop-back
//! ping-pong of a stock program through the shim over the soft device, whose counters must show
//! that waits were served.
//!
//! It says what does not work and what to do; it measures nothing.

mod pingpong;
mod switch;

use std::fmt::Write;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::libraries::Libraries;
use crate::version::{of_shim, of_softdev, Version, OWN};

/// One test's outcome.
#[derive(Debug, Serialize)]
struct Outcome {
    name: &'static str,
    passed: bool,
    detail: String,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    passed: bool,
    tests: Vec<Outcome>,
}

/// Runs the tests and prints their outcome. The status is 0 where all passed.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn selftest(json: bool) -> Result<ExitCode> {
    let libraries = Libraries::locate();
    let tests = vec![
        outcome("context switch", switch::test()),
        outcome("libraries", versions(&of_shim(&libraries), &of_softdev(&libraries))),
        outcome("ping-pong", pingpong::test(&libraries)),
    ];
    let report = Report { version: OWN, passed: tests.iter().all(|t| t.passed), tests };
    let text = if json { serde_json::to_string_pretty(&report)? + "\n" } else { render(&report) };
    crate::print(&text)?;
    Ok(if report.passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn outcome(name: &'static str, result: Result<String>) -> Outcome {
    match result {
        Ok(detail) => Outcome { name, passed: true, detail },
        Err(error) => Outcome { name, passed: false, detail: format!("{error:#}") },
    }
}

fn versions(shim: &Version, soft: &Version) -> Result<String> {
    match (shim, soft) {
        (Version::Known(_), Version::Known(_)) if !shim.differs() && !soft.differs() => {
            Ok(format!("shim and soft device are of version {OWN}"))
        }
        (Version::Missing(why), _) | (_, Version::Missing(why)) => anyhow::bail!("{why}"),
        _ => anyhow::bail!(
            "shim and soft device are not of version {OWN}; see fastwaked --version, and build all anew"
        ),
    }
}

fn render(report: &Report) -> String {
    let mut out = String::new();
    for test in &report.tests {
        let word = if test.passed { "pass" } else { "FAIL" };
        let _ = writeln!(out, "{word}  {:<14}  {}", test.name, test.detail);
    }
    out.push_str(if report.passed { "FastWake works here\n" } else { "FastWake does not work here\n" });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_must_be_there_and_of_this_version() {
        let own = || Version::Known(OWN.to_owned());
        assert!(versions(&own(), &own()).is_ok());
        assert!(versions(&own(), &Version::Known("0".into())).is_err());
        let error = versions(&Version::Missing("make build".into()), &own()).unwrap_err();
        assert_eq!(error.to_string(), "make build");
    }

    #[test]
    fn one_failure_fails_the_whole_and_says_why() {
        let tests = vec![
            outcome("context switch", Ok("fine".into())),
            outcome("ping-pong", Err(anyhow::anyhow!("no perftest"))),
        ];
        let text = render(&Report { version: OWN, passed: false, tests });
        assert!(text.contains("FAIL  ping-pong") && text.contains("no perftest"), "{text}");
        assert!(text.ends_with("does not work here\n"));
    }
}

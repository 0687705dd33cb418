// SPDX-License-Identifier: MIT
//! `fastwaked runs`: lists, shows and compares recorded runs. It only reads them.

pub(crate) mod diff;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, Context, Result};

use crate::cli::{RunsArgs, RunsCommand};
use crate::compare::result::Comparison;
use crate::compare::table::{self, figure};
use crate::record::{runs_folder, RUNS};

/// Runs the subcommand. A diff with regressions ends with status 1.
///
/// # Errors
/// A run is not there or cannot be read, or two runs cannot be compared.
pub(crate) fn runs(args: &RunsArgs) -> Result<ExitCode> {
    let dir = match &args.dir {
        Some(dir) => dir.clone(),
        None => runs_folder(&std::env::current_dir()?),
    };
    let mut status = ExitCode::SUCCESS;
    let text = match &args.command {
        RunsCommand::List => list(&dir)?,
        RunsCommand::Show { run } => show(&dir, run)?,
        RunsCommand::Diff { a, b } => {
            let diff = diff::diff(&read(&dir, a)?, &read(&dir, b)?)?;
            if diff.regressions() > 0 {
                status = ExitCode::FAILURE;
            }
            diff.render(a, b)
        }
    };
    crate::print(&text)?;
    Ok(status)
}

fn list(dir: &Path) -> Result<String> {
    let entries =
        fs::read_dir(dir).with_context(|| format!("no recorded runs: {} is not there", dir.display()))?;
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().join("result.json").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    if names.is_empty() {
        return Ok(format!("no recorded runs in {}; 'fastwaked compare --record' adds one\n", dir.display()));
    }
    let mut out = Vec::new();
    for name in names {
        // One record that cannot be read must not hide the others.
        match read(dir, &name) {
            Ok(run) => writeln!(out, "{name}  {}", line(&run))?,
            Err(error) => writeln!(out, "{name}  (unreadable: {error:#})")?,
        }
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// A run in a line: test, rounds, and what FastWake reached.
fn line(run: &Comparison) -> String {
    let mut parts = vec![format!("{}, {} rounds", run.command, run.rounds)];
    for r in run.ratios.iter().filter(|r| r.name.starts_with("fastwake/")) {
        parts.push(format!("{} {} {}", r.placement, r.name, figure(r.median)));
    }
    parts.push(run.host.cpu.clone());
    parts.join("; ")
}

fn show(dir: &Path, name: &str) -> Result<String> {
    let folder = folder(dir, name)?;
    let run = read(dir, name)?;
    let command = fs::read_to_string(folder.join("command.txt")).unwrap_or_default();
    let mut out = table::render(&run);
    if !command.is_empty() {
        out = format!("$ {}\n{out}", command.trim());
    }
    out.push_str("\nversions\n");
    for (what, version) in [
        ("fastwake", Some(&run.host.fastwake)),
        ("perftest", run.host.perftest.as_ref()),
        ("rdma-core", run.host.rdma_core.as_ref()),
    ] {
        out.push_str(&format!("  {what} {}\n", version.map_or("unknown", String::as_str)));
    }
    Ok(out)
}

/// The folder of a run: by name, or a path to it.
fn folder(dir: &Path, name: &str) -> Result<PathBuf> {
    let there = [dir.join(name), PathBuf::from(name)].into_iter().find(|p| p.join("result.json").is_file());
    match there {
        Some(folder) => Ok(folder),
        None => bail!("there is no run '{name}' in {}; 'fastwaked runs list' names them", dir.display()),
    }
}

fn read(dir: &Path, name: &str) -> Result<Comparison> {
    let file = folder(dir, name)?.join("result.json");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{RUNS}: {name}: result.json is not a result"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::result::tests::good;

    fn recorded(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir(dir.path().join(name)).unwrap();
            let json = serde_json::to_string(&good()).unwrap();
            fs::write(dir.path().join(name).join("result.json"), json).unwrap();
        }
        dir
    }

    #[test]
    fn runs_are_listed_by_name_with_what_was_reached() {
        let dir = recorded(&["b", "a", ".partial-x"]);
        fs::create_dir(dir.path().join("not-a-run")).unwrap();
        let text = list(dir.path()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(
            lines[0].starts_with("a  ib_send_lat -s 64, 3 rounds; two-cores fastwake/polling 1.071"),
            "{text}"
        );
    }

    #[test]
    fn an_unreadable_run_does_not_hide_the_others() {
        let dir = recorded(&["a", "b"]);
        fs::write(dir.path().join("a/result.json"), "{").unwrap();
        let text = list(dir.path()).unwrap();
        assert!(text.contains("a  (unreadable") && text.contains("b  ib_send_lat"), "{text}");
    }

    #[test]
    fn a_run_is_shown_with_its_command_table_and_versions() {
        let dir = recorded(&["a"]);
        fs::write(dir.path().join("a/command.txt"), "fastwaked compare\n").unwrap();
        let text = show(dir.path(), "a").unwrap();
        assert!(text.starts_with("$ fastwaked compare\n"), "{text}");
        assert!(text.contains("fastwake/event") && text.contains("rdma-core unknown"), "{text}");
    }

    #[test]
    fn a_run_that_is_not_there_says_how_to_find_the_names() {
        let dir = recorded(&["a"]);
        assert!(show(dir.path(), "c").unwrap_err().to_string().contains("runs list"));
    }
}

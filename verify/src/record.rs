// SPDX-License-Identifier: MIT
//! `--record`: a folder of perftest-runs with everything that a comparison was made of.
//!
//! Written under a temporary name and renamed at the end, so that a comparison that is interrupted
//! leaves no half of a record. What is recorded says what the host is and not whose: GIDs hold
//! addresses and are masked, and the command is written anew without paths and host names.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

use crate::compare::result::Comparison;
use crate::compare::rounds::{Run, Watch};
use crate::compare::sample::{Sample, Spoiled};
use crate::compare::table;
use crate::exec::process::SideOutput;
use crate::exec::PairOutput;

/// The folder of recorded runs in a work tree.
pub(crate) const RUNS: &str = "perftest-runs";

/// A record in the making.
pub(crate) struct Recorder {
    parent: PathBuf,
    folder: tempfile::TempDir,
    failure: Option<anyhow::Error>,
}

impl Recorder {
    /// Begins a record in `parent`, which is made where it is not there.
    ///
    /// # Errors
    /// What the file system reports.
    pub(crate) fn begin(parent: PathBuf) -> Result<Self> {
        fs::create_dir_all(parent.join("")).with_context(|| format!("making {}", parent.display()))?;
        let folder = tempfile::Builder::new().prefix(".partial-").tempdir_in(&parent)?;
        fs::create_dir(folder.path().join("raw"))?;
        Ok(Recorder { parent, folder, failure: None })
    }

    /// Completes the record; returns its folder, named by day, device and test.
    ///
    /// # Errors
    /// What the file system reported, now or while the runs came.
    pub(crate) fn complete(mut self, command: &str, result: &Comparison) -> Result<PathBuf> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let at = self.folder.path();
        fs::write(at.join("command.txt"), format!("{command}\n"))?;
        fs::write(at.join("host.json"), json(&result.host)?)?;
        if let Some(client) = &result.client_host {
            fs::write(at.join("client-host.json"), json(client)?)?;
        }
        fs::write(at.join("result.json"), json(result)?)?;
        fs::write(at.join("table.txt"), table::render(result))?;
        let day = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let test = result.command.split_whitespace().next().unwrap_or("test");
        let name = format!("{}-{}-{test}", day.get(..10).unwrap_or(&day), result.device);
        let target = (1..)
            .map(|n| self.parent.join(if n == 1 { name.clone() } else { format!("{name}-{n}") }))
            .find(|path| !path.exists())
            .context("no name is free")?;
        // Its maker's folder is 0700; the record is for everyone who may read the tree.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(at, mode)?;
        fs::rename(self.folder.keep(), &target)?;
        Ok(target)
    }

    fn write(&self, run: Run, output: &PairOutput, verdict: &Result<Sample, Spoiled>) -> Result<()> {
        let name = format!("{}-{}.txt", run.cell.placement, run.cell.kind);
        let path = self.folder.path().join("raw").join(name);
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let said = match verdict {
            Ok(_) => "counts".to_owned(),
            Err(spoiled) => format!("does not count: {}", masked(&spoiled.to_string()).trim_end()),
        };
        writeln!(file, "=== round {} attempt {}: {said}", run.round + 1, run.attempt + 1)?;
        side(&mut file, "server", &output.server)?;
        side(&mut file, "client", &output.client)
    }
}

fn side(file: &mut File, name: &str, side: &SideOutput) -> Result<()> {
    writeln!(file, "--- {name}: {}, cpu {:.3} s, wall {:.3} s", side.end, side.cpu_s, side.wall_s)?;
    file.write_all(masked(&side.text).as_bytes())?;
    for line in side.shim_log.lines().filter(|line| line.contains("stats ")) {
        writeln!(file, "shim: {line}")?;
    }
    Ok(())
}

fn json<T: serde::Serialize>(value: &T) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// perftest's output without GIDs, which hold the addresses of interfaces.
fn masked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        match line.split_once("GID:") {
            Some((before, _)) => out.push_str(&format!("{before}GID: (masked)")),
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

impl Watch for Recorder {
    fn begins(&mut self, _: Run) {}

    fn ended(&mut self, run: Run, output: &PairOutput, verdict: &Result<Sample, Spoiled>) {
        if self.failure.is_none() {
            self.failure = self.write(run, output, verdict).context("recording a run").err();
        }
    }
}

/// The folder of recorded runs: `perftest-runs` in `from` or a folder above it, else where it would
/// be made in `from`.
pub(crate) fn runs_folder(from: &Path) -> PathBuf {
    from.ancestors().map(|dir| dir.join(RUNS)).find(|dir| dir.is_dir()).unwrap_or_else(|| from.join(RUNS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::cell::{Cell, Kind, Placement};
    use crate::compare::result::tests::good;
    use crate::exec::process::End;

    fn output() -> PairOutput {
        let side = |text: &str| SideOutput {
            end: End::Exited(0),
            text: text.into(),
            shim_log: "warn x\nstats pid=1 waits=2\n".into(),
            cpu_s: 0.5,
            wall_s: 1.0,
        };
        PairOutput { server: side(" GID: 00:00:10:20\nserver says\n"), client: side("client says\n") }
    }

    fn record(parent: &Path) -> PathBuf {
        let mut recorder = Recorder::begin(parent.to_path_buf()).unwrap();
        let cell = Cell { kind: Kind::Event, placement: Placement::TwoCores };
        let clock = Err(Spoiled::Clock("inf".into()));
        recorder.ended(Run { round: 0, cell, attempt: 0 }, &output(), &clock);
        recorder.ended(Run { round: 0, cell, attempt: 1 }, &output(), &clock);
        recorder.complete("fastwaked compare -- ib_send_lat", &good()).unwrap()
    }

    #[test]
    fn a_record_holds_command_host_result_and_both_raw_outputs() {
        let parent = tempfile::tempdir().unwrap();
        let folder = record(parent.path());
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        assert!(folder.file_name().unwrap().to_str().unwrap().ends_with("-fw_soft0-ib_send_lat"));
        assert_eq!(read("command.txt"), "fastwaked compare -- ib_send_lat\n");
        assert_eq!(serde_json::from_str::<Comparison>(&read("result.json")).unwrap(), good());
        assert!(read("host.json").contains("A CPU"));
        let raw = read("raw/two-cores-event.txt");
        assert!(
            raw.contains("server says") && raw.contains("client says") && raw.contains("attempt 2"),
            "{raw}"
        );
        assert!(raw.contains("shim: stats pid=1 waits=2"), "{raw}");
        assert!(!raw.contains("10:20"), "{raw}");
    }

    #[test]
    fn records_are_added_and_never_overwritten_and_leave_nothing_half_done() {
        let parent = tempfile::tempdir().unwrap();
        let (a, b) = (record(parent.path()), record(parent.path()));
        assert_eq!(
            b.file_name().unwrap().to_str().unwrap(),
            format!("{}-2", a.file_name().unwrap().to_str().unwrap())
        );
        drop(Recorder::begin(parent.path().to_path_buf()).unwrap());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 2);
    }

    #[test]
    fn the_folder_of_runs_is_found_from_below() {
        let top = tempfile::tempdir().unwrap();
        let below = top.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        assert_eq!(runs_folder(&below), below.join(RUNS));
        fs::create_dir(top.path().join(RUNS)).unwrap();
        assert_eq!(runs_folder(&below), top.path().join(RUNS));
    }
}

// SPDX-License-Identifier: MIT
//! Where the tests of this folder run programs: with or without the shim, on the soft device or on
//! the scripted libibverbs, under a limit of time, with what they said and counted.
//!
//! A library or program that is missing ends the test with what to do about it; nothing is skipped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a program may take before it counts as hanging. The longest takes half a second alone.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// Programs whose own clock fails when they are disturbed run alone; the rest run side by side.
static MACHINE: RwLock<()> = RwLock::new(());

fn shared() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Nothing that [`Run::run`] starts runs while this is held.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(PoisonError::into_inner)
}

/// The folder with the built libraries: `FASTWAKE_LIBDIR`, else the release folder of this tree.
pub(crate) fn libraries() -> PathBuf {
    let folder = std::env::var_os("FASTWAKE_LIBDIR")
        .map(PathBuf::from)
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release"));
    let folder = folder
        .canonicalize()
        .unwrap_or_else(|error| panic!("{}: {error}; run 'make build' first", folder.display()));
    assert!(
        folder.join("libfastwake_shim.so").exists(),
        "no libfastwake_shim.so in {}; run 'make build' first",
        folder.display()
    );
    folder
}

/// A program of verify/apps or, by `scripted/NAME`, of verify/fake/scripted.
pub(crate) fn app(name: &str) -> PathBuf {
    let path = libraries().join("apps").join(name);
    assert!(path.exists(), "no {}; run 'make build' first", path.display());
    path
}

/// What a program finds as its RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// `fw_soft0`, by preloading the soft device.
    Soft,
    /// A device of the scripted libibverbs, which takes the place of the real one.
    Fake(&'static str),
    /// None at all.
    None,
}

impl Device {
    /// The name by which programs open it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Device::Soft => "fw_soft0",
            Device::Fake(name) => name,
            Device::None => "none",
        }
    }
}

/// Settings of the shim, or no shim at all.
pub(crate) type Shim<'a> = Option<&'a [(&'a str, &'a str)]>;

/// A program to be run.
pub(crate) struct Run<'a> {
    /// Path or name of the program, and its arguments.
    pub(crate) command: Vec<OsString>,
    /// See [`Device`].
    pub(crate) device: Device,
    /// See [`Shim`].
    pub(crate) shim: Shim<'a>,
    /// Run as this user and group (needs root).
    pub(crate) user: Option<u32>,
}

/// What became of it.
#[derive(Debug)]
pub(crate) struct Ran {
    /// `None` if it was stopped at the limit.
    pub(crate) status: Option<ExitStatus>,
    /// Standard output.
    pub(crate) output: String,
    /// Standard error.
    pub(crate) errors: String,
    /// The counters of the last process that wrote them (`FW_STATS`), by name; empty without.
    pub(crate) stats: BTreeMap<String, u64>,
    /// The shim's log, counters included.
    pub(crate) log: String,
}

impl Ran {
    /// Exit status, or why there is none, in words.
    pub(crate) fn end(&self) -> String {
        self.status.map_or("it hung".to_owned(), |status| status.to_string())
    }

    /// A counter; 0 if it was not written.
    pub(crate) fn count(&self, name: &str) -> u64 {
        self.stats.get(name).copied().unwrap_or(0)
    }
}

/// A program that runs, with the files that it writes to.
pub(crate) struct Running {
    child: Child,
    folder: TempDir,
    started: Instant,
}

impl<'a> Run<'a> {
    /// `command` on `device`, with the shim or without.
    pub(crate) fn new(
        command: impl IntoIterator<Item = impl Into<OsString>>,
        device: Device,
        shim: Shim<'a>,
    ) -> Run<'a> {
        Run { command: command.into_iter().map(Into::into).collect(), device, shim, user: None }
    }

    /// Starts it in a process group of its own.
    pub(crate) fn start(&self) -> Running {
        let libraries = libraries();
        let folder = TempDir::new().expect("a temporary folder");
        let mut command = Command::new(&self.command[0]);
        command.args(&self.command[1..]);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FW_") {
                command.env_remove(name);
            }
        }
        command.env_remove("LD_LIBRARY_PATH");
        let mut preload = Vec::new();
        if let Some(settings) = self.shim {
            preload.push(libraries.join("libfastwake_shim.so"));
            command.env("FW_LOG_FILE", folder.path().join("log"));
            command.env("FW_STATS", "1");
            command.envs(settings.iter().copied());
        }
        match self.device {
            Device::Soft => preload.push(libraries.join("libfastwake_softdev.so")),
            Device::Fake(_) => {
                command.env("LD_LIBRARY_PATH", libraries.join("apps/fake"));
            }
            Device::None => {}
        }
        let preload: Vec<String> = preload.iter().map(|path| path.display().to_string()).collect();
        if preload.is_empty() {
            command.env_remove("LD_PRELOAD");
        } else {
            command.env("LD_PRELOAD", preload.join(":"));
        }
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        let file = |name| File::create(folder.path().join(name)).expect("a file in it");
        let child = command
            .stdin(Stdio::null())
            .stdout(file("output"))
            .stderr(file("errors"))
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.command[0]));
        Running { child, folder, started: Instant::now() }
    }

    /// Runs it to its end, or to the limit.
    pub(crate) fn run(&self) -> Ran {
        let _beside_others = shared();
        self.start().wait()
    }
}

impl Running {
    /// Sends `signal` to the program and what it started.
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: the group is that of the child, which has not been waited for.
        unsafe { libc::kill(-(self.child.id() as i32), signal) };
    }

    /// Waits for its end, or for the limit.
    pub(crate) fn wait(mut self) -> Ran {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child of ours") {
                break Some(status);
            }
            if self.started.elapsed() > LIMIT {
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        // SAFETY: the group is that of the child, which has not been forgotten yet. Whatever it
        // left behind goes too.
        unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
        if status.is_none() {
            self.child.wait().expect("a child of ours");
        }
        let text = |name: &str| {
            let bytes = fs::read(self.folder.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let log = text("log");
        Ran { status, output: text("output"), errors: text("errors"), stats: stats(&log), log }
    }
}

/// The last `stats key=value ...` line of a log.
fn stats(log: &str) -> BTreeMap<String, u64> {
    let Some(line) = log.lines().rev().find_map(|line| line.split_once("stats ")) else {
        return BTreeMap::new();
    };
    line.1
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='))
        .filter_map(|(key, value)| Some((key.to_owned(), value.parse().ok()?)))
        .collect()
}

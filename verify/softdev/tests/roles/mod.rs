// SPDX-License-Identifier: MIT
//! Plays a test in several processes that have the soft device preloaded.
//!
//! A test calls [`play`] with one function per process. In the test runner, `play` starts the test
//! binary anew for each of them, with the library preloaded and a folder of segments of the test's
//! own; there, it runs the function and exits. The processes reach each other over a [`Link`].
//! A process that takes longer than [`LIMIT`] has hung, which fails the test.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest that any process of a test may take.
const LIMIT: Duration = Duration::from_secs(120);

/// One process of a test.
pub(crate) struct Role {
    body: fn(&mut Links),
    env: Vec<(&'static str, String)>,
    killed: bool,
    waits: bool,
}

/// A process that runs `body` and must succeed.
#[allow(dead_code, reason = "not every test file needs all of it")]
pub(crate) fn role(body: fn(&mut Links)) -> Role {
    Role { body, env: Vec::new(), killed: false, waits: false }
}

#[allow(dead_code, reason = "not every test file needs all of it")]
impl Role {
    /// Sets an environment variable.
    pub(crate) fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// Says that the process is not started with the others, but by [`Links::start`].
    pub(crate) fn on_demand(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Says that the process will be killed with SIGKILL.
    pub(crate) fn killed(mut self) -> Self {
        self.killed = true;
        self
    }
}

/// The connections of a process to the others: role 0 has one to each, the others have one, to
/// role 0.
pub(crate) struct Links {
    streams: Vec<UnixStream>,
    /// Which role this process plays.
    pub(crate) me: usize,
    /// The folder of segments.
    pub(crate) folder: PathBuf,
}

#[allow(dead_code, reason = "not every test file needs all of it")]
impl Links {
    /// The connection to role `other` (for role 0) or to role 0.
    fn stream(&mut self, other: usize) -> &mut UnixStream {
        let index = if self.me == 0 { other - 1 } else { 0 };
        &mut self.streams[index]
    }

    /// Sends words to a role.
    pub(crate) fn tell(&mut self, other: usize, words: &[u64]) {
        for word in words {
            self.stream(other).write_all(&word.to_ne_bytes()).expect("the other role listens");
        }
    }

    /// Receives `N` words from a role.
    pub(crate) fn hear<const N: usize>(&mut self, other: usize) -> [u64; N] {
        std::array::from_fn(|_| {
            let mut bytes = [0; 8];
            self.stream(other).read_exact(&mut bytes).expect("the other role talks");
            u64::from_ne_bytes(bytes)
        })
    }

    /// Starts role `other` of the test `name`, one of those on demand. Returns its process and the
    /// connection to it, on which it is the role 1 of this role 0.
    pub(crate) fn start(&self, name: &str, other: usize) -> (Child, Links) {
        let (here, there) = UnixStream::pair().expect("sockets");
        let child = Command::new(std::env::current_exe().expect("own name"))
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env("FASTWAKE_ROLE", other.to_string())
            .env("FASTWAKE_DEMAND", "1")
            .stdin(std::os::fd::OwnedFd::from(there))
            .stdout(Stdio::null())
            .spawn()
            .expect("a role's process");
        (child, Links { streams: vec![here], me: 0, folder: self.folder.clone() })
    }

    /// Waits until both of two roles are here.
    pub(crate) fn meet(&mut self, other: usize) {
        self.tell(other, &[0x6d65_6574]);
        assert_eq!(self.hear::<1>(other), [0x6d65_6574]);
    }
}

/// Where the built libraries are.
pub(crate) fn library() -> PathBuf {
    let dir = std::env::var_os("FASTWAKE_LIBDIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/release"), PathBuf::from);
    let library = dir.join("libfastwake_softdev.so");
    assert!(library.exists(), "{} is not there: run `make build` first", library.display());
    library
}

/// How many times as much to do: FASTWAKE_LONG=1 asks for the long run.
#[allow(dead_code, reason = "not every test file needs all of it")]
pub(crate) fn effort(quick: u32, long: u32) -> u32 {
    if std::env::var_os("FASTWAKE_LONG").is_some_and(|v| v == "1") {
        long
    } else {
        quick
    }
}

/// Plays the test `name` like [`play`], with a /dev/shm of its own of `size`. Needs the right to
/// mount, in a user namespace if need be.
#[allow(dead_code, reason = "not every test file needs all of it")]
pub(crate) fn play_in_small_shm(name: &str, size: &str, roles: &[Role]) {
    if std::env::var_os("FASTWAKE_ROLE").is_some() || std::env::var_os("FASTWAKE_SMALL").is_some() {
        return play(name, roles);
    }
    // SAFETY: cannot fail.
    let flags = if unsafe { libc::geteuid() } == 0 { "-m" } else { "-rm" };
    let mount = format!(r#"mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm && exec "$0" "$@""#);
    let status = Command::new("unshare")
        .args([flags, "sh", "-c", &mount])
        .arg(std::env::current_exe().expect("own name"))
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env("FASTWAKE_SMALL", "1")
        .stdout(Stdio::null())
        .status()
        .expect("unshare(1) is there");
    assert!(status.success(), "{name} in a /dev/shm of {size}: {status}");
}

/// Plays the test `name`, which must be the name of the calling test function.
pub(crate) fn play(name: &str, roles: &[Role]) {
    match std::env::var("FASTWAKE_ROLE") {
        Ok(me) => perform(me.parse().expect("a role's number"), roles),
        Err(_) => direct(name, roles),
    }
}

/// In a role's process.
fn perform(me: usize, roles: &[Role]) {
    let folder = PathBuf::from(std::env::var_os("FASTWAKE_STAGE").expect("a stage"));
    let hub = folder.join("hub");
    let others = roles.iter().skip(1).filter(|role| !role.waits).count();
    let streams = if std::env::var_os("FASTWAKE_DEMAND").is_some() {
        // SAFETY: standard input is the socket that `start` put there; nobody else uses it.
        vec![unsafe { std::os::fd::FromRawFd::from_raw_fd(0) }]
    } else if me == 0 {
        let listener = UnixListener::bind(folder.join("hub.new")).expect("hub");
        std::fs::rename(folder.join("hub.new"), &hub).expect("hub's name");
        let mut streams: Vec<Option<UnixStream>> = (0..others).map(|_| None).collect();
        for _ in 0..others {
            let (mut stream, _) = listener.accept().expect("a role connects");
            let mut index = [0];
            stream.read_exact(&mut index).expect("a role's number");
            streams[index[0] as usize - 1] = Some(stream);
        }
        streams.into_iter().map(|s| s.expect("each role once")).collect()
    } else {
        let mut stream = loop {
            match UnixStream::connect(&hub) {
                Ok(stream) => break stream,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        stream.write_all(&[me as u8]).expect("hub");
        vec![stream]
    };
    let mut links = Links { streams, me, folder: folder.join("soft") };
    (roles[me].body)(&mut links);
    // The output of the runner in this process would only confuse.
    std::process::exit(0);
}

/// In the test runner.
fn direct(name: &str, roles: &[Role]) {
    let library = library();
    let stage = tempfile::Builder::new().prefix("fwsoft").tempdir_in("/dev/shm").expect("stage in /dev/shm");
    // Processes under another user must get in.
    std::process::Command::new("chmod").arg("711").arg(stage.path()).status().expect("chmod");
    let mut actors: Vec<(usize, Child)> = roles
        .iter()
        .enumerate()
        .filter(|(_, role)| !role.waits)
        .map(|(me, role)| {
            let mut command = Command::new(std::env::current_exe().expect("own name"));
            command
                .args(["--exact", name, "--nocapture", "--test-threads=1"])
                .env("FASTWAKE_ROLE", me.to_string())
                .env("FASTWAKE_STAGE", stage.path())
                .env("FW_SOFT_DIR", stage.path().join("soft"))
                .env("LD_PRELOAD", &library)
                .stdout(Stdio::null());
            command.envs(role.env.iter().map(|(k, v)| (*k, v)));
            (me, command.spawn().expect("a role's process"))
        })
        .collect();
    let began = Instant::now();
    let mut failures = Vec::new();
    while !actors.is_empty() {
        actors.retain_mut(|(me, child)| {
            let Some(status) = child.try_wait().expect("wait") else { return true };
            let right = if roles[*me].killed { status.signal() == Some(9) } else { status.success() };
            if !right {
                failures.push(format!("role {me} ended with {status}"));
            }
            false
        });
        if began.elapsed() > LIMIT || !failures.is_empty() {
            // One that failed leaves the others waiting for it.
            if failures.is_empty() {
                failures.push(format!("roles {:?} hang", actors.iter().map(|a| a.0).collect::<Vec<_>>()));
            }
            for (_, child) in &mut actors {
                let _ = child.kill();
                let _ = child.wait();
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(failures.is_empty(), "{name}: {}", failures.join(", "));
}

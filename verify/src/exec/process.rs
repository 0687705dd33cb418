// SPDX-License-Identifier: MIT
//! One child process: started, waited for with a time-out, and accounted for.
//!
//! Used for both sides of a run, on this host and in the agent. A child's output goes to an
//! unlinked file, so that nothing of this process runs while a measurement does. Children die with
//! the thread that started them; none is ever left behind.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::interrupt;

/// Most output that is kept of one process, in bytes; a perftest prints two thousand.
const OUTPUT_LIMIT: u64 = 256 * 1024;

/// What to start.
#[derive(Clone, Debug, Default)]
pub(crate) struct Launch {
    /// The program: a path, or a name to be looked up in `PATH`.
    pub program: OsString,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Variables to set.
    pub env: Vec<(&'static str, OsString)>,
    /// Variables to take away.
    pub unset: Vec<&'static str>,
    /// The CPU to bind it to.
    pub cpu: Option<usize>,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// It returned this status.
    Exited(i32),
    /// This signal killed it.
    Killed(i32),
    /// It hung, doing this, and was killed.
    TimedOut(String),
    /// It could not be started, for this reason.
    NotStarted(String),
}

impl End {
    /// Whether it ended with status 0.
    pub(crate) fn is_success(&self) -> bool {
        *self == End::Exited(0)
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exited(status) => write!(f, "exit status {status}"),
            End::Killed(signal) => write!(f, "killed by signal {signal}"),
            End::TimedOut(doing) => write!(f, "hung ({doing}) and was killed"),
            End::NotStarted(why) => write!(f, "could not be started: {why}"),
        }
    }
}

/// What one side of a run left behind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SideOutput {
    /// How it ended.
    pub end: End,
    /// Its standard output and standard error, in the order written.
    pub text: String,
    /// The shim's log, where the shim was loaded.
    pub shim_log: String,
    /// CPU time used, user and system, in seconds.
    pub cpu_s: f64,
    /// Time from start to end in seconds.
    pub wall_s: f64,
}

impl SideOutput {
    /// A side that never ran.
    pub(crate) fn not_started(why: impl std::fmt::Display) -> Self {
        SideOutput {
            end: End::NotStarted(why.to_string()),
            text: String::new(),
            shim_log: String::new(),
            cpu_s: 0.0,
            wall_s: 0.0,
        }
    }
}

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Child {
    pid: libc::pid_t,
    pidfd: OwnedFd,
    started: Instant,
    output: File,
    reaped: bool,
}

impl Child {
    /// Starts a process.
    ///
    /// # Errors
    /// What fork, exec, the affinity or the file for the output report.
    pub(crate) fn start(launch: &Launch) -> io::Result<Self> {
        let output = tempfile::tempfile()?;
        let mut command = Command::new(&launch.program);
        command.args(&launch.args).stdin(std::process::Stdio::null());
        command.stdout(output.try_clone()?).stderr(output.try_clone()?);
        for name in &launch.unset {
            command.env_remove(name);
        }
        command.envs(launch.env.iter().map(|(name, value)| (name, value)));
        let cpus = launch.cpu.map(CpuSet::one);
        let before_exec = move || {
            // SAFETY: a system call with integers only; fit for the time after fork.
            if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
                return Err(io::Error::last_os_error());
            }
            cpus.map_or(Ok(()), |cpus| cpus.apply())
        };
        // SAFETY: the closure makes two system calls and neither allocates nor locks, as code
        // between fork and exec must not.
        unsafe { command.pre_exec(before_exec) };
        let started = Instant::now();
        // The handle is let go without being waited for: wait4 below takes the resource usage too.
        let pid = command.spawn()?.id() as libc::pid_t;
        // SAFETY: a system call with integers only; the result is checked.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if fd < 0 {
            let error = io::Error::last_os_error();
            // SAFETY: `pid` is our own child and not yet waited for, so it names no other process.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            return Err(error);
        }
        // SAFETY: the kernel has just given us this descriptor, and nothing else owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        Ok(Child { pid, pidfd, started, output, reaped: false })
    }

    /// What the process is doing, for the report of a hang: `running`, or asleep and in which
    /// function of the kernel. What it printed may still lie in its own buffer.
    fn doing(&self) -> String {
        let read =
            |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", self.pid)).unwrap_or_default();
        // The state stands behind the name, which may hold anything but ends at the last bracket.
        let stat = read("stat");
        let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
        match (state, read("wchan")) {
            (Some('R'), _) => "running".to_owned(),
            (_, place) if place.chars().any(char::is_alphabetic) => format!("asleep in {place}"),
            _ => "asleep".to_owned(),
        }
    }

    /// Waits until the process has ended or `deadline` has passed; says whether it has ended.
    pub(crate) fn ended_by(&self, deadline: Instant) -> bool {
        wait_any(&[self], deadline)
    }

    /// Waits until `deadline`, kills what still runs, and returns what the process left.
    pub(crate) fn finish(mut self, deadline: Instant) -> SideOutput {
        let in_time = self.ended_by(deadline);
        let doing = if in_time { String::new() } else { self.doing() };
        if !in_time {
            self.kill();
        }
        let (status, cpu) = self.reap();
        let wall = self.started.elapsed();
        let end = match status {
            None => End::NotStarted("its exit status was lost".to_owned()),
            Some(_) if !in_time => End::TimedOut(doing),
            Some(status) if libc::WIFSIGNALED(status) => End::Killed(libc::WTERMSIG(status)),
            Some(status) => End::Exited(libc::WEXITSTATUS(status)),
        };
        let mut bytes = Vec::new();
        let read =
            self.output.rewind().and_then(|()| (&self.output).take(OUTPUT_LIMIT).read_to_end(&mut bytes));
        if let Err(error) = read {
            log::warn!("the output of a run could not be read: {error}");
        }
        SideOutput {
            end,
            text: String::from_utf8_lossy(&bytes).into_owned(),
            shim_log: String::new(),
            cpu_s: cpu.as_secs_f64(),
            wall_s: wall.as_secs_f64(),
        }
    }

    fn kill(&self) {
        // SAFETY: the process is our child and not yet reaped, so the id names it and no other.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// Takes the exit status and the CPU time of a process that has ended or been killed.
    fn reap(&mut self) -> (Option<i32>, Duration) {
        let mut status = 0;
        // SAFETY: rusage is a plain structure of integers, for which all zeroes are a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        let got = loop {
            // SAFETY: the pointers are to locals that the call fills; the process is our own child.
            let got = unsafe { libc::wait4(self.pid, &mut status, 0, &mut usage) };
            if got >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break got;
            }
        };
        self.reaped = true;
        let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
        ((got == self.pid).then_some(status), time(usage.ru_utime) + time(usage.ru_stime))
    }
}

/// Waits until one of the processes has ended or `deadline` has passed; says whether one has. A
/// comparison that is interrupted waits no longer.
pub(crate) fn wait_any(children: &[&Child], deadline: Instant) -> bool {
    let fd = |child: &&Child| libc::pollfd { fd: child.pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut fds: Vec<libc::pollfd> = children.iter().map(fd).collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ms = left.as_millis().min(60_000) as i32 + i32::from(!left.is_zero());
        // SAFETY: the pointer and the count describe a live vector, whose entries the call updates.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, ms) };
        if ready > 0 || left.is_zero() || interrupt::happened() {
            return ready > 0;
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill();
            self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Launch {
        Launch { program: "sh".into(), args: vec!["-c".into(), script.into()], ..Launch::default() }
    }

    fn soon(ms: u64) -> Instant {
        Instant::now() + Duration::from_millis(ms)
    }

    #[test]
    fn both_streams_are_kept_in_order_with_the_status() {
        let child = Child::start(&shell("echo one; echo two >&2; echo three; exit 7")).unwrap();
        let output = child.finish(soon(10_000));
        assert_eq!(output.text, "one\ntwo\nthree\n");
        assert_eq!(output.end, End::Exited(7));
    }

    #[test]
    fn a_process_that_hangs_is_killed_and_what_it_printed_is_kept() {
        let child = Child::start(&shell("echo before; exec sleep 600")).unwrap();
        let pid = child.pid;
        assert!(!child.ended_by(soon(300)));
        let output = child.finish(soon(0));
        assert!(matches!(&output.end, End::TimedOut(doing) if doing.starts_with("asleep")), "{output:?}");
        assert_eq!(output.text, "before\n");
        // SAFETY: signal 0 only asks whether the process exists.
        assert_eq!(unsafe { libc::kill(pid, 0) }, -1, "it is still there");
    }

    #[test]
    fn a_dropped_child_is_killed() {
        let child = Child::start(&shell("exec sleep 600")).unwrap();
        let pid = child.pid;
        drop(child);
        // SAFETY: signal 0 only asks whether the process exists.
        assert_eq!(unsafe { libc::kill(pid, 0) }, -1, "it is still there");
    }

    #[test]
    fn cpu_time_is_that_of_the_child_alone() {
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let output = Child::start(&shell(script)).unwrap().finish(soon(60_000));
        assert!(output.end.is_success());
        assert!(output.cpu_s > 0.0, "{output:?}");
    }

    #[test]
    fn it_runs_on_its_cpu_and_with_its_variables() {
        let cpu = *crate::cpus::allowed().last().unwrap();
        let mut launch = shell("grep Cpus_allowed_list /proc/self/status; echo $FW_MODE$FW_IDLE");
        launch.cpu = Some(cpu);
        launch.env = vec![("FW_MODE", "off".into()), ("FW_IDLE", "busy".into())];
        let output = Child::start(&launch).unwrap().finish(soon(10_000));
        let words: Vec<_> = output.text.split_whitespace().collect();
        assert_eq!(words, ["Cpus_allowed_list:", &cpu.to_string(), "offbusy"]);
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let launch = Launch { program: "no-such-program-here".into(), ..Launch::default() };
        assert_eq!(Child::start(&launch).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

// SPDX-License-Identifier: MIT
//! The log of a preload library: whole lines, from a fixed buffer, to the right descriptor or nowhere.
//!
//! A preload lives in somebody else's process: it may not allocate to write a line, may not use a
//! descriptor that the application has since given another meaning, and stays silent below `warn`
//! unless it is asked. The filter has env_logger's syntax.

use std::fmt::Write as _;
use std::os::fd::RawFd;
use std::path::Path;

use env_logger::filter::{Builder, Filter};
use log::{Log, Metadata, Record};
use once_cell::sync::OnceCell;

use crate::settings::{c_path, Settings};

/// Descriptors that we keep lie here or above, so that the application's own numbers stay the same.
const HIGH_FD: RawFd = 512;

/// A line that does not fit is cut.
const LINE: usize = 1024;

struct Logger {
    filter: Filter,
    out: Out,
    prefix: &'static str,
}

static LOGGER: OnceCell<Logger> = OnceCell::new();

/// Standard error as it was when the library was loaded. Later its number may mean something else.
static STDERR: OnceCell<Option<(libc::dev_t, libc::ino_t)>> = OnceCell::new();

/// Remembers what standard error is; to be called as early as can be. Later calls change nothing.
pub fn remember_stderr() {
    STDERR.get_or_init(|| identity(libc::STDERR_FILENO));
}

/// Starts the log of this process; `prefix` begins each line. Later calls change nothing.
pub fn start(settings: &Settings, prefix: &'static str) {
    let logger = LOGGER.get_or_init(|| Logger {
        filter: Builder::new().parse(&settings.log_level).build(),
        out: match &settings.log_file {
            Some(path) => Out::file(path),
            None => Out::stderr(),
        },
        prefix,
    });
    // An application that has installed a logger of its own links its own copy of `log`.
    if log::set_logger(logger).is_ok() {
        log::set_max_level(logger.filter.filter());
    }
}

/// Writes one line whatever the filter says: the counters at exit, and errors before there is a log.
pub fn line(args: std::fmt::Arguments<'_>) {
    match LOGGER.get() {
        Some(logger) => logger.out.write(logger.prefix, "", args),
        None => Out::stderr().write("fastwake: ", "", args),
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.filter.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if self.filter.matches(record) {
            self.out.write(self.prefix, level_word(record.level()), *record.args());
        }
    }

    fn flush(&self) {}
}

fn level_word(level: log::Level) -> &'static str {
    match level {
        log::Level::Error => "error: ",
        log::Level::Warn => "warning: ",
        log::Level::Info => "info: ",
        log::Level::Debug => "debug: ",
        log::Level::Trace => "trace: ",
    }
}

/// A descriptor together with the file that it meant when we took it.
struct Out {
    fd: RawFd,
    file: Option<(libc::dev_t, libc::ino_t)>,
}

impl Out {
    fn stderr() -> Self {
        Out { fd: libc::STDERR_FILENO, file: *STDERR.get_or_init(|| identity(libc::STDERR_FILENO)) }
    }

    /// Opens `path` for appending; where that fails, standard error, with a line that says so.
    fn file(path: &Path) -> Self {
        let low = c_path(path).map_or(-1, |path| {
            // Not blocking, or a FIFO without a reader would keep the program from its start.
            let flags = libc::O_WRONLY
                | libc::O_APPEND
                | libc::O_CREAT
                | libc::O_CLOEXEC
                | libc::O_NOCTTY
                | libc::O_NONBLOCK;
            // SAFETY: a NUL-terminated path; open has no other precondition.
            unsafe { libc::open(path.as_ptr(), flags, 0o600) }
        });
        if low < 0 {
            let error = std::io::Error::last_os_error();
            let out = Out::stderr();
            out.write(
                "fastwake: ",
                "warning: ",
                format_args!(
                    "FW_LOG_FILE={} cannot be opened ({error}); using standard error",
                    path.display()
                ),
            );
            return out;
        }
        // SAFETY: `low` is ours; F_DUPFD_CLOEXEC gives a new descriptor at or above HIGH_FD.
        let high = unsafe { libc::fcntl(low, libc::F_DUPFD_CLOEXEC, HIGH_FD) };
        if high < 0 {
            return Out { fd: low, file: identity(low) };
        }
        // SAFETY: `low` is ours and has been duplicated.
        unsafe { libc::close(low) };
        Out { fd: high, file: identity(high) }
    }

    /// Writes one line in one write(2), if the descriptor still means the same file. errno is kept.
    fn write(&self, prefix: &str, level: &str, args: std::fmt::Arguments<'_>) {
        // SAFETY: errno's address is valid for the life of the thread.
        let errno = unsafe { *libc::__errno_location() };
        if self.file.is_some() && identity(self.fd) == self.file {
            let mut line = Line { bytes: [0; LINE], used: 0 };
            // A cut line is still a line: the error of a full buffer carries no more than that.
            let _ = write!(line, "{prefix}{level}{args}");
            line.end();
            // Not write(), which is a cancellation point: the caller may hold locks.
            // SAFETY: the buffer holds `used` initialised bytes.
            without_sigpipe(|| unsafe {
                libc::syscall(libc::SYS_write, self.fd, line.bytes.as_ptr(), line.used);
            });
        }
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
    }
}

/// Runs `f`; a SIGPIPE that it causes is taken back, as the program did nothing to deserve it.
fn without_sigpipe(f: impl FnOnce()) {
    // SAFETY: sets of our own; the thread's mask is put back. A SIGPIPE that was pending before is
    // the program's and stays.
    unsafe {
        let (mut pipe, mut old, mut pending) = (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut pipe);
        libc::sigaddset(&mut pipe, libc::SIGPIPE);
        libc::sigpending(&mut pending);
        if libc::sigismember(&pending, libc::SIGPIPE) == 1 {
            return f();
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &pipe, &mut old);
        f();
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        libc::sigtimedwait(&pipe, std::ptr::null_mut(), &none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut());
    }
}

fn identity(fd: RawFd) -> Option<(libc::dev_t, libc::ino_t)> {
    // SAFETY: stat is plain data, and fstat fills it or fails.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        (libc::fstat(fd, &mut stat) == 0).then_some((stat.st_dev, stat.st_ino))
    }
}

struct Line {
    bytes: [u8; LINE],
    used: usize,
}

impl Line {
    fn end(&mut self) {
        self.used = self.used.min(LINE - 1);
        self.bytes[self.used] = b'\n';
        self.used += 1;
    }
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = (LINE - 1).saturating_sub(self.used);
        let taken = text.len().min(room);
        self.bytes[self.used..self.used + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.used += taken;
        if taken == text.len() {
            Ok(())
        } else {
            Err(std::fmt::Error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_does_not_fit_is_cut_and_ended() {
        let mut line = Line { bytes: [0; LINE], used: 0 };
        assert!(write!(line, "{}", "x".repeat(3000)).is_err());
        line.end();
        assert_eq!((line.used, line.bytes[LINE - 1]), (LINE, b'\n'));
    }

    #[test]
    fn a_descriptor_that_now_means_another_file_is_not_written_to() {
        let mut fds = [0; 2];
        // SAFETY: `fds` has room for the two descriptors of a pipe.
        assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) }, 0);
        let out = Out { fd: fds[1], file: Some((0, 0)) };
        out.write("p ", "", format_args!("hidden"));
        let seen = Out { fd: fds[1], file: identity(fds[1]) };
        seen.write("p ", "info: ", format_args!("shown {}", 1));
        let mut got = [0u8; 64];
        // SAFETY: the buffer has 64 bytes.
        let n = unsafe { libc::read(fds[0], got.as_mut_ptr().cast(), 64) };
        assert_eq!(&got[..n as usize], b"p info: shown 1\n");
    }
}

// SPDX-License-Identifier: MIT
//! The raw baselines: what the machine itself takes for a message, with no verbs in between.
//!
//! `raw-shm` is a cache line on which both sides spin: the floor of polling. `raw-pipe` is a byte
//! string through a pipe on which both sides sleep: the floor of event mode. They are the yardstick
//! of the other rows, so they do as little as possible and are measured as perftest measures: the
//! client reads the cycle counter once for each round trip, and half of the difference is one way.
//!
//! `compare` starts one process for each side; they meet in a folder that both are given.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::cli::{Medium, RawPeerArgs, RawSide};
use crate::clock::cycles;

/// The shared page, and the FIFO of each direction.
const PAGE: &str = "page";
const TO_SERVER: &str = "to-server";
const TO_CLIENT: &str = "to-client";

/// How long both sides spin before they measure. perftest does so too, to calibrate its clock: without
/// it the rows would find the cores in different states, with other clocks, and virtual CPUs in other
/// places of the host, since a hypervisor moves those that have just woken.
const WARM_UP: Duration = Duration::from_millis(350);

/// Longest wait for the other side to appear, in yields of the core; some seconds.
const MEETING_YIELDS: u32 = 20_000_000;

/// Makes in `dir` what both sides open.
///
/// # Errors
/// What the file system reports.
pub(crate) fn prepare(dir: &Path) -> Result<()> {
    File::create(dir.join(PAGE))?.set_len(4096)?;
    for name in [TO_SERVER, TO_CLIENT] {
        let path = fastwake::settings::c_path(&dir.join(name)).context("a path with a NUL in it")?;
        // SAFETY: the path is a NUL-terminated string that lives through the call.
        if unsafe { libc::mkfifo(path.as_ptr(), 0o600) } != 0 {
            return Err(std::io::Error::last_os_error()).context("mkfifo");
        }
    }
    Ok(())
}

/// Runs one side; the client prints its figures in cycles, as [`parse`] reads them.
///
/// # Errors
/// The other side did not come or went away, or the folder was not prepared.
pub(crate) fn peer(args: &RawPeerArgs) -> Result<()> {
    // One element for each reading of the counter; written once so that no page faults later.
    let mut stamps = vec![u64::MAX; args.iterations as usize + 1];
    let start = Instant::now();
    while start.elapsed() < WARM_UP {
        std::hint::spin_loop();
    }
    match (args.medium, args.side) {
        (Medium::Shm, RawSide::Server) => Line::open(&args.dir)?.echo(args.iterations)?,
        (Medium::Shm, RawSide::Client) => Line::open(&args.dir)?.ask(&mut stamps)?,
        (Medium::Pipe, RawSide::Server) => Pipes::open(&args.dir, args.side)?.echo(args.iterations)?,
        (Medium::Pipe, RawSide::Client) => Pipes::open(&args.dir, args.side)?.ask(&mut stamps)?,
    }
    if args.side == RawSide::Client {
        print!("{}", report(&stamps));
    }
    Ok(())
}

/// A page with one word for each direction, on cache lines that no prefetcher pairs.
struct Line {
    page: *mut AtomicU32,
}

impl Line {
    const REQUEST: usize = 0;
    const REPLY: usize = 256 / 4;
    /// Words by which the two sides meet before the measurement.
    const SERVER_HERE: usize = 512 / 4;
    const CLIENT_HERE: usize = 768 / 4;

    fn open(dir: &Path) -> Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).open(dir.join(PAGE)).context("the shared page")?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("mapping the shared page");
        }
        Ok(Line { page: page.cast() })
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        debug_assert!(index < 4096 / 4);
        // SAFETY: the page is mapped for the life of the process, the index lies in it, words in it
        // are aligned, and both sides touch it by atomics only.
        unsafe { &*self.page.add(index) }
    }

    fn meet(&self, mine: usize, theirs: usize) -> Result<()> {
        self.word(mine).store(1, Ordering::Release);
        for _ in 0..MEETING_YIELDS {
            if self.word(theirs).load(Ordering::Acquire) == 1 {
                return Ok(());
            }
            std::thread::yield_now();
        }
        bail!("the other side did not come")
    }

    fn echo(&self, iterations: u32) -> Result<()> {
        self.meet(Self::SERVER_HERE, Self::CLIENT_HERE)?;
        for i in 1..=iterations {
            while self.word(Self::REQUEST).load(Ordering::Acquire) != i {}
            self.word(Self::REPLY).store(i, Ordering::Release);
        }
        Ok(())
    }

    fn ask(&self, stamps: &mut [u64]) -> Result<()> {
        self.meet(Self::CLIENT_HERE, Self::SERVER_HERE)?;
        let rounds = stamps.len() - 1;
        for (i, stamp) in (1..).zip(&mut stamps[..rounds]) {
            *stamp = cycles();
            self.word(Self::REQUEST).store(i, Ordering::Release);
            while self.word(Self::REPLY).load(Ordering::Acquire) != i {}
        }
        stamps[rounds] = cycles();
        Ok(())
    }
}

/// A FIFO for each direction; a message is 8 bytes, as a record of a completion channel is.
struct Pipes {
    from: File,
    to: File,
}

impl Pipes {
    fn open(dir: &Path, side: RawSide) -> Result<Self> {
        // Opened for both directions, so that neither open waits for the other side.
        let open = |name| OpenOptions::new().read(true).write(true).open(dir.join(name));
        let (to_server, to_client) = (open(TO_SERVER)?, open(TO_CLIENT)?);
        Ok(match side {
            RawSide::Server => Pipes { from: to_server, to: to_client },
            RawSide::Client => Pipes { from: to_client, to: to_server },
        })
    }

    fn echo(&mut self, iterations: u32) -> Result<()> {
        let mut message = [0; 8];
        // One round trip more than asked for: the client's first one waits for this side to start.
        for _ in 0..=iterations {
            self.from.read_exact(&mut message)?;
            self.to.write_all(&message)?;
        }
        Ok(())
    }

    fn ask(&mut self, stamps: &mut [u64]) -> Result<()> {
        let mut message = [0; 8];
        self.to.write_all(&message)?;
        self.from.read_exact(&mut message)?;
        let rounds = stamps.len() - 1;
        for stamp in &mut stamps[..rounds] {
            *stamp = cycles();
            self.to.write_all(&message)?;
            self.from.read_exact(&mut message)?;
        }
        stamps[rounds] = cycles();
        Ok(())
    }
}

/// Figures of a raw baseline, one way, in cycles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RawFigures {
    /// Median.
    pub median: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Mean.
    pub mean: f64,
}

/// The line that the client prints for its readings of the counter.
fn report(stamps: &[u64]) -> String {
    let mut deltas: Vec<u64> = stamps.windows(2).map(|w| w[1].wrapping_sub(w[0])).collect();
    deltas.sort_unstable();
    let (Some(&median), n) = (deltas.get(deltas.len() / 2), deltas.len()) else { return String::new() };
    // perftest's own choice of the percentile's index.
    let p99 = deltas[((n as f64 * 0.99).ceil() as usize).min(n - 1)];
    let mean = deltas.iter().sum::<u64>() as f64 / n as f64;
    format!("cycles median {:.1} p99 {:.1} mean {:.1}\n", median as f64 / 2.0, p99 as f64 / 2.0, mean / 2.0)
}

/// Reads the client's line back; `None` where it is not there or not positive.
pub(crate) fn parse(text: &str) -> Option<RawFigures> {
    let line = text.lines().find_map(|line| line.strip_prefix("cycles "))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let value = |name: &str| -> Option<f64> {
        let at = words.iter().position(|w| *w == name)?;
        words.get(at + 1)?.parse().ok().filter(|v: &f64| v.is_finite() && *v > 0.0)
    };
    Some(RawFigures { median: value("median")?, p99: value("p99")?, mean: value("mean")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sides, in two threads of this process.
    fn figures(medium: Medium, iterations: u32) -> RawFigures {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path()).unwrap();
        let args = |side| RawPeerArgs { medium, side, dir: dir.path().to_path_buf(), iterations };
        let server = args(RawSide::Server);
        let thread = std::thread::spawn(move || peer(&server).unwrap());
        let mut stamps = vec![0; iterations as usize + 1];
        match medium {
            Medium::Shm => Line::open(dir.path()).unwrap().ask(&mut stamps).unwrap(),
            Medium::Pipe => Pipes::open(dir.path(), RawSide::Client).unwrap().ask(&mut stamps).unwrap(),
        }
        thread.join().unwrap();
        parse(&report(&stamps)).unwrap()
    }

    #[test]
    fn every_message_of_a_pipe_and_of_a_cache_line_is_answered() {
        for medium in [Medium::Pipe, Medium::Shm] {
            let figures = figures(medium, 20);
            assert!(figures.median > 0.0 && figures.p99 >= figures.median, "{figures:?}");
        }
    }

    #[test]
    fn figures_are_half_of_the_round_trips() {
        let stamps: Vec<u64> = (0..=100).map(|i| 1000 + i * 200).collect();
        assert_eq!(report(&stamps), "cycles median 100.0 p99 100.0 mean 100.0\n");
        assert_eq!(parse(&report(&stamps)).unwrap().median, 100.0);
    }

    #[test]
    fn text_without_figures_gives_none() {
        for text in ["", "cycles median", "cycles median nan p99 1 mean 1", "cycles median 0.0 p99 1 mean 1"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}

// SPDX-License-Identifier: MIT
//! The progress thread: what goes on while the application sleeps or computes.
//!
//! One per process, named fw-soft, with all signals blocked; made when the first QP connects. It
//! sleeps in `poll` on the process's control FIFO (peers kick it), on the pidfds of its peers and
//! on completion channels that were full, until the next deadline of a waiting send, and for ever
//! where there is none. It never runs application code and never polls a CQ.

use crate::channel::make_fifo;
use crate::layout::fault;
use crate::peer::Peer;
use crate::process::Process;
use crate::qp::Qp;
use crate::say::say_once;
use crate::segment::Segment;
use parking_lot::Mutex;
use rdma_sys::ibv_event_type;
use rdma_sys::ibv_qp_state::{IBV_QPS_ERR, IBV_QPS_RTR};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{fence, AtomicU64, Ordering};
use std::sync::Arc;

/// How often a send that waits for a peer's QP is tried again, ns: nobody may be there to kick.
const RETRY: u64 = 10_000_000;

/// The progress thread, as others see it.
pub(crate) struct Progress {
    control: File,
    started: Mutex<bool>,
    /// Until when the thread sleeps (monotonic ns).
    sleeps_until: AtomicU64,
}

/// Monotonic time, ns.
pub(crate) fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the struct; cannot fail with this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Progress {
    /// Makes the control FIFO of `segment`; the thread comes later.
    pub(crate) fn new(segment: &Segment) -> io::Result<Progress> {
        let path = segment.path("ctl");
        make_fifo(&path)?;
        let control = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(path)?;
        Ok(Progress { control, started: Mutex::new(false), sleeps_until: AtomicU64::new(u64::MAX) })
    }

    /// Starts the thread, if it does not run yet.
    pub(crate) fn start(&self) -> io::Result<()> {
        let mut started = self.started.lock();
        if *started {
            return Ok(());
        }
        // SAFETY: plain calls on sets of this frame; the thread inherits the blocked signals.
        let thread = unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let thread = std::thread::Builder::new().name("fw-soft".into()).stack_size(256 * 1024).spawn(run);
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
            thread
        };
        thread.inspect_err(|e| say_once!("cannot start the progress thread: {e}"))?;
        *started = true;
        Ok(())
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        let Some(process) = Process::get() else { return };
        if self.start().is_ok() && process.segment.map.head().kicked.0.swap(1, Ordering::SeqCst) == 0 {
            // Full means that a wake-up is in it already.
            let _ = (&self.control).write(&[1]);
        }
    }

    /// Sees to it that the thread is awake at `deadline` (monotonic ns).
    pub(crate) fn wake_by(&self, deadline: u64) {
        if self.sleeps_until.fetch_min(deadline, Ordering::SeqCst) > deadline {
            self.wake();
        }
    }
}

fn run() {
    while let Some(process) = Process::get() {
        let progress = &process.progress;
        let mut drain = [0; 64];
        while matches!((&progress.control).read(&mut drain), Ok(n) if n > 0) {}
        process.segment.map.head().kicked.0.store(0, Ordering::SeqCst);
        // From here on a kick writes again; what was asked for before is seen below.
        progress.sleeps_until.store(u64::MAX, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let peers = process.living_peers();
        let mut wanted = Vec::new();
        let deadline = work(process, &mut wanted);
        let until = progress.sleeps_until.fetch_min(deadline, Ordering::SeqCst).min(deadline);
        sleep(process, &peers, &wanted, until);
    }
}

/// Does what there is to do. Fills in the channels whose room is waited for; returns the next
/// deadline.
fn work(process: &Process, wanted: &mut Vec<libc::c_int>) -> u64 {
    let mut deadline = u64::MAX;
    process.cqs.each(|cq| {
        if cq.newly_overflowed() {
            cq.fail_users(process);
        }
        while cq.shared.unwritten.load(Ordering::Acquire) > 0 {
            if !cq.write_event() {
                wanted.extend(cq.channel().map(crate::channel::Channel::fifo));
                break;
            }
            cq.shared.unwritten.fetch_sub(1, Ordering::AcqRel);
        }
    });
    process.qps.each(|qp| {
        match qp.shared.sender.0.fault.swap(0, Ordering::AcqRel) {
            fault::ACCESS => {
                qp.fail(process);
                qp.raise(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR);
            }
            fault::REQUEST => qp.fail(process),
            _ => {}
        }
        crate::stream::receive(process, qp);
        if qp.waiting.load(Ordering::Acquire) != 0 {
            let mut sq = qp.sq.lock();
            sq.go_on(qp, process);
            if qp.waiting.load(Ordering::Acquire) != 0 {
                let retry = if sq.waits_for_peer() { now() + RETRY } else { u64::MAX };
                deadline = deadline.min(sq.deadline().unwrap_or(u64::MAX)).min(retry);
            }
        }
    });
    deadline
}

/// Sleeps until something happens; deals with peers that died.
fn sleep(process: &Process, peers: &[Arc<Peer>], wanted: &[libc::c_int], until: u64) {
    let control = process.progress.control.as_raw_fd();
    let mut fds = vec![libc::pollfd { fd: control, events: libc::POLLIN, revents: 0 }];
    // A process outlives itself: its own pidfd is not asked.
    let others: Vec<_> = peers.iter().filter(|peer| !peer.own).collect();
    fds.extend(others.iter().map(|peer| libc::pollfd { fd: peer.pidfd(), events: libc::POLLIN, revents: 0 }));
    fds.extend(wanted.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }));
    let left = until.saturating_sub(now());
    let (limit, none) = (
        libc::timespec {
            tv_sec: (left / 1_000_000_000) as libc::time_t,
            tv_nsec: (left % 1_000_000_000) as libc::c_long,
        },
        std::ptr::null(),
    );
    let limit = if until == u64::MAX { none } else { &raw const limit };
    // SAFETY: a list of pollfds of that length; a limit of this frame.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, limit, std::ptr::null()) };
    for (peer, fd) in others.iter().zip(&fds[1..]) {
        if fd.revents != 0 {
            bury(process, peer);
        }
    }
}

/// A peer died: nothing that it was doing goes on, and who was connected to it is told.
fn bury(process: &Process, peer: &Arc<Peer>) {
    peer.dead.store(true, Ordering::Release);
    process.cqs.each(|cq| {
        cq.locked(|| cq.ring.void_claims_of(peer.id));
    });
    process.qps.each(|qp| {
        if qp.state() >= IBV_QPS_RTR && qp.shared.dest.load(Ordering::Relaxed) >> 12 == peer.id {
            orphan(process, qp, peer);
        }
    });
}

/// `qp` was connected to a peer that died.
fn orphan(process: &Process, qp: &Qp, peer: &Peer) {
    let mut sq = qp.sq.lock();
    if sq.connection.as_ref().is_some_and(|conn| !std::ptr::eq(&*conn.peer, peer)) {
        // Connected anew, to the process that has the id now.
        return;
    }
    if qp.state() == IBV_QPS_ERR {
        // A send met the dead peer first, and said so.
        return;
    }
    sq.peer_died(qp, process);
    // One that exited in order had nothing more to say; receives stay posted, as natively. After
    // one that was killed in the middle nobody could tell how long to wait.
    if !peer.left() {
        qp.fail_with(process, &mut sq);
    }
}

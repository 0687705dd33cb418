// SPDX-License-Identifier: MIT
//! A peer: another process (or this one) whose segment is mapped here.
//!
//! Connections hold it; the progress thread watches it through its pidfd. A pid alone may be
//! another process by now, so it counts together with the start time.

use crate::layout::{QpShared, MAGIC, MAX_SEGMENTS, NO_CHANNEL};
use crate::segment::{alive, file_of, Map, Segment};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// A process of this host that has the device open.
pub(crate) struct Peer {
    pub(crate) id: u32,
    pub(crate) map: Map,
    pub(crate) pid: i32,
    /// The peer is this very process: its memory is simply there.
    pub(crate) own: bool,
    /// `process_vm_readv` and `process_vm_writev` work on it.
    pub(crate) reachable: bool,
    /// Set once by the progress thread, when the pidfd says so.
    pub(crate) dead: AtomicBool,
    pidfd: OwnedFd,
    file: File,
    folder: PathBuf,
    kick: File,
    channels: Mutex<HashMap<u32, File>>,
    memory: Mutex<Option<File>>,
}

impl Peer {
    /// Maps the segment `id`. `None` if there is none, or its owner is dead.
    pub(crate) fn attach(own: &Segment, id: u32) -> Option<Peer> {
        if id == 0 || id > MAX_SEGMENTS {
            return None;
        }
        let file = open(&file_of(&own.folder, id, "seg"), 0)?;
        let map = Map::new(&file).ok()?;
        let head = map.head();
        if head.magic.load(Ordering::Acquire) != MAGIC || head.id.load(Ordering::Relaxed) != id {
            return None;
        }
        let pid = head.pid.load(Ordering::Relaxed);
        // SAFETY: plain call; the result is checked before it is owned.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as RawFd;
        if pidfd < 0 {
            return None;
        }
        // SAFETY: just opened, and nobody else's.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        // Looked at after the pidfd is there: from now on the pid cannot become another process.
        if !alive(pid, head.start_time.load(Ordering::Relaxed)) {
            return None;
        }
        let kick = open(&file_of(&own.folder, id, "ctl"), libc::O_NONBLOCK)?;
        let is_own = id == own.id;
        let reachable = is_own || probe(pid as i32, head.probe.load(Ordering::Relaxed));
        Some(Peer {
            id,
            pid: pid as i32,
            own: is_own,
            reachable,
            dead: AtomicBool::new(false),
            pidfd,
            file,
            folder: own.folder.clone(),
            kick,
            channels: Mutex::new(HashMap::new()),
            memory: Mutex::new(None),
            map,
        })
    }

    /// The record of QP `index`.
    pub(crate) fn qp(&self, index: u32) -> Option<&'static QpShared> {
        let place = self.map.head().qps.get(index as usize)?.load(Ordering::Acquire);
        self.map.at(place)
    }

    /// Wakes the peer's progress thread.
    pub(crate) fn kick(&self) {
        if self.map.head().kicked.0.swap(1, Ordering::SeqCst) == 0 {
            // Full means that a wake-up is in it already.
            let _ = (&self.kick).write(&[1]);
        }
    }

    /// Writes an event record to the peer's completion channel. `false` if the channel is full.
    pub(crate) fn write_event(&self, channel: u32, cookie: u64) -> bool {
        if channel == NO_CHANNEL {
            return true;
        }
        let mut channels = self.channels.lock();
        if let std::collections::hash_map::Entry::Vacant(vacant) = channels.entry(channel) {
            let path = file_of(&self.folder, self.id, &format!("ch{channel}"));
            // A channel that is gone took its events along.
            let Some(file) = open(&path, libc::O_NONBLOCK) else { return true };
            vacant.insert(file);
        }
        // Both ways open, so this write never meets a pipe without a reader (SIGPIPE).
        match channels[&channel].write_record(cookie) {
            Ok(()) => true,
            Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
        }
    }

    /// The peer's memory file, into which it moved pages.
    pub(crate) fn memory(&self, with: impl FnOnce(RawFd) -> Option<Mapped>) -> Option<Mapped> {
        let mut memory = self.memory.lock();
        if memory.is_none() {
            *memory = open(&file_of(&self.folder, self.id, "mem"), 0);
        }
        with(memory.as_ref()?.as_raw_fd())
    }

    /// The segment's file, a byte of which is the lock of atomics.
    pub(crate) fn lock_file(&self) -> &File {
        &self.file
    }

    /// Whether the peer is dead, asked of the kernel.
    pub(crate) fn is_dead(&self) -> bool {
        let mut look = libc::pollfd { fd: self.pidfd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        self.dead.load(Ordering::Acquire) || unsafe { libc::poll(&mut look, 1, 0) } == 1
    }

    /// Readable when the peer is dead.
    pub(crate) fn pidfd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }

    /// Whether the peer left by exiting in order.
    pub(crate) fn left(&self) -> bool {
        self.map.head().left.load(Ordering::Acquire) == 1
    }
}

/// Moved pages of a peer, mapped here.
pub(crate) struct Mapped {
    base: *mut u8,
    len: usize,
}

// SAFETY: plain memory that any thread may reach.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `len` bytes of the memory file `fd` from `at` on.
    pub(crate) fn new(fd: RawFd, at: u64, len: usize) -> Option<Mapped> {
        // Touching what lies beyond the end of the file would be SIGBUS.
        // SAFETY: fstat fills the zeroed struct.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd, &mut stat) != 0 {
                return None;
            }
            stat.st_size as u64
        };
        if len == 0 || at.checked_add(len as u64)? > size {
            return None;
        }
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                at as i64,
            )
        };
        (base != libc::MAP_FAILED).then_some(Mapped { base: base.cast(), len })
    }

    /// The byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.len);
        self.base.wrapping_add(offset)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; whoever drops it has no pointer into it any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Writing whole event records.
pub(crate) trait WriteRecord {
    /// Writes one 8-byte record; a FIFO takes it whole or not at all.
    fn write_record(&self, cookie: u64) -> std::io::Result<()>;
}

impl WriteRecord for File {
    fn write_record(&self, cookie: u64) -> std::io::Result<()> {
        loop {
            match (&mut &*self).write(&cookie.to_ne_bytes()) {
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

fn open(path: &std::path::Path, flags: i32) -> Option<File> {
    OpenOptions::new().read(true).write(true).custom_flags(flags | libc::O_CLOEXEC).open(path).ok()
}

/// Whether this process may read the memory of `pid`, tried on the word that it offers.
fn probe(pid: i32, addr: u64) -> bool {
    let mut word = 0_u64;
    let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: 8 };
    // SAFETY: `local` is a word of ours; what `remote` names is checked by the kernel.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    n == 8 && word == MAGIC
}

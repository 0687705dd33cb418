// SPDX-License-Identifier: MIT
//! What this process has of the device: made at the first `ibv_open_device`, gone at exit.
//!
//! A forked child inherits the memory but none of the rights: [`Process::get`] gives it nothing, so
//! it neither cleans up nor talks to peers, and every verbs call of it fails with `EPERM`.

use crate::cq::Cq;
use crate::layout::{MAX_CQ, MAX_QP};
use crate::mr::MrTable;
use crate::peer::Peer;
use crate::progress::Progress;
use crate::qp::Qp;
use crate::say::say_once;
use crate::segment::Segment;
use fastwake::settings::Soft;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::Arc;

static PROCESS: OnceCell<Process> = OnceCell::new();
static SETTINGS: OnceCell<Option<Soft>> = OnceCell::new();
/// Set in a child of a process that had the device open.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The device as this process has it.
pub(crate) struct Process {
    pub(crate) segment: Segment,
    pub(crate) qps: Table<Qp, MAX_QP>,
    pub(crate) cqs: Table<Cq, MAX_CQ>,
    pub(crate) mrs: MrTable,
    pub(crate) progress: Progress,
    peers: Mutex<HashMap<u32, Arc<Peer>>>,
    /// Numbers for channels and protection domains.
    serial: AtomicU32,
}

/// Objects by index. An entry is set while the object lives; its owner sees to it that no reader
/// is left when it is taken out.
pub(crate) struct Table<T, const N: usize> {
    entries: Box<[AtomicPtr<T>]>,
    /// Where to look for a free index next; moving on keeps indices from being reused at once.
    next: Mutex<usize>,
}

impl<T, const N: usize> Table<T, N> {
    fn new() -> Self {
        Table { entries: (0..N).map(|_| AtomicPtr::new(ptr::null_mut())).collect(), next: Mutex::new(0) }
    }

    /// Finds a free index and gives it to `make`, whose object is then entered.
    pub(crate) fn insert<E>(
        &self,
        make: impl FnOnce(usize) -> Result<*mut T, E>,
    ) -> Result<Option<*mut T>, E> {
        let mut next = self.next.lock();
        let free = (0..N)
            .map(|i| (*next + i) % N)
            .find(|&index| self.entries[index].load(Ordering::Relaxed).is_null());
        let Some(index) = free else { return Ok(None) };
        let object = make(index)?;
        self.entries[index].store(object, Ordering::Release);
        *next = (index + 1) % N;
        Ok(Some(object))
    }

    /// The object at `index`.
    #[inline(always)]
    pub(crate) fn get(&self, index: usize) -> *mut T {
        self.entries.get(index).map_or(ptr::null_mut(), |entry| entry.load(Ordering::Acquire))
    }

    /// Keeps the table as it is while `look` goes over its objects.
    pub(crate) fn each(&self, mut look: impl FnMut(&T)) {
        let _unchanged = self.next.lock();
        for entry in &self.entries {
            let object = entry.load(Ordering::Acquire);
            // SAFETY: removal happens under `unchanged`, see `remove`, so it lives.
            if let Some(object) = unsafe { object.as_ref() } {
                look(object);
            }
        }
    }

    /// Keeps the object at `index`, if it is still there, while `look` looks at it.
    pub(crate) fn pinned(&self, index: usize, look: impl FnOnce(&T)) {
        let _unchanged = self.next.lock();
        // SAFETY: as in `each`.
        if let Some(object) = unsafe { self.get(index).as_ref() } {
            look(object);
        }
    }

    /// Takes the object at `index` out once no other thread looks at it.
    pub(crate) fn remove(&self, index: usize) {
        let _alone = self.next.lock();
        self.entries[index].store(ptr::null_mut(), Ordering::Release);
    }
}

/// The settings of the soft device; `None` where one of them is wrong, which is said.
pub(crate) fn settings() -> Option<&'static Soft> {
    SETTINGS
        .get_or_init(|| match Soft::from_env() {
            Ok(soft) => Some(soft),
            Err(e) => {
                say_once!("{e}; the device is not offered");
                None
            }
        })
        .as_ref()
}

impl Process {
    /// This process's part of the device; `None` before it is opened and in a forked child.
    #[inline(always)]
    pub(crate) fn get() -> Option<&'static Process> {
        if FORKED.load(Ordering::Relaxed) {
            return None;
        }
        PROCESS.get()
    }

    /// Opens the device, if it is not open yet.
    pub(crate) fn open() -> io::Result<&'static Process> {
        if FORKED.load(Ordering::Relaxed) {
            say_once!("a forked child cannot use the device that its parent had open");
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        PROCESS.get_or_try_init(|| {
            let soft = settings().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
            let folder = soft.dir.clone().unwrap_or_else(default_folder);
            let segment = Segment::create(folder.clone()).inspect_err(|e| match e.raw_os_error() {
                Some(libc::EACCES) => say_once!(
                    "{} is not a folder of this user alone (mode 0700); set FW_SOFT_DIR to one",
                    folder.display()
                ),
                Some(libc::ENOSPC) => {
                    say_once!("no space left in {}; set FW_SOFT_DIR to another tmpfs", folder.display())
                }
                _ => say_once!("cannot make a segment in {}: {e}", folder.display()),
            })?;
            let process = Process {
                mrs: MrTable::new(soft.map),
                progress: Progress::new(&segment)?,
                segment,
                qps: Table::new(),
                cqs: Table::new(),
                peers: Mutex::new(HashMap::new()),
                serial: AtomicU32::new(0),
            };
            allow_peers();
            // SAFETY: functions of this library, which is never unloaded while the device is open:
            // it is preloaded.
            unsafe {
                libc::atexit(at_exit);
                libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
            }
            Ok(process)
        })
    }

    /// A number not given out before.
    pub(crate) fn serial(&self) -> u32 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }

    /// The peer whose segment is `id` (this process is a peer of itself); `None` if there is no
    /// such process.
    pub(crate) fn peer(&self, id: u32) -> Option<Arc<Peer>> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(&id) {
            if !peer.dead.load(Ordering::Acquire) {
                return Some(peer.clone());
            }
            peers.remove(&id);
        }
        let peer = Arc::new(Peer::attach(&self.segment, id)?);
        peers.insert(id, peer.clone());
        Some(peer)
    }

    /// All peers met so far that were alive when last looked at.
    pub(crate) fn living_peers(&self) -> Vec<Arc<Peer>> {
        self.peers.lock().values().filter(|p| !p.dead.load(Ordering::Acquire)).cloned().collect()
    }
}

/// `/dev/shm/fw_soft.<uid>`.
fn default_folder() -> PathBuf {
    // SAFETY: cannot fail.
    PathBuf::from(format!("/dev/shm/fw_soft.{}", unsafe { libc::geteuid() }))
}

/// Under Yama's scope 1 a peer may reach this process's memory only if told so.
fn allow_peers() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if scope.trim() == "1" {
        // SAFETY: plain call.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    }
}

extern "C" fn at_exit() {
    if let Some(process) = Process::get() {
        process.segment.remove();
    }
}

extern "C" fn before_fork() {
    if let Some(process) = Process::get() {
        process.mrs.before_fork();
    }
}

extern "C" fn after_fork() {
    if let Some(process) = Process::get() {
        process.mrs.after_fork();
    }
}

extern "C" fn in_child() {
    if let Some(process) = Process::get() {
        process.mrs.in_child();
    }
    FORKED.store(true, Ordering::Relaxed);
}

// SPDX-License-Identifier: MIT
//! The segment of this process: its file, its mapping and the space inside it.
//!
//! A segment is built under a temporary name and linked under its id when it is complete, so a peer
//! never sees half of one. What is mapped beyond the allocated part is never touched, and what is
//! handed out is allocated first (`fallocate`): a full file system is an error here, never SIGBUS.
//! Files of owners that died are removed by whoever needs an id; a `flock` on the very file makes
//! sure that two who clean up do not take a living newcomer's.

use crate::layout::{SegmentHead, MAGIC, MAX_SEGMENTS, UNIT};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Address space that a mapped segment takes, bytes: the most that one can grow to.
const SPAN: usize = 1 << 30;
/// Step in which a segment grows, bytes.
const STEP: usize = 64 * 1024;

/// Types that may be laid over shared memory: all bit patterns are values, all fields are atomics
/// or padding.
///
/// # Safety
/// The implementor promises the above.
pub(crate) unsafe trait Shared {}
// SAFETY: these consist of atomics and padding.
unsafe impl Shared for AtomicU32 {}
// SAFETY: as above.
unsafe impl Shared for AtomicU64 {}
// SAFETY: as above.
unsafe impl Shared for std::sync::atomic::AtomicU8 {}
// SAFETY: as above.
unsafe impl Shared for SegmentHead {}
// SAFETY: as above.
unsafe impl Shared for crate::layout::QpShared {}
// SAFETY: as above.
unsafe impl Shared for crate::layout::CqShared {}
// SAFETY: as above.
unsafe impl Shared for crate::layout::Cqe {}
// SAFETY: as above.
unsafe impl Shared for crate::layout::MrShared {}
// SAFETY: as above; `_pad` is never read.
unsafe impl Shared for crate::layout::RecvEntry {}

/// A mapped segment, one's own or a peer's.
pub(crate) struct Map {
    base: NonNull<u8>,
}

// SAFETY: the mapping is plain memory, reached through atomics only.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `file`, whose first [`SegmentHead`] bytes are allocated.
    pub(crate) fn new(file: &File) -> io::Result<Map> {
        if file.metadata()?.len() < size_of::<SegmentHead>() as u64 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SPAN,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(start) if base != libc::MAP_FAILED => Ok(Map { base: start }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The head. Like all references into a segment it is good while the `Map` lives, which its
    /// holder sees to (a peer's `Map` is held by every connection that uses it).
    pub(crate) fn head(&self) -> &'static SegmentHead {
        // SAFETY: `new` saw that the file holds a head; a file of the device never shrinks.
        unsafe { self.base.cast::<SegmentHead>().as_ref() }
    }

    /// The `T` at `place`, if that lies inside the allocated part.
    pub(crate) fn at<T: Shared>(&self, place: u32) -> Option<&'static T> {
        self.slice::<T>(place, 1).map(|s| &s[0])
    }

    /// `count` of `T` from `place` on, if they lie inside the allocated part.
    pub(crate) fn slice<T: Shared>(&self, place: u32, count: usize) -> Option<&'static [T]> {
        let start = place as usize * UNIT;
        let end = start.checked_add(count.checked_mul(size_of::<T>())?)?;
        let allocated = self.head().allocated.load(Ordering::Acquire).min(SPAN as u64) as usize;
        if place == 0 || count == 0 || end > allocated {
            return None;
        }
        // SAFETY: inside the allocated part of the mapping, aligned to 64 bytes, and `Shared`.
        Some(unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(start).cast(), count) })
    }

    /// The bytes from `place` on; the caller stays within the `len` that it was allocated with.
    pub(crate) fn bytes(&self, place: u32, len: usize) -> Option<NonNull<u8>> {
        self.slice::<std::sync::atomic::AtomicU8>(place, len)
            .and_then(|s| NonNull::new(s.as_ptr().cast_mut().cast()))
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; no connection holds it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), SPAN) };
    }
}

/// Free space inside the segment.
#[derive(Default)]
struct Heap {
    /// Freed blocks: place → units.
    free: BTreeMap<u32, u32>,
    /// First unit never handed out.
    end: u32,
    /// Freed blocks that are only reused for the same size: what peers may still touch by mistake.
    kept: HashMap<u32, Vec<u32>>,
}

/// The segment of this process.
pub(crate) struct Segment {
    pub(crate) map: Map,
    pub(crate) id: u32,
    pub(crate) folder: PathBuf,
    file: File,
    heap: Mutex<Heap>,
}

impl Segment {
    /// Makes the folder and this process's segment in it.
    ///
    /// # Errors
    /// Whatever the file system says; `EACCES` for a folder that others may write to.
    pub(crate) fn create(folder: PathBuf) -> io::Result<Segment> {
        make_folder(&folder)?;
        reap_all(&folder);
        let pid = std::process::id();
        let start_time = start_time(pid).unwrap_or(0);
        let building = folder.join(format!("new.{pid}"));
        let _ = fs::remove_file(&building);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC)
            .open(&building)?;
        let result = Self::build(folder, file, &building, pid, start_time);
        let _ = fs::remove_file(&building);
        result
    }

    fn build(folder: PathBuf, file: File, building: &Path, pid: u32, start: u64) -> io::Result<Segment> {
        let first = size_of::<SegmentHead>().next_multiple_of(STEP);
        allocate(&file, 0, first)?;
        let map = Map::new(&file)?;
        let head = map.head();
        head.pid.store(pid, Ordering::Relaxed);
        head.start_time.store(start, Ordering::Relaxed);
        head.probe.store(&raw const head.magic as u64, Ordering::Relaxed);
        head.allocated.store(first as u64, Ordering::Relaxed);
        head.magic.store(MAGIC, Ordering::Release);
        let heap = Heap {
            end: size_of::<SegmentHead>().next_multiple_of(UNIT) as u32 / UNIT as u32,
            ..Heap::default()
        };
        // Start somewhere else each time, so that a stale QP number rarely meets a new process.
        for turn in 0..MAX_SEGMENTS {
            let id = (pid + turn) % MAX_SEGMENTS + 1;
            let name = folder.join(format!("{id}.seg"));
            head.id.store(id, Ordering::Release);
            let linked = match fs::hard_link(building, &name) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && reap(&folder, id)? => {
                    fs::hard_link(building, &name)
                }
                other => other,
            };
            match linked {
                Ok(()) => return Ok(Segment { map, id, folder, file, heap: Mutex::new(heap) }),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EMFILE))
    }

    /// Space for `bytes`, all zero. Returns its place.
    ///
    /// # Errors
    /// `ENOSPC` when the file system is full, `ENOMEM` at the most a segment can hold.
    pub(crate) fn alloc(&self, bytes: usize) -> io::Result<u32> {
        let units = bytes.div_ceil(UNIT) as u32;
        let mut heap = self.heap.lock();
        let found = heap.free.iter().find(|(_, &len)| len >= units).map(|(&place, &len)| (place, len));
        if let Some((place, len)) = found {
            heap.free.remove(&place);
            if len > units {
                heap.free.insert(place + units, len - units);
            }
            self.zero(place, units);
            return Ok(place);
        }
        self.extend(&mut heap, units)
    }

    fn extend(&self, heap: &mut Heap, units: u32) -> io::Result<u32> {
        let place = heap.end;
        let end = (place as usize + units as usize) * UNIT;
        if end > SPAN {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let allocated = &self.map.head().allocated;
        let have = allocated.load(Ordering::Relaxed) as usize;
        if end > have {
            let want = end.next_multiple_of(STEP);
            allocate(&self.file, have, want - have)?;
            allocated.store(want as u64, Ordering::Release);
        }
        heap.end = place + units;
        Ok(place)
    }

    /// Gives back what [`Segment::alloc`] gave for `bytes`. No peer may touch it any more.
    pub(crate) fn free(&self, place: u32, bytes: usize) {
        let mut units = bytes.div_ceil(UNIT) as u32;
        let mut place = place;
        let mut heap = self.heap.lock();
        if let Some((&before, &len)) = heap.free.range(..place).next_back() {
            if before + len == place {
                heap.free.remove(&before);
                place = before;
                units += len;
            }
        }
        if let Some(len) = heap.free.remove(&(place + units)) {
            units += len;
        }
        heap.free.insert(place, units);
    }

    /// Like [`Segment::alloc`], for space that a slow peer may still write to after it was freed.
    /// It comes back as it was left, and only for the same size.
    pub(crate) fn alloc_kept(&self, bytes: usize) -> io::Result<u32> {
        let units = bytes.div_ceil(UNIT) as u32;
        let mut heap = self.heap.lock();
        match heap.kept.get_mut(&units).and_then(Vec::pop) {
            Some(place) => Ok(place),
            None => self.extend(&mut heap, units),
        }
    }

    /// Gives back what [`Segment::alloc_kept`] gave.
    pub(crate) fn free_kept(&self, place: u32, bytes: usize) {
        self.heap.lock().kept.entry(bytes.div_ceil(UNIT) as u32).or_default().push(place);
    }

    fn zero(&self, place: u32, units: u32) {
        if let Some(words) = self.map.slice::<AtomicU64>(place, units as usize * UNIT / 8) {
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
    }

    /// The name of one of this segment's files.
    pub(crate) fn path(&self, suffix: &str) -> PathBuf {
        file_of(&self.folder, self.id, suffix)
    }

    /// Removes all files of this segment: the owner leaves.
    pub(crate) fn remove(&self) {
        self.map.head().left.store(1, Ordering::Release);
        remove_files(&self.folder, self.id);
    }
}

/// The name of a file of segment `id`.
pub(crate) fn file_of(folder: &Path, id: u32, suffix: &str) -> PathBuf {
    folder.join(format!("{id}.{suffix}"))
}

/// Allocates `len` bytes of `file` from `at` on, for good.
pub(crate) fn allocate(file: &File, at: usize, len: usize) -> io::Result<()> {
    loop {
        // SAFETY: plain call on an open file.
        let rc = unsafe { libc::posix_fallocate(file.as_raw_fd(), at as i64, len as i64) };
        match rc {
            0 => return Ok(()),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    if let Err(e) = DirBuilder::new().mode(0o700).create(folder) {
        if e.kind() != io::ErrorKind::AlreadyExists {
            return Err(e);
        }
    }
    let meta = fs::symlink_metadata(folder)?;
    // SAFETY: cannot fail.
    let me = unsafe { libc::geteuid() };
    if !meta.is_dir() || meta.uid() != me || meta.mode() & 0o077 != 0 {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    Ok(())
}

/// When `pid` started, clock ticks since boot; `None` if there is no such process, or it is dead
/// and only waits to be collected.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold anything; what follows its last bracket is fields 3 and on.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether the process that started at `start` as `pid` still runs.
pub(crate) fn alive(pid: u32, start: u64) -> bool {
    start_time(pid).is_some_and(|now| start == 0 || now == start)
}

/// Who owns the segment in `file`: pid and start time.
fn owner(file: &File) -> io::Result<(u32, u64)> {
    let mut pid = [0; 4];
    let mut start = [0; 8];
    file.read_exact_at(&mut pid, offset_of!(SegmentHead, pid) as u64)?;
    file.read_exact_at(&mut start, offset_of!(SegmentHead, start_time) as u64)?;
    Ok((u32::from_ne_bytes(pid), u64::from_ne_bytes(start)))
}

/// Removes what dead processes left in the folder, so that it does not fill up.
fn reap_all(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(id) = name.strip_suffix(".seg").and_then(|id| id.parse().ok()) {
            // What cannot be looked at is left to whoever wants its id.
            let _ = reap(folder, id);
        } else if let Some(pid) = name.strip_prefix("new.").and_then(|pid| pid.parse().ok()) {
            if start_time(pid).is_none() {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Removes the files of segment `id` if its owner is dead. Returns whether the id is free now.
fn reap(folder: &Path, id: u32) -> io::Result<bool> {
    let name = file_of(folder, id, "seg");
    let file = match OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(&name) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(e),
    };
    // SAFETY: plain call on an open file. Whoever cleans up holds this; owners do not.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        return Ok(false);
    }
    // Under the lock: is the name still that of the file that was opened?
    match fs::metadata(&name) {
        Ok(now) if now.ino() == file.metadata()?.ino() => {}
        Ok(_) => return Ok(false),
        Err(_) => return Ok(true),
    }
    let dead = match owner(&file) {
        Ok((pid, start)) => !alive(pid, start),
        // Not a segment at all: nobody can use it.
        Err(e) => e.kind() == io::ErrorKind::UnexpectedEof,
    };
    if dead {
        remove_files(folder, id);
    }
    Ok(dead)
}

/// Removes every file of segment `id`, its own name last.
fn remove_files(folder: &Path, id: u32) {
    let (prefix, last) = (format!("{id}."), format!("{id}.seg"));
    if let Ok(entries) = fs::read_dir(folder) {
        for entry in entries.flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix) && name != last) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
    let _ = fs::remove_file(folder.join(last));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("soft");
        (dir, path)
    }

    #[test]
    fn space_is_zeroed_reused_and_joined() {
        let (_dir, path) = folder();
        let segment = Segment::create(path).expect("segment");
        let a = segment.alloc(128).expect("space");
        let b = segment.alloc(128).expect("space");
        segment.map.at::<AtomicU64>(a).expect("inside").store(7, Ordering::Relaxed);
        segment.free(a, 128);
        segment.free(b, 128);
        let c = segment.alloc(256).expect("space");
        assert_eq!(c, a, "the two freed blocks join");
        assert_eq!(segment.map.at::<AtomicU64>(c).expect("inside").load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_place_outside_is_refused() {
        let (_dir, path) = folder();
        let segment = Segment::create(path).expect("segment");
        let end = segment.map.head().allocated.load(Ordering::Relaxed) as u32 / UNIT as u32;
        assert!(segment.map.at::<AtomicU64>(end).is_none());
        assert!(segment.map.at::<AtomicU64>(0).is_none());
        assert!(segment.map.slice::<AtomicU64>(end - 1, 9).is_none());
    }

    #[test]
    fn the_files_of_a_dead_owner_are_taken_and_those_of_a_living_one_left() {
        let (_dir, path) = folder();
        let segment = Segment::create(path.clone()).expect("segment");
        fs::write(segment.path("ch0"), b"").expect("file");
        assert!(!reap(&path, segment.id).expect("look"));
        assert!(segment.path("seg").exists());
        // As if another process had owned it and were gone.
        segment.map.head().start_time.store(1, Ordering::Relaxed);
        assert!(reap(&path, segment.id).expect("look"));
        assert!(!segment.path("seg").exists());
        assert!(!segment.path("ch0").exists());
    }

    #[test]
    fn a_folder_open_to_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let (_dir, path) = folder();
        fs::create_dir(&path).expect("folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("mode");
        let error = Segment::create(path).err().expect("refused");
        assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    }
}

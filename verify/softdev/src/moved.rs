// SPDX-License-Identifier: MIT
//! Moving whole pages of memory regions into a file that peers map.
//!
//! READ, WRITE and atomics on moved pages cost a memory access instead of a system call. A page is
//! moved only if it lies wholly inside the region and is private, anonymous, readable and writable
//! memory that is no stack: nothing else shares such a page, so nobody but the owner of the region
//! can tell. Everything that speaks against moving is answered by not moving: peers then use
//! `process_vm_*`. `FW_SOFT_MAP=0` turns it off.
//!
//! A page that another thread writes to *while* it is registered or deregistered may lose that
//! write; programs that do this are what the setting is for.

use crate::segment::allocate;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::ptr;

pub(crate) const PAGE: usize = 4096;

/// A range of pages that stands in the memory file.
struct Range {
    len: usize,
    /// Place in the file.
    at: u64,
    /// Regions that use it.
    users: u32,
}

/// The memory file and what was moved into it.
#[derive(Default)]
pub(crate) struct Moved {
    file: Option<File>,
    ranges: BTreeMap<usize, Range>,
    /// Free places of the file: place → bytes.
    free: BTreeMap<u64, u64>,
    end: u64,
}

/// Pages of a region that stand in the memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) at: u64,
}

impl Moved {
    /// Moves the whole pages of `addr..addr + len`, or finds them moved already.
    pub(crate) fn take(&mut self, path: impl FnOnce() -> PathBuf, addr: usize, len: usize) -> Option<Part> {
        let start = addr.checked_next_multiple_of(PAGE)?;
        let end = addr.checked_add(len)? & !(PAGE - 1);
        if end <= start {
            return None;
        }
        let len = end - start;
        if let Some((&first, range)) = self.ranges.range_mut(..end).next_back() {
            if first + range.len > start {
                // Shared with an earlier region: all of it, or none.
                let inside = first <= start && end <= first + range.len;
                return inside.then(|| {
                    range.users += 1;
                    Part { addr: start, len, at: range.at + (start - first) as u64 }
                });
            }
        }
        if !movable(start, end) {
            return None;
        }
        let at = self.place(path, len).ok()?;
        match self.replace(start, len, at) {
            Ok(()) => {
                self.ranges.insert(start, Range { len, at, users: 1 });
                Some(Part { addr: start, len, at })
            }
            Err(_) => {
                self.give_place(at, len);
                None
            }
        }
    }

    /// Finds allocated space in the file, leaving half of what the file system has to others.
    fn place(&mut self, path: impl FnOnce() -> PathBuf, len: usize) -> io::Result<u64> {
        if self.file.is_none() {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC)
                .open(path())?;
            self.file = Some(file);
        }
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        if len as u64 > free_space(file)? / 2 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let found = self.free.iter().find(|(_, &n)| n >= len as u64).map(|(&at, &n)| (at, n));
        let at = found.map_or(self.end, |(at, _)| at);
        allocate(file, at as usize, len)?;
        match found {
            Some((at, n)) => {
                self.free.remove(&at);
                if n > len as u64 {
                    self.free.insert(at + len as u64, n - len as u64);
                }
            }
            None => self.end += len as u64,
        }
        Ok(at)
    }

    fn give_place(&mut self, at: u64, len: usize) {
        if let Some(file) = &self.file {
            // SAFETY: plain call on an open file; nothing maps this part any more.
            unsafe {
                libc::fallocate(
                    file.as_raw_fd(),
                    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    at as i64,
                    len as i64,
                )
            };
        }
        self.free.insert(at, len as u64);
    }

    /// Copies the pages to the file and puts the file in their place.
    fn replace(&self, start: usize, len: usize, at: u64) -> io::Result<()> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?;
        // SAFETY: `movable` saw that all of it is mapped readable; the application promised by
        // registering it that it stays so.
        file.write_all_at(unsafe { std::slice::from_raw_parts(start as *const u8, len) }, at)?;
        self.map_over(start, len, at, libc::MAP_SHARED | libc::MAP_POPULATE)
    }

    fn map_over(&self, start: usize, len: usize, at: u64, flags: i32) -> io::Result<()> {
        let fd = self.file.as_ref().ok_or(io::ErrorKind::NotFound)?.as_raw_fd();
        // SAFETY: replaces pages of the application by pages of the same contents.
        let done = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                at as i64,
            )
        };
        if done == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Gives up a use of `part`; the last one makes the pages private memory again.
    pub(crate) fn give(&mut self, part: Part) {
        let Some((&start, range)) = self.ranges.range_mut(..=part.addr).next_back() else { return };
        range.users -= 1;
        if range.users > 0 {
            return;
        }
        let (len, at) = (range.len, range.at);
        self.ranges.remove(&start);
        if make_private(start, len) {
            self.give_place(at, len);
        } else {
            // No memory for a copy: a private view of the file holds the same bytes. The place in
            // the file is then never used again.
            let _ = self.map_over(start, len, at, libc::MAP_PRIVATE);
        }
    }

    /// In a forked child: what it writes must not reach its parent.
    pub(crate) fn part_with_parent(&self) {
        for (&start, range) in &self.ranges {
            let _ = self.map_over(start, range.len, range.at, libc::MAP_PRIVATE);
        }
    }
}

/// Replaces `len` bytes from `start` on by private memory of the same contents.
fn make_private(start: usize, len: usize) -> bool {
    // SAFETY: `copy` is a fresh mapping of `len` bytes, and so is what stands at `start` (moved
    // there by `replace`); mremap puts the first in the place of the second in one step.
    unsafe {
        let copy = libc::mmap(
            ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if copy == libc::MAP_FAILED {
            return false;
        }
        ptr::copy_nonoverlapping(start as *const u8, copy.cast::<u8>(), len);
        let to = start as *mut libc::c_void;
        if libc::mremap(copy, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to) == libc::MAP_FAILED {
            libc::munmap(copy, len);
            return false;
        }
        true
    }
}

/// Bytes that the file system of `file` has left for ordinary users.
fn free_space(file: &File) -> io::Result<u64> {
    // SAFETY: fstatvfs fills the zeroed struct.
    unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::fstatvfs(file.as_raw_fd(), &mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        // A file system without a limit reports 0 blocks altogether.
        Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail * stat.f_frsize })
    }
}

/// Whether all of `start..end` is private anonymous memory, readable and writable, and no stack.
fn movable(start: usize, end: usize) -> bool {
    let here = 0_u8;
    match std::fs::read_to_string("/proc/self/maps") {
        Ok(maps) => movable_in(&maps, start, end, &raw const here as usize),
        Err(_) => false,
    }
}

/// [`movable`] by the text of `/proc/self/maps`, for a caller whose stack holds `stack`.
fn movable_in(maps: &str, start: usize, end: usize, stack: usize) -> bool {
    let (mut at, mut guard) = (start, None);
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else { return false };
        let Some((low, high)) = range.split_once('-') else { return false };
        let (Ok(low), Ok(high)) = (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16)) else {
            return false;
        };
        let (inode, name) = (fields.nth(2), fields.next().unwrap_or(""));
        // The mark of a thread's stack: a few pages without any right right below it.
        let below_is_guard = guard == Some(low);
        guard = (rights.starts_with("---p") && high - low <= 16 * PAGE).then_some(high);
        if high <= at {
            continue;
        }
        let plain = rights.starts_with("rw-p")
            && inode == Some("0")
            && (name.is_empty() || name == "[heap]" || name.starts_with("[anon:"))
            && !below_is_guard
            && !(low..high).contains(&stack);
        if low > at || !plain {
            return false;
        }
        at = high;
        if at >= end {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
10000-20000 rw-p 00000000 00:00 0                          [heap]
20000-30000 rw-p 00000000 00:00 0
40000-41000 ---p 00000000 00:00 0
41000-50000 rw-p 00000000 00:00 0
50000-60000 r--p 00000000 00:00 0
60000-70000 rw-p 00000000 fe:00 77                         /usr/lib/x.so
70000-80000 rw-s 00000000 00:01 5                          /dev/zero (deleted)
90000-a0000 rw-p 00000000 00:00 0
b0000-c0000 rw-p 00000000 00:00 0                          [stack]
";

    #[test]
    fn only_private_anonymous_memory_moves() {
        let movable = |start, end| movable_in(MAPS, start, end, 0x95000);
        assert!(movable(0x11000, 0x12000), "heap");
        assert!(movable(0x1f000, 0x21000), "across two mappings");
        assert!(!movable(0x2f000, 0x31000), "runs into a hole");
        assert!(!movable(0x42000, 0x43000), "stack of a thread");
        assert!(!movable(0x51000, 0x52000), "read-only");
        assert!(!movable(0x61000, 0x62000), "file");
        assert!(!movable(0x71000, 0x72000), "shared");
        assert!(!movable(0x91000, 0x92000), "the caller's own stack");
        assert!(!movable(0xb1000, 0xb2000), "stack");
        assert!(!movable(0xd1000, 0xd2000), "nothing there");
    }

    #[test]
    fn moved_pages_keep_their_contents_there_and_back() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("mem");
        let len = 5 * PAGE;
        // SAFETY: a fresh mapping, unmapped at the end; only touched in between.
        unsafe {
            let base = libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(base, libc::MAP_FAILED);
            let bytes = std::slice::from_raw_parts_mut(base.cast::<u8>(), len);
            bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 + i / PAGE) as u8);
            let before = bytes.to_vec();
            let mut moved = Moved::default();
            let addr = base as usize + 100;
            let part = moved.take(|| path.clone(), addr, 3 * PAGE).expect("movable");
            assert_eq!(part, Part { addr: base as usize + PAGE, len: 2 * PAGE, at: 0 });
            assert_eq!(bytes, &before[..]);
            bytes[PAGE + 5] ^= 0xff;
            let file = std::fs::read(&path).expect("file");
            assert_eq!(file[5], before[PAGE + 5] ^ 0xff, "the page stands in the file");
            let again = moved.take(|| path.clone(), base as usize + PAGE, PAGE).expect("shared");
            assert_eq!(again.at, 0);
            assert!(moved.take(|| path.clone(), base as usize, 2 * PAGE).is_none(), "overlaps in part");
            moved.give(part);
            bytes[PAGE + 6] ^= 0xff;
            moved.give(again);
            assert_eq!(bytes[PAGE + 5], before[PAGE + 5] ^ 0xff);
            assert_eq!(bytes[PAGE + 6], before[PAGE + 6] ^ 0xff);
            assert!(moved.ranges.is_empty());
            libc::munmap(base, len);
        }
    }
}

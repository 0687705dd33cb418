// SPDX-License-Identifier: MIT
//! Stacks for contexts that do not come with one: parked kernel threads and the runtime's tasks.
//!
//! A stack is a private mapping with a guard below it, so that an overflow is a SIGSEGV at a known
//! address and never a write into somebody's heap. Nothing here may be called on a hot path: a stack
//! costs three system calls to make and one to drop.

use std::io;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of the guard. C code built without stack probes may step over a single page with one large
/// frame; 64 KiB costs address space only.
pub const GUARD_SIZE: usize = 64 << 10;

/// Tops of stacks differ by this much, round and round: a switch touches the topmost lines of both
/// stacks, and page-aligned tops would all fall into one set of the first-level cache.
const COLOUR: usize = 64;
const COLOURS: usize = 32;
static NEXT_COLOUR: AtomicUsize = AtomicUsize::new(0);

/// A stack with a guard below it. Unmapped when dropped.
#[derive(Debug)]
pub struct Stack {
    /// Lowest address of the mapping, where the guard begins.
    base: NonNull<u8>,
    /// Bytes of guard and stack together.
    length: usize,
    /// Bytes left unused above the top.
    colour: usize,
}

// SAFETY: a Stack is memory and an owner; no thread is tied to it.
unsafe impl Send for Stack {}
// SAFETY: through a shared reference only addresses can be had.
unsafe impl Sync for Stack {}

impl Stack {
    /// Maps a stack of at least `size` usable bytes; memory is taken as it is touched.
    ///
    /// # Errors
    /// What `mmap` and `mprotect` say (`ENOMEM`), or `InvalidInput` for a size that overflows.
    pub fn new(size: usize) -> io::Result<Stack> {
        let page = page_size();
        let length = size
            .checked_add(GUARD_SIZE + COLOUR * COLOURS + page - 1)
            .map(|bytes| bytes & !(page - 1))
            .ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe { libc::mmap(ptr::null_mut(), length, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let colour = NEXT_COLOUR.fetch_add(1, Ordering::Relaxed) % COLOURS * COLOUR;
        let stack =
            Stack { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, length, colour };
        // SAFETY: the range lies within the mapping made above, which nobody else knows yet.
        let rc = unsafe {
            libc::mprotect(
                stack.base.as_ptr().add(GUARD_SIZE).cast(),
                length - GUARD_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }

    /// One past the highest usable byte, aligned to 64: where a new context begins.
    pub fn top(&self) -> *mut u8 {
        // SAFETY: the colour is smaller than the mapping, so the result stays within it.
        unsafe { self.base.as_ptr().add(self.length - self.colour) }
    }

    /// The usable addresses.
    pub fn range(&self) -> Range<usize> {
        self.base.as_ptr() as usize + GUARD_SIZE..self.top() as usize
    }

    /// The addresses of the guard: a fault here is an overflow of this stack.
    pub fn guard(&self) -> Range<usize> {
        let base = self.base.as_ptr() as usize;
        base..base + GUARD_SIZE
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping made in `new`; whoever drops the stack
        // says that no context lives on it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

fn page_size() -> usize {
    // SAFETY: sysconf has no precondition; the page size is always known on Linux.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usable_range_holds_what_was_asked_for_and_lies_above_the_guard() {
        for size in [1, 4096, 16 << 10, (1 << 20) + 1] {
            let stack = Stack::new(size).unwrap();
            assert!(stack.range().len() >= size);
            assert_eq!(stack.guard().end, stack.range().start);
            assert_eq!(stack.top() as usize % 64, 0);
        }
    }

    #[test]
    fn both_ends_can_be_written() {
        let stack = Stack::new(16 << 10).unwrap();
        for address in [stack.range().start, stack.range().end - 1] {
            let byte = address as *mut u8;
            // SAFETY: the address lies in the stack's usable range, which this test owns.
            unsafe {
                byte.write(7);
                assert_eq!(byte.read(), 7);
            }
        }
    }

    #[test]
    fn an_absurd_size_is_an_error() {
        assert!(Stack::new(usize::MAX).is_err());
        assert!(Stack::new(usize::MAX / 2).is_err());
    }

    #[test]
    fn neighbours_have_different_colours() {
        let tops: Vec<usize> = (0..4).map(|_| Stack::new(4096).unwrap().top() as usize % 4096).collect();
        // Other tests may take a colour in between, which keeps neighbours apart all the same.
        assert!(tops.windows(2).all(|pair| pair[0] != pair[1]), "{tops:?}");
    }
}

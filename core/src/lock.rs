// SPDX-License-Identifier: MIT
//! The lock of a CQ and of a channel: a word that its holder can be asked to give up, biased to the
//! thread that nearly always takes it.
//!
//! A polling waiter holds its channel for as long as it polls, so whoever else needs the channel
//! marks the word WANTED, and the poller lets go at its next look. A holder may be preempted on the
//! very core of the thread that wants the lock: that thread yields instead of spinning on.
//!
//! | word | by | to |
//! |---|---|---|
//! | FREE | `try_lock`, `lock` | HELD, or WANTED by who had to wait (others may wait still) |
//! | HELD | `lock` that waits | WANTED |
//! | HELD, WANTED | `unlock` | FREE |
//!
//! A wait takes such a lock five times, and a locked instruction costs as much as a look. After
//! [`BIAS_AFTER`] times in a row by one thread the lock is therefore **biased** to it: that thread
//! sets `inside` and looks whether it still has the bias, without a locked instruction. Who else
//! wants the lock takes the word, takes the bias away, has every thread of the process pass a full
//! barrier (membarrier(2)), and waits until `inside` is clear. A lock is only ever biased to one
//! thread, the first that earns it: a late `inside` of a former owner would wipe out that of the
//! next. So either the owner sees that the
//! bias is gone, or the other one sees that it is inside. The word is what locks; it is held by
//! whoever takes the bias away or gives it, and nobody is inside by the bias while its holder runs.
//! Without membarrier nothing is ever biased.

use std::sync::atomic::{compiler_fence, AtomicBool, AtomicU32, AtomicUsize, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const WANTED: u32 = 2;

/// Looks at a held lock before the core is yielded.
const SPINS: u32 = 64;
/// Times in a row that a thread takes the word before it gets the bias; doubled whenever it is lost.
const BIAS_AFTER: u32 = 64;
const BIAS_AFTER_MAX: u32 = 1 << 20;

const MEMBARRIER_CMD_PRIVATE_EXPEDITED: i32 = 1 << 3;
const MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED: i32 = 1 << 4;

/// Whether membarrier is there.
static BARRIER: AtomicBool = AtomicBool::new(false);

/// Registers this process for barriers in all its threads; without it they are not used.
pub fn enable_barrier() {
    // SAFETY: registering has no precondition and changes nothing but that.
    let done =
        unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0 };
    BARRIER.store(done, Ordering::Relaxed);
}

/// Whether [`barrier`] works.
#[inline(always)]
pub(crate) fn has_barrier() -> bool {
    BARRIER.load(Ordering::Relaxed)
}

/// Has every thread of the process pass a full barrier.
pub(crate) fn barrier() {
    // SAFETY: no precondition; registered, or nobody relies on it.
    unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) };
}

/// A number that no other live thread has: the address of its control block.
#[inline(always)]
fn this_thread() -> usize {
    let thread: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the control block's own address in its first word.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, preserves_flags, pure, readonly))
    };
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the ABI keeps the thread pointer there.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) thread, options(nostack, nomem, pure))
    };
    thread
}

/// The lock.
#[derive(Debug)]
pub struct Lock {
    word: AtomicU32,
    /// The word's holder is inside.
    by_word: AtomicBool,
    /// The bias's owner is inside, or is about to find that it has lost the bias.
    inside: AtomicBool,
    /// The thread that may enter without the word; 0 for none. Changed by the word's holder.
    bias: AtomicUsize,
    /// Who took the word last, and how many times in a row; touched by its holder only.
    last: AtomicUsize,
    /// The one thread that ever gets the bias; 0 until one earned it.
    owner: AtomicUsize,
    run: AtomicU32,
    bias_after: AtomicU32,
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Lock {
            word: AtomicU32::new(FREE),
            by_word: AtomicBool::new(false),
            inside: AtomicBool::new(false),
            bias: AtomicUsize::new(0),
            last: AtomicUsize::new(0),
            owner: AtomicUsize::new(0),
            run: AtomicU32::new(0),
            bias_after: AtomicU32::new(BIAS_AFTER),
        }
    }

    /// Enters by the bias, if the calling thread has it.
    #[inline(always)]
    fn enter(&self, thread: usize) -> bool {
        if self.bias.load(Ordering::Relaxed) != thread || self.inside.load(Ordering::Relaxed) {
            return false;
        }
        self.inside.store(true, Ordering::Relaxed);
        // The barrier that pairs with this one is membarrier's, in `take_bias`.
        compiler_fence(Ordering::SeqCst);
        if self.bias.load(Ordering::Relaxed) == thread {
            return true;
        }
        self.inside.store(false, Ordering::Release);
        false
    }

    /// Takes the lock if it is free.
    #[inline(always)]
    pub fn try_lock(&self) -> bool {
        let thread = this_thread();
        self.enter(thread) || self.try_word(thread)
    }

    fn try_word(&self, thread: usize) -> bool {
        // Acquire: pairs with the Release of `unlock`.
        if self.word.load(Ordering::Relaxed) != FREE
            || self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.take_bias(thread);
        if self.inside.load(Ordering::Acquire) {
            self.word.store(FREE, Ordering::Release);
            return false;
        }
        self.count(thread);
        true
    }

    /// Takes the lock.
    #[inline(always)]
    pub fn lock(&self) {
        let thread = this_thread();
        if !self.enter(thread) {
            self.lock_word(thread);
        }
    }

    fn lock_word(&self, thread: usize) {
        let mut spins = 0;
        let mut mark = HELD;
        loop {
            let seen = self.word.load(Ordering::Relaxed);
            let to = if seen == FREE { mark } else { WANTED };
            if seen != WANTED
                && self.word.compare_exchange(seen, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
                && seen == FREE
            {
                break;
            }
            // Marked WANTED when taken, too: others may be waiting still.
            mark = WANTED;
            pause(&mut spins);
        }
        self.take_bias(thread);
        while self.inside.load(Ordering::Acquire) {
            pause(&mut spins);
        }
        self.count(thread);
    }

    /// Takes the bias away from another thread; the caller holds the word.
    #[inline]
    fn take_bias(&self, thread: usize) {
        let bias = self.bias.load(Ordering::Relaxed);
        if bias != 0 && bias != thread {
            self.bias.store(0, Ordering::Relaxed);
            barrier();
            let after = self.bias_after.load(Ordering::Relaxed);
            self.bias_after.store((after * 2).min(BIAS_AFTER_MAX), Ordering::Relaxed);
        }
    }

    /// `thread` is in by the word: counts that, and gives it the bias in time.
    #[inline]
    fn count(&self, thread: usize) {
        self.by_word.store(true, Ordering::Relaxed);
        let run = if self.last.load(Ordering::Relaxed) == thread {
            self.run.load(Ordering::Relaxed) + 1
        } else {
            0
        };
        self.last.store(thread, Ordering::Relaxed);
        if run < self.bias_after.load(Ordering::Relaxed) {
            self.run.store(run, Ordering::Relaxed);
            return;
        }
        let owner = self.owner.load(Ordering::Relaxed);
        if has_barrier() && (owner == 0 || owner == thread) {
            self.run.store(0, Ordering::Relaxed);
            self.owner.store(thread, Ordering::Relaxed);
            self.bias.store(thread, Ordering::Relaxed);
        }
    }

    /// Gives the lock back.
    ///
    /// Only its holder may call this.
    #[inline(always)]
    pub fn unlock(&self) {
        // `by_word` is only ever set by a holder, so it tells how this one came in; `inside` does
        // not. Plain stores: who waits looks again, so a lost WANTED mark loses nobody.
        if self.by_word.load(Ordering::Relaxed) {
            self.by_word.store(false, Ordering::Relaxed);
            self.word.store(FREE, Ordering::Release);
        } else {
            self.inside.store(false, Ordering::Release);
        }
    }

    /// Whether somebody waits for the lock that the caller holds.
    #[inline(always)]
    pub fn wanted(&self) -> bool {
        if self.by_word.load(Ordering::Relaxed) {
            self.word.load(Ordering::Relaxed) == WANTED
        } else {
            self.bias.load(Ordering::Relaxed) == 0
        }
    }

    /// Lets those who wait have the lock, and takes it again.
    #[cold]
    pub fn lend(&self) {
        self.unlock();
        // The waiting thread may need this core to see that the lock is free.
        for _ in 0..SPINS {
            std::hint::spin_loop();
        }
        yield_core();
        self.lock();
    }

    /// Runs `f` with the lock held.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        self.lock();
        let result = f();
        self.unlock();
        result
    }
}

fn pause(spins: &mut u32) {
    *spins += 1;
    if spins.is_multiple_of(SPINS) {
        yield_core();
    } else {
        std::hint::spin_loop();
    }
}

/// sched_yield(2).
pub fn yield_core() {
    // SAFETY: no precondition; it cannot fail on Linux.
    unsafe { libc::sched_yield() };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::sync::Arc;

    #[test]
    fn excludes_and_lends() {
        let shared = Arc::new((Lock::new(), AtomicU64::new(0), AtomicU32::new(4)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        shared.0.with(|| {
                            let seen = shared.1.load(Ordering::Relaxed);
                            shared.1.store(seen + 1, Ordering::Relaxed);
                        });
                    }
                    shared.2.fetch_sub(1, Ordering::Relaxed);
                })
            })
            .collect();
        // The long holder: everybody else gets through only because it lends.
        shared.0.lock();
        while shared.2.load(Ordering::Relaxed) > 0 {
            if shared.0.wanted() {
                shared.0.lend();
            }
        }
        shared.0.unlock();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(shared.1.load(Ordering::Relaxed), 80_000);
    }

    #[test]
    fn a_biased_lock_excludes_those_who_take_the_bias_away() {
        enable_barrier();
        let shared = Arc::new((Lock::new(), AtomicU64::new(0), AtomicBool::new(false)));
        let owner = {
            let shared = shared.clone();
            std::thread::spawn(move || {
                let mut times = 0u64;
                while !shared.2.load(Ordering::Relaxed) {
                    shared.0.with(|| shared.1.store(shared.1.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
                    times += 1;
                }
                times
            })
        };
        let mut times = 0u64;
        let mut biased = 0;
        for round in 0..3_000 {
            biased += u32::from(shared.0.bias.load(Ordering::Relaxed) != 0);
            if round % 3 != 0 || shared.0.try_lock() {
                if round % 3 != 0 {
                    shared.0.lock();
                }
                shared.1.store(shared.1.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                shared.0.unlock();
                times += 1;
            }
            // The owner needs time to get the bias again; the threshold is kept low for that.
            shared.0.bias_after.store(4, Ordering::Relaxed);
            for _ in 0..2_000 {
                std::hint::spin_loop();
            }
        }
        shared.2.store(true, Ordering::Relaxed);
        times += owner.join().unwrap();
        assert_eq!(shared.1.load(Ordering::Relaxed), times);
        assert!(biased > 0 || !has_barrier(), "the bias was never given");
    }

    #[test]
    fn try_lock_fails_while_held_by_the_word_and_by_the_bias() {
        enable_barrier();
        let lock = Arc::new(Lock::new());
        assert!(lock.try_lock() && !lock.try_lock() && !lock.wanted());
        lock.unlock();
        (0..=BIAS_AFTER).for_each(|_| lock.with(|| ()));
        assert_eq!(lock.bias.load(Ordering::Relaxed) != 0, has_barrier());
        lock.lock();
        let other = lock.clone();
        assert!(!std::thread::spawn(move || other.try_lock()).join().unwrap());
        assert!(!has_barrier() || lock.wanted());
        lock.unlock();
        assert!(lock.try_lock());
    }
}

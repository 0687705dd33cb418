// SPDX-License-Identifier: MIT
//! The lock of a CQ and of a channel's list: a word that its holder can be asked to give up.
//!
//! A polling waiter holds its channel for as long as it polls, so whoever else needs the channel
//! marks the word WANTED, and the poller lets go at its next look. A holder may be preempted on the
//! very core of the thread that wants the lock: that thread yields instead of spinning on.
//!
//! | from | by | to |
//! |---|---|---|
//! | FREE | `try_lock` | HELD |
//! | FREE | `lock` that had to wait | WANTED (others may still be waiting) |
//! | HELD | `lock` that waits | WANTED |
//! | HELD, WANTED | `unlock` | FREE |

use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const WANTED: u32 = 2;

/// Looks at a held lock before the core is yielded.
const SPINS: u32 = 64;

/// The lock word.
#[derive(Debug, Default)]
pub struct Lock(AtomicU32);

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Lock(AtomicU32::new(FREE))
    }

    /// Takes the lock if it is free.
    #[inline(always)]
    pub fn try_lock(&self) -> bool {
        // Acquire: pairs with the Release of `unlock`.
        self.0.load(Ordering::Relaxed) == FREE
            && self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the lock.
    #[inline(always)]
    pub fn lock(&self) {
        if self.0.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_slow();
        }
    }

    #[cold]
    fn lock_slow(&self) {
        let mut spins = 0;
        loop {
            let seen = self.0.load(Ordering::Relaxed);
            // Marked WANTED when taken, too: others may be waiting still.
            if seen != WANTED
                && self.0.compare_exchange(seen, WANTED, Ordering::Acquire, Ordering::Relaxed).is_ok()
                && seen == FREE
            {
                return;
            }
            spins += 1;
            if spins % SPINS == 0 {
                yield_core();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Gives the lock back.
    ///
    /// Only its holder may call this.
    #[inline(always)]
    pub fn unlock(&self) {
        // A plain store: who waits looks at the word again, so a lost WANTED mark loses nobody.
        self.0.store(FREE, Ordering::Release);
    }

    /// Whether somebody waits for the lock that the caller holds.
    #[inline(always)]
    pub fn wanted(&self) -> bool {
        self.0.load(Ordering::Relaxed) == WANTED
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
    #[inline]
    pub fn with<R>(&self, f: impl FnOnce() -> R) -> R {
        self.lock();
        let result = f();
        self.unlock();
        result
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
    fn try_lock_fails_while_held() {
        let lock = Lock::new();
        assert!(lock.try_lock() && !lock.try_lock() && !lock.wanted());
        lock.unlock();
        assert!(lock.try_lock());
    }
}

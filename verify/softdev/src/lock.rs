// SPDX-License-Identifier: MIT
//! The lock of a queue, and the full barrier.
//!
//! Queues are locked and unlocked with every message, almost always by the same thread. Leaving
//! this lock is a plain store, which saves one locked instruction of two, 5 to 8 ns each. Who
//! finds it taken spins a little, yields, and then sleeps in steps: its holder does microseconds of
//! work, or has lost its CPU. Never held across anything that waits for the application.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A value that one thread at a time uses.
pub(crate) struct Lock<T> {
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by the thread that holds the lock only.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The lock, held.
pub(crate) struct Held<'a, T>(&'a Lock<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Lock { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes the lock if it is free.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Held<'_, T>> {
        let free = self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        free.is_ok().then(|| Held(self))
    }

    /// Takes the lock.
    #[inline(always)]
    pub(crate) fn lock(&self) -> Held<'_, T> {
        match self.try_lock() {
            Some(held) => held,
            None => self.wait(),
        }
    }

    #[cold]
    fn wait(&self) -> Held<'_, T> {
        let mut turn = 0_u32;
        loop {
            match turn {
                0..100 => std::hint::spin_loop(),
                100..200 => std::thread::yield_now(),
                // The holder may have less priority than those who yield.
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            if !self.taken.load(Ordering::Relaxed) {
                if let Some(held) = self.try_lock() {
                    return held;
                }
            }
            turn = turn.saturating_add(1);
        }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: held by this thread.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: held by this thread.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// A full barrier: stores before it are visible before loads after it are done.
#[inline(always)]
pub(crate) fn full_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: changes nothing. A locked instruction on a line that is here anyway is a full barrier
    // and takes half the time of mfence, which `fence` compiles to.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_thread_at_a_time_has_the_value() {
        let lock = &Lock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut value = lock.lock();
                        let seen = *value;
                        std::hint::spin_loop();
                        *value = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 80_000);
    }

    #[test]
    fn a_taken_lock_is_not_taken_again() {
        let lock = Lock::new(());
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
        assert!(lock.try_lock().is_some());
    }
}

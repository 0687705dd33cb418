// SPDX-License-Identifier: MIT
//! Objects that are recycled and never freed.
//!
//! An application may destroy a channel under its waiter, or a CQ that another thread is about to
//! look at. What FastWake keeps beside them therefore stays valid memory of the same type for ever:
//! a late look finds an object that says "gone", never a freed one.

use parking_lot::Mutex;

/// A pool of `T`.
pub struct Pool<T: 'static> {
    all: Mutex<Lists<T>>,
}

struct Lists<T: 'static> {
    all: Vec<&'static T>,
    free: Vec<&'static T>,
}

impl<T: Default + Sync + 'static> Pool<T> {
    /// An empty pool.
    pub const fn new() -> Self {
        Pool { all: Mutex::new(Lists { all: Vec::new(), free: Vec::new() }) }
    }

    /// An object that nobody uses: a recycled one, or a new one.
    pub fn take(&self) -> &'static T {
        let mut lists = self.all.lock();
        if let Some(object) = lists.free.pop() {
            return object;
        }
        let object: &'static T = Box::leak(Box::default());
        lists.all.push(object);
        object
    }

    /// Returns an object that [`Pool::take`] gave and that nobody uses any more.
    pub fn give_back(&self, object: &'static T) {
        self.all.lock().free.push(object);
    }

    /// Shows `f` every object, used or free.
    pub fn each(&self, mut f: impl FnMut(&'static T)) {
        // The list is copied: `f` may take and give back.
        let all = self.all.lock().all.clone();
        all.into_iter().for_each(&mut f);
    }
}

impl<T: Default + Sync + 'static> Default for Pool<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_taken_again_and_each_sees_all() {
        static POOL: Pool<u64> = Pool::new();
        let (a, b) = (POOL.take(), POOL.take());
        assert!(!std::ptr::eq(a, b));
        POOL.give_back(b);
        assert!(std::ptr::eq(POOL.take(), b));
        let mut seen = 0;
        POOL.each(|_| seen += 1);
        assert_eq!(seen, 2);
    }
}

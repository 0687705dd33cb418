// SPDX-License-Identifier: MIT
//! Completions that a look took out of a provider's CQ and that the application has not polled yet.
//!
//! Looking must consume nothing that the application can miss, and only `poll_cq` can look into the
//! CQ of an unknown provider: so what it returns is kept here, in order, and handed out first. The
//! provider writes straight into this ring: a completion that is copied right after it was written
//! piecemeal waits for the store buffer, which costs more than the look.

use std::mem::MaybeUninit;
use std::ptr;

use rdma_sys::ibv_wc;

/// Completions that there is room for at first.
const ROOM: usize = 16;

/// The completions of one CQ, oldest first; touched under the CQ's lock only.
#[derive(Default)]
pub struct Stash {
    /// A ring, whose length is a power of two (or zero before the first look).
    ring: Vec<MaybeUninit<ibv_wc>>,
    /// Where the oldest is.
    head: usize,
    len: usize,
}

impl Stash {
    /// Completions kept.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is kept.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn at(&self, index: usize) -> usize {
        (self.head + index) & (self.ring.len().wrapping_sub(1))
    }

    /// Room for at least one and at most `most` more, in one piece, for the provider to write to;
    /// [`Stash::filled`] says how many it wrote.
    #[inline]
    pub fn room(&mut self, most: usize) -> (*mut ibv_wc, usize) {
        if self.len == self.ring.len() {
            self.grow();
        }
        let tail = self.at(self.len);
        let until = if tail < self.head { self.head } else { self.ring.len() };
        (self.ring[tail].as_mut_ptr(), most.min(until - tail))
    }

    /// The provider wrote `n` completions into the room it was given.
    #[inline]
    pub fn filled(&mut self, n: usize) {
        self.len += n;
    }

    #[cold]
    fn grow(&mut self) {
        // In order from the start, so that nothing wraps.
        self.ring.rotate_left(self.head);
        self.head = 0;
        let room = (self.ring.len() * 2).max(ROOM);
        self.ring.resize_with(room, MaybeUninit::uninit);
    }

    /// Moves the oldest completions to `out`, as many as there are and as fit; returns how many.
    ///
    /// # Safety
    /// `out` has room for `room` completions.
    #[inline]
    pub unsafe fn pop_into(&mut self, out: *mut ibv_wc, room: usize) -> usize {
        let taken = room.min(self.len);
        for index in 0..taken {
            // SAFETY: `at` stays below the ring's length, the oldest `len` were filled, and `out`
            // has room for `taken`.
            unsafe {
                let from = self.ring.get_unchecked(self.at(index)).as_ptr();
                ptr::copy_nonoverlapping(from, out.add(index), 1);
            }
        }
        self.head = self.at(taken);
        self.len -= taken;
        taken
    }

    /// Drops the completions of a queue pair that was reset or destroyed, as the provider does.
    pub fn purge(&mut self, qp_num: u32) {
        let mut kept = 0;
        for index in 0..self.len {
            let from = self.at(index);
            // SAFETY: the oldest `len` were filled.
            if unsafe { self.ring[from].assume_init_ref() }.qp_num != qp_num {
                let to = self.at(kept);
                self.ring.swap(from, to);
                kept += 1;
            }
        }
        self.len = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn wc(wr_id: u64, qp_num: u32) -> ibv_wc {
        // SAFETY: a work completion is plain data.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        (wc.wr_id, wc.qp_num) = (wr_id, qp_num);
        wc
    }

    #[test]
    fn keeps_the_order_through_wrapping_growing_and_purging() {
        let (mut stash, mut model) = (Stash::default(), VecDeque::new());
        let (mut id, mut seed) = (0u64, 7u32);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match seed >> 28 {
                0 => {
                    stash.purge(1);
                    model.retain(|&(_, qp)| qp != 1);
                }
                1..=8 if model.len() < 200 => {
                    let (place, room) = stash.room((seed >> 20 & 7) as usize + 1);
                    for i in 0..room {
                        let qp = (id % 3) as u32;
                        // SAFETY: `room` completions fit.
                        unsafe { place.add(i).write(wc(id, qp)) };
                        model.push_back((id, qp));
                        id += 1;
                    }
                    stash.filled(room);
                }
                _ => {
                    let mut out = [(); 4].map(|()| wc(u64::MAX, 9));
                    // SAFETY: room for four.
                    let n = unsafe { stash.pop_into(out.as_mut_ptr(), 4) };
                    assert_eq!(n, model.len().min(4));
                    for wc in &out[..n] {
                        assert_eq!(Some((wc.wr_id, wc.qp_num)), model.pop_front());
                    }
                }
            }
            assert_eq!((stash.len(), stash.is_empty()), (model.len(), model.is_empty()));
        }
        assert!(id > 1_000);
    }
}

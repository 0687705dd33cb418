// SPDX-License-Identifier: MIT
//! Completions that a look took out of a provider's CQ and that the application has not polled yet.
//!
//! Looking must consume nothing that the application can miss, and only `poll_cq` can look into the
//! CQ of an unknown provider: so what it returns is kept here, in order, and handed out first.

use std::collections::VecDeque;

use rdma_sys::ibv_wc;

/// The completions of one CQ, oldest first; touched under the CQ's lock only.
#[derive(Default)]
pub struct Stash {
    wcs: VecDeque<ibv_wc>,
}

impl Stash {
    /// Completions kept.
    #[inline]
    pub fn len(&self) -> usize {
        self.wcs.len()
    }

    /// Whether nothing is kept.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.wcs.is_empty()
    }

    /// Keeps `wc` after all others.
    #[inline]
    pub fn push(&mut self, wc: ibv_wc) {
        self.wcs.push_back(wc);
    }

    /// Moves the oldest completions to `out`, as many as there are and as fit; returns how many.
    ///
    /// # Safety
    /// `out` has room for `room` completions.
    #[inline]
    pub unsafe fn pop_into(&mut self, out: *mut ibv_wc, room: usize) -> usize {
        let mut taken = 0;
        while taken < room {
            let Some(wc) = self.wcs.pop_front() else { break };
            // SAFETY: `taken` < `room`, and the caller vouches for `room`.
            unsafe { out.add(taken).write(wc) };
            taken += 1;
        }
        taken
    }

    /// Drops the completions of a queue pair that was reset or destroyed, as the provider does.
    pub fn purge(&mut self, qp_num: u32) {
        self.wcs.retain(|wc| wc.qp_num != qp_num);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(wr_id: u64, qp_num: u32) -> ibv_wc {
        // SAFETY: a work completion is plain data.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        (wc.wr_id, wc.qp_num) = (wr_id, qp_num);
        wc
    }

    #[test]
    fn hands_out_in_order_and_forgets_a_purged_queue_pair() {
        let mut stash = Stash::default();
        (0..6).for_each(|i| stash.push(wc(i, i as u32 % 2)));
        stash.purge(1);
        let mut out = [(); 4].map(|()| wc(99, 9));
        // SAFETY: `out` has room for two and for four.
        let (first, rest) =
            unsafe { (stash.pop_into(out.as_mut_ptr(), 2), stash.pop_into(out.as_mut_ptr(), 4)) };
        assert_eq!((first, rest, out[0].wr_id, stash.is_empty()), (2, 1, 4, true));
    }
}

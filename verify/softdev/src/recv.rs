// SPDX-License-Identifier: MIT
//! The receive queue: posting, and what polling does with a message that took a receive.
//!
//! The queue stands in the segment, so that a sender sees how many receives are posted, how much
//! they hold and, for long messages, where they are. Receives are taken in order when their
//! completions are polled.

use crate::connection::receive_entry;
use crate::layout::{flag, Cqe, RecvEntry, CARRIED};
use crate::mr::{access, check, owner_address};
use crate::process::Process;
use crate::qp::Qp;
use crate::ring::fence_after_locked;
use libc::c_int;
use rdma_sys::ibv_qp_state::{IBV_QPS_ERR, IBV_QPS_RESET};
use rdma_sys::{ibv_qp, ibv_recv_wr, ibv_sge, ibv_wc, ibv_wc_status};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// What only this process knows of a receive queue.
#[derive(Default)]
pub(crate) struct ReceiveQueue {
    /// Receives ever posted (modulo 2^32).
    pub(crate) posted: u32,
}

/// An entry's scatter list: where it points, and what is left of it.
pub(crate) struct Scatter<'a> {
    list: &'a [AtomicU64],
    pd: u32,
}

impl<'a> Scatter<'a> {
    /// The list of an entry of the receive queue of `qp`.
    pub(crate) fn of(qp: &Qp, entry: &RecvEntry, list: &'a [AtomicU64]) -> Self {
        let sges = entry.sges.load(Ordering::Relaxed) as usize;
        Scatter { list: &list[..(2 * sges).min(list.len())], pd: qp.pd() }
    }

    /// Spreads `len` bytes of `from` over the list, `skip` bytes into it.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn put(&self, process: &Process, from: *const u8, len: usize, skip: usize) -> bool {
        let (mut done, mut skip) = (0, skip);
        for sge in self.list.chunks_exact(2) {
            if done == len {
                break;
            }
            let (addr, room, key) = unpack(sge);
            if skip >= room {
                skip -= room;
                continue;
            }
            let n = (room - skip).min(len - done);
            let addr = addr + skip as u64;
            skip = 0;
            let map = &process.segment.map;
            let Ok(mr) = check(map, key, self.pd, addr, n as u64, access::LOCAL_WRITE) else { return false };
            // SAFETY: inside a region registered for writing; `from` as promised.
            unsafe { ptr::copy_nonoverlapping(from.add(done), owner_address(mr, addr) as *mut u8, n) };
            done += n;
        }
        done == len
    }
}

/// Address, bytes and key of a scatter entry.
pub(crate) fn unpack(sge: &[AtomicU64]) -> (u64, usize, u32) {
    let second = sge[1].load(Ordering::Relaxed);
    (sge[0].load(Ordering::Relaxed), (second & 0xffff_ffff) as usize, (second >> 32) as u32)
}

/// Fills in the completion of the receive that `entry` takes, and puts the payload where it
/// belongs. `false` if the QP has to fail. Under the lock of the receive CQ.
#[inline(always)]
pub(crate) fn deliver(qp: &Qp, entry: &Cqe, kind: u32, wc: &mut ibv_wc) -> bool {
    let number = qp.taken.load(Ordering::Relaxed);
    qp.taken.store(number.wrapping_add(1), Ordering::Release);
    if kind & flag::IMM != 0 {
        wc.wc_flags = rdma_sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;
    }
    wc.imm_data_invalidated_rkey_union.imm_data = entry.imm.load(Ordering::Relaxed);
    let Some(process) = Process::get() else { return true };
    let Some((receive, list)) = receive_entry(&process.segment.map, qp.shared, number) else { return false };
    wc.wr_id = receive.wr_id.load(Ordering::Relaxed);
    let len = wc.byte_len as usize;
    let scatter = Scatter::of(qp, receive, list);
    let placed = if kind & flag::CARRIED != 0 {
        // SAFETY: the payload of an entry that nobody writes any more, and at most all of it.
        unsafe { scatter.put(process, entry.payload.as_ptr().cast(), len.min(CARRIED), 0) }
    } else if kind & flag::BOUNCED != 0 {
        unbounce(process, qp, &scatter, entry.id.load(Ordering::Relaxed), len, 0)
    } else {
        true
    };
    if !placed {
        wc.status = ibv_wc_status::IBV_WC_LOC_PROT_ERR;
    }
    // A failed receive fails the QP; of a flushed one it has failed already.
    wc.status == ibv_wc_status::IBV_WC_SUCCESS
}

/// Copies `len` bytes from `at` on out of the bounce ring, to the place `skip` of a receive, and
/// gives their room back.
pub(crate) fn unbounce(
    process: &Process,
    qp: &Qp,
    scatter: &Scatter<'_>,
    at: u64,
    len: usize,
    skip: usize,
) -> bool {
    let size = qp.shared.bounce_len.load(Ordering::Relaxed) as usize;
    let place = qp.shared.bounce.load(Ordering::Relaxed);
    let Some(ring) = process.segment.map.bytes(place, size) else { return false };
    let start = at as usize & (size - 1);
    let first = len.min(size).min(size - start);
    let rest = len.min(size) - first;
    // SAFETY: both pieces lie inside the ring; the sender writes only what was given back.
    let placed = unsafe {
        scatter.put(process, ring.as_ptr().add(start), first, skip)
            && scatter.put(process, ring.as_ptr(), rest, skip + first)
    };
    qp.shared.bounce_head.0.swap(at + len as u64, Ordering::SeqCst);
    fence_after_locked();
    wake_sender(process, qp);
    placed
}

/// Wakes the peer's sender if it said that it waits. Pairs with `Connection::mark_stalled`: the
/// caller has just published what it waits for, with a full barrier.
#[inline(always)]
pub(crate) fn wake_sender(process: &Process, qp: &Qp) {
    if qp.shared.sender.0.stalled.load(Ordering::SeqCst) != 0 {
        wake_stalled(process, qp);
    }
}

#[cold]
fn wake_stalled(process: &Process, qp: &Qp) {
    if qp.shared.sender.0.stalled.swap(0, Ordering::SeqCst) != 0 {
        if let Some(peer) = process.peer(qp.shared.dest.load(Ordering::Relaxed) >> 12) {
            peer.kick();
        }
    }
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: called through the ops of a context of this device with one of its QPs.
    let qp = unsafe { Qp::of(qp) };
    let Some(process) = Process::get() else {
        // SAFETY: room for a pointer, as verbs demand.
        unsafe { *bad = wr };
        return libc::EPERM;
    };
    let mut rq = qp.rq.lock();
    let (before, mut wr, mut rc) = (rq.posted, wr, 0);
    // SAFETY: a list of live requests, as verbs demand.
    while let Some(request) = unsafe { wr.as_ref() } {
        rc = post(process, qp, &mut rq, request);
        if rc != 0 {
            // SAFETY: room for a pointer, as verbs demand.
            unsafe { *bad = wr };
            break;
        }
        wr = request.next;
    }
    if rq.posted != before {
        // A full barrier: {publish the receives; look for a stalled sender} against {say that one
        // stalls; look for receives}.
        qp.shared.posts.0.posted.swap(rq.posted, Ordering::SeqCst);
        fence_after_locked();
        wake_sender(process, qp);
        if qp.state() == IBV_QPS_ERR {
            // Failed before this was posted, or just now, when a last message may have taken it
            // already: what is left is counted like by whoever fails the QP.
            qp.wait_until_untouched();
            qp.flush_receives(process, &rq);
        }
    }
    rc
}

/// Enters one receive. Returns an error number.
#[inline(always)]
fn post(process: &Process, qp: &Qp, rq: &mut ReceiveQueue, request: &ibv_recv_wr) -> c_int {
    if qp.state() == IBV_QPS_RESET {
        return libc::EINVAL;
    }
    if rq.posted.wrapping_sub(qp.taken.load(Ordering::Acquire)) >= qp.cap.max_recv_wr {
        return libc::ENOMEM;
    }
    let sges = request.num_sge as usize;
    if request.num_sge < 0 || sges > qp.cap.max_recv_sge.max(1) as usize {
        return libc::EINVAL;
    }
    let Some((entry, list)) = receive_entry(&process.segment.map, qp.shared, rq.posted) else {
        return libc::ENOMEM;
    };
    let (mut bytes, mut bad) = (0_u64, false);
    for i in 0..sges {
        // SAFETY: a list of `num_sge` entries, as verbs demand.
        let sge: ibv_sge = unsafe { *request.sg_list.add(i) };
        list[2 * i].store(sge.addr, Ordering::Relaxed);
        list[2 * i + 1].store(u64::from(sge.lkey) << 32 | u64::from(sge.length), Ordering::Relaxed);
        bytes += u64::from(sge.length);
        let map = &process.segment.map;
        bad |= sge.length > 0
            && check(map, sge.lkey, qp.pd(), sge.addr, sge.length.into(), access::LOCAL_WRITE).is_err();
    }
    entry.wr_id.store(request.wr_id, Ordering::Relaxed);
    entry.bytes.store(bytes, Ordering::Relaxed);
    entry.sges.store(sges as u32, Ordering::Relaxed);
    entry.bad.store(bad.into(), Ordering::Relaxed);
    let least = &qp.shared.posts.0.min_bytes;
    let small = if bad { 0 } else { bytes.min(u64::from(u32::MAX)) as u32 };
    if small < least.load(Ordering::Relaxed) {
        least.store(small, Ordering::Relaxed);
    }
    rq.posted = rq.posted.wrapping_add(1);
    0
}

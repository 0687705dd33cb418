// SPDX-License-Identifier: MIT
//! Messages in fragments: a SEND that is longer than the bounce ring, to a peer whose memory cannot
//! be reached (`process_vm_*` is not permitted, and the receive's pages are not moved).
//!
//! The sender fills the bounce ring, again and again; the receiver's progress thread empties it
//! into the memory of the receive that the message takes. Each wakes the other. When everything is
//! there, the message completes like one that was placed directly. It is slow, some wake-ups per
//! ring, and happens only where nothing faster is allowed.

use crate::connection::{receive_entry, Connection};
use crate::execute::{Payload, Stall, Step};
use crate::process::Process;
use crate::qp::Qp;
use crate::recv::{unbounce, Scatter};
use crate::say::say_once;
use rdma_sys::ibv_qp_state::{IBV_QPS_RTR, IBV_QPS_SQE};
use rdma_sys::ibv_wc_status;
use std::sync::atomic::Ordering;

/// Sends the next fragments of a message of `total` bytes in `parts`. Called again, from the
/// beginning of the request, until it says that the payload is placed.
pub(crate) fn send(conn: &mut Connection, parts: &[(*mut u8, usize)], total: u64) -> Result<Payload, Step> {
    say_once!("process_vm_* is not permitted between these processes; long messages go in fragments, slowly");
    conn.mark_stalled();
    let left = conn.unconsumed();
    let marks = &conn.remote.sender.0;
    let mut sent = match conn.streamed {
        Some(sent) => sent,
        // What is in the ring belongs to messages that the application has yet to poll.
        None if left > 0 => return Err(Step::Wait(Stall::Room)),
        None => {
            marks.stream_receive.store(conn.sequence, Ordering::Relaxed);
            marks.stream_start.store(conn.bounce_tail, Ordering::Relaxed);
            marks.stream_tail.store(conn.bounce_tail, Ordering::Relaxed);
            marks.stream_len.store(total, Ordering::Release);
            0
        }
    };
    let room = (conn.bounce_len - left).min(total - sent);
    if room > 0 {
        let mut skip = sent;
        let mut todo = room;
        for &(from, len) in parts {
            if skip >= len as u64 {
                skip -= len as u64;
                continue;
            }
            let n = (len as u64 - skip).min(todo) as usize;
            // SAFETY: a checked part of the application's memory; `room` bytes fit.
            unsafe { conn.bounce(from.wrapping_add(skip as usize), n) };
            (skip, todo) = (0, todo - n as u64);
            if todo == 0 {
                break;
            }
        }
        sent += room;
        conn.remote.sender.0.stream_tail.store(conn.bounce_tail, Ordering::Release);
        conn.peer.kick();
    } else if sent == total && left == 0 {
        conn.streamed = None;
        marks.stream_len.store(0, Ordering::Release);
        return if marks.stream_bad.load(Ordering::Acquire) == 0 {
            Ok(Payload::Placed)
        } else {
            Err(Step::Failed(ibv_wc_status::IBV_WC_LOC_PROT_ERR))
        };
    }
    conn.streamed = Some(sent);
    Err(Step::Wait(Stall::Room))
}

/// Takes what is there of a message in fragments. Called by the progress thread.
pub(crate) fn receive(process: &Process, qp: &Qp) {
    let marks = &qp.shared.sender.0;
    if marks.stream_len.load(Ordering::Acquire) == 0 {
        return;
    }
    // Held by whoever flushes or resets the QP, too.
    let _rq = qp.rq.lock();
    if !(IBV_QPS_RTR..=IBV_QPS_SQE).contains(&qp.state()) {
        return;
    }
    let start = marks.stream_start.load(Ordering::Relaxed);
    let tail = marks.stream_tail.load(Ordering::Acquire);
    let head = qp.shared.bounce_head.0.load(Ordering::Relaxed);
    let len = tail.wrapping_sub(head);
    if head < start || len == 0 || len > u64::from(qp.shared.bounce_len.load(Ordering::Relaxed)) {
        return;
    }
    let number = marks.stream_receive.load(Ordering::Relaxed);
    let placed = receive_entry(&process.segment.map, qp.shared, number).is_some_and(|(entry, list)| {
        let scatter = Scatter::of(qp, entry, list);
        unbounce(process, qp, &scatter, head, len as usize, (head - start) as usize)
    });
    if !placed {
        marks.stream_bad.store(1, Ordering::Release);
    }
}

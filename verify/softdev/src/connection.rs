// SPDX-License-Identifier: MIT
//! The sending side of a connection: the peer's QP as this process sees it.
//!
//! The sender acts as the peer's adapter. It keeps copies of what the receiver publishes (receives
//! posted, room in the bounce ring) and looks again only when its copy is used up, so that a
//! message costs one line: the completion entry.

use crate::cq::take_arm;
use crate::layout::{fault, CqShared, QpShared, RecvEntry};
use crate::peer::{Mapped, Peer};
use crate::process::Process;
use crate::qp::Qp;
use crate::ring::{fence_after_locked, Cursor, Ring};
use rdma_sys::ibv_qp_state::{IBV_QPS_RTR, IBV_QPS_SQE};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// Keys of moved regions whose pages a connection keeps mapped.
const MAPPED: usize = 8;

/// A connected peer QP.
pub(crate) struct Connection {
    pub(crate) peer: Arc<Peer>,
    pub(crate) remote: &'static QpShared,
    pub(crate) cq: &'static CqShared,
    pub(crate) ring: Ring,
    /// This connection's idea of the peer's ring.
    pub(crate) cursor: Cursor,
    doorbell: &'static AtomicU32,
    /// Index of the peer's QP.
    index: u32,
    /// Generation of the peer's QP; another one is another QP.
    generation: u32,
    /// Messages sent that take a receive: the next one takes the receive of this number.
    pub(crate) sequence: u32,
    /// `Posts::posted` and `Posts::min_bytes` as last seen.
    pub(crate) posted: u32,
    pub(crate) min_bytes: u32,
    bounce: NonNull<u8>,
    pub(crate) bounce_len: u64,
    /// Bytes ever written to the bounce ring, and consumed as last seen.
    pub(crate) bounce_tail: u64,
    bounce_head: u64,
    /// Odd and growing: what this QP's `touching` says while it touches something.
    touches: u64,
    /// Bytes already sent of a message in fragments.
    pub(crate) streamed: Option<u64>,
    /// Moved pages of the peer: key, place in its memory file, mapping.
    mapped: Vec<(u32, u64, Arc<Mapped>)>,
}

// SAFETY: `bounce` points into the peer's mapped segment, which `peer` keeps mapped.
unsafe impl Send for Connection {}

impl Connection {
    /// Connects `qp` to the QP number that it was told; `None` as long as that one is not ready for
    /// it, or still bound to an earlier life of `qp`.
    pub(crate) fn establish(process: &Process, qp: &Qp) -> Option<Connection> {
        let (own, dest) = (qp.ibv.qp_num, qp.shared.dest.load(Ordering::Relaxed));
        let peer = process.peer(dest >> 12)?;
        let remote = peer.qp(dest & 0xfff)?;
        let life = remote.life.load(Ordering::Acquire);
        if !receives(life) || remote.dest.load(Ordering::Acquire) != own {
            return None;
        }
        let map = &peer.map;
        let place = remote.recv_cq.load(Ordering::Relaxed);
        let (cq, ring) = Ring::at(map, place)?;
        let bounce_len = remote.bounce_len.load(Ordering::Relaxed);
        let bounce = map.bytes(remote.bounce.load(Ordering::Relaxed), bounce_len as usize)?;
        let doorbell = map.head().doorbells.get(remote.recv_cq_index.load(Ordering::Relaxed) as usize)?;
        if !bounce_len.is_power_of_two() {
            return None;
        }
        let us = qp.shared.life.load(Ordering::Relaxed) >> 8 | 1 << 31;
        let bound = remote.sender.0.owner.compare_exchange(0, us, Ordering::AcqRel, Ordering::Acquire);
        if bound.is_err_and(|now| now != us) {
            return None;
        }
        Some(Connection {
            remote,
            cq,
            ring,
            cursor: ring.cursor(),
            doorbell,
            index: dest & 0xfff,
            generation: life >> 8,
            sequence: 0,
            posted: 0,
            min_bytes: 0,
            bounce,
            bounce_len: u64::from(bounce_len),
            bounce_tail: 0,
            bounce_head: 0,
            touches: 1,
            streamed: None,
            mapped: Vec::new(),
            peer,
        })
    }

    /// Whether the peer's QP is still the one that this connection was made to, and receives.
    #[inline(always)]
    pub(crate) fn receives(&self) -> bool {
        let life = self.remote.life.load(Ordering::SeqCst);
        life >> 8 == self.generation && receives(life)
    }

    /// The peer's index of its QP.
    #[inline(always)]
    pub(crate) fn remote_index(&self) -> u32 {
        self.index
    }

    /// Whether a receive is posted for the next message.
    #[inline(always)]
    pub(crate) fn has_receive(&mut self) -> bool {
        self.posted != self.sequence || self.look_for_receives()
    }

    #[cold]
    fn look_for_receives(&mut self) -> bool {
        let posts = &self.remote.posts.0;
        // Acquire: the entries, and the smallest size, of all receives counted here.
        self.posted = posts.posted.load(Ordering::Acquire);
        self.min_bytes = posts.min_bytes.load(Ordering::Relaxed);
        self.posted != self.sequence
    }

    /// The receive that the next message takes.
    pub(crate) fn next_receive(&self) -> Option<(&'static RecvEntry, &'static [AtomicU64])> {
        receive_entry(&self.peer.map, self.remote, self.sequence)
    }

    /// Whether `len` bytes fit into the bounce ring now.
    pub(crate) fn has_room(&mut self, len: u64) -> bool {
        self.bounce_len - (self.bounce_tail - self.bounce_head) >= len
            || self.bounce_len - self.unconsumed() >= len
    }

    /// Bytes of the bounce ring that the receiver has not consumed.
    pub(crate) fn unconsumed(&mut self) -> u64 {
        self.bounce_head = self.remote.bounce_head.0.load(Ordering::Acquire);
        self.bounce_tail - self.bounce_head
    }

    /// Copies `len` bytes to the bounce ring, behind those that are there.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, and [`Connection::has_room`] said that they fit.
    pub(crate) unsafe fn bounce(&mut self, from: *const u8, len: usize) {
        let at = (self.bounce_tail & (self.bounce_len - 1)) as usize;
        let first = len.min(self.bounce_len as usize - at);
        // SAFETY: both pieces lie inside the ring and inside `from`.
        unsafe {
            ptr::copy_nonoverlapping(from, self.bounce.as_ptr().add(at), first);
            ptr::copy_nonoverlapping(from.add(first), self.bounce.as_ptr(), len - first);
        }
        self.bounce_tail += len as u64;
    }

    /// Tells the receiver that this sender waits. A full barrier; the caller looks once more
    /// afterwards.
    pub(crate) fn mark_stalled(&self) {
        self.remote.sender.0.stalled.swap(1, Ordering::SeqCst);
        fence_after_locked();
    }

    /// Rings the doorbell and fires the event of a completion that was just published.
    #[inline(always)]
    pub(crate) fn announce(&self, solicited: bool) {
        if self.doorbell.load(Ordering::Relaxed) == 0 {
            self.doorbell.store(1, Ordering::Release);
        }
        if self.cq.armed.load(Ordering::SeqCst) != 0 {
            self.fire(solicited);
        }
    }

    #[cold]
    fn fire(&self, solicited: bool) {
        if take_arm(self.cq, solicited) {
            let channel = self.cq.channel.load(Ordering::Relaxed);
            if !self.peer.write_event(channel, self.cq.cookie.load(Ordering::Acquire)) {
                self.cq.unwritten.fetch_add(1, Ordering::AcqRel);
                self.peer.kick();
            }
        }
    }

    /// Makes the peer's QP fail for the reason `code`.
    pub(crate) fn accuse(&self, code: u32) {
        if code == fault::OVERFLOW {
            self.cq.overflowed.store(1, Ordering::Release);
        }
        let fault = &self.remote.sender.0.fault;
        let _ = fault.compare_exchange(0, code, Ordering::SeqCst, Ordering::Relaxed);
        self.peer.kick();
    }

    /// Says in `own` that the peer's memory is being touched. What is checked after this stays
    /// valid until [`untouch`]: who takes it back waits.
    pub(crate) fn touch(&mut self, own: &QpShared) {
        self.touches += 2;
        own.touching.0.swap(self.touches, Ordering::SeqCst);
        fence_after_locked();
    }

    /// Pages of the peer's memory file, mapped here.
    pub(crate) fn mapped(&mut self, key: u32, at: u64, len: usize) -> Option<&Mapped> {
        let found = self.mapped.iter().position(|(k, a, _)| *k == key && *a == at);
        let index = match found {
            Some(index) => index,
            None => {
                let mapped = self.peer.memory(|fd| Mapped::new(fd, at, len))?;
                if self.mapped.len() == MAPPED {
                    self.mapped.remove(0);
                }
                self.mapped.push((key, at, Arc::new(mapped)));
                self.mapped.len() - 1
            }
        };
        Some(&self.mapped[index].2)
    }
}

/// Ends what [`Connection::touch`] began.
pub(crate) fn untouch(own: &QpShared) {
    own.touching.0.store(0, Ordering::Release);
}

/// Whether a QP whose `life` this is takes messages.
#[inline(always)]
fn receives(life: u32) -> bool {
    (IBV_QPS_RTR..=IBV_QPS_SQE).contains(&(life & 0xff))
}

/// Entry `number` of the receive queue of `qp`, with its scatter list: address, then length and
/// key, of each.
pub(crate) fn receive_entry(
    map: &crate::segment::Map,
    qp: &QpShared,
    number: u32,
) -> Option<(&'static RecvEntry, &'static [AtomicU64])> {
    let len = qp.rq_len.load(Ordering::Relaxed);
    let stride = qp.rq_stride.load(Ordering::Relaxed) as usize;
    let index = (number & len.wrapping_sub(1)) as usize;
    let words = map.slice::<AtomicU64>(qp.rq.load(Ordering::Relaxed), len as usize * stride / 8)?;
    let words = &words[index * stride / 8..][..stride / 8];
    let (head, list) = words.split_at(size_of::<RecvEntry>() / 8);
    // SAFETY: the first words of an entry are a `RecvEntry`, 8-byte aligned, in memory that lives
    // as long as `words`.
    Some((unsafe { &*head.as_ptr().cast::<RecvEntry>() }, list))
}

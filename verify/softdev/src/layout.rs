// SPDX-License-Identifier: MIT
//! What two processes share: the layout of a segment.
//!
//! Every process that opens the device owns one segment, a file that its peers map whole. All
//! fields that more than one process touches are atomics; who writes a field is said at the field.
//! Lines are grouped by writer, so that a message moves no line but that of its completion entry.
//! Nothing here follows a pointer: places inside a segment are offsets, in units of 64 bytes.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// First word of a segment that is ready for use.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"fwsoft01");
/// Segment ids are 1 to this; an id is the upper half of a QP number.
pub(crate) const MAX_SEGMENTS: u32 = 4095;
/// QPs of one process; the index is the lower half of a QP number.
pub(crate) const MAX_QP: usize = 4096;
/// CQs of one process.
pub(crate) const MAX_CQ: usize = 4096;
/// Records of memory regions per block of the MR directory.
pub(crate) const MR_BLOCK: usize = 64;
/// Blocks of the MR directory.
pub(crate) const MR_BLOCKS: usize = 256;
/// Unit of an offset inside a segment, bytes. Also the alignment of everything.
pub(crate) const UNIT: usize = 64;
/// Payload bytes that ride in the completion entry itself.
pub(crate) const CARRIED: usize = 32;
/// `CqShared::channel` of a CQ without a completion channel.
pub(crate) const NO_CHANNEL: u32 = u32::MAX;

/// The head of a segment.
#[repr(C, align(64))]
pub(crate) struct SegmentHead {
    /// [`MAGIC`]; written before the segment gets its name.
    pub(crate) magic: AtomicU64,
    /// The owner's process id.
    pub(crate) pid: AtomicU32,
    /// The id that names the segment.
    pub(crate) id: AtomicU32,
    /// The owner's start time, in clock ticks since boot: with `pid`, who the owner is.
    pub(crate) start_time: AtomicU64,
    /// Address of a word of the owner that holds [`MAGIC`]: what peers try `process_vm_readv` on.
    pub(crate) probe: AtomicU64,
    /// Bytes of the file that are allocated; grows only.
    pub(crate) allocated: AtomicU64,
    /// 1 once the owner left in order (exit); a peer killed never sets it.
    pub(crate) left: AtomicU32,
    /// 1 while a wake-up of the owner's progress thread is under way. Anybody sets, the owner clears.
    pub(crate) kicked: Line<AtomicU32>,
    /// Places of the QP records; 0 where none was ever made. An entry never changes once set.
    pub(crate) qps: [AtomicU32; MAX_QP],
    /// Places of the blocks of MR records.
    pub(crate) mrs: [AtomicU32; MR_BLOCKS],
    /// One word per CQ, see `doorbell.rs`. Producers write 1, who watches writes 0.
    pub(crate) doorbells: [AtomicU32; MAX_CQ],
}

/// A value alone on its cache line.
#[repr(C, align(64))]
pub(crate) struct Line<T>(pub(crate) T);

/// What peers see of a QP. Never freed: a destroyed QP's record serves the next QP of that index,
/// so that a late store of a former peer hits nothing else.
#[repr(C, align(64))]
pub(crate) struct QpShared {
    // Written by the owner when the QP changes state; read by the sender with every message.
    /// Generation (upper 24 bits, moves on at RESET and destruction) and state (lower 8).
    pub(crate) life: AtomicU32,
    /// QP number that this QP is connected to.
    pub(crate) dest: AtomicU32,
    /// `qp_access_flags`.
    pub(crate) access: AtomicU32,
    /// The protection domain.
    pub(crate) pd: AtomicU32,
    /// Place of the receive CQ's record.
    pub(crate) recv_cq: AtomicU32,
    /// Index of the receive CQ.
    pub(crate) recv_cq_index: AtomicU32,
    /// Place of the receive queue.
    pub(crate) rq: AtomicU32,
    /// Entries of the receive queue, a power of two.
    pub(crate) rq_len: AtomicU32,
    /// Bytes from one entry of the receive queue to the next.
    pub(crate) rq_stride: AtomicU32,
    /// Place of the bounce ring.
    pub(crate) bounce: AtomicU32,
    /// Bytes of the bounce ring, a power of two.
    pub(crate) bounce_len: AtomicU32,
    /// The wait between two RNR retries, microseconds (from `min_rnr_timer`).
    pub(crate) rnr_wait_us: AtomicU32,
    /// Written by the owner when it posts receives; the sender looks when its credit is used up.
    pub(crate) posts: Line<Posts>,
    /// Bytes of the bounce ring ever consumed; written by the owner.
    pub(crate) bounce_head: Line<AtomicU64>,
    /// Written by the sender only when something is wrong or slow.
    pub(crate) sender: Line<SenderMarks>,
    /// Written by the owner, as a sender: the peer's key or queue that it is about to touch; 0 when
    /// it touches nothing. Who takes memory back waits for this (see `access.rs`).
    pub(crate) touching: Line<AtomicU64>,
}

/// What the receiver publishes about its receive queue.
#[repr(C)]
pub(crate) struct Posts {
    /// Receives ever posted (modulo 2^32).
    pub(crate) posted: AtomicU32,
    /// Smallest capacity of any receive posted since the QP was made, bytes. A message no longer
    /// than this needs no look at its own receive. 0 once a receive with a bad key was posted.
    pub(crate) min_bytes: AtomicU32,
}

/// What a sender tells the receiver besides messages.
#[repr(C)]
pub(crate) struct SenderMarks {
    /// 1: the sender waits for a receive, for room, or for this QP to become ready.
    pub(crate) stalled: AtomicU32,
    /// Not 0: the sender found a reason for this QP to fail; a `fault` code.
    pub(crate) fault: AtomicU32,
    /// Which life of the sender's QP sends here; 0 before the first message.
    pub(crate) owner: AtomicU32,
    /// A message in fragments: the receive that it takes, …
    pub(crate) stream_receive: AtomicU32,
    /// … where in the bounce ring (same count as `bounce_head`) it began, …
    pub(crate) stream_start: AtomicU64,
    /// … up to where it is there, …
    pub(crate) stream_tail: AtomicU64,
    /// … and its length, bytes; 0 while none is under way.
    pub(crate) stream_len: AtomicU64,
    /// Written by the receiver: 1 when such a message could not be put into the receive's memory.
    pub(crate) stream_bad: AtomicU32,
}

/// Codes of [`SenderMarks::fault`].
pub(crate) mod fault {
    /// A READ, WRITE or atomic was refused.
    pub(crate) const ACCESS: u32 = 1;
    /// A SEND was longer than its receive, or the receive's memory could not be written.
    pub(crate) const REQUEST: u32 = 2;
    /// The receive CQ was full.
    pub(crate) const OVERFLOW: u32 = 3;
}

/// One entry of a receive queue; `sges` of them follow, 16 bytes each, as in `ibv_sge`.
#[repr(C)]
pub(crate) struct RecvEntry {
    pub(crate) wr_id: AtomicU64,
    /// Capacity, bytes.
    pub(crate) bytes: AtomicU64,
    /// Count of scatter entries.
    pub(crate) sges: AtomicU32,
    /// 1 when a key was wrong at posting.
    pub(crate) bad: AtomicU32,
    pub(crate) _pad: u64,
}

/// What peers see of a CQ; its entries follow, and then one claim (8 bytes) for each.
#[repr(C, align(64))]
pub(crate) struct CqShared {
    /// Entries of the ring, a power of two. Written by the owner, once.
    pub(crate) len: AtomicU32,
    /// Number of the completion channel, or [`NO_CHANNEL`].
    pub(crate) channel: AtomicU32,
    /// The record that an event on this CQ writes to the channel: the owner's `ibv_cq *`.
    pub(crate) cookie: AtomicU64,
    /// 0, [`ARM_NEXT`] or [`ARM_SOLICITED`]. The owner arms, who fires takes the arm.
    pub(crate) armed: AtomicU32,
    /// 1 once the ring overflowed.
    pub(crate) overflowed: AtomicU32,
    /// Events ever fired.
    pub(crate) fired: AtomicU32,
    /// Events fired whose record found the channel full; the owner writes them later.
    pub(crate) unwritten: AtomicU32,
    /// Index of the CQ in its process: names its doorbell.
    pub(crate) index: AtomicU32,
    /// A place that the tail has passed: where a producer that knows nothing starts to look.
    pub(crate) tail: Line<AtomicU64>,
    /// Entries ever consumed. Written by the owner; a producer looks when its copy says "full".
    pub(crate) consumed: Line<AtomicU64>,
}

/// Armed for the next completion.
pub(crate) const ARM_NEXT: u32 = 1;
/// Armed for the next solicited (or failed) completion.
pub(crate) const ARM_SOLICITED: u32 = 2;

/// One completion entry: one cache line, written by whoever claimed its slot.
#[repr(C, align(64))]
pub(crate) struct Cqe {
    /// Turn and state, see `ring.rs`.
    pub(crate) word: AtomicU64,
    /// Index of the owner's QP.
    pub(crate) qp: AtomicU32,
    pub(crate) len: AtomicU32,
    /// Immediate data as the sender gave it; of a send completion the count of the WQE.
    pub(crate) imm: AtomicU32,
    /// `ibv_wc_status` (bits 0–7), `ibv_wc_opcode` (8–23), flags (24–31).
    pub(crate) kind: AtomicU32,
    /// `wr_id` of a send completion; place in the bounce ring of a receive completion.
    pub(crate) id: AtomicU64,
    /// The payload, if it is carried.
    pub(crate) payload: [AtomicU64; CARRIED / 8],
}

/// Flags of [`Cqe::kind`].
pub(crate) mod flag {
    /// Consumes a receive.
    pub(crate) const RECV: u32 = 1 << 24;
    /// Has immediate data.
    pub(crate) const IMM: u32 = 1 << 25;
    /// The payload is in the entry.
    pub(crate) const CARRIED: u32 = 1 << 26;
    /// The payload is in the bounce ring.
    pub(crate) const BOUNCED: u32 = 1 << 27;
}

/// One memory region, as peers see it.
#[repr(C, align(64))]
pub(crate) struct MrShared {
    /// The key while the region is valid, else 0. The lower 8 bits move on with each registration.
    pub(crate) key: AtomicU32,
    /// `ibv_access_flags`.
    pub(crate) access: AtomicU32,
    pub(crate) pd: AtomicU32,
    /// The last key given out for this record.
    pub(crate) last_key: AtomicU32,
    /// First address as keys name it.
    pub(crate) iova: AtomicU64,
    /// Bytes.
    pub(crate) len: AtomicU64,
    /// First address in the owner's memory.
    pub(crate) addr: AtomicU64,
    /// The part whose pages were moved to the owner's memory file: first address there is, …
    pub(crate) moved: AtomicU64,
    /// … bytes (0: none), and place in the file.
    pub(crate) moved_len: AtomicU64,
    pub(crate) moved_at: AtomicU64,
}

const _: () = {
    assert!(size_of::<Cqe>() == 64);
    assert!(size_of::<MrShared>() == 64);
    assert!(size_of::<CqShared>() == 192);
    assert!(size_of::<QpShared>() == 320);
    assert!(size_of::<RecvEntry>() == 32);
    // A segment head and a few queues fit well into the megabyte that 64 processes have each.
    assert!(size_of::<SegmentHead>() < 64 * 1024);
};

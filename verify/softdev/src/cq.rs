// SPDX-License-Identifier: MIT
//! Completion queues: making, polling, arming, destroying.
//!
//! Receive completions come through a ring in the segment (`ring.rs`), which peers write. Send
//! completions come through a ring of this process alone, so that a CQ that serves for both does not
//! have its lines pulled to and fro. The lock is the consumer's: it guards the position of the next entry and, with it, the order in
//! which receives are taken from the receive queues.

use crate::async_event::{settle, wait_acknowledged, Element};
use crate::channel::{channel_of, settle_events, Channel};
use crate::context::{ours, Context};
use crate::layout::{flag, CqShared, Cqe, ARM_NEXT, ARM_SOLICITED, NO_CHANNEL};
use crate::lock::Lock;
use crate::process::Process;
use crate::qp::Qp;
use crate::real::{fail, forward, refuse};
use crate::recv;
use crate::ring::{Cursor, Next, Ring};
use libc::{c_int, c_void};
use parking_lot::Mutex;
use rdma_sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_event_type, ibv_wc, ibv_wc_status};
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Most entries of a CQ.
pub(crate) const MAX_CQE: usize = 1 << 20;

/// A [`Cursor`] for all threads of the process. What one stores may be older than what is there:
/// a start for the next search, no more.
struct SharedCursor {
    tail: AtomicU64,
    consumed: AtomicU64,
}

impl SharedCursor {
    fn of(ring: &Ring) -> Self {
        let Cursor { tail, consumed } = ring.cursor();
        SharedCursor { tail: AtomicU64::new(tail), consumed: AtomicU64::new(consumed) }
    }

    #[inline(always)]
    fn load(&self) -> Cursor {
        let (tail, consumed) = (&self.tail, &self.consumed);
        Cursor { tail: tail.load(Ordering::Relaxed), consumed: consumed.load(Ordering::Acquire) }
    }

    #[inline(always)]
    fn store(&self, cursor: Cursor) {
        self.tail.store(cursor.tail, Ordering::Relaxed);
        self.consumed.store(cursor.consumed, Ordering::Release);
    }
}

/// A completion queue of this process.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) ibv: ibv_cq,
    pub(crate) index: usize,
    pub(crate) shared: &'static CqShared,
    pub(crate) ring: Ring,
    /// Where `shared` lies in the segment.
    pub(crate) place: u32,
    doorbell: &'static AtomicU32,
    /// The ring of send completions.
    own: Ring,
    /// Guards consuming from both.
    consumer: Lock<()>,
    /// This process's ideas of both, as a producer.
    cursor: SharedCursor,
    own_cursor: SharedCursor,
    /// The QPs that complete here, each once for sending and once for receiving.
    pub(crate) users: Mutex<Vec<*const Qp>>,
    /// QPs whose sends go here and wait for something.
    pub(crate) stalled: AtomicU32,
    pub(crate) async_raised: AtomicU32,
    /// The overflow was dealt with.
    reported: AtomicBool,
}

// SAFETY: raw pointers to objects of the same process, whose use is said where they stand.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// The CQ behind a verbs pointer.
    ///
    /// # Safety
    /// `cq` is a live CQ of this device.
    #[inline(always)]
    pub(crate) unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Cq {
        // SAFETY: such a pointer was made from a `Cq`, whose first field it is.
        unsafe { &*cq.cast::<Cq>() }
    }

    /// The record that events of this CQ write.
    pub(crate) fn cookie(&self) -> u64 {
        ptr::from_ref(self) as u64
    }

    pub(crate) fn channel(&self) -> Option<&Channel> {
        // SAFETY: the channel cannot go while this CQ holds it.
        unsafe { channel_of(self.ibv.channel) }
    }

    /// Queues a send completion. `fill` writes all of the entry but its word.
    #[inline]
    pub(crate) fn push_send(&self, segment: u32, failed: bool, fill: impl FnOnce(&Cqe)) {
        self.push(&self.own, &self.own_cursor, segment, failed, fill);
    }

    /// Queues the completion of a receive that was flushed, behind those that were not.
    pub(crate) fn push_flushed(&self, segment: u32, fill: impl FnOnce(&Cqe)) {
        self.push(&self.ring, &self.cursor, segment, true, fill);
    }

    #[inline(always)]
    fn push(
        &self,
        ring: &Ring,
        shared: &SharedCursor,
        segment: u32,
        solicited: bool,
        fill: impl FnOnce(&Cqe),
    ) {
        let mut cursor = shared.load();
        let Ok(claim) = ring.claim(&mut cursor, segment) else {
            self.overflow();
            return;
        };
        shared.store(cursor);
        fill(claim.entry);
        claim.publish();
        if self.doorbell.load(Ordering::Relaxed) == 0 {
            self.doorbell.store(1, Ordering::Release);
        }
        if take_arm(self.shared, solicited) && !self.write_event() {
            self.shared.unwritten.fetch_add(1, Ordering::AcqRel);
            if let Some(process) = Process::get() {
                process.progress.wake();
            }
        }
    }

    /// Writes an event record to the channel; `false` if that is full.
    pub(crate) fn write_event(&self) -> bool {
        self.channel().is_none_or(|channel| channel.write_event(self.cookie()))
    }

    /// Whether an event-mode application is `ahead` completions behind with polling.
    #[inline(always)]
    pub(crate) fn paces(&self, ahead: u64) -> bool {
        !self.ibv.channel.is_null()
            && self.own_cursor.tail.load(Ordering::Relaxed).saturating_sub(self.own.consumed()) >= ahead
    }

    /// The ring is full: the CQ fails. The progress thread says so and fails the QPs.
    #[cold]
    fn overflow(&self) {
        self.shared.overflowed.store(1, Ordering::Release);
        if let Some(process) = Process::get() {
            process.progress.wake();
        }
    }

    /// Whether the ring overflowed since this was asked last. Once.
    pub(crate) fn newly_overflowed(&self) -> bool {
        self.shared.overflowed.load(Ordering::Acquire) != 0 && !self.reported.swap(true, Ordering::AcqRel)
    }

    /// Raises the event of an overflow and fails the QPs that complete here.
    pub(crate) fn fail_users(&self, process: &Process) {
        // SAFETY: the context outlives its CQs.
        let context = unsafe { Context::of(self.ibv.context) };
        context.async_queue.raise(ibv_event_type::IBV_EVENT_CQ_ERR, Element::Cq(self));
        let mut users = self.users.lock().clone();
        users.sort_unstable();
        users.dedup();
        process.qps.each(|qp| {
            if users.contains(&ptr::from_ref(qp)) {
                qp.fail(process);
                qp.raise(ibv_event_type::IBV_EVENT_QP_FATAL);
            }
        });
    }

    /// Looks at the rings while nobody consumes.
    pub(crate) fn locked<R>(&self, look: impl FnOnce() -> R) -> R {
        let _consumer = self.consumer.lock();
        look()
    }

    /// Receive completions of QP `index` that nobody has polled yet. Under the lock of [`Cq::locked`].
    pub(crate) fn unpolled_receives(&self, index: u32) -> u32 {
        let of_qp = |entry: &&Cqe| {
            entry.qp.load(Ordering::Relaxed) == index && entry.kind.load(Ordering::Relaxed) & flag::RECV != 0
        };
        self.ring.published().map(|(_, entry)| entry).filter(of_qp).count() as u32
    }

    /// Removes all completions of QP `index`: it is reset or destroyed.
    pub(crate) fn purge(&self, index: u32) {
        self.locked(|| {
            for ring in [&self.ring, &self.own] {
                for (position, entry) in ring.published() {
                    if entry.qp.load(Ordering::Relaxed) == index {
                        ring.void(position);
                    }
                }
            }
        });
    }

    #[inline(always)]
    fn poll(&self, process: &Process, want: usize, wc: *mut ibv_wc) -> c_int {
        if self.stalled.load(Ordering::Relaxed) != 0 {
            self.push_on();
        }
        if self.rings_empty() {
            return self.nothing();
        }
        let (mut got, mut failed) = (0, None);
        let consumer = self.consumer.lock();
        // Own ones first: a send that failed is seen before the receives that were flushed for it, and
        // a request before its answer.
        for ring in [&self.own, &self.ring] {
            let mut position = ring.consumed();
            while got < want {
                match ring.next(position) {
                    Next::Empty => break,
                    Next::Void => {}
                    Next::Ready(entry) => {
                        // SAFETY: the application gave room for `want` completions. A QP takes its
                        // entries out of the rings, under this lock, before it goes.
                        unsafe {
                            let qp = process.qps.get(entry.qp.load(Ordering::Relaxed) as usize);
                            if let Some(qp) = qp.as_ref() {
                                if !complete(qp, entry, &mut *wc.add(got)) {
                                    failed = Some(qp.index as usize);
                                }
                                got += 1;
                            }
                        }
                    }
                }
                position += 1;
                ring.release(position);
            }
        }
        drop(consumer);
        if self.stalled.load(Ordering::Relaxed) != 0 {
            // What waits for this poll completes after it, and after the arm before it.
            self.push_on();
        }
        if let Some(index) = failed {
            // Another thread may destroy it meanwhile; the table keeps it, or has it no more.
            process.qps.pinned(index, |qp| qp.fail(process));
        }
        got as c_int
    }

    #[inline(always)]
    fn rings_empty(&self) -> bool {
        matches!(self.ring.next(self.ring.consumed()), Next::Empty)
            && matches!(self.own.next(self.own.consumed()), Next::Empty)
    }

    /// Whether a poll has something to do.
    #[inline(always)]
    pub(crate) fn is_ready(&self) -> bool {
        !matches!(self.ring.next(self.ring.consumed()), Next::Empty)
            || !matches!(self.own.next(self.own.consumed()), Next::Empty)
            || self.stalled.load(Ordering::Relaxed) != 0
            || self.shared.overflowed.load(Ordering::Relaxed) != 0
    }

    #[cold]
    fn nothing(&self) -> c_int {
        if self.shared.overflowed.load(Ordering::Relaxed) == 0 {
            0
        } else {
            -libc::EIO
        }
    }

    /// Lets the sends that wait for something try again.
    #[cold]
    fn push_on(&self) {
        let Some(process) = Process::get() else { return };
        let users = self.users.lock();
        for &qp in users.iter() {
            // SAFETY: a QP leaves `users` before it goes.
            let qp = unsafe { &*qp };
            if ptr::eq(qp.send_cq(), self) {
                qp.push_on(process);
            }
        }
    }
}

/// Makes a work completion of an entry. `false` if the QP has to fail.
#[inline(always)]
fn complete(qp: &Qp, entry: &Cqe, wc: &mut ibv_wc) -> bool {
    let kind = entry.kind.load(Ordering::Relaxed);
    wc.vendor_err = 0;
    wc.qp_num = qp.ibv.qp_num;
    wc.src_qp = 0;
    wc.wc_flags = 0;
    wc.pkey_index = 0;
    wc.slid = 0;
    wc.sl = 0;
    wc.dlid_path_bits = 0;
    wc.byte_len = entry.len.load(Ordering::Relaxed);
    wc.status = kind & 0xff;
    wc.opcode = kind >> 8 & 0xffff & !(flag::RECV >> 8);
    if kind & flag::RECV != 0 {
        return recv::deliver(qp, entry, kind, wc);
    }
    wc.wr_id = entry.id.load(Ordering::Relaxed);
    wc.imm_data_invalidated_rkey_union.imm_data = 0;
    // The count of the WQE: it and those before it are free again.
    qp.reaped.store(entry.imm.load(Ordering::Relaxed), Ordering::Release);
    true
}

/// Takes the arm of a CQ if the completion that was just published fires it. The caller published
/// with a full barrier; arming is one too.
#[inline(always)]
pub(crate) fn take_arm(cq: &CqShared, solicited: bool) -> bool {
    let armed = cq.armed.load(Ordering::SeqCst);
    if armed == 0 || (armed == ARM_SOLICITED && !solicited) {
        return false;
    }
    if cq.armed.compare_exchange(armed, 0, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        // Another producer took it, or the arm became one for any completion: look once more.
        let now = cq.armed.load(Ordering::SeqCst);
        if now != ARM_NEXT || cq.armed.compare_exchange(now, 0, Ordering::SeqCst, Ordering::Relaxed).is_err()
        {
            return false;
        }
    }
    cq.fired.fetch_add(1, Ordering::AcqRel);
    true
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, want: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: called through the ops of a context of this device with one of its CQs.
    let cq = unsafe { Cq::of(cq) };
    match Process::get() {
        Some(process) => cq.poll(process, want.max(0) as usize, wc),
        None => -libc::EPERM,
    }
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as for `poll_cq`.
    let cq = unsafe { Cq::of(cq) };
    if Process::get().is_none() {
        return libc::EPERM;
    }
    let armed = &cq.shared.armed;
    // Both are full barriers: what is published after this is seen to be armed for. An arm for any
    // completion stays one when a solicited one follows.
    if solicited_only == 0 {
        armed.swap(ARM_NEXT, Ordering::SeqCst);
    } else {
        let _ = armed.compare_exchange(0, ARM_SOLICITED, Ordering::SeqCst, Ordering::SeqCst);
    }
    crate::ring::fence_after_locked();
    0
}

#[no_mangle]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: the caller hands a live context and a live channel of it, or null.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_create_cq",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
                ptr::null_mut(),
                context,
                cqe,
                cq_context,
                channel,
                vector
            );
        }
        let Some(process) = Process::get() else { return fail(libc::EPERM) };
        if cqe < 1 || cqe as usize > MAX_CQE || vector < 0 || vector >= (*context).num_comp_vectors {
            return fail(libc::EINVAL);
        }
        let mut ibv: ibv_cq = zeroed();
        ibv.context = context;
        ibv.channel = channel;
        ibv.cq_context = cq_context;
        match create(process, ibv, cqe as usize) {
            Ok(Some(cq)) => {
                let ibv = &raw mut (*cq).ibv;
                libc::pthread_mutex_init((&raw mut (*ibv).mutex).cast(), ptr::null());
                libc::pthread_cond_init((&raw mut (*ibv).cond).cast(), ptr::null());
                if let Some(channel) = (*cq).channel() {
                    channel.hold();
                }
                (*cq).shared.cookie.store((*cq).cookie(), Ordering::Release);
                ibv
            }
            Ok(None) => fail(libc::ENOMEM),
            Err(e) => {
                crate::mr::out_of_space(&e);
                fail(libc::ENOMEM)
            }
        }
    }
}

fn create(process: &Process, mut ibv: ibv_cq, cqe: usize) -> std::io::Result<Option<*mut Cq>> {
    process.cqs.insert(|index| {
        let len = cqe.next_power_of_two();
        let place = process.segment.alloc_kept(Ring::bytes(len))?;
        let out = || std::io::Error::from_raw_os_error(libc::ENOMEM);
        let map = &process.segment.map;
        map.at::<CqShared>(place).ok_or_else(out)?.len.store(len as u32, Ordering::Relaxed);
        // The ring goes on where its last user left it: a slow peer's late claim stays valid.
        let (shared, ring) = Ring::at(map, place).ok_or_else(out)?;
        let own = Ring::private(len).ok_or_else(out)?;
        // SAFETY: the application's channel, or null.
        let number = unsafe { channel_of(ibv.channel) }.map_or(NO_CHANNEL, |channel| channel.number);
        shared.channel.store(number, Ordering::Relaxed);
        shared.armed.store(0, Ordering::Relaxed);
        shared.overflowed.store(0, Ordering::Relaxed);
        shared.fired.store(0, Ordering::Relaxed);
        shared.unwritten.store(0, Ordering::Relaxed);
        shared.index.store(index as u32, Ordering::Relaxed);
        let doorbell = &map.head().doorbells[index];
        doorbell.store(0, Ordering::Relaxed);
        ibv.handle = index as u32;
        ibv.cqe = len as c_int;
        Ok(Box::into_raw(Box::new(Cq {
            ibv,
            index,
            shared,
            ring,
            place,
            doorbell,
            cursor: SharedCursor::of(&ring),
            own_cursor: SharedCursor::of(&own),
            own,
            consumer: Lock::new(()),
            users: Mutex::new(Vec::new()),
            stalled: AtomicU32::new(0),
            async_raised: AtomicU32::new(0),
            reported: AtomicBool::new(false),
        })))
    })
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_cq(ibv: *mut ibv_cq) -> c_int {
    // SAFETY: the caller hands a live CQ and does not use it after success.
    unsafe {
        if !ours((*ibv).context) {
            return forward!(c"ibv_destroy_cq", c"IBVERBS_1.1", fn(*mut ibv_cq) -> c_int, libc::ENOSYS, ibv);
        }
        let Some(process) = Process::get() else { return libc::EPERM };
        let cq = Cq::of(ibv);
        if !cq.users.lock().is_empty() {
            return libc::EBUSY;
        }
        process.cqs.remove(cq.index);
        cq.shared.armed.store(0, Ordering::SeqCst);
        let (mutex, cond) = ((&raw mut (*ibv).mutex).cast(), (&raw mut (*ibv).cond).cast());
        if let Some(channel) = cq.channel() {
            let reported = settle_events(cq, channel);
            wait_acknowledged(mutex, cond, &raw const (*ibv).comp_events_completed, reported);
            channel.release();
        }
        let reported = settle(&Context::of((*ibv).context).async_queue, cq.cookie(), &cq.async_raised);
        wait_acknowledged(mutex, cond, &raw const (*ibv).async_events_completed, reported);
        let len = cq.shared.len.load(Ordering::Relaxed) as usize;
        cq.locked(|| cq.ring.stop());
        process.segment.free_kept(cq.place, Ring::bytes(len));
        let own = cq.own;
        drop(Box::from_raw(ibv.cast::<Cq>()));
        own.free_private();
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the caller hands a live CQ.
    unsafe {
        if !ours((*cq).context) {
            return forward!(
                c"ibv_resize_cq",
                c"IBVERBS_1.1",
                fn(*mut ibv_cq, c_int) -> c_int,
                libc::ENOSYS,
                cq,
                cqe
            );
        }
        refuse("ibv_resize_cq")
    }
}

/// The status of a completion that failed only because its QP had failed before.
pub(crate) const FLUSHED: u32 = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;

const _: () = {
    assert!(size_of::<ibv_cq>() == 128 && size_of::<ibv_wc>() == 48);
    assert!(std::mem::offset_of!(Cq, ibv) == 0);
};

// SPDX-License-Identifier: MIT
//! Queue pairs: what one is, making, failing, destroying.
//!
//! Locks are taken in the order send queue, receive queue, consumer of a CQ. The state stands in
//! the shared record, because peers look at it with every message.

use crate::async_event::{settle, wait_acknowledged, Element};
use crate::context::{ours, Context};
use crate::cq::{Cq, FLUSHED};
use crate::layout::{flag, QpShared, RecvEntry, UNIT};
use crate::lock::Lock;
use crate::process::Process;
use crate::real::{fail, forward, refuse};
use crate::recv::ReceiveQueue;
use crate::send::SendQueue;
use libc::c_int;
use parking_lot::Mutex;
use rdma_sys::ibv_qp_state::{IBV_QPS_ERR, IBV_QPS_RESET};
use rdma_sys::{
    ibv_context, ibv_event_type, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
    ibv_qp_init_attr_ex, ibv_qp_type, ibv_wc_opcode,
};
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{fence, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Most work requests of a queue.
pub(crate) const MAX_WR: u32 = 16384;
/// Most scatter or gather entries of a request.
pub(crate) const MAX_SGE: u32 = 32;
/// Most bytes that a request can carry inline.
pub(crate) const MAX_INLINE: u32 = 512;
/// Bytes of a QP's bounce ring.
const BOUNCE: usize = 16 * 1024;
/// How long taking back what a peer may be touching waits for it. Touching takes microseconds; a
/// peer that needs longer is stopped, and a stopped one touches nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// A queue pair of this process.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) ibv: ibv_qp,
    pub(crate) index: u32,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signal_all: bool,
    pub(crate) shared: &'static QpShared,
    /// Count of the last WQE whose completion was polled, or that a later polled one covers.
    pub(crate) reaped: AtomicU32,
    /// Receives ever taken. Written under the receive CQ's lock.
    pub(crate) taken: AtomicU32,
    pub(crate) async_raised: AtomicU32,
    /// Requests wait in the send queue.
    pub(crate) waiting: AtomicU32,
    pub(crate) sq: Lock<SendQueue>,
    pub(crate) rq: Lock<ReceiveQueue>,
    pub(crate) attr: Mutex<ibv_qp_attr>,
}

// SAFETY: raw pointers to objects of the same process that outlive the QP, as verbs demand.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// The QP behind a verbs pointer.
    ///
    /// # Safety
    /// `qp` is a live QP of this device.
    #[inline(always)]
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Qp {
        // SAFETY: such a pointer was made from a `Qp`, whose first field it is.
        unsafe { &*qp.cast::<Qp>() }
    }

    pub(crate) fn send_cq(&self) -> &Cq {
        // SAFETY: a CQ cannot go while a QP uses it.
        unsafe { Cq::of(self.ibv.send_cq) }
    }

    pub(crate) fn recv_cq(&self) -> &Cq {
        // SAFETY: as above.
        unsafe { Cq::of(self.ibv.recv_cq) }
    }

    /// The domain's number, as regions have it.
    pub(crate) fn pd(&self) -> u32 {
        self.shared.pd.load(Ordering::Relaxed)
    }

    /// Whether a send request with these flags completes when it succeeds.
    #[inline(always)]
    pub(crate) fn signals(&self, flags: u32) -> bool {
        self.signal_all || flags & rdma_sys::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0
    }

    /// The state, an `ibv_qp_state`.
    #[inline(always)]
    pub(crate) fn state(&self) -> u32 {
        self.shared.life.load(Ordering::Acquire) & 0xff
    }

    /// Enters `state`. Peers see all that was stored before.
    pub(crate) fn set_state(&self, state: u32) {
        let life = self.shared.life.load(Ordering::Relaxed);
        self.shared.life.store(life & !0xff | state, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Waits until the peer that this QP is connected to touches nothing of this process that it
    /// began to touch before; and, for a QP that no longer receives, until it is not about to
    /// complete anything. The caller invalidated what it takes back, and made a full barrier.
    pub(crate) fn wait_until_untouched(&self) {
        let dest = self.shared.dest.load(Ordering::Acquire);
        let Some(process) = Process::get() else { return };
        let Some(peer) = process.peer(dest >> 12) else { return };
        let Some(remote) = peer.qp(dest & 0xfff) else { return };
        let (began, mut turns) = (Instant::now(), 0_u32);
        let cq = self.recv_cq();
        let seen = remote.touching.0.load(Ordering::SeqCst);
        loop {
            let touching = seen != 0 && remote.touching.0.load(Ordering::SeqCst) == seen;
            let claimed = !self.receives() && cq.locked(|| cq.ring.claimed_by(peer.id));
            if !touching && !claimed {
                return;
            }
            turns += 1;
            if turns < 100 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
                if turns.is_multiple_of(64) && peer.is_dead() {
                    cq.locked(|| cq.ring.void_claims_of(peer.id));
                    return;
                }
                if turns.is_multiple_of(64) && began.elapsed() > PATIENCE {
                    // Stopped between claiming and publishing. What it publishes one day names a QP
                    // that is not there any more.
                    return;
                }
            }
        }
    }

    fn receives(&self) -> bool {
        use rdma_sys::ibv_qp_state::{IBV_QPS_RTR, IBV_QPS_SQE};
        (IBV_QPS_RTR..=IBV_QPS_SQE).contains(&self.state())
    }

    /// The QP fails: it enters the error state and flushes both queues. Nothing happens where it
    /// has failed already or was reset.
    pub(crate) fn fail(&self, process: &Process) {
        self.fail_with(process, &mut self.sq.lock());
    }

    /// [`Qp::fail`] for a caller that holds the send queue.
    pub(crate) fn fail_with(&self, process: &Process, sq: &mut SendQueue) {
        if matches!(self.state(), IBV_QPS_ERR | IBV_QPS_RESET) {
            return;
        }
        self.set_state(IBV_QPS_ERR);
        self.flush(process, sq);
    }

    /// Completes all requests of both queues as flushed. The state is ERR.
    pub(crate) fn flush(&self, process: &Process, sq: &mut SendQueue) {
        self.wait_until_untouched();
        sq.flush(self, process);
        // Held, so that nothing is posted between counting and flushing.
        self.flush_receives(process, &self.rq.lock());
    }

    /// Completes the receives that are posted and that no message took as flushed. The state is ERR,
    /// and the peer was waited for since it is.
    pub(crate) fn flush_receives(&self, process: &Process, rq: &ReceiveQueue) {
        let cq = self.recv_cq();
        let left = cq.locked(|| {
            let delivered = cq.unpolled_receives(self.index);
            rq.posted.wrapping_sub(self.taken.load(Ordering::Relaxed)).wrapping_sub(delivered)
        });
        for _ in 0..left {
            self.flush_receive(process);
        }
    }

    /// Completes the next receive as flushed.
    fn flush_receive(&self, process: &Process) {
        self.recv_cq().push_flushed(process.segment.id, |entry| {
            entry.qp.store(self.index, Ordering::Relaxed);
            entry.len.store(0, Ordering::Relaxed);
            entry.kind.store(FLUSHED | ibv_wc_opcode::IBV_WC_RECV << 8 | flag::RECV, Ordering::Relaxed);
        });
    }

    /// Forgets everything: both queues, their completions, the connection. The state is RESET.
    pub(crate) fn clear(&self, sq: &mut SendQueue) {
        self.wait_until_untouched();
        let mut rq = self.rq.lock();
        sq.clear(self);
        self.send_cq().purge(self.index);
        self.recv_cq().purge(self.index);
        rq.posted = 0;
        self.taken.store(0, Ordering::Relaxed);
        self.reaped.store(0, Ordering::Relaxed);
        let shared = self.shared;
        shared.dest.store(0, Ordering::Relaxed);
        shared.posts.0.posted.store(0, Ordering::Relaxed);
        shared.posts.0.min_bytes.store(u32::MAX, Ordering::Relaxed);
        shared.bounce_head.0.store(0, Ordering::Relaxed);
        let marks = &shared.sender.0;
        marks.stalled.store(0, Ordering::Relaxed);
        marks.fault.store(0, Ordering::Relaxed);
        marks.owner.store(0, Ordering::Relaxed);
        marks.stream_len.store(0, Ordering::Relaxed);
        marks.stream_bad.store(0, Ordering::Relaxed);
    }

    /// Moves the generation on: senders of before no longer reach this QP.
    pub(crate) fn next_life(&self, state: u32) {
        let life = self.shared.life.load(Ordering::Relaxed);
        self.shared.life.store((life >> 8).wrapping_add(1) << 8 | state, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Raises an asynchronous event about this QP.
    pub(crate) fn raise(&self, kind: ibv_event_type) {
        // SAFETY: the context outlives its QPs.
        unsafe { Context::of(self.ibv.context) }.async_queue.raise(kind, Element::Qp(self));
    }
}

/// Makes a QP for `ibv_create_qp`; an error number where it cannot.
///
/// # Safety
/// `pd` and what `attr` names are live objects of this device.
unsafe fn create(process: &Process, pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> Result<*mut Qp, c_int> {
    if attr.qp_type != ibv_qp_type::IBV_QPT_RC || !attr.srq.is_null() {
        return Err(refuse("a QP of another type than RC, or with an SRQ,"));
    }
    let cap = &mut attr.cap;
    if attr.send_cq.is_null()
        || attr.recv_cq.is_null()
        || cap.max_send_wr > MAX_WR
        || cap.max_recv_wr > MAX_WR
        || cap.max_send_sge > MAX_SGE
        || cap.max_recv_sge > MAX_SGE
        || cap.max_inline_data > MAX_INLINE
    {
        return Err(libc::EINVAL);
    }
    // What the application gets is never less than it asked for.
    cap.max_inline_data = cap.max_inline_data.max(64);
    let shape = Shape::of(cap);
    let no_space = |e: std::io::Error| {
        crate::mr::out_of_space(&e);
        libc::ENOMEM
    };
    let rq = process.segment.alloc(shape.rq_bytes()).map_err(no_space)?;
    let bounce = process.segment.alloc(BOUNCE).map_err(|e| {
        process.segment.free(rq, shape.rq_bytes());
        no_space(e)
    })?;
    let made = process.qps.insert(|index| {
        let entry = &process.segment.map.head().qps[index];
        if entry.load(Ordering::Relaxed) == 0 {
            entry.store(process.segment.alloc(size_of::<QpShared>()).map_err(no_space)?, Ordering::Release);
        }
        let shared: &'static QpShared =
            process.segment.map.at(entry.load(Ordering::Relaxed)).ok_or(libc::ENOMEM)?;
        // SAFETY: promised by the caller.
        unsafe { fill(process, shared, pd, attr, index, &shape, rq, bounce) }
    });
    match made {
        Ok(Some(qp)) => Ok(qp),
        failed => {
            process.segment.free(rq, shape.rq_bytes());
            process.segment.free(bounce, BOUNCE);
            Err(failed.err().unwrap_or(libc::ENOMEM))
        }
    }
}

/// The receive queue's dimensions.
struct Shape {
    len: u32,
    stride: usize,
}

impl Shape {
    fn of(cap: &ibv_qp_cap) -> Shape {
        let stride = (size_of::<RecvEntry>() + 16 * cap.max_recv_sge.max(1) as usize).next_multiple_of(16);
        Shape { len: cap.max_recv_wr.max(1).next_power_of_two(), stride }
    }

    fn rq_bytes(&self) -> usize {
        (self.len as usize * self.stride).next_multiple_of(UNIT)
    }
}

#[allow(clippy::too_many_arguments, reason = "the parts of one object, put together once")]
unsafe fn fill(
    process: &Process,
    shared: &'static QpShared,
    pd: *mut ibv_pd,
    attr: &ibv_qp_init_attr,
    index: usize,
    shape: &Shape,
    rq: u32,
    bounce: u32,
) -> Result<*mut Qp, c_int> {
    // SAFETY: `pd` and the CQs are live; the other structs are plain C ones, zero is a value.
    unsafe {
        shared.access.store(0, Ordering::Relaxed);
        shared.pd.store((*pd).handle, Ordering::Relaxed);
        shared.recv_cq.store(Cq::of(attr.recv_cq).place, Ordering::Relaxed);
        shared.recv_cq_index.store(Cq::of(attr.recv_cq).index as u32, Ordering::Relaxed);
        shared.rq.store(rq, Ordering::Relaxed);
        shared.rq_len.store(shape.len, Ordering::Relaxed);
        shared.rq_stride.store(shape.stride as u32, Ordering::Relaxed);
        shared.bounce.store(bounce, Ordering::Relaxed);
        shared.bounce_len.store(BOUNCE as u32, Ordering::Relaxed);
        shared.touching.0.store(0, Ordering::Relaxed);
        let mut ibv: ibv_qp = zeroed();
        ibv.context = (*pd).context;
        ibv.qp_context = attr.qp_context;
        ibv.pd = pd;
        ibv.send_cq = attr.send_cq;
        ibv.recv_cq = attr.recv_cq;
        ibv.handle = index as u32;
        ibv.qp_num = process.segment.id << 12 | index as u32;
        ibv.state = IBV_QPS_RESET;
        ibv.qp_type = attr.qp_type;
        let qp = Box::new(Qp {
            ibv,
            index: index as u32,
            cap: attr.cap,
            signal_all: attr.sq_sig_all != 0,
            shared,
            reaped: AtomicU32::new(0),
            taken: AtomicU32::new(0),
            async_raised: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            sq: Lock::new(SendQueue::default()),
            rq: Lock::new(ReceiveQueue::default()),
            attr: Mutex::new(zeroed()),
        });
        shared.dest.store(0, Ordering::Relaxed);
        qp.next_life(IBV_QPS_RESET);
        qp.clear(&mut qp.sq.lock());
        let qp = Box::into_raw(qp);
        libc::pthread_mutex_init((&raw mut (*qp).ibv.mutex).cast(), ptr::null());
        libc::pthread_cond_init((&raw mut (*qp).ibv.cond).cast(), ptr::null());
        (*qp).send_cq().users.lock().push(qp);
        (*qp).recv_cq().users.lock().push(qp);
        Ok(qp)
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller hands a live domain and attributes, as verbs demand.
    unsafe {
        if !ours((*pd).context) {
            return forward!(
                c"ibv_create_qp",
                c"IBVERBS_1.1",
                fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
                ptr::null_mut(),
                pd,
                attr
            );
        }
        let Some(process) = Process::get() else { return fail(libc::EPERM) };
        match create(process, pd, &mut *attr) {
            Ok(qp) => &raw mut (*qp).ibv,
            Err(error) => fail(error),
        }
    }
}

/// `ibv_create_qp_ex` with nothing but a domain named.
pub(crate) unsafe extern "C" fn context_create_qp_ex(
    _context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const INIT_ATTR_PD: u32 = 1;
    // SAFETY: called through a context of this device; the extended attributes begin with the
    // plain ones.
    unsafe {
        if (*attr).comp_mask != INIT_ATTR_PD {
            return fail(refuse("an extended QP"));
        }
        ibv_create_qp((*attr).pd, attr.cast())
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_qp(ibv: *mut ibv_qp) -> c_int {
    // SAFETY: the caller hands a live QP and does not use it afterwards.
    unsafe {
        if !ours((*ibv).context) {
            return forward!(c"ibv_destroy_qp", c"IBVERBS_1.1", fn(*mut ibv_qp) -> c_int, libc::ENOSYS, ibv);
        }
        let Some(process) = Process::get() else { return libc::EPERM };
        let qp = Qp::of(ibv);
        // From here on nobody of this process comes by the tables or lists; then the peer is waited
        // for, then nothing is left.
        for cq in [qp.send_cq(), qp.recv_cq()] {
            cq.users.lock().retain(|&user| !ptr::eq(user, qp));
        }
        qp.next_life(IBV_QPS_RESET);
        qp.clear(&mut qp.sq.lock());
        process.qps.remove(qp.index as usize);
        let reported =
            settle(&Context::of((*ibv).context).async_queue, ptr::from_ref(qp) as u64, &qp.async_raised);
        wait_acknowledged(
            (&raw mut (*ibv).mutex).cast(),
            (&raw mut (*ibv).cond).cast(),
            &raw const (*ibv).events_completed,
            reported,
        );
        let shape = Shape::of(&qp.cap);
        process.segment.free(qp.shared.rq.load(Ordering::Relaxed), shape.rq_bytes());
        process.segment.free(qp.shared.bounce.load(Ordering::Relaxed), BOUNCE);
        drop(Box::from_raw(ibv.cast::<Qp>()));
        0
    }
}

const _: () = assert!(std::mem::offset_of!(Qp, ibv) == 0);

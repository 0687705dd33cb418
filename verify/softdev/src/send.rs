// SPDX-License-Identifier: MIT
//! The send queue: posting, and what is done with a request that cannot go on at once.
//!
//! `ibv_post_send` carries a request out there and then (`execute.rs`) and completes it. One that
//! has to wait, for a receive, for room or for the peer's QP, is copied to the queue here, and all
//! later ones behind it. The queue goes on when its CQ is polled, when something is posted, and
//! by the progress thread, which the peer wakes. Posting never blocks.

use crate::connection::Connection;
use crate::cq::FLUSHED;
use crate::execute::{execute, Stall, Step};
use crate::process::Process;
use crate::qp::Qp;
use libc::c_int;
use rdma_sys::ibv_qp_state::{IBV_QPS_ERR, IBV_QPS_RTS, IBV_QPS_SQD};
use rdma_sys::{
    ibv_event_type, ibv_qp, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode,
};
use std::collections::VecDeque;
use std::slice;
use std::sync::atomic::Ordering;

/// How long a send waits for the application to poll, ns.
const UNPOLLED: u64 = 200_000;
pub(crate) const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;
pub(crate) const SOLICITED: u32 = ibv_send_flags::IBV_SEND_SOLICITED.0;

/// A send request, the application's or one that waits.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) wr_id: u64,
    /// An `ibv_wr_opcode`.
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) sges: &'a [ibv_sge],
    /// Count of the WQE, from 1 on (modulo 2^32).
    pub(crate) number: u32,
}

/// A request that waits, with copies of its lists.
struct Waiting {
    request: Request<'static>,
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
}

/// How long to wait for what, from the QP's attributes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Patience {
    /// `timeout`: 0 for ever, else 4.096 µs · 2^timeout.
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    /// 7 for ever.
    pub(crate) rnr_retry: u8,
}

/// The send queue of a QP.
#[derive(Default)]
pub(crate) struct SendQueue {
    /// Requests ever posted (modulo 2^32).
    posted: u32,
    waiting: VecDeque<Waiting>,
    /// Used up ones, whose buffers serve again.
    spare: Vec<Waiting>,
    pub(crate) connection: Option<Connection>,
    pub(crate) patience: Patience,
    /// What the first request waits for, and until when (monotonic ns; 0 for ever).
    stalled: Option<(Stall, u64)>,
    /// The first request has waited for the application to poll, and waits no longer.
    pub(crate) unpaced: bool,
    /// The peer is gone: the next request to fail says so.
    lost: bool,
    /// `IBV_EVENT_SQ_DRAINED` was asked for.
    pub(crate) tell_drained: bool,
}

impl SendQueue {
    /// Deals with one request of a list. Returns an error number for one that is refused.
    #[inline(always)]
    fn post(&mut self, qp: &Qp, process: &Process, request: Request<'_>) -> c_int {
        if self.posted.wrapping_sub(qp.reaped.load(Ordering::Acquire)) >= qp.cap.max_send_wr {
            return libc::ENOMEM;
        }
        let refused = validate(qp, &request);
        if refused != 0 {
            return refused;
        }
        self.posted = request.number;
        match qp.state() {
            IBV_QPS_RTS if self.waiting.is_empty() => match execute(self, qp, process, &request) {
                Step::Done(bytes) => self.complete(qp, process, &request, bytes),
                Step::Failed(status) => self.failed(qp, process, &request, status),
                Step::Wait(stall) => {
                    self.enqueue(qp, &request);
                    if self.stall(process, stall) {
                        self.fail_first(qp, process, stall.status());
                    }
                }
            },
            IBV_QPS_ERR => self.flushed(qp, process, &request),
            _ => self.enqueue(qp, &request),
        }
        0
    }

    /// Completes a request that succeeded.
    #[inline(always)]
    fn complete(&mut self, qp: &Qp, process: &Process, request: &Request<'_>, bytes: u32) {
        if qp.signals(request.flags) {
            push(qp, process, request, ibv_wc_status::IBV_WC_SUCCESS, bytes);
        }
    }

    /// Completes a request that failed, and fails the QP.
    #[cold]
    fn failed(&mut self, qp: &Qp, process: &Process, request: &Request<'_>, status: u32) {
        push(qp, process, request, status, 0);
        qp.fail_with(process, self);
    }

    /// Completes a request of a QP that has failed.
    fn flushed(&mut self, qp: &Qp, process: &Process, request: &Request<'_>) {
        let lost = std::mem::take(&mut self.lost);
        push(qp, process, request, if lost { ibv_wc_status::IBV_WC_RETRY_EXC_ERR } else { FLUSHED }, 0);
    }

    /// Copies a request to the end of the queue.
    #[cold]
    fn enqueue(&mut self, qp: &Qp, request: &Request<'_>) {
        let mut waiting = self.spare.pop().unwrap_or_else(|| Waiting {
            request: Request { sges: &[], ..*request },
            sges: Vec::new(),
            inline: Vec::new(),
        });
        waiting.request = Request { sges: &[], ..*request };
        waiting.sges.clear();
        waiting.inline.clear();
        if request.flags & INLINE != 0 {
            for sge in request.sges {
                // SAFETY: the application's own memory, readable now as verbs demand.
                let bytes = unsafe { slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) };
                waiting.inline.extend_from_slice(bytes);
            }
            waiting.sges.push(ibv_sge {
                addr: waiting.inline.as_ptr() as u64,
                length: waiting.inline.len() as u32,
                lkey: 0,
            });
        } else {
            waiting.sges.extend_from_slice(request.sges);
        }
        self.waiting.push_back(waiting);
        if self.waiting.len() == 1 {
            qp.waiting.store(1, Ordering::Release);
            qp.send_cq().stalled.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// The first request is done with.
    fn dequeue(&mut self, qp: &Qp) {
        if let Some(done) = self.waiting.pop_front() {
            self.spare.push(done);
        }
        self.stalled = None;
        self.unpaced = false;
        if self.waiting.is_empty() {
            qp.waiting.store(0, Ordering::Release);
            qp.send_cq().stalled.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Notes what the first request waits for. Returns whether it has waited long enough.
    fn stall(&mut self, process: &Process, stall: Stall) -> bool {
        let now = crate::progress::now();
        if let Some((before, deadline)) = self.stalled {
            if before == stall {
                let over = deadline != 0 && now >= deadline;
                self.unpaced = over && stall == Stall::Poll;
                return over && stall != Stall::Poll;
            }
        }
        let wait = match stall {
            Stall::Room => None,
            Stall::Poll => Some(UNPOLLED),
            Stall::Receive { .. } if self.patience.rnr_retry == 7 => None,
            Stall::Receive { wait_us } => {
                Some(u64::from(wait_us) * 1000 * u64::from(self.patience.rnr_retry))
            }
            Stall::NotReady if self.patience.timeout == 0 => None,
            Stall::NotReady => {
                Some((4096_u64 << self.patience.timeout.min(31)) * (u64::from(self.patience.retry_cnt) + 1))
            }
        };
        let deadline = wait.map_or(0, |wait| now + wait);
        self.stalled = Some((stall, deadline));
        if wait == Some(0) {
            return true;
        }
        if deadline != 0 {
            process.progress.wake_by(deadline);
        }
        false
    }

    /// Carries out what waits, as far as it goes.
    pub(crate) fn go_on(&mut self, qp: &Qp, process: &Process) {
        while let Some(first) = self.waiting.front() {
            if qp.state() != IBV_QPS_RTS {
                return;
            }
            let sges: *const [ibv_sge] = first.sges.as_slice();
            // SAFETY: the list stays where it is while the request is first; `execute` does not
            // change the queue.
            let request = Request { sges: unsafe { &*sges }, ..first.request };
            match execute(self, qp, process, &request) {
                Step::Done(bytes) => {
                    self.complete(qp, process, &request, bytes);
                    self.dequeue(qp);
                }
                Step::Failed(status) => return self.fail_first(qp, process, status),
                Step::Wait(stall) => {
                    if self.stall(process, stall) {
                        self.fail_first(qp, process, stall.status());
                    } else if self.unpaced {
                        continue;
                    }
                    return;
                }
            }
        }
        if self.tell_drained && qp.state() == IBV_QPS_SQD {
            self.tell_drained = false;
            qp.raise(ibv_event_type::IBV_EVENT_SQ_DRAINED);
        }
    }

    /// Fails the first request, and with it the QP.
    fn fail_first(&mut self, qp: &Qp, process: &Process, status: u32) {
        if let Some(first) = self.waiting.front() {
            let request = first.request;
            push(qp, process, &request, status, 0);
            self.dequeue(qp);
            qp.fail_with(process, self);
        }
    }

    /// The peer died: what waits fails, and if nothing waits, the next request does.
    pub(crate) fn peer_died(&mut self, qp: &Qp, process: &Process) {
        if self.waiting.is_empty() {
            self.lost = true;
        } else {
            self.fail_first(qp, process, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        }
    }

    /// Completes everything as flushed. For a QP in ERR.
    pub(crate) fn flush(&mut self, qp: &Qp, process: &Process) {
        while let Some(first) = self.waiting.front() {
            let request = first.request;
            push(qp, process, &request, FLUSHED, 0);
            self.dequeue(qp);
        }
    }

    /// Forgets everything. For a QP that is reset.
    pub(crate) fn clear(&mut self, qp: &Qp) {
        while !self.waiting.is_empty() {
            self.dequeue(qp);
        }
        *self = SendQueue { spare: std::mem::take(&mut self.spare), ..SendQueue::default() };
    }

    /// Whether the first request waits for the peer's QP.
    pub(crate) fn waits_for_peer(&self) -> bool {
        matches!(self.stalled, Some((Stall::NotReady, _)))
    }

    /// Whether the first request waits until a time, in monotonic ns.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.stalled.map(|(_, deadline)| deadline).filter(|&deadline| deadline != 0)
    }
}

impl Qp {
    /// Lets waiting requests try again, unless another thread is at it.
    pub(crate) fn push_on(&self, process: &Process) {
        if self.waiting.load(Ordering::Relaxed) != 0 {
            if let Some(mut sq) = self.sq.try_lock() {
                sq.go_on(self, process);
            }
        }
    }
}

/// Puts the completion of a send request into its CQ.
#[inline(always)]
fn push(qp: &Qp, process: &Process, request: &Request<'_>, status: u32, bytes: u32) {
    let opcode = match request.opcode {
        ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
            ibv_wc_opcode::IBV_WC_RDMA_WRITE
        }
        ibv_wr_opcode::IBV_WR_RDMA_READ => ibv_wc_opcode::IBV_WC_RDMA_READ,
        ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP => ibv_wc_opcode::IBV_WC_COMP_SWAP,
        ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => ibv_wc_opcode::IBV_WC_FETCH_ADD,
        _ => ibv_wc_opcode::IBV_WC_SEND,
    };
    qp.send_cq().push_send(process.segment.id, status != ibv_wc_status::IBV_WC_SUCCESS, |entry| {
        entry.qp.store(qp.index, Ordering::Relaxed);
        entry.len.store(bytes, Ordering::Relaxed);
        entry.imm.store(request.number, Ordering::Relaxed);
        entry.kind.store(status | opcode << 8, Ordering::Relaxed);
        entry.id.store(request.wr_id, Ordering::Relaxed);
    });
}

/// What is wrong with a request in itself: an error number, or 0.
#[inline(always)]
fn validate(qp: &Qp, request: &Request<'_>) -> c_int {
    let known = matches!(
        request.opcode,
        ibv_wr_opcode::IBV_WR_SEND
            | ibv_wr_opcode::IBV_WR_SEND_WITH_IMM
            | ibv_wr_opcode::IBV_WR_RDMA_WRITE
            | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
            | ibv_wr_opcode::IBV_WR_RDMA_READ
            | ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
            | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD
    );
    if !known || request.sges.len() > qp.cap.max_send_sge.max(1) as usize {
        return libc::EINVAL;
    }
    if request.flags & INLINE != 0 {
        let bytes: u64 = request.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let writes = !matches!(
            request.opcode,
            ibv_wr_opcode::IBV_WR_RDMA_READ
                | ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
                | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD
        );
        if !writes {
            return libc::EINVAL;
        }
        if bytes > u64::from(qp.cap.max_inline_data) {
            return libc::ENOMEM;
        }
    }
    0
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: called through the ops of a context of this device with one of its QPs.
    let qp = unsafe { Qp::of(qp) };
    let Some(process) = Process::get() else {
        // SAFETY: room for a pointer, as verbs demand.
        unsafe { *bad = wr };
        return libc::EPERM;
    };
    let mut sq = qp.sq.lock();
    let (mut wr, mut rc) = (wr, 0);
    if !sq.waiting.is_empty() {
        sq.go_on(qp, process);
    }
    // SAFETY: a list of live requests whose lists are as long as they say, as verbs demand; the
    // members of the unions are plain numbers.
    unsafe {
        while let Some(r) = wr.as_ref() {
            let atomic = matches!(
                r.opcode,
                ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD
            );
            let request = Request {
                wr_id: r.wr_id,
                opcode: r.opcode,
                flags: r.send_flags,
                imm: r.imm_data_invalidated_rkey_union.imm_data,
                remote_addr: r.wr.rdma.remote_addr,
                rkey: if atomic { r.wr.atomic.rkey } else { r.wr.rdma.rkey },
                compare_add: r.wr.atomic.compare_add,
                swap: r.wr.atomic.swap,
                sges: if r.num_sge > 0 { slice::from_raw_parts(r.sg_list, r.num_sge as usize) } else { &[] },
                number: sq.posted.wrapping_add(1),
            };
            rc = match qp.state() {
                IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR => sq.post(qp, process, request),
                _ => libc::EINVAL,
            };
            if rc != 0 {
                *bad = wr;
                break;
            }
            wr = r.next;
        }
    }
    rc
}

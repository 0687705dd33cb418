// SPDX-License-Identifier: MIT
//! The private CQ of a served channel.
//!
//! When a completion came before the hardware was armed, most hardware reports nothing; a waiter
//! that we cannot see would sleep on. The kernel is then made to report something: a SEND posted to
//! a queue pair in the error state completes at once, flushed, on a CQ of ours that reports to the
//! application's channel. (A posted receive does not do it on every kernel.)

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use fastwake::cq::{PollCq, ReqNotifyCq};
use fastwake::kernel_event::Kick;
use fastwake::lock::yield_core;
use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_send_flags, ibv_send_wr, ibv_wc, ibv_wr_opcode,
};

use crate::ops;
use crate::real::{call_real, Real};

static ALLOC_PD: Real = Real::verbs(c"ibv_alloc_pd");
static DEALLOC_PD: Real = Real::verbs(c"ibv_dealloc_pd");
static CREATE_CQ: Real = Real::verbs(c"ibv_create_cq");
static DESTROY_CQ: Real = Real::verbs(c"ibv_destroy_cq");
static CREATE_QP: Real = Real::verbs(c"ibv_create_qp");
static MODIFY_QP: Real = Real::verbs(c"ibv_modify_qp");
static DESTROY_QP: Real = Real::verbs(c"ibv_destroy_qp");

/// Work requests that may be outstanding; each is taken back before the next.
const DEPTH: u32 = 16;

/// Times that a full send queue is tried again.
const PATIENCE: u32 = 1000;

type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;

/// The private objects; dropping them destroys them.
struct Private {
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    poll: PollCq,
    req_notify: ReqNotifyCq,
    post_send: PostSend,
}

// SAFETY: verbs objects may be used by any thread; the channel's lock keeps it to one at a time.
unsafe impl Send for Private {}

/// Makes the private CQ of `channel`; `None`, with a word in the log, where the device refuses.
pub(crate) fn make(channel: *mut ibv_comp_channel) -> Option<Box<dyn Kick>> {
    // SAFETY: the caller holds the channel, which is live, and so is its context.
    let made = unsafe { Private::make(channel) };
    if made.is_none() {
        let error = std::io::Error::last_os_error();
        log::warn!("the device gives no queue pair to wake a completion channel with ({error}); waits on it stay with the kernel");
    }
    made.map(|private| Box::new(private) as Box<dyn Kick>)
}

impl Private {
    /// # Safety
    /// `channel` is live.
    unsafe fn make(channel: *mut ibv_comp_channel) -> Option<Private> {
        // SAFETY: live, as the caller says.
        let context: *mut ibv_context = unsafe { (*channel).context };
        let originals = ops::originals(context)?;
        // SAFETY: as above.
        let post_send = unsafe { (*context).ops.post_send }?;
        let mut private = Private {
            pd: ptr::null_mut(),
            cq: ptr::null_mut(),
            qp: ptr::null_mut(),
            poll: originals.provider.poll,
            req_notify: originals.provider.req_notify,
            post_send,
        };
        private.pd = call_real!(ALLOC_PD, fn(*mut ibv_context) -> *mut ibv_pd, (context), ptr::null_mut());
        if private.pd.is_null() {
            return None;
        }
        private.cq = call_real!(
            CREATE_CQ,
            fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
            (context, DEPTH as c_int, ptr::null_mut(), channel, 0),
            ptr::null_mut()
        );
        if private.cq.is_null() {
            return None;
        }
        // SAFETY: the C structs are plain data, for which zero is "none".
        let mut init: ibv_qp_init_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        init.send_cq = private.cq;
        init.recv_cq = private.cq;
        init.qp_type = ibv_qp_type::IBV_QPT_RC;
        init.cap.max_send_wr = DEPTH;
        init.cap.max_recv_wr = 1;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        private.qp = call_real!(
            CREATE_QP,
            fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
            (private.pd, &mut init),
            ptr::null_mut()
        );
        if private.qp.is_null() {
            return None;
        }
        // SAFETY: as above.
        let mut attr: ibv_qp_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        // The kernel knows no way from RESET to ERR but through INIT.
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = 1;
        let init_mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        let mut modify = |state, mask: c_int| {
            attr.qp_state = state;
            call_real!(
                MODIFY_QP,
                fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
                (private.qp, &mut attr, mask),
                -1
            )
        };
        let done = modify(ibv_qp_state::IBV_QPS_INIT, init_mask.0 as c_int) == 0
            && modify(ibv_qp_state::IBV_QPS_ERR, ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int) == 0;
        done.then_some(private)
    }
}

impl Kick for Private {
    fn kick(&mut self) -> bool {
        // The CQ must not overflow, nor the send queue fill up, however many events are unread: what
        // completed is taken back first, and what has not yet is waited for.
        for _ in 0..PATIENCE {
            self.settle();
            // SAFETY: our own live objects; the work request has no data and lives through the call.
            unsafe {
                let mut wr: ibv_send_wr = MaybeUninit::zeroed().assume_init();
                wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
                wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
                let mut bad = ptr::null_mut();
                if (self.req_notify)(self.cq, 0) == 0 && (self.post_send)(self.qp, &mut wr, &mut bad) == 0 {
                    return true;
                }
            }
            yield_core();
        }
        false
    }

    fn settle(&mut self) {
        let mut wcs = [const { MaybeUninit::<ibv_wc>::uninit() }; DEPTH as usize];
        // SAFETY: our own live CQ, and room for as many as are asked for.
        unsafe { (self.poll)(self.cq, DEPTH as c_int, wcs.as_mut_ptr().cast()) };
    }

    fn cq(&self) -> *mut ibv_cq {
        self.cq
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if !self.qp.is_null() {
            call_real!(DESTROY_QP, fn(*mut ibv_qp) -> c_int, (self.qp), 0);
        }
        if !self.cq.is_null() {
            call_real!(DESTROY_CQ, fn(*mut ibv_cq) -> c_int, (self.cq), 0);
        }
        if !self.pd.is_null() {
            call_real!(DEALLOC_PD, fn(*mut ibv_pd) -> c_int, (self.pd), 0);
        }
    }
}

// SPDX-License-Identifier: MIT
//! Verbs for tests: thin wrappers that panic where a call fails, and a connected RC end.
//!
//! Objects are leaked unless a test destroys them: the process that made them ends with the test.

#![allow(dead_code, reason = "not every test file needs all of it")]

use crate::roles::Links;
use rdma_sys::*;
use std::mem::zeroed;
use std::ptr;
use std::time::{Duration, Instant};

/// Longest that a completion may take to come.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) const ALL_RIGHTS: u32 = 0xf;
pub(crate) const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(crate) const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;
pub(crate) const SOLICITED: u32 = ibv_send_flags::IBV_SEND_SOLICITED.0;

/// The soft device, open, with a protection domain.
#[derive(Clone, Copy)]
pub(crate) struct Dev {
    pub(crate) ctx: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
}

/// Opens `fw_soft0`; the error number where that fails.
pub(crate) fn try_open() -> Result<Dev, i32> {
    // SAFETY: plain verbs, in the order that they demand.
    unsafe {
        let mut n = 0;
        let list = ibv_get_device_list(&mut n);
        assert!(n >= 1, "no device");
        let name = std::ffi::CStr::from_ptr(ibv_get_device_name(*list));
        assert_eq!(name, c"fw_soft0");
        let ctx = ibv_open_device(*list);
        if ctx.is_null() {
            return Err(errno());
        }
        ibv_free_device_list(list);
        let pd = ibv_alloc_pd(ctx);
        assert!(!pd.is_null());
        Ok(Dev { ctx, pd })
    }
}

pub(crate) fn open() -> Dev {
    try_open().expect("the device opens")
}

pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

impl Dev {
    pub(crate) fn try_cq(&self, entries: i32, channel: *mut ibv_comp_channel) -> *mut ibv_cq {
        // SAFETY: a live context.
        unsafe { ibv_create_cq(self.ctx, entries, 0x1234 as *mut _, channel, 0) }
    }

    pub(crate) fn cq(&self, entries: i32, channel: *mut ibv_comp_channel) -> *mut ibv_cq {
        let cq = self.try_cq(entries, channel);
        assert!(!cq.is_null(), "ibv_create_cq: {}", errno());
        cq
    }

    pub(crate) fn channel(&self) -> *mut ibv_comp_channel {
        // SAFETY: a live context.
        let channel = unsafe { ibv_create_comp_channel(self.ctx) };
        assert!(!channel.is_null());
        channel
    }

    /// Registers all of `bytes`.
    pub(crate) fn mr(&self, bytes: &mut [u8], rights: u32) -> *mut ibv_mr {
        // SAFETY: a live domain, memory of this process.
        let mr = unsafe { ibv_reg_mr(self.pd, bytes.as_mut_ptr().cast(), bytes.len(), rights as i32) };
        assert!(!mr.is_null(), "ibv_reg_mr: {}", errno());
        mr
    }

    pub(crate) fn try_qp(&self, spec: &Spec) -> *mut ibv_qp {
        // SAFETY: live objects; a zeroed C struct.
        unsafe {
            let mut init: ibv_qp_init_attr = zeroed();
            init.send_cq = spec.send_cq;
            init.recv_cq = spec.recv_cq;
            init.qp_type = ibv_qp_type::IBV_QPT_RC;
            init.sq_sig_all = spec.signal_all.into();
            init.cap = ibv_qp_cap {
                max_send_wr: spec.sends,
                max_recv_wr: spec.receives,
                max_send_sge: spec.sges,
                max_recv_sge: spec.sges,
                max_inline_data: 256,
            };
            ibv_create_qp(self.pd, &mut init)
        }
    }

    pub(crate) fn qp(&self, spec: &Spec) -> *mut ibv_qp {
        let qp = self.try_qp(spec);
        assert!(!qp.is_null(), "ibv_create_qp: {}", errno());
        qp
    }
}

/// What a QP is to be.
#[derive(Clone, Copy)]
pub(crate) struct Spec {
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) sends: u32,
    pub(crate) receives: u32,
    pub(crate) sges: u32,
    pub(crate) signal_all: bool,
}

impl Spec {
    pub(crate) fn on(cq: *mut ibv_cq) -> Spec {
        Spec { send_cq: cq, recv_cq: cq, sends: 64, receives: 64, sges: 16, signal_all: false }
    }
}

/// The attributes of a connection.
#[derive(Clone, Copy)]
pub(crate) struct Conn {
    pub(crate) access: u32,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
}

impl Default for Conn {
    fn default() -> Conn {
        Conn { access: ALL_RIGHTS, timeout: 14, retry_cnt: 7, rnr_retry: 7, min_rnr_timer: 12 }
    }
}

fn modify(qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) {
    // SAFETY: a live QP.
    let rc = unsafe { ibv_modify_qp(qp, attr, mask.0 as i32) };
    assert_eq!(rc, 0, "to state {}", attr.qp_state);
}

pub(crate) fn attr() -> ibv_qp_attr {
    // SAFETY: a C struct of numbers.
    unsafe { zeroed() }
}

pub(crate) fn to_init(qp: *mut ibv_qp, access: u32) {
    let mut a = attr();
    a.qp_state = ibv_qp_state::IBV_QPS_INIT;
    a.port_num = 1;
    a.qp_access_flags = access;
    type M = ibv_qp_attr_mask;
    modify(qp, &mut a, M::IBV_QP_STATE | M::IBV_QP_PKEY_INDEX | M::IBV_QP_PORT | M::IBV_QP_ACCESS_FLAGS);
}

pub(crate) fn to_rtr(qp: *mut ibv_qp, dest: u32, min_rnr_timer: u8) {
    let mut a = attr();
    a.qp_state = ibv_qp_state::IBV_QPS_RTR;
    a.path_mtu = ibv_mtu::IBV_MTU_4096;
    a.dest_qp_num = dest;
    a.max_dest_rd_atomic = 16;
    a.min_rnr_timer = min_rnr_timer;
    a.ah_attr.dlid = 1;
    a.ah_attr.port_num = 1;
    type M = ibv_qp_attr_mask;
    modify(
        qp,
        &mut a,
        M::IBV_QP_STATE
            | M::IBV_QP_AV
            | M::IBV_QP_PATH_MTU
            | M::IBV_QP_DEST_QPN
            | M::IBV_QP_RQ_PSN
            | M::IBV_QP_MAX_DEST_RD_ATOMIC
            | M::IBV_QP_MIN_RNR_TIMER,
    );
}

pub(crate) fn to_rts(qp: *mut ibv_qp, conn: &Conn) {
    let mut a = attr();
    a.qp_state = ibv_qp_state::IBV_QPS_RTS;
    a.timeout = conn.timeout;
    a.retry_cnt = conn.retry_cnt;
    a.rnr_retry = conn.rnr_retry;
    a.max_rd_atomic = 16;
    type M = ibv_qp_attr_mask;
    modify(
        qp,
        &mut a,
        M::IBV_QP_STATE
            | M::IBV_QP_TIMEOUT
            | M::IBV_QP_RETRY_CNT
            | M::IBV_QP_RNR_RETRY
            | M::IBV_QP_SQ_PSN
            | M::IBV_QP_MAX_QP_RD_ATOMIC,
    );
}

pub(crate) fn to_state(qp: *mut ibv_qp, state: ibv_qp_state::Type) -> i32 {
    let mut a = attr();
    a.qp_state = state;
    // SAFETY: a live QP.
    unsafe { ibv_modify_qp(qp, &mut a, ibv_qp_attr_mask::IBV_QP_STATE.0 as i32) }
}

/// The state that the device says a QP is in.
pub(crate) fn state(qp: *mut ibv_qp) -> ibv_qp_state::Type {
    // SAFETY: a live QP; zeroed C structs.
    unsafe {
        let (mut a, mut init): (ibv_qp_attr, ibv_qp_init_attr) = (zeroed(), zeroed());
        assert_eq!(ibv_query_qp(qp, &mut a, ibv_qp_attr_mask::IBV_QP_STATE.0 as i32, &mut init), 0);
        a.qp_state
    }
}

/// Connects `qp` to one of role `other`, which does the same.
pub(crate) fn connect(links: &mut Links, other: usize, qp: *mut ibv_qp, conn: &Conn) {
    // SAFETY: a live QP.
    links.tell(other, &[unsafe { (*qp).qp_num }.into()]);
    let [dest] = links.hear::<1>(other);
    to_init(qp, conn.access);
    to_rtr(qp, dest as u32, conn.min_rnr_timer);
    to_rts(qp, conn);
    links.meet(other);
}

/// A send request.
#[derive(Clone)]
pub(crate) struct Send {
    pub(crate) wr_id: u64,
    pub(crate) opcode: ibv_wr_opcode::Type,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) sges: Vec<ibv_sge>,
    pub(crate) remote: (u64, u32),
    pub(crate) atomic: (u64, u64),
}

impl Send {
    pub(crate) fn new(wr_id: u64, opcode: ibv_wr_opcode::Type, sges: &[ibv_sge]) -> Send {
        Send { wr_id, opcode, flags: SIGNALED, imm: 0, sges: sges.to_vec(), remote: (0, 0), atomic: (0, 0) }
    }

    pub(crate) fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    pub(crate) fn imm(mut self, imm: u32) -> Self {
        self.imm = imm;
        self
    }

    pub(crate) fn remote(mut self, addr: u64, rkey: u32) -> Self {
        self.remote = (addr, rkey);
        self
    }

    pub(crate) fn atomic(mut self, compare_add: u64, swap: u64) -> Self {
        self.atomic = (compare_add, swap);
        self
    }

    /// Posts it; what `ibv_post_send` returned.
    pub(crate) fn try_post(&self, qp: *mut ibv_qp) -> i32 {
        // SAFETY: a live QP; a zeroed C struct, filled in.
        unsafe {
            let mut wr: ibv_send_wr = zeroed();
            wr.wr_id = self.wr_id;
            wr.opcode = self.opcode;
            wr.send_flags = self.flags;
            wr.imm_data_invalidated_rkey_union.imm_data = self.imm;
            wr.sg_list = self.sges.as_ptr().cast_mut();
            wr.num_sge = self.sges.len() as i32;
            if self.opcode >= ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP {
                wr.wr.atomic = atomic_t {
                    remote_addr: self.remote.0,
                    rkey: self.remote.1,
                    compare_add: self.atomic.0,
                    swap: self.atomic.1,
                };
            } else {
                wr.wr.rdma = rdma_t { remote_addr: self.remote.0, rkey: self.remote.1 };
            }
            let mut bad = ptr::null_mut();
            let rc = ibv_post_send(qp, &mut wr, &mut bad);
            assert_eq!(rc != 0, bad == &raw mut wr, "bad_wr says what was refused");
            rc
        }
    }

    pub(crate) fn post(&self, qp: *mut ibv_qp) {
        assert_eq!(self.try_post(qp), 0, "ibv_post_send");
    }
}

pub(crate) fn try_post_recv(qp: *mut ibv_qp, wr_id: u64, sges: &[ibv_sge]) -> i32 {
    let mut wr = ibv_recv_wr {
        wr_id,
        next: ptr::null_mut(),
        sg_list: sges.as_ptr().cast_mut(),
        num_sge: sges.len() as i32,
    };
    let mut bad = ptr::null_mut();
    // SAFETY: a live QP.
    unsafe { ibv_post_recv(qp, &mut wr, &mut bad) }
}

pub(crate) fn post_recv(qp: *mut ibv_qp, wr_id: u64, sges: &[ibv_sge]) {
    assert_eq!(try_post_recv(qp, wr_id, sges), 0, "ibv_post_recv");
}

/// A scatter or gather entry for part of a region.
pub(crate) fn sge(mr: *mut ibv_mr, offset: usize, len: usize) -> ibv_sge {
    // SAFETY: a live region.
    unsafe { ibv_sge { addr: (*mr).addr as u64 + offset as u64, length: len as u32, lkey: (*mr).lkey } }
}

/// One work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) qp_num: u32,
}

/// Polls once: the next completion, `None` where there is none.
pub(crate) fn poll(cq: *mut ibv_cq) -> Option<Wc> {
    // SAFETY: a live CQ; a zeroed C struct, filled in by the call.
    unsafe {
        let mut wc: ibv_wc = zeroed();
        match ibv_poll_cq(cq, 1, &mut wc) {
            0 => None,
            1 => Some(Wc {
                wr_id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                len: wc.byte_len,
                imm: (wc.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0)
                    .then_some(wc.imm_data_invalidated_rkey_union.imm_data),
                qp_num: wc.qp_num,
            }),
            rc => panic!("ibv_poll_cq: {rc}"),
        }
    }
}

/// The next completion, waited for.
pub(crate) fn next(cq: *mut ibv_cq) -> Wc {
    let began = Instant::now();
    loop {
        if let Some(wc) = poll(cq) {
            return wc;
        }
        assert!(began.elapsed() < LIMIT, "no completion comes");
        std::thread::yield_now();
    }
}

/// The next completion, which must have this status.
pub(crate) fn expect(cq: *mut ibv_cq, wr_id: u64, status: u32) -> Wc {
    let wc = next(cq);
    assert_eq!((wc.wr_id, wc.status), (wr_id, status), "{wc:?}");
    wc
}

pub(crate) const OK: u32 = ibv_wc_status::IBV_WC_SUCCESS;
pub(crate) const FLUSHED: u32 = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;

/// Memory aligned to pages, so that its pages may be moved, filled with zeroes.
pub(crate) fn pages(len: usize) -> &'static mut [u8] {
    let len = len.next_multiple_of(4096);
    // SAFETY: a fresh mapping that is never unmapped.
    unsafe {
        let base = libc::mmap(
            ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(base, libc::MAP_FAILED);
        std::slice::from_raw_parts_mut(base.cast(), len)
    }
}

/// Bytes that tell their place and `seed`.
pub(crate) fn pattern(seed: u64, bytes: &mut [u8]) {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for byte in bytes {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *byte = x as u8;
    }
}

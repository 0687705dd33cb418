// SPDX-License-Identifier: MIT
//! The state machine of a QP: `ibv_modify_qp` and `ibv_query_qp`.
//!
//! Which attributes a transition needs and takes is the table of the InfiniBand specification
//! (11.2.5.2) for RC. Anything else is `EINVAL` and changes nothing.

use crate::context::ours;
use crate::process::Process;
use crate::qp::Qp;
use crate::real::forward;
use crate::recv::wake_sender;
use crate::send::Patience;
use libc::c_int;
use rdma_sys::ibv_qp_attr_mask as mask;
use rdma_sys::ibv_qp_state::*;
use rdma_sys::{ibv_mig_state, ibv_qp, ibv_qp_attr, ibv_qp_init_attr};
use std::ptr;
use std::sync::atomic::Ordering;

const STATE: u32 = mask::IBV_QP_STATE.0;
const CUR_STATE: u32 = mask::IBV_QP_CUR_STATE.0;
const SQD_NOTIFY: u32 = mask::IBV_QP_EN_SQD_ASYNC_NOTIFY.0;
const ACCESS: u32 = mask::IBV_QP_ACCESS_FLAGS.0;
const PKEY: u32 = mask::IBV_QP_PKEY_INDEX.0;
const PORT: u32 = mask::IBV_QP_PORT.0;
const AV: u32 = mask::IBV_QP_AV.0;
const MTU: u32 = mask::IBV_QP_PATH_MTU.0;
const TIMEOUT: u32 = mask::IBV_QP_TIMEOUT.0;
const RETRY: u32 = mask::IBV_QP_RETRY_CNT.0;
const RNR: u32 = mask::IBV_QP_RNR_RETRY.0;
const RQ_PSN: u32 = mask::IBV_QP_RQ_PSN.0;
const SQ_PSN: u32 = mask::IBV_QP_SQ_PSN.0;
const RD_ATOMIC: u32 = mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
const DEST_RD_ATOMIC: u32 = mask::IBV_QP_MAX_DEST_RD_ATOMIC.0;
const ALT_PATH: u32 = mask::IBV_QP_ALT_PATH.0;
const MIN_RNR: u32 = mask::IBV_QP_MIN_RNR_TIMER.0;
const MIG: u32 = mask::IBV_QP_PATH_MIG_STATE.0;
const DEST: u32 = mask::IBV_QP_DEST_QPN.0;

/// One transition: from, to, attributes that it needs, attributes that it takes besides.
type Row = (u32, u32, u32, u32);

const TABLE: &[Row] = &[
    (IBV_QPS_RESET, IBV_QPS_INIT, PKEY | PORT | ACCESS, 0),
    (IBV_QPS_INIT, IBV_QPS_INIT, 0, PKEY | PORT | ACCESS),
    (
        IBV_QPS_INIT,
        IBV_QPS_RTR,
        AV | MTU | DEST | RQ_PSN | DEST_RD_ATOMIC | MIN_RNR,
        ALT_PATH | ACCESS | PKEY,
    ),
    (
        IBV_QPS_RTR,
        IBV_QPS_RTS,
        TIMEOUT | RETRY | RNR | SQ_PSN | RD_ATOMIC,
        CUR_STATE | ALT_PATH | ACCESS | MIN_RNR | MIG,
    ),
    (IBV_QPS_RTS, IBV_QPS_RTS, 0, CUR_STATE | ACCESS | ALT_PATH | MIN_RNR | MIG),
    (IBV_QPS_RTS, IBV_QPS_SQD, 0, SQD_NOTIFY),
    (IBV_QPS_SQD, IBV_QPS_RTS, 0, CUR_STATE | ALT_PATH | ACCESS | MIN_RNR | MIG),
    (
        IBV_QPS_SQD,
        IBV_QPS_SQD,
        0,
        PORT | AV
            | TIMEOUT
            | RETRY
            | RNR
            | RD_ATOMIC
            | DEST_RD_ATOMIC
            | CUR_STATE
            | ALT_PATH
            | ACCESS
            | PKEY
            | MIN_RNR
            | MIG,
    ),
];

/// Whether `given` attributes, beside the states, are right for the transition.
fn permitted(from: u32, to: u32, given: u32) -> bool {
    let given = given & !STATE;
    if to == IBV_QPS_RESET || to == IBV_QPS_ERR {
        return given & !CUR_STATE == 0;
    }
    TABLE.iter().any(|&(row_from, row_to, needs, takes)| {
        (row_from, row_to) == (from, to) && given & needs == needs && given & !(needs | takes) == 0
    })
}

/// Whether the values given are ones that there are.
fn sane(attr: &ibv_qp_attr, given: u32) -> bool {
    let within = |bit: u32, ok: bool| given & bit == 0 || ok;
    within(PORT, attr.port_num == 1)
        && within(PKEY, attr.pkey_index == 0)
        && within(MTU, (1..=5).contains(&attr.path_mtu))
        && within(DEST, attr.dest_qp_num < 1 << 24)
        && within(TIMEOUT, attr.timeout < 32)
        && within(RETRY, attr.retry_cnt < 8)
        && within(RNR, attr.rnr_retry < 8)
        && within(MIN_RNR, attr.min_rnr_timer < 32)
        && within(AV, attr.ah_attr.is_global == 0 || attr.ah_attr.grh.sgid_index == 0)
}

/// The pause that an RNR NAK with this timer code asks for, µs (specification, table 45).
fn rnr_wait_us(code: u8) -> u32 {
    const HUNDREDTHS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    HUNDREDTHS[usize::from(code & 31)] * 10
}

/// Carries out a modification. Returns an error number.
fn modify(process: &Process, qp: &Qp, attr: &ibv_qp_attr, given: u32) -> c_int {
    let mut sq = qp.sq.lock();
    let from = qp.state();
    let to = if given & STATE != 0 { attr.qp_state } else { from };
    if given & CUR_STATE != 0 && attr.cur_qp_state != from {
        return libc::EINVAL;
    }
    if !permitted(from, to, given) || !sane(attr, given) {
        return libc::EINVAL;
    }
    if to == IBV_QPS_RTR {
        if let Err(e) = process.progress.start() {
            return e.raw_os_error().unwrap_or(libc::EAGAIN);
        }
    }
    take(qp, attr, given);
    if given & (TIMEOUT | RETRY | RNR) != 0 {
        let kept = qp.attr.lock();
        sq.patience =
            Patience { timeout: kept.timeout, retry_cnt: kept.retry_cnt, rnr_retry: kept.rnr_retry };
    }
    if to == from && to != IBV_QPS_SQD {
        return 0;
    }
    match to {
        IBV_QPS_RESET => {
            qp.next_life(IBV_QPS_RESET);
            qp.clear(&mut sq);
        }
        IBV_QPS_ERR => {
            qp.set_state(IBV_QPS_ERR);
            qp.flush(process, &mut sq);
        }
        _ => {
            qp.set_state(to);
            match to {
                IBV_QPS_RTR => {
                    // Known from now on, the peer is watched. It may be there only later.
                    if process.peer(qp.shared.dest.load(Ordering::Relaxed) >> 12).is_some() {
                        process.progress.wake();
                    }
                    wake_sender(process, qp);
                }
                IBV_QPS_SQD => sq.tell_drained = given & SQD_NOTIFY != 0 && attr.en_sqd_async_notify != 0,
                _ => {}
            }
            sq.go_on(qp, process);
        }
    }
    0
}

/// Stores the attributes given.
fn take(qp: &Qp, attr: &ibv_qp_attr, given: u32) {
    let mut kept = qp.attr.lock();
    macro_rules! take {
        ($($bit:ident => $($field:ident),+;)*) => {
            $(if given & $bit != 0 { $(kept.$field = attr.$field;)+ })*
        };
    }
    take! {
        ACCESS => qp_access_flags;
        PKEY => pkey_index;
        PORT => port_num;
        AV => ah_attr;
        MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY => retry_cnt;
        RNR => rnr_retry;
        RQ_PSN => rq_psn;
        SQ_PSN => sq_psn;
        RD_ATOMIC => max_rd_atomic;
        DEST_RD_ATOMIC => max_dest_rd_atomic;
        ALT_PATH => alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        MIN_RNR => min_rnr_timer;
        MIG => path_mig_state;
        DEST => dest_qp_num;
    }
    if given & ACCESS != 0 {
        qp.shared.access.store(attr.qp_access_flags, Ordering::Relaxed);
    }
    if given & MIN_RNR != 0 {
        qp.shared.rnr_wait_us.store(rnr_wait_us(attr.min_rnr_timer), Ordering::Relaxed);
    }
    if given & DEST != 0 {
        qp.shared.dest.store(attr.dest_qp_num, Ordering::Release);
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_modify_qp(ibv: *mut ibv_qp, attr: *mut ibv_qp_attr, given: c_int) -> c_int {
    // SAFETY: the caller hands a live QP and attributes.
    unsafe {
        if !ours((*ibv).context) {
            return forward!(
                c"ibv_modify_qp",
                c"IBVERBS_1.1",
                fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
                libc::ENOSYS,
                ibv,
                attr,
                given
            );
        }
        let Some(process) = Process::get() else { return libc::EPERM };
        let rc = modify(process, Qp::of(ibv), &*attr, given as u32);
        if rc == 0 && given as u32 & STATE != 0 {
            (*ibv).state = (*attr).qp_state;
        }
        rc
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_qp(
    ibv: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    wanted: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller hands a live QP and room for the results.
    unsafe {
        if !ours((*ibv).context) {
            return forward!(
                c"ibv_query_qp",
                c"IBVERBS_1.1",
                fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int,
                libc::ENOSYS,
                ibv,
                attr,
                wanted,
                init
            );
        }
        if Process::get().is_none() {
            return libc::EPERM;
        }
        let qp = Qp::of(ibv);
        ptr::copy_nonoverlapping(&raw const *qp.attr.lock(), attr, 1);
        let state = qp.state();
        (*attr).qp_state = state;
        (*attr).cur_qp_state = state;
        (*attr).path_mig_state = ibv_mig_state::IBV_MIG_MIGRATED;
        (*attr).cap = qp.cap;
        (*ibv).state = state;
        (*init).qp_context = (*ibv).qp_context;
        (*init).send_cq = (*ibv).send_cq;
        (*init).recv_cq = (*ibv).recv_cq;
        (*init).srq = (*ibv).srq;
        (*init).cap = qp.cap;
        (*init).qp_type = (*ibv).qp_type;
        (*init).sq_sig_all = qp.signal_all.into();
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO_INIT: u32 = STATE | PKEY | PORT | ACCESS;
    const TO_RTR: u32 = STATE | AV | MTU | DEST | RQ_PSN | DEST_RD_ATOMIC | MIN_RNR;

    #[test]
    fn a_transition_needs_all_its_attributes_and_takes_no_others() {
        assert!(permitted(IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT));
        assert!(!permitted(IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT & !PORT));
        assert!(!permitted(IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT | AV));
        assert!(permitted(IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR | ACCESS));
        assert!(!permitted(IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR & !MIN_RNR));
    }

    #[test]
    fn states_are_not_skipped() {
        assert!(!permitted(IBV_QPS_RESET, IBV_QPS_RTR, TO_RTR));
        assert!(!permitted(IBV_QPS_INIT, IBV_QPS_RTS, STATE | TIMEOUT | RETRY | RNR | SQ_PSN | RD_ATOMIC));
        assert!(!permitted(IBV_QPS_ERR, IBV_QPS_RTS, STATE));
    }

    #[test]
    fn every_state_leads_to_reset_and_to_error() {
        for from in IBV_QPS_RESET..=IBV_QPS_ERR {
            assert!(permitted(from, IBV_QPS_RESET, STATE), "from {from}");
            assert!(permitted(from, IBV_QPS_ERR, STATE), "from {from}");
        }
    }

    #[test]
    fn the_pauses_of_rnr_are_those_of_the_specification() {
        assert_eq!(rnr_wait_us(0), 655_360);
        assert_eq!(rnr_wait_us(1), 10);
        assert_eq!(rnr_wait_us(12), 640);
        assert_eq!(rnr_wait_us(31), 491_520);
    }
}

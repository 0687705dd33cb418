// SPDX-License-Identifier: MIT
//! Looking at CQs without polling them: a question about one CQ, and doorbells for many.
//!
//! `fw_soft_ready` reads what `ibv_poll_cq` would read first, and consumes nothing. The doorbells are
//! one word per CQ, dense in one array, for programs that watch many CQs at once.
//!
//! A producer, in whatever process, makes a CQ's doorbell 1 after each completion that it
//! publishes, unless it is 1 already. The device itself never reads or clears one. Who watches:
//!
//! 1. stores 0 to the doorbell,
//! 2. makes a full memory barrier,
//! 3. polls the CQ until it is empty,
//!
//! and knows from then on that there is nothing new as long as the word stays 0. A 1 says "look",
//! no more: the completion may have been polled meanwhile.

use crate::context::ours;
use crate::cq::Cq;
use crate::layout::MAX_CQ;
use crate::process::Process;
use libc::c_int;
use rdma_sys::ibv_cq;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// The doorbell of a CQ of this device, good until the CQ is destroyed; null for a CQ of another
/// device. All doorbells of a process stand in one array, that of CQ handle `i` at index `i`.
///
/// # Safety
/// `cq` is a live CQ.
#[no_mangle]
pub unsafe extern "C" fn fw_soft_doorbell(cq: *mut ibv_cq) -> *const AtomicU32 {
    // SAFETY: promised by the caller.
    unsafe {
        if !ours((*cq).context) {
            return ptr::null();
        }
        match Process::get() {
            Some(process) => &process.segment.map.head().doorbells[Cq::of(cq).index % MAX_CQ],
            None => ptr::null(),
        }
    }
}

/// Whether `ibv_poll_cq` has something to do on a CQ of this device: a completion, an overflow to
/// report, or sends that wait to be tried again. It takes no lock and changes nothing; a completion
/// that is published later is seen later.
///
/// # Safety
/// `cq` is a live CQ of this device.
#[no_mangle]
unsafe extern "C" fn fw_soft_ready(cq: *mut ibv_cq) -> c_int {
    // SAFETY: promised by the caller.
    c_int::from(unsafe { Cq::of(cq) }.is_ready())
}

// SPDX-License-Identifier: MIT
//! Calls that stock programs bind and this device does not have: SRQs, address handles, multicast,
//! imported objects and ECE. About another device they go to the real library; about this one
//! they say so and fail with `EOPNOTSUPP`, instead of crashing libibverbs on an object that is not
//! its own.

use crate::context::ours;
use crate::real::{fail, forward, refuse};
use libc::{c_int, c_void};
use rdma_sys::{ibv_context, ibv_gid, ibv_mr, ibv_pd, ibv_qp, ibv_srq};
use std::ptr;

/// Defines functions that only forward. The expression names the object's context.
macro_rules! unsupported {
    ($($name:ident @ $version:literal ($($arg:ident: $t:ty),*) -> $r:ty, $context:expr, $absent:expr, $refused:expr;)*) => {
        $(
            #[no_mangle]
            unsafe extern "C" fn $name($($arg: $t),*) -> $r {
                // SAFETY: the caller hands live objects, as verbs demand; the types are those of
                // the public header.
                unsafe {
                    if ours($context) {
                        let error = refuse(stringify!($name));
                        return $refused(error);
                    }
                    const NAME: &std::ffi::CStr =
                        match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => c"",
                        };
                    forward!(NAME, $version, fn($($t),*) -> $r, $absent, $($arg),*)
                }
            }
        )*
    };
}

/// How a call fails that gives a number.
fn number(error: c_int) -> c_int {
    error
}

unsupported! {
    ibv_create_srq @ c"IBVERBS_1.1" (pd: *mut ibv_pd, attr: *mut c_void) -> *mut ibv_srq,
        (*pd).context, ptr::null_mut(), fail;
    ibv_modify_srq @ c"IBVERBS_1.1" (srq: *mut ibv_srq, attr: *mut c_void, mask: c_int) -> c_int,
        (*srq).context, libc::ENOSYS, number;
    ibv_query_srq @ c"IBVERBS_1.1" (srq: *mut ibv_srq, attr: *mut c_void) -> c_int,
        (*srq).context, libc::ENOSYS, number;
    ibv_destroy_srq @ c"IBVERBS_1.1" (srq: *mut ibv_srq) -> c_int,
        (*srq).context, libc::ENOSYS, number;
    ibv_create_ah @ c"IBVERBS_1.1" (pd: *mut ibv_pd, attr: *mut c_void) -> *mut rdma_sys::ibv_ah,
        (*pd).context, ptr::null_mut(), fail;
    ibv_create_ah_from_wc @ c"IBVERBS_1.1"
        (pd: *mut ibv_pd, wc: *mut c_void, grh: *mut c_void, port: u8) -> *mut rdma_sys::ibv_ah,
        (*pd).context, ptr::null_mut(), fail;
    ibv_destroy_ah @ c"IBVERBS_1.1" (ah: *mut rdma_sys::ibv_ah) -> c_int,
        (*ah).context, libc::ENOSYS, number;
    ibv_init_ah_from_wc @ c"IBVERBS_1.1"
        (context: *mut ibv_context, port: u8, wc: *mut c_void, grh: *mut c_void, attr: *mut c_void) -> c_int,
        context, libc::ENOSYS, number;
    ibv_resolve_eth_l2_from_gid @ c"IBVERBS_1.1"
        (context: *mut ibv_context, attr: *mut c_void, mac: *mut c_void, vlan: *mut u16) -> c_int,
        context, libc::ENOSYS, number;
    ibv_attach_mcast @ c"IBVERBS_1.1" (qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int,
        (*qp).context, libc::ENOSYS, number;
    ibv_detach_mcast @ c"IBVERBS_1.1" (qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int,
        (*qp).context, libc::ENOSYS, number;
    ibv_set_ece @ c"IBVERBS_1.10" (qp: *mut ibv_qp, ece: *mut c_void) -> c_int,
        (*qp).context, libc::ENOSYS, number;
    ibv_query_ece @ c"IBVERBS_1.10" (qp: *mut ibv_qp, ece: *mut c_void) -> c_int,
        (*qp).context, libc::ENOSYS, number;
    ibv_query_qp_data_in_order @ c"IBVERBS_1.14" (qp: *mut ibv_qp, op: c_int, flags: u32) -> c_int,
        (*qp).context, 0, |_| 0;
    ibv_import_pd @ c"IBVERBS_1.10" (context: *mut ibv_context, handle: u32) -> *mut ibv_pd,
        context, ptr::null_mut(), fail;
    ibv_unimport_pd @ c"IBVERBS_1.10" (pd: *mut ibv_pd) -> (),
        (*pd).context, (), |_| ();
    ibv_import_mr @ c"IBVERBS_1.10" (pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr,
        (*pd).context, ptr::null_mut(), fail;
    ibv_unimport_mr @ c"IBVERBS_1.10" (mr: *mut ibv_mr) -> (),
        (*mr).context, (), |_| ();
    ibv_import_dm @ c"IBVERBS_1.13" (context: *mut ibv_context, handle: u32) -> *mut rdma_sys::ibv_dm,
        context, ptr::null_mut(), fail;
    ibv_unimport_dm @ c"IBVERBS_1.13" (dm: *mut rdma_sys::ibv_dm) -> (),
        (*dm).context, (), |_| ();
}

/// The extended view of a QP; null, without an error, for a QP that has none, as libibverbs has it.
#[no_mangle]
unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut c_void {
    // SAFETY: the caller hands a live QP.
    unsafe {
        if ours((*qp).context) {
            return ptr::null_mut();
        }
        forward!(c"ibv_qp_to_qp_ex", c"IBVERBS_1.6", fn(*mut ibv_qp) -> *mut c_void, ptr::null_mut(), qp)
    }
}

// SPDX-License-Identifier: MIT
//! What the device says of itself: attributes of device and port, GIDs, pkeys.
//!
//! The vendor is one that no program knows, so that none takes a shortcut to its own driver.

use crate::context::{ours, set, GUID};
use crate::cq::MAX_CQE;
use crate::execute::MAX_MESSAGE;
use crate::layout::{MAX_CQ, MAX_QP, MR_BLOCK, MR_BLOCKS};
use crate::process::settings;
use crate::qp::{MAX_SGE, MAX_WR};
use crate::real::{forward, set_errno};
use fastwake::settings::Link;
use libc::{c_int, c_uint, size_t, ssize_t};
use rdma_sys::{
    ibv_atomic_cap, ibv_context, ibv_device_attr, ibv_device_attr_ex, ibv_gid, ibv_gid_entry, ibv_mtu,
    ibv_port_attr, ibv_port_state, ibv_query_device_ex_input,
};
use std::mem::{offset_of, zeroed};
use std::ptr;

/// Not assigned to anybody.
const VENDOR: u32 = 0x00f5_7a6e;
const GID_TYPE_ROCE_V2_SYSFS: c_int = 1;
const LINK_LAYER_INFINIBAND: u8 = 1;
const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_PORT_IP_BASED_GIDS`.
const IP_BASED_GIDS: u32 = 1 << 26;

fn roce() -> bool {
    settings().is_some_and(|soft| soft.link == Link::Roce)
}

/// The one GID: link-local on InfiniBand, ::ffff:127.0.0.1 on Ethernet.
fn gid() -> ibv_gid {
    let mut raw = [0; 16];
    if roce() {
        raw[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    } else {
        raw[..2].copy_from_slice(&[0xfe, 0x80]);
        raw[8..].copy_from_slice(&GUID.to_ne_bytes());
    }
    ibv_gid { raw }
}

fn device_attr() -> ibv_device_attr {
    // SAFETY: a C struct of numbers: all zeroes is a value.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    set(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    attr.node_guid = GUID;
    attr.sys_image_guid = GUID;
    attr.max_mr_size = u64::MAX;
    attr.page_size_cap = !0xfff;
    attr.vendor_id = VENDOR;
    attr.vendor_part_id = 1;
    attr.hw_ver = 1;
    attr.max_qp = MAX_QP as c_int;
    attr.max_qp_wr = MAX_WR as c_int;
    attr.device_cap_flags = rdma_sys::ibv_device_cap_flags::IBV_DEVICE_RC_RNR_NAK_GEN.0;
    attr.max_sge = MAX_SGE as c_int;
    attr.max_sge_rd = MAX_SGE as c_int;
    attr.max_cq = MAX_CQ as c_int;
    attr.max_cqe = MAX_CQE as c_int;
    attr.max_mr = (MR_BLOCK * MR_BLOCKS - 1) as c_int;
    attr.max_pd = c_int::MAX;
    attr.max_qp_rd_atom = 16;
    attr.max_res_rd_atom = 16 * MAX_QP as c_int;
    attr.max_qp_init_rd_atom = 16;
    attr.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_HCA;
    attr.max_pkeys = 1;
    attr.local_ca_ack_delay = 15;
    attr.phys_port_cnt = 1;
    attr
}

fn port_attr() -> ibv_port_attr {
    // SAFETY: as above.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    attr.state = ibv_port_state::IBV_PORT_ACTIVE;
    attr.max_mtu = ibv_mtu::IBV_MTU_4096;
    attr.active_mtu = ibv_mtu::IBV_MTU_4096;
    attr.gid_tbl_len = 1;
    attr.pkey_tbl_len = 1;
    attr.max_msg_sz = MAX_MESSAGE as u32;
    attr.max_vl_num = 1;
    // 4X at 25 Gb/s a lane: what one core copies.
    attr.active_width = 2;
    attr.active_speed = 32;
    attr.phys_state = 5;
    if roce() {
        attr.link_layer = LINK_LAYER_ETHERNET;
        attr.port_cap_flags = IP_BASED_GIDS;
    } else {
        attr.link_layer = LINK_LAYER_INFINIBAND;
        attr.lid = 1;
        attr.sm_lid = 1;
    }
    attr
}

/// Copies the first `room` bytes of `value` to `to` and zeroes what is beyond it.
///
/// # Safety
/// `to` has room for `room` bytes.
unsafe fn give<T>(value: &T, to: *mut T, room: usize) {
    // SAFETY: promised by the caller; not more than either holds.
    unsafe {
        ptr::write_bytes(to.cast::<u8>(), 0, room);
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast(), room.min(size_of::<T>()));
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the caller hands a live context and room; so it is in all functions of this file.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_query_device",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
                libc::ENOSYS,
                context,
                attr
            );
        }
        *attr = device_attr();
        0
    }
}

pub(crate) unsafe extern "C" fn context_query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    room: usize,
) -> c_int {
    // SAFETY: `input` is null or the caller's; the struct is plain numbers, zero is a value.
    unsafe {
        if input.as_ref().is_some_and(|input| input.comp_mask != 0) || room < size_of::<ibv_device_attr>() {
            return libc::EINVAL;
        }
        let mut full: ibv_device_attr_ex = zeroed();
        full.orig_attr = device_attr();
        full.phys_port_cnt_ex = 1;
        give(&full, attr, room);
        0
    }
}

pub(crate) unsafe extern "C" fn context_query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    room: usize,
) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    // SAFETY: see `ibv_query_device`.
    unsafe { give(&port_attr(), attr, room) };
    0
}

#[no_mangle]
unsafe extern "C" fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_query_port",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
                libc::ENOSYS,
                context,
                port,
                attr
            );
        }
        // Callers of the symbol, not of the inline function, know the older and shorter struct.
        context_query_port(context, port, attr, offset_of!(ibv_port_attr, port_cap_flags2))
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    out: *mut ibv_gid,
) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_query_gid",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
                -1,
                context,
                port,
                index,
                out
            );
        }
        if port != 1 || index != 0 {
            set_errno(libc::EINVAL);
            return -1;
        }
        *out = gid();
        0
    }
}

fn gid_entry() -> ibv_gid_entry {
    let gid_type = if roce() { rdma_sys::IBV_GID_TYPE_ROCE_V2 } else { rdma_sys::IBV_GID_TYPE_IB };
    ibv_gid_entry { gid: gid(), gid_index: 0, port_num: 1, gid_type, ndev_ifindex: 0 }
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    room: size_t,
) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"_ibv_query_gid_ex",
                c"IBVERBS_1.11",
                fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, size_t) -> c_int,
                libc::ENOSYS,
                context,
                port,
                index,
                entry,
                flags,
                room
            );
        }
        if flags != 0 || room < size_of::<ibv_gid_entry>() {
            return libc::EOPNOTSUPP;
        }
        if port != 1 {
            return libc::EINVAL;
        }
        if index != 0 {
            return libc::ENODATA;
        }
        give(&gid_entry(), entry, room);
        0
    }
}

#[no_mangle]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    count: size_t,
    flags: u32,
    room: size_t,
) -> ssize_t {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"_ibv_query_gid_table",
                c"IBVERBS_1.11",
                fn(*mut ibv_context, *mut ibv_gid_entry, size_t, u32, size_t) -> ssize_t,
                -(libc::ENOSYS as ssize_t),
                context,
                entries,
                count,
                flags,
                room
            );
        }
        if flags != 0 || room < size_of::<ibv_gid_entry>() {
            return -(libc::EOPNOTSUPP as ssize_t);
        }
        if count < 1 {
            return -(libc::EINVAL as ssize_t);
        }
        give(&gid_entry(), entries, room);
        1
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_int,
) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_query_gid_type",
                c"IBVERBS_PRIVATE_34",
                fn(*mut ibv_context, u8, c_uint, *mut c_int) -> c_int,
                -1,
                context,
                port,
                index,
                kind
            );
        }
        if port != 1 || index != 0 {
            set_errno(libc::EINVAL);
            return -1;
        }
        *kind = if roce() { GID_TYPE_ROCE_V2_SYSFS } else { 0 };
        0
    }
}

const PKEY: u16 = 0xffff;

#[no_mangle]
unsafe extern "C" fn ibv_query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_query_pkey",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int,
                -1,
                context,
                port,
                index,
                pkey
            );
        }
        if port != 1 || index != 0 {
            set_errno(libc::EINVAL);
            return -1;
        }
        *pkey = PKEY;
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    // SAFETY: see `ibv_query_device`.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_get_pkey_index",
                c"IBVERBS_1.5",
                fn(*mut ibv_context, u8, u16) -> c_int,
                -1,
                context,
                port,
                pkey
            );
        }
        if port == 1 && pkey == PKEY {
            0
        } else {
            set_errno(libc::EINVAL);
            -1
        }
    }
}

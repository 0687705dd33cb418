// SPDX-License-Identifier: MIT
//! The device `fw_soft0` and its contexts: what `ibv_get_device_list` shows and `ibv_open_device`
//! opens.

use crate::async_event::AsyncQueue;
use crate::process::{settings, Process};
use crate::real::{fail, forward};
use crate::{cq, query, recv, send};
use libc::{c_char, c_int};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use rdma_sys::{ibv_context, ibv_device, ibv_node_type, ibv_transport_type, verbs_context};
use std::collections::HashMap;
use std::mem::{offset_of, zeroed};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The device's GUID, network byte order.
pub(crate) const GUID: u64 = 0x02f5_7a6e_0000_0001_u64.to_be();
/// `ibv_context.abi_compat` of a context that is part of a `verbs_context`.
const ABI_EXTENDED: *mut libc::c_void = usize::MAX as *mut libc::c_void;

/// The device. libibverbs' own is longer than the public `ibv_device`; programs that look beyond
/// its end find zeroes.
#[repr(C)]
struct Device {
    device: ibv_device,
    beyond: [u64; 64],
}

static DEVICE: AtomicPtr<ibv_device> = AtomicPtr::new(ptr::null_mut());

fn device() -> *mut ibv_device {
    static MADE: OnceCell<()> = OnceCell::new();
    MADE.get_or_init(|| {
        // SAFETY: a C struct of numbers, pointers and characters: all zeroes is a value.
        let mut made: Box<Device> = Box::new(unsafe { zeroed() });
        let device = &mut made.device;
        device.node_type = ibv_node_type::IBV_NODE_CA;
        device.transport_type = ibv_transport_type::IBV_TRANSPORT_IB;
        set(&mut device.name, "fw_soft0");
        set(&mut device.dev_name, "uverbs_fw_soft0");
        set(&mut device.dev_path, "/sys/class/infiniband_verbs/uverbs_fw_soft0");
        set(&mut device.ibdev_path, "/sys/class/infiniband/fw_soft0");
        DEVICE.store(&raw mut Box::leak(made).device, Ordering::Release);
    });
    DEVICE.load(Ordering::Acquire)
}

/// Puts `text` into a field of characters that is all zeroes.
pub(crate) fn set(field: &mut [c_char], text: &str) {
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// Whether `context` is one of this device.
///
/// # Safety
/// `context` is a live context.
#[inline(always)]
pub(crate) unsafe fn ours(context: *mut ibv_context) -> bool {
    // SAFETY: promised by the caller. Before the device is made, no context equals it: null.
    unsafe { (*context).device == DEVICE.load(Ordering::Relaxed) }
}

/// A context of the device.
#[repr(C)]
pub(crate) struct Context {
    verbs: verbs_context,
    pub(crate) async_queue: AsyncQueue,
}

impl Context {
    /// The whole of a context of this device.
    ///
    /// # Safety
    /// `context` is a live context of this device.
    pub(crate) unsafe fn of<'a>(context: *mut ibv_context) -> &'a Context {
        // SAFETY: such a context stands inside a `Context` made by `ibv_open_device`.
        unsafe { &*context.byte_sub(offset_of!(Context, verbs.context)).cast::<Context>() }
    }
}

/// Lists handed out, with the real library's list inside each.
static LISTS: Mutex<Option<HashMap<usize, usize>>> = Mutex::new(None);

#[no_mangle]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    // SAFETY: `count` is null or the caller's; the real library's list is NULL-terminated and as
    // long as it says; the new list is one longer.
    unsafe {
        let mut others = 0;
        let real = forward!(
            c"ibv_get_device_list",
            c"IBVERBS_1.1",
            fn(*mut c_int) -> *mut *mut ibv_device,
            ptr::null_mut(),
            &mut others
        );
        if real.is_null() {
            others = 0;
        }
        let soft = settings().is_some();
        let list = libc::calloc(others as usize + 2, size_of::<*mut ibv_device>()).cast::<*mut ibv_device>();
        if list.is_null() {
            return fail(libc::ENOMEM);
        }
        let mut n = 0;
        if soft {
            *list = device();
            n = 1;
        }
        for i in 0..others as usize {
            *list.add(n) = *real.add(i);
            n += 1;
        }
        LISTS.lock().get_or_insert_default().insert(list as usize, real as usize);
        if !count.is_null() {
            *count = n as c_int;
        }
        crate::real::set_errno(0);
        list
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let real = LISTS.lock().as_mut().and_then(|lists| lists.remove(&(list as usize)));
    // SAFETY: a list of ours is freed once; another one is the real library's.
    unsafe {
        let free = |real: *mut *mut ibv_device| {
            forward!(c"ibv_free_device_list", c"IBVERBS_1.1", fn(*mut *mut ibv_device) -> (), (), real);
        };
        match real {
            Some(0) => libc::free(list.cast()),
            Some(real) => {
                free(real as *mut *mut ibv_device);
                libc::free(list.cast());
            }
            None => free(list),
        }
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller hands a live device.
    unsafe { (&raw const (*device).name).cast() }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_guid(which: *mut ibv_device) -> u64 {
    if which == device() {
        return GUID;
    }
    // SAFETY: the caller hands a live device.
    unsafe { forward!(c"ibv_get_device_guid", c"IBVERBS_1.1", fn(*mut ibv_device) -> u64, 0, which) }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_device_index(which: *mut ibv_device) -> c_int {
    if which == device() {
        return -1;
    }
    // SAFETY: the caller hands a live device.
    unsafe { forward!(c"ibv_get_device_index", c"IBVERBS_1.9", fn(*mut ibv_device) -> c_int, -1, which) }
}

#[no_mangle]
unsafe extern "C" fn ibv_open_device(which: *mut ibv_device) -> *mut ibv_context {
    if which != device() {
        // SAFETY: the caller hands a live device.
        return unsafe {
            forward!(
                c"ibv_open_device",
                c"IBVERBS_1.1",
                fn(*mut ibv_device) -> *mut ibv_context,
                ptr::null_mut(),
                which
            )
        };
    }
    let opened = Process::open().and_then(|_| AsyncQueue::new());
    let (async_queue, async_fd) = match opened {
        Ok(queue) => queue,
        Err(e) => return fail(e.raw_os_error().unwrap_or(libc::EIO)),
    };
    // SAFETY: C structs of numbers and optional functions: all zeroes is a value, and means
    // "not supported" for every extended call that is left so.
    let mut verbs: verbs_context = unsafe { zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(query::context_query_port);
    verbs.query_device_ex = Some(query::context_query_device_ex);
    verbs.create_qp_ex = Some(crate::qp::context_create_qp_ex);
    let context = &mut verbs.context;
    context.device = which;
    context.abi_compat = ABI_EXTENDED;
    context.cmd_fd = -1;
    context.async_fd = async_fd;
    // SAFETY: plain call.
    context.num_comp_vectors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }.max(1) as c_int;
    context.ops.poll_cq = Some(cq::poll_cq);
    context.ops.req_notify_cq = Some(cq::req_notify_cq);
    context.ops.post_send = Some(send::post_send);
    context.ops.post_recv = Some(recv::post_recv);
    let made = Box::into_raw(Box::new(Context { verbs, async_queue }));
    // SAFETY: just made; the mutex is set up where it stays.
    unsafe {
        let context = &raw mut (*made).verbs.context;
        libc::pthread_mutex_init((&raw mut (*context).mutex).cast(), ptr::null());
        context
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller hands a live context and does not use it afterwards.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_close_device",
                c"IBVERBS_1.1",
                fn(*mut ibv_context) -> c_int,
                libc::ENOSYS,
                context
            );
        }
        libc::close((*context).async_fd);
        drop(Box::from_raw(context.byte_sub(offset_of!(Context, verbs.context)).cast::<Context>()));
        0
    }
}

const _: () = {
    // What programs compiled against any rdma-core reach inline.
    assert!(size_of::<ibv_context>() == 328);
    assert!(offset_of!(verbs_context, context) - offset_of!(verbs_context, sz) == 8);
    assert!(offset_of!(verbs_context, context) - offset_of!(verbs_context, create_cq_ex) == 120);
    assert!(offset_of!(ibv_context, ops) == 8 && offset_of!(ibv_context, async_fd) == 268);
    assert!(offset_of!(ibv_context, ops.poll_cq) == 96 && offset_of!(ibv_context, ops.req_notify_cq) == 104);
    // No padding behind the context: what follows it is ours.
    assert!(size_of::<verbs_context>() == offset_of!(verbs_context, context) + size_of::<ibv_context>());
};

// SPDX-License-Identifier: MIT
//! The operations of a verbs context that inline calls go through.
//!
//! `ibv_poll_cq` and `ibv_req_notify_cq` are inline in the application: they call what the context's
//! table says. The table of a context is changed when its first completion channel is made, and the
//! originals are kept for as long as the context is open.

use std::ffi::{c_int, c_void, CStr};
use std::mem::offset_of;

use fastwake::channel::{CHANNELS, CQS};
use fastwake::cq::{Peek, PollCq, Provider};
use fastwake::table::Table;
use rdma_sys::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex, ibv_wc, verbs_context,
};

use crate::{process, real};

type CreateCqEx = unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;

// What the compiled application relies on, and we with it.
const _: () = {
    assert!(size_of::<ibv_context>() == 328 && size_of::<ibv_cq>() == 128 && size_of::<ibv_wc>() == 48);
    assert!(offset_of!(ibv_context, ops) == 8 && offset_of!(ibv_context, abi_compat) == 320);
    assert!(offset_of!(ibv_cq, channel) == 8 && offset_of!(ibv_cq, comp_events_completed) == 120);
};

/// The originals of a context.
#[derive(Clone, Copy)]
pub(crate) struct Originals {
    pub(crate) provider: Provider,
    create_cq_ex: Option<CreateCqEx>,
}

static CONTEXTS: Table<ibv_context, Originals> = Table::new();

/// The originals of `context`; `None` where its operations were not replaced.
pub(crate) fn originals(context: *mut ibv_context) -> Option<&'static Originals> {
    CONTEXTS.get(context)
}

/// Replaces the operations of `context`, once. False where it has none that could be replaced.
///
/// # Safety
/// `context` is open.
pub(crate) unsafe fn replace(context: *mut ibv_context) -> bool {
    if CONTEXTS.get(context).is_some() {
        return true;
    }
    // SAFETY: an open context, whose table is plain data.
    let ops = unsafe { &mut (*context).ops };
    let (Some(poll), Some(req_notify)) = (ops.poll_cq, ops.req_notify_cq) else { return false };
    if std::ptr::fn_addr_eq(poll, poll_cq as PollCq) {
        // Ours already: a copy of a context whose originals we do not know by this address.
        return false;
    }
    // SAFETY: as above.
    let extended = unsafe { extended(context) };
    let create_cq_ex = extended.and_then(|slot| *slot);
    // SAFETY: as above.
    let provider = Provider { poll, req_notify, peek: unsafe { peek_of(context) } };
    // Contexts are few and reopened rarely; what look-ups may still read is never freed.
    CONTEXTS.insert(context, Box::leak(Box::new(Originals { provider, create_cq_ex })));
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq = Some(req_notify_cq);
    // SAFETY: as above.
    if let (Some(slot), Some(_)) = (unsafe { self::extended(context) }, create_cq_ex) {
        *slot = Some(self::create_cq_ex);
    }
    true
}

/// How the CQs of this context are asked whether there is something to poll: the soft device says so
/// by a function of its own; of any other device nothing is known.
///
/// # Safety
/// `context` is open.
unsafe fn peek_of(context: *mut ibv_context) -> Option<Peek> {
    let address = real::dlsym(libc::RTLD_NEXT, c"fw_soft_ready");
    // SAFETY: an open context names its device.
    let device = unsafe { CStr::from_ptr((*(*context).device).name.as_ptr()) };
    if address.is_null() || device != c"fw_soft0" {
        return None;
    }
    // SAFETY: the soft device's function of this name has this type.
    Some(unsafe { std::mem::transmute::<*mut c_void, Peek>(address) })
}

/// Forgets a context that is closed.
pub(crate) fn forget(context: *mut ibv_context) {
    CONTEXTS.remove(context);
}

/// The slot of `create_cq_ex`, which lies before the context, where this context has one.
///
/// # Safety
/// `context` is open.
unsafe fn extended<'a>(context: *mut ibv_context) -> Option<&'a mut Option<CreateCqEx>> {
    // SAFETY: an open context whose abi_compat is all ones lies at the end of a verbs_context, which
    // says in `sz` how far it reaches back.
    unsafe {
        if (*context).abi_compat as usize != usize::MAX {
            return None;
        }
        let verbs = context.byte_sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
        let back = size_of::<verbs_context>() - offset_of!(verbs_context, create_cq_ex);
        ((*verbs).sz >= back).then(|| &mut *(&raw mut (*verbs).create_cq_ex).cast())
    }
}

/// `ibv_poll_cq`.
unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, wcs: *mut ibv_wc) -> c_int {
    if let Some(account) = CQS.get(cq) {
        if process::active() {
            // SAFETY: the application's arguments.
            return unsafe { account.poll(room, wcs) };
        }
    }
    // SAFETY: a live CQ points to its context.
    match unsafe { originals((*cq).context) } {
        // SAFETY: the application's arguments.
        Some(originals) => unsafe { (originals.provider.poll)(cq, room, wcs) },
        None => -libc::EINVAL,
    }
}

/// `ibv_req_notify_cq`.
unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    if let Some(account) = CQS.get(cq) {
        if process::active() {
            return account.request(solicited_only != 0);
        }
    }
    // SAFETY: a live CQ points to its context.
    match unsafe { originals((*cq).context) } {
        // SAFETY: the application's arguments.
        Some(originals) => unsafe { (originals.provider.req_notify)(cq, solicited_only) },
        None => libc::EINVAL,
    }
}

/// `ibv_create_cq_ex`: such a CQ is polled through calls that consume what they look at, so its
/// channel stays with the kernel.
unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the application's arguments.
    let channel: *mut ibv_comp_channel =
        unsafe { attr.as_ref() }.map_or(std::ptr::null_mut(), |attr| attr.channel);
    if let Some(channel) = CHANNELS.get(channel) {
        if process::active() {
            channel.never_serve();
        }
    }
    match originals(context).and_then(|originals| originals.create_cq_ex) {
        // SAFETY: the application's arguments.
        Some(create) => unsafe { create(context, attr) },
        None => {
            crate::thread::set_errno(libc::EOPNOTSUPP);
            std::ptr::null_mut()
        }
    }
}

// SPDX-License-Identifier: MIT
//! libibverbs: channels, CQs, waits, and what may take completions away.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use parking_lot::Mutex;

use fastwake::channel::{AckCqEvents, Channel, GetCqEvent, CHANNELS, CQS};
use fastwake::cq::Cq;
use fastwake::wait::Wait;
use rdma_sys::{ibv_comp_channel, ibv_context, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state};

use super::{fds, hooks};
use crate::real::call_real;
use crate::thread::{self, Thread};
use crate::{kick, ops, process, signals};

hooks! {
    ibv_create_comp_channel(verbs) = create_comp_channel;
    ibv_destroy_comp_channel(verbs) = destroy_comp_channel;
    ibv_close_device(verbs) = close_device;
    ibv_create_cq(verbs) = create_cq;
    ibv_resize_cq(verbs) = resize_cq;
    ibv_destroy_cq(verbs) = destroy_cq;
    ibv_get_cq_event(verbs) = get_cq_event;
    ibv_ack_cq_events(verbs) = ack_cq_events;
    ibv_modify_qp(verbs) = modify_qp;
    ibv_destroy_qp(verbs) = destroy_qp;
}

/// No function of this name below: the program cannot have called it and got here.
fn missing<T>(value: T) -> T {
    thread::set_errno(libc::ENOSYS);
    value
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    process::enter();
    let hook = &ibv_create_comp_channel::HOOK;
    let channel = call_real!(
        hook.real,
        fn(*mut ibv_context) -> *mut ibv_comp_channel,
        (context),
        missing(ptr::null_mut())
    );
    if hook.wanted() && !channel.is_null() {
        // SAFETY: the library below has just made it.
        unsafe { account_of(channel) };
    }
    channel
}

/// The account of a live channel, made where there is none; `None` where the channel must stay with
/// the kernel because its context's operations cannot be replaced.
///
/// # Safety
/// `channel` is live.
unsafe fn account_of(channel: *mut ibv_comp_channel) -> Option<&'static Channel> {
    // Two threads may make their first channels of one context at once.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock();
    if let Some(account) = CHANNELS.get(channel) {
        return Some(account);
    }
    let (get, ack) = (ibv_get_cq_event::HOOK.real.address(), ibv_ack_cq_events::HOOK.real.address());
    // SAFETY: live, as the caller says.
    if get.is_null() || ack.is_null() || !unsafe { ops::replace((*channel).context) } {
        log::warn!("this verbs library has no operations to stand before; the program runs without FastWake");
        return None;
    }
    // SAFETY: the addresses are those of the functions of these names; the channel is live.
    let account = unsafe {
        let get = std::mem::transmute::<*mut c_void, GetCqEvent>(get);
        let ack = std::mem::transmute::<*mut c_void, AckCqEvents>(ack);
        Channel::new(channel, get, ack)
    };
    fds::watch(account);
    Some(account)
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let hook = &ibv_destroy_comp_channel::HOOK;
    let destroy = || call_real!(hook.real, fn(*mut ibv_comp_channel) -> c_int, (channel), libc::ENOSYS);
    let account = if hook.wanted() { CHANNELS.get(channel) } else { None };
    // With CQs of the application's own the call fails and changes nothing.
    let Some(account) = account.filter(|account| account.reporting() == 0) else { return destroy() };
    let errno = thread::errno();
    let fd = account.fd();
    // Before its address and descriptor can be another channel's.
    CHANNELS.remove(channel);
    fds::forget(fd);
    drop(account.retire());
    thread::set_errno(errno);
    let rc = destroy();
    if rc == 0 {
        account.forget();
    } else {
        CHANNELS.insert(channel, account);
        fds::watch(account);
        account.revive();
    }
    rc
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    let hook = &ibv_close_device::HOOK;
    if hook.wanted() {
        // Channels that the application leaves behind go with their context.
        Channel::each(|account| {
            // SAFETY: live, or it would not be shown.
            if unsafe { account.real().as_ref() }.is_some_and(|real| real.context == context) {
                drop(account.retire());
                fds::forget(account.fd());
                CHANNELS.remove(account.real());
                account.forget();
            }
        });
        ops::forget(context);
    }
    call_real!(hook.real, fn(*mut ibv_context) -> c_int, (context), libc::ENOSYS)
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let hook = &ibv_create_cq::HOOK;
    let cq = call_real!(
        hook.real,
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
        (context, cqe, cq_context, channel, comp_vector),
        missing(ptr::null_mut())
    );
    if !hook.wanted() || cq.is_null() || channel.is_null() {
        return cq;
    }
    // SAFETY: both are live; the operations are the context's own.
    unsafe {
        if let (Some(account), Some(originals)) = (account_of(channel), ops::originals(context)) {
            let new = Cq::new(cq, originals.provider);
            CQS.insert(cq, new);
            account.add(new);
        }
    }
    cq
}

unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    let hook = &ibv_resize_cq::HOOK;
    let resize = || call_real!(hook.real, fn(*mut ibv_cq, c_int) -> c_int, (cq, cqe), libc::ENOSYS);
    match CQS.get(cq) {
        Some(account) if hook.wanted() => account.resizing(resize),
        _ => resize(),
    }
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    let hook = &ibv_destroy_cq::HOOK;
    let destroy = || call_real!(hook.real, fn(*mut ibv_cq) -> c_int, (cq), libc::ENOSYS);
    let account = if hook.wanted() { CQS.get(cq) } else { None };
    let Some(account) = account else { return destroy() };
    let channel = account.channel();
    // From here on nobody looks at the ring.
    if let Some(channel) = channel {
        channel.remove(account);
    }
    // Made events are acknowledged like any, but the kernel knows nothing of them, and the destroy
    // waits until it and the acknowledgements agree.
    let made = account.made() as u32;
    let acknowledged = account.begin_destroy();
    // SAFETY: live until it is destroyed.
    unsafe { add_completed(cq, acknowledged.wrapping_sub(made)) };
    // Before its address can be another CQ's.
    CQS.remove(cq);
    let rc = destroy();
    if let Some(channel) = channel {
        channel.removed();
    }
    if rc == 0 {
        account.forget();
    } else {
        CQS.insert(cq, account);
        // SAFETY: it was not destroyed.
        unsafe { add_completed(cq, made) };
        account.cancel_destroy();
        if let Some(channel) = channel {
            channel.add(account);
        }
    }
    rc
}

/// Changes the count of acknowledged events as `ibv_ack_cq_events` does, but by any number.
///
/// # Safety
/// `cq` is live.
unsafe fn add_completed(cq: *mut ibv_cq, n: u32) {
    // SAFETY: the CQ's own mutex guards the count; rdma-sys keeps the pthread types opaque.
    unsafe {
        let mutex = (&raw mut (*cq).mutex).cast();
        libc::pthread_mutex_lock(mutex);
        (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(n);
        libc::pthread_mutex_unlock(mutex);
    }
}

/// Acknowledging takes libibverbs a mutex and a condition variable, on every event; what is kept in
/// the account instead goes to its counter when the CQ is destroyed.
unsafe extern "C" fn ack_cq_events(cq: *mut ibv_cq, events: c_uint) {
    let hook = &ibv_ack_cq_events::HOOK;
    let real = |events| call_real!(hook.real, fn(*mut ibv_cq, c_uint) -> (), (cq, events), ());
    match CQS.get(cq) {
        Some(account) if hook.wanted() => {
            if let Some(late) = account.acknowledge(events) {
                real(late);
            }
        }
        _ => real(events),
    }
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let hook = &ibv_modify_qp::HOOK;
    let modify = || {
        call_real!(
            hook.real,
            fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
            (qp, attr, mask),
            libc::ENOSYS
        )
    };
    let state = ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
    // SAFETY: the application's attributes.
    if hook.wanted() && mask & state != 0 && unsafe { (*attr).qp_state } == ibv_qp_state::IBV_QPS_RESET {
        // SAFETY: the application's queue pair.
        return unsafe { purging(qp, modify) };
    }
    modify()
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    let hook = &ibv_destroy_qp::HOOK;
    let destroy = || call_real!(hook.real, fn(*mut ibv_qp) -> c_int, (qp), libc::ENOSYS);
    if hook.wanted() {
        // SAFETY: the application's queue pair.
        return unsafe { purging(qp, destroy) };
    }
    destroy()
}

/// Runs `f`, which resets or destroys `qp`, while nobody looks at its CQs, and drops what was kept
/// of its completions.
///
/// # Safety
/// `qp` is live.
unsafe fn purging(qp: *mut ibv_qp, f: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: live, as the caller says.
    let (number, mut cqs) = unsafe { ((*qp).qp_num, [(*qp).send_cq, (*qp).recv_cq]) };
    // Always in the same order, or two of these could wait for each other.
    cqs.sort_unstable();
    let done = |rc| (rc, rc == 0);
    let [first, second] = cqs.map(|cq| CQS.get(cq));
    let second = second.filter(|_| cqs[0] != cqs[1]);
    match (first, second) {
        (Some(one), Some(two)) => one.purging(number, || done(two.purging(number, || done(f())))),
        (Some(one), None) | (None, Some(one)) => one.purging(number, || done(f())),
        (None, None) => f(),
    }
}

unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let hook = &ibv_get_cq_event::HOOK;
    let real = || {
        call_real!(
            hook.real,
            fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
            (channel, cq, cq_context),
            missing(-1)
        )
    };
    if !hook.wanted() {
        let rc = real();
        if rc == 0 {
            // A forked child may read the event by which its parent was to be woken.
            // SAFETY: filled by a successful call.
            let read = unsafe { *cq };
            if let Some(made) = CHANNELS.get(channel).and_then(|account| account.orphan(read)) {
                // SAFETY: the application's room for the results.
                unsafe { give(made, cq, cq_context) };
            }
        }
        return rc;
    }
    let Some(account) = CHANNELS.get(channel) else { return real() };
    let event = thread::with(|me| {
        if me.cancel_async.get() {
            return deferring_cancellation(|| wait(account, me, real, cq));
        }
        wait(account, me, real, cq)
    });
    match event {
        Some(event) => {
            // SAFETY: the application's room for the results; the CQ of an event is live.
            unsafe { give(event, cq, cq_context) };
            0
        }
        None => -1,
    }
}

/// Hands an event out: its CQ, and that CQ's context as it is now.
///
/// # Safety
/// `event` is live, and there is room for both results.
unsafe fn give(event: *mut ibv_cq, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) {
    // SAFETY: as the caller says.
    unsafe {
        *cq = event;
        *cq_context = (*event).cq_context;
    }
}

/// Waits for an event; `None` with errno set where the wait failed. `real` blocks in the library
/// below and leaves its result in `cq`.
#[inline]
fn wait(
    account: &'static Channel,
    me: &Thread,
    real: impl Fn() -> c_int,
    cq: *mut *mut ibv_cq,
) -> Option<*mut ibv_cq> {
    let policy = process::policy();
    match account.wait(&me.waiter, policy) {
        Wait::Event(event) if !me.waiter.wanted() => Some(event),
        other => wait_on(account, me, real, cq, other),
    }
}

#[cold]
#[inline(never)]
fn wait_on(
    account: &'static Channel,
    me: &Thread,
    real: impl Fn() -> c_int,
    cq: *mut *mut ibv_cq,
    mut next: Wait,
) -> Option<*mut ibv_cq> {
    let errno = thread::errno();
    me.register();
    loop {
        match next {
            Wait::Event(event) => {
                // A signal that came with it does not end the wait.
                me.waiter.take_attention();
                signals::deliver(me);
                thread::set_errno(errno);
                return Some(event);
            }
            Wait::Serve => me.waiter.undisturbed(|| account.serve(kick::make)),
            Wait::Block => {
                let rc = real();
                let failed = thread::errno();
                // SAFETY: filled by a successful call.
                let got = (rc == 0).then(|| unsafe { *cq });
                let event = me.waiter.undisturbed(|| account.awake(&me.waiter, got));
                // A signal that came after the kernel's event, as natively it may; with none it ends
                // the wait.
                let interrupted = me.waiter.take_attention() && signals::deliver(me);
                if interrupted && rc == 0 && event.is_none() {
                    thread::set_errno(libc::EINTR);
                    return None;
                }
                if rc != 0 {
                    thread::set_errno(failed);
                    return None;
                }
                if event.is_some() {
                    thread::set_errno(errno);
                    return event;
                }
            }
            Wait::Attention => {
                me.waiter.take_attention();
                if signals::deliver(me) {
                    thread::set_errno(libc::EINTR);
                    return None;
                }
                // SAFETY: nothing is held; where cancellation is pending this does not return.
                unsafe { pthread_testcancel() };
            }
            Wait::Again => {}
            Wait::Gone => {
                // Natively the read goes on: only a signal or cancellation ends it.
                // SAFETY: no descriptors, no time-out.
                unsafe { libc::poll(ptr::null_mut(), 0, -1) };
                return None;
            }
        }
        next = account.wait(&me.waiter, process::policy());
    }
}

extern "C" {
    fn pthread_testcancel();
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
}

/// Runs `f` with cancellation only at its cancellation points: a thread cancelled inside the
/// polling loop would leave its locks behind.
fn deferring_cancellation<R>(f: impl FnOnce() -> R) -> R {
    const DEFERRED: c_int = 0;
    let mut old = 0;
    // SAFETY: room for the old type.
    unsafe { pthread_setcanceltype(DEFERRED, &mut old) };
    let result = f();
    // SAFETY: as above.
    unsafe { pthread_setcanceltype(old, &mut old) };
    result
}

// SPDX-License-Identifier: MIT
//! libc: cancellation, and wake-ups of other threads.
//!
//! A thread that woke another one yields before it polls: natively it would have gone to sleep, and
//! the other one, perhaps on this very core, would have run at once.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use fastwake::waiter::cancel_somebody;

use super::hooks;
use crate::real::call_real;
use crate::thread;

hooks! {
    pthread_cancel(libc) = cancel;
    pthread_setcanceltype(libc) = set_cancel_type;
    sem_post(libc) = post_semaphore;
    pthread_cond_signal(libc) = signal_condition;
    pthread_cond_broadcast(libc) = broadcast_condition;
    pthread_mutex_unlock(libc) = unlock_mutex;
    pthread_create(libc) = create_thread;
    syscall(libc) = raw_syscall;
}

/// A mutex word that says that somebody waits (glibc's lock word, and the futex convention).
const CONTENDED: u32 = 2;
/// Where glibc counts the waiters of a semaphore and of a condition variable (the latter in eighths).
/// A wrong answer would cost or save a yield, no more.
const SEMAPHORE_WAITERS: usize = 4;
const CONDITION_WAITERS: usize = 36;

fn woke_one() {
    thread::with(|me| me.waiter.neighbours.woke_one());
}

/// The word of a synchronisation object at `offset`.
///
/// # Safety
/// `object` points to a live object that is larger than that.
unsafe fn word(object: *mut c_void, offset: usize) -> u32 {
    // SAFETY: as the caller says; such words are aligned.
    unsafe { (*object.byte_add(offset).cast::<AtomicU32>()).load(Ordering::Relaxed) }
}

/// Whether somebody waits on a condition variable.
///
/// # Safety
/// `condition` is the caller's of pthread_cond_signal.
unsafe fn awaited(condition: *mut libc::pthread_cond_t) -> bool {
    // SAFETY: as the caller says; the object has 48 bytes.
    unsafe { word(condition.cast(), CONDITION_WAITERS) >> 3 != 0 }
}

unsafe extern "C" fn cancel(target: libc::pthread_t) -> c_int {
    let hook = &pthread_cancel::HOOK;
    let rc = call_real!(hook.real, fn(libc::pthread_t) -> c_int, (target), libc::ENOSYS);
    if hook.wanted() {
        cancel_somebody();
    }
    rc
}

unsafe extern "C" fn set_cancel_type(kind: c_int, old: *mut c_int) -> c_int {
    const ASYNCHRONOUS: c_int = 1;
    let hook = &pthread_setcanceltype::HOOK;
    hook.wanted();
    // Kept also before FastWake is active: the thread may begin to wait later.
    thread::with(|me| me.cancel_async.set(kind == ASYNCHRONOUS));
    call_real!(hook.real, fn(c_int, *mut c_int) -> c_int, (kind, old), libc::ENOSYS)
}

unsafe extern "C" fn post_semaphore(semaphore: *mut libc::sem_t) -> c_int {
    let hook = &sem_post::HOOK;
    // SAFETY: the caller's semaphore, of 32 bytes.
    if hook.wanted() && unsafe { word(semaphore.cast(), SEMAPHORE_WAITERS) } != 0 {
        woke_one();
    }
    call_real!(hook.real, fn(*mut libc::sem_t) -> c_int, (semaphore), -1)
}

unsafe extern "C" fn signal_condition(condition: *mut libc::pthread_cond_t) -> c_int {
    let hook = &pthread_cond_signal::HOOK;
    // SAFETY: the caller's condition variable.
    if hook.wanted() && unsafe { awaited(condition) } {
        woke_one();
    }
    call_real!(hook.real, fn(*mut libc::pthread_cond_t) -> c_int, (condition), libc::ENOSYS)
}

unsafe extern "C" fn broadcast_condition(condition: *mut libc::pthread_cond_t) -> c_int {
    let hook = &pthread_cond_broadcast::HOOK;
    // SAFETY: the caller's condition variable.
    if hook.wanted() && unsafe { awaited(condition) } {
        woke_one();
    }
    call_real!(hook.real, fn(*mut libc::pthread_cond_t) -> c_int, (condition), libc::ENOSYS)
}

unsafe extern "C" fn unlock_mutex(mutex: *mut libc::pthread_mutex_t) -> c_int {
    let hook = &pthread_mutex_unlock::HOOK;
    // SAFETY: the caller holds this mutex; its first word is the lock word.
    if hook.wanted() && unsafe { word(mutex.cast(), 0) } == CONTENDED {
        woke_one();
    }
    call_real!(hook.real, fn(*mut libc::pthread_mutex_t) -> c_int, (mutex), libc::ENOSYS)
}

unsafe extern "C" fn create_thread(
    thread: *mut libc::pthread_t,
    attr: *const libc::pthread_attr_t,
    start: *mut c_void,
    argument: *mut c_void,
) -> c_int {
    let hook = &pthread_create::HOOK;
    if hook.wanted() {
        woke_one();
    }
    call_real!(
        hook.real,
        fn(*mut libc::pthread_t, *const libc::pthread_attr_t, *mut c_void, *mut c_void) -> c_int,
        (thread, attr, start, argument),
        libc::ENOSYS
    )
}

/// `syscall(2)` takes what its number takes; passing six always is what the C library does itself.
unsafe extern "C" fn raw_syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let hook = &syscall::HOOK;
    let operation = b as c_int & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME);
    if number == libc::SYS_futex && operation == libc::FUTEX_WAKE && hook.wanted() {
        woke_one();
    }
    call_real!(
        hook.real,
        fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long,
        (number, a, b, c, d, e, f),
        -1
    )
}

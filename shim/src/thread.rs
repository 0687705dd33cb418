// SPDX-License-Identifier: MIT
//! What is known of the calling thread.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use fastwake::waiter::Waiter;

use crate::signals::{self, Deferred};

/// One per thread; constant-initialised, without a destructor, so that a signal handler may use it.
pub(crate) struct Thread {
    pub(crate) waiter: Waiter,
    /// A signal that was put off until the polling loop is left.
    pub(crate) deferred: UnsafeCell<Deferred>,
    /// The thread asked for asynchronous cancellation.
    pub(crate) cancel_async: Cell<bool>,
    registered: Cell<bool>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            waiter: Waiter::new(),
            deferred: UnsafeCell::new(Deferred::NONE),
            cancel_async: Cell::new(false),
            registered: Cell::new(false),
        }
    };
}

const NO_KEY: u32 = u32::MAX;
/// The key whose destructor runs when a thread that waited ends.
static KEY: AtomicU32 = AtomicU32::new(NO_KEY);

/// Runs `f` with the calling thread's account.
#[inline(always)]
pub(crate) fn with<R>(f: impl FnOnce(&Thread) -> R) -> R {
    THREAD.with(f)
}

/// Runs `f`, which takes locks, with signals put off; one that came happens afterwards.
pub(crate) fn undisturbed(f: impl FnOnce()) {
    with(|me| {
        if me.waiter.is_polling() {
            return f();
        }
        me.waiter.undisturbed(f);
        if me.waiter.take_attention() {
            signals::deliver(me);
        }
    });
}

/// Prepares for threads that end.
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: the destructor stays loaded: a preload is never unloaded.
    if unsafe { libc::pthread_key_create(&mut key, Some(leave)) } == 0 {
        KEY.store(key, Ordering::Relaxed);
    }
}

impl Thread {
    /// Sees to it that the thread's account is closed when it ends, however it ends.
    #[inline]
    pub(crate) fn register(&self) {
        if !self.registered.get() {
            self.registered.set(true);
            let key = KEY.load(Ordering::Relaxed);
            if key != NO_KEY {
                // SAFETY: the key is ours; any non-null value makes the destructor run.
                unsafe { libc::pthread_setspecific(key, std::ptr::from_ref(self).cast()) };
            }
        }
    }
}

/// The thread ends, perhaps cancelled in its sleep.
unsafe extern "C" fn leave(_value: *mut c_void) {
    with(|thread| thread.waiter.wake());
}

/// The calling thread's errno.
pub(crate) fn errno() -> i32 {
    // SAFETY: valid for the life of the thread.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = errno };
}

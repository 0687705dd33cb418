// SPDX-License-Identifier: MIT
//! Signals of a thread that polls.
//!
//! Natively the thread would be asleep in a read: a handler runs, may do anything at all (leave by
//! siglongjmp, throw, exit, wait again), and the read returns EINTR unless the handler has
//! SA_RESTART. A thread that polls holds locks, so the handler must wait until it has left its loop:
//! every handler is wrapped in [`trampoline`], which keeps the signal, blocks all others in the
//! interrupted context, and returns. The loop ends at its next look, holding nothing; the signal is
//! queued again with what it brought, the mask is put back, and the handler runs there and then.
//!
//! A handler that the kernel would reset after one use is installed without that flag, and reset
//! here when it really runs.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use fastwake::counters::COUNTERS;

use crate::process;
use crate::real::{call_real, Real};
use crate::thread::{self, Thread};

/// The kernel's signal numbers are 1 to 64.
const SIGNALS: usize = 65;
/// glibc's own two (cancellation, setuid) pass every mask.
const GLIBC_OWN: u64 = 1 << 31 | 1 << 32;

/// The application's handlers of the signals that are wrapped.
static HANDLERS: [AtomicUsize; SIGNALS] = [const { AtomicUsize::new(0) }; SIGNALS];
/// Those of them that are used once.
static ONE_SHOT: [AtomicBool; SIGNALS] = [const { AtomicBool::new(false) }; SIGNALS];
/// Whether handlers are wrapped in this process or were in its parent.
static WRAPPING: AtomicBool = AtomicBool::new(false);

static SIGACTION: Real = Real::libc(c"sigaction");
static SIGNAL: Real = Real::libc(c"signal");

/// A signal that was put off.
pub(crate) struct Deferred {
    signal: c_int,
    info: MaybeUninit<libc::siginfo_t>,
    /// The thread's mask before it was put off.
    mask: u64,
}

impl Deferred {
    /// No signal.
    pub(crate) const NONE: Deferred = Deferred { signal: 0, info: MaybeUninit::uninit(), mask: 0 };
}

type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// The real `sigaction`.
///
/// # Safety
/// As for sigaction(2).
unsafe fn real_sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    call_real!(
        SIGACTION,
        fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int,
        (signal, new, old),
        -1
    )
}

/// Wraps the handlers that were installed before FastWake became active.
pub(crate) fn wrap_installed() {
    WRAPPING.store(true, Ordering::Relaxed);
    for signal in 1..SIGNALS as c_int {
        // SAFETY: queries and sets actions that are valid as they stand.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if real_sigaction(signal, ptr::null(), &mut action) == 0 && wrap(signal, &mut action) {
                real_sigaction(signal, &action, ptr::null_mut());
            }
        }
    }
}

/// Replaces the handler of `action` by ours, noting the application's. False where it has none.
fn wrap(signal: c_int, action: &mut libc::sigaction) -> bool {
    let handler = action.sa_sigaction;
    if [libc::SIG_DFL, libc::SIG_IGN, ours()].contains(&handler) || !(1..SIGNALS as c_int).contains(&signal) {
        return false;
    }
    HANDLERS[signal as usize].store(handler, Ordering::Relaxed);
    ONE_SHOT[signal as usize].store(action.sa_flags & libc::SA_RESETHAND != 0, Ordering::Relaxed);
    action.sa_sigaction = ours();
    action.sa_flags &= !libc::SA_RESETHAND;
    true
}

/// Replaces our handler in `action` by what the application knows.
fn unwrap(signal: c_int, action: &mut libc::sigaction, handler: usize, one_shot: bool) {
    if action.sa_sigaction == ours() && (1..SIGNALS as c_int).contains(&signal) {
        action.sa_sigaction = handler;
        if one_shot {
            action.sa_flags |= libc::SA_RESETHAND;
        }
    }
}

fn ours() -> usize {
    trampoline as *const () as usize
}

/// `sigaction` as the application sees it.
///
/// # Safety
/// As for sigaction(2).
pub(crate) unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !WRAPPING.load(Ordering::Relaxed) || !(1..SIGNALS as c_int).contains(&signal) {
        // SAFETY: the caller's arguments.
        return unsafe { real_sigaction(signal, new, old) };
    }
    let (slot, one_shot) = (&HANDLERS[signal as usize], &ONE_SHOT[signal as usize]);
    let before = (slot.load(Ordering::Relaxed), one_shot.load(Ordering::Relaxed));
    // SAFETY: a new action is the caller's to read from; it is copied before it is changed.
    let mut action = unsafe { new.as_ref() }.map(|new| unsafe { ptr::read(new) });
    // The handler is noted before the kernel may run it.
    let wrapped = action.as_mut().is_some_and(|action| wrap(signal, action));
    let passed = action.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: our copy of the caller's action, and the caller's room for the old one.
    let rc = unsafe { real_sigaction(signal, passed, old) };
    if rc != 0 && wrapped {
        slot.store(before.0, Ordering::Relaxed);
        one_shot.store(before.1, Ordering::Relaxed);
    }
    // SAFETY: where it succeeded, `old` was filled.
    if let (0, Some(old)) = (rc, unsafe { old.as_mut() }) {
        unwrap(signal, old, before.0, before.1);
    }
    rc
}

/// `signal` as the application sees it; the real one keeps what `siginterrupt` said.
///
/// # Safety
/// As for signal(2).
pub(crate) unsafe fn signal(signal: c_int, handler: usize) -> usize {
    let known = (1..SIGNALS as c_int).contains(&signal);
    let real = |handler| call_real!(SIGNAL, fn(c_int, usize) -> usize, (signal, handler), libc::SIG_ERR);
    if !WRAPPING.load(Ordering::Relaxed) || !known {
        return real(handler);
    }
    let slot = &HANDLERS[signal as usize];
    let before = slot.load(Ordering::Relaxed);
    let old = if [libc::SIG_DFL, libc::SIG_IGN, libc::SIG_ERR].contains(&handler) {
        real(handler)
    } else {
        slot.store(handler, Ordering::Relaxed);
        ONE_SHOT[signal as usize].store(false, Ordering::Relaxed);
        real(ours())
    };
    if old == libc::SIG_ERR {
        slot.store(before, Ordering::Relaxed);
    }
    if old == ours() {
        before
    } else {
        old
    }
}

/// `sysv_signal` as the application sees it: one shot, unmasked.
///
/// # Safety
/// As for signal(2).
pub(crate) unsafe fn sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: zeroed actions are valid; the handler is the caller's.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
        new.sa_sigaction = handler;
        new.sa_flags = libc::SA_RESETHAND | libc::SA_NODEFER;
        if sigaction(signal, &new, &mut old) == 0 {
            old.sa_sigaction
        } else {
            libc::SIG_ERR
        }
    }
}

/// Whether the signal reports an instruction of this very thread: it cannot wait.
fn synchronous(signal: c_int, info: *mut libc::siginfo_t) -> bool {
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS].contains(&signal)
        // SAFETY: the kernel passes what it knows of the signal; a code above zero is its own.
        && unsafe { info.as_ref() }.is_none_or(|info| info.si_code > 0)
}

/// The handler of every wrapped signal.
unsafe extern "C" fn trampoline(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let put_off = thread::with(|thread| {
        if !thread.waiter.is_polling() || synchronous(signal, info) {
            return false;
        }
        // SAFETY: only this thread touches the slot, and all signals stay blocked until `deliver`.
        let deferred = unsafe { &mut *thread.deferred.get() };
        // SAFETY: the context of the interrupted loop, whose mask the kernel puts back on return.
        let mask = unsafe { &raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask }.cast::<u64>();
        // SAFETY: the mask's first word is all of the kernel's mask.
        let before = unsafe { mask.replace(!GLIBC_OWN) };
        // Of several that come at once the last one's handler is entered first, and blocks all: this
        // is an earlier one, whose context is the loop itself. It waits in the queue.
        if deferred.signal != 0 {
            if !queue_again(signal, info) {
                lost(signal);
            }
        } else {
            deferred.signal = signal;
            // SAFETY: `info` is the kernel's.
            deferred.info.write(unsafe { ptr::read(info) });
        }
        deferred.mask = before;
        thread.waiter.raise_signal();
        true
    });
    if put_off {
        return;
    }
    let handler = HANDLERS[signal as usize].load(Ordering::Relaxed);
    if ONE_SHOT[signal as usize].swap(false, Ordering::Relaxed) {
        // SAFETY: the default action, as the kernel would have set it on its way here.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            real_sigaction(signal, &default, ptr::null_mut());
        }
    }
    if handler > libc::SIG_IGN {
        // SAFETY: the application's handler; one that takes only the number ignores the rest.
        unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
    }
}

/// The flags with which the handler of `signal` is installed.
fn flags(signal: c_int) -> c_int {
    // SAFETY: a query, into an action that is valid as zeroes.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        real_sigaction(signal, ptr::null(), &mut action);
        action.sa_flags
    }
}

/// Sends `signal` to this very thread once more, with what it brought. False where that failed.
fn queue_again(signal: c_int, info: *mut libc::siginfo_t) -> bool {
    // Without SA_SIGINFO the kernel did not say what the signal brought; nor will it now.
    // SAFETY: the information is what the kernel gave; to itself a thread may send any.
    unsafe {
        let (pid, tid) = (libc::getpid(), libc::syscall(libc::SYS_gettid));
        let sent = if flags(signal) & libc::SA_SIGINFO != 0 {
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, tid, signal, info)
        } else {
            libc::syscall(libc::SYS_tgkill, pid, tid, signal)
        };
        sent == 0
    }
}

fn lost(signal: c_int) {
    log::error!("signal {signal} could not be queued again and is lost");
}

/// Lets a signal that was put off happen, if there is one. True where the wait ends with EINTR.
/// The caller holds nothing: the handler may never return.
pub(crate) fn deliver(thread: &Thread) -> bool {
    // SAFETY: where a signal was put off all are blocked, and otherwise the thread is not polling:
    // either way the handler does not write the slot now.
    let deferred = unsafe { &mut *thread.deferred.get() };
    let signal = std::mem::take(&mut deferred.signal);
    if signal == 0 {
        return false;
    }
    COUNTERS.deferred_signals.add(1);
    let (mask, info) = (deferred.mask, deferred.info.as_mut_ptr());
    let restarts = flags(signal) & libc::SA_RESTART != 0;
    let queued = queue_again(signal, info);
    if !queued {
        lost(signal);
    }
    // The handler runs inside this call.
    // SAFETY: the mask is the thread's own, as it was.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &mask, ptr::null_mut::<u64>(), 8) };
    queued && !restarts && process::active()
}

// SPDX-License-Identifier: MIT
//! Contexts: a stack, the registers to go on with, and (for adopted threads) the TLS base.
//!
//! The dispatcher switches between waiters with this; the runtime between its tasks. It must never
//! block, allocate, or touch `thread_local!` data: between two switches of the dispatcher the code
//! that runs is one thread's and the kernel thread another's.
//!
//! Two switches: [`switch`] for contexts of one kernel thread that share its TLS (tasks; 2 to 4 ns),
//! and [`switch_tls`] which carries the TLS base and the floating-point control words along (adopted
//! threads; the instruction that writes the base takes 14.7 ns alone on Zen 3). A process that has
//! called [`use_pkeys`] exchanges the protection-key rights too, and one that has called
//! [`use_fp_control`] the control words between tasks.

use std::fmt;
use std::fs;
use std::mem::MaybeUninit;

use crate::arch;

/// The first function on a new stack: gets the `arg` of [`Context::on_stack`] and the value that
/// the first switch to it brings. It never returns; it ends by [`resume`] or [`resume_tls`].
pub type Entry = unsafe extern "C" fn(arg: *mut (), value: usize) -> !;

/// A context that does not run, or the place where a running one will be left. One cache line.
///
/// While it does not run it is at one place and belongs to whoever may resume it: nothing in here is
/// atomic, and handing it to another kernel thread needs a release and an acquire of its own, after
/// the switch away has finished (the code switched to can tell: it runs).
#[repr(transparent)]
#[derive(Debug)]
pub struct Context(arch::Registers);

impl Context {
    /// The place to leave the calling thread's context in. Its TLS base is taken here, once.
    pub fn of_thread() -> Context {
        Context(arch::Registers::of_thread())
    }

    /// A context that begins with `entry(arg, value)` on a stack of its own.
    ///
    /// `top` is its upper end, e.g. [`crate::stack::Stack::top`]. `tls` is the TLS base that it runs
    /// with under [`switch_tls`]: [`Context::tls`] of the thread that it works for. Where control
    /// words are exchanged it starts with those of a new process.
    ///
    /// # Safety
    /// The memory below `top` is writable, large enough for `entry`, aligned to 16 at `top`, used by
    /// nothing else and lives until the context has been left for the last time.
    pub unsafe fn on_stack(top: *mut u8, tls: usize, entry: Entry, arg: *mut ()) -> Context {
        // SAFETY: the same contract.
        Context(unsafe { arch::Registers::on_stack(top, tls, entry, arg) })
    }

    /// The TLS base that the context runs with.
    pub fn tls(&self) -> usize {
        self.0.tls()
    }
}

/// Leaves the running context in `from`, goes on in `to`, and returns when somebody switches to
/// `from`, with the value that they gave.
///
/// # Safety
/// - `from` is valid for writes until it is resumed, `to` for reads until `to` runs.
/// - `to` is suspended: made by [`Context::on_stack`], or left by a switch and not resumed since.
/// - Both run on this kernel thread, under this TLS base, and `to` was not left by [`switch_tls`]:
///   the two exchange different sets of registers.
/// - What `to` goes on with may be resumed here: the caller answers for every lock and borrow that
///   the other stack holds.
/// - [`check`] returned `Ok` on this thread.
#[inline(always)]
pub unsafe fn switch(from: *mut Context, to: *const Context, value: usize) -> usize {
    let mode = arch::mode() & (arch::MODE_PKEYS | arch::MODE_FP | arch::MODE_UNDECIDED);
    // SAFETY: the same contract; Context is transparent over Registers.
    unsafe {
        if mode == 0 {
            arch::switch(from.cast(), to.cast(), value)
        } else {
            let mode = arch::decide() | arch::MODE_KEEP_TLS;
            arch::switch_slow(from.cast(), to.cast(), value, mode)
        }
    }
}

/// [`switch`] that also changes the TLS base to that of `to`: `to` may be a context of any thread
/// of the process.
///
/// The caller's own TLS base is not read here but was recorded by [`Context::of_thread`] or
/// [`Context::on_stack`].
///
/// # Safety
/// As [`switch`], with the two functions exchanged, except that `to` may have run on another kernel
/// thread, provided that thread has left its stack (its own switch away happens before this one).
/// `from` has the TLS base of the running code. Whatever belongs to the kernel thread and not to the context (signal mask,
/// alternate signal stack, robust list, rseq) is the caller's care.
#[inline(always)]
pub unsafe fn switch_tls(from: *mut Context, to: *const Context, value: usize) -> usize {
    let mode = arch::mode() & !arch::MODE_FP;
    // SAFETY: the same contract; Context is transparent over Registers.
    unsafe {
        if mode == 0 {
            arch::switch_tls(from.cast(), to.cast(), value)
        } else {
            let mode = arch::decide();
            arch::switch_slow(from.cast(), to.cast(), value, mode)
        }
    }
}

/// Goes on in `to` and drops the running context: nothing on its stack is run or dropped any more.
///
/// # Safety
/// As [`switch`].
#[inline(always)]
pub unsafe fn resume(to: *const Context, value: usize) -> ! {
    let mut left = MaybeUninit::<Context>::uninit();
    // SAFETY: the same contract; a switch writes `from` before it reads of it, and this one is on the stack that is being dropped, nobody learns of it.
    unsafe { switch(left.as_mut_ptr(), to, value) };
    unreachable!("a dropped context was resumed")
}

/// [`resume`] with the TLS base of `to`.
///
/// # Safety
/// As [`switch_tls`].
#[inline(always)]
pub unsafe fn resume_tls(to: *const Context, value: usize) -> ! {
    let mut left = MaybeUninit::<Context>::uninit();
    // SAFETY: the same contract; a switch writes `from` before it reads of it, and this one is on the stack that is being dropped, nobody learns of it.
    unsafe { switch_tls(left.as_mut_ptr(), to, value) };
    unreachable!("a dropped context was resumed")
}

/// Why no context can be switched in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Shadow stacks (CET) are in force on this thread; a switch would be killed by the first `ret`.
    ShadowStack,
    /// The TLS base can only be changed by a system call, and the process runs under seccomp, whose
    /// policy may answer that call by killing it.
    Seccomp,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::ShadowStack => {
                "shadow stacks (CET) are in force: threads are not switched in user space"
            }
            Refusal::Seccomp => {
                "no FSGSBASE, and seccomp may forbid arch_prctl: threads are not switched in user space"
            }
        })
    }
}

impl std::error::Error for Refusal {}

/// How the TLS base is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsWay {
    /// By an instruction (FSGSBASE), about 15 ns.
    Instruction,
    /// By a system call, about 250 ns.
    SystemCall,
}

/// Whether the calling thread's context may be switched, and how its TLS base is changed then.
/// To be asked once per thread, before its first switch.
///
/// # Errors
/// The reason why not; the caller says it once and leaves the thread to the kernel.
pub fn check() -> Result<TlsWay, Refusal> {
    judge(arch::shadow_stack(), arch::decide(), || {
        fs::read_to_string("/proc/thread-self/status").unwrap_or_default()
    })
}

fn judge(shadow_stack: bool, mode: u8, status: impl FnOnce() -> String) -> Result<TlsWay, Refusal> {
    if shadow_stack {
        return Err(Refusal::ShadowStack);
    }
    if mode & arch::MODE_NO_FSGSBASE == 0 {
        return Ok(TlsWay::Instruction);
    }
    let filtered =
        status().lines().filter_map(|line| line.strip_prefix("Seccomp:")).any(|value| value.trim() != "0");
    if filtered {
        return Err(Refusal::Seccomp);
    }
    Ok(TlsWay::SystemCall)
}

/// From now on the rights of protection keys (PKRU) are part of every context. To be called before
/// the process allocates its first key; contexts suspended before stay right.
pub fn use_pkeys() {
    arch::use_pkeys();
}

/// From now on [`switch`] exchanges the floating-point control words (MXCSR, x87) as [`switch_tls`]
/// always does. To be called before a task changes them; until then all tasks share those of their
/// kernel thread. Costs about 15 ns a switch.
pub fn use_fp_control() {
    arch::use_fp_control();
}

/// For wrappers of signal handlers: a signal may come after a TLS switch has changed the stack and
/// before it has changed the TLS base, one instruction later. Returns the base that the interrupted
/// stack needs, which the wrapper sets before it runs application code; the interrupted instruction
/// sets it again.
pub fn pending_tls(interrupted: &libc::ucontext_t) -> Option<usize> {
    arch::pending_tls(interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shadow_stacks_are_refused_first() {
        let status = || "Seccomp:\t2\n".to_owned();
        assert_eq!(judge(true, 0, status), Err(Refusal::ShadowStack));
        assert_eq!(judge(true, arch::MODE_NO_FSGSBASE, status), Err(Refusal::ShadowStack));
    }

    #[test]
    fn seccomp_matters_only_where_a_system_call_is_needed() {
        let filtered = || "Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n".to_owned();
        let free = || "Name:\tx\nSeccomp:\t0\nSeccomp_filters:\t0\n".to_owned();
        assert_eq!(judge(false, 0, filtered), Ok(TlsWay::Instruction));
        assert_eq!(judge(false, arch::MODE_NO_FSGSBASE, filtered), Err(Refusal::Seccomp));
        assert_eq!(judge(false, arch::MODE_NO_FSGSBASE, free), Ok(TlsWay::SystemCall));
    }

    #[test]
    fn a_refusal_says_what_it_means() {
        assert!(Refusal::ShadowStack.to_string().contains("CET"));
        assert!(Refusal::Seccomp.to_string().contains("seccomp"));
    }
}

// SPDX-License-Identifier: MIT
//! Context switch, x86_64 (System V, Linux).
//!
//! Called by [`crate::context`] alone. It must never touch memory through FS (TLS) between leaving
//! one stack and reaching the other, and never return by `ret` into a resumed context: the return
//! predictor still holds the other context's callers and a `ret` costs 13.6 ns instead of 2 to 5 as
//! soon as two call sites exist.
//!
//! # What a context keeps
//!
//! The switch is inline assembly that names every register as clobbered, so the compiler spills
//! only what is alive at that very call. Left for us are the registers that Rust cannot name as
//! clobbers (RSP, RBP, RBX), the address to go on at, and what the ABI calls preserved but the
//! compiler does not track: MXCSR and the x87 control word. They lie in [`Registers`], one cache
//! line, and not on the stack, so SP never moves inside the switch and the caller's unwind tables
//! stay right at each of its instructions.
//!
//! The two control words are always exchanged together with the TLS base, since adopted threads may
//! be anybody's. Reading MXCSR alone costs 3 to 4 ns, more than the rest of a plain switch, so
//! between tasks of one thread they are exchanged only if the process has said that it changes them
//! (`use_fp_control`).
//!
//! ```text
//!        Registers, 64 bytes, aligned to 64               a stack that has never run
//!   +0  +-----------------------------+            top  +---------------------------+
//!       | sp    stack pointer         |                 | 0                         |
//!   +8  | bp    frame pointer         |          top-8  +---------------------------+
//!       |                             |                 | arg   for the entry       |
//!  +16  | bx                          |  sp ->  top-16  +---------------------------+
//!       |                             |                 | (return address of the    |
//!  +24  | ip    where to go on        |                 |  call in `enter`)         |
//!       |                             |                 |          ...              |
//!  +32  | tls   FS base               |                 |                           |
//!       |                             |                 +---------------------------+
//!  +40  | mxcsr | +44 cw  | +46 pad   |                 | guard, no access          |
//!       |                             |                 +---------------------------+
//!  +48  | pkru  | +52 pad             |
//!  +64  +-----------------------------+
//! ```
//!
//! A suspended context's stack holds nothing of ours. Everything above its SP is the frame of the
//! function into which the switch was inlined.
//!
//! # The TLS base comes last but one
//!
//! With a TLS switch the last three instructions are SP, `wrfsbase`, `jmp`, in this order. A signal
//! may come between any two of them. With `wrfsbase` hoisted (3 ns cheaper) 11 % of a signal flood
//! ran a handler on one thread's stack with another thread's TLS. In this order one instruction
//! boundary is left where the two disagree, and since all switches share the one tail below it has
//! one address, by which [`pending_tls`] recognises it.

use core::arch::{asm, global_asm};
use core::mem::offset_of;

mod process;
pub(crate) use process::*;

/// What a context keeps while it does not run. See the drawing above.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Registers {
    sp: usize,
    bp: usize,
    bx: usize,
    ip: usize,
    tls: usize,
    mxcsr: u32,
    cw: u16,
    pkru: u32,
}

const _: () = assert!(size_of::<Registers>() == 64);

/// The first function on a new stack. It never returns: there is nothing to return to.
pub(crate) type Entry = unsafe extern "C" fn(arg: *mut (), value: usize) -> !;

/// MXCSR and x87 control word as the ABI wants them at the start of a process.
const INITIAL_MXCSR: u32 = 0x1f80;
const INITIAL_CW: u16 = 0x037f;
const ARCH_SET_FS: usize = 0x1002;

impl Registers {
    /// Of the calling thread: its TLS base and PKRU. The rest is filled in by the first switch away.
    pub(crate) fn of_thread() -> Self {
        Self::new(0, 0, 0, tls_base())
    }

    /// Of a stack that has not run yet.
    ///
    /// # Safety
    /// `top` is the upper end of writable memory that nothing else uses, aligned to 16.
    pub(crate) unsafe fn on_stack(top: *mut u8, tls: usize, entry: Entry, arg: *mut ()) -> Self {
        let words = top.cast::<usize>();
        // SAFETY: the caller gives us the memory below `top`; two words of it are written, aligned
        // because `top` is.
        unsafe {
            words.sub(1).write(0);
            words.sub(2).write(arg as usize);
        }
        let enter = &raw const fastwake_switch_enter;
        // SP stays a multiple of 16, so that `call` leaves it as the ABI wants it at an entry.
        Self::new(top as usize - 16, entry as usize, enter as usize, tls)
    }

    fn new(sp: usize, bx: usize, ip: usize, tls: usize) -> Self {
        Registers {
            sp,
            // No frame above the entry: the chain of frame pointers ends in 0.
            bp: 0,
            bx,
            ip,
            tls,
            mxcsr: INITIAL_MXCSR,
            cw: INITIAL_CW,
            // Kept even while no key is in use, so that contexts from before stay right after.
            pkru: pkru_of_thread(),
        }
    }

    /// Its FS base.
    pub(crate) fn tls(&self) -> usize {
        self.tls
    }
}

// The three places that need an address of their own.
//
//   fastwake_switch_tls   the tail of every switch with TLS
//     RCX new SP   R9 new FS base   R8 where to go on   RDX value   RBX, RBP, FP words already new
//
//   fastwake_switch_slow  everything that an ordinary process never needs
//     RDI from   RSI to   RDX value   R10 mode   (from's registers are saved already)
//
//   fastwake_switch_enter the first instruction of a new stack
//     RSP top-16   RBX entry   RDX value   RBP 0
//
// None of them has a frame of its own that an unwinder could step over: the first two run in the
// frame of whoever inlined the switch, of which they know nothing, and the third has no caller.
// "RIP undefined" makes unwinders stop there instead of guessing.
global_asm!(
    ".pushsection .text.fastwake_switch,\"ax\",@progbits",
    ".p2align 5",
    ".hidden fastwake_switch_tls",
    ".globl fastwake_switch_tls",
    ".type fastwake_switch_tls,@function",
    "fastwake_switch_tls:",
    ".cfi_startproc",
    ".cfi_undefined rip",
    "mov rsp, rcx",
    // Here, and only here, the stack is the new one and the TLS still the old one.
    ".hidden fastwake_switch_window",
    ".globl fastwake_switch_window",
    "fastwake_switch_window:",
    "wrfsbase r9",
    "jmp r8",
    ".cfi_endproc",
    ".size fastwake_switch_tls, . - fastwake_switch_tls",
    "",
    ".p2align 5",
    ".hidden fastwake_switch_slow",
    ".globl fastwake_switch_slow",
    ".type fastwake_switch_slow,@function",
    "fastwake_switch_slow:",
    ".cfi_startproc",
    ".cfi_undefined rip",
    "test r10b, {pkeys}",
    "je 3f",
    // No stack access from here on: the old stack may be forbidden by the new PKRU.
    "mov r8, rdx",
    "xor ecx, ecx",
    "rdpkru",
    "mov [rdi + {pkru}], eax",
    "mov r9d, eax",
    "mov eax, [rsi + {pkru}]",
    "cmp eax, r9d",
    "je 2f",
    // ECX and EDX are zero, as wrpkru demands: rdpkru cleared EDX.
    "wrpkru",
    "2:",
    "mov rdx, r8",
    "3:",
    // Without MODE_FP a plain switch leaves stale words behind: they are not to be loaded either.
    "test r10b, {keep_tls}",
    "je 7f",
    "test r10b, {fp}",
    "je 5f",
    "7:",
    "mov eax, [rsi + {mxcsr}]",
    "cmp eax, [rdi + {mxcsr}]",
    "je 4f",
    "ldmxcsr [rsi + {mxcsr}]",
    "4:",
    "mov ax, [rsi + {cw}]",
    "cmp ax, [rdi + {cw}]",
    "je 5f",
    "fldcw [rsi + {cw}]",
    "5:",
    "mov rcx, [rsi + {sp}]",
    "mov r9, [rsi + {tls}]",
    "mov r8, [rsi + {ip}]",
    "mov rbp, [rsi + {bp}]",
    "mov rbx, [rsi + {bx}]",
    "test r10b, {keep_tls}",
    "jne 6f",
    "test r10b, {no_fsgsbase}",
    "je fastwake_switch_tls",
    // arch_prctl(ARCH_SET_FS, r9). The kernel clobbers RAX, RCX and R11; SP goes first as above.
    "mov edi, {arch_set_fs}",
    "mov rsi, r9",
    "mov eax, {sys_arch_prctl}",
    "mov rsp, rcx",
    ".hidden fastwake_switch_slow_window",
    ".globl fastwake_switch_slow_window",
    "fastwake_switch_slow_window:",
    "syscall",
    "jmp r8",
    "6:",
    "mov rsp, rcx",
    "jmp r8",
    ".cfi_endproc",
    ".size fastwake_switch_slow, . - fastwake_switch_slow",
    "",
    ".p2align 5",
    ".hidden fastwake_switch_enter",
    ".globl fastwake_switch_enter",
    ".type fastwake_switch_enter,@function",
    "fastwake_switch_enter:",
    ".cfi_startproc",
    ".cfi_undefined rip",
    "mov rdi, [rsp]",
    "mov rsi, rdx",
    "call rbx",
    "ud2",
    ".cfi_endproc",
    ".size fastwake_switch_enter, . - fastwake_switch_enter",
    ".popsection",
    sp = const offset_of!(Registers, sp),
    bp = const offset_of!(Registers, bp),
    bx = const offset_of!(Registers, bx),
    ip = const offset_of!(Registers, ip),
    tls = const offset_of!(Registers, tls),
    mxcsr = const offset_of!(Registers, mxcsr),
    cw = const offset_of!(Registers, cw),
    pkru = const offset_of!(Registers, pkru),
    pkeys = const MODE_PKEYS,
    fp = const MODE_FP,
    keep_tls = const MODE_KEEP_TLS,
    no_fsgsbase = const MODE_NO_FSGSBASE,
    arch_set_fs = const ARCH_SET_FS,
    sys_arch_prctl = const libc::SYS_arch_prctl,
);

unsafe extern "C" {
    static fastwake_switch_tls: u8;
    static fastwake_switch_slow: u8;
    static fastwake_switch_enter: u8;
    static fastwake_switch_window: u8;
    static fastwake_switch_slow_window: u8;
}

/// The switch itself, with another way on for each use. `$on` is a list of instructions that ends
/// by jumping.
///
/// Registers at the labels:
///   start  RDI from   RSI to   RDX value   everything else the caller's
///   `2`    RDX value, as given by whoever switched here   RSP, RBP, RBX this context's own again
///          everything else undefined
macro_rules! switch {
    ($from:ident, $to:ident, $value:ident, [$($on:literal),*], $($operands:tt)*) => {
        asm!(
            "lea rax, [rip + 2f]",
            "mov [rdi + {sp}], rsp",
            "mov [rdi + {bp}], rbp",
            "mov [rdi + {bx}], rbx",
            "mov [rdi + {ip}], rax",
            $($on,)*
            ".p2align 4",
            "2:",
            inout("rdi") $from => _,
            inout("rsi") $to => _,
            inout("rdx") $value,
            out("r12") _,
            out("r13") _,
            out("r14") _,
            out("r15") _,
            sp = const offset_of!(Registers, sp),
            bp = const offset_of!(Registers, bp),
            bx = const offset_of!(Registers, bx),
            ip = const offset_of!(Registers, ip),
            $($operands)*
            clobber_abi("sysv64"),
        )
    };
}

/// Leaves this context in `from` and goes on in `to`. Returns the value that the switch back brings.
///
/// # Safety
/// See [`crate::context::switch`].
#[inline(always)]
pub(crate) unsafe fn switch(from: *mut Registers, to: *const Registers, mut value: usize) -> usize {
    // SAFETY: everything of `to` that matters is read after `from` was written, all registers are
    // clobbers or saved (RSP, RBP, RBX), and control comes back to label 2 only through `from`,
    // with those three restored. The caller vouches for `to`.
    unsafe {
        switch!(
            from,
            to,
            value,
            [
                "mov rcx, [rsi + {sp}]",
                "mov r8, [rsi + {ip}]",
                "mov rbp, [rsi + {bp}]",
                "mov rbx, [rsi + {bx}]",
                "mov rsp, rcx",
                "jmp r8"
            ],
        );
    }
    value
}

/// [`switch`] with the TLS base and the floating-point control words.
///
/// Before the tail: RCX new SP, R8 where to go on, R9 new FS base, RBP and RBX the new ones.
///
/// MXCSR is compared with its sticky flags, which natively are each thread's own too. Saving the
/// two words costs 3 to 4 ns, a load that is needed about as much again.
///
/// # Safety
/// See [`crate::context::switch_tls`].
#[inline(always)]
pub(crate) unsafe fn switch_tls(from: *mut Registers, to: *const Registers, mut value: usize) -> usize {
    // SAFETY: as in `switch`; the tail changes SP and FS base and jumps, nothing else.
    unsafe {
        switch!(from, to, value,
            ["stmxcsr [rdi + {mxcsr}]",
             "fnstcw [rdi + {cw}]",
             "mov rcx, [rsi + {sp}]",
             "mov r8, [rsi + {ip}]",
             "mov r9, [rsi + {tls}]",
             "mov r10d, [rsi + {mxcsr}]",
             "movzx r11d, word ptr [rsi + {cw}]",
             "mov rbp, [rsi + {bp}]",
             "mov rbx, [rsi + {bx}]",
             "cmp r10d, [rdi + {mxcsr}]",
             "jne 4f",
             "3:",
             "cmp r11w, [rdi + {cw}]",
             "je {tail}",
             "fldcw [rsi + {cw}]",
             "jmp {tail}",
             "4:",
             "ldmxcsr [rsi + {mxcsr}]",
             "jmp 3b"],
            mxcsr = const offset_of!(Registers, mxcsr),
            cw = const offset_of!(Registers, cw),
            tls = const offset_of!(Registers, tls),
            tail = sym fastwake_switch_tls,
        );
    }
    value
}

/// Either switch with whatever `mode` says, for processes that are not ordinary, and for the first
/// switch of any.
///
/// # Safety
/// See [`crate::context::switch_tls`]; with [`MODE_KEEP_TLS`], [`crate::context::switch`].
#[cold]
#[inline(never)]
pub(crate) unsafe fn switch_slow(
    from: *mut Registers,
    to: *const Registers,
    mut value: usize,
    mode: u8,
) -> usize {
    // SAFETY: as in `switch`; R10 is among the clobbers of the ABI and is not overlapped by another
    // input, the out-of-line half restores RBP and RBX and jumps to `to`.
    unsafe {
        switch!(from, to, value,
            ["stmxcsr [rdi + {mxcsr}]",
             "fnstcw [rdi + {cw}]",
             "jmp {slow}"],
            mxcsr = const offset_of!(Registers, mxcsr),
            cw = const offset_of!(Registers, cw),
            slow = sym fastwake_switch_slow,
            inout("r10") usize::from(mode) => _,
        );
    }
    value
}

/// The calling thread's FS base.
pub(crate) fn tls_base() -> usize {
    let base: usize;
    // SAFETY: the x86_64 TLS ABI puts the thread pointer itself at FS:0, on every thread.
    unsafe {
        asm!("mov {}, fs:[0]", out(reg) base, options(readonly, nostack, preserves_flags));
    }
    base
}

/// If `context` was interrupted where its stack is the new context's and the FS base is still the
/// old one's: the base that belongs to the stack.
pub(crate) fn pending_tls(context: &libc::ucontext_t) -> Option<usize> {
    let register = |which: libc::c_int| context.uc_mcontext.gregs[which as usize] as usize;
    let ip = register(libc::REG_RIP);
    if ip == &raw const fastwake_switch_window as usize {
        Some(register(libc::REG_R9))
    } else if ip == &raw const fastwake_switch_slow_window as usize {
        Some(register(libc::REG_RSI))
    } else {
        None
    }
}

#[cfg(test)]
mod tests;

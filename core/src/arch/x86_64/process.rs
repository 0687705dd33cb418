// SPDX-License-Identifier: MIT
//! What switches have to care for in this process: the few facts of processor, kernel and
//! application that send a switch the slow way.
//!
//! Read by every switch (one load), decided by the first. It must never ask the machine anything on
//! that path.

use core::arch::asm;
use core::sync::atomic::{AtomicU8, Ordering};

/// PKRU as Linux gives it to every thread: all keys but 0 denied.
const INITIAL_PKRU: u32 = 0x5555_5554;

/// [`mode`] has not been decided yet; every switch takes the slow way, which decides.
pub(crate) const MODE_UNDECIDED: u8 = 1;
/// Protection keys are in use: PKRU is part of the context.
pub(crate) const MODE_PKEYS: u8 = 2;
/// The kernel does not let user space write the FS base: `arch_prctl` does it, 250 ns.
pub(crate) const MODE_NO_FSGSBASE: u8 = 4;
/// The floating-point control words are part of a context even where the TLS base is not.
pub(crate) const MODE_FP: u8 = 8;
/// Not a state of the process but of one call of [`switch_slow`]: leave the TLS base alone.
pub(crate) const MODE_KEEP_TLS: u8 = 16;

/// What switches have to care for in this process. Relaxed everywhere: it is decided from constants
/// of the machine, and `MODE_PKEYS` is set before the first key exists (a thread that gets to know
/// of the key does so through the application's own ordering).
static MODE: AtomicU8 = AtomicU8::new(MODE_UNDECIDED);

const HWCAP2_FSGSBASE: libc::c_ulong = 1 << 1;

/// The `MODE_*` bits of this process; 0 is the fast way.
#[inline(always)]
pub(crate) fn mode() -> u8 {
    MODE.load(Ordering::Relaxed)
}

/// Decides [`mode`] if it is not decided yet, and returns it.
#[cold]
pub(crate) fn decide() -> u8 {
    if mode() & MODE_UNDECIDED != 0 {
        // SAFETY: getauxval reads the auxiliary vector; it has no precondition.
        let hwcap2 = unsafe { libc::getauxval(libc::AT_HWCAP2) };
        if hwcap2 & HWCAP2_FSGSBASE == 0 {
            MODE.fetch_or(MODE_NO_FSGSBASE, Ordering::Relaxed);
        }
        if pkru_of_thread() != INITIAL_PKRU {
            use_pkeys();
        }
        MODE.fetch_and(!MODE_UNDECIDED, Ordering::Relaxed);
    }
    mode()
}

/// From now on PKRU is part of every context. To be called before the first key is allocated.
pub(crate) fn use_pkeys() {
    if has_pkru() {
        MODE.fetch_or(MODE_PKEYS, Ordering::Relaxed);
    }
}

/// From now on plain switches exchange the floating-point control words as well.
pub(crate) fn use_fp_control() {
    MODE.fetch_or(MODE_FP, Ordering::Relaxed);
}

/// Whether the kernel has switched protection keys on (CPUID.7.0:ECX.OSPKE). Asked once: CPUID
/// traps in a virtual machine, tens of microseconds.
pub(crate) fn has_pkru() -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    const NO: u8 = 1;
    const YES: u8 = 2;
    static OSPKE: AtomicU8 = AtomicU8::new(0);
    match OSPKE.load(Ordering::Relaxed) {
        0 => {
            let has = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & (1 << 4) != 0;
            OSPKE.store(if has { YES } else { NO }, Ordering::Relaxed);
            has
        }
        known => known == YES,
    }
}

/// The calling thread's rights, or those of a thread that has none to lose.
pub(crate) fn pkru_of_thread() -> u32 {
    if !has_pkru() {
        return INITIAL_PKRU;
    }
    let pkru: u32;
    // SAFETY: rdpkru with ECX = 0 is valid where OSPKE is set, which was just asked.
    unsafe {
        asm!("rdpkru", in("ecx") 0, out("eax") pkru, out("edx") _,
             options(nomem, nostack, preserves_flags));
    }
    pkru
}

/// Whether the calling thread runs with a shadow stack (CET), which a switch would not move.
pub(crate) fn shadow_stack() -> bool {
    let ssp: usize;
    // SAFETY: rdsspq is a no-op that leaves RAX alone where shadow stacks are off or unknown.
    unsafe {
        asm!("xor eax, eax", "rdsspq rax", out("rax") ssp, options(nomem, nostack));
    }
    ssp != 0
}

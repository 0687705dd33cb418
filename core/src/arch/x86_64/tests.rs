// SPDX-License-Identifier: MIT
//! What only the inside can test: the window between stack and TLS base, instruction by instruction,
//! and the slow ways that most machines would not take by themselves.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;
use crate::context::{check, Context, TlsWay};
use crate::stack::Stack;

/// SIGTRAP's handler and the counters below are the process's.
static STEPPING: Mutex<()> = Mutex::new(());

fn stepping() -> MutexGuard<'static, ()> {
    STEPPING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lower end of the second stack and the two bases, for the handler.
static OTHER_LOW: AtomicUsize = AtomicUsize::new(0);
static OTHER_HIGH: AtomicUsize = AtomicUsize::new(0);
static OTHER_TLS: AtomicUsize = AtomicUsize::new(0);
static OWN_TLS: AtomicUsize = AtomicUsize::new(0);
static STEPS: AtomicUsize = AtomicUsize::new(0);
static TORN: AtomicUsize = AtomicUsize::new(0);
static TORN_UNREPAIRED: AtomicUsize = AtomicUsize::new(0);
static ON_OTHER: AtomicUsize = AtomicUsize::new(0);

/// One instruction was executed: do stack and TLS base belong together, or is it said what is due?
/// Uses no TLS itself: while it runs the two may disagree.
extern "C" fn on_step(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a ucontext_t that lives as long as the handler.
    let interrupted = unsafe { &*context.cast::<libc::ucontext_t>() };
    let sp = interrupted.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    let on_other = (OTHER_LOW.load(Relaxed)..=OTHER_HIGH.load(Relaxed)).contains(&sp);
    let due = if on_other { &OTHER_TLS } else { &OWN_TLS }.load(Relaxed);
    let base = read_fs_base();
    STEPS.fetch_add(1, Relaxed);
    if on_other {
        ON_OTHER.fetch_add(1, Relaxed);
    }
    match pending_tls(interrupted) {
        None if base == due => {}
        Some(pending) if base != due && pending == due => {
            TORN.fetch_add(1, Relaxed);
        }
        _ => {
            TORN_UNREPAIRED.fetch_add(1, Relaxed);
        }
    }
}

/// The register itself: what FS:0 holds is up to the made-up second base.
fn read_fs_base() -> usize {
    let base: usize;
    // SAFETY: these tests run where FSGSBASE is there, which `step_through` asserts first.
    unsafe { asm!("rdfsbase {}", out(reg) base, options(nomem, nostack)) };
    base
}

fn trap_flag(on: bool) {
    const TF: usize = 1 << 8;
    // SAFETY: only TF changes; the handler for the traps was installed by the caller.
    unsafe {
        if on {
            asm!("pushfq", "or qword ptr [rsp], {}", "popfq", const TF);
        } else {
            asm!("pushfq", "and qword ptr [rsp], {}", "popfq", const !(TF as i32));
        }
    }
}

struct Pair {
    main: Context,
    other: Context,
    mode: Option<u8>,
}

/// One switch in the way that the test is about.
unsafe fn by(mode: Option<u8>, from: *mut Context, to: *const Context) {
    // SAFETY: the caller's contract is that of the two functions.
    unsafe {
        match mode {
            None => switch_tls(from.cast(), to.cast(), 0),
            Some(mode) => switch_slow(from.cast(), to.cast(), 0, mode),
        }
    };
}

unsafe extern "C" fn bounce(pair: *mut (), _: usize) -> ! {
    let pair = pair.cast::<Pair>();
    loop {
        // SAFETY: the pair outlives this context, and `main` was left by the switch to here.
        unsafe { by((*pair).mode, &raw mut (*pair).other, &raw const (*pair).main) };
    }
}

/// Single-steps two round trips between contexts with different TLS bases. Returns how many
/// instruction boundaries had the new stack with the old base.
fn step_through(mode: Option<u8>) -> usize {
    assert_eq!(check(), Ok(TlsWay::Instruction), "this test needs FSGSBASE");
    let _guard = stepping();
    let stack = Stack::new(64 << 10).unwrap();
    // The second base only has to be another number: no code here looks into it.
    let made_up = Box::new([0usize; 8]);
    let other_tls = made_up.as_ptr() as usize;
    let mut pair = Pair { main: Context::of_thread(), other: Context::of_thread(), mode };
    let arg = (&raw mut pair).cast();
    // SAFETY: the stack is fresh and outlives the pair's use below.
    pair.other = unsafe { Context::on_stack(stack.top(), other_tls, bounce, arg) };
    OTHER_LOW.store(stack.range().start, Relaxed);
    OTHER_HIGH.store(stack.range().end, Relaxed);
    OTHER_TLS.store(other_tls, Relaxed);
    OWN_TLS.store(pair.main.tls(), Relaxed);
    for counter in [&STEPS, &TORN, &TORN_UNREPAIRED, &ON_OTHER] {
        counter.store(0, Relaxed);
    }
    // SAFETY: the handler has the signature that SA_SIGINFO wants; the action is put back below.
    // The switches go to a context that was made or left for it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_step as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, &mut before), 0);
        for _ in 0..2 {
            trap_flag(true);
            by(mode, &raw mut pair.main, &raw const pair.other);
            trap_flag(false);
        }
        assert_eq!(libc::sigaction(libc::SIGTRAP, &before, std::ptr::null_mut()), 0);
    }
    assert!(STEPS.load(Relaxed) > 60, "stepped {}", STEPS.load(Relaxed));
    assert!(ON_OTHER.load(Relaxed) > 20, "the other stack was not seen");
    assert_eq!(TORN_UNREPAIRED.load(Relaxed), 0, "stack and TLS base disagreed unsaid");
    TORN.load(Relaxed)
}

#[test]
fn stack_and_tls_base_disagree_at_one_instruction_only_and_it_is_said() {
    // Two round trips, one boundary per switch.
    assert_eq!(step_through(None), 4);
}

#[test]
fn so_they_do_without_fsgsbase() {
    assert_eq!(step_through(Some(MODE_NO_FSGSBASE)), 4);
}

#[test]
fn so_they_do_with_protection_keys() {
    if !has_pkru() {
        eprintln!("not run: this processor or kernel has no protection keys");
        return;
    }
    assert_eq!(step_through(Some(MODE_PKEYS)), 4);
}

/// The rights that `set` asks for, as WRPKRU takes them.
fn set_pkru(rights: u32) {
    // SAFETY: called only where the keys exist; key 0, which all memory here has, stays allowed.
    unsafe { asm!("wrpkru", in("eax") rights, in("ecx") 0, in("edx") 0) };
}

unsafe extern "C" fn with_other_rights(pair: *mut (), _: usize) -> ! {
    let pair = pair.cast::<Pair>();
    set_pkru(0x5555_5550);
    // SAFETY: as in `bounce`.
    unsafe { by((*pair).mode, &raw mut (*pair).other, &raw const (*pair).main) };
    let seen = pkru_of_thread();
    set_pkru(0x5555_5554);
    // SAFETY: as in `bounce`; the value tells the other side what was seen.
    unsafe {
        switch_slow(
            (&raw mut (*pair).other).cast(),
            (&raw const (*pair).main).cast(),
            seen as usize,
            MODE_PKEYS | MODE_KEEP_TLS,
        )
    };
    unreachable!("resumed once too often")
}

#[test]
fn protection_key_rights_follow_the_context() {
    if !has_pkru() {
        eprintln!("not run: this processor or kernel has no protection keys");
        return;
    }
    let stack = Stack::new(64 << 10).unwrap();
    let mode = MODE_PKEYS | MODE_KEEP_TLS;
    let mut pair = Pair { main: Context::of_thread(), other: Context::of_thread(), mode: Some(mode) };
    let own = pkru_of_thread();
    let arg = (&raw mut pair).cast();
    // SAFETY: the stack is fresh and outlives both switches; `other` was made or left for each.
    let seen = unsafe {
        pair.other = Context::on_stack(stack.top(), pair.main.tls(), with_other_rights, arg);
        by(pair.mode, &raw mut pair.main, &raw const pair.other);
        assert_eq!(pkru_of_thread(), own);
        switch_slow((&raw mut pair.main).cast(), (&raw const pair.other).cast(), 0, mode)
    };
    assert_eq!(seen, 0x5555_5550);
    assert_eq!(pkru_of_thread(), own);
}

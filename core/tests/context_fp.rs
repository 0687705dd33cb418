// SPDX-License-Identifier: MIT
//! Floating-point control words across switches. A file, and so a process, of its own:
//! `use_fp_control` is for good.

use std::arch::asm;
use std::ptr;

use fastwake::context::{self, switch, switch_tls, Context};
use fastwake::stack::Stack;

struct Turns {
    main: Context,
    other: Context,
    way: unsafe fn(*mut Context, *const Context, usize) -> usize,
}

/// Main's turn ends. # Safety: `other` is suspended.
unsafe fn to_other(turns: *mut Turns) -> usize {
    // SAFETY: the caller's promise; both contexts live in `turns`.
    unsafe { ((*turns).way)(&raw mut (*turns).main, &raw const (*turns).other, 0) }
}

/// The other's turn ends. # Safety: called on the other stack.
unsafe fn to_main(turns: *mut Turns, value: usize) -> usize {
    // SAFETY: main is suspended in `to_other` whenever the other stack runs.
    unsafe { ((*turns).way)(&raw mut (*turns).other, &raw const (*turns).main, value) }
}

fn control_words() -> (u32, u16) {
    let (mut mxcsr, mut cw) = (0u32, 0u16);
    // SAFETY: both instructions write to the variables given.
    unsafe { asm!("stmxcsr [{}]", "fnstcw [{}]", in(reg) &raw mut mxcsr, in(reg) &raw mut cw) };
    (mxcsr, cw)
}

/// Rounding and precision only, which no code between the calls here depends on.
fn set_control_words(mxcsr: u32, cw: u16) {
    // SAFETY: both instructions read the variables given; all exceptions stay masked.
    unsafe { asm!("ldmxcsr [{}]", "fldcw [{}]", in(reg) &raw const mxcsr, in(reg) &raw const cw) };
}

const TOWARDS_ZERO: (u32, u16) = (0x7f80, 0x0f7f);
const DOWNWARDS: (u32, u16) = (0x3f80, 0x077f);
const INITIAL: (u32, u16) = (0x1f80, 0x037f);

unsafe extern "C" fn rounds_downwards(turns: *mut (), _: usize) -> ! {
    let turns = turns.cast::<Turns>();
    let begun_with_initial = control_words() == INITIAL;
    set_control_words(DOWNWARDS.0, DOWNWARDS.1);
    // SAFETY: runs on the other stack.
    unsafe { to_main(turns, begun_with_initial.into()) };
    loop {
        let kept = control_words() == DOWNWARDS;
        // SAFETY: runs on the other stack.
        unsafe { to_main(turns, kept.into()) };
    }
}

#[test]
fn floating_point_control_words_are_each_contexts_own() {
    context::check().expect("a machine on which contexts can be switched");
    context::use_fp_control();
    for way in [switch, switch_tls] {
        let stack = Stack::new(64 << 10).unwrap();
        let mut turns = Turns { main: Context::of_thread(), other: Context::of_thread(), way };
        let arg = ptr::from_mut(&mut turns).cast();
        // SAFETY: the stack is kept for as long as this round switches to it.
        turns.other = unsafe { Context::on_stack(stack.top(), turns.main.tls(), rounds_downwards, arg) };
        let before = control_words();
        set_control_words(TOWARDS_ZERO.0, TOWARDS_ZERO.1);
        let mut seen = [(0, (0, 0)); 3];
        for entry in &mut seen {
            // SAFETY: `rounds_downwards` always comes back to main.
            *entry = (unsafe { to_other(&raw mut turns) }, control_words());
        }
        set_control_words(before.0, before.1);
        assert_eq!(seen, [(1, TOWARDS_ZERO); 3]);
    }
}

// SPDX-License-Identifier: MIT
//! Switches between contexts of one kernel thread: what must come back as it was left.

use std::arch::naked_asm;
use std::backtrace::Backtrace;
use std::ptr;

use fastwake::context::{self, switch, switch_tls, Context};
use fastwake::stack::Stack;

/// Two contexts that take turns: the test's own and one on a stack.
struct Turns {
    main: Context,
    other: Context,
    way: Way,
}

#[derive(Clone, Copy)]
enum Way {
    Plain,
    Tls,
}

const WAYS: [Way; 2] = [Way::Plain, Way::Tls];

impl Turns {
    fn new(way: Way) -> Turns {
        context::check().expect("a machine on which contexts can be switched");
        Turns { main: Context::of_thread(), other: Context::of_thread(), way }
    }

    fn begin(&mut self, stack: &Stack, entry: context::Entry) {
        let arg = ptr::from_mut(self).cast();
        // SAFETY: the tests keep their stacks for as long as they switch to them.
        self.other = unsafe { Context::on_stack(stack.top(), self.main.tls(), entry, arg) };
    }
}

/// Main's turn ends. # Safety: `other` is suspended.
unsafe fn to_other(turns: *mut Turns, value: usize) -> usize {
    // SAFETY: the caller's promise; both contexts live in `turns`.
    unsafe {
        let (from, to) = (&raw mut (*turns).main, &raw const (*turns).other);
        match (*turns).way {
            Way::Plain => switch(from, to, value),
            Way::Tls => switch_tls(from, to, value),
        }
    }
}

/// The other's turn ends. # Safety: called on the other stack.
unsafe fn to_main(turns: *mut Turns, value: usize) -> usize {
    // SAFETY: main is suspended in `to_other` whenever the other stack runs.
    unsafe {
        let (from, to) = (&raw mut (*turns).other, &raw const (*turns).main);
        match (*turns).way {
            Way::Plain => switch(from, to, value),
            Way::Tls => switch_tls(from, to, value),
        }
    }
}

unsafe extern "C" fn adds_one(turns: *mut (), first: usize) -> ! {
    let mut value = first;
    loop {
        // SAFETY: runs on the other stack.
        value = unsafe { to_main(turns.cast(), value + 1) };
    }
}

#[test]
fn values_pass_both_ways() {
    for way in WAYS {
        let stack = Stack::new(64 << 10).unwrap();
        let mut turns = Turns::new(way);
        turns.begin(&stack, adds_one);
        for value in [1, 7, usize::MAX - 1] {
            // SAFETY: `adds_one` always comes back to main, so it is suspended here.
            assert_eq!(unsafe { to_other(&raw mut turns, value) }, value + 1);
        }
    }
}

/// Fills RBX, RBP and R12 to R15 with `pattern` + 0, 1, ... , calls `turn(turns)` and returns a bit
/// for each register that came back different.
#[unsafe(naked)]
unsafe extern "C" fn hold_registers(
    turns: *mut Turns,
    turn: unsafe extern "C" fn(*mut Turns),
    pattern: usize,
) -> usize {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdx",
        "lea rbx, [rdx + 0]",
        "lea rbp, [rdx + 1]",
        "lea r12, [rdx + 2]",
        "lea r13, [rdx + 3]",
        "lea r14, [rdx + 4]",
        "lea r15, [rdx + 5]",
        "call rsi",
        "mov rdx, [rsp]",
        "xor eax, eax",
        "sub rbx, rdx",
        "je 2f",
        "or eax, 1",
        "2: sub rbp, rdx",
        "cmp rbp, 1",
        "je 2f",
        "or eax, 2",
        "2: sub r12, rdx",
        "cmp r12, 2",
        "je 2f",
        "or eax, 4",
        "2: sub r13, rdx",
        "cmp r13, 3",
        "je 2f",
        "or eax, 8",
        "2: sub r14, rdx",
        "cmp r14, 4",
        "je 2f",
        "or eax, 16",
        "2: sub r15, rdx",
        "cmp r15, 5",
        "je 2f",
        "or eax, 32",
        "2: pop rdx",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

unsafe extern "C" fn turn_of_main(turns: *mut Turns) {
    // SAFETY: the other context is suspended whenever main runs in this test.
    unsafe { to_other(turns, 0) };
}

unsafe extern "C" fn turn_of_other(turns: *mut Turns) {
    // SAFETY: called on the other stack only.
    unsafe { to_main(turns, 0) };
}

unsafe extern "C" fn holds_registers(turns: *mut (), _: usize) -> ! {
    let mut lost = 0;
    loop {
        // SAFETY: `hold_registers` keeps the ABI; what it reports is handed to main in turn.
        unsafe {
            lost |= hold_registers(turns.cast(), turn_of_other, 0x1000);
            to_main(turns.cast(), lost);
        }
    }
}

#[test]
fn callee_saved_registers_survive() {
    for way in WAYS {
        let stack = Stack::new(64 << 10).unwrap();
        let mut turns = Turns::new(way);
        turns.begin(&stack, holds_registers);
        for _ in 0..3 {
            // SAFETY: as in `turn_of_main`.
            unsafe {
                assert_eq!(hold_registers(&raw mut turns, turn_of_main, 0x2000), 0);
                assert_eq!(to_other(&raw mut turns, 0), 0, "on the other stack");
            }
        }
    }
}

/// Goes down `depth` frames, takes a turn at each on the way down and on the way up, and returns a
/// sum that is wrong if any frame was damaged.
#[inline(never)]
fn descend(turns: *mut Turns, depth: usize) -> usize {
    let mut frame = [depth; 64];
    // SAFETY: runs on the other stack.
    unsafe { to_main(turns, 1) };
    let below = if depth > 0 { descend(turns, depth - 1) } else { 0 };
    // SAFETY: as above.
    unsafe { to_main(turns, 1) };
    frame[0] = std::hint::black_box(frame[63]);
    below + frame[0]
}

unsafe extern "C" fn descends(turns: *mut (), depth: usize) -> ! {
    let sum = descend(turns.cast(), depth);
    loop {
        // SAFETY: runs on the other stack.
        unsafe { to_main(turns.cast(), sum) };
    }
}

#[test]
fn deep_stacks_keep_every_frame() {
    const DEPTH: usize = 8000;
    for way in WAYS {
        // 512 bytes of payload a frame, and room for what debug builds add.
        let stack = Stack::new(16 << 20).unwrap();
        let mut turns = Turns::new(way);
        turns.begin(&stack, descends);
        let mut last = 0;
        for _ in 0..2 * (DEPTH + 1) + 1 {
            // SAFETY: `descends` always comes back to main.
            last = unsafe { to_other(&raw mut turns, DEPTH) };
        }
        assert_eq!(last, DEPTH * (DEPTH + 1) / 2);
    }
}

#[test]
fn the_order_of_stacks_in_memory_does_not_matter() {
    for way in WAYS {
        let stacks = [Stack::new(64 << 10).unwrap(), Stack::new(64 << 10).unwrap()];
        assert_ne!(stacks[0].top(), stacks[1].top());
        // Each of the two runs a context that switches to one on the other: upwards and downwards.
        for (outer, inner) in [(0, 1), (1, 0)] {
            let mut turns = Turns::new(way);
            let mut nested = (Turns::new(way), &stacks[inner]);
            turns.begin(&stacks[outer], runs_nested);
            let argument = &raw mut nested as usize;
            // SAFETY: `runs_nested` comes back to main once, with the result.
            assert_eq!(unsafe { to_other(&raw mut turns, argument) }, 42);
        }
    }
}

unsafe extern "C" fn runs_nested(turns: *mut (), nested: usize) -> ! {
    // SAFETY: main passes the address of its pair, which lives until the switch back.
    let (inner, stack) = unsafe { &mut *(nested as *mut (Turns, &Stack)) };
    inner.begin(stack, adds_one);
    // SAFETY: `adds_one` always comes back.
    let sum = unsafe { to_other(inner, 20) + to_other(inner, 20) };
    // SAFETY: runs on the outer stack, whose main is suspended.
    unsafe { to_main(turns.cast(), sum) };
    unreachable!("resumed once too often");
}

#[inline(never)]
fn upper_frame(turns: *mut Turns) -> Vec<String> {
    let traces = lower_frame(turns);
    std::hint::black_box(traces)
}

#[inline(never)]
fn lower_frame(turns: *mut Turns) -> Vec<String> {
    let mut traces = vec![Backtrace::force_capture().to_string()];
    // SAFETY: runs on the other stack.
    unsafe { to_main(turns, 0) };
    traces.push(Backtrace::force_capture().to_string());
    std::hint::black_box(traces)
}

unsafe extern "C" fn traces_itself(turns: *mut (), _: usize) -> ! {
    let traces = Box::new(upper_frame(turns.cast()));
    // SAFETY: runs on the other stack; main takes the box.
    unsafe { to_main(turns.cast(), Box::into_raw(traces) as usize) };
    unreachable!("resumed once too often");
}

#[test]
fn a_backtrace_goes_through_the_switched_stack_and_ends_at_its_entry() {
    for way in WAYS {
        let stack = Stack::new(1 << 20).unwrap();
        let mut turns = Turns::new(way);
        turns.begin(&stack, traces_itself);
        // SAFETY: `traces_itself` comes back twice, the second time with a leaked box.
        let traces = unsafe {
            to_other(&raw mut turns, 0);
            Box::from_raw(to_other(&raw mut turns, 0) as *mut Vec<String>)
        };
        assert_eq!(traces.len(), 2);
        for trace in traces.iter() {
            let at = |name: &str| trace.find(name).unwrap_or_else(|| panic!("no {name} in:\n{trace}"));
            assert!(at("lower_frame") < at("upper_frame"), "{trace}");
            assert!(at("upper_frame") < at("traces_itself"), "{trace}");
            assert!(!trace.contains("a_backtrace_goes_through"), "{trace}");
        }
    }
}

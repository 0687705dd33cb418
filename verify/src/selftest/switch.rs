// SPDX-License-Identifier: MIT
//! The context switch, tried: to a stack of its own and back, with and without the TLS base.
//!
//! Values must arrive on both sides, and what is in the caller's registers and thread-local storage
//! must be there afterwards. Run in fastwaked alone; the core's own tests go further.

use std::cell::Cell;

use anyhow::{bail, Result};
use fastwake::context::{self, switch, switch_tls, Context, TlsWay};
use fastwake::stack::Stack;

/// Round trips of each way.
const ROUND_TRIPS: usize = 10_000;

thread_local! {
    static MARK: Cell<usize> = const { Cell::new(0) };
}

/// The two ends of a test, where each is left while the other one runs.
struct Pair {
    caller: Context,
    other: Context,
}

/// Tries both switches.
///
/// # Errors
/// Contexts cannot be switched here, or a value was lost.
pub(super) fn test() -> Result<String> {
    let way = context::check()?;
    round_trips(echo, |pair, value| {
        // SAFETY: `other` is suspended: fresh, or left by its own switch back. Both run on this
        // thread, and `echo` holds no lock or borrow over a switch.
        unsafe { switch(&raw mut (*pair).caller, &raw const (*pair).other, value) }
    })?;
    round_trips(echo_tls, |pair, value| {
        // SAFETY: as above, and both contexts have the TLS base of this thread.
        unsafe { switch_tls(&raw mut (*pair).caller, &raw const (*pair).other, value) }
    })?;
    let tls = match way {
        TlsWay::Instruction => "by instruction",
        TlsWay::SystemCall => "by system call",
    };
    Ok(format!("{ROUND_TRIPS} round trips each without and with the TLS base ({tls})"))
}

fn round_trips(entry: context::Entry, go: impl Fn(*mut Pair, usize) -> usize) -> Result<()> {
    let stack = Stack::new(64 << 10)?;
    let mut pair = Pair { caller: Context::of_thread(), other: Context::of_thread() };
    let at = &raw mut pair;
    // SAFETY: the stack is fresh, and outlives the context: both end with this function, and the
    // context is never resumed after the loop below. `at` points to the pair, which nothing else
    // touches from here on.
    unsafe { (*at).other = Context::on_stack(stack.top(), (*at).caller.tls(), entry, at.cast()) };
    for i in 1..=ROUND_TRIPS {
        MARK.with(|mark| mark.set(i));
        let back = go(at, i);
        if back != i + 1 {
            bail!("sent {i}, and {back} came back instead of {}", i + 1);
        }
        let mark = MARK.with(Cell::get);
        if mark != i + 2 {
            bail!("thread-local storage holds {mark} instead of {}", i + 2);
        }
    }
    Ok(())
}

/// Adds one to each value, and two to the mark.
unsafe extern "C" fn echo(pair: *mut (), mut value: usize) -> ! {
    let pair = pair.cast::<Pair>();
    loop {
        MARK.with(|mark| mark.set(mark.get() + 2));
        // SAFETY: the pair lives in the caller's frame, which is suspended in its switch to here.
        value = unsafe { switch(&raw mut (*pair).other, &raw const (*pair).caller, value + 1) };
    }
}

/// The same with the TLS base.
unsafe extern "C" fn echo_tls(pair: *mut (), mut value: usize) -> ! {
    let pair = pair.cast::<Pair>();
    loop {
        MARK.with(|mark| mark.set(mark.get() + 2));
        // SAFETY: as in `echo`.
        value = unsafe { switch_tls(&raw mut (*pair).other, &raw const (*pair).caller, value + 1) };
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_switch_works_on_this_machine() {
        assert!(super::test().unwrap().contains("round trips"));
    }
}

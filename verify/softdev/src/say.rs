// SPDX-License-Identifier: MIT
//! The few lines that a user must see, on standard error, each kind once per process.
//!
//! Called from anywhere in the device; never from a message's fast path.

use std::fmt;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Writes `fastwake: soft device: <text>` unless `said` is set already.
pub(crate) fn say(said: &AtomicBool, text: fmt::Arguments<'_>) {
    if !said.swap(true, Ordering::Relaxed) {
        let line = format!("fastwake: soft device: {text}\n");
        // One write, so that lines of several processes do not mix. Nobody to tell if it fails.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// [`say`] with a flag of its own at each place of use.
macro_rules! say_once {
    ($($arg:tt)*) => {{
        static SAID: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
        $crate::say::say(&SAID, format_args!($($arg)*));
    }};
}
pub(crate) use say_once;

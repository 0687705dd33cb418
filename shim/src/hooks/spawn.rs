// SPDX-License-Identifier: MIT
//! libc: calls that make a child share the channels' descriptors.
//!
//! FastWake does nothing in the child, so every request must be with the kernel before it exists.
//! These calls are rare and slow, and need nothing from their hooks but that.

use std::ffi::{c_char, c_int};

use fastwake::channel::Channel;
use redhook::{hook, real};

use crate::{process, thread};

fn settle() {
    if process::active() {
        thread::undisturbed(|| Channel::each(Channel::to_kernel));
    }
}

hook! {
    unsafe fn fork() -> libc::pid_t => fork_settled {
        settle();
        // SAFETY: the caller's arguments.
        unsafe { real!(fork)() }
    }
}

hook! {
    unsafe fn daemon(nochdir: c_int, noclose: c_int) -> c_int => daemon_settled {
        settle();
        // SAFETY: the caller's arguments.
        unsafe { real!(daemon)(nochdir, noclose) }
    }
}

hook! {
    unsafe fn forkpty(
        master: *mut c_int,
        name: *mut c_char,
        terminal: *const libc::termios,
        window: *const libc::winsize
    ) -> libc::pid_t => forkpty_settled {
        settle();
        // SAFETY: the caller's arguments.
        unsafe { real!(forkpty)(master, name, terminal, window) }
    }
}

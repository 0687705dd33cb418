// SPDX-License-Identifier: MIT
//! libc: installing handlers.

use std::ffi::c_int;

use super::hooks;
use crate::signals;

hooks! {
    sigaction(libc) = set_action;
    signal(libc) = set_handler;
    sysv_signal(libc) = set_handler_once;
    __sysv_signal(libc) = set_handler_once_internal;
}

unsafe extern "C" fn set_action(
    number: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    sigaction::HOOK.wanted();
    // SAFETY: the caller's arguments.
    unsafe { signals::sigaction(number, new, old) }
}

unsafe extern "C" fn set_handler(number: c_int, handler: usize) -> usize {
    signal::HOOK.wanted();
    // SAFETY: the caller's arguments.
    unsafe { signals::signal(number, handler) }
}

unsafe extern "C" fn set_handler_once(number: c_int, handler: usize) -> usize {
    sysv_signal::HOOK.wanted();
    // SAFETY: the caller's arguments.
    unsafe { signals::sysv_signal(number, handler) }
}

unsafe extern "C" fn set_handler_once_internal(number: c_int, handler: usize) -> usize {
    __sysv_signal::HOOK.wanted();
    // SAFETY: the caller's arguments.
    unsafe { signals::sysv_signal(number, handler) }
}

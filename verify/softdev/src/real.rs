// SPDX-License-Identifier: MIT
//! The real libibverbs behind this library: calls about other devices go there.
//!
//! The next definition of the same version is looked for first, then an already loaded
//! libibverbs.so.1 (programs that `dlopen` it keep it out of the global scope). Where there is
//! none, there are no other devices.

use crate::say::say_once;
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the real libibverbs, looked up when it is first needed.
pub(crate) struct Real(AtomicPtr<c_void>);

impl Real {
    pub(crate) const fn new() -> Self {
        Real(AtomicPtr::new(ptr::null_mut()))
    }

    /// Its address; `None` where it cannot be found now (it is looked for again next time).
    pub(crate) fn find(&self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        let mut found = self.0.load(Ordering::Relaxed);
        if found.is_null() {
            found = look_up(name.as_ptr(), version.as_ptr());
            self.0.store(found, Ordering::Relaxed);
        }
        (!found.is_null()).then_some(found)
    }
}

fn look_up(name: *const c_char, version: *const c_char) -> *mut c_void {
    // SAFETY: both are C strings; the handle is closed again, and libibverbs stays loaded by whoever
    // loaded it.
    unsafe {
        let next = dlvsym(libc::RTLD_NEXT, name, version);
        if !next.is_null() {
            return next;
        }
        let loaded = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if loaded.is_null() {
            return ptr::null_mut();
        }
        let found = dlvsym(loaded, name, version);
        libc::dlclose(loaded);
        found
    }
}

extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Calls the real function `name@version` of the given type, or gives `absent`.
macro_rules! forward {
    ($name:expr, $version:expr, fn($($t:ty),*) -> $r:ty, $absent:expr, $($arg:expr),* $(,)?) => {{
        static REAL: $crate::real::Real = $crate::real::Real::new();
        match REAL.find($name, $version) {
            Some(address) => {
                let real: unsafe extern "C" fn($($t),*) -> $r = std::mem::transmute(address);
                real($($arg),*)
            }
            None => $absent,
        }
    }};
}
pub(crate) use forward;

/// Sets `errno` and gives null: how a call that makes an object fails.
pub(crate) fn fail<T>(error: c_int) -> *mut T {
    set_errno(error);
    ptr::null_mut()
}

/// Sets `errno`.
pub(crate) fn set_errno(error: c_int) {
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = error };
}

/// Says once that `call` is not supported. Returns `EOPNOTSUPP`.
pub(crate) fn refuse(call: &str) -> c_int {
    say_once!("{call} is not supported");
    libc::EOPNOTSUPP
}

// SPDX-License-Identifier: MIT
//! What is exported in place of libibverbs and libc.
//!
//! Every export (but those of `dl` and `spawn`) is a jump through a slot. The slot first leads to the hook of that name; once it is
//! settled that FastWake is off in this program it leads to the function below. A hook decides
//! nothing: it asks whether FastWake is active, calls what does the work, or passes the call on.
//!
//! To add a hook: a row in `shim/hooks.table`, a function and a row of [`hooks!`] in the module it
//! belongs to, a program in `verify/apps` that shows what would otherwise go wrong, and a word in
//! docs/ARCHITECTURE.md.

use std::sync::atomic::{AtomicPtr, Ordering};

use crate::process;
use crate::real::Real;

mod dl;
mod fds;
mod signals;
mod spawn;
mod threads;
mod verbs;

/// Where an export leads, and what lies below it.
#[repr(C)]
pub(crate) struct Hook {
    pub(crate) slot: AtomicPtr<()>,
    pub(crate) real: Real,
}

impl Hook {
    /// Whether the call is to be handled. Where FastWake is off for good, the export is made to
    /// lead straight to the function below.
    #[inline(always)]
    pub(crate) fn wanted(&self) -> bool {
        process::active() || self.passed_on()
    }

    #[cold]
    fn passed_on(&self) -> bool {
        if process::off() {
            let real = self.real.address();
            if !real.is_null() {
                self.slot.store(real.cast(), Ordering::Relaxed);
            }
        }
        false
    }
}

/// Defines exports: `name(kind) = hook;` where `kind` is the library it is looked up in.
macro_rules! hooks {
    ($($name:ident($kind:ident) = $hook:ident;)*) => {
        $(
            pub(crate) mod $name {
                use std::sync::atomic::AtomicPtr;

                use crate::hooks::Hook;
                use crate::real::Real;

                pub(crate) static HOOK: Hook = Hook {
                    slot: AtomicPtr::new(super::$hook as *const () as *mut ()),
                    real: {
                        const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) {
                            Ok(name) => name,
                            Err(_) => panic!("a name without NUL"),
                        };
                        Real::$kind(NAME)
                    },
                };

                #[unsafe(naked)]
                #[no_mangle]
                unsafe extern "C" fn $name() {
                    // The slot is the hook's first field; the assertion below keeps it there.
                    std::arch::naked_asm!("jmp qword ptr [rip + {}]", sym HOOK)
                }
            }
        )*
    };
}
pub(crate) use hooks;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("the exports' jump is written for x86_64 only");

const _: () = assert!(std::mem::offset_of!(Hook, slot) == 0);

/// The version of this library, for `fastwaked --version`.
#[no_mangle]
extern "C" fn fastwake_shim_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

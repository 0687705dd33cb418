// SPDX-License-Identifier: MIT
//! libdl: programs that open libibverbs themselves.
//!
//! NCCL, UCX, brpc and others `dlopen` libibverbs and look names up in that handle, where no preload
//! is seen. A look-up that ends inside libibverbs is therefore answered with what a preload exports
//! under the name, if any does: ours, or the soft device's, whichever comes first. Taking only some
//! of the names from a preload would mix two devices, so this goes for every name.
//!
//! For RTLD_DEFAULT and RTLD_NEXT the answer depends on the caller's address: these calls are passed
//! on by a jump, so that the real function sees the application as its caller.

use std::ffi::{c_char, c_void, CStr};
use std::ptr;

use crate::real;

/// Defines the export of a look-up: a jump to the real one for the two pseudo handles (0 and -1),
/// and before the real ones are known a call that finds them. The hook gets the caller's address as
/// one more argument, in `$caller`.
macro_rules! look_up {
    ($name:ident, $real:path, $hook:ident, $caller:literal) => {
        #[unsafe(naked)]
        #[no_mangle]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "cmp qword ptr [rip + {real}], 0",
                "jne 2f",
                "push rdi",
                "push rsi",
                "push rdx",
                "call {find}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "2:",
                "lea rax, [rdi + 1]",
                "cmp rax, 1",
                "ja 3f",
                "jmp qword ptr [rip + {real}]",
                "3:",
                concat!("mov ", $caller, ", [rsp]"),
                "jmp {hook}",
                real = sym $real,
                find = sym real::find_loader,
                hook = sym $hook,
            )
        }
    };
}

look_up!(dlsym, real::DLSYM, look_up_in, "rdx");
look_up!(dlvsym, real::DLVSYM, look_up_version_in, "rcx");

unsafe extern "C" fn look_up_in(
    handle: *mut c_void,
    name: *const c_char,
    caller: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's name.
    let name = unsafe { CStr::from_ptr(name) };
    prefer_preload(real::dlsym(handle, name), caller, || real::dlsym(libc::RTLD_DEFAULT, name))
}

unsafe extern "C" fn look_up_version_in(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's name and version.
    let (name, version) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(version)) };
    prefer_preload(real::dlvsym(handle, name, version), caller, || {
        real::dlvsym(libc::RTLD_DEFAULT, name, version)
    })
}

/// `found`, unless it lies in libibverbs and something before libibverbs has that name, too. A preload
/// that looks for what is below itself is not answered with itself.
fn prefer_preload(
    found: *mut c_void,
    caller: *mut c_void,
    preloaded: impl FnOnce() -> *mut c_void,
) -> *mut c_void {
    let in_libibverbs = |object: &libc::Dl_info| {
        // SAFETY: a name lives as long as its object.
        !object.dli_fname.is_null()
            && unsafe { CStr::from_ptr(object.dli_fname) }
                .to_bytes()
                .windows(13)
                .any(|part| part == b"libibverbs.so")
    };
    if found.is_null() || !object_of(found).is_some_and(|object| in_libibverbs(&object)) {
        return found;
    }
    let preloaded = preloaded();
    if preloaded.is_null() {
        // The miss must not be what a later dlerror tells.
        // SAFETY: no precondition.
        unsafe { libc::dlerror() };
        return found;
    }
    let base = |address| object_of(address).map(|object| object.dli_fbase);
    if base(preloaded) == base(caller) {
        found
    } else {
        preloaded
    }
}

/// The loaded object that `address` lies in.
fn object_of(address: *mut c_void) -> Option<libc::Dl_info> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: room for the description.
    (unsafe { libc::dladdr(address, &mut info) } != 0).then_some(info)
}

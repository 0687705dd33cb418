// SPDX-License-Identifier: MIT
//! Overflow of a stack: the process dies at the guard, and nothing else was written to.

use std::hint::black_box;
use std::os::fd::{FromRawFd, OwnedFd};
use std::{fs::File, io::Read, mem, ptr};

use fastwake::context::{switch, Context};
use fastwake::stack::Stack;

/// Where the child's SIGSEGV handler reports the address. Set before the fork's child installs it.
static REPORT: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

/// Reports the faulting address, then lets the same fault kill the process.
extern "C" fn on_fault(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let fd = REPORT.load(std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the kernel passes a valid siginfo; write, signal are async-signal-safe.
    unsafe {
        let address = ((*info).si_addr() as usize).to_ne_bytes();
        libc::write(fd, address.as_ptr().cast(), address.len());
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
    }
}

#[inline(never)]
fn recurse(depth: usize) -> usize {
    let frame = black_box([depth; 100]);
    if depth == usize::MAX {
        return 0;
    }
    recurse(depth + 1) + black_box(&frame)[99]
}

unsafe extern "C" fn overflows(_: *mut (), _: usize) -> ! {
    black_box(recurse(0));
    // SAFETY: ends the child; reached only if the stack had no end.
    unsafe { libc::_exit(3) }
}

#[test]
fn an_overflow_is_a_fault_within_the_guard() {
    let stack = Stack::new(256 << 10).unwrap();
    let mut fds = [0; 2];
    // SAFETY: fds is room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    REPORT.store(fds[1], std::sync::atomic::Ordering::Relaxed);
    // SAFETY: the child calls only async-signal-safe functions and code that touches its stack.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: a handler on a stack of its own (the overflowed one is full), then the switch to
        // a fresh context from which nothing comes back.
        unsafe {
            let handler_stack = Stack::new(64 << 10).unwrap();
            let mut alternate: libc::stack_t = mem::zeroed();
            alternate.ss_sp = handler_stack.range().start as *mut _;
            alternate.ss_size = handler_stack.range().len();
            libc::sigaltstack(&alternate, ptr::null_mut());
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGSEGV, &action, ptr::null_mut());
            // No core file for a death that is meant.
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &none);
            let mut left = Context::of_thread();
            let context = Context::on_stack(stack.top(), left.tls(), overflows, ptr::null_mut());
            switch(&raw mut left, &raw const context, 0);
            libc::_exit(4);
        }
    }
    // SAFETY: both descriptors are this test's own.
    let (read, write) = unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) };
    drop(write);
    let mut address = [0; 8];
    File::from(read).read_exact(&mut address).expect("an address from the child");
    let mut status = 0;
    // SAFETY: the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status), "status {status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    let address = usize::from_ne_bytes(address);
    assert!(stack.guard().contains(&address), "{address:#x} is not in {:x?}", stack.guard());
}

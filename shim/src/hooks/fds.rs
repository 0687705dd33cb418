// SPDX-License-Identifier: MIT
//! libc: other ways to wait on the descriptor of a completion channel.
//!
//! Whoever is about to wait with poll, select or epoll must find the requests with the kernel.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fastwake::channel::Channel;

use super::hooks;
use crate::real::call_real;
use crate::thread;

hooks! {
    poll(libc) = poll_fds;
    ppoll(libc) = ppoll_fds;
    select(libc) = select_fds;
    pselect(libc) = pselect_fds;
    epoll_ctl(libc) = control_epoll;
}

/// Descriptors with a bit here; a channel beyond them is served to blocking waiters all the same,
/// and found by the watchdog if it is polled.
const FDS: usize = 1 << 16;

static WATCHED: [AtomicU64; FDS / 64] = [const { AtomicU64::new(0) }; FDS / 64];
static COUNT: AtomicU32 = AtomicU32::new(0);

fn bit(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((WATCHED.get(fd / 64)?, 1 << (fd % 64)))
}

/// Notes the descriptor of a channel.
pub(super) fn watch(channel: &Channel) {
    if let Some((word, bit)) = bit(channel.fd()) {
        word.fetch_or(bit, Ordering::Relaxed);
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

/// Forgets the descriptor of a channel that is destroyed.
pub(super) fn forget(fd: c_int) {
    if let Some((word, bit)) = bit(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `f` for the channel whose descriptor `fd` is, if it is one's.
fn each_of(fd: c_int, f: impl Fn(&Channel)) {
    if bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0) {
        thread::undisturbed(|| {
            Channel::each(|channel| {
                if channel.fd() == fd {
                    f(channel);
                }
            });
        });
    }
}

/// The caller is about to wait on `fd`: if it is a channel's, its requests go to the kernel.
fn give_to_kernel(fd: c_int) {
    each_of(fd, Channel::waited_elsewhere);
}

fn any_channel() -> bool {
    COUNT.load(Ordering::Relaxed) > 0
}

/// # Safety
/// `fds` points to `count` entries.
unsafe fn give_polled(fds: *const libc::pollfd, count: libc::nfds_t) {
    if any_channel() && !fds.is_null() {
        // SAFETY: as the caller says.
        unsafe { std::slice::from_raw_parts(fds, count as usize) }
            .iter()
            .for_each(|poll| give_to_kernel(poll.fd));
    }
}

/// # Safety
/// `set` is null or a set of at least `count` bits.
unsafe fn give_selected(set: *const libc::fd_set, count: c_int) {
    if !any_channel() || set.is_null() {
        return;
    }
    for fd in 0..count.max(0) {
        // SAFETY: below the number of bits that the caller said the set has; sets may be larger
        // than FD_SETSIZE, so the word is read by hand.
        let word = unsafe { set.cast::<u64>().add(fd as usize / 64).read_unaligned() };
        if word >> (fd % 64) & 1 != 0 {
            give_to_kernel(fd);
        }
    }
}

unsafe extern "C" fn poll_fds(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    let hook = &poll::HOOK;
    if hook.wanted() {
        // SAFETY: the caller's arguments.
        unsafe { give_polled(fds, count) };
    }
    call_real!(hook.real, fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int, (fds, count, timeout), -1)
}

unsafe extern "C" fn ppoll_fds(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    let hook = &ppoll::HOOK;
    if hook.wanted() {
        // SAFETY: the caller's arguments.
        unsafe { give_polled(fds, count) };
    }
    call_real!(
        hook.real,
        fn(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t) -> c_int,
        (fds, count, timeout, mask),
        -1
    )
}

unsafe extern "C" fn select_fds(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    let hook = &select::HOOK;
    if hook.wanted() {
        // SAFETY: the caller's arguments.
        unsafe { give_selected(read, count) };
    }
    call_real!(
        hook.real,
        fn(c_int, *mut libc::fd_set, *mut libc::fd_set, *mut libc::fd_set, *mut libc::timeval) -> c_int,
        (count, read, write, except, timeout),
        -1
    )
}

unsafe extern "C" fn pselect_fds(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    let hook = &pselect::HOOK;
    if hook.wanted() {
        // SAFETY: the caller's arguments.
        unsafe { give_selected(read, count) };
    }
    call_real!(
        hook.real,
        fn(
            c_int,
            *mut libc::fd_set,
            *mut libc::fd_set,
            *mut libc::fd_set,
            *const libc::timespec,
            *const libc::sigset_t,
        ) -> c_int,
        (count, read, write, except, timeout, mask),
        -1
    )
}

unsafe extern "C" fn control_epoll(epoll: c_int, operation: c_int, fd: c_int, event: *mut c_void) -> c_int {
    let hook = &epoll_ctl::HOOK;
    if hook.wanted() && operation != libc::EPOLL_CTL_DEL && any_channel() {
        // It may be waited on there at any time from now on.
        each_of(fd, Channel::never_serve);
    }
    call_real!(hook.real, fn(c_int, c_int, c_int, *mut c_void) -> c_int, (epoll, operation, fd, event), -1)
}

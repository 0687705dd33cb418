// SPDX-License-Identifier: MIT
//! Reaching the memory of a peer: the copies of READ, WRITE, atomics and placed SENDs.
//!
//! Every access is bracketed by `Connection::touch` and `untouch`, and checked in between: {say
//! that one touches; look at key and QP} against {invalidate; wait until nobody touches}. So no
//! byte is touched without the right to, even when the region is just being taken back.
//!
//! Pages that the peer moved are mapped here and reached directly. The rest goes through
//! `process_vm_readv` and `process_vm_writev`.

use crate::connection::Connection;
use crate::layout::MrShared;
use crate::mr::{check, owner_address};
use crate::peer::Peer;
use crate::say::say_once;
use parking_lot::Mutex;
use rdma_sys::ibv_wc_status;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the peer.
    Read,
    /// To the peer.
    Write,
}

/// What an atomic does.
#[derive(Clone, Copy)]
pub(crate) enum Atomic {
    /// Adds.
    Add(u64),
    /// Compares with the first and, if equal, puts the second.
    Swap(u64, u64),
}

/// Why an access failed, as `ibv_wc_status`.
pub(crate) type Refused = u32;

/// The rest of a range in one piece: where it can be reached, and how long.
enum Piece {
    Here(*mut u8, usize),
    There(u64, usize),
}

/// The first piece of `addr..addr + len`, which lies inside `mr`.
fn piece(conn: &mut Connection, mr: &MrShared, key: u32, addr: u64, len: usize) -> Piece {
    let there = owner_address(mr, addr);
    if conn.peer.own {
        return Piece::Here(there as *mut u8, len);
    }
    let (moved, moved_len) = (mr.moved.load(Ordering::Relaxed), mr.moved_len.load(Ordering::Relaxed));
    let moved_end = moved + moved_len;
    if moved_len == 0 || there >= moved_end {
        return Piece::There(there, len);
    }
    if there < moved {
        return Piece::There(there, len.min((moved - there) as usize));
    }
    let at = mr.moved_at.load(Ordering::Relaxed);
    match conn.mapped(key, at, moved_len as usize) {
        Some(mapped) => {
            Piece::Here(mapped.at((there - moved) as usize), len.min((moved_end - there) as usize))
        }
        None => Piece::There(there, len),
    }
}

/// Whether all of a checked range can be reached without `process_vm_*`.
pub(crate) fn is_here(conn: &Connection, mr: &MrShared, addr: u64, len: u64) -> bool {
    let there = owner_address(mr, addr);
    let (moved, moved_len) = (mr.moved.load(Ordering::Relaxed), mr.moved_len.load(Ordering::Relaxed));
    conn.peer.own || (moved_len > 0 && there >= moved && there + len <= moved + moved_len)
}

/// Copies between `local` and `addr` of a region that was checked. `last` says that this ends the
/// message: then its last byte becomes visible last.
///
/// # Safety
/// `local` is good for `len` bytes in that direction. The connection touches (see the module).
pub(crate) unsafe fn copy(
    conn: &mut Connection,
    mr: &MrShared,
    key: u32,
    addr: u64,
    local: *mut u8,
    len: usize,
    way: Way,
) -> Result<(), Refused> {
    let mut done = 0;
    while done < len {
        let from = local.wrapping_add(done);
        match piece(conn, mr, key, addr + done as u64, len - done) {
            Piece::Here(here, n) => {
                // SAFETY: `here` is mapped for `n` bytes, `local` for `len`.
                unsafe {
                    match way {
                        Way::Read => ptr::copy(here, from, n),
                        Way::Write => place(from, here, n),
                    }
                }
                done += n;
            }
            Piece::There(there, n) => {
                transfer(&conn.peer, there, from, n, way)?;
                done += n;
            }
        }
    }
    Ok(())
}

/// Copies so that the last byte becomes visible last.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes.
#[inline]
unsafe fn place(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: promised by the caller. The peer may look at any byte meanwhile, which is what RDMA
    // is; volatile keeps the last store where it stands.
    unsafe {
        match len {
            0 => {}
            1 => to.write_volatile(*from),
            8 if to.addr().is_multiple_of(8) => {
                to.cast::<u64>().write_volatile(from.cast::<u64>().read_unaligned());
            }
            _ => {
                ptr::copy(from, to, len - 1);
                fence(Ordering::Release);
                to.add(len - 1).write_volatile(*from.add(len - 1));
            }
        }
    }
}

/// Moves bytes by `process_vm_*`.
fn transfer(peer: &Peer, there: u64, here: *mut u8, len: usize, way: Way) -> Result<(), Refused> {
    if !peer.reachable {
        say_once!(
            "the memory of process {} cannot be reached (process_vm_* is not permitted); \
             READ, WRITE and atomics work on whole pages of regions only",
            peer.pid
        );
        return Err(ibv_wc_status::IBV_WC_REM_OP_ERR);
    }
    let local = libc::iovec { iov_base: here.cast(), iov_len: len };
    // The last byte on its own: the kernel copies entry by entry, so it becomes visible last.
    let base = there as *mut u8;
    let remote = [
        libc::iovec { iov_base: base.cast(), iov_len: len - 1 },
        libc::iovec { iov_base: base.wrapping_add(len - 1).cast(), iov_len: 1 },
    ];
    let mut done = 0;
    while done < len {
        let left = libc::iovec { iov_base: here.wrapping_add(done).cast(), iov_len: len - done };
        let rest = [
            libc::iovec { iov_base: base.wrapping_add(done).cast(), iov_len: (len - 1).saturating_sub(done) },
            remote[1],
        ];
        let (local, remote) = if done == 0 { (&local, &remote) } else { (&left, &rest) };
        // SAFETY: `local` lies inside what the caller was checked for; what `remote` names is
        // checked by the kernel.
        let n = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(peer.pid, local, 1, remote.as_ptr(), 2, 0),
                Way::Write => libc::process_vm_writev(peer.pid, local, 1, remote.as_ptr(), 2, 0),
            }
        };
        if n <= 0 {
            return Err(match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ESRCH) => ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
                // Registered, but not mapped any more.
                Some(libc::EFAULT) => ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
                _ => ibv_wc_status::IBV_WC_REM_OP_ERR,
            });
        }
        done += n as usize;
    }
    Ok(())
}

/// Does an atomic at `addr` of a checked region. Returns the value before.
pub(crate) fn atomic(
    conn: &mut Connection,
    mr: &MrShared,
    key: u32,
    addr: u64,
    what: Atomic,
) -> Result<u64, Refused> {
    let moved = {
        let there = owner_address(mr, addr);
        let (start, len) = (mr.moved.load(Ordering::Relaxed), mr.moved_len.load(Ordering::Relaxed));
        len > 0 && there >= start && there < start + len
    };
    // Moved or not decides, not who asks: all who reach one address must do it the same way.
    if moved {
        if let Piece::Here(word, _) = piece(conn, mr, key, addr, 8) {
            // SAFETY: mapped, inside the checked region, and 8-byte aligned as the caller saw.
            let word = unsafe { AtomicU64::from_ptr(word.cast()) };
            return Ok(match what {
                Atomic::Add(n) => word.fetch_add(n, Ordering::SeqCst),
                Atomic::Swap(old, new) => {
                    match word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst) {
                        Ok(was) | Err(was) => was,
                    }
                }
            });
        }
    }
    let there = owner_address(mr, addr);
    let lock = AtomicLock::take(&conn.peer)?;
    let mut was = 0_u64;
    word_transfer(&conn.peer, there, &mut was, Way::Read)?;
    let mut now = match what {
        Atomic::Add(n) => was.wrapping_add(n),
        Atomic::Swap(old, new) if was == old => new,
        Atomic::Swap(..) => was,
    };
    if now != was {
        word_transfer(&conn.peer, there, &mut now, Way::Write)?;
    }
    drop(lock);
    Ok(was)
}

fn word_transfer(peer: &Peer, there: u64, word: &mut u64, way: Way) -> Result<(), Refused> {
    if peer.own {
        // SAFETY: a checked word of this process; others reach it under the lock that is held.
        let target = unsafe { AtomicU64::from_ptr(there as *mut u64) };
        match way {
            Way::Read => *word = target.load(Ordering::SeqCst),
            Way::Write => target.store(*word, Ordering::SeqCst),
        }
        return Ok(());
    }
    transfer(peer, there, ptr::from_mut(word).cast(), 8, way)
}

/// The lock of a process's words that are not moved. The kernel drops it when its holder dies.
struct AtomicLock<'a> {
    file: &'a std::fs::File,
    _threads: parking_lot::MutexGuard<'static, ()>,
}

impl<'a> AtomicLock<'a> {
    fn take(peer: &'a Peer) -> Result<Self, Refused> {
        // One open file per process: among its threads the kernel's lock does not tell.
        static THREADS: Mutex<()> = Mutex::new(());
        let threads = THREADS.lock();
        let file = peer.lock_file();
        if lock(file, libc::F_WRLCK) {
            Ok(AtomicLock { file, _threads: threads })
        } else {
            Err(ibv_wc_status::IBV_WC_REM_OP_ERR)
        }
    }
}

impl Drop for AtomicLock<'_> {
    fn drop(&mut self) {
        lock(self.file, libc::F_UNLCK);
    }
}

fn lock(file: &std::fs::File, kind: libc::c_int) -> bool {
    // SAFETY: the struct is plain numbers; the call takes an open file.
    unsafe {
        let mut range: libc::flock = std::mem::zeroed();
        range.l_type = kind as libc::c_short;
        range.l_whence = libc::SEEK_SET as libc::c_short;
        range.l_len = 1;
        loop {
            if libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &range) == 0 {
                return true;
            }
            if *libc::__errno_location() != libc::EINTR {
                return false;
            }
        }
    }
}

/// The region that `key` names at the peer, if it grants `rights` to the range for the peer's QP.
pub(crate) fn checked(
    conn: &Connection,
    key: u32,
    addr: u64,
    len: u64,
    rights: u32,
) -> Result<&'static MrShared, Refused> {
    let qp = conn.remote;
    // Rights to write locally are the region's alone; remote ones need the QP's consent too.
    let remote = rights & !crate::mr::access::LOCAL_WRITE;
    if qp.access.load(Ordering::Relaxed) & remote != remote {
        return Err(ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    }
    check(&conn.peer.map, key, qp.pd.load(Ordering::Relaxed), addr, len, rights)
        .map_err(|_| ibv_wc_status::IBV_WC_REM_ACCESS_ERR)
}

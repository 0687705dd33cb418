// SPDX-License-Identifier: MIT
//! Protection domains and memory regions.
//!
//! A region's record stands in the segment, so that peers check a key themselves before they touch
//! a byte. Taking a region back is a store/load pair with them: {key = 0; wait until no peer
//! touches} against {say that one touches; look at the key}, see `access.rs`.

use crate::context::ours;
use crate::layout::{MrShared, MR_BLOCK, MR_BLOCKS};
use crate::moved::{Moved, Part, PAGE};
use crate::process::Process;
use crate::real::{fail, forward, refuse};
use crate::say::say_once;
use crate::segment::Map;
use libc::{c_int, c_uint, c_void, size_t};
use parking_lot::lock_api::RawMutex as _;
use parking_lot::{Mutex, RawMutex};
use rdma_sys::{ibv_context, ibv_mr, ibv_pd};
use std::ptr;
use std::sync::atomic::{fence, Ordering};

/// `ibv_access_flags` that matter here.
pub(crate) mod access {
    pub(crate) const LOCAL_WRITE: u32 = 1;
    pub(crate) const REMOTE_WRITE: u32 = 1 << 1;
    pub(crate) const REMOTE_READ: u32 = 1 << 2;
    pub(crate) const REMOTE_ATOMIC: u32 = 1 << 3;
    /// The rest of what this device takes: zero-based keys and the optional hints (relaxed
    /// ordering, huge pages), which change nothing here.
    pub(crate) const ZERO_BASED: u32 = 1 << 5;
    pub(crate) const HUGETLB: u32 = 1 << 7;
    pub(crate) const OPTIONAL: u32 = 0x3ff << 20;
    pub(crate) const KNOWN: u32 =
        LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | ZERO_BASED | HUGETLB | OPTIONAL;
}

/// Why a key does not give access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Denied;

/// The regions of this process.
pub(crate) struct MrTable {
    moving: bool,
    moved: Mutex<Moved>,
    /// Held from before a fork until after it.
    fork: RawMutex,
    /// Indices free again, and the first one never used.
    free: Mutex<(Vec<u32>, u32)>,
}

impl MrTable {
    pub(crate) fn new(moving: bool) -> Self {
        MrTable {
            moving,
            moved: Mutex::new(Moved::default()),
            fork: RawMutex::INIT,
            free: Mutex::new((Vec::new(), 1)),
        }
    }

    /// Keeps regions as they are until the fork is over.
    pub(crate) fn before_fork(&self) {
        self.fork.lock();
    }

    /// In the parent.
    pub(crate) fn after_fork(&self) {
        // SAFETY: locked by this thread in `before_fork`.
        unsafe { self.fork.unlock() };
    }

    /// In the child, whose writes must not reach the parent's pages.
    pub(crate) fn in_child(&self) {
        // Nobody holds it: whoever changes it holds `fork` too.
        if let Some(moved) = self.moved.try_lock() {
            moved.part_with_parent();
        }
        self.after_fork();
    }

    fn change<R>(&self, change: impl FnOnce(&mut Moved) -> R) -> R {
        self.fork.lock();
        let result = change(&mut self.moved.lock());
        // SAFETY: locked above.
        unsafe { self.fork.unlock() };
        result
    }

    fn take_record(&self, process: &Process) -> Option<(u32, &'static MrShared)> {
        let mut free = self.free.lock();
        let index = match free.0.pop() {
            Some(index) => index,
            None if free.1 < (MR_BLOCK * MR_BLOCKS) as u32 => {
                let place = &process.segment.map.head().mrs[free.1 as usize / MR_BLOCK];
                if place.load(Ordering::Relaxed) == 0 {
                    let block = process.segment.alloc(MR_BLOCK * size_of::<MrShared>());
                    place.store(block.inspect_err(out_of_space).ok()?, Ordering::Release);
                }
                free.1 += 1;
                free.1 - 1
            }
            None => return None,
        };
        record(&process.segment.map, index).map(|r| (index, r))
    }
}

/// Says once that the segment could not grow.
pub(crate) fn out_of_space(error: &std::io::Error) {
    if error.raw_os_error() == Some(libc::ENOSPC) {
        say_once!("the file system of the segments is full; objects cannot be made");
    } else {
        say_once!("the segment cannot grow: {error}");
    }
}

#[inline(always)]
fn record(map: &Map, index: u32) -> Option<&'static MrShared> {
    let block = map.head().mrs.get(index as usize / MR_BLOCK)?.load(Ordering::Acquire);
    map.slice::<MrShared>(block, MR_BLOCK)?.get(index as usize % MR_BLOCK)
}

/// The valid region that `key` names in the segment `map`.
#[inline(always)]
fn region(map: &Map, key: u32) -> Option<&'static MrShared> {
    let record = record(map, key >> 8)?;
    (key != 0 && record.key.load(Ordering::Acquire) == key).then_some(record)
}

/// Checks that `key` gives `rights` to all of `addr..addr + len` within `pd`.
#[inline]
pub(crate) fn check(
    map: &Map,
    key: u32,
    pd: u32,
    addr: u64,
    len: u64,
    rights: u32,
) -> Result<&'static MrShared, Denied> {
    let mr = region(map, key).ok_or(Denied)?;
    let offset = addr.wrapping_sub(mr.iova.load(Ordering::Relaxed));
    let size = mr.len.load(Ordering::Relaxed);
    let inside = offset <= size && len <= size - offset;
    let allowed = mr.access.load(Ordering::Relaxed) & rights == rights;
    if inside && allowed && mr.pd.load(Ordering::Relaxed) == pd {
        Ok(mr)
    } else {
        Err(Denied)
    }
}

/// Where `addr` of a checked region lies in its owner's memory.
#[inline(always)]
pub(crate) fn owner_address(mr: &MrShared, addr: u64) -> u64 {
    mr.addr.load(Ordering::Relaxed).wrapping_add(addr.wrapping_sub(mr.iova.load(Ordering::Relaxed)))
}

/// Registers memory for [`ibv_reg_mr`] and its kin. `iova` is the address by which keys name it.
///
/// # Safety
/// `pd` is a domain of this device.
unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, rights: u32) -> *mut ibv_mr {
    let Some(process) = Process::get() else { return fail(libc::EPERM) };
    let remote_change = access::REMOTE_WRITE | access::REMOTE_ATOMIC;
    if rights & !access::KNOWN != 0
        || (rights & remote_change != 0 && rights & access::LOCAL_WRITE == 0)
        || (addr as usize).checked_add(len).is_none()
    {
        return fail(libc::EINVAL);
    }
    let iova = if rights & access::ZERO_BASED != 0 { 0 } else { iova };
    if iova.checked_add(len as u64).is_none() {
        return fail(libc::EINVAL);
    }
    if let Err(error) = populate(addr as usize, len, rights & access::LOCAL_WRITE != 0) {
        return fail(error);
    }
    let Some((index, record)) = process.mrs.take_record(process) else { return fail(libc::ENOMEM) };
    let part = (process.mrs.moving && rights & access::LOCAL_WRITE != 0)
        .then(|| process.mrs.change(|moved| moved.take(|| process.segment.path("mem"), addr as usize, len)))
        .flatten()
        .unwrap_or(Part { addr: 0, len: 0, at: 0 });
    let key = index << 8 | (record.last_key.load(Ordering::Relaxed).wrapping_add(1) & 0xff);
    record.last_key.store(key, Ordering::Relaxed);
    record.access.store(rights, Ordering::Relaxed);
    // SAFETY: promised by the caller.
    record.pd.store(unsafe { (*pd).handle }, Ordering::Relaxed);
    record.iova.store(iova, Ordering::Relaxed);
    record.len.store(len as u64, Ordering::Relaxed);
    record.addr.store(addr as u64, Ordering::Relaxed);
    record.moved.store(part.addr as u64, Ordering::Relaxed);
    record.moved_len.store(part.len as u64, Ordering::Relaxed);
    record.moved_at.store(part.at, Ordering::Relaxed);
    record.key.store(key, Ordering::Release);
    Box::into_raw(Box::new(ibv_mr {
        // SAFETY: promised by the caller.
        context: unsafe { (*pd).context },
        pd,
        addr,
        length: len,
        handle: index,
        lkey: key,
        rkey: key,
    }))
}

/// Brings the pages in, as pinning would: memory that is not there is an error now, not later.
fn populate(addr: usize, len: usize, write: bool) -> Result<(), c_int> {
    const MADV_POPULATE_READ: c_int = 22;
    const MADV_POPULATE_WRITE: c_int = 23;
    if len == 0 {
        return Ok(());
    }
    let start = addr & !(PAGE - 1);
    let end = (addr + len).next_multiple_of(PAGE);
    let advice = if write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    // SAFETY: does not change the contents of any page.
    let rc = unsafe { libc::madvise(start as *mut c_void, end - start, advice) };
    // SAFETY: errno of this thread.
    match if rc == 0 { 0 } else { unsafe { *libc::__errno_location() } } {
        // A kernel before 5.14 does not know it: then a bad address is found when it is used.
        0 | libc::EINVAL => Ok(()),
        libc::ENOMEM if rc != 0 => Err(libc::EFAULT),
        error => Err(error),
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller hands a live context, as verbs demand; so it is in all exported functions.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_alloc_pd",
                c"IBVERBS_1.1",
                fn(*mut ibv_context) -> *mut ibv_pd,
                ptr::null_mut(),
                context
            );
        }
        let Some(process) = Process::get() else { return fail(libc::EPERM) };
        Box::into_raw(Box::new(ibv_pd { context, handle: process.serial() }))
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*pd).context) {
            return forward!(c"ibv_dealloc_pd", c"IBVERBS_1.1", fn(*mut ibv_pd) -> c_int, libc::ENOSYS, pd);
        }
        drop(Box::from_raw(pd));
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: size_t,
    rights: c_int,
) -> *mut ibv_mr {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*pd).context) {
            return forward!(
                c"ibv_reg_mr",
                c"IBVERBS_1.1",
                fn(*mut ibv_pd, *mut c_void, size_t, c_int) -> *mut ibv_mr,
                ptr::null_mut(),
                pd,
                addr,
                len,
                rights
            );
        }
        register(pd, addr, len, addr as u64, rights as u32)
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: size_t,
    iova: u64,
    rights: c_int,
) -> *mut ibv_mr {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*pd).context) {
            return forward!(
                c"ibv_reg_mr_iova",
                c"IBVERBS_1.7",
                fn(*mut ibv_pd, *mut c_void, size_t, u64, c_int) -> *mut ibv_mr,
                ptr::null_mut(),
                pd,
                addr,
                len,
                iova,
                rights
            );
        }
        register(pd, addr, len, iova, rights as u32)
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: size_t,
    iova: u64,
    rights: c_uint,
) -> *mut ibv_mr {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*pd).context) {
            return forward!(
                c"ibv_reg_mr_iova2",
                c"IBVERBS_1.8",
                fn(*mut ibv_pd, *mut c_void, size_t, u64, c_uint) -> *mut ibv_mr,
                ptr::null_mut(),
                pd,
                addr,
                len,
                iova,
                rights
            );
        }
        register(pd, addr, len, iova, rights)
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*mr).context) {
            return forward!(c"ibv_dereg_mr", c"IBVERBS_1.1", fn(*mut ibv_mr) -> c_int, libc::ENOSYS, mr);
        }
        let Some(process) = Process::get() else { return libc::EPERM };
        let index = (*mr).handle;
        let Some(record) = record(&process.segment.map, index) else { return libc::EINVAL };
        record.key.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        process.qps.each(|qp| qp.wait_until_untouched());
        let part = Part {
            addr: record.moved.load(Ordering::Relaxed) as usize,
            len: record.moved_len.load(Ordering::Relaxed) as usize,
            at: record.moved_at.load(Ordering::Relaxed),
        };
        if part.len > 0 {
            process.mrs.change(|moved| moved.give(part));
        }
        process.mrs.free.lock().0.push(index);
        drop(Box::from_raw(mr));
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: size_t,
    rights: c_int,
) -> c_int {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*mr).context) {
            return forward!(
                c"ibv_rereg_mr",
                c"IBVERBS_1.1",
                fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, size_t, c_int) -> c_int,
                libc::ENOSYS,
                mr,
                flags,
                pd,
                addr,
                len,
                rights
            );
        }
        // IBV_REREG_MR_ERR_CMD: refused, the region is as it was.
        refuse("ibv_rereg_mr");
        const REREG_ERR_INPUT: c_int = -1;
        REREG_ERR_INPUT
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: size_t,
    iova: u64,
    fd: c_int,
    rights: c_int,
) -> *mut ibv_mr {
    // SAFETY: see `ibv_alloc_pd`.
    unsafe {
        if !ours((*pd).context) {
            return forward!(
                c"ibv_reg_dmabuf_mr",
                c"IBVERBS_1.12",
                fn(*mut ibv_pd, u64, size_t, u64, c_int, c_int) -> *mut ibv_mr,
                ptr::null_mut(),
                pd,
                offset,
                len,
                iova,
                fd,
                rights
            );
        }
        fail(refuse("ibv_reg_dmabuf_mr"))
    }
}

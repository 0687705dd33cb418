// SPDX-License-Identifier: MIT
//! Completion channels: a FIFO each, with the 8-byte records that uverbs has.
//!
//! The application's descriptor only reads, as natively. Whoever fires an event, this process or a
//! peer, writes the CQ's address in this process to the FIFO, which wakes a reader, `poll` or
//! `epoll` through the kernel.

use crate::async_event::acknowledge;
use crate::context::ours;
use crate::cq::Cq;
use crate::peer::WriteRecord;
use crate::process::Process;
use crate::real::{fail, forward};
use libc::{c_int, c_uint, c_void};
use rdma_sys::{ibv_comp_channel, ibv_context, ibv_cq};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

/// A completion channel.
#[repr(C)]
pub(crate) struct Channel {
    ibv: ibv_comp_channel,
    /// Names the FIFO to peers.
    pub(crate) number: u32,
    /// Both ways, never blocking: writes own events, and keeps the FIFO open.
    fifo: File,
}

impl Channel {
    fn create(context: *mut ibv_context) -> io::Result<Channel> {
        let process = Process::get().ok_or_else(|| io::Error::from_raw_os_error(libc::EPERM))?;
        let number = process.serial();
        let path = process.segment.path(&format!("ch{number}"));
        make_fifo(&path)?;
        let fifo = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(&path)?;
        let reader = OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC).open(&path)?;
        let ibv = ibv_comp_channel { context, fd: reader.into_raw_fd(), refcnt: 0 };
        Ok(Channel { ibv, number, fifo })
    }

    /// Writes an event record; `false` if the FIFO is full.
    pub(crate) fn write_event(&self, cookie: u64) -> bool {
        !matches!(self.fifo.write_record(cookie), Err(e) if e.kind() == io::ErrorKind::WouldBlock)
    }

    /// Takes the unread records of one CQ out of the FIFO. Returns how many there were.
    pub(crate) fn forget(&self, cookie: u64) -> u32 {
        let (mut kept, mut dropped) = (Vec::new(), 0);
        let mut record = [0; 8];
        // A FIFO gives whole records, as it took them; new ones of other CQs may come meanwhile
        // and be moved behind: the order among CQs is no promise.
        while matches!((&self.fifo).read(&mut record), Ok(8)) {
            if u64::from_ne_bytes(record) == cookie {
                dropped += 1;
            } else {
                kept.push(u64::from_ne_bytes(record));
            }
        }
        for record in kept {
            self.write_event(record);
        }
        dropped
    }

    /// The descriptor whose room for writing the progress thread waits for.
    pub(crate) fn fifo(&self) -> c_int {
        self.fifo.as_raw_fd()
    }

    fn references(&self) -> &AtomicI32 {
        // SAFETY: an int of this object that only this device changes, always atomically.
        unsafe { AtomicI32::from_ptr((&raw const self.ibv.refcnt).cast_mut()) }
    }

    /// A CQ uses the channel from now on.
    pub(crate) fn hold(&self) {
        self.references().fetch_add(1, Ordering::AcqRel);
    }

    /// A CQ that used the channel is gone.
    pub(crate) fn release(&self) {
        self.references().fetch_sub(1, Ordering::AcqRel);
    }
}

/// Makes a FIFO for this user at `path`, in the place of a file left there.
pub(crate) fn make_fifo(path: &std::path::Path) -> io::Result<()> {
    let _ = std::fs::remove_file(path);
    let name = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a C string.
    if unsafe { libc::mkfifo(name.as_ptr(), 0o600) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[no_mangle]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: the caller hands a live context.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_create_comp_channel",
                c"IBVERBS_1.0",
                fn(*mut ibv_context) -> *mut ibv_comp_channel,
                ptr::null_mut(),
                context
            );
        }
    }
    match Channel::create(context) {
        Ok(channel) => Box::into_raw(Box::new(channel)).cast(),
        Err(e) => {
            crate::mr::out_of_space(&e);
            fail(e.raw_os_error().unwrap_or(libc::ENOMEM))
        }
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: the caller hands a live channel and does not use it after success.
    unsafe {
        if !ours((*channel).context) {
            return forward!(
                c"ibv_destroy_comp_channel",
                c"IBVERBS_1.0",
                fn(*mut ibv_comp_channel) -> c_int,
                libc::ENOSYS,
                channel
            );
        }
        let Some(process) = Process::get() else { return libc::EPERM };
        let channel = channel.cast::<Channel>();
        if (*channel).references().load(Ordering::Acquire) != 0 {
            return libc::EBUSY;
        }
        let _ = std::fs::remove_file(process.segment.path(&format!("ch{}", (*channel).number)));
        libc::close((*channel).ibv.fd);
        drop(Box::from_raw(channel));
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller hands a live channel and room for the results. A record names a live CQ:
    // `ibv_destroy_cq` takes those of a dying one out first.
    unsafe {
        if !ours((*channel).context) {
            return forward!(
                c"ibv_get_cq_event",
                c"IBVERBS_1.1",
                fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
                -1,
                channel,
                cq,
                cq_context
            );
        }
        let mut cookie = 0_u64;
        if libc::read((*channel).fd, (&raw mut cookie).cast(), 8) != 8 {
            return -1;
        }
        *cq = cookie as *mut ibv_cq;
        *cq_context = (*(cookie as *mut ibv_cq)).cq_context;
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    // SAFETY: the caller hands a live CQ.
    unsafe {
        if !ours((*cq).context) {
            forward!(c"ibv_ack_cq_events", c"IBVERBS_1.1", fn(*mut ibv_cq, c_uint) -> (), (), cq, count);
            return;
        }
        acknowledge(
            (&raw mut (*cq).mutex).cast(),
            (&raw mut (*cq).cond).cast(),
            &raw mut (*cq).comp_events_completed,
            count,
        );
    }
}

/// The channel behind a CQ's `channel` field.
///
/// # Safety
/// `channel` is null or a live channel of this device.
pub(crate) unsafe fn channel_of<'a>(channel: *mut ibv_comp_channel) -> Option<&'a Channel> {
    // SAFETY: promised by the caller.
    unsafe { channel.cast::<Channel>().as_ref() }
}

/// Events of `cq` that a reader has got, once nobody can fire any more: what was fired, less what
/// is still in the FIFO (taken out here) or was never written.
pub(crate) fn settle_events(cq: &Cq, channel: &Channel) -> u32 {
    let shared = cq.shared;
    let fired = shared.fired.load(Ordering::Acquire);
    fired.wrapping_sub(channel.forget(cq.cookie())).wrapping_sub(shared.unwritten.load(Ordering::Acquire))
}

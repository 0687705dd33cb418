// SPDX-License-Identifier: MIT
//! Asynchronous events of a context: `context->async_fd` is the reading end of a pipe, a record is
//! 16 bytes, and an object goes only when its events that were read are acknowledged.

use crate::context::{ours, Context};
use crate::cq::Cq;
use crate::qp::Qp;
use crate::real::forward;
use crate::say::say_once;
use libc::{c_int, c_void};
use rdma_sys::{ibv_async_event, ibv_context, ibv_event_type};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// The writing end of a context's events.
pub(crate) struct AsyncQueue {
    write: File,
    read: c_int,
}

/// One event as it stands in the pipe.
#[repr(C)]
#[derive(Clone, Copy)]
struct Record {
    element: u64,
    kind: u32,
    pad: u32,
}

/// What an event is about.
#[derive(Clone, Copy)]
pub(crate) enum Element<'a> {
    Qp(&'a Qp),
    Cq(&'a Cq),
}

impl AsyncQueue {
    /// A new queue, and the descriptor that becomes `async_fd`.
    pub(crate) fn new() -> io::Result<(AsyncQueue, c_int)> {
        let mut ends = [0; 2];
        // SAFETY: pipe2 fills the array; both ends are then owned here, the reading one by the
        // context, which closes it.
        unsafe {
            if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::fcntl(ends[1], libc::F_SETFL, libc::O_NONBLOCK);
            Ok((AsyncQueue { write: File::from_raw_fd(ends[1]), read: ends[0] }, ends[0]))
        }
    }

    /// Queues an event about `element`.
    pub(crate) fn raise(&self, kind: ibv_event_type, element: Element<'_>) {
        let (element, raised) = match element {
            Element::Qp(qp) => (std::ptr::from_ref(qp) as u64, &qp.async_raised),
            Element::Cq(cq) => (std::ptr::from_ref(cq) as u64, &cq.async_raised),
        };
        let record = Record { element, kind: kind as u32, pad: 0 };
        raised.fetch_add(1, Ordering::AcqRel);
        if (&self.write).write(as_bytes(&record)).is_err() {
            raised.fetch_sub(1, Ordering::AcqRel);
            say_once!("asynchronous events are not read; some are lost");
        }
    }

    /// Takes the unread events about the object at `element` out of the queue. Returns how many.
    pub(crate) fn forget(&self, element: u64) -> u32 {
        let mut kept = Vec::new();
        let mut dropped = 0;
        let mut pending: c_int = 0;
        // SAFETY: FIONREAD writes an int.
        unsafe { libc::ioctl(self.read, libc::FIONREAD, &raw mut pending) };
        for _ in 0..pending as usize / size_of::<Record>() {
            let mut record = Record { element: 0, kind: 0, pad: 0 };
            // Another reader may have been faster: look before each read, never block.
            let mut look = libc::pollfd { fd: self.read, events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd; then a read into a record of just that size.
            let got = unsafe {
                if libc::poll(&mut look, 1, 0) != 1 {
                    break;
                }
                libc::read(self.read, (&raw mut record).cast(), size_of::<Record>())
            };
            if got != size_of::<Record>() as isize {
                break;
            }
            if record.element == element {
                dropped += 1;
            } else {
                kept.push(record);
            }
        }
        for record in kept {
            let _ = (&self.write).write(as_bytes(&record));
        }
        dropped
    }
}

fn as_bytes(record: &Record) -> &[u8] {
    // SAFETY: a struct of integers without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(record).cast(), size_of::<Record>()) }
}

/// Waits until `completed`, guarded by the mutex and condition variable, has reached `reported`.
///
/// # Safety
/// All pointers belong to a live object of this device.
pub(crate) unsafe fn wait_acknowledged(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    completed: *const u32,
    reported: u32,
) {
    // SAFETY: promised by the caller; `completed` changes under the mutex only.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        // Not "less than": a program that acknowledges more than it got is let go.
        while (completed.read_volatile().wrapping_sub(reported) as i32) < 0 {
            libc::pthread_cond_wait(cond, mutex);
        }
        libc::pthread_mutex_unlock(mutex);
    }
}

/// Adds `n` to `completed` and wakes who waits for it.
///
/// # Safety
/// As for [`wait_acknowledged`].
pub(crate) unsafe fn acknowledge(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    completed: *mut u32,
    n: u32,
) {
    // SAFETY: promised by the caller.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        completed.write_volatile(completed.read_volatile().wrapping_add(n));
        libc::pthread_cond_signal(cond);
        libc::pthread_mutex_unlock(mutex);
    }
}

/// Takes back the events about `element` that nobody read and waits for the rest.
pub(crate) fn settle(queue: &AsyncQueue, element: u64, raised: &AtomicU32) -> u32 {
    raised.load(Ordering::Acquire).wrapping_sub(queue.forget(element))
}

#[no_mangle]
unsafe extern "C" fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    // SAFETY: the caller hands a live context and room for an event.
    unsafe {
        if !ours(context) {
            return forward!(
                c"ibv_get_async_event",
                c"IBVERBS_1.1",
                fn(*mut ibv_context, *mut ibv_async_event) -> c_int,
                -1,
                context,
                event
            );
        }
        let mut record = Record { element: 0, kind: 0, pad: 0 };
        let fd = Context::of(context).async_queue.read;
        if libc::read(fd, (&raw mut record).cast::<c_void>(), size_of::<Record>())
            != size_of::<Record>() as isize
        {
            return -1;
        }
        // Both members of the struct are plain numbers here; `kind` came from `raise`.
        (&raw mut (*event).element).cast::<u64>().write(record.element);
        (&raw mut (*event).event_type).cast::<u32>().write(record.kind);
        0
    }
}

#[no_mangle]
unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller hands an event that it got; its object lives until it is acknowledged.
    unsafe {
        let kind = (&raw const (*event).event_type).cast::<u32>().read();
        let element = (&raw const (*event).element).cast::<u64>().read();
        let about_qp = (ibv_event_type::IBV_EVENT_QP_FATAL as u32
            ..=ibv_event_type::IBV_EVENT_PATH_MIG_ERR as u32)
            .contains(&kind)
            || kind == ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED as u32;
        if about_qp && ours((*(element as *mut rdma_sys::ibv_qp)).context) {
            let qp = element as *mut rdma_sys::ibv_qp;
            acknowledge(
                (&raw mut (*qp).mutex).cast(),
                (&raw mut (*qp).cond).cast(),
                &raw mut (*qp).events_completed,
                1,
            );
            return;
        }
        if kind == ibv_event_type::IBV_EVENT_CQ_ERR as u32
            && ours((*(element as *mut rdma_sys::ibv_cq)).context)
        {
            let cq = element as *mut rdma_sys::ibv_cq;
            acknowledge(
                (&raw mut (*cq).mutex).cast(),
                (&raw mut (*cq).cond).cast(),
                &raw mut (*cq).async_events_completed,
                1,
            );
            return;
        }
        forward!(c"ibv_ack_async_event", c"IBVERBS_1.1", fn(*mut ibv_async_event) -> (), (), event);
    }
}

impl AsRawFd for AsyncQueue {
    fn as_raw_fd(&self) -> c_int {
        self.read
    }
}

// SPDX-License-Identifier: MIT
//! `libfastwake_softdev.so`: a verbs device in user space.
//!
//! Preloaded into a program, it adds the device `fw_soft0` to what libibverbs offers, so that
//! unmodified RDMA programs run between processes of one host that has no RDMA device: polling is
//! shared memory, event mode sleeps in the kernel and is woken by it. No NIC, PCIe or interrupt is
//! modelled. docs/SOFTDEV.md is for its users.
//!
//! How a message goes, with the file that does it:
//!
//! ```text
//! ibv_post_send ─► send ─► execute ─► connection ─► ring      (the peer's segment)
//!                             └─► access (READ, WRITE, atomics, placed SENDs)
//! ibv_poll_cq ◄─ cq ◄─ recv (payload into the receive's memory) ◄─ ring   (own segment)
//! ibv_get_cq_event ◄─ channel (a FIFO, written by whoever publishes to an armed CQ)
//! ```
//!
//! `layout` is what processes share, `segment` where it stands, `peer` a process that has one.
//! `qp` and `modify` are a QP's life, `progress` the thread that goes on when the application
//! sleeps. The library exports exactly what `exports.table` lists; it knows nothing of FastWake's
//! shim, which stands before it like before any other provider.

mod access;
mod async_event;
mod channel;
mod connection;
mod context;
mod cq;
mod doorbell;
mod execute;
mod layout;
mod lock;
mod modify;
mod moved;
mod mr;
mod peer;
mod process;
mod progress;
mod qp;
mod query;
mod real;
mod recv;
mod ring;
mod say;
mod segment;
mod send;
mod stream;
mod unsupported;

pub use doorbell::fw_soft_doorbell;

/// The version of this library, for `fastwaked --version`: a constant C string.
#[no_mangle]
pub extern "C" fn fastwake_softdev_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

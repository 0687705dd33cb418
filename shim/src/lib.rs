// SPDX-License-Identifier: MIT
//! `libfastwake_shim.so`: serves the completion channels of an unmodified program.
//!
//! | module | holds |
//! |---|---|
//! | [`hooks`] | what is exported in place of libibverbs and libc, one short function a name |
//! | [`ops`] | what replaces the operations of a verbs context, which inline calls go through |
//! | [`kick`] | the private CQ by which the kernel is made to report an event |
//! | [`signals`] | handlers that run where they natively would, never inside the polling loop |
//! | [`thread`] | what is known of the calling thread |
//! | [`real`] | the functions below ours |
//! | [`process`] | whether FastWake is at work in this process, and with which settings |
//!
//! Everything that decides anything lives in the crate `fastwake`. This library runs inside other
//! people's programs: it steps aside where it cannot work, it says so once, and it never panics.

mod hooks;
mod kick;
mod ops;
mod process;
mod real;
mod signals;
mod thread;

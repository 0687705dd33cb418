// SPDX-License-Identifier: MIT
//! The register half of the context switch: one file per instruction set, all with the same names.
//!
//! Only [`crate::context`] uses this. A file here says which registers a context keeps, in which
//! order they change hands, and at which instruction stack and TLS base disagree. It must never
//! know of lanes, waiters or completion queues.
//!
//! Exported by each file: `Registers`, `Entry`, `switch`, `switch_tls`, `switch_slow`, `mode`,
//! `decide`, `use_pkeys`, `use_fp_control`, `tls_base`, `pending_tls`, `shadow_stack` and the `MODE_*` bits.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("FastWake's context switch knows x86_64 only: add core/src/arch/<this one>.rs");

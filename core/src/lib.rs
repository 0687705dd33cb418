// SPDX-License-Identifier: MIT
//! FastWake's dispatcher: what the preload library, the runtime and the tools share.

mod arch;
pub mod context;
pub mod settings;
pub mod stack;

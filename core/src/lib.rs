// SPDX-License-Identifier: MIT
//! FastWake's dispatcher: what the preload library, the runtime and the tools share.

pub mod settings;

// SPDX-License-Identifier: MIT
//! FastWake's dispatcher: what the preload library, the runtime and the tools share.

mod arch;
pub mod arm;
pub mod clock;
pub mod context;
pub mod lock;
pub mod logger;
pub mod settings;
pub mod stack;
pub mod stash;
pub mod table;

// SPDX-License-Identifier: MIT
//! FastWake's dispatcher: what the preload library, the runtime and the tools share.

mod arch;
pub mod arm;
pub mod channel;
pub mod clock;
pub mod context;
pub mod counters;
pub mod cq;
pub mod idle;
pub mod kernel_event;
pub mod lane;
pub mod lock;
pub mod logger;
pub mod neighbours;
pub mod pool;
pub mod settings;
pub mod stack;
pub mod stash;
pub mod table;
pub mod wait;
pub mod waiter;
pub mod watchdog;

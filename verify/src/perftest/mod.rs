// SPDX-License-Identifier: MIT
//! Stock perftest: its command line, and what it prints.
//!
//! Used by `compare`, which puts commands together and reads what comes back, and by the agent,
//! which checks commands of others against the same table of options.

pub(crate) mod command;
pub(crate) mod options;
pub(crate) mod output;

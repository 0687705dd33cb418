// SPDX-License-Identifier: MIT
//! Runs pairs of processes, a server and a client, on this host or with the client on another one.
//!
//! `compare` sees the trait alone, so that its logic is tested with scripted outputs. Nothing here
//! reads what a program printed or decides whether a run was good.

pub(crate) mod agent;
pub(crate) mod pair;
pub(crate) mod process;
pub(crate) mod remote;
pub(crate) mod wire;

use crate::compare::cell::Cell;
use process::SideOutput;

/// What both sides of a run left behind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PairOutput {
    /// The server.
    pub server: SideOutput,
    /// The client, whose figures count.
    pub client: SideOutput,
}

/// Something that runs a cell of a comparison once.
pub(crate) trait Executor {
    /// Runs it. Whatever goes wrong is part of the output.
    fn run(&mut self, cell: Cell) -> PairOutput;

    /// Rate of the client's cycle counter, in cycles per microsecond.
    fn cycles_per_us(&self) -> f64;
}

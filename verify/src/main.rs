// SPDX-License-Identifier: MIT
//! `fastwaked`: runs, measures and explains FastWake.
fn main() {}

// SPDX-License-Identifier: MIT
//! Turns `hooks.table`, the one list of exported names, into the Rust table that look-ups use.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=hooks.table");
    let table = fs::read_to_string("hooks.table").expect("hooks.table");
    let mut rows = String::new();
    for line in table.lines() {
        let mut words = line.split('#').next().unwrap_or("").split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            rows.push_str(&format!("    (c\"{name}\", c\"{version}\"),\n"));
        }
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("OUT_DIR")).join("exports.rs");
    fs::write(out, format!("&[\n{rows}]\n")).expect("exports.rs");
}

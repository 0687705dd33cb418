// SPDX-License-Identifier: MIT
//! `libfastwake_shim.so`: the preload library.

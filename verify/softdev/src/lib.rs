// SPDX-License-Identifier: MIT
//! `libfastwake_softdev.so`: a verbs device in user space.

// SPDX-License-Identifier: MIT
//! Programs under the preload libraries as they are shipped: the shim may change nothing of them but
//! their speed. Needs what `make build` builds.

mod dual;
mod exports;
mod invisible;
mod preload;
mod stage;
mod stock;
mod torture;

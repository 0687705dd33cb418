// SPDX-License-Identifier: MIT
//! SIGINT, SIGTERM and SIGHUP while a comparison runs: it ends what it started, removes what it
//! has half written, and says so. A second signal ends it at once.
//!
//! Only `compare` watches; every other command ends by a signal as any program does.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Begins to watch.
///
/// # Errors
/// What sigaction(2) reports.
pub(crate) fn watch() -> io::Result<()> {
    let interrupted = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // In this order: the first signal finds the flag down, and raises it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(interrupted))?;
        flag::register(signal, Arc::clone(interrupted))?;
    }
    Ok(())
}

/// Whether a signal came since.
pub(crate) fn happened() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

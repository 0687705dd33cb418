// SPDX-License-Identifier: MIT
//! Whether FastWake is at work in this process, and with which settings.
//!
//! Next to nothing happens when the library is loaded: it also enters shells and taskset. The first call of
//! a verbs function reads the settings. From then on the process is active or off, and a forked
//! child is off whatever its parent was: one word in a page that the kernel wipes on fork tells.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use fastwake::channel::Channel;
use fastwake::counters::COUNTERS;
use fastwake::cq::Cq;
use fastwake::settings::{Mode, Serve, Settings};
use fastwake::wait::Policy;
use fastwake::{clock, idle, lane, lock, logger, settings, watchdog};
use once_cell::sync::OnceCell;

use crate::{signals, thread};

static NOT_ACTIVE: AtomicU32 = AtomicU32::new(0);
/// The word that says that this process is active; 0 in a child.
static ACTIVE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::from_ref(&NOT_ACTIVE).cast_mut());
static OFF: AtomicBool = AtomicBool::new(false);
static POLICY: OnceCell<Policy> = OnceCell::new();

/// Whether FastWake is at work in this process.
#[inline(always)]
pub(crate) fn active() -> bool {
    // SAFETY: points to a static or to a page that is never unmapped.
    unsafe { (*ACTIVE.load(Ordering::Relaxed)).load(Ordering::Relaxed) != 0 }
}

/// Whether it is settled that FastWake does nothing in this program.
pub(crate) fn off() -> bool {
    OFF.load(Ordering::Relaxed)
}

/// How waits are served.
#[inline]
pub(crate) fn policy() -> Policy {
    POLICY.get().copied().unwrap_or(Policy { serve: Serve::Never, idle: fastwake::settings::Idle::Auto })
}

/// Runs when the library is loaded, in every program: one system call, and nothing else.
#[used]
#[link_section = ".init_array"]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        logger::remember_stderr();
    }
    at_load
};

/// The program uses verbs: settles, once, whether FastWake is active. True where it is.
pub(crate) fn enter() -> bool {
    static ENTERED: OnceCell<()> = OnceCell::new();
    if !active() && !off() {
        ENTERED.get_or_init(start);
    }
    active()
}

#[cold]
fn start() {
    if settings::mode_is_off() {
        OFF.store(true, Ordering::Relaxed);
        return;
    }
    let settings = match Settings::from_env() {
        Ok(settings) => settings,
        Err(error) => {
            logger::line(format_args!("warning: {error}; the program runs without FastWake"));
            OFF.store(true, Ordering::Relaxed);
            return;
        }
    };
    if settings.mode == Mode::Off {
        OFF.store(true, Ordering::Relaxed);
        return;
    }
    logger::start(&settings, "fastwake: ");
    let Some(word) = word_wiped_on_fork() else {
        log::warn!(
            "no page that is wiped on fork can be had from this kernel; the program runs without FastWake"
        );
        OFF.store(true, Ordering::Relaxed);
        return;
    };
    clock::calibrate();
    lock::enable_barrier();
    lane::restrict(settings.cores.clone());
    if let Some(spin) = settings.spin {
        idle::set_spin(spin.as_nanos() as u64);
    }
    watchdog::configure(settings.watchdog, settings.flip);
    // Interrupt affinity leaves every wait to the kernel.
    let serve = if settings.mode == Mode::Affinity { Serve::Never } else { settings.serve };
    // The first and only start: nothing is there to be replaced.
    let _ = POLICY.set(Policy { serve, idle: settings.idle });
    thread::start();
    if settings.stats {
        // SAFETY: a function without arguments that stays loaded: a preload is never unloaded.
        unsafe { libc::atexit(write_stats) };
    }
    word.store(1, Ordering::Relaxed);
    ACTIVE.store(ptr::from_ref(word).cast_mut(), Ordering::Release);
    signals::wrap_installed();
    log::debug!("active: {settings:?}");
}

/// A word that reads 0 in every forked child.
fn word_wiped_on_fork() -> Option<&'static AtomicU32> {
    const PAGE: usize = 4096;
    // SAFETY: a new private mapping of our own, never unmapped; zeroed memory is a valid AtomicU32.
    unsafe {
        let page = libc::mmap(
            ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED || libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) != 0 {
            return None;
        }
        Some(&*page.cast())
    }
}

/// `FW_STATS=1`: one line at exit.
extern "C" fn write_stats() {
    if active() {
        Cq::fold_counters();
        Channel::fold_counters();
        logger::line(format_args!("stats pid={} {COUNTERS}", std::process::id()));
    }
}

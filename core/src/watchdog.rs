// SPDX-License-Identifier: MIT
//! The watchdog: finds requests that nobody watches.
//!
//! A request on a served channel is only noted, on the assumption that its thread comes back to
//! wait. Where the application waits in a way that we cannot see (raw epoll, io_uring, a forked
//! child, a descriptor passed elsewhere) nobody looks. One thread per process finds such requests
//! within about a millisecond and sends their channel back to kernel mode.
//!
//! It sleeps on a futex while nothing is noted anywhere. The pair that makes this safe: it sets
//! ASLEEP, has every thread of the process pass a full barrier, and looks at everything before it
//! sleeps; who notes a request looks at ASLEEP afterwards. The barrier is membarrier(2)'s, so that
//! noting costs no locked instruction; where the kernel has none, noting takes a fence.

use std::ptr;
use std::sync::atomic::{compiler_fence, fence, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::channel::{Channel, Watch};
use crate::clock;
use crate::idle;
use crate::lane;
use crate::lock::{barrier, has_barrier};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// A second look at a channel that seemed deserted comes after this.
const SECOND_LOOK: Duration = Duration::from_micros(200);
/// The period where every allowed core polls, so that a tick disturbs one of them.
const CROWDED: Duration = Duration::from_millis(10);
/// Exchanges by which the cost of a wake-up is measured.
const ROUNDS: u32 = 32;

static STATE: AtomicU32 = AtomicU32::new(AWAKE);
static PERIOD_NS: AtomicU64 = AtomicU64::new(1_000_000);
static FLIP_NS: AtomicU64 = AtomicU64::new(0);

/// Sets the period, and how often every channel is forced back to kernel mode (tests only).
pub fn configure(period: Duration, flip: Option<Duration>) {
    PERIOD_NS.store(period.as_nanos() as u64, Ordering::Relaxed);
    FLIP_NS.store(flip.map_or(0, |flip| flip.as_nanos() as u64), Ordering::Relaxed);
}

/// A request was noted: wakes the watchdog if it sleeps.
#[inline(always)]
pub(crate) fn noted() {
    if has_barrier() {
        // The barrier that pairs with this one is membarrier's, in `sleep`.
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
    if STATE.load(Ordering::Relaxed) == ASLEEP {
        wake();
    }
}

#[cold]
fn wake() {
    if STATE.swap(AWAKE, Ordering::SeqCst) == ASLEEP {
        futex(&STATE, libc::FUTEX_WAKE, 1, None);
    }
}

/// Starts the watchdog, once. False where it could not be started: nothing may be served then.
pub fn start() -> bool {
    static STARTED: once_cell::sync::OnceCell<bool> = once_cell::sync::OnceCell::new();
    *STARTED.get_or_init(|| {
        let started = spawn();
        if !started {
            log::warn!("the watchdog thread could not be started; waits stay with the kernel");
        }
        started
    })
}

fn spawn() -> bool {
    clock::calibrate();
    idle::set_wake_cost(idle::WAKE);
    // The thread must take no signal of the application's. glibc keeps the two that it needs itself
    // (cancellation, setuid) out of every mask.
    // SAFETY: the sets are ours; a thread inherits the mask, which is put back.
    unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let started = std::thread::Builder::new().name("fastwake".into()).stack_size(256 * 1024).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, ptr::null_mut());
        if started.is_err() {
            return false;
        }
    }
    measure_wake(&PING, &PONG);
    true
}

static PING: AtomicU32 = AtomicU32::new(0);
static PONG: AtomicU32 = AtomicU32::new(0);

/// Exchanges words with the new thread through the kernel, and takes the median of one way as what
/// a wake-up costs. Bounded: a thread that does not answer leaves the default in force.
fn measure_wake(ping: &AtomicU32, pong: &AtomicU32) {
    let mut took = Vec::with_capacity(ROUNDS as usize);
    for round in 1..=ROUNDS {
        let start = clock::now();
        ping.store(round, Ordering::SeqCst);
        futex(ping, libc::FUTEX_WAKE, 1, None);
        let deadline = start + clock::ticks(20_000_000);
        while pong.load(Ordering::SeqCst) != round {
            if clock::now() > deadline {
                ping.store(u32::MAX, Ordering::SeqCst);
                futex(ping, libc::FUTEX_WAKE, 1, None);
                return;
            }
            futex(pong, libc::FUTEX_WAIT, round - 1, Some(Duration::from_millis(1)));
        }
        took.push(clock::nanos(clock::now() - start) / 2);
    }
    took.sort_unstable();
    idle::set_wake_cost(took[took.len() / 2]);
}

fn answer(ping: &AtomicU32, pong: &AtomicU32) {
    for round in 1..=ROUNDS {
        while ping.load(Ordering::SeqCst) < round {
            futex(ping, libc::FUTEX_WAIT, round - 1, Some(Duration::from_millis(100)));
        }
        pong.store(round, Ordering::SeqCst);
        futex(pong, libc::FUTEX_WAKE, 1, None);
    }
}

fn run() {
    answer(&PING, &PONG);
    let mut flip_at = clock::now();
    let mut deserted = false;
    loop {
        let flip = clock::ticks(FLIP_NS.load(Ordering::Relaxed));
        if flip != 0 && clock::now() >= flip_at {
            flip_at = clock::now() + flip;
            Channel::each(Channel::to_kernel);
        }
        match look(deserted) {
            Watch::Quiet if flip == 0 => sleep(),
            watch => {
                deserted = watch == Watch::Deserted;
                nap(if deserted { SECOND_LOOK } else { period(flip) });
                continue;
            }
        }
        deserted = false;
    }
}

/// Looks at every channel; what was found of the one that needs most.
fn look(act: bool) -> Watch {
    let mut found = Watch::Quiet;
    Channel::each(|channel| match channel.watch(act) {
        Watch::Deserted => found = Watch::Deserted,
        Watch::Busy if found == Watch::Quiet => found = Watch::Busy,
        _ => {}
    });
    found
}

fn period(flip: u64) -> Duration {
    let period = Duration::from_nanos(PERIOD_NS.load(Ordering::Relaxed));
    if flip != 0 {
        period.min(Duration::from_nanos(clock::nanos(flip)))
    } else if lane::all_polling() {
        period.max(CROWDED)
    } else {
        period
    }
}

/// Sleeps until something is noted, unless something is by now.
fn sleep() {
    STATE.store(ASLEEP, Ordering::SeqCst);
    if has_barrier() {
        barrier();
    }
    fence(Ordering::SeqCst);
    let mut needed = false;
    Channel::each(|channel| needed |= channel.needs_watching());
    if needed {
        STATE.store(AWAKE, Ordering::SeqCst);
        return;
    }
    while STATE.load(Ordering::SeqCst) == ASLEEP {
        futex(&STATE, libc::FUTEX_WAIT, ASLEEP, None);
    }
}

fn nap(time: Duration) {
    let time = timespec(time);
    // SAFETY: a timespec to read and none to write. Raw, past the application's interposers.
    unsafe { libc::syscall(libc::SYS_nanosleep, &time, ptr::null_mut::<libc::timespec>()) };
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

fn futex(word: &AtomicU32, operation: i32, value: u32, time: Option<Duration>) {
    let time = time.map(timespec);
    // SAFETY: the word outlives the call; the kernel only reads it. Private: no other process.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation | libc::FUTEX_PRIVATE_FLAG,
            value,
            time.as_ref().map_or(ptr::null(), ptr::from_ref),
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_wake_up_is_measured_between_two_threads() {
        static PING: AtomicU32 = AtomicU32::new(0);
        static PONG: AtomicU32 = AtomicU32::new(0);
        clock::calibrate();
        let partner = std::thread::spawn(|| answer(&PING, &PONG));
        measure_wake(&PING, &PONG);
        partner.join().unwrap();
        assert!((6_000..=300_000).contains(&idle::bound()));
        assert!(PING.load(Ordering::Relaxed) >= ROUNDS);
    }
}

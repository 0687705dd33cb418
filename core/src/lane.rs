// SPDX-License-Identifier: MIT
//! Lanes: how many waiters may poll at once on a set of cores.
//!
//! Threads with the same CPU mask share as many seats as the mask, cut by `FW_CORES`, has CPUs. A
//! waiter polls only in a seat; who finds none takes the kernel's way for that wait, so that cores
//! never hold more pollers than they are.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use once_cell::sync::OnceCell;
use parking_lot::RwLock;

/// Waits after which a thread asks for its CPU mask again: it may be changed from outside.
const MASK_EVERY: u32 = 512;

/// A set of CPUs, one bit each.
pub type Mask = [u64; libc::CPU_SETSIZE as usize / 64];

struct Lane {
    mask: Mask,
    /// One word per CPU of the lane: taken or not.
    seats: Box<[AtomicBool]>,
}

static CORES: OnceCell<Option<Vec<usize>>> = OnceCell::new();
static LANES: RwLock<Vec<&'static Lane>> = RwLock::new(Vec::new());

/// Restricts polling to `cores` (`FW_CORES`); before the first wait.
pub fn restrict(cores: Option<Vec<usize>>) {
    // Settings are read once; a second call would say the same.
    let _ = CORES.set(cores);
}

/// Where a thread sat last, so that it usually finds its seat at once.
pub struct SeatHint {
    lane: Cell<Option<&'static Lane>>,
    seat: Cell<Option<&'static AtomicBool>>,
    /// Waits until the CPU mask is asked for again.
    left: Cell<u32>,
}

impl SeatHint {
    /// Nowhere yet.
    pub const fn new() -> Self {
        SeatHint { lane: Cell::new(None), seat: Cell::new(None), left: Cell::new(0) }
    }

    /// Takes a seat on the lane of the calling thread; `None` where all are taken or none is allowed.
    #[inline]
    pub(crate) fn take(&self) -> Option<Seat> {
        let left = self.left.get();
        if let (Some(seat), true) = (self.seat.get(), left > 0) {
            self.left.set(left - 1);
            if sit(seat) {
                return Some(Seat { seat });
            }
        }
        self.find()
    }

    #[cold]
    fn find(&self) -> Option<Seat> {
        let lane = match self.lane.get() {
            Some(lane) if self.left.get() > 0 => lane,
            _ => {
                let lane = lane_of(&thread_mask());
                self.lane.set(Some(lane));
                self.left.set(MASK_EVERY);
                lane
            }
        };
        let seat = lane.seats.iter().find(|seat| sit(seat))?;
        self.seat.set(Some(seat));
        Some(Seat { seat })
    }
}

impl Default for SeatHint {
    fn default() -> Self {
        Self::new()
    }
}

/// Takes a seat, if it is free.
#[inline]
fn sit(seat: &AtomicBool) -> bool {
    // Acquire and the Release in `leave`: whoever sits down sees what the last one did.
    !seat.load(Ordering::Relaxed)
        && seat.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// The right to poll.
pub(crate) struct Seat {
    seat: &'static AtomicBool,
}

impl Seat {
    /// Gives the seat up.
    #[inline]
    pub(crate) fn leave(self) {
        self.seat.store(false, Ordering::Release);
    }
}

/// Whether every CPU that this process polls on has a waiter that polls now.
pub fn all_polling() -> bool {
    let allowed = cpus(&thread_mask());
    let taken: usize = LANES
        .read()
        .iter()
        .map(|lane| lane.seats.iter().filter(|seat| seat.load(Ordering::Relaxed)).count())
        .sum();
    taken >= allowed
}

fn cpus(mask: &Mask) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// The lane of the threads whose mask is `mask`.
fn lane_of(mask: &Mask) -> &'static Lane {
    if let Some(lane) = LANES.read().iter().find(|lane| lane.mask == *mask) {
        return lane;
    }
    let mut lanes = LANES.write();
    if let Some(lane) = lanes.iter().find(|lane| lane.mask == *mask) {
        return lane;
    }
    let mut cut = *mask;
    if let Some(Some(cores)) = CORES.get() {
        let allowed = cores.iter().fold([0; 16], |mut set: Mask, &cpu| {
            set[cpu / 64] |= 1 << (cpu % 64);
            set
        });
        cut.iter_mut().zip(allowed).for_each(|(word, allowed)| *word &= allowed);
    }
    let seats = (0..cpus(&cut)).map(|_| AtomicBool::new(false)).collect();
    let lane = Box::leak(Box::new(Lane { mask: *mask, seats }));
    lanes.push(lane);
    lane
}

/// The CPU mask of the calling thread; all CPUs where it cannot be had.
pub fn thread_mask() -> Mask {
    let mut mask: Mask = [0; 16];
    // SAFETY: the kernel writes at most the size given.
    let rc = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of::<Mask>(), mask.as_mut_ptr()) };
    if rc < 0 {
        mask = [u64::MAX; 16];
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_has_as_many_seats_as_its_mask_has_cpus() {
        let (one, two) = (SeatHint::new(), SeatHint::new());
        let mut mask: Mask = [0; 16];
        mask[3] = 0b101;
        for hint in [&one, &two] {
            hint.lane.set(Some(lane_of(&mask)));
            hint.left.set(9);
        }
        let (a, b) = (one.take().unwrap(), two.take().unwrap());
        assert!(one.take().is_none());
        b.leave();
        let c = one.take().unwrap();
        assert!(two.take().is_none());
        a.leave();
        c.leave();
        assert!(two.take().is_some());
    }

    #[test]
    fn equal_masks_share_a_lane() {
        let mut mask: Mask = [0; 16];
        mask[7] = 1;
        assert!(std::ptr::eq(lane_of(&mask), lane_of(&mask)));
    }
}

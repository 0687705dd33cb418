// SPDX-License-Identifier: MIT
//! The ring of a completion queue: many producers in many processes, one consumer.
//!
//! Peers push receive completions, the owner pushes those of receives that are flushed, and consumes
//! under the CQ's lock. (Send completions have a ring of the same kind in the owner's own memory.) Nobody ever waits for anybody here. A position is a count that never wraps; its slot
//! is `position % len`, its turn `position / len`. Who writes what:
//!
//! - A producer claims a position by compare-exchange on its *claim* (turn and segment), if it is
//!   less than a ring ahead of what was consumed.
//! - It then writes the *entry* and, last, the entry's word: READY(turn), or VOID(turn) for an entry
//!   that is to be skipped. If it died in between, the owner writes VOID.
//! - The consumer takes entries in order and publishes how many it has *consumed*.
//!
//! These are three lines, because of what a message costs. The consumer spins on the entry: were
//! the claim there, it would pull the line away just before the payload is written. Were the entry
//! freed by a mark in it, the consumer would have to wait for its line on the way to the answer.
//! As it is, claims stay in the cache of the only producer, the count in that of the consumer, and
//! a message moves one line once.
//!
//! The shared tail is a hint. Positions are claimed without holes because a producer starts at a
//! position that is known to be at most the tail and goes on by one only past a slot that it has
//! seen claimed.
//!
//! The compare-exchange that claims is also the first half of a store/load pair: {claim; look at
//! the QP's state} against {change the state; look for claims}, see `Qp::wait_until_untouched`.
//! Publishing, a store and a full barrier, is the first half of {publish; look at the arm} against
//! {arm; look at the ring}.

use crate::layout::{CqShared, Cqe, UNIT};
use crate::lock::full_fence;
use crate::segment::Map;
use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU64, Ordering};

// 0, the word of zeroed memory, is none of them in any turn.
const READY: u64 = 1;
const VOID: u64 = 2;

const fn word(turn: u32, state: u64) -> u64 {
    (turn as u64) << 32 | state
}

/// The claim of `segment` in `turn`. 0 is that of no turn: one more than the turn is stored.
const fn claim_word(turn: u32, segment: u32) -> u64 {
    (turn.wrapping_add(1) as u64) << 32 | segment as u64
}

const fn turn_of(word: u64) -> u32 {
    (word >> 32) as u32
}

/// A full barrier after a locked instruction. On x86 the instruction is one itself.
#[inline(always)]
pub(crate) fn fence_after_locked() {
    if !cfg!(target_arch = "x86_64") {
        fence(Ordering::SeqCst);
    }
}

/// A CQ's ring as one process has it mapped.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    head: &'static CqShared,
    entries: &'static [Cqe],
    claims: &'static [AtomicU64],
    shift: u32,
}

/// The ring has no free entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// A producer's own idea of a ring, kept from claim to claim. Both are at most what is true.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    pub(crate) tail: u64,
    pub(crate) consumed: u64,
}

/// An entry that this process claimed and must publish or void.
pub(crate) struct Claim {
    pub(crate) entry: &'static Cqe,
    turn: u32,
}

/// What a consumer finds at a position.
pub(crate) enum Next {
    /// A completion.
    Ready(&'static Cqe),
    /// An entry to be skipped.
    Void,
    /// Nothing yet.
    Empty,
}

/// One slot, seen in one turn.
struct Slot {
    entry: &'static Cqe,
    claim: &'static AtomicU64,
    turn: u32,
}

impl Slot {
    /// Claimed in this turn by `segment`, and not yet published.
    fn is_being_written_by(&self, segment: u32) -> bool {
        self.claim.load(Ordering::SeqCst) == claim_word(self.turn, segment)
            && !matches!(self.entry.word.load(Ordering::SeqCst), now if now == word(self.turn, READY) || now == word(self.turn, VOID))
    }
}

impl Ring {
    /// Bytes of a CQ of `len` entries: head, entries, claims.
    pub(crate) fn bytes(len: usize) -> usize {
        size_of::<CqShared>() + len * (size_of::<Cqe>() + size_of::<AtomicU64>())
    }

    /// The ring at `place` of a mapped segment, of as many entries as its head says, and that head;
    /// `None` where that does not lie inside the segment.
    pub(crate) fn at(map: &Map, place: u32) -> Option<(&'static CqShared, Ring)> {
        let head = map.at::<CqShared>(place)?;
        let len = head.len.load(Ordering::Relaxed) as usize;
        let first = place + (size_of::<CqShared>() / UNIT) as u32;
        let entries = map.slice::<Cqe>(first, len)?;
        let claims = map.slice::<AtomicU64>(first + (len * size_of::<Cqe>() / UNIT) as u32, len)?;
        Some((head, Ring::new(head, entries, claims)?))
    }

    /// A ring of `len` entries in memory of this process alone; `None` where there is none. Memory
    /// that no entry was ever in costs nothing.
    pub(crate) fn private(len: usize) -> Option<Ring> {
        let layout = Self::layout(len)?;
        // SAFETY: of a size that is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // SAFETY: zeroed memory of the size and alignment of a head, `len` entries and `len` claims,
        // for all of which zeroes are a value; it lives until `free_private`.
        unsafe {
            let entries = base.add(size_of::<CqShared>()).cast::<Cqe>();
            let claims = entries.add(len).cast::<AtomicU64>();
            Ring::new(
                base.cast::<CqShared>().as_ref(),
                std::slice::from_raw_parts(entries.as_ptr(), len),
                std::slice::from_raw_parts(claims.as_ptr(), len),
            )
        }
    }

    /// Frees what [`Ring::private`] made.
    ///
    /// # Safety
    /// It came from there, and nobody uses it or a copy of it any more.
    pub(crate) unsafe fn free_private(self) {
        if let Some(layout) = Self::layout(self.entries.len()) {
            // SAFETY: the allocation began with the head.
            unsafe { dealloc(std::ptr::from_ref(self.head).cast_mut().cast(), layout) };
        }
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(Self::bytes(len), UNIT).ok()
    }

    fn new(head: &'static CqShared, entries: &'static [Cqe], claims: &'static [AtomicU64]) -> Option<Ring> {
        let shift = entries.len().trailing_zeros();
        (entries.len().is_power_of_two() && claims.len() == entries.len()).then_some(Ring {
            head,
            entries,
            claims,
            shift,
        })
    }

    #[inline(always)]
    fn slot(&self, position: u64) -> Slot {
        let index = position as usize & (self.entries.len() - 1);
        Slot {
            entry: &self.entries[index],
            claim: &self.claims[index],
            turn: (position >> self.shift) as u32,
        }
    }

    /// All slots, from the consumer's on.
    fn slots(&self) -> impl Iterator<Item = (u64, Slot)> + '_ {
        let head = self.consumed();
        (head..head + self.entries.len() as u64).map(|position| (position, self.slot(position)))
    }

    /// Where a producer that knows nothing begins.
    pub(crate) fn cursor(&self) -> Cursor {
        Cursor { tail: self.start(), consumed: self.consumed() }
    }

    fn start(&self) -> u64 {
        self.head.tail.0.load(Ordering::Acquire)
    }

    /// Claims the entry at the tail for `segment`.
    #[inline]
    pub(crate) fn claim(&self, cursor: &mut Cursor, segment: u32) -> Result<Claim, Full> {
        let mut walked = 0_u32;
        loop {
            let Slot { entry, claim, turn } = self.slot(cursor.tail);
            let before = claim.load(Ordering::Acquire);
            if (turn_of(before).wrapping_sub(turn) as i32) <= 0 {
                // Not claimed in this turn: it is the tail.
                let len = self.entries.len() as u64;
                if cursor.tail.wrapping_sub(cursor.consumed) >= len {
                    // Acquire: the consumer has copied the payload out.
                    cursor.consumed = self.consumed();
                    if cursor.tail.saturating_sub(cursor.consumed) >= len {
                        return Err(Full);
                    }
                }
                let mine = claim_word(turn, segment);
                if claim.compare_exchange(before, mine, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                    continue;
                }
                fence_after_locked();
                cursor.tail += 1;
                // Written rarely, so that its line does not bounce; often enough that a newcomer
                // walks a few entries only.
                if walked > 4 || cursor.tail & 7 == 0 {
                    self.head.tail.0.fetch_max(cursor.tail, Ordering::AcqRel);
                }
                return Ok(Claim { entry, turn });
            }
            walked += 1;
            cursor.tail = (cursor.tail + 1).max(if walked == 1 { self.start() } else { 0 });
        }
    }

    /// Entries ever consumed: the position of the next one.
    #[inline(always)]
    pub(crate) fn consumed(&self) -> u64 {
        self.head.consumed.0.load(Ordering::Acquire)
    }

    /// The consumer has consumed all entries before `position`: producers may use them again.
    #[inline(always)]
    pub(crate) fn release(&self, position: u64) {
        // Release: the payloads were copied out before.
        self.head.consumed.0.store(position, Ordering::Release);
    }

    /// The consumer leaves the ring for good: gives everything back but an entry that is claimed
    /// just now, and what follows it. Whoever uses the memory next goes on there.
    pub(crate) fn stop(&self) {
        let mut position = self.consumed();
        while !matches!(self.next(position), Next::Empty) {
            position += 1;
        }
        self.release(position);
    }

    /// What stands at `position`; the consumer's own count.
    #[inline(always)]
    pub(crate) fn next(&self, position: u64) -> Next {
        let Slot { entry, turn, .. } = self.slot(position);
        // Acquire: pairs with the publishing store.
        let now = entry.word.load(Ordering::Acquire);
        if now == word(turn, READY) {
            Next::Ready(entry)
        } else if now == word(turn, VOID) {
            Next::Void
        } else {
            Next::Empty
        }
    }

    /// The completions that were not consumed, with their positions, until the first slot that is not
    /// claimed. Under the consumer's lock.
    pub(crate) fn published(&self) -> impl Iterator<Item = (u64, &'static Cqe)> + '_ {
        self.slots()
            .take_while(|(_, slot)| turn_of(slot.claim.load(Ordering::Acquire)) == slot.turn.wrapping_add(1))
            .filter(|(_, slot)| slot.entry.word.load(Ordering::Acquire) == word(slot.turn, READY))
            .map(|(position, slot)| (position, slot.entry))
    }

    /// Turns the completion at `position` into nothing. For the consumer, under its lock.
    pub(crate) fn void(&self, position: u64) {
        let Slot { entry, turn, .. } = self.slot(position);
        entry.word.store(word(turn, VOID), Ordering::Release);
    }

    /// Whether `segment` is just writing an entry.
    pub(crate) fn claimed_by(&self, segment: u32) -> bool {
        self.slots().any(|(_, slot)| slot.is_being_written_by(segment))
    }

    /// Voids what `segment`, which is dead, was writing. Returns how many entries.
    pub(crate) fn void_claims_of(&self, segment: u32) -> usize {
        self.slots()
            .filter(|(_, slot)| slot.is_being_written_by(segment))
            .map(|(position, _)| self.void(position))
            .count()
    }
}

impl Claim {
    /// Makes the entry visible. A full barrier.
    #[inline(always)]
    pub(crate) fn publish(self) {
        // The stores to the entry's line leave together; a locked instruction on it would give the
        // spinning consumer time to take the line away in between.
        self.entry.word.store(word(self.turn, READY), Ordering::Release);
        full_fence();
    }

    /// Gives the entry up; the consumer skips it.
    pub(crate) fn void(self) {
        self.entry.word.store(word(self.turn, VOID), Ordering::Release);
        full_fence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Zeroed memory is a valid empty ring.
    fn ring(len: usize) -> Ring {
        let head: &'static CqShared = {
            // SAFETY: CqShared consists of atomics, for which all zeroes is a value.
            Box::leak(Box::new(unsafe { std::mem::zeroed() }))
        };
        // SAFETY: as above, for Cqe.
        let entries: Vec<Cqe> = (0..len).map(|_| unsafe { std::mem::zeroed() }).collect();
        let claims: Vec<AtomicU64> = (0..len).map(|_| AtomicU64::new(0)).collect();
        Ring::new(head, Box::leak(entries.into_boxed_slice()), Box::leak(claims.into_boxed_slice()))
            .expect("power of two")
    }

    fn push(ring: &Ring, hint: &mut Cursor, segment: u32, value: u32) -> Result<(), Full> {
        let claim = ring.claim(hint, segment)?;
        claim.entry.len.store(value, Ordering::Relaxed);
        claim.publish();
        Ok(())
    }

    fn pop(ring: &Ring) -> Option<u32> {
        loop {
            match ring.next(ring.consumed()) {
                Next::Ready(entry) => {
                    let value = entry.len.load(Ordering::Relaxed);
                    ring.release(ring.consumed() + 1);
                    return Some(value);
                }
                Next::Void => ring.release(ring.consumed() + 1),
                Next::Empty => return None,
            }
        }
    }

    #[test]
    fn completions_come_out_in_order_over_many_turns() {
        let ring = ring(4);
        let mut hint = ring.cursor();
        for round in 0..100 {
            for i in 0..3 {
                assert_eq!(push(&ring, &mut hint, 1, round * 3 + i), Ok(()));
            }
            for i in 0..3 {
                assert_eq!(pop(&ring), Some(round * 3 + i));
            }
            assert_eq!(pop(&ring), None);
        }
    }

    #[test]
    fn a_full_ring_refuses_and_loses_nothing() {
        let ring = ring(2);
        let mut hint = ring.cursor();
        assert_eq!(push(&ring, &mut hint, 1, 10), Ok(()));
        assert_eq!(push(&ring, &mut hint, 1, 11), Ok(()));
        assert_eq!(push(&ring, &mut hint, 1, 12), Err(Full));
        assert_eq!(pop(&ring), Some(10));
        assert_eq!(push(&ring, &mut hint, 1, 12), Ok(()));
        assert_eq!(pop(&ring), Some(11));
        assert_eq!(pop(&ring), Some(12));
    }

    #[test]
    fn a_producer_with_an_old_hint_finds_the_tail() {
        let ring = ring(8);
        let (mut old, mut hint) = (ring.cursor(), ring.cursor());
        for value in 0..50 {
            assert_eq!(push(&ring, &mut hint, 1, value), Ok(()));
            assert_eq!(pop(&ring), Some(value));
        }
        assert_eq!(push(&ring, &mut old, 2, 50), Ok(()));
        assert_eq!(old.tail, 51);
        assert_eq!(pop(&ring), Some(50));
    }

    #[test]
    fn the_claim_of_a_dead_producer_is_voided_and_passed() {
        let ring = ring(4);
        let mut hint = ring.cursor();
        let _lost = ring.claim(&mut hint, 7).expect("room");
        assert_eq!(push(&ring, &mut hint, 1, 5), Ok(()));
        assert_eq!(pop(&ring), None);
        assert!(ring.claimed_by(7));
        assert_eq!(ring.void_claims_of(7), 1);
        assert_eq!(pop(&ring), Some(5));
        assert_eq!(pop(&ring), None);
        assert_eq!(push(&ring, &mut hint, 1, 6), Ok(()));
        assert_eq!(pop(&ring), Some(6));
    }

    #[test]
    fn four_producers_lose_and_double_nothing() {
        const EACH: u32 = 20_000;
        let ring = ring(16);
        let full = &AtomicU32::new(0);
        std::thread::scope(|scope| {
            for producer in 0..4_u32 {
                scope.spawn(move || {
                    let mut hint = ring.cursor();
                    for i in 0..EACH {
                        while push(&ring, &mut hint, producer + 1, producer << 24 | i).is_err() {
                            full.fetch_add(1, Ordering::Relaxed);
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut want, mut got) = ([0_u32; 4], 0);
            while got < 4 * EACH {
                let Some(value) = pop(&ring) else {
                    std::thread::yield_now();
                    continue;
                };
                let from = (value >> 24) as usize;
                assert_eq!(value & 0xff_ffff, want[from], "producer {from} out of order");
                want[from] += 1;
                got += 1;
            }
            assert_eq!(pop(&ring), None);
        });
    }
}

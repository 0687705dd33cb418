// SPDX-License-Identifier: MIT
//! The ring of a completion queue: many producers in many processes, one consumer.
//!
//! Peers push receive completions, the owner pushes send completions, the owner consumes under the
//! CQ's lock. Nobody ever waits for anybody here. Each entry's own word says where it stands:
//!
//! | word | meaning | who leaves it, how |
//! |---|---|---|
//! | FREE(turn) | nothing there | a producer, by compare-exchange to CLAIMED |
//! | CLAIMED(turn, segment) | being written | that producer, to READY or VOID; if it died, the owner, to VOID |
//! | READY(turn) | a completion | the consumer, to FREE(turn + 1) |
//! | VOID(turn) | nothing to see | the consumer, to FREE(turn + 1) |
//!
//! A position is a count that never wraps; its slot is `position % len`, its turn `position / len`.
//! The shared tail is a hint. Positions are claimed without holes because a producer starts at a
//! position that is known to be at most the tail and goes on by one only past an entry that it
//! has seen taken. With one producer the tail's line stays in that producer's cache, and a message
//! moves one line between the cores.
//!
//! The compare-exchange that claims is also the first half of a store/load pair: {claim; look at
//! the QP's state} against {change the state; look for claims}, see `Qp::quiesce`. That which
//! publishes is the first half of {publish; look at the arm} against {arm; look at the ring}.

use crate::layout::{CqShared, Cqe};
use std::sync::atomic::{fence, Ordering};

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const READY: u64 = 2;
const VOID: u64 = 3;

const fn word(turn: u32, segment: u32, state: u64) -> u64 {
    (turn as u64) << 32 | (segment as u64) << 8 | state
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
    shift: u32,
}

/// The ring has no free entry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// An entry that this process claimed and must publish or void.
pub(crate) struct Claim {
    pub(crate) entry: &'static Cqe,
    turn: u32,
    segment: u32,
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

impl Ring {
    /// The ring of `head`, whose length must be the power of two that `head` states.
    pub(crate) fn new(head: &'static CqShared, entries: &'static [Cqe]) -> Option<Ring> {
        entries.len().is_power_of_two().then(|| Ring { head, entries, shift: entries.len().trailing_zeros() })
    }

    #[inline(always)]
    fn slot(&self, position: u64) -> (&'static Cqe, u32) {
        (&self.entries[position as usize & (self.entries.len() - 1)], (position >> self.shift) as u32)
    }

    /// A position at which a producer may begin to look for the tail.
    pub(crate) fn start(&self) -> u64 {
        self.head.tail.0.load(Ordering::Acquire)
    }

    /// Claims the entry at the tail for `segment`. `hint` is the producer's own idea of the tail:
    /// from [`Ring::start`], then kept from claim to claim.
    #[inline]
    pub(crate) fn claim(&self, hint: &mut u64, segment: u32) -> Result<Claim, Full> {
        let mut walked = 0_u32;
        loop {
            let (entry, turn) = self.slot(*hint);
            let mut seen = word(turn, 0, FREE);
            match entry.word.compare_exchange(
                seen,
                word(turn, segment, CLAIMED),
                Ordering::SeqCst,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    fence_after_locked();
                    *hint += 1;
                    // Written rarely, so that its line does not bounce; often enough that a
                    // newcomer walks a few entries only.
                    if walked > 4 || *hint & 7 == 0 {
                        self.head.tail.0.fetch_max(*hint, Ordering::AcqRel);
                    }
                    return Ok(Claim { entry, turn, segment });
                }
                Err(now) => seen = now,
            }
            if (turn_of(seen).wrapping_sub(turn) as i32) < 0 {
                // Still the completion of the turn before, one whole ring ago.
                return Err(Full);
            }
            walked += 1;
            *hint = (*hint + 1).max(if walked == 1 { self.start() } else { 0 });
        }
    }

    /// Where a new user of the ring's memory begins to consume.
    pub(crate) fn restart(&self) -> u64 {
        self.head.stopped_at.load(Ordering::Acquire)
    }

    /// The consumer, at `head`, leaves the ring for good: gives everything back but an entry that
    /// is claimed just now, and what follows it.
    pub(crate) fn stop(&self, mut head: u64) {
        while !matches!(self.next(head), Next::Empty) {
            self.release(head);
            head += 1;
        }
        self.head.stopped_at.store(head, Ordering::Release);
    }

    /// What stands at `position`; the consumer's own count.
    #[inline(always)]
    pub(crate) fn next(&self, position: u64) -> Next {
        let (entry, turn) = self.slot(position);
        // Acquire: pairs with the publishing compare-exchange.
        let now = entry.word.load(Ordering::Acquire);
        if now == word(turn, 0, READY) {
            Next::Ready(entry)
        } else if now == word(turn, 0, VOID) {
            Next::Void
        } else {
            Next::Empty
        }
    }

    /// Gives the entry at `position` back to the producers.
    #[inline(always)]
    pub(crate) fn release(&self, position: u64) {
        let (entry, turn) = self.slot(position);
        // Release: the payload was copied out before.
        entry.word.store(word(turn.wrapping_add(1), 0, FREE), Ordering::Release);
    }

    /// Every entry that is taken from `head` (the consumer's position) on, with its position, until
    /// the first free one; claimed ones come as `None`.
    pub(crate) fn taken(&self, head: u64) -> impl Iterator<Item = (u64, Option<&'static Cqe>)> + '_ {
        (head..head + self.entries.len() as u64)
            .map(|position| {
                let (entry, turn) = self.slot(position);
                (position, entry, turn, entry.word.load(Ordering::Acquire))
            })
            .take_while(|&(_, _, turn, now)| turn_of(now) == turn && now & 0xff != FREE)
            .map(|(position, entry, turn, now)| (position, (now == word(turn, 0, READY)).then_some(entry)))
    }

    /// Turns the completion at `position` into nothing. For the consumer, under its lock.
    pub(crate) fn void(&self, position: u64) {
        let (entry, turn) = self.slot(position);
        entry.word.store(word(turn, 0, VOID), Ordering::Release);
    }

    /// Whether `segment` is just writing an entry from `head` on.
    pub(crate) fn claimed_by(&self, head: u64, segment: u32) -> bool {
        (head..head + self.entries.len() as u64).any(|position| {
            let (entry, turn) = self.slot(position);
            entry.word.load(Ordering::SeqCst) == word(turn, segment, CLAIMED)
        })
    }

    /// Voids what `segment`, which is dead, was writing. Returns how many entries.
    pub(crate) fn void_claims_of(&self, head: u64, segment: u32) -> usize {
        (head..head + self.entries.len() as u64)
            .filter(|&position| {
                let (entry, turn) = self.slot(position);
                let (claimed, void) = (word(turn, segment, CLAIMED), word(turn, 0, VOID));
                entry.word.compare_exchange(claimed, void, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            })
            .count()
    }
}

impl Claim {
    /// Makes the entry visible. A full barrier.
    #[inline(always)]
    pub(crate) fn publish(self) {
        self.end(READY);
    }

    /// Gives the entry up; the consumer skips it.
    pub(crate) fn void(self) {
        self.end(VOID);
    }

    #[inline(always)]
    fn end(self, state: u64) {
        // A compare-exchange, not a store: if the owner took this process for dead, the entry is
        // no longer ours.
        let _ = self.entry.word.compare_exchange(
            word(self.turn, self.segment, CLAIMED),
            word(self.turn, 0, state),
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        fence_after_locked();
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
        Ring::new(head, Box::leak(entries.into_boxed_slice())).expect("power of two")
    }

    fn push(ring: &Ring, hint: &mut u64, segment: u32, value: u32) -> Result<(), Full> {
        let claim = ring.claim(hint, segment)?;
        claim.entry.len.store(value, Ordering::Relaxed);
        claim.publish();
        Ok(())
    }

    fn pop(ring: &Ring, head: &mut u64) -> Option<u32> {
        loop {
            match ring.next(*head) {
                Next::Ready(entry) => {
                    let value = entry.len.load(Ordering::Relaxed);
                    ring.release(*head);
                    *head += 1;
                    return Some(value);
                }
                Next::Void => {
                    ring.release(*head);
                    *head += 1;
                }
                Next::Empty => return None,
            }
        }
    }

    #[test]
    fn completions_come_out_in_order_over_many_turns() {
        let ring = ring(4);
        let (mut hint, mut head) = (0, 0);
        for round in 0..100 {
            for i in 0..3 {
                assert_eq!(push(&ring, &mut hint, 1, round * 3 + i), Ok(()));
            }
            for i in 0..3 {
                assert_eq!(pop(&ring, &mut head), Some(round * 3 + i));
            }
            assert_eq!(pop(&ring, &mut head), None);
        }
    }

    #[test]
    fn a_full_ring_refuses_and_loses_nothing() {
        let ring = ring(2);
        let (mut hint, mut head) = (0, 0);
        assert_eq!(push(&ring, &mut hint, 1, 10), Ok(()));
        assert_eq!(push(&ring, &mut hint, 1, 11), Ok(()));
        assert_eq!(push(&ring, &mut hint, 1, 12), Err(Full));
        assert_eq!(pop(&ring, &mut head), Some(10));
        assert_eq!(push(&ring, &mut hint, 1, 12), Ok(()));
        assert_eq!(pop(&ring, &mut head), Some(11));
        assert_eq!(pop(&ring, &mut head), Some(12));
    }

    #[test]
    fn a_producer_with_an_old_hint_finds_the_tail() {
        let ring = ring(8);
        let (mut old, mut hint, mut head) = (0, 0, 0);
        for value in 0..50 {
            assert_eq!(push(&ring, &mut hint, 1, value), Ok(()));
            assert_eq!(pop(&ring, &mut head), Some(value));
        }
        assert_eq!(push(&ring, &mut old, 2, 50), Ok(()));
        assert_eq!(old, 51);
        assert_eq!(pop(&ring, &mut head), Some(50));
    }

    #[test]
    fn the_claim_of_a_dead_producer_is_voided_and_passed() {
        let ring = ring(4);
        let (mut hint, mut head) = (0, 0);
        let lost = ring.claim(&mut hint, 7).expect("room");
        assert_eq!(push(&ring, &mut hint, 1, 5), Ok(()));
        assert_eq!(pop(&ring, &mut head), None);
        assert!(ring.claimed_by(head, 7));
        assert_eq!(ring.void_claims_of(head, 7), 1);
        assert_eq!(pop(&ring, &mut head), Some(5));
        // Had it lived after all, it could not bring the entry back.
        lost.publish();
        assert_eq!(pop(&ring, &mut head), None);
    }

    #[test]
    fn four_producers_lose_and_double_nothing() {
        const EACH: u32 = 20_000;
        let ring = ring(16);
        let full = &AtomicU32::new(0);
        std::thread::scope(|scope| {
            for producer in 0..4_u32 {
                scope.spawn(move || {
                    let mut hint = ring.start();
                    for i in 0..EACH {
                        while push(&ring, &mut hint, producer + 1, producer << 24 | i).is_err() {
                            full.fetch_add(1, Ordering::Relaxed);
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut head, mut want, mut got) = (0, [0_u32; 4], 0);
            while got < 4 * EACH {
                let Some(value) = pop(&ring, &mut head) else {
                    std::thread::yield_now();
                    continue;
                };
                let from = (value >> 24) as usize;
                assert_eq!(value & 0xff_ffff, want[from], "producer {from} out of order");
                want[from] += 1;
                got += 1;
            }
            assert_eq!(pop(&ring, &mut head), None);
        });
    }
}

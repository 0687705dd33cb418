// SPDX-License-Identifier: MIT
//! The arm record of a CQ: one word, and the transitions that it may take.
//!
//! `ibv_req_notify_cq` asks for one event at the next completion. The word remembers that request
//! (`APP`), how many completions the CQ had seen when it came (an event is due only for a newer
//! one), and what the hardware may still say of arms that it was given.
//!
//! | state | bits | meaning |
//! |---|---|---|
//! | none | – | nothing asked, nothing outstanding |
//! | noted | `APP` | asked; the hardware knows nothing of it |
//! | in hardware | `APP HW LIVE` | asked, and the hardware is armed for it |
//! | answered | `HW` | the event was made by us; a kernel event may follow and is swallowed |
//! | noted over answered | `APP HW` | asked again before that kernel event was seen |
//! | armed over answered | `APP HW LIVE DOUBT` | the same, armed again: one or two kernel events follow |
//!
//! `LIVE` is always true of the hardware: it was armed after the request, and an event that is not
//! due then belongs to an older arm. `SOL` marks a request for solicited completions only. Those go
//! to the hardware at once, because a work completion does not say whether it was solicited.
//!
//! The word is changed under the CQ's lock; it is atomic so that a look may first ask without.

/// The word's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arm(pub u64);

const APP: u64 = 1;
const HW: u64 = 2;
const LIVE: u64 = 4;
const DOUBT: u64 = 8;
const SOL: u64 = 16;
/// Bits below the count.
const COUNT: u32 = 5;

/// What to do with the hardware when the application arms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Nothing: the request is only noted.
    No,
    /// Arm for the next completion.
    Next,
    /// Arm for the next solicited completion.
    Solicited,
}

/// What the application's request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The new word.
    pub arm: Arm,
    /// What the hardware is told.
    pub ring: Ring,
    /// Whether the request that was there before has an event coming that nobody has taken yet.
    pub owed: bool,
}

/// What a kernel event is to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The event that it waits for.
    Deliver,
    /// An answer to something already answered.
    Swallow,
}

impl Arm {
    /// Nothing asked, nothing outstanding.
    pub const NONE: Arm = Arm(0);

    const fn make(bits: u64, count: u64) -> Arm {
        Arm(bits | count << COUNT)
    }

    fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    fn count(self) -> u64 {
        self.0 >> COUNT
    }

    /// Whether a request is outstanding.
    #[inline]
    pub fn asked(self) -> bool {
        self.has(APP)
    }

    /// Whether a request is outstanding that a look at the ring can answer.
    #[inline]
    pub fn watchable(self) -> bool {
        self.0 & (APP | SOL) == APP
    }

    /// Whether a request is outstanding that only the hardware can answer.
    pub fn solicited(self) -> bool {
        self.has(APP | SOL)
    }

    /// Whether a request is outstanding of which the hardware knows nothing.
    pub fn noted(self) -> bool {
        self.watchable() && !self.has(LIVE)
    }

    /// Whether a kernel event may follow that nobody waits for.
    pub fn leftover(self) -> bool {
        self.has(DOUBT) || self.0 & (HW | LIVE) == HW
    }

    /// Whether a CQ that has seen `seen` completions has one that is newer than the request.
    #[inline]
    pub fn due(self, seen: u64) -> bool {
        self.watchable() && seen > self.count()
    }

    /// The event was made: the request is gone, a kernel event may remain.
    pub fn answered(self) -> Arm {
        Arm::make(self.0 & (HW | DOUBT), 0)
    }

    /// The hardware was armed for what was only noted.
    pub fn armed(self) -> Arm {
        Arm(self.0 | self.rung(false))
    }

    /// The hardware bits after it is armed; `same` where it holds this very arm already.
    fn rung(self, same: bool) -> u64 {
        let doubt = if self.has(HW) && !same { DOUBT } else { 0 };
        HW | LIVE | self.0 & DOUBT | doubt
    }

    /// The application asks for an event. `seen` is the CQ's count now; `to_hardware` is true where
    /// requests are not merely noted (kernel mode, or a waiter that sleeps).
    pub fn request(self, solicited: bool, seen: u64, to_hardware: bool) -> Request {
        let owed = self.due(seen);
        // The hardware still holds the arm of the request that this one repeats or widens.
        let same = self.has(APP | LIVE) && !owed;
        if self.watchable() && !owed {
            // Two requests before a completion are one; SOLICITED after NEXT stays NEXT.
            return if to_hardware {
                Request { arm: Arm(self.0 | self.rung(same)), ring: Ring::Next, owed }
            } else {
                Request { arm: self, ring: Ring::No, owed }
            };
        }
        let (bits, ring) = match (solicited, to_hardware || same) {
            (true, _) => (APP | SOL | self.rung(same), Ring::Solicited),
            (false, true) => (APP | self.rung(same), Ring::Next),
            (false, false) => (APP | self.0 & (HW | DOUBT), Ring::No),
        };
        Request { arm: Arm::make(bits, seen), ring, owed }
    }

    /// A kernel event was read. `seen` is the CQ's count after a look; `hint` is true where the
    /// ring decides (served mode). Returns the new word and what becomes of the event.
    pub fn record(self, seen: u64, hint: bool) -> (Arm, Verdict) {
        if !self.has(APP) {
            // With nothing outstanding it was armed behind our back: the application knows why.
            let verdict = if self.has(HW) { Verdict::Swallow } else { Verdict::Deliver };
            return (self.one_less(), verdict);
        }
        let answers = match () {
            // Which of the two it answers cannot be told: rather one event too many than one lost.
            () if self.has(SOL) => true,
            () if self.has(LIVE) && !self.has(DOUBT) => !hint || self.due(seen),
            () => self.due(seen),
        };
        if answers {
            return (Arm::make(self.0 & (HW | DOUBT), 0).one_less(), Verdict::Deliver);
        }
        // Not due, so it fired for something that the request had already counted: for an older
        // arm, if there was one.
        let left = if self.has(DOUBT) { Arm(self.0 & !DOUBT) } else { Arm(self.0 & !(HW | LIVE)) };
        (left, Verdict::Swallow)
    }

    /// One kernel event fewer may follow.
    fn one_less(self) -> Arm {
        if self.has(DOUBT) {
            Arm(self.0 & !DOUBT)
        } else {
            Arm(self.0 & !HW)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(seen: u64) -> Arm {
        Arm::NONE.request(false, seen, false).arm
    }

    #[test]
    fn a_noted_request_is_due_only_for_a_newer_completion() {
        let arm = noted(7);
        assert!(!arm.due(7) && arm.due(8) && arm.noted() && !arm.leftover());
        assert_eq!(arm.answered(), Arm::NONE);
    }

    #[test]
    fn two_requests_before_a_completion_are_one() {
        for to_hardware in [false, true] {
            let first = Arm::NONE.request(false, 3, to_hardware);
            let second = first.arm.request(false, 3, to_hardware);
            assert_eq!((second.arm, second.owed), (first.arm, false));
        }
    }

    #[test]
    fn a_request_after_the_completion_leaves_an_event_owed() {
        let second = noted(3).request(false, 4, false);
        assert!(second.owed && second.arm.asked() && !second.arm.due(4) && second.arm.due(5));
    }

    #[test]
    fn solicited_after_next_changes_nothing_and_next_after_solicited_wins() {
        assert_eq!(noted(1).request(true, 1, false), Request { arm: noted(1), ring: Ring::No, owed: false });
        let solicited = Arm::NONE.request(true, 1, false);
        assert_eq!(solicited.ring, Ring::Solicited);
        assert!(solicited.arm.solicited() && !solicited.arm.due(9));
        let next = solicited.arm.request(false, 1, false);
        assert_eq!(next.ring, Ring::Next);
        assert!(next.arm.due(2) && !next.arm.noted() && !next.arm.leftover());
    }

    #[test]
    fn the_kernel_event_of_an_answered_arm_is_swallowed_once() {
        let answered = noted(1).armed().answered();
        assert_eq!(answered.record(2, true), (Arm::NONE, Verdict::Swallow));
        assert_eq!(Arm::NONE.record(2, true).1, Verdict::Deliver);
    }

    #[test]
    fn the_older_kernel_event_does_not_answer_a_newer_request() {
        let noted_over = noted(1).armed().answered().request(false, 2, false).arm;
        assert!(noted_over.noted() && noted_over.leftover());
        assert_eq!(noted_over.record(2, true), (noted(2), Verdict::Swallow));
        let armed_over = noted_over.armed();
        assert!(!armed_over.noted() && armed_over.leftover());
        let (live, verdict) = armed_over.record(2, false);
        assert_eq!((live, verdict), (noted(2).armed(), Verdict::Swallow));
        assert_eq!(live.record(2, false), (Arm::NONE, Verdict::Deliver));
    }

    #[test]
    fn of_two_kernel_events_the_second_is_swallowed_once_the_first_was_the_answer() {
        let armed_over = noted(1).armed().answered().request(false, 2, true).arm;
        let (left, verdict) = armed_over.record(3, true);
        assert_eq!(verdict, Verdict::Deliver);
        assert_eq!(left.record(3, true), (Arm::NONE, Verdict::Swallow));
    }

    #[test]
    fn in_kernel_mode_a_clean_event_is_delivered_whatever_the_ring_says() {
        let arm = Arm::NONE.request(false, 5, true).arm;
        assert_eq!(arm.record(5, false), (Arm::NONE, Verdict::Deliver));
        assert_eq!(arm.record(5, true).1, Verdict::Swallow);
    }
}

// SPDX-License-Identifier: MIT
//! The arm record of a CQ: one word, and the transitions that it may take.
//!
//! `ibv_req_notify_cq` asks for one event at the next completion. The word remembers that request
//! (`APP`), how many completions the CQ had seen when it came (an event is due only for a newer
//! one), and what the hardware may still say of arms that it was given.
//!
//! | state | bits | meaning |
//! |---|---|---|
//! | none | – | nothing asked |
//! | noted | `APP` | asked; the hardware knows nothing of it |
//! | in hardware | `APP LIVE` | asked, and the hardware was armed for it |
//!
//! Beside the state stands how many kernel events may follow that nobody waits for: an event that
//! was made for an arm in hardware leaves that arm's own behind (state "answered"), and so does a
//! request that is repeated before its event was read. *May* follow, because arming hardware that is
//! armed already leaves one event where two were counted. Whoever reads an event that answers
//! nothing takes `LIVE` away: hardware with arm sequence numbers (mlx5) may have taken the newer arm
//! for the older one.
//!
//! `SOL` marks a request for solicited completions only. Those go to the hardware at once, because a
//! work completion does not say whether it was solicited, and their channel is not served.
//!
//! The word is changed under the CQ's lock; it is atomic so that a look may first ask without.

/// The word's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Arm(pub u64);

const APP: u64 = 1;
const LIVE: u64 = 2;
const SOL: u64 = 4;
/// Kernel events that may follow, in eight bits.
const LEFT: u32 = 3;
const LEFT_MAX: u64 = 0xff;
/// Completions seen when the request came, in the rest.
const COUNT: u32 = 11;

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

    const fn make(state: u64, left: u64, count: u64) -> Arm {
        let left = if left < LEFT_MAX { left } else { LEFT_MAX };
        Arm(state | left << LEFT | count << COUNT)
    }

    fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    fn state(self) -> u64 {
        self.0 & (APP | LIVE | SOL)
    }

    fn left(self) -> u64 {
        self.0 >> LEFT & LEFT_MAX
    }

    fn count(self) -> u64 {
        self.0 >> COUNT
    }

    /// Whether a request is outstanding that a look at the ring can answer.
    #[inline]
    pub fn watchable(self) -> bool {
        self.0 & (APP | SOL) == APP
    }

    fn solicited(self) -> bool {
        self.has(APP | SOL)
    }

    /// Whether a request is outstanding of which the hardware knows nothing.
    pub fn noted(self) -> bool {
        self.watchable() && !self.has(LIVE)
    }

    /// Whether a kernel event may follow that nobody waits for.
    pub fn leftover(self) -> bool {
        self.left() > 0
    }

    /// Whether a CQ that has seen `seen` completions has one that is newer than the request.
    #[inline]
    pub fn due(self, seen: u64) -> bool {
        self.watchable() && seen > self.count()
    }

    /// The event was made: the request is gone, the hardware's own event may follow.
    pub fn answered(self) -> Arm {
        Arm::make(0, self.left() + u64::from(self.has(LIVE)), 0)
    }

    /// The hardware was armed for what was only noted.
    pub fn armed(self) -> Arm {
        Arm(self.0 | LIVE)
    }

    /// The application asks for an event. `seen` is the CQ's count now; `to_hardware` is true where
    /// requests are not merely noted (kernel mode, or a waiter that sleeps).
    pub fn request(self, solicited: bool, seen: u64, to_hardware: bool) -> Request {
        let owed = self.due(seen);
        let before = if owed { self.answered() } else { self };
        if before.watchable() {
            // Two requests before a completion are one; SOLICITED after NEXT stays NEXT.
            let (arm, ring) = if to_hardware { (before.armed(), Ring::Next) } else { (before, Ring::No) };
            return Request { arm, ring, owed };
        }
        let (state, ring) = match solicited {
            true => (APP | LIVE | SOL, Ring::Solicited),
            // NEXT widens a solicited arm where it is: in the hardware.
            false if to_hardware || before.solicited() => (APP | LIVE, Ring::Next),
            false => (APP, Ring::No),
        };
        Request { arm: Arm::make(state, before.left(), seen), ring, owed }
    }

    /// The arm of a request that is only noted, where nothing was asked and nothing may follow.
    #[inline(always)]
    pub fn note(seen: u64) -> Arm {
        Arm::make(APP, 0, seen)
    }

    /// A kernel event was read. `seen` is the CQ's count after a look; `hint` is true where the
    /// ring decides. Returns the new word and what becomes of the event.
    pub fn record(self, seen: u64, hint: bool) -> (Arm, Verdict) {
        let left = self.left();
        if !self.has(APP) {
            // With nothing outstanding it was armed behind our back: the application knows why.
            let verdict = if left > 0 { Verdict::Swallow } else { Verdict::Deliver };
            return (Arm::make(0, left.saturating_sub(1), 0), verdict);
        }
        // Of a solicited request the ring tells nothing.
        let answers = self.due(seen) || self.has(SOL) || (self.has(LIVE) && left == 0 && !hint);
        if answers {
            // Which of them this was cannot be told. If the request's own, as many as before may
            // follow; if an older one, the request's own takes its place.
            let left = if self.has(LIVE) { left } else { left.saturating_sub(1) };
            return (Arm::make(0, left, 0), Verdict::Deliver);
        }
        // An older arm's, or for something that the request had already counted. Some hardware takes
        // an arm for the older one's as long as that one's event was not read: armed anew, if ever.
        (Arm::make(self.state() & !LIVE, left.saturating_sub(1), self.count()), Verdict::Swallow)
    }

    /// A kernel event was read that answers an earlier request.
    pub fn one_read(self) -> Arm {
        Arm::make(self.state(), self.left().saturating_sub(1), self.count())
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
        assert!(second.owed && second.arm.watchable() && !second.arm.due(4) && second.arm.due(5));
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
        let (again, verdict) = noted_over.armed().record(2, false);
        assert_eq!((again, verdict), (noted(2), Verdict::Swallow));
        assert_eq!(again.armed().record(2, false), (Arm::NONE, Verdict::Deliver));
    }

    #[test]
    fn of_several_kernel_events_those_after_the_answer_are_swallowed() {
        let mut arm = noted(0).armed();
        for seen in 1..4 {
            arm = arm.answered().request(false, seen, true).arm;
        }
        let (mut left, verdict) = arm.record(4, true);
        assert_eq!(verdict, Verdict::Deliver);
        for _ in 0..3 {
            let swallowed = left.record(4, true);
            assert_eq!(swallowed.1, Verdict::Swallow);
            left = swallowed.0;
        }
        assert_eq!(left, Arm::NONE);
    }

    #[test]
    fn in_kernel_mode_a_clean_event_is_delivered_whatever_the_ring_says() {
        let arm = Arm::NONE.request(false, 5, true).arm;
        assert_eq!(arm.record(5, false), (Arm::NONE, Verdict::Deliver));
        assert_eq!(arm.record(5, true).1, Verdict::Swallow);
    }
}

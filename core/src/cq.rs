// SPDX-License-Identifier: MIT
//! A completion queue that belongs to a completion channel.
//!
//! The application's CQ stays the real one. Beside it stand the arm record, the count of completions
//! that the CQ has seen, the events made for it, and the stash. All of them are touched under the
//! CQ's lock: by the application's `poll_cq` and `req_notify_cq`, and by looks. A look only tries
//! the lock, because its holder may be preempted on this very core.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use rdma_sys::{ibv_cq, ibv_wc};

use crate::arm::{Arm, Ring, Verdict};
use crate::channel::Channel;
use crate::counters::{Counter, COUNTERS};
use crate::lock::Lock;
use crate::pool::Pool;
use crate::stash::Stash;
use crate::watchdog;

/// `poll_cq` of a provider.
pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
/// `req_notify_cq` of a provider.
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;

/// Whether a CQ has something to poll: a provider's way to be asked without a lock, consuming
/// nothing.
pub type Peek = unsafe extern "C" fn(*mut ibv_cq) -> c_int;

/// What a provider does for a CQ.
#[derive(Clone, Copy)]
pub struct Provider {
    /// Polls it.
    pub poll: PollCq,
    /// Arms it.
    pub req_notify: ReqNotifyCq,
    /// Tells whether polling is worth it; without, polling is the only way to look.
    pub peek: Option<Peek>,
}

/// The bit of a work completion's opcode that says that it is a receive's (`IBV_WC_RECV`).
const RECEIVED: u32 = 1 << 7;

/// Completions taken from the provider at once.
const BATCH: usize = 8;

/// What is guarded by the lock.
#[derive(Default)]
struct Inner {
    provider: Option<Provider>,
    stash: Stash,
    /// Completions kept at most. Twice the CQ's size: a program that arms before it polls leaves a
    /// full CQ's worth here, and the ring may hold as many again.
    room: usize,
    /// Of the events that are owed, those that a forced kernel event brings.
    kicked: u32,
    /// Events handed out that the kernel does not know of; `ibv_destroy_cq` must not wait for them.
    made: u64,
}

/// A completion queue.
pub struct Cq {
    real: AtomicPtr<ibv_cq>,
    channel: AtomicPtr<Channel>,
    lock: Lock,
    /// Changed under the lock; read without it to see whether a look is worth while.
    arm: AtomicU64,
    /// Events that are due for earlier requests and that nobody has taken; changed as `arm` is.
    owed: AtomicU32,
    /// Completions seen since the CQ was made: polled by the application, or kept. Changed as `arm`.
    seen: AtomicU64,
    /// A completion of a receive was seen here.
    receives: AtomicBool,
    /// The provider's, where it has one; null otherwise.
    peek: AtomicPtr<()>,
    inner: UnsafeCell<Inner>,
    noted: Counter,
    /// Events that the application acknowledged, until the CQ is destroyed.
    acknowledged: AtomicU32,
    /// `ibv_destroy_cq` waits for acknowledgements: they go to libibverbs at once.
    destroying: AtomicBool,
}

// SAFETY: `inner` is touched under `lock` only; everything else is atomic.
unsafe impl Sync for Cq {}
// SAFETY: nothing in it belongs to a thread.
unsafe impl Send for Cq {}

static POOL: Pool<Cq> = Pool::new();

impl Default for Cq {
    fn default() -> Self {
        Cq {
            real: AtomicPtr::new(ptr::null_mut()),
            channel: AtomicPtr::new(ptr::null_mut()),
            lock: Lock::new(),
            arm: AtomicU64::new(0),
            owed: AtomicU32::new(0),
            seen: AtomicU64::new(0),
            receives: AtomicBool::new(false),
            peek: AtomicPtr::new(ptr::null_mut()),
            inner: UnsafeCell::new(Inner::default()),
            noted: Counter::new(),
            acknowledged: AtomicU32::new(0),
            destroying: AtomicBool::new(false),
        }
    }
}

impl Cq {
    /// Starts to keep account of `real`, which is `provider`'s.
    ///
    /// # Safety
    /// `real` is a live CQ with a completion channel, is the provider's, and stays
    /// live until [`Cq::forget`].
    pub unsafe fn new(real: *mut ibv_cq, provider: Provider) -> &'static Cq {
        let cq = POOL.take();
        cq.lock.with(|| {
            // SAFETY: the lock is held; the CQ is live.
            let (inner, room) = unsafe { (&mut *cq.inner.get(), (*real).cqe) };
            *inner = Inner { provider: Some(provider), room: stash_room(room), ..Inner::default() };
            cq.peek.store(provider.peek.map_or(ptr::null_mut(), |peek| peek as *mut ()), Ordering::Relaxed);
            cq.seen.store(0, Ordering::Relaxed);
            cq.receives.store(false, Ordering::Relaxed);
            cq.real.store(real, Ordering::Relaxed);
        });
        cq
    }

    /// The application's CQ.
    #[inline(always)]
    pub fn real(&self) -> *mut ibv_cq {
        self.real.load(Ordering::Relaxed)
    }

    /// The channel that it reports to.
    #[inline(always)]
    pub fn channel(&self) -> Option<&'static Channel> {
        // SAFETY: channels live in a pool that is never freed.
        unsafe { self.channel.load(Ordering::Relaxed).as_ref() }
    }

    pub(crate) fn set_channel(&self, channel: Option<&'static Channel>) {
        self.channel
            .store(channel.map_or(ptr::null_mut(), |c| ptr::from_ref(c).cast_mut()), Ordering::Relaxed);
    }

    #[inline(always)]
    fn arm(&self) -> Arm {
        Arm(self.arm.load(Ordering::Relaxed))
    }

    #[inline(always)]
    fn set_arm(&self, arm: Arm) {
        self.arm.store(arm.0, Ordering::Relaxed);
    }

    #[inline(always)]
    fn owed(&self) -> u32 {
        self.owed.load(Ordering::Relaxed)
    }

    fn owe(&self, more: u32) {
        self.owed.store(self.owed() + more, Ordering::Relaxed);
    }

    /// Takes one of the events that are owed.
    fn pay(&self, inner: &mut Inner) -> bool {
        let owed = self.owed();
        let left = owed.saturating_sub(1);
        self.owed.store(left, Ordering::Relaxed);
        inner.kicked = inner.kicked.min(left);
        owed > 0
    }

    /// Takes the lock and lends what it guards.
    #[inline(always)]
    fn locked<R>(&self, f: impl FnOnce(&mut Inner) -> R) -> R {
        // SAFETY: the lock is held while the reference lives.
        self.lock.with(|| f(unsafe { &mut *self.inner.get() }))
    }

    /// The application polls.
    ///
    /// # Safety
    /// As for `ibv_poll_cq`: `wcs` has room for `room` completions.
    #[inline]
    pub unsafe fn poll(&self, room: c_int, wcs: *mut ibv_wc) -> c_int {
        self.locked(|inner| {
            if !inner.stash.is_empty() && room > 0 {
                // Everything that an arm has counted lies in the stash: to hand out only that may
                // return fewer than there are, as any poll may, and never hides one from an event.
                // SAFETY: the caller vouches for `wcs`.
                return unsafe { inner.stash.pop_into(wcs, room as usize) } as c_int;
            }
            // SAFETY: the caller vouches for `wcs`; the CQ is live.
            let n = unsafe { inner.poll_real(self.real(), room, wcs) };
            self.saw(n.max(0) as u64);
            // SAFETY: the provider filled the first `n`.
            unsafe { self.note_receives(wcs, n.max(0) as usize) };
            n
        })
    }

    /// The application asks for an event; returns what `ibv_req_notify_cq` does.
    #[inline]
    pub fn request(&self, solicited: bool) -> c_int {
        let channel = self.channel();
        if let (true, Some(channel)) = (solicited, channel) {
            // Whether a completion was solicited is not seen in the ring: only the kernel can answer.
            channel.never_serve();
        }
        self.locked(|inner| {
            let full = !self.drain(inner);
            let to_hardware = full || channel.is_none_or(Channel::arms_hardware);
            if self.arm() == Arm::NONE && !solicited && !to_hardware {
                self.set_arm(Arm::note(self.seen()));
                self.noted.bump();
                watchdog::noted();
                return 0;
            }
            let request = self.arm().request(solicited, self.seen(), to_hardware);
            let rc = match request.ring {
                Ring::No => 0,
                Ring::Next => inner.ring(self.real(), false),
                Ring::Solicited => inner.ring(self.real(), true),
            };
            if rc == 0 {
                self.owe(u32::from(request.owed));
                self.set_arm(request.arm);
            }
            if request.ring == Ring::No {
                self.noted.bump();
                watchdog::noted();
            }
            rc
        })
    }

    /// Looks for an event and takes it; true where there was one. Without anything asked or owed it costs one load.
    #[inline(always)]
    pub(crate) fn look(&self) -> bool {
        if !self.worth_a_look() || (self.is_empty() && !self.event_seen()) || !self.lock.try_lock() {
            return false;
        }
        // SAFETY: the lock is held.
        let inner = unsafe { &mut *self.inner.get() };
        self.drain(inner);
        let look = self.take(inner);
        self.lock.unlock();
        look
    }

    /// Whether the provider says that there is nothing to poll; false where it cannot be asked.
    #[inline(always)]
    fn is_empty(&self) -> bool {
        let peek = self.peek.load(Ordering::Relaxed);
        // SAFETY: `new` put a function of this type there, for a CQ that is live while its account is.
        !peek.is_null() && unsafe { std::mem::transmute::<*mut (), Peek>(peek)(self.real()) == 0 }
    }

    /// Whether an event waits to be taken of which the ring knows no more.
    #[inline(always)]
    fn event_seen(&self) -> bool {
        self.owed() > 0 || self.arm().due(self.seen())
    }

    /// Takes an event that is owed or due.
    #[inline]
    fn take(&self, inner: &mut Inner) -> bool {
        if self.pay(inner) {
            // An older request's, whose event comes first.
        } else if self.arm().due(self.seen()) {
            self.set_arm(self.arm().answered());
        } else {
            return false;
        }
        inner.made += 1;
        true
    }

    /// Whether a look could find an event.
    #[inline(always)]
    pub(crate) fn worth_a_look(&self) -> bool {
        self.arm().watchable() || self.owed() > 0
    }

    /// Whether something waits for a look that nobody else would ever take.
    pub(crate) fn unwatched(&self) -> bool {
        self.arm().noted() || self.owed() > 0
    }

    /// Whether the kernel has an event for the application, or is about to.
    pub(crate) fn kernel_event_ready(&self) -> bool {
        self.locked(|inner| {
            self.drain(inner);
            self.owed() > 0 || (self.arm().due(self.seen()) && !self.arm().noted())
        })
    }

    /// Gives a request that is only noted to the hardware and looks again, because most hardware
    /// reports no completion that was there before. True where an event is ready now.
    pub(crate) fn arm_hardware(&self) -> bool {
        self.locked(|inner| {
            self.ring_noted(inner);
            self.owed() > 0 || self.arm().due(self.seen())
        })
    }

    /// Arms the hardware for a request that is only noted and not answered yet.
    fn ring_noted(&self, inner: &mut Inner) {
        self.drain(inner);
        if self.arm().noted() && !self.arm().due(self.seen()) && inner.ring(self.real(), false) == 0 {
            self.set_arm(self.arm().armed());
            self.drain(inner);
        }
    }

    /// Leaves served mode: what is noted goes to the hardware, and events that the kernel will not
    /// report are owed; the caller forces one for each.
    pub(crate) fn settle(&self) {
        self.locked(|inner| {
            if self.arm().noted() {
                self.ring_noted(inner);
                // Due already, it never reaches the hardware. Due just after it did, nobody knows
                // whether the hardware saw the completion: made here, its own event is swallowed.
                if self.arm().due(self.seen()) {
                    self.owe(1);
                    self.set_arm(self.arm().answered());
                }
            }
            inner.kicked = self.owed();
        });
    }

    /// Events that are owed and wait for a kernel event to be forced, or read.
    pub(crate) fn kicked(&self) -> u32 {
        self.locked(|inner| inner.kicked)
    }

    /// A kernel event of this CQ was read; decides whether the application gets it. On a channel
    /// that was never served it does; on any other the ring decides, because a device may look at
    /// its arm late, and answer with an old completion an arm that was given to it since.
    pub(crate) fn record(&self, served: bool, ring_decides: bool) -> Verdict {
        self.locked(|inner| {
            self.drain(inner);
            // In kernel mode the events of repeated requests come one by one; those for which one
            // was forced come from the private CQ.
            if !served && self.owed() > inner.kicked && self.arm().leftover() {
                self.pay(inner);
                self.set_arm(self.arm().one_read());
                return Verdict::Deliver;
            }
            let (arm, verdict) = self.arm().record(self.seen(), ring_decides);
            self.set_arm(arm);
            if verdict == Verdict::Swallow && !served && arm.noted() {
                // In kernel mode nobody looks: the hardware must stay armed, and what came before
                // it was is given for the event that was read.
                self.ring_noted(inner);
                if self.arm().due(self.seen()) {
                    self.set_arm(self.arm().answered());
                    return Verdict::Deliver;
                }
            }
            verdict
        })
    }

    /// Takes one owed event, for the kernel event that was forced for it.
    pub(crate) fn take_owed(&self) -> bool {
        self.locked(|inner| {
            if inner.kicked == 0 {
                return false;
            }
            inner.kicked -= 1;
            self.pay(inner);
            inner.made += 1;
            true
        })
    }

    /// Whether an event is owed, as seen without the lock.
    pub(crate) fn has_owed(&self) -> bool {
        self.owed() > 0
    }

    /// Puts an event that was taken back.
    pub(crate) fn give_back(&self) {
        self.locked(|inner| {
            inner.made -= 1;
            self.owe(1);
        });
    }

    /// Counts an event that the kernel made, and that was acknowledged to it, as ours.
    pub(crate) fn count_made(&self) {
        self.locked(|inner| inner.made += 1);
    }

    /// Moves what the provider has into the stash. False where the stash is full and some may be
    /// left.
    #[inline]
    fn drain(&self, inner: &mut Inner) -> bool {
        if self.is_empty() {
            return true;
        }
        loop {
            let most = BATCH.min(inner.room.saturating_sub(inner.stash.len()));
            if most == 0 {
                return false;
            }
            let (place, room) = inner.stash.room(most);
            // SAFETY: the place has that room; the CQ is live while its account is.
            let n = unsafe { inner.poll_real(self.real(), room as c_int, place) }.max(0) as usize;
            inner.stash.filled(n.min(room));
            // SAFETY: the provider filled the first `n` of the place.
            unsafe { self.note_receives(place, n.min(room)) };
            self.saw(n as u64);
            if n < room {
                return true;
            }
        }
    }

    /// Notes whether there are receives among `n` completions.
    ///
    /// # Safety
    /// `wcs` points to `n` completions.
    #[inline(always)]
    unsafe fn note_receives(&self, wcs: *const ibv_wc, n: usize) {
        // SAFETY: as the caller says.
        if !self.receives() && (0..n).any(|i| unsafe { (*wcs.add(i)).opcode } & RECEIVED != 0) {
            self.receives.store(true, Ordering::Relaxed);
        }
    }

    /// Whether completions of receives come here.
    #[inline(always)]
    pub(crate) fn receives(&self) -> bool {
        self.receives.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn seen(&self) -> u64 {
        self.seen.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn saw(&self, more: u64) {
        self.seen.store(self.seen() + more, Ordering::Relaxed);
    }

    /// Runs `f`, which resets or destroys queue pair `qp_num`, and drops that queue pair's
    /// completions, as the provider does with its own.
    pub fn purging<R>(&self, qp_num: u32, f: impl FnOnce() -> (R, bool)) -> R {
        self.locked(|inner| {
            // Natively the event of a completion that is dropped was given before.
            self.drain(inner);
            if self.arm().due(self.seen()) && self.arm().noted() {
                self.owe(1);
                self.set_arm(self.arm().answered());
            }
            let (result, done) = f();
            if done {
                inner.stash.purge(qp_num);
            }
            result
        })
    }

    /// Runs `f`, which resizes the CQ; nobody touches its ring meanwhile.
    pub fn resizing(&self, f: impl FnOnce() -> c_int) -> c_int {
        self.locked(|inner| {
            let rc = f();
            // SAFETY: the CQ is live.
            inner.room = stash_room(unsafe { (*self.real()).cqe });
            rc
        })
    }

    /// The application acknowledges events. Returns how many are to be passed on at once.
    #[inline]
    pub fn acknowledge(&self, events: u32) -> Option<u32> {
        // SeqCst, as in `begin_destroy`: of the two, one sees what the other wrote.
        self.acknowledged.fetch_add(events, Ordering::SeqCst);
        self.destroying.load(Ordering::SeqCst).then(|| self.acknowledged.swap(0, Ordering::SeqCst))
    }

    /// The CQ is about to be destroyed: returns the events acknowledged and not passed on.
    pub fn begin_destroy(&self) -> u32 {
        self.destroying.store(true, Ordering::SeqCst);
        self.acknowledged.swap(0, Ordering::SeqCst)
    }

    /// The CQ was not destroyed after all.
    pub fn cancel_destroy(&self) {
        self.destroying.store(false, Ordering::SeqCst);
    }

    /// Events made so far, of which the kernel knows nothing.
    pub fn made(&self) -> u64 {
        self.locked(|inner| inner.made)
    }

    /// Ends the account of a CQ that is destroyed.
    pub fn forget(&'static self) {
        self.locked(|inner| {
            COUNTERS.made.add(inner.made);
            *inner = Inner::default();
            self.set_arm(Arm::NONE);
            self.owed.store(0, Ordering::Relaxed);
            self.peek.store(ptr::null_mut(), Ordering::Relaxed);
            self.real.store(ptr::null_mut(), Ordering::Relaxed);
        });
        COUNTERS.noted.add(self.noted.take());
        self.acknowledged.store(0, Ordering::SeqCst);
        self.destroying.store(false, Ordering::SeqCst);
        self.set_channel(None);
        POOL.give_back(self);
    }

    /// Adds the counters of all live CQs to those of the process; once, at exit.
    pub fn fold_counters() {
        POOL.each(|cq| {
            COUNTERS.noted.add(cq.noted.take());
            // At exit a thread may have stopped anywhere: the lock is not waited for.
            if cq.lock.try_lock() {
                // SAFETY: the lock is held.
                COUNTERS.made.add(std::mem::take(unsafe { &mut (*cq.inner.get()).made }));
                cq.lock.unlock();
            }
        });
    }
}

fn stash_room(cqe: c_int) -> usize {
    2 * cqe.max(1) as usize + BATCH
}

impl Inner {
    /// # Safety
    /// `real` is live and `wcs` has room for `room` completions.
    #[inline]
    unsafe fn poll_real(&self, real: *mut ibv_cq, room: c_int, wcs: *mut ibv_wc) -> c_int {
        match self.provider {
            // SAFETY: as the caller says.
            Some(provider) => unsafe { (provider.poll)(real, room, wcs) },
            None => 0,
        }
    }

    fn ring(&self, real: *mut ibv_cq, solicited: bool) -> c_int {
        COUNTERS.hw_arms.add(1);
        match self.provider {
            // SAFETY: the CQ is live while its account is.
            Some(provider) => unsafe { (provider.req_notify)(real, c_int::from(solicited)) },
            None => 0,
        }
    }
}

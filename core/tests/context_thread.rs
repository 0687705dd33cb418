// SPDX-License-Identifier: MIT
//! Switches between contexts of different kernel threads: the TLS goes with the context, the kernel
//! thread stays, and a signal at any moment finds the two together.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use fastwake::context::{self, pending_tls, resume_tls, switch_tls, Context};
use fastwake::stack::Stack;

thread_local! {
    static NAME: Cell<&'static str> = const { Cell::new("nobody") };
}

fn kernel_thread() -> i64 {
    // SAFETY: gettid has no precondition. The raw call, since a library may keep the number in TLS.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

/// The smallest form of adoption: a guest thread leaves its context and parks on a stack of its
/// own; the host runs the context and comes back; the guest goes on at home.
struct Adoption {
    guest: Context,
    host: Context,
    park: Context,
    park_stack: Stack,
    /// The guest's context may be resumed by others: its kernel thread has left the stack.
    published: AtomicBool,
    /// The guest's kernel thread shall go on with its own context.
    go_home: AtomicBool,
}

/// On the guest's kernel thread, on the park stack. No TLS is used here.
unsafe extern "C" fn parked(adoption: *mut (), _: usize) -> ! {
    let adoption = adoption.cast::<Adoption>();
    // SAFETY: the adoption outlives both threads.
    unsafe {
        (*adoption).published.store(true, Ordering::Release);
        while !(*adoption).go_home.load(Ordering::Acquire) {
            libc::syscall(libc::SYS_sched_yield);
        }
        resume_tls(&raw const (*adoption).guest, 0)
    }
}

struct Shared(*mut Adoption);
// SAFETY: the fields are handed over by `published` and `go_home`, each with release and acquire.
unsafe impl Send for Shared {}
impl Shared {
    fn get(&self) -> *mut Adoption {
        self.0
    }
}

#[test]
fn tls_goes_with_the_context_and_the_kernel_thread_does_not() {
    context::check().expect("a machine on which contexts can be switched");
    let mut adoption = Box::new(Adoption {
        guest: Context::of_thread(),
        host: Context::of_thread(),
        park: Context::of_thread(),
        park_stack: Stack::new(64 << 10).unwrap(),
        published: AtomicBool::new(false),
        go_home: AtomicBool::new(false),
    });
    let address: *mut Adoption = &mut *adoption;
    let shared = Shared(address);
    let guest = thread::spawn(move || {
        let adoption = shared.get();
        NAME.set("guest");
        let home = kernel_thread();
        let (own_pthread, own_errno);
        // SAFETY: the park stack is fresh; the host resumes us once `parked` says that we left.
        let seen = unsafe {
            own_pthread = libc::pthread_self();
            own_errno = libc::__errno_location();
            (*adoption).guest = Context::of_thread();
            (*adoption).park = Context::on_stack(
                (*adoption).park_stack.top(),
                (*adoption).guest.tls(),
                parked,
                adoption.cast(),
            );
            switch_tls(&raw mut (*adoption).guest, &raw const (*adoption).park, 0)
        };
        // On the host's kernel thread now.
        assert_eq!(seen, 5);
        assert_ne!(kernel_thread(), home);
        assert_eq!(NAME.get(), "guest");
        // SAFETY: both calls only read; then back to the host, which is suspended in its switch.
        unsafe {
            assert_eq!(libc::pthread_self(), own_pthread);
            assert_eq!(libc::__errno_location(), own_errno);
            switch_tls(&raw mut (*adoption).guest, &raw const (*adoption).host, 6);
        }
        assert_eq!(kernel_thread(), home);
        assert_eq!(NAME.get(), "guest");
    });
    NAME.set("host");
    while !adoption.published.load(Ordering::Acquire) {
        thread::yield_now();
    }
    let own = kernel_thread();
    // SAFETY: the guest's context is published: its kernel thread has left the stack.
    let value = unsafe {
        (*address).host = Context::of_thread();
        switch_tls(&raw mut (*address).host, &raw const (*address).guest, 5)
    };
    assert_eq!(value, 6);
    assert_eq!(NAME.get(), "host");
    assert_eq!(kernel_thread(), own);
    adoption.go_home.store(true, Ordering::Release);
    guest.join().expect("the guest's assertions");
}

/// For the handler below: the bounds of the second stack and the base that belongs to it.
static SECOND: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
static FIRST_TLS: AtomicUsize = AtomicUsize::new(0);
static HITS: AtomicUsize = AtomicUsize::new(0);
static WRONG: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_signal(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a ucontext_t; FS:0 holds the base in every thread
    // and in the stand-in below.
    let (interrupted, base) = unsafe {
        let base: usize;
        std::arch::asm!("mov {}, fs:[0]", out(reg) base, options(readonly, nostack));
        (&*context.cast::<libc::ucontext_t>(), base)
    };
    let sp = interrupted.uc_mcontext.gregs[libc::REG_RSP as usize] as usize;
    let [low, high, second_tls] = SECOND.each_ref().map(|word| word.load(Ordering::Relaxed));
    let due = if (low..=high).contains(&sp) { second_tls } else { FIRST_TLS.load(Ordering::Relaxed) };
    HITS.fetch_add(1, Ordering::Relaxed);
    if pending_tls(interrupted).unwrap_or(base) != due {
        WRONG.fetch_add(1, Ordering::Relaxed);
    }
}

struct Bounce {
    first: Context,
    second: Context,
}

unsafe extern "C" fn bounces(pair: *mut (), _: usize) -> ! {
    let pair = pair.cast::<Bounce>();
    loop {
        // SAFETY: the first context is suspended whenever this one runs.
        unsafe { switch_tls(&raw mut (*pair).second, &raw const (*pair).first, 0) };
    }
}

#[test]
fn a_flood_of_signals_finds_stack_and_tls_together() {
    const SIGNALS: usize = 20_000;
    context::check().expect("a machine on which contexts can be switched");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let done = &done;
        let target = scope.spawn(move || {
            let stack = Stack::new(256 << 10).unwrap();
            // A stand-in for another thread's control block: all that is read is its first word.
            let mut block = Box::new([0usize; 64]);
            block[0] = block.as_ptr() as usize;
            let mut pair = Bounce { first: Context::of_thread(), second: Context::of_thread() };
            FIRST_TLS.store(pair.first.tls(), Ordering::Relaxed);
            for (word, value) in SECOND.iter().zip([stack.range().start, stack.range().end, block[0]]) {
                word.store(value, Ordering::Relaxed);
            }
            let arg = (&raw mut pair).cast();
            // SAFETY: fresh stack, kept until the end; the handler has SA_SIGINFO's signature; the
            // switches go to a context that always comes back.
            unsafe {
                pair.second = Context::on_stack(stack.top(), block[0], bounces, arg);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_signal as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
                assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
                sender.send(libc::pthread_self()).unwrap();
                while !done.load(Ordering::Relaxed) {
                    switch_tls(&raw mut pair.first, &raw const pair.second, 0);
                }
            }
        });
        let thread = receiver.recv().unwrap();
        // Each is seen to be handled before the next: signals of one number do not queue.
        for sent in 1..=SIGNALS {
            // SAFETY: the target runs until `done`, so its pthread_t is alive.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
            while HITS.load(Ordering::Relaxed) < sent {
                thread::yield_now();
            }
        }
        done.store(true, Ordering::Relaxed);
        target.join().unwrap();
    });
    assert_eq!(HITS.load(Ordering::Relaxed), SIGNALS);
    assert_eq!(WRONG.load(Ordering::Relaxed), 0);
}

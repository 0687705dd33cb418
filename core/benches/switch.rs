// SPDX-License-Identifier: MIT
//! What one context switch costs, in nanoseconds: `cargo bench -p fastwake --bench switch`.
//!
//! One iteration is one switch, one way. "ring of 16" goes round sixteen contexts with stacks of
//! their own, which also shows what their stacks do to the first-level cache; "two sites" leaves its
//! two contexts at different places of the code, where a switch that ended in `ret` would mispredict.

// criterion_group! makes a public function, and gives it no documentation.
#![allow(missing_docs)]

use std::cell::UnsafeCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{criterion_group, criterion_main, Criterion};
use fastwake::context::{switch, switch_tls, Context};
use fastwake::stack::Stack;

type Way = unsafe fn(*mut Context, *const Context, usize) -> usize;

/// Contexts that hand control on to the next one, for ever. The first is the bench itself.
struct Ring {
    contexts: Vec<UnsafeCell<Context>>,
    _stacks: Vec<Stack>,
}

struct Seat {
    own: *mut Context,
    next: *const Context,
}

macro_rules! member {
    ($name:ident, $way:ident) => {
        unsafe extern "C" fn $name(seat: *mut (), _: usize) -> ! {
            // SAFETY: the seat is leaked by `Ring::new`; its contexts live as long as the ring, and
            // the next one is suspended whenever this one runs.
            unsafe {
                let Seat { own, next } = *seat.cast::<Seat>();
                loop {
                    $way(own, next, 0);
                }
            }
        }
    };
}
member!(plain, switch);
member!(with_tls, switch_tls);

impl Ring {
    fn new(members: usize, entry: fastwake::context::Entry) -> Ring {
        let own = Context::of_thread();
        let tls = own.tls();
        let stacks: Vec<Stack> = (1..members).map(|_| Stack::new(64 << 10).expect("a stack")).collect();
        let mut contexts = vec![UnsafeCell::new(own)];
        contexts.extend((1..members).map(|_| UnsafeCell::new(Context::of_thread())));
        for i in 1..members {
            let seat =
                Box::leak(Box::new(Seat { own: contexts[i].get(), next: contexts[(i + 1) % members].get() }));
            let arg = (seat as *mut Seat).cast();
            // SAFETY: each stack is fresh and kept in the ring; nobody looks at the context yet.
            unsafe {
                *contexts[i].get() = Context::on_stack(stacks[i - 1].top(), tls, entry, arg);
            }
        }
        Ring { contexts, _stacks: stacks }
    }

    /// At least `switches` one-way switches, scaled to exactly that many.
    #[inline(always)]
    fn time(&self, switches: u64, way: impl Fn(*mut Context, *const Context)) -> Duration {
        let members = self.contexts.len() as u64;
        let rounds = switches.div_ceil(members);
        let start = Instant::now();
        for _ in 0..rounds {
            way(self.contexts[0].get(), self.contexts[1].get());
        }
        start.elapsed().mul_f64(switches as f64 / (rounds * members) as f64)
    }
}

/// For comparison: the same switch as a function that is called and returns.
#[inline(never)]
unsafe fn called(from: *mut Context, to: *const Context, value: usize) -> usize {
    // SAFETY: the caller's contract is the same.
    unsafe { switch(from, to, value) }
}
member!(by_call, called);

fn switches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("switch");
    for members in [2, 16] {
        let ring = Ring::new(members, plain);
        group.bench_function(format!("plain, ring of {members}"), |bench| {
            bench.iter_custom(|n| {
                // SAFETY: the ring's contexts are suspended, and control comes back to the first.
                ring.time(n, |from, to| unsafe {
                    switch(from, to, 0);
                })
            });
        });
        let ring = Ring::new(members, with_tls);
        group.bench_function(format!("tls, ring of {members}"), |bench| {
            bench.iter_custom(|n| {
                // SAFETY: as above.
                ring.time(n, |from, to| unsafe {
                    switch_tls(from, to, 0);
                })
            });
        });
    }
    let way: Way = black_box(called);
    let ring = Ring::new(2, by_call);
    group.bench_function("plain, called and returning, two sites", |bench| {
        bench.iter_custom(|n| {
            // SAFETY: as above.
            ring.time(n, |from, to| unsafe {
                way(from, to, 0);
            })
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = switches
}
criterion_main!(benches);

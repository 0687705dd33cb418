// SPDX-License-Identifier: MIT
//! Stock event-mode programs under the shim for a long time, with pauses and kills at random: no
//! wake-up is lost. 10 seconds, or with `FASTWAKE_LONG=1` 30 minutes and forced flips of mode, too.

use std::time::{Duration, Instant};

use crate::stage::{alone, Device, Run};
use crate::stock::{await_listener, free_port};

/// A small generator of random numbers; its seed is printed, so that a failure can be had again.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

const TESTS: &[&[&str]] = &[
    &["ib_send_lat", "-e", "-n", "20000"],
    &["ib_send_bw", "-e", "-n", "5000", "-s", "256"],
    &["ib_send_lat", "-e", "-n", "5000", "-s", "4096"],
];

#[test]
fn no_wake_up_is_lost_through_pauses_kills_and_flips() {
    let _alone = alone();
    let long = std::env::var_os("FASTWAKE_LONG").is_some();
    let end = Instant::now() + Duration::from_secs(if long { 1800 } else { 10 });
    let seed = std::process::id().into();
    println!("seed {seed}");
    let mut random = Random(seed);
    let (mut whole, mut killed, mut flips) = (0, 0, 0);
    while Instant::now() < end {
        let test = TESTS[random.below(TESTS.len() as u64) as usize];
        let flip = if long { [0, 200, 1_000, 10_000][random.below(4) as usize] } else { 0 }.to_string();
        let serve = ["auto", "always"][random.below(2) as usize];
        let settings = [("FW_SERVE", serve), ("FW_FLIP_US", flip.as_str())];
        let port = free_port();
        let number = port.to_string();
        let mut words: Vec<&str> = test.to_vec();
        words.extend(["-F", "-d", "fw_soft0", "-p", &number]);
        let server = Run::new(words.iter().copied(), Device::Soft, Some(&settings)).start();
        assert!(await_listener(port), "{words:?}: the server does not listen");
        words.push("127.0.0.1");
        let client = Run::new(words.iter().copied(), Device::Soft, Some(&settings)).start();

        let kill = random.below(4) == 0;
        // perftest calibrates its clock for half a second; what comes after is disturbed.
        std::thread::sleep(Duration::from_millis(600 + random.below(100)));
        // The bandwidth test polls one batch an event: what a pause piles up it may never poll.
        let pauses = if test[0] == "ib_send_lat" { random.below(4) } else { 0 };
        for _ in 0..pauses {
            let side = if random.below(2) == 0 { &server } else { &client };
            side.signal(libc::SIGSTOP);
            std::thread::sleep(Duration::from_millis(random.below(60)));
            side.signal(libc::SIGCONT);
            std::thread::sleep(Duration::from_millis(random.below(20)));
        }
        if kill {
            let side = if random.below(2) == 0 { &server } else { &client };
            side.signal(libc::SIGKILL);
        }
        let sides = [client.wait(), server.wait()];
        for side in &sides {
            flips += side.count("to_kernel");
            // Killed or left behind by a killed peer, a side may fail; it may not wait for ever.
            assert!(
                side.status.is_some(),
                "{words:?} with {settings:?}, {}: a side hung\n{}{}{}",
                if kill { "one side killed" } else { "nobody killed" },
                side.output,
                side.errors,
                side.log
            );
        }
        if kill {
            killed += 1;
        } else {
            whole += 1;
        }
    }
    println!("{whole} pairs to their end, {killed} with a side killed, {flips} times back to the kernel");
    assert!(whole > 2 && (flips > 10 || !long), "{whole} pairs, {flips} flips: too few to tell");
}

// SPDX-License-Identifier: MIT
//! Stock programs in event mode over the soft device, both sides, with and without the shim: both
//! sides succeed, and at least 95 % of the waits of the latency tests are served.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::stage::{alone, Device, Ran, Run, Shim};

/// perftest calibrates its clock for a second and fails, or prints inf and nan, when it is disturbed
/// meanwhile. That says nothing of the device, so the pair is run again, this often.
const ATTEMPTS: usize = 4;

const SERVED: Shim = Some(&[]);

/// A TCP port that is free now. Programs take it by number, so another one may come first; the pair
/// fails then and is run again.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}

/// Waits until a port is listened on, by looking: a server of a test takes one connection only.
pub(crate) fn await_listener(port: u16) -> bool {
    let needle = format!(":{port:04X} ");
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let text = std::fs::read_to_string(table).unwrap_or_default();
            // Columns: slot, local address, remote address, state; 0A is LISTEN.
            let listens = text.lines().any(|line| {
                let mut words = line.split_whitespace().skip(1);
                words.next().is_some_and(|local| format!("{local} ").ends_with(&needle))
                    && words.nth(1) == Some("0A")
            });
            if listens {
                return true;
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// Server and client of one stock test. Each element is one word of the command line.
fn pair(command: &[&str], shim: Shim) -> [Ran; 2] {
    let _alone = alone();
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let port = free_port();
        let number = port.to_string();
        let mut words: Vec<&str> = command.to_vec();
        words.extend(["-p", &number]);
        let server = Run::new(words.iter().copied(), Device::Soft, shim).start();
        let listening = await_listener(port);
        words.push("127.0.0.1");
        let client = Run::new(words.iter().copied(), Device::Soft, shim).start().wait();
        let sides = [server.wait(), client];
        let good = listening
            && sides.iter().all(|side| {
                side.status.is_some_and(|status| status.success())
                    && !side.output.contains("inf")
                    && !side.output.contains("nan")
            });
        if good {
            return sides;
        }
        // A hang is a failure of ours at once; only what perftest reports itself is tried again.
        let hung = sides.iter().any(|side| side.status.is_none());
        last = Some(sides);
        if hung {
            break;
        }
    }
    let [server, client] = last.expect("at least one attempt");
    panic!(
        "{command:?} with {shim:?}\nserver: {}\n{}{}{}\nclient: {}\n{}{}{}",
        server.end(),
        server.output,
        server.errors,
        server.log,
        client.end(),
        client.output,
        client.errors,
        client.log
    );
}

fn perftest(program: &'static str, iterations: &'static str) -> [&'static str; 8] {
    [program, "-e", "-F", "-d", "fw_soft0", "-n", iterations, "-s2"]
}

/// At least 95 % of the waits of both sides, where a side waits at all.
fn mostly_served(sides: &[Ran; 2]) {
    let total: u64 = sides.iter().map(|side| side.count("waits")).sum();
    assert!(total > 1000, "hardly any wait: {:?} {:?}", sides[0].stats, sides[1].stats);
    for side in sides {
        let (waits, served) = (side.count("waits"), side.count("served"));
        assert!(served as f64 >= 0.95 * waits as f64, "{served} of {waits} waits served: {:?}", side.stats);
    }
}

/// What a side printed, with everything that is or contains a number masked.
fn masked(side: &Ran) -> String {
    let mask = |word: &str| {
        if word.contains(|c: char| c.is_ascii_digit()) {
            "#".to_owned()
        } else {
            word.to_owned()
        }
    };
    let line = |line: &str| line.split_whitespace().map(mask).collect::<Vec<_>>().join(" ");
    (side.output.lines().chain(side.errors.lines())).map(line).collect::<Vec<_>>().join("\n")
}

/// Natively and under the shim: both sides succeed and print the same words. Returns the latter.
fn both_ways(command: &[&str]) -> [Ran; 2] {
    let native = pair(command, None);
    let served = pair(command, SERVED);
    for (native, served) in native.iter().zip(&served) {
        assert_eq!(masked(served), masked(native), "{command:?}");
    }
    served
}

#[test]
fn send_latency_is_served() {
    mostly_served(&both_ways(&perftest("ib_send_lat", "5000")));
}

#[test]
fn read_latency_is_served() {
    mostly_served(&both_ways(&perftest("ib_read_lat", "5000")));
}

#[test]
fn send_bandwidth() {
    both_ways(&perftest("ib_send_bw", "5000"));
}

#[test]
fn read_bandwidth() {
    both_ways(&perftest("ib_read_bw", "5000"));
}

#[test]
fn rc_pingpong() {
    both_ways(&["ibv_rc_pingpong", "-e", "-d", "fw_soft0", "-n", "2000"]);
}

#[test]
fn switched_off_the_shim_changes_nothing() {
    let command = ["ibv_rc_pingpong", "-e", "-d", "fw_soft0", "-n", "500"];
    let sides = pair(&command, Some(&[("FW_MODE", "off")]));
    for side in &sides {
        assert_eq!(side.count("made"), 0);
        assert_eq!(side.count("noted"), 0);
    }
}

// SPDX-License-Identifier: MIT
//! Waiters that no hook sees, with the completion placed between the arm and the watchdog: the arm
//! was only noted, the completion is there, and most hardware would report it no more.
//!
//! The watchdog is slowed down so far that the completion always comes first.

use crate::stage::{app, Device, Ran, Run};

/// A program whose first wait makes its channel served, and whose later waits nobody sees.
fn run(name: &str, device: Device) -> Ran {
    let command = [app(name).into_os_string(), device.name().into()];
    let settings = &[("FW_SERVE", "always"), ("FW_WATCHDOG_US", "20000")];
    let native = Run::new(command.clone(), device, None).run();
    let served = Run::new(command, device, Some(settings)).run();
    assert_eq!(native.end(), "exit status: 0", "natively:\n{}", native.output);
    assert_eq!(served.end(), native.end(), "{}{}", served.output, served.log);
    assert_eq!(served.output, native.output);
    served
}

/// That there was something to rescue: the first wait was served.
fn was_served(ran: &Ran) {
    assert!(ran.count("to_served") > 0, "never served: {:?}", ran.stats);
}

/// That it was rescued by a forced event: nothing else makes the real descriptor readable.
fn was_kicked(ran: &Ran) {
    was_served(ran);
    assert!(ran.count("kicks") > 0, "no forced event: {:?}", ran.stats);
}

#[test]
fn epoll_by_bare_system_calls() {
    was_kicked(&run("raw_epoll", Device::Soft));
    was_kicked(&run("raw_epoll", Device::Fake("fake0")));
    was_kicked(&run("raw_epoll", Device::Fake("fake_sn")));
}

#[test]
fn a_poll_request_on_an_io_uring() {
    was_kicked(&run("io_uring", Device::Soft));
    was_kicked(&run("io_uring", Device::Fake("fake0")));
    was_kicked(&run("io_uring", Device::Fake("fake_sn")));
}

#[test]
fn a_forked_child() {
    // The hook of fork hands every noted arm to the hardware, so the child needs no forced event.
    was_served(&run("forked_child", Device::Soft));
    was_served(&run("forked_child", Device::Fake("fake0")));
}

#[test]
fn a_process_that_was_passed_the_descriptor() {
    was_served(&run("passed_fd", Device::Soft));
    was_served(&run("passed_fd", Device::Fake("fake0")));
}

#[test]
fn a_bare_read_of_the_descriptor() {
    was_served(&run("raw_read", Device::Soft));
    was_served(&run("raw_read", Device::Fake("fake0")));
}

#[test]
fn where_no_event_could_be_forced_no_channel_is_served() {
    let ran = run("scripted/no_kick", Device::Fake("fake0"));
    assert_eq!(ran.count("to_served"), 0, "{:?}", ran.stats);
    assert_eq!(ran.count("noted"), 0, "{:?}", ran.stats);
}

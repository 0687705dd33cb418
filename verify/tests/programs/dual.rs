// SPDX-License-Identifier: MIT
//! Each event-mode program, natively and under the shim: the same output, word for word, and the
//! same exit status. A program counts only if FastWake really made events for it, or if the table
//! says why it makes none.

use crate::stage::{app, Device, Run, Shim};

const EAGER: Device = Device::Fake("fake_eager");
const SN: Device = Device::Fake("fake_sn");
const FAKE: Device = Device::Fake("fake0");

/// Why a program of the table is another case than the rest, on one device or (`None`) on all.
enum Except {
    /// It runs, and FastWake makes no event.
    NoEvent(Option<Device>, &'static str),
    /// It is not run.
    NotRun(Device, &'static str),
}
use Except::{NoEvent, NotRun};

const SOLICITED: &str = "a solicited arm, which it begins with, is the hardware's";
const EXTENDED: &str = "an extended CQ stays in kernel mode";
const NO_EXTENDED: &str = "the soft device has no extended CQs";
const NOT_TAKEN: &str = "its record is read past the library, which alone moves the sequence number";
const UNPOLLED: &str = "natively, arming with a completion unpolled makes an event at once there";

/// Every program of verify/apps and of verify/fake/scripted.
const PROGRAMS: &[(&str, &[Except])] = &[
    ("alarm_loop", &[]),
    ("arm_twice", &[]),
    ("cancelled", &[]),
    ("channel_gone", &[]),
    ("context_changed", &[]),
    ("cq_ex", &[NoEvent(None, EXTENDED), NotRun(Device::Soft, NO_EXTENDED)]),
    ("cq_thread", &[]),
    ("destroy", &[]),
    ("dlopened", &[NotRun(Device::Soft, "without the shim it finds the real library, which has no device")]),
    ("drained_first", &[]),
    ("forked_child", &[NotRun(SN, NOT_TAKEN)]),
    ("interrupted", &[]),
    ("io_uring", &[]),
    ("longjmped", &[]),
    ("nonblock", &[]),
    ("overlapped_acks", &[]),
    ("passed_fd", &[]),
    ("pingpong", &[NotRun(EAGER, UNPOLLED)]),
    ("present", &[NotRun(EAGER, UNPOLLED)]),
    ("qp_reset", &[]),
    ("raw_epoll", &[]),
    ("raw_read", &[NotRun(SN, NOT_TAKEN)]),
    ("readiness", &[]),
    ("resize", &[]),
    ("solicited", &[NoEvent(None, SOLICITED)]),
    ("threads", &[]),
    ("two_cqs", &[]),
    ("two_getters", &[NoEvent(None, "a channel on which two threads wait stays with the kernel")]),
    ("scripted/compat", &[NoEvent(None, "it only looks which functions answer")]),
    ("scripted/no_kick", &[NoEvent(None, "a channel whose waiters could be stranded is never served")]),
    ("scripted/races", &[]),
    ("scripted/refused", &[NoEvent(None, SOLICITED)]),
    ("scripted/semantics", &[]),
    ("scripted/stolen_lock", &[]),
    ("scripted/unplugged", &[]),
];

const OFF: Shim = Some(&[("FW_MODE", "off")]);
const AUTO: Shim = Some(&[]);
const ALWAYS: Shim = Some(&[("FW_SERVE", "always"), ("FW_IDLE", "busy")]);
const NEVER: Shim = Some(&[("FW_SERVE", "never")]);
const FLIPS: Shim = Some(&[("FW_SERVE", "always"), ("FW_FLIP_US", "300")]);

/// Runs the whole table on one device, one way, and says everything that differs.
fn all_alike(device: Device, shim: Shim) {
    let mut wrong = Vec::new();
    let (mut made, mut flipped) = (0, 0);
    for (name, exceptions) in PROGRAMS {
        let not_run = exceptions.iter().find_map(|except| match except {
            NotRun(on, reason) if *on == device => Some(*reason),
            _ => None,
        });
        if name.starts_with("scripted/") && device == Device::Soft {
            continue;
        }
        if let Some(reason) = not_run {
            println!("{name}: not run on {}: {reason}", device.name());
            continue;
        }
        let command = [app(name).into_os_string(), device.name().into()];
        let native = Run::new(command.clone(), device, None).run();
        let served = Run::new(command, device, shim).run();
        if native.status.is_none_or(|status| !status.success()) {
            wrong.push(format!("{name} natively: {}\n{}", native.end(), native.output));
            continue;
        }
        if served.end() != native.end() || served.output != native.output || served.errors != native.errors {
            wrong.push(format!(
                "{name}: {} instead of {}\n{}{}{}{}",
                served.end(),
                native.end(),
                difference(&native.output, &served.output),
                difference(&native.errors, &served.errors),
                if served.log.is_empty() { "" } else { "  log: " },
                served.log
            ));
            continue;
        }
        let none_made = exceptions.iter().find_map(|except| match except {
            NoEvent(on, reason) if on.is_none_or(|on| on == device) => Some(*reason),
            _ => None,
        });
        made += served.count("made");
        flipped += served.count("to_kernel");
        if shim == ALWAYS && served.count("made") == 0 {
            match none_made {
                Some(reason) => println!("{name}: no event made: {reason}"),
                None => wrong.push(format!("{name}: no event made: {:?}", served.stats)),
            }
        }
        if (shim == OFF || shim == NEVER) && served.count("made") != 0 {
            wrong.push(format!("{name}: events were made: {:?}", served.stats));
        }
    }
    // With forced flips each program may meet one at each of its few waits; together they do not.
    if shim == FLIPS && (made < 1000 || flipped < 100) {
        wrong.push(format!("{made} events made, {flipped} times back to the kernel: too few to tell"));
    }
    assert!(
        wrong.is_empty(),
        "{} of {} programs on {} with {shim:?}:\n{}",
        wrong.len(),
        PROGRAMS.len(),
        device.name(),
        wrong.join("\n")
    );
}

/// The first line at which two outputs part.
fn difference(native: &str, served: &str) -> String {
    let (mut left, mut right) = (native.lines(), served.lines());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return String::new(),
            (a, b) if a != b => {
                return format!(
                    "  natively: {}\n  served:   {}\n",
                    a.unwrap_or("(nothing more)"),
                    b.unwrap_or("(nothing more)")
                )
            }
            _ => {}
        }
    }
}

macro_rules! each {
    ($($name:ident: $device:expr, $shim:expr;)*) => {
        $(#[test] fn $name() { all_alike($device, $shim); })*
    };
}

each! {
    on_the_soft_device_switched_off: Device::Soft, OFF;
    on_the_soft_device_by_default: Device::Soft, AUTO;
    on_the_soft_device_always_served: Device::Soft, ALWAYS;
    on_the_soft_device_never_served: Device::Soft, NEVER;
    on_the_soft_device_with_forced_flips: Device::Soft, FLIPS;
    on_the_fake_by_default: FAKE, AUTO;
    on_the_fake_always_served: FAKE, ALWAYS;
    on_the_fake_with_forced_flips: FAKE, FLIPS;
    on_the_fake_that_fires_for_what_is_there_always_served: EAGER, ALWAYS;
    on_the_fake_that_fires_for_what_is_there_with_forced_flips: EAGER, FLIPS;
    on_the_fake_with_sequence_numbers_always_served: SN, ALWAYS;
    on_the_fake_with_sequence_numbers_with_forced_flips: SN, FLIPS;
}

#[test]
fn the_table_names_every_program_that_was_built() {
    let mut built = Vec::new();
    for (folder, prefix) in [("apps", ""), ("apps/scripted", "scripted/")] {
        for entry in std::fs::read_dir(crate::stage::libraries().join(folder)).expect("built programs") {
            let entry = entry.expect("an entry");
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            if entry.file_type().expect("a type").is_file() && !name.contains('.') {
                built.push(format!("{prefix}{name}"));
            }
        }
    }
    built.sort();
    let mut named: Vec<String> = PROGRAMS.iter().map(|(name, _)| (*name).to_owned()).collect();
    named.sort();
    assert_eq!(built, named);
}

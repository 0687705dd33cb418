// SPDX-License-Identifier: MIT
//! Programs that have nothing to do with RDMA, under the preload: no output of ours, no change in
//! what they print and return, no thread, no descriptor, no library loaded.

use crate::stage::{Device, Ran, Run};

/// Natively and with the shim, in whatever mode: everything the same.
fn unchanged(command: &[&str]) {
    unchanged_for(command, None);
}

fn unchanged_for(command: &[&str], user: Option<u32>) -> Ran {
    let mut native = Run::new(command.iter().copied(), Device::None, None);
    native.user = user;
    let native = native.run();
    for settings in [&[][..], &[("FW_MODE", "off")], &[("FW_SERVE", "always")]] {
        let settings: Vec<_> = settings.iter().copied().chain([("FW_STATS", "0")]).collect();
        let mut served = Run::new(command.iter().copied(), Device::None, Some(&settings));
        served.user = user;
        let served = served.run();
        assert_eq!(served.end(), native.end(), "{command:?} with {settings:?}: {}", served.errors);
        assert_eq!(served.output, native.output, "{command:?} with {settings:?}");
        assert_eq!(served.errors, native.errors, "{command:?} with {settings:?}");
        assert_eq!(served.log, "", "{command:?} with {settings:?}");
    }
    assert!(!native.output.is_empty() || !native.errors.is_empty(), "{command:?} says nothing");
    native
}

fn bash(script: &str) {
    unchanged(&["bash", "-c", script]);
}

#[test]
fn bash_with_pipes_and_subshells() {
    bash("for i in 1 2 3; do (echo $i | cat); done; echo done >&2; exit 7");
}

#[test]
fn exec_of_another_program() {
    bash("exec echo through exec");
    unchanged(&["env", "sh", "-c", "exec printf '%s\\n' again"]);
}

#[test]
fn forks_with_background_jobs_and_a_wait() {
    bash("sleep 0.01 & sleep 0.02 & wait; echo waited; kill -0 $$ && echo alive");
}

#[test]
fn signals_and_traps() {
    bash("trap 'echo caught' USR1; kill -USR1 $$; kill -TERM $$");
}

#[test]
fn taskset() {
    unchanged(&["taskset", "-c", "0", "bash", "-c", "taskset -pc $$ | sed 's/.*: //'"]);
}

#[test]
fn no_thread_is_started() {
    bash("ls /proc/$$/task | wc -l");
}

#[test]
fn no_descriptor_is_opened() {
    // No pipeline here: bash's own pipe would come and go in what is listed.
    bash("ls /proc/$$/fd; true");
    bash("exec 9</dev/null; ls /proc/self/fd; true");
}

#[test]
fn libibverbs_is_not_loaded() {
    bash("grep -c libibverbs /proc/$$/maps; grep -c libibverbs /proc/self/maps");
}

#[test]
fn the_soft_device_changes_nothing_either() {
    let script = "ls /proc/$$/task | wc -l; ls /proc/$$/fd; grep -c libibverbs /proc/$$/maps";
    let native = Run::new(["bash", "-c", script], Device::None, None).run();
    let soft = Run::new(["bash", "-c", script], Device::Soft, None).run();
    assert_eq!((soft.end(), soft.output, soft.errors), (native.end(), native.output, native.errors));
}

#[test]
fn a_program_that_closes_every_descriptor() {
    unchanged(&[
        "perl",
        "-e",
        "use POSIX; $| = 1; print \"open\\n\"; POSIX::close($_) for 3..1023; \
         print join(' ', map { readlink \"/proc/self/fd/$_\" ? $_ : () } 0..2), \"\\n\"",
    ]);
}

/// The loader ignores the preload of a program that gains rights, silently since it has a slash.
#[test]
fn a_setuid_program() {
    // SAFETY: geteuid has no precondition.
    let root = unsafe { libc::geteuid() } == 0;
    let nobody = if root { Some(65534) } else { None };
    let ran = unchanged_for(&["/usr/bin/su", "--version"], nobody);
    assert!(ran.status.is_some_and(|status| status.success()), "{}", ran.errors);
}

#[test]
fn a_bad_setting_is_one_line_and_the_program_runs_untouched() {
    let command = ["bash", "-c", "echo fine"];
    let ran = Run::new(command, Device::None, Some(&[("FW_MODE", "sideways")])).run();
    assert_eq!(ran.end(), "exit status: 0");
    assert_eq!(ran.output, "fine\n");
}

#[test]
fn a_bad_setting_is_named_once_where_verbs_are_used() {
    let device = Device::Fake("fake0");
    let command = [crate::stage::app("pingpong").into_os_string(), device.name().into()];
    let native = Run::new(command.clone(), device, None).run();
    let ran = Run::new(command, device, Some(&[("FW_MODE", "sideways")])).run();
    assert_eq!((ran.end(), &ran.output), (native.end(), &native.output), "{}", ran.errors);
    let said: Vec<&str> = ran.log.lines().chain(ran.errors.lines()).collect();
    assert_eq!(said.iter().filter(|line| line.contains("FW_MODE")).count(), 1, "{said:?}");
}

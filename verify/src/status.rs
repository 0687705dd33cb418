// SPDX-License-Identifier: MIT
//! `fastwaked status`: what this machine offers, what FastWake would use, and why.
//!
//! Each line that is not as it should be says what to do. Nothing is changed and nothing is run but
//! the child that asks the libraries for their versions.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use fastwake::context::{self, TlsWay};
use fastwake::settings::{Settings, TABLE};
use serde::Serialize;

use crate::cpus;
use crate::devices::{self, Device, Wish, SOFT_DEVICE};
use crate::fingerprint::Host;
use crate::libraries::Libraries;
use crate::version::{of_shim, of_softdev, Version, OWN};

/// How an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Ok,
    /// Not there, and FastWake does without.
    Note,
    /// Not there, and something does not work.
    Missing,
}

/// One line of the status.
#[derive(Clone, Debug, Serialize)]
struct Item {
    name: &'static str,
    state: State,
    value: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

#[derive(Serialize)]
struct Report {
    version: &'static str,
    items: Vec<Item>,
    would_use: Vec<String>,
}

fn ok(name: &'static str, value: impl Into<String>) -> Item {
    Item { name, state: State::Ok, value: value.into(), advice: None }
}

fn note(name: &'static str, value: impl Into<String>, advice: impl Into<String>) -> Item {
    Item { name, state: State::Note, value: value.into(), advice: Some(advice.into()) }
}

fn missing(name: &'static str, value: impl Into<String>, advice: impl Into<String>) -> Item {
    Item { name, state: State::Missing, value: value.into(), advice: Some(advice.into()) }
}

/// Prints the status. The exit status is 0 unless something needed is missing.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn status(json: bool) -> Result<ExitCode> {
    let report = report();
    let text = if json { serde_json::to_string_pretty(&report)? + "\n" } else { render(&report) };
    crate::print(&text)?;
    let broken = report.items.iter().any(|item| item.state == State::Missing);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn report() -> Report {
    let libraries = Libraries::locate();
    let devices = devices::list();
    let host = Host::of_this_machine("ib_send_lat");
    let soft = of_softdev(&libraries);
    let tls = context::check();
    let mut items = vec![
        ok(
            "cpu",
            [Some(&host.cpu), Some(&host.kernel), host.hypervisor.as_ref()]
                .into_iter()
                .flatten()
                .cloned()
                .collect::<Vec<_>>()
                .join(", "),
        ),
        cores(&cpus::allowed(), host.cores),
        quota(cpus::quota()),
        library("shim", &of_shim(&libraries)),
        library("soft device", &soft),
        shared_memory(),
        rdma(&devices),
        switching(&tls),
        kernel_module(Path::new("/dev/fastwake")),
        settings(),
    ];
    items.push(match (&host.perftest, &host.rdma_core) {
        (Some(perftest), Some(rdma)) => ok("programs", format!("perftest {perftest}, rdma-core {rdma}")),
        (None, _) => note("programs", "no perftest", "apt-get install perftest, for compare and selftest"),
        (_, None) => note("programs", "no rdma-core", "apt-get install libibverbs1"),
    });
    let soft_is_there = matches!(soft, Version::Known(_) | Version::Silent(_));
    Report { version: OWN, would_use: would_use(&devices, soft_is_there), items }
}

fn cores(allowed: &[usize], online: usize) -> Item {
    let value = format!("{} of {online} usable: {}", allowed.len(), list(allowed));
    if allowed.len() < 2 {
        return note("cores", value, "with one core only the one-core placement can be measured");
    }
    ok("cores", value)
}

/// `0-3,8`.
fn list(cpus: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let show = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(show).collect::<Vec<_>>().join(",")
}

fn quota(quota: Option<f64>) -> Item {
    match quota {
        None => ok("cpu quota", "none"),
        Some(cpus) => note(
            "cpu quota",
            format!("{cpus:.2} CPUs"),
            "polling is throttled when the quota is spent; raise cpu.max, or use --idle sleep",
        ),
    }
}

fn library(name: &'static str, version: &Version) -> Item {
    match version {
        Version::Known(v) if version.differs() => {
            missing(name, format!("version {v}, this tool is {OWN}"), "install all parts from one build")
        }
        Version::Known(v) => ok(name, format!("version {v}")),
        Version::Missing(why) => missing(name, "not found", why.clone()),
        Version::Silent(why) => {
            note(name, format!("found, of unknown version ({why})"), "build it anew: make build")
        }
    }
}

/// The soft device allocates its segments in full, and containers often have 64 MB in all.
fn shared_memory() -> Item {
    const LEAST: u64 = 64 << 20;
    // SAFETY: statvfs is a plain structure of integers, for which all zeroes are a value.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string and the call fills the structure it is given.
    if unsafe { libc::statvfs(c"/dev/shm".as_ptr(), &mut stat) } != 0 {
        return note("shared memory", "no /dev/shm", "mount a tmpfs there; the soft device needs it");
    }
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let value = format!("{} MB free in /dev/shm", free >> 20);
    if free < LEAST {
        return note("shared memory", value, "64 MB are little for the soft device; enlarge it (--shm-size)");
    }
    ok("shared memory", value)
}

fn rdma(devices: &[Device]) -> Item {
    if devices.is_empty() {
        return note(
            "rdma devices",
            "none",
            format!("the soft device {SOFT_DEVICE} stands in: fastwaked run --soft"),
        );
    }
    let show = |d: &Device| {
        let ports: Vec<_> = d
            .ports
            .iter()
            .map(|p| format!("{} {}", p.link_layer, if p.active { "active" } else { "down" }))
            .collect();
        format!("{} ({})", d.name, ports.join(", "))
    };
    let value = devices.iter().map(show).collect::<Vec<_>>().join(", ");
    if devices.iter().all(|d| d.ports.iter().all(|p| !p.active)) {
        return note("rdma devices", value, "no port is active; check the link (rdma link)");
    }
    ok("rdma devices", value)
}

fn switching(tls: &Result<TlsWay, context::Refusal>) -> Item {
    match tls {
        Ok(TlsWay::Instruction) => ok("thread switch", "TLS base by instruction (FSGSBASE), about 15 ns"),
        Ok(TlsWay::SystemCall) => note(
            "thread switch",
            "TLS base by system call, about 250 ns",
            "the CPU or the kernel (before 5.9, or nofsgsbase) has no FSGSBASE",
        ),
        Err(refusal) => {
            note("thread switch", refusal.to_string(), "waits are served in place on their own threads only")
        }
    }
}

fn kernel_module(device: &Path) -> Item {
    if !device.exists() {
        return note("kernel module", "no /dev/fastwake", "not needed; FastWake works without it");
    }
    match fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => ok("kernel module", "/dev/fastwake"),
        Err(error) => {
            note("kernel module", format!("/dev/fastwake: {error}"), "give this user access by a udev rule")
        }
    }
}

fn settings() -> Item {
    if let Err(error) = Settings::from_env() {
        return missing("settings", error.to_string(), "the shim steps aside until this is corrected");
    }
    let set: Vec<String> = TABLE
        .iter()
        .filter_map(|row| {
            let value = std::env::var_os(row.name).filter(|v| !v.is_empty())?;
            Some(format!("{}={}", row.name, value.to_string_lossy()))
        })
        .collect();
    ok("settings", if set.is_empty() { "defaults".to_owned() } else { set.join(" ") })
}

/// What a program started now would get.
fn would_use(devices: &[Device], soft: bool) -> Vec<String> {
    let mut lines = Vec::new();
    match devices::choose(Wish::default(), devices) {
        Ok(choice) if choice.soft && !soft => {
            lines.push(format!("no device: {}, and the soft device is not built", choice.why));
        }
        Ok(choice) => lines.push(format!("{}: {}", choice.name, choice.why)),
        Err(error) => lines.push(format!("no device: {error:#}")),
    }
    lines.push("a thread alone on its core in ibv_get_cq_event: polls in place".into());
    lines.push("other waits: the kernel's own path".into());
    lines
}

fn render(report: &Report) -> String {
    let mut out = format!("fastwaked {}\n\n", report.version);
    let width = report.items.iter().map(|item| item.name.len()).max().unwrap_or(0);
    for item in &report.items {
        let state = match item.state {
            State::Ok => "ok",
            State::Note => "note",
            State::Missing => "MISSING",
        };
        let _ = writeln!(out, "{state:<7}  {:<width$}  {}", item.name, item.value);
        if let Some(advice) = &item.advice {
            let _ = writeln!(out, "{:<7}  {:<width$}  -> {advice}", "", "");
        }
    }
    out.push_str("\nwould use\n");
    for line in &report.would_use {
        let _ = writeln!(out, "  {line}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_that_is_not_ok_says_what_to_do() {
        let report = report();
        assert!(report.items.len() > 8);
        for item in &report.items {
            assert_eq!(item.advice.is_some(), item.state != State::Ok, "{item:?}");
        }
        let text = render(&report);
        assert!(text.contains("would use") && text.contains("rdma devices"), "{text}");
    }

    #[test]
    fn without_a_device_the_soft_one_would_be_used_if_it_is_there() {
        assert!(would_use(&[], true)[0].starts_with(SOFT_DEVICE));
        assert!(would_use(&[], false)[0].starts_with("no device"));
    }

    #[test]
    fn libraries_of_another_version_are_missing_and_those_that_do_not_say_are_a_note() {
        assert_eq!(library("shim", &Version::Known("0.0.0".into())).state, State::Missing);
        assert_eq!(library("shim", &Version::Known(OWN.into())).state, State::Ok);
        assert_eq!(library("shim", &Version::Missing("x".into())).state, State::Missing);
        assert_eq!(library("shim", &Version::Silent("x".into())).state, State::Note);
    }

    #[test]
    fn cpus_are_listed_in_runs() {
        assert_eq!(list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(cores(&[0], 8).state, State::Note);
        assert_eq!(quota(Some(0.5)).state, State::Note);
    }
}

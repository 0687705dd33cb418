// SPDX-License-Identifier: MIT
//! What a host is, as far as it bears on figures, and nothing that says whose it is.
//!
//! Stands in every result and every recorded run. It must never hold a host name, a user name, an
//! address or a path.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::cpus;

/// A host. Unknown parts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Host {
    /// CPU model.
    pub cpu: String,
    /// CPUs that are online.
    pub cores: usize,
    /// CPUs that this process may use.
    pub cores_allowed: usize,
    /// Operating system and its release.
    pub kernel: String,
    /// What the machine runs on, if it is virtual.
    pub hypervisor: Option<String>,
    /// Microcode revision.
    pub microcode: Option<String>,
    /// Frequency governor of the first CPU.
    pub governor: Option<String>,
    /// Load average of the last minute, when the fingerprint was taken.
    pub load_average: Option<f64>,
    /// Version that perftest reports.
    pub perftest: Option<String>,
    /// Version of rdma-core's libibverbs.
    pub rdma_core: Option<String>,
    /// Version of FastWake.
    pub fastwake: String,
}

impl Host {
    /// Takes the fingerprint; `program` is the perftest to ask for its version.
    pub(crate) fn of_this_machine(program: &str) -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu0 = "/sys/devices/system/cpu/cpu0";
        Host {
            cpu: cpu_model(&cpuinfo),
            cores: first_line("/sys/devices/system/cpu/online")
                .and_then(|list| fastwake::settings::cpu_list(&list))
                .map_or(0, |cpus| cpus.len()),
            cores_allowed: cpus::allowed().len(),
            kernel: ["ostype", "osrelease"]
                .iter()
                .filter_map(|name| first_line(&format!("/proc/sys/kernel/{name}")))
                .collect::<Vec<_>>()
                .join(" "),
            hypervisor: hypervisor(&cpuinfo),
            microcode: field(&cpuinfo, "microcode"),
            governor: first_line(&format!("{cpu0}/cpufreq/scaling_governor")),
            load_average: first_line("/proc/loadavg")
                .and_then(|line| line.split_whitespace().next()?.parse().ok()),
            perftest: perftest_version(program),
            rdma_core: rdma_core_version(),
            fastwake: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Whether absolute figures of two hosts may be compared: same hardware, same kernel. Load and
    /// versions may differ; they are what a comparison is about.
    pub(crate) fn is_same_machine(&self, other: &Host) -> bool {
        let key = |h: &Host| {
            (
                h.cpu.clone(),
                h.cores,
                h.cores_allowed,
                h.kernel.clone(),
                h.hypervisor.clone(),
                h.microcode.clone(),
                h.governor.clone(),
            )
        };
        key(self) == key(other)
    }

    /// One line for people.
    pub(crate) fn summary(&self) -> String {
        let mut parts = vec![format!("{}, {} of {} cores", self.cpu, self.cores_allowed, self.cores)];
        parts.push(self.kernel.clone());
        parts.extend(self.hypervisor.clone());
        if let Some(load) = self.load_average {
            parts.push(format!("load {load}"));
        }
        parts.join(", ")
    }
}

fn first_line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned()).filter(|line| !line.is_empty())
}

/// The value of the first line `name : value`.
fn field(cpuinfo: &str, name: &str) -> Option<String> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|value| !value.is_empty())
}

fn cpu_model(cpuinfo: &str) -> String {
    field(cpuinfo, "model name").unwrap_or_else(|| {
        // Arm kernels give numbers only.
        let part = |name| field(cpuinfo, name).unwrap_or_else(|| "?".to_owned());
        format!("{} {}/{}", std::env::consts::ARCH, part("CPU implementer"), part("CPU part"))
    })
}

fn hypervisor(cpuinfo: &str) -> Option<String> {
    let flagged = field(cpuinfo, "flags").is_some_and(|flags| flags.split(' ').any(|f| f == "hypervisor"));
    if !flagged {
        return first_line("/sys/hypervisor/type");
    }
    Some(cpuid_vendor().unwrap_or_else(|| "unnamed".to_owned()))
}

/// The hypervisor's signature: CPUID leaf 0x4000_0000, which the hypervisor bit promises.
#[cfg(target_arch = "x86_64")]
fn cpuid_vendor() -> Option<String> {
    #[allow(unused_unsafe)] // Later compilers declare the intrinsic safe.
    // SAFETY: every x86_64 CPU has CPUID, and it changes nothing but its result registers.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0x4000_0000) };
    let bytes: Vec<u8> = [leaf.ebx, leaf.ecx, leaf.edx].iter().flat_map(|r| r.to_le_bytes()).collect();
    let text = String::from_utf8_lossy(&bytes).trim_matches(['\0', ' ']).to_owned();
    Some(match text.as_str() {
        "KVMKVMKVM" => "KVM".to_owned(),
        "Microsoft Hv" => "Hyper-V".to_owned(),
        "VMwareVMware" => "VMware".to_owned(),
        "XenVMMXenVMM" => "Xen".to_owned(),
        "TCGTCGTCGTCG" => "QEMU TCG".to_owned(),
        _ => text,
    })
    .filter(|name| !name.is_empty())
}

#[cfg(not(target_arch = "x86_64"))]
fn cpuid_vendor() -> Option<String> {
    None
}

fn perftest_version(program: &str) -> Option<String> {
    let output = Command::new(program)
        .arg("--version")
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.split_once("ersion:"))?.1.trim().to_owned();
    Some(version)
}

/// rdma-core writes its version into the name of the file behind `libibverbs.so.1`.
fn rdma_core_version() -> Option<String> {
    let arch = std::env::consts::ARCH;
    [
        format!("/usr/lib/{arch}-linux-gnu"),
        "/usr/lib64".into(),
        "/usr/lib".into(),
        format!("/lib/{arch}-linux-gnu"),
    ]
    .iter()
    .find_map(|dir| fs::read_link(Path::new(dir).join("libibverbs.so.1")).ok())
    .and_then(|file| libibverbs_version(&file.file_name()?.to_string_lossy()))
}

/// `libibverbs.so.1.14.44.0` is ABI 1.14 of rdma-core 44.0.
fn libibverbs_version(file: &str) -> Option<String> {
    let parts: Vec<&str> = file.strip_prefix("libibverbs.so.")?.split('.').collect();
    (parts.len() == 4).then(|| parts[2..].join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_cpu_and_a_kernel() {
        let host = Host::of_this_machine("no-such-program");
        assert!(!host.cpu.is_empty() && host.cores >= host.cores_allowed.min(1));
        assert!(host.kernel.starts_with("Linux "), "{host:?}");
        assert_eq!(host.perftest, None);
    }

    #[test]
    fn load_and_versions_do_not_make_another_machine_but_the_kernel_does() {
        let a = Host { cpu: "x".into(), kernel: "Linux 6.1".into(), ..Host::default() };
        let b = Host { load_average: Some(3.0), fastwake: "9".into(), ..a.clone() };
        assert!(a.is_same_machine(&b));
        assert!(!a.is_same_machine(&Host { kernel: "Linux 6.12".into(), ..a.clone() }));
    }

    #[test]
    fn fields_and_versions_are_read() {
        let cpuinfo = "processor\t: 0\nmodel name\t: A  CPU\nmicrocode\t: 0x1\nflags\t\t: fpu hypervisor\n";
        assert_eq!(cpu_model(cpuinfo), "A CPU");
        assert_eq!(field(cpuinfo, "microcode").as_deref(), Some("0x1"));
        assert!(hypervisor(cpuinfo).is_some());
        assert_eq!(libibverbs_version("libibverbs.so.1.14.44.0").as_deref(), Some("44.0"));
        assert_eq!(libibverbs_version("libibverbs.so.1"), None);
    }
}

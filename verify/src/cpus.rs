// SPDX-License-Identifier: MIT
//! Which CPUs this process may use, and which two of them a comparison takes.
//!
//! Called by `compare`, `status` and the host fingerprint. It reads; only [`CpuSet::apply`], used
//! between fork and exec, changes an affinity, and never that of fastwaked itself.

use std::fs;
use std::io;

/// A set of CPUs in the form that the kernel takes.
#[derive(Clone, Copy)]
pub(crate) struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// The set of one CPU.
    pub(crate) fn one(cpu: usize) -> Self {
        // SAFETY: cpu_set_t is an array of integers, for which all zeroes are a value.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        if cpu < libc::CPU_SETSIZE as usize {
            // SAFETY: the index is within the set, as just checked.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        CpuSet(set)
    }

    /// Binds the calling thread to this set. A single system call: fit for the time between fork
    /// and exec.
    ///
    /// # Errors
    /// What sched_setaffinity(2) reports; EINVAL where the set holds no usable CPU.
    pub(crate) fn apply(&self) -> io::Result<()> {
        // SAFETY: the pointer and the size describe the set of `self`, which the call only reads.
        match unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &self.0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// The CPUs that this process may run on, ascending.
pub(crate) fn allowed() -> Vec<usize> {
    // SAFETY: cpu_set_t is an array of integers, for which all zeroes are a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer and the size describe `set`, which the call fills.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    if result != 0 {
        return vec![0];
    }
    // SAFETY: every index is below CPU_SETSIZE, the number of bits of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// The two CPUs for server and client: the first allowed one, and the first other one of the same
/// package that is no hyper-thread of it (else the first other one at all). One CPU gives one.
pub(crate) fn choose(allowed: &[usize]) -> Vec<usize> {
    choose_by(allowed, |cpu| Place {
        package: topology(cpu, "physical_package_id"),
        siblings: topology(cpu, "thread_siblings_list"),
    })
}

/// Where a CPU lies, in the kernel's own words.
#[derive(PartialEq, Eq)]
struct Place {
    package: String,
    siblings: String,
}

fn topology(cpu: usize, name: &str) -> String {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}")).unwrap_or_default()
}

fn choose_by(allowed: &[usize], place: impl Fn(usize) -> Place) -> Vec<usize> {
    let Some((&first, others)) = allowed.split_first() else { return Vec::new() };
    let home = place(first);
    let near = |cpu: &&usize| {
        let other = place(**cpu);
        other.package == home.package && (other.siblings.is_empty() || other.siblings != home.siblings)
    };
    let second = others.iter().find(near).or_else(|| others.first());
    std::iter::once(first).chain(second.copied()).collect()
}

/// The CPU quota of this process's cgroup, in CPUs; `None` where there is none.
pub(crate) fn quota() -> Option<f64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // A limit may stand at any folder above; inside a container the root of the view is its own.
    std::path::Path::new(path)
        .ancestors()
        .filter_map(|dir| {
            let file = format!("/sys/fs/cgroup{}/cpu.max", dir.display());
            parse_quota(&fs::read_to_string(file).ok()?)
        })
        .min_by(f64::total_cmp)
}

/// Parses cgroup v2's cpu.max: `max 100000` or `150000 100000`.
fn parse_quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four cores of two hyper-threads in two packages: 0/1, 2/3 in the first, 4/5, 6/7 in the other.
    fn place(cpu: usize) -> Place {
        Place { package: (cpu / 4).to_string(), siblings: format!("{}-{}", cpu & !1, cpu | 1) }
    }

    #[test]
    fn hyper_threads_of_one_core_are_not_two_cores() {
        assert_eq!(choose_by(&[0, 1, 2, 3], place), [0, 2]);
    }

    #[test]
    fn a_core_of_the_same_package_is_preferred() {
        assert_eq!(choose_by(&[0, 4, 6, 3], place), [0, 3]);
        assert_eq!(choose_by(&[0, 4], place), [0, 4]);
    }

    #[test]
    fn one_cpu_gives_one() {
        assert_eq!(choose_by(&[5], place), [5]);
        assert_eq!(choose_by(&[0, 1], place), [0, 1]);
    }

    #[test]
    fn this_process_may_run_somewhere() {
        let cpus = allowed();
        assert!(!cpus.is_empty());
        assert!(CpuSet::one(cpus[0]).apply().is_ok(), "an allowed CPU was refused");
    }

    #[test]
    fn quotas_are_read_as_cpus() {
        assert_eq!(parse_quota("150000 100000\n"), Some(1.5));
        assert_eq!(parse_quota("max 100000\n"), None);
        assert_eq!(parse_quota("1 0"), None);
    }
}

// SPDX-License-Identifier: MIT
//! The RDMA devices of this host, read from sysfs, and which one a comparison takes.
//!
//! sysfs and not libibverbs: it needs no library, loads no provider and opens no device.

use std::fs;
use std::path::Path;

use anyhow::{bail, Result};
use serde::Serialize;

/// The name of the soft device.
pub(crate) const SOFT_DEVICE: &str = "fw_soft0";
const CLASS: &str = "/sys/class/infiniband";

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Port {
    /// Its number, from 1.
    pub number: u32,
    /// Whether its state is ACTIVE.
    pub active: bool,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: String,
    /// Index of the first RoCE v2 GID that holds an IPv4 address.
    pub ipv4_gid: Option<u32>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// Its name.
    pub name: String,
    /// Its ports.
    pub ports: Vec<Port>,
}

/// The device of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Its name.
    pub name: String,
    /// Whether it is the soft device.
    pub soft: bool,
    /// GID index, where one is needed.
    pub gid: Option<u32>,
    /// Why it was chosen.
    pub why: String,
}

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wish<'a> {
    /// `--device`, or `-d` of the test.
    pub device: Option<&'a str>,
    /// `--gid`, or `-x` of the test.
    pub gid: Option<u32>,
    /// `--soft`.
    pub soft: bool,
}

/// The devices of this host, by name.
pub(crate) fn list() -> Vec<Device> {
    list_in(Path::new(CLASS))
}

fn list_in(class: &Path) -> Vec<Device> {
    let mut devices: Vec<Device> = entries(class)
        .into_iter()
        .map(|name| {
            let ports = class.join(&name).join("ports");
            let mut numbers: Vec<u32> = entries(&ports).iter().filter_map(|n| n.parse().ok()).collect();
            numbers.sort_unstable();
            let ports =
                numbers.into_iter().map(|number| port(&ports.join(number.to_string()), number)).collect();
            Device { name, ports }
        })
        .collect();
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices
}

fn entries(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

fn port(dir: &Path, number: u32) -> Port {
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap_or_default().trim().to_owned();
    let ipv4 = |index: &u32| {
        let gid = read(&format!("gids/{index}"));
        // ::ffff:a.b.c.d, the form that a RoCE v2 GID of an IPv4 address has.
        read(&format!("gid_attrs/types/{index}")) == "RoCE v2"
            && gid.starts_with("0000:0000:0000:0000:0000:ffff")
    };
    Port {
        number,
        active: read("state").contains("ACTIVE"),
        link_layer: read("link_layer"),
        ipv4_gid: (0..256).find(ipv4),
    }
}

/// Chooses the device: the one asked for, else the first active one, else the soft device.
///
/// # Errors
/// The device asked for does not exist.
pub(crate) fn choose(wish: Wish<'_>, devices: &[Device]) -> Result<Choice> {
    let soft = |why: &str| Choice { name: SOFT_DEVICE.into(), soft: true, gid: wish.gid, why: why.into() };
    if wish.soft || wish.device == Some(SOFT_DEVICE) {
        return Ok(soft("asked for"));
    }
    let active = |d: &&Device| d.ports.iter().any(|p| p.active);
    let (device, why) = match wish.device {
        Some(name) => {
            match devices.iter().find(|d| d.name == name) {
                Some(device) => (device, "asked for"),
                None => {
                    let names: Vec<_> = devices.iter().map(|d| d.name.as_str()).collect();
                    let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                    bail!("there is no RDMA device '{name}' here (there is: {there}); --soft takes the soft device");
                }
            }
        }
        None => match devices.iter().find(active) {
            Some(device) => (device, "the first active device"),
            None if devices.is_empty() => return Ok(soft("there is no RDMA device")),
            None => return Ok(soft("no RDMA device is active")),
        },
    };
    let port = device.ports.iter().find(|p| p.active).or(device.ports.first());
    let ethernet = port.filter(|p| p.link_layer == "Ethernet");
    let gid = wish.gid.or_else(|| ethernet.and_then(|p| p.ipv4_gid));
    Ok(Choice { name: device.name.clone(), soft: false, gid, why: why.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let file = dir.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("mlx5_0/ports/1/state", "1: DOWN\n");
        write("rxe0/ports/1/state", "4: ACTIVE\n");
        write("rxe0/ports/1/link_layer", "Ethernet\n");
        write("rxe0/ports/1/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n");
        write("rxe0/ports/1/gid_attrs/types/0", "RoCE v2\n");
        write("rxe0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        write("rxe0/ports/1/gid_attrs/types/1", "RoCE v2\n");
        dir
    }

    #[test]
    fn the_first_active_device_is_taken_with_its_ipv4_gid() {
        let dir = sysfs();
        let choice = choose(Wish::default(), &list_in(dir.path())).unwrap();
        assert_eq!((choice.name.as_str(), choice.soft, choice.gid), ("rxe0", false, Some(1)));
    }

    #[test]
    fn what_is_asked_for_is_taken() {
        let dir = sysfs();
        let devices = list_in(dir.path());
        let wish = Wish { device: Some("mlx5_0"), gid: Some(5), soft: false };
        let choice = choose(wish, &devices).unwrap();
        assert_eq!((choice.name.as_str(), choice.gid), ("mlx5_0", Some(5)));
        assert!(choose(Wish { soft: true, ..Wish::default() }, &devices).unwrap().soft);
        assert!(choose(Wish { device: Some(SOFT_DEVICE), ..Wish::default() }, &devices).unwrap().soft);
    }

    #[test]
    fn without_a_device_the_soft_one_is_taken() {
        let choice = choose(Wish::default(), &list_in(Path::new("/nonexistent"))).unwrap();
        assert_eq!((choice.name.as_str(), choice.soft, choice.gid), (SOFT_DEVICE, true, None));
    }

    #[test]
    fn a_device_that_does_not_exist_is_an_error_that_lists_what_does() {
        let dir = sysfs();
        let wish = Wish { device: Some("mlx5_9"), ..Wish::default() };
        let error = choose(wish, &list_in(dir.path())).unwrap_err().to_string();
        assert!(error.contains("mlx5_9") && error.contains("rxe0") && error.contains("--soft"), "{error}");
    }
}

// SPDX-License-Identifier: MIT
//! The executor that really runs things: a server here, and a client here or on another host.
//!
//! It picks a free port, binds both sides to their cores, waits until the server listens, and puts
//! an end to whatever hangs. While a measurement runs, this process sleeps.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::{wait_any, Child, Launch, SideOutput};
use super::remote::Session;
use super::wire::Request;
use super::{Executor, PairOutput};
use crate::cli::RawSide;
use crate::clock::Calibration;
use crate::compare::cell::{iterations, Cell, Kind, Placement};
use crate::libraries::Libraries;
use crate::perftest::command::{Command, Figure, Variation};
use crate::raw;

/// What a side may still take once the other one has ended.
const GRACE: Duration = Duration::from_secs(3);
/// What a server gets to start in when nothing of it can be seen from outside (librdmacm).
const BLIND_START: Duration = Duration::from_millis(500);

/// Where the client runs.
pub(crate) enum Client {
    /// On this host.
    Here,
    /// On another one, which reaches this host under the address given.
    There(Box<Session>, String),
}

/// What stays the same from run to run.
pub(crate) struct Setup {
    /// The test.
    pub command: Command,
    /// The server's device.
    pub device: String,
    /// The client's device.
    pub client_device: String,
    /// GID index.
    pub gid: Option<u32>,
    /// Whether the soft device is preloaded.
    pub soft: bool,
    /// CPU of the server, and of the client on two cores. `None` leaves a side unbound.
    pub cpus: (Option<usize>, Option<usize>),
    /// Time after which a run is taken for hung.
    pub timeout: Duration,
    /// Where the client runs.
    pub client: Client,
}

/// Runs the cells of a comparison.
pub(crate) struct PairExecutor {
    setup: Setup,
    plain: Option<OsString>,
    with_shim: Option<OsString>,
    fastwaked: OsString,
    cycles_per_us: f64,
}

impl PairExecutor {
    /// Prepares everything that does not change: the libraries are found, the clock is measured.
    ///
    /// # Errors
    /// A library is missing.
    pub(crate) fn new(setup: Setup, libraries: &Libraries) -> Result<Self> {
        let before = std::env::var_os("LD_PRELOAD");
        let cycles_per_us = match &setup.client {
            Client::Here => Calibration::begin().per_us(),
            Client::There(session, _) => session.welcome().cycles_per_us,
        };
        Ok(PairExecutor {
            plain: libraries.preload(false, setup.soft, before.as_deref())?,
            with_shim: libraries.preload(true, setup.soft, before.as_deref())?,
            fastwaked: std::env::current_exe().context("finding this program")?.into(),
            setup,
            cycles_per_us,
        })
    }

    fn raw(&self, cell: Cell) -> Result<PairOutput> {
        // Shared memory must be memory: a file of a disk is written back while it is measured.
        let shm = std::path::Path::new("/dev/shm");
        let dir = tempfile::Builder::new().prefix("fastwaked-raw.").tempdir_in(if shm.is_dir() {
            shm.into()
        } else {
            std::env::temp_dir()
        })?;
        raw::prepare(dir.path())?;
        let launch = |side: RawSide| {
            let medium = if cell.kind == Kind::RawShm { "shm" } else { "pipe" };
            Launch {
                program: self.fastwaked.clone(),
                args: vec![
                    "raw-peer".into(),
                    medium.into(),
                    (if side == RawSide::Server { "server" } else { "client" }).into(),
                    dir.path().into(),
                    iterations(&self.setup.command, cell).to_string().into(),
                ],
                env: Vec::new(),
                unset: vec!["LD_PRELOAD"],
                cpu: self.cpu(side == RawSide::Server, cell.placement),
            }
        };
        let server = Child::start(&launch(RawSide::Server))?;
        let client = Child::start(&launch(RawSide::Client))?;
        Ok(self.both(server, client))
    }

    fn perftest(&mut self, cell: Cell) -> Result<PairOutput> {
        let port = free_port().context("finding a free port")?;
        let logs = tempfile::tempdir()?;
        let server_log = logs.path().join("server");
        let mut launch = self.launch(cell, port, None);
        shim_environment(&mut launch, cell.kind, &server_log);
        let server = Child::start(&launch).context(launch.program.to_string_lossy().into_owned())?;
        if !self.listens(&server, port) {
            let server = server.finish(Instant::now());
            return Ok(PairOutput { server, client: SideOutput::not_started("the server never listened") });
        }
        let mut output = match &mut self.setup.client {
            Client::Here => {
                let client_log = logs.path().join("client");
                let mut launch = self.launch(cell, port, Some("127.0.0.1"));
                shim_environment(&mut launch, cell.kind, &client_log);
                let client = Child::start(&launch)?;
                let mut output = self.both(server, client);
                output.client.shim_log = fs::read_to_string(client_log).unwrap_or_default();
                output
            }
            Client::There(session, address) => {
                let variation = Variation {
                    events: cell.kind.has_events(),
                    cycles: self.setup.command.figure() == Figure::Latency,
                    device: &self.setup.client_device,
                    gid: self.setup.gid,
                    port,
                    iterations: iterations(&self.setup.command, cell),
                    server: Some(address),
                };
                let mut words = vec![self.setup.command.program.to_owned()];
                words.extend(self.setup.command.args(&variation));
                let client = session.run(&Request {
                    command: words,
                    shim: cell.kind.has_shim(),
                    soft: self.setup.soft,
                    cpu: self.setup.cpus.1,
                    timeout_s: self.setup.timeout.as_secs(),
                });
                PairOutput { server: server.finish(Instant::now() + GRACE), client }
            }
        };
        output.server.shim_log = fs::read_to_string(server_log).unwrap_or_default();
        Ok(output)
    }

    /// The perftest of one side; `server` is the address for the client.
    fn launch(&self, cell: Cell, port: u16, server: Option<&str>) -> Launch {
        let variation = Variation {
            events: cell.kind.has_events(),
            cycles: self.setup.command.figure() == Figure::Latency,
            device: if server.is_some() { &self.setup.client_device } else { &self.setup.device },
            gid: self.setup.gid,
            port,
            iterations: iterations(&self.setup.command, cell),
            server,
        };
        let preload = if cell.kind.has_shim() { &self.with_shim } else { &self.plain };
        Launch {
            program: self.setup.command.program.into(),
            args: self.setup.command.args(&variation).into_iter().map(Into::into).collect(),
            env: preload.iter().map(|value| ("LD_PRELOAD", value.clone())).collect(),
            unset: vec!["LD_PRELOAD"],
            cpu: self.cpu(server.is_none(), cell.placement),
        }
    }

    fn cpu(&self, is_server: bool, placement: Placement) -> Option<usize> {
        let (server, client) = self.setup.cpus;
        if is_server || placement == Placement::OneCore {
            server
        } else {
            client
        }
    }

    /// Waits until the server listens; false where it ended or the time was up first.
    fn listens(&self, server: &Child, port: u16) -> bool {
        if self.setup.command.uses_rdma_cm() {
            return !server.ended_by(Instant::now() + BLIND_START);
        }
        wait_for_listener(server, port, Instant::now() + self.setup.timeout)
    }

    /// Waits for both sides of a run that has begun.
    fn both(&self, server: Child, client: Child) -> PairOutput {
        let deadline = Instant::now() + self.setup.timeout;
        if wait_any(&[&server, &client], deadline) {
            // One has ended: the other one has little to do left, or waits for ever.
            let deadline = deadline.min(Instant::now() + GRACE);
            let client = client.finish(deadline);
            return PairOutput { server: server.finish(deadline), client };
        }
        PairOutput { client: client.finish(deadline), server: server.finish(deadline) }
    }
}

impl Executor for PairExecutor {
    fn run(&mut self, cell: Cell) -> PairOutput {
        let output = if cell.kind.is_raw() { self.raw(cell) } else { self.perftest(cell) };
        output.unwrap_or_else(|error| {
            let side = SideOutput::not_started(format!("{error:#}"));
            PairOutput { server: side.clone(), client: side }
        })
    }

    fn cycles_per_us(&self) -> f64 {
        self.cycles_per_us
    }
}

/// Makes the shim count, and write what it counted into a file of its own.
pub(crate) fn shim_environment(launch: &mut Launch, kind: Kind, log: &std::path::Path) {
    if kind.has_shim() {
        launch.env.push(("FW_STATS", "1".into()));
        launch.env.push(("FW_LOG_FILE", log.into()));
    }
}

/// A TCP port that nothing uses.
pub(crate) fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

/// Waits until something listens on the port; false where the server ended or the time was up first.
///
/// The kernel is asked, and no connection tried: perftest takes the first one for its client.
pub(crate) fn wait_for_listener(server: &Child, port: u16, deadline: Instant) -> bool {
    while Instant::now() < deadline {
        if is_listening(port) {
            return true;
        }
        if server.ended_by(Instant::now() + Duration::from_millis(2)) {
            return false;
        }
    }
    false
}

/// Whether anything listens on this TCP port of this host.
fn is_listening(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .any(|table| fs::read_to_string(table).is_ok_and(|text| lists_listener(&text, port)))
}

/// Reads a table of /proc/net: `sl local_address rem_address st …` in hexadecimal; 0A is LISTEN.
fn lists_listener(table: &str, port: u16) -> bool {
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().and_then(|address| address.rsplit(':').next());
        local.and_then(|hex| u16::from_str_radix(hex, 16).ok()) == Some(port) && words.nth(1) == Some("0A")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_seen_to_listen_without_being_connected_to() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(port));
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        assert!(!is_listening(port));
    }

    #[test]
    fn established_connections_are_no_listeners() {
        let table = "  sl  local_address rem_address   st\n   0: 0100007F:4A38 0100007F:1F90 01 0:0\n";
        assert!(!lists_listener(table, 0x4a38));
        assert!(lists_listener(&table.replace(" 01 ", " 0A "), 0x4a38));
    }

    #[test]
    fn free_ports_are_free() {
        let port = free_port().unwrap();
        assert!(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok());
    }
}

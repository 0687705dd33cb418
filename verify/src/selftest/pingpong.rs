// SPDX-License-Identifier: MIT
//! A stock program in event mode against itself, through the shim, over the soft device.
//!
//! `ib_send_lat -e` of perftest, else `ibv_rc_pingpong -e` of ibverbs-utils: unmodified programs,
//! since that is what FastWake is for. Both sides must succeed, and their counters must show that
//! the shim served waits.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::compare::cell::Kind;
use crate::compare::sample::{counter, hung_or_failed};
use crate::cpus;
use crate::devices::SOFT_DEVICE;
use crate::exec::pair::{free_port, shim_environment, wait_for_listener};
use crate::exec::process::{Child, Launch};
use crate::exec::PairOutput;
use crate::libraries::Libraries;

const ITERATIONS: &str = "1000";
const TIMEOUT: Duration = Duration::from_secs(30);

/// The programs, and what each needs besides device, port and number.
const PROGRAMS: &[(&str, &[&str])] = &[("ib_send_lat", &["-F", "-e"]), ("ibv_rc_pingpong", &["-e"])];

/// Runs the ping-pong.
///
/// # Errors
/// There is no program, a library is missing, a side failed, or no wait was served.
pub(super) fn test(libraries: &Libraries) -> Result<String> {
    let Some((program, options)) = PROGRAMS.iter().find(|(name, _)| crate::find_program(name).is_some())
    else {
        bail!(
            "neither ib_send_lat nor ibv_rc_pingpong is in PATH; apt-get install perftest (or ibverbs-utils)"
        );
    };
    let port = free_port().context("finding a free port")?;
    let logs = tempfile::tempdir()?;
    let cpus = cpus::choose(&cpus::allowed());
    let side = |name: &str, cpu: Option<&usize>, operand: Option<&str>| -> Result<Launch> {
        let common = ["-d", SOFT_DEVICE, "-n", ITERATIONS, "-p"].map(str::to_owned);
        let args = options.iter().map(|o| (*o).to_owned()).chain(common).chain([port.to_string()]);
        let mut launch = Launch {
            program: (*program).into(),
            args: args.chain(operand.map(str::to_owned)).map(Into::into).collect(),
            env: Vec::new(),
            unset: vec!["LD_PRELOAD"],
            cpu: cpu.copied(),
        };
        launch.env.extend(libraries.preload(true, true, None)?.map(|value| ("LD_PRELOAD", value)));
        shim_environment(&mut launch, Kind::Fastwake, &logs.path().join(name));
        Ok(launch)
    };
    let deadline = Instant::now() + TIMEOUT;
    let server = Child::start(&side("server", cpus.first(), None)?)?;
    if !wait_for_listener(&server, port, deadline) {
        let output = server.finish(Instant::now());
        bail!("the server of {program} never listened: {}, {}", output.end, output.text.trim());
    }
    let client = Child::start(&side("client", cpus.last(), Some("127.0.0.1"))?)?.finish(deadline);
    let mut pair = PairOutput { server: server.finish(deadline), client };
    for (side, name) in [(&mut pair.server, "server"), (&mut pair.client, "client")] {
        side.shim_log = fs::read_to_string(logs.path().join(name)).unwrap_or_default();
    }
    if let Some(why) = hung_or_failed(&pair) {
        bail!("{program} failed: {why}");
    }
    verdict(program, &pair)
}

/// Reads the counters of both sides.
fn verdict(program: &str, pair: &PairOutput) -> Result<String> {
    let sum = |key| {
        [&pair.server, &pair.client].iter().map(|side| counter(&side.shim_log, key)).sum::<Option<u64>>()
    };
    let (Some(waits), Some(served)) = (sum("waits"), sum("served")) else {
        bail!("{program} ran, but the shim left no counters; was it loaded? {}", pair.client.shim_log.trim());
    };
    if served == 0 {
        bail!("{program} ran, but none of its {waits} waits was served: it ran in native event mode");
    }
    Ok(format!("{program} -e over {SOFT_DEVICE}: {served} of {waits} waits served"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::process::SideOutput;

    fn pair(server: &str, client: &str) -> PairOutput {
        let side = |log: &str| SideOutput { shim_log: log.into(), ..SideOutput::not_started("") };
        PairOutput { server: side(server), client: side(client) }
    }

    #[test]
    fn served_waits_of_both_sides_are_needed_and_counted() {
        let good = verdict("p", &pair("stats waits=10 served=9\n", "stats waits=10 served=10\n")).unwrap();
        assert!(good.contains("19 of 20"), "{good}");
        let none = verdict("p", &pair("stats waits=10 served=0\n", "stats waits=10 served=0\n"));
        assert!(none.unwrap_err().to_string().contains("native"));
        let silent = verdict("p", &pair("stats waits=10 served=9\n", "step aside\n"));
        assert!(silent.unwrap_err().to_string().contains("step aside"));
    }
}

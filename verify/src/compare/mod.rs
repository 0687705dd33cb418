// SPDX-License-Identifier: MIT
//! `fastwaked compare`: a stock perftest polling, in event mode, and in event mode under the shim.
//!
//! This file goes from the options to the output; the parts are below: `cell` what runs, `rounds`
//! the loop, `sample` the judgement of a run, `result` the JSON, `checks` the bounds, `table` and
//! `plot` what people see.

pub(crate) mod cell;
pub(crate) mod checks;
pub(crate) mod plot;
pub(crate) mod result;
pub(crate) mod rounds;
pub(crate) mod sample;
pub(crate) mod stats;
pub(crate) mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, Context, Result};

use crate::cli::{CompareArgs, PlacementArg};
use crate::cpus;
use crate::devices::{self, Choice, Wish};
use crate::exec::pair::{Client, PairExecutor, Setup};
use crate::exec::remote::{address_towards, host_of, Session};
use crate::fingerprint::Host;
use crate::interrupt;
use crate::libraries::Libraries;
use crate::perftest::command::Command;
use crate::progress::Progress;
use crate::record::{runs_folder, Recorder};
use cell::{order, Kind, Placement};
use result::{summarize, Comparison, Subject};
use rounds::Watch;

/// Runs a comparison and prints, draws and records its result. The status is 0 where every kind of
/// run succeeded, whatever the figures.
///
/// # Errors
/// It could not begin, or its result could not be written.
pub(crate) fn compare(args: &CompareArgs) -> Result<ExitCode> {
    let command = Command::parse(&args.command)?;
    if let Some(operand) = command.operands.first() {
        bail!(
            "'{operand}' is too much: compare starts both sides itself; --client HOST chooses another host"
        );
    }
    if command.program.starts_with("ib_write") {
        bail!("perftest has no event mode for RDMA WRITE; compare ib_send_*, ib_read_* or ib_atomic_*");
    }
    if crate::find_program(command.program).is_none() {
        bail!("{} is not in PATH. Install perftest (Debian: apt-get install perftest).", command.program);
    }
    let device = device(args, &command)?;
    let (cpus, placements) = places(args, &cpus::allowed())?;
    let client = client(args, &device)?;
    let client_host = match &client {
        Client::Here => None,
        Client::There(session, _) => Some(session.welcome().host.clone()),
    };

    let gid = device.gid.map_or(String::new(), |gid| format!(", GID index {gid}"));
    eprintln!("device {}{gid}: {}", device.name, device.why);
    // Taken now: afterwards the load would be that of the comparison itself.
    let host = Host::of_this_machine(command.program);
    for line in notes(args, &placements, &host) {
        eprintln!("{line}");
    }
    let setup = Setup {
        client_device: args.client_device.clone().unwrap_or_else(|| device.name.clone()),
        command: command.clone(),
        device: device.name.clone(),
        gid: device.gid,
        soft: device.soft,
        cpus,
        timeout: Duration::from_secs(args.timeout),
        client,
    };
    let mut executor = PairExecutor::new(setup, &Libraries::locate())?;
    let mut recorder = match args.record {
        true => Some(Recorder::begin(runs_folder(&std::env::current_dir()?))?),
        false => None,
    };
    let figure = command.figure();
    let mut progress = Progress::new(args.rounds, order(figure, &placements, 0).len());
    let mut watches: Vec<&mut dyn Watch> = vec![&mut progress];
    watches.extend(recorder.as_mut().map(|r| r as &mut dyn Watch));
    interrupt::watch()?;
    let stop = &interrupt::happened;
    let tallies = rounds::run(&mut executor, figure, &placements, args.rounds, &mut watches, stop);
    drop(progress);
    if interrupt::happened() {
        bail!("interrupted; nothing is recorded");
    }

    let subject = Subject {
        device: &device.name,
        soft: device.soft,
        host,
        client_host,
        command: &command,
        placements: &placements,
        rounds: args.rounds,
    };
    let comparison = summarize(subject, &tallies);
    show(args, &table::render(&comparison))?;
    let command = canonical(args, &device, &comparison);
    let record = recorder.map(|r| r.complete(&command, &comparison)).transpose()?;
    keep(args, &comparison, record)?;
    match comparison.failures().len() {
        0 => Ok(ExitCode::SUCCESS),
        n => bail!("{n} of {} kinds of run failed; the reasons stand above", comparison.rows.len()),
    }
}

/// Prints for people: to standard output, or to standard error where that is for the JSON.
fn show(args: &CompareArgs, text: &str) -> Result<()> {
    if args.json.as_deref() == Some(Path::new("-")) {
        eprint!("{text}");
        return Ok(());
    }
    crate::print(text)
}

/// Writes the result wherever it was asked for, and says where that is. The table is on the screen
/// already: a folder that cannot be written costs no figures.
fn keep(args: &CompareArgs, comparison: &Comparison, record: Option<PathBuf>) -> Result<()> {
    let mut text = String::from("\n");
    for row in comparison.rows.iter().filter(|r| r.name == Kind::Fastwake && r.min.is_some()) {
        let why = match row.served_pct {
            None if !comparison.compares_rates() => "counted no wait; was it loaded, and is it on?",
            Some(served) if served < 50.0 => "served few waits; the others were native event mode",
            _ => continue,
        };
        text.push_str(&format!("note   {} {}: the shim {why}\n", row.placement, row.name));
    }
    if let Some(folder) = record {
        text.push_str(&format!("record {}\n", folder.display()));
    }
    if let Some(file) = &args.json {
        let json = serde_json::to_string_pretty(comparison)? + "\n";
        if file == Path::new("-") {
            crate::print(&json)?;
        } else {
            fs::write(file, json).with_context(|| format!("writing {}", file.display()))?;
            text.push_str(&format!("json   {}\n", file.display()));
        }
    }
    if !args.no_plot {
        match plot::draw(comparison, &args.plot.clone().unwrap_or_else(plot_folder)) {
            Ok(files) => {
                files.iter().for_each(|file| text.push_str(&format!("plot   {}\n", file.display())));
            }
            // Drawn unasked: not worth a failure.
            Err(error) if args.plot.is_none() => text.push_str(&format!("plot   none: {error:#}\n")),
            Err(error) => return Err(error),
        }
    }
    show(args, &text)
}

/// The device: options of compare go before those of the test.
fn device(args: &CompareArgs, command: &Command) -> Result<Choice> {
    if args.soft && command.device.as_deref().is_some_and(|d| d != devices::SOFT_DEVICE) {
        bail!("--soft and -d of the test name two devices; give one of them");
    }
    let wish = Wish {
        device: args.device.as_deref().or(command.device.as_deref()),
        gid: args.gid.or(command.gid),
        soft: args.soft,
    };
    devices::choose(wish, &devices::list())
}

type Cpus = (Option<usize>, Option<usize>);

/// The CPUs of server and client, and the placements that they allow.
fn places(args: &CompareArgs, allowed: &[usize]) -> Result<(Cpus, Vec<Placement>)> {
    let given = match &args.cores {
        Some(list) => Some(parse_cores(list, allowed)?),
        None => None,
    };
    if args.client.is_some() {
        if args.placement.is_some() {
            bail!("--placement is about one host; with --client there are two");
        }
        let cpu = |i: usize| given.as_ref().and_then(|cores| cores.get(i).copied());
        return Ok(((cpu(0), cpu(1)), vec![Placement::TwoHosts]));
    }
    let cores = given.unwrap_or_else(|| cpus::choose(allowed));
    let cpus = (cores.first().copied(), cores.get(1).copied());
    let placements = match (args.placement, cores.len()) {
        (Some(PlacementArg::OneCore), _) => vec![Placement::OneCore],
        (Some(PlacementArg::TwoCores), 2..) => vec![Placement::TwoCores],
        (Some(PlacementArg::TwoCores), _) => {
            bail!("two cores were asked for, but this process may use one only")
        }
        (None, 2..) => vec![Placement::TwoCores, Placement::OneCore],
        (None, _) => vec![Placement::OneCore],
    };
    Ok((cpus, placements))
}

/// `A,B` or `A`, in the order given: the first is the server's.
fn parse_cores(list: &str, allowed: &[usize]) -> Result<Vec<usize>> {
    let cores: Option<Vec<usize>> = list.split(',').map(|c| c.trim().parse().ok()).collect();
    match cores {
        Some(cores) if cores.len() <= 2 && (cores.len() < 2 || cores[0] != cores[1]) => {
            match cores.iter().find(|c| !allowed.contains(c)) {
                Some(cpu) => bail!("this process may not run on CPU {cpu}; it may use {allowed:?}"),
                None => Ok(cores),
            }
        }
        _ => bail!("--cores takes one or two different CPUs, such as 0,1, not '{list}'"),
    }
}

/// Reaches the client host.
fn client(args: &CompareArgs, device: &Choice) -> Result<Client> {
    let Some(name) = &args.client else { return Ok(Client::Here) };
    let address = match args.server_address {
        Some(address) => address,
        None => address_towards(host_of(name))?,
    };
    if device.soft && !address.is_loopback() {
        bail!("the soft device joins processes of one host: it cannot reach a client on {}", host_of(name));
    }
    let session = Session::open(name, args.token_file.as_deref(), &args.client_fastwaked)?;
    Ok(Client::There(Box::new(session), address.to_string()))
}

/// What a user should know before the figures come.
fn notes(args: &CompareArgs, placements: &[Placement], host: &Host) -> Vec<String> {
    let mut notes = Vec::new();
    if placements == [Placement::OneCore] && args.placement.is_none() {
        notes.push("one CPU only may be used: two-cores is left out".to_owned());
    }
    if placements == [Placement::TwoHosts] {
        notes.push("the client is on another host: there are no raw baselines".to_owned());
    }
    if let Some(quota) = cpus::quota().filter(|q| *q < 2.0) {
        notes.push(format!(
            "the cgroup's quota is {quota:.2} CPUs: polling will be throttled and figures suffer"
        ));
    }
    if let Some(load) = host.load_average.filter(|load| *load > 0.5 * host.cores_allowed as f64) {
        notes.push(format!("the host is busy (load {load}): figures suffer"));
    }
    notes
}

/// The command of a record: what repeats the comparison, without paths and host names.
fn canonical(args: &CompareArgs, device: &Choice, comparison: &Comparison) -> String {
    let mut words = vec!["fastwaked compare --rounds".to_owned(), args.rounds.to_string()];
    if device.soft {
        words.push("--soft".to_owned());
    } else {
        words.extend(["--device".to_owned(), device.name.clone()]);
    }
    if let Some(gid) = device.gid {
        words.extend(["--gid".to_owned(), gid.to_string()]);
    }
    match args.placement {
        Some(PlacementArg::OneCore) => words.push("--placement one-core".to_owned()),
        Some(PlacementArg::TwoCores) => words.push("--placement two-cores".to_owned()),
        None => {}
    }
    if args.client.is_some() {
        words.push("--client CLIENT".to_owned());
    }
    words.extend(["--record --".to_owned(), comparison.command.clone()]);
    words.join(" ")
}

/// Where the plot goes by default: the target folder that this program was built in, else here.
fn plot_folder() -> PathBuf {
    let exe = std::env::current_exe().unwrap_or_default();
    exe.ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").is_file())
        .map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn args(line: &str) -> CompareArgs {
        let words = format!("fastwaked compare {line} -- ib_send_lat -e");
        match crate::cli::Cli::try_parse_from(words.split_whitespace()).unwrap().command {
            Some(crate::cli::Command::Compare(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn both_placements_are_measured_where_there_are_two_cores() {
        let (_, placements) = places(&args(""), &[3, 5]).unwrap();
        assert_eq!(placements, [Placement::TwoCores, Placement::OneCore]);
        let (cpus, placements) = places(&args(""), &[3]).unwrap();
        assert_eq!((cpus, placements), ((Some(3), None), vec![Placement::OneCore]));
        assert!(places(&args("--placement two-cores"), &[3]).is_err());
    }

    #[test]
    fn cores_are_taken_in_the_order_given_and_must_be_allowed() {
        assert_eq!(places(&args("--cores 5,3"), &[3, 5]).unwrap().0, (Some(5), Some(3)));
        for bad in ["0,1", "3,3", "a", "3,5,7", ""] {
            let mut args = args("");
            args.cores = Some(bad.into());
            assert!(places(&args, &[3, 5, 7]).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_second_host_is_a_placement_of_its_own_and_nothing_is_bound_unasked() {
        let (cpus, placements) = places(&args("--client h"), &[0, 1]).unwrap();
        assert_eq!((cpus, placements), ((None, None), vec![Placement::TwoHosts]));
    }

    #[test]
    fn the_recorded_command_repeats_the_comparison_without_paths_and_hosts() {
        let args = args("--rounds 3 --soft --json /home/me/x.json --client me@host");
        let device = Choice { name: "fw_soft0".into(), soft: true, gid: None, why: String::new() };
        assert_eq!(
            canonical(&args, &device, &result::tests::good()),
            "fastwaked compare --rounds 3 --soft --client CLIENT --record -- ib_send_lat -s 64"
        );
    }

    #[test]
    fn two_names_for_the_device_are_refused() {
        let command = Command::parse(&["ib_send_lat", "-d", "mlx5_0"]).unwrap();
        assert!(device(&args("--soft"), &command).is_err());
    }
}

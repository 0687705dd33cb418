// SPDX-License-Identifier: MIT
//! `fastwaked`: runs, measures and explains FastWake.
//!
//! Errors end with status 1 and one line on standard error that says what to do next; `run` ends
//! with the status of its program.

mod cli;
mod clock;
mod compare;
mod cpus;
mod devices;
mod exec;
mod fingerprint;
mod interrupt;
mod libraries;
mod man;
mod perftest;
mod progress;
mod raw;
mod record;
mod run;
mod runs;
mod selftest;
mod status;
mod version;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match cli.verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level)).init();
    match dispatch(&cli) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("fastwaked: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: &Cli) -> Result<ExitCode> {
    if cli.version {
        return version::version();
    }
    // Without a subcommand clap has printed the help and ended the program.
    let Some(command) = &cli.command else { return Ok(ExitCode::FAILURE) };
    match command {
        Command::Run(args) => return run::run(args),
        Command::Compare(args) => return compare::compare(args),
        Command::Runs(args) => return runs::runs(args),
        Command::Agent(args) => exec::agent::agent(args)?,
        Command::Man => print(&man::page()?)?,
        Command::RawPeer(args) => raw::peer(args)?,
        Command::Status(args) => return status::status(args.json),
        Command::Selftest(args) => return selftest::selftest(args.json),
        Command::LibraryVersion(args) => version::library_version(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints to standard output. A reader that has gone, such as `head`, is no error.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Finds a program as exec(3) does.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn programs_are_found_in_the_path_only() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-here").is_none());
    }
}

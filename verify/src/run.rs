// SPDX-License-Identifier: MIT
//! `fastwaked run`: replaces this process by a program under FastWake.
//!
//! It becomes the program by exec(3): process id, terminal, signals and exit status are then the
//! program's own, and there is nothing left in between that could get one of them wrong.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::Result;
use fastwake::settings::Settings;

use crate::cli::RunArgs;
use crate::libraries::Libraries;

/// Runs the program; returns only where it could not be started, with the shell's status for that:
/// 127 not found, 126 found but not executable.
///
/// # Errors
/// A setting that is not understood, or a library that is not there.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode> {
    let settings = settings(args);
    check(&settings)?;
    let before = std::env::var_os("LD_PRELOAD");
    let preload = Libraries::locate().preload(true, args.soft, before.as_deref())?;

    let mut command = Command::new(&args.command[0]);
    command.args(&args.command[1..]);
    command.envs(settings.iter().map(|(name, value)| (name, value)));
    if let Some(preload) = preload {
        log::info!("LD_PRELOAD={}", preload.to_string_lossy());
        command.env("LD_PRELOAD", preload);
    }
    let error = command.exec();
    let (status, advice) = match error.kind() {
        std::io::ErrorKind::NotFound => (127, "Is it spelled right and in PATH?"),
        _ => (126, "Is it an executable file?"),
    };
    eprintln!("fastwaked: cannot run '{}': {error}. {advice}", args.command[0]);
    Ok(ExitCode::from(status))
}

/// What the options set, as environment variables.
fn settings(args: &RunArgs) -> Vec<(&'static str, OsString)> {
    let mut settings: Vec<(&'static str, OsString)> = Vec::new();
    for (name, value) in [("FW_MODE", &args.mode), ("FW_CORES", &args.cores), ("FW_IDLE", &args.idle)] {
        if let Some(value) = value {
            settings.push((name, value.into()));
        }
    }
    if args.stats {
        settings.push(("FW_STATS", "1".into()));
    }
    settings
}

/// Checks the options, and the variables that the program inherits, with the shim's own table: the
/// shim would only step aside.
fn check(options: &[(&'static str, OsString)]) -> Result<()> {
    let lookup = |name: &str| {
        let option = options.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
        option.or_else(|| std::env::var_os(name)).map(|v| v.into_encoded_bytes())
    };
    Settings::from_lookup(lookup)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(mode: Option<&str>, idle: Option<&str>) -> RunArgs {
        RunArgs {
            mode: mode.map(str::to_owned),
            cores: None,
            idle: idle.map(str::to_owned),
            soft: false,
            stats: true,
            command: vec!["true".into()],
        }
    }

    #[test]
    fn options_become_settings() {
        let set = settings(&args(Some("off"), Some("busy")));
        assert_eq!(
            set,
            [("FW_MODE", "off".into()), ("FW_IDLE", "busy".into()), ("FW_STATS", OsString::from("1"))]
        );
        assert!(check(&set).is_ok());
    }

    #[test]
    fn a_mode_that_does_not_exist_is_refused_before_the_program_starts() {
        let error = check(&settings(&args(Some("fast"), None))).unwrap_err().to_string();
        assert!(error.contains("FW_MODE") && error.contains("dispatcher"), "{error}");
    }
}

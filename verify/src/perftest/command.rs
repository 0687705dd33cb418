// SPDX-License-Identifier: MIT
//! A perftest command line: taken apart, and put together again for each kind of run.
//!
//! What a comparison varies (`-e`, device, port, host, iterations, the unit of the report) is taken
//! out; the rest passes through in its order. Nothing here starts a process.

use std::fmt;

use super::options::{self, PerftestOption, Use};

/// The programs that a comparison and the agent run; nothing else ever.
pub(crate) const PROGRAMS: &[&str] = &[
    "ib_send_lat",
    "ib_write_lat",
    "ib_read_lat",
    "ib_atomic_lat",
    "ib_send_bw",
    "ib_write_bw",
    "ib_read_bw",
    "ib_atomic_bw",
];

/// What a program measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    /// `*_lat`: latency.
    Latency,
    /// `*_bw`: messages per second.
    Rate,
}

/// A command line, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    /// One of [`PROGRAMS`].
    pub program: &'static str,
    /// The options that pass through.
    pub options: Vec<String>,
    /// `-n`, if given.
    pub iterations: Option<u32>,
    /// `-d`, if given.
    pub device: Option<String>,
    /// `-x`, if given.
    pub gid: Option<u32>,
    /// The operands: the server's address, where there is one.
    pub operands: Vec<String>,
}

/// Why a command line cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CommandError {
    /// Not a program of perftest.
    Program(String),
    /// Not an option of perftest 4.5.
    Unknown(String),
    /// An option that needs a value came without one.
    NoValue(String),
    /// A value that is not a number where one is needed.
    NotANumber(String, String),
    /// An option that a comparison cannot take, and why.
    Refused(String, &'static str),
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Program(name) => {
                write!(f, "'{name}' is not a perftest program; there are {}", PROGRAMS.join(", "))
            }
            CommandError::Unknown(option) => write!(f, "'{option}' is not an option of perftest 4.5"),
            CommandError::NoValue(option) => write!(f, "'{option}' needs a value"),
            CommandError::NotANumber(option, value) => write!(f, "'{option}' needs a number, not '{value}'"),
            CommandError::Refused(option, why) => write!(f, "'{option}' cannot be compared: {why}"),
        }
    }
}

impl std::error::Error for CommandError {}

/// What varies from run to run.
#[derive(Clone, Debug)]
pub(crate) struct Variation<'a> {
    /// `-e`.
    pub events: bool,
    /// `-C`: report in cycles, which latency tests alone know.
    pub cycles: bool,
    /// `-d`.
    pub device: &'a str,
    /// `-x`.
    pub gid: Option<u32>,
    /// `-p`: TCP port of the exchange.
    pub port: u16,
    /// `-n`.
    pub iterations: u32,
    /// The server's address for the client, `None` for the server.
    pub server: Option<&'a str>,
}

impl Command {
    /// Takes a command line apart as getopt_long(3) does: letters in clusters, values attached or
    /// apart, operands anywhere, `--` ends the options.
    ///
    /// # Errors
    /// The first word that cannot be used.
    pub(crate) fn parse<S: AsRef<str>>(words: &[S]) -> Result<Self, CommandError> {
        let mut words = words.iter().map(AsRef::as_ref);
        let name = words.next().unwrap_or_default();
        let base = name.rsplit('/').next().unwrap_or(name);
        let program =
            PROGRAMS.iter().find(|p| **p == base).ok_or_else(|| CommandError::Program(name.to_owned()))?;
        let mut command = Command {
            program,
            options: Vec::new(),
            iterations: None,
            device: None,
            gid: None,
            operands: Vec::new(),
        };
        while let Some(word) = words.next() {
            if word == "--" {
                command.operands.extend(words.by_ref().map(str::to_owned));
            } else if let Some(long) = word.strip_prefix("--") {
                let (name, attached) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
                let option = options::long(name).ok_or_else(|| CommandError::Unknown(word.to_owned()))?;
                let value = match (option.value, attached) {
                    (false, Some(_)) => return Err(CommandError::Unknown(word.to_owned())),
                    (false, None) => None,
                    (true, Some(value)) => Some(value),
                    (true, None) => Some(words.next().ok_or(CommandError::NoValue(word.to_owned()))?),
                };
                command.take(option, value)?;
            } else if word.len() > 1 && word.starts_with('-') {
                command.cluster(&word[1..], &mut words)?;
            } else {
                command.operands.push(word.to_owned());
            }
        }
        Ok(command)
    }

    /// The letters behind one dash; the last may take a value from the next word.
    fn cluster<'a>(
        &mut self,
        mut letters: &'a str,
        words: &mut impl Iterator<Item = &'a str>,
    ) -> Result<(), CommandError> {
        while let Some(letter) = letters.chars().next() {
            letters = &letters[letter.len_utf8()..];
            let name = format!("-{letter}");
            let option = options::short(letter).ok_or_else(|| CommandError::Unknown(name.clone()))?;
            if option.value {
                let attached = (!letters.is_empty()).then_some(letters);
                let value = attached.or_else(|| words.next()).ok_or(CommandError::NoValue(name))?;
                return self.take(option, Some(value));
            }
            self.take(option, None)?;
        }
        Ok(())
    }

    fn take(&mut self, option: &PerftestOption, value: Option<&str>) -> Result<(), CommandError> {
        let name =
            if option.short == ' ' { format!("--{}", option.long) } else { format!("-{}", option.short) };
        let number = |value: Option<&str>| {
            let value = value.unwrap_or_default();
            value.parse().map_err(|_| CommandError::NotANumber(name.clone(), value.to_owned()))
        };
        match option.usage {
            Use::Refused(why) => return Err(CommandError::Refused(name, why)),
            Use::Ours => {}
            Use::Device => self.device = value.map(str::to_owned),
            Use::Gid => self.gid = Some(number(value)?),
            Use::Iterations => self.iterations = Some(number(value)?),
            Use::Pass => match value {
                Some(value) if option.short == ' ' => self.options.push(format!("{name}={value}")),
                Some(value) => self.options.extend([name, value.to_owned()]),
                None => self.options.push(name),
            },
        }
        Ok(())
    }

    /// What the program measures.
    pub(crate) fn figure(&self) -> Figure {
        if self.program.ends_with("_lat") {
            Figure::Latency
        } else {
            Figure::Rate
        }
    }

    /// Whether the server takes part in every message: SEND, and WRITE, whose receiver polls the
    /// payload. READ and ATOMIC find a passive one, and their latency is that of the whole
    /// operation.
    pub(crate) fn server_is_active(&self) -> bool {
        self.program.starts_with("ib_send") || self.program.starts_with("ib_write")
    }

    /// Whether the test's sockets are librdmacm's, which no look at the TCP ports finds.
    pub(crate) fn uses_rdma_cm(&self) -> bool {
        self.options.iter().any(|o| o == "-R" || o == "-z")
    }

    /// The command as the user would type it, without what varies.
    pub(crate) fn display(&self) -> String {
        let mut words = vec![self.program.to_owned()];
        words.extend(self.options.iter().cloned());
        if let Some(iterations) = self.iterations {
            words.extend(["-n".to_owned(), iterations.to_string()]);
        }
        words.join(" ")
    }

    /// The arguments of one side of one run.
    pub(crate) fn args(&self, variation: &Variation<'_>) -> Vec<String> {
        let mut args = vec!["-F".to_owned(), "-d".to_owned(), variation.device.to_owned()];
        if let Some(gid) = variation.gid {
            args.extend(["-x".to_owned(), gid.to_string()]);
        }
        args.extend(["-p".to_owned(), variation.port.to_string()]);
        args.extend(["-n".to_owned(), variation.iterations.to_string()]);
        if variation.cycles {
            args.push("-C".to_owned());
        }
        if variation.events {
            args.push("-e".to_owned());
        }
        args.extend(self.options.iter().cloned());
        args.extend(variation.server.map(str::to_owned));
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Command, CommandError> {
        Command::parse(&line.split_whitespace().collect::<Vec<_>>())
    }

    #[test]
    fn options_pass_through_and_what_varies_is_taken_out() {
        let c = parse("/usr/bin/ib_send_lat -eFs 64 -d mlx5_0 -x3 --iters=500 --tclass 5 -p 7 -q4").unwrap();
        assert_eq!(c.program, "ib_send_lat");
        assert_eq!(c.options, ["-s", "64", "--tclass=5", "-q", "4"]);
        assert_eq!((c.device.as_deref(), c.gid, c.iterations), (Some("mlx5_0"), Some(3), Some(500)));
        assert!(c.operands.is_empty());
        assert_eq!(c.display(), "ib_send_lat -s 64 --tclass=5 -q 4 -n 500");
    }

    #[test]
    fn a_run_sets_events_and_port_and_host() {
        let c = parse("ib_send_lat -s 64 -e").unwrap();
        let mut v = Variation {
            events: true,
            cycles: true,
            device: "fw_soft0",
            gid: Some(1),
            port: 2000,
            iterations: 100,
            server: Some("127.0.0.1"),
        };
        let line = "-F -d fw_soft0 -x 1 -p 2000 -n 100 -C -e -s 64 127.0.0.1";
        assert_eq!(c.args(&v).join(" "), line);
        (v.events, v.cycles, v.gid, v.server) = (false, false, None, None);
        assert_eq!(c.args(&v).join(" "), "-F -d fw_soft0 -p 2000 -n 100 -s 64");
        assert_eq!(parse(&format!("ib_send_lat {line}")).unwrap().operands, ["127.0.0.1"]);
    }

    #[test]
    fn what_cannot_be_compared_is_refused_with_the_reason() {
        for (line, word) in [
            ("ib_send_lat -a", "many sizes"),
            ("ib_send_lat -eD 5", "duration"),
            ("ib_send_lat --out_json_file=x", "files"),
            ("ib_send_lat -H", "sample"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(matches!(error, CommandError::Refused(..)), "{line}: {error}");
            assert!(error.to_string().contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn what_is_not_perftest_is_refused() {
        assert_eq!(parse("sh -c true"), Err(CommandError::Program("sh".into())));
        assert_eq!(parse(""), Err(CommandError::Program(String::new())));
        assert_eq!(parse("ib_send_lat --no-such"), Err(CommandError::Unknown("--no-such".into())));
        assert_eq!(parse("ib_send_lat -Z"), Err(CommandError::Unknown("-Z".into())));
        assert_eq!(parse("ib_send_lat -s"), Err(CommandError::NoValue("-s".into())));
        assert_eq!(parse("ib_send_lat -n many"), Err(CommandError::NotANumber("-n".into(), "many".into())));
    }

    #[test]
    fn operands_may_stand_anywhere_and_behind_a_double_dash() {
        let c = parse("ib_send_bw host -s 8 -- -odd").unwrap();
        assert_eq!(c.operands, ["host", "-odd"]);
        assert_eq!((c.figure(), c.server_is_active()), (Figure::Rate, true));
        assert!(!parse("ib_read_lat").unwrap().server_is_active());
        assert!(parse("ib_send_lat -R").unwrap().uses_rdma_cm());
    }
}

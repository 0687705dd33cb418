// SPDX-License-Identifier: MIT
//! `fastwaked agent`: runs the client's side of comparisons for another host.
//!
//! It is reached over TCP with a token, or started over ssh with its standard input and output as
//! the connection. It listens on loopback unless told otherwise, serves one session at a time, and
//! runs nothing but perftest: the program must be on the list, each option must be one that
//! `compare` passes on (none of them names a file), and the only operand is an IP address. Preload
//! libraries are this host's own.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use super::pair::shim_environment;
use super::process::{Child, Launch, SideOutput};
use super::wire::{receive, send, Hello, Reply, Request, Welcome, PROTOCOL};
use crate::cli::AgentArgs;
use crate::clock::Calibration;
use crate::compare::cell::Kind;
use crate::fingerprint::Host;
use crate::libraries::Libraries;
use crate::perftest::command::Command;

/// Longest wait for the first line, and between two requests.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest run, in seconds, whatever a request asks for.
const RUN_LIMIT_S: u64 = 600;
/// Shortest token, in characters.
const TOKEN_MIN: usize = 16;

/// Runs the agent; returns only over ssh, at the end of the session.
///
/// # Errors
/// It cannot listen, the token is unusable, or, over ssh, the session broke.
pub(crate) fn agent(args: &AgentArgs) -> Result<()> {
    let welcome = Welcome {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cycles_per_us: Calibration::begin().per_us(),
        host: Host::of_this_machine("ib_send_lat"),
    };
    if args.stdio {
        return session(&mut io::stdin().lock(), &mut io::stdout().lock(), None, &welcome, || Ok(()));
    }
    let token = match &args.token_file {
        Some(file) => read_token(file)?,
        None => new_token()?,
    };
    let listener = TcpListener::bind(args.listen).with_context(|| format!("listening on {}", args.listen))?;
    let mut out = io::stdout().lock();
    writeln!(out, "listening on agent://{}", listener.local_addr()?)?;
    if args.token_file.is_none() {
        writeln!(out, "token {token}")?;
    }
    out.flush()?;
    if !args.listen.ip().is_loopback() {
        log::warn!("the token and all traffic cross the network in the clear");
    }
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                log::info!("session from {peer}");
                if let Err(error) = tcp_session(&stream, &token, &welcome) {
                    log::warn!("session from {peer}: {error:#}");
                }
            }
            Err(error) => {
                log::warn!("accept: {error}");
                // Out of descriptors, most likely: not worth a spin.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn tcp_session(stream: &TcpStream, token: &str, welcome: &Welcome) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    let greeted = || stream.set_read_timeout(Some(IDLE_TIMEOUT));
    session(&mut BufReader::new(stream), &mut &*stream, Some(token), welcome, greeted)
}

/// One session, from its hello to its end; `greeted` is called once the token was right.
fn session(
    from: &mut impl BufRead,
    to: &mut impl Write,
    token: Option<&str>,
    welcome: &Welcome,
    greeted: impl FnOnce() -> io::Result<()>,
) -> Result<()> {
    let Some(hello) = receive::<Hello>(from)? else { return Ok(()) };
    let refusal = if hello.protocol != PROTOCOL {
        Some(format!("this agent speaks protocol {PROTOCOL}, not {}", hello.protocol))
    } else if token.is_some_and(|token| !same(token.as_bytes(), hello.token.as_bytes())) {
        Some("wrong token".to_owned())
    } else {
        None
    };
    if let Some(why) = refusal {
        send(to, &Reply::Refused(why.clone()))?;
        bail!(why);
    }
    greeted()?;
    send(to, &Reply::Welcome(Box::new(welcome.clone())))?;
    while let Some(request) = receive::<Request>(from)? {
        let launch = match launch(&request, &Libraries::locate()) {
            Ok(launch) => launch,
            Err(error) => {
                send(to, &Reply::Refused(format!("{error:#}")))?;
                bail!(error);
            }
        };
        log::info!("runs {}", request.command.join(" "));
        send(to, &Reply::Done(run(launch, &request)))?;
    }
    Ok(())
}

/// Compares in a time that does not tell where the first difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (x, y)| all | (x ^ y)) == 0
}

/// What a request asks for, or why it is not done.
fn launch(request: &Request, libraries: &Libraries) -> Result<Launch> {
    let command = Command::parse(&request.command)?;
    let [server] = &command.operands[..] else { bail!("a client's run names one server") };
    server.parse::<IpAddr>().with_context(|| format!("'{server}' is not an IP address"))?;
    let preload = libraries.preload(request.shim, request.soft, None)?;
    Ok(Launch {
        // The name from the list, found in this host's PATH; never a path of the other side's.
        program: command.program.into(),
        args: request.command[1..].iter().map(Into::into).collect(),
        env: preload.into_iter().map(|value| ("LD_PRELOAD", value)).collect(),
        unset: vec!["LD_PRELOAD"],
        cpu: request.cpu,
    })
}

fn run(mut launch: Launch, request: &Request) -> SideOutput {
    let started = tempfile::tempdir().and_then(|logs| {
        let log = logs.path().join("client");
        shim_environment(&mut launch, if request.shim { Kind::Fastwake } else { Kind::Event }, &log);
        Ok((Child::start(&launch)?, log, logs))
    });
    match started {
        Err(error) => SideOutput::not_started(format!("{}: {error}", launch.program.to_string_lossy())),
        Ok((child, log, _logs)) => {
            let limit = Duration::from_secs(request.timeout_s.clamp(1, RUN_LIMIT_S));
            let mut output = child.finish(Instant::now() + limit);
            output.shim_log = fs::read_to_string(log).unwrap_or_default();
            output
        }
    }
}

/// Reads a token file, for both sides.
///
/// # Errors
/// It cannot be read, or the token is too short to be one.
pub(crate) fn read_token(file: &Path) -> Result<String> {
    let text =
        fs::read_to_string(file).with_context(|| format!("reading the token from {}", file.display()))?;
    let token = text.trim();
    if token.len() < TOKEN_MIN {
        bail!("the token in {} has fewer than {TOKEN_MIN} characters", file.display());
    }
    Ok(token.to_owned())
}

fn new_token() -> Result<String> {
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> Request {
        Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            shim: false,
            soft: false,
            cpu: None,
            timeout_s: 5,
        }
    }

    fn refused(line: &str) -> String {
        launch(&request(line), &Libraries::in_folders(Vec::new())).unwrap_err().to_string()
    }

    #[test]
    fn nothing_but_perftest_against_an_address_is_run() {
        assert!(refused("sh -c id 127.0.0.1").contains("not a perftest program"));
        assert!(refused("ib_send_lat --out_json_file=/etc/x 127.0.0.1").contains("files"));
        assert!(refused("ib_send_lat --unheard-of 127.0.0.1").contains("not an option"));
        assert!(refused("ib_send_lat").contains("one server"));
        assert!(refused("ib_send_lat some-host").contains("not an IP address"));
        let good =
            launch(&request("/x/ib_send_lat -e 127.0.0.1"), &Libraries::in_folders(Vec::new())).unwrap();
        assert_eq!(good.program, "ib_send_lat");
        assert_eq!(good.args, ["-e", "127.0.0.1"]);
    }

    fn talk(hello: &str, token: Option<&str>) -> (String, bool) {
        let welcome = Welcome { version: "1".into(), cycles_per_us: 1.0, host: Host::default() };
        let mut out = Vec::new();
        let mut greeted = false;
        let result = session(&mut hello.as_bytes(), &mut out, token, &welcome, || {
            greeted = true;
            Ok(())
        });
        assert_eq!(result.is_ok(), greeted);
        (String::from_utf8(out).unwrap(), greeted)
    }

    #[test]
    fn a_session_needs_the_token_and_the_protocol() {
        let hello = "{\"protocol\":1,\"token\":\"0123456789abcdef\"}\n";
        assert!(talk(hello, Some("0123456789abcdef")).1);
        assert!(talk(hello, None).1);
        for token in ["0123456789abcdeX", "0123456789abcde", ""] {
            let (text, greeted) = talk(hello, Some(token));
            assert!(!greeted && text.contains("wrong token"), "{token}: {text}");
        }
        assert!(talk(&hello.replace(":1,", ":9,"), None).0.contains("protocol"));
    }

    #[test]
    fn short_tokens_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "short\n").unwrap();
        assert!(read_token(file.path()).is_err());
        fs::write(file.path(), " 0123456789abcdef\n").unwrap();
        assert_eq!(read_token(file.path()).unwrap(), "0123456789abcdef");
        assert_eq!(new_token().unwrap().len(), 32);
        assert_ne!(new_token().unwrap(), new_token().unwrap());
    }
}

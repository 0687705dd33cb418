// SPDX-License-Identifier: MIT
//! The protocol between `compare` and the agent of a client host: lines of JSON, each answered by
//! one line.
//!
//! The client sends a [`Hello`], the agent answers [`Reply::Welcome`]; then each [`Request`] is
//! answered by [`Reply::Done`]. [`Reply::Refused`] ends the session. The agent believes nothing
//! that it reads here: see `agent`.

use std::io::{BufRead, Read, Write};

use anyhow::{bail, Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::process::SideOutput;
use crate::fingerprint::Host;

/// Version of this protocol.
pub(crate) const PROTOCOL: u32 = 1;

/// Longest line, in bytes: a run's output and some.
const LINE_LIMIT: u64 = 1024 * 1024;

/// The first line of a session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The agent's token; empty over ssh, which has asked for credentials itself.
    pub token: String,
}

/// What the agent says of its host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Welcome {
    /// Version of its fastwaked.
    pub version: String,
    /// Rate of its cycle counter, in cycles per microsecond.
    pub cycles_per_us: f64,
    /// Its fingerprint.
    pub host: Host,
}

/// One run of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// A perftest program and its arguments.
    pub command: Vec<String>,
    /// Whether to preload the shim.
    pub shim: bool,
    /// Whether to preload the soft device.
    pub soft: bool,
    /// The CPU to bind to.
    pub cpu: Option<usize>,
    /// Seconds after which the run is killed.
    pub timeout_s: u64,
}

/// The agent's lines.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To a hello.
    Welcome(Box<Welcome>),
    /// To a request: what the run left behind.
    Done(SideOutput),
    /// To anything that the agent does not do.
    Refused(String),
}

/// Sends one line.
///
/// # Errors
/// The connection broke.
pub(crate) fn send<T: Serialize>(to: &mut impl Write, message: &T) -> Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()?;
    Ok(())
}

/// Receives one line; `None` where the other side has closed the connection between two lines.
///
/// # Errors
/// The connection broke, timed out or ended within a line, or the line is too long or not what was
/// expected.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>> {
    let mut line = Vec::new();
    from.take(LINE_LIMIT).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line).context("not a line of this protocol")?)),
        Some(_) if line.len() as u64 == LINE_LIMIT => bail!("a line of more than {LINE_LIMIT} bytes"),
        Some(_) => bail!("the connection ended within a line"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let mut wire = Vec::new();
        send(&mut wire, &Hello { protocol: 1, token: "a\nb".into() }).unwrap();
        let mut wire = &wire[..];
        let hello: Hello = receive(&mut wire).unwrap().unwrap();
        assert_eq!((hello.protocol, hello.token.as_str()), (1, "a\nb"));
        assert!(receive::<Hello>(&mut wire).unwrap().is_none());
    }

    #[test]
    fn lines_that_are_cut_off_or_endless_or_strange_are_errors() {
        assert!(receive::<Hello>(&mut &b"{\"protocol\":1"[..]).is_err());
        assert!(receive::<Hello>(&mut &b"GET / HTTP/1.0\n"[..]).is_err());
        assert!(receive::<Hello>(&mut std::io::BufReader::new(std::io::repeat(b'x'))).is_err());
    }
}

// SPDX-License-Identifier: MIT
//! The other end of an agent: a session with a client host, over TCP or over ssh.
//!
//! `--client HOST` starts `fastwaked agent` there over ssh and talks through its pipes;
//! `--client agent://HOST:PORT` connects to one that runs. From here on both are the same.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{bail, Context, Result};

use super::agent::read_token;
use super::process::SideOutput;
use super::wire::{receive, send, Hello, Reply, Request, Welcome, PROTOCOL};

/// Longest wait for a connection, and for an answer beyond the time-out of the run itself.
const PATIENCE: Duration = Duration::from_secs(15);

/// A session with the agent of a client host.
pub(crate) struct Session {
    from: Box<dyn BufRead>,
    to: Box<dyn Write>,
    /// The connection, of which the time-out is set for each run; none over ssh, which notices a
    /// dead peer itself.
    stream: Option<TcpStream>,
    ssh: Option<std::process::Child>,
    welcome: Welcome,
}

impl Session {
    /// Opens a session with `client`, which is what `--client` was given.
    ///
    /// # Errors
    /// The host cannot be reached, ssh is not installed, or the agent refuses.
    pub(crate) fn open(client: &str, token_file: Option<&Path>, fastwaked: &str) -> Result<Self> {
        match client.strip_prefix("agent://") {
            Some(address) => Self::over_tcp(address, token_file),
            None => Self::over_ssh(client, fastwaked),
        }
    }

    fn over_tcp(address: &str, token_file: Option<&Path>) -> Result<Self> {
        let Some(token_file) = token_file else {
            bail!("an agent wants its token: give --token-file FILE with what it printed at start");
        };
        let token = read_token(token_file)?;
        let to = address
            .to_socket_addrs()
            .with_context(|| format!("'{address}' is not HOST:PORT"))?
            .next()
            .with_context(|| format!("'{address}' has no address"))?;
        let stream = TcpStream::connect_timeout(&to, PATIENCE).with_context(|| {
            format!("no agent at {address}; start one there with 'fastwaked agent --listen ADDR:PORT'")
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let from = Box::new(BufReader::new(stream.try_clone()?));
        Self::greet(from, Box::new(stream.try_clone()?), Some(stream), None, token)
    }

    fn over_ssh(host: &str, fastwaked: &str) -> Result<Self> {
        if host.starts_with('-') {
            bail!("'{host}' is not the name of a host");
        }
        let spawned = Command::new("ssh")
            .args(["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "--"])
            .args([fastwaked, "agent", "--stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut ssh = match spawned {
            Ok(ssh) => ssh,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "ssh is not installed here. Install it (openssh-client), or start 'fastwaked agent' on {host} \
                 and give --client agent://{host}:PORT"
            ),
            Err(error) => return Err(error).context("starting ssh"),
        };
        let (Some(to), Some(from)) = (ssh.stdin.take(), ssh.stdout.take()) else {
            bail!("ssh was started without pipes");
        };
        Self::greet(Box::new(BufReader::new(from)), Box::new(to), None, Some(ssh), String::new())
            .with_context(|| {
                format!("no session with {host}: ssh without a password and {fastwaked} there are needed")
            })
    }

    fn greet(
        mut from: Box<dyn BufRead>,
        mut to: Box<dyn Write>,
        stream: Option<TcpStream>,
        ssh: Option<std::process::Child>,
        token: String,
    ) -> Result<Self> {
        send(&mut to, &Hello { protocol: PROTOCOL, token })?;
        match receive::<Reply>(&mut from)? {
            Some(Reply::Welcome(welcome)) => {
                let welcome = *welcome;
                if welcome.version != env!("CARGO_PKG_VERSION") {
                    log::warn!("the client host has fastwaked {}", welcome.version);
                }
                Ok(Session { from, to, stream, ssh, welcome })
            }
            Some(Reply::Refused(why)) => bail!("the agent refuses: {why}"),
            Some(Reply::Done(_)) => bail!("the agent answered something else"),
            None => bail!("the agent closed the connection"),
        }
    }

    /// What the agent said of its host.
    pub(crate) fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Runs one client there.
    pub(crate) fn run(&mut self, request: &Request) -> SideOutput {
        self.ask(request).unwrap_or_else(|error| SideOutput::not_started(format!("{error:#}")))
    }

    fn ask(&mut self, request: &Request) -> Result<SideOutput> {
        if let Some(stream) = &self.stream {
            stream.set_read_timeout(Some(PATIENCE + Duration::from_secs(request.timeout_s)))?;
        }
        send(&mut self.to, request)?;
        match receive::<Reply>(&mut self.from)? {
            Some(Reply::Done(output)) => Ok(output),
            Some(Reply::Refused(why)) => bail!("the agent refuses: {why}"),
            Some(Reply::Welcome(_)) => bail!("the agent answered something else"),
            None => bail!("the agent closed the connection"),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(ssh) = &mut self.ssh {
            // The far side ends at the end of its input; ssh itself may hang on a dead connection.
            let _ = ssh.kill();
            let _ = ssh.wait();
        }
    }
}

/// Host part of what `--client` was given: without user, scheme and port.
pub(crate) fn host_of(client: &str) -> &str {
    match client.strip_prefix("agent://") {
        Some(address) => address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']),
        None => client.rsplit_once('@').map_or(client, |(_, host)| host),
    }
}

/// The address under which `host` reaches this one: that of the route to it.
///
/// # Errors
/// The host has no address or there is no route.
pub(crate) fn address_towards(host: &str) -> Result<IpAddr> {
    let to = (host, 9)
        .to_socket_addrs()
        .ok()
        .and_then(|mut all| all.next())
        .with_context(|| format!("'{host}' has no address here; give --server-address"))?;
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    // Connecting a datagram socket sends nothing; it only chooses the route.
    let socket = UdpSocket::bind(any)?;
    socket.connect(to).with_context(|| format!("there is no route to {host}"))?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_found_in_every_form() {
        for (client, host) in [
            ("node7", "node7"),
            ("me@node7", "node7"),
            ("agent://node7:18600", "node7"),
            ("agent://[::1]:18600", "::1"),
        ] {
            assert_eq!(host_of(client), host);
        }
    }

    #[test]
    fn loopback_reaches_us_by_loopback() {
        assert!(address_towards("127.0.0.1").unwrap().is_loopback());
    }

    #[test]
    fn an_agent_without_a_token_and_a_host_that_is_an_option_are_refused() {
        let error = |client| Session::open(client, None, "fastwaked").err().unwrap().to_string();
        assert!(error("agent://127.0.0.1:1").contains("--token-file"));
        assert!(error("-oProxyCommand=x").contains("not the name of a host"));
    }
}

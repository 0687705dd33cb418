// SPDX-License-Identifier: MIT
//! Stock programs, unmodified, over `fw_soft0`: server and client both exit 0.
//!
//! perftest measures the clock when it starts and gives up on a machine that is too busy for that;
//! a run that fails is therefore tried twice more.

mod roles;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A free port, for programs that want to be told one.
fn port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port").local_addr().expect("its number").port()
}

fn start(program: &str, args: &[&str], env: &[(&str, &str)], folder: &std::path::Path) -> Child {
    Command::new(program)
        .args(args)
        .env("LD_PRELOAD", roles::library())
        .env("FW_SOFT_DIR", folder.join("soft"))
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{program}: {e}; install perftest and ibverbs-utils"))
}

/// Waits for a program, which must not take longer than `LIMIT`.
fn finish(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if began.elapsed() > LIMIT {
            child.kill().expect("kill");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("output")
}

fn stage() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("fwsoft").tempdir_in("/dev/shm").expect("stage in /dev/shm")
}

/// Runs server and client of one command line.
fn pair(line: &str, env: &[(&str, &str)]) {
    let mut words = line.split_whitespace();
    let program = words.next().expect("a program");
    let mut said = String::new();
    for _ in 0..3 {
        let folder = stage();
        let port = port().to_string();
        let mut args: Vec<_> = words.clone().collect();
        args.extend(["-d", "fw_soft0", "-p", &port]);
        let mut server = start(program, &args, env, folder.path());
        listening(&mut server, port.parse().expect("number"));
        args.push("127.0.0.1");
        let client = finish(start(program, &args, env, folder.path()));
        if !client.status.success() {
            // Nobody would talk to the server any more.
            let _ = server.kill();
        }
        let server = finish(server);
        if client.status.success() && server.status.success() {
            return;
        }
        for (who, output) in [("server", server), ("client", client)] {
            said += &format!(
                "\n{who} {}:\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }
    panic!("{line}: {said}");
}

/// Waits until a server has its port, without connecting to it: it would take that for its client.
fn listening(server: &mut Child, port: u16) {
    let began = Instant::now();
    let wanted = format!(":{port:04X} ");
    loop {
        let table = |path| std::fs::read_to_string(path).unwrap_or_default();
        let open = (table("/proc/net/tcp") + &table("/proc/net/tcp6"))
            .lines()
            .any(|line| line.split_whitespace().nth(3) == Some("0A") && line.contains(&wanted));
        if open || server.try_wait().expect("wait").is_some() {
            return;
        }
        assert!(began.elapsed() < LIMIT, "the server does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn all(lines: &[&str]) {
    for line in lines {
        pair(line, &[]);
    }
}

#[test]
fn perftest_latency_runs() {
    all(&[
        "ib_send_lat -F -n 500",
        "ib_send_lat -F -n 500 -s 64",
        "ib_send_lat -F -n 100 -s 65536",
        "ib_send_lat -F -n 500 -I 0",
        "ib_write_lat -F -n 500",
        "ib_read_lat -F -n 500",
        "ib_atomic_lat -F -n 500",
    ]);
}

#[test]
fn perftest_latency_runs_in_event_mode() {
    all(&[
        "ib_send_lat -F -n 500 -e",
        "ib_send_lat -F -n 100 -s 8192 -e",
        "ib_read_lat -F -n 500 -e",
        "ib_atomic_lat -F -n 500 -e",
    ]);
}

#[test]
fn perftest_bandwidth_runs() {
    all(&[
        "ib_send_bw -F -n 500",
        "ib_send_bw -F -n 500 -b",
        "ib_send_bw -F -n 5 -s 67108864",
        "ib_write_bw -F -n 500",
        "ib_write_bw -F -n 500 -b",
        "ib_write_bw -F -n 5 -s 67108864",
        "ib_read_bw -F -n 500",
        "ib_read_bw -F -n 5 -s 67108864",
        "ib_atomic_bw -F -n 500",
        "ib_send_bw -F -n 1000 -s 2",
    ]);
}

#[test]
fn perftest_bandwidth_runs_in_event_mode() {
    all(&[
        "ib_send_bw -F -n 500 -e",
        "ib_send_bw -F -n 500 -e -b",
        "ib_read_bw -F -n 500 -e",
        "ib_atomic_bw -F -n 500 -e",
    ]);
}

#[test]
fn perftest_runs_over_many_qps() {
    all(&[
        "ib_send_bw -F -n 100 -q 32",
        "ib_send_bw -F -n 100 -q 32 -e",
        "ib_write_bw -F -n 100 -q 32",
        "ib_read_bw -F -n 100 -q 32",
        "ib_atomic_bw -F -n 100 -q 32",
    ]);
}

#[test]
fn perftest_runs_without_moved_pages() {
    for line in [
        "ib_send_lat -F -n 200 -s 3000",
        "ib_write_lat -F -n 200",
        "ib_read_bw -F -n 200",
        "ib_atomic_lat -F -n 200",
    ] {
        pair(line, &[("FW_SOFT_MAP", "0")]);
    }
}

#[test]
fn perftest_runs_over_roce() {
    for line in ["ib_send_lat -F -n 200 -x 0", "ib_write_bw -F -n 200 -x 0"] {
        pair(line, &[("FW_SOFT_LINK", "roce")]);
    }
}

#[test]
fn rc_pingpong_runs() {
    all(&["ibv_rc_pingpong", "ibv_rc_pingpong -e", "ibv_rc_pingpong -s 16 -n 200 -e", "ibv_rc_pingpong -c"]);
}

#[test]
fn devinfo_lists_the_device() {
    let folder = stage();
    for (link, layer) in [("ib", "InfiniBand"), ("roce", "Ethernet")] {
        let output = finish(start("ibv_devinfo", &["-v"], &[("FW_SOFT_LINK", link)], folder.path()));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        for wanted in ["hca_id:\tfw_soft0", "PORT_ACTIVE", "ATOMIC_HCA", "GID[  0]", layer] {
            assert!(text.contains(wanted), "{wanted} is missing from:\n{text}");
        }
    }
    let output = finish(start("ibv_devices", &[], &[], folder.path()));
    assert!(String::from_utf8_lossy(&output.stdout).contains("fw_soft0"));
}

#[test]
fn asyncwatch_watches() {
    let folder = stage();
    let mut child = start("stdbuf", &["-oL", "ibv_asyncwatch"], &[], folder.path());
    let mut line = String::new();
    let out = child.stdout.take().expect("output");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
    assert!(line.contains("fw_soft0: async event FD"), "{line}");
    assert!(child.try_wait().expect("wait").is_none(), "it waits for events");
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[test]
fn a_wrong_setting_is_one_line_and_no_device() {
    let folder = stage();
    let output = finish(start("ibv_devices", &[], &[("FW_SOFT_LINK", "token-ring")], folder.path()));
    assert!(output.status.success());
    assert!(!String::from_utf8_lossy(&output.stdout).contains("fw_soft0"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("fastwake: soft device: FW_SOFT_LINK=") && said.lines().count() == 1, "{said}");
    // The folder of somebody else, or open to others.
    std::fs::create_dir(folder.path().join("soft")).expect("folder");
    let output = finish(start("ibv_devinfo", &[], &[], folder.path()));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("is not a folder of this user alone"), "{said}");
}

#[test]
fn a_server_whose_client_is_killed_does_not_spin_or_crash() {
    let folder = stage();
    let port = port().to_string();
    let args = ["-F", "-d", "fw_soft0", "-D", "30", "-p", &port];
    let mut server = start("ib_send_bw", &args, &[], folder.path());
    listening(&mut server, port.parse().expect("number"));
    let mut client_args = args.to_vec();
    client_args.push("127.0.0.1");
    let mut client = start("ib_send_bw", &client_args, &[], folder.path());
    std::thread::sleep(Duration::from_secs(2));
    client.kill().expect("kill");
    client.wait().expect("wait");
    // It ends with an error of its own, long before its 30 seconds.
    let output = finish(server);
    assert!(!output.status.success());
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), None, "{}", output.status);
    let _ = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], 9)));
}

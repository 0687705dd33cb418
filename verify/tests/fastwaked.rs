// SPDX-License-Identifier: MIT
//! The built `fastwaked` from outside: stock programs, the real shim, the soft device.
//!
//! Needs perftest and the libraries of `make build`, in FASTWAKE_LIBDIR or in target/release; fails
//! where they are not there.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const BIN: &str = env!("CARGO_BIN_EXE_fastwaked");

/// The folder of the libraries.
fn libraries() -> PathBuf {
    let dir = match std::env::var_os("FASTWAKE_LIBDIR") {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/release"),
    };
    for name in ["libfastwake_shim.so", "libfastwake_softdev.so"] {
        assert!(dir.join(name).is_file(), "{name} is not in {}; run 'make build' first", dir.display());
    }
    dir
}

/// A fastwaked in a clean environment.
fn fastwaked(args: &[&str]) -> Command {
    let mut command = Command::new(BIN);
    command.args(args).env("FASTWAKE_LIBDIR", libraries()).env_remove("LD_PRELOAD").env_remove("RUST_LOG");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("FW_")) {
        command.env_remove(name);
    }
    command
}

fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().expect("fastwaked starts")
}

/// Standard output of a fastwaked that succeeds.
fn success(command: &mut Command) -> String {
    let output = output(command);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out.into_owned()
}

fn json(command: &mut Command) -> Value {
    serde_json::from_str(&success(command)).expect("JSON on standard output")
}

#[test]
fn run_is_the_program_with_its_status_and_its_signals() {
    let exits = output(&mut fastwaked(&["run", "--", "sh", "-c", "exit 7"]));
    assert_eq!(exits.status.code(), Some(7));
    let killed = output(&mut fastwaked(&["run", "--", "sh", "-c", "kill -TERM $$"]));
    assert_eq!(killed.status.signal(), Some(15));
    let missing = output(&mut fastwaked(&["run", "--", "no-such-program-here"]));
    assert_eq!(missing.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no-such-program-here"));
}

#[test]
fn run_preloads_the_shim_before_the_soft_device_and_sets_what_was_asked_for() {
    let script = "echo $LD_PRELOAD; echo $FW_MODE,$FW_CORES,$FW_IDLE";
    let args =
        ["run", "--mode", "off", "--cores", "0", "--idle", "sleep", "--soft", "--", "sh", "-c", script];
    let text = success(&mut fastwaked(&args));
    let lines: Vec<&str> = text.lines().collect();
    let preloaded: Vec<&str> = lines[0].split(':').map(|p| p.rsplit('/').next().unwrap()).collect();
    assert_eq!(preloaded, ["libfastwake_shim.so", "libfastwake_softdev.so"]);
    assert_eq!(lines[1], "off,0,sleep");
}

#[test]
fn a_setting_that_is_not_understood_is_refused_before_the_program_runs() {
    let refused = output(&mut fastwaked(&["run", "--mode", "fast", "--", "echo", "ran"]));
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stdout.is_empty());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("FW_MODE"));
}

#[test]
fn compare_measures_every_row_records_it_and_draws_it() {
    let dir = tempfile::tempdir().unwrap();
    let args =
        ["compare", "--rounds", "1", "--soft", "--json", "-", "--record", "--plot", ".", "--", "ib_send_lat"];
    let result = json(fastwaked(&args).args(["-n", "500"]).current_dir(dir.path()));
    assert_eq!(result["device"], "fw_soft0");
    assert_eq!(result["rounds"], 1);
    let placements = if one_cpu() { vec!["one-core"] } else { vec!["two-cores", "one-core"] };
    for placement in &placements {
        for name in ["raw-shm", "raw-pipe", "polling", "event", "fastwake"] {
            let row = find(&result["rows"], name, placement);
            assert!(row["median_us"].as_f64().is_some_and(|us| us > 0.0), "{row}");
            assert_eq!(row["failed_runs"], 0, "{row}");
        }
        assert!(find(&result["ratios"], "fastwake/event", placement)["median"].is_number());
        let served = find(&result["rows"], "fastwake", placement)["served_pct"].as_f64();
        assert!(served.is_some_and(|pct| pct > 0.0), "no wait was served: {result}");
    }
    assert!(dir.path().join("compare.svg").is_file() && dir.path().join("compare.png").is_file());

    let list = success(fastwaked(&["runs", "list"]).current_dir(dir.path()));
    let name = list.split_whitespace().next().expect("a recorded run");
    assert!(name.ends_with("-fw_soft0-ib_send_lat"), "{list}");
    let show = success(fastwaked(&["runs", "show", name]).current_dir(dir.path()));
    assert!(show.contains("fastwake/event"), "{show}");
    let diff = success(fastwaked(&["runs", "diff", name, name]).current_dir(dir.path()));
    assert!(diff.contains("nothing regressed"), "{diff}");
}

fn one_cpu() -> bool {
    std::thread::available_parallelism().is_ok_and(|n| n.get() == 1)
}

fn find<'a>(list: &'a Value, name: &str, placement: &str) -> &'a Value {
    list.as_array()
        .and_then(|list| list.iter().find(|x| x["name"] == name && x["placement"] == placement))
        .unwrap_or_else(|| panic!("no {name} {placement} in {list}"))
}

#[test]
fn compare_measures_rates_of_bandwidth_tests() {
    let args = ["compare", "--rounds", "1", "--soft", "--placement", "one-core", "--json", "-", "--no-plot"];
    let result = json(fastwaked(&args).args(["--", "ib_send_bw", "-s", "64", "-n", "1000"]));
    for name in ["polling", "event", "fastwake"] {
        let row = find(&result["rows"], name, "one-core");
        assert!(row["msgs_per_s"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        assert!(row["median_us"].is_null(), "{row}");
    }
}

#[test]
fn a_command_that_cannot_be_compared_says_why() {
    for (test, word) in
        [("ib_write_lat", "event mode"), ("ib_send_lat -a", "many sizes"), ("sh -c true", "not a perftest")]
    {
        let refused = output(fastwaked(&["compare", "--soft", "--"]).args(test.split(' ')));
        assert_eq!(refused.status.code(), Some(1), "{test}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(word), "{test}: {refused:?}");
    }
}

/// An agent on a free port of loopback; killed at the end.
struct Agent {
    child: Child,
    address: String,
    token: String,
}

impl Agent {
    fn start() -> Agent {
        let mut child = fastwaked(&["agent", "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the agent starts");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut line = |prefix: &str| {
            let line = lines.next().expect("a line of the agent").unwrap();
            line.strip_prefix(prefix).unwrap_or_else(|| panic!("{line}")).to_owned()
        };
        let (address, token) = (line("listening on "), line("token "));
        Agent { child, address, token }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_client_runs_through_an_agent_that_knows_the_token() {
    let agent = Agent::start();
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    let compare = |file: &str| {
        std::fs::write(&token, file).unwrap();
        let mut command = fastwaked(&["compare", "--rounds", "1", "--soft", "--json", "-", "--no-plot"]);
        command.args(["--client", &agent.address, "--token-file"]).arg(&token);
        command.args(["--", "ib_send_lat", "-n", "200"]);
        command
    };
    let refused = output(&mut compare("0123456789abcdef"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("wrong token"), "{refused:?}");

    let result = json(&mut compare(&agent.token));
    for name in ["polling", "event", "fastwake"] {
        assert_eq!(find(&result["rows"], name, "two-hosts")["failed_runs"], 0);
    }
    assert!(result["client_host"]["cpu"].is_string());
}

#[test]
fn a_client_runs_over_ssh() {
    // No sshd here: an ssh that runs the command on this host, as sshd would on another.
    let dir = tempfile::tempdir().unwrap();
    let ssh = dir.path().join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift\nexec \"$@\"\n").unwrap();
    std::fs::set_permissions(&ssh, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let args = ["compare", "--rounds", "1", "--soft", "--json", "-", "--no-plot", "--client", "localhost"];
    let mut command = fastwaked(&args);
    command.args(["--client-fastwaked", BIN, "--", "ib_read_lat", "-n", "200"]).env("PATH", path);
    let result = json(&mut command);
    assert_eq!(find(&result["rows"], "fastwake", "two-hosts")["failed_runs"], 0);
}

#[test]
fn the_selftest_passes_here() {
    let report = json(&mut fastwaked(&["selftest", "--json"]));
    assert_eq!(report["passed"], true, "{report}");
    assert_eq!(report["tests"].as_array().map(Vec::len), Some(3));
}

#[test]
fn tool_shim_and_device_are_of_one_version() {
    let text = success(&mut fastwaked(&["--version"]));
    assert!(text.ends_with("all match\n"), "{text}");
}

#[test]
fn the_status_names_what_would_be_used() {
    let report = json(&mut fastwaked(&["status", "--json"]));
    assert!(report["would_use"].as_array().is_some_and(|lines| !lines.is_empty()), "{report}");
    let item = |name: &str| report["items"].as_array().unwrap().iter().find(|i| i["name"] == name).cloned();
    assert_eq!(item("shim").expect("an item")["state"], "ok");
}

#[test]
fn an_interrupted_comparison_leaves_neither_processes_nor_half_a_record() {
    let dir = tempfile::tempdir().unwrap();
    // More messages than anybody waits for, one slice of the scheduler each.
    let args = ["compare", "--soft", "--placement", "one-core", "--record", "--no-plot"];
    let mut command = fastwaked(&args);
    command.args(["--timeout", "600", "--", "ib_send_lat", "-n", "100000000"]).current_dir(dir.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().expect("fastwaked starts");
    let children = || {
        let path = format!("/proc/{0}/task/{0}/children", child.id());
        let ids = std::fs::read_to_string(path).unwrap_or_default();
        let ids: Vec<libc::pid_t> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
        ids
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let sides = loop {
        let sides = children();
        if sides.len() == 2 {
            break sides;
        }
        assert!(Instant::now() < deadline, "server and client were never started");
        std::thread::sleep(Duration::from_millis(5));
    };
    // SAFETY: the process is our own child and has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("interrupted"), "{output:?}");
    for side in sides {
        // SAFETY: signal 0 only asks whether the process exists.
        assert_eq!(unsafe { libc::kill(side, 0) }, -1, "{side} is still there");
    }
    assert_eq!(std::fs::read_dir(dir.path().join("perftest-runs")).unwrap().count(), 0);
}

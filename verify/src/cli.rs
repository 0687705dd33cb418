// SPDX-License-Identifier: MIT
//! The command line: what `fastwaked` accepts, and nothing of what it does.
//!
//! The manual page is rendered from here, so every help text is a sentence for users.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

/// Runs, measures and explains FastWake: polling latency for event-mode RDMA programs.
#[derive(Debug, Parser)]
#[command(
    name = "fastwaked",
    arg_required_else_help = true,
    disable_help_subcommand = true,
    subcommand_value_name = "COMMAND",
    subcommand_help_heading = "Commands"
)]
pub(crate) struct Cli {
    /// Print the versions of the tool, the shim and the soft device, and whether they match.
    #[arg(short = 'V', long)]
    pub version: bool,
    /// Say more on standard error; twice for every step. RUST_LOG overrides it.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program under FastWake.
    Run(RunArgs),
    /// Measure a stock perftest program polling, in event mode, and in event mode under FastWake.
    Compare(CompareArgs),
    /// Serve as the client host of a comparison, for hosts that cannot be reached over ssh.
    Agent(AgentArgs),
    /// List, show and compare recorded runs.
    Runs(RunsArgs),
    /// Say what this machine offers and what FastWake would use.
    Status(JsonFlag),
    /// Try the context switch and a loop-back ping-pong through the shim.
    Selftest(JsonFlag),
    /// Print the manual page in roff.
    #[command(hide = true)]
    Man,
    /// One side of a raw baseline; started by `compare`.
    #[command(hide = true)]
    RawPeer(RawPeerArgs),
    /// Print the version string that a library exports; started by `--version`.
    #[command(hide = true)]
    LibraryVersion(LibraryVersionArgs),
}

/// `fastwaked run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// How waits are served (FW_MODE): auto, dispatcher, affinity or off.
    #[arg(long, value_name = "MODE")]
    pub mode: Option<String>,
    /// Cores on which waiters may poll (FW_CORES), such as 0-3,8.
    #[arg(long, value_name = "LIST")]
    pub cores: Option<String>,
    /// What a waiter does while nothing completes (FW_IDLE): auto, busy, yield or sleep.
    #[arg(long, value_name = "POLICY")]
    pub idle: Option<String>,
    /// Add the soft device fw_soft0, for machines without RDMA.
    #[arg(long)]
    pub soft: bool,
    /// Write a line of counters at exit (FW_STATS).
    #[arg(long)]
    pub stats: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// `fastwaked compare`.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// How many rounds; each runs every kind once.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=999))]
    pub rounds: u32,
    /// RDMA device of the server, and of the client unless --client-device is given.
    /// Default: the first active one, else the soft device.
    #[arg(long, value_name = "D", conflicts_with = "soft")]
    pub device: Option<String>,
    /// GID index. Default on Ethernet: the first RoCE v2 GID of an IPv4 address.
    #[arg(long, value_name = "G")]
    pub gid: Option<u32>,
    /// Use the soft device fw_soft0 even where there is an RDMA device.
    #[arg(long)]
    pub soft: bool,
    /// CPUs of server and client, such as 0,1; the one-core runs use the first.
    #[arg(long, value_name = "A,B")]
    pub cores: Option<String>,
    /// Measure only this placement.
    #[arg(long, value_enum)]
    pub placement: Option<PlacementArg>,
    /// Run the client on this host: a name for ssh, or agent://HOST:PORT.
    #[arg(long, value_name = "HOST")]
    pub client: Option<String>,
    /// RDMA device of the client where it is named otherwise there.
    #[arg(long, value_name = "D", requires = "client")]
    pub client_device: Option<String>,
    /// Address under which the client reaches this host. Default: that of the route to it.
    #[arg(long, value_name = "ADDR", requires = "client")]
    pub server_address: Option<std::net::IpAddr>,
    /// File that holds the agent's token.
    #[arg(long, value_name = "FILE", requires = "client")]
    pub token_file: Option<PathBuf>,
    /// Where fastwaked lies on the client host, for ssh.
    #[arg(long, value_name = "PATH", requires = "client", default_value = "fastwaked")]
    pub client_fastwaked: String,
    /// Write the result as JSON; - is standard output, the table then goes to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Add a folder to perftest-runs: command, raw outputs, host fingerprint, result.
    #[arg(long)]
    pub record: bool,
    /// Folder of the plot. Default: the target folder that this program was built in, else here.
    #[arg(long, value_name = "DIR")]
    pub plot: Option<PathBuf>,
    /// Draw no plot.
    #[arg(long, conflicts_with = "plot")]
    pub no_plot: bool,
    /// Seconds after which a run that hangs is killed.
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// A perftest program and its options, such as ib_send_lat -s 64.
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true, value_name = "TEST")]
    pub command: Vec<String>,
}

/// `--placement`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlacementArg {
    /// Server and client share one core.
    OneCore,
    /// Server and client have a core each.
    TwoCores,
}

/// `fastwaked agent`.
#[derive(Args, Debug)]
pub(crate) struct AgentArgs {
    /// Where to listen. Traffic is not encrypted: beyond loopback use a trusted network.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:18600")]
    pub listen: SocketAddr,
    /// File that holds the token (at least 16 characters). Default: a new one, printed at start.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Serve one session on standard input and output, as ssh starts it.
    #[arg(long, hide = true, conflicts_with_all = ["listen", "token_file"])]
    pub stdio: bool,
}

/// `fastwaked runs`.
#[derive(Args, Debug)]
pub(crate) struct RunsArgs {
    /// Folder of the recorded runs. Default: perftest-runs here or in a folder above.
    #[arg(long, value_name = "DIR", global = true)]
    pub dir: Option<PathBuf>,
    /// What to do with them.
    #[command(subcommand)]
    pub command: RunsCommand,
}

/// `fastwaked runs …`.
#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// One line for each recorded run.
    List,
    /// The table of one run.
    Show {
        /// Name of its folder, or a path to it.
        run: String,
    },
    /// What changed from run A to run B; exit status 1 where something regressed beyond the spread.
    Diff {
        /// The earlier run.
        a: String,
        /// The later run.
        b: String,
    },
}

/// `--json` of the commands that only report.
#[derive(Args, Debug)]
pub(crate) struct JsonFlag {
    /// Print JSON instead of text.
    #[arg(long)]
    pub json: bool,
}

/// One side of a raw baseline.
#[derive(Args, Debug)]
pub(crate) struct RawPeerArgs {
    /// Which baseline.
    #[arg(value_enum)]
    pub medium: Medium,
    /// Which side.
    #[arg(value_enum)]
    pub side: RawSide,
    /// Folder that both sides share.
    pub dir: PathBuf,
    /// Round trips.
    pub iterations: u32,
}

/// What carries a raw baseline's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Medium {
    /// A cache line that both sides spin on.
    Shm,
    /// A pair of pipes that both sides sleep on.
    Pipe,
}

/// The sides of a raw baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RawSide {
    /// Echoes.
    Server,
    /// Asks and measures.
    Client,
}

/// Which library to ask for its version.
#[derive(Args, Debug)]
pub(crate) struct LibraryVersionArgs {
    /// The library.
    pub path: PathBuf,
    /// The function that returns its version.
    pub symbol: String,
}

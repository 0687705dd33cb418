// SPDX-License-Identifier: MIT
//! The settings: one table, read once per process from the environment.
//!
//! The preload library, the soft device and the tools all ask here; nothing else reads `FW_*`. The
//! documentation of a setting is its row in [`TABLE`]. A value that cannot be understood is an
//! error that names the variable, the value and what would be right; a preload then steps aside.

use std::ffi::{CStr, CString, OsString};
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

/// One row of the table of settings.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The environment variable.
    pub name: &'static str,
    /// The values it takes.
    pub values: &'static str,
    /// The value in force when the variable is unset or empty.
    pub default: &'static str,
    /// What it does, in one sentence.
    pub help: &'static str,
}

/// Every setting there is.
pub const TABLE: &[Setting] = &[
    row(
        "FW_MODE",
        "auto|dispatcher|affinity|off",
        "auto",
        "How waits are served; off leaves the program untouched. auto is dispatcher, until interrupts can be steered.",
    ),
    row("FW_CORES", "list such as 0-3,8", "all allowed", "Cores on which waiters may poll."),
    row("FW_IDLE", "auto|busy|yield|sleep", "auto", "What a waiter does while nothing completes."),
    row("FW_SERVE", "auto|always|never", "auto", "When a completion channel is served in user space."),
    row(
        "FW_SPIN_US",
        "microseconds",
        "measured",
        "Longest time that a waiter polls before it sleeps in the kernel.",
    ),
    row(
        "FW_WATCHDOG_US",
        "microseconds, 100 to 1000000",
        "1000",
        "Period at which unwatched arms are looked for.",
    ),
    row(
        "FW_FLIP_US",
        "microseconds, 0 to 1000000",
        "0",
        "For tests: forces every channel back to kernel mode this often; 0 never.",
    ),
    row("FW_ONLY", "program names, comma-separated", "", "Serve only these programs."),
    row("FW_EXCLUDE", "program names, comma-separated", "", "Leave these programs alone."),
    row("FW_LOG_FILE", "path", "standard error", "Where the log goes."),
    row("FW_LOG_LEVEL", "env_logger's filter syntax", "warn", "What is logged."),
    row("FW_STATS", "0|1", "0", "Write a line of counters to the log at exit."),
    row("FW_SOFT_DIR", "path", "/dev/shm/fw_soft.<uid>", "Folder of the soft device's shared segments."),
    row("FW_SOFT_LINK", "ib|roce", "ib", "Link layer that the soft device reports."),
    row(
        "FW_SOFT_MAP",
        "0|1",
        "1",
        "Let the soft device move whole pages of memory regions into shared memory.",
    ),
];

const fn row(name: &'static str, values: &'static str, default: &'static str, help: &'static str) -> Setting {
    Setting { name, values, default, help }
}

/// `FW_MODE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Choose by what is measured.
    Auto,
    /// Serve waits in user space; what [`Mode::Auto`] comes to until interrupts can be steered.
    Dispatcher,
    /// Leave waits to the kernel, steer interrupts.
    Affinity,
    /// Do nothing at all.
    Off,
}

/// `FW_IDLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Poll while that is cheaper than sleeping, then sleep.
    Auto,
    /// Poll for ever.
    Busy,
    /// Poll, and yield the core between looks.
    Yield,
    /// Sleep at once.
    Sleep,
}

/// `FW_SERVE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serve {
    /// Serve a channel once a thread really had to wait on it.
    Auto,
    /// Serve every channel from its first wait.
    Always,
    /// Never serve: every arm goes to the hardware.
    Never,
}

/// Link layer of the soft device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// InfiniBand: a LID.
    Ib,
    /// Ethernet: RoCE v2 GIDs.
    Roce,
}

/// Settings of the soft device.
#[derive(Clone, Debug)]
pub struct Soft {
    /// `FW_SOFT_DIR`, or `None` for the default.
    pub dir: Option<PathBuf>,
    /// `FW_SOFT_LINK`.
    pub link: Link,
    /// `FW_SOFT_MAP`.
    pub map: bool,
}

/// All settings of a process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `FW_MODE`, or [`Mode::Off`] where `FW_ONLY` or `FW_EXCLUDE` say so.
    pub mode: Mode,
    /// `FW_CORES`: allowed cores, ascending; `None` for all.
    pub cores: Option<Vec<usize>>,
    /// `FW_IDLE`.
    pub idle: Idle,
    /// `FW_SERVE`.
    pub serve: Serve,
    /// `FW_SPIN_US`; `None` lets the measured cost of a wake-up decide.
    pub spin: Option<Duration>,
    /// `FW_WATCHDOG_US`.
    pub watchdog: Duration,
    /// `FW_FLIP_US`; `None` for never.
    pub flip: Option<Duration>,
    /// `FW_LOG_FILE`; `None` for standard error.
    pub log_file: Option<PathBuf>,
    /// `FW_LOG_LEVEL`.
    pub log_level: String,
    /// `FW_STATS`.
    pub stats: bool,
    /// `FW_SOFT_*`.
    pub soft: Soft,
}

/// A value that a setting does not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    /// The environment variable.
    pub name: &'static str,
    /// What it was set to.
    pub value: String,
    /// What it takes.
    pub wanted: &'static str,
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?} is not understood; it takes {}", self.name, self.value, self.wanted)
    }
}

impl std::error::Error for SettingError {}

impl Soft {
    /// Reads the soft device's settings of this process, whatever the others are.
    ///
    /// # Errors
    /// The first value that is not understood.
    pub fn from_env() -> Result<Self, SettingError> {
        let only_soft = |name: &str| name.starts_with("FW_SOFT_").then(|| std::env::var_os(name)).flatten();
        Settings::from_lookup(|name| only_soft(name).map(OsString::into_vec)).map(|settings| settings.soft)
    }
}

impl Settings {
    /// Reads the settings of this process.
    ///
    /// # Errors
    /// The first value that is not understood.
    pub fn from_env() -> Result<Self, SettingError> {
        Self::from_lookup(|name| std::env::var_os(name).map(OsString::into_vec))
    }

    /// Reads the settings through `get`, which maps a variable's name to its value.
    ///
    /// # Errors
    /// The first value that is not understood.
    pub fn from_lookup(get: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Self, SettingError> {
        let text = |name: &str| {
            get(name).map(|v| String::from_utf8_lossy(&v).trim().to_owned()).filter(|v| !v.is_empty())
        };
        let path =
            |name: &str| get(name).filter(|v| !v.is_empty()).map(|v| PathBuf::from(OsString::from_vec(v)));
        let mut mode = choice(
            text("FW_MODE"),
            "FW_MODE",
            &[
                ("auto", Mode::Auto),
                ("dispatcher", Mode::Dispatcher),
                ("affinity", Mode::Affinity),
                ("off", Mode::Off),
            ],
        )?;
        if !program_wanted(text("FW_ONLY").as_deref(), text("FW_EXCLUDE").as_deref(), &program_name()) {
            mode = Mode::Off;
        }
        Ok(Settings {
            mode,
            cores: text("FW_CORES").map(|v| cpu_list(&v).ok_or_else(|| wrong("FW_CORES", v))).transpose()?,
            idle: choice(
                text("FW_IDLE"),
                "FW_IDLE",
                &[("auto", Idle::Auto), ("busy", Idle::Busy), ("yield", Idle::Yield), ("sleep", Idle::Sleep)],
            )?,
            serve: choice(
                text("FW_SERVE"),
                "FW_SERVE",
                &[("auto", Serve::Auto), ("always", Serve::Always), ("never", Serve::Never)],
            )?,
            spin: micros(text("FW_SPIN_US"), "FW_SPIN_US", 0, 10_000_000)?,
            watchdog: micros(text("FW_WATCHDOG_US"), "FW_WATCHDOG_US", 100, 1_000_000)?
                .unwrap_or(Duration::from_micros(1000)),
            flip: micros(text("FW_FLIP_US"), "FW_FLIP_US", 0, 1_000_000)?.filter(|d| !d.is_zero()),
            log_file: path("FW_LOG_FILE"),
            log_level: text("FW_LOG_LEVEL").unwrap_or_else(|| "warn".to_owned()),
            stats: choice(text("FW_STATS"), "FW_STATS", &[("0", false), ("1", true)])?,
            soft: Soft {
                dir: path("FW_SOFT_DIR"),
                link: choice(
                    text("FW_SOFT_LINK"),
                    "FW_SOFT_LINK",
                    &[("ib", Link::Ib), ("roce", Link::Roce)],
                )?,
                map: choice(text("FW_SOFT_MAP"), "FW_SOFT_MAP", &[("1", true), ("0", false)])?,
            },
        })
    }
}

/// The row of `name`. Every name used here is in the table: a test reads it through.
fn wanted(name: &'static str) -> &'static str {
    TABLE.iter().find(|row| row.name == name).map_or("", |row| row.values)
}

fn wrong(name: &'static str, value: String) -> SettingError {
    SettingError { name, value, wanted: wanted(name) }
}

/// One of several words; the first is the default.
fn choice<T: Copy>(
    value: Option<String>,
    name: &'static str,
    words: &[(&str, T)],
) -> Result<T, SettingError> {
    match value {
        None => Ok(words[0].1),
        Some(v) => words.iter().find(|(word, _)| *word == v).map(|(_, t)| *t).ok_or_else(|| wrong(name, v)),
    }
}

fn micros(
    value: Option<String>,
    name: &'static str,
    min: u64,
    max: u64,
) -> Result<Option<Duration>, SettingError> {
    value
        .map(|v| match v.parse() {
            Ok(n) if (min..=max).contains(&n) => Ok(Duration::from_micros(n)),
            _ => Err(wrong(name, v)),
        })
        .transpose()
}

/// Parses a list of CPUs as taskset(1) writes it: `0-3,8`. Ascending, without repetition.
pub fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if first > last || last >= libc::CPU_SETSIZE as usize {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

fn program_wanted(only: Option<&str>, exclude: Option<&str>, name: &str) -> bool {
    let among = |list: &str| list.split(',').any(|p| p.trim() == name);
    only.is_none_or(among) && !exclude.is_some_and(among)
}

/// The name by which `FW_ONLY` and `FW_EXCLUDE` know this program: the last part of what the
/// kernel ran.
fn program_name() -> String {
    std::fs::read_link("/proc/self/exe")
        .ok()
        .and_then(|exe| exe.file_name().map(|name| name.to_string_lossy().into_owned()))
        .unwrap_or_default()
}

/// Whether `FW_MODE` is literally `off`, found without an allocation: what a preload asks first.
pub fn mode_is_off() -> bool {
    // SAFETY: getenv returns null or a NUL-terminated string of the environment, read at once.
    unsafe {
        let value = libc::getenv(c"FW_MODE".as_ptr());
        !value.is_null() && CStr::from_ptr(value) == c"off"
    }
}

/// A path as a C string; `None` where it contains a NUL, which no real path does.
pub fn c_path(path: &std::path::Path) -> Option<CString> {
    CString::new(path.as_os_str().as_encoded_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Settings, SettingError> {
        Settings::from_lookup(|name| pairs.iter().find(|p| p.0 == name).map(|p| p.1.as_bytes().to_vec()))
    }

    #[test]
    fn unset_and_empty_give_the_defaults() {
        for pairs in [&[][..], &[("FW_MODE", ""), ("FW_CORES", " "), ("FW_SPIN_US", "")][..]] {
            let s = with(pairs).unwrap();
            assert_eq!((s.mode, s.idle, s.serve), (Mode::Auto, Idle::Auto, Serve::Auto));
            assert_eq!((s.cores, s.spin, s.flip), (None, None, None));
            assert_eq!(s.watchdog, Duration::from_millis(1));
            assert!(!s.stats && s.soft.map);
        }
    }

    #[test]
    fn a_bad_value_names_the_variable_and_what_it_takes() {
        for row in TABLE.iter().filter(|r| !r.name.contains("FILE") && !r.name.contains("DIR")) {
            if ["FW_ONLY", "FW_EXCLUDE", "FW_LOG_LEVEL"].contains(&row.name) {
                continue;
            }
            let error = with(&[(row.name, "3x-")]).unwrap_err();
            assert_eq!((error.name, error.wanted), (row.name, row.values));
            assert!(error.to_string().contains("3x-"));
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for (name, value) in [
            ("FW_WATCHDOG_US", "99"),
            ("FW_SPIN_US", "-1"),
            ("FW_CORES", "5-3"),
            ("FW_CORES", "0,,1"),
            ("FW_CORES", "99999"),
        ] {
            assert_eq!(with(&[(name, value)]).unwrap_err().name, name);
        }
    }

    #[test]
    fn lists_of_cores_are_sorted_and_without_repetition() {
        assert_eq!(cpu_list("4,0-2,1"), Some(vec![0, 1, 2, 4]));
    }

    #[test]
    fn only_and_exclude_choose_programs_by_name() {
        assert!(program_wanted(None, None, "a"));
        assert!(program_wanted(Some("b, a"), None, "a"));
        assert!(!program_wanted(Some("b"), None, "a"));
        assert!(!program_wanted(None, Some("a"), "a"));
        assert!(!program_wanted(Some("a"), Some("a"), "a"));
    }
}

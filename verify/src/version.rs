// SPDX-License-Identifier: MIT
//! `fastwaked --version`: the versions of tool, shim and soft device, and whether they match.
//!
//! The libraries are asked in a child process: a preload library acts on the process that loads it.

use std::ffi::{CStr, CString};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::cli::LibraryVersionArgs;
use crate::exec::process::{Child, Launch};
use crate::libraries::{Libraries, SHIM, SOFTDEV};

/// Version of this tool.
pub(crate) const OWN: &str = env!("CARGO_PKG_VERSION");

/// Longest time that a library may take to be loaded and to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is known of a library's version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    /// The library says this.
    Known(String),
    /// It cannot be found, for this reason.
    Missing(String),
    /// It is there and does not say, for this reason.
    Silent(String),
}

impl Version {
    /// Whether it is known to differ from this tool's.
    pub(crate) fn differs(&self) -> bool {
        matches!(self, Version::Known(version) if version != OWN)
    }
}

/// Asks the shim for its version.
pub(crate) fn of_shim(libraries: &Libraries) -> Version {
    ask(libraries, SHIM, "fastwake_shim_version")
}

/// Asks the soft device for its version.
pub(crate) fn of_softdev(libraries: &Libraries) -> Version {
    ask(libraries, SOFTDEV, "fastwake_softdev_version")
}

fn ask(libraries: &Libraries, name: &'static str, symbol: &str) -> Version {
    let path = match libraries.find(name) {
        Ok(path) => path,
        Err(error) => return Version::Missing(error.to_string()),
    };
    let exe = match std::env::current_exe() {
        Ok(exe) => exe,
        Err(error) => return Version::Silent(error.to_string()),
    };
    let launch = Launch {
        program: exe.into(),
        args: vec!["library-version".into(), path.into(), symbol.into()],
        env: vec![("FW_MODE", "off".into())],
        unset: vec!["LD_PRELOAD"],
        cpu: None,
    };
    match Child::start(&launch).map(|child| child.finish(Instant::now() + PATIENCE)) {
        Ok(output) if output.end.is_success() => Version::Known(output.text.trim().to_owned()),
        Ok(output) => {
            let said = output.text.trim().trim_start_matches("fastwaked: ");
            Version::Silent(if said.is_empty() { output.end.to_string() } else { said.to_owned() })
        }
        Err(error) => Version::Silent(error.to_string()),
    }
}

/// Prints all versions. The status is 1 where two are known to differ.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn version() -> Result<ExitCode> {
    let libraries = Libraries::locate();
    let all = [(SHIM, of_shim(&libraries)), (SOFTDEV, of_softdev(&libraries))];
    let (text, matching) = render(&all);
    crate::print(&text)?;
    Ok(if matching { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn render(all: &[(&str, Version)]) -> (String, bool) {
    let mut out = format!("fastwaked {OWN}\n");
    for (name, version) in all {
        let _ = match version {
            Version::Known(version) => writeln!(out, "{name} {version}"),
            Version::Missing(why) => writeln!(out, "{name} missing: {why}"),
            Version::Silent(why) => writeln!(out, "{name} of unknown version: {why}"),
        };
    }
    let differs = all.iter().any(|(_, v)| v.differs());
    let known = all.iter().all(|(_, v)| matches!(v, Version::Known(_)));
    out.push_str(match (differs, known) {
        (true, _) => "the versions differ: install tool, shim and soft device from one build\n",
        (false, true) => "all match\n",
        (false, false) => "not all versions are known\n",
    });
    (out, !differs)
}

/// The child: loads the library, calls the function, prints what it returns.
///
/// # Errors
/// The library cannot be loaded, has no such function, or the function returns nothing.
pub(crate) fn library_version(args: &LibraryVersionArgs) -> Result<()> {
    let version = call(&args.path, &args.symbol)?;
    crate::print(&format!("{version}\n"))
}

fn call(path: &Path, symbol: &str) -> Result<String> {
    let file = CString::new(path.as_os_str().as_bytes()).context("a path with a NUL in it")?;
    let name = CString::new(symbol).context("a name with a NUL in it")?;
    // SAFETY: the path is a C string. The library's initialisers run: it is one of ours, and this
    // process does nothing else.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        bail!("it cannot be loaded: {}", last_dl_error());
    }
    // SAFETY: the handle is that of a loaded library, the name is a C string.
    let function = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if function.is_null() {
        bail!("it has no function {symbol}");
    }
    // SAFETY: the function of this name is documented as `const char *(void)` in every version.
    let text = unsafe {
        let function: extern "C" fn() -> *const libc::c_char = std::mem::transmute(function);
        function()
    };
    if text.is_null() {
        bail!("{symbol} returned nothing");
    }
    // SAFETY: not null, and a constant C string of the library, which stays loaded.
    Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn last_dl_error() -> String {
    // SAFETY: dlerror returns null or a C string that is valid until the next dl call of this
    // thread; it is copied at once.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "no reason is given".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(version: &str) -> Version {
        Version::Known(version.to_owned())
    }

    #[test]
    fn equal_versions_match() {
        let (text, matching) = render(&[(SHIM, known(OWN)), (SOFTDEV, known(OWN))]);
        assert!(matching && text.ends_with("all match\n"), "{text}");
    }

    #[test]
    fn different_versions_do_not_match_and_missing_ones_are_said_to_be_missing() {
        let (text, matching) = render(&[(SHIM, known("0.0.0")), (SOFTDEV, known(OWN))]);
        assert!(!matching && text.contains("differ"), "{text}");
        let (text, matching) = render(&[(SHIM, Version::Missing("gone".into())), (SOFTDEV, known(OWN))]);
        assert!(matching && text.contains("missing: gone") && text.contains("not all"), "{text}");
    }

    #[test]
    fn a_function_of_a_library_is_called_by_name() {
        let version = call(Path::new("libc.so.6"), "gnu_get_libc_version").unwrap();
        assert!(version.starts_with("2."), "{version}");
        let error = call(Path::new("libc.so.6"), "fastwake_shim_version").unwrap_err().to_string();
        assert!(error.contains("no function"), "{error}");
        assert!(call(Path::new("/nowhere.so"), "x").unwrap_err().to_string().contains("/nowhere.so"));
    }
}

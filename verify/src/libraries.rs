// SPDX-License-Identifier: MIT
//! Where the preload libraries lie, and how `LD_PRELOAD` is put together.
//!
//! Called by everything that starts a program under FastWake. It only finds files; it never loads
//! one of them into this process, because a preload library acts on whatever process it enters.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// File name of the shim.
pub(crate) const SHIM: &str = "libfastwake_shim.so";
/// File name of the soft device.
pub(crate) const SOFTDEV: &str = "libfastwake_softdev.so";
/// Folder that overrides where the libraries are looked for.
pub(crate) const LIBDIR_ENV: &str = "FASTWAKE_LIBDIR";

/// The folders in which the libraries are looked for, in order.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    folders: Vec<PathBuf>,
}

/// A library that is in none of the folders, or at a path that `LD_PRELOAD` cannot name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LibraryError {
    /// In none of the folders.
    Missing {
        /// Its file name.
        name: &'static str,
        /// Where it was looked for.
        folders: Vec<PathBuf>,
    },
    /// `LD_PRELOAD` separates by colons and spaces.
    Unpreloadable(PathBuf),
}

impl fmt::Display for LibraryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LibraryError::Missing { name, folders } => {
                let list: Vec<_> = folders.iter().map(|d| d.display().to_string()).collect();
                write!(
                    f,
                    "{name} was not found in {}. Build it with 'make build', or set {LIBDIR_ENV} to the \
                     folder that holds it.",
                    list.join(", ")
                )
            }
            LibraryError::Unpreloadable(path) => write!(
                f,
                "{} cannot be preloaded: LD_PRELOAD separates paths by colons and spaces. Move it, and set \
                 {LIBDIR_ENV} to its folder.",
                path.display()
            ),
        }
    }
}

impl std::error::Error for LibraryError {}

impl Libraries {
    /// The folders for this executable: `FASTWAKE_LIBDIR` alone where it is set; else the folder of
    /// the executable, then `../lib/fastwake` and `../lib` beside it.
    pub(crate) fn locate() -> Self {
        if let Some(dir) = std::env::var_os(LIBDIR_ENV).filter(|d| !d.is_empty()) {
            return Libraries { folders: vec![PathBuf::from(dir)] };
        }
        let exe = std::env::current_exe().and_then(|exe| exe.canonicalize()).unwrap_or_default();
        let bin = exe.parent().unwrap_or(Path::new("/"));
        let up = bin.parent().unwrap_or(bin);
        Libraries { folders: vec![bin.to_path_buf(), up.join("lib/fastwake"), up.join("lib")] }
    }

    /// The folders given.
    #[cfg(test)]
    pub(crate) fn in_folders(folders: Vec<PathBuf>) -> Self {
        Libraries { folders }
    }

    /// The library of that file name.
    ///
    /// # Errors
    /// It is in none of the folders, or its path cannot stand in `LD_PRELOAD`.
    pub(crate) fn find(&self, name: &'static str) -> Result<PathBuf, LibraryError> {
        let path = self
            .folders
            .iter()
            .map(|dir| dir.join(name))
            .find(|path| path.is_file())
            .ok_or_else(|| LibraryError::Missing { name, folders: self.folders.clone() })?;
        let path = path.canonicalize().unwrap_or(path);
        if path.as_os_str().as_bytes().iter().any(|b| b": \t\n".contains(b)) {
            return Err(LibraryError::Unpreloadable(path));
        }
        Ok(path)
    }

    /// The value of `LD_PRELOAD` for a program: the shim, then the soft device, then what was there
    /// without either of them. `None` where nothing is to be preloaded.
    ///
    /// # Errors
    /// As [`Libraries::find`].
    pub(crate) fn preload(
        &self,
        shim: bool,
        soft: bool,
        before: Option<&OsStr>,
    ) -> Result<Option<OsString>, LibraryError> {
        let mut parts: Vec<OsString> = Vec::new();
        if shim {
            parts.push(self.find(SHIM)?.into_os_string());
        }
        if soft {
            parts.push(self.find(SOFTDEV)?.into_os_string());
        }
        for old in before.unwrap_or_default().as_bytes().split(|b| b": \t\n".contains(b)) {
            let name = Path::new(OsStr::from_bytes(old)).file_name().unwrap_or_default();
            if !old.is_empty() && name != SHIM && name != SOFTDEV {
                parts.push(OsStr::from_bytes(old).to_os_string());
            }
        }
        Ok((!parts.is_empty()).then(|| parts.join(OsStr::new(":"))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built() -> (tempfile::TempDir, Libraries) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(SHIM), "").unwrap();
        std::fs::write(dir.path().join(SOFTDEV), "").unwrap();
        let libraries = Libraries::in_folders(vec![dir.path().join("nowhere"), dir.path().to_path_buf()]);
        (dir, libraries)
    }

    #[test]
    fn the_shim_comes_before_the_soft_device_before_what_was_there() {
        let (dir, libraries) = built();
        let at = dir.path().canonicalize().unwrap();
        let value = libraries.preload(true, true, Some(OsStr::new("/x/libother.so"))).unwrap().unwrap();
        let want = format!("{0}/{SHIM}:{0}/{SOFTDEV}:/x/libother.so", at.display());
        assert_eq!(value, OsString::from(want));
    }

    #[test]
    fn our_own_libraries_are_not_preloaded_twice() {
        let (_dir, libraries) = built();
        let before = format!("/old/{SHIM} /x/libother.so:/old/{SOFTDEV}");
        assert_eq!(
            libraries.preload(false, false, Some(OsStr::new(&before))).unwrap(),
            Some(OsString::from("/x/libother.so"))
        );
        assert_eq!(libraries.preload(false, false, None).unwrap(), None);
    }

    #[test]
    fn a_missing_library_says_where_it_was_looked_for_and_what_to_do() {
        let libraries = Libraries::in_folders(vec![PathBuf::from("/nowhere")]);
        let text = libraries.find(SHIM).unwrap_err().to_string();
        assert!(text.contains(SHIM) && text.contains("/nowhere") && text.contains("make build"), "{text}");
    }

    #[test]
    fn a_path_that_ld_preload_would_split_is_refused() {
        let dir = tempfile::Builder::new().prefix("a b").tempdir().unwrap();
        std::fs::write(dir.path().join(SHIM), "").unwrap();
        let libraries = Libraries::in_folders(vec![dir.path().to_path_buf()]);
        assert!(matches!(libraries.find(SHIM), Err(LibraryError::Unpreloadable(_))));
    }
}

//! Finds and loads shared libraries at run time: by a variable, by the system's loader, in Python
//! environments.
#![doc = include_str!("../README.md")]

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use libloading::Library;

/// Candidates for one library, in the order in which they are tried.
#[derive(Clone, Debug)]
pub struct LibrarySearch {
    candidates: Vec<PathBuf>,
    /// True if the environment names the library, so that nothing else is a candidate.
    is_named: bool,
}

impl LibrarySearch {
    /// Begins a search. If the environment variable `variable` is set and not empty, its value is
    /// the only candidate.
    #[must_use]
    pub fn new(variable: &str) -> Self {
        let named = named_by(variable);
        Self { is_named: named.is_some(), candidates: named.into_iter().collect() }
    }

    /// Adds file names that the system's loader looks for in its own folders.
    #[must_use]
    pub fn system<N: Into<PathBuf>>(self, names: impl IntoIterator<Item = N>) -> Self {
        self.with(|| names.into_iter().map(Into::into).collect())
    }

    /// Adds files of the active Python environments ([`active_environments`]) that exist. The paths
    /// are relative to the folder of an environment's packages. The environment comes first, then
    /// the path, then the newest Python.
    #[must_use]
    pub fn active_environments(self, paths: &[PathBuf]) -> Self {
        self.with(|| active_environments().iter().flat_map(|prefix| files_in_python(prefix, paths)).collect())
    }

    /// Returns the candidates, in the order in which they are tried.
    pub fn candidates(&self) -> &[PathBuf] {
        &self.candidates
    }

    /// Passes the candidates to `open`, one after the other, and returns its result for the first
    /// that it accepts.
    ///
    /// # Errors
    ///
    /// All candidates, each with the reason that `open` gave.
    pub fn first<T>(&self, open: impl FnMut(&Path) -> Result<T, String>) -> Result<T, LoadFailures> {
        first(&self.candidates, open)
    }

    fn with(mut self, candidates: impl FnOnce() -> Vec<PathBuf>) -> Self {
        if !self.is_named {
            self.candidates.extend(candidates());
        }
        self
    }
}

/// Tries candidates like [`LibrarySearch::first`], for a list of the caller's.
///
/// # Errors
///
/// All candidates, each with the reason that `open` gave.
pub fn first<T>(candidates: &[PathBuf], mut open: impl FnMut(&Path) -> Result<T, String>) -> Result<T, LoadFailures> {
    let mut attempts = Vec::new();
    for library in candidates {
        match open(library) {
            Ok(opened) => return Ok(opened),
            Err(reason) => attempts.push(Attempt { library: library.clone(), reason }),
        }
    }
    Err(LoadFailures { attempts })
}

/// Failure to load any of the candidates for a library.
#[derive(Clone, Debug)]
pub struct LoadFailures {
    /// All candidates, in the order in which they were tried.
    pub attempts: Vec<Attempt>,
}

impl LoadFailures {
    /// Returns the reasons of the candidates that exist, or were named by a full path. For the
    /// others, the loader only reports that there is no such file.
    pub fn notable(&self) -> impl Iterator<Item = &str> {
        let is_notable = |attempt: &&Attempt| attempt.library.is_absolute() || !attempt.reason.contains("No such file");
        self.attempts.iter().filter(is_notable).map(|attempt| attempt.reason.as_str())
    }
}

impl fmt::Display for LoadFailures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.attempts.iter().map(|attempt| attempt.library.display().to_string()).collect();
        write!(f, "none of {} was found", names.join(", "))?;
        self.notable().try_for_each(|reason| write!(f, "; {reason}"))
    }
}

impl std::error::Error for LoadFailures {}

/// A candidate that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The path, or the name that the system's loader looked for.
    pub library: PathBuf,
    /// The loader's reason, or that of the function that opens the library.
    pub reason: String,
}

/// Loads a library: a file by its path, or one that the system's loader finds by its name.
///
/// # Errors
///
/// The reason that the system's loader gave, without the name of the function that failed.
///
/// # Safety
///
/// The library's initialisers run, and its finalisers when the [`Library`] is dropped. The caller
/// vouches for both.
pub unsafe fn load(path: &Path) -> Result<Library, String> {
    // SAFETY: the caller promises the same.
    unsafe { Library::new(path) }.map_err(|error| reason(&error))
}

/// Returns the system loader's own message for a library that it does not load, which is the source
/// of the error.
pub fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the path that an environment variable names, if it is set and not empty.
pub fn named_by(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Returns the folders of the active Python environments: those that `VIRTUAL_ENV` and
/// `CONDA_PREFIX` name.
pub fn active_environments() -> Vec<PathBuf> {
    environments(|name| env::var_os(name))
}

/// Returns the folders like [`active_environments`], with `variable` in place of the process's
/// environment variables.
fn environments(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    named.filter(|folder| !folder.is_empty()).map(PathBuf::from).collect()
}

/// Returns the folders below which this machine's Pythons may keep their packages: the active
/// environments, the parents of folders on `PATH` that hold one of `programs`, the user's
/// `~/.local`, `/usr/local` and `/usr`. `variable` reads the environment.
pub fn python_prefixes(programs: &[&str], variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes = Vec::new();
    let mut add = |prefix: PathBuf| {
        if !prefixes.contains(&prefix) {
            prefixes.push(prefix);
        }
    };
    environments(&variable).into_iter().for_each(&mut add);
    for folder in variable("PATH").iter().flat_map(env::split_paths) {
        let has_program = programs.iter().any(|name| folder.join(name).is_file());
        if let Some(prefix) = folder.parent().filter(|_| has_program && folder.is_absolute()) {
            add(prefix.to_owned());
        }
    }
    variable("HOME").map(|home| PathBuf::from(home).join(".local")).into_iter().for_each(&mut add);
    ["/usr/local", "/usr"].map(PathBuf::from).into_iter().for_each(&mut add);
    prefixes
}

/// Returns those of `paths` that exist in the Pythons below `prefix`. The paths are relative to the
/// folder of the packages. In the order of `paths`, and for each path the newest Python first.
pub fn files_in_python(prefix: &Path, paths: &[PathBuf]) -> Vec<PathBuf> {
    let packages = python_packages(prefix);
    let in_packages = |path: &PathBuf| packages.iter().map(|folder| folder.join(path)).collect::<Vec<_>>();
    paths.iter().flat_map(in_packages).filter(|file| file.exists()).collect()
}

/// Returns the folders where the Pythons below `prefix` keep their packages, the newest Python
/// first. Some may not exist.
pub fn python_packages(prefix: &Path) -> Vec<PathBuf> {
    let folders = ["lib", "lib64"].into_iter().filter_map(|lib| fs::read_dir(prefix.join(lib)).ok()).flatten();
    let mut pythons: Vec<_> = folders
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.strip_prefix("python3")?.trim_start_matches('.').to_owned();
            Some((version.parse::<u32>().unwrap_or(0), entry.path()))
        })
        .collect();
    pythons.sort_unstable();
    let packages = |python: PathBuf| ["site-packages", "dist-packages"].map(|folder| python.join(folder));
    pythons.into_iter().rev().flat_map(|(_, python)| packages(python)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_python_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        for python in ["lib/python3.9", "lib/python3.12", "lib64/python3.13", "lib/python3", "lib/perl5"] {
            fs::create_dir_all(folder.path().join(python)).unwrap();
        }
        let found = python_packages(folder.path());
        let sites: Vec<_> = found.iter().filter(|folder| folder.ends_with("site-packages")).collect();
        let expected = ["lib64/python3.13", "lib/python3.12", "lib/python3.9", "lib/python3"]
            .map(|python| folder.path().join(python).join("site-packages"));
        assert_eq!(sites, expected.iter().collect::<Vec<_>>());
        assert_eq!(found.len(), 8);
        assert!(python_packages(&folder.path().join("lib")).is_empty());
    }

    #[test]
    fn an_environment_without_a_name_is_none() {
        let variable = |name: &str| Some(if name == "CONDA_PREFIX" { "/opt/conda".into() } else { "".into() });
        assert_eq!(environments(variable), [PathBuf::from("/opt/conda")]);
    }

    #[test]
    fn the_active_environment_comes_before_those_on_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("tools/bin")).unwrap();
        fs::write(root.join("tools/bin/tvm-ffi-config"), "").unwrap();
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            "PATH" => Some(env::join_paths([root.join("empty/bin"), root.join("tools/bin")]).unwrap()),
            _ => None,
        };
        let prefixes = python_prefixes(&["tvm-ffi-config", "python3"], variable);
        let expected = [root.join("venv"), root.join("tools"), "/usr/local".into(), "/usr".into()];
        assert_eq!(prefixes, expected);
    }

    #[test]
    fn files_of_a_python_environment_come_in_the_order_of_their_paths_and_the_newest_python_first() {
        let folder = tempfile::tempdir().unwrap();
        let packages = |python: &str| folder.path().join("lib").join(python).join("site-packages");
        for (python, file) in [("python3.9", "a.so"), ("python3.12", "a.so"), ("python3.12", "b.so")] {
            fs::create_dir_all(packages(python)).unwrap();
            fs::write(packages(python).join(file), "").unwrap();
        }
        let found = files_in_python(folder.path(), &["b.so".into(), "a.so".into(), "c.so".into()]);
        let newest = packages("python3.12");
        assert_eq!(found, [newest.join("b.so"), newest.join("a.so"), packages("python3.9").join("a.so")]);
    }

    #[test]
    fn all_candidates_are_tried_and_absent_ones_are_listed_without_a_reason() {
        let search = LibrarySearch::new("A_VARIABLE_THAT_IS_NEVER_SET").system(["liba.so.1", "liba.so", "libb.so"]);
        let open = |path: &Path| match path.to_str() {
            Some("libb.so") => Ok("b"),
            _ => Err(format!("{}: No such file or directory", path.display())),
        };
        assert_eq!(search.first(open).unwrap(), "b");
        let failures = search.first(|_| Err::<(), _>("No such file or directory".to_owned())).unwrap_err();
        assert_eq!(failures.to_string(), "none of liba.so.1, liba.so, libb.so was found");
        let file = tempfile::NamedTempFile::new().unwrap();
        // SAFETY: an empty file has no initialisers.
        let load = |path: &Path| unsafe { load(path) }.map(drop);
        let failures = first(&[file.path().to_owned()], load).unwrap_err();
        assert!(failures.to_string().starts_with(&format!("none of {} was found; ", file.path().display())));
    }
}

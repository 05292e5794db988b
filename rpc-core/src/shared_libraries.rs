//! Where shared libraries may be that are found when a program runs, beside the places that the system looks in.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the Python environments that are active: those that `VIRTUAL_ENV` and `CONDA_PREFIX` name.
pub fn active_environments() -> Vec<PathBuf> {
    environments(|name| env::var_os(name))
}

/// As [`active_environments`], by what `variable` says of the environment variables.
pub(crate) fn environments(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    named.filter(|folder| !folder.is_empty()).map(PathBuf::from).collect()
}

/// Where the Pythons below a folder have their packages, the newest Python first. Not all of these folders need exist.
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

/// What the system's loader says of a library, which is the source of the error.
#[cfg(any(feature = "cuda", feature = "tvm-ffi"))]
pub(crate) fn reason(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
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
}

//! `--fetch`: files and folders that a program has left in its workspace.

use std::fs;
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};
use rpc_core::client::{FileEntry, Files};
use rpc_core::{Session, printable_line};

use super::super::failure::Failure;
use super::super::files::on_own_thread;
use super::super::new_file::NewFile;
use super::super::output::{Output, size};

/// Fetches the files of the workspace that match one of `globs` into `folder`, and creates the
/// folders that do. Returns the paths of the files in the workspace.
pub(super) async fn fetch(
    session: &Session,
    output: &Output,
    globs: &[Pattern],
    folder: &Path,
) -> Result<Vec<String>, Failure> {
    if globs.is_empty() {
        return Ok(Vec::new());
    }
    let files = Files::new(session);
    let (mut entries, mut folders) = (files.ls("").await?, files.folders().await?);
    let names = entries.iter().map(|entry| &entry.name).chain(&folders);
    for glob in globs.iter().filter(|glob| !names.clone().any(|name| matches(glob, name))) {
        output.warn(&format!("no file matches '{glob}'"));
    }
    let is_wanted = |name: &str| globs.iter().any(|glob| matches(glob, name));
    entries.retain(|entry| is_wanted(&entry.name));
    folders.retain(|name| is_wanted(name));
    for name in &folders {
        let target = folder.join(local_path(name)?);
        fs::create_dir_all(&target).map_err(|error| Failure::file("cannot create", &target, error))?;
    }
    for FileEntry { name, executable, .. } in &entries {
        let target = folder.join(local_path(name)?);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(|error| Failure::file("cannot create", parent, error))?;
        }
        let file = NewFile::create(&target, output)?;
        let bar = output.progress(name, None);
        let (files, path, writer, shown) = (files.clone(), name.clone(), file.writer()?, bar.clone());
        let get = move || Ok(files.get(&path, writer).progress(|bytes| shown.set_position(bytes)).wait()?);
        let bytes = on_own_thread(get).await?;
        bar.finish_and_clear();
        if *executable {
            file.set_executable()?;
        }
        file.persist()?;
        output.note(&format!("{}: {} fetched", target.display(), size(bytes)));
    }
    Ok(entries.into_iter().map(|entry| entry.name).collect())
}

/// Returns the path below the local folder for a name that the server has sent.
fn local_path(name: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(name);
    let stays_below = path.components().all(|component| matches!(component, Component::Normal(_)));
    if stays_below && !name.is_empty() {
        Ok(path.to_owned())
    } else {
        Err(Failure::Unsuitable(format!(
            "the server calls a file '{}', which is no path in a folder",
            printable_line(name)
        )))
    }
}

/// Returns true if `glob` stands for `name`, a path in the workspace.
fn matches(glob: &Pattern, name: &str) -> bool {
    glob.matches_with(name, MatchOptions { require_literal_separator: true, ..MatchOptions::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_text_within_a_name_and_two_for_folders() {
        for (glob, name, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "b/a.txt", false),
            ("**/*.txt", "a.txt", true),
            ("out/**/*.txt", "out/b/c/a.txt", true),
            ("out/**", "out/a/b", true),
            ("o?t/*", "out/a", true),
            ("o?t", "o/t", false),
        ] {
            assert_eq!(matches(&glob.parse().unwrap(), name), expected, "{glob} {name}");
        }
    }

    #[test]
    fn names_of_the_server_stay_below_the_folder() {
        assert_eq!(local_path("a/b.txt").unwrap(), Path::new("a/b.txt"));
        for name in ["", "/etc/passwd", "../a", "a/../../b", "."] {
            assert!(local_path(name).is_err(), "{name}");
        }
    }
}

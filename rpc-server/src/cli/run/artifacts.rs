//! `--fetch`: files that a program has left in its workspace.

use std::fs;
use std::path::{Component, Path, PathBuf};

use rpc_core::client::Files;
use rpc_core::{Session, printable_line};

use super::super::failure::Failure;
use super::super::files::on_own_thread;
use super::super::new_file::NewFile;
use super::super::output::{Output, size};

/// Fetches the files of the workspace that match one of `globs` into `folder`. Returns their paths
/// in the workspace.
pub(super) async fn fetch(
    session: &Session,
    output: &Output,
    globs: &[String],
    folder: &Path,
) -> Result<Vec<String>, Failure> {
    if globs.is_empty() {
        return Ok(Vec::new());
    }
    let files = Files::new(session);
    let mut names: Vec<_> = files.ls("").await?.into_iter().map(|entry| entry.name).collect();
    for glob in globs.iter().filter(|glob| !names.iter().any(|name| matches(glob, name))) {
        output.warn(&format!("no file matches '{glob}'"));
    }
    names.retain(|name| globs.iter().any(|glob| matches(glob, name)));
    for name in &names {
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
        file.persist()?;
        output.note(&format!("{}: {} fetched", target.display(), size(bytes)));
    }
    Ok(names)
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

/// Returns true if `glob` stands for `name`: `*` for any text within a name of the path, `?` for
/// one character of it, and `**` for any text.
fn matches(glob: &str, name: &str) -> bool {
    let glob: Vec<char> = glob.chars().collect();
    // For each prefix of the glob: true if it stands for the beginning of the name read so far. So
    // no glob takes more than its length times that of the name.
    let mut reached = vec![false; glob.len() + 1];
    reached[0] = true;
    pass_stars(&glob, &mut reached);
    for c in name.chars() {
        let mut next = vec![false; glob.len() + 1];
        for at in (0..glob.len()).filter(|at| reached[*at]) {
            match glob[at] {
                '*' => next[at] |= c != '/' || is_double_star(&glob, at),
                '?' => next[at + 1] |= c != '/',
                literal => next[at + 1] |= c == literal,
            }
        }
        pass_stars(&glob, &mut next);
        reached = next;
    }
    reached[glob.len()]
}

/// Marks what follows a star that may stand for nothing.
fn pass_stars(glob: &[char], reached: &mut [bool]) {
    for at in 0..glob.len() {
        reached[at + 1] |= reached[at] && glob[at] == '*';
    }
}

fn is_double_star(glob: &[char], at: usize) -> bool {
    glob.get(at + 1) == Some(&'*') || at > 0 && glob[at - 1] == '*'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_within_names_and_double_stars_beyond() {
        for (glob, name, expected) in [
            ("a.txt", "a.txt", true),
            ("a.txt", "b/a.txt", false),
            ("*.txt", "a.txt", true),
            ("*.txt", "b/a.txt", false),
            ("**.txt", "b/c/a.txt", true),
            ("out/**", "out/a/b", true),
            ("out/*", "out/a/b", false),
            ("o?t/*", "out/a", true),
            ("o?t", "o/t", false),
            ("*", "", true),
            ("", "a", false),
            ("*a*b*", "xxaxxbxx", true),
        ] {
            assert_eq!(matches(glob, name), expected, "{glob} {name}");
        }
        assert!(!matches(&"*a".repeat(40), &"a".repeat(39)));
    }

    #[test]
    fn names_of_the_server_stay_below_the_folder() {
        assert_eq!(local_path("a/b.txt").unwrap(), Path::new("a/b.txt"));
        for name in ["", "/etc/passwd", "../a", "a/../../b", "."] {
            assert!(local_path(name).is_err(), "{name}");
        }
    }
}

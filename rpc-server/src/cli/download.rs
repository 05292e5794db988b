//! Download of files and folders of a workspace, for `get` and `run --fetch`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::future::IntoFuture as _;
use std::io::Write;
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};
use indicatif::ProgressBar;
use rpc_core::client::{FileEntry, Files};
use rpc_core::{ErrorKind, printable_line};

use super::failure::Failure;
use super::files::{local_digest, on_own_thread};
use super::new_file::NewFile;
use super::output::{Output, label, size, skip_to};
use super::partial_file::PartialFile;
use crate::sparse::SparseWriter;

/// A file to fetch, and its local path.
#[derive(Debug)]
pub(super) struct Download {
    pub(super) remote: FileEntry,
    pub(super) local: PathBuf,
}

/// Files to fetch, and local folders to create.
#[derive(Debug, Default)]
pub(super) struct DownloadList {
    pub(super) files: Vec<Download>,
    folders: Vec<PathBuf>,
}

impl DownloadList {
    /// Returns the files and folders whose paths match one of `globs`, with the same paths below
    /// `folder`. A folder comes without its files.
    pub(super) async fn matching(
        files: &Files,
        globs: &[Pattern],
        folder: &Path,
        output: &Output,
    ) -> Result<Self, Failure> {
        let mut list = Self::default();
        if globs.is_empty() {
            return Ok(list);
        }
        let (entries, folders) = (files.ls("").await?, files.folders().await?);
        let names = entries.iter().map(|entry| &entry.name).chain(&folders);
        for glob in globs.iter().filter(|glob| !names.clone().any(|name| matches(glob, name))) {
            output.warn(&format!("no file matches '{glob}'"));
        }
        let is_wanted = |name: &str| globs.iter().any(|glob| matches(glob, name));
        list.add(entries, folders, is_wanted, "", folder)?;
        Ok(list)
    }

    /// Returns the files and folders for which `sources` stand: the path of a file, of a folder
    /// with all that is in it, or a pattern. One file or folder becomes `target`, unless that is a
    /// folder, in which all else is put: by its path from the folder of the source on, or, of a
    /// pattern, from the last folder without a wildcard.
    pub(super) async fn of_sources(files: &Files, sources: &[String], target: &Target) -> Result<Self, Failure> {
        let mut list = Self::default();
        for source in sources {
            let names: Vec<_> = source.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
            let path = names.join("/");
            let into = target.folder();
            match files.ls(&path).await {
                Ok(entries) => {
                    let is_file = entries.len() == 1 && entries[0].name == path;
                    let folders = if is_file { Vec::new() } else { files.folders().await? };
                    let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
                    let is_wanted = |name: &str| below(name, &path).is_some();
                    match target {
                        Target::Renamed(local) => list.add(entries, folders, is_wanted, &path, local)?,
                        Target::Into(_) => list.add(entries, folders, is_wanted, parent, into)?,
                    }
                }
                Err(error) if error.kind() == ErrorKind::NotFound && is_pattern(&path) => {
                    let malformed = |error| Failure::Usage(format!("{source}: {error}"));
                    let pattern = Pattern::new(&path).map_err(malformed)?;
                    let literal: Vec<_> = names.iter().take_while(|name| !is_pattern(name)).copied().collect();
                    let (entries, folders) = (files.ls("").await?, files.folders().await?);
                    // With a folder comes all that is in it.
                    let is_wanted = |name: &str| ancestors(name).any(|name| matches(&pattern, name));
                    if !entries.iter().map(|entry| &entry.name).chain(&folders).any(|name| is_wanted(name)) {
                        return Err(Failure::Unsuitable(format!("no file of the workspace matches '{source}'")));
                    }
                    list.add(entries, folders, is_wanted, &literal.join("/"), into)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        list.check_distinct()?;
        Ok(list)
    }

    /// Adds the wanted files and folders, with the paths below `local` that they have below `base`.
    fn add(
        &mut self,
        files: Vec<FileEntry>,
        folders: Vec<String>,
        is_wanted: impl Fn(&str) -> bool,
        base: &str,
        local: &Path,
    ) -> Result<(), Failure> {
        let target = |name: &str| match below(name, base) {
            // The file or the folder itself.
            Some("") => Ok(local.to_owned()),
            Some(rest) => Ok(local.join(local_path(rest)?)),
            None => Err(no_path(name)),
        };
        for remote in files.into_iter().filter(|file| is_wanted(&file.name)) {
            let local = target(&remote.name)?;
            self.files.push(Download { remote, local });
        }
        for name in folders.iter().filter(|name| is_wanted(name)) {
            self.folders.push(target(name)?);
        }
        Ok(())
    }

    /// Refuses two files that would get the same local path.
    fn check_distinct(&self) -> Result<(), Failure> {
        let mut first = HashMap::new();
        for Download { remote, local } in &self.files {
            match first.insert(local, &remote.name) {
                Some(other) if *other != remote.name => {
                    let local = local.display();
                    return Err(Failure::Usage(format!("'{other}' and '{}' would both be {local}", remote.name)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the length of all files in bytes.
    pub(super) fn total_bytes(&self) -> u64 {
        self.files.iter().map(|download| download.remote.size).sum()
    }

    /// Creates the local folders.
    pub(super) fn create_folders(&self) -> Result<(), Failure> {
        self.folders.iter().try_for_each(|folder| create_folder(folder))
    }
}

/// Local place of what is fetched.
#[derive(Debug)]
pub(super) enum Target {
    /// The folder in which files and folders keep their names.
    Into(PathBuf),
    /// The new name of the only file or folder.
    Renamed(PathBuf),
}

impl Target {
    fn folder(&self) -> &Path {
        match self {
            Self::Into(folder) | Self::Renamed(folder) => folder,
        }
    }
}

/// Fetcher of the files of a list.
pub(super) struct Downloader {
    files: Files,
    output: Output,
    /// Bar over the bytes of all files.
    bar: ProgressBar,
    /// Length of the files that are complete.
    done_bytes: u64,
    /// Keeps the beginnings of incomplete files, and continues behind those of earlier downloads.
    resumes: bool,
}

impl Downloader {
    pub(super) fn new(files: &Files, output: &Output, list: &DownloadList, resumes: bool) -> Self {
        let bar = output.progress("", Some(list.total_bytes()));
        Self { files: files.clone(), output: *output, bar, done_bytes: 0, resumes }
    }

    /// Fetches a file, which has its name when it is complete. Returns the number of bytes that
    /// were received for it.
    pub(super) async fn fetch(&mut self, download: &Download) -> Result<u64, Failure> {
        let Download { remote, local } = download;
        label(&self.bar, &remote.name);
        if let Some(parent) = local.parent() {
            create_folder(parent)?;
        }
        let received = if !self.resumes || is_stream(local) {
            self.fetch_whole(remote, local).await?
        } else if self.is_there(remote, local).await? {
            self.output.note(&format!("{}: unchanged", local.display()));
            skip_to(&self.bar, self.done_bytes + remote.size);
            0
        } else {
            self.fetch_rest(remote, local).await?
        };
        self.done_bytes += remote.size;
        self.bar.set_position(self.done_bytes);
        Ok(received)
    }

    /// Clears the bar.
    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
    }

    async fn fetch_whole(&self, remote: &FileEntry, local: &Path) -> Result<u64, Failure> {
        let file = LocalFile::create(local, &self.output)?;
        let (files, path, writer) = (self.files.clone(), remote.name.clone(), file.writer(local)?);
        let report = self.reporter();
        let bytes = on_own_thread(move || Ok(files.get(&path, writer).progress(report).wait()?)).await?;
        file.finish(remote.executable)?;
        Ok(bytes)
    }

    /// Returns true if the local file has the content of the remote one already.
    async fn is_there(&self, remote: &FileEntry, local: &Path) -> Result<bool, Failure> {
        if !fs::metadata(local).is_ok_and(|metadata| metadata.is_file() && metadata.len() == remote.size) {
            return Ok(false);
        }
        let (own, theirs) = tokio::join!(local_digest(local), self.files.digest(&remote.name).into_future());
        Ok(own? == theirs?)
    }

    /// Continues behind the part that an earlier download has left, if that is the beginning of the
    /// file: the server tells the digest of as many bytes.
    async fn fetch_rest(&self, remote: &FileEntry, local: &Path) -> Result<u64, Failure> {
        let source = self.files.open(&remote.name).await?;
        let part = PartialFile::open(local, &self.output)?;
        let mut start = part.len()?;
        if start > 0 {
            let is_beginning = start <= source.len() && {
                let (own, theirs) = tokio::join!(part.digest(), source.prefix_digest(start).into_future());
                let own = own?;
                match theirs {
                    // A server that cannot tell.
                    Err(error) if error.kind() == ErrorKind::NotFound => false,
                    theirs => theirs? == own,
                }
            };
            if is_beginning {
                self.output.note(&format!("{}: continued after {}", local.display(), size(start)));
            } else {
                self.output.note(&format!("{}: its part was of another file, and is not used", local.display()));
                start = 0;
            }
        }
        skip_to(&self.bar, self.done_bytes + start);
        let (writer, report) = (part.writer(start)?, self.reporter());
        let len = on_own_thread(move || Ok(source.read_from(start, writer).progress(report).wait()?)).await?;
        part.persist(remote.executable)?;
        Ok(len - start)
    }

    /// Returns a function that shows how far the present file has come.
    fn reporter(&self) -> impl FnMut(u64) + Send + 'static {
        let (bar, done) = (self.bar.clone(), self.done_bytes);
        move |bytes| bar.set_position(done + bytes)
    }
}

/// Local file that is written to.
enum LocalFile {
    /// A new file, which appears when it is complete.
    New(NewFile),
    /// A device or a pipe, which must not be replaced.
    Existing(File),
}

impl LocalFile {
    fn create(local: &Path, output: &Output) -> Result<Self, Failure> {
        if !is_stream(local) {
            return NewFile::create(local, output).map(Self::New);
        }
        let opened = File::options().write(true).open(local);
        opened.map(Self::Existing).map_err(|error| Failure::file("cannot write", local, error))
    }

    /// Returns a writer for a thread. Long runs of zeros become holes of a new file.
    fn writer(&self, local: &Path) -> Result<Box<dyn Write + Send>, Failure> {
        match self {
            Self::New(file) => Ok(Box::new(SparseWriter::new(file.writer()?, 0))),
            Self::Existing(file) => match file.try_clone() {
                Ok(file) => Ok(Box::new(file)),
                Err(error) => Err(Failure::file("cannot write", local, error)),
            },
        }
    }

    fn finish(self, executable: bool) -> Result<(), Failure> {
        match self {
            Self::New(file) => {
                if executable {
                    file.set_executable()?;
                }
                file.persist()
            }
            Self::Existing(_) => Ok(()),
        }
    }
}

/// Returns true for a device or a pipe.
fn is_stream(local: &Path) -> bool {
    fs::metadata(local).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir())
}

fn create_folder(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder).map_err(|error| Failure::file("cannot create", folder, error))
}

/// Returns the path below the local folder for a name that the server has sent.
fn local_path(name: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(name);
    let stays_below = path.components().all(|component| matches!(component, Component::Normal(_)));
    if stays_below && !name.is_empty() { Ok(path.to_owned()) } else { Err(no_path(name)) }
}

fn no_path(name: &str) -> Failure {
    let name = printable_line(name);
    Failure::Unsuitable(format!("the server calls a file '{name}', which is no path in the folder that was asked for"))
}

/// Returns the path of `name` below `folder`, an empty one for the folder itself; all paths are
/// below the empty one.
fn below<'a>(name: &'a str, folder: &str) -> Option<&'a str> {
    match name.strip_prefix(folder)? {
        rest if folder.is_empty() || rest.is_empty() => Some(rest),
        rest => rest.strip_prefix('/'),
    }
}

/// Returns the folders on the way to `name`, and `name` itself.
fn ancestors(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('/').map(|(end, _)| &name[..end]).chain([name])
}

/// Returns true if the text has wildcards.
pub(super) fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
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

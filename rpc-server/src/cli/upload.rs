//! Upload of files and folders to a workspace, for `put` and `run --send`.

use std::collections::HashMap;
use std::fs::{self, File};
use std::future::IntoFuture as _;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use indicatif::ProgressBar;
use rpc_core::client::{Digest, FileCache, FileEntry, Files};
use rpc_core::{ErrorKind, Session};

use super::failure::Failure;
use super::files::{digest_of, local_digest, on_own_thread};
use super::output::{Output, label, size, skip_to};

/// A file to send, and its path in the workspace.
#[derive(Debug)]
pub(super) struct Upload {
    pub(super) local: PathBuf,
    pub(super) remote: String,
    pub(super) len: u64,
    executable: bool,
}

/// Files to send, and empty folders to create.
#[derive(Debug, Default)]
pub(super) struct UploadList {
    pub(super) files: Vec<Upload>,
    folders: Vec<String>,
}

impl UploadList {
    /// Adds a file, or a folder with all that is in it, as `remote` in the workspace; if that is
    /// empty, the content of a folder. Links in a folder are sent as the files that they lead to,
    /// if these are in the folder, too.
    pub(super) fn add(&mut self, local: &Path, remote: String, output: &Output) -> Result<(), Failure> {
        let root = local.canonicalize().map_err(|error| Failure::file("cannot send", local, error))?;
        let (mut pending, added) = (vec![(local.to_owned(), remote)], self.files.len());
        while let Some((path, remote)) = pending.pop() {
            let cannot = |error| Failure::file("cannot send", &path, error);
            let metadata = fs::metadata(&path).map_err(cannot)?;
            if metadata.is_file() {
                let executable = metadata.permissions().mode() & 0o111 != 0;
                self.files.push(Upload { local: path, remote, len: metadata.len(), executable });
                continue;
            }
            if !metadata.is_dir() {
                return Err(cannot(io::Error::other("it is neither a file nor a folder")));
            }
            let mut is_empty = true;
            for entry in fs::read_dir(&path).map_err(cannot)? {
                is_empty = false;
                let entry = entry.map_err(cannot)?;
                let mut source = entry.path();
                if entry.file_type().map_err(cannot)?.is_symlink() {
                    match source.canonicalize() {
                        Ok(target) if target.starts_with(&root) && target.is_file() => source = target,
                        _ => {
                            let link = source.display();
                            output.warn(&format!("{link} is not sent: it is no link to a file in the folder"));
                            continue;
                        }
                    }
                }
                let Ok(name) = entry.file_name().into_string() else {
                    return Err(Failure::file("cannot send", &source, io::Error::other("its name is not UTF-8")));
                };
                pending.push((source, if remote.is_empty() { name } else { format!("{remote}/{name}") }));
            }
            if is_empty && !remote.is_empty() {
                self.folders.push(remote);
            }
        }
        self.files[added..].sort_by(|one, other| one.remote.cmp(&other.remote));
        Ok(())
    }

    /// Refuses two files that would get the same path.
    pub(super) fn check_distinct(&self) -> Result<(), Failure> {
        let mut first = HashMap::new();
        for Upload { local, remote, .. } in &self.files {
            if let Some(other) = first.insert(remote, local) {
                let (local, other) = (local.display(), Path::display(other));
                return Err(Failure::Usage(format!("{other} and {local} would both be '{remote}' in the workspace")));
            }
        }
        Ok(())
    }

    /// Returns the length of all files in bytes.
    pub(super) fn total_bytes(&self) -> u64 {
        self.files.iter().map(|upload| upload.len).sum()
    }
}

/// Returns the last name of a local path: the empty one for paths such as `.` and `..`, which stand
/// for what is in the folder.
pub(super) fn own_name(path: &Path) -> Result<&str, Failure> {
    match path.file_name().map(|name| name.to_str()) {
        Some(Some(name)) => Ok(name),
        Some(None) => Err(Failure::file("cannot send", path, io::Error::other("its name is not UTF-8"))),
        None => Ok(""),
    }
}

/// Treatment of what is in the workspace already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UploadMode {
    /// Every file is sent.
    Replace,
    /// Files that the workspace has with the same content are not sent.
    Update,
    /// Like `Update`; and an upload that stops leaves its part, behind which the next one goes on.
    Resume,
}

/// Way in which a file has come to a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// So many bytes were sent for it.
    Bytes(u64),
    /// The server had it in its cache.
    FromCache,
    /// It was there.
    Unchanged,
}

impl Sent {
    /// Returns the number of bytes that were sent.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::FromCache | Self::Unchanged => 0,
        }
    }
}

/// Sender of files to a workspace.
pub(super) struct Uploader {
    files: Files,
    output: Output,
    mode: UploadMode,
    /// Cache of the server, if files are taken from it and added to it.
    cache: Option<FileCache>,
    /// Files that the workspace had before, by name; none for [`UploadMode::Replace`].
    present: HashMap<String, FileEntry>,
    /// Bar over the bytes of all files.
    bar: ProgressBar,
    /// Length of the files that are complete.
    done_bytes: u64,
}

impl Uploader {
    pub(super) async fn new(
        session: &Session,
        output: &Output,
        list: &UploadList,
        mode: UploadMode,
    ) -> Result<Self, Failure> {
        let files = Files::new(session);
        let present = if mode == UploadMode::Replace { Vec::new() } else { files.ls("").await? };
        let present = present.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        let bar = output.progress("", Some(list.total_bytes()));
        Ok(Self { files, output: *output, mode, cache: None, present, bar, done_bytes: 0 })
    }

    /// Takes files from the server's cache, and adds those that are sent, if the server has one.
    pub(super) async fn use_cache(&mut self) -> Result<(), Failure> {
        self.cache = self.files.cache().await?;
        Ok(())
    }

    /// Creates the empty folders of the list.
    pub(super) async fn create_folders(&self, list: &UploadList) -> Result<(), Failure> {
        for folder in &list.folders {
            self.files.create_folder(folder).await?;
        }
        Ok(())
    }

    /// Brings a file to the workspace, unless it is there already.
    pub(super) async fn send(&mut self, upload: &Upload) -> Result<Sent, Failure> {
        let Upload { local, remote, len, executable } = upload;
        label(&self.bar, remote);
        let present = self.present.get(remote).filter(|present| present.size == *len);
        let cache = self.cache.clone().filter(|cache| (1..=cache.limit()).contains(len));
        let compared = match present {
            Some(_) => Some(self.compare(local, remote).await?),
            None => None,
        };
        let (sent, was_executable) = match (present, cache) {
            (Some(present), _) if compared.is_some_and(|(is_same, _)| is_same) => (Sent::Unchanged, present.executable),
            _ if self.mode == UploadMode::Resume => (Sent::Bytes(self.send_rest(upload).await?), false),
            (_, Some(cache)) => {
                let digest = match compared {
                    Some((_, digest)) => digest,
                    None => local_digest(local).await?,
                };
                (self.send_by_cache(cache, upload, digest).await?, *executable)
            }
            _ => {
                let (files, target, len, report) = (self.files.clone(), remote.clone(), *len, self.reporter());
                let file = open(local)?;
                let put = move || Ok(files.put_sized(&target, len, file).progress(report).wait()?);
                (Sent::Bytes(on_own_thread(put).await?), false)
            }
        };
        if sent.bytes() == 0 {
            skip_to(&self.bar, self.done_bytes + len);
        }
        if *executable != was_executable {
            self.files.set_executable(remote, *executable).await?;
        }
        self.done_bytes += len;
        self.bar.set_position(self.done_bytes);
        Ok(sent)
    }

    /// Clears the bar.
    pub(super) fn finish(self) {
        self.bar.finish_and_clear();
    }

    /// Takes a file, whose SHA-256 is `digest`, from the server's cache, or sends it if it is not
    /// there.
    async fn send_by_cache(&self, cache: FileCache, upload: &Upload, digest: Digest) -> Result<Sent, Failure> {
        let Upload { local, remote, len, executable } = upload;
        let (target, len, executable, report) = (remote.clone(), *len, *executable, self.reporter());
        let file = open(local)?;
        let put = move || Ok(cache.put(&target, digest, len, executable, file).progress(report).wait()?);
        let was_sent = on_own_thread(put).await?;
        Ok(if was_sent { Sent::Bytes(len) } else { Sent::FromCache })
    }

    /// Continues behind the part that an earlier upload has left, if that is the beginning of the
    /// file.
    async fn send_rest(&self, upload: &Upload) -> Result<u64, Failure> {
        let Upload { local, remote, len, .. } = upload;
        let mut file = open(local)?;
        let mut transfer = self.files.put_resumable(remote, *len).await?;
        let mut start = transfer.part_len();
        if start > 0 {
            let beginning = open(local)?.take(start);
            if digest_of(beginning, local).await? == transfer.part_digest() {
                self.output.note(&format!("{remote}: continued after {}", size(start)));
            } else {
                self.output.note(&format!("{remote}: its part was of another file, and is not used"));
                transfer.discard().await?;
                transfer = self.files.put_resumable(remote, *len).await?;
                start = transfer.part_len();
                if start > 0 {
                    return Err(Failure::Unsuitable(format!("another upload to '{remote}' is going on")));
                }
            }
        }
        skip_to(&self.bar, self.done_bytes + start);
        file.seek(io::SeekFrom::Start(start)).map_err(|error| Failure::file("cannot send", local, error))?;
        let report = self.reporter();
        let sent = on_own_thread(move || Ok(transfer.finish(file).progress(report).wait()?)).await?;
        Ok(sent - start)
    }

    /// Returns true if the file of the workspace has the same content as the local one, and the
    /// SHA-256 of the latter.
    async fn compare(&self, local: &Path, remote: &str) -> Result<(bool, Digest), Failure> {
        let (own, theirs) = tokio::join!(local_digest(local), self.files.digest(remote).into_future());
        let own = own?;
        match theirs {
            // Removed since the listing.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok((false, own)),
            theirs => Ok((theirs? == own, own)),
        }
    }

    /// Returns a function that shows how far the present file has come.
    fn reporter(&self) -> impl FnMut(u64) + Send + 'static {
        let (bar, done) = (self.bar.clone(), self.done_bytes);
        move |bytes| bar.set_position(done + bytes)
    }
}

fn open(local: &Path) -> Result<File, Failure> {
    File::open(local).map_err(|error| Failure::file("cannot send", local, error))
}

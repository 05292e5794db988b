//! `put`, `get`, `ls`, `rm`: the files of a workspace.

use std::fs::{self, File};
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rpc_core::client::{Digest, FileEntry, Files as RemoteFiles};
use serde_json::{Value as Json, json};

use super::connect::{CommonOptions, Files};
use super::download::{DownloadList, Downloader, Target, is_pattern};
use super::failure::Failure;
use super::output::{Output, counted, seconds, size};
use super::upload::{UploadList, UploadMode, Uploader, own_name};
use crate::modules::hash;
use crate::pki::rfc3339;

/// File name that stands for standard input or output.
const STANDARD_STREAM: &str = "-";

#[derive(Args, Debug)]
pub(super) struct PutArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Local files and folders, and then the path in the workspace. With a / at its end, or behind
    /// several files, that is a folder; without it the names are kept. - is standard input. In
    /// names, * and ? stand for text, and ** for any folders
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Continue what an interrupted put --resume has left, and send only what differs
    #[arg(long, env = "RPC_CLI_RESUME")]
    resume: bool,
}

impl PutArgs {
    /// Returns true if standard input is sent.
    pub(super) fn reads_stdin(&self) -> bool {
        split_target(&self.paths).0.iter().any(|path| path.as_os_str() == STANDARD_STREAM)
    }
}

pub(super) async fn put(options: &CommonOptions, output: &Output, args: PutArgs) -> Result<(), Failure> {
    let (sources, remote) = split_target(&args.paths);
    let remote = remote.map(utf8).transpose()?;
    let stream: Option<Box<dyn io::Read + Send>> = match sources {
        [source] if source.as_os_str() == STANDARD_STREAM => Some(Box::new(io::stdin())),
        // A pipe or a device.
        [source] if fs::metadata(source).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) => {
            Some(Box::new(File::open(source).map_err(|error| Failure::file("cannot read", source, error))?))
        }
        _ if args.reads_stdin() => return Err(Failure::Usage("- stands alone in front of the name".to_owned())),
        _ => None,
    };
    if let Some(source) = stream {
        let name = if args.reads_stdin() { "" } else { own_name(&sources[0])? };
        let remote = remote_name(remote, name, false)
            .ok_or_else(|| Failure::Usage("say which name the file gets in the workspace".to_owned()))?;
        return put_stream(options, output, &args.address, remote, source).await;
    }
    let mut list = UploadList::default();
    let (expanded, has_pattern) = expand(sources)?;
    for source in &expanded {
        let remote = remote_name(remote, own_name(source)?, has_pattern || sources.len() > 1);
        list.add(source, remote.unwrap_or_default(), output)?;
    }
    list.check_distinct()?;
    let mode = if args.resume { UploadMode::Resume } else { UploadMode::Replace };
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let began = Instant::now();
            let mut uploader = Uploader::new(&session, output, &list, mode).await?;
            uploader.create_folders(&list).await?;
            let mut transfer = Transfer::default();
            for upload in &list.files {
                let sent = uploader.send(upload).await?.bytes();
                transfer.add(json!({ "path": upload.remote, "bytes": upload.len }), &upload.remote, upload.len, sent);
            }
            uploader.finish();
            transfer.report(output, began.elapsed())
        })
        .await
}

/// Sends what a pipe, a device or standard input gives, until its end.
async fn put_stream(
    options: &CommonOptions,
    output: &Output,
    address: &str,
    remote: String,
    source: Box<dyn io::Read + Send>,
) -> Result<(), Failure> {
    options
        .with_session(address, Files::Workspace, async |session| {
            let (bar, began) = (output.progress(&remote, None), Instant::now());
            let (files, path, shown) = (RemoteFiles::new(&session), remote.clone(), bar.clone());
            let put = move || Ok(files.put(&path, source).progress(|bytes| shown.set_position(bytes)).wait()?);
            let bytes = on_own_thread(put).await?;
            bar.finish_and_clear();
            let mut transfer = Transfer::default();
            transfer.add(json!({ "path": remote, "bytes": bytes }), &remote, bytes, bytes);
            transfer.report(output, began.elapsed())
        })
        .await
}

/// Returns the path in the workspace of a source with this name; `None` if it has none.
fn remote_name(remote: Option<&str>, name: &str, is_folder: bool) -> Option<String> {
    let path = match remote {
        Some(remote) if is_folder || remote.ends_with('/') => match remote.trim_end_matches('/') {
            "" => name.to_owned(),
            folder if name.is_empty() => folder.to_owned(),
            folder => format!("{folder}/{name}"),
        },
        Some(remote) => remote.to_owned(),
        None => name.to_owned(),
    };
    (!path.is_empty()).then_some(path)
}

/// Returns the paths with all that the patterns among them stand for, and true if there is one.
fn expand(paths: &[PathBuf]) -> Result<(Vec<PathBuf>, bool), Failure> {
    let (mut expanded, mut has_pattern) = (Vec::new(), false);
    for path in paths {
        let pattern = path.to_str().filter(|text| is_pattern(text) && fs::symlink_metadata(path).is_err());
        let Some(pattern) = pattern else {
            expanded.push(path.clone());
            continue;
        };
        let before = expanded.len();
        for found in glob::glob(pattern).map_err(|error| Failure::Usage(format!("{pattern}: {error}")))? {
            expanded.push(found.map_err(|error| Failure::file("cannot read", path, error.into()))?);
        }
        if expanded.len() == before {
            return Err(Failure::file("cannot read", path, io::Error::other("no file matches it")));
        }
        has_pattern = true;
    }
    Ok((expanded, has_pattern))
}

/// Splits paths into the sources and, if there is more than one path, the target.
fn split_target(paths: &[PathBuf]) -> (&[PathBuf], Option<&Path>) {
    match paths {
        [sources @ .., target] if !sources.is_empty() => (sources, Some(target)),
        _ => (paths, None),
    }
}

fn utf8(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| Failure::Usage(format!("{} is not UTF-8, as paths in workspaces are", path.display())))
}

#[derive(Args, Debug)]
pub(super) struct GetArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Files and folders of the workspace, and then the local file or folder; without it the names
    /// are kept. - is standard output. In names, * and ? stand for text, and ** for any folders
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Continue what an interrupted get --resume has left, and fetch only what differs
    #[arg(long, env = "RPC_CLI_RESUME")]
    resume: bool,
}

pub(super) async fn get(options: &CommonOptions, output: &Output, args: GetArgs) -> Result<(), Failure> {
    let (sources, local) = split_target(&args.paths);
    let to_stdout = local.is_some_and(|local| local.as_os_str() == STANDARD_STREAM);
    if to_stdout && (sources.len() > 1 || args.resume) {
        return Err(Failure::Usage("standard output takes one file, from its beginning".to_owned()));
    }
    let has_slash = |path: &Path| path.as_os_str().as_encoded_bytes().ends_with(b"/");
    let target = match local {
        None => Target::Into(PathBuf::new()),
        Some(local) if sources.len() > 1 || local.is_dir() || has_slash(local) => Target::Into(local.to_owned()),
        Some(local) => Target::Renamed(local.to_owned()),
    };
    let sources = sources.iter().map(|path| utf8(path).map(str::to_owned)).collect::<Result<Vec<_>, _>>()?;
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let files = RemoteFiles::new(&session);
            let began = Instant::now();
            if to_stdout {
                let path = sources.concat();
                let bytes = get_to_stdout(&files, &path, output).await?;
                let mut transfer = Transfer::default();
                transfer.add(Json::Null, &path, bytes, bytes);
                // Standard output has the file, and no document beside it.
                return if output.is_json() { Ok(()) } else { transfer.report(output, began.elapsed()) };
            }
            let list = DownloadList::of_sources(&files, &sources, &target).await?;
            list.create_folders()?;
            let mut downloader = Downloader::new(&files, output, &list, args.resume);
            let mut transfer = Transfer::default();
            for download in &list.files {
                let received = downloader.fetch(download).await?;
                let (name, local) = (&download.remote.name, download.local.display().to_string());
                let bytes = received.max(download.remote.size);
                transfer.add(json!({ "path": name, "local": local, "bytes": bytes }), &local, bytes, received);
            }
            downloader.finish();
            transfer.report(output, began.elapsed())
        })
        .await
}

/// Writes a file to standard output. Returns its length.
async fn get_to_stdout(files: &RemoteFiles, path: &str, output: &Output) -> Result<u64, Failure> {
    let file = files.open(path).await?;
    // A bar and the file would be in each other's way on a terminal.
    let bar = (!io::stdout().is_terminal()).then(|| output.progress(path, Some(file.len())));
    let shown = bar.clone();
    let report = move |bytes| shown.iter().for_each(|bar| bar.set_position(bytes));
    let bytes = on_own_thread(move || Ok(file.read_from(0, io::stdout()).progress(report).wait()?)).await?;
    bar.iter().for_each(|bar| bar.finish_and_clear());
    Ok(bytes)
}

/// Report of the files that a command has transferred.
#[derive(Debug, Default)]
struct Transfer {
    files: Vec<Json>,
    /// Name of the last file.
    name: String,
    /// Length of all files.
    bytes: u64,
    /// Bytes of them that were not at the other side before.
    transferred_bytes: u64,
}

impl Transfer {
    fn add(&mut self, file: Json, name: &str, bytes: u64, transferred: u64) {
        self.files.push(file);
        name.clone_into(&mut self.name);
        self.bytes += bytes;
        self.transferred_bytes += transferred;
    }

    /// Prints size, time and rate.
    fn report(self, output: &Output, elapsed: Duration) -> Result<(), Failure> {
        let Self { files, name, bytes, transferred_bytes } = self;
        let elapsed = elapsed.as_secs_f64();
        if output.is_json() {
            // One file is described by the document itself, too.
            let mut report = if let [file] = &files[..] { file.clone() } else { json!({ "bytes": bytes }) };
            report["transferred"] = transferred_bytes.into();
            report["seconds"] = elapsed.into();
            report["files"] = files.into();
            return output.json(&report);
        }
        let what = if files.len() == 1 { name } else { counted(files.len() as u64, "file") };
        let rate = size((transferred_bytes as f64 / elapsed.max(f64::MIN_POSITIVE)) as u64);
        output.note(&format!("{what}: {} in {}, {rate}/s", size(transferred_bytes), seconds(elapsed)));
        Ok(())
    }
}

/// Returns the SHA-256 of a local file.
pub(super) async fn local_digest(path: &Path) -> Result<Digest, Failure> {
    digest_of(File::open(path).map_err(|error| Failure::file("cannot read", path, error))?, path).await
}

/// Returns the SHA-256 of what `source`, which is of the file `path`, still has.
pub(super) async fn digest_of(source: impl io::Read + Send + 'static, path: &Path) -> Result<Digest, Failure> {
    let path = path.to_owned();
    let read = move || hash(source).map_err(|error| Failure::file("cannot read", &path, error));
    on_own_thread(read).await.map(|(digest, _)| digest)
}

/// Runs work that may wait for a file, a pipe or a terminal, so that signals and the session's
/// keep-alive are served meanwhile.
pub(super) async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Failure::local("the transfer has panicked", io::Error::other(error))))
}

#[derive(Args, Debug)]
pub(super) struct LsArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Folder of the workspace; all of the workspace without it
    #[arg(default_value = "")]
    path: String,
    /// Show sizes in bytes, and times
    #[arg(short, long, env = "RPC_CLI_LONG")]
    long: bool,
}

pub(super) async fn ls(options: &CommonOptions, output: &Output, args: LsArgs) -> Result<(), Failure> {
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let entries = RemoteFiles::new(&session).ls(&args.path).await?;
            if output.is_json() {
                return output.json(&entries.iter().map(entry_json).collect::<Vec<Json>>());
            }
            let width = entries.iter().map(|entry| entry.size.to_string().len()).max().unwrap_or(0);
            entries.iter().try_for_each(|entry| {
                if args.long {
                    let modified = rfc3339(entry.modified);
                    output.line(&format!("{:>width$} {modified} {}", entry.size, entry.name))
                } else {
                    output.untrusted_line(&entry.name)
                }
            })
        })
        .await
}

fn entry_json(entry: &FileEntry) -> Json {
    json!({ "name": entry.name, "size": entry.size, "modified": rfc3339(entry.modified) })
}

#[derive(Args, Debug)]
pub(super) struct RmArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Files or folders of the workspace
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
}

pub(super) async fn rm(options: &CommonOptions, output: &Output, args: RmArgs) -> Result<(), Failure> {
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let files = RemoteFiles::new(&session);
            for path in &args.paths {
                files.rm(path).await?;
            }
            if output.is_json() { output.json(&json!({ "removed": args.paths })) } else { Ok(()) }
        })
        .await
}

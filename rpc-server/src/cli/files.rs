//! `put`, `get`, `ls`, `rm`: the files of a workspace.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rpc_core::client::{FileEntry, Files as RemoteFiles};
use serde_json::{Value as Json, json};

use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::new_file::NewFile;
use super::output::{Output, seconds, size};
use crate::pki::rfc3339;

/// File name that stands for standard input or output.
const STANDARD_STREAM: &str = "-";

#[derive(Args, Debug)]
pub(super) struct PutArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// The local file; - is standard input
    local: PathBuf,
    /// Path in the workspace; without it, or with a / at its end, the name is kept
    remote: Option<String>,
}

pub(super) async fn put(options: &CommonOptions, output: &Output, args: PutArgs) -> Result<(), Failure> {
    let from_stdin = args.local.as_os_str() == STANDARD_STREAM;
    let name = if from_stdin { None } else { args.local.file_name().and_then(|name| name.to_str()) };
    let remote = match (&args.remote, name) {
        (Some(remote), Some(name)) if remote.ends_with('/') => format!("{remote}{name}"),
        (Some(remote), _) => remote.clone(),
        (None, Some(name)) => name.to_owned(),
        (None, None) => return Err(Failure::Usage("say which name the file gets in the workspace".to_owned())),
    };
    let mut len = None;
    let source: Box<dyn io::Read + Send> = if from_stdin {
        Box::new(io::stdin())
    } else {
        let cannot = |error| Failure::file("cannot read", &args.local, error);
        let file = File::open(&args.local).map_err(cannot)?;
        let metadata = file.metadata().map_err(cannot)?;
        if metadata.is_dir() {
            return Err(cannot(io::ErrorKind::IsADirectory.into()));
        }
        // The length of a pipe is unknown.
        len = metadata.is_file().then_some(metadata.len());
        Box::new(file)
    };
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let (bar, began) = (output.progress(&remote, len), Instant::now());
            let (files, path, shown) = (RemoteFiles::new(&session), remote.clone(), bar.clone());
            let bytes = on_own_thread(move || {
                let put = match len {
                    Some(len) => files.put_sized(&path, len, source),
                    None => files.put(&path, source),
                };
                Ok(put.progress(|bytes| shown.set_position(bytes)).wait()?)
            })
            .await?;
            bar.finish_and_clear();
            let elapsed = began.elapsed();
            if output.is_json() {
                let seconds = elapsed.as_secs_f64();
                return output.json(&json!({ "path": remote, "bytes": bytes, "seconds": seconds }));
            }
            output.note(&format!("{remote}: {}", transferred(bytes, elapsed)));
            Ok(())
        })
        .await
}

#[derive(Args, Debug)]
pub(super) struct GetArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// The file's path in the workspace
    remote: String,
    /// Local file or folder; - is standard output. Without it the name is kept
    local: Option<PathBuf>,
}

pub(super) async fn get(options: &CommonOptions, output: &Output, args: GetArgs) -> Result<(), Failure> {
    let name = args.remote.rsplit('/').next().unwrap_or(&args.remote);
    let local = match args.local {
        Some(folder) if folder.is_dir() => folder.join(name),
        Some(local) => local,
        None => PathBuf::from(name),
    };
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let files = RemoteFiles::new(&session);
            let path = args.remote.clone();
            if local.as_os_str() == STANDARD_STREAM {
                return on_own_thread(move || Ok(files.get(&path, io::stdout()).wait().map(drop)?)).await;
            }
            let target = writable(&local, output)?;
            let (bar, began) = (output.progress(name, None), Instant::now());
            let shown = bar.clone();
            let file = target.writer(&local)?;
            let bytes =
                on_own_thread(move || Ok(files.get(&path, file).progress(|bytes| shown.set_position(bytes)).wait()?))
                    .await?;
            bar.finish_and_clear();
            target.finish()?;
            let elapsed = began.elapsed();
            if output.is_json() {
                let (local, seconds) = (local.display().to_string(), elapsed.as_secs_f64());
                let report = json!({ "path": args.remote, "local": local, "bytes": bytes, "seconds": seconds });
                return output.json(&report);
            }
            output.note(&format!("{}: {}", local.display(), transferred(bytes, elapsed)));
            Ok(())
        })
        .await
}

/// Describes a transfer by size, time and rate.
fn transferred(bytes: u64, elapsed: Duration) -> String {
    let rate = bytes as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    format!("{} in {}, {}/s", size(bytes), seconds(elapsed.as_secs_f64()), size(rate as u64))
}

/// Runs work that may wait for a file, a pipe or a terminal, so that signals and the session's
/// keep-alive are served meanwhile.
pub(super) async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Failure::local("the transfer has panicked", io::Error::other(error))))
}

/// Target of a download.
enum Target {
    /// A new file, which appears when it is complete.
    New(NewFile),
    /// A device or a pipe, which must not be replaced.
    Existing(File),
}

fn writable(local: &Path, output: &Output) -> Result<Target, Failure> {
    match fs::metadata(local) {
        Ok(metadata) if !metadata.is_file() => {
            let opened = File::options().write(true).open(local);
            opened.map(Target::Existing).map_err(|error| Failure::file("cannot write", local, error))
        }
        _ => NewFile::create(local, output).map(Target::New),
    }
}

impl Target {
    /// Returns the file, for the thread that writes to it.
    fn writer(&self, local: &Path) -> Result<File, Failure> {
        match self {
            Self::New(file) => file.writer(),
            Self::Existing(file) => file.try_clone().map_err(|error| Failure::file("cannot write", local, error)),
        }
    }

    fn finish(self) -> Result<(), Failure> {
        match self {
            Self::New(file) => file.persist(),
            Self::Existing(_) => Ok(()),
        }
    }
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
                    output.name(&entry.name)
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

//! `run`: a program at the server, with files in, output as it comes, and artifacts out.

mod artifacts;
mod program_output;

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::future::IntoFuture as _;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use glob::Pattern;
use rpc_core::client::{EndCause, FileEntry, Files as RemoteFiles, RemoteProcess, RunStatus};
use rpc_core::{ErrorKind, Session};
use serde_json::json;

use self::program_output::ProgramOutput;
use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::files::on_own_thread;
use super::interruption::Interruption;
use super::output::{Output, size};
use crate::config::ByteSize;
use crate::modules::hash;

const EXIT_CODES: &str = "\
The program runs in a new folder at the server, which is removed afterwards unless --keep is given, with all \
processes that it has started. The exit code is that of the program, or 128 and the number of the signal that has \
ended it; 124 after --timeout. Other codes are those of rpc-cli.

The server has to allow it: rpc-server serve --allow-run PROGRAM.";

#[derive(Args, Debug)]
#[command(after_help = EXIT_CODES)]
pub(super) struct RunArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<String>,
    /// File or folder that the program gets in its folder, under the same name; may be repeated
    #[arg(long, env = "RPC_CLI_SEND", value_name = "PATH")]
    send: Vec<PathBuf>,
    /// Run in the folder of the named workspace (--workspace), which the server keeps, and send
    /// only the files that are not there, or differ
    #[arg(long, env = "RPC_CLI_KEEP")]
    keep: bool,
    /// Files and folders that are fetched when the program has ended: a path, in which * and ?
    /// stand for text within a name, and ** for any folders; a folder comes without its files; may
    /// be repeated
    #[arg(long, env = "RPC_CLI_FETCH", value_name = "GLOB")]
    fetch: Vec<Pattern>,
    /// Folder for the fetched files
    #[arg(long, env = "RPC_CLI_OUT", value_name = "FOLDER", default_value = ".")]
    out: PathBuf,
    /// Variable of the program's environment; may be repeated
    #[arg(long, env = "RPC_CLI_ENV", value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Send standard input to the program
    #[arg(long, env = "RPC_CLI_STDIN")]
    stdin: bool,
    /// End the program after this much output. Default: no limit
    #[arg(long, env = "RPC_CLI_MAX_OUTPUT", value_name = "SIZE")]
    max_output: Option<ByteSize>,
    /// Write output to a terminal as it is, with the control characters that the program writes
    #[arg(long, env = "RPC_CLI_RAW")]
    raw: bool,
}

fn variable(text: &str) -> Result<(String, String), &'static str> {
    let (name, value) = text.split_once('=').ok_or("a variable is written as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

pub(super) async fn run(
    options: &CommonOptions,
    output: &Output,
    args: RunArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let interrupted = interruption.wait();
    let connected = options.connect(&args.address, if args.keep { Files::Workspace } else { Files::None });
    let session = tokio::select! {
        connected = connected => connected?,
        failure = interrupted => return Err(failure),
    };
    let outcome = run_in(&session, options, output, args, interruption).await;
    super::connect::close(&session).await;
    outcome
}

async fn run_in(
    session: &Session,
    options: &CommonOptions,
    output: &Output,
    args: RunArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let started = async {
        let mut sender = Sender::new(session, *output, args.keep).await?;
        for path in &args.send {
            sender.send(path).await?;
        }
        start(session, options, &args).await
    };
    let process = tokio::select! {
        started = started => started?,
        failure = interruption.wait() => return Err(failure),
    };
    let reader = process.clone();
    let (to, raw) = (*output, args.raw);
    let mut shown = std::pin::pin!(on_own_thread(move || show(&reader, ProgramOutput::new(to, raw))));
    let (status, interrupted) = tokio::select! {
        status = &mut shown => (status?, None),
        failure = interruption.wait() => {
            process.terminate().await?;
            (shown.await?, Some(failure))
        }
    };
    if let Some(failure) = interrupted {
        return Err(failure);
    }
    let fetched = tokio::select! {
        fetched = artifacts::fetch(session, output, &args.fetch, &args.out) => fetched?,
        failure = interruption.wait() => return Err(failure),
    };
    if output.is_json() {
        let RunStatus { code, signal, ended_by } = status;
        output.json(&json!({ "code": code, "signal": signal, "ended_by": ended_by, "fetched": fetched }))?;
    }
    exit(&args.command[0], &status, options, output)
}

async fn start(session: &Session, options: &CommonOptions, args: &RunArgs) -> Result<RemoteProcess, Failure> {
    // Clap demands a program.
    let (program, arguments) = args.command.split_first().unwrap_or((&args.address, &[]));
    let mut command = session.run(program).args(arguments);
    for (name, value) in &args.env {
        command = command.env(name, value);
    }
    if let Some(limit) = options.timeout() {
        command = command.time_limit(limit);
    }
    if let Some(limit) = args.max_output {
        command = command.output_limit(limit.0);
    }
    if args.stdin {
        command = command.stdin(io::stdin());
    }
    Ok(command.start().await?)
}

/// Writes the output of the program until its end.
fn show(process: &RemoteProcess, mut output: ProgramOutput) -> Result<RunStatus, Failure> {
    let mut outcome = Ok(());
    let write = |stream, piece: &[u8]| {
        outcome = output.write(stream, piece);
        // The failure itself is reported, and this error only ends the reading.
        if outcome.is_ok() { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
    };
    let forwarded = process.forward_output(write).wait();
    outcome?;
    forwarded?;
    output.finish()?;
    Ok(process.status().wait()?)
}

/// Ends this program as the other one has ended.
fn exit(program: &str, status: &RunStatus, options: &CommonOptions, output: &Output) -> Result<(), Failure> {
    match (status.ended_by, options.timeout()) {
        (Some(EndCause::TimeLimit), Some(limit)) => {
            Err(Failure::TimedOut { what: format!("'{program}'"), limit, why: None })
        }
        (Some(cause), _) => Err(Failure::Unsuitable(format!("'{program}' was ended: {cause}"))),
        (None, _) => match (status.code, status.signal) {
            (Some(0), _) => Ok(()),
            // As the system keeps it, and as a shell reports a signal.
            (Some(code), _) => Err(Failure::Reported((code & 0xff) as u8)),
            (None, signal) => {
                let signal = signal.unwrap_or_default();
                output.note(&format!("'{program}' was ended by signal {signal}"));
                Err(Failure::Reported(((128 + signal) & 0xff) as u8))
            }
        },
    }
}

/// Sender of files to the workspace.
struct Sender {
    files: RemoteFiles,
    output: Output,
    /// Files that the workspace had before, by name.
    present: HashMap<String, FileEntry>,
}

impl Sender {
    /// Returns a sender, which sends what `is_kept` workspaces have already only if it differs.
    async fn new(session: &Session, output: Output, is_kept: bool) -> Result<Self, Failure> {
        let files = RemoteFiles::new(session);
        let present = if is_kept { files.ls("").await? } else { Vec::new() };
        let present = present.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        Ok(Self { files, output, present })
    }

    /// Sends a file or a folder.
    async fn send(&mut self, path: &Path) -> Result<(), Failure> {
        let mut pending = vec![(path.to_owned(), String::new())];
        while let Some((local, folder)) = pending.pop() {
            let cannot = |error| Failure::file("cannot send", &local, error);
            // A path such as `.` or `..` has no name, and stands for what is in it.
            let name = match local.file_name().map(|name| name.to_str()) {
                Some(Some(name)) if folder.is_empty() => name.to_owned(),
                Some(Some(name)) => format!("{folder}/{name}"),
                None => folder,
                Some(None) => return Err(cannot(io::Error::other("its name is not UTF-8"))),
            };
            let metadata = fs::metadata(&local).map_err(cannot)?;
            if metadata.is_dir() {
                let mut is_empty = true;
                for entry in fs::read_dir(&local).map_err(cannot)? {
                    is_empty = false;
                    let entry = entry.map_err(cannot)?;
                    // A link to a folder may lead back to it.
                    let is_link = entry.file_type().map_err(cannot)?.is_symlink();
                    if !(is_link && entry.path().is_dir()) {
                        pending.push((entry.path(), name.clone()));
                    }
                }
                if is_empty && !name.is_empty() {
                    self.files.create_folder(&name).await?;
                }
                continue;
            }
            if !metadata.is_file() {
                return Err(cannot(io::Error::other("it is neither a file nor a folder")));
            }
            self.send_file(&local, &name, &metadata).await?;
        }
        Ok(())
    }

    async fn send_file(&self, local: &Path, name: &str, metadata: &Metadata) -> Result<(), Failure> {
        let len = metadata.len();
        let executable = metadata.permissions().mode() & 0o111 != 0;
        let mut was_executable = false;
        if let Some(present) = self.present.get(name).filter(|present| present.size == len)
            && self.is_same(local, name).await?
        {
            was_executable = present.executable;
            self.output.note(&format!("{name}: unchanged"));
        } else {
            let file = File::open(local).map_err(|error| Failure::file("cannot send", local, error))?;
            let bar = self.output.progress(name, Some(len));
            let (files, target, shown) = (self.files.clone(), name.to_owned(), bar.clone());
            on_own_thread(move || {
                let put = files.put_sized(&target, len, file);
                Ok(put.progress(|bytes| shown.set_position(bytes)).wait()?)
            })
            .await?;
            bar.finish_and_clear();
            self.output.note(&format!("{name}: {} sent", size(len)));
        }
        if executable != was_executable {
            self.files.set_executable(name, executable).await?;
        }
        Ok(())
    }

    /// Returns true if the file of the workspace has the same content as the local one.
    async fn is_same(&self, local: &Path, name: &str) -> Result<bool, Failure> {
        let path = local.to_owned();
        let own = on_own_thread(move || {
            let read = File::open(&path).and_then(hash);
            read.map(|(digest, _)| digest).map_err(|error| Failure::file("cannot send", &path, error))
        });
        let (own, theirs) = tokio::join!(own, self.files.digest(name).into_future());
        let own = own?;
        match theirs {
            // Removed since the listing.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            theirs => Ok(theirs? == own),
        }
    }
}

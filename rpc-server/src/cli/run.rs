//! `run`: a program at the server, with files in, output as it comes, and artifacts out.

mod program_output;

use std::io;
use std::path::PathBuf;

use clap::Args;
use glob::Pattern;
use rpc_core::client::{EndCause, Files as RemoteFiles, RemoteProcess, RunStatus};
use rpc_core::{ErrorKind, RpcError, Session};
use serde_json::json;

use self::program_output::ProgramOutput;
use super::connect::{CommonOptions, Files};
use super::download::{DownloadList, Downloader};
use super::failure::Failure;
use super::files::on_own_thread;
use super::interruption::Interruption;
use super::output::{Output, size};
use super::upload::{Sent, UploadList, UploadMode, Uploader, own_name};
use crate::config::ByteSize;

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
    /// Send all files, and neither take them from the server's cache nor leave them there
    #[arg(long, env = "RPC_CLI_NO_CACHE")]
    no_cache: bool,
    /// Run in the folder of the named workspace (--workspace), which the server keeps, and send
    /// only the files that are not there, or differ
    #[arg(long, env = "RPC_CLI_KEEP")]
    keep: bool,
    /// Files and folders that are fetched when the program has ended: a path, in which * and ?
    /// stand for text within a name, and ** for any folders; a folder comes without its files; may
    /// be repeated
    #[arg(long, env = "RPC_CLI_FETCH", value_name = "GLOB", value_parser = artifacts)]
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

impl RunArgs {
    /// Returns true if the program gets standard input.
    pub(super) fn reads_stdin(&self) -> bool {
        self.stdin
    }
}

/// Parses a pattern of files in the folder of the program.
fn artifacts(text: &str) -> Result<Pattern, String> {
    if text.starts_with('/') {
        return Err("it is absolute, and files are fetched by their paths in the folder of the program".to_owned());
    }
    let names: Vec<_> = text.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
    if names.contains(&"..") {
        return Err("it leads out of the folder of the program, and nothing is fetched from elsewhere".to_owned());
    }
    if names.is_empty() {
        return Err("it names no file; ** stands for all".to_owned());
    }
    Pattern::new(&names.join("/")).map_err(|error| error.to_string())
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
        send(session, output, &args).await?;
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
    let (fetched, failed) = tokio::select! {
        fetched = fetch(session, output, &args) => fetched?,
        failure = interruption.wait() => return Err(failure),
    };
    if output.is_json() {
        let RunStatus { code, signal, ended_by } = status;
        output.json(&json!({ "code": code, "signal": signal, "ended_by": ended_by, "fetched": fetched }))?;
    }
    if let Some(error) = failed {
        return Err(error.into());
    }
    exit(&args.command[0], &status, options, output)
}

/// Sends the files of `--send`; to a folder that is kept, what it has not.
async fn send(session: &Session, output: &Output, args: &RunArgs) -> Result<(), Failure> {
    let mut list = UploadList::default();
    for path in &args.send {
        list.add(path, own_name(path)?.to_owned(), output)?;
    }
    let mode = if args.keep { UploadMode::Update } else { UploadMode::Replace };
    let mut uploader = Uploader::new(session, output, &list, mode).await?;
    if !args.no_cache && list.total_bytes() > 0 {
        uploader.use_cache().await?;
    }
    uploader.create_folders(&list).await?;
    for upload in &list.files {
        let outcome = match uploader.send(upload).await? {
            Sent::Bytes(bytes) => format!("{} sent", size(bytes)),
            Sent::FromCache => format!("{} from the server's cache", size(upload.len)),
            Sent::Unchanged => "unchanged".to_owned(),
        };
        output.note(&format!("{}: {outcome}", upload.remote));
    }
    uploader.finish();
    Ok(())
}

/// Fetches the files of `--fetch`. Returns their paths in the workspace, and the error of the first
/// one that the server could not read, as after it was removed. The others are fetched all the
/// same.
async fn fetch(session: &Session, output: &Output, args: &RunArgs) -> Result<(Vec<String>, Option<RpcError>), Failure> {
    let files = RemoteFiles::new(session);
    let list = DownloadList::matching(&files, &args.fetch, &args.out, output).await?;
    list.create_folders()?;
    let mut downloader = Downloader::new(&files, output, &list, false);
    let (mut fetched, mut failed) = (Vec::new(), None);
    for download in list.files {
        match downloader.fetch(&download).await {
            Ok(bytes) => {
                output.note(&format!("{}: {} fetched", download.local.display(), size(bytes)));
                fetched.push(download.remote.name);
            }
            Err(Failure::Remote(error)) if is_of_one_file(&error) => {
                let error = error.context(format_args!("'{}' is not fetched", download.remote.name));
                match failed {
                    None => failed = Some(error),
                    Some(_) => output.warn(error.message()),
                }
            }
            Err(failure) => return Err(failure),
        }
    }
    downloader.finish();
    Ok((fetched, failed))
}

/// Returns true for an error of the server's that says nothing about other files.
fn is_of_one_file(error: &RpcError) -> bool {
    error.hop() > 0 && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidArgument | ErrorKind::Io)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_patterns_that_can_match_in_the_folder_are_taken() {
        for (text, expected) in [("./out//*.txt", "out/*.txt"), ("**", "**"), ("a../..b/", "a../..b")] {
            assert_eq!(artifacts(text).unwrap().as_str(), expected);
        }
        for text in ["../*", "out/../../x", "**/..", "/etc/*", "//", "", ".", "./", "a["] {
            assert!(artifacts(text).is_err(), "{text}");
        }
    }
}

//! `disco top`: the sessions of Disco at servers, what their workers execute, and who is missing in
//! which collective.

mod merged;
mod trace;

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use disco::HostReport;
use rpc_core::{Pack, RemoteFunction};

use self::merged::MergedSession;
use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::interruption::Interruption;
use super::limited;
use super::new_file::NewFile;
use super::output::{Output, counted, seconds};
use crate::builtins::DISCO_SESSIONS;
use crate::config::{SERVER_PORT, Span};

/// Number of times that each server is asked. The answer of the shortest round trip counts, since
/// its time is known best.
const ROUNDS: usize = 3;

/// Control sequence that clears a terminal.
const CLEAR: &[u8] = b"\x1b[2J\x1b[H";

#[derive(Args, Debug)]
pub(super) struct DiscoArgs {
    #[command(subcommand)]
    command: DiscoCommand,
}

#[derive(Subcommand, Debug)]
enum DiscoCommand {
    /// Show sessions, what each worker executes, and who is missing in which collective
    Top(TopArgs),
}

#[derive(Args, Debug)]
struct TopArgs {
    /// Servers that the workers are at
    #[arg(required = true, value_name = "ADDRESS")]
    servers: Vec<String>,
    /// Also write the last collectives of all workers to this file, for ui.perfetto.dev or
    /// chrome://tracing
    #[arg(long, env = "RPC_CLI_TRACE", value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Repeat until interrupted
    #[arg(short, long, env = "RPC_CLI_WATCH")]
    watch: bool,
    /// With --watch: time between two updates
    #[arg(short, long, env = "RPC_CLI_INTERVAL", value_name = "TIME", default_value = "1s")]
    interval: Span,
}

/// Reports of one server, and the time to which their ages relate.
#[derive(Clone, Debug)]
pub(super) struct ServerAnswer {
    /// Address of the server, as it was given.
    pub(super) server: String,
    /// Time since the command began at which the server made its answer. It is known to within half
    /// of the round trip.
    pub(super) made: Duration,
    pub(super) reports: Vec<HostReport>,
}

/// Performs a command about Disco: once, or again and again until the interruption comes.
pub(super) async fn disco(
    options: &CommonOptions,
    output: &Output,
    args: DiscoArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let DiscoCommand::Top(args) = args.command;
    loop {
        match limited((options, interruption), top(options, output, &args)).await {
            Err(Failure::Interrupted(_)) if args.watch => return Ok(()),
            outcome => outcome?,
        }
        if !args.watch {
            return Ok(());
        }
        tokio::select! {
            () = tokio::time::sleep(args.interval.0) => {}
            _ = interruption.wait() => return Ok(()),
        }
    }
}

async fn top(options: &CommonOptions, output: &Output, args: &TopArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let mut answers = Vec::new();
    for server in &args.servers {
        answers.push(ask(options, server.clone(), began).await?);
    }
    let sessions = MergedSession::merge(&answers);
    if let Some(file) = &args.trace {
        let new = NewFile::create(file, output)?;
        let text = trace::document(&answers, &sessions).to_string();
        new.writer()?.write_all(text.as_bytes()).map_err(|error| Failure::file("cannot write", file, error))?;
        new.persist()?;
        output.note(&format!("wrote {}", file.display()));
    }
    if output.is_json() {
        return output.json(&sessions);
    }
    if args.watch && std::io::stdout().is_terminal() {
        output.bytes(CLEAR)?;
    }
    text(&sessions).iter().try_for_each(|line| output.line(line))
}

/// Asks one server, by its name or address.
async fn ask(options: &CommonOptions, server: String, began: Instant) -> Result<ServerAnswer, Failure> {
    let (mut options, mut address) = (options.clone(), server.clone());
    options.resolve_servers(&mut address, SERVER_PORT)?;
    options.check_addresses(&address)?;
    let mut best: Option<(Duration, ServerAnswer)> = None;
    let ask = async |session: rpc_core::Session| {
        let function: RemoteFunction = session.get_function(DISCO_SESSIONS).await?;
        for _ in 0..ROUNDS {
            let before = began.elapsed();
            let Pack(reports): Pack<Vec<HostReport>> = function.call(()).await?;
            let round_trip = began.elapsed().saturating_sub(before);
            if best.as_ref().is_none_or(|(shortest, _)| round_trip < *shortest) {
                let made = before + round_trip / 2;
                best = Some((round_trip, ServerAnswer { server: server.clone(), made, reports }));
            }
        }
        Ok(())
    };
    options.with_session(&address, Files::None, ask).await?;
    best.map(|(_, answer)| answer).ok_or_else(|| Failure::Usage("no server was asked".to_owned()))
}

fn text(sessions: &[MergedSession]) -> Vec<String> {
    if sessions.is_empty() {
        return vec!["no sessions of Disco".to_owned()];
    }
    let mut lines = Vec::new();
    for session in sessions {
        let MergedSession { name, client, world_size, num_groups, workers, collectives, workers_below } = session;
        let (all, groups) = (counted((*world_size).into(), "worker"), counted((*num_groups).into(), "group"));
        let shown = workers.len();
        lines.push(format!("session {name} of {client}: {all} in {groups}, {shown} shown"));
        if *workers_below > 0 {
            let below = counted((*workers_below).into(), "worker");
            lines.push(format!("  {below} in processes or at nodes below these servers, which report nothing here"));
        }
        let width = workers.iter().map(|worker| worker.server.chars().count()).max().unwrap_or(0);
        for worker in workers {
            let doing = match &worker.command {
                Some(command) => format!("{command} for {}", seconds(worker.for_seconds)),
                None => format!("waits for commands, {} executed", worker.executed),
            };
            let server = format!("{:width$}", worker.server);
            lines.push(format!("  worker {:>4}  {server}  {:>6} queued  {doing}", worker.worker, worker.queued));
        }
        lines.extend(collectives.iter().map(|collective| format!("  {collective}")));
    }
    lines
}

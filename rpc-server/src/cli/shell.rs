//! `shell`: commands line by line, over one connection. A terminal gets history and completion;
//! other input is a script, which ends at the first line that fails.

mod completion;
mod connection;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _, Stdin};
use std::path::PathBuf;

use clap::Args;
use clap::error::ErrorKind;
use rpc_transports::exec::split_words;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Behavior, CompletionType, Config, Editor};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(super) use self::connection::SharedConnection;

use self::completion::LineHelper;
use super::argument::rewrite_negative_numbers;
use super::command_line::{DEFAULT_SERVER, parse_without_address, usage_failure};
use super::connect::{CommonOptions, Files, close, is_tracker};
use super::failure::Failure;
use super::interruption::{Interruption, interrupted};
use super::output::Output;
use super::{Cli, Command, perform};
use crate::config::TRACKER_PORT;

/// Maximum number of lines in the history.
const HISTORY_LINES: usize = 10_000;

/// Options of the connection, which a line cannot change.
const CONNECTION_OPTIONS: [&str; 11] = [
    "-J",
    "--jump",
    "--want",
    "--label",
    "--workspace",
    "--config",
    "--ca",
    "--cert",
    "--cert-key",
    "--token-file",
    "--plain-servers",
];

#[derive(Args, Debug)]
pub(super) struct ShellArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
}

/// Runs the lines of standard input as commands, until its end or `exit`.
pub(super) async fn shell(options: &CommonOptions, output: &Output, args: ShellArgs) -> Result<(), Failure> {
    let connection = SharedConnection::default();
    let options = options.clone().with_connection(connection.clone());
    let mut interrupts = interrupt_signals()?;
    tokio::select! {
        connected = options.connect(&args.address, Files::Workspace) => connection.set(connected?),
        _ = interrupts.recv() => return Err(interrupted()),
    }
    let mut lines = Lines::open(connection.clone())?;
    if lines.is_terminal() {
        output.note(&format!("connected to {}; help lists the commands, exit ends", args.address));
    }
    let outcome = loop {
        // An interrupt at a prompt of the terminal is a key that the editor reads.
        let line = tokio::select! {
            line = lines.next() => line,
            _ = interrupts.recv(), if !lines.is_terminal() => break Err(interrupted()),
        };
        let line = match line {
            Ok(Some(line)) => line,
            Ok(None) => break Ok(()),
            Err(failure) => break Err(failure),
        };
        let done = match parse_line(&line, &options) {
            Ok(Line::Empty) => continue,
            Ok(Line::Exit) => break Ok(()),
            Ok(Line::Command(cli)) => {
                let (interrupt, interruption) = Interruption::manual();
                if lines.is_terminal() {
                    // One more interrupt of the last command does not end this one.
                    interrupts = interrupt_signals()?;
                }
                let work = perform_line(&options, *cli, &args.address, &interruption);
                tokio::pin!(work);
                let mut is_interrupted = false;
                loop {
                    tokio::select! {
                        done = &mut work => break done,
                        _ = interrupts.recv() => {
                            // A command that does not end by itself is dropped.
                            if is_interrupted {
                                break Err(interrupted());
                            }
                            is_interrupted = true;
                            interrupt();
                        }
                    }
                }
            }
            Err(failure) => Err(failure),
        };
        if let Err(failure) = done {
            if !lines.is_terminal() {
                break Err(failure);
            }
            failure.report(output, options.jump());
        }
    };
    if let Some(session) = connection.take() {
        close(&session).await;
    }
    outcome
}

/// Returns the interrupts from now on.
fn interrupt_signals() -> Result<Signal, Failure> {
    signal(SignalKind::interrupt()).map_err(|error| Failure::local("cannot receive signals", error))
}

/// A line of input.
enum Line {
    Empty,
    Exit,
    Command(Box<Cli>),
}

/// Parses a line. The text of help is printed.
fn parse_line(line: &str, options: &CommonOptions) -> Result<Line, Failure> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(Line::Empty);
    }
    if matches!(line, "exit" | "quit") {
        return Ok(Line::Exit);
    }
    let words = split_words(line).map_err(|problem| Failure::Usage(problem.to_owned()))?;
    let mut flags = words.iter().take_while(|word| *word != "--").map(|word| word.split('=').next().unwrap_or(word));
    let is_connection = |flag: &&str| CONNECTION_OPTIONS.contains(flag) || flag.starts_with("-J");
    if let Some(flag) = flags.find(is_connection) {
        return Err(Failure::Usage(format!("{flag} is an option of the connection: give it to rpc-cli shell")));
    }
    let words = ["rpc-cli".to_owned()].into_iter().chain(words).map(OsString::from);
    match parse_without_address(rewrite_negative_numbers(words), options.transports()) {
        Ok(cli) => Ok(Line::Command(Box::new(cli))),
        Err(error) if error.use_stderr() && options.output().is_json() => Err(usage_failure(&error)),
        Err(error) => {
            error.print().map_err(Failure::Output)?;
            match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Line::Empty),
                _ => Err(Failure::Reported(Failure::Usage(String::new()).exit_code())),
            }
        }
    }
}

/// Runs the command of a line at the server of the shell.
async fn perform_line(
    options: &CommonOptions,
    cli: Cli,
    server: &str,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let Cli { options: line_options, mut command } = cli;
    if matches!(command, Command::Shell(_)) {
        return Err(Failure::Usage("this is a shell already".to_owned()));
    }
    if is_tracker(server) && matches!(command, Command::Run(_) | Command::Lease(_) | Command::Forward(_)) {
        return Err(Failure::Usage(
            "this shell holds a server of the tracker, and the command would take another: run it outside of the shell"
                .to_owned(),
        ));
    }
    let reads_stdin = match &command {
        Command::Put(args) => args.reads_stdin(),
        Command::Run(args) => args.reads_stdin(),
        _ => false,
    };
    if reads_stdin && !io::stdin().is_terminal() {
        let text = "standard input is this script, whose other lines the command would take: give it a file";
        return Err(Failure::Usage(text.to_owned()));
    }
    let mut options = options.for_line(&line_options);
    match command.address_mut() {
        Some((address, _)) if address == DEFAULT_SERVER => server.clone_into(address),
        // Another tracker than that of the shell.
        Some((address, TRACKER_PORT)) => {
            options.resolve_servers(address, TRACKER_PORT)?;
            options.check_addresses(address)?;
        }
        Some(_) => return Err(Failure::Usage("the address is left out here".to_owned())),
        None => {}
    }
    perform(&options, &options.output(), command, interruption).await
}

/// Source of lines.
enum Lines {
    /// The editor, which is away while a thread of its own reads a line.
    Terminal(Option<Box<LineEditor>>, Option<PathBuf>),
    Script(Option<BufReader<Stdin>>),
}

type LineEditor = Editor<LineHelper, FileHistory>;

impl Lines {
    /// Opens standard input. The completion asks the server of the connection.
    fn open(connection: SharedConnection) -> Result<Self, Failure> {
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Self::Script(Some(BufReader::new(io::stdin()))));
        }
        let config = Config::builder()
            .history_ignore_space(true)
            .completion_type(CompletionType::List)
            .behavior(Behavior::Stdio)
            .max_history_size(HISTORY_LINES)
            .map_err(terminal_failure)?
            .build();
        let mut editor: LineEditor = Editor::with_config(config).map_err(terminal_failure)?;
        editor.set_helper(Some(LineHelper::new(connection)));
        let history = history_file();
        if let Some(file) = &history {
            // Without a history the shell works as well.
            _ = editor.load_history(file);
        }
        Ok(Self::Terminal(Some(Box::new(editor)), history))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// Reads a line on a thread of its own, so that the connection is served meanwhile. Returns
    /// `None` at the end of the input.
    async fn next(&mut self) -> Result<Option<String>, Failure> {
        match self {
            Self::Script(reader) => {
                let Some(mut source) = reader.take() else { return Ok(None) };
                let read = tokio::task::spawn_blocking(move || {
                    let mut line = String::new();
                    source.read_line(&mut line).map(|count| (source, (count > 0).then_some(line)))
                });
                let read = read.await.unwrap_or_else(|error| Err(io::Error::other(error)));
                let (source, line) = read.map_err(|error| Failure::local("cannot read standard input", error))?;
                *reader = Some(source);
                Ok(line)
            }
            Self::Terminal(editor, history) => {
                let Some(mut taken) = editor.take() else { return Ok(None) };
                let history = history.clone();
                let read = tokio::task::spawn_blocking(move || {
                    let line = taken.readline("rpc> ");
                    if let Ok(line) = &line {
                        _ = taken.add_history_entry(line.as_str());
                        _ = history.map(|file| taken.append_history(&file));
                    }
                    (taken, line)
                });
                let panicked = |error| Failure::local("cannot read the terminal", io::Error::other(error));
                let (taken, line) = read.await.map_err(panicked)?;
                *editor = Some(taken);
                match line {
                    Ok(line) => Ok(Some(line)),
                    // The key discards the line.
                    Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                    Err(ReadlineError::Eof) => Ok(None),
                    Err(error) => Err(terminal_failure(error)),
                }
            }
        }
    }
}

fn terminal_failure(error: ReadlineError) -> Failure {
    Failure::local("cannot use the terminal", io::Error::other(error))
}

/// Returns the file of the history, `rpc/history` in `$XDG_STATE_HOME` or `~/.local/state`, whose
/// folder exists then.
fn history_file() -> Option<PathBuf> {
    let folder = env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let folder = folder.or_else(|| env::home_dir().map(|home| home.join(".local/state")))?.join("rpc");
    fs::create_dir_all(&folder).ok()?;
    Some(folder.join("history"))
}

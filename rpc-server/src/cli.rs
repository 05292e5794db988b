//! `rpc-cli`: use of servers from the shell.
//!
//! Data goes to standard output and everything else to standard error, so that pipes carry data
//! alone. Each command is a file of its own. They share the connection (`connect`), the parser of
//! arguments (`argument`), the display of values (`show`) and the exit codes of failures
//! (`failure`). [`main`] is for programs of one's own; `rpc-bench` uses the other public items.

mod argument;
mod call;
mod can;
mod command_line;
mod connect;
mod credentials;
mod disco;
mod doctor;
mod download;
mod drain;
mod failure;
mod failure_report;
mod files;
mod forward;
mod info;
mod interruption;
mod kick;
mod lease;
mod logs;
mod module;
mod named_servers;
mod new_file;
pub mod npy;
mod output;
mod partial_file;
mod ping;
mod place;
mod pool_wait;
mod run;
mod shell;
mod show;
mod status;
mod tensor;
mod tracker_pool;
mod up;
mod upload;
mod use_server;

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use rpc_transports::Transports;

use self::interruption::Interruption;
use crate::config::{SERVER_PORT, TRACKER_PORT};
use crate::logging::{self, LogFormat};
use crate::server::exit_code;

pub use self::connect::{CommonOptions, close, resolve_named_servers};
pub use self::failure::Failure;
pub use self::named_servers::NamedServerError;
pub(crate) use self::output::counted;
pub use self::output::{ColorChoice, Output, digits, size};

const EXIT_CODES: &str = "\
Exit codes:
  0     success
  1     the request failed: at the server, in the function, or with a file here; or the answer is no
  2     the command line is wrong
  69    the server or a hop cannot be reached, or was lost
  76    the peer speaks another protocol
  77    the server refused the key, version, identity, session or forwarding
  124   the time limit has passed, or a peer is silent
  130   interrupted; 143 for SIGTERM

Every flag has an environment variable: --no-such-flag would be RPC_CLI_NO_SUCH_FLAG.";

const ABOUT: &str = "\
Calls functions, runs programs, moves files and tensors, and measures round trips, on servers that speak this protocol.

An ADDRESS is tcp://HOST:PORT[/KEY], tls://…, quic://…, unix:PATH[?key=KEY], 'exec:COMMAND LINE', \
ssh://[USER@]HOST for a server that ssh starts there, tracker://HOST:PORT/KEY for a server of a tracker, or @NAME for \
one that rpc-cli use lists. Without an ADDRESS it is the default one of these; without a command, a shell starts \
there. Ports are by default 9090, and 9190 for a tracker. Data goes to standard output, everything else to standard \
error.";

#[derive(Parser)]
#[command(name = "rpc-cli", version, about = "Servers from the shell", long_about = ABOUT, after_help = EXIT_CODES)]
#[command(max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    options: CommonOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Call a function and print what it returns
    Call(call::CallArgs),
    /// List the functions of a server, or of a module, with their signatures
    Functions(info::FunctionsArgs),
    /// Show version, devices and usage of a server
    Info(info::AddressArgs),
    /// Tell if you may do something at a server: exit code 0 for yes, 1 for no
    Can(can::CanArgs),
    /// Copy files or folders into the workspace at a server
    Put(files::PutArgs),
    /// Copy files or folders from the workspace at a server
    Get(files::GetArgs),
    /// List the files of the workspace at a server
    Ls(files::LsArgs),
    /// Remove files or folders of the workspace at a server
    Rm(files::RmArgs),
    /// Run a program at a server, with files in, its output, and files out
    Run(run::RunArgs),
    /// Forward a local port to a service near a server, or the other way, until interrupted
    Forward(forward::ForwardArgs),
    /// Lease a device of a server while a program runs here
    Lease(lease::LeaseArgs),
    /// Measure round trips until interrupted
    Ping(ping::PingArgs),
    /// Measure the run time of a function at the server
    Time(call::TimeArgs),
    /// Plan a graph of calls over several servers, by a file, and run it
    Place(place::PlaceArgs),
    /// Show the last log lines of a server, where it lets you read them, and follow its log
    Logs(logs::LogsArgs),
    /// Show the servers of a tracker, their clients and the waiting requests
    Status(status::StatusArgs),
    /// End the session of a client of a tracker's server, where the tracker allows it
    Kick(kick::KickArgs),
    /// Give a tracker's server to no more clients, or to clients again, where the tracker allows it
    Drain(drain::DrainArgs),
    /// Show the sessions of Disco at servers
    Disco(disco::DiscoArgs),
    /// Diagnose an address that does not work
    Doctor(doctor::DoctorArgs),
    /// Run commands line by line, over one connection
    Shell(shell::ShellArgs),
    /// List named servers, make one the default, or add one
    Use(use_server::UseArgs),
    /// Start a server on another machine by ssh, with a token of its own, and name it
    Up(up::UpArgs),
    /// Stop a server that up has started
    Down(up::DownArgs),
    /// Make certificates for a server and a client, or renew them
    Cert(credentials::CertArgs),
    /// Make a token, the secret that a server and its clients share
    Token(credentials::TokenArgs),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page; or with a folder, write the pages of all commands into it
    Man {
        /// The folder
        folder: Option<PathBuf>,
    },
}

/// Runs the tool with the arguments of this process. Returns its exit code. Call it first in
/// `main`: the tool may start its program again, to remove socket files if it is killed.
pub fn main() -> ExitCode {
    main_with(crate::transports())
}

/// As [`main`], with these transports: for a program that registers more than this crate has.
pub fn main_with(transports: Transports) -> ExitCode {
    ExitCode::from(run_with(transports))
}

/// As [`main_with`], and returns the number of the exit code: for a program that is
/// [run by another one](rpc_transports::program).
pub fn run_with(transports: Transports) -> u8 {
    let args: Vec<_> = rpc_transports::program::args().collect();
    crate::socket_guard::run_if_asked(args.get(1).map(|arg| &**arg), args.get(2).map(|arg| &**arg));
    crate::raise_file_limit();
    let asks_for_json = command_line::asks_for_json(&args);
    let Cli { mut options, mut command } = match command_line::parse(args.into_iter(), &transports) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && asks_for_json => {
            let failure = command_line::usage_failure(&error);
            failure.report(&Output::new(true, false, ColorChoice::Never), &[]);
            return failure.exit_code();
        }
        Err(error) => error.exit(),
    };
    if let Command::Status(status::StatusArgs { format: Some(status::StatusFormat::Json), .. }) = command {
        options.print_json();
    }
    options.set_transports(transports);
    let output = options.output();
    if let Ok(filter) = options.log_level().parse() {
        logging::init(&filter, LogFormat::Text);
    }
    let outcome = resolve_server(&mut options, &mut command).and_then(|()| run(&options, &output, command));
    match outcome {
        Ok(()) => exit_code::SUCCESS,
        Err(failure) => {
            failure.report(&output, options.jump());
            failure.exit_code()
        }
    }
}

impl Command {
    /// Returns the address of the server that the command uses, with the default port of its role.
    fn address_mut(&mut self) -> Option<(&mut String, u16)> {
        let address = match self {
            Self::Status(status::StatusArgs { tracker, .. })
            | Self::Kick(kick::KickArgs { tracker, .. })
            | Self::Drain(drain::DrainArgs { tracker, .. }) => return Some((tracker, TRACKER_PORT)),
            Self::Call(args) => &mut args.address,
            Self::Functions(args) => &mut args.address,
            Self::Info(args) => &mut args.address,
            Self::Can(args) => &mut args.address,
            Self::Put(args) => &mut args.address,
            Self::Get(args) => &mut args.address,
            Self::Ls(args) => &mut args.address,
            Self::Rm(args) => &mut args.address,
            Self::Run(args) => &mut args.address,
            Self::Forward(args) => &mut args.address,
            Self::Lease(args) => &mut args.address,
            Self::Ping(args) => &mut args.address,
            Self::Time(args) => &mut args.address,
            Self::Logs(args) => &mut args.address,
            Self::Doctor(args) => &mut args.address,
            Self::Shell(args) => &mut args.address,
            // It may have several, which are resolved one by one.
            Self::Disco(_)
            | Self::Place(_)
            | Self::Use(_)
            | Self::Up(_)
            | Self::Down(_)
            | Self::Cert(_)
            | Self::Token(_)
            | Self::Completions { .. }
            | Self::Man { .. } => return None,
        };
        Some((address, SERVER_PORT))
    }
}

/// Puts the address in the place of a named server, and checks it.
fn resolve_server(options: &mut CommonOptions, command: &mut Command) -> Result<(), Failure> {
    // The doctor reports a bad address as one of its steps.
    let is_doctor = matches!(command, Command::Doctor(_));
    let Some((address, port)) = command.address_mut() else { return Ok(()) };
    options.resolve_servers(address, port)?;
    if is_doctor { Ok(()) } else { options.check_addresses(address) }
}

fn run(options: &CommonOptions, output: &Output, command: Command) -> Result<(), Failure> {
    match command {
        // It takes signals itself, and goes on.
        Command::Shell(args) => block_on(shell::shell(options, output, args)),
        command => {
            let interruption = Interruption::listen()?;
            block_on(perform(options, output, command, &interruption))
        }
    }
}

/// Performs a command other than `shell`, until a signal asks to end.
async fn perform(
    options: &CommonOptions,
    output: &Output,
    command: Command,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let limits = (options, interruption);
    match command {
        Command::Call(args) => limited(limits, call::call(options, output, args)).await,
        Command::Functions(args) => {
            limited(limits, info::functions(options, output, args)).await.map_err(Failure::without_effect)
        }
        Command::Info(args) => {
            limited(limits, info::info(options, output, args)).await.map_err(Failure::without_effect)
        }
        Command::Can(args) => limited(limits, can::can(options, output, args)).await.map_err(Failure::without_effect),
        Command::Put(args) => limited(limits, files::put(options, output, args)).await,
        Command::Get(args) => limited(limits, files::get(options, output, args)).await.map_err(Failure::without_effect),
        Command::Ls(args) => limited(limits, files::ls(options, output, args)).await.map_err(Failure::without_effect),
        Command::Rm(args) => limited(limits, files::rm(options, output, args)).await,
        Command::Time(args) => limited(limits, call::time(options, output, args)).await,
        Command::Place(args) => limited(limits, place::place(options, output, args)).await,
        Command::Kick(args) => limited(limits, kick::kick(options, output, args)).await,
        Command::Drain(args) => limited(limits, drain::drain(options, output, args)).await,
        // These commands apply the limit to each of their steps, or to the program, and end by
        // themselves when a signal asks them to.
        Command::Run(args) => run::run(options, output, args, interruption).await,
        Command::Status(args) => {
            status::status(options, output, args, interruption).await.map_err(Failure::without_effect)
        }
        Command::Disco(args) => {
            disco::disco(options, output, args, interruption).await.map_err(Failure::without_effect)
        }
        Command::Logs(args) => logs::logs(options, output, args, interruption).await.map_err(Failure::without_effect),
        Command::Ping(args) => ping::ping(options, output, args, interruption).await.map_err(Failure::without_effect),
        Command::Forward(args) => forward::forward(options, output, args, interruption).await,
        Command::Lease(args) => lease::lease(options, output, args, interruption).await,
        Command::Doctor(args) => interruptible(interruption, doctor::doctor(options, output, args)).await,
        Command::Shell(_) => Err(Failure::Usage("this is a shell already".to_owned())),
        Command::Up(args) => up::up(options, output, args, interruption).await,
        Command::Down(args) => up::down(options, output, args, interruption).await,
        Command::Use(args) => use_server::use_server(options, output, args),
        Command::Cert(args) => credentials::cert(output, args),
        Command::Token(args) => credentials::token(output, args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "rpc-cli", &mut script);
            output.bytes(&script)
        }
        Command::Man { folder: Some(folder) } => {
            let written =
                std::fs::create_dir_all(&folder).and_then(|()| clap_mangen::generate_to(Cli::command(), &folder));
            written.map_err(|error| Failure::file("cannot write the manual to", &folder, error))
        }
        Command::Man { folder: None } => {
            let mut page = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(Failure::Output)?;
            output.bytes(&page)
        }
    }
}

/// Runs `work` within the time limit of the options, until the interruption comes.
async fn limited(
    (options, interruption): (&CommonOptions, &Interruption),
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    let within_limit = async {
        match options.timeout() {
            Some(limit) => match tokio::time::timeout(limit, work).await {
                Ok(outcome) => outcome,
                Err(_) => Err(Failure::TimedOut { what: "this".to_owned(), limit, why: options.wait_reason() }),
            },
            None => work.await,
        }
    };
    interruptible(interruption, within_limit).await
}

/// Runs `work` until the interruption comes: then it is dropped.
async fn interruptible(
    interruption: &Interruption,
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    tokio::select! {
        outcome = work => outcome,
        failure = interruption.wait() => Err(failure),
    }
}

/// Runs `work` on the calling thread.
fn block_on(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(work);
    // A read of standard input may still block a thread for ever.
    runtime.shutdown_background();
    outcome
}

/// Returns a runtime on the calling thread.
///
/// # Errors
///
/// The system refuses resources of the runtime.
pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error: io::Error| Failure::Local { what: "cannot start the runtime".to_owned(), source: error })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, builder::StyledStr};

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_its_environment_variable() {
        fn check(command: &clap::Command) {
            for flag in command.get_arguments().filter(|flag| flag.get_long().is_some() && !command.is_hide_set()) {
                let long = flag.get_long().unwrap();
                if matches!(long, "help" | "version") {
                    continue;
                }
                let expected = format!("RPC_CLI_{}", long.to_uppercase().replace('-', "_"));
                assert_eq!(flag.get_env().and_then(|name| name.to_str()), Some(&*expected), "{}", command.get_name());
                assert!(!flag.get_help().unwrap_or(&StyledStr::new()).to_string().is_empty(), "--{long}");
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}

//! `rpc-server`: the commands serve, tracker, relay and worker. [`main`] is for programs of one's
//! own, too.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::config::{
    ConfigError, RelaySettings, ServeError, ServeSettings, TrackerSettings, WorkerSettings, with_groups_and_defaults,
};
use crate::isolate::{self, gpu};
use crate::policy::{Answer, Policy};
use crate::server::Relay;
use crate::server::{RpcServer, StopReason};
use crate::server::{disco_node, exit_code};
use crate::tracker::Tracker;
use crate::{builtins, logging};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use rpc_core::{Permission, Registry};
use rpc_transports::{Dialects, PeerIdentity, Transports, program};

const EXIT_CODES: &str = "\
Exit codes:
  0     stopped by a signal or at the end of its session, or printed what was asked for
  1     failed, or the answer is no
  2     the command line is wrong
  69    an address, the folder for files of sessions, or a controller is not available
  78    the configuration is wrong
  130   stopped at once by SIGINT as a second signal
  143   stopped at once by SIGTERM as a second signal";

/// Serves the functions, devices and files of this machine to other programs.
#[derive(Parser)]
#[command(name = "rpc-server", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT.
    ///
    /// Prints "listening on ADDRESS" for each address on standard output; everything else goes to
    /// standard error. After SIGTERM or SIGINT the server refuses new sessions, tells clients to
    /// leave, and gives their sessions --drain-timeout to end; a second signal stops at once.
    #[command(after_help = EXIT_CODES)]
    Serve(#[command(flatten)] Box<ServeSettings>),
    /// Give servers to clients until SIGTERM or SIGINT.
    ///
    /// Servers register with "serve --tracker ADDRESS", and clients ask for them as
    /// tracker://HOST:PORT/KEY. Prints "listening on ADDRESS" for each address on standard output;
    /// everything else goes to standard error. After a restart the tracker learns its state again
    /// from servers and waiting clients; running sessions are not affected.
    #[command(after_help = EXIT_CODES)]
    Tracker(#[command(flatten)] Box<TrackerSettings>),
    /// Connect clients with servers that cannot be dialled until SIGTERM or SIGINT.
    ///
    /// Servers wait here with "serve --relay ADDRESS/NAME", and clients reach them as ADDRESS/NAME.
    /// The relay forwards bytes; client and server authenticate each other. Prints "listening on
    /// ADDRESS" for each address on standard output; everything else goes to standard error.
    #[command(after_help = EXIT_CODES)]
    Relay(#[command(flatten)] Box<RelaySettings>),
    /// Run a node of a Disco session, which dials the controller, until the session ends.
    ///
    /// For nodes that the controller cannot dial, and for launchers: mpirun, srun and torchrun set
    /// the number of the node of each process. Everything else is as with "serve"; with --listen
    /// other clients are served, too.
    #[command(after_help = EXIT_CODES)]
    Worker(#[command(flatten)] Box<WorkerSettings>),
    /// Print the configuration that "relay" would use with these flags, this environment and this
    /// file, as TOML.
    RelayConfig(#[command(flatten)] Box<RelaySettings>),
    /// Print the configuration that "tracker" would use with these flags, this environment and this
    /// file, as TOML.
    TrackerConfig(#[command(flatten)] Box<TrackerSettings>),
    /// Print the configuration that "serve" would use with these flags, this environment and this
    /// file, as TOML.
    Config(#[command(flatten)] Box<ServeSettings>),
    /// Check the rights of clients (--policy) without a server.
    Policy {
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page; or with a folder, write the pages of all commands into it.
    Man {
        /// The folder.
        folder: Option<PathBuf>,
    },
}

#[derive(Subcommand)]
enum PolicyCommand {
    /// Check a policy file, and answer what it lets a client do.
    ///
    /// The settings of a server, which limit every rule, are not considered. The exit code is 0 for
    /// yes, 1 for no.
    #[command(after_help = EXIT_CODES)]
    Check {
        /// The policy file.
        file: PathBuf,
        /// The client: token:NAME, cert:NAME, unix:NUMBER, via:PROXY/NAME or anonymous.
        #[arg(requires = "permission")]
        identity: Option<PeerIdentity>,
        /// Permission that the client wants: call:NAME, device:DEVICE, run:PROGRAM, modules, disco,
        /// forward:ADDRESS, port:ADDRESS, listen:ADDRESS, peer:ADDRESS, logs or
        /// lease-priority:NUMBER.
        permission: Option<String>,
    },
}

/// Runs the daemon with the arguments of this process. Returns its exit code. Call it first in
/// `main`: session processes and workers are this program again.
pub fn main() -> ExitCode {
    main_with(crate::transports(), Dialects::default())
}

/// As [`main`], for a program that registers more than this crate has: all commands have
/// `transports`, and those that serve sessions of functions (`serve` and `worker`) speak `dialects`
/// beside the native protocol.
pub fn main_with(transports: Transports, dialects: Dialects) -> ExitCode {
    ExitCode::from(run_with(transports, dialects, None))
}

/// Importer of modules of another language (`--python`): returns a registry of their functions, and
/// sees to it that [the program that is started again](rpc_transports::program) has them, too.
/// Fails with a text.
pub type Importer<'a> = dyn Fn(&[String]) -> Result<Registry, String> + 'a;

/// As [`main_with`], for a program that is [run by another one](rpc_transports::program), such as
/// an interpreter, whose modules `importer` imports. Returns the number of the exit code.
pub fn run_with(transports: Transports, dialects: Dialects, importer: Option<&Importer<'_>>) -> u8 {
    gpu::answer_if_asked();
    crate::raise_file_limit();
    let registry = Registry::new();
    builtins::register(&registry);
    // First, so that session processes can have worker processes.
    disco_node::serve_if_worker(&registry);
    isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
    let Cli { command } =
        Cli::from_arg_matches(&command_line().get_matches_from(program::args())).unwrap_or_else(|error| error.exit());
    match command {
        Command::Serve(settings) => exit_code::of_server(&serve(*settings, transports, dialects, importer)),
        Command::Worker(settings) => exit_code::of_server(&work(*settings, transports, dialects, importer)),
        Command::Config(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Relay(settings) => exit_code::of_server(&relay(*settings, transports)),
        Command::RelayConfig(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Tracker(settings) => exit_code::of_server(&track(*settings, transports)),
        Command::TrackerConfig(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Policy { command: PolicyCommand::Check { file, identity, permission } } => {
            check_policy(&file, identity.zip(permission), &transports)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command_line(), "rpc-server", &mut script);
            print(&script)
        }
        Command::Man { folder: Some(folder) } => done(clap_mangen::generate_to(command_line(), folder)),
        Command::Man { folder: None } => {
            let mut page = Vec::new();
            match clap_mangen::Man::new(command_line()).render(&mut page) {
                Ok(()) => print(&page),
                Err(error) => done(Err(error)),
            }
        }
    }
}

/// Returns the command line, with the settings in groups.
fn command_line() -> clap::Command {
    with_groups_and_defaults(Cli::command())
}

fn serve(
    settings: ServeSettings,
    transports: Transports,
    dialects: Dialects,
    importer: Option<&Importer<'_>>,
) -> Result<StopReason, ServeError> {
    let config = settings.clone().resolve_with(&transports)?;
    logging::init_for_server(&config);
    let server = RpcServer::new(import(&config.python, importer)?).devices(gpu::for_server(&config)).config(config);
    let server = server.transports(transports.clone()).dialects(dialects);
    server.read_origins(move || Ok(settings.clone().resolve_with(&transports)?.allow_origin)).run_blocking()
}

fn relay(settings: RelaySettings, transports: Transports) -> Result<StopReason, ServeError> {
    let config = settings.clone().resolve_with(&transports)?;
    logging::init(&config.log_level, config.log_format);
    let relay = Relay::with_transports(&config, transports.clone())?;
    relay.read_origins(move || Ok(settings.clone().resolve_with(&transports)?.allow_origin)).run_blocking()
}

fn track(settings: TrackerSettings, transports: Transports) -> Result<StopReason, ServeError> {
    let config = settings.clone().resolve_with(&transports)?;
    logging::init(&config.log_level, config.log_format);
    let known = transports.clone();
    Tracker::run_blocking_reading(&config, transports, move || Ok(settings.clone().resolve_with(&known)?.allow_origin))
}

/// Returns a registry with the functions of modules.
fn import(modules: &[String], importer: Option<&Importer<'_>>) -> Result<Registry, ConfigError> {
    if modules.is_empty() {
        return Ok(Registry::new());
    }
    let importer = importer.ok_or(ConfigError::NoPython)?;
    importer(modules).map_err(|problem| ConfigError::Import { problem })
}

fn work(
    settings: WorkerSettings,
    transports: Transports,
    dialects: Dialects,
    importer: Option<&Importer<'_>>,
) -> Result<StopReason, ServeError> {
    let config = settings.clone().resolve_with(&transports)?;
    logging::init_for_server(&config.serve);
    let registry = import(&config.serve.python, importer)?;
    let known = transports.clone();
    let read_origins = move || Ok(settings.clone().resolve_with(&known)?.serve.allow_origin);
    disco_node::run_blocking_reading(config, registry, transports, dialects, read_origins)
}

/// Reads a policy file, and prints the number of its rules, or what it lets a client do.
fn check_policy(file: &Path, question: Option<(PeerIdentity, String)>, transports: &Transports) -> u8 {
    let policy = match Policy::read(file, transports) {
        Ok(policy) => policy,
        Err(error) => return exit_code::of_server(&Err(error.into())),
    };
    let Some((identity, permission)) = question else {
        return print(format!("{}: {} rules\n", file.display(), policy.rule_count()).as_bytes());
    };
    match Permission::parse(&permission) {
        Ok(permission) => {
            let answer = Answer::of_policy(&policy, &identity, &permission);
            let printed = print(format!("{answer}\n").as_bytes());
            if answer.allowed { printed } else { exit_code::FAILURE }
        }
        Err(error) => {
            exit_code::report(&error);
            exit_code::USAGE
        }
    }
}

fn print_config(config: Result<String, ConfigError>) -> u8 {
    match config {
        Ok(text) => print(text.as_bytes()),
        Err(error) => exit_code::of_server(&Err(error.into())),
    }
}

fn print(bytes: &[u8]) -> u8 {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        // The reader has closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => exit_code::SUCCESS,
        outcome => done(outcome),
    }
}

fn done(outcome: io::Result<()>) -> u8 {
    match outcome {
        Ok(()) => exit_code::SUCCESS,
        Err(error) => {
            exit_code::report(&error);
            exit_code::FAILURE
        }
    }
}

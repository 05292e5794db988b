//! The daemon.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use rpc_core::Registry;
use rpc_server::config::{ConfigError, RelaySettings, ServeError, ServeSettings, TrackerSettings, WorkerSettings};
use rpc_server::isolate::{self, gpu};
use rpc_server::server::Relay;
use rpc_server::server::{RpcServer, StopReason};
use rpc_server::server::{disco_node, exit_code};
use rpc_server::tracker::Tracker;
use rpc_server::{builtins, logging};

const EXIT_CODES: &str = "\
Exit codes:
  0     stopped as it was told to, or there was nothing to do but print
  1     failed
  2     the command line is not right
  69    an address, the folder for the files of sessions, or a controller cannot be had
  78    the configuration cannot be used
  130   stopped at once by a second signal, the last one being SIGINT
  143   the same, the last one being SIGTERM";

/// Serves this machine's functions, memory and files to other programs.
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
    /// Prints "listening on ADDRESS" for each address on standard output; all else goes to standard
    /// error. On SIGTERM or SIGINT no session begins any more, clients are told to go, and their
    /// sessions may end within --drain-timeout; a second signal stops at once.
    #[command(after_help = EXIT_CODES)]
    Serve(#[command(flatten)] Box<ServeSettings>),
    /// Hand out servers until SIGTERM or SIGINT.
    ///
    /// Servers come by themselves ("serve --tracker ADDRESS"), and clients ask for them as
    /// tracker://HOST:PORT/KEY. Prints "listening on ADDRESS" for each address on standard output;
    /// all else goes to standard error. What it knows it learns again after a restart, from the
    /// servers and from the clients that wait; sessions that run are not touched.
    #[command(after_help = EXIT_CODES)]
    Tracker(#[command(flatten)] Box<TrackerSettings>),
    /// Bring servers that nobody can dial together with their clients, until SIGTERM or SIGINT.
    ///
    /// Servers come by themselves ("serve --relay ADDRESS/NAME") and wait, and clients reach them
    /// as ADDRESS/NAME. The relay passes bytes; who is who is settled between client and server.
    /// Prints "listening on ADDRESS" for each address on standard output; all else goes to standard
    /// error.
    #[command(after_help = EXIT_CODES)]
    Relay(#[command(flatten)] Box<RelaySettings>),
    /// Be a node of a Disco session, whose controller is dialled, until the session ends.
    ///
    /// For nodes that the controller cannot dial, and for launchers: started by mpirun, srun or
    /// torchrun each process is the node that the launcher says. All else is as with "serve", and
    /// with --listen other clients are served, too.
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
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page; or with a folder, write the pages of all commands into it.
    Man {
        /// Where to write the pages.
        folder: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    gpu::answer_if_asked();
    let registry = Registry::new();
    builtins::register(&registry);
    // First, so that sessions in processes of their own can have workers in others.
    disco::serve_if_worker_with(&registry, || disco_node::worker_devices(&registry));
    isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
    match Cli::parse().command {
        Command::Serve(settings) => exit_code::of_server(&serve(*settings)).into(),
        Command::Worker(settings) => exit_code::of_server(&work(*settings)).into(),
        Command::Config(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Relay(settings) => exit_code::of_server(&relay(*settings)).into(),
        Command::RelayConfig(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Tracker(settings) => exit_code::of_server(&track(*settings)).into(),
        Command::TrackerConfig(settings) => print_config(settings.resolve().and_then(|config| config.to_toml())),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "rpc-server", &mut script);
            print(&script)
        }
        Command::Man { folder: Some(folder) } => done(clap_mangen::generate_to(Cli::command(), folder)),
        Command::Man { folder: None } => {
            let mut page = Vec::new();
            match clap_mangen::Man::new(Cli::command()).render(&mut page) {
                Ok(()) => print(&page),
                Err(error) => done(Err(error)),
            }
        }
    }
}

fn serve(settings: ServeSettings) -> Result<StopReason, ServeError> {
    let config = settings.resolve()?;
    logging::init(&config.log_level, config.log_format);
    RpcServer::default().devices(gpu::for_server(&config)).config(config).run_blocking()
}

fn relay(settings: RelaySettings) -> Result<StopReason, ServeError> {
    let config = settings.resolve()?;
    logging::init(&config.log_level, config.log_format);
    Relay::new(&config)?.run_blocking()
}

fn track(settings: TrackerSettings) -> Result<StopReason, ServeError> {
    let config = settings.resolve()?;
    logging::init(&config.log_level, config.log_format);
    Tracker::run_blocking(&config)
}

fn work(settings: WorkerSettings) -> Result<StopReason, ServeError> {
    let config = settings.resolve()?;
    logging::init(&config.serve.log_level, config.serve.log_format);
    disco_node::run_blocking(config)
}

fn print_config(config: Result<String, ConfigError>) -> ExitCode {
    match config {
        Ok(text) => print(text.as_bytes()),
        Err(error) => exit_code::of_server(&Err(error.into())).into(),
    }
}

fn print(bytes: &[u8]) -> ExitCode {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        outcome => done(outcome),
    }
}

fn done(outcome: io::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            exit_code::report(&error);
            exit_code::FAILURE.into()
        }
    }
}

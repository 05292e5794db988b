//! `rpc-bench`: measures sessions and Disco, beside bare sockets on the same machine.
//!
//! `session_bench` measures calls and copies, `long_link_bench` copies over a long link,
//! `disco_bench` a controller and its workers, `scale_bench` a controller with more and more
//! workers, `run_bench` programs at a server, `forward_bench` connections that are carried to a
//! service, `send_bench` tensors from server to server. The servers of all are this program again,
//! in child processes; the options of a connection and the exit codes are those of `rpc-cli`.

#![forbid(unsafe_code)]

mod case_filter;
mod certificates;
mod child_process;
mod disco_bench;
mod forward_bench;
mod long_link_bench;
mod run_bench;
mod scale_bench;
mod send_bench;
mod session_bench;
mod statistics;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rpc_server::cli::CommonOptions;
use rpc_server::logging::{self, LogFormat};

const EXIT_CODES: &str = "\
Exit codes are those of rpc-cli: 0 success, 1 the request failed, 2 wrong command line, 69 the server cannot be reached,
76 another protocol, 77 refused, 124 the time limit passed.

Every flag has an environment variable: those under \"Common options\" share theirs with rpc-cli (RPC_CLI_NO_SUCH_FLAG),
the others are RPC_BENCH_NO_SUCH_FLAG.";

/// Measures sessions and Disco, beside bare sockets on the same machine.
#[derive(Parser)]
#[command(name = "rpc-bench", version, after_help = EXIT_CODES, max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    options: CommonOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure calls and copies of a session, and compare them with bare sockets
    Rpc(Box<session_bench::SessionBenchArgs>),
    /// Measure copies over a link with a long round trip
    LongLink(long_link_bench::LongLinkArgs),
    /// Measure commands of a controller to its workers, and collectives among the workers
    Disco(Box<disco_bench::DiscoBenchArgs>),
    /// Measure programs at a server, and compare them with the same programs here; and leases
    Run(run_bench::RunBenchArgs),
    /// Measure a forwarded connection, and compare it with bare relays
    Forward(forward_bench::ForwardBenchArgs),
    /// Measure tensors from one server to another, and compare them with a bare copy
    Send(send_bench::SendBenchArgs),
    /// Measure the start, calls and memory of sessions with more and more workers
    Scale(scale_bench::ScaleBenchArgs),
    /// Measure one session for `scale`
    #[command(hide = true)]
    ScaleCase(scale_bench::CaseArgs),
    /// Run nodes that `scale` starts
    #[command(hide = true)]
    SimulatedNodes(scale_bench::SimulatedNodesArgs),
    /// Run a server that `run` or `long-link` starts
    #[command(hide = true)]
    RunServer(run_bench::RunServerArgs),
    /// Run a process on the way that `forward` measures
    #[command(hide = true)]
    ForwardChild(forward_bench::ChildArgs),
    /// Run a process that `send` starts
    #[command(hide = true)]
    SendChild(send_bench::ChildArgs),
    /// Run a server that `rpc` starts
    #[command(hide = true)]
    SessionServer(session_bench::ChildArgs),
    /// Run a server that `disco` starts
    #[command(hide = true)]
    DiscoNode(disco_bench::NodeArgs),
}

fn main() -> ExitCode {
    disco_bench::serve_if_worker();
    rpc_server::isolate::run_if_isolated(&rpc_core::Registry::new());
    let Cli { options, command } = Cli::parse();
    let output = options.output();
    if let Ok(filter) = options.log_level().parse() {
        logging::init(&filter, LogFormat::Text);
    }
    let outcome = match command {
        Command::Rpc(args) => session_bench::run(&options, &output, &args),
        Command::LongLink(args) => long_link_bench::run(&options, &output, &args),
        Command::Disco(args) => disco_bench::run(&output, &args),
        Command::Run(args) => run_bench::run(&output, &args),
        Command::Forward(args) => forward_bench::run(&output, &args),
        Command::ForwardChild(args) => forward_bench::run_child(args),
        Command::Send(args) => send_bench::run(&output, &args),
        Command::SendChild(args) => send_bench::run_child(args),
        Command::Scale(args) => scale_bench::run(&output, &args),
        Command::ScaleCase(args) => scale_bench::run_case(&args),
        Command::SimulatedNodes(args) => scale_bench::run_simulated_nodes(args),
        Command::RunServer(args) => run_bench::run_server(args),
        Command::SessionServer(args) => session_bench::run_child(args),
        Command::DiscoNode(args) => disco_bench::run_node(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report(&output, options.jump());
            ExitCode::from(failure.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, builder::StyledStr};

    use super::Cli;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_an_environment_variable_and_a_help_text() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            for flag in command.get_arguments() {
                let Some(long) = flag.get_long().filter(|long| !matches!(*long, "help" | "version")) else { continue };
                let expected = format!("RPC_BENCH_{}", long.to_uppercase().replace('-', "_"));
                assert_eq!(flag.get_env().and_then(|name| name.to_str()), Some(&*expected), "{}", command.get_name());
                assert!(!flag.get_help().unwrap_or(&StyledStr::new()).to_string().is_empty(), "--{long}");
            }
        }
    }
}

//! The tool for the shell.

use std::process::ExitCode;

fn main() -> ExitCode {
    rpc_server::cli::main()
}

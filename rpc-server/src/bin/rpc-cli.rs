//! The program `rpc-cli`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rpc_server::cli::main()
}

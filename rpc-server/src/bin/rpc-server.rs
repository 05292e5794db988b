//! The program `rpc-server`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rpc_server::daemon::main()
}

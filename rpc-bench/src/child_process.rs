//! The protocol of a child process that is a server with its parent: it prints its address, and
//! ends with its standard input.

use std::io::{self, Read, Write};

use rpc_server::cli::Failure;

/// Prints the address in the form that [`ServerProcess`](rpc_server::ServerProcess) expects.
pub(crate) fn announce(address: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "listening on {address}").and_then(|()| stdout.flush());
}

/// Exits this process when its standard input ends: the pipe closes with the parent process.
pub(crate) fn exit_with_stdin() -> Result<(), Failure> {
    let watch = || {
        let mut buffer = [0; 64];
        // The parent writes nothing; what another one writes is ignored.
        while io::stdin().read(&mut buffer).is_ok_and(|count| count > 0) {}
        std::process::exit(0);
    };
    let started = std::thread::Builder::new().name("stdin".to_owned()).spawn(watch);
    started.map(drop).map_err(|error| Failure::local("cannot start a thread", error))
}

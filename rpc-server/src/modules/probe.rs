//! Whether the operator's libraries can be loaded, found out by a process of its own before anybody is served: a server with
//! processes for its sessions loads nothing itself.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{self, Command, Stdio};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Registry, Result, RpcError};

use super::native::{Native, NativeSettings};
use crate::isolate::this_program;

/// The first argument of a program that is started to load libraries; which ones it reads from standard input, a socket, to
/// which it answers.
const ARGUMENT: &str = "--load-libraries";

/// How long libraries may take. Some look for devices when they are loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most that is read of a message, in bytes.
const LONGEST: u64 = 1 << 20;

/// Loads libraries, answers whether that went well, and exits, if this process was started to do that with `first` as its first
/// argument; otherwise returns at once.
pub(crate) fn answer_if_asked(first: Option<&OsString>) {
    if first.is_none_or(|first| first != ARGUMENT) {
        return;
    }
    process::exit(match answer() {
        Ok(()) => 0,
        Err(_) => 1,
    });
}

fn answer() -> io::Result<()> {
    let mut server = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let settings: NativeSettings = serde_json::from_reader((&server).take(LONGEST))?;
    let outcome = Native::with(settings).offer_libraries(&Registry::new());
    let answer = outcome.map_err(|error| error.message().to_owned());
    server.write_all(&serde_json::to_vec(&answer)?)
}

/// Has a process of its own load the operator's libraries, if there are any. Blocks, up to a minute. `main` has to begin with
/// [`run_if_isolated`](crate::isolate::run_if_isolated).
///
/// # Errors
///
/// What cannot be loaded, and why; or that the process did not say.
pub(crate) fn check_libraries(native: &Native) -> Result<()> {
    if native.libraries().is_empty() {
        return Ok(());
    }
    let answer = ask(native.settings()).map_err(|error| {
        RpcError::new(ErrorKind::Io, format!("{}: a process that loads them {error}", native.libraries()))
    })?;
    // It is about those that this process was given, and names the one.
    answer.map_err(|message| RpcError::new(ErrorKind::Io, message))
}

/// What the process has answered, or in words that follow "the process" what it did instead.
fn ask(settings: &NativeSettings) -> Result<Result<(), String>, String> {
    let failed = |error| format!("cannot be started: {error}");
    let (mut stream, theirs) = UnixStream::pair().map_err(failed)?;
    let (program, name) = this_program().map_err(failed)?;
    let mut command = Command::new(program);
    // What libraries print when they are loaded is none of the server's output.
    command.arg0(name).arg(ARGUMENT).stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    // Our copy of its end goes with this.
    drop(command);
    let answer = exchange(&mut stream, settings);
    if let Err(error) = &answer
        && matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
    {
        let _ = child.kill();
        // Reaped when it ends, which may take its time in a driver.
        drop(std::thread::Builder::new().name("rpc-probe".into()).spawn(move || child.wait()));
        return Err(format!("has not answered within {PATIENCE:?}"));
    }
    let status = child.wait().map_err(|error| format!("cannot be waited for: {error}"))?;
    match answer.ok().and_then(|text| serde_json::from_slice(&text).ok()) {
        Some(answer) => Ok(answer),
        None => Err(format!("ended with {status}")),
    }
}

/// Says what is to be loaded, and reads until the process has closed its end.
fn exchange(stream: &mut UnixStream, settings: &NativeSettings) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&serde_json::to_vec(settings)?)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    while (text.len() as u64) < LONGEST {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(text)
}

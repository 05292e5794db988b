//! A check of the operator's libraries in a process of its own, before the server starts: a server
//! with session processes loads no library itself.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{self, Stdio};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Registry, Result, RpcError};
use rpc_transports::MessageFamily;
use rpc_transports::program::Program;
use rpc_transports::self_start;
use serde::{Deserialize, Serialize};

use super::tvm_ffi::{Native, NativeSettings};
use crate::versioned_json;

/// First argument of the process that checks libraries. It reads their names from standard input, a
/// socket, and answers there.
const ARGUMENT: &str = "--load-libraries";

/// Longest time to load libraries. Some search for devices when they are loaded.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum length of a message in bytes.
const MAX_MESSAGE: u64 = 1 << 20;

/// Messages to and from processes that check libraries.
const MESSAGES: MessageFamily = MessageFamily::new("the messages of library checks", 3);

/// Request to load libraries, as JSON.
#[derive(Serialize, Deserialize)]
struct LoadRequest {
    /// Version of the server: that of [`MESSAGES`].
    version: u32,
    settings: NativeSettings,
}

/// Answer of the process, as JSON.
#[derive(Serialize, Deserialize)]
struct LoadAnswer {
    /// Version of the process: that of [`MESSAGES`].
    version: u32,
    /// Result, with the message of an error.
    outcome: Result<(), String>,
}

/// Loads libraries, reports the result and exits, if `first` is the argument for this; otherwise
/// returns at once.
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
    let mut request = Vec::new();
    (&server).take(MAX_MESSAGE).read_to_end(&mut request)?;
    let outcome = load(&request);
    server.write_all(&serde_json::to_vec(&LoadAnswer { version: MESSAGES.version(), outcome })?)
}

fn load(request: &[u8]) -> Result<(), String> {
    let request = versioned_json::decode(&MESSAGES, request, "the server", "this process");
    let LoadRequest { settings, .. } = request.map_err(|error| error.to_string())?;
    let outcome = Native::with(settings).offer_libraries(&Registry::new());
    outcome.map_err(|error| error.message().to_owned())
}

fn read_answer(text: &[u8]) -> io::Result<Result<(), String>> {
    let answer: LoadAnswer = versioned_json::decode(&MESSAGES, text, "that process", "this server")?;
    Ok(answer.outcome)
}

/// Starts a process that loads the operator's libraries, if there are any. Blocks, up to a minute.
/// `main` must begin with [`run_if_isolated`](crate::isolate::run_if_isolated).
///
/// # Errors
///
/// A library cannot be loaded, or the process did not answer.
pub(crate) fn check_libraries(native: &Native) -> Result<()> {
    if native.libraries().is_empty() {
        return Ok(());
    }
    let answer = ask(native.settings()).map_err(|error| {
        RpcError::new(ErrorKind::Io, format!("{}: a process that loads them {error}", native.libraries()))
    })?;
    // The message names the library.
    answer.map_err(|message| RpcError::new(ErrorKind::Io, message))
}

/// Returns the answer of the process, or the reason for which there is none, as a text that follows
/// "the process".
fn ask(settings: &NativeSettings) -> Result<Result<(), String>, String> {
    let failed = |error| format!("cannot be started: {error}");
    let (mut stream, child_stream) = UnixStream::pair().map_err(failed)?;
    let mut command = self_start::command(&Program::this()).map_err(failed)?;
    // Libraries may print when they are loaded, which must not mix with the server's output.
    command.arg(ARGUMENT).stdin(OwnedFd::from(child_stream)).stdout(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    // This closes our copy of the child's end of the socket.
    drop(command);
    let answer = exchange(&mut stream, settings);
    if let Err(error) = &answer
        && matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
    {
        let _ = child.kill();
        // A driver may delay its end, so a thread reaps it.
        drop(std::thread::Builder::new().name("rpc-probe".into()).spawn(move || child.wait()));
        return Err(format!("has not answered within {LOAD_TIMEOUT:?}"));
    }
    let status = child.wait().map_err(|error| format!("cannot be waited for: {error}"))?;
    match answer.ok().filter(|text| !text.is_empty()) {
        Some(text) => read_answer(&text).map_err(|error| format!("has answered in another form: {error}")),
        None => Err(format!("ended with {status}")),
    }
}

/// Sends the names of the libraries, and reads until the process closes its end.
fn exchange(stream: &mut UnixStream, settings: &NativeSettings) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + LOAD_TIMEOUT;
    stream.set_write_timeout(Some(LOAD_TIMEOUT))?;
    let request = LoadRequest { version: MESSAGES.version(), settings: settings.clone() };
    stream.write_all(&serde_json::to_vec(&request)?)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    while (text.len() as u64) < MAX_MESSAGE {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_bytes_and_others_are_refused_in_words() {
        let request =
            r#"{"version":3,"settings":{"tvm_ffi":null,"runtimes":[],"libraries":[],"allows_modules":false}}"#;
        let settings = NativeSettings::default();
        let made = LoadRequest { version: MESSAGES.version(), settings };
        assert_eq!(serde_json::to_string(&made).unwrap(), request);
        assert_eq!(load(request.as_bytes()), Ok(()));
        let answer = r#"{"version":3,"outcome":{"Err":"a.so: not found"}}"#;
        let made = LoadAnswer { version: MESSAGES.version(), outcome: Err("a.so: not found".to_owned()) };
        assert_eq!(serde_json::to_string(&made).unwrap(), answer);
        assert_eq!(read_answer(answer.as_bytes()).unwrap(), Err("a.so: not found".to_owned()));

        let older = load(br#"{"tvm_ffi":null,"runtimes":[],"libraries":[]}"#).unwrap_err();
        assert!(older.contains("the server speaks version 1 of the messages of library checks"), "{older}");
        let older = read_answer(br#"{"Ok":null}"#).unwrap_err().to_string();
        assert!(older.contains("update that process"), "{older}");
        let newer = read_answer(br#"{"version":4,"loaded":7}"#).unwrap_err().to_string();
        assert!(newer.contains("update this server"), "{newer}");
    }
}

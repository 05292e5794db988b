//! `exec:` addresses: a child process at the far end of a socket pair, started, watched and ended.
//!
//! The child gets one end of the pair as both standard input and standard output. It shares this
//! process's standard error, or writes to a pipe that [`ChildStderr`] receives. One thread that
//! never exits starts all children: on Linux, the signal that kills a child together with this
//! process follows the *thread* that started the child. On a pool's thread it would strike when the
//! pool shrinks. The same thread ends and reaps the children.
//!
//! A child is ended by closing the channel. It gets [`GRACE`] to exit by itself, and is then
//! killed. When this process dies, for whatever reason, the kernel kills the children at once on
//! Linux. On other systems, and in children that raised their privileges, the child reads the end
//! of the stream. Processes that a child starts are not ended with it.
//!
//! The functions for the child's side are [`take_stdio`] and [`stdio_channel`].

mod child;
// Unsafe code closes descriptors that nothing in the process owns.
#[allow(unsafe_code)]
mod inherited;
// Unsafe code tells the kernel, between fork and exec, that a child must die with its parent.
#[allow(unsafe_code)]
mod launcher;
mod stdio;
#[cfg(test)]
mod tests;
mod words;

use std::io;

use self::child::ChildEnd;
pub use self::child::ChildGuard;
pub(super) use self::child::Started;
pub use self::inherited::close_inherited_descriptors;
pub(super) use self::launcher::ChildCommand;
pub use self::launcher::{ChildStderr, GRACE};
pub use self::stdio::{StdioEnds, stdio_channel, take_stdio};
use self::words::quoted;
pub use self::words::split_words;
use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel, Machine, Peer};
use crate::error::TransportError;
use crate::transport::{BoxFuture, Dial, Properties, Reach, Transport};

/// The transport of `exec:` addresses.
#[derive(Clone, Debug, Default)]
pub struct Exec {
    stderr: Option<ChildStderr>,
}

impl Exec {
    /// Creates the transport. Its children share this process's standard error.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the receiver of the children's standard error. Default: none, and children write to the
    /// standard error of this process.
    #[must_use]
    pub fn stderr(self, stderr: ChildStderr) -> Self {
        Self { stderr: Some(stderr) }
    }
}

impl Transport for Exec {
    fn schemes(&self) -> &[&str] {
        &["exec"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        argv_of(at).map(|_| Properties::program(Reach::Machine))
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        Address::exec(argv_of(at)?)
    }

    fn dial<'a>(&'a self, to: &'a Address, _with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, self.stderr.as_ref()))
    }

    fn dial_blocking(&self, to: &Address, _with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        Some(dial_blocking(to, self.stderr.as_ref()))
    }
}

impl Address {
    /// Returns the address of a child process that is started when dialled.
    ///
    /// # Errors
    ///
    /// [`AddressError::Invalid`] if there is no program, or a word contains a zero byte.
    pub fn exec<I>(argv: I) -> Result<Self, AddressError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let argv: Vec<String> = argv.into_iter().map(Into::into).collect();
        let address = Self::opaque("exec", &quoted(&argv))?;
        argv_of(&address)?;
        Ok(address)
    }
}

/// Returns the program of an `exec:` address and its arguments.
///
/// # Errors
///
/// [`AddressError::Invalid`]: the command line cannot be split into words, names no program, or
/// contains a zero byte.
pub fn argv_of(address: &Address) -> Result<Vec<String>, AddressError> {
    let invalid = |problem| {
        let example = "write for example exec:ssh board 'rpc-server serve --stdio'";
        AddressError::invalid(address, format!("{problem}; {example}"))
    };
    let argv = split_words(address.rest().unwrap_or_default()).map_err(invalid)?;
    match () {
        () if argv.first().is_none_or(String::is_empty) => Err(invalid("it names no program")),
        () if argv.iter().any(|word| word.contains('\0')) => Err(invalid("it contains a zero byte")),
        () => Ok(argv),
    }
}

async fn dial(address: &Address, stderr: Option<&ChildStderr>) -> Result<Channel, TransportError> {
    let command = ChildCommand::local(argv_of(address)?);
    let program = command.program();
    let started = Started::start(command, stderr.cloned()).await;
    let started = started.map_err(|error| spawn_error(address, program, error))?;
    let peer = Peer::new(peer_text(address, &started)).on(Machine::This).with_process(started.pid());
    let channel = started.into_channel(peer, ChildEnd);
    channel.map_err(|error| TransportError::from_io(address.to_string(), error))
}

fn dial_blocking(address: &Address, stderr: Option<&ChildStderr>) -> Result<BlockingChannel, TransportError> {
    let command = ChildCommand::local(argv_of(address)?);
    let program = command.program();
    let started = Started::start_blocking(command, stderr.cloned());
    let started = started.map_err(|error| spawn_error(address, program, error))?;
    let peer = peer_text(address, &started);
    Ok(started.into_blocking_channel(peer, ChildEnd).sharing_memory())
}

fn peer_text(address: &Address, started: &Started) -> String {
    format!("{address} (process {})", started.pid())
}

/// Makes the error of a child that did not start. `program` is the first word of its command.
pub(super) fn spawn_error(address: &Address, program: Option<String>, error: io::Error) -> TransportError {
    let address = address.to_string();
    match error.get_ref().and_then(|error| error.downcast_ref()) {
        Some(cause) => TransportError::EndlessStart { address, source: *cause },
        None => TransportError::Spawn { address, program: program.unwrap_or_default(), source: error.into() },
    }
}

//! The child's side: standard input and output as the channel to the parent.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, fstat};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use crate::channel::{Channel, Peer};
use crate::error::TransportError;
use crate::handshake::identity_proofs::Security;

/// Child's end of the channel to its parent. Made by [`take_stdio`].
#[derive(Debug)]
#[non_exhaustive]
pub enum StdioEnds {
    /// One socket for input and output, as an `exec:` address makes it.
    Socket(StdStream),
    /// Two pipes or two sockets for input and output, as remote shells make them.
    Pair {
        /// Former standard input.
        read: OwnedFd,
        /// Former standard output.
        write: OwnedFd,
    },
}

impl StdioEnds {
    /// Converts the ends into a channel. Needs a tokio runtime with I/O. With a
    /// [`Pair`](Self::Pair), the parent reads the end of the stream when the channel is dropped,
    /// and not yet when it is shut down.
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn into_channel(self) -> io::Result<Channel> {
        match self {
            Self::Socket(stream) => {
                let stream = async_stream(stream)?;
                let peer = Peer::new(STDIO).with_process_of(&stream);
                Ok(Channel::new(stream, peer))
            }
            Self::Pair { read, write } => {
                let io = tokio::io::join(reader(read)?, writer(write)?);
                Ok(Channel::new(io, STDIO))
            }
        }
    }
}

/// Takes standard input and output for the channel to the parent, so that nothing else can use
/// them.
///
/// Afterwards standard input is empty, and output to standard output, such as that of `println!`,
/// goes to standard error. Call this function first in `main`: earlier output has gone to the
/// parent, and breaks the protocol.
///
/// On Linux the function also tells the kernel to kill this process when the thread that started it
/// is gone. Dialling an `exec:` address has done so already, but only for the process that it
/// started directly. This call covers a process behind a shell or another program.
///
/// From then on this process counts as one that serves its parent, and may start its own program as
/// a child ([`self_start::hook_took_over`](crate::self_start::hook_took_over)).
///
/// # Errors
///
/// [`io::ErrorKind::AlreadyExists`] at the second call. [`io::ErrorKind::InvalidInput`] if standard
/// input or output is neither a pipe nor a socket but, say, a terminal. Any other error that the
/// system reports. Standard input and output are then as before.
pub fn take_stdio() -> io::Result<StdioEnds> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::AcqRel) {
        let message = "standard input and output have been taken already";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    let ends = move_stdio_away();
    match ends {
        Ok(_) => crate::self_start::hook_took_over(),
        Err(_) => TAKEN.store(false, Ordering::Release),
    }
    ends
}

/// Takes standard input and output, and returns the channel to the parent over them: see
/// [`take_stdio`].
///
/// # Errors
///
/// As [`take_stdio`], in [`TransportError::Io`].
pub async fn stdio_channel() -> Result<Channel, TransportError> {
    let channel = take_stdio().and_then(StdioEnds::into_channel);
    let security = Security { is_parent: true, ..Security::default() };
    let channel = channel.map(|channel| channel.with_security(security));
    channel.map_err(|error| TransportError::Io { address: STDIO.into(), source: Arc::new(error) })
}

/// Name of the parent in errors.
const STDIO: &str = "standard input and output";

fn move_stdio_away() -> io::Result<StdioEnds> {
    // The copies are above the three standard descriptors. They are closed on exec, so that
    // children of this process do not inherit them.
    let read = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let write = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    let ends = sorted(read, write)?;
    let nothing = OpenOptions::new().read(true).open("/dev/null")?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    // The steps that are likely to fail come before the first change to standard input.
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok(ends)
}

fn sorted(read: OwnedFd, write: OwnedFd) -> io::Result<StdioEnds> {
    let (from, to) = (fstat(&read)?, fstat(&write)?);
    for stat in [&from, &to] {
        if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::Fifo | FileType::Socket) {
            let message = "standard input and output must be a socket or pipes; \
                           start this program through an exec: address";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
    }
    // A named pipe opened for both directions is one file too, but it cannot carry both.
    let is_socket = FileType::from_raw_mode(from.st_mode) == FileType::Socket;
    if is_socket && (from.st_dev, from.st_ino) == (to.st_dev, to.st_ino) {
        Ok(StdioEnds::Socket(read.into()))
    } else {
        Ok(StdioEnds::Pair { read, write })
    }
}

fn reader(fd: OwnedFd) -> io::Result<Box<dyn AsyncRead + Send + Unpin>> {
    if is_pipe(&fd)? {
        Ok(Box::new(pipe::Receiver::from_owned_fd(fd)?))
    } else {
        Ok(Box::new(async_stream(fd.into())?))
    }
}

fn writer(fd: OwnedFd) -> io::Result<Box<dyn AsyncWrite + Send + Unpin>> {
    if is_pipe(&fd)? { Ok(Box::new(pipe::Sender::from_owned_fd(fd)?)) } else { Ok(Box::new(async_stream(fd.into())?)) }
}

fn is_pipe(fd: impl AsFd) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(fd)?.st_mode) == FileType::Fifo)
}

fn async_stream(stream: StdStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

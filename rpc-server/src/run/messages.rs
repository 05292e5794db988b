//! Messages between a session process and the reaper of a program, over a pair of stream sockets.
//!
//! The reaper begins with [`ReaperStart`]. To the reaper: a [`ProgramSetup`] with the descriptors
//! of standard output, of standard error and, if the client sends it, of standard input; then
//! [`TERMINATE`]. The end of the stream kills the program. From the reaper: [`Started`], and after
//! that a [`RunStatus`].
//!
//! A reaper is requested of the reaper server by one byte with one descriptor, the reaper's end of
//! the pair. If the server cannot start one, it answers there itself.
//!
//! Each message but that byte is JSON after its length in bytes as four bytes, little-endian. Both
//! processes are the same program, but its file may have been replaced while the server runs, so
//! the setup has a version.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rpc_core::{ErrorKind, Result as RpcResult, RpcError};
use rpc_transports::MessageFamily;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::versioned_json;

/// Messages between session processes and reapers.
pub(super) const MESSAGES: MessageFamily = MessageFamily::new("the messages of run programs", 3);

/// Program that a reaper starts.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ProgramSetup {
    /// Version of the session process: that of [`MESSAGES`]. Read before the other fields.
    pub(super) version: u32,
    /// Path of the program.
    pub(super) path: PathBuf,
    /// Name by which the client has called it, and arguments.
    pub(super) args: Vec<String>,
    /// Environment.
    pub(super) env: BTreeMap<String, OsString>,
    /// Folder in which the program starts.
    pub(super) folder: PathBuf,
    /// Time after which the program is ended.
    pub(super) time_limit: Option<Duration>,
    /// Maximum number of processes of the program.
    pub(super) max_processes: u32,
}

/// Answer to the request for a reaper.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ReaperStart {
    /// From the reaper: its process id.
    Ready(i32),
    /// There is no namespace for the program. From the reaper server, or from a reaper that exits
    /// now, with its process id.
    NoNamespace(Option<i32>),
    /// From the reaper server, which cannot copy itself.
    HasThreads,
    /// From the reaper server: the system's error number.
    Failed(i32),
}

/// Outcome of the start of a program.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Started {
    Running,
    /// The system's error number.
    Failed(i32),
}

impl Started {
    /// Returns the error of a program that could not be started.
    pub(super) fn into_result(self, program: &str) -> RpcResult<()> {
        let Self::Failed(number) = self else { return Ok(()) };
        let error = io::Error::from_raw_os_error(number);
        let kind = if error.kind() == io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
        Err(RpcError::new(kind, format!("cannot start '{program}': {error}")).without_effect())
    }
}

/// Byte to the reaper server: start a reaper, outside of a namespace.
const START_REAPER: u8 = 1;

/// Byte to the reaper server: start a reaper in a namespace of its own.
const START_IN_NAMESPACE: u8 = 2;

/// Byte to a reaper: end the program, in good order if it can.
pub(super) const TERMINATE: u8 = 1;

/// Maximum length of a message: far more than the system takes as arguments of a program.
const MAX_BYTES: u32 = 16 << 20;

/// Maximum number of descriptors beside a setup.
const MAX_DESCRIPTORS: usize = 3;

impl ProgramSetup {
    /// Sends the setup with the descriptors of the standard streams.
    pub(super) fn send(&self, to: &UnixStream, streams: &[BorrowedFd<'_>]) -> io::Result<()> {
        let message = encode(self)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(streams));
        let sent = sendmsg(to, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
        (&mut &*to).write_all(&message[sent..])
    }

    /// Receives a setup and its descriptors; `None` if the stream ended before it.
    ///
    /// # Errors
    ///
    /// The session process speaks another version; the setup is malformed; the connection broke.
    pub(super) fn receive(from: &UnixStream) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        let mut len = [0; 4];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut len)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
        if received == 0 {
            return Ok(None);
        }
        let mut streams = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                streams.extend(descriptors);
            }
        }
        (&mut &*from).read_exact(&mut len[received..])?;
        let text = read_text(from, len)?;
        let setup = versioned_json::decode(&MESSAGES, &text, "the session process", "this reaper")?;
        Ok(Some((setup, streams)))
    }
}

/// Request for a reaper.
#[derive(Debug)]
pub(super) struct ReaperRequest<D> {
    /// The reaper's end of the connection.
    pub(super) control: D,
    /// True if it gets a namespace of its own.
    pub(super) in_namespace: bool,
}

/// Requests a reaper of the reaper server.
pub(super) fn send_request(to: &UnixStream, request: &ReaperRequest<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [request.control];
    let byte = if request.in_namespace { START_IN_NAMESPACE } else { START_REAPER };
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(to, &[IoSlice::new(&[byte])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a request for a reaper; `None` at the end of the stream.
pub(super) fn receive_request(from: &UnixStream) -> io::Result<Option<ReaperRequest<OwnedFd>>> {
    loop {
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        match received {
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
            Ok(received) if received.bytes == 0 => return Ok(None),
            Ok(_) => {}
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
                && let Some(control) = descriptors.next()
            {
                return Ok(Some(ReaperRequest { control, in_namespace: byte == [START_IN_NAMESPACE] }));
            }
        }
        // A descriptor that the limit on open files kept away: its end of the pair is closed, so
        // that the one who waits at the other end learns of it.
    }
}

/// Sends a message of a reaper.
pub(super) fn send(to: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    (&mut &*to).write_all(&encode(message)?)
}

/// Receives a message of a reaper.
pub(super) fn receive<T: DeserializeOwned>(from: &UnixStream) -> io::Result<T> {
    let mut len = [0; 4];
    (&mut &*from).read_exact(&mut len)?;
    Ok(serde_json::from_slice(&read_text(from, len)?)?)
}

fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let text = serde_json::to_vec(message)?;
    let len = u32::try_from(text.len()).ok().filter(|len| *len <= MAX_BYTES);
    let len = len.ok_or_else(|| io::Error::other("the arguments and the environment are too long"))?;
    Ok([&len.to_le_bytes()[..], &text].concat())
}

fn read_text(mut from: &UnixStream, len: [u8; 4]) -> io::Result<Vec<u8>> {
    let len = u32::from_le_bytes(len);
    if len > MAX_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len as usize];
    from.read_exact(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rpc_core::client::{EndCause, RunStatus};

    use super::*;

    /// Bytes of a setup of version 3, without the length.
    const SETUP: &str = concat!(
        r#"{"version":3,"path":"/bin/sh","args":["sh","-c"],"env":{"A":{"Unix":[98]}},"folder":"/work","#,
        r#""time_limit":{"secs":1,"nanos":0},"max_processes":7}"#
    );

    #[test]
    fn messages_keep_their_bytes() {
        let (near, far) = UnixStream::pair().unwrap();
        let setup = ProgramSetup {
            version: MESSAGES.version(),
            path: "/bin/sh".into(),
            args: vec!["sh".into(), "-c".into()],
            env: [("A".to_owned(), "b".into())].into(),
            folder: "/work".into(),
            time_limit: Some(Duration::from_secs(1)),
            max_processes: 7,
        };
        assert_eq!(serde_json::to_string(&setup).unwrap(), SETUP);
        setup.send(&near, &[near.as_fd(), near.as_fd()]).unwrap();
        let (received, streams) = ProgramSetup::receive(&far).unwrap().unwrap();
        assert_eq!((received, streams.len()), (setup, 2));

        let status = RunStatus { code: None, signal: Some(9), ended_by: Some(EndCause::TimeLimit) };
        for (text, message) in [
            (r#"{"ready":7}"#, serde_json::to_string(&ReaperStart::Ready(7))),
            (r#"{"no_namespace":7}"#, serde_json::to_string(&ReaperStart::NoNamespace(Some(7)))),
            (r#"{"no_namespace":null}"#, serde_json::to_string(&ReaperStart::NoNamespace(None))),
            (r#""has_threads""#, serde_json::to_string(&ReaperStart::HasThreads)),
            (r#"{"failed":11}"#, serde_json::to_string(&ReaperStart::Failed(11))),
            (r#""running""#, serde_json::to_string(&Started::Running)),
            (r#"{"failed":2}"#, serde_json::to_string(&Started::Failed(2))),
            (r#"{"code":null,"signal":9,"ended_by":"time_limit"}"#, serde_json::to_string(&status)),
        ] {
            assert_eq!(message.unwrap(), text);
        }
        send(&far, &status).unwrap();
        assert_eq!(receive::<RunStatus>(&near).unwrap(), status);
    }

    #[test]
    fn a_request_for_a_reaper_has_its_connection() {
        let (near, far) = UnixStream::pair().unwrap();
        let (control, requested) = UnixStream::pair().unwrap();
        let request = |in_namespace| ReaperRequest { control: requested.as_fd(), in_namespace };
        send_request(&near, &request(false)).unwrap();
        send_request(&near, &request(true)).unwrap();
        drop(near);
        let received = receive_request(&far).unwrap().unwrap();
        assert!(!received.in_namespace);
        send(&received.control.into(), &ReaperStart::Ready(7)).unwrap();
        assert_eq!(receive::<ReaperStart>(&control).unwrap(), ReaperStart::Ready(7));
        assert!(receive_request(&far).unwrap().unwrap().in_namespace);
        assert!(receive_request(&far).unwrap().is_none());
        assert!(send_request(&far, &request(true)).is_err(), "the other end is closed");
    }

    #[test]
    fn a_setup_of_another_version_or_length_is_refused() {
        let refused = |bytes: &[u8]| {
            let (mut near, far) = UnixStream::pair().unwrap();
            near.write_all(bytes).unwrap();
            drop(near);
            ProgramSetup::receive(&far).unwrap_err().to_string()
        };
        let newer = SETUP.replace("\"version\":3", "\"version\":4");
        let newer = [&(newer.len() as u32).to_le_bytes()[..], newer.as_bytes()].concat();
        assert!(refused(&newer).contains("speaks version 4 of the messages of run programs"));
        refused(&u32::MAX.to_le_bytes());
        refused(&[1, 0]);
    }
}

//! Messages between the server and a session process, beside the session.
//!
//! Over the connection, before the session's handshake: a [`SessionSetup`] as JSON, after its
//! length in bytes as four bytes, little-endian. Over a pair of datagram sockets, at any time:
//! [`ControlMessage`]s to the server, and [`ControlAnswer`]s to the process.
//!
//! Both processes are the same program, but its file may have been replaced while the server runs.
//! So the setup has the version of [`MESSAGES`], which any change of the messages raises, and
//! `golden.txt` holds their bytes.

use std::io::{self, Read};
use std::time::Duration;

use rpc_core::{Device, RpcError, Usage};
use rpc_transports::{ConnectionState, EndReport, MessageFamily};
use serde::{Deserialize, Serialize};

use crate::leases::{LeaseRequest, LeasedDevice};
use crate::modules::DigestList;
use crate::policy::PassedRights;
use crate::recent_logs::LogPage;
use crate::server::server_state::ServerTotals;
use crate::versioned_json;
use crate::workspace::WorkspaceLoan;

/// Messages between a server and its session processes.
pub(super) const MESSAGES: MessageFamily = MessageFamily::new("the messages of session processes", 9);

/// Settings of a session process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SessionSetup {
    /// Version of the server: that of [`MESSAGES`]. Read before the other fields.
    pub(super) version: u32,
    /// Configuration of the server, as TOML.
    pub(super) config: String,
    /// Workspace of the session.
    pub(super) workspace: WorkspaceLoan,
    /// Time since the start of the server.
    pub(super) uptime: Duration,
    /// Modules that may be loaded, as the server has read them; `None` for any.
    pub(super) module_digests: Option<DigestList>,
    /// Identity of the client, as text with the kind of its proof.
    pub(super) identity: String,
    /// True if the client's connection to the server is encrypted.
    pub(super) is_encrypted: bool,
    /// Rights of the client; `None` if the server has no policy.
    pub(super) rights: Option<PassedRights>,
}

/// Maximum length: far more than a configuration and the longest list of digests.
const MAX_SETUP_BYTES: u32 = 8 << 20;

impl SessionSetup {
    pub(super) fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let text = serde_json::to_vec(self)?;
        let len = u32::try_from(text.len()).ok().filter(|len| *len <= MAX_SETUP_BYTES);
        let len = len.ok_or_else(|| io::Error::other("the configuration is too large to be passed on"))?;
        Ok([&len.to_le_bytes()[..], &text].concat())
    }

    /// Reads the settings; `None` if the connection ended before them, so that there will be no
    /// session.
    ///
    /// # Errors
    ///
    /// The server speaks another version; the setup is malformed; the connection broke.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut len = [0; 4];
        match from.read_exact(&mut len) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let len = u32::from_le_bytes(len);
        if len > MAX_SETUP_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = vec![0; len as usize];
        from.read_exact(&mut text)?;
        versioned_json::decode(&MESSAGES, &text, "the server", "this session process").map(Some)
    }
}

/// Usage of a session: handles and bytes of memory, eight bytes each, and a byte that is 1 to ask
/// for the totals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) usage: Usage,
    pub(super) asks: bool,
}

impl Report {
    const LEN: usize = 17;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.usage.handles.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.usage.memory_bytes.to_le_bytes());
        bytes[16] = self.asks.into();
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let usage = Usage { handles: number(&bytes[..8])?, memory_bytes: number(&bytes[8..16])? };
        Some(Self { usage, asks: bytes[16] == 1 })
    }
}

/// Datagram to the server: a byte for its kind, and its content.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ControlMessage {
    /// Kind 0.
    Report(Report),
    /// Kind 1; as JSON.
    Lease(LeaseCommand),
    /// Kind 2; as JSON.
    Logs(LogCommand),
    /// Kind 3; as JSON.
    Session(SessionNotice),
}

/// Datagram to a session process: a byte for its kind, and its content.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ControlAnswer {
    /// Kind 0: the answer to a report that asks.
    Totals(ServerTotals),
    /// Kind 1; as JSON.
    Lease(LeaseAnswer),
    /// Kind 2; as JSON.
    Logs(LogAnswer),
    /// Kind 3; as JSON.
    Order(SessionOrder),
}

/// Command about a lease. The process numbers its requests and its questions in one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LeaseCommand {
    Request {
        number: u64,
        request: LeaseRequest,
    },
    Release {
        number: u64,
    },
    Ahead {
        question: u64,
        number: u64,
    },
    LeasedDevices {
        question: u64,
    },
    /// Devices that the session does not use, of those that are reserved for others by the list
    /// with this number: sent at once for the devices that are unused then, and for each other
    /// device when its last use ends. At most [`UNUSED_AT_ONCE`](Self::UNUSED_AT_ONCE) devices.
    Unused {
        list: u64,
        devices: Vec<Device>,
    },
}

impl LeaseCommand {
    /// Maximum number of devices in a message, so that it fits [`ControlMessage::MAX_LEN`].
    pub(super) const UNUSED_AT_ONCE: usize = 16;
}

/// Answer about leases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LeaseAnswer {
    Queued {
        number: u64,
    },
    Refused {
        number: u64,
        error: RpcError,
    },
    Granted {
        number: u64,
        waited: Duration,
        duration: Duration,
    },
    Ahead {
        question: u64,
        ahead: u64,
    },
    LeasedDevices {
        question: u64,
        devices: Vec<LeasedDevice>,
    },
    /// Devices that are reserved for other sessions, and the number of this list; sent at the begin
    /// of the session and at each change, if there are devices that sessions without a lease do not
    /// share.
    ReservedForOthers {
        number: u64,
        devices: Vec<Device>,
    },
}

impl LeaseAnswer {
    /// Returns the number of the request or of the question; `None` if nothing was asked.
    pub(super) fn number(&self) -> Option<u64> {
        match self {
            Self::Queued { number } | Self::Refused { number, .. } | Self::Granted { number, .. } => Some(*number),
            Self::Ahead { question, .. } | Self::LeasedDevices { question, .. } => Some(*question),
            Self::ReservedForOthers { .. } => None,
        }
    }
}

/// Read of log lines of the server. Its number is in the sequence of the questions about leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LogCommand {
    pub(super) question: u64,
    /// Number of the first line; `None` for the oldest.
    pub(super) from: Option<u64>,
    /// Time to wait for a line if there is none.
    pub(super) wait_ms: u64,
}

/// Answer to a read of log lines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LogAnswer {
    pub(super) question: u64,
    pub(super) outcome: Result<LogPage, RpcError>,
}

/// Order about the session that the process serves over the socket of the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SessionOrder {
    /// Serve the session over the socket that comes with this message. The first descriptor is the
    /// socket, the second one the file of the mark at which the output stands. Sent once at most.
    Take(Box<ConnectionState>),
    /// Take no new requests, and end the session when all are answered.
    GoAway,
    /// End the session, and tell the client the reason.
    Close(RpcError),
    /// Answer to [`SessionNotice::Queue`] with this number.
    Queued { number: u64, outcome: Result<(), RpcError> },
}

impl SessionOrder {
    /// Number of descriptors that come with [`Take`](Self::Take).
    pub(super) const DESCRIPTORS: usize = 2;
}

/// Notice about the session that the process serves over the socket of the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum SessionNotice {
    /// The session has `bytes` queued from now on. With a `number`, these are more than before, and
    /// need an answer. With `lasting` they are needed for as long as the session.
    Queue { bytes: u64, lasting: bool, number: Option<u64> },
    /// The session ends, and its objects are about to be freed.
    Ending,
    /// The session has ended.
    Ended {
        report: EndReport,
        /// Names of functions that the client has fetched.
        functions: Vec<String>,
    },
}

const FIXED_LAYOUT: u8 = 0;
const LEASES: u8 = 1;
const LOGS: u8 = 2;
const SESSION: u8 = 3;

impl ControlMessage {
    /// Maximum length in bytes: that of the report on the end of a session with all names.
    pub(super) const MAX_LEN: usize = 16 << 10;

    /// Creates the report on the end of a session. It has no names, and then a short reason, if it
    /// would be too long with them.
    pub(super) fn ended(mut report: EndReport, functions: Vec<String>) -> Self {
        let fits = |message: &Self| message.to_bytes().len() <= Self::MAX_LEN;
        let whole = Self::Session(SessionNotice::Ended { report: report.clone(), functions });
        if fits(&whole) {
            return whole;
        }
        let without_names = Self::Session(SessionNotice::Ended { report: report.clone(), functions: Vec::new() });
        if fits(&without_names) {
            return without_names;
        }
        let text: String = report.reason.message().chars().take(256).collect();
        report.reason = RpcError::new(report.reason.kind(), format!("{text}…"));
        Self::Session(SessionNotice::Ended { report, functions: Vec::new() })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Report(report) => [&[FIXED_LAYOUT][..], &report.to_bytes()].concat(),
            Self::Lease(command) => json(LEASES, command),
            Self::Logs(command) => json(LOGS, command),
            Self::Session(notice) => json(SESSION, notice),
        }
    }

    /// Parses a datagram; `None` for other bytes. Functions of the session run in that process, and
    /// may send anything.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (&FIXED_LAYOUT, content) => Report::from_bytes(content).map(Self::Report),
            (&LEASES, content) => serde_json::from_slice(content).ok().map(Self::Lease),
            (&LOGS, content) => serde_json::from_slice(content).ok().map(Self::Logs),
            (&SESSION, content) => serde_json::from_slice(content).ok().map(Self::Session),
            _ => None,
        }
    }
}

impl ControlAnswer {
    /// Maximum length in bytes: far more than the longest list of devices or page of log lines.
    pub(super) const MAX_LEN: usize = 64 << 10;

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Totals(totals) => [&[FIXED_LAYOUT][..], &totals.to_bytes()].concat(),
            Self::Lease(answer) => json(LEASES, answer),
            Self::Logs(answer) => json(LOGS, answer),
            Self::Order(order) => json(SESSION, order),
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (&FIXED_LAYOUT, content) => ServerTotals::from_bytes(content).map(Self::Totals),
            (&LEASES, content) => serde_json::from_slice(content).ok().map(Self::Lease),
            (&LOGS, content) => serde_json::from_slice(content).ok().map(Self::Logs),
            (&SESSION, content) => serde_json::from_slice(content).ok().map(Self::Order),
            _ => None,
        }
    }
}

fn json(kind: u8, message: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![kind];
    // These types have no maps and no values that JSON cannot express, so nothing can fail; an
    // incomplete message would be ignored.
    let written = serde_json::to_writer(&mut bytes, message);
    debug_assert!(written.is_ok(), "{written:?}");
    bytes
}

impl ServerTotals {
    const LEN: usize = 24;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        for (field, number) in bytes.chunks_exact_mut(8).zip([self.sessions, self.handles, self.memory_bytes]) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        Some(Self {
            sessions: number(&bytes[..8])?,
            handles: number(&bytes[8..16])?,
            memory_bytes: number(&bytes[16..])?,
        })
    }
}

fn number(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use rpc_core::proto::{Hello, Negotiated, Role};
    use rpc_core::{DeviceType, ErrorKind};
    use rpc_transports::PassedProtocol;

    use super::*;
    use crate::leases::{LeaseClient, MAX_LISTED, MAX_NEXT, WaitingLease};

    fn end_report(reason: &str) -> EndReport {
        let reason = RpcError::new(ErrorKind::Closed, reason.to_owned());
        EndReport { reason, requests: 3, received: 4, sent: 5, last_message_sent: true }
    }

    fn messages() -> [(&'static str, ControlMessage); 10] {
        let max_duration = Some(Duration::from_millis(1500));
        let request = LeaseRequest { device: Device::cuda(1), priority: -2, max_duration };
        let usage = Usage { handles: 7, memory_bytes: 1 << 40 };
        [
            ("report", ControlMessage::Report(Report { usage, asks: true })),
            ("request", ControlMessage::Lease(LeaseCommand::Request { number: 3, request })),
            ("release", ControlMessage::Lease(LeaseCommand::Release { number: 3 })),
            ("ask ahead", ControlMessage::Lease(LeaseCommand::Ahead { question: 4, number: 3 })),
            ("ask devices", ControlMessage::Lease(LeaseCommand::LeasedDevices { question: 5 })),
            ("read logs", ControlMessage::Logs(LogCommand { question: 6, from: Some(9), wait_ms: 20 })),
            ("queue", ControlMessage::Session(SessionNotice::Queue { bytes: 1 << 20, lasting: true, number: Some(7) })),
            ("session ends", ControlMessage::Session(SessionNotice::Ending)),
            ("session ended", ControlMessage::ended(end_report("it is over"), vec!["add".to_owned()])),
            ("unused", ControlMessage::Lease(LeaseCommand::Unused { list: 6, devices: vec![Device::cuda(1)] })),
        ]
    }

    fn answers() -> [(&'static str, ControlAnswer); 14] {
        let (waited, duration) = (Duration::from_micros(7), Duration::from_secs(9));
        let error = RpcError::limit("max_lease_requests", 1, 2);
        let page: LogPage = serde_json::from_str(r#"{"lines":["a"],"next":10,"lost":2}"#).unwrap();
        let device = LeasedDevice {
            device: "cuda:1".to_owned(),
            held_seconds: 0.5,
            left_seconds: 8.5,
            waiting: 2,
            used_by: 0,
            holder: Some(LeaseClient::new("token:alice", 3)),
            next: vec![WaitingLease { client: LeaseClient::new("anonymous", 4), priority: -1, waited_seconds: 1.5 }],
        };
        let negotiated = Negotiated {
            version: 1,
            role: Role::Server,
            ours: Hello { agent: "rpc/test".to_owned(), ..Hello::new(Role::Server) },
            theirs: Hello { agent: "rpc/test".to_owned(), ..Hello::new(Role::Client) },
            identity: "token:alice".to_owned(),
        };
        let state = |protocol| {
            let peer = "10.0.0.2:1234".to_owned();
            SessionOrder::Take(Box::new(ConnectionState { protocol, input: vec![1, 255], peer, process: Some(7) }))
        };
        let native = PassedProtocol::Native(Box::new(negotiated));
        let (name, identity) = ("tvm".to_owned(), "anonymous".to_owned());
        let dialect = PassedProtocol::Dialect { name, identity, state: vec![2, 254] };
        let reserved = LeaseAnswer::ReservedForOthers { number: 6, devices: vec![Device::cuda(1)] };
        [
            ("totals", ControlAnswer::Totals(ServerTotals { sessions: 3, handles: 5, memory_bytes: 258 })),
            ("queued", ControlAnswer::Lease(LeaseAnswer::Queued { number: 3 })),
            ("granted", ControlAnswer::Lease(LeaseAnswer::Granted { number: 3, waited, duration })),
            ("refused", ControlAnswer::Lease(LeaseAnswer::Refused { number: 3, error: error.clone() })),
            ("ahead", ControlAnswer::Lease(LeaseAnswer::Ahead { question: 4, ahead: 6 })),
            ("devices", ControlAnswer::Lease(LeaseAnswer::LeasedDevices { question: 5, devices: vec![device] })),
            ("log page", ControlAnswer::Logs(LogAnswer { question: 6, outcome: Ok(page) })),
            ("log refusal", ControlAnswer::Logs(LogAnswer { question: 6, outcome: Err(error.clone()) })),
            ("reserved for others", ControlAnswer::Lease(reserved)),
            ("take", ControlAnswer::Order(state(native))),
            ("take dialect", ControlAnswer::Order(state(dialect))),
            ("go away", ControlAnswer::Order(SessionOrder::GoAway)),
            ("queue granted", ControlAnswer::Order(SessionOrder::Queued { number: 7, outcome: Ok(()) })),
            ("close", ControlAnswer::Order(SessionOrder::Close(error))),
        ]
    }

    #[test]
    fn datagrams_round_trip_and_other_bytes_are_none() {
        for (name, message) in messages() {
            let bytes = message.to_bytes();
            assert!(bytes.len() <= ControlMessage::MAX_LEN);
            assert_eq!(ControlMessage::from_bytes(&bytes), Some(message), "{name}");
            assert_eq!(ControlAnswer::from_bytes(&bytes), None, "{name}");
        }
        for (name, answer) in answers() {
            assert_eq!(ControlAnswer::from_bytes(&answer.to_bytes()), Some(answer), "{name}");
        }
        let devices = vec![Device::new(DeviceType(i32::MIN), i32::MIN); LeaseCommand::UNUSED_AT_ONCE];
        let longest = ControlMessage::Lease(LeaseCommand::Unused { list: u64::MAX, devices });
        assert!(longest.to_bytes().len() <= ControlMessage::MAX_LEN, "{}", longest.to_bytes().len());
        // Reports with long names and reasons, of characters that are long in JSON.
        for (reason, names) in [(1, 17), (2000, 17), (100_000, 0), (100_000, 17)] {
            let names = (0..names).map(|_| "\\u{10ffff}".repeat(64)).collect();
            let report = ControlMessage::ended(end_report(&"\u{1}".repeat(reason)), names);
            assert!(report.to_bytes().len() <= ControlMessage::MAX_LEN, "{}", report.to_bytes().len());
            assert_eq!(ControlMessage::from_bytes(&report.to_bytes()), Some(report));
        }
        // A list of as many devices as there may be, with names of the greatest length.
        let client = || LeaseClient::new(&"\"".repeat(1000), u64::MAX);
        let (priority, waited_seconds) = (i32::MIN, -1.234_567_890_123_456_7e-300);
        let leased = || LeasedDevice {
            device: Device::new(DeviceType(i32::MIN), i32::MIN).to_string(),
            held_seconds: waited_seconds,
            left_seconds: waited_seconds,
            waiting: u64::MAX,
            used_by: u64::MAX,
            holder: Some(client()),
            next: (0..MAX_NEXT).map(|_| WaitingLease { client: client(), priority, waited_seconds }).collect(),
        };
        let devices = (0..MAX_LISTED).map(|_| leased()).collect();
        let longest = ControlAnswer::Lease(LeaseAnswer::LeasedDevices { question: u64::MAX, devices });
        assert!(longest.to_bytes().len() <= ControlAnswer::MAX_LEN, "{}", longest.to_bytes().len());
        for other in [&b""[..], &[0], &[1], &[2, 0], &[3, 0], &[4, 0], &[0; 19]] {
            assert_eq!((ControlMessage::from_bytes(other), ControlAnswer::from_bytes(other)), (None, None));
        }
    }

    /// Returns a message by its name: one over the connection as text, a datagram as hexadecimal
    /// digits.
    fn golden(name: &str) -> &'static str {
        let lines = include_str!("golden.txt").lines().filter_map(|line| line.split_once(" = "));
        let mut found = lines.filter(|(other, _)| *other == name);
        found.next().unwrap_or_else(|| panic!("golden.txt has no message '{name}'")).1
    }

    fn framed(text: &str) -> Vec<u8> {
        [&u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn messages_keep_their_bytes() {
        assert_eq!(MESSAGES.version(), 9);
        for name in ["setup", "setup with digests and rights"] {
            let bytes = framed(golden(name));
            let setup = SessionSetup::read(&mut &bytes[..]).unwrap().unwrap();
            assert_eq!(setup.to_bytes().unwrap(), bytes, "{name}");
            assert_eq!((setup.version, setup.config.as_str()), (9, "max-handles = 7\n"));
            assert_eq!(setup.uptime, Duration::new(3, 5));
            assert_eq!((setup.module_digests.is_some(), setup.rights.is_some()), (name != "setup", name != "setup"));
        }
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (name, message) in messages() {
            assert_eq!(hex(&message.to_bytes()), golden(name));
        }
        for (name, answer) in answers() {
            assert_eq!(hex(&answer.to_bytes()), golden(name));
        }
    }

    #[test]
    fn a_setup_of_another_version_is_refused_in_words() {
        for (text, expected) in [
            (r#"{"workspace":1}"#, "speaks version 1 of the messages of session processes"),
            (r#"{"workspace":1}"#, "update the server, and start the server again"),
            (r#"{"version":10,"others":[]}"#, "update this session process, and start the server again"),
        ] {
            let error = SessionSetup::read(&mut &framed(text)[..]).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn a_setup_is_whole_or_none() {
        assert!(SessionSetup::read(&mut &b""[..]).unwrap().is_none());
        assert!(SessionSetup::read(&mut &b"\x05\0\0\0{}"[..]).is_err());
        assert!(SessionSetup::read(&mut &u32::MAX.to_le_bytes()[..]).is_err());
    }
}

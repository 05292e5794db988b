//! Messages between the server and a session process, beside the session.
//!
//! Over the connection, before the session's handshake: a [`SessionSetup`] as JSON, after its
//! length in bytes as four bytes, little-endian. Over a pair of datagram sockets, at any time:
//! [`Report`]s to the server, and [`ServerTotals`] in answer to those that ask.
//!
//! Both processes are the same program, but its file may have been replaced while the server runs.
//! So the setup has the version of [`MESSAGES`], which any change of the messages raises, and
//! `golden.txt` holds their bytes.

use std::io::{self, Read};
use std::time::Duration;

use rpc_core::Usage;
use rpc_transports::MessageFamily;
use serde::{Deserialize, Serialize};

use crate::modules::DigestList;
use crate::server::server_state::ServerTotals;
use crate::versioned_json;
use crate::workspace::WorkspaceLoan;

/// Messages between a server and its session processes.
pub(super) const MESSAGES: MessageFamily = MessageFamily::new("the messages of session processes", 2);

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
    pub(super) const LEN: usize = 17;

    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.usage.handles.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.usage.memory_bytes.to_le_bytes());
        bytes[16] = self.asks.into();
        bytes
    }

    /// Parses a report; `None` for other bytes. Functions of the session run in that process, and
    /// may send anything.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let usage = Usage { handles: number(&bytes[..8])?, memory_bytes: number(&bytes[8..16])? };
        Some(Self { usage, asks: bytes[16] == 1 })
    }
}

impl ServerTotals {
    pub(super) const LEN: usize = 24;

    pub(super) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        for (field, number) in bytes.chunks_exact_mut(8).zip([self.sessions, self.handles, self.memory_bytes]) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
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
    use super::*;

    #[test]
    fn reports_and_totals_round_trip_and_other_bytes_are_none() {
        let report = Report { usage: Usage { handles: 7, memory_bytes: 1 << 40 }, asks: true };
        assert_eq!(Report::from_bytes(&report.to_bytes()), Some(report));
        let totals = ServerTotals { sessions: 3, handles: u64::MAX, memory_bytes: 0 };
        assert_eq!(ServerTotals::from_bytes(&totals.to_bytes()), Some(totals));
        assert_eq!(Report::from_bytes(&totals.to_bytes()), None);
        assert_eq!(ServerTotals::from_bytes(b""), None);
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
        assert_eq!(MESSAGES.version(), 2);
        for name in ["setup", "setup with digests"] {
            let bytes = framed(golden(name));
            let setup = SessionSetup::read(&mut &bytes[..]).unwrap().unwrap();
            assert_eq!(setup.to_bytes().unwrap(), bytes, "{name}");
            assert_eq!((setup.version, setup.config.as_str()), (2, "max-handles = 7\n"));
            assert_eq!(setup.uptime, Duration::new(3, 5));
            assert_eq!(setup.module_digests.is_some(), name == "setup with digests");
        }
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let report = Report { usage: Usage { handles: 7, memory_bytes: 1 << 40 }, asks: true };
        assert_eq!(hex(&report.to_bytes()), golden("report"));
        let totals = ServerTotals { sessions: 3, handles: 5, memory_bytes: 258 };
        assert_eq!(hex(&totals.to_bytes()), golden("totals"));
    }

    #[test]
    fn a_setup_of_another_version_is_refused_in_words() {
        for (text, expected) in [
            (r#"{"workspace":1}"#, "speaks version 1 of the messages of session processes"),
            (r#"{"workspace":1}"#, "update the server, and start the server again"),
            (r#"{"version":3,"others":[]}"#, "update this session process, and start the server again"),
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

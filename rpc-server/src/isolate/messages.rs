//! Messages between the server and a session process, beside the session.
//!
//! Over the connection, before the session's handshake: a [`SessionSetup`] as JSON, after its
//! length in bytes as four bytes, little-endian. Over a pair of datagram sockets, at any time:
//! [`Report`]s to the server, and [`ServerTotals`] in answer to those that ask.

use std::io::{self, Read};
use std::time::Duration;

use rpc_core::Usage;
use serde::{Deserialize, Serialize};

use crate::modules::DigestList;
use crate::server::server_state::ServerTotals;
use crate::workspace::WorkspaceLoan;

/// Settings of a session process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SessionSetup {
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
        Ok(Some(serde_json::from_slice(&text)?))
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
    fn reports_and_totals_read_back_as_themselves_and_all_else_is_none() {
        let report = Report { usage: Usage { handles: 7, memory_bytes: 1 << 40 }, asks: true };
        assert_eq!(Report::from_bytes(&report.to_bytes()), Some(report));
        let totals = ServerTotals { sessions: 3, handles: u64::MAX, memory_bytes: 0 };
        assert_eq!(ServerTotals::from_bytes(&totals.to_bytes()), Some(totals));
        assert_eq!(Report::from_bytes(&totals.to_bytes()), None);
        assert_eq!(ServerTotals::from_bytes(b""), None);
    }

    #[test]
    fn a_setup_is_whole_or_none() {
        assert!(SessionSetup::read(&mut &b""[..]).unwrap().is_none());
        assert!(SessionSetup::read(&mut &b"\x05\0\0\0{}"[..]).is_err());
        assert!(SessionSetup::read(&mut &u32::MAX.to_le_bytes()[..]).is_err());
    }
}

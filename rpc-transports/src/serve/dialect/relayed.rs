//! A connection in a dialect that a relay has taken out of the hands of its task, to pass its bytes
//! on.

use std::fmt;
use std::io;

use crate::channel::{Channel, ChannelIo};
use crate::serve::state::ServerState;
use crate::splice::{SilenceLimit, splice};

/// An admitted connection of a relay, apart from the task that has accepted it: see
/// [`DialectConnection::detach`](crate::DialectConnection::detach). It keeps its place in the
/// relay's limits until it is dropped.
pub struct RelayedConnection {
    /// Declared before the share, so that the peer sees the end before its place is free.
    pub(super) channel: Channel,
    pub(super) _share: Box<dyn Send + Sync>,
}

impl RelayedConnection {
    /// Returns the stream of bytes. Nothing watches how fast the peer takes them.
    pub fn io(&mut self) -> &mut dyn ChannelIo {
        self.channel.io_mut()
    }

    /// Returns the address that the peer comes from.
    #[must_use]
    pub fn peer(&self) -> &str {
        self.channel.peer()
    }

    /// Copies bytes between this peer and that of `other`.
    pub(super) async fn splice(&mut self, other: &mut Channel, server: &ServerState) -> io::Result<()> {
        let silence = SilenceLimit::WhileBytesWait(server.tunnel_silence());
        let from_other = other.take_unread();
        splice(other, &mut self.channel, from_other, silence, &server.open_files).await
    }
}

impl fmt::Debug for RelayedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayedConnection").field("peer", &self.peer()).finish_non_exhaustive()
    }
}

//! Tunnels of clients: plain streams of bytes to services that servers dial.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use rpc_core::OpenFileQuota;

use crate::channel::Channel;
use crate::splice::{SilenceLimit, splice};

/// Silence after which this side closes a tunnel. The servers on the way close it sooner.
const MAX_SILENCE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Plain stream of bytes to a service near a server, made by
/// [`Connector::open_tunnel`](crate::Connector::open_tunnel). Dropping it closes the connection to
/// the service.
#[derive(Debug)]
pub struct Tunnel {
    pub(super) channel: Channel,
    /// Bytes of the service that came with the server's answer.
    pub(super) input: BytesMut,
}

impl Tunnel {
    /// Copies bytes between `local` and the service, in both directions, until both have ended or
    /// one has broken. After the end of one direction the other may be silent for 5 s, and the
    /// servers on the way close a tunnel that is silent for 120 of their keep-alive intervals.
    ///
    /// # Errors
    ///
    /// The error of the side that broke, or [`TimedOut`](io::ErrorKind::TimedOut).
    pub async fn join(self, mut local: Channel) -> io::Result<()> {
        let Self { mut channel, input } = self;
        let open_files = OpenFileQuota::new("open files", u64::MAX, None);
        splice(&mut channel, &mut local, input, SilenceLimit::Always(MAX_SILENCE), &open_files).await
    }
}

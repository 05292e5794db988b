//! Servers that nobody can dial: they dial a relay, and wait there for clients.

use std::time::Duration;

use rpc_core::proto::{HandshakeConfig, Hello, Role};

use crate::address::Address;
use crate::backoff::Backoff;
use crate::channel::Channel;
use crate::connect::ConnectError;
use crate::handshake::driver::dial_handshake_with_keep_alive;
use crate::handshake::identity::of_dialler;
use crate::serve::Server;
use crate::transport::DialOptions;
use crate::transport::dial;

/// The pauses between attempts to reach a relay.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// From one client of a channel to the next there is this time at least.
const SHORTEST: Duration = Duration::from_millis(50);

/// How a server offers itself at a relay.
#[derive(Clone, Debug)]
pub struct ParkOptions {
    /// The key that clients ask the relay for, and then this server: for them it is the server's, whatever other clients know it
    /// by.
    pub key: String,
    /// How many clients may be served by way of the relay at one time: each has a channel of its own, which waits there.
    pub capacity: usize,
    /// How long the handshake with the relay may take, before the waiting begins. 10 s.
    pub handshake_timeout: Duration,
}

impl Default for ParkOptions {
    fn default() -> Self {
        Self { key: String::new(), capacity: 8, handshake_timeout: Duration::from_secs(10) }
    }
}

impl Server {
    /// Serves clients that come by way of the relay at `relay`, until this server drains or stops. Reconnects by itself.
    ///
    /// The relay is dialled by what [`ServeOptions::onward`](crate::ServeOptions::onward) says at the time. Behind the relay the handshake is between client and server, so that the client proves itself to this server, and the
    /// other way about. For limits on peers all of them come from the relay's machine.
    pub fn park(&self, relay: &Address, options: &ParkOptions) {
        for _ in 0..options.capacity {
            let (server, relay, options) = (self.clone(), relay.clone(), options.clone());
            tokio::spawn(async move {
                let closed = server.closed();
                tokio::select! {
                    () = closed => {}
                    () = keep_parked(&server, &relay, &options) => {}
                }
            });
        }
    }

    /// Waits at the relay at `relay` for one client, and serves that one. Returns when it has gone: `false` if no session came of it, because it
    /// went, or was refused, during its handshake.
    ///
    /// Dropping the future gives up the waiting; a client that is there already is served on.
    ///
    /// # Errors
    ///
    /// The relay cannot be reached, refuses, or goes away before anybody has come.
    pub async fn park_once(&self, relay: &Address, options: &ParkOptions) -> Result<bool, ConnectError> {
        let channel = wait_at(relay, options, &self.onward()).await?;
        // One that panicked has ended, too.
        Ok(self.start(channel, Some(options.key.clone())).await.unwrap_or(true))
    }
}

/// One channel: it waits, serves, and waits again.
async fn keep_parked(server: &Server, relay: &Address, options: &ParkOptions) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut lost = false;
    loop {
        match wait_at(relay, options, &server.onward()).await {
            Ok(channel) => {
                if std::mem::take(&mut lost) {
                    tracing::info!(%relay, "back at the relay");
                }
                backoff.reset();
                // One that panicked has ended, too.
                let begun = tokio::time::Instant::now();
                let _ = server.start(channel, Some(options.key.clone())).await;
                // A relay that accepts and closes at once is not dialled without end.
                tokio::time::sleep_until(begun + SHORTEST).await;
            }
            Err(error) => {
                let error = error.into_rpc_error();
                if !std::mem::replace(&mut lost, true) {
                    tracing::warn!(%relay, %error, "not at the relay; trying again");
                }
                tokio::time::sleep(backoff.pause()).await;
            }
        }
    }
}

/// Waits at a relay for one client. The channel leads to that one, who will speak first.
async fn wait_at(relay: &Address, options: &ParkOptions, onward: &DialOptions) -> Result<Channel, ConnectError> {
    let mut channel = dial(&relay.clone().without_key(), onward).await?;
    let mut hello = Hello::new(Role::Server);
    hello.key.clone_from(&options.key);
    let identities = of_dialler(&onward.tokens, channel.security());
    let config = HandshakeConfig { hello, identities, hold: false, timeout: options.handshake_timeout };
    let (_, input) = dial_handshake_with_keep_alive(&mut channel, config).await?;
    let peer = channel.peer().to_owned();
    // The client may have spoken already.
    Ok(channel.leading_to(peer).after_reading(input))
}

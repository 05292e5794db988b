//! Servers that cannot be dialled: they dial a relay, and wait there for clients.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::proto::{HandshakeConfig, Hello, Role};
use tokio::time::Instant;

use super::park_places::{ParkLimit, ParkPlaces};
use crate::address::Address;
use crate::backoff::Backoff;
use crate::channel::Channel;
use crate::connect::{ConnectError, Connector};
use crate::handshake::driver::dial_handshake_with_keep_alive;
use crate::handshake::identity_proofs::of_dialler;
use crate::serve::Server;
use crate::transport::{Dial, Transports};

/// Shortest and longest pause between attempts to reach a relay.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// Shortest time from a client that got no session to the next.
const SHORTEST: Duration = Duration::from_millis(50);

/// Time that a client may take for its handshake before the server waits at the relay again. The
/// client may take longer; only a session counts towards the capacity.
const HANDSHAKE_PATIENCE: Duration = Duration::from_millis(500);

/// Options of a server that parks at a relay.
#[derive(Clone, Debug)]
pub struct ParkOptions {
    /// Key that clients ask the relay for, and then this server. For these clients it replaces the
    /// server's other key.
    pub key: String,
    /// Number of clients that may be served through the relay at one time. Each has a channel of
    /// its own: as many channels wait at the relay as further clients may come. A client that is
    /// slow in its handshake does not count until it has a session, and then takes the place of a
    /// channel that waits; if there is none any more, it is refused.
    pub capacity: usize,
    /// Longest time for the handshake with the relay, before the wait begins. Default 10 s.
    pub handshake_timeout: Duration,
}

impl Default for ParkOptions {
    fn default() -> Self {
        Self { key: String::new(), capacity: 8, handshake_timeout: Duration::from_secs(10) }
    }
}

impl Server {
    /// Serves clients that come through the relay at `relay`, until this server drains or stops.
    /// Reconnects by itself.
    ///
    /// The relay is dialled with the settings that
    /// [`ServeOptions::onward`](crate::ServeOptions::onward) has at the time. Behind the relay the
    /// handshake is between client and server, which prove themselves to each other. For limits on
    /// peers, all these clients count as the relay's machine.
    pub fn park(&self, relay: &Address, options: &ParkOptions) {
        let places = ParkPlaces::new(options.capacity);
        for _ in 0..options.capacity {
            let (server, relay, options, places) = (self.clone(), relay.clone(), options.clone(), places.clone());
            tokio::spawn(async move {
                let closed = server.closed();
                tokio::select! {
                    () = closed => {}
                    () = keep_parked(&server, &relay, &options, &places) => {}
                }
            });
        }
    }

    /// Waits at the relay at `relay` for one client, and serves it. Returns when the client has
    /// gone. The result is `false` if the client got no session, because it went or was refused
    /// during its handshake.
    ///
    /// Dropping the future ends the wait. A client that has come already is served to its end.
    ///
    /// # Errors
    ///
    /// The relay cannot be reached, or not as securely as its address says. It refuses, or goes
    /// away before a client has come.
    pub async fn park_once(&self, relay: &Address, options: &ParkOptions) -> Result<bool, ConnectError> {
        let channel = wait_at(relay, options, self.transports(), &self.onward()).await?;
        // A task that panicked has ended as well.
        Ok(self.start(channel, Some(options.key.clone())).await.unwrap_or(true))
    }
}

/// Keeps one channel at the relay: waits for a client, serves it, and waits again. A client that is
/// slow in its handshake goes on in the background: one that never finishes it would keep others
/// out until its time is over.
async fn keep_parked(server: &Server, relay: &Address, options: &ParkOptions, places: &Arc<ParkPlaces>) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut lost = false;
    loop {
        let reservation = places.reserve().await;
        let onward = server.onward();
        let parked = tokio::select! {
            // A client that has come already is served, or told that it is too late.
            biased;
            parked = wait_at(relay, options, server.transports(), &onward) => parked,
            // A client that was slow in its handshake has a session, and this place for it: none
            // may come here.
            () = reservation.taken() => continue,
        };
        match parked {
            Ok(channel) => {
                if std::mem::take(&mut lost) {
                    rpc_core::log_limited!(INFO, %relay, "back at the relay");
                }
                backoff.reset();
                let begun = Instant::now();
                let limit = ParkLimit::new(places, reservation);
                let mut served = server.start_parked(channel, options.key.clone(), limit.clone());
                // A task that panicked has ended as well.
                let had_session = tokio::select! {
                    served = &mut served => served.unwrap_or(true),
                    () = limit.admitted() => (&mut served).await.unwrap_or(true),
                    () = tokio::time::sleep(HANDSHAKE_PATIENCE) => false,
                };
                limit.release();
                if !had_session {
                    // A relay that accepts and closes at once must not be dialled in a busy loop.
                    tokio::time::sleep_until(begun + SHORTEST).await;
                }
            }
            Err(error) => {
                drop(reservation);
                let error = error.into_rpc_error();
                if !std::mem::replace(&mut lost, true) {
                    rpc_core::log_limited!(WARN, %relay, %error, "not at the relay; trying again");
                }
                tokio::time::sleep(backoff.pause()).await;
            }
        }
    }
}

/// Waits at a relay for one client. Returns the channel that leads to the client, which sends
/// first.
async fn wait_at(
    relay: &Address,
    options: &ParkOptions,
    transports: &Transports,
    onward: &Dial,
) -> Result<Channel, ConnectError> {
    let connector = Connector::new().transports(transports.clone()).dial(onward.clone());
    let mut channel = connector.dial_channel(&relay.clone().without_key(), None).await?;
    let mut hello = Hello::new(Role::Server);
    hello.key.clone_from(&options.key);
    let identities = of_dialler(&onward.tokens, channel.security());
    let config = HandshakeConfig { hello, identities, hold: false, timeout: options.handshake_timeout };
    let (_, input) = dial_handshake_with_keep_alive(&mut channel, config).await?;
    let peer = channel.peer().to_owned();
    // The client may have sent input already.
    Ok(channel.with_further_peer(peer).after_reading(input))
}

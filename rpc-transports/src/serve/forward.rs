//! What a server does for a client that wants to reach another one: a session to forward to, or a way there.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use bytes::BytesMut;
use rpc_core::proto::{ANONYMOUS, Hello};
use rpc_core::{ErrorKind, RpcError, Session, SharedSession};

use super::mailbox::{Mailbox, STOP};
use super::server::{FAR_OFF, Shared};
use super::splice::splice;
use crate::channel::Channel;
use crate::connect::{ConnectError, Connector, Hop};
use crate::serve::filter::FilteredSession;

/// The longest chain that there may be.
const MAX_HOPS: usize = 16;

/// A tunnel is closed when nothing has moved for so many of the intervals after which a session would test its channel:
/// nobody is at either end then.
const SILENT_INTERVALS: u32 = 120;

impl Shared {
    /// Opens the session that a client will be forwarded to.
    pub(super) async fn open_next(&self, hello: &Hello, identity: &str) -> Result<SharedSession, RpcError> {
        let (target, further) = self.next_hop(&hello.path, &hello.forward)?;
        let connector = self.connector(&hello.path, identity);
        let connector = connector.key(&hello.key).workspace(&hello.workspace).ticket(&hello.ticket);
        let next = connector.forward(&target, &further).await.map_err(|error| error.into_rpc_error())?;
        Ok(match &self.options.forward_policy {
            Some(policy) => Arc::new(FilteredSession::new(next, policy.clone())),
            None => next,
        })
    }

    /// Opens sessions further on, for a client that has come by `path`.
    fn connector(&self, path: &[String], identity: &str) -> Connector {
        let mut path = path.to_vec();
        path.push(self.name.clone());
        Connector::new()
            .transports(self.options.transports.clone())
            .dial(self.onward())
            .keep_alive(self.options.keep_alive)
            .limits(self.options.limits.clone())
            .on_the_way(path, identity)
    }

    /// Opens the channel that a client's tunnel will lead to.
    pub(super) async fn open_tunnel(&self, hello: &Hello) -> Result<Channel, RpcError> {
        let (target, further) = self.next_hop(&hello.path, &hello.forward)?;
        if self.options.forward_policy.is_some() {
            let text = "this server makes no tunnels: it limits what may be done through it (--forward-functions)";
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        if !further.is_empty() {
            return Err(RpcError::new(ErrorKind::InvalidArgument, "a tunnel leads to one address"));
        }
        let transports = &self.options.transports;
        // What is encrypted is between the client and whoever is there.
        let through = transports.of(&target.address).map(|transport| transport.tunnel_target(&target.address));
        let Some(address) = through.map_err(|error| ConnectError::from(error).into_rpc_error())? else {
            let text = format!("a tunnel cannot lead to '{}': it passes the bytes of a connection", target.address);
            return Err(RpcError::new(ErrorKind::Unsupported, text));
        };
        let dialled = transports.dial(&address, &self.onward()).await;
        dialled.map_err(|error| ConnectError::from(error).into_rpc_error())
    }

    /// Passes bytes between a client and where its tunnel leads, until either has gone.
    pub(super) async fn run_tunnel(&self, client: &mut Channel, mut to: Channel, input: BytesMut, mailbox: &Mailbox) {
        let (peer, silence) = (to.peer().to_owned(), self.options.keep_alive.saturating_mul(SILENT_INTERVALS));
        let limit = self.options.session_duration.unwrap_or(FAR_OFF).min(FAR_OFF);
        tokio::select! {
            ended = splice(client, &mut to, input, silence.min(FAR_OFF)) => {
                tracing::debug!(to = peer, ?ended, "tunnel ended");
            }
            () = mailbox.told(STOP) => tracing::debug!(to = peer, "tunnel cut: the server stops"),
            () = tokio::time::sleep(limit) => tracing::debug!(to = peer, "tunnel cut: session_duration is over"),
        }
    }

    /// The address to go to, and those behind it, if the client may go there.
    fn next_hop(&self, path: &[String], forward: &[String]) -> Result<(Hop, Vec<Hop>), RpcError> {
        let Some((next, further)) = forward.split_first() else {
            return Err(RpcError::new(ErrorKind::InvalidArgument, "there is no address to forward to"));
        };
        let hops = path.len() + forward.len();
        if hops > MAX_HOPS {
            return Err(RpcError::limit("hops", MAX_HOPS as u64, hops as u64));
        }
        if path.contains(&self.name) {
            let text = format!("the chain to '{next}' comes back to a server that it has passed");
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        let first = self.may_reach(parsed(next)?)?;
        let mut tunnel = first.tunnel;
        let mut stops = Vec::new();
        for next in further {
            let next = parsed(next)?;
            // It is this server that goes on behind a tunnel.
            let next = if tunnel { self.may_reach(next)? } else { next };
            tunnel &= next.tunnel;
            stops.push(next);
        }
        Ok((first, stops))
    }

    /// The same hop, if clients may be brought there.
    fn may_reach(&self, hop: Hop) -> Result<Hop, RpcError> {
        let text = hop.to_string();
        if hop.address.key().is_some() {
            // Who may ask for which key is looked at where it is said.
            let text = format!("cannot forward to '{text}': the key of a server is told apart from its address");
            return Err(RpcError::new(ErrorKind::InvalidArgument, text));
        }
        let (allowed, transports) = (&self.options.allow_forward, &self.options.transports);
        if allowed.iter().any(|pattern| transports.matches(pattern, &hop.address)) {
            return Ok(hop);
        }
        Err(RpcError::new(
            ErrorKind::Refused,
            format!("this server may not be used to reach '{text}': its operator has to allow it (--allow-forward)"),
        ))
    }

    pub(super) fn onward(&self) -> crate::transport::Dial {
        self.onward.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the effective identity: the client's own, or the one that a trusted proxy asserts.
    pub(super) fn effective_identity(&self, hello: &Hello, identity: &str) -> String {
        let trusted = identity != ANONYMOUS && self.options.trust_proxy.iter().any(|name| name == identity);
        let named = !hello.on_behalf.is_empty() && hello.on_behalf.len() <= MAX_NAME;
        if trusted && named { hello.on_behalf.clone() } else { identity.to_owned() }
    }
}

/// The way from a session to further servers: as its server forwards, to whatever its operator allows
/// ([`ServeOptions::allow_forward`](super::ServeOptions::allow_forward)), with the server's own identity and on behalf of the session's client.
///
/// A factory gives it to the session as an [extension](rpc_core::LocalSessionBuilder::extension), where functions find it.
#[derive(Clone)]
pub struct Onward {
    server: Weak<Shared>,
    path: Vec<String>,
    identity: String,
}

impl Onward {
    pub(super) fn new(server: Weak<Shared>, path: &[String], identity: &str) -> Self {
        Self { server, path: path.to_vec(), identity: identity.to_owned() }
    }

    /// Opens a session with the server at `target`, which is tested as often as the server of this session tests its own peers, or every `keep_alive` if
    /// that is more often. Inside of a tokio runtime.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::Refused`]: the operator does not allow it, or the chain comes back to a server that it has passed.
    /// * [`ErrorKind::Closed`]: the server is gone.
    /// * Those of [`Connector::connect`].
    pub async fn connect(&self, target: &str, keep_alive: Duration) -> Result<Session, RpcError> {
        let gone = || RpcError::new(ErrorKind::Closed, "the server of this session is gone");
        let server = self.server.upgrade().ok_or_else(gone)?;
        let forward = [target.to_owned()];
        let (target, _) = server.next_hop(&self.path, &forward)?;
        let connector = server.connector(&self.path, &self.identity);
        let connector = connector.keep_alive(keep_alive.min(server.options.keep_alive));
        let next = connector.forward(&target, &[]).await.map_err(|error| error.into_rpc_error())?;
        Ok(match &server.options.forward_policy {
            Some(policy) => Session::from(Arc::new(FilteredSession::new(next, policy.clone())) as SharedSession),
            None => Session::from(next),
        })
    }
}

impl fmt::Debug for Onward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Onward").field("identity", &self.identity).finish_non_exhaustive()
    }
}

fn parsed(text: &str) -> Result<Hop, RpcError> {
    text.parse().map_err(|error: crate::AddressError| {
        RpcError::new(ErrorKind::InvalidArgument, format!("cannot forward to '{text}': {error}"))
    })
}

/// The longest name that somebody may be known by.
const MAX_NAME: usize = 64;

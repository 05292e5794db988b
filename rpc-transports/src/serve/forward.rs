//! Forwarding: sessions with further servers, and tunnels to them, on behalf of a client.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use rpc_core::limits::OpenFileLease;
use rpc_core::proto::{ANONYMOUS, Hello};
use rpc_core::session::InPlaceWrite;
use rpc_core::{
    ErrorKind, Lane, OpenFileQuota, Permission, Request, RpcError, RpcSession, Session, SharedSession, Submission,
    TensorRef,
};

use super::authorization::AuthorizedClient;
use super::further_servers::OnwardServer;
use super::mailbox::{Command, Mailbox};
use super::state::{ServerState, UNLIMITED};
use crate::address::Address;
use crate::channel::Channel;
use crate::connect::{ConnectError, Connector, Hop};
use crate::handshake::peer_identity::PeerIdentity;
use crate::serve::filter::FilteredSession;
use crate::splice::{SilenceLimit, splice};

/// Largest number of hops in a chain.
const MAX_HOPS: usize = 16;

/// Number of keep-alive intervals of silence after which a tunnel is closed, because both its ends
/// must be gone.
const SILENT_TUNNEL_INTERVALS: u32 = 120;

impl ServerState {
    /// Opens the session to which a client's requests are forwarded.
    pub(super) async fn open_next(
        &self,
        hello: &Hello,
        client: &AuthorizedClient,
        open_files: &OpenFileQuota,
    ) -> Result<SharedSession, RpcError> {
        let (target, further) = self.next_hop(&hello.path, &hello.forward, client)?;
        let connector = self.connector(&hello.path, client.identity.name());
        let open = open_files.reserve(self.files_of_connection(&target.address))?;
        let connector = connector.key(&hello.key).workspace(&hello.workspace).ticket(&hello.ticket);
        let next = connector.forward(&target, &further).await.map_err(|error| error.into_rpc_error())?;
        Ok(self.onward_session(next, open))
    }

    /// Returns the number of descriptors that a connection to `address` takes.
    fn files_of_connection(&self, address: &Address) -> u64 {
        match self.options.transports.check(address) {
            // Input, output and errors of the program, and its process.
            Ok(properties) if properties.starts_programs => 4,
            _ => 1,
        }
    }

    /// Returns a session that forwards to `next` the requests that the server's policy allows. It
    /// counts as `open` while it lives.
    fn onward_session(&self, next: SharedSession, open: OpenFileLease) -> SharedSession {
        let next = Arc::new(OnwardSession { next, _open: open });
        match &self.options.forward_policy {
            Some(policy) => Arc::new(FilteredSession::new(next, policy.clone())),
            None => next,
        }
    }

    /// Returns a connector to further servers, for a client that has come by `path`.
    fn connector(&self, path: &[String], identity: &str) -> Connector {
        let mut path = path.to_vec();
        path.push(self.name.clone());
        Connector::new()
            .transports(self.options.transports.clone())
            .dial(self.onward())
            .keep_alive(self.options.keep_alive)
            .spin(self.options.spin)
            .limits(self.options.limits.clone())
            // It would count against no limit of the client.
            .shared_memory(false)
            .with_path(path, identity)
    }

    /// Opens the channel to the target of a client's tunnel.
    pub(super) async fn open_tunnel(
        &self,
        hello: &Hello,
        client: &AuthorizedClient,
        open_files: &OpenFileQuota,
    ) -> Result<Channel, RpcError> {
        let [target] = hello.forward.as_slice() else {
            return Err(RpcError::new(ErrorKind::InvalidArgument, "a tunnel leads to one address"));
        };
        self.check_path(&hello.path, &hello.forward)?;
        let (target, transports) = (parsed(target)?, &self.options.transports);
        let is_port = self.may_reach(&target, &self.options.allow_port).is_ok();
        let as_port = is_port.then(|| client.check(&Permission::Port(&target.address.to_string())));
        if as_port != Some(Ok(())) {
            // A right to sessions with the target is one to tunnels, too. Of two refusals, that of
            // the client's rights tells more than that of the options.
            self.may_forward(&target, client).map_err(|error| as_port.and_then(Result::err).unwrap_or(error))?;
            if self.options.forward_policy.is_some() {
                let text = "this server makes no tunnels: it limits what may be done through it (--forward-functions)";
                return Err(RpcError::new(ErrorKind::Refused, text));
            }
        }
        // TLS is between the client and the target, and the hop carries its bytes over TCP.
        let through = transports.of(&target.address).map(|transport| transport.tunnel_target(&target.address));
        let Some(address) = through.map_err(|error| ConnectError::from(error).into_rpc_error())? else {
            let text = format!("a tunnel cannot lead to '{}': it passes the bytes of a connection", target.address);
            return Err(RpcError::new(ErrorKind::Unsupported, text));
        };
        // The pattern has allowed the target, but not the address that is dialled for it.
        if transports.check(&address).is_ok_and(|properties| properties.starts_programs) {
            let text = format!("a tunnel to '{}' would start a program here", target.address);
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        let open = open_files.reserve(self.files_of_connection(&address))?;
        let dialled = transports.dial(&address, &self.onward()).await;
        let channel = dialled.map_err(|error| ConnectError::from(error).into_rpc_error())?;
        Ok(channel.with_additional_guard(open))
    }

    /// Copies bytes between a client and the target of its tunnel, until either is gone. Returns
    /// the reason of the end.
    pub(super) async fn run_tunnel(
        &self,
        client: &mut Channel,
        mut to: Channel,
        input: BytesMut,
        mailbox: &Mailbox,
    ) -> String {
        let silence = SilenceLimit::Always(self.tunnel_silence());
        let limit = self.options.session_duration.unwrap_or(UNLIMITED).min(UNLIMITED);
        tokio::select! {
            ended = splice(client, &mut to, input, silence, &self.open_files) => match ended {
                Ok(()) => "the tunnel was closed".to_owned(),
                Err(error) => format!("the tunnel broke: {error}"),
            },
            () = mailbox.wait_for(Command::Stop) => "the server was stopped".to_owned(),
            () = tokio::time::sleep(limit) => "session_duration is over".to_owned(),
        }
    }

    /// Returns the time without progress after which a tunnel is closed.
    pub(super) fn tunnel_silence(&self) -> Duration {
        self.options.keep_alive.saturating_mul(SILENT_TUNNEL_INTERVALS).min(UNLIMITED)
    }

    /// Returns the next hop and the addresses behind it, if the client may be forwarded there.
    fn next_hop(
        &self,
        path: &[String],
        forward: &[String],
        client: &AuthorizedClient,
    ) -> Result<(Hop, Vec<Hop>), RpcError> {
        let Some((next, further)) = forward.split_first() else {
            return Err(RpcError::new(ErrorKind::InvalidArgument, "there is no address to forward to"));
        };
        self.check_path(path, forward)?;
        let first = parsed(next)?;
        self.may_forward(&first, client)?;
        let mut tunnel = first.tunnel;
        let mut stops = Vec::new();
        for next in further {
            let next = parsed(next)?;
            // Behind a tunnel, this server dials the next address itself.
            if tunnel {
                self.may_forward(&next, client)?;
            }
            tunnel &= next.tunnel;
            stops.push(next);
        }
        Ok((first, stops))
    }

    /// Checks that a chain that has passed `path` may go on to the addresses of `forward`: it is
    /// not too long, and has not been here before.
    fn check_path(&self, path: &[String], forward: &[String]) -> Result<(), RpcError> {
        let hops = path.len() + forward.len();
        if hops > MAX_HOPS {
            return Err(RpcError::limit("hops", MAX_HOPS as u64, hops as u64));
        }
        if path.contains(&self.name) {
            let next = forward.first().map_or("", String::as_str);
            let text = format!("the chain to '{next}' comes back to a server that it has passed");
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        Ok(())
    }

    /// Checks that the client may be forwarded to `hop`.
    fn may_forward(&self, hop: &Hop, client: &AuthorizedClient) -> Result<(), RpcError> {
        self.may_reach(hop, &self.options.allow_forward)?;
        client.check(&Permission::Forward(&hop.address.to_string()))
    }

    /// Checks that `hop` matches one of the patterns `allowed`.
    fn may_reach(&self, hop: &Hop, allowed: &[String]) -> Result<(), RpcError> {
        let text = hop.to_string();
        if hop.address.key().is_some() {
            // Access is checked on the key field of the hello, which a key in the address would
            // bypass.
            let text = format!("cannot forward to '{text}': the key of a server is told apart from its address");
            return Err(RpcError::new(ErrorKind::InvalidArgument, text));
        }
        if allowed.iter().any(|pattern| self.options.transports.matches(pattern, &hop.address)) {
            return Ok(());
        }
        let text = format!(
            "this server may not be used to reach '{text}': its operator has to allow it (--allow-forward, or \
             --allow-port for a tunnel)"
        );
        Err(RpcError::new(ErrorKind::Refused, text))
    }

    /// Returns the effective identity: the client's own, or the one that a trusted proxy asserts.
    pub(super) fn effective_identity(&self, hello: &Hello, identity: PeerIdentity) -> PeerIdentity {
        let proxy = identity.name();
        let is_named = |entry: &String| match entry.parse::<PeerIdentity>() {
            Ok(wanted) => wanted == identity,
            Err(_) => entry == proxy,
        };
        let trusted = proxy != ANONYMOUS && self.options.trust_proxy.iter().any(is_named);
        let named = !hello.on_behalf.is_empty() && hello.on_behalf.len() <= MAX_NAME;
        match trusted && named {
            true => PeerIdentity::Asserted { proxy: proxy.to_owned(), name: hello.on_behalf.clone() },
            false => identity,
        }
    }
}

#[async_trait]
impl OnwardServer for ServerState {
    async fn connect_onward(
        &self,
        path: &[String],
        client: &AuthorizedClient,
        (target, key): (&str, &str),
        keep_alive: Duration,
        open_files: &OpenFileQuota,
    ) -> Result<Session, RpcError> {
        let (target, _) = self.next_hop(path, &[target.to_owned()], client)?;
        let connector = self.connector(path, client.identity.name()).key(key);
        let connector = connector.keep_alive(keep_alive.min(self.options.keep_alive));
        let open = open_files.reserve(self.files_of_connection(&target.address))?;
        let next = connector.forward(&target, &[]).await.map_err(|error| error.into_rpc_error())?;
        Ok(Session::from(self.onward_session(next, open)))
    }
}

/// Session with a further server, whose connection is counted while it lives.
struct OnwardSession {
    next: SharedSession,
    _open: OpenFileLease,
}

impl RpcSession for OnwardSession {
    fn submit(&self, request: Request) -> Submission {
        self.next.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.next)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.next.write_in_place(lane, to, offset, len)
    }
}

fn parsed(text: &str) -> Result<Hop, RpcError> {
    text.parse().map_err(|error: crate::AddressError| {
        RpcError::new(ErrorKind::InvalidArgument, format!("cannot forward to '{text}': {error}"))
    })
}

/// Longest name of an identity.
const MAX_NAME: usize = 64;

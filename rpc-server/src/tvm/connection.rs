//! A connection of a client of TVM: the handshake, the requests in their order, and its ends.

use std::sync::Arc;
use std::time::Instant;

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError, printable_line};
use rpc_transports::{DialectConnection, DialectRequest};
use rpc_tvm::wire::{
    HelloAnswer, HelloKey, PROTOCOL_VERSION, Request, ServerEvent, ServerWire, Text, WireLimits, WireValue, exception,
    returned,
};
use tokio::io::AsyncReadExt as _;

use super::chain::{CONNECT, Chain};
use super::error_text::error_text;
use super::handoff::HandedState;
use super::link::{End, Link, Reply, SMALL_REPLY, lost, write};
use super::session::TvmSession;
use super::tracker::MatchKeys;
use super::{copies, requests};

/// Terms on which clients are served.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    /// Key that clients have to name; may be empty.
    pub(super) key: String,
    /// True if a tracker gives the server out, so that clients come with tickets.
    pub(super) takes_tickets: bool,
    /// Match keys, if the server registers at a tracker of TVM.
    pub(super) match_keys: Option<Arc<MatchKeys>>,
    /// True if clients are served who name the key alone.
    pub(super) allow_direct: bool,
    /// True if clients come through a proxy at which the server waits, which has accepted them.
    pub(super) through_proxy: bool,
    /// Maximum number of handles that a client may hold.
    pub(super) max_handles: usize,
}

/// Serves a connection to its end.
pub(super) async fn serve(terms: &Terms, connection: &mut DialectConnection) -> Result<(), RpcError> {
    let Terms { key: server_key, takes_tickets, match_keys, allow_direct, through_proxy, max_handles } = terms;
    let limits = WireLimits::new(connection.limits().max_message);
    let mut wire = ServerWire::new(limits);
    let key = read_hello(connection, &mut wire).await?;
    let parsed = HelloKey::parse(&key);
    let ticket = parsed.as_ref().ok().filter(|_| *takes_tickets).and_then(|hello| ticket_of(hello.key));
    // Offered again to the tracker when the session is over.
    let place = parsed.as_ref().ok().and_then(|hello| match_keys.as_ref()?.take(hello.key));
    let hello = match parsed {
        Ok(hello) if *through_proxy => hello,
        Ok(hello) if place.is_some() || ticket.is_some() || *allow_direct && hello.key == server_key => hello,
        Err(error) if *through_proxy => return Err(RpcError::new(ErrorKind::Refused, error.to_string())),
        parsed => {
            let text = match parsed {
                Ok(hello) if match_keys.is_some() => {
                    let key = printable_line(hello.key);
                    format!("the client has the match key '{key}', which is not in the tracker: it has to ask there")
                }
                Ok(hello) => {
                    let key = printable_line(hello.key);
                    format!("the client asks for key '{key}', and the server has '{server_key}'")
                }
                Err(error) => error.to_string(),
            };
            write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
    };
    let deadline = hello.timeout.and_then(|length| Some((Instant::now().checked_add(length)?, length)));
    let request = DialectRequest {
        key: server_key.to_owned(),
        ticket: ticket.unwrap_or_default().to_owned(),
        ..DialectRequest::default()
    };
    let opened = connection.open(request).await;
    if let Err(error) = &opened
        && ticket.is_some()
    {
        // The client asks the tracker again.
        write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
        return Err(error.clone());
    }
    let shown = match_keys.as_ref().map_or(server_key.as_str(), |keys| keys.key());
    if !through_proxy {
        write(connection.io(), &HelloAnswer::Accepted(&format!("server:{shown}")).encode()).await?;
    }
    let queued = connection.queued().clone();
    let mut link = Link::new(connection, wire, deadline);
    let ended = match opened {
        Ok(session) => {
            let session = TvmSession::new(session, queued, *max_handles)?;
            link.begin_and_serve(session, Box::new(place)).await
        }
        Err(reason) => link.refuse_session(reason).await,
    };
    link.finish(ended).await
}

/// Goes on with a connection whose session has begun in another process.
pub(super) async fn resume(terms: &Terms, connection: &mut DialectConnection, state: &[u8]) -> Result<(), RpcError> {
    let state = HandedState::from_bytes(state)?;
    let session = connection.session().ok_or_else(|| RpcError::internal("no session has been opened"))?;
    let session = TvmSession::new(session, connection.queued().clone(), terms.max_handles)?;
    let wire = ServerWire::begun(WireLimits::new(connection.limits().max_message));
    let mut link = Link::new(connection, wire, state.deadline());
    let ended = link.serve_session(session).await;
    link.finish(ended).await
}

/// Returns the ticket in a match key of a tracker: what follows the last colon, in the form of a
/// ticket. Its proof is as good as the server's own key.
fn ticket_of(match_key: &str) -> Option<&str> {
    match_key.rsplit_once(':').map(|(_, ticket)| ticket).filter(|ticket| ticket.starts_with("t1."))
}

/// Reads the hello, and returns the text of its key. The server limits the time.
async fn read_hello(connection: &mut DialectConnection, wire: &mut ServerWire) -> Result<String, RpcError> {
    loop {
        match wire.poll_event() {
            Ok(Some(ServerEvent::Hello(hello))) => return Ok(hello.key),
            Ok(_) => {}
            Err(error) => return Err(RpcError::new(ErrorKind::Protocol, error.to_string())),
        }
        let read = connection.io().read_buf(&mut wire.input()).await;
        if read.map_err(|error| lost(&error))? == 0 {
            return Err(RpcError::new(ErrorKind::PeerLost, "the client left during the handshake"));
        }
    }
}

impl Link<'_> {
    /// Serves a session that has not begun. Once it has, it is handed to its process, if it has one
    /// that serves sockets, with what is `held` until its end. Returns the reason for the end, of
    /// the connection or of its part here.
    async fn begin_and_serve(&mut self, mut session: TvmSession, mut held: Box<dyn Send + Sync>) -> End {
        let mut body = None;
        while !self.wire.has_begun() {
            if let Err(end) = self.serve_next(&mut session, &mut body).await {
                return end;
            }
        }
        // A session with a further server stays here, where that was dialled.
        if !session.is_forwarded() {
            match self.hand_off(held).await {
                Ok(()) => return End::Closed,
                Err(kept) => held = kept,
            }
        }
        let end = self.serve_session(session).await;
        drop(held);
        end
    }

    /// Serves the requests of a session that has begun. Returns the reason for its end.
    async fn serve_session(&mut self, mut session: TvmSession) -> End {
        let mut body = None;
        loop {
            if let Err(end) = self.serve_next(&mut session, &mut body).await {
                return end;
            }
        }
    }

    async fn serve_next(&mut self, session: &mut TvmSession, body: &mut Option<(u64, MemoryLease)>) -> Result<(), End> {
        match self.next_event().await? {
            ServerEvent::Request(Request::Shutdown) => Err(End::Closed),
            event => self.serve_event(event, session, body).await,
        }
    }

    async fn serve_event(
        &mut self,
        event: ServerEvent,
        session: &mut TvmSession,
        body: &mut Option<(u64, MemoryLease)>,
    ) -> Result<(), End> {
        let reply = match event {
            ServerEvent::Announced { len } => {
                match session.queued().reserve(len) {
                    Ok(lease) => *body = Some((len, lease)),
                    Err(error) => self.wire.refuse(&error_text(&error)),
                }
                return Ok(());
            }
            ServerEvent::Answer(frame) => Reply::Frame(frame),
            ServerEvent::CopyTo { to, len } => {
                let _working = self.activity.working();
                match copies::copy_to(self, session, &to, len).await? {
                    Some(frame) => Reply::Frame(frame),
                    // The rest was refused, and is answered behind it.
                    None => return Ok(()),
                }
            }
            ServerEvent::Request(Request::CopyFrom { from, len }) => {
                let _working = self.activity.working();
                return copies::copy_from(self, session, &from, len).await;
            }
            ServerEvent::Request(Request::Init { version, constructor }) => {
                Reply::Frame(match self.begin(session, &version, &constructor).await? {
                    Ok(()) => {
                        self.wire.begin();
                        returned(&[WireValue::None])
                    }
                    Err(text) => exception(&text),
                })
            }
            ServerEvent::Request(request) => {
                let _working = self.activity.working();
                let served = self.until(requests::serve(session, request)).await?;
                let mut reply = served.unwrap_or_else(|error| Reply::Frame(exception(&error_text(&error))));
                // The arguments are gone, unless the result is a part of them, with which all stay.
                if !matches!(reply, Reply::Bytes(..)) {
                    drop(body.take());
                }
                let charged = body.as_ref().map_or(0, |(len, _)| *len);
                let mut _lease = None;
                if reply.len() > SMALL_REPLY.max(charged) {
                    match session.queued().reserve(reply.len() - charged) {
                        Ok(lease) => _lease = Some(lease),
                        Err(error) => reply = Reply::Frame(exception(&error_text(&error))),
                    }
                }
                let replied = self.reply(reply).await;
                drop(body.take());
                return replied;
            }
            // There is one hello, which was read.
            _ => return Ok(()),
        };
        drop(body.take());
        self.reply(reply).await
    }

    /// Begins a session with its first request: here, or at a further server. The inner error is
    /// for the client.
    async fn begin(
        &mut self,
        session: &mut TvmSession,
        version: &Text,
        constructor: &[WireValue],
    ) -> Result<Result<(), String>, End> {
        let chain = match constructed(version, constructor) {
            Ok(None) => return Ok(Ok(())),
            Ok(Some(chain)) => chain,
            Err(text) => return Ok(Err(text)),
        };
        let _working = self.activity.working();
        let servers = self.connection.further_servers();
        let next = self.until(servers.connect(&chain.address, &chain.key)).await?;
        Ok(match next.and_then(|next| self.connection.forward_to(&next).map(|()| next)) {
            Ok(next) => {
                session.forward_to(next, chain.is_of_tvm);
                Ok(())
            }
            Err(error) => Err(constructor_text(&error)),
        })
    }

    /// Answers the first request with the reason why there is no session.
    async fn refuse_session(&mut self, reason: RpcError) -> End {
        loop {
            match self.next_event().await {
                Ok(ServerEvent::Announced { .. }) => self.wire.refuse("no session has been opened"),
                Ok(_) => return End::Told(error_text(&reason), reason),
                Err(end) => return end,
            }
        }
    }
}

/// Checks the first request of a session. Returns the chain of further servers that is to serve it,
/// if there is one.
fn constructed(version: &Text, constructor: &[WireValue]) -> Result<Option<Chain>, String> {
    if version.as_str() != PROTOCOL_VERSION {
        let found: String = version.as_str().chars().take(64).collect();
        return Err(format!("Client protocol version mismatch with the server: {found:?} vs. {PROTOCOL_VERSION:?}"));
    }
    let Some(name) = constructor.first() else { return Ok(None) };
    match name {
        WireValue::Str(name) if name.as_str() == "rpc.LocalSession" => Ok(None),
        WireValue::Str(name) if name.as_str() == CONNECT => {
            Chain::of_constructor(constructor).map(Some).map_err(|error| constructor_text(&error))
        }
        WireValue::Str(name) if matches!(name.as_str(), "rpc.PopenSession" | "rpc.WasmSession") => {
            let name = name.as_str();
            Err(format!("Cannot construct a session by {name}: this server runs no program that a client of TVM sends"))
        }
        WireValue::Str(name) => {
            let name: String = name.as_str().chars().take(256).collect();
            Err(format!("Cannot find session constructor {name}"))
        }
        other => Err(format!("Cannot find session constructor: its name is of type {}", other.type_name())),
    }
}

/// Returns the text of an error for which a session with a further server did not begin.
fn constructor_text(error: &RpcError) -> String {
    format!("Error caught from session constructor {CONNECT}:\n{}", error_text(error))
}

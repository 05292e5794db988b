//! The connector: makes sessions, directly or through hops.

mod route;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use rpc_core::proto::{EndpointConfig, HandshakeConfig, Hello, Negotiated, Role};
use rpc_core::{ErrorKind, Registry, RpcError, Session};

use self::route::tunnel_without_target;
use super::error::ConnectError;
use super::hop::Hop;
use super::opener::{OpenedBy, SessionOpener};
use crate::address::{Address, AddressError, ToAddress};
use crate::channel::{BlockingChannel, Channel};
use crate::client::{BlockingClientSession, BlockingSession, ClientProtocol, ClientSession, SessionConfig};
use crate::error::TransportError;
#[cfg(feature = "tls")]
use crate::handshake::certificates::ClientTls;
use crate::handshake::driver::{dial_handshake, dial_handshake_blocking};
use crate::handshake::identity_proofs::{DIALLER, Security, Tokens, of_dialler};
use crate::handshake::peer_identity::{PeerIdentity, ProvenName};
use crate::retry::{RetryPolicy, RetrySession};
use crate::shared_memory::features;
use crate::tracker::ServerRequest;
use crate::transport::{Dial, Properties, Transports};
use crate::wire_limits::WireLimits;

/// Default of [`Connector::tracker_outage`].
const TRACKER_OUTAGE: Duration = Duration::from_secs(30);

/// Opener of sessions with servers, directly or through hops.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use rpc_transports::Connector;
///
/// let session = Connector::new().via("tcp://gateway:9190").connect("tcp://10.0.0.5:9090").await?;
/// let add = session.function::<(i64, i64), i64>("add").await?;
/// assert_eq!(add.call((1, 2)).await?, 3);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Connector {
    transports: Transports,
    via: Vec<Hop>,
    /// Error of the first hop that could not be parsed.
    malformed: Option<AddressError>,
    key: String,
    workspace: String,
    ticket: String,
    dial: Dial,
    handshake_timeout: Duration,
    spin: Duration,
    shared_memory: bool,
    queue_timeout: Option<Duration>,
    tracker_outage: Duration,
    limits: WireLimits,
    local: Option<Registry>,
    /// Requirements for a server that a tracker gives out.
    server_request: Option<Arc<ServerRequest>>,
    /// Client for which a server connects. Empty where a client connects for itself.
    forwarded_for: ForwardedFor,
}

/// Client for which a server connects.
#[derive(Clone, Debug, Default)]
struct ForwardedFor {
    /// Names of the servers that the chain has passed.
    path: Vec<String>,
    identity: String,
}

impl Connector {
    /// Creates a connector with default settings and no hops.
    pub fn new() -> Self {
        Self {
            transports: Transports::default(),
            via: Vec::new(),
            malformed: None,
            key: String::new(),
            workspace: String::new(),
            ticket: String::new(),
            dial: Dial::default(),
            handshake_timeout: Duration::from_secs(10),
            spin: Duration::ZERO,
            shared_memory: true,
            queue_timeout: None,
            tracker_outage: TRACKER_OUTAGE,
            limits: WireLimits::default(),
            local: None,
            server_request: None,
            forwarded_for: ForwardedFor::default(),
        }
    }

    /// Adds a hop: a server that forwards to the next one, or to the target. Several hops are
    /// passed in the order of the calls, as with ssh.
    ///
    /// A hop sees requests and data, and proves its own identity to the next one. With `tunnel:` in
    /// front of its address it passes bytes that it does not look into. Handshake, proof of
    /// identity and encryption are then between this side and the peer behind the hop. That peer
    /// has a `tls://` address, or without encryption a `tcp://` or `unix:` address.
    #[must_use]
    pub fn via(mut self, hop: &str) -> Self {
        match hop.parse() {
            Ok(hop) => self.via.push(hop),
            Err(error) => _ = self.malformed.get_or_insert(error),
        }
        self
    }

    /// Adds a hop that has been parsed.
    pub(crate) fn through(mut self, hop: Hop) -> Self {
        self.via.push(hop);
        self
    }

    /// Makes each hop that has been added a tunnel, as with `tunnel:` in front of its address.
    #[must_use]
    pub fn through_tunnels(mut self) -> Self {
        self.via.iter_mut().for_each(|hop| hop.tunnel = true);
        self
    }

    /// Sets the transports by which addresses are dialled. Default: those that this crate was
    /// compiled with.
    #[must_use]
    pub fn transports(mut self, transports: Transports) -> Self {
        self.transports = transports;
        self
    }

    /// Connects for a client of a server: `path` has the names of the servers that the chain has
    /// passed.
    pub(crate) fn with_path(mut self, path: Vec<String>, on_behalf: &str) -> Self {
        self.forwarded_for = ForwardedFor { path, identity: on_behalf.to_owned() };
        self
    }

    /// Accepts only a server with this key. The path of an address, as in `tcp://host:9090/KEY`,
    /// does the same.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        key.clone_into(&mut self.key);
        self
    }

    /// Sets the requirements for a server that a tracker gives out: labels, devices and priority.
    /// The tracker is asked for one server, with the key of the [address](Self::connect) or of
    /// [`key`](Self::key) if one of them names any. Addresses of servers are not affected.
    #[must_use]
    pub fn server_request(mut self, request: ServerRequest) -> Self {
        self.server_request = Some(Arc::new(request));
        self
    }

    /// Asks for the named workspace instead of a private one.
    #[must_use]
    pub fn workspace(mut self, name: &str) -> Self {
        name.clone_into(&mut self.workspace);
        self
    }

    /// Shows the server a ticket that a tracker gave out for it. One ticket is good for one
    /// session.
    #[must_use]
    pub fn ticket(mut self, ticket: &str) -> Self {
        ticket.clone_into(&mut self.ticket);
        self
    }

    /// Proves this side's identity by one of these tokens. Accepts only servers that know the
    /// token, or that have proven themselves by a certificate. Default: none.
    #[must_use]
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.dial.tokens = tokens;
        self
    }

    /// Sets the trust in servers at `tls://` and `quic://` addresses. Without it, such addresses
    /// can be reached only with [`tokens`](Self::tokens).
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: ClientTls) -> Self {
        self.dial.tls = Some(tls);
        self
    }

    /// Sets all terms on which channels are opened: time limit, keep-alive, tokens and trust.
    #[must_use]
    pub fn dial(mut self, terms: Dial) -> Self {
        self.dial = terms;
        self
    }

    /// Sets the time limit for opening the channel. Default: 10 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.dial.connect_timeout = timeout;
        self
    }

    /// Sets the time limit for the handshake, hops included. Default: 10 s.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// Sets the time to wait for a server at a `tracker://` address while all servers are taken.
    /// Default: no limit while the tracker has a server that suits, and 60 s while it has none
    /// ([`ServerRequest::unservable_timeout`]).
    #[must_use]
    pub fn queue_timeout(mut self, timeout: Duration) -> Self {
        self.queue_timeout = Some(timeout);
        self
    }

    /// Sets the longest outage of a tracker in which a request that waits there is repeated. The
    /// silence by which an outage is noticed counts: that is three times the
    /// [`keep_alive`](Self::keep_alive), and with a limit that is not longer no request is repeated
    /// after it. Default: 30 s, twice the silence after which a peer is given up by default.
    #[must_use]
    pub fn tracker_outage(mut self, limit: Duration) -> Self {
        self.tracker_outage = limit;
        self
    }

    /// Sets the silence after which a channel is tested. It is given up after three times as long.
    /// Default: 5 s.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.dial.keep_alive = interval;
        self
    }

    /// Sets the longest time for which a session over a bare socket looks for replies before its
    /// thread sleeps, such as [`SPIN`](crate::SPIN). It saves the time of waking the thread, tens
    /// of microseconds where the server is on another core, and takes time of a core. It adapts:
    /// where it does not help or other threads want the core it stops. Default: zero, which
    /// switches it off.
    #[must_use]
    pub fn spin(mut self, limit: Duration) -> Self {
        self.spin = limit;
        self
    }

    /// Chooses if copies go through shared memory where the server is a process of this machine and
    /// can do so, too. Default: true.
    #[must_use]
    pub fn shared_memory(mut self, shared_memory: bool) -> Self {
        self.shared_memory = shared_memory;
        self
    }

    /// Sets the limits of the session on the wire and in queues.
    #[must_use]
    pub fn limits(mut self, limits: WireLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the functions that `local:` addresses find.
    #[must_use]
    pub fn local(mut self, registry: Registry) -> Self {
        self.local = Some(registry);
        self
    }

    /// Opens a session with the server at `target`, or with one that the tracker gives out if that
    /// is a `tracker://` address; [`tracker`](crate::tracker) says more. Other addresses that lead
    /// to a session and to no channel are opened by their [`SessionOpener`]. The session's input
    /// and output run as a task of the current tokio runtime. Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if an address is malformed, or if a peer cannot be reached or refuses.
    pub async fn connect<A: ToAddress + ?Sized>(&self, target: &A) -> Result<Session, ConnectError> {
        let target = self.target(target)?;
        self.connect_at(target).await
    }

    /// Opens a session as [`connect`](Self::connect) does, and wraps it in a [`RetrySession`],
    /// which connects again when the session was lost.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), for the first session.
    pub async fn connect_retrying<A: ToAddress + ?Sized>(
        &self,
        target: &A,
        policy: RetryPolicy,
    ) -> Result<Session, ConnectError> {
        let target = self.target(target)?;
        let first = self.connect_at(target.clone()).await?;
        let connector = self.clone();
        let open = move || {
            let (connector, target) = (connector.clone(), target.clone());
            async move { connector.connect_at(target).await.map_err(ConnectError::into_rpc_error) }
        };
        Ok(Session::new(RetrySession::reopening(open, policy).starting_with(first.shared().clone())))
    }

    /// Opens a session as [`connect`](Self::connect) does, at an address that has been parsed.
    pub(crate) async fn connect_at(&self, target: Hop) -> Result<Session, ConnectError> {
        if let Some(opener) = self.own_opener(&target) {
            let (address, connector) = self.for_opener(&target.address)?;
            return opener.open(&address, &connector).await;
        }
        let (first, further) = self.route(target);
        Ok(self.forward(&first, &further).await?.into())
    }

    /// Returns the opener that this side uses for `target`. There is none if a channel leads there,
    /// or if the last hop opens the session.
    fn own_opener(&self, target: &Hop) -> Option<&dyn SessionOpener> {
        let opener = self.transports.opener(target.address.scheme()).filter(|_| !target.tunnel)?;
        (self.via.is_empty() || opener.opened_by() == OpenedBy::Client).then_some(opener)
    }

    /// Returns the address for an opener, which has no key, and the connector with that key.
    fn for_opener(&self, target: &Address) -> Result<(Address, Self), ConnectError> {
        self.transports.check(target)?;
        crate::runtime::install_in_core();
        let connector = match target.key() {
            Some(key) => self.clone().key(key),
            None => self.clone(),
        };
        Ok((target.clone().without_key(), connector))
    }

    /// Opens a session as [`connect`](Self::connect) does, on the calling thread and without a
    /// runtime. The thread that waits for the session does its input and output, so that a call
    /// costs no switch to another thread. That holds for `tcp://`, `unix:`, `exec:` and `ssh://`
    /// addresses. Sessions at other addresses run on one thread that all such sessions of the
    /// process share.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_blocking<A: ToAddress + ?Sized>(&self, target: &A) -> Result<Session, ConnectError> {
        let target = self.target(target)?;
        if let Some(opener) = self.own_opener(&target) {
            let (address, connector) = self.for_opener(&target.address)?;
            if let Some(opened) = opener.open_blocking(&address, &connector) {
                return opened;
            }
            let this = self.clone();
            return crate::runtime::run_in_background(async move { this.connect_at(target).await });
        }
        let (first, further) = self.route(target);
        let plan = self.plan(&first, &further)?;
        crate::runtime::install_in_core();
        // Blocking sockets carry no TLS.
        let dialled = match plan.tunnel || self.properties(&plan.address)?.encrypted {
            false => self.transports.dial_blocking(&plan.address, &self.dial)?,
            true => None,
        };
        let Some(channel) = dialled else {
            let this = self.clone();
            return crate::runtime::run_in_background(async move { this.forward(&first, &further).await })
                .map(Session::from);
        };
        let handshake = self.handshake(plan.key, plan.forward, &Security::default(), channel.shares_memory());
        let agreed = dial_handshake_blocking(&channel, handshake);
        let agreed = agreed.map_err(|error| match channel.end().filter(|_| is_of_the_end(&error)) {
            Some(end) => explained(error, end.explain_blocking()),
            None => error,
        });
        let (mut negotiated, mut input) = agreed?;
        if negotiated.theirs.relay && negotiated.ours.forward.is_empty() {
            expect_no_input(&input, channel.peer())?;
            let handshake = self.handshake(negotiated.ours.key, Vec::new(), &Security::default(), false);
            (negotiated, input) = dial_handshake_blocking(&channel, handshake)?;
            is_no_relay(&negotiated, channel.peer())?;
        }
        let peer = channel.peer().to_owned();
        let session = BlockingClientSession::start(channel, &negotiated, input, self.session_config());
        let session = session.map_err(|error| TransportError::from_io(peer, error))?;
        Ok(Session::new(session))
    }

    /// Opens a session with the server at the far end of `channel`, which this side dialled.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect). A channel to a server whose certificate was not checked is
    /// refused without a token, as its address would be.
    pub async fn connect_channel(&self, channel: Channel) -> Result<Session, ConnectError> {
        if is_unverified(&channel) && self.dial.tokens.is_empty() {
            let text = format!("channels {UNVERIFIED_SERVER}; check the certificate, or set tokens");
            return Err(RpcError::new(ErrorKind::Unauthenticated, text).with_peer(channel.peer()).into());
        }
        Ok(Session::new(self.client(channel, self.key.clone(), Vec::new()).await?))
    }

    /// Opens a channel to `address`, without hops and on the terms of this connector. For
    /// [`SessionOpener`]s whose peers speak another protocol.
    ///
    /// The caller may send at once: a server at the far end of an encrypted channel has been
    /// verified by its certificate. [Tokens](Self::tokens) do not replace that here, because a
    /// server proves its token only in the handshake of a session.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if the peer cannot be reached, or not as securely as its address says.
    /// [`TransportError::Unsupported`] for an encrypted channel to a server whose certificate was
    /// not checked.
    pub async fn open_channel(&self, address: &Address) -> Result<Channel, ConnectError> {
        let channel = self.dial_channel(address, None).await?;
        if is_unverified(&channel) {
            return Err(TransportError::unsupported(address, NEEDS_CERTIFICATE).into());
        }
        Ok(channel)
    }

    /// Opens a channel as [`open_channel`](Self::open_channel) does, on the calling thread and
    /// without a runtime. Returns `None` if the address needs a runtime, or is encrypted.
    ///
    /// # Errors
    ///
    /// As [`open_channel`](Self::open_channel).
    pub fn open_channel_blocking(&self, address: &Address) -> Result<Option<BlockingChannel>, ConnectError> {
        match self.properties(address)?.encrypted {
            false => Ok(self.transports.dial_blocking(address, &self.dial)?),
            true => Ok(None),
        }
    }

    /// Starts a session by another protocol than the native one, whose input and output are done by
    /// the threads that wait for its replies. The handshake of that protocol has been performed
    /// over `channel`, which this connector has [opened](Self::open_channel_blocking).
    ///
    /// # Errors
    ///
    /// The system refuses the thread that serves such sessions while no caller waits.
    pub fn start_blocking<E: ClientProtocol>(
        &self,
        channel: BlockingChannel,
        endpoint: E,
    ) -> Result<BlockingSession<E>, ConnectError> {
        let peer = channel.peer().to_owned();
        let session = BlockingSession::drive(channel, endpoint, BytesMut::new(), self.dial.keep_alive, self.spin);
        Ok(session.map_err(|error| TransportError::from_io(peer, error))?)
    }

    /// Returns the terms on which channels are opened: time limit, tokens and trust.
    #[must_use]
    pub fn terms(&self) -> &Dial {
        &self.dial
    }

    /// Returns the time limit of the handshake.
    #[must_use]
    pub fn handshake_limit(&self) -> Duration {
        self.handshake_timeout
    }

    /// Returns the limits of the session on the wire and in queues.
    #[must_use]
    pub fn wire_limits(&self) -> &WireLimits {
        &self.limits
    }

    /// Returns the key that the server must have, if any.
    #[must_use]
    pub fn requested_key(&self) -> Option<&str> {
        (!self.key.is_empty()).then_some(&self.key)
    }

    /// Returns true if a server that dials for this side asks a further server for the same as
    /// this side would: there are no hops, no key, workspace, ticket or request to a tracker, and
    /// neither proofs of identity nor trust of this side's own.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        #[cfg(feature = "tls")]
        let has_tls = self.dial.tls.is_some();
        #[cfg(not(feature = "tls"))]
        let has_tls = false;
        let has_hops = !self.via.is_empty() || self.malformed.is_some();
        let asks_for_more = !self.key.is_empty() || !self.workspace.is_empty() || !self.ticket.is_empty();
        let is_identified = !self.dial.tokens.is_empty() || has_tls;
        !has_hops && !asks_for_more && !is_identified && self.server_request.is_none()
    }

    /// Returns true if sessions are opened through hops.
    #[must_use]
    pub fn has_hops(&self) -> bool {
        !self.via.is_empty()
    }

    /// Returns the functions that `local:` addresses find, if any were set.
    #[must_use]
    pub fn local_functions(&self) -> Option<&Registry> {
        self.local.as_ref()
    }

    /// Returns the last stop if it and the hops in front of it are well-formed.
    fn target<A: ToAddress + ?Sized>(&self, target: &A) -> Result<Hop, ConnectError> {
        if let Some(error) = &self.malformed {
            return Err(error.clone().into());
        }
        let hop = Hop { address: target.to_address()?, tunnel: false };
        // The prefix `tunnel:` is no scheme.
        if Hop::is_tunnel(&hop.address) { Err(tunnel_without_target(&hop).into()) } else { Ok(hop) }
    }

    /// Opens a channel to `address` and runs `continuation` over it. If the channel is on an
    /// existing connection and nothing is heard over that connection any more, the server has
    /// restarted or the route to it is cut. A second attempt is then made over a new connection,
    /// and the first attempt to succeed counts. The second attempt is made as well if a reused
    /// connection is lost, because its server may have restarted.
    async fn run_over_channel<'a, T>(
        &'a self,
        address: &'a Address,
        existing: Option<Channel>,
        continuation: &(dyn Fn(Channel) -> Continuation<'a, T> + Sync),
    ) -> Result<T, ConnectError> {
        let channel = self.dial_channel(address, existing).await?;
        let Some(connection) = channel.security().connection.clone() else { return continuation(channel).await };
        let reuses_connection = channel.security().reuses_connection;
        let mut second = Box::pin(async { continuation(self.dial_channel(address, None).await?).await });
        let mut first = continuation(channel);
        tokio::select! {
            biased;
            outcome = &mut first => match outcome {
                Err(error) if reuses_connection && is_lost_connection(&error) => return second.await,
                outcome => return outcome,
            },
            () = connection.silence() => connection.suspect(),
        }
        tokio::select! {
            biased;
            outcome = &mut first => match outcome {
                Ok(done) => Ok(done),
                Err(_) => second.await,
            },
            outcome = &mut second => match outcome {
                Ok(done) => Ok(done),
                Err(_) => first.await,
            },
        }
    }

    /// Opens a channel to `address`, through `existing` if a channel leads there already. A
    /// handshake must follow: with tokens alone, nothing else proves which server is at the far
    /// end.
    pub(crate) async fn dial_channel(
        &self,
        address: &Address,
        existing: Option<Channel>,
    ) -> Result<Channel, ConnectError> {
        #[cfg(feature = "tls")]
        if self.properties(address)?.encrypted
            && self.dial.tokens.is_empty()
            && self.dial.tls.as_ref().is_some_and(|tls| !tls.verifies())
        {
            return Err(TransportError::unsupported(address, UNVERIFIED_SERVER).into());
        }
        let channel = match existing {
            None => self.transports.dial(address, &self.dial).await?,
            Some(stream) => self.transports.dial_over(address, stream, &self.dial).await?,
        };
        if self.properties(address)?.encrypted && !channel.security().is_encrypted() {
            return Err(TransportError::unsupported(address, NOT_ENCRYPTED).into());
        }
        if is_unverified(&channel) && self.dial.tokens.is_empty() {
            return Err(TransportError::unsupported(address, UNVERIFIED_SERVER).into());
        }
        Ok(channel)
    }

    /// Returns the properties of an address, as its transport or opener declares them.
    fn properties(&self, address: &Address) -> Result<Properties, TransportError> {
        self.transports.check(address)
    }

    /// Returns true if a tracker may send this client to `address`: a server is there, and no
    /// program is started by going there.
    pub(crate) fn accepts_grant(&self, address: &Address) -> bool {
        let by_client = |opener: &dyn SessionOpener| opener.opened_by() != OpenedBy::LastHop;
        self.properties(address).is_ok_and(|properties| !properties.starts_programs)
            && !self.transports.opener(address.scheme()).is_some_and(by_client)
    }

    /// Returns true if this client may go to a server at the last of these `stops`, which the
    /// tracker at `tracker` grants: if the tracker is reached with encryption, then so must be the
    /// first of the stops, or the one that the session leads to through tunnels.
    pub(crate) fn accepts_encryption_of(&self, stops: &[Hop], tracker: &Address) -> bool {
        let properties = |hop: &Hop| self.properties(&hop.address).unwrap_or_default();
        let protects = |hop: &Hop| properties(hop).encrypted;
        let first = stops.first().is_some_and(|hop| protects(hop) || properties(hop).is_local());
        let behind_tunnels = stops.iter().find(|hop| !hop.tunnel).is_some_and(protects);
        let tracker_is_encrypted = self.properties(tracker).is_ok_and(|properties| properties.encrypted);
        self.dial.plain_grants || !tracker_is_encrypted || first || behind_tunnels
    }

    async fn client(
        &self,
        mut channel: Channel,
        key: String,
        forward: Vec<String>,
    ) -> Result<ClientSession, ConnectError> {
        let handshake = self.handshake(key, forward, channel.security(), channel.process().is_some());
        let forwards = !handshake.hello.forward.is_empty();
        let (mut negotiated, mut input) = self.perform_handshake(&mut channel, handshake).await?;
        if negotiated.theirs.relay && !forwards {
            expect_no_input(&input, channel.peer())?;
            let relay = channel.peer().to_owned();
            channel = channel.with_further_peer(relay);
            let handshake =
                self.handshake(negotiated.ours.key, Vec::new(), channel.security(), channel.process().is_some());
            (negotiated, input) = self.perform_handshake(&mut channel, handshake).await?;
            is_no_relay(&negotiated, channel.peer())?;
        }
        Ok(ClientSession::spawn(channel, &negotiated, input, self.session_config()))
    }

    /// Performs a handshake, and records its outcome for the connection under the channel.
    async fn perform_handshake(
        &self,
        channel: &mut Channel,
        handshake: HandshakeConfig,
    ) -> Result<(Negotiated, BytesMut), RpcError> {
        let agreed = match dial_handshake(channel, handshake).await {
            Err(error) => Err(match channel.end().filter(|_| is_of_the_end(&error)) {
                Some(end) => explained(error, end.explain().await),
                None => error,
            }),
            agreed => agreed,
        };
        if let (Err(error), Some(connection)) = (&agreed, &channel.security().connection)
            && error.hop() == 0
        {
            // The error is no answer of the server: the connection may lead nowhere any more.
            connection.suspect();
        }
        let (negotiated, input) = agreed?;
        if let Some(connection) = &channel.security().connection {
            let earlier = channel.security().proven_earlier(DIALLER);
            let server = PeerIdentity::of_handshake(&ProvenName::of(&negotiated), earlier.as_ref(), None);
            connection.prove(DIALLER, server);
        }
        Ok((negotiated, input))
    }

    fn handshake(
        &self,
        key: String,
        forward: Vec<String>,
        security: &Security,
        shares_memory: bool,
    ) -> HandshakeConfig {
        let mut hello = Hello::new(Role::Client);
        hello.features = features(shares_memory && self.shared_memory);
        hello.key = key;
        hello.workspace.clone_from(&self.workspace);
        hello.ticket.clone_from(&self.ticket);
        hello.forward = forward;
        (hello.path, hello.on_behalf) = (self.forwarded_for.path.clone(), self.forwarded_for.identity.clone());
        hello.keep_alive_ms = self.dial.keep_alive.as_millis() as u64;
        self.limits.apply(&mut hello);
        let identities = of_dialler(&self.dial.tokens, security);
        HandshakeConfig { hello, identities, hold: false, timeout: self.handshake_timeout }
    }

    /// Returns the longest outage of a tracker in which a request is repeated.
    pub(crate) fn outage_limit(&self) -> Duration {
        self.tracker_outage
    }

    /// Returns the silence after which a peer is given up.
    pub(crate) fn silence_limit(&self) -> Duration {
        self.dial.keep_alive.saturating_mul(3)
    }

    /// Returns the time to wait for a server of a tracker: that of
    /// [`queue_timeout`](Self::queue_timeout). `None` for no limit.
    #[must_use]
    pub fn queue_limit(&self) -> Option<Duration> {
        self.queue_timeout
    }

    pub(crate) fn requested_server(&self) -> Option<&ServerRequest> {
        self.server_request.as_deref()
    }

    fn session_config(&self) -> SessionConfig {
        SessionConfig { endpoint: EndpointConfig { keep_alive: self.dial.keep_alive }, spin: self.spin }
    }
}

/// Returns true if the error stems from the end of the stream and not from the peer's answer.
fn is_of_the_end(error: &RpcError) -> bool {
    error.hop() == 0 && matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Refused)
}

/// Returns true if the connection to the dialled peer broke before the peer had answered.
fn is_lost_connection(error: &ConnectError) -> bool {
    matches!(error, ConnectError::Session(error) if error.hop() == 0 && error.kind() == ErrorKind::PeerLost)
}

/// Adds the explanation of the far side's end to an error, if there is one.
fn explained(error: RpcError, end: Option<String>) -> RpcError {
    match end {
        Some(end) => {
            let text = format!("{end} before there was a session: {}", error.message());
            RpcError::new(ErrorKind::PeerLost, text)
        }
        None => error,
    }
}

const NOT_ENCRYPTED: &str = "are encrypted, their transport says, and this channel is not: it came without the \
     security of ClientTls::connect";

const UNVERIFIED_SERVER: &str = "whose certificate is not checked need a token, by which the server is known";

const NEEDS_CERTIFICATE: &str = "need a server whose certificate is checked, where no handshake of a session proves \
     its token; give the certificate of its authority (Connector::tls with ClientTls::new; --ca)";

/// Returns true if the channel is encrypted, and the certificate of the server at its far end was
/// not checked.
fn is_unverified(channel: &Channel) -> bool {
    channel.security().is_encrypted() && !channel.security().server_verified
}

/// Checks that the peer has sent nothing, since this side has to speak first.
pub(crate) fn expect_no_input(input: &[u8], peer: &str) -> Result<(), RpcError> {
    if input.is_empty() {
        return Ok(());
    }
    let error = RpcError::new(ErrorKind::Protocol, "a server spoke first that should be spoken to");
    Err(error.with_peer(peer.to_owned()))
}

fn is_no_relay(negotiated: &Negotiated, peer: &str) -> Result<(), RpcError> {
    if !negotiated.theirs.relay {
        return Ok(());
    }
    let error = RpcError::new(ErrorKind::Protocol, "behind the relay there is another relay, and no server");
    Err(error.with_peer(peer.to_owned()))
}

/// Future of the work on a channel that has been opened.
type Continuation<'a, T> = Pin<Box<dyn Future<Output = Result<T, ConnectError>> + Send + 'a>>;

impl Default for Connector {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll};

    use rpc_core::{LocalSession, SharedSession};
    use tokio::io::{AsyncRead, ReadBuf};

    use super::*;
    use crate::handshake::identity_proofs::Connection;
    use crate::serve::{ServeOptions, Server};
    use crate::transport::{Bind, BoxFuture, Transport};

    /// Stream of a connection that is lost.
    struct LostStream;

    impl AsyncRead for LostStream {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }
    }

    /// Transport with pooled connections, the first of which is lost in the handshake. The
    /// others lead to a server.
    #[derive(Debug)]
    struct LosesFirst {
        /// True if the lost channel is on a connection that has carried others.
        reuses_connection: bool,
        server: Address,
        dialled: Arc<AtomicUsize>,
    }

    impl Transport for LosesFirst {
        fn schemes(&self) -> &[&str] {
            &["pooled"]
        }

        fn dial<'a>(&'a self, _: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
            Box::pin(async move {
                let is_first = self.dialled.fetch_add(1, Ordering::Relaxed) == 0;
                if !is_first {
                    return Transports::default().dial(&self.server, with).await;
                }
                let lost = Channel::new(tokio::io::join(LostStream, tokio::io::sink()), "pooled:server");
                let connection = Some(Arc::new(Connection::default()));
                let reuses_connection = self.reuses_connection;
                Ok(lost.with_security(Security { connection, reuses_connection, ..Security::default() }))
            })
        }
    }

    /// Regression: a client failed because a pooled QUIC connection was lost in the handshake: the
    /// server had restarted.
    #[tokio::test]
    async fn a_reused_connection_that_is_lost_is_replaced_and_a_new_one_is_an_error() {
        let open = |_: &_| -> Result<SharedSession, RpcError> { Ok(Arc::new(LocalSession::new(Registry::new()))) };
        let server = Server::new(Arc::new(open), ServeOptions::default());
        let address: Address = "memory:loses-first".parse().unwrap();
        server.listen(&address, &Bind::default()).await.unwrap();
        for (reuses_connection, attempts) in [(true, 2), (false, 1)] {
            let dialled = Arc::default();
            let pooled = LosesFirst { reuses_connection, server: address.clone(), dialled: Arc::clone(&dialled) };
            let connector = Connector::new().transports(Transports::default().with(pooled));
            let outcome = connector.connect("pooled:server").await;
            assert_eq!(dialled.load(Ordering::Relaxed), attempts);
            match outcome {
                Ok(_) => assert!(reuses_connection),
                Err(error) => assert!(!reuses_connection && is_lost_connection(&error), "{error:?}"),
            }
        }
    }
}

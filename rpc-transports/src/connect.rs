//! Connecting: from an address, and the hops in front of it, to a session.

use std::time::Duration;

use rpc_core::proto::{HandshakeConfig, Hello, LinkConfig, Role};
use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, Session, SharedSession};

use crate::address::{Address, AddressError, AddressKind};
use crate::blocking::{BlockingClientSession, dial_hands_blocking};
#[cfg(feature = "tls")]
use crate::certificates::ClientTls;
use crate::channel_io::dial_hands;
use crate::client::ClientSession;
use crate::dispatch::{dial, dial_blocking};
use crate::identity::{DIALLER, Security, Tokens, of_dialler};
use crate::serve::WireLimits;
use crate::transport::{Channel, DialOptions, TransportError};

/// Why there is no session.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address is malformed.
    #[error("bad address")]
    Address(#[from] AddressError),
    /// No channel could be opened.
    #[error("cannot reach the peer")]
    Transport(#[from] TransportError),
    /// The peer, or a hop behind it, was reached and gave no session.
    #[error("no session with the peer")]
    Session(#[from] RpcError),
}

impl ConnectError {
    /// The same facts as an error of a session.
    pub fn into_rpc_error(self) -> RpcError {
        match self {
            Self::Address(error) => RpcError::new(ErrorKind::InvalidArgument, error.to_string()),
            Self::Transport(error) => {
                let kind = match &error {
                    TransportError::Insecure { .. } => ErrorKind::Unauthenticated,
                    TransportError::Unsupported { .. } => ErrorKind::Unsupported,
                    TransportError::PermissionDenied { .. } => ErrorKind::Refused,
                    _ => ErrorKind::PeerLost,
                };
                let address = error.address().to_owned();
                let mut text = error.to_string();
                let mut cause = std::error::Error::source(&error);
                while let Some(error) = cause {
                    text += &format!(": {error}");
                    cause = error.source();
                }
                RpcError::new(kind, text).with_peer(address)
            }
            Self::Session(error) => error,
        }
    }
}

impl From<ConnectError> for RpcError {
    fn from(error: ConnectError) -> Self {
        error.into_rpc_error()
    }
}

/// Makes sessions.
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
    via: Vec<String>,
    key: String,
    workspace: String,
    ticket: String,
    dial: DialOptions,
    handshake_timeout: Duration,
    queue_timeout: Option<Duration>,
    keep_alive: Duration,
    limits: WireLimits,
    local: Option<Registry>,
}

impl Connector {
    /// A connector with default settings and no hops.
    pub fn new() -> Self {
        Self {
            via: Vec::new(),
            key: String::new(),
            workspace: String::new(),
            ticket: String::new(),
            dial: DialOptions::default(),
            handshake_timeout: Duration::from_secs(10),
            queue_timeout: None,
            keep_alive: Duration::from_secs(5),
            limits: WireLimits::default(),
            local: None,
        }
    }

    /// Adds a hop: a server that will forward to the next one, or to the target. Several are passed in order, as with ssh.
    #[must_use]
    pub fn via(mut self, hop: &str) -> Self {
        self.via.push(hop.to_owned());
        self
    }

    /// Accepts only a server with this key. The path of an address, as in `tcp://host:9090/KEY`, does the same.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        key.clone_into(&mut self.key);
        self
    }

    /// Asks for the named workspace instead of a private one.
    #[must_use]
    pub fn workspace(mut self, name: &str) -> Self {
        name.clone_into(&mut self.workspace);
        self
    }

    /// Shows what a tracker gave out for the server. One ticket is good for one session.
    #[must_use]
    pub fn ticket(mut self, ticket: &str) -> Self {
        ticket.clone_into(&mut self.ticket);
        self
    }

    /// Proves itself by one of these tokens, and takes only servers that know it, or that have proven themselves by a
    /// certificate. None.
    #[must_use]
    pub fn tokens(mut self, tokens: Tokens) -> Self {
        self.dial.tokens = tokens;
        self
    }

    /// How servers at `tls://` and `quic://` addresses are trusted. Without this such addresses cannot be reached.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls(mut self, tls: ClientTls) -> Self {
        self.dial.tls = Some(tls);
        self
    }

    /// How channels are opened, all at once: time limit, tokens and trust.
    #[must_use]
    pub fn dial_options(mut self, options: DialOptions) -> Self {
        self.dial = options;
        self
    }

    /// How long opening the channel may take. 10 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.dial.connect_timeout = timeout;
        self
    }

    /// How long the handshake may take, hops included. 10 s.
    #[must_use]
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// How long to wait for a server at a `tracker://` address while others have them all. No limit.
    #[must_use]
    pub fn queue_timeout(mut self, timeout: Duration) -> Self {
        self.queue_timeout = Some(timeout);
        self
    }

    /// A channel on which nothing was heard for this long is tested, and is given up after three times as long. 5 s.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.keep_alive = interval;
        self
    }

    /// What the session may have on the wire and in queues.
    #[must_use]
    pub fn limits(mut self, limits: WireLimits) -> Self {
        self.limits = limits;
        self
    }

    /// The functions that `local:` addresses find.
    #[must_use]
    pub fn local(mut self, registry: Registry) -> Self {
        self.local = Some(registry);
        self
    }

    /// Opens a session with the server at `target`, or with one that the tracker gives out, if that is a `tracker://`
    /// address; see [`tracker`](crate::tracker) for more than that. Its input and output run as a task of the current tokio runtime.
    ///
    /// # Errors
    ///
    /// A malformed address, a peer that cannot be reached, and one that refuses, each saying why. Cancel-safe.
    pub async fn connect(&self, target: &str) -> Result<Session, ConnectError> {
        let address: Address = target.parse()?;
        if address.tracker_address().is_some() {
            return crate::tracker::connect(self, &address, self.queue_timeout).await;
        }
        self.connect_at(target).await
    }

    /// As [`connect`](Self::connect), where no tracker is asked.
    pub(crate) async fn connect_at(&self, target: &str) -> Result<Session, ConnectError> {
        let mut hops = self.via.clone();
        hops.push(target.to_owned());
        let session = self.forward(&hops[0], &hops[1..]).await?;
        Ok(session.into())
    }

    /// As [`connect`](Self::connect), on the calling thread and without a runtime: the session's input and output are done
    /// by whoever waits for it, so that a call costs no switch to another thread. That holds for `tcp://`, `unix:` and `exec:`
    /// addresses; those of sessions at other addresses run on a thread that all such sessions of the process share.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_blocking(&self, target: &str) -> Result<Session, ConnectError> {
        if target.parse::<Address>()?.tracker_address().is_some() {
            let (this, target) = (self.clone(), target.to_owned());
            return crate::runtime::run_in_background(async move { this.connect(&target).await });
        }
        let mut hops = self.via.clone();
        hops.push(target.to_owned());
        let plan = self.plan(&hops[0], &hops[1..])?;
        if *plan.address.kind() == AddressKind::Local {
            return Ok(Session::new(LocalSession::new(self.local.clone().unwrap_or_default())));
        }
        crate::runtime::install_probe();
        if !plan.address.has_plain_socket() {
            let this = self.clone();
            return crate::runtime::run_in_background(async move { this.forward(&hops[0], &hops[1..]).await })
                .map(Session::from);
        }
        let channel = dial_blocking(&plan.address, &self.dial)?;
        let handshake = self.handshake(plan.key, plan.forward, &Security::default());
        let hands = dial_hands_blocking(&channel, handshake);
        #[cfg(feature = "exec")]
        let hands = hands.map_err(|error| crate::child::explain_blocking(error, channel.guard()));
        let (negotiated, input) = hands?;
        let session = BlockingClientSession::start(channel, &negotiated, input, self.link());
        let session = session.map_err(|error| TransportError::from_io(target, error))?;
        Ok(Session::new(session))
    }

    /// Opens a session with the server at the far end of `channel`, which this side dialled.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_channel(&self, channel: Channel) -> Result<Session, ConnectError> {
        Ok(Session::new(self.client(channel, self.key.clone(), Vec::new()).await?))
    }

    /// Opens a session with `first`, which is to forward to `further`.
    pub(crate) async fn forward(&self, first: &str, further: &[String]) -> Result<SharedSession, ConnectError> {
        let plan = self.plan(first, further)?;
        if *plan.address.kind() == AddressKind::Local {
            let registry = self.local.clone().unwrap_or_default();
            return Ok(std::sync::Arc::new(LocalSession::new(registry)));
        }
        crate::runtime::install_probe();
        #[cfg(feature = "tls")]
        if plan.address.is_encrypted()
            && self.dial.tokens.is_empty()
            && self.dial.tls.as_ref().is_some_and(|tls| !tls.verifies())
        {
            return Err(TransportError::unsupported(&plan.address, NOBODY_KNOWN).into());
        }
        let options = &self.dial;
        #[cfg(feature = "quic")]
        let options = &DialOptions { quic_idle: crate::quic::idle_for(self.keep_alive), ..options.clone() };
        let channel = dial(&plan.address, options).await?;
        Ok(std::sync::Arc::new(self.client(channel, plan.key, plan.forward).await?))
    }

    async fn client(
        &self,
        mut channel: Channel,
        key: String,
        forward: Vec<String>,
    ) -> Result<ClientSession, ConnectError> {
        let handshake = self.handshake(key, forward, channel.security());
        let hands = dial_hands(&mut channel, handshake).await;
        #[cfg(feature = "exec")]
        let hands = match hands {
            Err(error) => Err(crate::child::explain(error, channel.guard()).await),
            hands => hands,
        };
        if let (Err(error), Some(connection)) = (&hands, &channel.security().connection)
            && error.hop() == 0
        {
            // Not the server has said so: perhaps the connection leads nowhere any more.
            connection.suspect();
        }
        let (negotiated, input) = hands?;
        if let Some(connection) = &channel.security().connection {
            connection.prove(DIALLER, &negotiated.identity);
        }
        Ok(ClientSession::spawn(channel, &negotiated, input, self.link()))
    }

    /// What is dialled, which key the target must have, and what the dialled one is to forward to.
    pub(crate) fn plan(&self, first: &str, further: &[String]) -> Result<Plan, ConnectError> {
        let target: Address = further.last().map_or(first, String::as_str).parse()?;
        let key = target.key().map_or_else(|| self.key.clone(), str::to_owned);
        for hop in further {
            hop.parse::<Address>()?;
        }
        let address = first.parse::<Address>()?.without_key();
        let mut forward = further.to_vec();
        if let Some(last) = forward.last_mut() {
            *last = target.without_key().to_string();
        }
        Ok(Plan { address, key, forward })
    }

    fn handshake(&self, key: String, forward: Vec<String>, security: &Security) -> HandshakeConfig {
        let mut hello = Hello::new(Role::Client);
        hello.key = key;
        hello.workspace.clone_from(&self.workspace);
        hello.ticket.clone_from(&self.ticket);
        hello.forward = forward;
        hello.keep_alive_ms = self.keep_alive.as_millis() as u64;
        self.limits.apply(&mut hello);
        let identities = of_dialler(&self.dial.tokens, security);
        HandshakeConfig { hello, identities, hold: false, timeout: self.handshake_timeout }
    }

    /// The key that the server must have, if any.
    pub(crate) fn asked_key(&self) -> Option<&str> {
        (!self.key.is_empty()).then_some(&self.key)
    }

    pub(crate) fn link(&self) -> LinkConfig {
        LinkConfig { keep_alive: self.keep_alive }
    }
}

#[cfg(feature = "tls")]
const NOBODY_KNOWN: &str = "whose certificate is not checked need a token, by which the server is known";

/// See [`Connector::plan`].
pub(crate) struct Plan {
    pub(crate) address: Address,
    pub(crate) key: String,
    pub(crate) forward: Vec<String>,
}

impl Default for Connector {
    fn default() -> Self {
        Self::new()
    }
}

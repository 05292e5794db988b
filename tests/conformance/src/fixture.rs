//! Fixtures: where sessions under test come from. [`Local`] is this process, [`Remote`] is any way
//! of links to an origin.

use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, Session, SessionLimits, SharedSession};
use rpc_transports::{
    Access, Bind, Certificate, ClientTls, Connector, Dial, OpenRequest, RetryPolicy, RetrySession, ServeOptions,
    Server, ServerTls, Tokens, TokioSpawner, Transports, WireLimits,
};
use tokio::runtime::Handle;

use crate::functions;

/// A future in a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Makes the functions of an origin: [`functions::registry`], and whatever clauses of your own
/// need.
pub type MakeRegistry = fn() -> Registry;

/// One way to get sessions whose origin serves [`functions::registry`].
///
/// One fixture serves one test: what it starts ends when it is dropped. It is made within the
/// test's tokio runtime.
pub trait Fixture: Send + Sync + 'static {
    /// Returns a new session with these limits, connected asynchronously. It holds nothing yet.
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session>;

    /// Returns a new session with these limits, connected by the blocking form. Called on a plain
    /// thread.
    fn blocking_session(&self, limits: SessionLimits) -> Session;

    /// Returns the number of links between the client and the origin, which errors of the origin
    /// name as their hop.
    fn hops(&self) -> u16;
}

/// A [`LocalSession`] of this process.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    registry: MakeRegistry,
    spawner: bool,
}

impl Default for Local {
    fn default() -> Self {
        Self::new()
    }
}

impl Local {
    /// Makes sessions that run asynchronous functions on threads of their own.
    pub fn new() -> Self {
        // Blocking forms recognise the threads of a runtime once the transports have said how; a
        // server does that.
        drop(Server::new(Arc::new(refuse), ServeOptions::default()));
        Self { registry: functions::registry, spawner: false }
    }

    /// Makes sessions that run asynchronous functions on the runtime of the test.
    pub fn spawning() -> Self {
        Self { spawner: true, ..Self::new() }
    }

    /// Serves other functions than those of the suite alone.
    #[must_use]
    pub fn registry(self, registry: MakeRegistry) -> Self {
        Self { registry, ..self }
    }

    fn make(&self, limits: SessionLimits, runtime: Option<Handle>) -> Session {
        let builder = LocalSession::builder((self.registry)()).limits(limits);
        Session::new(match runtime {
            Some(_) if self.spawner => builder.spawner(Arc::new(TokioSpawner::current())).build(),
            _ => builder.build(),
        })
    }
}

impl Fixture for Local {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        Box::pin(async move { self.make(limits, Handle::try_current().ok()) })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        self.make(limits, None)
    }

    fn hops(&self) -> u16 {
        0
    }
}

/// The sessions of another fixture, each in a [`RetrySession`].
pub struct Retrying {
    next: Arc<dyn Fixture>,
    /// Runtime of the test, which the attempts run on.
    runtime: Handle,
}

impl Retrying {
    /// Wraps the sessions of `next`.
    pub fn new(next: impl Fixture) -> Self {
        Self { next: Arc::new(next), runtime: Handle::current() }
    }
}

impl fmt::Debug for Retrying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Retrying")
    }
}

impl Fixture for Retrying {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        let next = self.next.session(limits);
        Box::pin(async move { Session::new(RetrySession::new(next.await.shared().clone(), RetryPolicy::default())) })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        // The attempts are tasks, whatever waits for them.
        self.runtime.block_on(self.session(limits))
    }

    fn hops(&self) -> u16 {
        self.next.hops()
    }
}

/// Opens the sessions of an origin.
fn open(registry: Registry, limits: &SessionLimits) -> LocalSession {
    let builder = LocalSession::builder(registry).limits(limits.clone());
    builder.spawner(Arc::new(TokioSpawner::current())).build()
}

/// Opens no session: for servers that only forward.
fn refuse(_: &OpenRequest) -> Result<SharedSession, RpcError> {
    Err(RpcError::new(ErrorKind::Refused, "this server only forwards"))
}

/// Credentials of encrypted transports: a certificate for this machine.
struct Credentials {
    server: ServerTls,
    pem: String,
}

static CREDENTIALS: LazyLock<Credentials> = LazyLock::new(|| {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let pem = made.cert.pem();
    let certificate = Certificate::from_pem(pem.as_bytes(), made.signing_key.serialize_pem().as_bytes()).unwrap();
    Credentials { server: ServerTls::new(certificate, None).unwrap(), pem }
});

/// Returns the options with which servers along `links` are dialled. Each session has its own:
/// another session's connection may lead to a server that has gone, and whose port a new one has by
/// now.
fn dial_options(links: &[Link]) -> Dial {
    if !links.iter().any(|link| link.encrypted) {
        return Dial::default();
    }
    Dial {
        tls: Some(ClientTls::new(CREDENTIALS.pem.as_bytes(), None).unwrap()),
        tokens: Tokens::parse("0123456789abcdef0123456789abcdef").unwrap(),
        ..Dial::default()
    }
}

/// Makes a server whose sessions, and whose links, have these limits.
fn origin(registry: MakeRegistry, limits: &SessionLimits, options: ServeOptions) -> Server {
    let limits = limits.clone();
    let factory = move |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(open(registry(), &limits))) };
    Server::new(Arc::new(factory), options)
}

fn serve_options(limits: &SessionLimits, onward: &Dial, transports: &Transports) -> ServeOptions {
    let defaults = WireLimits::default();
    let requests = u32::try_from(limits.max_requests).unwrap_or(u32::MAX);
    // Large enough for the largest call of the suite.
    let max_message = (limits.max_queued_bytes as u64).clamp(8 << 20, defaults.max_message);
    let limits = WireLimits { max_requests: requests, max_message, window: max_message, ..defaults };
    let access = Access { anonymous: onward.tokens.is_empty(), tokens: onward.tokens.clone(), certificates: false };
    ServeOptions {
        limits,
        transports: transports.clone(),
        access,
        onward: onward.clone(),
        allow_forward: ["*", "unix:*", "exec:*", "memory:*"].map(str::to_owned).into(),
        ..ServeOptions::default()
    }
}

/// One link on the way to an origin: the address at which the server at its far end listens.
#[derive(Clone, Debug)]
pub struct Link {
    address: LinkAddress,
    encrypted: bool,
    dials_blocking: bool,
}

#[derive(Clone, Debug)]
enum LinkAddress {
    /// An address that several servers can listen on at once, such as one with port 0.
    Shared(String),
    /// An address made from a folder of the test's own and a number, which no other server has.
    Unique(fn(&Path, u64) -> String),
    /// The path of a program that is the origin, over its standard input and output.
    Program(String),
}

impl Link {
    fn new(address: LinkAddress) -> Self {
        Self { address, encrypted: false, dials_blocking: true }
    }

    /// Makes a link to an address that any number of servers can listen on at once: `tcp://127.0.0.1:0`. Clients dial
    /// the address that [`Server::listen`] returns.
    pub fn at(address: impl Into<String>) -> Self {
        Self::new(LinkAddress::Shared(address.into()))
    }

    /// Makes a link to an address of each server's own, which is made from a folder that exists as
    /// long as the fixture does, and a number.
    pub fn unique(address: fn(folder: &Path, number: u64) -> String) -> Self {
        Self::new(LinkAddress::Unique(address))
    }

    /// Makes a link to a program that calls [`serve_stdio`], at this path. It must be the last one.
    pub fn program(path: impl Into<String>) -> Self {
        Self::new(LinkAddress::Program(path.into()))
    }

    /// Has the servers of this link present a certificate, and all clients of the fixture trust it
    /// and prove a token.
    #[must_use]
    pub fn encrypted(self) -> Self {
        Self { encrypted: true, ..self }
    }

    /// Has blocking clients use an asynchronous connection: for transports whose servers run in the
    /// dialling process only.
    #[must_use]
    pub fn without_blocking_dial(self) -> Self {
        Self { dials_blocking: false, ..self }
    }

    /// Makes a link of the transport `memory:`.
    pub fn memory() -> Self {
        // The folder's name makes it unique in the process.
        let name =
            |folder: &Path, number| format!("memory:{}-{number}", folder.display().to_string().replace('/', "-"));
        Self::unique(name).without_blocking_dial()
    }

    /// Makes a link of the transport `tcp://`.
    pub fn tcp() -> Self {
        Self::at("tcp://127.0.0.1:0")
    }

    /// Makes a link of the transport `tls://`, with a token.
    pub fn tls() -> Self {
        Self::at("tls://127.0.0.1:0").encrypted()
    }

    /// Makes a link of the transport `quic://`, with a token.
    pub fn quic() -> Self {
        Self::at("quic://127.0.0.1:0").encrypted()
    }

    /// Makes a link of the transport `unix:`.
    pub fn unix() -> Self {
        Self::unique(|folder, number| format!("unix:{}", folder.join(number.to_string()).display()))
    }
}

/// Sessions at the end of any number of links, with a server that forwards between any two.
///
/// Servers run in the test's own process and runtime, but for the program of [`Link::program`].
pub struct Remote {
    /// Links from the client to the origin; at least one.
    links: Vec<Link>,
    transports: Transports,
    registry: MakeRegistry,
    runtime: Handle,
    folder: tempfile::TempDir,
    next: AtomicU64,
    servers: Mutex<Vec<Server>>,
    /// Time for which clients and servers look for input before they wait.
    spin: Duration,
}

impl Remote {
    /// Makes sessions with an origin that is reached at once.
    pub fn direct(link: Link) -> Self {
        Self::through(0, link)
    }

    /// Makes sessions with an origin behind so many servers that forward, each reached by the same
    /// transport. In front of a program they are reached by TCP.
    pub fn through(hops: u16, link: Link) -> Self {
        let hop = if let LinkAddress::Program(_) = link.address { Link::tcp() } else { link.clone() };
        let mut links = vec![hop; usize::from(hops)];
        links.push(link);
        Self::along(links)
    }

    /// Makes sessions with an origin at the end of a chain of these links.
    ///
    /// # Panics
    ///
    /// There is no link, or no folder can be made for sockets.
    pub fn along(links: impl Into<Vec<Link>>) -> Self {
        let links = links.into();
        assert!(!links.is_empty(), "an origin is reached by a link");
        let folder = tempfile::tempdir().expect("a folder for sockets");
        let (next, servers) = (AtomicU64::new(0), Mutex::default());
        Self {
            links,
            transports: Transports::default(),
            registry: functions::registry,
            runtime: Handle::current(),
            folder,
            next,
            servers,
            spin: Duration::ZERO,
        }
    }

    /// Uses these transports in all clients and servers, in place of those of `rpc-transports`
    /// alone.
    #[must_use]
    pub fn transports(mut self, transports: Transports) -> Self {
        self.transports = transports;
        self
    }

    /// Serves other functions than those of the suite alone. A program of [`Link::program`] has its
    /// own.
    #[must_use]
    pub fn registry(mut self, registry: MakeRegistry) -> Self {
        self.registry = registry;
        self
    }

    /// Has clients and servers look for input before they wait
    /// ([`SPIN`](rpc_transports::SPIN)).
    #[must_use]
    pub fn spinning(mut self) -> Self {
        self.spin = rpc_transports::SPIN;
        self
    }

    fn serve_options(&self, limits: &SessionLimits, onward: &Dial) -> ServeOptions {
        ServeOptions { spin: self.spin, ..serve_options(limits, onward, &self.transports) }
    }

    async fn listen(&self, server: Server, address: &str, encrypted: bool) -> String {
        let mut options = Bind::default();
        if encrypted {
            options.tls = Some(CREDENTIALS.server.clone());
        }
        let address = server.listen(&address.parse().unwrap(), &options).await.unwrap();
        self.servers.lock().unwrap().push(server);
        address.to_string()
    }

    /// Starts a server at the far end of `link`, and returns the address to dial.
    async fn serve(&self, link: &Link, limits: &SessionLimits, server: impl FnOnce() -> Server) -> String {
        match &link.address {
            LinkAddress::Shared(address) => self.listen(server(), address, link.encrypted).await,
            LinkAddress::Unique(address) => {
                let address = address(self.folder.path(), self.next.fetch_add(1, Ordering::Relaxed));
                self.listen(server(), &address, link.encrypted).await
            }
            LinkAddress::Program(path) => {
                let SessionLimits { max_requests, max_queued_bytes, max_handles, max_memory, .. } = limits;
                format!("exec:{path} {max_requests} {max_queued_bytes} {max_handles} {max_memory}")
            }
        }
    }

    /// Starts all servers of one session, and returns how and where to connect.
    async fn prepare(&self, limits: &SessionLimits) -> (Connector, String) {
        let dial = dial_options(&self.links);
        let mut connector = Connector::new().transports(self.transports.clone()).dial(dial.clone()).spin(self.spin);
        let (last, hops) = self.links.split_last().expect("at least one link");
        for link in hops {
            let hop = || Server::new(Arc::new(refuse), self.serve_options(limits, &dial));
            connector = connector.via(&self.serve(link, limits, hop).await);
        }
        let origin = || origin(self.registry, limits, self.serve_options(limits, &dial));
        let target = self.serve(last, limits, origin).await;
        (connector, target)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("links", &self.links).finish_non_exhaustive()
    }
}

impl Fixture for Remote {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        Box::pin(async move {
            let (connector, target) = self.prepare(&limits).await;
            connector.connect(&target).await.unwrap()
        })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        let (connector, target) = self.runtime.block_on(self.prepare(&limits));
        if self.links[0].dials_blocking {
            connector.connect_blocking(&target).unwrap()
        } else {
            self.runtime.block_on(connector.connect(&target)).unwrap()
        }
    }

    fn hops(&self) -> u16 {
        self.links.len() as u16
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        for server in self.servers.lock().unwrap().drain(..) {
            server.stop();
        }
    }
}

/// Serves one session over standard input and output: the `main` of the program of a
/// [`Link::program`]. The arguments are the limits of the session.
///
/// # Panics
///
/// Standard input and output are no channel.
pub async fn serve_stdio(mut args: impl Iterator<Item = String>, registry: Registry) {
    let mut number = || args.next().and_then(|arg| arg.parse::<u64>().ok());
    let mut limits = SessionLimits::default();
    if let (Some(requests), Some(bytes), Some(handles), Some(memory)) = (number(), number(), number(), number()) {
        limits.max_requests = requests as usize;
        limits.max_queued_bytes = bytes as usize;
        limits.max_handles = handles as usize;
        limits.max_memory = memory;
    }
    let options = serve_options(&limits, &Dial::default(), &Transports::default());
    let factory =
        move |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(open(registry.clone(), &limits))) };
    let server = Server::new(Arc::new(factory), options);
    server.serve_channel(rpc_transports::exec::stdio_channel().await.unwrap());
    server.idle().await;
}

//! Where sessions under test come from. A new transport is a new [`Fixture`], and one line in `tests/conformance.rs`.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use rpc_core::{ErrorKind, LocalSession, RpcError, Session, SessionLimits, SharedSession};
use rpc_transports::{
    Access, Certificate, ClientTls, Connector, DialOptions, ListenOptions, OpenRequest, ServeOptions, Server,
    ServerTls, Tokens, TokioSpawner, WireLimits,
};
use tokio::runtime::Handle;

use crate::functions;

/// A future in a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One way to get sessions whose origin serves [`functions::registry`].
///
/// One fixture serves one test: what it starts ends when it is dropped.
pub trait Fixture: Send + Sync + 'static {
    /// A new session, connected asynchronously. It holds nothing yet.
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session>;

    /// A new session, connected on a plain thread by the blocking form.
    fn blocking_session(&self, limits: SessionLimits) -> Session;

    /// How many links lie between the client and the origin.
    fn hops(&self) -> u16;
}

/// [`LocalSession`].
#[derive(Debug, Default)]
pub struct Local {
    spawner: bool,
}

impl Local {
    /// Sessions that run asynchronous functions on threads of their own.
    pub fn new() -> Self {
        // Whoever brings a runtime says how to tell its threads; here that is the crate of the transports.
        drop(Server::new(Arc::new(refuse), ServeOptions::default()));
        Self { spawner: false }
    }

    /// Sessions that run asynchronous functions on the runtime of the test.
    pub fn spawning() -> Self {
        let mut local = Self::new();
        local.spawner = true;
        local
    }

    fn make(&self, limits: SessionLimits, runtime: Option<Handle>) -> Session {
        let builder = LocalSession::builder(functions::registry()).limits(limits);
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

/// Opens the sessions of an origin.
fn open(limits: &SessionLimits) -> LocalSession {
    let builder = LocalSession::builder(functions::registry()).limits(limits.clone());
    builder.spawner(Arc::new(TokioSpawner::current())).build()
}

/// Opens none: for servers that only forward.
fn refuse(_: &OpenRequest) -> Result<SharedSession, RpcError> {
    Err(RpcError::new(ErrorKind::Refused, "this server only forwards"))
}

/// What encrypted transports need: a certificate for this machine, and a token.
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

/// The options with which servers on the way along `links` are dialled. Those of one session are its own: another one's
/// connection may lead to a server that has gone, and whose port a new one has by now.
fn dial_options(links: &[Transport]) -> DialOptions {
    if !links.iter().any(|link| link.is_encrypted()) {
        return DialOptions::default();
    }
    DialOptions {
        tls: Some(ClientTls::new(CREDENTIALS.pem.as_bytes(), None).unwrap()),
        tokens: Tokens::parse("0123456789abcdef0123456789abcdef").unwrap(),
        ..DialOptions::default()
    }
}

/// A server whose sessions, and whose links, have these limits.
pub fn server(limits: &SessionLimits) -> Server {
    origin(limits, serve_options(limits, &DialOptions::default()))
}

fn origin(limits: &SessionLimits, options: ServeOptions) -> Server {
    let limits = limits.clone();
    let factory = move |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(open(&limits))) };
    Server::new(Arc::new(factory), options)
}

fn serve_options(limits: &SessionLimits, onward: &DialOptions) -> ServeOptions {
    let defaults = WireLimits::default();
    let requests = u32::try_from(limits.max_requests).unwrap_or(u32::MAX);
    // Large enough for the largest call of the suite.
    let max_message = (limits.max_queued_bytes as u64).clamp(8 << 20, defaults.max_message);
    let limits = WireLimits { max_requests: requests, max_message, window: max_message, ..defaults };
    let access = Access { anonymous: onward.tokens.is_empty(), tokens: onward.tokens.clone(), certificates: false };
    ServeOptions {
        limits,
        access,
        onward: onward.clone(),
        allow_forward: ["*", "unix:*", "exec:*", "memory:*"].map(str::to_owned).into(),
        ..ServeOptions::default()
    }
}

/// How an origin is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// `memory:`. Blocking forms use an asynchronous connection.
    Memory,
    /// `tcp://`
    Tcp,
    /// `tls://`, with a token
    Tls,
    /// `quic://`, with a token
    Quic,
    /// `unix:`
    Unix,
    /// `exec:` of the program at this path, which is this package's `origin`.
    Exec(&'static str),
}

impl Transport {
    fn is_encrypted(self) -> bool {
        matches!(self, Self::Tls | Self::Quic)
    }
}

/// Sessions over a transport, through any number of hops.
///
/// Servers run in the test's own process and runtime, but for `exec:`.
pub struct Remote {
    /// From the client to the origin.
    links: Vec<Transport>,
    runtime: Handle,
    folder: tempfile::TempDir,
    next: AtomicU64,
    servers: Mutex<Vec<Server>>,
}

impl Remote {
    /// Sessions with an origin that is reached at once.
    pub fn direct(transport: Transport) -> Self {
        Self::through(0, transport)
    }

    /// Sessions with an origin behind so many servers that forward, each reached by the same transport. In front of a
    /// child process they are reached by TCP.
    pub fn through(hops: u16, transport: Transport) -> Self {
        let hop = if let Transport::Exec(_) = transport { Transport::Tcp } else { transport };
        let mut links = vec![hop; usize::from(hops)];
        links.push(transport);
        Self::along(&links)
    }

    /// Sessions with an origin at the end of a chain of these links, with a server that forwards between any two.
    pub fn along(links: &[Transport]) -> Self {
        let folder = tempfile::tempdir().expect("a folder for sockets");
        let (next, servers) = (AtomicU64::new(0), Mutex::default());
        Self { links: links.to_vec(), runtime: Handle::current(), folder, next, servers }
    }

    fn last_link(&self) -> Transport {
        *self.links.last().expect("an origin is reached somehow")
    }

    async fn listen(&self, server: Server, transport: Transport) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let address = match transport {
            // The folder's name makes it unique in the process.
            Transport::Memory => {
                format!("memory:{}-{number}", self.folder.path().display().to_string().replace('/', "-"))
            }
            Transport::Unix => format!("unix:{}", self.folder.path().join(format!("{number}")).display()),
            Transport::Tcp | Transport::Exec(_) => "tcp://127.0.0.1:0".to_owned(),
            Transport::Tls => "tls://127.0.0.1:0".to_owned(),
            Transport::Quic => "quic://127.0.0.1:0".to_owned(),
        };
        let mut options = ListenOptions::default();
        if transport.is_encrypted() {
            options.tls = Some(CREDENTIALS.server.clone());
        }
        let address = server.listen(&address.parse().unwrap(), &options).await.unwrap();
        self.servers.lock().unwrap().push(server);
        address.to_string()
    }

    /// Starts what serves one session; how to connect to it, and where.
    async fn prepare(&self, limits: &SessionLimits) -> (Connector, String) {
        let dial = dial_options(&self.links);
        let mut connector = Connector::new().dial_options(dial.clone());
        for link in &self.links[..self.links.len() - 1] {
            let hop = Server::new(Arc::new(refuse), serve_options(limits, &dial));
            connector = connector.via(&self.listen(hop, *link).await);
        }
        let target = match self.last_link() {
            Transport::Exec(program) => {
                let SessionLimits { max_requests, max_queued_bytes, max_handles, max_memory, .. } = limits;
                format!("exec:{program} {max_requests} {max_queued_bytes} {max_handles} {max_memory}")
            }
            transport => self.listen(origin(limits, serve_options(limits, &dial)), transport).await,
        };
        (connector, target)
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
        match self.links[0] {
            Transport::Memory => self.runtime.block_on(connector.connect(&target)).unwrap(),
            _ => connector.connect_blocking(&target).unwrap(),
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

/// Serves one session over standard input and output: the `main` of an origin in a process of its own.
pub async fn serve_stdio(mut args: impl Iterator<Item = String>) {
    let mut number = || args.next().and_then(|arg| arg.parse::<u64>().ok());
    let mut limits = SessionLimits::default();
    if let (Some(requests), Some(bytes), Some(handles), Some(memory)) = (number(), number(), number(), number()) {
        limits.max_requests = requests as usize;
        limits.max_queued_bytes = bytes as usize;
        limits.max_handles = handles as usize;
        limits.max_memory = memory;
    }
    let channel = rpc_transports::exec::stdio_channel().await.unwrap();
    let server = server(&limits);
    server.serve_channel(channel);
    server.idle().await;
}

//! Servers in the test's own process, each with an authority of its own, and their good clients.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rpc_core::{LocalSession, Registry, RpcError, Session, SessionLimits, SharedSession};
use rpc_tests::functions;
use rpc_transports::{
    Bind, Certificate, ClientTls, Connector, OpenRequest, ServeOptions, Server, ServerTls, Tokens, TokioSpawner,
};
use tokio::task::JoinHandle;

use super::{Transport, within};

/// Time limit of each step, longer than any takes: a step that needs more hangs.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

pub const SECRET: &str = "0123456789abcdef0123456789abcdef";

pub async fn soon<F: IntoFuture>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(TIME_LIMIT, future.into_future())
        .await
        .unwrap_or_else(|_| panic!("{what}: not after {TIME_LIMIT:?}"))
}

/// Authority that issues certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "authority");
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    pub fn issue(&self, host: &str, change: impl FnOnce(&mut CertificateParams)) -> Certificate {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "somebody");
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        Certificate::from_pem(pem.as_bytes(), key.serialize_pem().as_bytes()).unwrap()
    }

    /// Issues a certificate for a server at this host.
    pub fn server(&self, host: &str) -> ServerTls {
        ServerTls::new(self.issue(host, |_| {}), None).unwrap()
    }

    pub fn trust(&self) -> ClientTls {
        ClientTls::new(self.pem.as_bytes(), None).unwrap()
    }
}

/// A server on one transport. It stops when this value is dropped.
pub struct Site {
    pub server: Server,
    pub address: String,
    pub authority: Arc<Authority>,
    keep_alive: Duration,
    _folder: tempfile::TempDir,
}

impl Site {
    /// Starts a server of the test functions, with an authority of its own.
    pub async fn new(transport: Transport, options: ServeOptions) -> Self {
        Self::serving(transport, options, functions::registry()).await
    }

    /// Starts a server of these functions.
    pub async fn serving(transport: Transport, options: ServeOptions, registry: Registry) -> Self {
        Self::at("127.0.0.1", transport, options, registry, Arc::new(Authority::new())).await
    }

    /// Starts a server at this host, with a certificate of `authority`.
    pub async fn at(
        host: &str,
        transport: Transport,
        options: ServeOptions,
        registry: Registry,
        authority: Arc<Authority>,
    ) -> Self {
        let (keep_alive, mut limits) = (options.keep_alive, SessionLimits::default());
        limits.max_requests = limits.max_requests.max(options.limits.max_requests as usize);
        let open = move |_: &OpenRequest| -> Result<SharedSession, RpcError> {
            let builder = LocalSession::builder(registry.clone()).limits(limits.clone());
            Ok(Arc::new(builder.spawner(Arc::new(TokioSpawner::current())).build()))
        };
        let server = Server::new(Arc::new(open), options);
        let folder = tempfile::tempdir().unwrap();
        let address = match transport {
            Transport::Unix => format!("unix:{}", folder.path().join("socket").display()),
            other => format!("{}://{host}:0", other.scheme()),
        };
        let listen = Bind { tls: Some(authority.server(host)), ..Bind::default() };
        let address = server.listen(&address.parse().unwrap(), &listen).await.unwrap().to_string();
        Self { server, address, authority, keep_alive, _folder: folder }
    }

    /// Returns the connector of a good client, with a connection of its own. It notices silence as
    /// soon as the server does.
    pub fn connector(&self) -> Connector {
        let connector = Connector::new().tls(self.authority.trust()).keep_alive(self.keep_alive);
        connector.connect_timeout(TIME_LIMIT).handshake_timeout(TIME_LIMIT)
    }

    pub fn with_token(&self) -> Connector {
        self.connector().tokens(tokens(SECRET))
    }

    pub fn socket_address(&self) -> SocketAddr {
        self.address.split_once("://").unwrap().1.parse().unwrap()
    }

    /// Checks that all sessions end and nothing is left of them.
    pub async fn is_empty(&self) {
        within(TIME_LIMIT, "all sessions end", async || self.server.sessions() == 0).await;
        soon("the server is idle", self.server.idle()).await;
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.server.stop();
    }
}

pub fn tokens(text: &str) -> Tokens {
    Tokens::parse(text).unwrap()
}

pub async fn works(session: &Session) {
    let add = soon("get", session.function::<(i64, i64), i64>("add")).await.unwrap();
    assert_eq!(soon("call", add.call((20, 22))).await.unwrap(), 42);
}

/// Good client, which calls and connects anew without end, and must never be disturbed.
pub struct GoodClient {
    over: Arc<AtomicBool>,
    calls: JoinHandle<u64>,
}

impl GoodClient {
    pub fn start(connector: Connector, address: &str) -> Self {
        let (over, address) = (Arc::new(AtomicBool::new(false)), address.to_owned());
        let seen = over.clone();
        let calls = tokio::spawn(async move {
            let session = soon("the good client connects", connector.connect(&address)).await.unwrap();
            let mut calls = 0;
            while calls == 0 || !seen.load(Ordering::Acquire) {
                works(&session).await;
                works(&soon("it connects again", connector.connect(&address)).await.unwrap()).await;
                calls += 1;
            }
            calls
        });
        Self { over, calls }
    }

    pub async fn stays_unharmed(self) {
        self.over.store(true, Ordering::Release);
        assert!(soon("the good client", self.calls).await.unwrap() > 0);
    }
}

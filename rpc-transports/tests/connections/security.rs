//! Authentication: tokens and certificates over every transport where they make sense.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd};
use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Access, Address, AddressError, Bind, BoxFuture, Certificate, Channel, ClientCertificates, ClientTls, ConnectError,
    Connector, Dial, OpenRequest, Properties, Reach, ServeObserver, ServeOptions, Server, ServerTls, Tokens, Transport,
    TransportError, Transports,
};
use tokio::io::copy_bidirectional;

/// Certificate authority of a test.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

struct Issued {
    pem: String,
    key: String,
}

impl Issued {
    fn certificate(&self) -> Certificate {
        Certificate::from_pem(self.pem.as_bytes(), self.key.as_bytes()).unwrap()
    }
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "authority");
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn issue(&self, name: &str, hosts: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let mut params = CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        Issued { pem, key: key.serialize_pem() }
    }

    fn server(&self) -> Issued {
        self.issue("server", &["localhost", "127.0.0.1"], |_| {})
    }

    fn client(&self, name: &str) -> Issued {
        self.issue(name, &["client"], |_| {})
    }

    fn trust(&self) -> ClientTls {
        ClientTls::new(self.pem.as_bytes(), None).unwrap()
    }
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";
const OTHER: &str = "fedcba9876543210fedcba9876543210";

fn tokens(text: &str) -> Tokens {
    Tokens::parse(text).unwrap()
}

/// Server whose function `whoami` returns the identity of its client.
fn server(access: Access) -> Server {
    let open = |request: &OpenRequest| -> Result<SharedSession, RpcError> {
        let (registry, identity) = (Registry::new(), request.identity.clone());
        registry.add_inline("whoami", move || identity.clone());
        Ok(Arc::new(LocalSession::new(registry)))
    };
    Server::new(Arc::new(open), ServeOptions { access, ..ServeOptions::default() })
}

async fn listen(server: &Server, scheme: &str, tls: Option<&ServerTls>) -> String {
    let address: Address = format!("{scheme}://127.0.0.1:0").parse().unwrap();
    let options = Bind { tls: tls.cloned(), ..Bind::default() };
    server.listen(&address, &options).await.unwrap().to_string()
}

async fn whoami(session: &Session) -> String {
    session.function::<(), String>("whoami").await.unwrap().call(()).await.unwrap()
}

fn by_token(text: &str) -> Access {
    Access { anonymous: false, tokens: tokens(text), certificates: false }
}

fn refusal(outcome: Result<Session, ConnectError>) -> RpcError {
    match outcome {
        Err(ConnectError::Session(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn insecure(outcome: Result<Session, ConnectError>) -> String {
    match outcome {
        Err(ConnectError::Transport(error @ TransportError::Insecure { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn unauthenticated(outcome: Result<Session, ConnectError>) {
    match outcome {
        // Over QUIC a client may learn of it already when it connects.
        Err(ConnectError::Transport(TransportError::Unauthenticated { .. })) => {}
        Err(ConnectError::Session(error)) if error.kind() == ErrorKind::Unauthenticated => {}
        other => panic!("{other:?}"),
    }
}

const SECURE: [&str; 2] = ["tls", "quic"];

#[tokio::test]
async fn calls_cross_encrypted_channels_in_both_forms() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(Access::default());
    for scheme in SECURE {
        let address = listen(&server, scheme, Some(&tls)).await;
        let connector = Connector::new().tls(authority.trust());
        let session = connector.connect(&address).await.unwrap();
        assert_eq!(whoami(&session).await, "anonymous");
        let blocking = move || {
            let session = connector.connect_blocking(&address).unwrap();
            session.function::<(), String>("whoami").wait().unwrap().call(()).wait().unwrap()
        };
        assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), "anonymous");
    }
}

#[tokio::test]
async fn a_channel_to_a_server_that_was_not_verified_needs_a_token() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(by_token(SECRET));
    for scheme in SECURE {
        let address: Address = listen(&server, scheme, Some(&tls)).await.parse().unwrap();
        let dial = Dial { tls: Some(ClientTls::unverified(None).unwrap()), ..Dial::default() };
        let transports = Transports::default();
        let channel = transports.dial(&address, &dial).await.unwrap();
        unauthenticated(Connector::new().connect_channel(channel).await);
        let channel = transports.dial(&address, &dial).await.unwrap();
        let session = Connector::new().tokens(tokens(SECRET)).connect_channel(channel).await.unwrap();
        assert!(session.is_encrypted());
        assert_eq!(whoami(&session).await, "token");
        // The security is the channel's own: once taken, the channel claims none.
        let mut channel = transports.dial(&address, &dial).await.unwrap();
        assert!(channel.take_security().is_encrypted());
        assert!(!channel.security().is_encrypted());
    }
}

#[tokio::test]
async fn a_plain_channel_leads_only_to_a_server_that_was_verified() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(by_token(SECRET));
    for scheme in SECURE {
        let address: Address = listen(&server, scheme, Some(&tls)).await.parse().unwrap();
        // The token would be proven in a handshake, which a plain channel need not have.
        let by_token = Connector::new().tokens(tokens(SECRET));
        for connector in [by_token.clone(), by_token.clone().tls(ClientTls::unverified(None).unwrap())] {
            let error = connector.open_channel(&address).await.unwrap_err();
            assert!(matches!(&error, ConnectError::Transport(TransportError::Unsupported { .. })), "{error:?}");
            let text = error.into_rpc_error().to_string();
            assert!(text.contains("Connector::tls"), "{text}");
        }
        let channel = by_token.tls(authority.trust()).open_channel(&address).await.unwrap();
        assert!(channel.security().is_encrypted());
    }
}

/// Transport of `own://` addresses: TLS with trust of its own, which is not that of the connector.
#[derive(Debug)]
struct OwnTrust(ClientTls);

impl Transport for OwnTrust {
    fn schemes(&self) -> &[&str] {
        &["own"]
    }

    fn check(&self, _: &Address) -> Result<Properties, AddressError> {
        Ok(Properties::encrypted(Reach::Network))
    }

    fn dial<'a>(&'a self, to: &'a Address, _: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(async move {
            let with = Dial { tls: Some(self.0.clone()), ..Dial::default() };
            Transports::default().dial(&to.to_string().replace("own:", "tls:").parse()?, &with).await
        })
    }
}

#[tokio::test]
async fn a_transport_that_verifies_no_server_needs_a_token_as_well() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(Access { anonymous: true, ..by_token(SECRET) });
    let address = listen(&server, "tls", Some(&tls)).await.replace("tls:", "own:");
    let with = |trust| Connector::new().transports(Transports::default().with(OwnTrust(trust)));
    let unverified = with(ClientTls::unverified(None).unwrap());
    let error = unverified.connect(&address).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Transport(TransportError::Unsupported { .. })), "{error:?}");
    assert_eq!(whoami(&unverified.tokens(tokens(SECRET)).connect(&address).await.unwrap()).await, "token");
    assert_eq!(whoami(&with(authority.trust()).connect(&address).await.unwrap()).await, "anonymous");
}

#[tokio::test]
async fn no_server_is_trusted_by_default() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(Access::default());
    for scheme in SECURE {
        let address = listen(&server, scheme, Some(&tls)).await;
        let error = Connector::new().connect(&address).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Transport(TransportError::Unsupported { .. })), "{error:?}");
        // Without a check of the certificate, and without a token, any peer could be at the far
        // end.
        let unverified = Connector::new().tls(ClientTls::unverified(None).unwrap());
        let error = unverified.connect(&address).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Transport(TransportError::Unsupported { .. })), "{error:?}");
        let nothing_to_show = server.listen(&address.parse().unwrap(), &Bind::default()).await.unwrap_err();
        assert!(nothing_to_show.to_string().contains("rpc-cli cert"), "{nothing_to_show}");
    }
}

#[tokio::test]
async fn a_server_with_the_wrong_certificate_is_refused() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let long_ago = |params: &mut CertificateParams| {
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
    };
    let server = server(Access::default());
    for scheme in SECURE {
        for (issued, why) in [
            (stranger.server(), "not by the authority"),
            (authority.issue("server", &["elsewhere"], |_| {}), "another name"),
            (authority.issue("server", &["127.0.0.1"], long_ago), "expired"),
        ] {
            let tls = ServerTls::new(issued.certificate(), None).unwrap();
            let address = listen(&server, scheme, Some(&tls)).await;
            let error = insecure(Connector::new().tls(authority.trust()).connect(&address).await);
            assert!(error.contains(why), "{scheme}: {error}");
        }
    }
    assert_eq!(server.sessions(), 0);
}

/// Observer that records why clients were refused.
#[derive(Debug, Default)]
struct Refusals(std::sync::Mutex<Vec<ErrorKind>>, tokio::sync::Notify);

impl ServeObserver for Refusals {
    fn refused(&self, reason: ErrorKind) {
        self.0.lock().unwrap().push(reason);
        self.1.notify_one();
    }
}

#[tokio::test]
async fn clients_that_tls_refuses_are_reported_to_the_observer() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let demand = ClientCertificates { authorities: authority.pem.as_bytes(), optional: false };
    let tls = ServerTls::new(authority.server().certificate(), Some(&demand)).unwrap();
    for scheme in SECURE {
        let refusals = Arc::new(Refusals::default());
        let access = Access { anonymous: false, tokens: Tokens::default(), certificates: true };
        let options = ServeOptions { access, observer: Some(refusals.clone()), ..ServeOptions::default() };
        let server = Server::new(Arc::new(Registry::new()), options);
        let address = listen(&server, scheme, Some(&tls)).await;
        for certificate in [None, Some(stranger.client("mallory").certificate())] {
            let trust = ClientTls::new(authority.pem.as_bytes(), certificate).unwrap();
            unauthenticated(Connector::new().tls(trust).connect(&address).await);
            tokio::time::timeout(Duration::from_secs(20), refusals.1.notified()).await.unwrap();
        }
        assert_eq!(*refusals.0.lock().unwrap(), [ErrorKind::Unauthenticated; 2], "{scheme}");
    }
}

#[tokio::test]
async fn a_client_is_known_by_its_certificate() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let demand = ClientCertificates { authorities: authority.pem.as_bytes(), optional: false };
    let tls = ServerTls::new(authority.server().certificate(), Some(&demand)).unwrap();
    let server = server(Access { anonymous: false, tokens: Tokens::default(), certificates: true });
    for scheme in SECURE {
        let address = listen(&server, scheme, Some(&tls)).await;
        let with = |issued: &Issued| {
            Connector::new().tls(ClientTls::new(authority.pem.as_bytes(), Some(issued.certificate())).unwrap())
        };
        let session = with(&authority.client("alice")).connect(&address).await.unwrap();
        assert_eq!(whoami(&session).await, "alice");
        // A name that could not be that of a folder is replaced by a digest.
        let session = with(&authority.client("../alice")).connect(&address).await.unwrap();
        let name = whoami(&session).await;
        assert!(name.starts_with("subject-") && name.len() == 40, "{name}");
        unauthenticated(with(&stranger.client("alice")).connect(&address).await);
        unauthenticated(Connector::new().tls(authority.trust()).connect(&address).await);
    }
}

#[tokio::test]
async fn a_token_lets_in_over_any_transport() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(by_token(&format!("alice {SECRET}\nbob {OTHER}")));
    for scheme in ["tcp", "tls", "quic"] {
        let address = listen(&server, scheme, Some(&tls)).await;
        // A certificate that was not checked is enough together with a token.
        let plain = Connector::new().tls(ClientTls::unverified(None).unwrap());
        for (secret, name) in [(SECRET, "alice"), (OTHER, "bob")] {
            let connector = plain.clone().tokens(tokens(secret));
            assert_eq!(whoami(&connector.connect(&address).await.unwrap()).await, name, "{scheme}");
            let address = address.clone();
            let blocking = move || {
                let session = connector.connect_blocking(&address).unwrap();
                session.function::<(), String>("whoami").wait().unwrap().call(()).wait().unwrap()
            };
            assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), name);
        }
        let wrong = plain.clone().tokens(tokens("0000000000000000000000000000000000000000"));
        let error = refusal(wrong.connect(&address).await);
        assert_eq!((error.kind(), error.hop()), (ErrorKind::Unauthenticated, 1), "{error}");
        let without = Connector::new().tls(authority.trust());
        assert_eq!(refusal(without.connect(&address).await).kind(), ErrorKind::Unauthenticated);
    }
}

#[tokio::test]
async fn a_client_with_a_token_refuses_a_server_that_does_not_know_it() {
    for (access, tls_verified) in [(Access::default(), false), (by_token(OTHER), false), (by_token(OTHER), true)] {
        let authority = Authority::new();
        let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
        let server = server(access);
        for scheme in ["tcp", "tls", "quic"] {
            let address = listen(&server, scheme, Some(&tls)).await;
            let trust = if tls_verified { authority.trust() } else { ClientTls::unverified(None).unwrap() };
            let error = refusal(Connector::new().tokens(tokens(SECRET)).tls(trust).connect(&address).await);
            assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{scheme}: {error}");
        }
    }
}

/// A man in the middle with a certificate of its own forwards every byte of the protocol.
#[tokio::test]
async fn a_token_is_of_no_use_to_a_man_in_the_middle() {
    let (authority, mallory) = (Authority::new(), Authority::new());
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(by_token(SECRET));
    for scheme in SECURE {
        let address = listen(&server, scheme, Some(&tls)).await;
        let own = ServerTls::new(mallory.server().certificate(), None).unwrap();
        let options = Bind { tls: Some(own), ..Bind::default() };
        let between: Address = format!("{scheme}://127.0.0.1:0").parse().unwrap();
        let mut between = Transports::default().bind(&between, &options).await.unwrap();
        let lure = between.local_address().to_string();
        let target: Address = address.parse().unwrap();
        let relay = tokio::spawn(async move {
            let mut near: Channel = between.accept().await.unwrap();
            near.secure().await.unwrap();
            let options = Dial { tls: Some(ClientTls::unverified(None).unwrap()), ..Dial::default() };
            let mut far = Transports::default().dial(&target, &options).await.unwrap();
            let _ = copy_bidirectional(near.io_mut(), far.io_mut()).await;
        });
        let client = Connector::new().tokens(tokens(SECRET)).tls(ClientTls::unverified(None).unwrap());
        let error = refusal(client.connect(&lure).await);
        assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{scheme}: {error}");
        relay.abort();
        // Without the man in the middle it works.
        assert_eq!(whoami(&client.connect(&address).await.unwrap()).await, "token");
    }
}

#[tokio::test]
async fn access_can_change_while_a_server_runs() {
    let (old, new) = (Authority::new(), Authority::new());
    let tls = ServerTls::new(old.server().certificate(), None).unwrap();
    let server = server(by_token(SECRET));
    for scheme in SECURE {
        server.set_access(by_token(SECRET));
        tls.replace(old.server().certificate(), None).unwrap();
        let address = listen(&server, scheme, Some(&tls)).await;
        let connector = |authority: &Authority, text| Connector::new().tokens(tokens(text)).tls(authority.trust());
        let (with_old, with_new) = (connector(&old, SECRET), connector(&new, OTHER));
        let session = with_old.connect(&address).await.unwrap();
        server.set_access(by_token(OTHER));
        // Also on a connection on which the client had proven itself before.
        assert_eq!(refusal(with_old.connect(&address).await).kind(), ErrorKind::Unauthenticated);
        tls.replace(new.server().certificate(), None).unwrap();
        assert_eq!(whoami(&with_new.connect(&address).await.unwrap()).await, "token");
        // Existing sessions stay.
        assert_eq!(whoami(&session).await, "token");
    }
}

#[tokio::test]
async fn an_open_connection_does_not_extend_the_life_of_a_certificate() {
    let (old, new) = (Authority::new(), Authority::new());
    fn demand(authority: &Authority) -> ClientCertificates<'_> {
        ClientCertificates { authorities: authority.pem.as_bytes(), optional: false }
    }
    let tls = ServerTls::new(old.server().certificate(), Some(&demand(&old))).unwrap();
    let access = Access { anonymous: false, tokens: Tokens::default(), certificates: true };
    let server = server(access.clone());
    let address = listen(&server, "quic", Some(&tls)).await;
    let trust = ClientTls::new(old.pem.as_bytes(), Some(old.client("alice").certificate())).unwrap();
    let alice = Connector::new().tls(trust);
    let session = alice.connect(&address).await.unwrap();
    alice.connect(&address).await.unwrap();
    // As by a server that reads its files again. Certificates that have not changed stay valid.
    tls.replace(old.server().certificate(), Some(&demand(&old))).unwrap();
    server.set_access(access.clone());
    alice.connect(&address).await.unwrap();
    tls.replace(old.server().certificate(), Some(&demand(&new))).unwrap();
    server.set_access(access);
    assert_eq!(refusal(alice.connect(&address).await).kind(), ErrorKind::Unauthenticated);
    assert_eq!(whoami(&session).await, "alice");
}

#[test]
fn each_runtime_has_connections_of_its_own() {
    let (serving, resting) = (tokio::runtime::Runtime::new().unwrap(), tokio::runtime::Builder::new_current_thread());
    let resting = { resting }.enable_all().build().unwrap();
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = serving.block_on(async { server(Access::default()) });
    let address = serving.block_on(listen(&server, "quic", Some(&tls)));
    let connector = Connector::new().tls(authority.trust());
    let session = resting.block_on(connector.connect(&address)).unwrap();
    // The runtime of the first connection is gone.
    let blocking = connector.connect_blocking(&address).unwrap();
    let whoami_blocking = blocking.function::<(), String>("whoami").wait().unwrap();
    assert_eq!(whoami_blocking.call(()).wait().unwrap(), "anonymous");
    assert_eq!(resting.block_on(whoami(&session)), "anonymous");
}

#[tokio::test]
async fn sessions_on_one_connection_prove_an_identity_once_and_do_not_mix() {
    let authority = Authority::new();
    let tls = ServerTls::new(authority.server().certificate(), None).unwrap();
    let server = server(by_token(&format!("alice {SECRET}\nbob {OTHER}")));
    let address = listen(&server, "quic", Some(&tls)).await;
    let trust = authority.trust();
    let alice = Connector::new().tokens(tokens(SECRET)).tls(trust.clone());
    let bob = Connector::new().tokens(tokens(OTHER)).tls(trust);
    let mut sessions = Vec::new();
    for _ in 0..20 {
        let (hers, his) = (alice.connect(&address).await.unwrap(), bob.connect(&address).await.unwrap());
        assert_eq!((&*whoami(&hers).await, &*whoami(&his).await), ("alice", "bob"));
        sessions.extend([hers, his]);
    }
    assert_eq!(server.sessions(), 40);
    drop(sessions);
    tokio::time::timeout(Duration::from_secs(10), server.idle()).await.unwrap();
}

/// Regression: over QUIC, a port on which no server listens was an error only when the whole time
/// for connecting was over.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_closed_port_refuses_a_quic_client() {
    let trust = ClientTls::new(Authority::new().pem.as_bytes(), None).unwrap();
    let connector = Connector::new().tls(trust).connect_timeout(Duration::from_secs(3600));
    let outcome = tokio::time::timeout(Duration::from_secs(60), connector.connect("quic://127.0.0.1:1")).await;
    let error = outcome.expect("the system tells that the port is closed").unwrap_err();
    assert!(matches!(error, ConnectError::Transport(TransportError::Refused { .. })), "{error}");
}

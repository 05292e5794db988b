//! Servers behind servers: forwarding and tunnels, identities behind them, and targets that are
//! refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Anonymous, Handshake, HandshakeConfig, Hello, Role};
use rpc_core::{DataType, Device, ErrorKind, LocalSession, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Access, Address, Bind, Certificate, Channel, ClientTls, ConnectError, Connector, Dial, FunctionPatterns,
    OpenRequest, ServeOptions, Server, ServerTls, Tokens,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

const SECRETS: [&str; 4] = [
    "client 0123456789abcdef0123456789abcdef",
    "first 1123456789abcdef0123456789abcdef",
    "second 2123456789abcdef0123456789abcdef",
    "third 3123456789abcdef0123456789abcdef",
];

fn tokens(number: usize) -> Tokens {
    Tokens::parse(SECRETS[number]).unwrap()
}

fn known_by(number: usize) -> Access {
    Access { anonymous: false, tokens: tokens(number), certificates: false }
}

/// Server with a function that returns the identity of its client.
fn server(change: impl FnOnce(&mut ServeOptions)) -> Server {
    let open = |request: &OpenRequest| -> Result<SharedSession, RpcError> {
        let (registry, identity) = (Registry::new(), request.identity.clone());
        registry.add_inline("whoami", move || identity.clone());
        Ok(Arc::new(LocalSession::new(registry)))
    };
    let mut options = ServeOptions { allow_forward: vec!["*".into(), "unix:*".into()], ..ServeOptions::default() };
    change(&mut options);
    Server::new(Arc::new(open), options)
}

async fn listen(server: &Server) -> String {
    let address: Address = "tcp://127.0.0.1:0".parse().unwrap();
    server.listen(&address, &Bind::default()).await.unwrap().to_string()
}

async fn whoami(session: &Session) -> String {
    session.function::<(), String>("whoami").await.unwrap().call(()).await.unwrap()
}

fn refusal(outcome: Result<Session, ConnectError>) -> RpcError {
    outcome.expect_err("there is no session").into_rpc_error()
}

async fn idle(server: &Server) {
    tokio::time::timeout(LIMIT, server.idle()).await.expect("the server has no sessions in the end");
}

pub(crate) fn certificate() -> (ServerTls, ClientTls) {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let certificate = Certificate::from_pem(pem.as_bytes(), key.as_bytes()).unwrap();
    (ServerTls::new(certificate, None).unwrap(), ClientTls::new(pem.as_bytes(), None).unwrap())
}

#[tokio::test]
async fn behind_a_tunnel_the_handshake_is_with_the_target() {
    let target = server(|options| options.access = known_by(0));
    // The client proves itself to every server, and the hops prove nothing to the target.
    let hops = [0, 1].map(|_| server(|options| options.access = known_by(0)));
    let (address, first, second) = (listen(&target).await, listen(&hops[0]).await, listen(&hops[1]).await);
    let connector = Connector::new().tokens(tokens(0));
    for connector in [
        connector.clone().via(&format!("tunnel:{first}")),
        connector.clone().via(&format!("tunnel:{first}")).via(&format!("tunnel:{second}")),
    ] {
        let session = connector.connect(&address).await.unwrap();
        assert_eq!(whoami(&session).await, "client");
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[3 << 20]).await.unwrap();
        let data: Vec<u8> = (0..3 << 20).map(|at: u32| (at % 251) as u8).collect();
        session.copy_to_remote(&tensor, data.clone()).await.unwrap();
        assert!(session.copy_from_remote(&tensor).await.unwrap() == data);
        // The hops have no session, and see none of its errors.
        assert_eq!(session.get_function("no such function").await.unwrap_err().hop(), 1);
        assert_eq!(hops[0].sessions(), 1);
        drop(tensor);
        session.shutdown().await.unwrap();
        let address = address.clone();
        let blocking = move || {
            let session = connector.connect_blocking(&address).unwrap();
            session.function::<(), String>("whoami").wait().unwrap().call(()).wait().unwrap()
        };
        assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), "client");
        for hop in &hops {
            idle(hop).await;
        }
    }
}

#[tokio::test]
async fn encryption_goes_from_end_to_end_through_a_tunnel() {
    let (tls, trust) = certificate();
    let target = server(|_| {});
    let options = Bind { tls: Some(tls), ..Bind::default() };
    let secure = target.listen(&"tls://127.0.0.1:0".parse().unwrap(), &options).await.unwrap().to_string();
    let quic = target.listen(&"quic://127.0.0.1:0".parse().unwrap(), &options).await.unwrap().to_string();
    let hop = server(|_| {});
    let hop = format!("tunnel:{}", listen(&hop).await);
    let session = Connector::new().tls(trust.clone()).via(&hop).connect(&secure).await.unwrap();
    assert_eq!(whoami(&session).await, "anonymous");
    // The certificate of another server is refused behind a tunnel as well.
    let (_, stranger) = certificate();
    let error = refusal(Connector::new().tls(stranger).via(&hop).connect(&secure).await);
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    let error = refusal(Connector::new().tls(trust.clone()).via(&hop).connect(&quic).await);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // The first hop may be reached over QUIC, whose streams carry bytes like any other channel.
    let gateway = server(|_| {});
    let gateway = gateway.listen(&"quic://127.0.0.1:0".parse().unwrap(), &options).await.unwrap();
    let connector = Connector::new().tls(trust).via(&format!("tunnel:{gateway}"));
    assert_eq!(whoami(&connector.connect(&secure).await.unwrap()).await, "anonymous");
}

/// A session tells whether the connection to its first hop is encrypted, whatever is behind that
/// hop.
#[tokio::test]
async fn a_session_knows_whether_its_first_leg_is_encrypted() {
    let (tls, trust) = certificate();
    let options = Bind { tls: Some(tls), ..Bind::default() };
    let target = server(|_| {});
    let plain = listen(&target).await;
    let connector = Connector::new().tls(trust);
    assert!(!connector.connect(&plain).await.unwrap().is_encrypted());
    for scheme in ["tls", "quic"] {
        let address = format!("{scheme}://127.0.0.1:0").parse().unwrap();
        let hop = server(|_| {});
        let hop = hop.listen(&address, &options).await.unwrap().to_string();
        assert!(connector.connect(&hop).await.unwrap().is_encrypted(), "{scheme}");
        for via in [hop.clone(), format!("tunnel:{hop}")] {
            let session = connector.clone().via(&via).connect(&plain).await.unwrap();
            assert!(session.is_encrypted(), "{via}");
        }
        let gateway = server(|_| {});
        let session = connector.clone().via(&listen(&gateway).await).connect(&plain).await.unwrap();
        assert!(!session.is_encrypted());
    }
}

#[tokio::test]
async fn forwarding_and_tunnels_come_in_any_order() {
    let target = server(|_| {});
    let hops = [server(|_| {}), server(|_| {}), server(|_| {})];
    let address = listen(&target).await;
    let [first, second, third] = [listen(&hops[0]).await, listen(&hops[1]).await, listen(&hops[2]).await];
    let tunnel = |hop: &str| format!("tunnel:{hop}");
    for (route, links) in [
        (vec![first.clone(), tunnel(&second), third.clone()], 3),
        (vec![tunnel(&first), second.clone(), tunnel(&third)], 2),
        (vec![first, second, third], 4),
    ] {
        let connector = route.iter().fold(Connector::new(), |connector, hop| connector.via(hop));
        let session = connector.connect(&address).await.unwrap();
        assert_eq!(whoami(&session).await, "anonymous");
        let error = session.get_function("no such function").await.unwrap_err();
        assert_eq!(error.hop(), links, "{route:?}: a tunnel is no hop of its own");
        session.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn a_tunnel_to_a_target_that_is_not_allowed_is_refused() {
    let target = server(|_| {});
    let (closed, open) = (server(|options| options.allow_forward.clear()), server(|_| {}));
    let (address, closed, open) = (listen(&target).await, listen(&closed).await, listen(&open).await);
    let tunnel = |hop: &str| Connector::new().via(&format!("tunnel:{hop}"));
    let error = refusal(tunnel(&closed).connect(&address).await);
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.message().contains("--allow-forward"), "{error}");
    for (target, kind) in [
        ("exec:cat", ErrorKind::Refused),
        ("local:", ErrorKind::Refused),
        ("tcp://127.0.0.1:1", ErrorKind::PeerLost),
        ("tunnel:tcp://127.0.0.1:1", ErrorKind::InvalidArgument),
    ] {
        let error = refusal(tunnel(&open).connect(target).await);
        assert_eq!(error.kind(), kind, "{target}: {error}");
    }
    // A peer that accepts the connection and does not speak.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = format!("tcp://{}", silent.local_addr().unwrap());
    let connector = tunnel(&open).handshake_timeout(Duration::from_millis(300));
    assert_eq!(refusal(connector.connect(&silent).await).kind(), ErrorKind::PeerSilent);
}

#[tokio::test]
async fn a_hop_behind_a_tunnel_refuses_targets_that_are_not_allowed() {
    let (target, gateway) = (server(|_| {}), server(|_| {}));
    let (address, gateway) = (listen(&target).await, listen(&gateway).await);
    // The hop may go to the gateway, and the gateway may go anywhere.
    let hop = server(|options| options.allow_forward = vec![gateway.clone()]);
    let hop = listen(&hop).await;
    let connector = Connector::new().via(&hop).via(&format!("tunnel:{gateway}"));
    for target in [address.as_str(), "local:"] {
        let error = refusal(connector.connect(target).await);
        assert_eq!((error.kind(), error.hop()), (ErrorKind::Refused, 1), "{target}: {error}");
        assert!(error.message().contains("--allow-forward"), "{error}");
    }
    // With everything allowed, the process of a hop itself still cannot be reached.
    let open = server(|options| options.allow_forward.push("local:".into()));
    let connector = Connector::new().via(&listen(&open).await);
    assert_eq!(refusal(connector.connect("local:").await).kind(), ErrorKind::Refused);
}

#[tokio::test]
async fn a_server_that_limits_functions_refuses_tunnels() {
    let target = server(|_| {});
    let policy = FunctionPatterns::new(["who*".to_owned()]);
    let hop = server(|options| options.forward_policy = Some(Arc::new(policy)));
    let (first, address) = (listen(&hop).await, listen(&target).await);
    let error = refusal(Connector::new().via(&format!("tunnel:{first}")).connect(&address).await);
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("--forward-functions"), "{error}");
}

/// Returns the answer of a server to a changed hello.
async fn answer_to(server: &Server, change: impl FnOnce(&mut Hello)) -> RpcError {
    let (mut ours, theirs) = tokio::io::duplex(1 << 16);
    server.serve_channel(Channel::new(theirs, "a client"));
    let mut hello = Hello::new(Role::Client);
    change(&mut hello);
    let config = HandshakeConfig { hello, identities: vec![Box::new(Anonymous)], hold: false, timeout: LIMIT };
    let mut handshake = Handshake::dial(config, Instant::now());
    let mut input = BytesMut::new();
    loop {
        ours.write_all(&handshake.take_output()).await.unwrap();
        assert!(ours.read_buf(&mut input).await.unwrap() > 0, "the server says nothing");
        match handshake.handle_input(&mut input) {
            Ok(None) => {}
            Ok(Some(_)) => panic!("the server accepts"),
            Err(error) => return error,
        }
    }
}

#[tokio::test]
async fn a_hello_that_says_a_key_twice_or_has_endless_lists_is_refused() {
    let server = server(|_| {});
    let error = answer_to(&server, |hello| hello.forward = vec!["tcp://127.0.0.1:1/other".into()]).await;
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let error = answer_to(&server, |hello| hello.features = vec![String::new(); 60_000]).await;
    assert!(error.kind() == ErrorKind::Protocol && error.message().contains("64 elements"), "{error}");
}

#[tokio::test]
async fn a_chain_that_loops_or_is_too_long_is_refused() {
    let (target, hop, other) = (server(|_| {}), server(|_| {}), server(|_| {}));
    let (address, first, second) = (listen(&target).await, listen(&hop).await, listen(&other).await);
    // The same server, at another of its addresses.
    let again = listen(&hop).await;
    let error = refusal(Connector::new().via(&first).via(&second).via(&again).connect(&address).await);
    assert_eq!(error.kind(), ErrorKind::Refused);
    assert!(error.message().contains("comes back to a server that it has passed"), "{error}");
    assert_eq!(error.hop(), 3, "{error}");
    let long = (0..17).fold(Connector::new(), |connector, _| connector.via(&first));
    let error = refusal(long.connect(&address).await);
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("hops"), "{error}");
}

/// Hop that proves itself onward by token number `onward`, and accepts clients with token number
/// `access`.
fn named_hop(access: usize, onward: usize, trusted: &[&str]) -> Server {
    server(|options| {
        options.access = known_by(access);
        options.onward = Dial { tokens: tokens(onward), ..Dial::default() };
        options.trust_proxy = trusted.iter().map(ToString::to_string).collect();
    })
}

#[tokio::test]
async fn the_identity_that_a_hop_asserts_counts_if_the_hop_is_trusted() {
    // The client proves itself to the first hop, the first hop to the second, and the second to the
    // target.
    for (second_trusts, target_trusts, known_as) in [
        (vec!["first"], vec!["second"], "client"),
        (vec![], vec!["second"], "first"),
        (vec!["first"], vec![], "second"),
        (vec!["first"], vec!["first", "anonymous"], "second"),
        (vec!["token:first"], vec!["token:second"], "client"),
        (vec!["token:first"], vec!["cert:second", "unix:0"], "second"),
    ] {
        let hops = [named_hop(0, 1, &[]), named_hop(1, 2, &second_trusts)];
        let target = named_hop(2, 3, &target_trusts);
        let (first, second, address) = (listen(&hops[0]).await, listen(&hops[1]).await, listen(&target).await);
        let connector = Connector::new().tokens(tokens(0)).via(&first).via(&second);
        let session = connector.connect(&address).await.unwrap();
        assert_eq!(whoami(&session).await, known_as, "{second_trusts:?} {target_trusts:?}");
    }
    // An anonymous client is anonymous at the target, too, and does not get the identity of the
    // hop.
    let hop = server(|options| options.onward = Dial { tokens: tokens(1), ..Dial::default() });
    let target = named_hop(1, 2, &["first"]);
    let (first, address) = (listen(&hop).await, listen(&target).await);
    let session = Connector::new().via(&first).connect(&address).await.unwrap();
    assert_eq!(whoami(&session).await, "anonymous");
}

#[tokio::test]
async fn a_hop_passes_the_functions_that_its_operator_allows() {
    let target = server(|_| {});
    let policy = FunctionPatterns::new(["who*".to_owned()]);
    let hop = server(|options| options.forward_policy = Some(Arc::new(policy)));
    let (first, address) = (listen(&hop).await, listen(&target).await);
    let session = Connector::new().via(&first).connect(&address).await.unwrap();
    assert_eq!(whoami(&session).await, "anonymous");
    let error = session.get_function("rpc.info").await.unwrap_err();
    assert_eq!((error.kind(), error.hop()), (ErrorKind::Refused, 1));
}

#[tokio::test]
async fn a_tunnel_ends_with_either_of_its_ends_and_with_its_server() {
    let target = server(|_| {});
    let hop = server(|_| {});
    let (first, address) = (listen(&hop).await, listen(&target).await);
    let connector = Connector::new().via(&format!("tunnel:{first}"));
    let session = connector.connect(&address).await.unwrap();
    drop(session);
    idle(&hop).await;
    idle(&target).await;
    let session = connector.connect(&address).await.unwrap();
    hop.stop();
    assert_eq!(session.ended().await.kind(), ErrorKind::PeerLost);
    idle(&hop).await;
    idle(&target).await;
}

#[tokio::test]
async fn connections_to_further_servers_count_as_open_files_until_they_end() {
    let target = server(|_| {});
    let address = listen(&target).await;
    let hop = server(|options| options.max_total_open_files = 1);
    let at = listen(&hop).await;
    for via in [at.clone(), format!("tunnel:{at}")] {
        let first = Connector::new().via(&via).connect(&address).await.unwrap();
        let error = refusal(Connector::new().via(&via).connect(&address).await);
        assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
        assert!(error.message().contains("max_total_open_files is 1"), "{error}");
        // The others go on, and so do sessions with the hop itself.
        assert_eq!(whoami(&first).await, "anonymous");
        assert_eq!(whoami(&Connector::new().connect(&at).await.unwrap()).await, "anonymous");
        drop(first);
        idle(&hop).await;
    }
}

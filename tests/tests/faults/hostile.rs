//! Hostile peers: they claim false identities, intercept, stall, flood, forge and send rubbish.
//! None gets in, none makes the server grow, and no good client notices.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use rpc_core::client::Files;
use rpc_core::proto::{FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, Role};
use rpc_core::{DataType, Device, ErrorKind, Lane, Operation, Packed, RemoteObject, Request, RpcError};
use rpc_server::config::ServeConfig;
use rpc_server::server::RpcServer;
use rpc_server::server::SessionWorkspace;
use rpc_tests::forwarder::{Random, UdpForwarder, Weather};
use rpc_tests::functions;
use rpc_tests::harness::on_thread;
use rpc_transports::{
    Access, Address, Bind, Certificate, ClientCertificates, ClientTls, ConnectError, Connector, Dial, ServeOptions,
    ServerTls, Tokens, TransportError, WireLimits,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinHandle;

use crate::peers::forge;
use crate::peers::raw::{
    OVER, Raw, cut_off, error_in, frame, frames, function_in, last_word, mutated, request, trickle, was_accepted,
};
use crate::peers::site::{Authority, GoodClient, PATIENCE, SECRET, Site, soon, tokens, works};
use crate::peers::{self, Transport, within};

/// Time limit of handshakes in tests that draw one out.
const HANDSHAKE: Duration = Duration::from_secs(1);

fn by_token() -> Access {
    Access { anonymous: false, tokens: tokens(SECRET), certificates: false }
}

fn with_token() -> ServeOptions {
    ServeOptions { access: by_token(), ..ServeOptions::default() }
}

/// Byte pipe that records the written bytes.
struct Recorder<I> {
    io: I,
    written: Arc<Mutex<Vec<u8>>>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Recorder<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Recorder<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = &written {
            self.written.lock().unwrap().extend_from_slice(&bytes[..*count]);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Returns the bytes that a client with the token writes, inside of any encryption, until it has
/// called a function.
async fn recorded(site: &Site) -> Vec<u8> {
    let raw = Raw::dial(site).await;
    let written = Arc::new(Mutex::new(Vec::new()));
    let channel = raw.channel.map_io(|io| Recorder { io, written: written.clone() });
    let session = soon("it connects", site.with_token().connect_channel(channel)).await.unwrap();
    works(&session).await;
    let written = written.lock().unwrap();
    written.clone()
}

// Identities.

async fn a_client_with_an_unfit_certificate_gets_in_nowhere(transport: Transport) {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let demand = ClientCertificates { authorities: authority.pem.as_bytes(), optional: false };
    let tls = ServerTls::new(authority.issue("127.0.0.1", |_| {}), Some(&demand)).unwrap();
    let access = Access { anonymous: false, tokens: Tokens::default(), certificates: true };
    let site = Site::new(Transport::Tcp, ServeOptions { access, ..ServeOptions::default() }).await;
    let address: Address = format!("{}://127.0.0.1:0", transport.scheme()).parse().unwrap();
    let listen = Bind { tls: Some(tls), ..Bind::default() };
    let address = site.server.listen(&address, &listen).await.unwrap().to_string();
    let connect = async |certificate: Option<Certificate>| {
        let tls = ClientTls::new(authority.pem.as_bytes(), certificate).unwrap();
        soon("an outcome", Connector::new().tls(tls).connect(&address)).await
    };
    let expired = authority.issue("client", |params| {
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    });
    let not_yet_valid = authority.issue("client", |params| {
        (params.not_before, params.not_after) = (date_time_ymd(4000, 1, 1), date_time_ymd(4001, 1, 1));
    });
    let of_a_server =
        authority.issue("client", |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
    // The number of the alert tells the client the reason.
    let of_a_stranger = stranger.issue("client", |_| {});
    for (what, certificate, reason) in [
        ("an expired one", Some(expired), "the client's certificate has expired"),
        ("one of the future", Some(not_yet_valid), "the client's certificate has expired"),
        ("one for servers", Some(of_a_server), "it does not take the client's certificate"),
        ("one of a stranger", Some(of_a_stranger), "the client's certificate is not by an authority"),
        ("none", None, "it wants a certificate"),
    ] {
        let error = connect(certificate).await.expect_err(what).into_rpc_error();
        assert_eq!((error.kind(), error.hop()), (ErrorKind::Unauthenticated, 0), "{what}: {error}");
        assert!(error.message().contains(reason), "{what}: {error}");
        assert!(!error.request_may_have_run(), "{what}: {error}");
        assert_eq!(site.server.sessions(), 0, "{what}");
    }
    works(&connect(Some(authority.issue("client", |_| {}))).await.unwrap()).await;
}

async fn a_server_with_an_unfit_certificate_is_refused(transport: Transport) {
    let authority = Authority::new();
    let site = Site::new(Transport::Tcp, ServeOptions::default()).await;
    let not_yet_valid = authority.issue("127.0.0.1", |params| {
        (params.not_before, params.not_after) = (date_time_ymd(4000, 1, 1), date_time_ymd(4001, 1, 1));
    });
    let of_a_client =
        authority.issue("127.0.0.1", |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    for (what, certificate) in [("one of the future", not_yet_valid), ("one for clients", of_a_client)] {
        let listen = Bind { tls: Some(ServerTls::new(certificate, None).unwrap()), ..Bind::default() };
        let address: Address = format!("{}://127.0.0.1:0", transport.scheme()).parse().unwrap();
        let address = site.server.listen(&address, &listen).await.unwrap().to_string();
        let outcome = soon("an outcome", Connector::new().tls(authority.trust()).connect(&address)).await;
        let is_insecure =
            |error: &ConnectError| matches!(error, ConnectError::Transport(TransportError::Insecure { .. }));
        let error = outcome.expect_err(what);
        assert!(is_insecure(&error), "{what}: {error:?}");
        assert_eq!(error.into_rpc_error().kind(), ErrorKind::Unauthenticated, "{what}");
        // A token does not replace the check of the certificate that the client has asked for.
        let with_token = Connector::new().tls(authority.trust()).tokens(tokens(SECRET));
        let error = soon("an outcome", with_token.connect(&address)).await.expect_err(what);
        assert!(is_insecure(&error), "{what}: {error:?}");
    }
}

/// An eavesdropper learns nothing that opens a session.
async fn a_recorded_handshake_opens_no_session(transport: Transport) {
    let site = Site::new(transport, with_token()).await;
    let recorded = recorded(&site).await;
    within(PATIENCE, "the honest session ends", async || site.server.sessions() == 0).await;
    let mut replayed = Raw::dial(&site).await;
    replayed.write(&recorded).await;
    let said = replayed.rest().await;
    assert!(!was_accepted(&said), "{}", said.escape_ascii());
    assert_eq!(last_word(&said).unwrap().kind(), ErrorKind::Unauthenticated);
    // The replay follows the rounds of the server, too: the second frame is the proof.
    let hello_len = MAGIC.len() + frames(&recorded)[0].1.len() + HEADER_LEN;
    let mut replayed = Raw::dial(&site).await;
    replayed.write(&recorded[..hello_len]).await;
    replayed.magic().await;
    assert_eq!(replayed.frame().await.unwrap().0.kind, Kind::Hello);
    assert_eq!(replayed.frame().await.unwrap().0.kind, Kind::Proof);
    replayed.write(&recorded[hello_len..]).await;
    assert_eq!(last_word(&replayed.rest().await).unwrap().kind(), ErrorKind::Unauthenticated);
    // A client that omits the proof has no identity.
    let accept = frame(Kind::Accept, 0, &[]);
    let mut silent = Raw::dial(&site).await;
    silent.write(&[&recorded[..hello_len], &accept].concat()).await;
    let said = {
        silent.magic().await;
        silent.frame().await.unwrap();
        silent.frame().await.unwrap();
        silent.write(&[&frame(Kind::Proof, 0, &[7; 64])[..], &accept].concat()).await;
        silent.rest().await
    };
    assert!(!was_accepted(&said));
    assert_eq!(last_word(&said).unwrap().kind(), ErrorKind::Unauthenticated);
    site.is_empty().await;
}

/// Answers that a server without the token can give to a client that has one.
async fn a_server_without_the_token_convinces_no_client(transport: Transport) {
    const CHALLENGE: [u8; 32] = [5; 32];
    type Answer = fn(&[u8]) -> Vec<u8>;
    let accept = || frame(Kind::Accept, 0, &[]);
    let proof: [(&str, &[&str], Answer); 9] = [
        ("the client's own proof", &["token"], |proof| frame(Kind::Proof, 0, &proof[32..])),
        ("all that the client said", &["token"], |proof| frame(Kind::Proof, 0, proof)),
        ("the client's challenge", &["token"], |proof| frame(Kind::Proof, 0, &proof[..32])),
        ("nothing", &["token"], |_| frame(Kind::Proof, 0, &[])),
        ("zeros", &["token"], |_| frame(Kind::Proof, 0, &[0; 32])),
        ("no proof", &["token"], |_| Vec::new()),
        ("another method", &["none"], |_| Vec::new()),
        ("what was never agreed on", &["connection"], |_| Vec::new()),
        ("a choice", &["token", "none"], |_| Vec::new()),
    ];
    for (what, identities, answer) in proof {
        let authority = Authority::new();
        let options = Bind { tls: Some(authority.server("127.0.0.1")), ..Bind::default() };
        let folder = tempfile::tempdir().unwrap();
        let address = match transport {
            Transport::Unix => format!("unix:{}", folder.path().join("socket").display()),
            other => format!("{}://127.0.0.1:0", other.scheme()),
        };
        let mut listener =
            rpc_transports::Transports::default().bind(&address.parse().unwrap(), &options).await.unwrap();
        let address = listener.local_address().to_string();
        let served = tokio::spawn(async move {
            let mut channel = listener.accept().await.unwrap();
            channel.secure().await.unwrap();
            let mut raw = Raw { channel };
            raw.magic().await;
            raw.frame().await.unwrap();
            let mut hello = Hello::new(Role::Server);
            hello.identities = identities.iter().map(ToString::to_string).collect();
            let hello = Packed::encode(&hello).unwrap();
            raw.write(&[&MAGIC[..], &frame(Kind::Hello, 0, hello.as_bytes())].concat()).await;
            if identities == ["token"] {
                raw.write(&frame(Kind::Proof, 0, &CHALLENGE)).await;
                if let Some((_, proof)) = raw.frame().await {
                    raw.write(&answer(&proof)).await;
                }
            }
            raw.write(&accept()).await;
            raw.half_close().await;
            raw.rest().await
        });
        // With a token the certificate is not checked, and would not suffice.
        let client = Connector::new().tokens(tokens(SECRET)).tls(ClientTls::unverified(None).unwrap());
        let outcome = soon("an outcome", client.handshake_timeout(OVER).connect(&address)).await;
        let error = outcome.expect_err(what).into_rpc_error();
        let kinds = [ErrorKind::Unauthenticated, ErrorKind::Protocol];
        // A server that closes without any proof is only known to have closed.
        assert!(
            kinds.contains(&error.kind()) || (what == "no proof" && error.kind() == ErrorKind::Refused),
            "{what}: {error}"
        );
        let said = soon("the false server", served).await.unwrap();
        assert!(!was_accepted(&said), "{what}: the client has accepted");
    }
}

/// Change of a hello by an interceptor.
type Change = fn(&mut Hello);

/// Over TCP an interceptor can change a field of the hello. The proofs then do not match, whichever
/// field it was.
async fn a_hello_changed_on_the_way_breaks_the_proof() {
    let changes: [(&str, Change); 8] = [
        ("the identities", |hello| hello.identities = vec!["none".to_owned()]),
        ("one identity more", |hello| hello.identities.push("none".to_owned())),
        ("the workspace", |hello| hello.workspace = "another".to_owned()),
        ("the key", |hello| hello.key.clear()),
        ("the features", |hello| hello.features = vec!["new".to_owned()]),
        ("the window", |hello| hello.window += 1),
        ("the keep-alive", |hello| hello.keep_alive_ms += 1),
        ("the agent", |hello| hello.agent.push('!')),
    ];
    for anonymous_too in [false, true] {
        // A client with a token demands a proof even from a server that needs none of its clients.
        let access = Access { anonymous: anonymous_too, ..by_token() };
        let options = ServeOptions { access, key: "board".to_owned(), ..ServeOptions::default() };
        let site = Site::new(Transport::Tcp, options).await;
        for (what, change) in changes {
            for of_client in [true, false] {
                if !of_client && what == "the key" {
                    continue; // The client asks for this one, and sees at once that it is another.
                }
                let (lure, meddler) = meddle(site.socket_address(), of_client, change).await;
                let client = Connector::new().tokens(tokens(SECRET)).key("board").handshake_timeout(OVER);
                let outcome = soon("an outcome", client.connect(&format!("tcp://{lure}"))).await;
                let error = outcome.expect_err(what).into_rpc_error();
                assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{what}, of the client: {of_client}: {error}");
                meddler.abort();
            }
        }
        works(&site.with_token().key("board").connect(&site.address).await.unwrap()).await;
        within(PATIENCE, "all sessions end", async || site.server.sessions() == 0).await;
    }
}

/// Starts an interceptor that changes the hello of one side, and forwards everything else. Returns
/// its address.
async fn meddle(server: SocketAddr, of_client: bool, change: Change) -> (SocketAddr, JoinHandle<()>) {
    async fn pass_changed(from: &mut TcpStream, to: &mut TcpStream, change: Option<Change>) {
        let mut head = [0; MAGIC.len() + HEADER_LEN];
        from.read_exact(&mut head).await.unwrap();
        let header = head.last_chunk().unwrap();
        let header = FrameHeader::decode(header, usize::MAX, usize::MAX).unwrap();
        let mut body = vec![0; header.body_len as usize];
        from.read_exact(&mut body).await.unwrap();
        if let Some(change) = change {
            let mut hello: Hello = Packed::from_bytes(body.into()).decode().unwrap();
            change(&mut hello);
            body = Packed::encode(&hello).unwrap().as_bytes().to_vec();
        }
        to.write_all(&[&MAGIC[..], &frame(header.kind, 0, &body)].concat()).await.unwrap();
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut far = TcpStream::connect(server).await.unwrap();
        pass_changed(&mut near, &mut far, of_client.then_some(change)).await;
        pass_changed(&mut far, &mut near, (!of_client).then_some(change)).await;
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    });
    (address, task)
}

/// Returns a hello of TLS 1.2, without the extensions of 1.3.
fn tls12_client_hello() -> Vec<u8> {
    let suites = [0xc02f_u16, 0xc030, 0xc02b, 0xc02c, 0x009c, 0x002f];
    let mut hello = vec![3, 3];
    hello.extend([7; 32]);
    hello.push(0);
    hello.extend((suites.len() as u16 * 2).to_be_bytes());
    hello.extend(suites.iter().flat_map(|suite| suite.to_be_bytes()));
    hello.extend([1, 0]);
    // Groups and signatures, like those of any client of 1.2.
    let extensions = [0, 10, 0, 4, 0, 2, 0, 29, 0, 13, 0, 6, 0, 4, 4, 3, 8, 4];
    hello.extend((extensions.len() as u16).to_be_bytes());
    hello.extend(extensions);
    let mut record = vec![22, 3, 1];
    record.extend((hello.len() as u16 + 4).to_be_bytes());
    record.extend([1, 0]);
    record.extend((hello.len() as u16).to_be_bytes());
    record.extend(hello);
    record
}

/// Writes these bytes to `address`, and returns the answer when the connection has ended.
async fn answer_to(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut said = Vec::new();
    let _ = soon("the server cuts it off", stream.read_to_end(&mut said)).await;
    said
}

async fn nobody_talks_the_server_out_of_tls_1_3() {
    let site = Site::new(Transport::Tls, ServeOptions::default()).await;
    let good = GoodClient::start(site.connector(), &site.address);
    let said = answer_to(site.socket_address(), &tls12_client_hello()).await;
    // The answer is a fatal alert: protocol_version.
    assert_eq!(said, [21, 3, 3, 0, 2, 2, 70], "{}", said.escape_ascii());
    // A client without TLS gets no bytes of the protocol.
    for plain in [&peers::hello(&Hello::new(Role::Client))[..], b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"] {
        let said = answer_to(site.socket_address(), plain).await;
        assert!(!said.windows(MAGIC.len()).any(|bytes| bytes == MAGIC), "{}", said.escape_ascii());
    }
    good.stays_unharmed().await;
    site.is_empty().await;
}

async fn nobody_talks_a_client_out_of_tls_1_3() {
    let authority = Authority::new();
    // A server of TLS 1.2, one of this protocol without TLS, and one of an unknown protocol.
    let mut server_hello = vec![22, 3, 3, 0, 42, 2, 0, 0, 38, 3, 3];
    server_hello.extend([9; 32]);
    server_hello.extend([0, 0xc0, 0x2f, 0]);
    for answer in [server_hello, peers::hello(&Hello::new(Role::Server)), vec![0xff; 64]] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tls://{}", listener.local_addr().unwrap());
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&answer).await.unwrap();
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said).await;
            said
        });
        let client = Connector::new().tls(authority.trust()).tokens(tokens(SECRET));
        let error = soon("an outcome", client.connect(&address)).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Transport(TransportError::Insecure { .. })), "{error:?}");
        let said = soon("the false server", served).await.unwrap();
        assert!(!said.windows(MAGIC.len()).any(|bytes| bytes == MAGIC), "the client went on without TLS");
    }
}

// Stalling.

async fn a_handshake_cannot_be_drawn_out(transport: Transport) {
    let options = ServeOptions { handshake_timeout: HANDSHAKE, ..with_token() };
    let site = Site::new(transport, options).await;
    let recorded = recorded(&site).await;
    let hello_len = MAGIC.len() + frames(&recorded)[0].1.len() + HEADER_LEN;
    let mut peers = tokio::task::JoinSet::new();
    // The peer stalls in the magic, in the hello and in the proof: it sends a trickle, or nothing.
    for at_once in [1, MAGIC.len() + HEADER_LEN + 9, hello_len, hello_len + HEADER_LEN] {
        for count in [0, 1000] {
            let mut raw = Raw::dial(&site).await;
            raw.write(&recorded[..at_once]).await;
            let slowly: Vec<u8> = recorded[at_once..].iter().copied().cycle().take(count).collect();
            peers.spawn(async move { cut_off(raw.channel.io_mut(), &slowly).await });
        }
    }
    while let Some(peer) = soon("a peer", peers.join_next()).await {
        peer.unwrap();
    }
    tokio::time::timeout(OVER, site.server.idle()).await.expect("nothing is left of them");
    works(&site.with_token().connect(&site.address).await.unwrap()).await;
}

async fn a_tls_handshake_cannot_be_drawn_out() {
    let options = ServeOptions { handshake_timeout: HANDSHAKE, ..ServeOptions::default() };
    let site = Site::new(Transport::Tls, options).await;
    // The header of a record with a client's hello of 16,000 bytes, so that each byte is expected.
    let record = [&[22, 3, 1, 0x3e, 0x80, 1, 0, 0x3e, 0x7c, 3, 3][..], &[7; 1000]].concat();
    for slowly in [&[][..], &record] {
        cut_off(&mut TcpStream::connect(site.socket_address()).await.unwrap(), slowly).await;
    }
    tokio::time::timeout(OVER, site.server.idle()).await.expect("nothing is left of them");
}

/// A QUIC connection exists before its first channel. Until its client has proven its identity, it
/// has the time limit of any handshake.
async fn a_connection_without_a_channel_is_given_up() {
    let options = ServeOptions { handshake_timeout: HANDSHAKE, ..with_token() };
    let site = Site::new(Transport::Quic, options).await;
    // The server learns of a stream by the first bytes on it, and there are none.
    let mut raw = Raw::dial(&site).await;
    cut_off(raw.channel.io_mut(), &[]).await;
}

/// An idle server does nothing any more, so that a process that waits for that may end.
async fn an_idle_server_has_no_session() {
    let site = Site::new(Transport::Tcp, ServeOptions::default()).await;
    let mut raw = Raw::greeted(&site, &Hello::new(Role::Client)).await;
    raw.write(&frame(Kind::Close, 0, &[])).await;
    assert_eq!(raw.frame().await.unwrap().0.kind, Kind::Close);
    // The server waits a moment for the client to close.
    soon("the server is idle", site.server.idle()).await;
    assert_eq!(site.server.sessions(), 0);
    drop(raw);
}

/// The client has a time limit, too, also in its blocking form.
async fn a_server_that_draws_its_handshake_out_is_given_up() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                trickle(&mut stream, &[peers::hello(&Hello::new(Role::Server)), vec![0; 1000]].concat()).await;
            });
        }
    });
    let connector = Connector::new().handshake_timeout(HANDSHAKE);
    let outcome = tokio::time::timeout(OVER, connector.connect(&address)).await.expect("there is a limit");
    assert_eq!(outcome.unwrap_err().into_rpc_error().kind(), ErrorKind::Refused);
    let blocking = on_thread(move || connector.connect_blocking(&address));
    let outcome = tokio::time::timeout(OVER, blocking).await.expect("there is a limit");
    assert_eq!(outcome.unwrap_err().into_rpc_error().kind(), ErrorKind::Refused);
}

// Flooding.

const MIB: usize = 1 << 20;

/// Counter of replies of 1 MiB that the server still keeps.
#[derive(Clone, Default)]
struct Replies {
    begun: Arc<AtomicU64>,
    alive: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

struct Reply(Vec<u8>, Replies);

impl AsRef<[u8]> for Reply {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.1.alive.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Replies {
    fn make(&self) -> Bytes {
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.most.fetch_max(self.alive.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
        Bytes::from_owner(Reply(vec![3; MIB], self.clone()))
    }
}

/// Flow-control windows of both sides in the next test.
const WINDOW: u64 = 4 << 20;

/// A peer asks for 300 MiB, reads nothing, and then reads everything.
async fn replies_that_nobody_reads_do_not_pile_up(transport: Transport) {
    let limits = WireLimits { max_message: 2 << 20, window: WINDOW, ..WireLimits::default() };
    let (registry, replies) = (functions::registry(), Replies::default());
    let (inline, blocking) = (replies.clone(), replies.clone());
    registry.add_inline("bulk", move || inline.make());
    registry.add("bulk.blocking", move || blocking.make());
    let site = Site::serving(transport, ServeOptions { limits, ..ServeOptions::default() }, registry).await;
    let good = GoodClient::start(site.connector(), &site.address);
    for (name, windows) in [("bulk", 2), ("bulk.blocking", 10)] {
        const CALLS: u64 = 300;
        replies.most.store(0, Ordering::Release);
        let begun = replies.begun.load(Ordering::Acquire);
        let hello = Hello { max_message: 2 << 20, window: WINDOW, ..Hello::new(Role::Client) };
        let mut raw = Raw::greeted(&site, &hello).await;
        raw.write(&request(1, Lane(0), Operation::GetFunction { name: name.to_owned() })).await;
        let function = function_in(&raw.frame().await.unwrap().1);
        for id in 2..CALLS + 2 {
            let call = Operation::Call { function, args: Vec::new() };
            raw.write(&request(id, Lane(id as u32 % 16), call)).await;
        }
        within(PATIENCE, "calls have begun", async || replies.begun.load(Ordering::Acquire) > begun + 2).await;
        // The server has had time to send, because others were served meanwhile.
        let session = soon("connect", site.connector().connect(&site.address)).await.unwrap();
        for _ in 0..30 {
            works(&session).await;
        }
        // Replies without room are made and then refused, which may take a moment.
        let room = (windows * WINDOW) >> 20;
        let fits = async || replies.alive.load(Ordering::Acquire) <= room;
        within(PATIENCE, "what is kept for a peer that reads nothing fits its window", fits).await;
        let kept = replies.alive.load(Ordering::Acquire);
        // Each request has one answer, which may be the refusal.
        let mut answered = HashSet::new();
        while answered.len() < CALLS as usize {
            let (header, body) = raw.frame().await.expect("the session lives");
            let whole = matches!(header.kind, Kind::Reply | Kind::Error) && !header.more;
            if header.kind == Kind::Error {
                assert_eq!(error_in(&body).kind(), ErrorKind::LimitExceeded);
            }
            if whole {
                assert!(answered.insert(header.id));
            }
            if header.payload_len > 0 {
                let credit = [&[0; 4][..], &(body.len() as u64).to_le_bytes()].concat();
                raw.write(&frame(Kind::Credit, 0, &credit)).await;
            }
        }
        let most = replies.most.load(Ordering::Acquire);
        println!("{transport:?} {name}: {kept} MiB kept, {most} MiB for a moment");
    }
    good.stays_unharmed().await;
    site.is_empty().await;
}

/// A peer that neither reads nor writes is cut off, although the server has much to send to it.
async fn a_peer_that_does_nothing_is_cut_off(transport: Transport) {
    let registry = functions::registry();
    registry.add_inline("bulk", || Bytes::from(vec![3; 16 * MIB]));
    let options = ServeOptions { keep_alive: Duration::from_millis(100), ..ServeOptions::default() };
    let site = Site::serving(transport, options, registry).await;
    let mut raw = Raw::greeted(&site, &Hello::new(Role::Client)).await;
    raw.write(&request(1, Lane(0), Operation::GetFunction { name: "bulk".to_owned() })).await;
    let function = function_in(&raw.frame().await.unwrap().1);
    for id in 2..7 {
        raw.write(&request(id, Lane(0), Operation::Call { function, args: Vec::new() })).await;
    }
    assert_eq!(site.server.sessions(), 1);
    within(OVER, "it is cut off", async || site.server.sessions() == 0).await;
    soon("nothing is left of it", site.server.idle()).await;
    drop(raw);
}

async fn pings_without_end_are_not_all_answered(transport: Transport) {
    const PINGS: usize = 1_000_000;
    let site = Site::new(transport, ServeOptions::default()).await;
    let good = GoodClient::start(site.connector(), &site.address);
    let mut raw = Raw::greeted(&site, &Hello::new(Role::Client)).await;
    let ping = frame(Kind::Ping, 9, &[]);
    let many = ping.repeat(1000);
    for _ in 0..PINGS / 1000 {
        // The server reads on, although the peer does not read its answers.
        raw.write(&many).await;
    }
    raw.write(&frame(Kind::Close, 0, &[])).await;
    let said = raw.rest().await;
    let pongs = frames(&said).iter().filter(|(header, _)| header.kind == Kind::Pong).count();
    println!("{transport:?}: {pongs} pongs");
    assert!(pongs > 0 && pongs < PINGS - 1000, "{pongs} pongs were kept for a peer that reads nothing");
    good.stays_unharmed().await;
    site.is_empty().await;
}

/// Returns the number of connections that the limit on files allows, without those of other tests
/// of this program.
fn allowed_connections() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let files = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20) as usize;
    // Both ends of each connection are in this process.
    (files * 9 / 20).saturating_sub(100).clamp(10, 10_000)
}

async fn thousands_of_half_open_connections_do_not_keep_others_out(transport: Transport) {
    // The limit on files does not allow two of these tests at a time.
    static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    let _turn = soon("the other one ends", ONE_AT_A_TIME.lock()).await;
    let count = allowed_connections();
    if count < 2000 {
        return println!("skipped: {count} connections are all that the limit on open files allows");
    }
    let options = ServeOptions { handshake_timeout: PATIENCE * 3, ..ServeOptions::default() };
    let site = Site::new(transport, options).await;
    let mut held = Vec::with_capacity(count);
    for number in 0..count {
        let mut stream = soon("connect", TcpStream::connect(site.socket_address())).await.unwrap();
        // Some write a little.
        // The oldest connections may have been closed by now.
        let _ = stream.write_all(&MAGIC[..number % 5]).await;
        held.push(stream);
    }
    println!("{count} half-open connections");
    let session = soon("a good client connects", site.connector().connect(&site.address)).await.unwrap();
    works(&session).await;
    drop(session);
    drop(held);
    site.is_empty().await;
}

async fn a_good_client_gets_in_while_too_many_are_half_open(transport: Transport) {
    let options = ServeOptions { max_handshakes: 32, handshake_timeout: PATIENCE * 3, ..ServeOptions::default() };
    let site = Site::new(transport, options).await;
    let early = soon("connect", site.connector().connect(&site.address)).await.unwrap();
    let mut held = Vec::new();
    let cut_off = Arc::new(AtomicU64::new(0));
    for _ in 0..100 {
        let options = Dial { tls: Some(site.authority.trust()), ..Dial::default() };
        let (address, cut_off) = (site.address.parse::<Address>().unwrap(), cut_off.clone());
        held.push(tokio::spawn(async move {
            // With TLS the connection may end before there is a channel.
            let channel = rpc_transports::Transports::default().dial(&address, &options).await;
            if let Ok(mut channel) = channel {
                let _ = channel.io_mut().write_all(&MAGIC).await;
                let _ = channel.io_mut().read_to_end(&mut Vec::new()).await;
            }
            cut_off.fetch_add(1, Ordering::AcqRel);
        }));
    }
    within(PATIENCE, "those beyond the limit are cut off", async || cut_off.load(Ordering::Acquire) == 68).await;
    // The oldest other handshakes are closed, although all come from one machine.
    for _ in 0..5 {
        works(&soon("a good client connects", site.connector().connect(&site.address)).await.unwrap()).await;
    }
    // Established sessions are not affected.
    works(&early).await;
    // Draining does not wait for unfinished handshakes.
    let begun = Instant::now();
    site.server.drain(PATIENCE * 3).await;
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    for raw in held {
        raw.abort();
    }
}

/// Connections whose clients never answer the server, more than it keeps.
async fn quic_connections_that_never_come_about_do_not_keep_others_out() {
    let options = ServeOptions { max_handshakes: 64, ..ServeOptions::default() };
    let site = Site::new(Transport::Quic, options).await;
    let hole = UdpForwarder::start(site.socket_address(), Weather::default()).unwrap();
    hole.pass(true, false);
    let address: Address = format!("quic://{}", hole.address()).parse().unwrap();
    let mut attempts = tokio::task::JoinSet::new();
    for _ in 0..400 {
        let (address, tls) = (address.clone(), site.authority.trust());
        attempts.spawn(async move {
            let options = Dial { tls: Some(tls), ..Dial::default() };
            rpc_transports::Transports::default().dial(&address, &options).await.map(drop)
        });
    }
    within(PATIENCE, "they have all begun", async || hole.passed().0 >= 400).await;
    for _ in 0..5 {
        works(&soon("a good client connects", site.connector().connect(&site.address)).await.unwrap()).await;
    }
    attempts.shutdown().await;
}

/// Connections that are established and not used: they displace only each other.
async fn quic_connections_of_strangers_do_not_keep_others_out() {
    let options = ServeOptions { max_handshakes: 8, max_sessions: 4, ..ServeOptions::default() };
    let site = Site::new(Transport::Quic, options).await;
    let good = soon("a good client", site.connector().connect(&site.address)).await.unwrap();
    let address: Address = site.address.parse().unwrap();
    let mut held = Vec::new();
    for _ in 0..40 {
        let options = Dial { tls: Some(site.authority.trust()), ..Dial::default() };
        held.push(soon("a stranger", rpc_transports::Transports::default().dial(&address, &options)).await.unwrap());
    }
    works(&good).await;
    works(&soon("another good client", site.connector().connect(&site.address)).await.unwrap()).await;
}

/// Lengths that no data follows, in every field that has one.
async fn lengths_that_are_not_true_reserve_nothing(transport: Transport) {
    let site = Site::new(transport, ServeOptions::default()).await;
    let good = GoodClient::start(site.connector(), &site.address);
    let before = peers::memory(std::process::id(), "VmPeak");
    let hello = peers::hello(&Hello::new(Role::Client));
    let greeting = &hello[..MAGIC.len()];
    let accepted = [&hello[..], &frame(Kind::Accept, 0, &[])].concat();
    let request =
        |claim: &[u8]| [&accepted[..], &frame(Kind::Request, 1, &[&[0x93, 2, 0xc0][..], claim].concat())].concat();
    let header = |header: FrameHeader| [&accepted[..], &header.encode()].concat();
    let bombs = [
        [greeting, &FrameHeader::control(Kind::Hello, u32::MAX).encode()].concat(),
        [greeting, &frame(Kind::Hello, 0, b"\x81\xa8features\xdd\xff\xff\xff\xff")].concat(),
        [greeting, &frame(Kind::Hello, 0, b"\xdf\xff\xff\xff\xff")].concat(),
        [greeting, &frame(Kind::Hello, 0, b"\x81\xdb\xff\xff\xff\xff")].concat(),
        header(FrameHeader { id: 1, ..FrameHeader::control(Kind::Request, u32::MAX) }),
        header(FrameHeader { id: 1, payload_len: u32::MAX, ..FrameHeader::control(Kind::Request, 0) }),
        header(FrameHeader { id: 1, payload_len: u32::MAX, more: true, ..FrameHeader::control(Kind::Request, 9) }),
        header(FrameHeader::control(Kind::Free, u32::MAX)),
        // Arguments: a list, a text, bytes, packed bytes and a shape of four billion elements each;
        // a tensor of 255 dimensions.
        request(b"\x92\x01\xdd\xff\xff\xff\xff"),
        request(b"\x92\x01\x91\xdb\xff\xff\xff\xff"),
        request(b"\x92\x01\x91\xd7\x01\xff\xff\xff\xff\xff\xff\xff\xff"),
        request(b"\x92\x01\x91\xc9\xff\xff\xff\xff\x05"),
        request(b"\x92\x01\x91\xc9\xff\xff\xff\xff\x02"),
        request(&[&b"\x92\x01\x91\xc7\x1e\x09"[..], &[0; 24], &[255, 0], &[0; 4]].concat()),
        request(&[&b"\x92\x01"[..], &[0x91; 60_000]].concat()),
    ];
    let mut held = Vec::new();
    for (number, bomb) in bombs.iter().enumerate() {
        for _ in 0..3 {
            let mut raw = Raw::dial(&site).await;
            raw.write(bomb).await;
            let said = raw.rest().await;
            let word = last_word(&said).unwrap_or_else(|| panic!("bomb {number}: {}", said.escape_ascii()));
            assert_eq!(word.kind(), ErrorKind::Protocol, "bomb {number}: {word}");
            held.push(raw);
        }
    }
    let grown = peers::memory(std::process::id(), "VmPeak").saturating_sub(before);
    // Other tests of this program may have reserved memory, but far less than four billion bytes.
    assert!(grown < 3 << 30, "{grown} bytes were reserved for lengths that are not true");
    // Shapes are lengths, too, and bad ones are errors of one call.
    let session = soon("connect", site.connector().connect(&site.address)).await.unwrap();
    for shape in [&[i64::MAX][..], &[1 << 46], &[1 << 40, 1 << 40], &[i64::MAX, i64::MAX], &[-1], &[i64::MIN, 2]] {
        let error = soon("alloc", session.alloc(Device::cpu(), DataType::F32, shape)).await.unwrap_err();
        let kinds = [ErrorKind::OutOfMemory, ErrorKind::InvalidArgument, ErrorKind::LimitExceeded];
        assert!(kinds.contains(&error.kind()), "{shape:?}: {error}");
    }
    works(&session).await;
    drop(session);
    good.stays_unharmed().await;
    drop(held);
    site.is_empty().await;
}

// Forging.

async fn forged_handles_reach_nothing_of_another_session(transport: Transport) {
    let site = Site::new(transport, ServeOptions::default()).await;
    forge::handles_of_others(site.connector(), &site.address, 1_200_000).await;
}

/// A freed handle stays invalid, however often its slot is used again.
async fn stale_handles_reach_nothing(transport: Transport) {
    let site = Site::new(transport, ServeOptions::default()).await;
    let session = soon("connect", site.connector().connect(&site.address)).await.unwrap();
    let new = soon("get", session.get_function("tagged.new")).await.unwrap();
    let tag = format!("stale-{transport:?}");
    let mut stale = Vec::new();
    for _ in 0..200 {
        let object: RemoteObject = soon("call", new.call((tag.clone(),))).await.unwrap();
        stale.push(object.handle());
        soon("free", object.free()).await.unwrap();
    }
    assert_eq!(stale.iter().collect::<HashSet<_>>().len(), stale.len(), "no handle comes twice");
    let kept: RemoteObject = soon("call", new.call((tag.clone(),))).await.unwrap();
    for _ in 0..100 {
        let mut pending = Vec::new();
        for handle in &stale {
            pending.push(session.shared().submit(Request::new(Operation::Free { handle: *handle })).reply());
        }
        for reply in pending {
            assert_eq!(soon("a request", reply).await.unwrap_err().kind(), ErrorKind::InvalidHandle);
        }
        let release = Operation::Release { handles: stale.repeat(50) };
        soon("release", session.shared().submit(Request::new(release)).reply()).await.unwrap();
    }
    let alive = soon("get", session.function::<(String,), i64>("tagged.alive")).await.unwrap();
    assert_eq!(soon("call", alive.call((tag,))).await.unwrap(), 1);
    drop(kept);
}

// Files.

/// Makes a symbolic link in the workspace of the session, as native code in a function could.
fn workspace_of(context: &rpc_core::Context) -> rpc_core::Result<std::path::PathBuf> {
    let files = context.workspace().unwrap();
    Ok(files.as_any().downcast_ref::<SessionWorkspace>().unwrap().open()?.path().to_owned())
}

async fn no_path_leads_out_of_a_workspace(scheme: &str) {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let registry = functions::registry();
    registry.add("link", |context: rpc_core::Context, to: String, name: String| -> rpc_core::Result<()> {
        symlink(to, workspace_of(&context)?.join(name)).map_err(|error| RpcError::internal(error.to_string()))
    });
    let address = if scheme == "unix" {
        format!("unix:{}", folder.path().join("socket").display())
    } else {
        "tcp://127.0.0.1:0".to_owned()
    };
    let config = ServeConfig {
        listen: vec![address.parse().unwrap()],
        workdir: folder.path().join("work"),
        ..ServeConfig::default()
    };
    let running = RpcServer::new(registry).config(config).start().await.unwrap();
    let address = running.addresses()[0].to_string();
    let neighbour = soon("connect", Connector::new().connect(&address)).await.unwrap();
    soon("put", Files::new(&neighbour).put_bytes("private", "neighbour")).await.unwrap();
    let session = soon("connect", Connector::new().connect(&address)).await.unwrap();
    let files = Files::new(&session);
    soon("put", files.put_bytes("inside/file", "mine")).await.unwrap();
    let link = soon("get", session.get_function("link")).await.unwrap();
    let links = [
        (secret.to_str().unwrap(), "to-file"),
        (outside.path().to_str().unwrap(), "to-folder"),
        ("..", "up"),
        ("../..", "inside/up"),
        ("../staging", "staging"),
        ("/", "root"),
        ("/proc/self/root", "proc"),
        ("to-folder", "chain"),
        ("loop", "loop"),
    ];
    for (to, name) in links {
        soon("link", link.call::<()>((to, name))).await.unwrap();
    }
    let absolute = secret.to_str().unwrap();
    let from_root = &absolute[1..];
    let mut paths: Vec<String> = [
        "..",
        "../",
        "../secret",
        "./..",
        "inside/../../x",
        "inside/../..",
        "/",
        "/etc/passwd",
        absolute,
        "//etc/passwd",
        "a\0b",
        "\0",
        "inside/file\0",
        "../private",
        "inside/./../../staging/x",
        "to-file",
        "to-folder/secret",
        "to-folder/new",
        "up/x",
        "up",
        "inside/up/x",
        "staging/x",
        "chain/secret",
        "chain/new",
        "loop",
        "loop/x",
        "root/etc/passwd",
        "inside/file/..//../..",
        "...//../../x",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend([format!("root/{from_root}"), format!("proc/{from_root}")]);
    paths.extend([
        format!("{}etc/passwd", "../".repeat(300)),
        "x".repeat(256),
        "x".repeat(5000),
        "y/".repeat(3000) + "z",
    ]);
    paths.push("n".repeat(1 << 20));
    let refused = [ErrorKind::InvalidArgument, ErrorKind::NotFound, ErrorKind::Io];
    for path in &paths {
        let shown: String = path.chars().take(60).collect();
        let mut taken = Vec::new();
        let error = soon("get", files.get(path, &mut taken)).await.expect_err(&shown);
        assert!(refused.contains(&error.kind()) && taken.is_empty(), "get {shown:?}: {error}");
        let error = soon("put", files.put_bytes(path, "intruder")).await.expect_err(&shown);
        assert!(refused.contains(&error.kind()), "put {shown:?}: {error}");
        let error = soon("load", session.load_module(path)).await.expect_err(&shown);
        assert!(!error.message().contains("secret\n"), "load {shown:?}: {error}");
        // A link to a folder inside the workspace may be listed, and one that leads outside may
        // not.
        for entry in soon("ls", files.ls(path)).await.unwrap_or_default() {
            assert!(!entry.name.ends_with("secret") && !entry.name.ends_with("passwd"), "ls {shown:?}: {entry:?}");
        }
    }
    // Links can be removed, which leaves their targets.
    for path in &paths {
        let _ = soon("rm", files.rm(path)).await;
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
    assert_eq!(names_in(outside.path()), ["secret"]);
    assert!(Path::new("/etc/passwd").exists());
    let mut own = Vec::new();
    soon("get", files.get("inside/file", &mut own)).await.unwrap();
    assert_eq!(own, b"mine");
    let mut theirs = Vec::new();
    soon("get", Files::new(&neighbour).get("private", &mut theirs)).await.unwrap();
    assert_eq!(theirs, b"neighbour");
    running.stop();
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

// Rubbish.

/// Rubbish inside of the encryption, if there is any, beside good clients.
async fn rubbish_opens_no_session_and_disturbs_nobody(transport: Transport) {
    const PEERS: usize = 300;
    let site = Site::new(transport, with_token()).await;
    let recorded = recorded(&site).await;
    let good = [0; 2].map(|_| GoodClient::start(site.with_token(), &site.address));
    let mut random = Random::new(41);
    let tls = site.authority.trust();
    let mut peers = tokio::task::JoinSet::new();
    for number in 0..PEERS {
        let bytes = match number % 3 {
            0 => {
                let count = random.below(4000);
                random.bytes(count)
            }
            _ => mutated(&recorded, &mut random),
        };
        let mut raw = Raw::dial_to(&site.address, tls.clone()).await;
        peers.spawn(async move {
            raw.write(&bytes).await;
            raw.half_close().await;
            let said = raw.rest().await;
            assert!(!was_accepted(&said), "peer {number}: {} led to {}", bytes.escape_ascii(), said.escape_ascii());
        });
        // The peers come in groups.
        if peers.len() > 20 {
            soon("a peer", peers.join_next()).await.unwrap().unwrap();
        }
    }
    while let Some(peer) = soon("a peer", peers.join_next()).await {
        peer.unwrap();
    }
    for good in good {
        good.stays_unharmed().await;
    }
    site.is_empty().await;
}

/// Rubbish in place of the encryption.
async fn rubbish_in_place_of_tls_disturbs_nobody() {
    let site = Site::new(Transport::Tls, ServeOptions::default()).await;
    let good = GoodClient::start(site.connector(), &site.address);
    let mut random = Random::new(43);
    let valid = tls12_client_hello();
    for number in 0..300 {
        let bytes = match number % 2 {
            0 => {
                let count = random.below(3000);
                random.bytes(count)
            }
            _ => mutated(&valid, &mut random),
        };
        let mut stream = TcpStream::connect(site.socket_address()).await.unwrap();
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut said = Vec::new();
        let _ = soon("the server cuts it off", stream.read_to_end(&mut said)).await;
    }
    good.stays_unharmed().await;
    site.is_empty().await;
}

/// Rubbish datagrams, some of which look like the beginning of a connection.
async fn rubbish_datagrams_disturb_nobody() {
    let site = Site::new(Transport::Quic, ServeOptions::default()).await;
    let good = GoodClient::start(site.connector(), &site.address);
    // The first datagram of a client.
    let catcher = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address: Address = format!("quic://{}", catcher.local_addr().unwrap()).parse().unwrap();
    let tls = site.authority.trust();
    let attempt = tokio::spawn(async move {
        let options = Dial { tls: Some(tls), ..Dial::default() };
        rpc_transports::Transports::default().dial(&address, &options).await.map(drop)
    });
    let mut valid = vec![0; 2000];
    let (len, _) = soon("a client begins", catcher.recv_from(&mut valid)).await.unwrap();
    valid.truncate(len);
    attempt.abort();
    let mut random = Random::new(47);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    for number in 0..20_000 {
        let bytes = match number % 3 {
            0 => {
                let count = 1 + random.below(1400);
                random.bytes(count)
            }
            1 => mutated(&valid, &mut random),
            // The long header of version 1, and noise.
            _ => [&[0xc0 | random.number() as u8, 0, 0, 0, 1, 8][..], &random.bytes(1300)].concat(),
        };
        // The system may refuse a datagram, which is then left out.
        let _ = socket.send_to(&bytes[..bytes.len().min(1400)], site.socket_address()).await;
    }
    good.stays_unharmed().await;
    works(&soon("a good client connects", site.connector().connect(&site.address)).await.unwrap()).await;
}

/// Makes a test for each transport.
macro_rules! each {
    ($($test:ident: $($name:ident($transport:ident))*;)*) => {$(
        mod $test {
            use super::*;

            $(#[test]
            fn $name() {
                peers::run(|| super::$test(Transport::$transport));
            })*
        }
    )*};
}

each! {
    a_client_with_an_unfit_certificate_gets_in_nowhere: tls(Tls) quic(Quic);
    a_server_with_an_unfit_certificate_is_refused: tls(Tls) quic(Quic);
    a_recorded_handshake_opens_no_session: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    a_server_without_the_token_convinces_no_client: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    a_handshake_cannot_be_drawn_out: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    replies_that_nobody_reads_do_not_pile_up: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    a_peer_that_does_nothing_is_cut_off: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    pings_without_end_are_not_all_answered: tcp(Tcp) unix(Unix) tls(Tls);
    thousands_of_half_open_connections_do_not_keep_others_out: tcp(Tcp) tls(Tls);
    a_good_client_gets_in_while_too_many_are_half_open: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    lengths_that_are_not_true_reserve_nothing: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    forged_handles_reach_nothing_of_another_session: tcp(Tcp) tls(Tls) quic(Quic);
    stale_handles_reach_nothing: tcp(Tcp) tls(Tls) quic(Quic);
    rubbish_opens_no_session_and_disturbs_nobody: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
}

macro_rules! once {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        fn $name() {
            peers::run(|| $body);
        }
    )*};
}

once! {
    a_hello_that_was_changed_on_the_way_breaks_the_proof: a_hello_changed_on_the_way_breaks_the_proof();
    a_server_stays_with_tls_1_3: nobody_talks_the_server_out_of_tls_1_3();
    a_client_stays_with_tls_1_3: nobody_talks_a_client_out_of_tls_1_3();
    a_handshake_of_tls_cannot_be_drawn_out: a_tls_handshake_cannot_be_drawn_out();
    a_quic_connection_without_a_channel_is_given_up: a_connection_without_a_channel_is_given_up();
    a_server_that_is_idle_has_no_session: an_idle_server_has_no_session();
    a_client_gives_a_slow_server_up: a_server_that_draws_its_handshake_out_is_given_up();
    half_open_quic_connections_do_not_keep_others_out: quic_connections_that_never_come_about_do_not_keep_others_out();
    unused_quic_connections_do_not_keep_others_out: quic_connections_of_strangers_do_not_keep_others_out();
    no_path_leads_out_of_a_workspace_over_tcp: no_path_leads_out_of_a_workspace("tcp");
    no_path_leads_out_of_a_workspace_over_unix_sockets: no_path_leads_out_of_a_workspace("unix");
    rubbish_for_a_tls_server: rubbish_in_place_of_tls_disturbs_nobody();
    rubbish_for_a_quic_server: rubbish_datagrams_disturb_nobody();
}

//! Bad peers: clients and servers that send nonsense, stall, or break off.

use super::*;

// Bad peers write raw bytes, and so need a transport without encryption.
each_way! {
    over plain:
    bad_clients_disturb_no_other_client
    bad_servers_are_clear_errors
}

/// Time limit of handshakes in the tests of bad peers.
const HANDSHAKE: Duration = Duration::from_millis(500);

/// Tolerance for the difference between clocks and timers.
const SLACK: Duration = Duration::from_millis(10);

/// Good client that calls without end, and must never be disturbed.
struct GoodClient {
    over: Arc<AtomicBool>,
    calls: JoinHandle<(u64, Duration)>,
}

impl GoodClient {
    async fn start(form: Form, address: &str) -> Self {
        let session = connect(form, quick(), address).await.unwrap();
        let add = session.function::<(i64, i64), i64>("add").await.unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let calls = tokio::spawn(async move {
            let (mut calls, mut slowest) = (0, Duration::ZERO);
            while !seen.load(Ordering::Relaxed) {
                let begun = pace::now();
                let call = add.call((calls, 1));
                let sum = match form {
                    Form::Async => call.await,
                    Form::Blocking => on_thread(move || call.wait()).await,
                };
                assert_eq!(sum.unwrap(), calls + 1);
                (calls, slowest) = (calls + 1, slowest.max(pace::since(begun)));
            }
            drop(session);
            (calls as u64, slowest)
        });
        Self { over, calls }
    }

    async fn stays_unharmed(self) {
        self.over.store(true, Ordering::Relaxed);
        let (calls, slowest) = self.calls.await.unwrap();
        assert!(calls > 10 && slowest < LIMIT, "{calls} calls, the slowest took {slowest:?}");
    }
}

/// Returns the error in the last frame that a peer has sent.
fn last_word(frames: &[u8]) -> Option<String> {
    let mut rest = frames;
    let mut word = None;
    while let Some((header, behind)) = rest.split_first_chunk() {
        let header = FrameHeader::decode(header, usize::MAX, usize::MAX).unwrap();
        let (body, behind) = behind.split_at(header.body_len as usize + header.payload_len as usize);
        word = matches!(header.kind, Kind::Close | Kind::Reject).then(|| String::from_utf8_lossy(body).into_owned());
        rest = behind;
    }
    word
}

fn frame(kind: Kind, id: u64, body: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut header = FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) };
    header.payload_len = payload.len() as u32;
    [&header.encode(), body, payload].concat()
}

async fn bad_clients_disturb_no_other_client(transport: Transport, form: Form) {
    let server = ServerPeer::with(transport, &["--keep-alive", "200ms", "--handshake-timeout", "500ms"]);
    let address = server.address().to_owned();
    let good = GoodClient::start(form, &address).await;
    let watcher = Calls::to(&address).await;
    let before = watcher.info().await;
    on_thread(move || misbehave(&address)).await;
    at_pace(LIMIT, "the bad clients are gone", async || watcher.info().await.sessions == before.sessions).await;
    good.stays_unharmed().await;
}

/// Bad clients, one after the other.
fn misbehave(address: &str) {
    // A client of another protocol is cut off at once, without an answer.
    let noise: Vec<u8> = (0..1_u32 << 16).map(|at| (at.wrapping_mul(2654435761) >> 13) as u8).collect();
    for greeting in [&noise[..], b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", &[0; 100]] {
        let mut peer = RawPeer::connect(address);
        peer.write(greeting);
        let (said, took) = peer.rest();
        assert!(said.is_empty(), "{}", said.escape_ascii());
        assert!(took < HANDSHAKE, "noise was cut after {took:?}");
    }
    // A peer that does not finish the handshake is cut off at the time limit.
    let whole = peers::hello(&Hello::new(Role::Client));
    for part in [0, 3, 8, 20, whole.len() - 1] {
        // The server's time begins with the connection, of which this thread may hear later.
        let begun = Instant::now();
        let mut peer = RawPeer::connect(address);
        peer.write(&whole[..part]);
        let took = peer.rest().1;
        assert!(begun.elapsed() > HANDSHAKE - SLACK, "after {part} bytes it was cut after {:?}", begun.elapsed());
        assert!(took < HANDSHAKE + LIMIT, "after {part} bytes it was cut after {took:?}");
    }
    // A peer that ends in the middle of the handshake leaves nothing behind.
    for part in [0, 3, 20, whole.len()] {
        let mut peer = RawPeer::connect(address);
        peer.write(&whole[..part]);
        peer.half_close();
        assert!(peer.rest().1 < HANDSHAKE, "after {part} bytes");
    }
    // A malformed or absurd hello is refused with a reason.
    let mut old = Hello::new(Role::Client);
    (old.version_min, old.version_max) = (0, 0);
    let refused = [
        [&peers::hello(&old)[..], &[]],
        [&peers::hello(&Hello::new(Role::Server)), &[]],
        [&whole[..8], &frame(Kind::Hello, 0, &[0xc1; 40], &[])],
        [&whole[..8], &frame(Kind::Request, 1, &[0x90], &[])],
        [&whole[..8], &FrameHeader::control(Kind::Hello, u32::MAX).encode()],
        // A list of four billion features.
        [&whole[..8], &frame(Kind::Hello, 0, b"\x81\xa8features\xdd\xff\xff\xff\xff", &[])],
    ];
    for hello in refused {
        let mut peer = RawPeer::connect(address);
        peer.write(&hello.concat());
        let (said, took) = peer.rest();
        let word = said.strip_prefix(&rpc_core::proto::MAGIC).and_then(last_word);
        assert!(word.is_some(), "refused without a word: {}", said.escape_ascii());
        assert!(took < HANDSHAKE, "refused after {took:?}");
    }
    // Nonsense after the handshake ends the session with a reason.
    let nonsense = [
        vec![0xff; 24],
        frame(Kind::Request, 1, &[0xc1], &[]),
        frame(Kind::Request, 1, &[0x93, 0x01, 0xc0, 0x91, 0xdb, 0xff, 0xff, 0xff, 0xff], &[]),
        frame(Kind::Reply, 1, &[0xc0], &[]),
        frame(Kind::Free, 0, &[1, 2, 3], &[]),
        frame(Kind::Credit, 0, &[1, 2, 3], &[]),
        frame(Kind::Hello, 0, &[], &[]),
        FrameHeader::control(Kind::Request, u32::MAX).encode().to_vec(),
        FrameHeader { payload_len: u32::MAX, id: 1, ..FrameHeader::control(Kind::Request, 0) }.encode().to_vec(),
        FrameHeader { payload_len: 1, id: 1, ..FrameHeader::control(Kind::Ping, 0) }.encode().to_vec(),
        // Deeply nested lists.
        frame(Kind::Request, 1, &[&[0x93, 0x02, 0xc0][..], &[0x91; 10_000]].concat(), &[]),
    ];
    for (at, nonsense) in nonsense.iter().enumerate() {
        let mut peer = RawPeer::greeted(address);
        peer.write(nonsense);
        let (said, took) = peer.rest();
        assert!(last_word(&said).is_some(), "nonsense {at} ended without a word: {}", said.escape_ascii());
        assert!(took < HANDSHAKE, "nonsense {at} ended after {took:?}");
    }
    // An unfinished frame: silence ends the session, and the end of the stream ends it at once.
    let begun = frame(Kind::Request, 1, &sleep_request(), &[0; 100_000]);
    for part in [1, 23, 24, 30, 20_000] {
        let mut peer = RawPeer::greeted(address);
        let written = Instant::now();
        peer.write(&begun[..part]);
        let took = peer.rest().1;
        assert!(written.elapsed() >= DEAD - SLACK, "{part} bytes of a frame: cut after {:?}", written.elapsed());
        assert!(took < LIMIT, "{part} bytes of a frame: cut after {took:?}");
        let mut peer = RawPeer::greeted(address);
        peer.write(&begun[..part]);
        peer.half_close();
        assert!(peer.rest().1 < KEEP_ALIVE * 2, "{part} bytes of a frame and the end");
    }
    let mut peer = RawPeer::greeted(address);
    peer.half_close();
    assert!(peer.rest().1 < KEEP_ALIVE * 2, "a client that has said all");
}

/// Returns a request for the function `rpc.sleep`.
fn sleep_request() -> Vec<u8> {
    [&[0x93, 0x01, 0xc0, 0x91, 0xa9][..], b"rpc.sleep"].concat()
}

/// Misbehaviour of a server towards a client.
#[derive(Clone, Copy, Debug)]
enum BadServer {
    SaysNothing,
    Closes,
    SpeaksHttp,
    StopsInTheHello,
    ClosesInTheHello,
    RepliesWithNoise,
    RepliesToNobody,
    StopsInAFrame,
    ClosesInAFrame,
    Closed,
}

impl BadServer {
    fn serve(self, io: &BlockingIo) {
        let mut writer = io;
        let hello = peers::hello(&Hello::new(Role::Server));
        let greeting = match self {
            Self::SaysNothing | Self::Closes => Vec::new(),
            Self::SpeaksHttp => b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            Self::StopsInTheHello | Self::ClosesInTheHello => hello[..hello.len() / 2].to_vec(),
            _ => [&hello[..], &FrameHeader::control(Kind::Accept, 0).encode()].concat(),
        };
        let _ = writer.write_all(&greeting);
        if matches!(self, Self::Closes | Self::ClosesInTheHello) {
            return;
        }
        // This answers the first request of the session.
        let answer = match self {
            Self::RepliesWithNoise => vec![0xff; 100],
            Self::RepliesToNobody => frame(Kind::Reply, 1 << 40, &[0xc0], &[]),
            Self::StopsInAFrame | Self::ClosesInAFrame => frame(Kind::Reply, 1, &[0; 1000], &[])[..100].to_vec(),
            _ => Vec::new(),
        };
        let mut seen = Vec::new();
        let mut reader = io;
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            seen.extend_from_slice(&buffer[..count]);
            if seen.windows(3).any(|bytes| bytes == b"add") {
                seen.clear();
                let _ = writer.write_all(&answer);
                if matches!(self, Self::ClosesInAFrame | Self::Closed) {
                    return;
                }
            }
        }
    }
}

/// Starts a server that misbehaves in the same way on each connection, on threads that end with the
/// test program.
fn listen(transport: Transport, folder: &tempfile::TempDir, bad: BadServer) -> String {
    match transport {
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = format!("tcp://{}", listener.local_addr().unwrap());
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let io = BlockingIo::from(stream.unwrap());
                    thread::spawn(move || bad.serve(&io));
                }
            });
            address
        }
        Transport::Unix => {
            let path = folder.path().join(format!("{bad:?}"));
            let listener = UnixListener::bind(&path).unwrap();
            thread::spawn(move || {
                for stream in listener.incoming() {
                    let io = BlockingIo::from(stream.unwrap());
                    thread::spawn(move || bad.serve(&io));
                }
            });
            format!("unix:{}", path.display())
        }
        Transport::Tls | Transport::Quic => unreachable!("its bytes are not for anybody to choose"),
    }
}

async fn bad_servers_are_clear_errors(transport: Transport, form: Form) {
    let folder = tempfile::tempdir().unwrap();
    // First servers that open no session, then sessions that fail at the first call.
    for (bad, kind, least) in [
        (BadServer::SaysNothing, ErrorKind::PeerSilent, HANDSHAKE),
        (BadServer::Closes, ErrorKind::Refused, Duration::ZERO),
        (BadServer::SpeaksHttp, ErrorKind::Protocol, Duration::ZERO),
        (BadServer::StopsInTheHello, ErrorKind::PeerSilent, HANDSHAKE),
        (BadServer::ClosesInTheHello, ErrorKind::Refused, Duration::ZERO),
    ] {
        let address = listen(transport, &folder, bad);
        let (since, begun) = (pace::now(), Instant::now());
        let outcome = connect(form, quick().handshake_timeout(HANDSHAKE), &address).await;
        let error = outcome.expect_err("no session").into_rpc_error();
        let (took, waited) = (pace::since(since), begun.elapsed());
        // A peer that closes with unread bytes resets the connection, which then looks like a
        // broken link.
        let lost = error.kind() == ErrorKind::PeerLost && least.is_zero() && !matches!(bad, BadServer::SpeaksHttp);
        assert!(error.kind() == kind || lost, "{bad:?}: {error}");
        assert!(error.peer().is_some(), "{bad:?}: {error}");
        assert!(waited >= least && took < least + LIMIT, "{bad:?}: {waited:?}");
    }
    for (bad, kind) in [
        (BadServer::RepliesWithNoise, ErrorKind::Protocol),
        (BadServer::RepliesToNobody, ErrorKind::Protocol),
        (BadServer::StopsInAFrame, ErrorKind::PeerSilent),
        (BadServer::ClosesInAFrame, ErrorKind::PeerLost),
        (BadServer::Closed, ErrorKind::PeerLost),
    ] {
        let address = listen(transport, &folder, bad);
        let session = connect(form, quick(), &address).await.unwrap();
        let begun = pace::now();
        let calls = [Lane(0), Lane(0), Lane(1)]
            .map(|lane| watch(form, "a call", session.get_function("add").lane(lane).start()));
        for call in calls {
            let (outcome, at) = call.outcome.await.unwrap();
            let error: RpcError = outcome.unwrap_err();
            assert_eq!(error.kind(), kind, "{bad:?}: {error}");
            assert!(at.saturating_sub(begun) <= LIMIT, "{bad:?}");
        }
        assert_eq!(session.ended().await.kind(), kind, "{bad:?}");
    }
}

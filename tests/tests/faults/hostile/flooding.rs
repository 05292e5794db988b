//! Flooding: requests without end, unread replies, half-open connections, false lengths.

use super::*;

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
async fn unread_replies_do_not_accumulate(transport: Transport) {
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
        within(TIME_LIMIT, "calls have begun", async || replies.begun.load(Ordering::Acquire) > begun + 2).await;
        // The server has had time to send, because others were served meanwhile.
        let session = soon("connect", site.connector().connect(&site.address)).await.unwrap();
        for _ in 0..30 {
            works(&session).await;
        }
        // Replies without room are made and then refused, which may take a moment.
        let room = (windows * WINDOW) >> 20;
        let fits = async || replies.alive.load(Ordering::Acquire) <= room;
        within(TIME_LIMIT, "what is kept for a peer that reads nothing fits its window", fits).await;
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
    // On a machine that stands still a peer may be cut off before it has asked.
    let mut attempts = 0;
    let raw = loop {
        if let Some(raw) = asks_for_much(&site).await {
            break raw;
        }
        attempts += 1;
        assert!(attempts < 10, "a peer is cut off although it is not silent");
    };
    within(OVER, "it is cut off", async || site.server.sessions() == 0).await;
    soon("nothing is left of it", site.server.idle()).await;
    drop(raw);
}

/// Connects a peer that asks for more than a connection holds. Returns `None` if its session ends
/// meanwhile.
async fn asks_for_much(site: &Site) -> Option<Raw> {
    let mut raw = Raw::greeted(site, &Hello::new(Role::Client)).await;
    raw.write(&request(1, Lane(0), Operation::GetFunction { name: "bulk".to_owned() })).await;
    let reply = loop {
        let (header, body) = raw.frame().await?;
        match header.kind {
            Kind::Reply => break body,
            Kind::Ping => {}
            _ => return None,
        }
    };
    let function = function_in(&reply);
    for id in 2..7 {
        raw.write(&request(id, Lane(0), Operation::Call { function, args: Vec::new() })).await;
    }
    (site.server.sessions() == 1).then_some(raw)
}

async fn endless_pings_are_not_all_answered(transport: Transport) {
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
    let options = ServeOptions { handshake_timeout: TIME_LIMIT * 3, ..ServeOptions::default() };
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
    let options = ServeOptions { max_handshakes: 32, handshake_timeout: TIME_LIMIT * 3, ..ServeOptions::default() };
    let site = Site::new(transport, options).await;
    let early = soon("connect", site.connector().connect(&site.address)).await.unwrap();
    // The handshake is complete at the server, too.
    works(&early).await;
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
    within(TIME_LIMIT, "those beyond the limit are cut off", async || cut_off.load(Ordering::Acquire) == 68).await;
    // The oldest other handshakes are closed, although all come from one machine.
    for _ in 0..5 {
        works(&soon("a good client connects", site.connector().connect(&site.address)).await.unwrap()).await;
    }
    // Established sessions are not affected.
    works(&early).await;
    // Draining does not wait for unfinished handshakes.
    let begun = Instant::now();
    site.server.drain(TIME_LIMIT * 3).await;
    assert!(begun.elapsed() < TIME_LIMIT, "{:?}", begun.elapsed());
    for raw in held {
        raw.abort();
    }
}

/// Connections whose clients never answer the server, more than it keeps.
async fn unanswered_quic_connections_do_not_keep_others_out() {
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
    within(TIME_LIMIT, "they have all begun", async || hole.passed().0 >= 400).await;
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
async fn false_lengths_reserve_no_memory(transport: Transport) {
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

each! {
    unread_replies_do_not_accumulate: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    a_peer_that_does_nothing_is_cut_off: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    endless_pings_are_not_all_answered: tcp(Tcp) unix(Unix) tls(Tls);
    thousands_of_half_open_connections_do_not_keep_others_out: tcp(Tcp) tls(Tls);
    a_good_client_gets_in_while_too_many_are_half_open: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    false_lengths_reserve_no_memory: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
}

once! {
    half_open_quic_connections_do_not_keep_others_out: unanswered_quic_connections_do_not_keep_others_out();
    unused_quic_connections_do_not_keep_others_out: quic_connections_of_strangers_do_not_keep_others_out();
}

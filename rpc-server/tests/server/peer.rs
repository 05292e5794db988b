//! Sends from one server to another: the routes that they take, what a capability allows, and what
//! is left when a party fails.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use rpc_core::client::{CHUNK, SendRoute};
use rpc_core::{DataType, Device, ErrorKind, RemoteFunction, RemoteObject, RemoteTensor, Result, RpcError, Session};
use rpc_transports::{Capability, Connector, Tokens};

use super::cli::{Fixture, cli, unused};

/// Limit against a test that hangs.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Flags of a server that sends to every server of this machine.
const SENDS: &[&str] = &["--isolate", "none", "--allow-peer", "tcp://127.0.0.1:*,tls://127.0.0.1:*"];

/// Flags of a server that is sent to.
const RECEIVES: &[&str] = &["--isolate", "none"];

fn connect(address: &str) -> Session {
    Connector::new().connect_blocking(address).unwrap()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 % 251) as u8).collect()
}

fn bytes(session: &Session, len: usize) -> RemoteTensor {
    session.alloc(Device::cpu(), DataType::U8, &[len as i64]).wait().unwrap()
}

fn content(tensor: &RemoteTensor) -> Vec<u8> {
    tensor.session().copy_from_remote(tensor).wait().unwrap().to_vec()
}

/// Connection between the client and a server, which a test can cut.
struct Link {
    address: String,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Link {
    fn new(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let (server, ends) = (server.trim_start_matches("tcp://").to_owned(), Arc::<Mutex<Vec<_>>>::default());
        let kept = ends.clone();
        thread::spawn(move || {
            let near = listener.accept().unwrap().0;
            let far = TcpStream::connect(server).unwrap();
            for (mut from, mut to) in [(&near, &far), (&far, &near)].map(|(from, to)| (copy_of(from), copy_of(to))) {
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
            kept.lock().unwrap().extend([near, far]);
        });
        Self { address, ends }
    }

    /// Cuts the connection. Its ends are there: a request has been answered.
    fn cut(&self) {
        for end in self.ends.lock().unwrap().iter() {
            // The end of one ends the other, too.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn copy_of(stream: &TcpStream) -> TcpStream {
    stream.try_clone().unwrap()
}

/// Two servers, a session with each, and a tensor in both.
struct Pair {
    source: Fixture,
    /// Link between the client and the source.
    link: Link,
    destination: Fixture,
    from: RemoteTensor,
    to: RemoteTensor,
    data: Vec<u8>,
}

impl Pair {
    fn new(source: &[&str], destination: &[&str], len: usize) -> Self {
        let (source, destination) = (Fixture::new(source), Fixture::new(destination));
        let link = Link::new(source.address());
        let (near, far) = (connect(&link.address), connect(destination.address()));
        let data = pattern(len);
        let from = near.upload(&[len as i64], &data).wait().unwrap();
        let to = bytes(&far, len);
        Self { source, link, destination, from, to, data }
    }

    fn send(&self) -> Result<SendRoute> {
        self.from.session().send(&self.from, &self.to.session(), &self.to).timeout(HANG_LIMIT).wait()
    }

    /// Sends, checks that all has arrived through the client, and returns the reason.
    fn send_through_client(&self) -> String {
        let route = self.send().unwrap();
        assert_eq!(content(&self.to), self.data);
        match route {
            SendRoute::ThroughClient { reason } => reason,
            other => panic!("{other}"),
        }
    }
}

#[test]
fn bytes_go_from_one_server_to_the_other() {
    let len = 5 * CHUNK + 11;
    let pair = Pair::new(SENDS, RECEIVES, len);
    let direct = SendRoute::Direct { address: pair.destination.address().to_owned() };
    assert_eq!(pair.send().unwrap(), direct);
    assert_eq!(content(&pair.to), pair.data);
    // Parts, an empty one among them, with views, and nothing else is touched.
    let (near, far) = (pair.from.session(), pair.to.session());
    for (range, offset) in [(3..CHUNK as u64 + 9, 7), (0..len as u64 - 100, 100), (5..5, len as u64)] {
        far.copy_to_remote(&pair.to, vec![0; len]).wait().unwrap();
        let mut seen = Vec::new();
        let (from, to) = (&pair.from, pair.to.view(4, DataType::U8, &[len as i64 - 4], None));
        let offset_in_view = u64::max(offset, 4) - 4;
        let send = near.send_range(from, range.clone(), &far, &to, offset_in_view);
        let route = send.progress(move |sent| seen.push(sent)).wait().unwrap();
        assert_eq!(route, direct);
        let mut expected = vec![0; len];
        let at = 4 + offset_in_view as usize;
        let part = &pair.data[range.start as usize..range.end as usize];
        expected[at..at + part.len()].copy_from_slice(part);
        assert!(content(&pair.to) == expected, "{range:?} at {offset}");
    }
    // A copy that does not fit is refused before anything is sent.
    for (range, offset) in [(0..len as u64 + 1, 0), (0..10, len as u64 - 9), (Range { start: 7, end: 3 }, 0)] {
        let error = near.send_range(&pair.from, range, &far, &pair.to, offset).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    let strided = pair.from.view(0, DataType::U8, &[4, 4], Some(&[8, 1]));
    let error = near.send(&strided, &far, &pair.to).wait().unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("densely packed"), "{error}");
    let error = far.send(&pair.from, &far, &pair.to).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle);
    let copied = near.send(&pair.from, &near, &bytes(&near, len)).wait().unwrap();
    assert_eq!(copied, SendRoute::SameSession);
}

#[test]
fn what_cannot_go_directly_goes_through_the_client() {
    let len = CHUNK + 5;
    let reason = Pair::new(RECEIVES, RECEIVES, len).send_through_client();
    assert!(reason.contains("--allow-peer"), "{reason}");
    let other = &["--isolate", "none", "--allow-peer", "tcp://127.0.0.1:1"];
    let reason = Pair::new(other, RECEIVES, len).send_through_client();
    assert!(reason.contains("--allow-peer"), "{reason}");
    // Nothing listens there, and nothing that another server could dial is named.
    let nowhere = unused();
    let reason = Pair::new(SENDS, &["--isolate", "none", "--peer-address", &nowhere], len).send_through_client();
    assert!(reason.contains(&nowhere), "{reason}");
    // A server that is not the one that has made the capability, and has none.
    let stranger = Fixture::new(RECEIVES);
    let flags = ["--isolate", "none", "--peer-address", stranger.address()];
    let reason = Pair::new(SENDS, &flags, len).send_through_client();
    assert!(reason.contains("no such capability"), "{reason}");
}

#[test]
fn a_source_at_its_limits_sends_through_the_client() {
    // The tensor has room in the session, and the buffers of a connection have none.
    let pair = Pair::new(&[SENDS, &["--max-memory", "512KiB"]].concat(), RECEIVES, 300 << 10);
    let reason = pair.send_through_client();
    assert!(reason.contains("max_memory"), "{reason}");
}

#[test]
fn addresses_of_this_machine_are_for_clients_of_this_machine() {
    let (hop, server) = (Fixture::new(&[RECEIVES, &["--allow-forward", "*"]].concat()), Fixture::new(RECEIVES));
    let named = Fixture::new(&[RECEIVES, &["--peer-address", "tcp://127.0.0.1:1"]].concat());
    let addresses = |session: &Session| {
        let terms = (&bytes(session, 8), 0, 8, 30_000, false);
        let (_, addresses, _): (RemoteObject, Vec<String>, String) =
            function(session, "rpc.peer.offer").call(terms).wait().unwrap();
        addresses
    };
    assert_eq!(addresses(&connect(server.address())), [server.address()]);
    // The machine of a client behind a hop is not known.
    let through = |server: &Fixture| Connector::new().via(hop.address()).connect_blocking(server.address()).unwrap();
    assert_eq!(addresses(&through(&server)), [""; 0]);
    assert_eq!(addresses(&through(&named)), ["tcp://127.0.0.1:1"]);
}

#[test]
fn a_policy_gives_the_right_to_send_by_address() {
    for (peers, is_direct) in [("tcp://127.0.0.1:*", true), ("tcp://127.0.0.2:*", false)] {
        let folder = tempfile::tempdir().unwrap();
        let policy = folder.path().join("policy").to_str().unwrap().to_owned();
        let rule = format!("[[rule]]\nname = 'all'\nidentities = ['anonymous']\npeer = ['{peers}']\n");
        std::fs::write(&policy, rule).unwrap();
        let pair = Pair::new(&[SENDS, &["--policy", &policy]].concat(), RECEIVES, 100);
        match pair.send().unwrap() {
            SendRoute::Direct { .. } if is_direct => assert_eq!(content(&pair.to), pair.data),
            SendRoute::ThroughClient { reason } if !is_direct => assert!(reason.contains("'all'"), "{reason}"),
            other => panic!("{peers}: {other}"),
        }
    }
    // Whoever has a rule may be sent to.
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy").to_str().unwrap().to_owned();
    std::fs::write(&policy, "[[rule]]\nname = 'all'\nidentities = ['anonymous']\n").unwrap();
    let pair = Pair::new(SENDS, &[RECEIVES, &["--policy", &policy]].concat(), 100);
    assert!(matches!(pair.send().unwrap(), SendRoute::Direct { .. }));
}

#[test]
fn info_tells_where_a_server_sends_and_is_sent_to() {
    let info = |server: &Fixture| cli(&["info", server.address()]).ok();
    let server = Fixture::new(&[SENDS, &["--peer-address", "tcp://127.0.0.1:1"]].concat());
    let text = info(&server);
    assert!(text.contains("\nsends      to tcp://127.0.0.1:*, tls://127.0.0.1:*\n"), "{text}");
    assert!(text.contains("\nreceives   at tcp://127.0.0.1:1\n"), "{text}");
    let server = Fixture::new(RECEIVES);
    let text = info(&server);
    assert!(text.contains("\nsends      through the client (--allow-peer)\n"), "{text}");
    let sends = cli(&["info", server.address(), "--json"]).json()["sends"].clone();
    assert_eq!(sends, serde_json::json!({ "to": [], "addresses": [server.address()] }));
    // With a policy, the patterns of the client's rules, below those of the settings.
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy").to_str().unwrap().to_owned();
    let rule = "[[rule]]\nname = 'all'\nidentities = ['anonymous']\npeer = ['tcp://127.0.0.1:7']\n";
    std::fs::write(&policy, rule).unwrap();
    let text = info(&Fixture::new(&[SENDS, &["--policy", &policy]].concat()));
    assert!(text.contains("\nsends      to tcp://127.0.0.1:7\n"), "{text}");
    let text = info(&Fixture::new(&["--isolate", "process", "--max-memory", "64MiB"]));
    assert!(text.contains("\nreceives   through the client: ") && text.contains("process of its own"), "{text}");
}

#[test]
fn isolated_sessions_send_and_are_sent_to_through_the_client() {
    let isolated = &["--isolate", "process", "--max-memory", "64MiB"];
    let sending = [isolated, &["--allow-peer", "tcp://127.0.0.1:*"][..]].concat();
    let pair = Pair::new(&sending, RECEIVES, CHUNK + 5);
    assert!(matches!(pair.send().unwrap(), SendRoute::Direct { .. }));
    assert_eq!(content(&pair.to), pair.data);
    let reason = Pair::new(SENDS, isolated, CHUNK + 5).send_through_client();
    assert!(reason.contains("process of its own"), "{reason}");
}

#[test]
fn what_the_client_encrypts_is_encrypted_between_the_servers() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token").to_str().unwrap().to_owned();
    assert_eq!(cli(&["token", "--out", &token]).code, 0);
    let tokens = Tokens::parse(&std::fs::read_to_string(&token).unwrap()).unwrap();
    let secure = ["--listen", "tls://127.0.0.1:0,quic://127.0.0.1:0", "--token-file", &token, "--isolate", "none"];
    let (plain, secure) = (Fixture::new(SENDS), Fixture::listening(&secure));
    let near = connect(plain.address());
    let far = Connector::new().tokens(tokens).connect_blocking(secure.address()).unwrap();
    let data = pattern(CHUNK + 3);
    let from = near.upload(&[data.len() as i64], &data).wait().unwrap();
    let to = bytes(&far, data.len());
    // The server at the far end is known by the capability alone.
    let route = near.send(&from, &far, &to).wait().unwrap();
    assert_eq!(route, SendRoute::Direct { address: secure.address().to_owned() });
    assert_eq!(content(&to), data);
    // The server offers only encrypted addresses, whatever the client asks for.
    let mixed = ["--listen", "tls://127.0.0.1:0,tcp://127.0.0.1:0", "--token-file", &token, "--isolate", "none"];
    let mixed = Fixture::listening(&mixed);
    let tokens = Tokens::parse(&std::fs::read_to_string(&token).unwrap()).unwrap();
    let session = Connector::new().tokens(tokens).connect_blocking(mixed.address()).unwrap();
    let offer = function(&session, "rpc.peer.offer");
    let (_offer, addresses, _): (RemoteObject, Vec<String>, String) =
        offer.call((&bytes(&session, 8), 0, 8, 30_000, false)).wait().unwrap();
    assert_eq!(addresses, [mixed.address()]);
    // Back to a server that has no encrypted address.
    let sending = ["--listen", "tls://127.0.0.1:0", "--token-file", &token];
    let sending = Fixture::listening(&[&sending, SENDS].concat());
    let tokens = Tokens::parse(&std::fs::read_to_string(&token).unwrap()).unwrap();
    let near = Connector::new().tokens(tokens).connect_blocking(sending.address()).unwrap();
    let from = near.upload(&[data.len() as i64], &data).wait().unwrap();
    let far = connect(plain.address());
    let to = bytes(&far, data.len());
    match near.send(&from, &far, &to).wait().unwrap() {
        SendRoute::ThroughClient { reason } => assert!(reason.contains("encrypted"), "{reason}"),
        other => panic!("{other}"),
    }
    assert_eq!(content(&to), data);
}

/// An offer of a server, made by hand.
struct Offered {
    session: Session,
    to: RemoteTensor,
    offer: RemoteObject,
    address: String,
    capability: Capability,
}

fn function(session: &Session, name: &str) -> RemoteFunction {
    session.get_function(name).wait().unwrap()
}

impl Offered {
    /// Offers 8 bytes from the fourth on.
    fn new(server: &Fixture, lifetime_ms: i64, encrypted: bool) -> Self {
        let session = connect(server.address());
        let to = bytes(&session, 16);
        let offer = function(&session, "rpc.peer.offer");
        let (offer, mut addresses, capability): (_, Vec<String>, String) =
            offer.call((&to, 4, 8, lifetime_ms, encrypted)).wait().unwrap();
        let address = addresses.pop().unwrap_or_else(|| server.address().to_owned());
        Self { session, to, offer, address, capability: capability.parse().unwrap() }
    }

    fn connect_by(&self, capability: &Capability) -> Result<Session> {
        let connector = Connector::new().tokens(Tokens::capability(capability.clone()));
        connector.connect_blocking(&self.address).map_err(rpc_transports::ConnectError::into_rpc_error)
    }

    fn connect(&self) -> Result<Session> {
        self.connect_by(&self.capability)
    }

    /// Withdraws the offer. Returns true if it was used.
    fn withdraw(&self) -> bool {
        function(&self.session, "rpc.peer.withdraw").call((&self.offer,)).wait().unwrap()
    }
}

fn is_refused(outcome: Result<Session>, text: &str) -> RpcError {
    let error = outcome.unwrap_err();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains(text), "{error}");
    error
}

/// Objects are freed a moment after the answer: a connection that was faster ends then.
fn is_refused_or_ends(outcome: Result<Session>, text: &str) {
    let error = match outcome {
        Ok(holder) => rpc_core::blocking::block_on(holder.ended()).unwrap(),
        Err(error) => error,
    };
    assert!(error.message().contains(text), "{error}");
}

#[test]
fn a_capability_is_good_for_one_connection_in_its_time() {
    let server = Fixture::new(RECEIVES);
    let offered = Offered::new(&server, 30_000, false);
    // Altered, and unknown: these do not use it up.
    let text = offered.capability.to_text();
    let last = if text.ends_with('0') { '1' } else { '0' };
    let altered: Capability = format!("{}{last}", &text[..text.len() - 1]).parse().unwrap();
    let error = offered.connect_by(&altered).unwrap_err();
    assert!(error.kind() == ErrorKind::Unauthenticated && error.message().contains("secret"), "{error}");
    is_refused(offered.connect_by(&Capability::generate().unwrap()), "no such capability");
    // Used, and replayed, while the connection lasts and after it.
    let holder = offered.connect().unwrap();
    is_refused(offered.connect(), "used before");
    let range: RemoteTensor = function(&holder, "rpc.peer.range").call(()).wait().unwrap();
    holder.copy_to_remote(&range, vec![7; 8]).wait().unwrap();
    assert_eq!(content(&offered.to), [[0; 4], [7; 4], [7; 4], [0; 4]].concat());
    drop((range, holder));
    is_refused(offered.connect(), "used before");
    assert!(offered.withdraw());
    // Expired.
    let offered = Offered::new(&server, 0, false);
    is_refused(offered.connect(), "expired");
    assert!(!offered.withdraw());
    // Withdrawn, freed, and of a session that has ended.
    let offered = Offered::new(&server, 30_000, false);
    assert!(!offered.withdraw());
    is_refused(offered.connect(), "withdrawn");
    let Offered { session, to: _to, offer, address, capability } = Offered::new(&server, 30_000, false);
    offer.free().wait().unwrap();
    let by = Connector::new().tokens(Tokens::capability(capability));
    let connected = by.connect_blocking(&address).map_err(rpc_transports::ConnectError::into_rpc_error);
    is_refused_or_ends(connected, "withdrawn");
    drop(session);
    let offered = Offered::new(&server, 30_000, false);
    offered.session.shutdown().wait().unwrap();
    is_refused_or_ends(offered.connect(), "withdrawn");
    // For encrypted connections alone.
    is_refused(Offered::new(&server, 30_000, true).connect(), "encrypted");
    // A text that is none, and a lifetime of no sense.
    let offered = Offered::new(&server, i64::MIN, false);
    is_refused(offered.connect(), "expired");
}

#[test]
fn a_capability_allows_writes_to_its_range_and_nothing_else() {
    let server = Fixture::new(&[RECEIVES, &["--allow-forward", "*"]].concat());
    let offered = Offered::new(&server, 30_000, false);
    let holder = offered.connect().unwrap();
    let range: RemoteTensor = function(&holder, "rpc.peer.range").call(()).wait().unwrap();
    assert_eq!((range.size_bytes(), range.byte_offset()), (8, 4));
    let refusals = [
        holder.get_function("rpc.info").wait().unwrap_err(),
        holder.get_function("rpc.echo").wait().unwrap_err(),
        holder.alloc(Device::cpu(), DataType::U8, &[1]).wait().unwrap_err(),
        holder.copy_from_remote(&range).wait().unwrap_err(),
        holder.copy_among_remote(&range, &range).wait().unwrap_err(),
        holder.load_module("x.so").wait().unwrap_err(),
        holder.create_stream(Device::cpu()).wait().unwrap_err(),
        // Other views of the storage: shifted, longer, and of other elements.
        holder.copy_to_remote(&range.view(1, DataType::U8, &[8], None), vec![1; 8]).wait().unwrap_err(),
        holder.copy_to_remote(&range.view(0, DataType::U8, &[12], None), vec![1; 12]).wait().unwrap_err(),
        holder.copy_to_remote(&range.view(0, DataType::I32, &[2], None), vec![1; 8]).wait().unwrap_err(),
    ];
    for error in refusals {
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    }
    let error = holder.copy_to_remote_at(&range, 1, vec![1; 8]).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(content(&offered.to), [0; 16]);
    // No hop and no tunnel by a capability.
    let offered = Offered::new(&server, 30_000, false);
    let connector = Connector::new().tokens(Tokens::capability(offered.capability.clone()));
    let forwarded = connector.via(offered.address.as_str()).connect_blocking(server.address());
    let error = forwarded.unwrap_err().into_rpc_error();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("no tunnel or hop"), "{error}");
    // The end of the offer ends the connection of its holder.
    let holder = offered.connect().unwrap();
    assert!(offered.withdraw());
    let error = rpc_core::blocking::block_on(holder.ended()).unwrap();
    assert!(error.message().contains("withdrawn"), "{error}");
}

#[test]
fn a_server_without_capabilities_refuses_their_holders() {
    let server = Fixture::new(&["--isolate", "process", "--max-memory", "64MiB"]);
    let connector = Connector::new().tokens(Tokens::capability(Capability::generate().unwrap()));
    let error = connector.connect_blocking(server.address()).unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
}

#[test]
fn another_users_of_the_capability_is_reported_and_nothing_is_sent_over_it() {
    // The destination names an address where a thief uses the capability and gives no answer.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let thief = format!("tcp://{}", listener.local_addr().unwrap());
    let pair = Pair::new(SENDS, &["--isolate", "none", "--peer-address", &thief], 100);
    let target = pair.destination.address().trim_start_matches("tcp://").to_owned();
    thread::spawn(move || {
        // Passes the handshake on, so that the capability is used, and cuts the source off.
        let source = listener.accept().unwrap().0;
        let server = TcpStream::connect(target).unwrap();
        let (mut up, mut to) = (source.try_clone().unwrap(), server.try_clone().unwrap());
        let copy = thread::spawn(move || std::io::copy(&mut up, &mut to));
        let mut from_server = server.try_clone().unwrap();
        let mut magic = [0; 8];
        from_server.read_exact(&mut magic).unwrap();
        (&source).write_all(&magic).unwrap();
        loop {
            let mut header = [0; 24];
            from_server.read_exact(&mut header).unwrap();
            // The server accepts in a frame of kind 2, which is not passed on.
            if header[20] == 2 {
                break;
            }
            let mut body = vec![0; u32::from_le_bytes(*header.first_chunk().unwrap()) as usize];
            from_server.read_exact(&mut body).unwrap();
            (&source).write_all(&[&header[..], &body].concat()).unwrap();
        }
        let _ = source.shutdown(Shutdown::Both);
        let _ = copy.join();
        // Keeps the connection to the server.
        let _ = from_server.read(&mut magic);
    });
    let error = pair.send().unwrap_err();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("was used"), "{error}");
    assert!(error.request_may_have_run());
}

/// A forwarder between two servers, which stops after some bytes and says so.
struct Stall {
    address: String,
    stopped: Receiver<()>,
    /// Says that the source has closed its connection.
    source_gone: Receiver<()>,
}

impl Stall {
    /// `passes_end` makes the end of the destination's answers that of the source's input, too.
    /// Without it the source hears nothing from the stop on.
    fn new(passes_end: bool) -> (Self, Sender<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let (target, to) = channel::<String>();
        let (stops, stopped) = channel();
        let (ends, source_gone) = channel();
        thread::spawn(move || {
            let mut source = listener.accept().unwrap().0;
            let server = TcpStream::connect(to.recv().unwrap()).unwrap();
            let (mut answers, mut back) = (server.try_clone().unwrap(), source.try_clone().unwrap());
            let is_silent = Arc::new(AtomicBool::new(false));
            let was_stopped = is_silent.clone();
            thread::spawn(move || {
                let mut piece = vec![0; 64 << 10];
                while let Ok(count @ 1..) = answers.read(&mut piece) {
                    if !was_stopped.load(Ordering::Acquire) && back.write_all(&piece[..count]).is_err() {
                        break;
                    }
                }
                // A source that is still writing reads the last message all the same.
                if passes_end {
                    let _ = back.shutdown(Shutdown::Write);
                }
            });
            let mut piece = vec![0; 64 << 10];
            let mut passed = 0;
            let mut server = Some(server);
            while let Ok(count @ 1..) = source.read(&mut piece) {
                let was_below = passed < 2 * CHUNK;
                passed += count;
                if passed < 2 * CHUNK {
                    let _ = server.as_mut().unwrap().write_all(&piece[..count]);
                } else if was_below {
                    is_silent.store(!passes_end, Ordering::Release);
                    stops.send(()).unwrap();
                    // Reads on, so that the end of the source is noticed; the server gets no more.
                }
            }
            drop(server.take());
            let _ = ends.send(());
        });
        (Self { address, stopped, source_gone }, target)
    }
}

/// Returns servers between which a send stops in the middle.
fn stalling() -> (Stall, Pair) {
    stalling_with(SENDS, true)
}

fn stalling_with(source: &[&str], passes_end: bool) -> (Stall, Pair) {
    let (stall, target) = Stall::new(passes_end);
    let pair = Pair::new(source, &["--isolate", "none", "--peer-address", &stall.address], 64 * CHUNK);
    target.send(pair.destination.address().trim_start_matches("tcp://").to_owned()).unwrap();
    (stall, pair)
}

/// Starts a send that stops in the middle. Returns the pair, the stall and the outcome to come.
fn stopped_in_the_middle() -> (Pair, Stall, Receiver<Result<SendRoute>>) {
    let (stall, pair) = stalling();
    let (outcomes, outcome) = channel();
    let (near, far, from, to) = (pair.from.session(), pair.to.session(), pair.from.clone(), pair.to.clone());
    thread::spawn(move || drop(outcomes.send(near.send(&from, &far, &to).wait())));
    stall.stopped.recv_timeout(HANG_LIMIT).unwrap();
    (pair, stall, outcome)
}

#[test]
fn the_death_of_a_server_in_the_middle_is_an_error() {
    let (mut pair, stall, outcome) = stopped_in_the_middle();
    pair.destination.server.kill().unwrap();
    let error = outcome.recv_timeout(HANG_LIMIT).unwrap().unwrap_err();
    assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error}");
    stall.source_gone.recv_timeout(HANG_LIMIT).unwrap();
    // The source is as good as before.
    assert_eq!(content(&pair.from), pair.data);

    let (mut pair, stall, outcome) = stopped_in_the_middle();
    pair.source.server.kill().unwrap();
    let error = outcome.recv_timeout(HANG_LIMIT).unwrap().unwrap_err();
    assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error}");
    stall.source_gone.recv_timeout(HANG_LIMIT).unwrap();
    // The destination can be written to: the offer's connection holds no borrow of it.
    let (to, len) = (&pair.to, pair.data.len());
    to.session().copy_to_remote(to, vec![9; len]).timeout(HANG_LIMIT).wait().unwrap();
    assert_eq!(content(to), vec![9; len]);
}

#[test]
fn the_end_of_a_client_or_of_its_session_in_the_middle_ends_the_send() {
    // The client vanishes from the source.
    let (pair, stall, outcome) = stopped_in_the_middle();
    pair.link.cut();
    let error = outcome.recv_timeout(HANG_LIMIT).unwrap().unwrap_err();
    assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error}");
    stall.source_gone.recv_timeout(HANG_LIMIT).unwrap();

    // The session at the destination ends: the source learns of it by the end of its connection.
    let (pair, stall, outcome) = stopped_in_the_middle();
    pair.to.session().shutdown().timeout(HANG_LIMIT).wait().unwrap();
    let error = outcome.recv_timeout(HANG_LIMIT).unwrap().unwrap_err();
    assert!(error.message().contains("withdrawn"), "{error}");
    stall.source_gone.recv_timeout(HANG_LIMIT).unwrap();

    // The client drops the operation.
    let (stall, pair) = stalling();
    drop_in_the_middle(stall, &pair);
    // The lane of the source is free again.
    assert_eq!(content(&pair.from), pair.data);
}

/// Sends, drops the operation once it has stopped, and waits until the source has closed its
/// connection.
fn drop_in_the_middle(stall: Stall, pair: &Pair) {
    let mut pending = pair.from.session().send(&pair.from, &pair.to.session(), &pair.to).start();
    let waiter = thread::spawn(move || {
        stall.stopped.recv_timeout(HANG_LIMIT).unwrap();
        stall
    });
    let outcome = rpc_core::blocking::block_on(std::future::poll_fn(|cx| {
        if waiter.is_finished() {
            return Poll::Ready(None);
        }
        cx.waker().wake_by_ref();
        Pin::new(&mut pending).poll(cx).map(Some)
    }));
    assert!(outcome.unwrap().is_none());
    drop(pending);
    waiter.join().unwrap().source_gone.recv_timeout(HANG_LIMIT).unwrap();
}

/// A destination that says nothing more is given up with the send, not by its silence.
#[test]
fn the_connection_of_a_dropped_send_is_cut() {
    let (stall, pair) = stalling_with(&[SENDS, &["--keep-alive", "1h"]].concat(), false);
    drop_in_the_middle(stall, &pair);
    // Nothing of the connection holds the tensor any more.
    let (from, len) = (&pair.from, pair.data.len());
    from.session().copy_to_remote(from, vec![9; len]).timeout(HANG_LIMIT).wait().unwrap();
}

#[test]
fn no_write_lands_after_a_withdrawal() {
    let server = Fixture::new(RECEIVES);
    for _ in 0..20 {
        let offered = Offered::new(&server, 30_000, false);
        let holder = offered.connect().unwrap();
        let range: RemoteTensor = function(&holder, "rpc.peer.range").call(()).wait().unwrap();
        // Some of these have been read by the server, and some are on their way.
        let writes: Vec<_> = (0..200).map(|_| holder.copy_to_remote(&range, vec![7; 8]).start()).collect();
        assert!(offered.withdraw());
        offered.session.copy_to_remote(&offered.to, vec![9; 16]).wait().unwrap();
        drop((writes, holder));
        assert_eq!(content(&offered.to), [9; 16]);
    }
}

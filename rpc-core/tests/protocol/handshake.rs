//! Tests of the handshake, byte for byte and under virtual time.

use std::time::{Duration, Instant};

use crate::pair::{frame, frames};
use bytes::BytesMut;
use rpc_core::proto::{
    Anonymous, Handshake, HandshakeConfig, Hello, Identity, IdentityStep, Kind, MAGIC, Negotiated, Role, Transcript,
};
use rpc_core::{ErrorKind, RpcError};

fn config(hello: Hello) -> HandshakeConfig {
    with_identity(hello, Box::new(Anonymous))
}

fn with_identity(hello: Hello, identity: Box<dyn Identity>) -> HandshakeConfig {
    HandshakeConfig { hello, identities: vec![identity], hold: false, timeout: Duration::from_secs(10) }
}

fn client() -> Hello {
    Hello::new(Role::Client)
}

fn server() -> Hello {
    Hello::new(Role::Server)
}

type Outcome = Result<Negotiated, RpcError>;

/// Lets both sides exchange `cut` bytes at a time, until they are done or have nothing to send.
fn exchange_bytes(dialler: &mut Handshake, acceptor: &mut Handshake, cut: usize) -> (Option<Outcome>, Option<Outcome>) {
    let (mut up, mut down) = (BytesMut::new(), BytesMut::new());
    let (mut at_acceptor, mut at_dialler) = (BytesMut::new(), BytesMut::new());
    let (mut ours, mut theirs) = (None, None);
    loop {
        up.extend_from_slice(&dialler.take_output());
        down.extend_from_slice(&acceptor.take_output());
        if up.is_empty() && down.is_empty() {
            return (ours, theirs);
        }
        if !up.is_empty() {
            at_acceptor.extend_from_slice(&up.split_to(up.len().min(cut)));
            if theirs.is_none() {
                theirs = acceptor.handle_input(&mut at_acceptor).transpose();
            }
        }
        if !down.is_empty() {
            at_dialler.extend_from_slice(&down.split_to(down.len().min(cut)));
            if ours.is_none() {
                ours = dialler.handle_input(&mut at_dialler).transpose();
            }
        }
    }
}

fn perform_handshake(dialler: HandshakeConfig, acceptor: HandshakeConfig) -> (Option<Outcome>, Option<Outcome>) {
    let now = Instant::now();
    exchange_bytes(&mut Handshake::dial(dialler, now), &mut Handshake::accept(acceptor, now), usize::MAX)
}

fn agreed((ours, theirs): (Option<Outcome>, Option<Outcome>)) -> (Negotiated, Negotiated) {
    (ours.unwrap().unwrap(), theirs.unwrap().unwrap())
}

/// Asserts that both sides get the refusal, one of them over the wire.
fn refused((ours, theirs): (Option<Outcome>, Option<Outcome>)) -> (RpcError, RpcError) {
    (ours.unwrap().unwrap_err(), theirs.unwrap().unwrap_err())
}

#[test]
fn both_sides_agree_on_versions_features_and_limits() {
    let mut offer = client();
    offer.features = vec!["a".into(), "b".into()];
    offer.max_message = 1000;
    let mut answer = server();
    answer.features = vec!["b".into(), "c".into()];
    answer.max_requests = 7;
    let (ours, theirs) = agreed(perform_handshake(config(offer), config(answer)));
    assert_eq!((ours.version, theirs.version), (1, 1));
    assert_eq!((ours.role, theirs.role), (Role::Client, Role::Server));
    assert!(ours.has_feature("b") && theirs.has_feature("b"));
    assert!(!ours.has_feature("a") && !theirs.has_feature("a") && !ours.has_feature("c"));
    assert_eq!((ours.theirs.max_requests, theirs.theirs.max_message), (7, 1000));
    assert_eq!(ours.identity, "anonymous");
}

#[test]
fn every_cut_of_the_bytes_gives_the_same_outcome() {
    for cut in [1, 2, 3, 7, 23, 24, 25, 100] {
        let now = Instant::now();
        let (mut dialler, mut acceptor) =
            (Handshake::dial(config(client()), now), Handshake::accept(config(server()), now));
        agreed(exchange_bytes(&mut dialler, &mut acceptor, cut));
    }
}

#[test]
fn the_highest_common_version_is_spoken() {
    let range = |hello: Hello, min, max| Hello { version_min: min, version_max: max, ..hello };
    let (ours, theirs) = agreed(perform_handshake(config(range(client(), 1, 9)), config(range(server(), 3, 5))));
    assert_eq!((ours.version, theirs.version), (5, 5));
    for (old, new) in [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((7, 9), (1, 6))] {
        let (ours, theirs) =
            refused(perform_handshake(config(range(client(), old.0, old.1)), config(range(server(), new.0, new.1))));
        for error in [ours, theirs] {
            assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
            assert!(error.message().contains("no common protocol version"), "{error}");
        }
    }
}

#[test]
fn the_roles_do_not_depend_on_the_side_that_dialled() {
    let (ours, theirs) = agreed(perform_handshake(config(server()), config(client())));
    assert_eq!((ours.role, theirs.role), (Role::Server, Role::Client));
    for role in [Role::Client, Role::Server] {
        let (ours, theirs) = refused(perform_handshake(config(Hello::new(role)), config(Hello::new(role))));
        assert_eq!((ours.kind(), theirs.kind()), (ErrorKind::Refused, ErrorKind::Refused));
        assert!(ours.message().contains("both sides want to be"), "{ours}");
        assert_eq!((ours.hop(), theirs.hop()), (1, 0));
    }
}

#[test]
fn a_key_must_match_unless_the_client_asks_for_none_or_for_a_hop() {
    let keyed = |hello: Hello, key: &str| Hello { key: key.into(), ..hello };
    agreed(perform_handshake(config(client()), config(keyed(server(), "gpu"))));
    agreed(perform_handshake(config(keyed(client(), "gpu")), config(keyed(server(), "gpu"))));
    let mut through = keyed(client(), "gpu");
    through.forward.push("tcp://b:1".into());
    agreed(perform_handshake(config(through), config(server())));
    for key in ["", "cpu"] {
        let (ours, theirs) = refused(perform_handshake(config(keyed(client(), "gpu")), config(keyed(server(), key))));
        assert_eq!((ours.kind(), theirs.kind()), (ErrorKind::Refused, ErrorKind::Refused));
        assert!(ours.message().contains("'gpu'"), "{ours}");
    }
    // The same when the server dialled.
    refused(perform_handshake(config(keyed(server(), "cpu")), config(keyed(client(), "gpu"))));
}

#[test]
fn limits_that_allow_no_request_are_refused() {
    let break_limits: [fn(&mut Hello); 3] =
        [|hello| hello.chunk = 0, |hello| hello.max_requests = 0, |hello| hello.max_message = 0];
    for change in break_limits {
        let mut offer = client();
        change(&mut offer);
        let (ours, theirs) = refused(perform_handshake(config(offer), config(server())));
        assert_eq!((ours.kind(), theirs.kind()), (ErrorKind::Protocol, ErrorKind::Protocol), "{ours}");
    }
    // Our own window is widened to the size of the largest message; the one on the wire is not.
    let mut offer = Hello { window: 1, identities: vec!["none".into()], ..client() };
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    let error = acceptor.handle_input(&mut hello_bytes(&offer)).unwrap_err();
    assert!(error.message().contains("let nothing pass"), "{error}");
    offer.window = offer.max_message;
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    assert!(acceptor.handle_input(&mut hello_bytes(&offer)).unwrap().is_none());
}

fn hello_bytes(hello: &Hello) -> BytesMut {
    raw_hello(&rmp_serde::to_vec_named(hello).unwrap())
}

fn raw_hello(body: &[u8]) -> BytesMut {
    let mut bytes = BytesMut::from(&MAGIC[..]);
    bytes.extend_from_slice(&frame(Kind::Hello, 0, 0, false, body, &[]));
    bytes
}

/// Challenge and response over a shared secret: the dialler's challenge, the acceptor's answer and
/// challenge, the dialler's answer. Only the message flow, without cryptography.
struct Toy {
    secret: u8,
    dialler: bool,
    round: u32,
    /// True to keep sending proofs that the peer does not expect.
    chatty: bool,
}

impl Toy {
    fn new(secret: u8, dialler: bool) -> Box<Self> {
        Box::new(Self { secret, dialler, round: 0, chatty: false })
    }

    fn check(&self, answer: Option<&u8>, challenge: u8) -> rpc_core::Result<()> {
        if answer == Some(&(challenge ^ self.secret)) {
            Ok(())
        } else {
            Err(RpcError::new(ErrorKind::Refused, "the peer does not know the secret"))
        }
    }
}

impl Identity for Toy {
    fn method(&self) -> &str {
        "toy"
    }

    fn step(&mut self, received: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        self.round += 1;
        if self.chatty && self.round > 1 {
            return Ok(IdentityStep::Send(vec![0]));
        }
        match (self.dialler, self.round, received) {
            (true, 1, None) => Ok(IdentityStep::Send(vec![40])),
            (false, 1, None) => Ok(IdentityStep::Wait),
            (false, 2, Some(challenge)) => {
                Ok(IdentityStep::Send(vec![challenge.first().unwrap_or(&0) ^ self.secret, 50]))
            }
            (true, 2, Some(answer)) => {
                self.check(answer.first(), 40)?;
                let last = answer.get(1).map(|challenge| vec![challenge ^ self.secret]);
                Ok(IdentityStep::Proven { peer: "acceptor".into(), last })
            }
            (false, 3, Some(answer)) => {
                self.check(answer.first(), 50)?;
                Ok(IdentityStep::Proven { peer: "dialler".into(), last: None })
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn identity_is_proven_in_several_rounds() {
    for cut in [1, usize::MAX] {
        let now = Instant::now();
        let mut dialler = Handshake::dial(with_identity(client(), Toy::new(9, true)), now);
        let mut acceptor = Handshake::accept(with_identity(server(), Toy::new(9, false)), now);
        let (ours, theirs) = agreed(exchange_bytes(&mut dialler, &mut acceptor, cut));
        assert_eq!((&*ours.identity, &*theirs.identity), ("acceptor", "dialler"));
    }
}

#[test]
fn a_wrong_secret_is_refused_and_both_sides_get_the_error() {
    let outcome =
        perform_handshake(with_identity(client(), Toy::new(9, true)), with_identity(server(), Toy::new(8, false)));
    let (ours, theirs) = refused(outcome);
    assert_eq!((ours.kind(), theirs.kind()), (ErrorKind::Refused, ErrorKind::Refused));
    assert!(theirs.message().contains("secret"), "{theirs}");
    assert_eq!((ours.hop(), theirs.hop()), (0, 1));
}

#[test]
fn methods_of_identity_must_be_the_same() {
    for outcome in [
        perform_handshake(with_identity(client(), Toy::new(9, true)), config(server())),
        perform_handshake(config(client()), with_identity(server(), Toy::new(9, false))),
    ] {
        let (ours, theirs) = refused(outcome);
        assert!(ours.message().contains("'toy'") && ours.message().contains("'none'"), "{ours}");
        assert_eq!(theirs.kind(), ErrorKind::Unauthenticated);
    }
}

#[test]
fn the_first_method_of_the_dialler_that_the_acceptor_has_is_used() {
    let both = |first: Box<dyn Identity>, second: Box<dyn Identity>, hello| HandshakeConfig {
        identities: vec![first, second],
        ..config(hello)
    };
    let now = Instant::now();
    for toy_first in [true, false] {
        let (toy, none): (Box<dyn Identity>, Box<dyn Identity>) = (Toy::new(9, true), Box::new(Anonymous));
        let (first, second) = if toy_first { (toy, none) } else { (none, toy) };
        let mut dialler = Handshake::dial(both(first, second, client()), now);
        let mut acceptor = Handshake::accept(both(Box::new(Anonymous), Toy::new(9, false), server()), now);
        let (ours, theirs) = agreed(exchange_bytes(&mut dialler, &mut acceptor, usize::MAX));
        assert_eq!(
            (&*ours.identity, &*theirs.identity),
            if toy_first { ("acceptor", "dialler") } else { ("anonymous", "anonymous") }
        );
    }
    // An answer must choose one method: it neither offers several, nor names one that was not
    // offered.
    for answer in [vec![], vec!["none".into(), "toy".into()], vec!["other".into()]] {
        let mut dialler = Handshake::dial(both(Box::new(Anonymous), Toy::new(9, true), client()), now);
        let error = dialler.handle_input(&mut hello_bytes(&Hello { identities: answer, ..server() })).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    }
}

/// Identity that records the transcript.
struct Witness(std::sync::Arc<std::sync::Mutex<Vec<Vec<u8>>>>);

impl Identity for Witness {
    fn method(&self) -> &str {
        "witness"
    }

    fn begin(&mut self, transcript: Transcript<'_>) {
        let mut seen = self.0.lock().unwrap();
        seen.extend([transcript.dialler_hello.to_vec(), transcript.acceptor_hello.to_vec()]);
    }

    fn step(&mut self, _: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        Ok(IdentityStep::Proven { peer: "witness".into(), last: None })
    }
}

#[test]
fn both_sides_bind_their_proofs_to_the_same_transcript() {
    let (near, far) = <(std::sync::Arc<_>, std::sync::Arc<_>)>::default();
    agreed(perform_handshake(
        with_identity(Hello { agent: "near".into(), ..client() }, Box::new(Witness(std::sync::Arc::clone(&near)))),
        with_identity(Hello { agent: "far".into(), ..server() }, Box::new(Witness(std::sync::Arc::clone(&far)))),
    ));
    let (near, far) = (near.lock().unwrap(), far.lock().unwrap());
    assert_eq!(*near, *far);
    let holds = |hello: &[u8], word: &[u8]| hello.windows(word.len()).any(|part| part == word);
    assert!(holds(&near[0], b"near") && holds(&near[1], b"far") && near.len() == 2);
}

#[test]
fn accepting_without_proof_proves_nothing() {
    let mut acceptor = Handshake::accept(with_identity(server(), Toy::new(9, false)), Instant::now());
    let mut input = hello_bytes(&Hello { identities: vec!["toy".into()], ..client() });
    input.extend_from_slice(&frame(Kind::Accept, 0, 0, false, &[], &[]));
    assert!(acceptor.handle_input(&mut input).unwrap().is_none());
    assert!(acceptor.approve().is_none() && acceptor.awaits_approval().is_none());
    // A second one is not in the protocol, and session frames are not allowed yet.
    for kind in [Kind::Accept, Kind::Request, Kind::Hello, Kind::Ping] {
        let mut acceptor = Handshake::accept(with_identity(server(), Toy::new(9, false)), Instant::now());
        let mut input = hello_bytes(&Hello { identities: vec!["toy".into()], ..client() });
        input.extend_from_slice(&frame(Kind::Accept, 0, 0, false, &[], &[]));
        input.extend_from_slice(&frame(kind, 0, 0, false, &[], &[]));
        assert_eq!(acceptor.handle_input(&mut input).unwrap_err().kind(), ErrorKind::Protocol);
    }
}

#[test]
fn the_number_of_proofs_is_limited() {
    let chatty = |dialler| Box::new(Toy { secret: 0, dialler, round: u32::from(!dialler), chatty: true });
    let (ours, theirs) =
        refused(perform_handshake(with_identity(client(), chatty(true)), with_identity(server(), chatty(false))));
    assert_eq!((ours.kind(), theirs.kind()), (ErrorKind::Protocol, ErrorKind::Protocol));
    // One more than the method has, behind the last.
    let mut dialler = Handshake::dial(config(client()), Instant::now());
    let mut input = hello_bytes(&Hello { identities: vec!["none".into()], ..server() });
    input.extend_from_slice(&frame(Kind::Proof, 0, 0, false, &[1], &[]));
    assert_eq!(dialler.handle_input(&mut input).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn a_server_that_holds_its_accept_approves_or_refuses() {
    let hold = || HandshakeConfig { hold: true, ..config(server()) };
    let now = Instant::now();
    let (mut dialler, mut acceptor) = (Handshake::dial(config(client()), now), Handshake::accept(hold(), now));
    assert!(acceptor.awaits_approval().is_none());
    let (ours, theirs) = exchange_bytes(&mut dialler, &mut acceptor, usize::MAX);
    assert!(ours.is_none() && theirs.is_none());
    let (hello, peer) = acceptor.awaits_approval().unwrap();
    assert_eq!((hello.role, peer), (Role::Client, "anonymous"));
    assert_eq!(acceptor.approve().unwrap().role, Role::Server);
    assert!(acceptor.approve().is_none() && acceptor.awaits_approval().is_none());
    let mut input = BytesMut::from(&acceptor.take_output()[..]);
    assert!(dialler.handle_input(&mut input).unwrap().is_some());

    let (mut dialler, mut acceptor) = (Handshake::dial(config(client()), now), Handshake::accept(hold(), now));
    exchange_bytes(&mut dialler, &mut acceptor, usize::MAX);
    acceptor.refuse(&RpcError::limit("max_sessions", 1, 2));
    assert!(acceptor.approve().is_none() && acceptor.awaits_approval().is_none());
    let mut input = BytesMut::from(&acceptor.take_output()[..]);
    let error = dialler.handle_input(&mut input).unwrap_err();
    assert_eq!((error.kind(), error.hop()), (ErrorKind::LimitExceeded, 1));
}

#[test]
fn approval_before_the_peer_has_accepted_waits_for_it() {
    let mut acceptor = Handshake::accept(HandshakeConfig { hold: true, ..config(server()) }, Instant::now());
    let offer = Hello { identities: vec!["none".into()], ..client() };
    assert!(acceptor.handle_input(&mut hello_bytes(&offer)).unwrap().is_none());
    assert!(acceptor.approve().is_none());
    let mut input = BytesMut::from(&frame(Kind::Accept, 0, 0, false, &[], &[])[..]);
    assert!(acceptor.handle_input(&mut input).unwrap().is_some());
}

#[test]
fn garbage_is_quoted_in_the_error_and_not_answered() {
    for (bytes, shown) in
        [(&b"HTTP/1.1 400 Bad Request\r\n"[..], "HTTP/1.1 400 Bad"), (b"\x16\x03\x01", "\\x16\\x03\\x01")]
    {
        let mut acceptor = Handshake::accept(config(server()), Instant::now());
        let error = acceptor.handle_input(&mut BytesMut::from(bytes)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.message().contains(shown), "{error}");
        assert!(acceptor.take_output().is_empty());
        let mut dialler = Handshake::dial(config(client()), Instant::now());
        let error = dialler.handle_input(&mut BytesMut::from(bytes)).unwrap_err();
        assert!(error.message().contains(shown), "{error}");
    }
    // A channel in text mode is detected at the first byte of the magic that it changes.
    let mut changed = MAGIC;
    changed[4] = b'\n';
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    assert!(acceptor.handle_input(&mut BytesMut::from(&changed[..5])).is_err());
}

#[test]
fn a_malformed_hello_is_an_error_that_is_sent_to_the_peer() {
    let good = rmp_serde::to_vec_named(&Hello { identities: vec!["none".into()], ..client() }).unwrap();
    let with_role = |role: &str| {
        let mut map: std::collections::BTreeMap<String, serde_json_like::Any> = rmp_serde::from_slice(&good).unwrap();
        map.insert("role".into(), serde_json_like::Any::Str(role.into()));
        rmp_serde::to_vec(&map).unwrap()
    };
    let deep = [&[0x81, 0xa1, b'x'][..], &[0x91; 60_000]].concat();
    let cases = [
        Vec::new(),
        vec![0xc1],
        vec![0x80],
        good[..good.len() - 1].to_vec(),
        // Something behind the map, and an array in place of it.
        [&good[..], &[0xc0]].concat(),
        rmp_serde::to_vec(&client()).unwrap(),
        with_role("spectator"),
        b"\x81\xa4role\xa2\xff\xfe".to_vec(),
        vec![0xdf, 0xff, 0xff, 0xff, 0xff],
        b"\x81\xa8features\xdd\xff\xff\xff\xff".to_vec(),
        deep,
    ];
    for body in cases {
        let mut acceptor = Handshake::accept(config(server()), Instant::now());
        let error = acceptor.handle_input(&mut raw_hello(&body)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        let mut dialler = Handshake::dial(config(client()), Instant::now());
        let told = dialler.handle_input(&mut BytesMut::from(&acceptor.take_output()[..])).unwrap_err();
        assert!(told.message().contains("malformed hello"), "{told}");
    }
}

/// Minimal MessagePack encoder, to change one field of a map.
mod serde_json_like {
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize, Clone)]
    #[serde(untagged)]
    pub(crate) enum Any {
        Uint(u64),
        Str(String),
        List(Vec<String>),
        Map(std::collections::BTreeMap<String, u64>),
    }
}

#[test]
fn unknown_fields_are_skipped_and_optional_ones_may_be_missing() {
    use serde_json_like::Any;
    let offer = Hello { identities: vec!["none".into()], ..client() };
    let bytes = rmp_serde::to_vec_named(&offer).unwrap();
    let mut map: std::collections::BTreeMap<String, Any> = rmp_serde::from_slice(&bytes).unwrap();
    map.insert("colour".into(), Any::Str("blue".into()));
    map.insert("nested".into(), Any::Map([("x".into(), 1)].into()));
    for optional in ["features", "key", "workspace", "forward", "agent"] {
        map.remove(optional);
    }
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    let mut input = raw_hello(&rmp_serde::to_vec(&map).unwrap());
    input.extend_from_slice(&frame(Kind::Accept, 0, 0, false, &[], &[]));
    let negotiated = acceptor.handle_input(&mut input).unwrap().unwrap();
    assert_eq!(negotiated.theirs.agent, "");
    assert_eq!(negotiated.theirs.max_message, offer.max_message);
    map.remove("role");
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    assert!(acceptor.handle_input(&mut raw_hello(&rmp_serde::to_vec(&map).unwrap())).is_err());
}

#[test]
fn oversized_frames_are_refused_by_their_header() {
    let mut bytes = BytesMut::from(&MAGIC[..]);
    bytes.extend_from_slice(&frame(Kind::Hello, 0, 0, false, &[0; 65_537], &[])[..24]);
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    let error = acceptor.handle_input(&mut bytes).unwrap_err();
    assert!(error.message().contains("65537"), "{error}");
    let mut bytes = BytesMut::from(&MAGIC[..]);
    bytes.extend_from_slice(&frame(Kind::Request, 0, 0, false, &[], &[0])[..24]);
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    assert_eq!(acceptor.handle_input(&mut bytes).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn a_malformed_reject_frame_is_still_a_refusal() {
    let mut dialler = Handshake::dial(config(client()), Instant::now());
    dialler.take_output();
    let mut input = BytesMut::from(&MAGIC[..]);
    input.extend_from_slice(&frame(Kind::Reject, 0, 0, false, &[0xc1], &[]));
    assert_eq!(dialler.handle_input(&mut input).unwrap_err().kind(), ErrorKind::Refused);
    // It is not answered, and no further frame is expected.
    assert!(dialler.take_output().is_empty());
    assert!(dialler.handle_input(&mut BytesMut::from(&b"x"[..])).unwrap().is_none());
}

#[test]
fn the_errors_for_end_of_stream_and_time_limit_name_the_stage() {
    let now = Instant::now();
    let mut acceptor = Handshake::accept(config(server()), now);
    assert_eq!(acceptor.deadline(), now + Duration::from_secs(10));
    acceptor.handle_timeout(now + Duration::from_millis(9999)).unwrap();
    let early = acceptor.handle_timeout(acceptor.deadline()).unwrap_err();
    assert!(early.message().contains("which protocol"), "{early}");
    assert!(acceptor.end_of_stream().message().contains("which protocol"));
    acceptor.handle_input(&mut BytesMut::from(&MAGIC[..])).unwrap();
    let late = acceptor.handle_timeout(acceptor.deadline()).unwrap_err();
    assert!(late.message().contains("not finished"), "{late}");
    assert!(acceptor.end_of_stream().message().contains("middle"));
    assert_eq!((early.kind(), late.kind()), (ErrorKind::PeerSilent, ErrorKind::PeerSilent));
}

#[test]
fn bytes_behind_the_handshake_are_left_for_the_session() {
    let mut acceptor = Handshake::accept(config(server()), Instant::now());
    let mut input = hello_bytes(&Hello { identities: vec!["none".into()], ..client() });
    input.extend_from_slice(&frame(Kind::Accept, 0, 0, false, &[], &[]));
    let ping = frame(Kind::Ping, 3, 0, false, &[], &[]);
    input.extend_from_slice(&ping);
    input.extend_from_slice(b"and more");
    assert!(acceptor.handle_input(&mut input).unwrap().is_some());
    assert_eq!(&input[..], [&ping[..], b"and more"].concat());
}

#[test]
fn golden_hello() {
    let hello = Hello { agent: "rpc/0.1.0".into(), key: "k".into(), features: vec!["f".into()], ..client() };
    let mut dialler = Handshake::dial(config(hello), Instant::now());
    let output = dialler.take_output();
    assert_eq!(&output[..8], b"\x93rpc\r\n\x1a\n");
    let hello = &frames(&output[8..])[0];
    assert_eq!((hello.kind(), hello.header.id, hello.header.lane), (Kind::Hello, 0, 0));
    let golden = b"\x8e\xabversion_min\x01\xabversion_max\x01\xa8features\x91\xa1f\xa4role\xa6client\
        \xaaidentities\x91\xa4none\xa3key\xa1k\xa9workspace\xa0\xa7forward\x90\xa5agent\xa9rpc/0.1.0\
        \xabmax_message\xce\x04\x00\x00\x00\xa5chunk\xce\x00\x10\x00\x00\xacmax_requests\xcd\x04\x00\
        \xa6window\xce\x04\x10\x00\x00\xadkeep_alive_ms\xcd\x13\x88";
    assert_eq!(hello.body.escape_ascii().to_string(), golden.escape_ascii().to_string());
}

//! Identities: false, recorded and missing ones, and changes by an interceptor.

use super::*;

async fn a_client_with_an_unfit_certificate_is_refused(transport: Transport) {
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
    within(TIME_LIMIT, "the honest session ends", async || site.server.sessions() == 0).await;
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
async fn a_server_without_the_token_is_refused_by_clients(transport: Transport) {
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
                let (lure, meddler) = intercept(site.socket_address(), of_client, change).await;
                let client = Connector::new().tokens(tokens(SECRET)).key("board").handshake_timeout(OVER);
                let outcome = soon("an outcome", client.connect(&format!("tcp://{lure}"))).await;
                let error = outcome.expect_err(what).into_rpc_error();
                assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{what}, of the client: {of_client}: {error}");
                meddler.abort();
            }
        }
        works(&site.with_token().key("board").connect(&site.address).await.unwrap()).await;
        within(TIME_LIMIT, "all sessions end", async || site.server.sessions() == 0).await;
    }
}

/// Starts an interceptor that changes the hello of one side, and forwards everything else. Returns
/// its address.
async fn intercept(server: SocketAddr, of_client: bool, change: Change) -> (SocketAddr, JoinHandle<()>) {
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
pub(super) fn tls12_client_hello() -> Vec<u8> {
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

async fn servers_refuse_tls_1_2() {
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

async fn clients_refuse_tls_1_2() {
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

each! {
    a_client_with_an_unfit_certificate_is_refused: tls(Tls) quic(Quic);
    a_server_with_an_unfit_certificate_is_refused: tls(Tls) quic(Quic);
    a_recorded_handshake_opens_no_session: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
    a_server_without_the_token_is_refused_by_clients: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
}

once! {
    a_hello_that_was_changed_on_the_way_breaks_the_proof: a_hello_changed_on_the_way_breaks_the_proof();
    a_server_stays_with_tls_1_3: servers_refuse_tls_1_2();
    a_client_stays_with_tls_1_3: clients_refuse_tls_1_2();
}

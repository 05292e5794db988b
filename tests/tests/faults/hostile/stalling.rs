//! Stalling: handshakes that are drawn out or never finished.

use super::*;

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
    assert_eq!(outcome.unwrap_err().into_rpc_error().kind(), ErrorKind::PeerSilent);
    let blocking = on_thread(move || connector.connect_blocking(&address));
    let outcome = tokio::time::timeout(OVER, blocking).await.expect("there is a limit");
    assert_eq!(outcome.unwrap_err().into_rpc_error().kind(), ErrorKind::PeerSilent);
}

each! {
    a_handshake_cannot_be_drawn_out: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
}

once! {
    a_handshake_of_tls_cannot_be_drawn_out: a_tls_handshake_cannot_be_drawn_out();
    a_quic_connection_without_a_channel_is_given_up: a_connection_without_a_channel_is_given_up();
    a_server_that_is_idle_has_no_session: an_idle_server_has_no_session();
    a_client_gives_a_slow_server_up: a_server_that_draws_its_handshake_out_is_given_up();
}

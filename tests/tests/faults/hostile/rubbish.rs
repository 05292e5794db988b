//! Rubbish: in place of the protocol, of TLS, and of QUIC.

use super::identities::tls12_client_hello;
use super::*;

/// Rubbish inside of the encryption, if there is any, beside good clients.
async fn rubbish_opens_no_session_and_disturbs_no_client(transport: Transport) {
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
async fn rubbish_in_place_of_tls_disturbs_no_client() {
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
async fn rubbish_datagrams_disturb_no_client() {
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

each! {
    rubbish_opens_no_session_and_disturbs_no_client: tcp(Tcp) unix(Unix) tls(Tls) quic(Quic);
}

once! {
    rubbish_for_a_tls_server: rubbish_in_place_of_tls_disturbs_no_client();
    rubbish_for_a_quic_server: rubbish_datagrams_disturb_no_client();
}

//! Tunnels to services that are no servers: the ways to them, half-closed connections, refusals.

use std::sync::Arc;

use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, SharedSession};
use rpc_transports::{
    Address, Bind, Channel, ConnectError, Connector, FunctionPatterns, OpenRequest, ParkOptions, ServeOptions, Server,
    Tunnel,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Starts a service that speaks first, then echoes, and says good-bye after the end of its input.
async fn service() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                to.write_all(b"hello,").await?;
                tokio::io::copy(&mut from, &mut to).await?;
                to.write_all(b",bye").await
            });
        }
    });
    address.parse().unwrap()
}

async fn server(change: impl FnOnce(&mut ServeOptions)) -> (Server, Address) {
    let open =
        |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(LocalSession::new(Registry::new()))) };
    let mut options = ServeOptions { key: "board".into(), ..ServeOptions::default() };
    change(&mut options);
    let server = Server::new(Arc::new(open), options);
    let address = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
    (server, address)
}

fn allowing(service: &Address) -> impl FnOnce(&mut ServeOptions) {
    let pattern = service.to_string();
    |options| options.allow_port = vec![pattern]
}

/// Checks that the service is at the far end: all that is sent comes back between its own words.
async fn leads_to_the_service(tunnel: Tunnel) {
    let (near, far) = tokio::io::duplex(4096);
    let carried = tokio::spawn(tunnel.join(Channel::new(far, "a local program")));
    let (mut from, mut to) = tokio::io::split(near);
    let sent: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    let send = async {
        to.write_all(&sent).await.unwrap();
        to.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (_, read) = tokio::join!(send, from.read_to_end(&mut received));
    read.unwrap();
    assert!(received == [b"hello,", &sent[..], b",bye"].concat(), "{} bytes came", received.len());
    carried.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_service_is_reached_directly_through_hops_and_at_a_relay() {
    let service = service().await;
    let (server, address) = server(allowing(&service)).await;
    let (_hop, hop) = self::server(|options| options.allow_forward = vec![address.to_string()]).await;
    let (relay, at) = self::server(|options| options.relay = true).await;
    server.park(&at, &ParkOptions { key: "board".into(), ..ParkOptions::default() });
    while relay.parked().is_empty() {
        tokio::task::yield_now().await;
    }
    let direct = Connector::new();
    for (connector, target) in [
        (direct.clone(), address.to_string()),
        (direct.clone(), format!("{address}/board")),
        (direct.clone().via(&hop.to_string()), address.to_string()),
        (direct.clone().via(&format!("tunnel:{hop}")), address.to_string()),
        (direct.clone().key("board"), at.to_string()),
    ] {
        leads_to_the_service(connector.open_tunnel(&target, &service).await.unwrap()).await;
    }
}

fn refusal(outcome: Result<Tunnel, ConnectError>) -> RpcError {
    outcome.expect_err("there is no tunnel").into_rpc_error()
}

#[tokio::test]
async fn a_service_that_is_not_allowed_is_refused() {
    let service = service().await;
    let (_server, address) = server(allowing(&service)).await;
    let connector = Connector::new();
    let other = "tcp://127.0.0.1:1".parse().unwrap();
    let error = refusal(connector.open_tunnel(&address, &other).await);
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("--allow-port"), "{error}");
    let error = refusal(connector.open_tunnel(&format!("{address}/another"), &service).await);
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("'another'"), "{error}");
    let error = refusal(connector.open_tunnel("tracker://127.0.0.1:1/board", &service).await);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // The port is for tunnels alone.
    let error = connector.clone().via(&address.to_string()).connect(&service).await.unwrap_err().into_rpc_error();
    assert!(error.kind() == ErrorKind::Refused && error.message().contains("--allow-forward"), "{error}");
}

#[tokio::test]
async fn a_server_that_limits_functions_leads_to_the_services_that_it_allows() {
    let service = service().await;
    let (_server, address) = server(|options| {
        allowing(&service)(options);
        options.allow_forward = vec!["*".into()];
        options.forward_policy = Some(Arc::new(FunctionPatterns::new(vec!["echo".into()])));
    })
    .await;
    let connector = Connector::new();
    leads_to_the_service(connector.open_tunnel(&address, &service).await.unwrap()).await;
    let other = "tcp://127.0.0.1:1".parse().unwrap();
    let error = refusal(connector.open_tunnel(&address, &other).await);
    assert!(error.message().contains("--forward-functions"), "{error}");
}

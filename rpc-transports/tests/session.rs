//! A session over each transport: connect, call, copy, forward, end.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{Device, DataType, ErrorKind, LocalSession, Registry, RpcError, SharedSession};
use rpc_transports::{Address, Connector, ListenOptions, OpenRequest, ServeOptions, Server};

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add_inline("echo", |value: rpc_core::LocalValue| value);
    registry
}

fn server(options: ServeOptions) -> Server {
    let registry = registry();
    Server::new(
        Arc::new(move |_: &OpenRequest| -> Result<SharedSession, RpcError> {
            Ok(Arc::new(LocalSession::new(registry.clone())))
        }),
        options,
    )
}

async fn listen(server: &Server, address: &str) -> String {
    server.listen(&address.parse::<Address>().unwrap(), &ListenOptions::default()).await.unwrap().to_string()
}

async fn exercise(connector: Connector, address: &str) {
    let session = connector.connect(address).await.unwrap();
    let add = session.function::<(i64, i64), i64>("add").await.unwrap();
    assert_eq!(add.call((1, 2)).await.unwrap(), 3);
    let error = session.get_function("nothing").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let len = 5 * 1024 * 1024 + 123;
    let data: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[len as i64]).await.unwrap();
    session.copy_to_remote(&tensor, data.clone()).await.unwrap();
    assert_eq!(session.copy_from_remote(&tensor).await.unwrap(), data);
    let echo = session.get_function("echo").await.unwrap();
    let bytes = bytes::Bytes::from(data);
    assert_eq!(echo.call::<bytes::Bytes>((bytes.clone(),)).await.unwrap(), bytes);
    session.shutdown().await.unwrap();
    assert_eq!(add.call((1, 2)).await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn memory() {
    let server = server(ServeOptions::default());
    let address = listen(&server, "memory:session-test").await;
    exercise(Connector::new(), &address).await;
    server.idle().await;
}

#[tokio::test]
async fn tcp_and_unix_direct_and_through_a_hop() {
    let origin = server(ServeOptions::default());
    let address = listen(&origin, "tcp://127.0.0.1:0").await;
    exercise(Connector::new(), &address).await;
    let folder = tempfile::tempdir().unwrap();
    let unix = listen(&origin, &format!("unix:{}/s", folder.path().display())).await;
    exercise(Connector::new(), &unix).await;

    let options = ServeOptions { allow_forward: vec!["tcp://127.0.0.1:*".into()], ..Default::default() };
    let hop = server(options);
    let hop_address = listen(&hop, "tcp://127.0.0.1:0").await;
    exercise(Connector::new().via(&hop_address), &address).await;
    let refused = Connector::new().via(&hop_address).connect(&unix).await.unwrap_err().into_rpc_error();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    hop.idle().await;
    origin.idle().await;
}

#[tokio::test]
async fn a_drained_server_lets_go_of_idle_clients() {
    let server = server(ServeOptions::default());
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let session = Connector::new().connect(&address).await.unwrap();
    server.drain(Duration::from_secs(30)).await;
    assert_eq!(server.sessions(), 0);
    let error = session.ended().await;
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[tokio::test]
async fn a_dropped_client_frees_its_session() {
    let server = server(ServeOptions::default());
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let session = Connector::new().connect(&address).await.unwrap();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[1 << 30]).await.unwrap();
    drop(session);
    assert_eq!(server.sessions(), 1);
    drop(tensor);
    server.idle().await;
}

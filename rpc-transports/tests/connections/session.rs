//! A session over each transport: connect, call, copy, forward, end.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{DataType, Device, ErrorKind, Registry};
use rpc_transports::{Address, Bind, ConnectError, Connector, ServeOptions, Server};

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add_inline("echo", |value: rpc_core::LocalValue| value);
    registry
}

fn server(options: ServeOptions) -> Server {
    Server::new(Arc::new(registry()), options)
}

async fn listen(server: &Server, address: &str) -> String {
    server.listen(&address.parse::<Address>().unwrap(), &Bind::default()).await.unwrap().to_string()
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

/// Runs a server on a thread of its own, so that the test has no runtime.
fn with_server(test: impl FnOnce(&str, &str, &Server)) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (server, tcp, unix) = runtime.block_on(async {
        let server = server(ServeOptions::default());
        let tcp = listen(&server, "tcp://127.0.0.1:0").await;
        let unix = listen(&server, &format!("unix:{}/s", folder.path().display())).await;
        (server, tcp, unix)
    });
    test(&tcp, &unix, &server);
    runtime.block_on(server.idle());
}

#[test]
fn blocking_over_tcp_and_unix() {
    with_server(|tcp, unix, _| {
        for address in [tcp, unix] {
            let session = Connector::new().connect_blocking(address).unwrap();
            let add = session.function::<(i64, i64), i64>("add").wait().unwrap();
            for i in 0..1000 {
                assert_eq!(add.call((i, 2)).wait().unwrap(), i + 2);
            }
            let len = 5 * 1024 * 1024 + 123;
            let data: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
            let tensor = session.alloc(Device::cpu(), DataType::U8, &[len as i64]).wait().unwrap();
            session.copy_to_remote(&tensor, data.clone()).wait().unwrap();
            assert_eq!(session.copy_from_remote(&tensor).wait().unwrap(), data);
            let echo = session.get_function("echo").wait().unwrap();
            let bytes = bytes::Bytes::from(data);
            assert_eq!(echo.call::<bytes::Bytes>((bytes.clone(),)).wait().unwrap(), bytes);
            session.shutdown().wait().unwrap();
            assert_eq!(add.call((1, 2)).wait().unwrap_err().kind(), ErrorKind::Closed);
        }
    });
}

#[test]
fn a_blocking_session_is_closed_by_its_last_reference() {
    with_server(|tcp, _, server| {
        let session = Connector::new().connect_blocking(tcp).unwrap();
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[1 << 20]).wait().unwrap();
        drop(session);
        assert_eq!(server.sessions(), 1);
        drop(tensor);
    });
}

#[test]
fn many_threads_share_a_blocking_session() {
    with_server(|tcp, _, _| {
        let session = Connector::new().connect_blocking(tcp).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_i64 {
                let session = &session;
                scope.spawn(move || {
                    let echo = session.get_function("echo").wait().unwrap();
                    for i in 0..300 {
                        let number = thread * 1000 + i;
                        assert_eq!(echo.call::<i64>((number,)).concurrent().wait().unwrap(), number);
                    }
                });
            }
        });
    });
}

#[test]
fn a_blocking_session_can_be_awaited_too() {
    with_server(|tcp, _, _| {
        let session = Connector::new().connect_blocking(tcp).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let echo = session.get_function("echo").await.unwrap();
            let calls: Vec<_> = (0..200_i64).map(|i| echo.call::<i64>((i,)).start()).collect();
            for (i, call) in calls.into_iter().enumerate() {
                assert_eq!(call.await.unwrap(), i as i64);
            }
            let error = session.get_function("echo").wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ApiMisuse, "{error}");
        });
    });
}

#[tokio::test]
async fn a_program_that_ends_before_there_is_a_session_is_an_error_that_says_how() {
    let told = |error: ConnectError| match error {
        ConnectError::Session(error) => assert!(error.message().contains("exit status: 7"), "{error}"),
        other => panic!("{other:?}"),
    };
    told(Connector::new().connect("exec:sh -c 'exit 7'").await.unwrap_err());
    let blocking = tokio::task::spawn_blocking(|| Connector::new().connect_blocking("exec:sh -c 'exit 7'"));
    told(blocking.await.unwrap().unwrap_err());
}

//! The web around a WebSocket: pages with an origin, proxies that end TLS, other HTTP servers.
#![allow(clippy::unwrap_used)]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::Registry;
use rpc_transports::{
    Access, Address, AllowedOrigins, Bind, Certificate, ClientTls, ConnectError, Connector, ServeOptions, Server,
    ServerTls, Tokens, Transports,
};
use rpc_websocket::{Proxies, WebSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn transports() -> Transports {
    let transport = WebSocket::new().proxies(Proxies::none()).allow_origins(["https://console.example"]);
    Transports::default().with(transport)
}

fn server(access: Access) -> Server {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    let open = move |_: &rpc_transports::OpenRequest| {
        Ok(Arc::new(rpc_core::LocalSession::new(registry.clone())) as rpc_core::SharedSession)
    };
    Server::new(Arc::new(open), ServeOptions { transports: transports(), access, ..ServeOptions::default() })
}

async fn listen(server: &Server, tls: Option<ServerTls>) -> Address {
    let scheme = if tls.is_some() { "wss" } else { "ws" };
    let bind = Bind { tls, ..Bind::default() };
    server.listen(&format!("{scheme}://127.0.0.1:0").parse().unwrap(), &bind).await.unwrap()
}

/// Joins the texts of an error and its causes.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Sends the request of a browser on a page of `origin`, and returns the first line of the answer.
async fn ask_as_a_page(address: &Address, origin: &str) -> String {
    let (host, port) = address.host_and_port().unwrap();
    let mut stream = TcpStream::connect((host, port)).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nOrigin: {origin}\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(line).unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn pages_are_served_if_the_operator_lists_their_origin() {
    let server = server(Access { anonymous: true, ..Access::default() });
    let address = listen(&server, None).await;
    assert!(ask_as_a_page(&address, "https://console.example").await.contains("101"));
    for origin in ["https://evil.example", "null", "http://127.0.0.1"] {
        let answer = ask_as_a_page(&address, origin).await;
        assert!(answer.contains("403"), "{origin}: {answer}");
    }
    // Programs send no origin.
    let session = Connector::new().transports(transports()).connect(&address.to_string()).await.unwrap();
    assert_eq!(session.get_function("add").await.unwrap().call::<i64>((1_i64, 2_i64)).await.unwrap(), 3);
}

#[tokio::test]
async fn the_blocking_form_works_on_a_plain_thread() {
    let server = server(Access { anonymous: true, ..Access::default() });
    let address = listen(&server, None).await.to_string();
    let sum = tokio::task::spawn_blocking(move || {
        let session = Connector::new().transports(transports()).connect_blocking(&address)?;
        let sum: i64 = session.get_function("add").wait()?.call((20_i64, 22_i64)).wait()?;
        Ok::<_, ConnectError>(sum)
    });
    assert_eq!(sum.await.unwrap().unwrap(), 42);
}

/// Returns certificates for this machine, and the authority to trust them by.
fn certificates() -> (ServerTls, ClientTls) {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let pem = made.cert.pem();
    let certificate = Certificate::from_pem(pem.as_bytes(), made.signing_key.serialize_pem().as_bytes()).unwrap();
    (ServerTls::new(certificate, None).unwrap(), ClientTls::new(pem.as_bytes(), None).unwrap())
}

#[tokio::test]
async fn a_proxy_that_ends_tls_is_an_error_that_says_so() {
    let tokens = Tokens::parse(TOKEN).unwrap();
    let server = server(Access { tokens: tokens.clone(), ..Access::default() });
    let plain = listen(&server, None).await;

    // A reverse proxy: TLS to the client, plain bytes to the server.
    let (tls, trust) = certificates();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = listener.local_addr().unwrap();
    let behind = plain.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, behind) = (tls.clone(), behind.clone());
            tokio::spawn(async move {
                let (mut near, _) = tls.accept(b"http/1.1", stream).await.unwrap();
                let mut far = TcpStream::connect(behind.host_and_port().unwrap()).await.unwrap();
                _ = copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });

    let connector = Connector::new().transports(transports()).tokens(tokens).tls(trust);
    let error = connector.connect(&format!("wss://{front}")).await.unwrap_err();
    let text = chain(&error);
    assert!(text.contains("ends TLS"), "{text}");
}

#[tokio::test]
async fn a_proxy_that_ends_tls_and_encrypts_again_is_named_as_a_possible_cause() {
    let tokens = Tokens::parse(TOKEN).unwrap();
    let server = server(Access { tokens: tokens.clone(), ..Access::default() });
    let (tls, trust) = certificates();
    let behind = listen(&server, Some(tls.clone())).await;

    // A reverse proxy: a TLS connection to the client, and another one to the server.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = listener.local_addr().unwrap();
    let trust_of_proxy = trust.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, trust, behind) = (tls.clone(), trust_of_proxy.clone(), behind.clone());
            tokio::spawn(async move {
                let (mut near, _) = tls.accept(b"http/1.1", stream).await.unwrap();
                let far = TcpStream::connect(behind.host_and_port().unwrap()).await.unwrap();
                let limit = Duration::from_secs(10);
                let (mut far, _) = trust.connect(&behind, b"http/1.1", far, limit).await.unwrap();
                _ = copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });

    let connector = Connector::new().transports(transports()).tokens(tokens).tls(trust);
    let error = connector.connect(&format!("wss://{front}")).await.unwrap_err();
    let text = chain(&error);
    assert!(text.contains("a proxy that ends TLS and encrypts again"), "{text}");
}

#[tokio::test]
async fn web_pages_of_one_listener_can_be_changed_while_it_listens() {
    let server = server(Access { anonymous: true, ..Access::default() });
    let origins = AllowedOrigins::new(["https://old.example"]);
    let bind = Bind { origins: origins.clone(), ..Bind::default() };
    let address = server.listen(&"ws://127.0.0.1:0".parse().unwrap(), &bind).await.unwrap();
    assert!(ask_as_a_page(&address, "https://Old.example").await.contains("101"));
    assert!(ask_as_a_page(&address, "https://new.example").await.contains("403"));
    origins.set(["https://NEW.example"]);
    assert!(ask_as_a_page(&address, "https://old.example").await.contains("403"));
    assert!(ask_as_a_page(&address, "https://new.example").await.contains("101"));
    // The transport's own list holds for all listeners.
    assert!(ask_as_a_page(&address, "https://console.example").await.contains("101"));
}

#[tokio::test]
async fn a_token_alone_is_enough_for_wss() {
    let tokens = Tokens::parse(TOKEN).unwrap();
    let server = server(Access { tokens: tokens.clone(), ..Access::default() });
    let address = listen(&server, Some(certificates().0)).await.to_string();
    let connector = Connector::new().transports(transports());
    let session = connector.clone().tokens(tokens).connect(&address).await.unwrap();
    assert!(session.is_encrypted());
    assert_eq!(session.get_function("add").await.unwrap().call::<i64>((1_i64, 2_i64)).await.unwrap(), 3);
    let error = connector.connect(&address).await.unwrap_err();
    assert!(chain(&error).contains("Connector::tokens"), "{error}");
    let other = Tokens::parse("fedcba9876543210fedcba9876543210").unwrap();
    connector.tokens(other).connect(&address).await.unwrap_err();
}

#[tokio::test]
async fn another_http_server_is_quoted() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\nno such thing";
        stream.write_all(answer.as_bytes()).await.unwrap();
    });
    let error = Connector::new().transports(transports()).connect(&format!("ws://{address}")).await.unwrap_err();
    let text = chain(&error);
    assert!(text.contains("404 Not Found"), "{text}");
}

#[tokio::test]
async fn a_way_through_an_http_proxy_is_asked_for() {
    let server = server(Access { anonymous: true, ..Access::default() });
    let target = listen(&server, None).await;

    // A proxy that leads everybody to the server, whatever name they ask for.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap();
    let asked = tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(near.read_u8().await.unwrap());
        }
        near.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.unwrap();
        let mut far = TcpStream::connect(target.host_and_port().unwrap()).await.unwrap();
        tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        String::from_utf8(head).unwrap()
    });

    let transport = WebSocket::new().proxies(Proxies::fixed(&format!("http://{proxy}"), ""));
    let connector = Connector::new().transports(Transports::default().with(transport));
    let session = connector.connect("ws://board.example:9090").await.unwrap();
    assert_eq!(session.get_function("add").await.unwrap().call::<i64>((1_i64, 2_i64)).await.unwrap(), 3);
    assert!(asked.await.unwrap().starts_with("CONNECT board.example:9090 HTTP/1.1\r\n"));
}

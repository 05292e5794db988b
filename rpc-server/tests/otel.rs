//! Spans of calls, as a collector receives them.

// Tests may unwrap, because a panic is how a test fails.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rpc_core::{Context, ErrorKind, Registry, RpcError, Session, TraceContext};
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, Running};
use rpc_transports::Connector;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Span {
    trace_id: Vec<u8>,
    span_id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
    kind: u64,
    attributes: HashMap<String, String>,
    /// 2 is an error.
    status: u64,
}

/// A collector on a port of this machine, with what to answer. Its thread ends with the process.
fn collector(status: &'static str) -> (String, mpsc::Receiver<Vec<Span>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, received) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let spans = receive(stream.unwrap(), status);
            if sender.send(spans).is_err() {
                return;
            }
        }
    });
    (endpoint, received)
}

fn receive(mut stream: TcpStream, status: &str) -> Vec<Span> {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_ascii_lowercase()),
        }
    }
    assert_eq!(lines[0], "post /v1/traces http/1.1");
    assert!(lines.contains(&"content-type: application/x-protobuf".to_owned()), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("host: 127.0.0.1:")), "{lines:?}");
    let len = lines.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; len.parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").unwrap();
    spans(&body)
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans(request: &[u8]) -> Vec<Span> {
    let resources = fields(request).remove(&1).unwrap_or_default();
    let scopes = resources.iter().flat_map(|resource| fields(resource.bytes()).remove(&2).unwrap_or_default());
    let spans = scopes.flat_map(|scope| fields(scope.bytes()).remove(&2).unwrap_or_default());
    spans.map(|span| read_span(span.bytes())).collect()
}

fn read_span(span: &[u8]) -> Span {
    let fields_of_span = fields(span);
    let bytes = |number| fields_of_span.get(&number).map_or(&[][..], |values| values[0].bytes());
    let attributes = fields_of_span.get(&9).into_iter().flatten().map(|attribute| {
        let mut parts = fields(attribute.bytes());
        let value = fields(parts.remove(&2).unwrap()[0].bytes()).remove(&1).unwrap();
        (text(parts.remove(&1).unwrap()[0].bytes()), text(value[0].bytes()))
    });
    let status = fields(bytes(15)).remove(&3).map_or(0, |code| code[0].number());
    Span {
        trace_id: bytes(1).to_vec(),
        span_id: bytes(2).to_vec(),
        parent: bytes(4).to_vec(),
        name: text(bytes(5)),
        kind: fields_of_span[&6][0].number(),
        attributes: attributes.collect(),
        status,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A field's value in a message of Protocol Buffers.
#[derive(Clone)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Field {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(number) => panic!("{number}"),
        }
    }

    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Bytes(bytes) => panic!("{bytes:?}"),
        }
    }
}

fn fields(mut message: &[u8]) -> HashMap<u64, Vec<Field>> {
    fn varint(message: &mut &[u8]) -> u64 {
        let len = message.iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
        let (taken, rest) = message.split_at(len);
        *message = rest;
        taken.iter().rev().fold(0, |number, byte| number << 7 | u64::from(byte & 0x7f))
    }
    let mut found: HashMap<u64, Vec<Field>> = HashMap::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let value = match key & 7 {
            0 => Field::Number(varint(&mut message)),
            wire_type => {
                let len = match wire_type {
                    1 => 8,
                    2 => varint(&mut message) as usize,
                    5 => 4,
                    other => panic!("wire type {other}"),
                };
                let (taken, rest) = message.split_at(len);
                message = rest;
                Field::Bytes(taken.to_vec())
            }
        };
        found.entry(key >> 3).or_default().push(value);
    }
    found
}

async fn start(registry: Registry, endpoint: &str) -> (Running, Session, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().join("work"),
        otlp_endpoint: Some(endpoint.parse().unwrap()),
        ..ServeConfig::default()
    };
    let running = RpcServer::new(registry).config(config).start().await.unwrap();
    let session = Connector::new().connect(&running.addresses()[0].to_string()).await.unwrap();
    (running, session, folder)
}

/// All spans that come until there are `count`.
fn wait_for(count: usize, received: &mpsc::Receiver<Vec<Span>>) -> HashMap<String, Span> {
    let mut spans = HashMap::new();
    while spans.len() < count {
        let batch = received.recv_timeout(LIMIT).unwrap();
        spans.extend(batch.into_iter().map(|span| (span.name.clone(), span)));
    }
    spans
}

fn caller() -> TraceContext {
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_span_of_a_call_is_a_child_of_its_callers_and_the_parent_of_nested_calls() {
    let (endpoint, received) = collector("200 OK");
    let registry = Registry::new();
    let itself: Arc<Mutex<Option<Session>>> = Arc::default();
    let (for_async, for_blocking) = (itself.clone(), itself.clone());
    registry.add_async("outer", move || {
        let session = for_async.lock().unwrap().clone().unwrap();
        async move { session.get_function("middle").await?.call::<String>(()).concurrent().await }
    });
    registry.add("middle", move || -> rpc_core::Result<String> {
        let session = for_blocking.lock().unwrap().clone().unwrap();
        let inner = session.get_function("inner").wait()?;
        inner.call::<String>(()).concurrent().wait()
    });
    registry.add_inline("inner", |context: Context| context.trace().unwrap().to_string());
    registry.add("fail", || -> rpc_core::Result<()> { Err(RpcError::invalid_argument("no")) });

    let (running, session, _folder) = start(registry, &endpoint).await;
    let address = running.addresses()[0].to_string();
    let blocking = tokio::task::spawn_blocking(move || Connector::new().connect_blocking(&address).unwrap());
    *itself.lock().unwrap() = Some(blocking.await.unwrap());

    let outer = session.get_function("outer").await.unwrap();
    let seen: TraceContext = outer.call::<String>(()).trace(caller()).await.unwrap().parse().unwrap();
    let fail = session.get_function("fail").await.unwrap();
    assert_eq!(fail.call::<()>(()).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Of a caller that does not record there is no span, and nothing else is different.
    let unsampled = TraceContext::new([1; 16], [1; 8], 0).unwrap();
    let unrecorded: TraceContext = outer.call::<String>(()).trace(unsampled).await.unwrap().parse().unwrap();
    assert_eq!((unrecorded.trace_id(), unrecorded.is_sampled()), ([1; 16], false));

    drop((outer, fail, session, itself.lock().unwrap().take()));
    running.drain().await;
    let spans = wait_for(4, &received);
    let [outer, middle, inner, fail] = ["outer", "middle", "inner", "fail"].map(|name| &spans[name]);
    assert_eq!(spans.len(), 4, "{spans:?}");
    assert_eq!(outer.parent, caller().span_id());
    assert_eq!(middle.parent, outer.span_id);
    assert_eq!(inner.parent, middle.span_id);
    assert_eq!(inner.span_id, seen.span_id());
    for span in [outer, middle, inner] {
        assert_eq!((&span.trace_id[..], span.kind, span.status), (&caller().trace_id()[..], 2, 0), "{span:?}");
        assert_eq!(span.attributes["rpc.system"], "rpc");
        assert_eq!(span.attributes["rpc.method"], span.name);
        assert_eq!(span.attributes["rpc.outcome"], "ok");
    }
    assert!(fail.parent.is_empty() && fail.trace_id != outer.trace_id, "{fail:?}");
    assert_eq!((fail.status, &*fail.attributes["error.type"]), (2, "invalid_argument"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_are_not_affected_by_a_collector_that_fails_or_hangs() {
    let registry = Registry::new();
    registry.add_inline("one", || 1_i64);
    let (refusing, received) = collector("500 Internal Server Error");
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let hangs = format!("http://{}", hanging.local_addr().unwrap());
    for endpoint in [refusing, hangs, format!("http://{closed}")] {
        let (running, session, _folder) = start(registry.clone(), &endpoint).await;
        let one = session.get_function("one").await.unwrap();
        // More than fit into the queue.
        for _ in 0..50 {
            let calls: Vec<_> = (0..100).map(|_| one.call::<i64>(()).start()).collect();
            for call in calls {
                assert_eq!(call.await.unwrap(), 1);
            }
        }
        drop((one, session));
        let begun = Instant::now();
        running.drain().await;
        assert!(begun.elapsed() < LIMIT, "{endpoint}");
    }
    assert!(!wait_for(1, &received).is_empty());
}

//! Small calls beside other frameworks, measured in one run: everything pinned to one core, client
//! and server in processes of their own, each on a current-thread runtime.
//!
//!     cargo bench -p rpc-tests --features compare --bench compare
//!
//! Prints calls per second with one and with 64 in flight, for this project, for tarpc and for
//! tonic (gRPC over HTTP/2 without TLS). Each round measures the three in turn. A rate is the
//! median over the rounds; a ratio is the median over the rounds of our rate divided by theirs.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rpc_core::{LocalValue, Registry};
use rpc_transports::{Bind, Connector, Server};

const IN_FLIGHT: usize = 64;
const ROUNDS: usize = 11;
const ROUND: Duration = Duration::from_millis(400);

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve-ours") => block_on(serve_ours()),
        Some("serve-tarpc") => block_on(tarpc_side::serve()),
        Some("serve-tonic") => block_on(tonic_side::serve()),
        // `cargo bench` adds arguments of its own.
        _ => compare(),
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built").block_on(future)
}

fn pin_to_one_core() {
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(0);
    // Inherited by the servers, which are started later.
    if let Err(error) = rustix::thread::sched_setaffinity(None, &cores) {
        eprintln!("cannot pin to one core, the figures will vary: {error}");
    }
}

struct Peer {
    child: Child,
    address: String,
}

impl Peer {
    fn start(role: &str) -> Self {
        let program = std::env::current_exe().expect("the program has a path");
        let mut child = Command::new(program)
            .arg(role)
            .stdout(Stdio::piped())
            .stdin(Stdio::piped())
            .spawn()
            .expect("the program can be started again");
        let mut address = String::new();
        let output = child.stdout.take().expect("standard output is piped");
        BufReader::new(output).read_line(&mut address).expect("the server says its address");
        Self { child, address: address.trim().to_owned() }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn serve_ours() {
    let registry = Registry::new();
    registry.add_inline("echo", |value: LocalValue| value);
    let server = Server::serving(registry);
    let address = "tcp://127.0.0.1:0".parse().expect("a good address");
    let address = server.listen(&address, &Bind::default()).await.expect("a free port");
    println!("{address}");
    std::future::pending().await
}

/// Calls per second of one round.
struct Rates {
    ours: f64,
    tarpc: f64,
    tonic: f64,
}

fn compare() {
    pin_to_one_core();
    let (ours, tarpc, tonic) = (Peer::start("serve-ours"), Peer::start("serve-tarpc"), Peer::start("serve-tonic"));
    block_on(async {
        let session = Connector::new().connect(&ours.address).await.expect("our server answers");
        let echo = session.function::<(i64,), i64>("echo").await.expect("echo is there");
        let tarpc_client = tarpc_side::connect(tarpc.address.parse().expect("an address")).await;
        let tonic_client = tonic_side::connect(&tonic.address).await;
        let call_ours = |number: i64| {
            let call = echo.call((number,)).start();
            async move { assert_eq!(call.await.expect("the call succeeds"), number) }
        };
        let call_tarpc = |number: i64| tarpc_side::call(tarpc_client.clone(), number);
        let call_tonic = |number: i64| tonic_side::call(tonic_client.clone(), number);
        let round = async |in_flight| Rates {
            ours: rate(in_flight, call_ours).await,
            tarpc: rate(in_flight, call_tarpc).await,
            tonic: rate(in_flight, call_tonic).await,
        };
        let (mut single, mut pipelined) = (Vec::new(), Vec::new());
        for number in 0..=ROUNDS {
            let (one, many) = (round(1).await, round(IN_FLIGHT).await);
            // The first round warms up.
            if number > 0 {
                single.push(one);
                pipelined.push(many);
            }
        }
        print("call", &single);
        print("call_pipelined_64", &pipelined);
    });
}

/// Measures calls per second with `in_flight` at a time, over one round.
async fn rate<F: Future>(in_flight: usize, call: impl Fn(i64) -> F) -> f64 {
    use futures_util::stream::{FuturesUnordered, StreamExt};
    let start = Instant::now();
    let mut calls = FuturesUnordered::new();
    let mut made = 0;
    let mut done = 0_u32;
    while start.elapsed() < ROUND {
        while calls.len() < in_flight {
            calls.push(call(made));
            made += 1;
        }
        calls.next().await;
        done += 1;
        // All replies that have arrived are taken together, so that the clock is read seldom.
        while calls.len() > in_flight / 2 {
            match futures_util::FutureExt::now_or_never(calls.next()) {
                Some(Some(_)) => done += 1,
                _ => break,
            }
        }
    }
    let rate = f64::from(done) / start.elapsed().as_secs_f64();
    while calls.next().await.is_some() {}
    rate
}

fn print(case: &str, rounds: &[Rates]) {
    let median = |value: fn(&Rates) -> f64| {
        let mut values: Vec<_> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let ours = median(|round| round.ours);
    let (tarpc, to_tarpc) = (median(|round| round.tarpc), median(|round| round.ours / round.tarpc));
    let (tonic, to_tonic) = (median(|round| round.tonic), median(|round| round.ours / round.tonic));
    println!(
        "{case}: ours {ours:.0}/s, tarpc {tarpc:.0}/s (ratio {to_tarpc:.2}), tonic {tonic:.0}/s (ratio {to_tonic:.2})"
    );
}

/// Same service in tarpc, over TCP with no delay and bincode.
mod tarpc_side {
    use super::SocketAddr;
    use futures_util::StreamExt;
    use tarpc::server::{BaseChannel, Channel};
    use tarpc::tokio_serde::formats::Bincode;
    use tarpc::tokio_util::codec::LengthDelimitedCodec;
    use tarpc::{client, context, serde_transport};

    #[tarpc::service]
    pub trait Echo {
        async fn echo(number: i64) -> i64;
    }

    #[derive(Clone)]
    struct EchoServer;

    impl Echo for EchoServer {
        async fn echo(self, _: context::Context, number: i64) -> i64 {
            number
        }
    }

    pub(super) async fn serve() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        println!("{}", listener.local_addr().expect("a bound address"));
        loop {
            let (stream, _) = listener.accept().await.expect("a client");
            stream.set_nodelay(true).expect("no delay can be set");
            let framed = LengthDelimitedCodec::builder().new_framed(stream);
            let channel = BaseChannel::with_defaults(serde_transport::new(framed, Bincode::default()));
            tokio::spawn(channel.execute(EchoServer.serve()).for_each(|response| async {
                tokio::spawn(response);
            }));
        }
    }

    pub(super) async fn connect(address: SocketAddr) -> EchoClient {
        let stream = tokio::net::TcpStream::connect(address).await.expect("the server answers");
        stream.set_nodelay(true).expect("no delay can be set");
        let framed = LengthDelimitedCodec::builder().new_framed(stream);
        EchoClient::new(client::Config::default(), serde_transport::new(framed, Bincode::default())).spawn()
    }

    pub(super) async fn call(client: EchoClient, number: i64) {
        let answer = client.echo(context::current(), number).await.expect("the call succeeds");
        assert_eq!(answer, number);
    }
}

/// Same service in tonic, over TCP with no delay and protobuf. The code that `tonic-build` would
/// generate is written by hand, so that no `protoc` is needed.
mod tonic_side {
    use std::convert::Infallible;
    use std::future::{self, Ready};
    use std::task::{Context, Poll};

    use tonic::body::Body;
    use tonic::client;
    use tonic::codegen::{BoxFuture, Service, http};
    use tonic::server::{self, UnaryService};
    use tonic::transport::server::TcpIncoming;
    use tonic::transport::{Channel, Endpoint, Server};
    use tonic::{Request, Response, Status};
    use tonic_prost::ProstCodec;

    const ECHO: &str = "/compare.Echo/Echo";

    #[derive(Clone, PartialEq, prost::Message)]
    struct Number {
        #[prost(int64, tag = "1")]
        number: i64,
    }

    /// Method of the service.
    struct Echo;

    impl UnaryService<Number> for Echo {
        type Response = Number;
        type Future = Ready<Result<Response<Number>, Status>>;

        fn call(&mut self, request: Request<Number>) -> Self::Future {
            future::ready(Ok(Response::new(request.into_inner())))
        }
    }

    /// Service that finds the method by its path.
    #[derive(Clone)]
    struct EchoServer;

    impl Service<http::Request<Body>> for EchoServer {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = BoxFuture<Self::Response, Infallible>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            Box::pin(async move {
                match request.uri().path() {
                    ECHO => Ok(server::Grpc::new(ProstCodec::default()).unary(Echo, request).await),
                    _ => Ok(Status::unimplemented("no such method").into_http()),
                }
            })
        }
    }

    pub(super) async fn serve() {
        let address = "127.0.0.1:0".parse().expect("a good address");
        let incoming = TcpIncoming::bind(address).expect("a free port").with_nodelay(Some(true));
        println!("{}", incoming.local_addr().expect("a bound address"));
        Server::builder().serve_with_incoming(EchoServer, incoming).await.expect("the server runs");
    }

    pub(super) async fn connect(address: &str) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address").tcp_nodelay(true);
        endpoint.connect().await.expect("the server answers")
    }

    pub(super) async fn call(channel: Channel, number: i64) {
        let mut client = client::Grpc::new(channel);
        client.ready().await.expect("the channel is open");
        let path = http::uri::PathAndQuery::from_static(ECHO);
        let codec = ProstCodec::<Number, Number>::default();
        let answer = client.unary(Request::new(Number { number }), path, codec).await.expect("the call succeeds");
        assert_eq!(answer.into_inner().number, number);
    }
}

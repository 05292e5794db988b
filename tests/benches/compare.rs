//! Small calls beside other frameworks, measured in one run: everything pinned to one core, client and server in
//! processes of their own, each on a current-thread runtime.
//!
//!     cargo bench -p rpc-tests --features compare --bench compare
//!
//! Prints calls per second with 64 in flight, and the round trip of one call, for this project and for tarpc, in
//! interleaved rounds, and the median ratio of the pairs.

use std::future::Future;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::{LocalSession, LocalValue, Registry, RpcError, SharedSession};
use rpc_transports::{Connector, ListenOptions, OpenRequest, ServeOptions, Server};

const IN_FLIGHT: usize = 64;
const ROUNDS: usize = 11;
const ROUND: Duration = Duration::from_millis(400);

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve-ours") => block_on(serve_ours()),
        Some("serve-tarpc") => block_on(tarpc_side::serve()),
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
    let open =
        move |_: &OpenRequest| -> Result<SharedSession, RpcError> { Ok(Arc::new(LocalSession::new(registry.clone()))) };
    let server = Server::new(Arc::new(open), ServeOptions::default());
    let address = "tcp://127.0.0.1:0".parse().expect("a good address");
    let address = server.listen(&address, &ListenOptions::default()).await.expect("a free port");
    println!("{address}");
    std::future::pending().await
}

fn compare() {
    pin_to_one_core();
    let (ours, theirs) = (Peer::start("serve-ours"), Peer::start("serve-tarpc"));
    block_on(async {
        let session = Connector::new().connect(&ours.address).await.expect("our server answers");
        let echo = session.function::<(i64,), i64>("echo").await.expect("echo is there");
        let client = tarpc_side::connect(theirs.address.parse().expect("an address")).await;
        let (mut single, mut pipelined) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let call_ours = |number: i64| {
                let call = echo.call((number,)).start();
                async move { assert_eq!(call.await.expect("the call succeeds"), number) }
            };
            let call_theirs = |number: i64| tarpc_side::call(client.clone(), number);
            let one = (rate(1, call_ours).await, rate(1, call_theirs).await);
            let many = (rate(IN_FLIGHT, call_ours).await, rate(IN_FLIGHT, call_theirs).await);
            // The first round warms up.
            if round > 0 {
                single.push(one);
                pipelined.push(many);
            }
        }
        print("call", &single);
        print("call_pipelined_64", &pipelined);
    });
}

/// Calls per second with `in_flight` at a time, over one round.
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
        // As many as are there: the clock is not asked for each.
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

fn print(case: &str, pairs: &[(f64, f64)]) {
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let ours = median(pairs.iter().map(|pair| pair.0).collect());
    let theirs = median(pairs.iter().map(|pair| pair.1).collect());
    let ratio = median(pairs.iter().map(|pair| pair.0 / pair.1).collect());
    println!("{case}: ours {ours:.0}/s, tarpc {theirs:.0}/s, ratio {ratio:.2} (median of {} pairs)", pairs.len());
}

#[allow(unreachable_pub, missing_docs, clippy::module_name_repetitions)]
/// The same service in tarpc, over TCP with no delay and bincode.
mod tarpc_side {
    use std::future::Future;

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
    pub struct EchoServer;

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

    pub(super) fn call(client: EchoClient, number: i64) -> impl Future<Output = ()> {
        async move {
            let answer = client.echo(context::current(), number).await.expect("the call succeeds");
            assert_eq!(answer, number);
        }
    }
}

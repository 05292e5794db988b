//! A process for tests that kill, stop or measure processes: a server, a relay, a tracker, or a
//! client that holds objects and memory.

// The program serves tests: any error is a reason to panic.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::sync::mpsc;
use std::thread;

use clap::Parser;
use rpc_core::{DataType, Device, Lane, Registry, RemoteObject, Session, Shared};
use rpc_server::config::{RelaySettings, ServeSettings, TrackerSettings};
use rpc_server::isolate;
use rpc_server::server::Relay;
use rpc_server::server::RpcServer;
use rpc_server::tracker::Tracker;
use rpc_tests::functions;
use rpc_transports::{ClientTls, Connector};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn main() {
    let registry = registry();
    isolate::run_if_isolated(&registry);
    allow_many_files();
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("serve") => serve(registry, Program::parse_from(args)),
        Some("tracker") => track(Program::parse_from(args)),
        Some("relay") => relay(Program::parse_from(args)),
        Some("client") => client(Client::parse_from(args)),
        _ => panic!("unknown arguments {args:?}"),
    }
}

/// Arguments of a server, a relay or a tracker: the flags that `rpc-server` has for it.
#[derive(Parser)]
struct Program<S: clap::Args> {
    #[command(flatten)]
    settings: S,
}

/// Arguments of a client that holds objects and memory.
#[derive(Parser)]
struct Client {
    /// `async` or `blocking`
    form: String,
    address: String,
    /// Objects to be held
    objects: i64,
    /// The size of a tensor to be held; 0 for none
    bytes: i64,
    /// The certificate that the server must have, as PEM
    #[arg(allow_hyphen_values = true)]
    certificate: String,
    /// Call `hold.tagged` with this, and copy without end
    #[arg(long)]
    busy: Option<String>,
}

fn registry() -> Registry {
    let registry = functions::registry();
    registry.add_inline("pid", || i64::from(std::process::id()));
    registry.add_inline("bulk", || bytes::Bytes::from(vec![3; 1 << 20]));
    let made = bytes::Bytes::from(vec![3; 1 << 20]);
    registry.add_inline("bulk.made", move || made.clone());
    // `count` objects of a kind that costs next to no memory.
    registry.add_inline("objects.many", |count: i64| {
        (0..count).map(|object| Shared(std::sync::Arc::new(object))).collect::<Vec<_>>()
    });
    registry
}

fn serve(registry: Registry, program: Program<ServeSettings>) {
    let config = program.settings.resolve().unwrap();
    let reason = RpcServer::new(registry).config(config).run_blocking().unwrap();
    std::process::exit(reason.exit_code().into());
}

fn track(program: Program<TrackerSettings>) {
    let reason = Tracker::run_blocking(&program.settings.resolve().unwrap()).unwrap();
    std::process::exit(reason.exit_code().into());
}

fn relay(program: Program<RelaySettings>) {
    let relay = Relay::new(&program.settings.resolve().unwrap()).unwrap();
    std::process::exit(relay.run_blocking().unwrap().exit_code().into());
}

/// Connects, takes hold of objects and memory, prints the process id of the server, and waits for a
/// line. Then prints the kind of error by which the session has ended.
fn client(args: Client) {
    let connector = Connector::new().tls(ClientTls::new(args.certificate.as_bytes(), None).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let session = match args.form.as_str() {
        "async" => runtime.block_on(connector.connect(&args.address)).unwrap(),
        _ => connector.connect_blocking(&args.address).unwrap(),
    };
    let _held = hold(&session, args.objects, args.bytes);
    let _under_way = args.busy.map(|tag| begin(&session, tag));
    let pid: i64 = session.get_function("pid").wait().unwrap().call(()).wait().unwrap();
    println!("{pid}");
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let ended = runtime.block_on(session.ended());
    println!("{}", ended.kind().name());
}

fn hold(session: &Session, objects: i64, bytes: i64) -> (Vec<RemoteObject>, Option<rpc_core::RemoteTensor>) {
    let many = session.get_function("objects.many").wait().unwrap();
    let held = many.call::<Vec<RemoteObject>>((objects,)).wait().unwrap();
    let tensor = (bytes > 0).then(|| {
        let tensor = session.alloc(Device::cpu(), DataType::F32, &[bytes / 4]).wait().unwrap();
        // The memory is touched, so that it is really there to be freed.
        let fill = session.get_function("tensor.fill").wait().unwrap();
        fill.call::<()>((&tensor, 1.0)).wait().unwrap();
        tensor
    });
    (held, tensor)
}

/// Begins a call that runs for as long as the returned value is kept, and copies without end, each
/// on a lane of its own.
fn begin(session: &Session, tag: String) -> rpc_core::Pending<()> {
    let function = session.get_function("hold.tagged").wait().unwrap();
    let running = function.call::<()>((tag,)).lane(Lane(1)).start();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[COPY]).wait().unwrap();
    let (session, (copying, copies)) = (session.clone(), mpsc::channel());
    thread::spawn(move || {
        let data = bytes::Bytes::from(vec![1; COPY as usize]);
        // The copies end with the session.
        while session.copy_to_remote(&tensor, data.clone()).lane(Lane(2)).wait().is_ok() {
            let _ = copying.send(());
        }
    });
    copies.recv().unwrap();
    running
}

/// Size of each of the endless copies, in bytes.
const COPY: i64 = 16 << 20;

fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

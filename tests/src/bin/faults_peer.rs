//! The other process of tests that kill and stop processes, and of those that measure one: a server, or a client that holds
//! things.

// It serves tests: whatever goes wrong is a reason to panic.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::time::Duration;

use rpc_core::{DataType, Device, RemoteObject, Session, Shared};
use rpc_server::config::{ServeConfig, Span};
use rpc_server::server::RpcServer;
use rpc_tests::functions;
use rpc_transports::Connector;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn main() {
    allow_many_files();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", address, workdir, keep_alive, handshake] => {
            let config = ServeConfig {
                listen: vec![address.parse().unwrap()],
                keep_alive: Span(millis(keep_alive)),
                handshake_timeout: Span(millis(handshake)),
                ..config(workdir)
            };
            serve(config);
        }
        ["stdio", workdir] => serve(ServeConfig { stdio: true, listen: Vec::new(), ..config(workdir) }),
        ["client", form, address, objects, bytes] => {
            client(form, address, objects.parse().unwrap(), bytes.parse().unwrap())
        }
        _ => panic!("unknown arguments {args:?}"),
    }
}

fn config(workdir: &str) -> ServeConfig {
    ServeConfig {
        workdir: workdir.into(),
        allow_forward: ["*", "unix:*", "exec:*", "memory:*"].map(str::to_owned).into(),
        ..ServeConfig::default()
    }
}

fn serve(config: ServeConfig) {
    let registry = functions::registry();
    registry.add_inline("pid", || i64::from(std::process::id()));
    // As many objects as it takes, of a kind that costs nothing itself.
    registry.add_inline("objects.many", |count: i64| {
        (0..count).map(|object| Shared(std::sync::Arc::new(object))).collect::<Vec<_>>()
    });
    let reason = RpcServer::builder().registry(registry).config(config).build().run_blocking().unwrap();
    std::process::exit(reason.exit_code().into());
}

/// Connects, takes hold of so much, says what the server's process is, and waits for a line; then says how the session has
/// ended.
fn client(form: &str, address: &str, objects: i64, bytes: i64) {
    let connector = Connector::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let session = match form {
        "async" => runtime.block_on(connector.connect(address)).unwrap(),
        _ => connector.connect_blocking(address).unwrap(),
    };
    let _held = hold(&session, objects, bytes);
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
        // Touched, so that there is something to free.
        let fill = session.get_function("tensor.fill").wait().unwrap();
        fill.call::<()>((&tensor, 1.0)).wait().unwrap();
        tensor
    });
    (held, tensor)
}

fn millis(text: &str) -> Duration {
    Duration::from_millis(text.parse().unwrap())
}

fn allow_many_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
}

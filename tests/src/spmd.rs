//! Disco sessions for tests: the functions of their workers, and the kinds of launches.

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use disco::{
    Advertise, DataAddress, DiscoSession, Hosting, JoinOptions, NodeListener, NodeRank, Options, ProcessSession,
    ReduceOp, Scope, SocketSession, ThreadedSession, WeightFolders, WeightReader, WorkerContext,
};
use rpc_core::function::Rest;
use rpc_core::{
    Devices, ErrorKind, FunctionModule, LocalSession, Registry, Result, RpcError, Shared, SharedSession, Tensor,
    TensorView, TensorViewMut,
};
use rpc_transports::{Address, Bind, Connector, OpenRequest, ServeOptions, Server, TokioSpawner};
use tokio::runtime::Runtime;

/// Returns the functions of workers.
pub fn registry() -> Registry {
    let registry = Registry::new();
    disco::register(&registry);
    crate::digits::register(&registry);
    registry
        .add("worker_id", |worker: WorkerContext| worker.worker_id().0)
        .add("where", |worker: WorkerContext| {
            vec![worker.world_size(), worker.num_groups(), worker.group(), worker.rank_in_group().0]
        })
        .add("device", |worker: WorkerContext| worker.device())
        .add("print", |what: String| {
            println!("{what}, by standard output");
            eprintln!("{what}, by standard error");
        })
        .add("log", |what: String| {
            tracing::warn!(answer = 42, "{what}");
            tracing::debug!("{what} in detail");
        })
        .add("pid", || i64::from(std::process::id()))
        .add("echo", |value: rpc_core::LocalValue| value)
        .add("list", |Rest(args): Rest| rpc_core::Value::List(args))
        .add("add", |a: f64, b: f64| a + b)
        .add("add_to", |mut x: TensorViewMut, value: f32| -> Result<()> {
            x.as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += value);
            Ok(())
        })
        .add("add_id", |worker: WorkerContext, mut x: TensorViewMut| -> Result<()> {
            x.as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += worker.worker_id().0 as f32);
            Ok(())
        })
        .add("sum", |x: TensorView| -> Result<f32> { Ok(x.as_slice::<f32>()?.iter().sum()) })
        .add("copy", |x: TensorView| -> Result<Tensor> { Tensor::from_slice(x.shape(), x.as_slice::<f32>()?) })
        .add("fail_on", |worker: WorkerContext, id: u32| -> Result<f64> {
            if worker.worker_id().0 == id {
                return Err(RpcError::new(ErrorKind::Application, "told to fail"));
            }
            Ok(1.0)
        })
        .add("tensor_unless", |worker: WorkerContext, id: u32| -> Result<Tensor> {
            if worker.worker_id().0 == id {
                return Err(RpcError::new(ErrorKind::Application, "no tensor here"));
            }
            Tensor::from_slice([2], &[1.0_f32, 2.0])
        })
        .add("panic_on", |worker: WorkerContext, id: u32| assert!(worker.worker_id().0 != id, "told to panic"))
        .add("die_on", |worker: WorkerContext, id: u32| {
            if worker.worker_id().0 == id {
                std::process::abort();
            }
        })
        .add("sleep_on", |worker: WorkerContext, id: u32, ms: u64| {
            if worker.worker_id().0 == id {
                std::thread::sleep(std::time::Duration::from_millis(ms));
            }
        })
        // Makes the file `path-ID`, by which the test sees that it runs, and stays on the workers
        // `ids` until there is a file `path`.
        .add("hold_on", |worker: WorkerContext, ids: Vec<u32>, path: String| -> Result<()> {
            if ids.contains(&worker.worker_id().0) {
                std::fs::write(format!("{path}-{}", worker.worker_id()), "")?;
                while !std::path::Path::new(&path).exists() {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
            Ok(())
        })
        // Does the same in one collective after the other.
        .add("hold_in_collectives", |worker: WorkerContext, path: String| -> Result<()> {
            loop {
                let free = f32::from(u8::from(std::path::Path::new(&path).exists()));
                let sum = Tensor::from_slice([1], &[free])?;
                worker.allreduce(ReduceOp::Sum, &sum, &sum, Scope::World)?;
                if sum.read()?.as_slice::<f32>()?[0] > 0.0 {
                    return Ok(());
                }
                std::fs::write(format!("{path}-{}", worker.worker_id()), "")?;
            }
        })
        // Returns the worker's share of the rows, whose number need not be a multiple of the
        // workers'.
        .add("rows", |worker: WorkerContext, weight: Shared<WeightReader>| -> Result<Tensor> {
            let (rows, id, n) = (weight.0.shape()[0], i64::from(worker.worker_id().0), i64::from(worker.world_size()));
            weight.0.read_range(0, rows * id / n..rows * (id + 1) / n)
        })
        .add("name_of_weight", |weight: Shared<WeightReader>| {
            format!("{} {} {:?} {}", weight.0.name(), weight.0.dtype(), weight.0.shape(), weight.0.device())
        })
        .add("fail", || -> Result<f64> { Err(RpcError::new(ErrorKind::Application, "told to fail")) })
        .add_async("later", |value: i64| async move { value + 1 })
        .add("sum_of_ids", |worker: WorkerContext, rounds: u32| -> Result<f32> {
            let x = Tensor::from_slice([1], &[worker.worker_id().0 as f32])?;
            let sum = Tensor::from_slice([1], &[0.0_f32])?;
            for _ in 0..rounds {
                worker.allreduce(ReduceOp::Sum, &x, &sum, Scope::World)?;
            }
            Ok(sum.read()?.as_slice::<f32>()?[0])
        })
        // Returns the sum of the workers' ids along an axis of a mesh.
        .add("sum_along", |worker: WorkerContext, axis: String| -> Result<f32> {
            let sum = Tensor::from_slice([1], &[worker.worker_id().0 as f32])?;
            worker.allreduce(ReduceOp::Sum, &sum, &sum, worker.axis(&axis)?)?;
            Ok(sum.read()?.as_slice::<f32>()?[0])
        })
        .add("sum_along_unless", |worker: WorkerContext, axis: String, id: u32| -> Result<()> {
            if worker.worker_id().0 == id {
                return Err(RpcError::new(ErrorKind::Application, "told to fail"));
            }
            let sum = Tensor::from_slice([4], &[1.0_f32; 4])?;
            worker.allreduce(ReduceOp::Sum, &sum, &sum, worker.axis(&axis)?)
        })
        // Returns the worker's coordinates in the first mesh, its rank along an axis, and its size.
        .add("place_on_mesh", |worker: WorkerContext, axis: String| -> Result<Vec<u32>> {
            let scope = worker.axis(&axis)?;
            let meshes = worker.meshes();
            let mesh = meshes.first().ok_or_else(|| RpcError::internal("no mesh"))?;
            let mut place = mesh.coordinates(worker.worker_id())?;
            place.extend([worker.rank_in(scope).0, worker.size_of(scope)]);
            Ok(place)
        })
        .add("sum_unless", |worker: WorkerContext, id: u32| -> Result<f32> {
            if worker.worker_id().0 == id {
                return Err(RpcError::new(ErrorKind::Application, "told to fail"));
            }
            let sum = Tensor::from_slice([4], &[1.0_f32; 4])?;
            worker.allreduce(ReduceOp::Sum, &sum, &sum, Scope::World)?;
            Ok(sum.read()?.as_slice::<f32>()?[0])
        })
        .add("pass_to_next_group", |worker: WorkerContext| -> Result<f32> {
            let mine = Tensor::from_slice([1], &[worker.worker_id().0 as f32])?;
            if worker.group() + 1 < worker.num_groups() {
                worker.send_to_next_group(&mine)?;
            }
            if worker.group() > 0 {
                worker.recv_from_prev_group(&mine)?;
            }
            Ok(mine.read()?.as_slice::<f32>()?[0])
        });
    let module = FunctionModule::new("arithmetic")
        .add("square", |x: f64| x * x)
        .add("id_times", |worker: WorkerContext, x: f64| x * f64::from(worker.worker_id().0))
        .add_async("negate", |x: f64| async move { -x });
    registry.add_module(Arc::new(module));
    if let Some(environment) = crate::tvm_ffi::find() {
        registry.add_loader(Arc::new(environment.tvm_ffi()));
    }
    registry
}

/// Returns the folder from which the workers of servers and of nodes that dial in may read weights.
/// The threads and child processes of a test may read them anywhere.
pub fn readable_folder() -> PathBuf {
    let folder = std::env::temp_dir().join("rpc-tests-weights");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// Launch kind of the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Threads of this process.
    Threads,
    /// Child processes running this program.
    Processes(&'static str),
    /// Servers of this process behind TCP, each with so many workers.
    Tcp {
        /// Workers of each server.
        per_node: u32,
        /// Data path between the workers.
        data: Data,
    },
    /// Servers as with `Tcp`, behind a server that forwards.
    Chain,
    /// Nodes of this process with one worker each, which dial in.
    DialIn,
    /// The controller's own process, and servers behind TCP, each with one worker.
    Controller {
        /// Data path between the workers.
        data: Data,
    },
    /// One node, which runs this program and has its workers in processes of their own.
    NodeOfProcesses(&'static str),
    /// Servers behind TCP, each in a process of its own that runs this program, with one worker.
    Nodes {
        /// The program.
        program: &'static str,
        /// Data path between the workers.
        data: Data,
        /// Connection of the controller.
        route: Route,
    },
    /// Servers of this process behind TCP, each with one worker, of which each opens the next.
    Line {
        /// Data path between the workers.
        data: Data,
    },
}

/// Path of the collectives' data from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Through shared memory.
    Shared,
    /// Over TCP.
    Tcp,
    /// The workers do not reach each other; whoever has opened both nodes relays.
    Relayed,
}

impl Data {
    /// Sets the options by which the data of `nodes` nodes takes this path.
    pub fn set(self, nodes: u32, options: &mut Options) {
        if self != Self::Shared {
            options.data_addresses = vec![Ipv4Addr::LOCALHOST.into(); nodes as usize];
        }
        if self == Self::Relayed {
            options.allow_controller_relay = true;
            options.direct_timeout = Duration::from_millis(100);
            // Nothing listens at that address.
            options.advertise = Some(Advertise::new(|_, _| (Ipv4Addr::new(127, 7, 7, 7), 1).into()));
        }
    }
}

/// Path from a controller to its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Straight to each.
    Straight,
    /// Through a server of this process that forwards.
    Chain,
    /// Straight to the first, which opens the second, and so on.
    Line,
}

/// A session with the servers and processes that it needs.
pub struct Fixture {
    /// The session.
    pub session: DiscoSession,
    servers: Option<(Vec<Server>, Runtime)>,
    _nodes: Vec<Node>,
}

/// A server in a process of its own, which is killed when this value is dropped.
#[derive(Debug)]
pub struct Node {
    process: Child,
    address: String,
}

impl Node {
    /// Starts a node.
    pub fn start(program: &str) -> Self {
        Self::spawn(Command::new(program).arg("serve")).expect("the program says where it listens")
    }

    /// Starts a node that counts as another machine, because it is in a namespace of processes of
    /// its own. Its workers listen for data at `data`, if there is one. Returns `None` if the
    /// system does not permit such namespaces.
    pub fn apart(program: &str, data: Option<&str>) -> Option<Self> {
        let mut command = Command::new("unshare");
        Self::spawn(command.args(["--pid", "--fork", "--kill-child", program, "serve"]).args(data))
    }

    fn spawn(command: &mut Command) -> Option<Self> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        let mut address = String::new();
        let output = process.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut address).expect("a line");
        let this = Self { process, address: address.trim().to_owned() };
        (!this.address.is_empty()).then_some(this)
    }

    /// Address at which the node listens.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The process may have been killed already.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// Runs the program of a [`Node`]: serves the functions of workers, prints its address, and ends
/// with its standard input. The second argument is the address at which its workers listen for
/// data.
pub fn serve_node() {
    let runtime = runtime();
    let data = std::env::args().nth(2).map(|text| DataAddress(text.parse().expect("an IP address")));
    let (address, _server) = listen_with(&runtime, forwarding(Options::default().keep_alive), data);
    println!("{address}");
    _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    std::process::exit(0);
}

impl Fixture {
    /// Returns the number of sessions of the servers that host the workers.
    pub fn sessions(&self) -> usize {
        self.servers.iter().flat_map(|(servers, _)| servers).map(Server::sessions).sum()
    }
}

/// Returns the launches that every operation has to work over. Those with processes run `program`.
pub fn launches(program: &'static str) -> [Launch; 13] {
    [
        Launch::Threads,
        Launch::Processes(program),
        Launch::Tcp { per_node: 2, data: Data::Shared },
        Launch::Tcp { per_node: 1, data: Data::Tcp },
        Launch::Tcp { per_node: 2, data: Data::Relayed },
        Launch::Chain,
        Launch::DialIn,
        Launch::Controller { data: Data::Shared },
        Launch::Controller { data: Data::Relayed },
        Launch::NodeOfProcesses(program),
        Launch::Line { data: Data::Shared },
        Launch::Line { data: Data::Tcp },
        Launch::Line { data: Data::Relayed },
    ]
}

/// Runs `test` for each of the [`launches`], number of workers and number of groups.
///
/// # Panics
///
/// The session cannot be started, fails by itself, or does not end.
pub fn everywhere(program: &'static str, shapes: &[(u32, u32)], test: impl Fn(&DiscoSession)) {
    for launch in launches(program) {
        for (workers, groups) in shapes {
            if let Launch::Tcp { per_node, .. } = launch
                && workers % per_node != 0
            {
                continue;
            }
            eprintln!("{launch:?}, {workers} workers in {groups} groups");
            let fixture = launch.start(*workers, *groups);
            test(&fixture.session);
            fixture.session.sync_all().wait().expect("nothing has failed");
            fixture.session.shutdown().wait().expect("an orderly end");
        }
    }
}

impl Launch {
    /// Starts a session.
    pub fn start(self, num_workers: u32, num_groups: u32) -> Fixture {
        self.try_start(num_workers, num_groups).expect("a session")
    }

    /// Starts a session.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn try_start(self, num_workers: u32, num_groups: u32) -> disco::Result<Fixture> {
        self.try_start_with(num_workers, num_groups, Options::default())
    }

    /// Starts a session with these settings.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn try_start_with(self, num_workers: u32, num_groups: u32, mut options: Options) -> disco::Result<Fixture> {
        let mut nodes = Vec::new();
        let keep_alive = options.keep_alive;
        let (session, servers) = match self {
            Self::Threads => {
                let session = ThreadedSession::new(num_workers, num_groups).registry(registry());
                (session.options(options).start(), None)
            }
            Self::Processes(program) => {
                let session = ProcessSession::new(num_workers, num_groups).command([program, "--disco-worker"]);
                (session.options(options).start(), None)
            }
            Self::Nodes { program, data, route } => {
                nodes = (0..num_workers).map(|_| Node::start(program)).collect();
                let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_owned()).collect();
                data.set(num_workers, &mut options);
                let mut session = SocketSession::new(addresses, 1, num_groups).options(options);
                let mut servers = None;
                if route == Route::Line {
                    session = session.fan_out(1);
                }
                if route == Route::Chain {
                    let runtime = runtime();
                    let (gateway, server) = listen(&runtime, forwarding(keep_alive));
                    session = session.connector(Connector::new().via(&gateway));
                    servers = Some((vec![server], runtime));
                }
                (session.start(), servers)
            }
            Self::Tcp { per_node, data } => {
                let nodes = num_workers / per_node;
                data.set(nodes, &mut options);
                let runtime = runtime();
                let (addresses, servers) = serve(&runtime, nodes);
                let session = SocketSession::new(addresses, per_node, num_groups).options(options).start();
                (session, Some((servers, runtime)))
            }
            Self::Line { data } => {
                data.set(num_workers, &mut options);
                // The nodes relay, which needs no permission.
                options.allow_controller_relay = false;
                let runtime = runtime();
                let (addresses, servers): (Vec<_>, Vec<_>) =
                    (0..num_workers).map(|_| listen(&runtime, forwarding(keep_alive))).unzip();
                let session = SocketSession::new(addresses, 1, num_groups).fan_out(1).options(options).start();
                (session, Some((servers, runtime)))
            }
            Self::Chain => {
                let runtime = runtime();
                let (addresses, mut servers) = serve(&runtime, num_workers);
                let (gateway, server) = listen(&runtime, forwarding(keep_alive));
                servers.push(server);
                let session = SocketSession::new(addresses, 1, num_groups).connector(Connector::new().via(&gateway));
                (session.options(options).start(), Some((servers, runtime)))
            }
            Self::DialIn => {
                let listener = NodeListener::bind("tcp://127.0.0.1:0").wait()?;
                for rank in (0..num_workers).rev() {
                    let mut options = JoinOptions::default();
                    // One node does not name its rank.
                    options.weights = Some(WeightFolders::new([readable_folder()]));
                    options.rank = (rank > 0).then_some(NodeRank { rank, nodes: num_workers });
                    std::thread::spawn({
                        let address = listener.address();
                        move || {
                            // If this fails, the error of the session names the missing node.
                            if let Err(error) = disco::join(&registry(), &address, options).wait() {
                                eprintln!("a node: {error}");
                            }
                        }
                    });
                }
                (SocketSession::dialled_by(num_workers as usize, &listener, 1, num_groups).start(), None)
            }
            Self::Controller { data } => {
                data.set(num_workers, &mut options);
                let runtime = runtime();
                let (addresses, servers) = serve(&runtime, num_workers - 1);
                let session = SocketSession::new(addresses, 1, num_groups).options(options);
                let session = session.controller_as_node(registry(), Devices::new()).start();
                (session, Some((servers, runtime)))
            }
            Self::NodeOfProcesses(program) => {
                options.hosting = Hosting::Processes;
                let node = Address::exec([program, "--disco-worker"]).expect("an address").to_string();
                (SocketSession::new([node], num_workers, num_groups).options(options).start(), None)
            }
        };
        Ok(Fixture { session: session.wait()?, servers, _nodes: nodes })
    }
}

/// Keep-alive for tests with peers that are stopped or cut off, which are noticed by their silence
/// alone. It is too short for other tests: a busy machine may delay a program by three times as
/// long.
pub const ATTENTIVE: Duration = Duration::from_millis(200);

fn forwarding(keep_alive: Duration) -> ServeOptions {
    ServeOptions { allow_forward: vec!["*".to_owned()], keep_alive, ..ServeOptions::default() }
}

/// Creates a runtime for servers of tests.
pub fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Starts `count` servers of the functions of workers, and returns their addresses.
pub fn serve(runtime: &Runtime, count: u32) -> (Vec<String>, Vec<Server>) {
    serve_with(runtime, count, &ServeOptions::default())
}

/// Does the same as [`serve`], with these settings.
pub fn serve_with(runtime: &Runtime, count: u32, options: &ServeOptions) -> (Vec<String>, Vec<Server>) {
    (0..count).map(|_| listen(runtime, options.clone())).unzip()
}

fn listen(runtime: &Runtime, options: ServeOptions) -> (String, Server) {
    listen_with(runtime, options, None)
}

fn listen_with(runtime: &Runtime, options: ServeOptions, data: Option<DataAddress>) -> (String, Server) {
    runtime.block_on(async {
        let server = node_with(options, data);
        let address = "tcp://127.0.0.1:0".parse().expect("an address");
        let address = server.listen(&address, &Bind::default()).await.expect("to listen");
        (address.to_string(), server)
    })
}

/// Creates a server of the functions of workers. Must be called in a runtime.
pub fn node(options: ServeOptions) -> Server {
    node_with(options, None)
}

fn node_with(options: ServeOptions, data: Option<DataAddress>) -> Server {
    let open = move |request: &OpenRequest| -> Result<SharedSession, RpcError> {
        let session = LocalSession::builder(registry()).spawner(Arc::new(TokioSpawner::current()));
        let mut session = session
            .extension(Arc::new(request.onward.clone()))
            .extension(Arc::new(WeightFolders::new([readable_folder()])));
        if let Some(data) = data {
            session = session.extension(Arc::new(data));
        }
        Ok(Arc::new(session.build()))
    };
    Server::new(Arc::new(open), options)
}

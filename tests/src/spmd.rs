//! Disco sessions under test: the functions of their workers, and the ways in which workers are launched.

use std::sync::Arc;

use disco::{
    DiscoSession, Hosting, JoinOptions, NodeListener, NodePlace, Options, ProcessSession, ReduceOp, Scope,
    SocketSession, ThreadedSession, WorkerContext,
};
use rpc_core::{ErrorKind, LocalSession, Registry, Result, RpcError, SharedSession, Tensor, TensorView, TensorViewMut};
use rpc_transports::{Address, ListenOptions, OpenRequest, ServeOptions, Server, TokioSpawner};
use tokio::runtime::Runtime;

/// The functions of workers.
pub fn registry() -> Registry {
    let registry = Registry::new();
    disco::register(&registry);
    crate::digits::register(&registry);
    registry
        .add("worker_id", |worker: WorkerContext| worker.worker_id().0)
        .add("where", |worker: WorkerContext| {
            vec![worker.world_size(), worker.num_groups(), worker.group(), worker.rank_in_group().0]
        })
        .add("pid", || i64::from(std::process::id()))
        .add("echo", |value: rpc_core::LocalValue| value)
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
        .add_async("later", |value: i64| async move { value + 1 })
        .add("sum_of_ids", |worker: WorkerContext, rounds: u32| -> Result<f32> {
            let x = Tensor::from_slice([1], &[worker.worker_id().0 as f32])?;
            let sum = Tensor::from_slice([1], &[0.0_f32])?;
            for _ in 0..rounds {
                worker.allreduce(ReduceOp::Sum, &x, &sum, Scope::World)?;
            }
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
    registry
}

/// How workers are launched.
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
        /// Collectives over TCP, too, rather than through shared memory.
        data_over_tcp: bool,
    },
    /// As `Tcp`, behind a server that forwards.
    Chain,
    /// Nodes of this process with one worker each, which dial in.
    DialIn,
    /// One node, which is this program, and has its workers in processes of their own.
    NodeOfProcesses(&'static str),
}

/// A session, and what it stands on.
pub struct Fixture {
    /// The session.
    pub session: DiscoSession,
    servers: Option<(Vec<Server>, Runtime)>,
}

impl Fixture {
    /// How many sessions the servers have that the workers are at.
    pub fn sessions(&self) -> usize {
        self.servers.iter().flat_map(|(servers, _)| servers).map(Server::sessions).sum()
    }
}

impl Launch {
    /// Starts a session.
    pub fn start(self, num_workers: u32, num_groups: u32) -> Fixture {
        self.try_start(num_workers, num_groups).expect("a session")
    }

    /// Starts a session, or says why there is none.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn try_start(self, num_workers: u32, num_groups: u32) -> disco::Result<Fixture> {
        let mut options = Options::default();
        let (session, servers) = match self {
            Self::Threads => (ThreadedSession::new(num_workers, num_groups).registry(registry()).start(), None),
            Self::Processes(program) => {
                (ProcessSession::new(num_workers, num_groups).command([program, "--disco-worker"]).start(), None)
            }
            Self::Tcp { per_node, data_over_tcp } => {
                let nodes = num_workers / per_node;
                if data_over_tcp {
                    options.data_addresses = vec![std::net::Ipv4Addr::LOCALHOST.into(); nodes as usize];
                }
                let runtime = runtime();
                let (addresses, servers) = serve(&runtime, nodes);
                let session = SocketSession::new(addresses, per_node, num_groups).options(options).start();
                (session, Some((servers, runtime)))
            }
            Self::Chain => {
                let runtime = runtime();
                let (addresses, mut servers) = serve(&runtime, num_workers);
                let (gateway, server) =
                    listen(&runtime, ServeOptions { allow_forward: vec!["*".to_owned()], ..ServeOptions::default() });
                servers.push(server);
                let connector = rpc_transports::Connector::new().via(&gateway);
                let session = SocketSession::new(addresses, 1, num_groups).connector(connector).start();
                (session, Some((servers, runtime)))
            }
            Self::DialIn => {
                let listener = NodeListener::bind("tcp://127.0.0.1:0").wait()?;
                for rank in (0..num_workers).rev() {
                    let mut options = JoinOptions::default();
                    // One does not say which it is.
                    options.place = (rank > 0).then_some(NodePlace { rank, nodes: num_workers });
                    std::thread::spawn({
                        let address = listener.address();
                        move || {
                            // If this fails the session says who is missing.
                            if let Err(error) = disco::join(&registry(), &address, options).wait() {
                                eprintln!("a node: {error}");
                            }
                        }
                    });
                }
                (SocketSession::dialled_by(num_workers as usize, &listener, 1, num_groups).start(), None)
            }
            Self::NodeOfProcesses(program) => {
                options.hosting = Hosting::Processes;
                let node = Address::exec([program, "--disco-worker"]).expect("an address").to_string();
                (SocketSession::new([node], num_workers, num_groups).options(options).start(), None)
            }
        };
        Ok(Fixture { session: session.wait()?, servers })
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn serve(runtime: &Runtime, count: u32) -> (Vec<String>, Vec<Server>) {
    (0..count).map(|_| listen(runtime, ServeOptions::default())).unzip()
}

fn listen(runtime: &Runtime, options: ServeOptions) -> (String, Server) {
    runtime.block_on(async {
        let server = node(options);
        let address = "tcp://127.0.0.1:0".parse().expect("an address");
        let address = server.listen(&address, &ListenOptions::default()).await.expect("to listen");
        (address.to_string(), server)
    })
}

/// A server of the functions of workers. Inside of a runtime.
pub fn node(options: ServeOptions) -> Server {
    let open = |_: &OpenRequest| -> Result<SharedSession, RpcError> {
        Ok(Arc::new(LocalSession::builder(registry()).spawner(Arc::new(TokioSpawner::current())).build()))
    };
    Server::new(Arc::new(open), options)
}

//! Controllers of Disco and their nodes on the simulated network.
//!
//! Links and controllers are tasks of Disco's own runtime, workers are threads. The virtual clock
//! waits for all of them: it moves on only while every other thread sleeps. Which of two threads
//! comes first is not drawn from the seed.
//!
//! Timers follow the clock of the runtime that drives the task, and Disco's runtime has the real
//! clock. So the runtime of the simulation drives every session here: those of controllers are
//! connected on it, and those between nodes are opened by servers that run on it.
//!
//! Beside what holds for all sessions: each worker runs the commands of its controller once, in
//! order, and all of them before a sync succeeds; each failure is told once; a session that is lost
//! says so in all that follows; no worker's thread is left.

use std::ops::Range;
use std::time::Duration;

use disco::{DRef, DiscoError, DiscoSession, Hosting, Options, SocketSession, WorkerContext};
use rpc_conformance::threads::{alone_in_process, threads_named, wait_for_rest};
use rpc_core::{DataType, Tensor};

use super::*;

/// Seeds of an ordinary run. `RPC_SIMULATION_SEEDS=FIRST..END` runs others.
const SEEDS: Range<u64> = 0..50;

/// Number of controllers, each at a host of its own.
const CONTROLLERS: usize = 2;

/// Hosts of servers: two nodes, which open each other, and a hop to either.
const HOSTS: [&str; 3] = ["hop", "near", "far"];

/// Interval of keep-alive. While nothing happens, the pings are what costs time.
const KEEP_ALIVE: Duration = Duration::from_secs(4);

/// Record of the steps that the workers of all sessions have done.
#[derive(Default)]
pub(super) struct Steps {
    /// Number of the last step, by session and worker.
    last: Mutex<HashMap<(u64, u32), u64>>,
    /// Steps that came twice or too early.
    faults: Mutex<Vec<String>>,
}

impl Steps {
    fn take(&self, session: u64, worker: u32, step: u64) {
        let mut last = self.last.lock();
        let last = last.entry((session, worker)).or_default();
        if step != *last + 1 {
            let fault = format!("session {session}, worker {worker}: step {step} after step {last}");
            self.faults.lock().push(fault);
        }
        *last = step;
    }
}

/// Adds the functions that workers call.
pub(super) fn register(registry: &Registry, steps: &Arc<Steps>) {
    let steps = Arc::clone(steps);
    registry.add_inline("step", move |worker: WorkerContext, session: u64, step: u64| {
        steps.take(session, worker.worker_id().0, step);
    });
    registry.add_inline("fail", |text: String| -> Result<()> { Err(RpcError::invalid_argument(text)) });
}

/// The histories of half of the seeds, so that the cores share them.
#[test]
fn controllers_and_workers_agree_until_they_lose_each_other() {
    let seeds = seeds(SEEDS);
    run(
        "simulation::disco_links::controllers_and_workers_agree_until_they_lose_each_other",
        seeds.start..seeds.start.midpoint(seeds.end),
    );
}

/// The histories of the other half.
#[test]
fn controllers_and_workers_agree_in_other_histories() {
    let seeds = seeds(SEEDS);
    run(
        "simulation::disco_links::controllers_and_workers_agree_in_other_histories",
        seeds.start.midpoint(seeds.end)..seeds.end,
    );
}

/// Runs the histories of `seeds` in a process of their own. `test` is the name of the test.
fn run(test: &str, seeds: Range<u64>) {
    if !alone_in_process(test) {
        return;
    }
    let least = [
        ("sessions", 1.0),
        ("nodes below nodes", 0.5),
        ("syncs", 2.0),
        ("steps", 20.0),
        ("copies", 1.0),
        ("failures told", 0.5),
        ("losses", 0.25),
    ];
    let least = least.map(|(what, times)| (what.to_owned(), times));
    run_histories(seeds, Builder::new_current_thread().on_thread_park(wait_for_rest), history, &least);
}

async fn history(seed: u64) -> Tally {
    let mut random = Random::new(seed);
    let conditions = conditions(&mut random);
    let network = SimulatedNetwork::new(random.number(), conditions);
    let mut world = World::start(network.clone(), &HOSTS, KEEP_ALIVE).await;
    let controllers = (0..CONTROLLERS).map(|index| {
        let controller = Controller {
            connector: connector(&network, &format!("client-{index}"), KEEP_ALIVE),
            random: Random::new(random.number()),
            ledger: Arc::clone(&world.ledger),
        };
        tokio::spawn(controller.run())
    });
    let controllers = controllers.collect();
    let disturbances = 2 + random.below(5);
    world.go_through(&mut random, disturbances, Duration::from_secs(1), controllers).await;
    let no_workers = async {
        // One of Disco's own runtime stays.
        while threads_named("disco-") > threads_named("disco-io") {
            sleep(Duration::from_millis(100)).await;
        }
    };
    patiently("the threads of workers", no_workers).await;
    assert_eq!(*world.ledger.steps.faults.lock(), [""; 0]);
    std::mem::take(&mut world.ledger.tally.lock())
}

/// One controller: it opens a session, works, and ends it, several times.
struct Controller {
    connector: Connector,
    random: Random,
    ledger: Arc<Ledger>,
}

/// A session, and what has been asked of it.
struct Open {
    session: DiscoSession,
    /// Number by which the steps name it.
    number: u64,
    steps: u64,
    /// Commands that fail and have not been told.
    failing: usize,
    objects: Vec<DRef>,
}

impl Controller {
    async fn run(mut self) {
        for _ in 0..3 {
            let mut nodes = Vec::new();
            for _ in 0..1 + self.random.below(2) {
                let (node, other) =
                    [("sim://near:1", "sim://far:1"), ("sim://far:1", "sim://near:1")][self.random.below(2)];
                let connector = match self.random.below(2) {
                    0 => self.connector.clone(),
                    _ => self.connector.clone().via("sim://hop:1"),
                };
                match patiently("a connection", connector.connect(node)).await {
                    Ok(session) => {
                        // One of three nodes opens the other one.
                        let below = (self.random.below(3) == 0).then(|| other.to_owned());
                        nodes.push((session, Vec::from_iter(below)));
                    }
                    Err(error) => check_refusal(&error.into_rpc_error()),
                }
            }
            if nodes.is_empty() {
                continue;
            }
            let mut options = Options::default();
            options.hosting = Hosting::Threads;
            let per_node = 1 + self.random.below(2) as u32;
            let below: usize = nodes.iter().map(|(_, below)| below.len()).sum();
            let session = SocketSession::over(nodes, per_node, 1).options(options);
            match patiently("the start of a session", session.start()).await {
                Ok(session) => {
                    self.ledger.count("sessions");
                    *self.ledger.tally.lock().entry("nodes below nodes".into()).or_default() += below as u64;
                    self.work(session).await;
                }
                Err(error) => self.check(&error),
            }
        }
    }

    async fn work(&mut self, session: DiscoSession) {
        let number = call_number(&mut self.random);
        let mut open = Open { session, number, steps: 0, failing: 0, objects: Vec::new() };
        for _ in 0..1 + self.random.below(12) {
            if let Err(error) = patiently("an operation", self.operation(&mut open)).await {
                self.check(&error);
                self.ledger.count("losses");
                let later = patiently("a sync after the loss", open.session.sync_all()).await;
                assert!(matches!(later, Err(DiscoError::Session(_))), "{later:?} after {error}");
                return;
            }
            sleep(Duration::from_millis(self.random.below(200) as u64)).await;
        }
        if self.random.below(2) == 0 {
            // A session that is lost already is shut down, too.
            match patiently("a shutdown", open.session.shutdown()).await {
                Ok(()) | Err(DiscoError::Workers(_)) => {}
                Err(error) => self.check(&error),
            }
        }
    }

    /// Does one thing.
    ///
    /// # Errors
    ///
    /// The session is lost.
    async fn operation(&mut self, open: &mut Open) -> disco::Result<()> {
        open.session.room().await?;
        match self.random.below(7) {
            0 | 1 => {
                let step = open.session.get_global_func("step")?;
                for _ in 0..1 + self.random.below(100) {
                    step.call((open.number, open.steps + 1))?;
                    open.steps += 1;
                    self.ledger.count("steps");
                }
                Ok(())
            }
            2 => {
                let told = open.session.sync_all().await;
                self.synced(open, told)
            }
            3 => {
                // Dropped at any moment: the sync is given up.
                let limit = Duration::from_millis(self.random.below(300) as u64);
                match timeout(limit, open.session.sync_all()).await {
                    Ok(told) => self.synced(open, told),
                    Err(_) => Ok(()),
                }
            }
            4 => {
                let data = self.random.bytes_up_to(300_000);
                let tensor = Tensor::from_slice([data.len() as i64], &data)?;
                let there = open.session.copy_to_worker_0(&tensor, None)?;
                let back = open.session.copy_from_worker_0(&there).await?;
                assert_eq!(back.read()?.as_slice::<u8>()?, data, "what came back from worker 0");
                self.ledger.count("copies");
                Ok(())
            }
            5 => {
                let fail = open.session.get_global_func("fail")?;
                fail.call(("on purpose",))?;
                open.failing += 1;
                Ok(())
            }
            _ => {
                let keep = self.random.below(4);
                open.objects.truncate(keep);
                let object = open.session.get_global_func("object")?;
                open.objects.push(object.call(())?);
                open.session.empty(&[self.random.below(10_000) as i64], DataType::F32, None)?;
                Ok(())
            }
        }
    }

    /// Checks the outcome of a sync of all workers.
    fn synced(&self, open: &mut Open, told: disco::Result<()>) -> disco::Result<()> {
        let failures = match told {
            Ok(()) => 0,
            Err(DiscoError::Workers(failures)) => failures.len(),
            Err(error) => return Err(error),
        };
        let expected = std::mem::take(&mut open.failing) * open.session.num_workers() as usize;
        assert_eq!(failures, expected, "failures that a sync tells");
        self.has_run(open);
        self.ledger.count("syncs");
        *self.ledger.tally.lock().entry("failures told".into()).or_default() += failures as u64;
        Ok(())
    }

    /// Checks that every worker has run all steps.
    fn has_run(&self, open: &Open) {
        let last = self.ledger.steps.last.lock();
        for worker in 0..open.session.num_workers() {
            let ran = last.get(&(open.number, worker)).copied().unwrap_or_default();
            assert_eq!(ran, open.steps, "last step of worker {worker}");
        }
    }

    fn check(&self, error: &DiscoError) {
        match error {
            DiscoError::Session(error) => check_loss(error),
            _ => panic!("not the loss of a session: {error}"),
        }
    }
}

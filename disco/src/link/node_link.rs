//! Link to the host of one node: commands go to its workers and events come back, in this process
//! or over a session.

use std::future::poll_fn;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use rpc_core::reply::{Outcome, ReplySink};
use rpc_core::{
    ErrorKind, Lane, Operation, Pack, Reference, RemoteFunction, RemoteObject, Request, RpcError, RpcSession, Session,
    Value,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::link::local::LocalLink;
use crate::link::loss::{LossReporter, LostNode};
use crate::link::outbox::Outbox;
use crate::link::relayed_data::{Destination, End, RelayRequest};
use crate::link::upstream::Upstream;
use crate::wire::codec::Encoded;
use crate::wire::command::Queued;
use crate::wire::event::decode_events;
use crate::wire::mesh::Mesh;
use crate::wire::plan::ListenAddresses;
use crate::wire::relayed_pair::RelayedPair;
use crate::wire::set_up::{MESSAGES, NodeInfo, SetUp};

/// Lanes at each host: one for commands, one for events.
const COMMANDS: Lane = Lane(1);
const EVENTS: Lane = Lane(2);

/// Pause before requests for relaying are fetched again, after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// Most messages without a reply. While these are on their way, further commands gather, so that
/// many share the cost of one. It is one more than one, so that a sync that follows a call does not
/// wait.
const MAX_UNANSWERED: usize = 2;

/// Link to one host, whose workers have consecutive numbers, those below it included.
pub(crate) struct Link {
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// Number of nodes: the one at the other end and those below it.
    pub(crate) nodes: usize,
    pub(crate) info: NodeInfo,
    /// Name of the other end, for users.
    pub(crate) name: String,
    /// True if the link or one behind it is encrypted, as far as the processes at its ends can
    /// tell.
    pub(crate) is_encrypted: bool,
    /// True if it goes through hops.
    pub(crate) has_hops: bool,
    path: Path,
    /// Open session and host at the other end. Taken when the session ends.
    held: Mutex<Option<OpenHost>>,
    /// True once a task takes the data that is to be relayed.
    relays: AtomicBool,
    /// Number of the first command that it takes.
    first_command: u64,
}

enum Path {
    /// The host is in this process, and takes commands as they are.
    Local(Arc<LocalLink>),
    /// The host is in another process; commands wait here to be sent.
    Remote(Arc<Outbox>),
}

struct OpenHost {
    session: Session,
    host: RemoteObject,
    /// Functions by which the host is driven, until the tasks that call them start.
    functions: Option<DrivingFunctions>,
    tasks: Vec<JoinHandle<()>>,
}

/// Functions of a node that submit commands and fetch events.
struct DrivingFunctions {
    submit: RemoteFunction,
    events: RemoteFunction,
}

impl Link {
    /// Opens a host at the other end of `session`, which has `local` as an extension if that is
    /// given.
    ///
    /// # Errors
    ///
    /// The session's; [`ErrorKind::NotFound`] where the other end is no node.
    pub(crate) async fn open(
        session: Session,
        name: String,
        set_up: SetUp,
        local: Option<Arc<LocalLink>>,
    ) -> rpc_core::Result<Self> {
        let named = |error: RpcError| error.context(&name);
        let (host, info, functions) = Self::open_host(&session, &set_up).await.map_err(named)?;
        let said: u64 = info.processes.iter().map(|process| u64::from(process.count)).sum();
        if said != u64::from(set_up.workers()) {
            let text = format!("a node was to have {} workers and says that it has {said}", set_up.workers());
            return Err(named(RpcError::new(ErrorKind::Protocol, text)));
        }
        if info.data_addresses.len() != set_up.nodes() {
            let text = "a node does not say for each of its nodes where data goes";
            return Err(named(RpcError::new(ErrorKind::Protocol, text)));
        }
        let path = match local.filter(|local| local.has_host()) {
            Some(local) => Path::Local(local),
            None => Path::Remote(Arc::default()),
        };
        let is_encrypted = session.is_encrypted() || info.is_encrypted_below;
        let held = Mutex::new(Some(OpenHost { session, host, functions: Some(functions), tasks: Vec::new() }));
        Ok(Self {
            first: set_up.first,
            count: set_up.workers(),
            nodes: set_up.nodes(),
            info,
            name,
            is_encrypted,
            has_hops: false,
            path,
            held,
            relays: AtomicBool::new(false),
            first_command: set_up.position().sequence + 1,
        })
    }

    async fn open_host(
        session: &Session,
        set_up: &SetUp,
    ) -> rpc_core::Result<(RemoteObject, NodeInfo, DrivingFunctions)> {
        // All at once.
        let version = async { session.get_function("disco.version").await?.call::<u32>(()).await };
        let find = |name| session.get_function(name).into_future();
        let (version, open, submit, events) =
            tokio::join!(version, find("disco.open"), find("disco.submit"), find("disco.events"));
        let open = open.map_err(|error| match error.kind() {
            ErrorKind::NotFound => error.context("it is no node: its program does not register disco's functions"),
            _ => error,
        })?;
        let version = match version {
            // Version 1 had no such function.
            Err(error) if error.kind() == ErrorKind::NotFound => 1,
            version => version?,
        };
        MESSAGES.check(version, "the node", "the program that opens it")?;
        let opened = open.call((Pack(set_up.clone()),)).await;
        let (host, info): (RemoteObject, Pack<NodeInfo>) = opened.map_err(|error: RpcError| match error.kind() {
            ErrorKind::Unsupported => error.context(
                "the session carries no calls side by side, as Disco needs: reach the node by its native protocol",
            ),
            _ => error,
        })?;
        Ok((host, info.0, DrivingFunctions { submit: submit?, events: events? }))
    }

    /// Starts the tasks that send commands and fetch events. A host of this process needs none, and
    /// gets `upstream` itself.
    pub(crate) fn start(&self, number: usize, upstream: &Weak<dyn Upstream>) -> rpc_core::Result<()> {
        let outbox = match &self.path {
            Path::Local(local) => {
                local.set_upstream(number, upstream);
                return Ok(());
            }
            Path::Remote(outbox) => outbox,
        };
        let Some((session, host)) = self.far_end() else { return Ok(()) };
        let functions = self.lock().as_mut().and_then(|held| held.functions.take());
        let Some(DrivingFunctions { submit, events }) = functions else { return Ok(()) };
        let runtime = crate::runtime::runtime()?;
        let sender = Sender {
            outbox: Arc::clone(outbox),
            next: self.first_command,
            session: session.clone(),
            submit,
            host: host.clone(),
            replies: Arc::new(Replies::new(LossReporter::new(upstream.clone(), number, self.workers()))),
        };
        let loss = Arc::clone(&sender.replies.loss);
        self.hold([
            runtime.spawn(sender.run()),
            runtime.spawn(take_events(events, host, Arc::clone(&loss))),
            runtime.spawn(async move { loss.report(session.ended().await) }),
        ]);
        Ok(())
    }

    /// Starts the task that fetches requests for relaying, if it does not run yet.
    pub(crate) async fn take_relays(&self, number: usize, upstream: &Weak<dyn Upstream>) -> rpc_core::Result<()> {
        let Some((session, host)) = self.far_end() else { return Ok(()) };
        let relays = session.get_function("disco.relays").await?;
        let loss = Arc::new(LossReporter::new(upstream.clone(), number, self.workers()));
        // Nothing is awaited from here on, so that a caller that gives this up has begun it or not.
        if self.relays.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        self.hold([crate::runtime::runtime()?.spawn(take_relays(relays, session, host, loss))]);
        Ok(())
    }

    /// Lets these tasks end with the session.
    fn hold<const COUNT: usize>(&self, tasks: [JoinHandle<()>; COUNT]) {
        match self.lock().as_mut() {
            Some(held) => held.tasks.extend(tasks),
            // It has ended meanwhile.
            None => tasks.iter().for_each(JoinHandle::abort),
        }
    }

    /// Returns the session with the other end.
    pub(crate) fn session(&self) -> rpc_core::Result<Session> {
        self.far_end().map(|(session, _)| session).ok_or_else(ended)
    }

    /// Returns the destination of data for a worker there.
    pub(crate) fn destination(&self, worker: u32, communicator: u32) -> rpc_core::Result<Destination> {
        let (session, host) = self.far_end().ok_or_else(ended)?;
        Ok(Destination::RemoteEnd { session, host, worker, communicator })
    }

    pub(crate) fn is_remote(&self) -> bool {
        matches!(self.path, Path::Remote(_))
    }

    /// Returns the session and the host, until the link is closed.
    pub(crate) fn far_end(&self) -> Option<(Session, RemoteObject)> {
        self.lock().as_ref().map(|held| (held.session.clone(), held.host.clone()))
    }

    /// Lets the workers there listen for each other at these addresses of their nodes. Returns the
    /// addresses of their listeners, in the order of workers.
    ///
    /// It is awaited by itself, so that many nodes can be asked at once.
    pub(crate) fn listen(
        &self,
        addresses: Vec<IpAddr>,
        meshes: Vec<Mesh>,
    ) -> impl Future<Output = rpc_core::Result<Vec<ListenAddresses>>> + Send + use<> {
        let (far_end, count, name) = (self.far_end(), self.count, self.name.clone());
        async move {
            let (session, host) = far_end.ok_or_else(ended)?;
            let listen = session.get_function("disco.listen").await?;
            let listening: Pack<Vec<ListenAddresses>> = listen.call((&host, Pack(addresses), Pack(meshes))).await?;
            if listening.0.len() != count as usize {
                let text = format!("a node with {count} workers says where {} listen", listening.0.len());
                return Err(RpcError::new(ErrorKind::Protocol, text).context(&name));
            }
            Ok(listening.0)
        }
    }

    /// Returns the number of bytes of commands that wait to be sent.
    pub(crate) fn held(&self) -> usize {
        match &self.path {
            Path::Local(_) => 0,
            Path::Remote(outbox) => outbox.held(),
        }
    }

    /// Returns the numbers of the workers there.
    pub(crate) fn workers(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    /// Returns the other end, as errors describe it once it is lost.
    pub(crate) fn lost_node(&self) -> LostNode<'_> {
        LostNode { name: &self.name, workers: self.workers(), nodes: self.nodes, has_hops: self.has_hops }
    }

    /// Appends a command. `encoded` is there if any link of the session needs it; `bulk` says
    /// whether its bulk is for this link.
    pub(crate) fn push(&self, sequence: u64, queued: &Queued, encoded: Option<&Encoded>, bulk: bool) {
        match &self.path {
            Path::Local(local) => {
                // Gone only when the session ends.
                if let Some(host) = local.host()
                    && let Err(error) = host.submit(sequence, queued.clone())
                {
                    rpc_core::log_limited!(ERROR, %error, "a host of this process refused a command");
                }
            }
            Path::Remote(outbox) => {
                if let Some(encoded) = encoded {
                    let mut encoded = encoded.clone();
                    if !bulk && encoded.bulk.is_some() {
                        encoded.bulk = Some(Bytes::new());
                    }
                    outbox.push(encoded);
                }
            }
        }
    }

    /// Ends the collectives of an epoch, also those that workers are in, and if `and_joins` is set
    /// those by which they join each other. Never waits: if the message does not arrive, the link
    /// is lost, too.
    pub(crate) fn break_collectives(&self, epoch: u64, cause: &RpcError, and_joins: bool) {
        if let Path::Local(local) = &self.path {
            if let Some(host) = local.host() {
                host.break_collectives(epoch, cause, and_joins);
            }
            return;
        }
        let (Some((session, host)), Ok(runtime)) = (self.far_end(), crate::runtime::runtime()) else { return };
        let (name, kind, reason) = (self.name.clone(), cause.kind().code(), cause.message().to_owned());
        runtime.spawn(async move {
            let told = async {
                let break_ccl = session.get_function("disco.break_ccl").await?;
                break_ccl.call::<()>((&host, epoch, kind, reason.as_str(), and_joins)).await
            };
            if let Err(error) = told.await {
                tracing::debug!(%name, %error, "a node was not told that collectives are broken");
            }
        });
    }

    /// Closes the session: the workers end after the command that each executes.
    pub(crate) fn close(&self) {
        let Some(held) = self.lock().take() else { return };
        held.tasks.iter().for_each(JoinHandle::abort);
        if let Path::Local(local) = &self.path
            && let Some(host) = local.host()
        {
            host.abort();
        }
        // References that are dropped are freed there, and the last one closes the session.
        drop(held);
    }

    fn lock(&self) -> MutexGuard<'_, Option<OpenHost>> {
        self.held.lock()
    }
}

/// Sends commands over a session, many to a message.
struct Sender {
    outbox: Arc<Outbox>,
    /// Number of the next command.
    next: u64,
    session: Session,
    submit: RemoteFunction,
    host: RemoteObject,
    replies: Arc<Replies>,
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.outbox.close();
    }
}

impl Sender {
    async fn run(mut self) {
        loop {
            match self.replies.permits.acquire().await {
                // Given back by the answer.
                Ok(permit) => permit.forget(),
                Err(_) => return,
            }
            let batch = self.outbox.take().await;
            let first = self.next;
            self.next += batch.len() as u64;
            let heads = match &batch[..] {
                [one] => one.head.clone(),
                several => {
                    let mut heads = BytesMut::with_capacity(several.iter().map(|one| one.head.len()).sum());
                    several.iter().for_each(|one| heads.extend_from_slice(&one.head));
                    heads.freeze()
                }
            };
            let bulk = batch.into_iter().filter_map(|one| one.bulk).map(Value::Bytes).collect();
            let host = Value::Object(Reference::Object(self.host.handle()));
            let args = vec![host, Value::Int(first as i64), Value::Bytes(heads), Value::List(bulk)];
            let call = Request::new(Operation::Call { function: self.submit.handle(), args }).on(COMMANDS);
            match self.session.submit(call).await {
                Ok(reply) => {
                    reply.deliver_to(Arc::clone(&self.replies) as Arc<dyn ReplySink>, first);
                }
                Err(error) => return self.replies.loss.report(error),
            }
        }
    }
}

/// Fetches the events of the host until the empty list that ends them.
async fn take_events(events: RemoteFunction, host: RemoteObject, loss: Arc<LossReporter>) {
    loop {
        let taken = events.call::<Value>((&host,)).lane(EVENTS).await;
        match taken.and_then(decode_events) {
            Ok(events) if events.is_empty() => return,
            Ok(events) => {
                for event in events {
                    if event.worker().is_some_and(|worker| !loss.has_worker(worker.0)) {
                        let error =
                            RpcError::new(ErrorKind::Protocol, "a node spoke for a worker that it does not have");
                        return loss.report(error);
                    }
                    let Some(upstream) = loss.upstream() else { return };
                    poll_fn(|cx| upstream.poll_room(cx)).await;
                    loss.forward(&*upstream, event);
                }
            }
            Err(error) => return loss.report(error),
        }
    }
}

/// Fetches the workers' requests for relaying until the workers have ended.
async fn take_relays(relays: RemoteFunction, session: Session, host: RemoteObject, loss: Arc<LossReporter>) {
    loop {
        let wanted = relays.call::<(RemoteObject, Pack<RelayedPair>)>((&host,)).lane(Lane::CONCURRENT).await;
        let error = match wanted {
            Ok((_, Pack(between))) if !loss.has_worker(between.from) => {
                let error = RpcError::new(ErrorKind::Protocol, "a node spoke for a worker that it does not have");
                return loss.report(error);
            }
            Ok((end, Pack(between))) => match End::there(&session, end).await {
                Ok(end) => {
                    let Some(upstream) = loss.upstream() else { return };
                    upstream.relay(RelayRequest { between, end });
                    continue;
                }
                Err(error) => error,
            },
            Err(error) => error,
        };
        // The end of the session is reported elsewhere.
        if error.kind() == ErrorKind::Closed || error.ends_session() {
            return;
        }
        rpc_core::log_limited!(WARN, %error, "what workers wish to have relayed cannot be taken");
        tokio::time::sleep(PAUSE).await;
    }
}

fn ended() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session has ended")
}

/// Takes the replies to messages with commands.
struct Replies {
    loss: Arc<LossReporter>,
    /// One permit for each further message that may be sent now.
    permits: Semaphore,
}

impl Replies {
    fn new(loss: LossReporter) -> Self {
        Self { loss: Arc::new(loss), permits: Semaphore::new(MAX_UNANSWERED) }
    }
}

impl ReplySink for Replies {
    fn deliver(&self, _: u64, outcome: Outcome) {
        self.permits.add_permits(1);
        if let Err(error) = outcome {
            self.loss.report(error);
        }
    }
}

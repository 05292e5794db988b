//! The main function of a session process: it serves one session and exits.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use disco::{DataAddress, WeightFolders};
use parking_lot::Mutex;
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{
    Devices, ErrorKind, Lane, LocalSession, MemoryQuota, OpenFileQuota, Registry, Request, RpcError, RpcSession,
    SharedSession, Submission, Usage,
};
use rpc_transports::exec::{StdioEnds, take_stdio};
use rpc_transports::{
    Channel, Dialects, OpenRequest, PassedConnection, ReceivedSession, ServeOptions, Server, TokioSpawner,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpgrp, getpid, kill_current_process_group};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;

use super::control_link::{ControlLink, LinkQueues, PassedOrder, QueueOfServer};
use super::messages::{SessionOrder, SessionSetup};
use super::{GRACE, REPORT_INTERVAL, RUN_GRACE, process_limits};
use crate::builtins::ListenQuota;
use crate::config::{ServeConfig, ServeSettings};
use crate::file_cache::FileCache;
use crate::handed_down::SettingsForWorkers;
use crate::leases::{LeaseGate, LeasePolicy, Leases};
use crate::modules::{ModuleService, Native, Sharing};
use crate::offers::PeerQuota;
use crate::policy::{Ceiling, ClientIdentity, session_limits_within};
use crate::recent_logs::Logs;
use crate::run::{self, RunPolicy};
use crate::server::exit_code;
use crate::server::functions_used::{FunctionsUsed, NotingSession};
use crate::server::server_state::{ServerState, SessionCount, UsageSource};
use crate::server::session_workspace::{Cleaner, FILES_OF_WORKSPACE, SessionWorkspace, WorkspaceSource};
use crate::server::{session_limits, spin_time, wire_limits};
use crate::tvm::TvmDialect;
use crate::workspace::Workspace;
use crate::{builtins, logging};

/// Serves the session of this process and ends the process. `server` is the process id of the
/// server.
pub(super) fn run(registry: &Registry, devices: impl FnOnce() -> Devices, server: Option<i32>) -> ! {
    match serve(registry, devices, server) {
        // Processes that functions have started end with the session, even if the server is gone
        // and cannot kill them.
        Ok(()) => kill_group(),
        Err(error) => {
            exit_code::report(&*error);
            process::exit(exit_code::FAILURE.into());
        }
    }
}

fn serve(
    registry: &Registry,
    devices: impl FnOnce() -> Devices,
    server: Option<i32>,
) -> Result<(), Box<dyn std::error::Error>> {
    // From here on functions print to the server's standard error.
    let StdioEnds::Pair { read, write } = take_stdio()? else {
        return Err("only a server starts a program with this argument".into());
    };
    if !die_with_parent(server)? {
        return Ok(());
    }
    let (mut connection, control) = (UnixStream::from(read), UnixDatagram::from(write));
    let Some(setup) = SessionSetup::read(&mut connection)? else { return Ok(()) };
    let SessionSetup { config, workspace, uptime, module_digests, identity, is_encrypted, rights, .. } = setup;
    let rights = rights.map(|rights| Arc::new(rights.restore(crate::transports())));
    let config = ServeSettings::from_toml(&config, "of the server".as_ref())?.resolve()?;
    logging::init(&config.log_level, config.log_format);
    process_limits::set(&config)?;
    watch(connection.try_clone()?)?;
    builtins::register(registry);
    builtins::register_disco(registry, &config);
    builtins::register_tvm_self_test(registry, &config);
    let native = Native::new(&config);
    native.offer_libraries(registry)?;
    let service = ModuleService::open(&config, module_digests, &native, Sharing::OneSession)?;

    let functions = tokio::runtime::Builder::new_multi_thread()
        // Two threads: while an asynchronous function blocks one, the other serves the rest.
        .worker_threads(2)
        .enable_all()
        .thread_name("rpc-session")
        .build()?;
    // Both connections, that of the client and that of the server, are served on this thread, so
    // that no asynchronous function keeps it from them. An inline function does, and then the
    // server gets no answer to its pings, and ends this process.
    let connections = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (session, link, orders) = functions.block_on(async {
        let (link, LinkQueues { messages, orders }) = ControlLink::new(control)?;
        let running = link.clone();
        drop(tokio::spawn(async move {
            if let Err(error) = running.run(messages).await {
                tracing::debug!(%error, "the link to the server is broken, which ends this process");
                kill_group();
            }
        }));
        let started = Instant::now().checked_sub(uptime).unwrap_or_else(Instant::now);
        let asking = link.clone();
        let state = ServerState::for_single_session(config.key.clone(), started, move |usage| asking.totals(usage));
        let open_files = OpenFileQuota::new("max_open_files", config.max_open_files, None);
        let open = open_files.reserve(FILES_OF_WORKSPACE).map_err(io::Error::other)?;
        let workspace = WorkspaceSource::Opened(Workspace::borrowed(&workspace)?, open);
        let limits = session_limits_within(rights.as_deref(), session_limits(&config));
        let listen = Arc::new(ListenQuota::new(&limits));
        let client = Arc::new(ClientIdentity(identity));
        let mut session = LocalSession::builder(registry.clone())
            .devices(devices())
            .limits(limits)
            .workspace(Arc::new(SessionWorkspace::new(workspace, Cleaner::none(), open_files.clone())))
            .open_files(open_files)
            .extension(state.clone())
            .extension(Arc::new(Leases(link.clone())))
            .extension(listen)
            .extension(Arc::new(PeerQuota::new(None, None, config.keep_alive.0, is_encrypted)))
            .extension(client.clone())
            .extension(Arc::new(Ceiling::new(&config, crate::transports())))
            .spawner(Arc::new(TokioSpawner::current()));
        if let Some(cache) = FileCache::of(&config) {
            session = session.extension(cache);
        }
        if let Some(gate) = LeaseGate::new(&LeasePolicy::new(&config.lease_policy), link.clone()) {
            session = session.device_gate(gate);
        }
        if let Some(rights) = rights {
            session = session.access_control(rights);
        }
        if config.allow_logs == Some(true) {
            session = session.extension(Arc::new(Logs(link.clone())));
        }
        if let Some(address) = config.data_address {
            session = session.extension(Arc::new(DataAddress(address)));
        }
        if !config.weights.is_empty() {
            session = session.extension(Arc::new(WeightFolders::new(&config.weights)));
        }
        if let Some(service) = service {
            session = session.extension(service);
        }
        if let Some(policy) = RunPolicy::new(&config) {
            run::adopt_orphans()?;
            session = session.extension(Arc::new(policy));
        }
        if let Some(settings) = SettingsForWorkers::of(&config).and_then(|settings| settings.in_session(&client)) {
            session = session.extension(settings);
        }
        let session = session.build();
        let changes = Arc::new(Notify::new());
        let session = ReportingSession {
            inner: state.count(|counted| CountedSession { session, _counted: counted }),
            changes: changes.clone(),
        };
        let reports = report(Arc::downgrade(&session.inner), link.clone(), changes);
        drop(tokio::spawn(reports));
        io::Result::Ok((session, link, orders))
    })?;
    connections.block_on(serve_session(connection, Arc::new(session), &config, link, orders))?;
    // Other threads drop the objects of the session.
    functions.shutdown_timeout(GRACE);
    Ok(())
}

/// Serves the session for the server, and over the socket of the client once it has come. Returns
/// when the session has ended.
async fn serve_session(
    connection: UnixStream,
    session: SharedSession,
    config: &ServeConfig,
    link: Arc<ControlLink>,
    mut orders: UnboundedReceiver<PassedOrder>,
) -> io::Result<()> {
    // A signal to a group of processes is not meant for this one: the server ends it in time.
    let _terminate = signal(SignalKind::terminate())?;
    let _interrupt = signal(SignalKind::interrupt())?;
    let mut server_died = signal(SignalKind::hangup())?;

    connection.set_nonblocking(true)?;
    let channel = Channel::new(tokio::net::UnixStream::from_std(connection)?, "the server");
    let own = ServeOptions {
        keep_alive: config.keep_alive.0,
        spin: spin_time(config),
        handshake_timeout: config.handshake_timeout.0,
        limits: wire_limits(config),
        max_total_queued: u64::MAX,
        ..ServeOptions::default()
    };
    // Here the server checks the pace of its client for both processes.
    let options = ServeOptions { write_timeout: Duration::MAX, min_rate: 0, ..own.clone() };
    let lent = Arc::new(LentSession(Mutex::new(Some(session))));
    let served = Mutex::new(Some(lent.clone()));
    let factory = move |_: &OpenRequest| match served.lock().take() {
        Some(session) => Ok(session as SharedSession),
        None => Err(RpcError::new(ErrorKind::Refused, "this process serves one session")),
    };
    let server = Server::new(Arc::new(factory), options);
    server.serve_channel(channel);
    // Over the socket of the client, this process checks its pace. The server sees to the longest
    // duration of the session.
    let refuse = |_: &OpenRequest| Err(RpcError::new(ErrorKind::Refused, "this process serves one session"));
    let options = ServeOptions {
        write_timeout: config.write_timeout.0,
        min_rate: config.min_rate.0,
        idle_timeout: config.idle_timeout.map(|limit| limit.0),
        max_open_files: config.max_open_files,
        dialects: Dialects::default().with(TvmDialect::resuming(config)),
        ..own
    };
    let of_client = Server::new(Arc::new(refuse), options);
    let queued = MemoryQuota::granted_by("max_total_queued", QueueOfServer::new(link.clone()));
    let used = Arc::<FunctionsUsed>::default();
    let mut received: Option<ReceivedSession> = None;
    loop {
        tokio::select! {
            () = server.idle() => break,
            _ = server_died.recv() => kill_group(),
            Some((order, descriptors)) = orders.recv() => match order {
                SessionOrder::Take(state) => {
                    let (Ok([socket, mark]), Some(session)) = (<[OwnedFd; 2]>::try_from(descriptors), lent.take())
                    else {
                        return Err(io::Error::other("the server has passed a connection without its descriptors"));
                    };
                    let session = NotingSession::wrap(session, used.clone());
                    let session = Arc::new(ClientsSession { session, link: link.clone() });
                    let connection = PassedConnection { socket, mark, state: *state };
                    received = Some(of_client.serve_passed(connection, session, queued.clone())?);
                }
                // Taken where it is waited for.
                SessionOrder::Queued { .. } => {}
                SessionOrder::GoAway => received.iter().for_each(ReceivedSession::go_away),
                SessionOrder::Close(reason) => {
                    if let Some(session) = &received {
                        session.close(reason);
                    }
                }
            },
            report = ReceivedSession::end_of(&mut received) => {
                link.report_end(report, used.names()).await?;
                // Its objects are freed, and with them the session that the server has here.
                tokio::join!(of_client.idle(), server.idle());
                break;
            }
        }
    }
    Ok(())
}

/// The session as this process serves it to the client.
struct ClientsSession {
    session: SharedSession,
    link: Arc<ControlLink>,
}

impl Drop for ClientsSession {
    fn drop(&mut self) {
        // Before the leases of the session are released: the server keeps the devices until this
        // process has ended, since functions may go on.
        self.link.session_ends();
    }
}

impl RpcSession for ClientsSession {
    fn submit(&self, request: Request) -> Submission {
        self.session.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.session)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.session.write_in_place(lane, to, offset, len)
    }
}

/// The session as it is lent to the server, until this process serves the client by itself.
struct LentSession(Mutex<Option<SharedSession>>);

impl LentSession {
    fn take(&self) -> Option<SharedSession> {
        self.0.lock().take()
    }

    fn get(&self) -> Option<SharedSession> {
        self.0.lock().clone()
    }
}

impl RpcSession for LentSession {
    fn submit(&self, request: Request) -> Submission {
        match self.get() {
            Some(session) => session.submit(request),
            None => Submission::ready(Err(RpcError::internal("the client has this session"))),
        }
    }

    fn ended(&self) -> Submission {
        self.get().map_or_else(Submission::never, |session| session.ended())
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.get()?.write_in_place(lane, to, offset, len)
    }
}

/// Asks the kernel for a signal when the server dies. Returns false if it has died already.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn die_with_parent(server: Option<i32>) -> io::Result<bool> {
    // SIGHUP instead of SIGKILL, so that this process can kill those that functions have started.
    // Until its handler is installed SIGHUP kills this process as well.
    rustix::process::set_parent_process_death_signal(Some(Signal::HUP))?;
    // The name differs from the server's, so that lists of processes show the difference.
    let _ = rustix::thread::set_name(c"rpc-session");
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    Ok(server.is_none() || server == parent)
}

/// Does nothing: other systems have no such signal, and the end of the connection serves instead.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn die_with_parent(_server: Option<i32>) -> io::Result<bool> {
    Ok(true)
}

/// Ends this process after the end of the connection, even if all other threads are blocked.
fn watch(connection: UnixStream) -> io::Result<()> {
    let watch = move || {
        loop {
            // No events are requested: only the end of both directions is reported.
            let mut fds = [PollFd::new(&connection, PollFlags::empty())];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                _ => break,
            }
        }
        // Also if a function prevents the end of the session here.
        run::end_programs();
        // In good order the process ends during this sleep.
        thread::sleep(GRACE);
        kill_group();
    };
    thread::Builder::new().name("rpc-watch".into()).spawn(watch).map(drop)
}

/// Ends the programs of the client, and kills this process and its process group.
fn kill_group() -> ! {
    run::end_reapers(RUN_GRACE);
    if getpgrp() == getpid() {
        let _ = kill_current_process_group(Signal::KILL);
    }
    // The process was started by hand, in a process group with others.
    process::exit(exit_code::FAILURE.into());
}

/// The local session with its count.
struct CountedSession {
    session: LocalSession,
    _counted: SessionCount,
}

impl UsageSource for CountedSession {
    fn usage(&self) -> Usage {
        self.session.usage()
    }
}

/// The session as it is served: each request wakes the task that reports usage.
struct ReportingSession {
    inner: Arc<CountedSession>,
    changes: Arc<Notify>,
}

impl RpcSession for ReportingSession {
    fn submit(&self, request: Request) -> Submission {
        let submission = self.inner.session.submit(request);
        self.changes.notify_one();
        submission
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner.session)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.session.write_in_place(lane, to, offset, len)
    }
}

/// Reports the usage of `session` a moment after each request.
async fn report(session: Weak<CountedSession>, link: Arc<ControlLink>, changes: Arc<Notify>) {
    loop {
        changes.notified().await;
        tokio::time::sleep(REPORT_INTERVAL).await;
        let Some(session) = session.upgrade() else { return };
        if link.report(session.usage()) {
            // The usage may change further without a request.
            changes.notify_one();
        }
    }
}

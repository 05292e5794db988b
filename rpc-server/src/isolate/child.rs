//! The process of a session.

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use disco::{DataAddress, WeightFolders};
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{
    Devices, ErrorKind, Lane, LocalSession, Registry, Request, RpcError, RpcSession, SharedSession, Submission, Usage,
};
use rpc_transports::exec::{StdioEnds, take_stdio};
use rpc_transports::{Channel, OpenRequest, ServeOptions, Server, TokioSpawner};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, Signal, getpgrp, getpid, getrlimit, kill_current_process_group, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use super::messages::{Report, SetUp};
use super::{GRACE, REPORT_INTERVAL};
use crate::config::{ByteSize, ServeConfig, ServeSettings};
use crate::modules::{ModuleService, Native};
use crate::server::{session_limits, wire_limits};
use crate::session::{Cleaner, Counted, Holder, ServerState, SessionWorkspace, Source, Totals};
use crate::workspace::Workspace;
use crate::{builtins, exit, logging, modules};

/// Serves the session of this process, whose server has the process id `server`, and ends the process.
pub(super) fn run(registry: &Registry, devices: impl FnOnce() -> Devices, server: Option<i32>) -> ! {
    match serve(registry, devices, server) {
        // Whatever functions have started ends with the session, even if the server is not there any more to see to it.
        Ok(()) => kill_group(),
        Err(error) => {
            exit::report(&*error);
            process::exit(exit::FAILURE.into());
        }
    }
}

fn serve(
    registry: &Registry,
    devices: impl FnOnce() -> Devices,
    server: Option<i32>,
) -> Result<(), Box<dyn std::error::Error>> {
    // What functions print goes to the server's standard error from here on.
    let StdioEnds::Pair { read, write } = take_stdio()? else {
        return Err("only a server starts a program with this argument".into());
    };
    if !die_with(server)? {
        return Ok(());
    }
    let (mut connection, control) = (UnixStream::from(read), UnixDatagram::from(write));
    let Some(SetUp { config, workspace, uptime, module_digests }) = SetUp::read(&mut connection)? else {
        return Ok(());
    };
    let config = ServeSettings::from_toml(&config, "of the server".as_ref())?.resolve()?;
    logging::init(&config.log_level, config.log_format);
    limit(&config)?;
    watch(connection.try_clone()?)?;
    builtins::register(registry);
    disco::register(registry);
    let native = Native::new(&config);
    native.offer_libraries(registry)?;
    let service = ModuleService::open(&config, module_digests, &native)?;

    let runtime = tokio::runtime::Builder::new_multi_thread()
        // One to serve the connection, and one so that it is served while an asynchronous function blocks the other.
        .worker_threads(2)
        .enable_all()
        .thread_name("rpc-session")
        .build()?;
    runtime.block_on(async {
        let link = Arc::new(ControlLink::new(control)?);
        let started = Instant::now().checked_sub(uptime).unwrap_or_else(Instant::now);
        let asking = link.clone();
        let state = ServerState::of_one(config.key.clone(), started, move |usage| asking.totals(usage));
        let workspace = Source::Opened(Workspace::borrowed(&workspace)?);
        let mut session = LocalSession::builder(registry.clone())
            .devices(devices())
            .limits(session_limits(&config))
            .workspace(Arc::new(SessionWorkspace::new(workspace, Cleaner::none())))
            .extension(state.clone())
            .spawner(Arc::new(TokioSpawner::current()));
        if let Some(address) = config.data_address {
            session = session.extension(Arc::new(DataAddress(address)));
        }
        if !config.weights.is_empty() {
            session = session.extension(Arc::new(WeightFolders::new(&config.weights)));
        }
        if let Some(service) = service {
            session = session.extension(service);
        }
        if let Some(settings) = modules::worker::handed_down(&config) {
            session = session.extension(settings);
        }
        let session = session.build();
        let changes = Arc::new(Notify::new());
        let session = Reporting {
            inner: state.count(|counted| Reported { session, _counted: counted }),
            changes: changes.clone(),
        };
        let reports = report(Arc::downgrade(&session.inner), link, changes);
        drop(tokio::spawn(reports));
        serve_session(connection, Arc::new(session), &config).await
    })?;
    // The objects of the session are dropped on other threads.
    runtime.shutdown_timeout(GRACE);
    Ok(())
}

async fn serve_session(connection: UnixStream, session: SharedSession, config: &ServeConfig) -> io::Result<()> {
    // The server ends this process when it is time to; whoever stops a whole group of processes does not mean this one.
    let _terminate = signal(SignalKind::terminate())?;
    let _interrupt = signal(SignalKind::interrupt())?;
    let mut server_died = signal(SignalKind::hangup())?;

    connection.set_nonblocking(true)?;
    let channel = Channel::new(tokio::net::UnixStream::from_std(connection)?, "the server");
    let options = ServeOptions {
        keep_alive: config.keep_alive.0,
        handshake_timeout: config.handshake_timeout.0,
        limits: wire_limits(config),
        // The server is patient with its client, or not, for both.
        write_timeout: Duration::MAX,
        min_rate: 0,
        max_total_queued: u64::MAX,
        ..ServeOptions::default()
    };
    let session = Mutex::new(Some(session));
    let factory = move |_: &OpenRequest| {
        let session = session.lock().unwrap_or_else(PoisonError::into_inner).take();
        session.ok_or_else(|| RpcError::new(ErrorKind::Refused, "this process serves one session"))
    };
    let server = Server::new(Arc::new(factory), options);
    server.serve_channel(channel);
    tokio::select! {
        () = server.idle() => Ok(()),
        _ = server_died.recv() => kill_group(),
    }
}

/// Sets the limits of this process, which those that it starts inherit.
fn limit(config: &ServeConfig) -> io::Result<()> {
    // Not the address space: most of that is reserved and never used, above all by drivers of devices.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const MEMORY: Resource = Resource::Data;
    // Elsewhere that would only be the smallest part of the data.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const MEMORY: Resource = Resource::As;

    lower(Resource::Nofile, config.isolate_files, config.isolate_files)?;
    if config.isolate_memory != ByteSize::UNLIMITED {
        lower(MEMORY, config.isolate_memory.0, config.isolate_memory.0)?;
    }
    if let Some(limit) = config.isolate_cpu_time {
        let seconds = limit.0.as_millis().div_ceil(1000).max(1).try_into().unwrap_or(u64::MAX);
        // At the first limit comes a signal that says what it is; at the second one that cannot be ignored.
        lower(Resource::Cpu, seconds, seconds.saturating_add(1))?;
    }
    Ok(())
}

fn lower(resource: Resource, current: u64, maximum: u64) -> io::Result<()> {
    let most = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let limit = Rlimit { current: Some(current.min(most)), maximum: Some(maximum.min(most)) };
    Ok(setrlimit(resource, limit)?)
}

/// Has the kernel tell this process when the server dies. Says whether it still lives.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn die_with(server: Option<i32>) -> io::Result<bool> {
    // Not the signal that kills: what functions have started is to end, too. It kills nevertheless until it is handled.
    rustix::process::set_parent_process_death_signal(Some(Signal::HUP))?;
    // Many of the same name are hard to tell apart in a list, so this one does not keep that of the file.
    let _ = rustix::thread::set_name(c"rpc-session");
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    Ok(server.is_none() || server == parent)
}

/// Elsewhere the end of the connection has to do.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn die_with(_server: Option<i32>) -> io::Result<bool> {
    Ok(true)
}

/// Ends this process when the connection has ended, whatever its other threads do.
fn watch(connection: UnixStream) -> io::Result<()> {
    let watch = move || {
        loop {
            // Without asking for any event: only the end of both directions is reported.
            let mut fds = [PollFd::new(&connection, PollFlags::empty())];
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                _ => break,
            }
        }
        // If all is well the process does not live to see this.
        thread::sleep(GRACE);
        kill_group();
    };
    thread::Builder::new().name("rpc-watch".into()).spawn(watch).map(drop)
}

/// Kills this process and all that it has started, except for what has left the group.
fn kill_group() -> ! {
    if getpgrp() == getpid() {
        let _ = kill_current_process_group(Signal::KILL);
    }
    // Started by hand, in a group with others.
    process::exit(exit::FAILURE.into());
}

/// What there is to say to the server beside the session.
struct ControlLink {
    socket: UnixDatagram,
    /// Held by whoever waits for an answer.
    asking: Mutex<()>,
    /// What was reported last.
    reported: Mutex<Usage>,
}

/// How long the server may take to answer. It does nothing else in that thread that takes time.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(200);

impl ControlLink {
    fn new(socket: UnixDatagram) -> io::Result<Self> {
        socket.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        socket.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self { socket, asking: Mutex::default(), reported: Mutex::default() })
    }

    /// Says what the session holds, and asks what all do; `None` if the server does not say.
    fn totals(&self, usage: Usage) -> Option<Totals> {
        let _asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        self.socket.send(&Report { usage, asks: true }.to_bytes()).ok()?;
        let mut answer = [0; Totals::LEN + 1];
        let len = self.socket.recv(&mut answer).ok()?;
        Totals::from_bytes(&answer[..len])
    }

    /// Says what the session holds, if that is not what was said last. Returns whether it was said.
    fn report(&self, usage: Usage) -> bool {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *reported != usage;
        if changed && self.socket.send(&Report { usage, asks: false }.to_bytes()).is_ok() {
            *reported = usage;
        }
        changed
    }
}

/// The session, counted.
struct Reported {
    session: LocalSession,
    _counted: Counted,
}

impl Holder for Reported {
    fn usage(&self) -> Usage {
        self.session.usage()
    }
}

/// The session as it is served: whoever reports what it holds is told when that may have changed.
struct Reporting {
    inner: Arc<Reported>,
    changes: Arc<Notify>,
}

impl RpcSession for Reporting {
    fn submit(&self, request: Request) -> Submission {
        let submission = self.inner.session.submit(request);
        self.changes.notify_one();
        submission
    }

    fn is_local(&self) -> bool {
        true
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.session.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        self.inner.session.ended()
    }
}

/// Reports what `session` holds, a moment after it was asked something.
async fn report(session: Weak<Reported>, link: Arc<ControlLink>, changes: Arc<Notify>) {
    loop {
        changes.notified().await;
        tokio::time::sleep(REPORT_INTERVAL).await;
        let Some(session) = session.upgrade() else { return };
        if link.report(session.usage()) {
            // What changes it may go on.
            changes.notify_one();
        }
    }
}

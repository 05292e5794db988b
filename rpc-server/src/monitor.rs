//! Metrics for Prometheus, liveness and readiness of a server.
//!
//! Without `--metrics` nothing here runs. With it each session is wrapped in one that counts and
//! measures, and an HTTP listener serves `/metrics`, `/healthz` and `/readyz`.
//!
//! | metric | labels | what it is |
//! | --- | --- | --- |
//! | `rpc_build_info` | `version` | always 1 |
//! | `rpc_start_time_seconds` | | when the server started, since the epoch |
//! | `rpc_sessions` | | sessions that are open |
//! | `rpc_sessions_opened_total` | | sessions that were opened |
//! | `rpc_refusals_total` | `reason` | clients without a session, but for probes of trackers |
//! | `rpc_calls_total` | `function`, `outcome` | calls that ended |
//! | `rpc_calls_in_progress` | | calls that have not ended |
//! | `rpc_call_duration_seconds` | `function` | from the arrival of a call to its end |
//! | `rpc_tensor_bytes_total` | `direction` | bytes of tensors that were copied `in` or `out` |
//! | `rpc_handles` | | objects that sessions hold |
//! | `rpc_memory_bytes` | | device memory that sessions hold |
//! | `rpc_leases` | | leases on devices that sessions hold |
//! | `rpc_lease_requests_waiting` | | requests for leases that wait |
//! | `rpc_leases_granted_total` | | leases that were granted |
//! | `rpc_leases_overdue_total` | | sessions that were ended because a lease lasted too long |
//! | `rpc_lease_wait_milliseconds_total` | | time that granted requests have waited |
//! | `rpc_lease_held_milliseconds_total` | | time for which ended leases were held |
//! | `rpc_device_clock_megahertz` | `device` | clock of a GPU, if it tells |
//! | `rpc_device_memory_used_bytes` | `device` | memory of a GPU that is in use, if it tells |
//! | `rpc_device_utilization_percent` | `device` | part of the time for which a GPU was busy |
//! | `rpc_certificate_expiry_timestamp_seconds` | | end of the certificate, since the epoch |
//!
//! A tracker has [more](crate::tracker): servers, slots and requests.
//!
//! Forwarded sessions count at the server on which they end, not here.
//!
//! An outcome is `ok` or the [name](ErrorKind::name) of the kind of the error; so is a reason. A
//! function has its name as label if it is registered at this server and is among the first 1,024
//! that were called. All others, those of modules too, have the label `other`.

mod device_gauges;
mod endpoints;
mod lease_gauges;
mod metered;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, SystemTime};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use parking_lot::RwLock;
use rpc_core::{Device, ErrorKind, Registry};
use rpc_transports::{Address, ServeObserver, SessionFactory};
use tokio::task::JoinSet;

use self::metered::MeteredFactory;
use crate::config::ServeError;
use crate::http_listener::HttpServer;
use crate::server::server_state::ServerState;

pub(crate) use self::device_gauges::DeviceGauges;
pub(crate) use self::lease_gauges::LeaseGauges;

/// Maximum number of functions with metrics of their own. Each costs about twenty lines of output.
const MAX_FUNCTIONS: usize = 1024;

/// Label of functions without metrics of their own.
const OTHER: &str = "other";

/// Upper bounds of the buckets in seconds: from a call of an inline function to training for an
/// hour.
const BUCKETS: [f64; 16] =
    [1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0, 600.0, 3600.0];

/// Interval at which durations of calls are sorted into buckets without a scrape: unsorted
/// durations take memory.
const UPKEEP: Duration = Duration::from_secs(1);

const METADATA: Metadata<'_> = Metadata::new("rpc_server", Level::INFO, None);

const SESSIONS: &str = "rpc_sessions";
const SESSIONS_OPENED: &str = "rpc_sessions_opened_total";
const REFUSALS: &str = "rpc_refusals_total";
const CALLS: &str = "rpc_calls_total";
const CALLS_IN_PROGRESS: &str = "rpc_calls_in_progress";
const CALL_DURATION: &str = "rpc_call_duration_seconds";
const TENSOR_BYTES: &str = "rpc_tensor_bytes_total";
const HANDLES: &str = "rpc_handles";
const MEMORY: &str = "rpc_memory_bytes";
/// Suffix of the names of counters.
const TOTAL: &str = "_total";

const BUILD_INFO: &str = "rpc_build_info";
const START_TIME: &str = "rpc_start_time_seconds";
const CERTIFICATE_EXPIRY: &str = "rpc_certificate_expiry_timestamp_seconds";

/// Metrics of a server and the listener that serves them. Dropping it closes the listener.
#[derive(Debug)]
pub(crate) struct Monitoring {
    monitor: Arc<Monitor>,
    server: HttpServer,
    /// Task that ends on drop.
    _upkeep: JoinSet<()>,
}

impl Monitoring {
    /// Starts to serve metrics at `address`. Functions of `registry` have their names as labels.
    pub(crate) async fn start(
        address: SocketAddr,
        registry: Registry,
        state: Arc<ServerState>,
        gauges: Vec<Arc<dyn Gauges>>,
    ) -> Result<Self, ServeError> {
        let monitor = Monitor::new(registry, state, gauges);
        let server = HttpServer::start(address, monitor.clone()).await;
        let server = server.map_err(|source| ServeError::Metrics { address, source })?;
        tracing::info!(address = %server.address(), "serving metrics");
        let mut upkeep = JoinSet::new();
        let kept = monitor.clone();
        upkeep.spawn(async move { kept.upkeep().await });
        Ok(Self { monitor, server, _upkeep: upkeep })
    }

    /// Returns a factory whose sessions are measured.
    pub(crate) fn metered(&self, factory: Arc<dyn SessionFactory>) -> Arc<dyn SessionFactory> {
        Arc::new(MeteredFactory::new(factory, self.monitor.clone()))
    }

    /// Returns the observer that counts clients without a session.
    pub(crate) fn observer(&self) -> Arc<dyn ServeObserver> {
        self.monitor.clone()
    }

    /// Returns the gauge for the end of the server's certificate, which is shown from now on.
    pub(crate) fn certificate_gauge(&self) -> CertificateGauge {
        CertificateGauge(gauge(&self.monitor.recorder, Key::from_static_name(CERTIFICATE_EXPIRY)))
    }

    /// Sets the phase of the server. A server that drains does not become ready again.
    pub(crate) fn enter(&self, phase: Phase) {
        self.monitor.enter(phase);
    }

    /// Returns the address of the metrics, with the port that was chosen.
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

/// Gauge of the end of the server's certificate.
pub(crate) struct CertificateGauge(Gauge);

impl CertificateGauge {
    pub(crate) fn set(&self, end: SystemTime) {
        self.0.set(end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    }
}

impl fmt::Debug for CertificateGauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CertificateGauge")
    }
}

/// Metrics and phase of one server. Several servers in one process have one each.
struct Monitor {
    recorder: PrometheusRecorder,
    output: PrometheusHandle,
    /// Registry whose functions have their names as labels.
    registry: Registry,
    state: Arc<ServerState>,
    phase: AtomicU8,
    functions: RwLock<HashMap<String, Arc<FunctionMetrics>>>,
    /// Metrics of the functions without their own.
    other: Arc<FunctionMetrics>,
    sessions: Gauge,
    sessions_opened: Counter,
    calls_in_progress: Gauge,
    bytes_in: Counter,
    bytes_out: Counter,
    handles: Gauge,
    memory: Gauge,
    /// Further gauges.
    further: Vec<Arc<dyn Gauges>>,
}

/// Source of further gauges and counters.
pub(crate) trait Gauges: Send + Sync {
    /// Returns the name and the description of each number. Names of counters end in `_total`.
    fn described(&self) -> &'static [(&'static str, &'static str)];

    /// Returns the current numbers in the same order. Called for each scrape.
    fn now(&self) -> Vec<u64>;

    /// Returns the current numbers that have a device as their label; by default none.
    fn of_devices(&self) -> Vec<DeviceValue> {
        Vec::new()
    }
}

/// Number of a gauge for one device.
pub(crate) struct DeviceValue {
    /// Name of the gauge, one of those that are [described](Gauges::described).
    pub(crate) metric: &'static str,
    pub(crate) device: Device,
    pub(crate) value: f64,
}

/// Phase of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Not all listeners are bound.
    Starting,
    Ready,
    /// A listener has ended.
    ListenerLost,
    /// It takes no new sessions.
    Draining,
}

impl ServeObserver for Monitor {
    fn refused(&self, reason: ErrorKind) {
        let key = Key::from_parts(REFUSALS, vec![Label::new("reason", reason.name())]);
        self.recorder.register_counter(&key, &METADATA).increment(1);
    }

    fn stopped_listening(&self, _: &Address) {
        self.enter(Phase::ListenerLost);
    }
}

impl Monitor {
    fn new(registry: Registry, state: Arc<ServerState>, further: Vec<Arc<dyn Gauges>>) -> Arc<Self> {
        let builder = PrometheusBuilder::new().set_buckets(&BUCKETS);
        // Building fails only without buckets.
        let recorder = builder.unwrap_or_else(|_| PrometheusBuilder::new()).build_recorder();
        describe(&recorder);
        for (name, text) in further.iter().flat_map(|further| further.described()) {
            if name.ends_with(TOTAL) {
                recorder.describe_counter((*name).into(), None, (*text).into());
            } else {
                recorder.describe_gauge((*name).into(), None, (*text).into());
            }
        }
        gauge(&recorder, Key::from_parts(BUILD_INFO, vec![Label::new("version", env!("CARGO_PKG_VERSION"))])).set(1.0);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let started = now.saturating_sub(state.started().elapsed());
        gauge(&recorder, Key::from_static_name(START_TIME)).set(started.as_secs_f64());
        let bytes = |direction: &'static str| {
            let key = Key::from_parts(TENSOR_BYTES, vec![Label::new("direction", direction)]);
            recorder.register_counter(&key, &METADATA)
        };
        Arc::new(Self {
            output: recorder.handle(),
            registry,
            state,
            phase: AtomicU8::new(Phase::Starting as u8),
            functions: RwLock::default(),
            other: Arc::new(FunctionMetrics::new(&recorder, OTHER)),
            sessions: gauge(&recorder, Key::from_static_name(SESSIONS)),
            sessions_opened: recorder.register_counter(&Key::from_static_name(SESSIONS_OPENED), &METADATA),
            calls_in_progress: gauge(&recorder, Key::from_static_name(CALLS_IN_PROGRESS)),
            bytes_in: bytes("in"),
            bytes_out: bytes("out"),
            handles: gauge(&recorder, Key::from_static_name(HANDLES)),
            memory: gauge(&recorder, Key::from_static_name(MEMORY)),
            further,
            recorder,
        })
    }

    fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Ready,
            2 => Phase::ListenerLost,
            _ => Phase::Draining,
        }
    }

    /// Renders all metrics in the format of Prometheus.
    fn render(&self) -> String {
        let totals = self.state.totals();
        self.handles.set(totals.handles as f64);
        self.memory.set(totals.memory_bytes as f64);
        for further in &self.further {
            for ((name, _), value) in further.described().iter().zip(further.now()) {
                let key = Key::from_static_name(name);
                if name.ends_with(TOTAL) {
                    self.recorder.register_counter(&key, &METADATA).absolute(value);
                } else {
                    gauge(&self.recorder, key).set(value as f64);
                }
            }
            for DeviceValue { metric, device, value } in further.of_devices() {
                let key = Key::from_parts(metric, vec![Label::new("device", device.to_string())]);
                gauge(&self.recorder, key).set(value);
            }
        }
        self.output.render()
    }

    /// Sorts measurements into buckets while it is polled, so that they take little memory.
    async fn upkeep(&self) {
        let mut ticks = tokio::time::interval(UPKEEP);
        loop {
            ticks.tick().await;
            self.output.run_upkeep();
        }
    }

    /// Returns the metrics of the function `name`.
    fn function(&self, name: &str) -> Arc<FunctionMetrics> {
        if let Some(known) = self.functions.read().get(name) {
            return known.clone();
        }
        // A session may know any number of functions that this server does not have.
        if self.registry.get(name).is_err() {
            return self.other.clone();
        }
        let mut functions = self.functions.write();
        if functions.len() >= MAX_FUNCTIONS && !functions.contains_key(name) {
            return self.other.clone();
        }
        let new = || Arc::new(FunctionMetrics::new(&self.recorder, name));
        functions.entry(name.to_owned()).or_insert_with(new).clone()
    }

    /// Records the end of a call.
    fn called(&self, function: &FunctionMetrics, error: Option<ErrorKind>, duration: Duration) {
        match error {
            None => function.ok.increment(1),
            Some(kind) => self.recorder.register_counter(&calls(&function.name, kind.name()), &METADATA).increment(1),
        }
        function.duration.record(duration.as_secs_f64());
    }
}

impl fmt::Debug for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Monitor").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

/// Metrics of one function.
struct FunctionMetrics {
    name: Arc<str>,
    ok: Counter,
    duration: Histogram,
}

impl FunctionMetrics {
    fn new(recorder: &PrometheusRecorder, name: &str) -> Self {
        let name: Arc<str> = name.into();
        let duration = Key::from_parts(CALL_DURATION, vec![Label::new("function", name.clone())]);
        Self {
            ok: recorder.register_counter(&calls(&name, "ok"), &METADATA),
            duration: recorder.register_histogram(&duration, &METADATA),
            name,
        }
    }
}

fn calls(function: &Arc<str>, outcome: &'static str) -> Key {
    Key::from_parts(CALLS, vec![Label::new("function", function.clone()), Label::new("outcome", outcome)])
}

fn gauge(recorder: &PrometheusRecorder, key: Key) -> Gauge {
    recorder.register_gauge(&key, &METADATA)
}

fn describe(recorder: &PrometheusRecorder) {
    let gauges = [
        (BUILD_INFO, "The version of the server; always 1."),
        (START_TIME, "When the server started, in seconds since the epoch."),
        (SESSIONS, "Sessions that are open."),
        (CALLS_IN_PROGRESS, "Calls that have not ended."),
        (HANDLES, "Objects that sessions hold."),
        (MEMORY, "Device memory that sessions hold, in bytes."),
        (CERTIFICATE_EXPIRY, "When the server's certificate expires, in seconds since the epoch."),
    ];
    let counters = [
        (SESSIONS_OPENED, "Sessions that were opened."),
        (REFUSALS, "Clients that got no session, by reason."),
        (CALLS, "Calls that ended, by function and outcome: ok, or the kind of the error."),
        (TENSOR_BYTES, "Bytes of tensors that were copied in or out."),
    ];
    for (name, text) in gauges {
        recorder.describe_gauge(name.into(), None, text.into());
    }
    for (name, text) in counters {
        recorder.describe_counter(name.into(), None, text.into());
    }
    let text = "From the arrival of a call to its end, its time in queues included, by function.";
    recorder.describe_histogram(CALL_DURATION.into(), Some(Unit::Seconds), text.into());
}

#[cfg(test)]
mod tests {
    use rpc_core::{LocalSession, Operation, Reference, Request, RpcSession, SharedSession, Submission, Value};

    use super::metered::MeteredSession;
    use super::*;

    fn monitor(registry: &Registry) -> Arc<Monitor> {
        Monitor::new(registry.clone(), ServerState::new(None, u64::MAX, false, None, Arc::default()), Vec::new())
    }

    fn metered(registry: &Registry, monitor: &Arc<Monitor>) -> MeteredSession {
        MeteredSession::new(Arc::new(LocalSession::builder(registry.clone()).build()), monitor.clone())
    }

    fn get(session: &impl RpcSession, name: &str) -> rpc_core::Handle {
        let get = Request::new(Operation::GetFunction { name: name.to_owned() });
        match session.submit(get).reply().wait().unwrap() {
            Value::Object(Reference::Function(handle)) => handle,
            other => panic!("{other:?}"),
        }
    }

    fn call(session: &impl RpcSession, function: rpc_core::Handle) -> rpc_core::reply::Outcome {
        session.submit(Request::new(Operation::Call { function, args: Vec::new() })).reply().wait()
    }

    /// Returns the value of the only line that begins with `name`.
    fn value(monitor: &Monitor, name: &str) -> Option<f64> {
        let text = monitor.render();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = lines.next().map(|value| value.parse().unwrap());
        assert_eq!(lines.next(), None, "{name}");
        value
    }

    #[test]
    fn only_the_first_called_functions_have_metrics_of_their_own() {
        let registry = Registry::new();
        for at in 0..=MAX_FUNCTIONS {
            registry.add_inline(format!("f{at}"), || ());
        }
        let monitor = monitor(&registry);
        assert_eq!(&*monitor.function("not registered").name, OTHER);
        for at in 0..MAX_FUNCTIONS {
            assert_eq!(*monitor.function(&format!("f{at}")).name, format!("f{at}"));
        }
        assert_eq!(&*monitor.function(&format!("f{MAX_FUNCTIONS}")).name, OTHER);
        assert_eq!(&*monitor.function("f0").name, "f0");
    }

    #[test]
    fn calls_by_a_handle_count_for_its_function_until_the_handle_is_freed() {
        let registry = Registry::new();
        registry.add_inline("one", || 1_i64);
        let monitor = monitor(&registry);
        let session = metered(&registry, &monitor);
        let (first, second) = (get(&session, "one"), get(&session, "one"));
        call(&session, first).unwrap();
        call(&session, second).unwrap();
        session.submit(Request::new(Operation::Release { handles: vec![first] })).reply().wait().unwrap();
        session.submit(Request::new(Operation::Free { handle: second })).reply().wait().unwrap();
        call(&session, first).unwrap_err();
        let calls = |function, outcome| {
            value(&monitor, &format!("rpc_calls_total{{function=\"{function}\",outcome=\"{outcome}\"}}"))
        };
        assert_eq!((calls("one", "ok"), calls("one", "invalid_handle")), (Some(2.0), None));
        assert_eq!(calls("other", "invalid_handle"), Some(1.0));
        assert_eq!(session.tracked(), 0);
    }

    #[test]
    fn calls_by_a_handle_that_is_still_looked_up_count_for_its_function() {
        let (registry, (release, held)) = (Registry::new(), std::sync::mpsc::channel::<()>());
        let held = std::sync::Mutex::new(held);
        registry.add_inline("one", || 1_i64);
        registry.add("hold", move || held.lock().is_ok_and(|held| held.recv().is_ok()));
        let monitor = monitor(&registry);
        let session = metered(&registry, &monitor);
        let hold = get(&session, "hold");
        let pipes = [(); 3].map(|()| rpc_core::PipeId::unused());
        let [found, missing, freed] = pipes;
        let look_up = |pipe, name: &str| {
            let get = Request::new(Operation::GetFunction { name: name.to_owned() });
            session.submit(Request { pipe: Some(pipe), ..get }).reply()
        };
        let call = |function| session.submit(Request::new(Operation::Call { function, args: Vec::new() })).reply();
        let release_pipe = |pipe: rpc_core::PipeId| {
            let release = Request::new(Operation::Release { handles: vec![pipe.handle()] });
            session.submit(release).reply().wait().unwrap();
        };
        let held = call(hold);
        let replies = [look_up(found, "one"), look_up(missing, "two"), look_up(freed, "one"), call(found.handle())];
        release_pipe(freed);
        release.send(()).unwrap();
        held.wait().unwrap();
        let outcomes = replies.map(|reply| reply.wait().is_ok());
        assert_eq!(outcomes, [true, false, true, true]);
        let calls = |function, outcome| {
            value(&monitor, &format!("rpc_calls_total{{function=\"{function}\",outcome=\"{outcome}\"}}"))
        };
        assert_eq!((calls("one", "ok"), calls("other", "ok")), (Some(1.0), Some(0.0)));
        // That of the function which holds the lane, and one more.
        assert_eq!(session.tracked(), 2);
        call(found.handle()).wait().unwrap();
        assert_eq!(calls("one", "ok"), Some(2.0));
        release_pipe(found);
        assert_eq!(session.tracked(), 1);
    }

    #[test]
    fn the_handles_remembered_for_a_session_are_bounded() {
        let registry = Registry::new();
        registry.add_inline("one", || 1_i64);
        let session = metered(&registry, &monitor(&registry));
        for _ in 0..crate::function_table::MAX_TRACKED + 10 {
            get(&session, "one");
        }
        assert_eq!(session.tracked(), crate::function_table::MAX_TRACKED);
    }

    #[test]
    fn a_call_that_will_not_be_answered_is_no_longer_in_progress() {
        struct Deaf;
        impl RpcSession for Deaf {
            fn submit(&self, _: Request) -> Submission {
                Submission::never()
            }
        }
        let monitor = monitor(&Registry::new());
        let session = MeteredSession::new(Arc::new(Deaf) as SharedSession, monitor.clone());
        assert_eq!((value(&monitor, SESSIONS), value(&monitor, SESSIONS_OPENED)), (Some(1.0), Some(1.0)));
        let function = rpc_core::Handle::from_bits(7);
        let call = session.submit(Request::new(Operation::Call { function, args: Vec::new() }));
        drop((call, session));
        assert_eq!((value(&monitor, SESSIONS), value(&monitor, SESSIONS_OPENED)), (Some(0.0), Some(1.0)));
        assert_eq!(value(&monitor, CALLS_IN_PROGRESS), Some(0.0));
        let closed = "rpc_calls_total{function=\"other\",outcome=\"closed\"}";
        assert_eq!(value(&monitor, closed), Some(1.0));
    }

    #[test]
    fn a_server_that_drains_does_not_become_ready_again() {
        let monitor = monitor(&Registry::new());
        assert_eq!(monitor.phase(), Phase::Starting);
        for (enter, then) in [
            (Phase::Ready, Phase::Ready),
            (Phase::ListenerLost, Phase::ListenerLost),
            (Phase::Draining, Phase::Draining),
            (Phase::Ready, Phase::Draining),
        ] {
            monitor.enter(enter);
            assert_eq!(monitor.phase(), then);
        }
    }
}

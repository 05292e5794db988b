//! The functions that the origin of a session under test serves.
//!
//! Each thing that a test controls at the origin (gates, counters, journals) is an object of the
//! session and is worked through functions, because the origin may be another process, several hops
//! away.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rpc_core::function::Rest;
use rpc_core::tensor::{Tensor, TensorView, TensorViewMut};
use rpc_core::{
    Context, DataType, Device, ErrorKind, Function, FunctionModule, LocalSession, LocalValue, Pack, Registry, Result,
    RpcError, Session, Shared, Value,
};
use serde::{Deserialize, Serialize};

/// A struct that travels packed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Coordinates.
    pub at: (f64, f64),
    /// Name.
    pub label: String,
    /// Anything else.
    pub tags: Vec<Option<u8>>,
}

/// The error of `fail.application`.
#[derive(Debug)]
pub struct OutOfPaper;

impl fmt::Display for OutOfPaper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the printer is out of paper")
    }
}

impl std::error::Error for OutOfPaper {}

/// Holds calls back until it is opened, and counts those that have come to it.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    open: bool,
    reached: i64,
    wakers: Vec<Waker>,
}

impl Gate {
    fn wait(&self) {
        let mut state = self.state.lock();
        state.reached += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.open);
    }

    async fn wait_async(&self) {
        let mut reached = false;
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if !std::mem::replace(&mut reached, true) {
                state.reached += 1;
                self.changed.notify_all();
            }
            if state.open {
                return Poll::Ready(());
            }
            state.wakers.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn open(&self) {
        let mut state = self.state.lock();
        state.open = true;
        self.changed.notify_all();
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn reach(&self, calls: i64) {
        self.changed.wait_while(&mut self.state.lock(), |state| state.reached < calls);
    }
}

/// A number that can be waited for.
#[derive(Debug, Default)]
pub struct Counter {
    value: Mutex<i64>,
    changed: Condvar,
}

impl Counter {
    fn add(&self, by: i64) -> i64 {
        let mut value = self.value.lock();
        *value += by;
        self.changed.notify_all();
        *value
    }

    fn value(&self) -> i64 {
        *self.value.lock()
    }

    fn reach(&self, least: i64) -> i64 {
        let mut value = self.value.lock();
        self.changed.wait_while(&mut value, |value| *value < least);
        *value
    }
}

/// Events, in order.
#[derive(Debug, Default)]
pub struct Journal(Mutex<Vec<i64>>);

impl Journal {
    fn push(&self, entry: i64) {
        self.0.lock().push(entry);
    }
}

/// An object whose end is noticed.
#[derive(Debug)]
pub struct Probe {
    dropped: Arc<Counter>,
    payload: i64,
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.dropped.add(1);
    }
}

/// Number of [`Tagged`] objects of each tag that this process holds: seen by all its sessions, so
/// that one can tell what is left of another that has ended.
static ALIVE: LazyLock<Mutex<HashMap<String, i64>>> = LazyLock::new(Mutex::default);

/// An object that other sessions of the process can count.
#[derive(Debug)]
pub struct Tagged(String);

impl Tagged {
    fn new(tag: String) -> Self {
        *ALIVE.lock().entry(tag.clone()).or_default() += 1;
        Self(tag)
    }
}

impl Drop for Tagged {
    fn drop(&mut self) {
        *ALIVE.lock().entry(std::mem::take(&mut self.0)).or_default() -= 1;
    }
}

/// An object that cannot be freed in peace.
#[derive(Debug)]
pub struct Grenade;

impl Drop for Grenade {
    fn drop(&mut self) {
        panic!("freed");
    }
}

/// Runs until nobody waits for the call any more: a call that fills a place in a queue and can be
/// ended while the queue is full, when no other call could be admitted to end it.
fn hold(context: &Context) {
    while !context.is_cancelled() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All names that [`registry`] registers, for clients that fetch them at once.
pub fn names() -> Vec<String> {
    registry().functions().into_iter().map(|(name, _)| name).collect()
}

/// The functions, and the module `arithmetic`.
pub fn registry() -> Registry {
    let registry = Registry::new();
    values(&registry);
    control(&registry);
    objects(&registry);
    failures(&registry);
    tensors(&registry);
    context(&registry);
    sessions(&registry);
    let module = FunctionModule::new("arithmetic")
        .add("square", |x: i64| x * x)
        .add_inline("negate", |x: i64| -x)
        .add_async("half", |x: f64| async move { x / 2.0 });
    registry.add_module(Arc::new(module));
    registry
}

/// Sessions as values: one that a function opens, and one that a function is given.
fn sessions(registry: &Registry) {
    registry.add("session.new", || {
        let inner = Registry::new();
        objects(&inner);
        control(&inner);
        inner.add("add", |a: i64, b: i64| a + b);
        inner.add("adder", |a: i64| Function::blocking(move |b: i64| a + b));
        inner.add("tensor", |context: Context| context.allocate(Device::cpu(), DataType::F32, &[3]));
        inner.add_inline("tensor.shape", |x: Tensor| rpc_core::Shape(x.shape().to_vec()));
        inner.add_async("apply", |context: Context, function: Function, Rest(args): Rest| async move {
            context.call_async(&function, args).await
        });
        inner.add_async("never", std::future::pending::<()>);
        let module = FunctionModule::new("arithmetic").add("square", |x: i64| x * x);
        inner.add_module(Arc::new(module));
        inner.add("load", |context: Context| context.load_module("arithmetic", None));
        Session::new(LocalSession::new(inner))
    });
    registry.add_async("session.add", |session: Session, a: i64, b: i64| async move {
        session.get_function("add").await?.call::<i64>((a, b)).await
    });
}

fn values(registry: &Registry) {
    registry.add_inline("echo", |value: LocalValue| value);
    registry.add("echo.blocking", |value: LocalValue| value);
    registry.add_async("echo.async", |value: LocalValue| async move { value });
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add_inline("narrow", |small: u8, text: String, flag: bool| format!("{small} {text} {flag}"));
    registry.add_inline("half", |x: f64| x / 2.0);
    registry.add_inline("optional", |value: Option<i64>| value.unwrap_or(-1));
    registry.add_inline("mean", |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64);
    registry.add_inline("swap_keys", |names: BTreeMap<i64, String>| -> BTreeMap<String, i64> {
        names.into_iter().map(|(number, name)| (name, number)).collect()
    });
    registry.add_inline("nothing", || ());
    registry.add_inline("count", |Rest(values): Rest| values.len() as i64);
    registry.add("move_point", |Pack(mut point): Pack<Point>, by: f64| {
        point.at.0 += by;
        Pack(point)
    });
    registry.add_inline("eight", |a: i64, b: i64, c: i64, d: i64, e: i64, f: i64, g: i64, h: i64| {
        vec![a, b, c, d, e, f, g, h]
    });
    registry.add("make_adder", |by: i64| Function::inline(move |x: i64| x + by));
    registry.add("compose", |first: Function, second: Function| {
        Function::blocking(move |context: Context, value: LocalValue| {
            let between = context.call(&first, vec![value])?;
            context.call(&second, vec![between])
        })
    });
    registry.add("apply", |context: Context, function: Function, Rest(args): Rest| context.call(&function, args));
}

fn control(registry: &Registry) {
    registry.add_inline("gate.new", || Shared(Arc::<Gate>::default()));
    registry.add("gate.wait", |Shared(gate): Shared<Gate>| gate.wait());
    registry.add_async("gate.wait_async", |Shared(gate): Shared<Gate>| async move { gate.wait_async().await });
    registry.add_inline("gate.open", |Shared(gate): Shared<Gate>| gate.open());
    registry.add("gate.reach", |Shared(gate): Shared<Gate>, calls: i64| gate.reach(calls));
    // The objects made after the gate show whether a discarded result is freed.
    registry.add("gate.probes", |Shared(gate): Shared<Gate>, Shared(dropped): Shared<Counter>, count: i64| {
        gate.wait();
        probes(&dropped, count)
    });
    registry.add_async(
        "gate.probes_async",
        |Shared(gate): Shared<Gate>, Shared(dropped): Shared<Counter>, count: i64| async move {
            gate.wait_async().await;
            probes(&dropped, count)
        },
    );
    registry.add("gate.hold_object", |Shared(gate): Shared<Gate>, Shared(probe): Shared<Probe>| {
        gate.wait();
        probe.payload
    });
    registry.add_inline("counter.new", || Shared(Arc::<Counter>::default()));
    registry.add_inline("counter.add", |Shared(counter): Shared<Counter>, by: i64| counter.add(by));
    registry.add("counter.add.blocking", |Shared(counter): Shared<Counter>, by: i64| counter.add(by));
    registry.add_async("counter.add.async", |Shared(counter): Shared<Counter>, by: i64| async move { counter.add(by) });
    registry.add_inline("counter.value", |Shared(counter): Shared<Counter>| counter.value());
    registry.add("counter.reach", |Shared(counter): Shared<Counter>, least: i64| counter.reach(least));
    registry.add_inline("journal.new", || Shared(Arc::<Journal>::default()));
    registry.add_inline("journal.push", |Shared(journal): Shared<Journal>, entry: i64| journal.push(entry));
    registry.add("journal.push.blocking", |Shared(journal): Shared<Journal>, entry: i64| journal.push(entry));
    registry.add_async("journal.push.async", |Shared(journal): Shared<Journal>, entry: i64| async move {
        yield_once().await;
        journal.push(entry);
    });
    registry.add_inline("journal.entries", |Shared(journal): Shared<Journal>| journal.0.lock().clone());
    registry.add("hold", |context: Context, Shared(started): Shared<Counter>, Shared(ended): Shared<Counter>| {
        started.add(1);
        hold(&context);
        ended.add(1)
    });
    registry.add_async(
        "hold.async",
        |context: Context, Shared(started): Shared<Counter>, Shared(ended): Shared<Counter>| async move {
            started.add(1);
            while !context.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
                yield_once().await;
            }
            ended.add(1)
        },
    );
    registry.add("hold.tagged", |context: Context, tag: String| {
        let _alive = Tagged::new(tag);
        hold(&context);
    });
    // Work that takes a while, so that a queue behind it stays filled for a moment.
    registry.add("journal.push.slowly", |Shared(journal): Shared<Journal>, entry: i64| {
        std::thread::sleep(Duration::from_millis(1));
        journal.push(entry);
    });
}

async fn yield_once() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

fn probes(dropped: &Arc<Counter>, count: i64) -> Vec<Shared<Probe>> {
    (0..count).map(|payload| Shared(Arc::new(Probe { dropped: dropped.clone(), payload }))).collect()
}

fn objects(registry: &Registry) {
    registry.add_inline("probe.new", |Shared(dropped): Shared<Counter>, payload: i64| {
        Shared(Arc::new(Probe { dropped, payload }))
    });
    registry.add_inline("probe.many", |Shared(dropped): Shared<Counter>, count: i64| probes(&dropped, count));
    registry.add_inline("probe.payload", |Shared(probe): Shared<Probe>| probe.payload);
    registry.add_inline("probe.share", |Shared(probe): Shared<Probe>| Shared(probe));
    registry.add_inline("probe.same", |Shared(a): Shared<Probe>, Shared(b): Shared<Probe>| Arc::ptr_eq(&a, &b));
    registry.add_inline("tagged.new", |tag: String| Shared(Arc::new(Tagged::new(tag))));
    registry.add_inline("tagged.alive", |tag: String| ALIVE.lock().get(&tag).copied().unwrap_or_default());
    registry.add_inline("usage", |context: Context| {
        let usage = context.usage();
        (usage.handles, usage.memory_bytes)
    });
}

fn failures(registry: &Registry) {
    registry.add("fail.application", || -> Result<i64, OutOfPaper> { Err(OutOfPaper) });
    registry.add_inline("fail.rpc", || -> Result<()> {
        Err(RpcError::new(ErrorKind::Unsupported, "not on a Sunday").with_application_kind("Calendar"))
    });
    registry.add_inline("grenade.new", || Shared(Arc::new(Grenade)));
    registry.add("fail.panic", |message: String| -> i64 { panic!("{message}") });
    registry.add_inline("fail.panic.inline", |message: String| -> i64 { panic!("{message}") });
    registry.add_async("fail.panic.async", |message: String| async move {
        yield_once().await;
        if !message.is_empty() {
            panic!("{message}");
        }
    });
    registry.add("fail.panic.holding", |mut tensor: TensorViewMut| -> Result<()> {
        tensor.map_mut::<f32>()?.fill(1.0);
        panic!("with a tensor in hand");
    });
}

fn tensors(registry: &Registry) {
    registry.add("tensor.new", |context: Context, elements: i64| {
        context.allocate(Device::cpu(), DataType::F32, &[elements])
    });
    registry.add_inline("tensor.sum", |x: TensorView| sum(&x));
    registry.add("tensor.sum.blocking", |x: TensorView| sum(&x));
    registry.add_inline("tensor.byte", |x: TensorView, at: i64| byte(&x, at));
    registry.add("tensor.byte.blocking", |x: TensorView, at: i64| byte(&x, at));
    registry.add("tensor.fill", |mut x: TensorViewMut, with: f32| fill(&mut x, with));
    registry.add("tensor.add", |a: TensorView, b: TensorView, mut out: TensorViewMut| -> Result<()> {
        let (a, b, mut out) = (a.map::<f32>()?, b.map::<f32>()?, out.map_mut::<f32>()?);
        for (out, (a, b)) in out.iter_mut().zip(a.iter().zip(b.iter())) {
            *out = a + b;
        }
        out.end()
    });
    registry.add("tensor.read_gated", |x: TensorView, Shared(gate): Shared<Gate>, Shared(journal): Shared<Journal>| {
        gate.wait();
        journal.push(1);
        sum(&x)
    });
    registry.add(
        "tensor.fill_gated",
        |mut x: TensorViewMut, with: f32, Shared(gate): Shared<Gate>, Shared(journal): Shared<Journal>| -> Result<()> {
            gate.wait();
            journal.push(1);
            fill(&mut x, with)
        },
    );
    registry.add(
        "tensor.fill_noted",
        |mut x: TensorViewMut, with: f32, Shared(journal): Shared<Journal>| -> Result<()> {
            journal.push(2);
            fill(&mut x, with)
        },
    );
    registry.add_inline("tensor.sum_noted", |x: TensorView, Shared(journal): Shared<Journal>| {
        journal.push(2);
        sum(&x)
    });
    registry.add_inline("tensor.shape", |x: Tensor| rpc_core::Shape(x.shape().to_vec()));
    registry.add_inline("tensor.same", |x: Tensor| x);
    registry.add_inline("tensor.misalignment", |x: TensorView, alignment: i64| {
        x.map::<u8>().map(|bytes| (bytes.as_ptr().addr() % alignment as usize) as i64)
    });
    // The nested call wants to write what its caller reads.
    registry.add("tensor.conflict", |context: Context, x: TensorView| {
        let fill = context.function("tensor.fill")?;
        let tensor = Value::Object(rpc_core::Object::Tensor(x.tensor().clone()));
        context.call(&fill, vec![tensor, Value::Float(1.0)])
    });
    // The nested call reads what its caller reads.
    registry.add("tensor.nested_sum", |context: Context, x: TensorView| {
        let sum = context.function("tensor.sum")?;
        context.call(&sum, vec![Value::Object(rpc_core::Object::Tensor(x.tensor().clone()))])
    });
}

fn sum(x: &TensorView) -> Result<f64> {
    Ok(x.map::<f32>()?.iter().map(|x| f64::from(*x)).sum())
}

fn fill(x: &mut TensorViewMut, with: f32) -> Result<()> {
    let mut mapped = x.map_mut::<f32>()?;
    mapped.fill(with);
    mapped.end()
}

fn byte(x: &TensorView, at: i64) -> Result<i64> {
    Ok(i64::from(x.map::<u8>()?[at as usize]))
}

fn context(registry: &Registry) {
    registry.add_inline("context.lane", |context: Context| context.lane().0);
    registry.add("context.remaining_ms", |context: Context| {
        context.deadline().map(|deadline| deadline.saturating_duration_since(Instant::now()).as_millis() as i64)
    });
    registry.add("context.call", |context: Context, name: String, Rest(args): Rest| {
        context.call(&context.function(&name)?, args)
    });
    registry.add_async("context.call_async", |context: Context, name: String, Rest(args): Rest| async move {
        let function = context.function(&name)?;
        context.call_async(&function, args).await
    });
    registry.add_inline("context.thread", || format!("{:?}", std::thread::current().id()));
}

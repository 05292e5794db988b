//! Requests that wait in front of a device that another session has for itself, or are refused.

use std::task::{self, Poll, Waker};

use super::*;
use crate::dlpack::DataType;
use crate::local::{DeviceGate, DeviceUse};
use crate::value::TensorRef;

/// Gate that tests open and shut.
#[derive(Default)]
pub(super) struct TestGate {
    answer: Mutex<Answer>,
    uses: Arc<Uses>,
}

/// Uses that a gate has admitted.
#[derive(Default)]
struct Uses {
    present: AtomicUsize,
    most: AtomicUsize,
    all: AtomicUsize,
}

impl Uses {
    fn begin(self: &Arc<Self>) -> DeviceUse {
        let present = self.present.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(present, Ordering::SeqCst);
        self.all.fetch_add(1, Ordering::SeqCst);
        DeviceUse::counted(CountedUse(self.clone()))
    }

    fn present(&self) -> usize {
        self.present.load(Ordering::SeqCst)
    }
}

struct CountedUse(Arc<Uses>);

impl Drop for CountedUse {
    fn drop(&mut self) {
        self.0.present.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Default)]
struct Answer {
    waits: bool,
    refuses: bool,
    /// True if uses are counted.
    counts: bool,
    /// Number of uses after which the others wait.
    admits: Option<usize>,
    waker: Option<Waker>,
}

impl TestGate {
    /// Counts uses from now on.
    pub(super) fn count(&self) {
        self.answer.lock().counts = true;
    }

    /// Returns the number of uses that have not ended.
    pub(super) fn uses(&self) -> usize {
        self.uses.present()
    }

    fn open(&self) {
        let waker = std::mem::take(&mut *self.answer.lock()).waker;
        waker.into_iter().for_each(Waker::wake);
    }
}

impl DeviceGate for TestGate {
    fn poll_use(&self, _: Device, cx: &mut task::Context<'_>) -> Poll<Result<DeviceUse>> {
        let mut answer = self.answer.lock();
        if answer.refuses {
            return Poll::Ready(Err(RpcError::new(ErrorKind::Busy, "refused")));
        }
        if answer.waits || answer.admits.is_some_and(|admits| self.uses.present() >= admits) {
            answer.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(if answer.counts { self.uses.begin() } else { DeviceUse::uncounted() }))
    }
}

fn session(gate: &Arc<TestGate>) -> LocalSession {
    let registry = Registry::new();
    registry.add_inline("plain", |_: Rest| 7);
    LocalSession::builder(registry).device_gate(gate.clone()).build()
}

fn tensor(session: &LocalSession) -> TensorRef {
    let alloc =
        Operation::Alloc { device: Device::cpu(), dtype: DataType::U8, shape: vec![4], scope: None, alignment: 0 };
    match session.submit(Request::new(alloc)).reply().wait().unwrap() {
        Value::Object(Reference::Tensor(tensor)) => *tensor,
        other => panic!("{other:?}"),
    }
}

/// Requests of every kind that uses the tensor, or its device.
fn uses(session: &LocalSession, tensor: &TensorRef) -> Vec<Operation> {
    let device = tensor.device;
    let argument = || Value::List(vec![Value::Object(Reference::Tensor(tensor.clone().into()))]);
    vec![
        Operation::Alloc { device, dtype: DataType::U8, shape: vec![4], scope: None, alignment: 0 },
        Operation::Write { to: tensor.clone().into(), offset: 0, data: Bytes::from_static(&[1]) },
        Operation::Read { from: tensor.clone().into(), offset: 0, len: 4, into: None },
        Operation::Copy { from: tensor.clone().into(), to: tensor.clone().into() },
        Operation::CreateStream { device },
        Operation::SetStream { device, stream: None },
        Operation::StreamWait { device, stream: None },
        Operation::Call { function: handle(session, "plain"), args: vec![argument()] },
    ]
}

#[test]
fn every_use_of_a_device_is_refused_or_waits_and_other_requests_go_on() {
    let gate = Arc::new(TestGate::default());
    let session = session(&gate);
    let tensor = tensor(&session);
    gate.answer.lock().refuses = true;
    for operation in uses(&session, &tensor) {
        let name = operation.name();
        let error = session.submit(Request::new(operation)).reply().wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Busy, false), "{name}");
    }
    *gate.answer.lock() = Answer { waits: true, ..Answer::default() };
    let waiting: Vec<_> = uses(&session, &tensor)
        .into_iter()
        .map(|operation| session.submit(Request::new(operation).on(Lane::CONCURRENT)).reply())
        .collect();
    assert!(session.write_in_place(Lane::DEFAULT, &tensor, 0, 4).is_none());
    assert_eq!(session.backlog().admitted_requests, waiting.len());
    // Other calls, attributes and releases do not wait.
    assert_eq!(session.submit(call(handle(&session, "plain"), Vec::new())).reply().wait().unwrap(), Value::Int(7));
    let exists = Operation::Attribute { device: Device::cpu(), attribute: DeviceAttribute::Exists };
    session.submit(Request::new(exists)).reply().wait().unwrap();
    // What waits has pinned what it uses.
    let release = Operation::Release { handles: vec![tensor.storage] };
    session.submit(Request::new(release)).reply().wait().unwrap();
    gate.open();
    wait_all(waiting);
    eventually("all have ended", || session.backlog() == Backlog::default());
}

#[test]
fn a_lane_keeps_its_order_behind_a_request_that_waits() {
    let gate = Arc::new(TestGate::default());
    let session = session(&gate);
    let (tensor, plain) = (tensor(&session), handle(&session, "plain"));
    gate.answer.lock().waits = true;
    let write = |byte| {
        let data = Bytes::from(vec![byte; 4]);
        session.submit(Request::new(Operation::Write { to: tensor.clone().into(), offset: 0, data })).reply()
    };
    let writes: Vec<_> = (1..=3).map(write).collect();
    let plain = session.submit(call(plain, Vec::new())).reply();
    let read =
        session.submit(Request::new(Operation::Read { from: tensor.into(), offset: 0, len: 4, into: None })).reply();
    assert_eq!(session.backlog().admitted_requests, 5);
    gate.open();
    wait_all(writes);
    assert_eq!(plain.wait().unwrap(), Value::Int(7));
    assert_eq!(read.wait().unwrap(), Value::Bytes(Bytes::from_static(&[3; 4])));
}

#[test]
fn requests_that_wait_end_with_their_deadline_their_caller_and_their_session() {
    let gate = Arc::new(TestGate::default());
    let session = session(&gate);
    let tensor = tensor(&session);
    gate.answer.lock().waits = true;
    let read = || Request::new(Operation::Read { from: tensor.clone().into(), offset: 0, len: 4, into: None });
    let mut with_deadline = read();
    with_deadline.deadline = Some(Instant::now() + Duration::from_millis(10));
    let error = session.submit(with_deadline).reply().wait().unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, false));

    // Dropping the reply cancels the request, and its lane goes on.
    drop(session.submit(read()).reply());
    let next = session.submit(call(handle(&session, "plain"), Vec::new())).reply();
    assert_eq!(next.wait().unwrap(), Value::Int(7));

    let last = session.submit(read()).reply();
    session.close(RpcError::new(ErrorKind::SessionTimeout, "closed"));
    assert_eq!(last.wait().unwrap_err().kind(), ErrorKind::SessionTimeout);
    eventually("all have ended", || session.backlog() == Backlog::default());
}

/// A request that is about to wait as the gate opens, as its caller leaves, or as its session ends
/// is neither forgotten nor run twice.
#[test]
fn no_request_is_lost_when_the_gate_changes_at_the_same_time() {
    for round in 0..50 {
        let gate = Arc::new(TestGate::default());
        let session = session(&gate);
        let tensor = tensor(&session);
        gate.answer.lock().waits = true;
        let opener = {
            let gate = gate.clone();
            std::thread::spawn(move || gate.open())
        };
        let read = || Request::new(Operation::Read { from: tensor.clone().into(), offset: 0, len: 4, into: None });
        let replies: Vec<_> = (0..4).map(|_| session.submit(read().on(Lane::CONCURRENT)).reply()).collect();
        if round % 2 == 0 {
            session.close(RpcError::new(ErrorKind::Closed, "closed"));
        }
        for reply in replies {
            let _ = reply.wait();
        }
        opener.join().unwrap();
        eventually("all have ended", || session.backlog() == Backlog::default());
    }
}

/// Gate that counts, and a session with functions that return the number of uses while they run.
fn counting_session() -> (Arc<TestGate>, LocalSession) {
    /// Runtime with a thread for each future.
    struct ThreadSpawner;
    impl Spawner for ThreadSpawner {
        fn spawn(&self, future: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>) {
            std::thread::spawn(|| crate::blocking::block_on(future));
        }
    }
    let gate = Arc::new(TestGate::default());
    let [inline, blocking, future] = [(); 3].map(|()| gate.uses.clone());
    let registry = Registry::new();
    registry.add_inline("plain", |_: Rest| 7).add_inline("inline", move |_: Rest| inline.present() as i64);
    registry.add("blocking", move |_: Rest| blocking.present() as i64);
    registry.add_async("future", move |_: Rest| {
        let uses = future.clone();
        async move { uses.present() as i64 }
    });
    let session = LocalSession::builder(registry).device_gate(gate.clone()).spawner(Arc::new(ThreadSpawner)).build();
    (gate, session)
}

fn argument(tensor: &TensorRef) -> Value {
    Value::Object(Reference::Tensor(tensor.clone().into()))
}

/// Requests of all kinds, in place, on a thread and as a future: while each runs it is counted
/// once, and no more once its reply is there. One that goes to a thread may begin there before the
/// thread that submitted it goes on.
#[test]
fn a_use_lasts_until_its_request_has_ended_wherever_that_runs() {
    let (gate, session) = counting_session();
    let tensor = tensor(&session);
    gate.answer.lock().counts = true;
    for operation in uses(&session, &tensor) {
        let name = operation.name();
        session.submit(Request::new(operation)).reply().wait().unwrap();
        assert_eq!(gate.uses.present(), 0, "{name}");
    }
    // A write in place would last for as long as its client takes to send.
    assert!(session.write_in_place(Lane::DEFAULT, &tensor, 0, 4).is_none());
    assert_eq!(gate.uses.present(), 0);
    // A copy has two.
    gate.uses.most.store(0, Ordering::SeqCst);
    for name in ["inline", "blocking", "future"] {
        let function = handle(&session, name);
        for round in 0..100 {
            // Lanes of their own: with and without a thread that is there already.
            let lane = if round % 2 == 0 { Lane::DEFAULT } else { Lane::CONCURRENT };
            let request = call(function, vec![argument(&tensor)]).on(lane);
            assert_eq!(session.submit(request).reply().wait().unwrap(), Value::Int(1), "{name}");
            assert_eq!(gate.uses.present(), 0, "{name}");
        }
    }
    assert_eq!(gate.uses.most.load(Ordering::SeqCst), 1);
    assert!(gate.uses.all.load(Ordering::SeqCst) > 300);
}

#[test]
fn a_request_that_cannot_use_all_its_devices_uses_none_while_it_waits() {
    let (gate, session) = counting_session();
    let tensor = tensor(&session);
    *gate.answer.lock() = Answer { counts: true, admits: Some(1), ..Answer::default() };
    let args = vec![argument(&tensor), argument(&tensor)];
    let reply = session.submit(call(handle(&session, "inline"), args)).reply();
    assert_eq!((gate.uses.present(), session.backlog().admitted_requests), (0, 1));
    gate.answer.lock().admits = None;
    let waker = std::mem::take(&mut gate.answer.lock().waker);
    waker.unwrap().wake();
    assert_eq!(reply.wait().unwrap(), Value::Int(2));
    assert_eq!(gate.uses.present(), 0);
}

/// Neither a caller that leaves nor the end of the session ends a use: the function still runs.
#[test]
fn a_function_that_runs_on_keeps_its_use() {
    let (test_gate, hold) = (Arc::new(TestGate::default()), Arc::new(Gate::default()));
    let registry = Registry::new();
    let holds = hold.clone();
    registry.add("hold", move |_: Rest| holds.pass());
    let session = LocalSession::builder(registry).device_gate(test_gate.clone()).build();
    let (tensor, function) = (tensor(&session), handle(&session, "hold"));
    test_gate.answer.lock().counts = true;
    let held = || session.submit(call(function, vec![argument(&tensor)]).on(Lane::CONCURRENT)).reply();
    let (cancelled, ended) = (held(), held());
    eventually("both run", || hold.waiting() == 2);
    drop(cancelled);
    assert_eq!(test_gate.uses.present(), 2);
    session.close(RpcError::new(ErrorKind::SessionTimeout, "closed"));
    assert_eq!(test_gate.uses.present(), 2);
    hold.open(2);
    let _ = ended.wait();
    eventually("all uses have ended", || test_gate.uses.present() == 0);
}

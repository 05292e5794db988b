//! Tests of streams: those that lanes set, and waits for them.

use super::device_gate::TestGate;
use super::*;

/// Device that only has streams, made by a function of their names.
struct StreamOnlyDevice<F>(F);

const RECORDING: DeviceType = DeviceType::EXT_DEV;

struct RecordingStream(&'static str, Arc<Mutex<HashSet<&'static str>>>);

impl Stream for RecordingStream {
    fn device(&self) -> Device {
        Device::new(RECORDING, 0)
    }

    fn synchronize(&self) -> Result<()> {
        self.1.lock().insert(self.0);
        Ok(())
    }

    fn wait_for(&self, _: &dyn Stream) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<F: Fn(&'static str) -> Arc<dyn Stream> + Send + Sync> DeviceApi for StreamOnlyDevice<F> {
    fn kind(&self) -> DeviceType {
        RECORDING
    }

    fn count(&self) -> Result<i32> {
        Ok(1)
    }

    fn attribute(&self, _: i32, _: DeviceAttribute) -> Result<Value> {
        Ok(Value::Null)
    }

    fn allocate(&self, _: i32, _: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Err(RpcError::unsupported("no memory"))
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Ok((self.0)("created"))
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Ok((self.0)("default"))
    }
}

#[test]
fn a_stream_set_by_a_concurrent_request_is_seen_by_no_other() {
    /// Waits for the current stream while the request that set one is being answered.
    struct Waiter(LocalSession, mpsc::Sender<Outcome>);
    impl ReplySink for Waiter {
        fn deliver(&self, _: u64, outcome: Outcome) {
            outcome.unwrap();
            self.1.send(wait_for_stream(&self.0, Lane::CONCURRENT)).unwrap();
        }
    }
    fn wait_for_stream(session: &LocalSession, lane: Lane) -> Outcome {
        let wait = Operation::StreamWait { device: Device::new(RECORDING, 0), stream: None };
        session.submit(Request::new(wait).on(lane)).reply().wait()
    }

    let (gate, noted) = (Arc::new(Gate::default()), Arc::new(Mutex::default()));
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move |_: Rest| waits.pass());
    let notes = noted.clone();
    let streams = StreamOnlyDevice(move |name| Arc::new(RecordingStream(name, notes.clone())) as Arc<dyn Stream>);
    let devices = Devices::new().with(Arc::new(streams));
    let limits = SessionLimits { max_queued_bytes: 1000, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).devices(devices).limits(limits).build();
    let (wait, device) = (handle(&session, "wait"), Device::new(RECORDING, 0));
    let stream = session.submit(Request::new(Operation::CreateStream { device })).reply().wait().unwrap().handles()[0];
    let set = |lane| Request::new(Operation::SetStream { device, stream: Some(stream) }).on(lane);
    // It waits for admission, behind the second of these, so that its reply is delivered while it
    // is being run.
    let large = || call(wait, vec![Bytes::from(vec![0; 600]).into()]).on(Lane::CONCURRENT);
    let held = [session.submit(large()).reply(), session.submit(large()).reply()];
    let (sender, outcomes) = mpsc::channel();
    let _canceller =
        session.submit(set(Lane::CONCURRENT)).reply().deliver_to(Arc::new(Waiter(session.clone(), sender)), 1);
    gate.open(2);
    wait_all(held);
    outcomes.recv_timeout(LIMIT).unwrap().unwrap();
    assert_eq!(*noted.lock(), HashSet::from(["default"]));
    assert!(session.local_inner().streams.lock().is_empty());
    // A named lane keeps its stream.
    session.submit(set(Lane(1))).reply().wait().unwrap();
    wait_for_stream(&session, Lane(1)).unwrap();
    assert_eq!(*noted.lock(), HashSet::from(["default", "created"]));
}

#[test]
fn a_stream_waits_for_the_one_that_is_named_or_current() {
    /// Streams with numbers in order of creation, and the pairs that waited for each other.
    struct Numbered(i64, Arc<Mutex<Vec<(i64, i64)>>>);
    impl Stream for Numbered {
        fn device(&self) -> Device {
            Device::new(RECORDING, 0)
        }

        fn synchronize(&self) -> Result<()> {
            panic!("nothing waits here")
        }

        fn wait_for(&self, other: &dyn Stream) -> Result<()> {
            let other = other.as_any().downcast_ref::<Self>().unwrap();
            self.1.lock().push((self.0, other.0));
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    let (waits, created) = (Arc::new(Mutex::default()), Mutex::new(0));
    let noted = waits.clone();
    let streams = StreamOnlyDevice(move |name| {
        let mut created = created.lock();
        *created += i64::from(name == "created");
        Arc::new(Numbered(if name == "created" { *created } else { 0 }, noted.clone())) as Arc<dyn Stream>
    });
    let session = crate::Session::new(
        LocalSession::builder(Registry::new()).devices(Devices::new().with(Arc::new(streams))).build(),
    );
    let device = Device::new(RECORDING, 0);
    let (one, two) = (session.create_stream(device).wait().unwrap(), session.create_stream(device).wait().unwrap());
    let sync = |from, to| session.sync_stream_from_to((device, from), (device, to)).lane(Lane(1)).wait().unwrap();
    sync(Some(&one), Some(&two));
    sync(None, Some(&one));
    session.set_stream(device, Some(&two)).lane(Lane(1)).wait().unwrap();
    sync(None, Some(&one));
    sync(Some(&one), None);
    assert_eq!(*waits.lock(), [(2, 1), (1, 0), (1, 2), (2, 1)]);
}

/// Stream whose work is done when the test says so.
#[derive(Clone, Default)]
struct ManualStream(Arc<Mutex<Vec<WhenDone>>>);

impl ManualStream {
    /// Ends the oldest wait.
    fn tell(&self, outcome: Result<()>) {
        let done = self.0.lock().remove(0);
        done(outcome);
    }

    fn waits(&self) -> usize {
        self.0.lock().len()
    }
}

impl Stream for ManualStream {
    fn device(&self) -> Device {
        Device::new(RECORDING, 0)
    }

    fn synchronize(&self) -> Result<()> {
        panic!("the session must not block")
    }

    fn when_done(&self, done: WhenDone) -> std::result::Result<(), WhenDone> {
        self.0.lock().push(done);
        Ok(())
    }

    fn wait_for(&self, _: &dyn Stream) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn waits_for_streams_hold_their_lanes_and_no_thread() {
    let device = ManualStream::default();
    let devices = || {
        let stream = device.clone();
        Devices::new().with(Arc::new(StreamOnlyDevice(move |_| Arc::new(stream.clone()) as Arc<dyn Stream>)))
    };
    let registry = Registry::new();
    registry.add("blocking", || 7).add_inline("inline", || 8);
    let limits = SessionLimits { max_threads: 1, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).devices(devices()).limits(limits).build();
    let [blocking, inline] = ["blocking", "inline"].map(|name| handle(&session, name));
    let wait = || Request::new(Operation::StreamWait { device: Device::new(RECORDING, 0), stream: None });
    let waits = [1, 2, 3].map(|lane| session.submit(wait().on(Lane(lane))).reply());
    let behind = [1, 2, 3].map(|lane| {
        let function = if lane == 2 { blocking } else { inline };
        session.submit(call(function, vec![]).on(Lane(lane))).reply()
    });
    eventually("all three wait", || device.waits() == 3);
    // The only thread is free, and the lanes are busy.
    let other = session.submit(call(blocking, vec![]).on(Lane(4))).reply();
    assert_eq!(other.wait().unwrap(), Value::Int(7));
    // A reply is sent before its request is counted as complete.
    eventually("the lanes alone are left", || session.backlog().admitted_requests == 6);
    device.tell(Ok(()));
    device.tell(Ok(()));
    device.tell(Err(RpcError::new(ErrorKind::DeviceLost, "a kernel trapped")));
    let outcomes = waits.map(PendingReply::wait);
    assert_eq!(outcomes[..2], [Ok(Value::Null), Ok(Value::Null)]);
    assert_eq!(outcomes[2].as_ref().unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(behind.map(|reply| reply.wait().unwrap()), [8, 7, 8].map(Value::Int));
    eventually("nothing is left", || session.backlog() == Backlog::default());

    // The deadline may pass before the stream is done, and the session may end: a later callback
    // then has no effect.
    let deadline = Some(Instant::now() + Duration::from_millis(1));
    let late = session.submit(Request { deadline, ..wait() }).reply();
    assert_eq!(late.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let last = session.submit(wait().on(Lane(9))).reply();
    eventually("it waits", || device.waits() >= 1 && device.0.lock().len() == session.backlog().admitted_requests);
    drop(session);
    while device.waits() > 0 {
        device.tell(Ok(()));
    }
    _ = last.wait();
    // A device that drops a wait without calling back ends it with an error.
    let session = LocalSession::builder(Registry::new()).devices(devices()).build();
    let forgotten = session.submit(wait()).reply();
    eventually("it waits", || device.waits() == 1);
    device.0.lock().clear();
    assert_eq!(forgotten.wait().unwrap_err().kind(), ErrorKind::Internal);
}

#[test]
fn a_wait_for_a_stream_uses_the_device_until_the_stream_is_done() {
    let (device, gate) = (ManualStream::default(), Arc::new(TestGate::default()));
    let stream = device.clone();
    let devices = Devices::new().with(Arc::new(StreamOnlyDevice(move |_| Arc::new(stream.clone()) as Arc<dyn Stream>)));
    let session = LocalSession::builder(Registry::new()).devices(devices).device_gate(gate.clone()).build();
    gate.count();
    let wait = || Request::new(Operation::StreamWait { device: Device::new(RECORDING, 0), stream: None });
    for outcome in [Some(Ok(())), Some(Err(RpcError::new(ErrorKind::DeviceLost, "a kernel trapped"))), None] {
        let reply = session.submit(wait()).reply();
        eventually("it waits", || device.waits() == 1);
        assert_eq!(gate.uses(), 1);
        match outcome {
            Some(outcome) => device.tell(outcome),
            None => device.0.lock().clear(),
        }
        let _ = reply.wait();
        assert_eq!(gate.uses(), 0);
    }
}

//! Tests of the ends of requests and objects: futures that are dropped, releases behind requests.

use std::future::Future;
use std::pin::Pin;

use super::*;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runtime that is shutting down, at once or a little later.
#[derive(Default)]
struct DroppingSpawner {
    later: Option<Mutex<mpsc::Sender<Task>>>,
}

impl Spawner for DroppingSpawner {
    fn spawn(&self, future: Task) {
        match &self.later {
            Some(later) => drop(later.lock().send(future)),
            None => drop(future),
        }
    }
}

#[test]
fn a_future_that_its_runtime_drops_gets_a_reply_and_leaves_its_lane() {
    let registry = Registry::new();
    registry.add_async("async", std::future::pending::<()>).add_inline("one", || 1);
    let (sender, dropped) = mpsc::channel();
    let later = DroppingSpawner { later: Some(Mutex::new(sender)) };
    for spawner in [DroppingSpawner::default(), later] {
        let waits = spawner.later.is_some();
        let session = LocalSession::builder(registry.clone()).spawner(Arc::new(spawner)).build();
        let (future, one) = (handle(&session, "async"), handle(&session, "one"));
        // More than the stack would hold if each continued the next one.
        let calls: Vec<_> = (0..1000).map(|_| session.submit(call(future, vec![])).reply()).collect();
        let behind = session.submit(call(one, vec![])).reply();
        if waits {
            // Each arrives when the previous one has ended.
            (0..1000).for_each(|_| drop(dropped.recv_timeout(LIMIT).unwrap()));
        }
        for reply in calls {
            let error = reply.wait().unwrap_err();
            assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Internal, true), "{error}");
        }
        assert_eq!(behind.wait().unwrap(), Value::Int(1));
        assert_eq!(session.backlog(), Backlog::default());
    }
}

/// Counter of live values.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn a_release_stays_behind_requests_that_wait_for_admission() {
    let (gate, alive) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
    let (waits, count) = (gate.clone(), alive.clone());
    let registry = Registry::new();
    registry
        .add("wait", move || waits.pass())
        .add_inline("new", move || {
            count.fetch_add(1, Ordering::SeqCst);
            SharedObject(Arc::new(Counted(count.clone())))
        })
        .add_inline("use", |_: SharedObject<Counted>| 7);
    let limits = SessionLimits { max_requests: 1, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).build();
    let [wait, new, uses] = ["wait", "new", "use"].map(|name| handle(&session, name));
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    let named = object.handles()[0];
    let held = session.submit(call(wait, vec![]).on(Lane(1))).reply();
    let used = session.submit(call(uses, vec![object.clone()])).reply();
    let release = |handles| session.submit(Request::new(Operation::Release { handles })).reply().wait().unwrap();
    // Repeated, and with handles that name nothing: no more is queued than there are objects to
    // free.
    for forged in 0..1000 {
        release(vec![named, Handle::from_bits(forged)]);
    }
    {
        let lanes = session.local_inner().lanes.lock();
        assert_eq!(lanes.releasing_len(), (1, 1));
    }
    let late = session.submit(call(uses, vec![object])).reply();
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    gate.open(1);
    held.wait().unwrap();
    assert_eq!(used.wait().unwrap(), Value::Int(7));
    assert_eq!(late.wait().unwrap_err().kind(), ErrorKind::InvalidHandle);
    assert_eq!((alive.load(Ordering::SeqCst), session.usage().handles), (0, 3));
    // Without waiting requests, at once.
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    release(object.handles());
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    // Behind a request that is given up, as soon as it is.
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    let held = session.submit(call(wait, vec![]).on(Lane(1))).reply();
    let given_up = session.submit(call(uses, vec![object.clone()])).reply();
    release(object.handles());
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    drop(given_up);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    gate.open(1);
    held.wait().unwrap();
}

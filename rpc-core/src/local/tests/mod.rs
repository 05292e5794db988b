//! Tests of local sessions beyond the conformance suite: threads, queues, and the time for which
//! objects are kept. This file holds what they share.

mod access_control;
mod admission;
mod device_gate;
mod lifetimes;
pub(super) mod models;
mod pipes;
mod streams;
mod thread_quota;
mod threads;

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Barrier, mpsc};
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::device::{AllocRequest, DeviceApi, DeviceAttribute, Memory, Stream, WhenDone};
use crate::dlpack::DeviceType;
use crate::error::Result;
use crate::function::context::{Context, ThreadPermit};
use crate::function::convert::Shared as SharedObject;
use crate::function::handler::Rest;
use crate::reply::{PendingReply, ReplySink};
use crate::session::Operation;
use crate::session::{Lane, RpcSession};
use crate::value::Reference;

const YEAR: Duration = Duration::from_secs(365 * 86400);

/// Time limit of each wait; long enough for every expected event.
const LIMIT: Duration = Duration::from_secs(20);

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Gate that holds calls until it is opened.
#[derive(Default)]
struct Gate {
    state: Mutex<(usize, usize)>,
    changed: parking_lot::Condvar,
}

impl Gate {
    /// Waits until one more call is let through.
    fn pass(&self) {
        let mut state = self.state.lock();
        state.0 += 1;
        self.changed.wait_while(&mut state, |(_, open)| *open == 0);
        state.1 -= 1;
    }

    fn waiting(&self) -> usize {
        self.state.lock().0
    }

    fn open(&self, count: usize) {
        self.state.lock().1 += count;
        self.changed.notify_all();
    }
}

fn handle(session: &LocalSession, name: &str) -> Handle {
    let get = Request::new(Operation::GetFunction { name: name.to_owned() });
    match session.submit(get).reply().wait().unwrap() {
        Value::Object(Reference::Function(handle)) => handle,
        other => panic!("{other:?}"),
    }
}

fn call(function: Handle, args: Vec<Value>) -> Request {
    Request::new(Operation::Call { function, args })
}

fn concurrent(function: Handle) -> Request {
    call(function, Vec::new()).on(Lane::CONCURRENT)
}

fn wait_all(replies: impl IntoIterator<Item = PendingReply>) {
    for reply in replies {
        reply.wait().unwrap();
    }
}

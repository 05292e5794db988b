//! Queue of events: the reports of a node's workers, until the controller or the node above fetches
//! them.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rpc_core::function::Object;
use rpc_core::{LocalValue, Result, Tensor, Value, blocking};

use crate::error::{Failure, WorkerId};
use crate::held_memory::{HeldMemory, STEP};
use crate::wire::event::{Event, EventSink, LocalContent};

/// Number of bytes of a tensor travel in one event.
const CHUNK: usize = 1 << 20;

/// Most events that travel together, and about the most bytes of them, if they are several.
const MAX_EVENTS: usize = 4096;
const MAX_TOGETHER: usize = 8 << 20;

/// Most bytes of tensors that wait to be fetched before their worker waits.
const MAX_WAITING: usize = 4 << 20;

/// Most bytes of other events before the nodes below have to wait. The events of workers themselves
/// are bounded by the commands that they get.
const MAX_OTHER: usize = 64 << 20;

/// Most lines of logs that wait to be fetched; more are dropped, and counted.
const MAX_LINES: usize = 4096;

/// Events that wait for the controller to fetch them. They are charged to its session; if that may
/// hold no more memory, there is no room for further ones until some have been fetched.
pub(crate) struct EventQueue {
    state: Mutex<Queue>,
}

struct Queue {
    events: VecDeque<Event>,
    tensor_bytes: usize,
    other_bytes: usize,
    lines: usize,
    line_bytes: usize,
    /// Lines that found no room, since the last one that did.
    lost_lines: u64,
    /// Charge of the bytes that wait.
    held: HeldMemory,
    /// True if the session may hold no more.
    is_full: bool,
    closed: bool,
    /// Task that fetches.
    waker: Option<Waker>,
    /// Tasks that wait for room.
    waiting: Vec<Waker>,
}

impl Queue {
    fn has_room(&self) -> bool {
        (self.tensor_bytes < MAX_WAITING && self.other_bytes < MAX_OTHER && !self.is_full) || self.closed
    }

    /// Charges the bytes that wait now.
    fn charge(&mut self) {
        self.is_full = self.charge_with(0).is_err();
    }

    /// Charges the bytes that wait now, and so many more.
    fn charge_with(&mut self, more: usize) -> Result<()> {
        let waiting = self.tensor_bytes + self.other_bytes + self.line_bytes + more;
        self.held.resize(waiting as u64)
    }
}

impl EventQueue {
    /// Makes an empty queue, whose events are charged to the session of `context`.
    pub(crate) fn new(context: rpc_core::Context) -> Self {
        Self {
            state: Mutex::new(Queue {
                events: VecDeque::new(),
                tensor_bytes: 0,
                other_bytes: 0,
                lines: 0,
                line_bytes: 0,
                lost_lines: 0,
                held: HeldMemory::new(context),
                is_full: false,
                closed: false,
                waker: None,
                waiting: Vec::new(),
            }),
        }
    }

    /// Returns the events since the last call, once there are any. An empty list is the end.
    pub(crate) async fn next(&self) -> Result<LocalValue> {
        let events = poll_fn(|cx| {
            let mut state = self.lock();
            if state.events.is_empty() && !state.closed {
                state.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            let mut bytes = 0;
            let fit = state.events.iter().take(MAX_EVENTS).take_while(|event| {
                let first = bytes == 0;
                bytes += event.size();
                first || bytes <= MAX_TOGETHER
            });
            let count = fit.count();
            let events: Vec<Event> = state.events.drain(..count).collect();
            for event in &events {
                match event {
                    Event::TensorBytes { bytes, .. } => state.tensor_bytes -= bytes.len(),
                    Event::Logged { .. } => {
                        state.lines -= 1;
                        state.line_bytes -= event.size();
                    }
                    other => state.other_bytes -= other.size(),
                }
            }
            state.charge();
            let waiting = if state.has_room() { std::mem::take(&mut state.waiting) } else { Vec::new() };
            drop(state);
            waiting.into_iter().for_each(Waker::wake);
            Poll::Ready(events)
        })
        .await;
        events.into_iter().map(Event::into_value).collect::<Result<_>>().map(Value::List)
    }

    /// Closes the queue: there is no fetching task any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let mut wakers = std::mem::take(&mut state.waiting);
        wakers.extend(state.waker.take());
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.state.lock()
    }
}

impl EventSink for EventQueue {
    fn send(&self, event: Event) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let mut event = event;
        match &mut event {
            Event::TensorBytes { bytes, .. } => state.tensor_bytes += bytes.len(),
            Event::Logged { .. } if state.lines >= MAX_LINES || state.is_full => {
                state.lost_lines += 1;
                return;
            }
            Event::Logged { line, .. } => {
                line.missing_before = std::mem::take(&mut state.lost_lines);
                state.lines += 1;
                state.line_bytes += event.size();
            }
            other => state.other_bytes += other.size(),
        }
        state.charge();
        // Of progress only the latest counts.
        if let (Event::Progress { worker, .. }, Some(Event::Progress { worker: last, .. })) =
            (&event, state.events.back())
            && worker == last
            && let Some(last) = state.events.pop_back()
        {
            state.other_bytes -= last.size();
        }
        state.events.push_back(event);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if state.has_room() {
            return Poll::Ready(());
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }

    fn send_content(&self, ticket: u64, content: std::result::Result<LocalValue, Failure>) {
        let value = match content {
            Ok(Value::Object(Object::Tensor(tensor))) => match self.send_tensor(ticket, &tensor) {
                Ok(()) => Ok(LocalContent::TensorComplete),
                // The register was read before, so that only memory can fail.
                Err(cause) => Err(Failure { worker: WorkerId(0), sequence: 0, command: "copy".to_owned(), cause }),
            },
            content => content.map(LocalContent::Value),
        };
        let event = Event::Fetched { ticket, value };
        // A value may be large. One that the session may not hold is not put here first.
        let refused = if event.size() as u64 > STEP { self.lock().charge_with(event.size()).err() } else { None };
        self.send(match refused {
            Some(cause) => {
                let failure = Failure { worker: WorkerId(0), sequence: 0, command: "copy".to_owned(), cause };
                Event::Fetched { ticket, value: Err(failure) }
            }
            None => event,
        });
    }
}

impl EventQueue {
    fn send_tensor(&self, ticket: u64, tensor: &Tensor) -> Result<()> {
        let view = tensor.read()?;
        let range = tensor.byte_range(0, tensor.size_bytes())?;
        self.send(Event::TensorBegins { ticket, dtype: tensor.dtype(), shape: tensor.shape().to_vec() });
        let len = range.end - range.start;
        for offset in (0..len).step_by(CHUNK) {
            // A worker has a thread of its own, which may wait.
            blocking::block_on(poll_fn(|cx| self.poll_room(cx)))?;
            let (start, size) = (range.start + offset, (len - offset).min(CHUNK as u64) as usize);
            let bytes = match view.guard().bytes() {
                Some(bytes) => Bytes::copy_from_slice(&bytes[start as usize..][..size]),
                None => {
                    let mut bytes = vec![0; size];
                    view.guard().copy_out(start, &mut bytes)?;
                    bytes.into()
                }
            };
            self.send(Event::TensorBytes { ticket, offset, bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::held_memory::tests::context;
    use crate::wire::event::{LogLine, decode_events};

    #[test]
    fn lines_that_find_no_room_are_counted() {
        let queue = EventQueue::new(context(u64::MAX));
        let line = LogLine { level: 0, target: String::new(), text: String::new(), missing_before: 0 };
        let log = || queue.send(Event::Logged { worker: WorkerId(0), line: line.clone() });
        (0..MAX_LINES + 3).for_each(|_| log());
        rpc_core::blocking::block_on(queue.next()).unwrap().unwrap();
        log();
        let last = rpc_core::blocking::block_on(queue.next()).unwrap().unwrap();
        let value = last.try_map(&mut |_| Err::<rpc_core::Reference, _>(())).unwrap();
        let [Event::Logged { line, .. }] = &decode_events(value).unwrap()[..] else { panic!() };
        assert_eq!(line.missing_before, 3);
    }

    #[test]
    fn events_are_charged_and_there_is_no_room_for_more_than_the_session_may_hold() {
        let context = context(2 * STEP);
        let queue = EventQueue::new(context.clone());
        let failure = Failure {
            worker: WorkerId(0),
            sequence: 1,
            command: "x".repeat(1000),
            cause: rpc_core::RpcError::internal("y"),
        };
        let has_room = || queue.poll_room(&mut std::task::Context::from_waker(Waker::noop())).is_ready();
        let sent = (0..1000).take_while(|_| has_room()).inspect(|_| queue.send(Event::Failed(failure.clone()))).count();
        assert!(sent as u64 * 1000 < 3 * STEP, "{sent}");
        assert_eq!(context.usage().memory_bytes, 2 * STEP);
        rpc_core::blocking::block_on(queue.next()).unwrap().unwrap();
        assert!(has_room());
        assert_eq!(context.usage().memory_bytes, 0);
    }

    #[test]
    fn progress_is_told_once() {
        let queue = EventQueue::new(context(u64::MAX));
        for sequence in 1..=3 {
            queue.send(Event::Progress { worker: WorkerId(0), sequence, cost: sequence });
        }
        let Value::List(events) = rpc_core::blocking::block_on(queue.next()).unwrap().unwrap() else { panic!() };
        assert_eq!(events.len(), 1);
        queue.close();
        let Value::List(events) = rpc_core::blocking::block_on(queue.next()).unwrap().unwrap() else { panic!() };
        assert!(events.is_empty());
    }
}

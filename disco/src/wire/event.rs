//! Events: reports of workers to the controller, and their form as values on a link.

use std::task::{Context, Poll};

use bytes::Bytes;
use rpc_core::{DataType, ErrorKind, LocalValue, Packed, Result, RpcError, Value};
use serde::{Deserialize, Serialize};

use crate::error::{Failure, WorkerId};

/// Something that has happened on a worker. Those of one worker arrive in their order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// The worker has executed all up to here, which took so much credit in all.
    Progress { worker: WorkerId, sequence: u64, cost: u64 },
    /// The worker has come to a command that a caller waits for.
    Reached { ticket: u64 },
    /// The value that a ticket waits for, or why there is none.
    Fetched { ticket: u64, value: std::result::Result<LocalContent, Failure> },
    /// The value that a ticket waits for is a tensor, whose bytes follow.
    TensorBegins { ticket: u64, dtype: DataType, shape: Vec<i64> },
    /// The next bytes of the tensor.
    TensorBytes { ticket: u64, offset: u64, bytes: Bytes },
    /// A command has failed.
    Failed(Failure),
    /// A line of a worker's log.
    Logged { worker: WorkerId, line: LogLine },
    /// The worker executes nothing any more.
    Lost { worker: WorkerId, error: RpcError },
    /// The worker has found a communicator broken, or could not make it.
    CclBroken { worker: WorkerId, report: Report },
    /// More bytes of weights have come to the worker, for a loader that reports progress.
    Loaded { worker: WorkerId, loader: u64, bytes: u64 },
}

impl Event {
    /// Returns the worker that the event names, if it names one.
    pub(crate) fn worker(&self) -> Option<WorkerId> {
        match self {
            Self::Progress { worker, .. }
            | Self::Logged { worker, .. }
            | Self::Lost { worker, .. }
            | Self::CclBroken { worker, .. }
            | Self::Loaded { worker, .. } => Some(*worker),
            Self::Failed(failure) => Some(failure.worker),
            Self::Reached { .. } | Self::Fetched { .. } | Self::TensorBegins { .. } | Self::TensorBytes { .. } => None,
        }
    }

    /// Returns about the number of bytes that the event takes on its way.
    pub(crate) fn size(&self) -> usize {
        64 + match self {
            Self::TensorBytes { bytes, .. } => bytes.len(),
            Self::Logged { line, .. } => line.target.len() + line.text.len(),
            Self::Failed(failure) | Self::Fetched { value: Err(failure), .. } => failure.size(),
            Self::Fetched { value: Ok(LocalContent::Value(value)), .. } => value.size_with(&|_| 0),
            Self::Lost { error, .. } => size_of_error(error),
            Self::CclBroken { report, .. } => size_of_error(&report.cause),
            _ => 0,
        }
    }
}

/// Returns the bytes of all texts of an error: nodes decide how long each is.
fn size_of_error(error: &RpcError) -> usize {
    let texts = [error.backtrace(), error.application_kind(), error.peer()];
    error.message().len() + texts.into_iter().flatten().map(str::len).sum::<usize>()
}

impl Failure {
    /// Returns about the number of bytes that the failure takes in memory.
    pub(crate) fn size(&self) -> usize {
        size_of::<Self>() + self.command.len() + size_of_error(&self.cause)
    }
}

/// Report of a worker that found a communicator broken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) epoch: u64,
    pub(crate) culprit: Option<WorkerId>,
    pub(crate) cause: RpcError,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LogLine {
    /// From 0, an error, to 4, a trace.
    pub(crate) level: u8,
    pub(crate) target: String,
    pub(crate) text: String,
    /// Number of lines before this one that were dropped because too many waited.
    pub(crate) missing_before: u64,
}

/// The content of a register at the controller.
#[derive(Clone, Debug)]
pub(crate) enum LocalContent {
    Value(LocalValue),
    /// The tensor whose bytes have come.
    TensorComplete,
}

impl PartialEq for LocalContent {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            // Of objects only tensors are ever sent, and those in another way.
            (Self::Value(a), Self::Value(b)) => format!("{a:?}") == format!("{b:?}"),
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }
}

impl Event {
    pub(crate) fn into_value(self) -> Result<LocalValue> {
        let number = |number: u64| Value::Int(number as i64);
        Ok(Value::List(match self {
            Self::Progress { worker, sequence, cost } => {
                vec![Value::Int(0), worker.0.into(), number(sequence), number(cost)]
            }
            Self::Reached { ticket } => vec![Value::Int(1), number(ticket)],
            Self::Fetched { ticket, value: Ok(LocalContent::Value(value)) } => {
                vec![Value::Int(2), number(ticket), value]
            }
            Self::TensorBegins { ticket, dtype, shape } => {
                vec![Value::Int(3), number(ticket), dtype.into(), Value::Shape(shape)]
            }
            Self::TensorBytes { ticket, offset, bytes } => {
                vec![Value::Int(4), number(ticket), number(offset), bytes.into()]
            }
            Self::Fetched { ticket, value: Ok(LocalContent::TensorComplete) } => vec![Value::Int(5), number(ticket)],
            Self::Fetched { ticket, value: Err(failure) } => {
                vec![Value::Int(6), number(ticket), Packed::encode(&failure)?.into()]
            }
            Self::Failed(failure) => vec![Value::Int(7), Packed::encode(&failure)?.into()],
            Self::Lost { worker, error } => vec![Value::Int(8), worker.0.into(), Packed::encode(&error)?.into()],
            Self::Logged { worker, line } => vec![Value::Int(9), worker.0.into(), Packed::encode(&line)?.into()],
            Self::CclBroken { worker, report } => {
                vec![Value::Int(10), worker.0.into(), Packed::encode(&report)?.into()]
            }
            Self::Loaded { worker, loader, bytes } => {
                vec![Value::Int(11), worker.0.into(), number(loader), number(bytes)]
            }
        }))
    }

    fn from_value(value: Value) -> Result<Self> {
        let Value::List(fields) = value else { return Err(malformed()) };
        let mut fields = fields.into_iter();
        let number = |value: Option<Value>| match value {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| malformed()),
            _ => Err(malformed()),
        };
        let worker = |number: u64| u32::try_from(number).map(WorkerId).map_err(|_| malformed());
        let packed = |value: Option<Value>| match value {
            Some(Value::Packed(packed)) => Ok(packed),
            _ => Err(malformed()),
        };
        Ok(match number(fields.next())? {
            0 => Self::Progress {
                worker: worker(number(fields.next())?)?,
                sequence: number(fields.next())?,
                cost: number(fields.next())?,
            },
            1 => Self::Reached { ticket: number(fields.next())? },
            2 => {
                let ticket = number(fields.next())?;
                let value = fields.next().ok_or_else(malformed)?.try_map(&mut |_| Err(malformed()))?;
                Self::Fetched { ticket, value: Ok(LocalContent::Value(value)) }
            }
            3 => {
                let ticket = number(fields.next())?;
                match (fields.next(), fields.next()) {
                    (Some(Value::DataType(dtype)), Some(Value::Shape(shape))) => {
                        Self::TensorBegins { ticket, dtype, shape }
                    }
                    _ => return Err(malformed()),
                }
            }
            4 => {
                let (ticket, offset) = (number(fields.next())?, number(fields.next())?);
                let Some(Value::Bytes(bytes)) = fields.next() else { return Err(malformed()) };
                Self::TensorBytes { ticket, offset, bytes }
            }
            5 => Self::Fetched { ticket: number(fields.next())?, value: Ok(LocalContent::TensorComplete) },
            6 => {
                let ticket = number(fields.next())?;
                Self::Fetched { ticket, value: Err(packed(fields.next())?.decode()?) }
            }
            7 => Self::Failed(packed(fields.next())?.decode()?),
            8 => {
                let worker = worker(number(fields.next())?)?;
                Self::Lost { worker, error: packed(fields.next())?.decode()? }
            }
            9 => {
                let worker = worker(number(fields.next())?)?;
                Self::Logged { worker, line: packed(fields.next())?.decode()? }
            }
            10 => {
                let worker = worker(number(fields.next())?)?;
                Self::CclBroken { worker, report: packed(fields.next())?.decode()? }
            }
            11 => Self::Loaded {
                worker: worker(number(fields.next())?)?,
                loader: number(fields.next())?,
                bytes: number(fields.next())?,
            },
            _ => return Err(malformed()),
        })
    }
}

fn malformed() -> RpcError {
    RpcError::new(ErrorKind::Protocol, "a malformed event")
}

/// Reads the reply of `disco.events`.
pub(crate) fn decode_events(value: Value) -> Result<Vec<Event>> {
    let Value::List(events) = value else { return Err(malformed()) };
    events.into_iter().map(Event::from_value).collect()
}

/// Receiver of the events of a host's workers.
pub(crate) trait EventSink: Send + Sync {
    /// Passes the event on. Never waits.
    fn send(&self, event: Event);

    /// Returns ready once there is room for more. The task is woken then.
    fn poll_room(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }

    /// Passes on what a register holds.
    fn send_content(&self, ticket: u64, content: std::result::Result<LocalValue, Failure>);
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns one event of each kind, and more where a kind has several forms.
    pub(crate) fn all() -> Vec<Event> {
        let failure = Failure {
            worker: WorkerId(3),
            sequence: 1 << 40,
            command: "f".to_owned(),
            cause: RpcError::new(ErrorKind::Application, "no").with_application_kind("E").with_backtrace("b"),
        };
        vec![
            Event::Progress { worker: WorkerId(1), sequence: 2, cost: 3 },
            Event::Reached { ticket: 4 },
            Event::Fetched { ticket: 5, value: Ok(LocalContent::Value(Value::List(vec![Value::Float(0.5)]))) },
            Event::Fetched { ticket: 5, value: Ok(LocalContent::TensorComplete) },
            Event::Fetched { ticket: 5, value: Err(failure.clone()) },
            Event::TensorBegins { ticket: 6, dtype: DataType::BF16, shape: vec![1, 2] },
            Event::TensorBytes { ticket: 6, offset: 1 << 33, bytes: Bytes::from_static(b"abc") },
            Event::Failed(failure),
            Event::Lost { worker: WorkerId(0), error: RpcError::internal("gone") },
            Event::Logged {
                worker: WorkerId(2),
                line: LogLine { level: 1, target: "t".to_owned(), text: "x=1".to_owned(), missing_before: 7 },
            },
            Event::CclBroken {
                worker: WorkerId(4),
                report: Report { epoch: 1 << 33, culprit: Some(WorkerId(5)), cause: RpcError::internal("broken") },
            },
            Event::Loaded { worker: WorkerId(3), loader: 2, bytes: 1 << 40 },
            Event::CclBroken {
                worker: WorkerId(4),
                report: Report { epoch: 0, culprit: None, cause: RpcError::internal("broken") },
            },
        ]
    }

    /// Regression: the name of the error and the peer were not counted.
    #[test]
    fn every_text_of_an_error_counts_for_the_size_of_its_event() {
        let text = "x".repeat(1000);
        let error = || RpcError::new(ErrorKind::Application, "");
        let long = [
            RpcError::new(ErrorKind::Application, text.clone()),
            error().with_backtrace(&text),
            error().with_application_kind(&text),
            error().with_peer(&text),
        ];
        for cause in long {
            let worker = WorkerId(0);
            let failure = Failure { worker, sequence: 1, command: String::new(), cause: cause.clone() };
            let report = Report { epoch: 0, culprit: None, cause: cause.clone() };
            let events = [
                Event::Failed(failure.clone()),
                Event::Fetched { ticket: 1, value: Err(failure) },
                Event::CclBroken { worker, report },
                Event::Lost { worker, error: cause },
            ];
            assert!(events.iter().all(|event| event.size() >= text.len()), "{events:?}");
        }
    }

    #[test]
    fn events_survive_the_link() {
        for event in all() {
            let value = event.clone().into_value().unwrap();
            let value = value.try_map(&mut |_| Err::<rpc_core::Reference, _>(())).unwrap();
            assert_eq!(Event::from_value(value).unwrap(), event);
        }
        Event::from_value(Value::List(vec![Value::Int(99)])).unwrap_err();
    }
}

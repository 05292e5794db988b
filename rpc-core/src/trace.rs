//! Trace context: which span of a distributed trace a request belongs to.
//!
//! A request carries the context of whoever made it over every hop, unchanged, and the function that it calls finds it in
//! [`Context::trace`](crate::Context::trace). This crate makes no spans. It takes the context of requests from, in this
//! order:
//!
//! 1. [`Action::trace`](crate::Action::trace), where the caller names one;
//! 2. the [source](set_source) of the program, which asks whatever library the program traces with;
//! 3. the request that is being served, if it is a function that calls: on the thread of the function, or where its future
//!    is polled. Threads and tasks that the function starts do not count, and name the context themselves.
//!
//! A program that uses none of these pays for one load of an atomic variable with each request.
//!
//! ```
//! use rpc_core::trace::TraceContext;
//! use rpc_core::{Context, LocalSession, Registry, Session};
//!
//! let registry = Registry::new();
//! registry.add("trace_of", |context: Context| context.trace().map(|trace| trace.to_string()));
//! let session = Session::new(LocalSession::new(registry));
//! let trace: TraceContext = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse()?;
//! let function = session.get_function("trace_of").wait()?;
//! let seen = function.call::<Option<String>>(()).trace(trace).wait()?;
//! assert_eq!(seen, Some(trace.to_string()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::cell::Cell;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A span of a trace, as W3C Trace Context names it. Its text is that of a `traceparent` header.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Not all zero.
    trace_id: [u8; 16],
    /// Not all zero.
    span_id: [u8; 8],
    flags: u8,
}

/// The flag that says that the span is recorded.
const SAMPLED: u8 = 1;

impl TraceContext {
    /// How many bytes [`to_bytes`](Self::to_bytes) gives.
    pub const LEN: usize = 25;

    /// The span `span_id` of the trace `trace_id`. `None` if one of them is all zero, which stands for no id.
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], flags: u8) -> Option<Self> {
        (trace_id != [0; 16] && span_id != [0; 8]).then_some(Self { trace_id, span_id, flags })
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `None` if an id is all zero.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Option<Self> {
        let (mut trace_id, mut span_id) = ([0; 16], [0; 8]);
        trace_id.copy_from_slice(&bytes[..16]);
        span_id.copy_from_slice(&bytes[16..24]);
        Self::new(trace_id, span_id, bytes[24])
    }

    /// The trace id, the span id and the flags, one behind the other: the form on the wire.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&self.trace_id);
        bytes[16..24].copy_from_slice(&self.span_id);
        bytes[24] = self.flags;
        bytes
    }

    /// What all spans of the trace have in common.
    pub fn trace_id(self) -> [u8; 16] {
        self.trace_id
    }

    /// The span.
    pub fn span_id(self) -> [u8; 8] {
        self.span_id
    }

    /// All flags. Those that are not known pass as they are.
    pub fn flags(self) -> u8 {
        self.flags
    }

    /// Whether whoever made the span records it, so that those behind it should, too.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace_id, span_id) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        write!(f, "00-{trace_id:032x}-{span_id:016x}-{:02x}", self.flags)
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceContext({self})")
    }
}

/// A text that is no `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a trace context: expected 00-TRACE-SPAN-FLAGS with 32, 16 and 2 lower-case hexadecimal digits, and ids not all zero"
)]
pub struct TraceContextError;

impl FromStr for TraceContext {
    type Err = TraceContextError;

    /// Reads a `traceparent`. Of a version that is not known the fields of version 00 are read, as W3C Trace Context asks.
    fn from_str(text: &str) -> Result<Self, TraceContextError> {
        let mut fields = text.split('-');
        let mut field = || fields.next().ok_or(TraceContextError);
        let version = hex::<1>(field()?)?;
        let (trace_id, span_id, flags) = (hex(field()?)?, hex(field()?)?, hex::<1>(field()?)?);
        let more = fields.next().is_some();
        match version {
            [0xff] => Err(TraceContextError),
            [0] if more => Err(TraceContextError),
            _ => Self::new(trace_id, span_id, flags[0]).ok_or(TraceContextError),
        }
    }
}

fn hex<const N: usize>(text: &str) -> Result<[u8; N], TraceContextError> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return Err(TraceContextError);
    }
    let mut bytes = [0; N];
    for (at, digit) in digits.iter().enumerate() {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return Err(TraceContextError),
        };
        bytes[at / 2] = bytes[at / 2] << 4 | digit;
    }
    Ok(bytes)
}

/// Gives this process's requests a trace context where they name none: `source` is asked on the thread that makes a
/// request, and should be quick. What is set first stays; whether it was this.
pub fn set_source(source: fn() -> Option<TraceContext>) -> bool {
    let set = SOURCE.set(source).is_ok();
    ON.store(true, Ordering::Release);
    set
}

/// The context that a request made here and now would have.
pub fn current() -> Option<TraceContext> {
    if !ON.load(Ordering::Acquire) {
        return None;
    }
    SOURCE.get().and_then(|source| source()).or_else(|| SERVED.get())
}

static SOURCE: OnceLock<fn() -> Option<TraceContext>> = OnceLock::new();

/// Whether there is anything to ask: a source, or a traced request that this process has served.
static ON: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The context of the request whose function runs on this thread.
    static SERVED: Cell<Option<TraceContext>> = const { Cell::new(None) };
}

/// Says that a function runs on this thread for a request with this context, until the guard is dropped.
pub(crate) fn serve(trace: Option<TraceContext>) -> Served {
    if trace.is_some() {
        ON.store(true, Ordering::Release);
    } else if !ON.load(Ordering::Relaxed) {
        // Then no function on this thread has a context.
        return Served { outer: None };
    }
    Served { outer: SERVED.replace(trace) }
}

/// Puts back the context of the function further out, which called this one.
pub(crate) struct Served {
    outer: Option<TraceContext>,
}

impl Drop for Served {
    fn drop(&mut self) {
        if ON.load(Ordering::Relaxed) {
            SERVED.set(self.outer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn text_and_bytes_read_back_as_the_same_context() {
        let trace: TraceContext = TEXT.parse().unwrap();
        assert_eq!((trace.trace_id()[0], trace.span_id()[7], trace.flags()), (0x0a, 0x31, 1));
        assert!(trace.is_sampled());
        assert_eq!(trace.to_string(), TEXT);
        assert_eq!(TraceContext::from_bytes(trace.to_bytes()), Some(trace));
        assert_eq!(TraceContext::new(trace.trace_id(), trace.span_id(), 1), Some(trace));
        let later = format!("01{}-more", &TEXT[2..]);
        assert_eq!(later.parse(), Ok(trace));
    }

    #[test]
    fn what_is_no_trace_context_is_refused() {
        let zero_trace = format!("00-{:032}-b7ad6b7169203331-01", 0);
        let zero_span = format!("00-0af7651916cd43dd8448eb211c80319c-{:016}-01", 0);
        let upper = TEXT.to_uppercase();
        let (unknown, more, signed) = (TEXT.replacen("00", "ff", 1), format!("{TEXT}-x"), TEXT.replacen("00", "+0", 1));
        for text in ["", "00", &TEXT[..54], &TEXT[1..], &zero_trace, &zero_span, &upper, &unknown, &more, &signed] {
            assert_eq!(text.parse::<TraceContext>(), Err(TraceContextError), "{text}");
        }
        assert_eq!(TraceContext::new([0; 16], [1; 8], 1), None);
        assert_eq!(TraceContext::new([1; 16], [0; 8], 1), None);
        assert_eq!(TraceContext::from_bytes([0; 25]), None);
    }

    #[test]
    fn a_function_that_calls_another_hides_its_context_for_that_time() {
        let (outer, inner) = (TraceContext::new([1; 16], [1; 8], 0), TraceContext::new([1; 16], [2; 8], 0));
        let serving = serve(outer);
        assert_eq!(current(), outer);
        {
            let _nested = serve(inner);
            assert_eq!(current(), inner);
            let _untraced = serve(None);
            assert_eq!(current(), None);
        }
        assert_eq!(current(), outer);
        drop(serving);
        assert_eq!(current(), None);
    }
}

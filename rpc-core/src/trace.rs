//! Trace context: the span of a distributed trace that a request belongs to.
//!
//! A request carries the caller's context over every hop, unchanged, and the function that it calls
//! gets it from [`Context::trace`](crate::Context::trace). This crate creates no spans. It takes
//! the context of a request from the first of these that has one:
//!
//! 1. [`Action::trace`](crate::Action::trace), set by the caller;
//! 2. the program's [source](set_source), which asks the program's tracing library;
//! 3. the request that is being served, if a served function makes the call: on the thread of the
//!    function, or where its future is polled. Threads and tasks that the function starts do not
//!    inherit it, and must name the context themselves.
//!
//! A program that uses none of these pays for one load of an atomic variable per request.
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

/// A span of a trace, in W3C Trace Context's terms. Its text form is that of a `traceparent`
/// header.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// Not all zero.
    trace_id: [u8; 16],
    /// Not all zero.
    span_id: [u8; 8],
    flags: u8,
}

/// Flag of a span that is recorded.
const SAMPLED: u8 = 1;

impl TraceContext {
    /// Length of the output of [`to_bytes`](Self::to_bytes).
    pub const LEN: usize = 25;

    /// Returns the span `span_id` of the trace `trace_id`. `None` if one of them is all zero, which
    /// means no id.
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], flags: u8) -> Option<Self> {
        (trace_id != [0; 16] && span_id != [0; 8]).then_some(Self { trace_id, span_id, flags })
    }

    /// Decodes the output of [`to_bytes`](Self::to_bytes). `None` if an id is all zero.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Option<Self> {
        let (mut trace_id, mut span_id) = ([0; 16], [0; 8]);
        trace_id.copy_from_slice(&bytes[..16]);
        span_id.copy_from_slice(&bytes[16..24]);
        Self::new(trace_id, span_id, bytes[24])
    }

    /// Encodes the trace id, the span id and the flags, in this order: the form on the wire.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&self.trace_id);
        bytes[16..24].copy_from_slice(&self.span_id);
        bytes[24] = self.flags;
        bytes
    }

    /// Returns the id that all spans of the trace share.
    pub fn trace_id(self) -> [u8; 16] {
        self.trace_id
    }

    /// Returns the id of the span.
    pub fn span_id(self) -> [u8; 8] {
        self.span_id
    }

    /// Returns all flags. Unknown flags are passed on unchanged.
    pub fn flags(self) -> u8 {
        self.flags
    }

    /// Returns true if the caller records the span, so that the spans below it should be recorded,
    /// too.
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

/// Error for a text that is no `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a trace context: expected 00-TRACE-SPAN-FLAGS with 32, 16 and 2 lower-case hexadecimal digits, \
     and ids not all zero"
)]
pub struct TraceContextError;

impl FromStr for TraceContext {
    type Err = TraceContextError;

    /// Parses a `traceparent`. Unknown versions are parsed like version 00, as W3C Trace Context
    /// asks.
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

/// Sets the source of this process's trace context, for requests that name none. `source` is called
/// on the thread that makes a request, and should be fast. The first source stays; returns true if
/// this call set it.
pub fn set_source(source: fn() -> Option<TraceContext>) -> bool {
    let set = SOURCE.set(source).is_ok();
    ON.store(true, Ordering::Release);
    set
}

/// Returns the context that a request made on this thread would get now.
pub fn current() -> Option<TraceContext> {
    if !ON.load(Ordering::Acquire) {
        return None;
    }
    SOURCE.get().and_then(|source| source()).or_else(|| SERVED.get())
}

static SOURCE: OnceLock<fn() -> Option<TraceContext>> = OnceLock::new();

/// True if there is a source, or this process has served a traced request.
static ON: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Context of the request whose function runs on this thread.
    static SERVED: Cell<Option<TraceContext>> = const { Cell::new(None) };
}

/// Records that a function runs on this thread for a request with this context, until the guard is
/// dropped.
pub(crate) fn serve(trace: Option<TraceContext>) -> ServedGuard {
    if trace.is_some() {
        ON.store(true, Ordering::Release);
    } else if !ON.load(Ordering::Relaxed) {
        // In this case no function on this thread has a context.
        return ServedGuard { outer: None };
    }
    ServedGuard { outer: SERVED.replace(trace) }
}

/// Guard that restores the context of the outer function, which called this one.
pub(crate) struct ServedGuard {
    outer: Option<TraceContext>,
}

impl Drop for ServedGuard {
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
    fn malformed_trace_contexts_are_refused() {
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
    fn a_nested_function_has_its_own_context_until_it_returns() {
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

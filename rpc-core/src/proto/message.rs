//! Messages: the encoding of requests and replies as body and payload.
//!
//! A request's body is an array of three: the operation's number, nil or a map of extras, and an
//! array of the operation's fields in the order below. A receiver skips extras that it does not
//! know. Extra `d` is the time left until the deadline, in microseconds. Extra `p` is the handle
//! under which the session keeps the result. A request made in a span has a fourth element, a `bin`
//! of 25 bytes: trace id (16), span id (8) and flags (1) of W3C Trace Context. The ids are not all
//! zero.
//!
//! | number | operation | fields |
//! | --- | --- | --- |
//! | 1 | get function | name |
//! | 2 | call | function, arguments |
//! | 3 | alloc | device, dtype, shape, scope or nil |
//! | 4 | write | tensor, offset, bytes |
//! | 5 | read | tensor, offset, length |
//! | 6 | copy | tensor from, tensor to |
//! | 7 | free | handle |
//! | 8 | attribute | device, number |
//! | 9 | create stream | device |
//! | 10 | set stream | device, stream or nil |
//! | 11 | stream wait | device, stream or nil |
//! | 12 | load module | path, loader or nil |
//! | 13 | module function | module, name |
//! | 14 | stream wait for | device, stream or nil, device of the other, other stream or nil |
//! | 15 | alloc aligned | device, dtype, shape, scope or nil, alignment |
//! | 16 | fetch | handle |
//!
//! An allocation whose alignment is zero is sent as operation 3, which every peer knows.
//!
//! A reply's body is one value. An error's body is a map, see [`RpcError`].

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::codec::{CodecError, Reader, Writer};
use crate::device::DeviceAttribute;
use crate::error::{ErrorKind, RpcError};
use crate::handle::PipeId;
use crate::session::{Lane, Operation, Request};
use crate::trace::TraceContext;
use crate::value::Value;

/// Encodes a request as body and payload. Operations that are no requests on the wire (release,
/// shutdown) give empty ones.
pub fn encode_request(request: &Request, now: Instant) -> (Vec<u8>, Vec<Bytes>) {
    let writer = write_request(request, now, Vec::with_capacity(48));
    (writer.body, writer.payload)
}

/// Encodes a request like [`encode_request`], with the memory of `body` for its body.
pub(super) fn write_request(request: &Request, now: Instant, body: Vec<u8>) -> Writer {
    let mut writer = Writer::into_body(body);
    let begin = |writer: &mut Writer, number: u64, fields: usize| {
        writer.array(if request.trace.is_some() { 4 } else { 3 });
        writer.uint(number);
        match usize::from(request.deadline.is_some()) + usize::from(request.pipe.is_some()) {
            0 => writer.nil(),
            extras => writer.map(extras),
        }
        if let Some(deadline) = request.deadline {
            let left = deadline.saturating_duration_since(now).as_micros();
            writer.str("d");
            writer.uint(u64::try_from(left).unwrap_or(u64::MAX));
        }
        if let Some(pipe) = request.pipe {
            writer.str("p");
            writer.handle(pipe.handle());
            writer.has_pipes = true;
        }
        writer.array(fields);
    };
    match &request.operation {
        Operation::GetFunction { name } => {
            begin(&mut writer, 1, 1);
            writer.str(name);
        }
        Operation::Call { function, args } => {
            begin(&mut writer, 2, 2);
            writer.handle(*function);
            writer.args(args);
        }
        Operation::Alloc { device, dtype, shape, scope, alignment } => {
            let aligned = *alignment != 0;
            if aligned {
                begin(&mut writer, 15, 5)
            } else {
                begin(&mut writer, 3, 4)
            }
            writer.device(*device);
            writer.dtype(*dtype);
            writer.shape(shape);
            optional(&mut writer, scope.as_deref(), Writer::str);
            if aligned {
                writer.uint(*alignment);
            }
        }
        Operation::Write { to, offset, data } => {
            begin(&mut writer, 4, 3);
            writer.tensor(to);
            writer.uint(*offset);
            writer.bytes(data);
        }
        Operation::Read { from, offset, len, into: _ } => {
            begin(&mut writer, 5, 3);
            writer.tensor(from);
            writer.uint(*offset);
            writer.uint(*len);
        }
        Operation::Copy { from, to } => {
            begin(&mut writer, 6, 2);
            writer.tensor(from);
            writer.tensor(to);
        }
        Operation::Free { handle } => {
            begin(&mut writer, 7, 1);
            writer.handle(*handle);
        }
        Operation::Attribute { device, attribute } => {
            begin(&mut writer, 8, 2);
            writer.device(*device);
            writer.uint(attribute.code().into());
        }
        Operation::CreateStream { device } => {
            begin(&mut writer, 9, 1);
            writer.device(*device);
        }
        Operation::SetStream { device, stream } => {
            begin(&mut writer, 10, 2);
            writer.device(*device);
            optional(&mut writer, *stream, Writer::handle);
        }
        Operation::StreamWait { device, stream } => {
            begin(&mut writer, 11, 2);
            writer.device(*device);
            optional(&mut writer, *stream, Writer::handle);
        }
        Operation::StreamWaitFor { device, stream, other_device, other } => {
            begin(&mut writer, 14, 4);
            for (device, stream) in [(device, stream), (other_device, other)] {
                writer.device(*device);
                optional(&mut writer, *stream, Writer::handle);
            }
        }
        Operation::LoadModule { path, loader } => {
            begin(&mut writer, 12, 2);
            writer.str(path);
            optional(&mut writer, loader.as_deref(), Writer::str);
        }
        Operation::ModuleFunction { module, name } => {
            begin(&mut writer, 13, 2);
            writer.handle(*module);
            writer.str(name);
        }
        Operation::Fetch { handle } => {
            begin(&mut writer, 16, 1);
            writer.handle(*handle);
            writer.has_pipes = true;
        }
        Operation::Release { .. } | Operation::Shutdown => return writer,
    }
    if let Some(trace) = request.trace {
        writer.bin(trace.to_bytes());
    }
    writer
}

fn optional<T>(writer: &mut Writer, value: Option<T>, write: impl FnOnce(&mut Writer, T)) {
    match value {
        Some(value) => write(writer, value),
        None => writer.nil(),
    }
}

fn optionally<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, CodecError>,
) -> Result<Option<T>, CodecError> {
    if reader.nil()? { Ok(None) } else { read(reader).map(Some) }
}

/// Decodes the output of [`encode_request`].
///
/// # Errors
///
/// Malformed input. Never reserves more memory than the input's own size.
pub fn decode_request(lane: Lane, body: &[u8], payload: Bytes, now: Instant) -> Result<Request, CodecError> {
    read_request(lane, body, payload, now).map(|(request, _)| request)
}

/// Decodes a request like [`decode_request`], and also returns the number of values in it.
pub(super) fn read_request(
    lane: Lane,
    body: &[u8],
    payload: Bytes,
    now: Instant,
) -> Result<(Request, usize), CodecError> {
    let mut reader = Reader::new(body, payload);
    let Head { number, deadline, pipe, traced } = read_head(&mut reader, now)?;
    reader.values = 0;
    let fields = reader.array()?;
    let expect = |count: usize| if fields == count { Ok(()) } else { Err(CodecError::OutOfRange) };
    let operation = match number {
        1 => {
            expect(1)?;
            Operation::GetFunction { name: reader.str()? }
        }
        2 => {
            expect(2)?;
            let function = reader.handle()?;
            let count = reader.array()?;
            // Not `with_capacity(count)`, because the peer chose `count`: the vector grows with the
            // values that are there.
            let args = (0..count).map(|_| reader.value(1)).collect::<Result<_, _>>()?;
            Operation::Call { function, args }
        }
        3 | 15 => {
            let aligned = number == 15;
            expect(if aligned { 5 } else { 4 })?;
            let (device, dtype, shape) = (reader.device()?, reader.dtype()?, reader.shape()?);
            let scope = optionally(&mut reader, Reader::str)?;
            Operation::Alloc { device, dtype, shape, scope, alignment: if aligned { reader.uint()? } else { 0 } }
        }
        4 => {
            expect(3)?;
            Operation::Write { to: reader.tensor()?.into(), offset: reader.uint()?, data: reader.bytes()? }
        }
        5 => {
            expect(3)?;
            let (from, offset) = (reader.tensor()?, reader.uint()?);
            Operation::Read { from: from.into(), offset, len: reader.uint()?, into: None }
        }
        6 => {
            expect(2)?;
            Operation::Copy { from: reader.tensor()?.into(), to: reader.tensor()?.into() }
        }
        7 => {
            expect(1)?;
            Operation::Free { handle: reader.handle()? }
        }
        8 => {
            expect(2)?;
            let (device, number) = (reader.device()?, reader.uint()?);
            let attribute = u16::try_from(number).ok().and_then(DeviceAttribute::from_code);
            Operation::Attribute { device, attribute: attribute.ok_or(CodecError::UnknownAttribute(number))? }
        }
        9 => {
            expect(1)?;
            Operation::CreateStream { device: reader.device()? }
        }
        10 => {
            expect(2)?;
            Operation::SetStream { device: reader.device()?, stream: optionally(&mut reader, Reader::handle)? }
        }
        11 => {
            expect(2)?;
            Operation::StreamWait { device: reader.device()?, stream: optionally(&mut reader, Reader::handle)? }
        }
        12 => {
            expect(2)?;
            Operation::LoadModule { path: reader.str()?, loader: optionally(&mut reader, Reader::str)? }
        }
        13 => {
            expect(2)?;
            Operation::ModuleFunction { module: reader.handle()?, name: reader.str()? }
        }
        14 => {
            expect(4)?;
            let (device, stream) = (reader.device()?, optionally(&mut reader, Reader::handle)?);
            let (other_device, other) = (reader.device()?, optionally(&mut reader, Reader::handle)?);
            Operation::StreamWaitFor { device, stream, other_device, other }
        }
        16 => {
            expect(1)?;
            Operation::Fetch { handle: reader.handle()? }
        }
        other => return Err(CodecError::UnknownOperation(other)),
    };
    let values = reader.values;
    let trace = if traced { Some(read_trace(&mut reader)?) } else { None };
    reader.finish()?;
    Ok((Request { lane, deadline, trace, pipe, operation }, values))
}

/// The part of a request in front of the operation's fields.
struct Head {
    /// Number of the operation.
    number: u64,
    deadline: Option<Instant>,
    /// Handle under which the session keeps the result.
    pipe: Option<PipeId>,
    /// True if a trace context follows the fields.
    traced: bool,
}

fn read_head(reader: &mut Reader<'_>, now: Instant) -> Result<Head, CodecError> {
    let traced = match reader.array()? {
        3 => false,
        4 => true,
        _ => return Err(CodecError::OutOfRange),
    };
    let number = reader.uint()?;
    let (mut deadline, mut pipe) = (None, None);
    if !reader.nil()? {
        for _ in 0..reader.map()? {
            let key = reader.str()?;
            if key == "d" {
                // A deadline beyond the clock's range counts as none.
                deadline = now.checked_add(Duration::from_micros(reader.uint()?));
            } else if key == "p" {
                pipe = Some(PipeId::from_handle(reader.handle()?).ok_or(CodecError::OutOfRange)?);
            } else {
                reader.value(0)?;
            }
        }
    }
    Ok(Head { number, deadline, pipe, traced })
}

fn read_trace(reader: &mut Reader<'_>) -> Result<TraceContext, CodecError> {
    TraceContext::from_bytes(reader.bin()?).ok_or(CodecError::OutOfRange)
}

/// Reads the body of a write whose payload has not been received: the tensor, the offset and the
/// length in bytes. Returns `None` for any other request.
pub(super) fn peek_write(body: &[u8], now: Instant) -> Option<(crate::value::TensorRef, u64, u64)> {
    let mut reader = Reader::new(body, Bytes::new());
    let Head { number, deadline, pipe, traced } = read_head(&mut reader, now).ok()?;
    // A write with a deadline takes the ordinary path, where deadlines are watched. So does one
    // whose end later requests ask for.
    if number != 4 || deadline.is_some() || pipe.is_some() || reader.array().ok()? != 3 {
        return None;
    }
    let (tensor, offset) = (reader.tensor().ok()?, reader.uint().ok()?);
    let len = reader.bytes_len().ok()?;
    if traced {
        // Checked and dropped: a write in place runs no function that could see the trace.
        read_trace(&mut reader).ok()?;
    }
    reader.finish().ok()?;
    Some((tensor, offset, len))
}

/// Returns true if the body of a reply is exactly one bytes value of `len` bytes.
pub(super) fn is_bytes_reply(body: &[u8], len: u64) -> bool {
    let mut reader = Reader::new(body, Bytes::new());
    reader.bytes_len() == Ok(len) && reader.finish().is_ok()
}

/// Encodes a reply as body, payload and a flag that is true for an error. A value that cannot be
/// encoded becomes an error.
pub fn encode_reply(outcome: &Result<Value, RpcError>) -> (Vec<u8>, Vec<Bytes>, bool) {
    let (writer, is_error) = write_reply(outcome, Vec::new());
    (writer.body, writer.payload, is_error)
}

/// Encodes a reply like [`encode_reply`], with the memory of `body` for its body.
pub(super) fn write_reply(outcome: &Result<Value, RpcError>, body: Vec<u8>) -> (Writer, bool) {
    let error = match outcome {
        Ok(value) => {
            let mut writer = Writer::into_body(body);
            writer.value(value);
            match writer.invalid {
                None => return (writer, false),
                Some(invalid) => RpcError::invalid_argument(invalid).may_have_run(true).to_wire(),
            }
        }
        Err(error) => error.to_wire(),
    };
    (Writer { body: error, ..Writer::default() }, true)
}

/// Decodes the output of [`encode_reply`].
///
/// # Errors
///
/// A protocol error for malformed input. The inner result is the reply.
pub fn decode_reply(is_error: bool, body: &[u8], payload: Bytes) -> Result<Result<Value, RpcError>, RpcError> {
    read_reply(is_error, body, payload).map(|(outcome, _)| outcome)
}

/// Decodes a reply like [`decode_reply`], and also returns the number of values in it.
pub(super) fn read_reply(
    is_error: bool,
    body: &[u8],
    payload: Bytes,
) -> Result<(Result<Value, RpcError>, usize), RpcError> {
    if is_error {
        let malformed = |error| RpcError::new(ErrorKind::Protocol, format!("malformed error reply: {error}"));
        return RpcError::from_wire(body).map(|error| (Err(error.from_next_hop()), 0)).map_err(malformed);
    }
    let mut reader = Reader::new(body, payload);
    let value = reader.value(0)?;
    let values = reader.values;
    reader.finish()?;
    Ok((Ok(value), values))
}

#[cfg(test)]
mod tests;

//! The frame around each message: its length and its code, and the body behind them.

use bytes::{Buf, Bytes, BytesMut};

use super::frame_code::FrameCode;
use super::reader::WireError;

/// Room for bytes that are read ahead. Frames up to this length are not announced.
pub(super) const READ_AHEAD: usize = 16 << 10;

/// Bytes in front of the body of a frame: its length, and its code.
pub(super) const FRAME_HEADER: usize = 12;

/// Returns the number of the code of the next frame and the length of its body, which stay in the
/// input; `None` if they have not arrived. Passes over frames that are empty.
///
/// # Errors
///
/// The frame has no room for its code.
pub(super) fn peek_header(input: &mut BytesMut) -> Result<Option<(i32, u64)>, WireError> {
    loop {
        let Some(len) = input.first_chunk().map(|len| u64::from_le_bytes(*len)) else { return Ok(None) };
        if len == 0 {
            input.advance(8);
            continue;
        }
        if len < 4 {
            return Err(WireError::new(format!("a frame of {len} bytes has no room for its code")));
        }
        let code = input[8..].first_chunk().map(|code| i32::from_le_bytes(*code));
        return Ok(code.map(|code| (code, len - 4)));
    }
}

/// Takes a body that has arrived as a whole.
pub(super) fn take_body(input: &mut BytesMut, len: usize) -> Bytes {
    if len <= READ_AHEAD {
        // The buffer stays one piece, and is used again.
        let body = Bytes::copy_from_slice(&input[..len]);
        input.advance(len);
        return body;
    }
    let body = input.split_to(len).freeze();
    // The rest must not keep the memory of the body.
    *input = BytesMut::from(&input[..]);
    body
}

/// Returns a frame with the body that `write` writes.
pub(super) fn frame(code: FrameCode, write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame[8..].copy_from_slice(&code.number().to_le_bytes());
    write(&mut frame);
    let len = frame.len() as u64 - 8;
    frame[..8].copy_from_slice(&len.to_le_bytes());
    frame
}

/// Makes a frame that ends with the length of no bytes the header of `len` bytes.
pub(super) fn followed_by(mut frame: Vec<u8>, len: u64) -> Vec<u8> {
    let without_data = frame.len() as u64 - 8;
    frame[..8].copy_from_slice(&without_data.saturating_add(len).to_le_bytes());
    let at = frame.len() - 8;
    frame[at..].copy_from_slice(&len.to_le_bytes());
    frame
}

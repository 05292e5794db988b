//! A reader of little-endian numbers from bytes of a peer, and the error for bytes that break the
//! protocol.

use bytes::{Buf, Bytes};

/// Bytes of a peer that break the protocol. The connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireError(String);

impl WireError {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl std::fmt::Display for WireError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WireError {}

/// Reader of a frame's body. What it returns shares the memory of the body.
pub(super) struct Reader {
    body: Bytes,
    /// Name of what is read, for errors.
    what: &'static str,
}

impl Reader {
    pub(super) fn new(body: Bytes, what: &'static str) -> Self {
        Self { body, what }
    }

    pub(super) fn u64(&mut self) -> Result<u64, WireError> {
        self.need(8)?;
        Ok(self.body.get_u64_le())
    }

    pub(super) fn i64(&mut self) -> Result<i64, WireError> {
        self.need(8)?;
        Ok(self.body.get_i64_le())
    }

    pub(super) fn u32(&mut self) -> Result<u32, WireError> {
        self.need(4)?;
        Ok(self.body.get_u32_le())
    }

    pub(super) fn i32(&mut self) -> Result<i32, WireError> {
        self.need(4)?;
        Ok(self.body.get_i32_le())
    }

    pub(super) fn u16(&mut self) -> Result<u16, WireError> {
        self.need(2)?;
        Ok(self.body.get_u16_le())
    }

    pub(super) fn u8(&mut self) -> Result<u8, WireError> {
        self.need(1)?;
        Ok(self.body.get_u8())
    }

    /// Returns bytes with their length in front.
    pub(super) fn bytes(&mut self) -> Result<Bytes, WireError> {
        let len = self.u64()?;
        let len = usize::try_from(len).ok().filter(|&len| len <= self.body.remaining());
        let len = len.ok_or_else(|| self.cut())?;
        Ok(self.body.split_to(len))
    }

    /// Returns all bytes that have not been read.
    pub(super) fn rest(self) -> Bytes {
        self.body
    }

    /// Returns the number of bytes that have not been read.
    pub(super) fn left(&self) -> usize {
        self.body.remaining()
    }

    /// Checks that all has been read.
    pub(super) fn finish(self) -> Result<(), WireError> {
        match self.body.remaining() {
            0 => Ok(()),
            left => Err(WireError::new(format!("{} has {left} bytes behind its end", self.what))),
        }
    }

    pub(super) fn error(&self, text: impl std::fmt::Display) -> WireError {
        WireError::new(format!("{}: {text}", self.what))
    }

    fn need(&self, len: usize) -> Result<(), WireError> {
        if self.body.remaining() < len { Err(self.cut()) } else { Ok(()) }
    }

    fn cut(&self) -> WireError {
        WireError::new(format!("{} ends before its content", self.what))
    }
}

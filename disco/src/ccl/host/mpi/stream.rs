//! The messages between two processes as a stream of bytes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;

use super::super::stream::Socket;
use super::library::{Library, Transfer};

/// The most bytes of a message: a whole frame of data with its head.
const MESSAGE: usize = 256 * 1024 + 64;
/// Number of messages may be on their way out, and how many on their way in.
const WINDOW: usize = 4;

/// One end of such a stream. It is not told when the other end's process has gone.
pub(super) struct MessageStream {
    library: &'static Library,
    peer: u32,
    tag: u16,
    outgoing: VecDeque<Transfer>,
    incoming: VecDeque<Transfer>,
    /// The message that is being read, and how much of it has been.
    message: Vec<u8>,
    read: usize,
    /// True once the other end has said that nothing follows.
    is_over: bool,
    /// True once this end has said that nothing follows.
    is_finished: bool,
    /// Buffers to be used again.
    spare: Vec<Vec<u8>>,
}

impl MessageStream {
    pub(super) fn new(library: &'static Library, peer: u32, tag: u16) -> Self {
        let (outgoing, incoming) = (VecDeque::new(), VecDeque::new());
        Self {
            library,
            peer,
            tag,
            outgoing,
            incoming,
            message: Vec::new(),
            read: 0,
            is_over: false,
            is_finished: false,
            spare: Vec::new(),
        }
    }

    fn keep(spare: &mut Vec<Vec<u8>>, mut buffer: Vec<u8>) {
        if buffer.capacity() > 0 && spare.len() < WINDOW {
            buffer.clear();
            spare.push(buffer);
        }
    }

    /// Lets go of messages that are out.
    fn reap(&mut self) -> io::Result<()> {
        while let Some(first) = self.outgoing.front_mut() {
            match first.poll()? {
                Some(buffer) => {
                    self.outgoing.pop_front();
                    Self::keep(&mut self.spare, buffer);
                }
                None => break,
            }
        }
        Ok(())
    }

    /// Goes on to the next message, if one has come.
    fn next_message(&mut self) -> io::Result<()> {
        while self.incoming.len() < WINDOW {
            let spare = &mut self.spare;
            let room = |_| spare.pop().unwrap_or_default();
            match self.library.receive(self.peer, self.tag, MESSAGE, room)? {
                Some(transfer) => self.incoming.push_back(transfer),
                None => break,
            }
        }
        let Some(first) = self.incoming.front_mut() else { return Err(ErrorKind::WouldBlock.into()) };
        let Some(bytes) = first.poll()? else { return Err(ErrorKind::WouldBlock.into()) };
        self.incoming.pop_front();
        Self::keep(&mut self.spare, std::mem::replace(&mut self.message, bytes));
        self.read = 0;
        Ok(())
    }
}

impl Read for MessageStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.read == self.message.len() && !self.is_over {
            self.next_message()?;
            // No other message is empty.
            self.is_over = self.message.is_empty();
        }
        let len = bytes.len().min(self.message.len() - self.read);
        bytes[..len].copy_from_slice(&self.message[self.read..self.read + len]);
        self.read += len;
        Ok(len)
    }
}

impl Write for MessageStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.reap()?;
        if self.outgoing.len() >= WINDOW {
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut message = self.spare.pop().unwrap_or_default();
        for part in parts {
            let room = MESSAGE - message.len();
            message.extend_from_slice(&part[..part.len().min(room)]);
        }
        let len = message.len();
        if len > 0 {
            self.outgoing.push_back(self.library.send(self.peer, self.tag, message)?);
        }
        Ok(len)
    }

    /// Checks that all messages are out; fails with `WouldBlock` otherwise.
    fn flush(&mut self) -> io::Result<()> {
        self.reap()?;
        if self.outgoing.is_empty() { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

impl Socket for MessageStream {
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Returns true while messages are under way: they make progress only during calls of MPI.
    fn holds_back(&self) -> bool {
        !self.outgoing.is_empty()
    }

    fn finish(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.is_finished, true) {
            self.outgoing.push_back(self.library.send(self.peer, self.tag, Vec::new())?);
        }
        Ok(())
    }
}

impl Drop for MessageStream {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::debug!(peer = self.peer, %error, "the end of a stream over MPI is not told");
        }
    }
}

//! Standard error of `ssh`: passed on, with its end kept for the explanation of a failure.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::transports::exec::ChildStderr;

/// The end of what one `ssh` has written to standard error, remote text included.
#[derive(Debug, Default)]
pub(super) struct StderrTail {
    state: Mutex<TailState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct TailState {
    /// The last bytes, [`KEPT_BYTES`] at most.
    bytes: Vec<u8>,
    /// True once nothing can follow.
    ended: bool,
}

/// Bytes that are kept: more than the lines of a failure have.
const KEPT_BYTES: usize = 4 << 10;

/// Characters of a line that errors quote.
const QUOTED_CHARACTERS: usize = 300;

impl StderrTail {
    /// Returns the receiver of the pipe. It passes everything on to `to`, or to the standard error
    /// of this process.
    ///
    /// Each `ssh` has a thread for this, since it may be dialled without a runtime. The thread ends
    /// with the last process that holds the pipe.
    pub(super) fn receiver(self: &Arc<Self>, to: Option<ChildStderr>) -> ChildStderr {
        let this = Arc::clone(self);
        ChildStderr::new(move |pipe| {
            let (copied, to) = (Arc::clone(&this), to.clone());
            let thread = thread::Builder::new().name("rpc-ssh-stderr".into()).stack_size(128 << 10);
            if thread.spawn(move || copied.copy(pipe, to.as_ref())).is_err() {
                // The pipe is closed, which `ssh` ignores.
                this.end();
            }
        })
    }

    /// Returns the kept lines that are not empty, for people: control characters are replaced, so
    /// that the far side cannot write to the terminal by an error. Waits up to `limit` for the end
    /// of the text.
    pub(super) fn lines(&self, limit: Duration) -> Vec<String> {
        let mut state = self.state.lock();
        self.ended.wait_while_for(&mut state, |state| !state.ended, limit);
        let text = String::from_utf8_lossy(&state.bytes);
        let lines = text.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty());
        let clean = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
        lines.map(|line| line.chars().map(clean).take(QUOTED_CHARACTERS).collect()).collect()
    }

    fn copy(&self, pipe: OwnedFd, to: Option<&ChildStderr>) {
        let mut sink = sink(to);
        let mut pipe = File::from(pipe);
        let mut buffer = [0; 4 << 10];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => break,
                Ok(len) => {
                    self.keep(&buffer[..len]);
                    // Text that cannot be passed on is still read: `ssh` waits while the pipe is
                    // full.
                    let _ = sink.write_all(&buffer[..len]);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.end();
    }

    fn keep(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        state.bytes.extend_from_slice(bytes);
        let excess = state.bytes.len().saturating_sub(KEPT_BYTES);
        state.bytes.drain(..excess);
    }

    fn end(&self) {
        self.state.lock().ended = true;
        self.ended.notify_all();
    }
}

/// Returns the writing end of a pipe to `to`, or the standard error of this process.
fn sink(to: Option<&ChildStderr>) -> Box<dyn Write> {
    if let Some((to, (read, write))) = to.zip(pipe_with(PipeFlags::CLOEXEC).ok()) {
        to.take(read);
        return Box::new(File::from(write));
    }
    Box::new(io::stderr())
}

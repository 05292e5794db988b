//! The output of a program on this program's standard streams.

use std::io::{self, IsTerminal as _, Write as _};

use rpc_core::client::OutputStream;
use rpc_core::printable;
use serde_json::json;

use super::super::failure::Failure;
use super::super::output::Output;

/// Both streams of a program.
pub(super) struct ProgramOutput {
    output: Output,
    stdout: TerminalText,
    stderr: TerminalText,
}

impl ProgramOutput {
    /// Returns the streams. Text for a terminal is escaped, unless `raw`.
    pub(super) fn new(output: Output, raw: bool) -> Self {
        let text = |is_terminal: bool| TerminalText { escapes: is_terminal && !raw, partial: Vec::new() };
        Self { output, stdout: text(io::stdout().is_terminal()), stderr: text(io::stderr().is_terminal()) }
    }

    /// Writes a piece of a stream.
    pub(super) fn write(&mut self, stream: OutputStream, piece: &[u8]) -> Result<(), Failure> {
        if self.output.is_json() {
            let name = match stream {
                OutputStream::Stdout => "stdout",
                OutputStream::Stderr => "stderr",
            };
            let text = self.text(stream).decode(piece);
            return if text.is_empty() { Ok(()) } else { self.output.json(&json!({ "stream": name, "text": text })) };
        }
        if !self.text(stream).escapes {
            return put(stream, piece);
        }
        let text = self.text(stream).decode(piece);
        put(stream, printable(&text).as_bytes())
    }

    /// Writes the bytes of an incomplete character at the end of a stream.
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        for stream in [OutputStream::Stdout, OutputStream::Stderr] {
            let rest = std::mem::take(&mut self.text(stream).partial);
            if !rest.is_empty() {
                let text = String::from_utf8_lossy(&rest).into_owned();
                self.write(stream, text.as_bytes())?;
            }
        }
        Ok(())
    }

    fn text(&mut self, stream: OutputStream) -> &mut TerminalText {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }
}

fn put(stream: OutputStream, bytes: &[u8]) -> Result<(), Failure> {
    let written = match stream {
        OutputStream::Stdout => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush())
        }
        OutputStream::Stderr => io::stderr().write_all(bytes),
    };
    written.map_err(Failure::Output)
}

/// Text of one stream, whose pieces may end inside of a character.
#[derive(Default)]
struct TerminalText {
    /// True if the stream is a terminal, and escapes are asked for.
    escapes: bool,
    /// The beginning of a character whose end has not come.
    partial: Vec<u8>,
}

impl TerminalText {
    /// Returns the text up to the last complete character; other bytes are replaced.
    fn decode(&mut self, piece: &[u8]) -> String {
        self.partial.extend_from_slice(piece);
        let end = match std::str::from_utf8(&self.partial) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            // Invalid bytes before the last character; that one is at most three bytes long, if it
            // is incomplete.
            Err(_) => incomplete_from(&self.partial),
            Ok(_) => self.partial.len(),
        };
        let text = String::from_utf8_lossy(&self.partial[..end]).into_owned();
        self.partial.drain(..end);
        text
    }
}

/// Returns the position of an incomplete character at the end of `bytes`, or their length.
fn incomplete_from(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    let is_incomplete = |at: &usize| {
        let error = std::str::from_utf8(&bytes[*at..]).err();
        error.is_some_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (from..bytes.len()).find(is_incomplete).unwrap_or(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_are_split_are_kept_together() {
        let text = "naïve 日本 🦀";
        for at in 0..text.len() {
            let mut decoder = TerminalText::default();
            let (a, b) = text.as_bytes().split_at(at);
            assert_eq!(decoder.decode(a) + &decoder.decode(b), text);
        }
        let mut decoder = TerminalText::default();
        assert_eq!(decoder.decode(b"\xff\xe6\x97"), "\u{fffd}");
        assert_eq!(decoder.decode(b"\xa5!"), "日!");
    }
}

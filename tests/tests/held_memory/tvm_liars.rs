//! Servers of TVM that lie, behind a hop whose client floods them and reads nothing.

use std::io::{ErrorKind, Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use bytes::Bytes;
use rpc_core::{Operation, Value};
use rpc_tvm::wire::{self, CallResult, FrameCode, HelloAnswer, ResultKind, WireValue};
use rustix::event::{PollFd, PollFlags, poll};

use super::peer::Peer;
use super::recipes::{Answer, LARGE, Recipe};
use super::tvm_floods::{Frames, repeat};

/// Bytes that a server sends at once, without being asked.
const UNASKED: usize = 1 << 20;

/// Lie of a server, from the moment at which the session has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lie {
    /// No request is read.
    Silence,
    /// Each look-up gives a new function, which the hop has to keep.
    NewFunctions,
    /// Each call returns bytes, as many as a message may have.
    LargeResults,
    /// Each call fails with a text, as long as a message may be.
    LongErrors,
    /// The first reply announces more than any memory has, and goes on for long.
    EndlessReply,
    /// Many empty frames, which mean nothing.
    EmptyFrames,
    /// Many answers to what was not asked.
    Unasked,
    /// Each call returns a list, which stays there, and is a handle here.
    Lists,
}

/// Server of TVM that lies, in a thread.
pub(crate) struct Liar {
    pub(crate) at: SocketAddr,
    /// The server's connection, once there is one.
    connected: Receiver<TcpStream>,
    serving: JoinHandle<()>,
}

/// Errors of a connection that either side has ended.
const ENDED: [ErrorKind; 3] = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset, ErrorKind::UnexpectedEof];

impl Liar {
    /// Ends the connection, and with it the server.
    pub(crate) fn stop(self) {
        // It may have ended.
        let _ = self.connected.recv().unwrap().shutdown(Shutdown::Both);
        self.serving.join().unwrap();
    }
}

impl Lie {
    pub(crate) const ALL: [Self; 8] = [
        Self::Silence,
        Self::NewFunctions,
        Self::LargeResults,
        Self::LongErrors,
        Self::EndlessReply,
        Self::EmptyFrames,
        Self::Unasked,
        Self::Lists,
    ];

    /// Starts a server of one session.
    pub(crate) fn start(self) -> Liar {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let (sender, connected) = channel();
        let serving = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            sender.send(stream.try_clone().unwrap()).unwrap();
            match self.serve(stream) {
                Err(error) if ENDED.contains(&error.kind()) => {}
                ended => ended.unwrap(),
            }
        });
        Liar { at, connected, serving }
    }

    fn serve(self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut hello = [0; 8];
        stream.read_exact(&mut hello)?;
        let len = u64::from(hello[4]);
        std::io::copy(&mut (&stream).take(len), &mut std::io::sink())?;
        stream.write_all(&HelloAnswer::Accepted("server:").encode())?;
        let plain = |value| wire::returned_call(CallResult::Plain(value));
        let handle = |handle| wire::returned(&[WireValue::Pointer(handle)]);
        // The session begins. The server says that it takes packets of any size, so that many
        // requests are sent at once.
        for answer in [wire::returned(&[WireValue::None]), handle(9), plain(WireValue::Int(i64::MAX)), handle(0)] {
            read_frame(&mut stream)?;
            stream.write_all(&answer)?;
        }
        // The function that the flood calls is found.
        let answers_first = !matches!(self, Self::NewFunctions | Self::EndlessReply);
        if answers_first {
            read_frame(&mut stream)?;
            stream.write_all(&handle(16))?;
        }
        let text = "e".repeat(2 * LARGE - 100);
        let of_call = match self {
            Self::LargeResults => wire::returned_call(CallResult::Bytes(text.into())),
            _ => wire::exception(&text),
        };
        let unasked = match self {
            Self::Silence => Vec::new(),
            // A header, and bytes that may be those of its frame.
            Self::EndlessReply => {
                let header = [&(1_u64 << 62).to_le_bytes()[..], &FrameCode::Return.number().to_le_bytes()].concat();
                [header, vec![0; UNASKED]].concat()
            }
            Self::EmptyFrames => vec![0; UNASKED],
            Self::Unasked => handle(16).repeat(1000),
            _ => {
                return answer(&mut stream, |number| {
                    if self == Self::Lists {
                        wire::returned_call(CallResult::Object(ResultKind::Array, number))
                    } else {
                        of_call.clone()
                    }
                });
            }
        };
        // Something has been asked.
        read_frame(&mut stream)?;
        for _ in 0..64 {
            stream.write_all(&unasked)?;
        }
        // Until the connection ends.
        let ended = PollFd::new(&stream, PollFlags::RDHUP);
        poll(&mut [ended], None)?;
        Ok(())
    }

    /// Returns the flood of a native client of the hop.
    pub(crate) fn flood(self, peer: &mut Peer) -> Recipe {
        if self == Self::NewFunctions {
            let look_up = |peer: &mut Peer, _| peer.request(1, Operation::GetFunction { name: "f".repeat(1000) });
            return Recipe { frames: Box::new(look_up), answer: Answer::Later };
        }
        if self == Self::EndlessReply {
            let look_up = |peer: &mut Peer, _| peer.request(1, Operation::GetFunction { name: "f".into() });
            return Recipe { frames: Box::new(look_up), answer: Answer::Later };
        }
        let function = peer.function("f");
        let args: Vec<Value> = vec![Bytes::from(vec![1; if self == Self::Silence { LARGE } else { 600 }]).into()];
        let call = move |peer: &mut Peer, _| peer.request(1, Operation::Call { function, args: args.clone() });
        let answer = if self == Self::Unasked { Answer::EndsConnection } else { Answer::Later };
        Recipe { frames: Box::new(call), answer }
    }

    /// Returns the flood of a client of TVM, to which the hop is the first server of a chain.
    pub(crate) fn flood_by_tvm(self, peer: &mut Peer) -> Frames {
        if matches!(self, Self::NewFunctions | Self::EndlessReply) {
            return repeat(wire::Request::GetFunction { name: "f".repeat(1000).as_str().into() });
        }
        let function = peer.tvm_function("f");
        let len = if self == Self::Silence { LARGE } else { 600 };
        repeat(wire::Request::Call { function, args: vec![WireValue::Bytes(vec![1; len].into())] })
    }
}

/// Answers calls by `of_call`, and other requests by new handles, until the connection
/// ends.
fn answer(stream: &mut TcpStream, of_call: impl Fn(u64) -> Vec<u8>) -> std::io::Result<()> {
    for number in 2.. {
        let answer = match read_frame(stream)? {
            code if code == FrameCode::CallFunc.number() => of_call(16 * number),
            _ => wire::returned(&[WireValue::Pointer(16 * number)]),
        };
        stream.write_all(&answer)?;
    }
    Ok(())
}

/// Reads a frame, and returns its code.
fn read_frame(stream: &mut TcpStream) -> std::io::Result<i32> {
    let mut header = [0; 12];
    stream.read_exact(&mut header)?;
    let len = u64::from_le_bytes(*header.first_chunk().unwrap()) - 4;
    std::io::copy(&mut Read::take(&*stream, len), &mut std::io::sink())?;
    Ok(i32::from_le_bytes(*header.last_chunk().unwrap()))
}

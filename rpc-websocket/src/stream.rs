//! The byte stream of a channel, carried in the binary messages of a WebSocket.
//!
//! Message boundaries mean nothing: a message holds whatever was written at once, and the reader
//! joins what arrives. Pings are answered, pongs ignored. A close frame, and the end of the
//! connection without one, are both the end of the stream; the session protocol above tells an
//! orderly end from a lost peer. A text message is an error.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{Sink, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::error::ProtocolError;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error, Message};

/// Largest message that this side sends, in bytes.
const MAX_SENT: usize = 256 << 10;

/// Largest message, and largest frame of one, that this side accepts, in bytes. The library
/// reserves what the header of a frame announces, and keeps it; so a peer that has proven nothing
/// yet can make a channel hold no more than a few times this.
const MAX_RECEIVED: usize = MAX_SENT;

/// Read buffer of a connection, in bytes. It is allocated at once, so that it counts for every idle
/// connection; larger reads do not pay, since messages are copied out of it either way.
const READ_BUFFER: usize = 16 << 10;

/// Sent messages are passed to the socket in pieces of at least this many bytes, or when the
/// channel is flushed.
const WRITE_BUFFER: usize = 64 << 10;

/// Returns the limits of a connection: what a peer can make this side hold.
pub(crate) fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(WRITE_BUFFER)
        // One message beyond the buffer, with its header; a writer waits before it adds another.
        .max_write_buffer_size(WRITE_BUFFER + 2 * MAX_SENT)
        .max_message_size(Some(MAX_RECEIVED))
        .max_frame_size(Some(MAX_RECEIVED))
}

/// A WebSocket as a stream of bytes.
pub(crate) struct MessageStream<S> {
    socket: WebSocketStream<S>,
    /// Rest of the message that is being read.
    incoming: Bytes,
}

impl<S> MessageStream<S> {
    pub(crate) fn new(socket: WebSocketStream<S>) -> Self {
        Self { socket, incoming: Bytes::new() }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> MessageStream<S> {
    /// Sends the start of `slices` as one message, up to [`MAX_SENT`] bytes.
    fn poll_send(mut self: Pin<&mut Self>, slices: &[IoSlice<'_>], cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        if total == 0 {
            return Poll::Ready(Ok(0));
        }
        ready!(Pin::new(&mut self.socket).poll_ready(cx)).map_err(into_io)?;
        let mut message = BytesMut::with_capacity(total.min(MAX_SENT));
        for slice in slices {
            let room = MAX_SENT - message.len();
            message.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        let len = message.len();
        Pin::new(&mut self.socket).start_send(Message::Binary(message.freeze())).map_err(into_io)?;
        Poll::Ready(Ok(len))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for MessageStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        while self.incoming.is_empty() && buffer.remaining() > 0 {
            match ready!(Pin::new(&mut self.socket).poll_next(cx)) {
                Some(Ok(Message::Binary(bytes))) => self.incoming = bytes,
                Some(Ok(Message::Text(_))) => {
                    let text = "the peer sent a text message, where a channel is made of binary ones";
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
                }
                // Pings are answered by the library.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Close(_))) | None => return Poll::Ready(Ok(())),
                Some(Err(Error::Protocol(ProtocolError::ResetWithoutClosingHandshake))) => return Poll::Ready(Ok(())),
                Some(Err(error)) => return Poll::Ready(Err(into_io(error))),
            }
        }
        let len = self.incoming.len().min(buffer.remaining());
        buffer.put_slice(&self.incoming[..len]);
        self.incoming.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MessageStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(&[IoSlice::new(bytes)], cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(slices, cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx).map_err(into_io)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_close(cx).map_err(into_io)
    }
}

/// Turns an error of the library into one of a channel: those of the socket keep their kind, a
/// broken rule of the protocol is `InvalidData`.
pub(crate) fn into_io(error: Error) -> io::Error {
    let kind = match error {
        Error::Io(error) => return error,
        Error::ConnectionClosed | Error::AlreadyClosed | Error::Protocol(ProtocolError::SendAfterClosing) => {
            io::ErrorKind::BrokenPipe
        }
        Error::Capacity(_) | Error::Protocol(_) | Error::Utf8(_) => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;

    async fn pair() -> (MessageStream<DuplexStream>, WebSocketStream<DuplexStream>) {
        let (near, far) = tokio::io::duplex(64 << 10);
        let near = WebSocketStream::from_raw_socket(near, Role::Client, Some(limits())).await;
        let far = WebSocketStream::from_raw_socket(far, Role::Server, Some(limits())).await;
        (MessageStream::new(near), far)
    }

    #[tokio::test]
    async fn bytes_pass_in_both_directions_whatever_the_messages() {
        let (mut near, far) = pair().await;
        let mut far = MessageStream::new(far);
        let sent: Vec<u8> = (0..3 * MAX_SENT + 17).map(|index| index as u8).collect();
        let copy = sent.clone();
        let writer = tokio::spawn(async move {
            near.write_all(&copy).await.unwrap();
            near.flush().await.unwrap();
            near
        });
        let mut received = vec![0; sent.len()];
        far.read_exact(&mut received).await.unwrap();
        assert!(received == sent);
        let mut near = writer.await.unwrap();
        far.write_all(b"back").await.unwrap();
        far.flush().await.unwrap();
        let mut back = [0; 4];
        near.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"back");
    }

    #[tokio::test]
    async fn slices_are_joined_to_one_message() {
        let (mut near, mut far) = pair().await;
        let slices = [IoSlice::new(b"one"), IoSlice::new(b""), IoSlice::new(b"two")];
        assert_eq!(near.write_vectored(&slices).await.unwrap(), 6);
        near.flush().await.unwrap();
        let message = std::future::poll_fn(|cx| Pin::new(&mut far).poll_next(cx)).await.unwrap().unwrap();
        assert_eq!(message, Message::Binary(Bytes::from_static(b"onetwo")));
    }

    #[tokio::test]
    async fn the_end_with_and_without_a_close_frame_is_the_end_of_the_stream() {
        let (mut near, far) = pair().await;
        drop(far);
        assert_eq!(near.read(&mut [0; 8]).await.unwrap(), 0);

        let (mut near, mut far) = pair().await;
        far.close(None).await.unwrap();
        assert_eq!(near.read(&mut [0; 8]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_text_message_is_an_error() {
        let (mut near, mut far) = pair().await;
        Pin::new(&mut far).start_send(Message::text("hello")).unwrap();
        std::future::poll_fn(|cx| Pin::new(&mut far).poll_flush(cx)).await.unwrap();
        let error = near.read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn a_message_above_the_limit_is_refused_before_it_is_held() {
        let (near, mut far) = tokio::io::duplex(64);
        let near = WebSocketStream::from_raw_socket(near, Role::Client, Some(limits())).await;
        let mut near = MessageStream::new(near);
        // The header of a final binary frame of 2^40 bytes, and nothing behind it.
        far.write_all(&[0x82, 127, 0, 0, 1, 0, 0, 0, 0, 0]).await.unwrap();
        let error = near.read(&mut [0; 8]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}

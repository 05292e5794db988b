//! Dialects: other protocols in which clients of a server speak, recognised by their first bytes.

pub(super) mod activity;
pub(super) mod connection;
pub(super) mod passed;
pub(super) mod relayed;
mod stream;
pub(super) mod task;

use std::fmt;
use std::io;
use std::sync::Arc;

use bytes::BufMut;
use rpc_core::RpcError;
use rpc_core::proto::MAGIC;
use tokio::io::AsyncReadExt;

use self::connection::DialectConnection;
use crate::channel::Channel;
use crate::transport::BoxFuture;

/// A protocol other than the native one, in which clients may speak to a server. Registered in
/// [`ServeOptions::dialects`](crate::ServeOptions::dialects).
///
/// The client has to send first. Its first bytes decide: those of the native protocol are the
/// server's own, and others are shown to the dialects. A connection that no dialect accepts is
/// treated as a native one, whose handshake refuses it. They are not asked on connections that this
/// server has dialled, such as those to a relay, except for one that
/// [`Server::serve_dialect`](crate::Server::serve_dialect) names.
///
/// A [relay](crate::ServeOptions::relay) has dialects, too, which connect the peers of their
/// protocol with each other. It opens no sessions: its dialects [admit](DialectConnection::admit)
/// peers, [detach](DialectConnection::detach) the connection of one, and
/// [splice](DialectConnection::splice) it with that of another.
///
/// Dialects work on every transport, behind TLS and at the end of tunnels. Over `tls://` and
/// `quic://` the client has to name the native protocol in its TLS handshake (ALPN `rpc/1`), as the
/// transports of this crate do: a client without that never gets as far as its first bytes.
///
/// A client of a dialect is known by the certificate that it has shown, if the server accepts
/// [certificates](crate::Access::certificates), by the identity that a native session has proven on
/// the same QUIC connection, and else as `anonymous`. A dialect proves nothing by itself. So
/// clients without such an identity are served only where the server serves anonymous clients,
/// unless the dialect was registered by [`Dialects::with_unproven`], or the client is the process
/// that has started the server.
///
/// # Limits
///
/// The server by itself limits the number of connections and sessions, the time for the handshake
/// and for the session, and, by `write_timeout` and `min_rate`, how long a client may leave output
/// untaken. It sees bytes and no messages, so the rest is up to the dialect:
///
/// - Requests: [`DialectActivity::working`](crate::DialectActivity::working). A session without one
///   is idle, whatever bytes its client sends, and ends after `idle_timeout`.
/// - Incomplete messages: [`DialectActivity::receiving`](crate::DialectActivity::receiving), which
///   cuts off a client that sends the rest more slowly than `min_rate`.
/// - Sizes: [`DialectConnection::limits`], and [`DialectConnection::queued`] for bytes in memory.
/// - Silent clients: the server's `keep_alive` sends pings in the native protocol alone. In a
///   dialect, a client whose machine is gone is found by probes of the kernel over TCP, and by
///   QUIC, within six intervals of `keep_alive`; over TLS by the kernel's own keep-alive, which may
///   take hours; and in any case by `idle_timeout`, or by messages of the
///   dialect's own.
pub trait Dialect: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the dialect, for the log.
    fn name(&self) -> &str;

    /// Decides by the first bytes of a connection, at least one and at most [`MAX_FIRST_BYTES`].
    /// Called again with more bytes after [`NeedMore`](Recognition::NeedMore), which at the limit
    /// counts as [`Decline`](Recognition::Decline).
    fn recognize(&self, first: &[u8]) -> Recognition;

    /// Serves an accepted connection to its end. The stream of
    /// [`DialectConnection::io`] begins with the bytes that were shown to
    /// [`recognize`](Self::recognize).
    ///
    /// Until [`DialectConnection::open`] has opened a session, the connection counts among the
    /// handshakes, and the handshake's time limit holds. The future is dropped when that is over,
    /// when the client stalls, and a second after [`ServerNotices::stopped`](crate::ServerNotices):
    /// when the server was stopped, the session has ended by itself, or has lasted or idled for as
    /// long as the server's options allow. When the future ends, the connection is closed and the
    /// session freed; references to the session's objects must not outlive it.
    ///
    /// # Errors
    ///
    /// The reason why the connection ended, for the log. The client was told by the dialect, if it
    /// can be told at all.
    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>>;

    /// Goes on with a connection that [`serve`](Self::serve) in another process has
    /// [handed](DialectConnection::hand_off) to this one, in the `state` that it has passed. The
    /// [session](DialectConnection::session) is open, and [`machine`](DialectConnection::machine)
    /// is unknown here. The server there sees to the longest duration of the session; all else is
    /// as for [`serve`](Self::serve).
    ///
    /// # Errors
    ///
    /// As [`serve`](Self::serve). By default, the dialect hands nothing off.
    fn resume<'a>(
        &'a self,
        connection: &'a mut DialectConnection,
        state: &'a [u8],
    ) -> BoxFuture<'a, Result<(), RpcError>> {
        let _ = (connection, state);
        let text = format!("the dialect {} cannot go on with a connection", self.name());
        Box::pin(async { Err(RpcError::internal(text)) })
    }

    /// Returns the message that tells a client why its session ends, at the end of a message of the
    /// server. Sent in the place of a process that the connection was
    /// [handed](DialectConnection::hand_off) to, and that is gone. None by default.
    fn last_message(&self, reason: &RpcError) -> Vec<u8> {
        let _ = reason;
        Vec::new()
    }

    /// Returns the message for a client that is refused before it is served. None by default: the
    /// connection is closed.
    fn refusal(&self, reason: &RpcError) -> Vec<u8> {
        let _ = reason;
        Vec::new()
    }
}

/// Largest number of bytes by which a dialect has to be recognised.
pub const MAX_FIRST_BYTES: usize = 512;

/// A dialect's decision on the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recognition {
    /// The connection speaks this dialect.
    Accept,
    /// The connection does not speak this dialect.
    Decline,
    /// The bytes may be the beginning of this dialect.
    NeedMore,
}

/// The dialects that a server speaks beside the native protocol. The default has none. Cheap to
/// clone.
#[derive(Clone, Debug, Default)]
pub struct Dialects(Arc<[RegisteredDialect]>);

/// Dialect of a server, and the access that its operator has given it.
#[derive(Clone, Debug)]
pub(super) struct RegisteredDialect {
    pub(super) dialect: Arc<dyn Dialect>,
    /// True if clients are served without proof of identity even where native clients need one.
    pub(super) unproven: bool,
}

impl Dialects {
    /// Adds a dialect. Those that were added earlier decide first.
    #[must_use]
    pub fn with(self, dialect: impl Dialect) -> Self {
        self.with_entry(RegisteredDialect { dialect: Arc::new(dialect), unproven: false })
    }

    /// Adds a dialect whose clients are served without proof of identity, even by a server that
    /// demands one. **Every client that reaches the server can use it then.**
    #[must_use]
    pub fn with_unproven(self, dialect: impl Dialect) -> Self {
        self.with_entry(RegisteredDialect { dialect: Arc::new(dialect), unproven: true })
    }

    /// Returns true if the server speaks the native protocol alone.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the dialect of this name.
    pub(super) fn named(&self, name: &str) -> Option<Arc<dyn Dialect>> {
        self.0.iter().find(|registered| registered.dialect.name() == name).map(|found| found.dialect.clone())
    }

    fn with_entry(self, added: RegisteredDialect) -> Self {
        Self(self.0.iter().cloned().chain([added]).collect())
    }

    /// Reads the first bytes of a channel until they decide, and puts them back. Returns `None` for
    /// the native protocol. The caller limits the time.
    pub(super) async fn recognize(&self, channel: &mut Channel) -> io::Result<Option<RegisteredDialect>> {
        let mut first = channel.take_unread();
        let accepted = loop {
            if let Some(decided) = self.decide(&first) {
                break decided.cloned();
            }
            let left = MAX_FIRST_BYTES - first.len();
            first.reserve(left);
            let mut room = (&mut first).limit(left);
            if channel.io_mut().read_buf(&mut room).await? == 0 {
                break None;
            }
        };
        channel.put_back(first);
        Ok(accepted)
    }

    /// Returns the dialect of these first bytes, `Some(None)` for the native protocol, or `None` if
    /// more bytes are needed.
    fn decide(&self, first: &[u8]) -> Option<Option<&RegisteredDialect>> {
        let is_all = first.len() >= MAX_FIRST_BYTES;
        if first.starts_with(&MAGIC) {
            return Some(None);
        }
        if MAGIC.starts_with(first) {
            return None;
        }
        for registered in self.0.iter() {
            match registered.dialect.recognize(first) {
                Recognition::Accept => return Some(Some(registered)),
                Recognition::NeedMore if !is_all => return None,
                Recognition::NeedMore | Recognition::Decline => {}
            }
        }
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dialect of connections that begin with a word.
    #[derive(Debug)]
    struct Word(&'static str);

    impl Dialect for Word {
        fn name(&self) -> &str {
            self.0
        }

        fn recognize(&self, first: &[u8]) -> Recognition {
            assert!(!first.is_empty() && first.len() <= MAX_FIRST_BYTES);
            match self.0.as_bytes() {
                word if first.starts_with(word) => Recognition::Accept,
                word if word.starts_with(first) => Recognition::NeedMore,
                _ => Recognition::Decline,
            }
        }

        fn serve<'a>(&'a self, _: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
            Box::pin(async { Ok(()) })
        }
    }

    /// Dialect that never has enough.
    #[derive(Debug)]
    struct Undecided;

    impl Dialect for Undecided {
        fn name(&self) -> &str {
            "undecided"
        }

        fn recognize(&self, _: &[u8]) -> Recognition {
            Recognition::NeedMore
        }

        fn serve<'a>(&'a self, _: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
            Box::pin(async { Ok(()) })
        }
    }

    /// Returns the name of the dialect, `native`, or `more`.
    fn decide<'a>(dialects: &'a Dialects, first: &[u8]) -> &'a str {
        match dialects.decide(first) {
            Some(Some(registered)) => registered.dialect.name(),
            Some(None) => "native",
            None => "more",
        }
    }

    #[test]
    fn the_first_bytes_decide_and_native_ones_are_the_servers_own() {
        let dialects = Dialects::default().with(Word("GET ")).with(Word("GE"));
        let cases: [(&[u8], &str); 8] = [
            (b"", "more"),
            (b"GET /", "GET "),
            (b"GE", "more"),
            (b"GEM", "GE"),
            (b"POST", "native"),
            (b"\x93", "more"),
            (&MAGIC, "native"),
            (b"\x93rx", "native"),
        ];
        for (first, expected) in cases {
            assert_eq!(decide(&dialects, first), expected, "{first:?}");
        }
    }

    #[test]
    fn a_dialect_that_is_never_sure_gives_way_at_the_limit() {
        let dialects = Dialects::default().with(Undecided).with(Word("x"));
        assert_eq!(decide(&dialects, &[b'x'; MAX_FIRST_BYTES - 1]), "more");
        assert_eq!(decide(&dialects, &[b'x'; MAX_FIRST_BYTES]), "x");
        assert_eq!(decide(&Dialects::default().with(Undecided), &[0; MAX_FIRST_BYTES]), "native");
    }

    #[tokio::test]
    async fn bytes_that_were_looked_at_are_still_to_be_read() {
        let (mut near, far) = tokio::io::duplex(64);
        let mut channel = Channel::new(far, "a test");
        let sending = tokio::spawn(async move {
            for byte in b"GET it" {
                tokio::io::AsyncWriteExt::write_all(&mut near, &[*byte]).await.unwrap();
                tokio::task::yield_now().await;
            }
            near
        });
        let found = Dialects::default().with(Word("GET ")).recognize(&mut channel).await.unwrap();
        assert_eq!(found.unwrap().dialect.name(), "GET ");
        let mut read = channel.take_unread().to_vec();
        drop(sending.await.unwrap());
        channel.io_mut().read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"GET it");
    }
}

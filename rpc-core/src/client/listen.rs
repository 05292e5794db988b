//! Listeners near a session's server, from the client's side: connections that come there are
//! served here.
//!
//! A server that listens for its clients registers the functions `rpc.listen.*`; this module calls
//! them. A listener and each accepted connection are objects of the session: they are closed when
//! their last reference is dropped, and with the session.
//!
//! ```no_run
//! # async fn example(session: &rpc_core::Session) -> rpc_core::Result<()> {
//! let listener = session.listen("tcp://127.0.0.1:0").await?;
//! println!("listening at {}", listener.address());
//! let connection = listener.accept().await?;
//! while let Some(bytes) = connection.read().await? {
//!     connection.write(bytes).await?;
//! }
//! connection.finish().await?;
//! # Ok(())
//! # }
//! ```
//!
//! The client requests the bytes piece by piece, and a write waits until the socket has taken all,
//! so that a slow side slows the other down and neither keeps more than a few pieces.

use std::sync::Arc;

use bytes::Bytes;

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::files::functions;
use crate::client::references::{RemoteFunction, RemoteObject};
use crate::client::session::Session;

impl Session {
    /// Has the server listen at `address`, such as `tcp://127.0.0.1:0` or `unix:/run/x.sock`, for
    /// connections that this side serves.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused) if the server does not let this client
    /// listen there; [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded) if the session
    /// has too many listeners; [`ErrorKind::Io`](crate::ErrorKind::Io) if the address is in use.
    pub fn listen(&self, address: &str) -> Action<RemoteListener> {
        let (session, address) = (self.clone(), address.to_owned());
        let listen = async move |options: Options<'static>| {
            let names =
                ["rpc.listen.open", "rpc.listen.accept", "rpc.listen.read", "rpc.listen.write", "rpc.listen.finish"];
            let [open, accept, read, write, finish] = functions(&session, &options, names).await?;
            let (listener, address) = options.apply(open.call((address,))).await?;
            let functions = Arc::new(ConnectionFunctions { read, write, finish });
            Ok(RemoteListener { listener, address, accept, functions })
        };
        ScopedAction::steps(listen).concurrent()
    }
}

/// A listener near a session's server, made by [`Session::listen`]. Dropping it closes the port;
/// accepted connections live on.
#[derive(Debug)]
pub struct RemoteListener {
    listener: RemoteObject,
    address: String,
    accept: RemoteFunction,
    functions: Arc<ConnectionFunctions>,
}

/// The functions of accepted connections.
#[derive(Debug)]
struct ConnectionFunctions {
    read: RemoteFunction,
    write: RemoteFunction,
    finish: RemoteFunction,
}

impl RemoteListener {
    /// Returns the address of the listener, with the port that was chosen.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits for the next connection. Connections that nobody waits for queue at the server's
    /// system, as do those beyond the number that the session may have. Dropping the operation may
    /// lose a connection that has just come.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded) if the session has too many
    /// open files; [`ErrorKind::Io`](crate::ErrorKind::Io) if the listener is broken.
    pub fn accept(&self) -> Action<RemoteConnection> {
        let (listener, accept, functions) = (self.listener.clone(), self.accept.clone(), self.functions.clone());
        let accept = async move |options: Options<'static>| {
            let (connection, peer) = options.apply(accept.call((&listener,))).await?;
            Ok(RemoteConnection { connection, peer, functions })
        };
        ScopedAction::steps(accept).concurrent()
    }
}

/// A connection that was accepted near a session's server. Dropping it closes the connection.
///
/// Reads and writes are concurrent with each other. Several in flight need an order: start them on
/// one [lane](ScopedAction::lane), which they occupy until they are done, so best on a lane of
/// their own for each direction. A read or write that is cancelled may have taken or sent bytes.
#[derive(Clone, Debug)]
pub struct RemoteConnection {
    connection: RemoteObject,
    peer: String,
    functions: Arc<ConnectionFunctions>,
}

impl RemoteConnection {
    /// Maximum length in bytes of what a [read](Self::read) yields, and the best one for a
    /// [write](Self::write).
    pub const MAX_PIECE: usize = 256 << 10;

    /// Returns the name of the peer, such as its address, for people.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Waits for bytes; `None` once the peer has sent its last.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if the connection is broken.
    pub fn read(&self) -> Action<Option<Bytes>> {
        self.functions.read.call((&self.connection,)).concurrent()
    }

    /// Sends bytes. Done when the server's socket has taken all of them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if the connection is broken.
    pub fn write(&self, data: impl Into<Bytes>) -> Action<()> {
        self.functions.write.call((&self.connection, data.into())).concurrent()
    }

    /// Ends the sending direction: the peer reads the end, and may still send.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if the connection is broken.
    pub fn finish(&self) -> Action<()> {
        self.functions.finish.call((&self.connection,)).concurrent()
    }
}

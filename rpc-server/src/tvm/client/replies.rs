//! The replies of a server: charged, checked, and given to their requests.

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError};
use rpc_tvm::wire::{ClientEvent, ClientWire, ServerReply};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::link::lost;
use super::state::ClientCore;

/// Text by which a server begins the error that the time of the session is over.
const TIMEOUT: &str = "RPCSessionTimeoutError";

/// The replies of a connection, from bytes to their requests.
pub(super) struct Replies {
    pub(super) wire: ClientWire,
    /// Charge for the reply that is being collected.
    charged: Option<MemoryLease>,
    /// The last reply, if it says that the time of the session is over. A function may say so, too:
    /// the server closes the connection if it is true.
    timeout: Option<RpcError>,
}

impl Replies {
    pub(super) fn new(wire: ClientWire) -> Self {
        Self { wire, charged: None, timeout: None }
    }

    /// Gives the replies that have arrived to their requests.
    ///
    /// # Errors
    ///
    /// The reason for which there are no more.
    pub(super) fn handle(&mut self, core: &ClientCore) -> Result<(), RpcError> {
        loop {
            let event = self.wire.poll_event(core.link.expected());
            let event = event.map_err(|error| RpcError::new(ErrorKind::Protocol, error.to_string()))?;
            match event {
                None => return Ok(()),
                Some(ClientEvent::Announced { len }) => match core.memory.reserve(len) {
                    Ok(lease) => drop(self.charged.replace(lease)),
                    Err(_) => self.wire.refuse(),
                },
                Some(ClientEvent::Reply(reply)) => {
                    let reply = checked(reply, core);
                    let timeout = reply.as_ref().err().filter(|error| error.kind() == ErrorKind::SessionTimeout);
                    self.timeout = timeout.cloned();
                    core.link.answer(reply);
                    drop(self.charged.take());
                }
                Some(ClientEvent::Unasked(text)) => {
                    let error = exception(text);
                    // The server closes the connection after it, whatever it says.
                    let is_timeout = error.kind() == ErrorKind::SessionTimeout;
                    let said = error.message().to_owned();
                    return Err(if is_timeout { error } else { RpcError::new(ErrorKind::PeerLost, said) });
                }
                Some(ClientEvent::Shutdown) => {
                    let text = "the server has ended the session: it died, or was stopped";
                    return Err(RpcError::new(ErrorKind::PeerLost, text));
                }
                Some(_) => return Err(RpcError::new(ErrorKind::Protocol, "the server says hello twice")),
            }
        }
    }

    /// Returns the error for the end of the stream.
    pub(super) fn end_of_stream(&self) -> RpcError {
        if let Some(timeout) = &self.timeout {
            return timeout.clone();
        }
        let is_cut = self.wire.is_inside_message();
        let text =
            if is_cut { "the connection ended inside a message" } else { "the server has closed the connection" };
        RpcError::new(ErrorKind::PeerLost, text)
    }

    /// Returns the error for a connection that broke.
    pub(super) fn broken(&self, error: &std::io::Error) -> RpcError {
        self.timeout.clone().unwrap_or_else(|| lost(error))
    }
}

/// Reads replies, and gives them to their requests. Returns the reason for which there are no more.
pub(super) async fn read(core: &ClientCore, io: &mut (impl AsyncRead + Unpin), mut replies: Replies) -> RpcError {
    loop {
        if let Err(error) = replies.handle(core) {
            return error;
        }
        match io.read_buf(&mut replies.wire.input()).await {
            Ok(0) => return replies.end_of_stream(),
            Ok(_) => {}
            Err(error) => return replies.broken(&error),
        }
    }
}

/// Returns the reply, or the error that it stands for.
fn checked(reply: ServerReply, core: &ClientCore) -> Result<ServerReply, RpcError> {
    match reply {
        ServerReply::Exception(text) => Err(exception(text).with_peer(&*core.peer).from_next_hop()),
        ServerReply::Unusable(text) => Err(RpcError::new(ErrorKind::Protocol, text).may_have_run(true)),
        ServerReply::TooLarge { len } => {
            let (limit, all) = (core.max_message, core.memory.limit());
            let text = format!(
                "a reply of {len} bytes has been passed over: max_message is {limit}, and all sessions with servers of \
                 TVM may hold {all} together"
            );
            Err(RpcError::new(ErrorKind::LimitExceeded, text).may_have_run(true))
        }
        reply => Ok(reply),
    }
}

/// Returns the error that the text of a server stands for.
fn exception(text: String) -> RpcError {
    let kind = match text.as_str() {
        text if text.starts_with(TIMEOUT) => ErrorKind::SessionTimeout,
        text if text.contains("Device API ") && text.contains(" is not enabled") => ErrorKind::DeviceUnavailable,
        _ => ErrorKind::Application,
    };
    RpcError::new(kind, text).may_have_run(true)
}

//! The replies of a server: charged, checked, and given to their requests.

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError};
use rpc_tvm::wire::{ClientEvent, ClientWire, ServerReply};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::link::lost;
use super::state::ClientCore;

/// Text by which a server begins the error that the time of the session is over.
const TIMEOUT: &str = "RPCSessionTimeoutError";

/// Reads replies, and gives them to their requests. Returns the reason for which there are no more.
pub(super) async fn read(core: &ClientCore, io: &mut (impl AsyncRead + Unpin), mut wire: ClientWire) -> RpcError {
    // Charge for the reply that is being collected.
    let mut charged: Option<MemoryLease> = None;
    loop {
        let event = match wire.poll_event(core.link.expected()) {
            Ok(event) => event,
            Err(error) => return RpcError::new(ErrorKind::Protocol, error.to_string()),
        };
        match event {
            Some(ClientEvent::Announced { len }) => match core.memory.reserve(len) {
                Ok(lease) => drop(charged.replace(lease)),
                Err(_) => wire.refuse(),
            },
            Some(ClientEvent::Reply(reply)) => {
                match checked(reply, core) {
                    Err(error) if error.kind() == ErrorKind::SessionTimeout => return error,
                    reply => core.link.answer(reply),
                }
                drop(charged.take());
            }
            Some(ClientEvent::Unasked(text)) => {
                let error = exception(text);
                // The server closes the connection after it, whatever it says.
                let is_timeout = error.kind() == ErrorKind::SessionTimeout;
                let said = error.message().to_owned();
                return if is_timeout { error } else { RpcError::new(ErrorKind::PeerLost, said) };
            }
            Some(ClientEvent::Shutdown) => {
                return RpcError::new(ErrorKind::PeerLost, "the server has ended the session: it died, or was stopped");
            }
            Some(_) => return RpcError::new(ErrorKind::Protocol, "the server says hello twice"),
            None => match io.read_buf(&mut wire.input()).await {
                Ok(0) if wire.is_inside_message() => {
                    return RpcError::new(ErrorKind::PeerLost, "the connection ended inside a message");
                }
                Ok(0) => return RpcError::new(ErrorKind::PeerLost, "the server has closed the connection"),
                Ok(_) => {}
                Err(error) => return lost(&error),
            },
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

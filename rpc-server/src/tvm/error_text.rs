//! Texts of errors, for clients of TVM.

use rpc_core::{ErrorKind, RpcError};

/// Maximum length in bytes of the text of an error, which is charged to nobody.
const MAX_ERROR: usize = 16 << 10;

/// Beginning of the error that the time of a session is over.
const TIMEOUT: &str = "RPCSessionTimeoutError";

/// Returns the text by which a client of TVM gets an error, which is all that it shows. What a
/// function says by itself stays as it is; other errors name their kind. The end of a long text is
/// left out.
pub(super) fn error_text(error: &RpcError) -> String {
    let message = error.message();
    let end = (0..=message.len().min(MAX_ERROR)).rev().find(|end| message.is_char_boundary(*end)).unwrap_or(0);
    let (message, left_out) = message.split_at(end);
    let end = if left_out.is_empty() { String::new() } else { format!(" … ({} bytes more)", left_out.len()) };
    match error.kind() {
        ErrorKind::Application => format!("{message}{end}"),
        // Clients know this error by its beginning. That of a further server has it already.
        ErrorKind::SessionTimeout if message.starts_with(TIMEOUT) => format!("{message}{end}"),
        ErrorKind::SessionTimeout => format!("{TIMEOUT}: {message}{end}"),
        kind @ (ErrorKind::PeerLost | ErrorKind::PeerSilent) => match error.peer() {
            Some(peer) => format!("{kind}: {message}{end} (at {peer})"),
            None => format!("{kind}: {message}{end}"),
        },
        kind => format!("{kind}: {message}{end}"),
    }
}

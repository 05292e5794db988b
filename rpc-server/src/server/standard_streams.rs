//! Standard input and output of a server: its announcements, and the end of its standard input.

use std::io::{self, Read, Write};

use tokio::sync::oneshot;

use super::running::Running;

/// Prints the addresses on which the server listens, the address of its metrics, and `more` lines.
pub(super) fn announce(running: &Running, more: &[String]) {
    let mut stdout = io::stdout().lock();
    for address in running.addresses() {
        // Standard output may be closed, which is no reason to stop.
        let _ = writeln!(stdout, "listening on {address}");
    }
    if let Some(address) = running.metrics_address() {
        let _ = writeln!(stdout, "metrics on http://{address}");
    }
    for line in more {
        let _ = writeln!(stdout, "{line}");
    }
    let _ = stdout.flush();
}

/// Resolves when standard input ends. A thread of its own reads it, because the runtime would wait
/// for one of its threads.
pub(super) async fn stdin_end() {
    let (ended, end) = oneshot::channel::<()>();
    let watch = move || {
        let _ended = ended;
        let mut buffer = [0; 1024];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
                _ => {}
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("rpc-stdin".into()).spawn(watch) {
        tracing::error!(%error, "cannot watch standard input");
        return std::future::pending().await;
    }
    // The thread sends nothing: it drops the sender when it returns.
    let _ = end.await;
}

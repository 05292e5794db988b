//! A server of this project that waits at a proxy of TVM for clients (`serve --tvm-proxy`).
//!
//! One connection waits at a time, as a proxy of TVM allows; when a client has come, the next one
//! does, up to the capacity of the server.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::{Address, Backoff, Channel, Dial, Dialect, Server, Transports};
use rpc_tvm::wire::{Hello, HelloAnswer, ParkedServerWire, ServerAnswer};
use tokio::io::AsyncReadExt as _;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::link::{lost, write};

/// First and longest pause before the next attempt to wait at the proxy.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));

/// Shortest time from one client to the next: a proxy that accepts and closes at once must not be
/// dialled in a busy loop.
const SHORTEST: Duration = Duration::from_millis(50);

/// Task that keeps a server waiting at a proxy, until dropped. Sessions go on.
#[derive(Debug)]
pub(crate) struct TvmParking(JoinHandle<()>);

/// Proxy at which a server waits, and the terms of it.
#[derive(Clone, Debug)]
pub(crate) struct TvmParkingTerms {
    pub(crate) proxy: Address,
    /// Key that clients name.
    pub(crate) key: String,
    /// Number of clients that are served at a time.
    pub(crate) capacity: u32,
    pub(crate) transports: Transports,
    pub(crate) dial: Dial,
}

impl TvmParking {
    /// Starts to wait at the proxy, for clients that `server` serves in `dialect`. Needs a tokio
    /// runtime.
    pub(crate) fn start(server: &Server, dialect: Arc<dyn Dialect>, terms: TvmParkingTerms) -> Self {
        let server = server.clone();
        Self(tokio::spawn(async move { keep_waiting(&server, &dialect, &terms).await }))
    }

    /// Leaves the proxy.
    pub(crate) fn leave(&self) {
        self.0.abort();
    }
}

impl Drop for TvmParking {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits for clients, one after the other.
async fn keep_waiting(server: &Server, dialect: &Arc<dyn Dialect>, terms: &TvmParkingTerms) {
    let TvmParkingTerms { proxy, key, .. } = terms;
    let places = Arc::new(Semaphore::new(terms.capacity as usize));
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut last = String::new();
    loop {
        // The semaphore is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let begun = Instant::now();
        match wait_once(terms).await {
            Ok((channel, answer)) => {
                if !std::mem::take(&mut last).is_empty() {
                    rpc_core::log_limited!(INFO, %proxy, key, "back at the proxy of TVM");
                }
                backoff.reset();
                let served = server.serve_dialect(channel, &answer, dialect.clone());
                tokio::spawn(async move {
                    // A task that panicked has ended as well.
                    let _ = served.await;
                    drop(place);
                });
                tokio::time::sleep_until(begun + SHORTEST).await;
            }
            Err(error) => {
                drop(place);
                // The same error is logged once, and not at each attempt.
                let text = error.to_string();
                if text != last {
                    rpc_core::log_limited!(WARN, %proxy, key, %error, "not at the proxy of TVM; trying again");
                    last = text;
                }
                tokio::time::sleep(backoff.pause()).await;
            }
        }
    }
}

/// Waits at the proxy for one client. Returns the channel that leads to it, and the bytes that a
/// client which dials the server itself would begin with: the proxy passes its key on in that form.
async fn wait_once(terms: &TvmParkingTerms) -> Result<(Channel, Vec<u8>)> {
    let TvmParkingTerms { proxy, key, transports, dial, .. } = terms;
    let dialled = transports.dial(proxy, dial).await;
    let mut channel = dialled.map_err(|error| RpcError::new(ErrorKind::PeerLost, error.to_string()))?;
    write(channel.io_mut(), &Hello { key: format!("server:{key}") }.encode()).await?;
    let mut wire = ParkedServerWire::new();
    let answer = loop {
        let polled = wire.poll_answer();
        if let Some(answer) = polled.map_err(|error| RpcError::new(ErrorKind::Protocol, error.to_string()))? {
            break answer;
        }
        let read = channel.io_mut().read_buf(&mut wire.input()).await;
        if read.map_err(|error| lost(&error))? == 0 {
            return Err(RpcError::new(ErrorKind::PeerLost, "the proxy has closed the connection"));
        }
    };
    match answer {
        ServerAnswer::Accepted { key: client } => {
            let answer = HelloAnswer::Accepted(&client).encode();
            Ok((channel, [&answer[..], wire.rest()].concat()))
        }
        ServerAnswer::Duplicate => {
            Err(RpcError::new(ErrorKind::Refused, format!("another server waits there under the key '{key}'")))
        }
        _ => Err(RpcError::new(ErrorKind::PeerSilent, "no client has come within the proxy's time, or it stops")),
    }
}

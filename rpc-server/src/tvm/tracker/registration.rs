//! Registration of a server at a tracker of TVM (`serve --tvm-tracker`).
//!
//! The server offers a match key for each place that is free, looks now and then at those that were
//! given out, and offers a place again after its session. A tracker that is gone is tried again,
//! with growing pauses. Sessions are not affected.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::{Address, Backoff};
use rpc_tvm::wire::{InfoPort, PeerInfo, TrackerAnswer, TrackerMessage};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use super::super::link::lost;
use super::link::{TrackerLink, malformed, within};
use super::match_keys::MatchKeys;

/// First and longest pause before the next attempt to reach the tracker.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Time between two looks at the match keys that were given out, as of a server of TVM.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Task that keeps a server registered, until dropped. The tracker forgets the server then.
#[derive(Debug)]
pub(crate) struct TvmRegistrar(JoinHandle<()>);

/// Address of a server as a tracker of TVM gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TvmAdvertisement {
    /// Host; `None` for the one that the server comes from.
    pub(crate) host: Option<String>,
    pub(crate) port: u16,
}

impl TvmAdvertisement {
    /// Returns the address of a server that clients of TVM can dial, if it is one.
    pub(crate) fn of(address: &Address) -> Option<Self> {
        (address.scheme() == "tcp").then_some(())?;
        let (host, port) = (address.host()?, address.port()?);
        let is_unspecified = host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_unspecified());
        Some(Self { host: (!is_unspecified).then(|| host.to_owned()), port })
    }
}

impl TvmRegistrar {
    /// Starts to register. Needs a tokio runtime.
    pub(crate) fn start(tracker: &Address, keys: Arc<MatchKeys>, advertised: TvmAdvertisement) -> Self {
        let tracker = tracker.clone();
        Self(tokio::spawn(async move { run(&tracker, &keys, &advertised, keys.key()).await }))
    }

    /// Starts to register a server that waits at a proxy, once the address of that is known. Needs
    /// a tokio runtime.
    pub(crate) fn start_at_proxy(
        tracker: &Address,
        keys: Arc<MatchKeys>,
        mut proxy: watch::Receiver<Option<TvmAdvertisement>>,
    ) -> Self {
        let tracker = tracker.clone();
        Self(tokio::spawn(async move {
            let advertised = proxy.wait_for(Option::is_some).await.map(|known| known.clone());
            if let Ok(Some(advertised)) = advertised {
                run(&tracker, &keys, &advertised, &format!("proxy[{}]", keys.key())).await;
            }
        }))
    }

    /// Leaves the tracker.
    pub(crate) fn leave(&self) {
        self.0.abort();
    }
}

impl Drop for TvmRegistrar {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Keeps the server registered. `name` is what the tracker shows of it.
async fn run(tracker: &Address, keys: &Arc<MatchKeys>, advertised: &TvmAdvertisement, name: &str) {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    let mut last = String::new();
    loop {
        let mut is_registered = false;
        let Err(error) = register(tracker, keys, advertised, name, &mut is_registered).await else { return };
        keys.revoke_all();
        if is_registered {
            backoff.reset();
            last.clear();
        }
        // The same error is logged once, and not at each attempt.
        let text = error.to_string();
        if text != last {
            rpc_core::log_limited!(WARN, %tracker, %error, "not registered with the tracker of TVM; trying again");
            last = text;
        }
        tokio::time::sleep(backoff.pause()).await;
    }
}

/// Registers, and offers places until an error.
async fn register(
    tracker: &Address,
    keys: &Arc<MatchKeys>,
    advertised: &TvmAdvertisement,
    name: &str,
    is_registered: &mut bool,
) -> Result<()> {
    let TvmAdvertisement { host, port } = advertised.clone();
    let mut link = connect(tracker).await?;
    let key = Some(format!("server:{name}"));
    let info = PeerInfo { key, address: Some((host.clone(), InfoPort::Number(port))) };
    obey(&mut link, &TrackerMessage::UpdateInfo(info)).await?;
    let mut looks = looks();
    loop {
        while let Some(match_key) = keys.issue()? {
            let (key, host) = (keys.key().to_owned(), host.clone());
            obey(&mut link, &TrackerMessage::Put { key, port, match_key, host }).await?;
            if !*is_registered {
                rpc_core::log_limited!(INFO, %tracker, key = keys.key(), "registered with the tracker of TVM");
                *is_registered = true;
            }
        }
        let is_time_to_look = tokio::select! {
            is_time_to_look = next_turn(keys, &mut looks) => is_time_to_look,
            end = end_of(&mut link) => return Err(end),
        };
        if is_time_to_look {
            let TrackerAnswer::MatchKeys(pending) = ask(&mut link, &TrackerMessage::PendingMatchKeys).await? else {
                return Err(malformed("its reply has no match keys"));
            };
            if keys.look(&pending) {
                tracing::debug!(%tracker, "a client was given this server, and does not come: offering it again");
            }
        }
    }
}

/// Returns the times of the looks at the match keys that the tracker has not given out.
fn looks() -> Interval {
    let mut looks = interval_at(Instant::now() + LOOK_INTERVAL, LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    looks
}

/// Waits for a place that is to be offered, or for the time of the next look, whatever else becomes
/// free before: places whose clients do not come must not wait for that. Returns true if it is time
/// to look, and there is something to look for. Cancel-safe.
async fn next_turn(keys: &MatchKeys, looks: &mut Interval) -> bool {
    tokio::select! {
        biased;
        _ = looks.tick() => keys.has_offered(),
        () = keys.freed() => false,
    }
}

async fn connect(tracker: &Address) -> Result<TrackerLink<TcpStream>> {
    let (Some(host), Some(port)) = (tracker.host(), tracker.port()) else {
        return Err(RpcError::invalid_argument(format!("{tracker} is no address of a tracker of TVM")));
    };
    let connected = within("the connect", TcpStream::connect((host, port))).await?;
    let stream = connected.map_err(|error| RpcError::new(ErrorKind::PeerLost, format!("cannot connect: {error}")))?;
    // Messages are small, and each waits for its reply. Without this they are only slower.
    _ = stream.set_nodelay(true);
    TrackerLink::begin(stream).await
}

/// Sends a message that the tracker has to obey.
async fn obey(link: &mut TrackerLink<TcpStream>, message: &TrackerMessage) -> Result<()> {
    match ask(link, message).await? {
        TrackerAnswer::Code(0) => Ok(()),
        _ => Err(RpcError::new(ErrorKind::Refused, "the tracker of TVM has refused this server")),
    }
}

async fn ask(link: &mut TrackerLink<TcpStream>, message: &TrackerMessage) -> Result<TrackerAnswer> {
    let reply = within("the reply", link.exchange(message)).await??;
    TrackerAnswer::decode(&reply).map_err(|error| malformed(&error.to_string()))
}

/// Resolves when the connection ends, or the tracker says what nobody has asked for.
async fn end_of(link: &mut TrackerLink<TcpStream>) -> RpcError {
    match link.0.read(&mut [0]).await {
        Ok(0) => RpcError::new(ErrorKind::PeerLost, "the tracker has closed the connection"),
        Ok(_) => malformed("it says what nobody has asked for"),
        Err(error) => lost(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn places_that_become_free_do_not_put_off_the_looks() {
        let keys = MatchKeys::new("rasp", 2);
        let (busy, _given_out) = (keys.issue().unwrap().unwrap(), keys.issue().unwrap().unwrap());
        let mut used = keys.take(&busy);
        let (mut looks, begun) = (looks(), Instant::now());
        let mut turns = Vec::new();
        while turns.len() < 12 {
            // The session of one place ends each time.
            tokio::time::sleep(LOOK_INTERVAL * 2 / 3).await;
            drop(used.take());
            turns.push(next_turn(&keys, &mut looks).await);
            used = keys.issue().unwrap().and_then(|key| keys.take(&key));
        }
        let seen = turns.iter().filter(|is_time_to_look| **is_time_to_look).count();
        assert!(seen >= 4 && seen < turns.len(), "{turns:?} in {:?}", begun.elapsed());
    }
}

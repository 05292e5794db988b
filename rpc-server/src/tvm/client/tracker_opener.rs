//! The opener of `tvm-tracker://` addresses: sessions with servers that a tracker of TVM gives out.

use rpc_core::{ErrorKind, Fault, RpcError, Session};
use rpc_transports::{Address, AddressError, BoxFuture, ConnectError, Connector, Properties, Reach, SessionOpener};
use rpc_tvm::wire::{TrackerGrant, TrackerMessage};
use tokio::time::{Instant, timeout_at};

use super::super::chain::{SCHEME as SERVER_SCHEME, TIMEOUT};
use super::super::tracker::link::{TrackerLink, malformed};
use super::opener::{TvmOpener, dial_plan, is_key, problem_of, timeout};

/// Scheme of the addresses of trackers of TVM.
const SCHEME: &str = "tvm-tracker";

/// Parameter of an address with the priority of the request.
const PRIORITY: &str = "priority";

/// Priority of requests that name none, as of TVM's clients.
const DEFAULT_PRIORITY: i64 = 1;

/// Number of servers that are tried, one after the other, as by TVM's clients.
const ATTEMPTS: u32 = 5;

/// Opener of sessions with servers that a tracker of TVM gives out:
/// `tvm-tracker://host:port/KEY?priority=NUMBER&timeout=SECONDS`, where the last two may be missing.
///
/// A server that was granted is used at once; it registers again by itself after the session. As
/// with [`TvmOpener`], the last hop of a chain does all of that, and so reaches what the tracker
/// names.
#[derive(Debug)]
pub(crate) struct TvmTrackerOpener {
    servers: TvmOpener,
}

impl TvmTrackerOpener {
    /// Creates the opener. The sessions count as those of `servers`.
    pub(crate) fn new(servers: TvmOpener) -> Self {
        Self { servers }
    }
}

impl SessionOpener for TvmTrackerOpener {
    fn schemes(&self) -> &[&str] {
        &[SCHEME]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let problem = match problem_of(at) {
            Some(problem) => problem,
            None if at.parameters().any(|name| !matches!(name, TIMEOUT | PRIORITY)) => {
                "timeout and priority are its parameters"
            }
            None if priority(at).is_err() => "the priority is no whole number",
            // The servers may be anywhere.
            None => return Ok(Properties::plain(Reach::Network)),
        };
        Err(AddressError::invalid(at, format!("{problem}; write for example tvm-tracker://pool.lan:9190/KEY")))
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        let (host, port) = at.host_and_port().unwrap_or_default();
        let bare = Address::at_host(SCHEME, host, port)?;
        at.key().map_or(Ok(bare.clone()), |key| bare.with_key(key))
    }

    fn open<'a>(&'a self, to: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(self.connect(to, connector))
    }
}

impl TvmTrackerOpener {
    async fn connect(&self, to: &Address, connector: &Connector) -> Result<Session, ConnectError> {
        let end = connector.queue_limit().and_then(|limit| Instant::now().checked_add(limit));
        let mut attempt = 1;
        loop {
            let (server, key) = granted(to, connector, end).await?;
            let error = match self.servers.connect(&server, &connector.clone().key(&key)).await {
                Ok(session) => return Ok(session),
                Err(error) => error.into_rpc_error(),
            };
            // A server that has stopped waiting for this client, or that is gone.
            let another_may_do = error.fault() == Fault::Link || error.kind() == ErrorKind::Refused;
            if attempt == ATTEMPTS || !another_may_do {
                return Err(error.context(format_args!("the tracker of TVM has granted {server}")).into());
            }
            tracing::debug!(%server, %error, "a server that was granted gave no session; asking again");
            attempt += 1;
        }
    }
}

/// Waits until the tracker grants a server, up to `end`. Returns its address, and the key for this
/// client there.
async fn granted(to: &Address, connector: &Connector, end: Option<Instant>) -> Result<(Address, String), ConnectError> {
    let (at, dialling) = dial_plan(to, connector)?;
    let mut channel = dialling.open_channel(&at).await?;
    let asked = async {
        let mut link = TrackerLink::begin(channel.io_mut()).await?;
        let key = connector.requested_key().unwrap_or_default().to_owned();
        let priority = priority(to).unwrap_or(DEFAULT_PRIORITY);
        link.exchange(&TrackerMessage::Request { key, user: String::new(), priority }).await
    };
    let reply = match end {
        Some(end) => timeout_at(end, asked).await.unwrap_or_else(|_| {
            let text = "the time to wait for a server is over, and the tracker of TVM has granted none";
            Err(RpcError::new(ErrorKind::DeadlineExceeded, text))
        }),
        None => asked.await,
    };
    let named = |error: RpcError| error.with_peer(to.to_string());
    let grant = TrackerGrant::decode(&reply.map_err(named)?);
    match grant.map_err(|error| named(malformed(&error.to_string())))? {
        TrackerGrant::Granted { host, port, match_key } if is_key(&match_key) => {
            let server = Address::at_host(SERVER_SCHEME, &host, port);
            let server = server.map_err(|_| named(malformed(&format!("it grants a server at '{host}'"))))?;
            let server = match timeout(to) {
                Ok(Some(seconds)) => format!("{server}?{TIMEOUT}={seconds}").parse()?,
                _ => server,
            };
            Ok((server, match_key))
        }
        TrackerGrant::Granted { .. } => {
            Err(named(malformed("it grants a key with spaces, or one that is too long")).into())
        }
        TrackerGrant::Refused(reason) => {
            let text = format!("the tracker of TVM has refused the request: {}", rpc_core::printable_line(&reason));
            Err(named(RpcError::new(ErrorKind::Refused, text)).into())
        }
    }
}

/// Returns the priority that an address names.
fn priority(at: &Address) -> Result<i64, ()> {
    at.parameter(PRIORITY).map_or(Ok(DEFAULT_PRIORITY), |text| text.parse().map_err(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_a_port_a_key_and_two_parameters() {
        let opener = TvmTrackerOpener::new(TvmOpener::new());
        let check = |text: &str| opener.check(&text.parse().unwrap());
        for right in ["tvm-tracker://127.0.0.1:9190", "tvm-tracker://pool:9190/rasp?priority=-3&timeout=0.5"] {
            assert_eq!(check(right).unwrap(), Properties::plain(Reach::Network), "{right}");
        }
        for wrong in [
            "tvm-tracker://pool",
            "tvm-tracker:pool",
            "tvm-tracker://me@pool:9190",
            "tvm-tracker://pool:9190/k?then=a:1",
            "tvm-tracker://pool:9190/k?timeout=0",
            "tvm-tracker://pool:9190/k?priority=high",
        ] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
        let canonical = |text: &str| opener.canonical(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(canonical("tvm-tracker://POOL:09190/k?priority=3"), "tvm-tracker://pool:9190/k");
    }
}

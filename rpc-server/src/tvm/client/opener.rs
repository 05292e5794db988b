//! The opener of `tvm://` addresses.

use std::sync::Arc;

use rpc_core::limits::MemoryQuota;
use rpc_core::{RpcError, Session};
use rpc_transports::{
    Address, AddressError, BoxFuture, ConnectError, Connector, Dial, Properties, Reach, SessionOpener,
};

use super::super::chain::{SCHEME, Stops, THEN, TIMEOUT};
use super::farewell::leave_blocking;
use super::handshake::{Terms, begin, begin_blocking};

/// Bytes that all sessions of a process with servers of TVM may hold for large frames, replies on
/// their way, and files.
const MAX_MEMORY: u64 = 512 << 20;

/// Longest time-out in seconds. A server of TVM counts it in milliseconds of 32 bits: a longer one
/// stops it for good.
const MAX_TIMEOUT: f64 = 1e6;

/// Number of keep-alive intervals of silence after which a server is given up.
const SILENT_INTERVALS: u32 = 3;

/// Longest key, so that one with its options fits the limit of any peer.
const MAX_KEY: usize = 1024;

/// Opener of sessions with servers of TVM: `tvm://host:port/KEY?timeout=SECONDS&then=STOPS`, of
/// which all but host and port may be missing. Each stop is a server that the one before dials.
///
/// The protocol has neither identity nor encryption, and a server of TVM takes any client. The last
/// hop of a chain opens the session, so that one beside the server can guard it.
#[derive(Clone, Debug)]
pub(crate) struct TvmOpener {
    memory: Arc<MemoryQuota>,
}

impl TvmOpener {
    pub(crate) fn new() -> Self {
        Self { memory: MemoryQuota::new("memory of sessions with servers of TVM", MAX_MEMORY, None) }
    }
}

impl SessionOpener for TvmOpener {
    fn schemes(&self) -> &[&str] {
        &[SCHEME]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let problem = match problem_of(at) {
            Some(problem) => problem,
            None if at.parameters().any(|name| !matches!(name, TIMEOUT | THEN)) => {
                "timeout and then are its parameters"
            }
            None if Stops::of_address(at).is_err() => "'then' is no list of servers such as a:9090/KEY;b:9090",
            None if at.has_loopback_host() && at.parameter(THEN).is_none() => {
                return Ok(Properties::plain(Reach::Machine));
            }
            None => return Ok(Properties::plain(Reach::Network)),
        };
        Err(AddressError::invalid(at, format!("{problem}; write for example tvm://board.lan:9090/KEY?timeout=60")))
    }

    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        // An operator allows a server, whatever the time that its clients want. Each chain needs a
        // word of its own, since a server of TVM dials the one behind it without asking anybody.
        let (host, port) = at.host_and_port().unwrap_or_default();
        let bare = Address::at_host(SCHEME, host, port)?;
        let bare = at.key().map_or(Ok(bare.clone()), |key| bare.with_key(key))?;
        Stops::of_address(at).map_err(|problem| AddressError::invalid(at, problem))?.behind(&bare)
    }

    fn open<'a>(&'a self, to: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(self.connect(to, connector))
    }

    fn open_blocking(&self, to: &Address, connector: &Connector) -> Option<Result<Session, ConnectError>> {
        self.connect_blocking(to, connector).transpose()
    }
}

impl TvmOpener {
    pub(super) async fn connect(&self, to: &Address, connector: &Connector) -> Result<Session, ConnectError> {
        let terms = self.terms(to, connector)?;
        let (at, connector) = dial_plan(to, connector)?;
        let channel = connector.open_channel(&at).await?;
        let session = begin(channel, terms).await.map_err(|error| error.with_peer(to.to_string()))?;
        Ok(Session::new(session))
    }

    fn connect_blocking(&self, to: &Address, connector: &Connector) -> Result<Option<Session>, ConnectError> {
        rpc_core::blocking::check_may_block()?;
        let terms = self.terms(to, connector)?;
        let (at, connector) = dial_plan(to, connector)?;
        let Some(channel) = connector.open_channel_blocking(&at)? else { return Ok(None) };
        match begin_blocking(&channel, terms) {
            Ok(protocol) => Ok(Some(Session::new(connector.start_blocking(channel, protocol)?))),
            Err(error) => {
                leave_blocking(channel);
                Err(error.with_peer(to.to_string()).into())
            }
        }
    }

    fn terms<'a>(&self, to: &Address, connector: &'a Connector) -> Result<Terms<'a>, ConnectError> {
        let key = connector.requested_key().unwrap_or_default();
        if !is_key(key) {
            let text = format!("the key {key:?} has spaces or is too long for a server of TVM");
            return Err(RpcError::invalid_argument(text).into());
        }
        let stops = Stops::of_address(to).map_err(|problem| AddressError::invalid(to, problem))?;
        Ok(Terms {
            peer: to.to_string(),
            key,
            timeout: timeout(to).ok().flatten(),
            constructor: stops.constructor(),
            max_message: connector.wire_limits().max_message,
            memory: self.memory.clone(),
            limit: connector.handshake_limit(),
        })
    }
}

/// Returns the address of the channel to a server, and the connector that opens it: the system
/// watches the connection, since the protocol cannot.
pub(super) fn dial_plan(to: &Address, connector: &Connector) -> Result<(Address, Connector), ConnectError> {
    let (host, port) = to.host_and_port().unwrap_or_default();
    let silence = connector.terms().keep_alive.saturating_mul(SILENT_INTERVALS);
    let dial = Dial { socket_silence: Some(silence), ..connector.terms().clone() };
    Ok((Address::tcp(host, port)?, connector.clone().dial(dial)))
}

/// Returns the fault of an address of a server of TVM, or of a tracker of such, in the parts that
/// both have.
pub(super) fn problem_of(at: &Address) -> Option<&'static str> {
    match () {
        () if at.host().is_none() => Some("two slashes and a host are missing"),
        () if at.port().is_none() => Some("no port follows the host"),
        () if at.user().is_some() => Some("there are no users"),
        () if timeout(at).is_err() => Some("the timeout is no number of seconds above 0, of 1000000 at most"),
        () if at.key().is_some_and(|key| !is_key(key)) => Some("the key has spaces, or is too long"),
        () => None,
    }
}

/// Returns the time-out that an address names.
pub(super) fn timeout(at: &Address) -> Result<Option<f64>, ()> {
    let Some(text) = at.parameter(TIMEOUT) else { return Ok(None) };
    // What is no number stops a server of TVM for good.
    text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= MAX_TIMEOUT).map(Some).ok_or(())
}

pub(super) fn is_key(key: &str) -> bool {
    key.len() <= MAX_KEY && !key.contains(char::is_whitespace) && !key.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_a_port_a_key_and_a_time() {
        let check = |text: &str| TvmOpener::new().check(&text.parse().unwrap());
        assert_eq!(check("tvm://127.0.0.1:9090").unwrap(), Properties::plain(Reach::Machine));
        assert_eq!(check("tvm://board:9090/rasp3b?timeout=0.5").unwrap(), Properties::plain(Reach::Network));
        let chain = check("tvm://127.0.0.1:9090/k?then=board:9090/rasp3b;inner:1").unwrap();
        assert_eq!(chain, Properties::plain(Reach::Network));
        for wrong in [
            "tvm://board",
            "tvm:board",
            "tvm://me@board:9090",
            "tvm://board:9090?token=x",
            "tvm://board:9090?timeout=abc",
            "tvm://board:9090?timeout=0",
            "tvm://board:9090?timeout=inf",
            "tvm://board:9090?timeout=nan",
            "tvm://board:9090?timeout=1000001",
            "tvm://board:9090?then=inner",
            "tvm://board:9090?then=",
        ] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn patterns_of_operators_do_not_see_the_time() {
        let canonical = |text: &str| TvmOpener::new().canonical(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(canonical("tvm://board:9090?timeout=5"), "tvm://board:9090");
        assert_eq!(canonical("tvm://[::1]:9090/k?timeout=5"), "tvm://[::1]:9090/k");
        assert_eq!(canonical("tvm://a:1?then=B:01/k&timeout=5"), "tvm://a:1?then=b:1/k");
    }
}

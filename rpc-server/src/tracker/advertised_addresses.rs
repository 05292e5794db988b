//! Advertised addresses of servers: which ones a server may advertise, and a probe of them.
//!
//! A tracker sends clients to these addresses and probes them itself, so a server could use it to
//! scan its network. Therefore a server may advertise the IP address that it comes from, and any
//! other only if the operator allows it.

use std::net::IpAddr;
use std::time::Duration;

use super::limits::clip;
use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::tracker::{Reach, TICKET_REFUSED};
use rpc_transports::{Address, ConnectError, Connector, Properties, TransportError, Transports};

/// Time limit of a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

/// Text that is not a ticket: a server that answers refuses it, and no slot is taken.
const NO_TICKET: &str = "probe";

/// Returns the addresses for clients, if a server that comes from `peer` may advertise them.
///
/// # Errors
///
/// [`ErrorKind::Refused`] with advice for the operator, and [`ErrorKind::InvalidArgument`].
pub(super) fn admit(told: &[String], peer: &str, allowed: &[String], transports: &Transports) -> Result<Vec<String>> {
    let from = machine(peer);
    let last = told.len().saturating_sub(1);
    let admit = |(at, text): (usize, &String)| {
        let address: Address = text
            .parse()
            .map_err(|error| RpcError::invalid_argument(format!("the advertised address '{text}': {error}")))?;
        let address = if at == last { with_host(address, from)? } else { address };
        // Clients and the tracker dial the address, which must not start programs.
        let properties = transports.check(&address).ok().filter(|properties| !properties.starts_programs);
        let is_allowed = |properties: &Properties| {
            is_own(&address, properties, from) || allowed.iter().any(|pattern| transports.matches(pattern, &address))
        };
        if properties.as_ref().is_some_and(is_allowed) {
            return Ok(address.to_string());
        }
        let from = from.map_or("this machine".to_owned(), |ip| ip.to_string());
        Err(RpcError::new(
            ErrorKind::Refused,
            format!(
                "a server that comes from {from} may not advertise '{address}': write its own IP address, or have the \
                 tracker's operator allow it (--allow-advertise)"
            ),
        ))
    };
    told.iter().enumerate().map(admit).collect()
}

/// Checks that a server answers at its address, without taking a slot.
pub(super) async fn probe(connector: &Connector, address: &[String]) -> Reach {
    let Some((target, hops)) = address.split_last() else { return Reach::Untried };
    let connector = connector.clone().ticket(NO_TICKET).connect_timeout(PROBE_LIMIT).handshake_timeout(PROBE_LIMIT);
    let connector = hops.iter().fold(connector, |connector, hop| connector.via(hop));
    let outcome = tokio::time::timeout(2 * PROBE_LIMIT, connector.connect(target)).await;
    let why = match outcome {
        Ok(Ok(session)) => {
            // The server admits clients without a ticket.
            drop(session);
            return Reach::Reached;
        }
        Ok(Err(ConnectError::Session(error))) => {
            // A server that asks for authentication can be reached, too.
            let is_there = error.application_kind() == Some(TICKET_REFUSED)
                || matches!(error.kind(), ErrorKind::Unauthenticated | ErrorKind::LimitExceeded);
            if is_there {
                return Reach::Reached;
            }
            error.message().to_owned()
        }
        Ok(Err(ConnectError::Transport(TransportError::Unauthenticated { .. }))) => return Reach::Reached,
        Ok(Err(ConnectError::Transport(TransportError::Unsupported { .. } | TransportError::Insecure { .. }))) => {
            // The tracker has no credentials to check the server with.
            return Reach::Untried;
        }
        Ok(Err(error)) => error.into_rpc_error().message().to_owned(),
        Err(_) => format!("no answer within {:?}", 2 * PROBE_LIMIT),
    };
    // Parts of the text come from the peer.
    Reach::Unreachable { why: clip(&why) }
}

/// Returns the IP address of a peer; `None` if it is on this machine.
fn machine(peer: &str) -> Option<IpAddr> {
    let address: Address = peer.parse().ok()?;
    let host = address.host()?;
    let ip: IpAddr = host.split('%').next()?.parse().ok()?;
    let ip = ip.to_canonical();
    (!ip.is_loopback()).then_some(ip)
}

/// Returns true if the address is on the machine of the peer.
fn is_own(address: &Address, properties: &Properties, from: Option<IpAddr>) -> bool {
    match from {
        None => properties.is_local(),
        Some(from) => ip_of(address).is_some_and(|ip| ip == from),
    }
}

fn ip_of(address: &Address) -> Option<IpAddr> {
    let host = address.host()?;
    host.parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

/// Replaces an unspecified host by that of the peer.
fn with_host(address: Address, from: Option<IpAddr>) -> Result<Address> {
    if !ip_of(&address).is_some_and(|ip| ip.is_unspecified()) {
        return Ok(address);
    }
    let host = from.map_or("127.0.0.1".to_owned(), |ip| ip.to_string());
    address.with_host(&host).map_err(|error| RpcError::invalid_argument(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: &str = "tcp://10.0.0.5:40000";
    const HERE: &str = "tcp://127.0.0.1:40000";

    fn admitted(told: &[&str], peer: &str, allowed: &[&str]) -> Result<Vec<String>> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        admit(&owned(told), peer, &owned(allowed), &Transports::default())
    }

    #[test]
    fn a_server_may_tell_its_own_address_and_no_other() {
        for (told, peer) in [
            ("tcp://10.0.0.5:9090/board", REMOTE),
            ("quic://10.0.0.5:9090", "tcp://[::ffff:10.0.0.5]:1"),
            ("tcp://127.0.0.1:9090", HERE),
            ("tcp://[::1]:9090", HERE),
            ("unix:/run/rpc.sock", "unix:/run/tracker.sock"),
            ("memory:board", "memory:tracker"),
        ] {
            assert_eq!(admitted(&[told], peer, &[]).unwrap(), [told], "{peer}");
        }
        for (told, peer) in [
            ("tcp://10.0.0.6:9090", REMOTE),
            ("tcp://127.0.0.1:9090", REMOTE),
            ("unix:/run/docker.sock", REMOTE),
            ("tcp://board.lan:9090", REMOTE),
            ("tcp://10.0.0.5:9090", HERE),
            ("exec:sh", HERE),
            ("local:", HERE),
            ("tracker://127.0.0.1:9190", HERE),
        ] {
            let error = admitted(&[told], peer, &[]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{told} {peer}");
            assert!(error.message().contains("--allow-advertise"), "{error}");
        }
        assert_eq!(admitted(&["nonsense"], HERE, &[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn the_operator_may_allow_more_and_hops_count_too() {
        let told = ["quic://gateway.lab:9190", "tcp://192.168.0.7:9090"];
        assert!(admitted(&told, REMOTE, &["tcp://192.168.*"]).is_err());
        assert_eq!(admitted(&told, REMOTE, &["tcp://192.168.*", "quic://gateway.lab:*"]).unwrap(), told);
        assert!(admitted(&["exec:sh"], HERE, &["*"]).is_err());
    }

    #[test]
    fn wherever_i_am_is_where_it_comes_from() {
        for (told, peer, expected) in [
            ("tcp://0.0.0.0:9090/board", REMOTE, "tcp://10.0.0.5:9090/board"),
            ("tls://[::]:9090", REMOTE, "tls://10.0.0.5:9090"),
            ("quic://0.0.0.0:9090", HERE, "quic://127.0.0.1:9090"),
        ] {
            assert_eq!(admitted(&[told], peer, &[]).unwrap(), [expected]);
        }
    }
}

//! Advertised addresses of servers: which ones a server may advertise, and a probe of them.
//!
//! A tracker sends clients to these addresses and probes them itself, so a server could use it to
//! scan its network. Therefore a server may advertise the IP address that it comes from, and any
//! other only if the operator allows it. The transport says which machine a server is on; the text
//! of its address, which a transport may choose freely, does not count.
//!
//! A peer on the tracker's own machine may be a proxy that passes others on, and one that comes
//! through a hop is on another machine than the hop. Such a server has to prove that it is at its
//! address: the tracker goes there with a ticket that only this registration can verify.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::tracker::{PROBE_ANSWERED, PROBE_TICKET, PROOF_SERIAL, Reach, TICKET_REFUSED, Ticket, TicketKey};
use rpc_transports::{Address, ConnectError, Connector, Machine, Properties, TransportError, Transports};

use super::limits::clip;

/// Time limit of a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

/// Addresses that a server may advertise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    /// Addresses for clients.
    pub(super) addresses: Vec<String>,
    /// True if the server has to prove that it is there.
    pub(super) to_prove: bool,
}

/// Returns the addresses for clients, if a server on `machine`, or behind a hop on it, may
/// advertise them.
///
/// # Errors
///
/// [`ErrorKind::Refused`] with advice for the operator, and [`ErrorKind::InvalidArgument`].
pub(super) fn admit(
    told: &[String],
    machine: Machine,
    through_hop: bool,
    allowed: &[String],
    transports: &Transports,
) -> Result<Admitted> {
    let from = Origin::of(machine);
    let mut to_prove = false;
    let last = told.len().saturating_sub(1);
    let admit = |(at, text): (usize, &String)| {
        let address: Address = text
            .parse()
            .map_err(|error| RpcError::invalid_argument(format!("the advertised address '{text}': {error}")))?;
        let address = if at == last { with_host(address, from)? } else { address };
        // Clients and the tracker dial the address, which must not start programs.
        let properties = transports.check(&address).ok().filter(|properties| !properties.starts_programs);
        if let Some(properties) = &properties {
            let is_allowed = allowed.iter().any(|pattern| transports.matches(pattern, &address));
            if is_allowed || is_own(&address, properties, from) {
                to_prove |= !is_allowed && (through_hop || from == Origin::ThisMachine);
                return Ok(address.to_string());
            }
        }
        let own = match from {
            Origin::Unknown => "",
            Origin::ThisMachine | Origin::Ip(_) => "write its own IP address, or ",
        };
        Err(RpcError::new(
            ErrorKind::Refused,
            format!(
                "a server that comes from {from} may not advertise '{address}': {own}have the tracker's operator \
                 allow it (--allow-advertise)"
            ),
        ))
    };
    let addresses = told.iter().enumerate().map(admit).collect::<Result<_>>()?;
    Ok(Admitted { addresses, to_prove })
}

/// Checks that the server at this address has made the registration with this key.
///
/// # Errors
///
/// The reason why that is not known, for the operator of the tracker. It tells what is at the
/// address, which may not be the server's.
pub(super) async fn prove(
    connector: &Connector,
    address: &[String],
    key: &TicketKey,
) -> std::result::Result<(), String> {
    let ticket = key.sign(Ticket { serial: PROOF_SERIAL, expires_ms: u64::MAX });
    match visit(connector, address, &ticket).await {
        Ok(()) => Err("another server is there, which opens sessions without a ticket".to_owned()),
        Err(Some(ConnectError::Session(error))) if error.application_kind() == Some(PROBE_ANSWERED) => Ok(()),
        Err(Some(error)) => Err(clip(error.into_rpc_error().message())),
        Err(None) => Err(format!("no answer within {:?}", 2 * PROBE_LIMIT)),
    }
}

/// Goes to a server with this ticket, and leaves it if it opens a session.
///
/// # Errors
///
/// The reason why there is no session; `None` if there was no answer in time.
async fn visit(
    connector: &Connector,
    address: &[String],
    ticket: &str,
) -> std::result::Result<(), Option<ConnectError>> {
    let Some((target, hops)) = address.split_last() else { return Err(None) };
    let connector = connector.clone().ticket(ticket).connect_timeout(PROBE_LIMIT).handshake_timeout(PROBE_LIMIT);
    let connector = hops.iter().fold(connector, |connector, hop| connector.via(hop));
    let session = tokio::time::timeout(2 * PROBE_LIMIT, connector.connect(target)).await.map_err(|_| None)??;
    let _ = tokio::time::timeout(PROBE_LIMIT, session.shutdown().into_future()).await;
    Ok(())
}

/// Checks that a server answers at its address, without taking a slot.
pub(super) async fn probe(connector: &Connector, address: &[String]) -> Reach {
    let why = match visit(connector, address, PROBE_TICKET).await {
        // The server admits any client.
        Ok(()) => return Reach::Reached,
        Err(Some(ConnectError::Session(error))) => {
            // A server that asks for authentication can be reached, too.
            let is_there = matches!(error.application_kind(), Some(PROBE_ANSWERED | TICKET_REFUSED))
                || matches!(error.kind(), ErrorKind::Unauthenticated | ErrorKind::LimitExceeded);
            if is_there {
                return Reach::Reached;
            }
            error.message().to_owned()
        }
        Err(Some(ConnectError::Transport(TransportError::Unauthenticated { .. }))) => return Reach::Reached,
        Err(Some(ConnectError::Transport(TransportError::Unsupported { .. } | TransportError::Insecure { .. }))) => {
            // The tracker has no credentials to check the server with.
            return Reach::Untried;
        }
        Err(Some(error)) => error.into_rpc_error().message().to_owned(),
        Err(None) => format!("no answer within {:?}", 2 * PROBE_LIMIT),
    };
    // Parts of the text come from the peer.
    Reach::Unreachable { why: clip(&why) }
}

/// Machine of a server, as far as its own addresses can be told by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The machine of the tracker.
    ThisMachine,
    /// Another machine, with this IP address.
    Ip(IpAddr),
    /// A machine that the transport does not know. No address is known to be on it.
    Unknown,
}

impl Origin {
    fn of(machine: Machine) -> Self {
        match machine {
            Machine::This => Self::ThisMachine,
            Machine::At(ip) if ip.to_canonical().is_loopback() => Self::ThisMachine,
            Machine::At(ip) => Self::Ip(ip.to_canonical()),
            Machine::Unknown => Self::Unknown,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThisMachine => f.write_str("this machine"),
            Self::Ip(ip) => ip.fmt(f),
            Self::Unknown => f.write_str("an unknown machine"),
        }
    }
}

/// Returns true if the address is on the machine of the server.
fn is_own(address: &Address, properties: &Properties, from: Origin) -> bool {
    match from {
        Origin::ThisMachine => properties.is_local(),
        Origin::Ip(from) => ip_of(address).is_some_and(|ip| ip == from),
        Origin::Unknown => false,
    }
}

/// Returns the IP address of the host, without the zone of a link-local one.
fn ip_of(address: &Address) -> Option<IpAddr> {
    let ip = address.host()?.split('%').next()?;
    ip.parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

/// Replaces an unspecified host by that of the server.
fn with_host(address: Address, from: Origin) -> Result<Address> {
    if !ip_of(&address).is_some_and(|ip| ip.is_unspecified()) {
        return Ok(address);
    }
    let host = match from {
        Origin::ThisMachine => "127.0.0.1".to_owned(),
        Origin::Ip(ip) => ip.to_string(),
        // Stays as it is, and is refused unless the operator allows it.
        Origin::Unknown => return Ok(address),
    };
    address.with_host(&host).map_err(|error| RpcError::invalid_argument(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: &str = "10.0.0.5";
    const REMOTE_V6: &str = "2001:db8::5";

    fn at(ip: &str) -> Machine {
        Machine::At(ip.parse().unwrap())
    }

    fn admitted(told: &[&str], machine: Machine, allowed: &[&str]) -> Result<Vec<String>> {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let admitted = admit(&owned(told), machine, false, &owned(allowed), &Transports::default());
        admitted.map(|admitted| admitted.addresses)
    }

    #[test]
    fn a_server_whose_machine_may_be_that_of_a_proxy_or_a_hop_has_to_prove_where_it_is() {
        for (told, machine, through_hop, to_prove) in [
            ("tcp://10.0.0.5:9090", at(REMOTE), false, false),
            ("tcp://10.0.0.5:9090", at(REMOTE), true, true),
            ("tcp://127.0.0.1:9090", at("127.0.0.1"), false, true),
            ("unix:/run/rpc.sock", Machine::This, false, true),
        ] {
            let admit = |allowed: &[String]| {
                admit(&[told.to_owned()], machine, through_hop, allowed, &Transports::default()).unwrap().to_prove
            };
            assert_eq!(admit(&[]), to_prove, "{told} {machine} {through_hop}");
            assert!(!admit(&[told.to_owned()]), "the operator knows it");
        }
    }

    #[test]
    fn a_server_may_advertise_its_own_address_and_no_other() {
        for (told, machine) in [
            ("tcp://10.0.0.5:9090/board", at(REMOTE)),
            ("quic://10.0.0.5:9090", at("::ffff:10.0.0.5")),
            ("tcp://[2001:db8::5]:9090/board", at(REMOTE_V6)),
            ("quic://[2001:db8:0:0::5]:9090", at(REMOTE_V6)),
            ("tcp://[fe80::5%eth0]:9090", at("fe80::5")),
            ("tcp://[::ffff:10.0.0.5]:9090", at(REMOTE)),
            ("tcp://127.0.0.1:9090", at("127.0.0.1")),
            ("tcp://[::1]:9090", at("127.0.0.1")),
            ("tcp://127.0.0.1:9090", at("::1")),
            ("tcp://127.0.0.1:9090", Machine::This),
            ("unix:/run/rpc.sock", Machine::This),
            ("memory:board", Machine::This),
        ] {
            assert_eq!(admitted(&[told], machine, &[]).unwrap(), [told], "{machine}");
        }
        for (told, machine) in [
            ("tcp://10.0.0.6:9090", at(REMOTE)),
            ("tcp://127.0.0.1:9090", at(REMOTE)),
            ("tcp://[::1]:9090", at(REMOTE_V6)),
            ("tcp://[2001:db8::6]:9090", at(REMOTE_V6)),
            ("unix:/run/docker.sock", at(REMOTE)),
            ("unix:/run/docker.sock", at(REMOTE_V6)),
            ("tcp://board.lan:9090", at(REMOTE)),
            ("tcp://10.0.0.5:9090", Machine::This),
            ("exec:sh", Machine::This),
            ("local:", Machine::This),
            ("tracker://127.0.0.1:9190", Machine::This),
        ] {
            let error = admitted(&[told], machine, &[]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{told} {machine}");
            assert!(error.message().contains("--allow-advertise"), "{error}");
        }
        assert_eq!(admitted(&["nonsense"], Machine::This, &[]).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_server_on_an_unknown_machine_advertises_what_the_operator_allows() {
        for told in ["tcp://127.0.0.1:9090", "unix:/run/rpc.sock", "tcp://0.0.0.0:9090", "tcp://10.0.0.5:9090"] {
            let error = admitted(&[told], Machine::Unknown, &[]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{told}");
            assert!(error.message().contains("from an unknown machine"), "{error}");
        }
        assert!(admitted(&["tcp://10.0.0.5:9090"], Machine::Unknown, &["tcp://10.0.0.*"]).is_ok());
    }

    #[test]
    fn the_operator_may_allow_more_and_hops_count_too() {
        let told = ["quic://gateway.lab:9190", "tcp://192.168.0.7:9090"];
        assert!(admitted(&told, at(REMOTE), &["tcp://192.168.*"]).is_err());
        assert_eq!(admitted(&told, at(REMOTE), &["tcp://192.168.*", "quic://gateway.lab:*"]).unwrap(), told);
        assert!(admitted(&["exec:sh"], Machine::This, &["*"]).is_err());
    }

    #[test]
    fn an_unspecified_host_becomes_that_of_the_server() {
        for (told, machine, expected) in [
            ("tcp://0.0.0.0:9090/board", at(REMOTE), "tcp://10.0.0.5:9090/board"),
            ("tls://[::]:9090", at(REMOTE), "tls://10.0.0.5:9090"),
            ("tls://[::]:9090/board", at(REMOTE_V6), "tls://[2001:db8::5]:9090/board"),
            ("quic://0.0.0.0:9090", at("::1"), "quic://127.0.0.1:9090"),
        ] {
            assert_eq!(admitted(&[told], machine, &[]).unwrap(), [expected]);
        }
    }
}

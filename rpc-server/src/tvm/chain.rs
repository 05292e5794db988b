//! Chains of servers of TVM: a server dials the next one, as a client asks it to when the session
//! begins.
//!
//! ```text
//! on the wire  "rpc.Connect", host, port, key, logging, then the same for the server behind it, …
//! in a text    tvm://first:9090/KEY?then=second:9090/KEY;third:9090
//! ```
//!
//! Instead of a host, the first server may have an address with its scheme, such as
//! `tls://board:9090` with the port 0: a server that speaks the native protocol, at which the chain
//! ends.

use rpc_core::RpcError;
use rpc_transports::{Address, AddressError};
use rpc_tvm::wire::{HelloKey, WireValue};

use super::args::checked_name;

/// Scheme of the addresses of servers of TVM.
pub(super) const SCHEME: &str = "tvm";

/// Parameter of an address with the servers behind the first one.
pub(super) const THEN: &str = "then";

/// Parameter of an address with the seconds after which the server ends the session.
pub(super) const TIMEOUT: &str = "timeout";

/// Text between the servers of an address. Lists of addresses have commas.
const SEPARATOR: &str = ";";

/// Maximum number of servers in a chain, as of hops in the native protocol.
const MAX_STOPS: usize = 16;

/// Name of the constructor of a session with a further server.
pub(super) const CONNECT: &str = "rpc.Connect";

/// Number of values that name one server: the constructor, and its arguments.
const VALUES_OF_STOP: usize = 5;

/// Servers that a server of TVM dials itself, the first one first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stops(Vec<Stop>);

/// A server of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stop {
    host: String,
    port: u16,
    /// Key of the server; may be empty.
    key: String,
}

impl Stops {
    /// Returns the servers behind the first one that an address names.
    ///
    /// # Errors
    ///
    /// The problem with them.
    pub(super) fn of_address(at: &Address) -> Result<Self, &'static str> {
        let Some(text) = at.parameter(THEN) else { return Ok(Self::default()) };
        let stops = text.split(SEPARATOR).map(|stop| {
            let stop: Address = format!("{SCHEME}://{stop}").parse().ok()?;
            let (host, port) = stop.host_and_port()?;
            let is_bare = stop.user().is_none() && stop.parameters().next().is_none();
            is_bare.then(|| Stop { host: host.to_owned(), port, key: stop.key().unwrap_or_default().to_owned() })
        });
        match stops.collect::<Option<Vec<_>>>() {
            Some(stops) if stops.len() < MAX_STOPS => Ok(Self(stops)),
            Some(_) => Err("it has too many servers"),
            None => Err("what follows 'then=' is no list such as board:9090/KEY;inner:9090"),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the address with these servers behind it.
    pub(super) fn behind(&self, first: &Address) -> Result<Address, AddressError> {
        if self.is_empty() {
            return Ok(first.clone());
        }
        let stops: Vec<_> = self.0.iter().map(Stop::text).collect();
        let separator = if first.parameters().next().is_some() { '&' } else { '?' };
        format!("{first}{separator}{THEN}={}", stops.join(SEPARATOR)).parse()
    }

    /// Returns the constructor that asks for them on the wire.
    pub(super) fn constructor(&self) -> Vec<WireValue> {
        let values = self.0.iter().flat_map(|stop| {
            let (host, port, key) = (stop.host.as_str(), WireValue::Int(stop.port.into()), stop.key.as_str());
            [CONNECT.into(), host.into(), port, key.into(), WireValue::Bool(false)]
        });
        values.collect()
    }
}

impl Stop {
    fn text(&self) -> String {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        let Self { host, port, key } = self;
        let slash = if key.is_empty() { "" } else { "/" };
        format!("{open}{host}{close}:{port}{slash}{key}")
    }

    /// Takes a server off a constructor's values. Returns it, and the options of its key.
    fn take(values: &[WireValue]) -> Result<(Self, HelloKey<'_>), RpcError> {
        let at = |at: usize| values.get(at).ok_or_else(|| wrong("a host, a port and a key follow the constructor"));
        let (WireValue::Str(host), WireValue::Int(port), WireValue::Str(key)) = (at(1)?, at(2)?, at(3)?) else {
            return Err(wrong("a text, a number and a text follow the constructor: host, port and key"));
        };
        let host = checked_name(host, "the name of a host")?.to_owned();
        let port = u16::try_from(*port).map_err(|_| wrong(&format!("there is no port {port}")))?;
        let options = HelloKey::of_server(checked_name(key, "the key of a server")?);
        let options = options.map_err(|error| wrong(&error.to_string()))?;
        Ok((Self { host, port, key: options.key.to_owned() }, options))
    }
}

/// First server of a chain, and those behind it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chain {
    /// Address of the chain, without the key of its first server.
    pub(super) address: String,
    /// Key of the first server; may be empty.
    pub(super) key: String,
    /// True if the server has functions of TVM's own names for files, modules and measurements.
    pub(super) is_of_tvm: bool,
}

impl Chain {
    /// Returns the chain that the constructor of a session names.
    ///
    /// # Errors
    ///
    /// The values are none of a chain, or of one that cannot be passed on.
    pub(super) fn of_constructor(constructor: &[WireValue]) -> Result<Self, RpcError> {
        if let Some(WireValue::Str(host)) = constructor.get(1)
            && has_scheme(host.as_str())
        {
            return Self::of_address(constructor);
        }
        let mut stops = Vec::new();
        let mut first_timeout = None;
        let mut rest = constructor;
        while let Some(name) = rest.first() {
            match name {
                WireValue::Str(name) if name.as_str() == CONNECT => {}
                WireValue::Str(name) if name.as_str() == "rpc.LocalSession" && rest.len() == 1 => break,
                WireValue::Str(name) => {
                    let name: String = name.as_str().chars().take(256).collect();
                    return Err(wrong(&format!("{name} cannot follow it: a chain has servers alone ({CONNECT})")));
                }
                other => return Err(wrong(&format!("a value of type {} is no constructor", other.type_name()))),
            }
            if stops.len() == MAX_STOPS {
                return Err(RpcError::limit("servers of a chain", MAX_STOPS as u64, stops.len() as u64 + 1));
            }
            let (stop, options) = Stop::take(rest)?;
            if has_scheme(&stop.host) {
                return Err(wrong(&format!(
                    "'{}' has a scheme, and can be the only server of a chain alone",
                    stop.host
                )));
            }
            match options.timeout {
                Some(timeout) if stops.is_empty() => first_timeout = Some(timeout),
                Some(_) => return Err(wrong("a time-out of a server behind the first one is not passed on")),
                None => {}
            }
            stops.push(stop);
            rest = rest.get(VALUES_OF_STOP..).unwrap_or_default();
        }
        if stops.is_empty() {
            return Err(wrong("it names no server"));
        }
        let Stop { host, port, key } = stops.remove(0);
        let malformed = |error: AddressError| wrong(&error.to_string());
        let mut address = Address::at_host(SCHEME, &host, port).map_err(malformed)?;
        if let Some(timeout) = first_timeout {
            let text = format!("{address}?{TIMEOUT}={:?}", timeout.as_secs_f64());
            address = text.parse().map_err(malformed)?;
        }
        let stops = Self::checked(Stops(stops), &address)?;
        Ok(Self { address: stops.to_string(), key, is_of_tvm: true })
    }

    /// Returns the server whose address stands in the place of a host.
    fn of_address(constructor: &[WireValue]) -> Result<Self, RpcError> {
        let (Stop { host: address, port, key }, options) = Stop::take(constructor)?;
        if port != 0 {
            return Err(wrong(&format!("the port behind '{address}' has to be 0: the address has its own")));
        }
        if options.timeout.is_some() {
            return Err(wrong("a time-out is passed on to servers of TVM alone, which are named by host and port"));
        }
        match constructor.get(VALUES_OF_STOP..).unwrap_or_default() {
            [] => {}
            [WireValue::Str(name)] if name.as_str() == "rpc.LocalSession" => {}
            _ => return Err(wrong(&format!("nothing can follow '{address}': it ends a chain"))),
        }
        let is_of_tvm = address.split_once(':').is_some_and(|(scheme, _)| scheme == SCHEME);
        Ok(Self { address, key, is_of_tvm })
    }

    /// Returns the address of the chain, which has to name the same servers when it is parsed.
    fn checked(stops: Stops, first: &Address) -> Result<Address, RpcError> {
        let address = stops.behind(first).map_err(|error| wrong(&error.to_string()))?;
        if Stops::of_address(&address).as_ref() == Ok(&stops) {
            return Ok(address);
        }
        Err(wrong("the host or the key of a server behind the first one has characters that no address has"))
    }
}

/// Returns true for an address with a scheme, which is no name of a host.
fn has_scheme(host: &str) -> bool {
    // IPv6 addresses have colons, too.
    host.contains("://") || host.starts_with("unix:")
}

fn wrong(problem: &str) -> RpcError {
    RpcError::invalid_argument(problem.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stop(host: &str, port: i64, key: &str) -> Vec<WireValue> {
        vec![CONNECT.into(), host.into(), WireValue::Int(port), key.into(), WireValue::Bool(true)]
    }

    #[test]
    fn a_constructor_and_an_address_name_the_same_servers() {
        let constructor = [stop("A.lan", 9090, "k:0.1 -timeout=2"), stop("::1", 1, ""), stop("c", 2, "k")].concat();
        let chain = Chain::of_constructor(&constructor).unwrap();
        assert_eq!(chain.address, "tvm://a.lan:9090?timeout=2.0&then=[::1]:1;c:2/k");
        assert_eq!(chain.key, "k:0.1");
        let stops = Stops::of_address(&chain.address.parse().unwrap()).unwrap();
        let passed_on = [stop("::1", 1, ""), stop("c", 2, "k")].concat();
        let shown = |values: &[WireValue]| format!("{values:?}").replace("true", "false");
        assert_eq!(shown(&stops.constructor()), shown(&passed_on));
        let plain = Chain::of_constructor(&stop("h", 1, "")[..4]).unwrap();
        assert_eq!((plain.address.as_str(), plain.key.as_str()), ("tvm://h:1", ""));
        let local = [stop("h", 1, ""), vec!["rpc.LocalSession".into()]].concat();
        assert_eq!(Chain::of_constructor(&local), Ok(plain));
    }

    #[test]
    fn an_address_with_a_scheme_is_the_only_server() {
        let address = |at: &str, key: &str| [stop(at, 0, key), vec!["rpc.LocalSession".into()]].concat();
        for at in ["tcp://h:1", "tls://[::1]:9090", "quic://h:1", "unix:/run/x.sock", "tvm://h:1?then=b:2"] {
            let is_of_tvm = at.starts_with("tvm");
            let chain = Chain { address: at.to_owned(), key: "a:b".to_owned(), is_of_tvm };
            assert_eq!(Chain::of_constructor(&stop(at, 0, "a:b")), Ok(chain));
            let chain = Chain { address: at.to_owned(), key: String::new(), is_of_tvm };
            assert_eq!(Chain::of_constructor(&address(at, "")), Ok(chain));
            for wrong in [
                stop(at, 1, ""),
                stop(at, 0, "k -timeout=1"),
                stop(at, 0, "")[..3].to_vec(),
                [stop(at, 0, ""), stop("h", 1, "")].concat(),
                [stop("h", 1, ""), stop(at, 0, "")].concat(),
                [stop(at, 0, ""), stop(at, 0, "")].concat(),
            ] {
                assert!(Chain::of_constructor(&wrong).is_err(), "{wrong:?}");
            }
        }
    }

    #[test]
    fn what_is_no_chain_is_refused() {
        let numbered = vec![CONNECT.into(), WireValue::Int(1), WireValue::Int(1), "".into()];
        for wrong in [
            vec![CONNECT.into()],
            numbered,
            stop("h", 1, "")[..3].to_vec(),
            stop("h", 65536, ""),
            stop("h", -1, ""),
            stop("h/x", 1, ""),
            stop("h", 1, "k -timeout=abc"),
            stop(&"h".repeat(5000), 1, ""),
            [stop("h", 1, ""), stop("h", 1, "a;b")].concat(),
            [stop("h", 1, ""), stop("h", 1, "k&x=1")].concat(),
            [stop("h", 1, ""), stop("h:1;x", 1, "")].concat(),
            [stop("h", 1, ""), stop("h", 1, "k -timeout=1")].concat(),
            [stop("h", 1, ""), vec!["rpc.PopenSession".into(), "x".into()]].concat(),
            [stop("h", 1, ""), vec![WireValue::None]].concat(),
            vec![stop("h", 1, ""); MAX_STOPS + 1].concat(),
        ] {
            assert!(Chain::of_constructor(&wrong).is_err(), "{wrong:?}");
        }
        assert!(Chain::of_constructor(&vec![stop("h", 1, ""); MAX_STOPS].concat()).is_ok());
        for wrong in ["", "h", "h:1;", "h:1,h:1", "h:1?x=1", "me@h:1", "h:1/a b", "h:x"] {
            let address = format!("tvm://h:1?then={}", wrong.replace('?', "%3f").replace(' ', "%20"));
            assert!(Stops::of_address(&address.parse().unwrap()).is_err(), "{address}");
        }
    }
}

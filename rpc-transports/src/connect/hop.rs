//! Hops: the stops on the way to a server.

use std::fmt;
use std::str::FromStr;

use crate::address::{Address, AddressError};

/// One stop on the way to a server: `ADDRESS`, which forwards requests, or `tunnel:ADDRESS`, which
/// passes bytes without looking into them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) address: Address,
    pub(crate) tunnel: bool,
}

const TUNNEL: &str = "tunnel:";

impl FromStr for Hop {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let inner = text.strip_prefix(TUNNEL);
        Ok(Self { address: inner.unwrap_or(text).parse()?, tunnel: inner.is_some() })
    }
}

impl Hop {
    /// Returns true if the text of a tunnel has been parsed as if it were an address.
    pub(super) fn is_tunnel(address: &Address) -> bool {
        TUNNEL.strip_suffix(':') == Some(address.scheme())
    }

    pub(super) fn without_key(self) -> Self {
        Self { address: self.address.without_key(), ..self }
    }
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.tunnel { TUNNEL } else { "" }, self.address)
    }
}

//! Conversions of sockets and texts to addresses, and the error that quotes an address.

use std::net::SocketAddr;

use super::grammar::{Location, Parts};
use super::{Address, AddressError};

/// Conversion to a TCP address without a key.
impl From<SocketAddr> for Address {
    fn from(socket: SocketAddr) -> Self {
        let host = match socket {
            SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
            _ => socket.ip().to_string(),
        };
        let location = Location::Host { user: None, host, port: Some(socket.port()) };
        Self::from_parts(Parts { scheme: "tcp".to_owned(), location, key: None, parameters: Vec::new() })
    }
}

impl TryFrom<&str> for Address {
    type Error = AddressError;

    fn try_from(text: &str) -> Result<Self, AddressError> {
        text.parse()
    }
}

/// An address, or the text of one.
pub trait ToAddress: Sync {
    /// Returns the address.
    ///
    /// # Errors
    ///
    /// [`AddressError`] if the text is malformed.
    fn to_address(&self) -> Result<Address, AddressError>;
}

impl ToAddress for Address {
    fn to_address(&self) -> Result<Address, AddressError> {
        Ok(self.clone())
    }
}

impl ToAddress for str {
    fn to_address(&self) -> Result<Address, AddressError> {
        self.parse()
    }
}

impl ToAddress for String {
    fn to_address(&self) -> Result<Address, AddressError> {
        self.parse()
    }
}

impl<T: ToAddress + ?Sized> ToAddress for &T {
    fn to_address(&self) -> Result<Address, AddressError> {
        (**self).to_address()
    }
}

impl AddressError {
    /// Makes the error by which a transport refuses an address. `problem` names the error in the
    /// address and shows the right form.
    #[must_use]
    pub fn invalid(address: &Address, problem: impl Into<String>) -> Self {
        Self::Invalid { address: address.to_string(), problem: problem.into() }
    }
}

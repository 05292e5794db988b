//! Access control: rights of a session's client, and the trait by which the session checks them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::dlpack::Device;
use crate::error::{Result, RpcError};

/// Rights of the client of one session.
///
/// A session that [has one](crate::LocalSessionBuilder::access_control) checks it where functions
/// are looked up by name, also inside of functions, where devices are used, and where modules are
/// loaded. Functions check the other permissions themselves, by
/// [`Context::authorize`](crate::Context::authorize). The rights of a session do not change.
pub trait AccessControl: Send + Sync + fmt::Debug {
    /// Checks that the client has a permission. Called often, and on threads that must not block.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`](crate::ErrorKind::Refused) with the reason. The client is told.
    fn check(&self, permission: &Permission<'_>) -> Result<()>;

    /// Returns the rights as text, for other processes that serve a part of the session, such as
    /// workers of Disco. `None` if they cannot be passed on: then such processes are not started.
    fn to_text(&self) -> Option<String>;

    /// Returns the value as its concrete type, for programs that know it.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// Permission that a client may have. Its text, such as `call:model.run` or `device:cuda:0`, is
/// what [`parse`](Self::parse) reads and `Display` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Permission<'a> {
    /// Calls of the function registered under this name: `call:NAME`.
    Function(&'a str),
    /// Use of a device: its memory, streams and attributes, and leases: `device:cuda:0`.
    Device(Device),
    /// Loading of modules, and use of their functions: `modules`.
    Modules,
    /// Start of the program that the client names so: `run:PROGRAM`.
    Program(&'a str),
    /// Sessions with the server at this address, by way of this one: `forward:ADDRESS`.
    Forward(&'a str),
    /// Tunnels to the service at this address: `port:ADDRESS`.
    Port(&'a str),
    /// A listener at this address, near the server, whose connections the client serves:
    /// `listen:ADDRESS`.
    Listen(&'a str),
    /// Connections of the server to another one at this address, to which it sends tensors for the
    /// client: `peer:ADDRESS`.
    Peer(&'a str),
    /// Workers of Disco: `disco`.
    Disco,
    /// Leases with this priority: `lease-priority:NUMBER`.
    LeasePriority(i32),
    /// Log lines of the server: `logs`.
    Logs,
}

impl<'a> Permission<'a> {
    /// Parses the text of a permission.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument), with the forms that there
    /// are.
    pub fn parse(text: &'a str) -> Result<Self> {
        let malformed = || {
            RpcError::invalid_argument(format!(
                "'{text}' is no permission: write call:NAME, device:DEVICE, modules, run:PROGRAM, forward:ADDRESS, \
                 port:ADDRESS, listen:ADDRESS, peer:ADDRESS, disco, logs or lease-priority:NUMBER"
            ))
        };
        match text.split_once(':') {
            None if text == "modules" => Ok(Self::Modules),
            None if text == "disco" => Ok(Self::Disco),
            None if text == "logs" => Ok(Self::Logs),
            Some((_, "")) | None => Err(malformed()),
            Some(("call", name)) => Ok(Self::Function(name)),
            Some(("device", device)) => Ok(Self::Device(device.parse()?)),
            Some(("run", program)) => Ok(Self::Program(program)),
            Some(("forward", address)) => Ok(Self::Forward(address)),
            Some(("port", address)) => Ok(Self::Port(address)),
            Some(("listen", address)) => Ok(Self::Listen(address)),
            Some(("peer", address)) => Ok(Self::Peer(address)),
            Some(("lease-priority", number)) => number.parse().map(Self::LeasePriority).map_err(|_| malformed()),
            Some(_) => Err(malformed()),
        }
    }
}

impl fmt::Display for Permission<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(name) => write!(f, "call:{name}"),
            Self::Device(device) => write!(f, "device:{device}"),
            Self::Modules => f.write_str("modules"),
            Self::Program(program) => write!(f, "run:{program}"),
            Self::Forward(address) => write!(f, "forward:{address}"),
            Self::Port(address) => write!(f, "port:{address}"),
            Self::Listen(address) => write!(f, "listen:{address}"),
            Self::Peer(address) => write!(f, "peer:{address}"),
            Self::Disco => f.write_str("disco"),
            Self::LeasePriority(priority) => write!(f, "lease-priority:{priority}"),
            Self::Logs => f.write_str("logs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_what_their_text_says() {
        for text in [
            "call:model.run",
            "device:cuda:1",
            "modules",
            "run:/bin/sh",
            "forward:tcp://10.0.0.5:9090",
            "port:unix:/run/x.sock",
            "listen:tcp://127.0.0.1:0",
            "peer:tls://10.0.0.6:9090",
            "disco",
            "logs",
            "lease-priority:-3",
        ] {
            assert_eq!(Permission::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Permission::parse("device:cuda").unwrap(), Permission::Device(Device::cuda(0)));
        for text in
            ["", "call", "call:", "modules:x", "disco:", "logs:", "device:toaster", "lease-priority:high", "shell:x"]
        {
            assert!(Permission::parse(text).is_err(), "{text}");
        }
    }
}

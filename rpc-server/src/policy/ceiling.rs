//! The ceiling of a policy: what the settings of the server allow to any client.

use rpc_core::Permission;
use rpc_transports::Transports;

use super::rule::{Right, lists_program, reaches, right_behind};
use crate::config::ServeConfig;

/// Settings of a server that limit what clients may do, whatever its policy says. They are enforced
/// where they are used; this copy answers questions beforehand.
#[derive(Clone, Debug)]
pub(crate) struct Ceiling {
    run: Vec<String>,
    forward: Vec<String>,
    port: Vec<String>,
    listen: Vec<String>,
    peer: Vec<String>,
    disco: bool,
    logs: bool,
    /// True if a client that may be forwarded to a server may have a tunnel there.
    forwards_tunnels: bool,
    transports: Transports,
}

impl Ceiling {
    /// Returns the ceiling of a server with these settings, as far as they are resolved.
    pub(crate) fn new(config: &ServeConfig, transports: Transports) -> Self {
        Self {
            run: config.allow_run.clone(),
            forward: config.allow_forward.clone(),
            port: config.allow_port.clone(),
            listen: config.allow_listen.clone(),
            peer: config.allow_peer.clone(),
            disco: config.allow_disco == Some(true),
            logs: config.allow_logs == Some(true),
            forwards_tunnels: config.forward_functions.is_empty(),
            transports,
        }
    }

    /// Returns the transports of the server.
    pub(crate) fn transports(&self) -> &Transports {
        &self.transports
    }

    /// Returns the patterns of the addresses of other servers that tensors may be sent to.
    pub(crate) fn peers(&self) -> &[String] {
        &self.peer
    }

    /// Returns true if a client that may be forwarded to a server may have a tunnel there.
    pub(super) fn forwards_tunnels(&self) -> bool {
        self.forwards_tunnels
    }

    /// Returns the setting that would have to allow `permission` and does not.
    pub(super) fn missing(&self, permission: &Permission<'_>) -> Option<&'static str> {
        let (setting, allowed) = match permission {
            Permission::Program(program) => ("--allow-run", lists_program(&self.run, program)),
            Permission::Forward(address) => ("--allow-forward", reaches(&self.transports, &self.forward, address)),
            Permission::Port(address) => ("--allow-port", reaches(&self.transports, &self.port, address)),
            Permission::Listen(address) => ("--allow-listen", reaches(&self.transports, &self.listen, address)),
            Permission::Peer(address) => ("--allow-peer", reaches(&self.transports, &self.peer, address)),
            Permission::Disco => ("--allow-disco", self.disco),
            Permission::Logs => ("--allow-logs", self.logs),
            Permission::Function(name) => match right_behind(name) {
                Some(Right::Run) => ("--allow-run", !self.run.is_empty()),
                Some(Right::Disco) => ("--allow-disco", self.disco),
                Some(Right::Listen) => ("--allow-listen", !self.listen.is_empty()),
                Some(Right::Peer) => ("--allow-peer", !self.peer.is_empty()),
                Some(Right::Logs) => ("--allow-logs", self.logs),
                Some(Right::Modules | Right::Devices) | None => return None,
            },
            // Modules of the operator can be loaded without a setting.
            _ => return None,
        };
        (!allowed).then_some(setting)
    }
}

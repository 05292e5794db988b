//! The route of a connection: its hops in order, each of which forwards to the next or is a tunnel
//! to it. A part of the connector, about whose imports `opener.rs` has a word.

use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError, SharedSession};

use super::{Connector, Continuation, expect_no_input};
use crate::address::Address;
use crate::channel::Channel;
use crate::client::ClientSession;
use crate::connect::error::ConnectError;
use crate::connect::hop::Hop;
use crate::connect::opener::OpenedBy;

/// Result of [`Connector::plan`].
pub(super) struct Plan {
    pub(super) address: Address,
    pub(super) tunnel: bool,
    pub(super) key: String,
    pub(super) forward: Vec<String>,
}

impl Connector {
    /// Returns the first stop, and the stops behind it.
    pub(super) fn route(&self, target: Hop) -> (Hop, Vec<Hop>) {
        match self.via.split_first() {
            Some((first, further)) => (first.clone(), further.iter().cloned().chain([target]).collect()),
            None => (target, Vec::new()),
        }
    }

    /// Opens a session with `first`, which is to forward to `further`.
    pub(crate) async fn forward(&self, first: &Hop, further: &[Hop]) -> Result<SharedSession, ConnectError> {
        let (mut first, mut further) = (first, further);
        let mut existing = None;
        loop {
            let plan = self.plan(first, further)?;
            if !plan.tunnel {
                return self.open(plan, existing).await;
            }
            let Some((next, rest)) = further.split_first() else { return Err(tunnel_without_target(first).into()) };
            existing = Some(self.tunnel(plan.address, existing, next).await?);
            (first, further) = (next, rest);
        }
    }

    /// Opens a session with a server, through `existing` if a channel leads there already.
    pub(super) async fn open(&self, plan: Plan, existing: Option<Channel>) -> Result<SharedSession, ConnectError> {
        let Plan { address, key, forward, .. } = plan;
        if let Some(opener) = self.transports.opener(address.scheme())
            && existing.is_none()
            && forward.is_empty()
        {
            if opener.opened_by() != OpenedBy::LastHop {
                let text = format!("'{address}' is opened by the client itself, and no server leads others there");
                return Err(RpcError::new(ErrorKind::Refused, text).into());
            }
            let (address, connector) = self.clone().key(&key).for_opener(&address)?;
            return Ok(opener.open(&address, &connector).await?.shared().clone());
        }
        crate::runtime::install_in_core();
        let client = |channel| -> Continuation<'_, ClientSession> {
            Box::pin(self.client(channel, key.clone(), forward.clone()))
        };
        Ok(Arc::new(self.run_over_channel(&address, existing, &client).await?))
    }

    /// Opens a channel to `next` through the hop at `address`.
    pub(super) async fn tunnel(
        &self,
        address: Address,
        existing: Option<Channel>,
        next: &Hop,
    ) -> Result<Channel, ConnectError> {
        crate::runtime::install_in_core();
        let next = next.address.clone().without_key().to_string();
        let open_tunnel = |mut channel: Channel| -> Continuation<'_, Channel> {
            let mut config = self.handshake(String::new(), vec![next.clone()], channel.security());
            config.hello.tunnel = true;
            config.hello.workspace.clear();
            config.hello.ticket.clear();
            Box::pin(async move {
                let (_, input) = self.perform_handshake(&mut channel, config).await?;
                expect_no_input(&input, channel.peer())?;
                Ok(channel)
            })
        };
        let channel = self.run_over_channel(&address, existing, &open_tunnel).await?;
        Ok(channel.with_further_peer(format!("{next} through {address}")))
    }

    /// Returns the address to dial, the key that the target must have, and the stops that the
    /// dialled peer forwards to.
    pub(super) fn plan(&self, first: &Hop, further: &[Hop]) -> Result<Plan, ConnectError> {
        let target = further.last().unwrap_or(first);
        if target.tunnel {
            return Err(tunnel_without_target(target).into());
        }
        let key = target.address.key().map_or_else(|| self.key.clone(), str::to_owned);
        let forward = further.iter().map(|hop| hop.clone().without_key().to_string()).collect();
        Ok(Plan { address: first.address.clone().without_key(), tunnel: first.tunnel, key, forward })
    }
}

pub(super) fn tunnel_without_target(tunnel: &Hop) -> RpcError {
    let text = format!("'{tunnel}' is a tunnel, and leads nowhere: name the server behind it");
    RpcError::new(ErrorKind::InvalidArgument, text)
}

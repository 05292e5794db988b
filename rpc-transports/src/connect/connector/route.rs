//! The route of a connection: its hops in order, each of which forwards to the next or is a tunnel
//! to it. A part of the connector, about whose imports `opener.rs` has a word.

use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError, SharedSession, printable_line};

use super::{Connector, Continuation, expect_no_input, is_no_relay};
use crate::address::{Address, ToAddress};
use crate::channel::Channel;
use crate::client::ClientSession;
use crate::connect::error::ConnectError;
use crate::connect::hop::Hop;
use crate::connect::opener::OpenedBy;
use crate::connect::tunnel::Tunnel;
use crate::error::TransportError;

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
            existing = Some(self.tunnel(plan.address, existing, &next.address).await?);
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

    /// Opens a plain stream of bytes to `to`, an address that the server at `server` dials: a
    /// service near it that speaks a protocol of its own. The server's operator allows such
    /// addresses ([`ServeOptions::allow_port`](crate::ServeOptions::allow_port)). Each hop of the
    /// connector passes the bytes on, too, as [a tunnel](Self::via). Cancel-safe.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] if an address is malformed, a peer cannot be reached or refuses, the
    /// service cannot be reached, or `server` is an address without a channel. That of a tracker's
    /// servers is such a one: [`Loan::open_tunnel`](crate::tracker::Loan::open_tunnel).
    pub async fn open_tunnel<A: ToAddress + ?Sized>(&self, server: &A, to: &Address) -> Result<Tunnel, ConnectError> {
        self.open_tunnel_at(self.target(server)?, to).await
    }

    /// Opens a tunnel as [`open_tunnel`](Self::open_tunnel) does, from a server whose address has
    /// been parsed.
    pub(crate) async fn open_tunnel_at(&self, server: Hop, to: &Address) -> Result<Tunnel, ConnectError> {
        if self.transports.opener(server.address.scheme()).is_some() {
            let text = "no channel leads there, and so no tunnel";
            return Err(TransportError::unsupported(&server.address, text).into());
        }
        let (first, further) = self.route(server);
        let (mut address, mut existing) = (first.address, None);
        for next in further {
            existing = Some(self.tunnel(address.without_key(), existing, &next.address).await?);
            address = next.address;
        }
        let key = address.key().unwrap_or(&self.key).to_owned();
        self.tunnel_from(address.without_key(), &key, existing, to).await
    }

    /// Opens a channel to `next`, where a server waits to be spoken to, through the hop at
    /// `address`.
    async fn tunnel(
        &self,
        address: Address,
        existing: Option<Channel>,
        next: &Address,
    ) -> Result<Channel, ConnectError> {
        let Tunnel { channel, input } = self.tunnel_from(address, "", existing, next).await?;
        expect_no_input(&input, channel.peer())?;
        Ok(channel)
    }

    /// Opens a tunnel to `next` from the server at `address`. With a `key` the server must have it,
    /// or be a relay at which a server with that key waits.
    async fn tunnel_from(
        &self,
        address: Address,
        key: &str,
        existing: Option<Channel>,
        next: &Address,
    ) -> Result<Tunnel, ConnectError> {
        crate::runtime::install_in_core();
        let next = next.clone().without_key().to_string();
        let handshake = |key: &str, channel: &Channel| {
            let mut config = self.handshake(key.to_owned(), vec![next.clone()], channel.security(), false);
            config.hello.tunnel = true;
            config.hello.workspace.clear();
            config.hello.ticket.clear();
            config
        };
        let open_tunnel = |mut channel: Channel| -> Continuation<'_, Tunnel> {
            Box::pin(async move {
                let config = handshake(key, &channel);
                let (mut negotiated, mut input) = self.perform_handshake(&mut channel, config).await?;
                if negotiated.theirs.relay && !key.is_empty() {
                    expect_no_input(&input, channel.peer())?;
                    let relay = channel.peer().to_owned();
                    channel = channel.with_further_peer(relay);
                    let config = handshake("", &channel);
                    (negotiated, input) = self.perform_handshake(&mut channel, config).await?;
                    is_no_relay(&negotiated, channel.peer())?;
                }
                is_key(key, &negotiated.theirs.key, channel.peer())?;
                Ok(Tunnel { channel, input })
            })
        };
        let Tunnel { channel, input } = self.run_over_channel(&address, existing, &open_tunnel).await?;
        Ok(Tunnel { channel: channel.with_further_peer(format!("{next} through {address}")), input })
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

/// Checks that a server has the key that it was to have, if any.
fn is_key(wanted: &str, key: &str, peer: &str) -> Result<(), RpcError> {
    if wanted.is_empty() || wanted == key {
        return Ok(());
    }
    let text = format!("the client asks for key '{wanted}', and the server has '{}'", printable_line(key));
    Err(RpcError::new(ErrorKind::Refused, text).with_peer(peer))
}

pub(super) fn tunnel_without_target(tunnel: &Hop) -> RpcError {
    let text = format!("'{tunnel}' is a tunnel, and leads nowhere: name the server behind it");
    RpcError::new(ErrorKind::InvalidArgument, text)
}

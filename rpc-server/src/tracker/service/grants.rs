//! The answer to a request: the servers that were granted, within a limit of bytes.

use rpc_core::{Result, RpcError};
use rpc_transports::tracker::Grant;

use super::{Granted, MAX_GRANTS, ServerDescription};

/// Returns the description of granted slots for a client.
///
/// # Errors
///
/// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded): the descriptions of the
/// servers are too long for one message.
pub(super) fn grants(slots: &[Granted], good_for_ms: u64) -> Result<Vec<Grant>> {
    let size: usize = slots.iter().map(|granted| granted.description.size()).sum();
    if size > MAX_GRANTS {
        return Err(RpcError::limit("bytes of one answer: ask for fewer servers", MAX_GRANTS as u64, size as u64));
    }
    let grant = |granted: &Granted| {
        let Granted { slot, ticket, description, .. } = granted;
        Ok(Grant {
            serial: slot.serial,
            ticket: ticket.clone(),
            good_for_ms,
            server: description.name.clone(),
            key: description.offer.key.clone(),
            labels: description.offer.labels.clone(),
            devices: description.offer.devices.clone(),
            address: granted.address()?,
        })
    };
    slots.iter().map(grant).collect()
}

impl Granted {
    /// Returns the addresses for a native client.
    fn address(&self) -> Result<Vec<String>> {
        #[cfg(feature = "tvm")]
        if let Some(place) = &self.tvm {
            return Ok(vec![place.address()?.to_string()]);
        }
        Ok(self.description.address.clone())
    }
}

impl ServerDescription {
    /// Returns the approximate length of the description in a message, in bytes.
    fn size(&self) -> usize {
        let labels = self.offer.labels.iter().map(|(name, value)| name.len() + value.len());
        let devices = self.offer.devices.iter().map(|device| {
            let target = device.target.as_ref().map_or(0, |target| target.to_string().len());
            let scopes = device.memory_scopes.iter().map(|scope| scope.len() + 4);
            device.kind.len() + target + scopes.sum::<usize>() + 48
        });
        let addresses = self.address.iter().map(String::len);
        // The constant covers the ticket and the names of the fields.
        256 + self.name.len() + self.offer.key.len() + labels.chain(devices).chain(addresses).sum::<usize>()
    }
}

//! The objects that sessions of servers and clients hold: registrations and claims.

use std::collections::HashMap;
use std::sync::Arc;

use rpc_core::function::EndProbe;
use rpc_core::{Context, Result, RpcError};
use rpc_transports::tracker::{LossReason, Reach, Renewed, Returned, ServerStatus};
use tokio::sync::watch;

use super::super::limits::{check_status, clip, clipped};
use super::super::scheduler::{ClaimId, ServerId};
use super::{Answer, Granted, PROBE_INTERVAL, ReportedDetails, Tracker};

/// A registration. It ends when the session that made it ends or frees it.
pub(crate) struct ServerObject {
    pub(super) tracker: Arc<Tracker>,
    pub(super) id: ServerId,
}

impl ServerObject {
    /// Takes a report. Details are kept as long as the session of the server has memory for them.
    pub(super) fn renew(&self, context: &Context, status: ServerStatus) -> Result<Renewed> {
        check_status(&status)?;
        let mut status = clipped(status);
        let details = status.details.take().and_then(|details| ReportedDetails::new(context, details));
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        if !state.scheduler.report(now, self.id, &status) {
            return Err(RpcError::not_found("the registration has expired: register again"));
        }
        let Some(entry) = state.servers.get_mut(&self.id) else {
            return Err(RpcError::internal("a server is registered of which nothing is known"));
        };
        if details.is_some() {
            entry.details = details;
        }
        let reach = entry.reach.clone();
        if status.leaving {
            if state.scheduler.unregister(now, self.id) {
                state.remove_server(now, self.id, None);
            }
            self.tracker.apply_events(state, now);
            return Ok(Renewed { reach, end: Vec::new() });
        }
        let end = std::mem::take(&mut entry.to_end).into_iter().collect();
        let look_again = matches!(reach, Reach::Unreachable { .. }) && now > entry.probed + PROBE_INTERVAL;
        let address = look_again.then(|| {
            entry.probed = now;
            entry.description.address.clone()
        });
        self.tracker.apply_events(state, now);
        if let Some(address) = address {
            self.tracker.spawn_probe(self.id, address);
        }
        Ok(Renewed { reach, end })
    }
}

impl Drop for ServerObject {
    fn drop(&mut self) {
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        if state.scheduler.unregister(now, self.id) {
            state.remove_server(now, self.id, Some(LossReason::Gone));
            self.tracker.apply_events(state, now);
        }
    }
}

/// A claim. It is cancelled when the session that made it ends or frees it. Granted slots that have
/// not been used by then expire, or come back a moment later if the session has ended: the client
/// is gone.
pub(super) struct ClaimObject {
    pub(super) tracker: Arc<Tracker>,
    pub(super) id: ClaimId,
    pub(super) answer: watch::Receiver<Answer>,
    /// Probe of the end of the session that made it.
    pub(super) session: EndProbe,
}

impl ClaimObject {
    pub(super) fn give_back(&self, returned: &[Returned]) {
        let Some(Ok(slots)) = self.answer.borrow().clone() else { return };
        let reasons: HashMap<u64, &str> =
            returned.iter().map(|returned| (returned.serial, returned.why.as_str())).collect();
        let back = slots.iter().filter_map(|Granted { slot, description, .. }| {
            let why = clip(reasons.get(&slot.serial)?);
            rpc_core::log_limited!(INFO, name = description.name, why, "a granted server was returned unused");
            Some((slot.server, slot.serial))
        });
        let back: Vec<_> = back.collect();
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        state.scheduler.give_back(now, self.id, &back);
        self.tracker.apply_events(state, now);
    }
}

impl Drop for ClaimObject {
    fn drop(&mut self) {
        let now = rpc_core::clock::now();
        let mut state = self.tracker.lock();
        if state.claims.remove(&self.id).is_some() {
            state.scheduler.cancel(now, self.id);
            self.tracker.apply_events(state, now);
        } else if self.session.has_ended()
            && let Some(Ok(slots)) = &*self.answer.borrow()
        {
            let slots = slots.iter().map(|granted| (granted.slot.server, granted.slot.serial)).collect();
            state.scheduler.abandon(now, self.id, slots);
            self.tracker.apply_events(state, now);
        }
    }
}

//! Leases of an isolated session, as the server keeps them: by the numbers that the process of the
//! session has given them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::task::Waker;

use rpc_core::Device;

use super::messages::{LeaseAnswer, LeaseCommand};
use crate::leases::{LeaseId, SessionLeases};

/// Sender of answers to the process. Must not block.
type AnswerSender = Arc<dyn Fn(LeaseAnswer) + Send + Sync>;

/// Leases of one session; see the [module](self). They end with this value.
pub(super) struct ProcessLeases {
    session: SessionLeases,
    ids: HashMap<u64, LeaseId>,
    answer: AnswerSender,
}

impl ProcessLeases {
    pub(super) fn new(session: SessionLeases, answer: impl Fn(LeaseAnswer) + Send + Sync + 'static) -> Self {
        Self { session, ids: HashMap::new(), answer: Arc::new(answer) }
    }

    /// Keeps what the session holds until this value is dropped, whatever the process asks for: it
    /// releases its objects before it ends, while its functions may still compute.
    pub(super) fn session_ends(&self) {
        self.session.begin_end();
    }

    /// Wakes `waker` at each change of the devices that are reserved for others, as
    /// [`SessionLeases::observe_reservations`].
    pub(super) fn observe_reservations(&self, waker: Waker) {
        self.session.observe_reservations(waker);
    }

    /// Returns the next list of these devices, with its number.
    pub(super) fn take_reserved_for_others(&self) -> Option<(u64, Vec<Device>)> {
        self.session.take_reserved_for_others()
    }

    /// Does what the process asks for. Commands with numbers that it may not use are ignored.
    pub(super) fn act(&mut self, command: LeaseCommand) {
        match command {
            LeaseCommand::Request { number, request } => {
                let Entry::Vacant(entry) = self.ids.entry(number) else { return };
                let answer = self.answer.clone();
                let queued = self.session.queue(request, move |grant| {
                    answer(LeaseAnswer::Granted { number, waited: grant.waited, duration: grant.duration });
                });
                (self.answer)(match queued {
                    Ok(id) => {
                        entry.insert(id);
                        LeaseAnswer::Queued { number }
                    }
                    Err(error) => LeaseAnswer::Refused { number, error },
                });
            }
            LeaseCommand::Release { number } => {
                if let Some(id) = self.ids.remove(&number) {
                    self.session.release(id);
                }
            }
            LeaseCommand::Ahead { question, number } => {
                let ahead = self.ids.get(&number).map_or(0, |id| self.session.ahead(*id));
                (self.answer)(LeaseAnswer::Ahead { question, ahead });
            }
            LeaseCommand::LeasedDevices { question } => {
                let devices = self.session.leased_devices();
                (self.answer)(LeaseAnswer::LeasedDevices { question, devices });
            }
            LeaseCommand::Unused { list, devices } => self.session.take_unused(list, &devices),
        }
    }
}

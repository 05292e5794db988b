//! Leases of an isolated session, as the server keeps them: by the numbers that the process of the
//! session has given them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::task::Waker;

use rpc_core::{Device, ErrorKind, Result, RpcError};

use super::messages::{LeaseAnswer, LeaseCommand};
use crate::leases::{LeaseId, LeaseRequest, SessionLeases};

/// Sender of answers to the process. Must not block.
type AnswerSender = Arc<dyn Fn(LeaseAnswer) + Send + Sync>;

/// Check of a request against the rights of the session's client, which the process may have been
/// made to ignore.
pub(super) type LeaseCheck = Box<dyn Fn(&LeaseRequest) -> Result<()> + Send>;

/// More devices of one kind than any machine has. A process may name no others, so that the lists
/// of reserved devices stay short.
const MAX_DEVICES_OF_A_KIND: i32 = 256;

/// Leases of one session; see the [module](self). They end with this value.
pub(super) struct ProcessLeases {
    session: SessionLeases,
    ids: HashMap<u64, LeaseId>,
    check: LeaseCheck,
    answer: AnswerSender,
}

impl ProcessLeases {
    pub(super) fn new(
        session: SessionLeases,
        check: LeaseCheck,
        answer: impl Fn(LeaseAnswer) + Send + Sync + 'static,
    ) -> Self {
        Self { session, ids: HashMap::new(), check, answer: Arc::new(answer) }
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
                let granted = move |grant: crate::leases::LeaseGrant| {
                    answer(LeaseAnswer::Granted { number, waited: grant.waited, duration: grant.duration });
                };
                let queued = check_request(&request, &self.check).and_then(|()| self.session.queue(request, granted));
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

/// Checks a request that comes from a process, which may be one that its client controls.
fn check_request(request: &LeaseRequest, check: &LeaseCheck) -> Result<()> {
    if !(0..MAX_DEVICES_OF_A_KIND).contains(&request.device.index) {
        return Err(RpcError::new(ErrorKind::NotFound, format!("there is no device {}", request.device)));
    }
    check(request)
}

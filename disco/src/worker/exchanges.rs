//! Exchanges of a worker with the workers of another session: how they are ended from outside,
//! while the worker waits in one.
//!
//! An exchange has a number that the controller chooses. It is told to end as collectives of an
//! epoch are (`disco.break_ccl`), by that number: exchanges have numbers from 2^62 on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};

use crate::ccl::Control;

/// Bit that the numbers of exchanges have, and no epoch of a session's collectives. It is not the
/// highest one, because integers of calls have a sign.
pub(crate) const EXCHANGE: u64 = 1 << 62;

/// Exchanges whose end is remembered, for workers that come to them later, and the bytes of each
/// cause: a controller may end any number.
const MAX_REMEMBERED: usize = 8;
const MAX_CAUSE: usize = 256;

/// Returns true if this is the number of an exchange.
pub(crate) fn is_exchange(epoch: u64) -> bool {
    epoch & EXCHANGE != 0
}

/// The exchanges of one worker.
#[derive(Default)]
pub(crate) struct Exchanges(Mutex<State>);

#[derive(Default)]
struct State {
    running: Vec<Running>,
    /// The last ones that were ended from outside, and why.
    ended: VecDeque<(u64, RpcError)>,
    /// True once the session has ended.
    are_over: bool,
}

struct Running {
    number: u64,
    /// Flag by which joining ends.
    has_ended: Arc<AtomicBool>,
    /// Control of the communicator, once there is one.
    control: Option<Arc<dyn Control>>,
}

impl Running {
    fn end(&self, reason: &str) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.control.iter().for_each(|control| control.abort(reason));
    }
}

/// Place of an exchange among those that run. Dropping it ends that.
pub(crate) struct Exchange {
    exchanges: Arc<Exchanges>,
    number: u64,
    has_ended: Arc<AtomicBool>,
}

impl Exchanges {
    /// Begins an exchange.
    ///
    /// # Errors
    ///
    /// It has been ended already, for this reason; or runs already.
    pub(crate) fn begin(self: &Arc<Self>, number: u64) -> Result<Exchange, RpcError> {
        let mut state = self.0.lock();
        if state.are_over {
            return Err(RpcError::new(ErrorKind::Closed, "the session has ended"));
        }
        if let Some((_, cause)) = state.ended.iter().find(|(ended, _)| *ended == number) {
            return Err(cause.clone());
        }
        if state.running.iter().any(|running| running.number == number) {
            return Err(RpcError::invalid_argument("an exchange that has begun already"));
        }
        let has_ended = Arc::<AtomicBool>::default();
        state.running.push(Running { number, has_ended: Arc::clone(&has_ended), control: None });
        Ok(Exchange { exchanges: Arc::clone(self), number, has_ended })
    }

    /// Ends an exchange, also one that has not begun.
    pub(crate) fn end(&self, number: u64, cause: &RpcError) {
        let mut state = self.0.lock();
        if state.ended.iter().any(|(ended, _)| *ended == number) {
            return;
        }
        if state.ended.len() == MAX_REMEMBERED {
            state.ended.pop_front();
        }
        let remembered: String = cause.message().chars().take(MAX_CAUSE / 4).collect();
        state.ended.push_back((number, RpcError::new(cause.kind(), remembered)));
        state.running.iter().filter(|running| running.number == number).for_each(|one| one.end(cause.message()));
    }

    /// Ends all exchanges, and those to come: the session has ended.
    pub(crate) fn end_all(&self, reason: &str) {
        let mut state = self.0.lock();
        state.are_over = true;
        state.running.iter().for_each(|running| running.end(reason));
    }
}

impl Exchange {
    /// Returns the flag that is set when the exchange ends, for joining.
    pub(crate) fn has_ended(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.has_ended)
    }

    /// Returns the cause for which it was ended from outside, if it was.
    pub(crate) fn end_cause(&self) -> Option<RpcError> {
        let state = self.exchanges.0.lock();
        let cause = state.ended.iter().find(|(number, _)| *number == self.number).map(|(_, cause)| cause.clone());
        cause.or_else(|| state.are_over.then(|| RpcError::new(ErrorKind::Closed, "the session has ended")))
    }

    /// Has this control end the exchange, at once if it has been ended meanwhile.
    pub(crate) fn joined(&self, control: Arc<dyn Control>) {
        let mut state = self.exchanges.0.lock();
        if self.has_ended.load(Ordering::Relaxed) {
            control.abort("it was ended");
        }
        if let Some(running) = state.running.iter_mut().find(|running| running.number == self.number) {
            running.control = Some(control);
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.exchanges.0.lock().running.retain(|running| running.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ccl::host;

    #[test]
    fn an_exchange_ends_before_it_begins_while_it_joins_and_while_it_runs() {
        let exchanges = Arc::<Exchanges>::default();
        let cause = RpcError::new(ErrorKind::PeerLost, "the other session has ended");
        exchanges.end(EXCHANGE | 1, &cause);
        assert_eq!(exchanges.begin(EXCHANGE | 1).err(), Some(cause.clone()));
        let joining = exchanges.begin(EXCHANGE | 2).unwrap();
        exchanges.begin(EXCHANGE | 2).map(drop).unwrap_err();
        let other = exchanges.begin(EXCHANGE | 3).unwrap();
        exchanges.end(EXCHANGE | 2, &cause);
        assert!(joining.has_ended().load(Ordering::Relaxed) && !other.has_ended().load(Ordering::Relaxed));
        assert_eq!((joining.end_cause(), other.end_cause()), (Some(cause.clone()), None));
        // Its communicator came too late.
        let [late, control] = [(); 2].map(|()| host::threads(1, &host::Options::default()).unwrap()[0].control());
        joining.joined(Arc::clone(&late));
        assert!(late.broken().is_some());
        other.joined(Arc::clone(&control));
        assert!(control.broken().is_none());
        exchanges.end_all("the session has ended");
        assert!(control.broken().is_some());
        assert_eq!(exchanges.begin(EXCHANGE | 4).err().unwrap().kind(), ErrorKind::Closed);
        drop((joining, other));
        assert!(exchanges.0.lock().running.is_empty());
    }

    #[test]
    fn few_ends_are_remembered() {
        let exchanges = Arc::<Exchanges>::default();
        for number in 0..100 {
            exchanges.end(EXCHANGE | number, &RpcError::internal("of a test"));
        }
        assert_eq!(exchanges.0.lock().ended.len(), MAX_REMEMBERED);
        assert!(is_exchange(EXCHANGE) && !is_exchange(7));
        // All numbers are integers of calls.
        i64::try_from(EXCHANGE | (EXCHANGE - 1)).unwrap();
    }
}

//! Handing the connection of a client of TVM to the process of its session, which goes on with it.

use std::time::{Duration, Instant};

use rpc_core::RpcError;
use rpc_transports::DialectHandoff;
use serde::{Deserialize, Serialize};

use super::link::{Link, lasted_as_asked};

/// State of a connection whose session has begun, as JSON. Both processes are the same program.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct HandedState {
    /// Time that the client has asked for, if it has.
    timeout: Option<HandedTimeout>,
}

/// Time after which the session ends.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct HandedTimeout {
    /// Time left, as the connection is handed over.
    left: Duration,
    /// Whole time, of which the client is told.
    length: Duration,
}

impl HandedState {
    fn new(deadline: Option<(Instant, Duration)>) -> Self {
        let timeout =
            deadline.map(|(at, length)| HandedTimeout { left: at.saturating_duration_since(Instant::now()), length });
        Self { timeout }
    }

    fn to_bytes(&self) -> Result<Vec<u8>, RpcError> {
        serde_json::to_vec(self).map_err(|error| RpcError::internal(format!("no state of a connection: {error}")))
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, RpcError> {
        serde_json::from_slice(bytes).map_err(|error| RpcError::internal(format!("no state of a connection: {error}")))
    }

    /// Returns the end of the session and its whole time, with the time that is left counting from
    /// now on.
    pub(super) fn deadline(&self) -> Option<(Instant, Duration)> {
        let HandedTimeout { left, length } = self.timeout.as_ref()?;
        Some((Instant::now().checked_add(*left)?, *length))
    }
}

impl Link<'_> {
    /// Hands the connection to the process of the session, with what is to be held until its end.
    /// The session has just begun, and all that was written has been flushed.
    ///
    /// # Errors
    ///
    /// `held`, if the session is to be served here.
    pub(super) async fn hand_off(&mut self, held: Box<dyn Send + Sync>) -> Result<(), Box<dyn Send + Sync>> {
        let Ok(state) = HandedState::new(self.deadline).to_bytes() else { return Err(held) };
        let input = self.wire.take_unread().to_vec();
        let deadline = self.deadline.map(|(at, length)| (at, lasted_as_asked(length)));
        match self.connection.hand_off(DialectHandoff { state, input, deadline, held }).await {
            Ok(()) => Ok(()),
            Err(DialectHandoff { input, held, .. }) => {
                self.wire.put_back(&input);
                Err(held)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_connection_is_read_as_it_was_written() {
        let timeout = HandedTimeout { left: Duration::from_millis(1), length: Duration::from_millis(1500) };
        for state in [HandedState::default(), HandedState { timeout: Some(timeout) }] {
            assert_eq!(HandedState::from_bytes(&state.to_bytes().unwrap()).unwrap(), state);
        }
        assert!(HandedState::from_bytes(b"{}x").is_err());
    }

    #[test]
    fn the_time_of_a_client_goes_on_where_it_stood() {
        let (length, before) = (Duration::from_secs(9), Instant::now());
        let state = HandedState::new(Some((before + Duration::from_secs(4), length)));
        let (at, told) = HandedState::from_bytes(&state.to_bytes().unwrap()).unwrap().deadline().unwrap();
        assert_eq!(told, length);
        assert!(at <= Instant::now() + Duration::from_secs(4), "no time is gained");
        let over = HandedState::new(Some((before, length))).deadline().unwrap();
        assert!(over.0 <= Instant::now());
        assert_eq!(HandedState::new(None).deadline(), None);
    }
}

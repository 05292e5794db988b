//! Places of a server at its relay: one for each client that may be served through it. A channel
//! that waits at the relay holds one, so that no more clients come than are served.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Places of a server at one relay.
pub(super) struct ParkPlaces {
    free: Arc<Semaphore>,
    waiting: Mutex<WaitingPlaces>,
}

/// Places of the channels that wait at the relay.
#[derive(Default)]
struct WaitingPlaces {
    next: u64,
    by_id: BTreeMap<u64, (OwnedSemaphorePermit, Arc<Notify>)>,
}

/// Place of a channel that waits at the relay. Another client may take it.
pub(super) struct Reservation {
    places: Arc<ParkPlaces>,
    id: u64,
    /// Notified once the place has been taken.
    taken: Arc<Notify>,
}

impl ParkPlaces {
    pub(super) fn new(capacity: usize) -> Arc<Self> {
        let free = Arc::new(Semaphore::new(capacity.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self { free, waiting: Mutex::default() })
    }

    /// Waits for a free place, and reserves it.
    pub(super) async fn reserve(self: &Arc<Self>) -> Reservation {
        let place = match self.free.clone().acquire_owned().await {
            Ok(place) => place,
            Err(_) => unreachable!("the semaphore is never closed"),
        };
        let taken = Arc::new(Notify::new());
        let mut waiting = self.waiting.lock();
        let id = waiting.next;
        waiting.next += 1;
        waiting.by_id.insert(id, (place, taken.clone()));
        Reservation { places: self.clone(), id, taken }
    }

    /// Returns true if [`take`](Self::take) would find a place now.
    fn has_any(&self) -> bool {
        self.free.available_permits() > 0 || !self.waiting.lock().by_id.is_empty()
    }

    /// Returns a place for a client that has none: a free one, or that of a channel that waits,
    /// which then leaves the relay.
    fn take(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = self.free.clone().try_acquire_owned() {
            return Some(place);
        }
        let (_, (place, taken)) = self.waiting.lock().by_id.pop_last()?;
        taken.notify_one();
        Some(place)
    }
}

impl Reservation {
    /// Resolves once another client has taken the place.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    /// Ends the reservation. Returns its place, unless another client has it.
    fn end(&self) -> Option<OwnedSemaphorePermit> {
        self.places.waiting.lock().by_id.remove(&self.id).map(|(place, _)| place)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // The end of a place wakes the next one to wait for it, outside of the lock.
        drop(self.end());
    }
}

/// Limit on the clients of a server that come through a relay, as one of their connections sees it.
#[derive(Clone)]
pub(in crate::serve) struct ParkLimit {
    places: Arc<ParkPlaces>,
    /// Place that is kept for the client, for the first moment of its handshake.
    kept: Arc<Mutex<Option<OwnedSemaphorePermit>>>,
    /// Notified once the client of the connection is admitted.
    admitted: Arc<Notify>,
}

impl ParkLimit {
    /// Returns the limit for a client that has come to the channel with this reservation.
    pub(super) fn new(places: &Arc<ParkPlaces>, reservation: Reservation) -> Self {
        let kept = Arc::new(Mutex::new(reservation.end()));
        Self { places: places.clone(), kept, admitted: Arc::default() }
    }

    /// Takes the place that is kept for the client, if its time has not ended, for one that has
    /// proven its identity.
    pub(in crate::serve) fn take_kept(&self) -> Option<OwnedSemaphorePermit> {
        let place = self.kept.lock().take()?;
        self.admitted.notify_one();
        Some(place)
    }

    /// Checks that a client for which no place is kept could be admitted now. A session is opened
    /// only then, since that may start a process.
    ///
    /// # Errors
    ///
    /// As of [`admit`](Self::admit).
    pub(in crate::serve) fn check(&self) -> Result<(), RpcError> {
        if self.places.has_any() { Ok(()) } else { Err(all_taken()) }
    }

    /// Counts a client that has a session, and for which no place was kept.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`]: while its handshake lasted, others have taken all places.
    pub(in crate::serve) fn admit(&self) -> Result<OwnedSemaphorePermit, RpcError> {
        let place = self.places.take().ok_or_else(all_taken)?;
        self.admitted.notify_one();
        Ok(place)
    }

    /// Resolves once the client is admitted.
    pub(super) async fn admitted(&self) {
        self.admitted.notified().await;
    }

    /// Ends the time for which a place is kept.
    pub(super) fn release(&self) {
        let kept = self.kept.lock().take();
        drop(kept);
    }
}

fn all_taken() -> RpcError {
    let text = "the server has as many clients through this relay as it takes: try again later";
    RpcError::new(ErrorKind::LimitExceeded, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a client that was slow in its handshake took the last place while a channel
    /// waited for another one, which then came and was refused.
    #[tokio::test]
    async fn a_slow_client_takes_the_place_of_a_channel_that_waits() {
        let places = ParkPlaces::new(1);
        let slow = ParkLimit::new(&places, places.reserve().await);
        // Its time is over, and the server waits at the relay again.
        slow.release();
        let waiting = places.reserve().await;
        slow.check().unwrap();
        let session = slow.admit().unwrap();
        waiting.taken().await;
        // A client that came at the same moment finds no place.
        let late = ParkLimit::new(&places, waiting);
        assert!(late.take_kept().is_none());
        for error in [late.check().unwrap_err(), late.admit().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        }
        let reserve = places.reserve();
        let mut reserve = std::pin::pin!(reserve);
        assert!(is_pending(&mut reserve).await, "a full server waits for no client");
        drop(session);
        let next = reserve.await;
        drop(ParkLimit::new(&places, next).take_kept().unwrap());
    }

    /// Returns true if the future is pending when it is polled now.
    async fn is_pending<F: Future>(future: &mut std::pin::Pin<&mut F>) -> bool {
        std::future::poll_fn(|cx| std::task::Poll::Ready(future.as_mut().poll(cx).is_pending())).await
    }

    #[tokio::test]
    async fn a_place_that_is_kept_is_not_given_to_others() {
        let places = ParkPlaces::new(2);
        let [first, second] = [places.reserve().await, places.reserve().await];
        let (first, second) = (ParkLimit::new(&places, first), ParkLimit::new(&places, second));
        first.release();
        let stranger = ParkLimit::new(&places, places.reserve().await);
        let (kept, session) = (second.take_kept().unwrap(), stranger.take_kept().unwrap());
        assert!(first.take_kept().is_none() && first.admit().is_err(), "all places are taken");
        drop((kept, session));
        drop(first.admit().unwrap());
    }
}

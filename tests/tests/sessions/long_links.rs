//! Copies over links with a long round trip, in virtual time: how many pieces are in flight, and
//! what a peer does that has no room for them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rpc_core::client::CHUNK;
use rpc_core::reply::ReplyControl;
use rpc_core::{
    DataType, Device, ErrorKind, Handle, Operation, Reference, RemoteTensor, Request, RpcError, RpcSession, Session,
    Submission, TensorRef, Value,
};
use tokio::time::{Instant, sleep_until};

/// Session behind a link that passes one piece after the other. Pieces are not stored.
struct LinkedSession {
    round_trip: Duration,
    /// Time that the link takes for a piece.
    piece: Duration,
    /// Number of pieces for which the peer has room; it refuses others.
    room: usize,
    free: Mutex<Option<Instant>>,
    counts: Arc<Counts>,
    ids: AtomicU64,
}

#[derive(Default)]
struct Counts {
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    refused: AtomicUsize,
}

/// Control of requests that need neither cancellation nor release.
struct NoControl;

impl ReplyControl for NoControl {
    fn cancel(&self, _: u64) {}

    fn discard(&self, _: Value) {}
}

impl RpcSession for LinkedSession {
    fn submit(&self, request: Request) -> Submission {
        let reply = match request.operation {
            Operation::Alloc { device, dtype, shape, .. } => {
                let storage = Handle::from_bits(1 << 32);
                let tensor = TensorRef { storage, byte_offset: 0, shape, strides: None, dtype, device };
                return Submission::ready(Ok(Value::Object(Reference::Tensor(tensor.into()))));
            }
            Operation::Write { .. } | Operation::Read { .. } => Ok(Value::Null),
            _ => return Submission::ready(Ok(Value::Null)),
        };
        let counts = self.counts.clone();
        let in_flight = counts.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        counts.most_in_flight.fetch_max(in_flight, Ordering::Relaxed);
        let is_refused = in_flight > self.room;
        let arrives = {
            let mut free = self.free.lock().unwrap();
            let at_the_link = Instant::now() + self.round_trip / 2;
            let passed = free.map_or(at_the_link, |free| free.max(at_the_link)) + self.piece;
            *free = Some(passed);
            passed + self.round_trip / 2
        };
        let (submission, responder) =
            Submission::pending(Arc::new(NoControl), self.ids.fetch_add(1, Ordering::Relaxed));
        responder.admit();
        tokio::spawn(async move {
            sleep_until(arrives).await;
            counts.in_flight.fetch_sub(1, Ordering::Relaxed);
            if is_refused {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                responder.complete(Err(RpcError::limit("max_total_queued", 0, CHUNK as u64)));
            } else {
                responder.complete(reply);
            }
        });
        submission
    }
}

/// Link with a tensor behind it.
struct Site {
    session: Session,
    tensor: RemoteTensor,
    counts: Arc<Counts>,
    pieces: usize,
    piece: Duration,
}

impl Site {
    async fn new(mbit: u64, round_trip_ms: u64, room: usize, pieces: usize) -> Self {
        // As `rpc_transports` does for sessions of its own.
        rpc_core::clock::install(|| Instant::now().into_std());
        let piece = Duration::from_secs_f64(8.0 * CHUNK as f64 / (mbit as f64 * 1e6));
        let counts = Arc::<Counts>::default();
        let session = Session::new(LinkedSession {
            round_trip: Duration::from_millis(round_trip_ms),
            piece,
            room,
            free: Mutex::new(None),
            counts: counts.clone(),
            ids: AtomicU64::new(1),
        });
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[(pieces * CHUNK) as i64]).await.unwrap();
        Self { session, tensor, counts, pieces, piece }
    }

    /// Copies to the tensor, or from it. Returns the share of the link's rate that was used.
    async fn copy(&self, is_write: bool) -> Result<f64, RpcError> {
        let began = Instant::now();
        // Memory that is not touched takes none.
        if is_write {
            let data = Bytes::from(vec![0; self.pieces * CHUNK]);
            self.session.copy_to_remote(&self.tensor, data).await?;
        } else {
            let buffer = BytesMut::zeroed(self.pieces * CHUNK);
            let filled = self.session.copy_from_remote_into(&self.tensor, None, buffer).await?;
            assert_eq!(filled.len(), self.pieces * CHUNK);
        }
        Ok((self.piece * self.pieces as u32).as_secs_f64() / began.elapsed().as_secs_f64())
    }

    fn most_in_flight(&self) -> usize {
        self.counts.most_in_flight.load(Ordering::Relaxed)
    }
}

#[tokio::test(start_paused = true)]
async fn copies_fill_a_long_link() {
    for is_write in [true, false] {
        let site = Site::new(1000, 150, usize::MAX, 1024).await;
        let share = site.copy(is_write).await.unwrap();
        assert!(share >= 0.9, "{share}");
        assert!((19..=48).contains(&site.most_in_flight()), "{}", site.most_in_flight());
    }
}

#[tokio::test(start_paused = true)]
async fn copies_over_a_slow_or_a_short_link_have_eight_pieces_in_flight() {
    for (mbit, round_trip) in [(10, 150), (100, 100), (1000, 2)] {
        for is_write in [true, false] {
            let site = Site::new(mbit, round_trip, usize::MAX, 256).await;
            let share = site.copy(is_write).await.unwrap();
            assert!(share > 0.95, "{mbit} Mbit/s, {round_trip} ms: {share}");
            assert_eq!(site.most_in_flight(), 8, "{mbit} Mbit/s, {round_trip} ms");
        }
    }
}

/// A server refuses pieces beyond the eight of each session when other sessions have queued all
/// that there may be.
#[tokio::test(start_paused = true)]
async fn a_copy_goes_on_with_eight_pieces_where_the_peer_has_no_room_for_more() {
    for is_write in [true, false] {
        for room in [8, 12, 20] {
            let site = Site::new(1000, 150, room, 300).await;
            site.copy(is_write).await.unwrap();
            // Those of one window, and none after it.
            let refused = site.counts.refused.load(Ordering::Relaxed);
            assert!(site.most_in_flight() > room && (1..=48).contains(&refused), "room for {room}: {refused}");
        }
        // Room for less than eight was an error before, and is one.
        let site = Site::new(1000, 150, 7, 300).await;
        assert_eq!(site.copy(is_write).await.unwrap_err().kind(), ErrorKind::LimitExceeded);
        assert_eq!(site.most_in_flight(), 8);
    }
}

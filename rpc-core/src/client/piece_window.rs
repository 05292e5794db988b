//! Pieces of one copy that are in flight, oldest first, in a window whose [size](WindowSize) adapts
//! to the link.
//!
//! A peer, or a hop on the way, may have room for eight pieces of a session and none for more,
//! because other sessions hold the rest. It refuses those then. They are submitted again, with no
//! more than eight in flight, so that a window that has grown makes no copy fail. That is right
//! because a piece is the same bytes at the same place each time.

use std::collections::VecDeque;
use std::future::Future;
use std::time::Instant;

use super::window_size::{LEAST, WindowSize};
use crate::error::{ErrorKind, Result};

/// Pieces in flight. `T` describes a piece, `P` is its pending reply, and `R` the reply.
pub(crate) struct PieceWindow<T, P, R> {
    pieces: VecDeque<Piece<T, P, R>>,
    size: WindowSize,
    now: fn() -> Instant,
}

struct Piece<T, P, R> {
    piece: T,
    number: u64,
    submitted: Instant,
    /// True if the piece was submitted into a window of more than [`LEAST`].
    is_beyond_least: bool,
    reply: Reply<P, R>,
}

enum Reply<P, R> {
    Pending(P),
    Ended(Result<R>),
}

impl<T, P: Future<Output = Result<R>> + Unpin, R> PieceWindow<T, P, R> {
    pub(crate) fn new() -> Self {
        Self { pieces: VecDeque::with_capacity(LEAST), size: WindowSize::new(), now: crate::clock::now }
    }

    /// Returns true if the oldest piece has to end before the next one is submitted.
    pub(crate) fn is_full(&self) -> bool {
        self.pieces.len() >= self.size.pieces()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns the present time, which is passed to [`push`](Self::push).
    pub(crate) fn now(&self) -> Instant {
        (self.now)()
    }

    /// Adds a piece whose submission began at `submitted`.
    pub(crate) fn push(&mut self, piece: T, submitted: Instant, reply: P) {
        let number = self.size.submit();
        let is_beyond_least = self.size.pieces() > LEAST;
        self.pieces.push_back(Piece { piece, number, submitted, is_beyond_least, reply: Reply::Pending(reply) });
    }

    /// Waits for the reply to the oldest piece; `None` if none is in flight. `again` submits once
    /// more a piece that was refused.
    pub(crate) async fn finish(&mut self, mut again: impl FnMut(&T) -> P) -> Option<(T, Result<R>)> {
        self.pieces.front_mut()?.end().await;
        if self.pieces.front().is_some_and(Piece::was_refused) {
            self.size.narrow();
            // What the others take is free once they have ended.
            for piece in &mut self.pieces {
                piece.end().await;
            }
            for piece in self.pieces.iter_mut().filter(|piece| piece.was_refused()).take(LEAST) {
                piece.is_beyond_least = false;
                piece.reply = Reply::Pending(again(&piece.piece));
            }
            self.pieces.front_mut()?.end().await;
        } else if let Some(piece) = self.pieces.front() {
            self.size.end(piece.number, self.now().saturating_duration_since(piece.submitted));
        }
        let Piece { piece, reply, .. } = self.pieces.pop_front()?;
        match reply {
            Reply::Ended(outcome) => Some((piece, outcome)),
            Reply::Pending(reply) => Some((piece, reply.await)),
        }
    }
}

impl<T, P: Future<Output = Result<R>> + Unpin, R> Piece<T, P, R> {
    /// Waits for the reply, and keeps it.
    async fn end(&mut self) {
        if let Reply::Pending(reply) = &mut self.reply {
            self.reply = Reply::Ended(reply.await);
        }
    }

    /// Returns true if the piece has ended because there was no room for it, and there may be if
    /// fewer are in flight.
    fn was_refused(&self) -> bool {
        self.is_beyond_least
            && matches!(&self.reply, Reply::Ended(Err(error)) if error.kind() == ErrorKind::LimitExceeded)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::rc::Rc;
    use std::sync::LazyLock;
    use std::task::Poll;

    use super::*;
    use crate::error::RpcError;

    type Pending = Pin<Box<dyn Future<Output = Result<u32>>>>;

    /// Peer with room for a number of pieces. It answers what it has when it is asked to.
    #[derive(Default)]
    struct Peer {
        room: usize,
        held: Cell<usize>,
        most: Cell<usize>,
        submitted: RefCell<Vec<u32>>,
        broken: Cell<Option<u32>>,
    }

    impl Peer {
        fn submit(self: &Rc<Self>, piece: u32) -> Pending {
            let peer = self.clone();
            peer.submitted.borrow_mut().push(piece);
            peer.held.set(peer.held.get() + 1);
            peer.most.set(peer.most.get().max(peer.held.get()));
            let fits = peer.held.get() <= peer.room;
            Box::pin(async move {
                // Once, so that the caller waits.
                let mut polled = false;
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                peer.held.set(peer.held.get() - 1);
                match fits {
                    true if peer.broken.get() == Some(piece) => Err(RpcError::internal("broken")),
                    true => Ok(piece),
                    false => Err(RpcError::limit("max_total_queued", 8, 9)),
                }
            })
        }
    }

    /// Copies `pieces` pieces with a window that has grown to `width`. Returns those that ended.
    fn copy(peer: &Rc<Peer>, pieces: u32, width: usize) -> Result<Vec<u32>> {
        let mut window = PieceWindow::new();
        window.size = WindowSize::grown(width);
        // No time passes, so that the window stays as it is.
        static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
        window.now = || *NOW;
        let mut ended = Vec::new();
        crate::blocking::block_on(async {
            let mut next = 0;
            while next < pieces || !window.is_empty() {
                if next < pieces && !window.is_full() {
                    window.push(next, window.now(), peer.submit(next));
                    next += 1;
                    continue;
                }
                let Some((piece, outcome)) = window.finish(|piece| peer.submit(*piece)).await else { break };
                assert_eq!(outcome?, piece);
                ended.push(piece);
            }
            Ok(ended)
        })?
    }

    #[test]
    fn pieces_that_are_refused_in_a_wide_window_are_submitted_again_in_order() {
        for (room, width) in [(8, 24), (8, 48), (9, 9), (20, 48), (48, 48)] {
            let peer = Rc::new(Peer { room, ..Peer::default() });
            assert_eq!(copy(&peer, 200, width).unwrap(), (0..200).collect::<Vec<_>>(), "{room} of {width}");
            assert_eq!(peer.most.get(), width);
            // Each of a whole window is submitted again, once, because eight find room then.
            let again = peer.submitted.borrow().len() - 200;
            assert_eq!(again, if room < width { width } else { 0 }, "{room} of {width}");
        }
    }

    #[test]
    fn a_refusal_among_eight_pieces_is_the_error_of_the_copy() {
        for width in [8, 24] {
            let peer = Rc::new(Peer { room: 7, ..Peer::default() });
            let error = copy(&peer, 100, width).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        }
    }

    #[test]
    fn other_errors_are_not_tried_again() {
        let peer = Rc::new(Peer { room: 48, broken: Cell::new(Some(3)), ..Peer::default() });
        assert_eq!(copy(&peer, 100, 48).unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(peer.submitted.borrow().iter().filter(|piece| **piece == 3).count(), 1);
    }
}

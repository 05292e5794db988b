//! Pieces of one copy that are in flight, oldest first, in a window whose [size](WindowSize) adapts
//! to the link.
//!
//! A peer, or a hop on the way, may have room for eight pieces of a session and none for more,
//! because other sessions hold the rest. It refuses those then. They are submitted again, with no
//! more than eight in flight, so that a window that has grown makes no copy fail. That is right
//! because a piece is the same bytes at the same place each time. Where pieces have to come in
//! order, the window stays at eight.

use std::collections::VecDeque;
use std::future::Future;
use std::time::Instant;

use super::window_size::{LEAST, WindowSize};
use crate::error::{ErrorKind, Result};

/// Pieces in flight. `T` describes a piece, `P` is its pending reply, and `R` the reply.
pub(crate) struct PieceWindow<T, P, R> {
    pieces: VecDeque<Piece<T, P, R>>,
    size: WindowSize,
    /// True if a piece whose request was carried out may be submitted again: its reply found no
    /// room.
    repeats_what_ran: bool,
    now: fn() -> Instant,
}

struct Piece<T, P, R> {
    piece: T,
    number: u64,
    submitted: Instant,
    /// True if the piece was submitted into a window of more than [`LEAST`], or was refused beside
    /// such a one.
    is_beyond_least: bool,
    /// True if the piece was submitted again.
    was_repeated: bool,
    reply: Reply<P, R>,
}

enum Reply<P, R> {
    Pending(P),
    Ended(Result<R>),
}

impl<T, P: Future<Output = Result<R>> + Unpin, R> PieceWindow<T, P, R> {
    /// Creates a window of reads.
    pub(crate) fn of_reads() -> Self {
        Self { repeats_what_ran: true, ..Self::of_writes() }
    }

    /// Creates a window of writes, in any order. One that was carried out and failed is not
    /// submitted again.
    pub(crate) fn of_writes() -> Self {
        let pieces = VecDeque::with_capacity(LEAST);
        Self { pieces, size: WindowSize::new(), repeats_what_ran: false, now: crate::clock::now }
    }

    /// Creates a window of writes that have to come in order, so that none may be submitted again.
    pub(crate) fn of_writes_in_order() -> Self {
        let mut window = Self::of_writes();
        window.size.narrow();
        window
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
        let reply = Reply::Pending(reply);
        self.pieces.push_back(Piece { piece, number, submitted, is_beyond_least, was_repeated: false, reply });
    }

    /// Waits for the reply to the oldest piece; `None` if none is in flight. `again` submits once
    /// more a piece that was refused.
    pub(crate) async fn finish(&mut self, mut again: impl FnMut(&T) -> P) -> Option<(T, Result<R>)> {
        self.pieces.front_mut()?.end().await;
        let ran = self.repeats_what_ran;
        let is_wide = self.pieces.iter().any(|piece| piece.is_beyond_least);
        if is_wide && self.pieces.front().is_some_and(|piece| piece.was_refused(ran)) {
            self.size.narrow();
            // What the others take is free once they have ended.
            for piece in &mut self.pieces {
                piece.end().await;
            }
            for (at, piece) in self.pieces.iter_mut().filter(|piece| piece.was_refused(ran)).enumerate() {
                // The rest has its turn when it is the oldest.
                piece.is_beyond_least = at >= LEAST;
                if at < LEAST {
                    piece.was_repeated = true;
                    piece.reply = Reply::Pending(again(&piece.piece));
                }
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

    /// Returns true if the piece has ended because there was no room for it, and may be submitted
    /// again. A function reports a limit of its own, such as a quota of files, in the same way, but
    /// has run.
    fn was_refused(&self, even_if_it_ran: bool) -> bool {
        let Reply::Ended(Err(error)) = &self.reply else { return false };
        let is_refused = error.kind() == ErrorKind::LimitExceeded;
        is_refused && !self.was_repeated && (even_if_it_ran || !error.request_may_have_run())
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
        /// Piece that is over a limit of the function that was called.
        over: Cell<Option<u32>>,
        /// Pieces that find no room, once each, however few are in flight.
        refused: RefCell<Vec<u32>>,
    }

    impl Peer {
        fn submit(self: &Rc<Self>, piece: u32) -> Pending {
            let peer = self.clone();
            peer.submitted.borrow_mut().push(piece);
            peer.held.set(peer.held.get() + 1);
            peer.most.set(peer.most.get().max(peer.held.get()));
            let unlucky = peer.refused.borrow().iter().position(|refused| *refused == piece);
            let unlucky = unlucky.map(|at| peer.refused.borrow_mut().remove(at)).is_some();
            let fits = peer.held.get() <= peer.room && !unlucky;
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
                    true if peer.over.get() == Some(piece) => Err(RpcError::limit("quota", 1, 2).may_have_run(true)),
                    true => Ok(piece),
                    false => Err(RpcError::limit("max_total_queued", 8, 9)),
                }
            })
        }
    }

    /// Copies `pieces` pieces with a window that has grown to `width`. Returns those that ended.
    fn copy(peer: &Rc<Peer>, pieces: u32, width: usize) -> Result<Vec<u32>> {
        let mut window = PieceWindow::of_writes();
        window.size = WindowSize::grown(width);
        copy_in(window, peer, pieces)
    }

    fn copy_in(mut window: PieceWindow<u32, Pending, u32>, peer: &Rc<Peer>, pieces: u32) -> Result<Vec<u32>> {
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

    /// Its reply comes after those of others that find no room, because they are more than eight.
    #[test]
    fn an_older_piece_that_is_refused_beside_newer_ones_is_submitted_again() {
        let peer = Rc::new(Peer { room: 48, ..Peer::default() });
        peer.refused.borrow_mut().extend([3, 9]);
        let mut window = PieceWindow::of_writes();
        for piece in 0..8 {
            window.push(piece, Instant::now(), peer.submit(piece));
        }
        window.size = WindowSize::grown(24);
        for piece in 8..12 {
            window.push(piece, Instant::now(), peer.submit(piece));
        }
        let mut ended = Vec::new();
        crate::blocking::block_on(async {
            while let Some((piece, outcome)) = window.finish(|piece| peer.submit(*piece)).await {
                assert_eq!(outcome.unwrap(), piece);
                ended.push(piece);
            }
        })
        .unwrap();
        assert_eq!(ended, (0..12).collect::<Vec<_>>());
        assert_eq!(peer.submitted.borrow()[12..], [3, 9]);
    }

    #[test]
    fn a_limit_of_the_function_is_the_error_of_writes_and_tried_again_by_reads() {
        let peer = Rc::new(Peer { room: 48, over: Cell::new(Some(5)), ..Peer::default() });
        let times = || peer.submitted.borrow().iter().filter(|piece| **piece == 5).count();
        let error = copy(&peer, 100, 24).unwrap_err();
        assert!(error.message().contains("quota") && times() == 1, "{error}");
        peer.submitted.borrow_mut().clear();
        let mut window = PieceWindow::of_reads();
        window.size = WindowSize::grown(24);
        assert!(copy_in(window, &peer, 100).unwrap_err().message().contains("quota"));
        assert_eq!(times(), 2);
    }

    #[test]
    fn pieces_that_have_to_come_in_order_are_never_submitted_again() {
        let peer = Rc::new(Peer { room: 48, ..Peer::default() });
        peer.refused.borrow_mut().push(20);
        assert_eq!(
            copy_in(PieceWindow::of_writes_in_order(), &peer, 100).unwrap_err().kind(),
            ErrorKind::LimitExceeded
        );
        assert_eq!((peer.most.get(), peer.submitted.borrow().iter().filter(|piece| **piece == 20).count()), (LEAST, 1));
    }

    #[test]
    fn other_errors_are_not_tried_again() {
        let peer = Rc::new(Peer { room: 48, broken: Cell::new(Some(3)), ..Peer::default() });
        assert_eq!(copy(&peer, 100, 48).unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(peer.submitted.borrow().iter().filter(|piece| **piece == 3).count(), 1);
    }
}

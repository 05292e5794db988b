//! Number of pieces that a copy has in flight: it grows where the link takes more at a time, and
//! not where more pieces would only wait.
//!
//! The time of a piece, from its submission to its reply, is the round trip and the time that it
//! waits behind other pieces. The rate of a copy is its pieces in flight divided by that time. So a
//! larger window raises the rate as long as the time stays at the shortest one that was seen; once
//! the time grows with the window, only the queue grows. It does not matter where pieces queue: in
//! a link, for credit, in a lane, or because the source of an upload is slow.

use std::time::Duration;

/// Number of pieces that a copy begins with: enough to fill two hops.
pub(crate) const LEAST: usize = 8;

/// Largest number of pieces: enough for 1 Gbit/s with a round trip of 400 ms. A session's default
/// window of 65 MiB then has room for calls beside a copy.
pub(crate) const MOST: usize = 48;

/// Round trip up to which the window does not grow: [`LEAST`] pieces fill 3.4 Gbit/s then. One
/// piece of a copy that was answered sooner proves that the link is not longer, however long pieces
/// take on a busy machine.
const SHORT: Duration = Duration::from_millis(20);

/// Window of one copy, in pieces. It counts pieces and compares times that are passed in.
#[derive(Debug)]
pub(crate) struct WindowSize {
    pieces: usize,
    limit: usize,
    /// Shortest time of any piece.
    shortest: Duration,
    /// Number of pieces submitted.
    submitted: u64,
    round: Round,
    idle_check: IdleCheck,
    /// True if no round has ended since the window last grew: what it has added at once may still
    /// queue.
    is_settling: bool,
}

/// Pieces that are measured before the next decision.
#[derive(Debug)]
struct Round {
    /// Number of the first piece that counts. Earlier ones were submitted with another window.
    first: u64,
    /// Number of pieces that have not ended.
    left: usize,
    shortest: Duration,
    /// True at the beginning of the copy, whose pieces are all submitted at once. The last one is
    /// measured, which waits behind the others even in an idle link.
    is_first_flight: bool,
}

/// Check that the link is idle for a part of the time, before more than [`LEAST`] pieces are in
/// flight. The shortest time may be that of pieces that have all queued; with half the window they
/// come back sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdleCheck {
    Due,
    /// The window is halved for one round. Holds the shortest time before.
    Running(Duration),
    Passed,
}

impl WindowSize {
    pub(crate) fn new() -> Self {
        let round = Round { first: LEAST as u64 - 1, left: 1, shortest: Duration::MAX, is_first_flight: true };
        Self {
            pieces: LEAST,
            limit: MOST,
            shortest: Duration::MAX,
            submitted: 0,
            round,
            idle_check: IdleCheck::Due,
            is_settling: false,
        }
    }

    /// Returns a window that has grown to this many pieces.
    #[cfg(test)]
    pub(crate) fn grown(pieces: usize) -> Self {
        Self { pieces, idle_check: IdleCheck::Passed, ..Self::new() }
    }

    /// Returns the number of pieces that may be in flight.
    pub(crate) fn pieces(&self) -> usize {
        self.pieces
    }

    /// Counts a piece that is submitted, and returns its number.
    pub(crate) fn submit(&mut self) -> u64 {
        self.submitted += 1;
        self.submitted - 1
    }

    /// Takes account of the piece `number`, which was answered `took` after its submission.
    pub(crate) fn end(&mut self, number: u64, took: Duration) {
        self.shortest = self.shortest.min(took);
        if number < self.round.first {
            return;
        }
        self.round.shortest = self.round.shortest.min(took);
        self.round.left = self.round.left.saturating_sub(1);
        if self.round.left == 0 {
            self.decide(self.round.shortest);
        }
    }

    /// Keeps the window at [`LEAST`] from now on, because the peer has no room for more.
    pub(crate) fn narrow(&mut self) {
        self.limit = LEAST;
        self.resize(self.pieces.min(LEAST));
    }

    /// Chooses the next window after a round whose pieces took `time` at least.
    fn decide(&mut self, time: Duration) {
        let longest_idle = self.shortest.saturating_mul(9) / 8;
        let longest = if self.round.is_first_flight { self.shortest.saturating_mul(3) / 2 } else { longest_idle };
        if let IdleCheck::Running(before) = self.idle_check {
            let was_idle = before <= longest_idle;
            self.idle_check = if was_idle { IdleCheck::Passed } else { IdleCheck::Due };
            self.resize(if was_idle { (2 * LEAST).min(self.limit) } else { LEAST });
        } else if time <= longest && self.shortest >= SHORT && self.pieces < self.limit {
            if self.idle_check == IdleCheck::Due {
                self.idle_check = IdleCheck::Running(self.shortest);
                self.resize(LEAST / 2);
            } else {
                self.resize((2 * self.pieces).min(self.limit));
            }
        } else if self.pieces > LEAST && !self.is_settling && time > self.shortest.saturating_mul(3) / 2 {
            // The pieces that the link holds, and a quarter more, so that it never runs dry.
            let held = self.pieces as f64 * self.shortest.as_secs_f64() / time.as_secs_f64();
            let pieces = (held * 1.25).ceil() as usize;
            self.idle_check = if pieces <= LEAST { IdleCheck::Due } else { self.idle_check };
            self.resize(pieces.clamp(LEAST, self.pieces));
        } else {
            self.resize(self.pieces);
        }
    }

    /// Sets the window, and begins a round.
    fn resize(&mut self, pieces: usize) {
        // Pieces that are submitted at once, because the window grows, queue behind each other.
        let added = pieces.saturating_sub(self.pieces);
        self.is_settling = added > 0;
        self.round = Round {
            first: self.submitted + added as u64,
            left: (pieces / 2).max(LEAST / 2),
            shortest: Duration::MAX,
            is_first_flight: false,
        };
        self.pieces = pieces;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Model of a link, in virtual time: pieces pass a bottleneck one after the other.
    struct Link {
        round_trip: Duration,
        /// Time that the bottleneck takes for a piece.
        piece: Duration,
        /// Time at which the bottleneck is free.
        free: Duration,
    }

    impl Link {
        fn new(mbit: u64, round_trip_ms: u64) -> Self {
            let piece = Duration::from_secs_f64(8.0 * (1 << 20) as f64 / (mbit as f64 * 1e6));
            Self { round_trip: Duration::from_millis(round_trip_ms), piece, free: Duration::ZERO }
        }

        /// Returns the time at which the reply to a piece arrives that is submitted at `now`.
        fn pass(&mut self, now: Duration) -> Duration {
            self.free = self.free.max(now + self.round_trip / 2) + self.piece;
            self.free + self.round_trip / 2
        }
    }

    /// Copy in progress.
    struct Copy {
        size: WindowSize,
        flight: VecDeque<(u64, Duration, Duration)>,
        now: Duration,
        /// Windows, one for each piece that has ended.
        windows: Vec<usize>,
    }

    impl Copy {
        fn new() -> Self {
            Self { size: WindowSize::new(), flight: VecDeque::new(), now: Duration::ZERO, windows: Vec::new() }
        }

        /// Copies `pieces` pieces. Returns the time that it took.
        fn over(&mut self, pieces: usize, mut pass: impl FnMut(Duration) -> Duration) -> Duration {
            let (begin, mut submitted) = (self.now, 0);
            while submitted < pieces || !self.flight.is_empty() {
                if submitted < pieces && self.flight.len() < self.size.pieces() {
                    self.flight.push_back((self.size.submit(), self.now, pass(self.now)));
                    submitted += 1;
                } else if let Some((number, since, end)) = self.flight.pop_front() {
                    self.now = self.now.max(end);
                    self.size.end(number, self.now - since);
                    self.windows.push(self.size.pieces());
                }
            }
            self.now - begin
        }

        fn widest(&self) -> usize {
            self.windows.iter().copied().max().unwrap_or_default()
        }
    }

    /// Copies `pieces` over a link. Returns the share of its rate that was used, and the copy.
    fn copy(mbit: u64, round_trip_ms: u64, pieces: usize) -> (f64, Copy) {
        let (mut link, mut copy) = (Link::new(mbit, round_trip_ms), Copy::new());
        let took = copy.over(pieces, |now| link.pass(now));
        ((link.piece * pieces as u32).as_secs_f64() / took.as_secs_f64(), copy)
    }

    #[test]
    fn a_long_link_is_filled() {
        let (share, long) = copy(1000, 150, 1024);
        assert!(share > 0.9, "{share}");
        // 19 pieces fit, and what is in flight beyond them waits.
        assert!((19..=28).contains(&long.size.pieces()), "{}", long.size.pieces());
        // With eight pieces it would be 0.42.
        let (share, _) = copy(1000, 150, 256);
        assert!(share > 0.75, "{share}");
    }

    #[test]
    fn links_of_any_length_are_filled_as_far_as_the_limit_allows() {
        for round_trip in [1, 10, 20, 50, 70, 100, 200, 300, 380] {
            let (share, _) = copy(1000, round_trip, 2048);
            assert!(share > 0.85, "{round_trip} ms: {share}");
        }
        let (share, copy) = copy(10_000, 150, 4096);
        assert!((0.22..0.27).contains(&share) && copy.size.pieces() == MOST, "{share}");
    }

    #[test]
    fn nothing_more_queues_where_eight_pieces_fill_the_link() {
        for (mbit, round_trip) in [(10, 150), (10, 1), (100, 150), (100, 0), (1000, 10), (20_000, 0), (8000, 1)] {
            let (share, copy) = copy(mbit, round_trip, 512);
            assert_eq!(copy.widest(), LEAST, "{mbit} Mbit/s, {round_trip} ms");
            assert!(share > 0.9, "{mbit} Mbit/s, {round_trip} ms: {share}");
        }
    }

    /// A fast link to a peer that was slow to begin looks like a long one.
    #[test]
    fn a_stall_at_the_beginning_is_not_taken_for_a_long_link() {
        let (mut link, mut copy) = (Link::new(1000, 1), Copy::new());
        link.free = Duration::from_millis(500);
        copy.over(512, |now| link.pass(now));
        assert_eq!(copy.widest(), LEAST);
        assert!(copy.windows.contains(&(LEAST / 2)), "it was checked with half as many");
    }

    #[test]
    fn a_slow_source_does_not_make_the_window_grow() {
        // The next piece is read for 50 ms before it is submitted, and answered in 6 ms.
        let (mut copy, step) = (Copy::new(), Duration::from_millis(50));
        let mut since = VecDeque::new();
        for _ in 0..500 {
            while since.len() >= copy.size.pieces() {
                let (number, at) = since.pop_front().unwrap();
                copy.size.end(number, (copy.now - at).max(Duration::from_millis(6)));
                copy.windows.push(copy.size.pieces());
            }
            copy.now += step;
            since.push_back((copy.size.submit(), copy.now));
        }
        assert_eq!(copy.widest(), LEAST);
    }

    #[test]
    fn the_window_shrinks_when_the_link_becomes_slower() {
        let (mut link, mut copy) = (Link::new(1000, 300), Copy::new());
        copy.over(1024, |now| link.pass(now));
        assert!(copy.size.pieces() > 32);
        link.piece *= 20;
        copy.over(512, |now| link.pass(now));
        assert_eq!(copy.size.pieces(), LEAST);
    }

    #[test]
    fn jitter_does_not_keep_a_long_link_from_being_filled() {
        let (mut link, mut copy, mut state) = (Link::new(1000, 150), Copy::new(), 7_u64);
        let took = copy.over(1024, |now| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            link.pass(now) + Duration::from_millis((state >> 33) % 30)
        });
        let share = (link.piece * 1024).as_secs_f64() / took.as_secs_f64();
        assert!(share > 0.85, "{share}");
    }

    #[test]
    fn a_window_that_was_narrowed_stays_so() {
        let (mut link, mut copy) = (Link::new(1000, 150), Copy::new());
        copy.over(512, |now| link.pass(now));
        assert!(copy.size.pieces() > LEAST);
        copy.size.narrow();
        copy.windows.clear();
        copy.over(512, |now| link.pass(now));
        assert_eq!(copy.widest(), LEAST);
    }
}

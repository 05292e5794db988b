//! Steps of a handshake and its time limits, for all drivers: either side, asynchronous or
//! blocking. This module performs no input or output.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use rpc_core::proto::{Handshake, Hello, Negotiated, SILENT_INTERVALS};
use rpc_core::{ErrorKind, RpcError};

use super::peer_identity::ProvenName;

/// Longest keep-alive interval that a peer may ask for.
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(3600);

/// Next step of a driver, once the output has been written.
pub(super) enum Step {
    /// Reads more input.
    Read,
    /// Opens the session: the peer has proven its identity. The driver then
    /// [approves](HandshakeSteps::approve) or [refuses](HandshakeSteps::refuse) the peer.
    Open(Box<Hello>, ProvenName),
    /// Ends the handshake, which is done.
    Finish(Box<Negotiated>),
}

/// One side of a handshake, its input, and its time limits.
pub(super) struct HandshakeSteps {
    handshake: Handshake,
    input: BytesMut,
    limit: Limit,
    /// True if the peer's keep-alive replaces the deadline as soon as the peer has proven itself.
    follows_peer: bool,
    /// Outcome of an approval that has finished the handshake.
    approved: Option<Negotiated>,
}

/// Limit on the time that the peer may take.
#[derive(Clone, Copy)]
enum Limit {
    /// Handshake's own deadline.
    Deadline,
    /// Silence of [`SILENT_INTERVALS`] intervals. `heard` is the time of the last input, or of the
    /// keep-alive's start.
    KeepAlive { interval: Duration, heard: Instant, pings: u32 },
}

impl HandshakeSteps {
    /// Creates the steps of `handshake`, with `input` that has been read already.
    pub(super) fn new(handshake: Handshake, input: BytesMut) -> Self {
        Self { handshake, input, limit: Limit::Deadline, follows_peer: false, approved: None }
    }

    /// Lets the peer take any time to accept, once it has proven itself, as long as its silences
    /// stay within its own keep-alive.
    pub(super) fn following_peer(mut self) -> Self {
        self.follows_peer = true;
        self
    }

    /// Replaces the deadline by pings: in each silent `interval` the peer is sent a ping.
    pub(super) fn start_keep_alive(&mut self, interval: Duration, now: Instant) {
        self.limit = Limit::KeepAlive { interval, heard: now, pings: 0 };
    }

    /// Handles the input that has arrived. There may be output afterwards, also after an error.
    ///
    /// # Errors
    ///
    /// The objection of either side; that of this side is in the output.
    pub(super) fn advance(&mut self, now: Instant) -> Result<Step, RpcError> {
        if let Some(negotiated) = self.approved.take() {
            return Ok(Step::Finish(Box::new(negotiated)));
        }
        if let Some(negotiated) = self.handshake.handle_input(&mut self.input)? {
            return Ok(Step::Finish(Box::new(negotiated)));
        }
        if let Some((hello, name)) = self.handshake.awaits_approval() {
            let method = self.handshake.identity_method().unwrap_or_default().to_owned();
            return Ok(Step::Open(Box::new(hello.clone()), ProvenName { name: name.to_owned(), method }));
        }
        if self.follows_peer
            && let Some(theirs) = self.handshake.proven()
        {
            let interval = Duration::from_millis(theirs.keep_alive_ms.max(1)).min(MAX_KEEP_ALIVE);
            self.start_keep_alive(interval, now);
        }
        Ok(Step::Read)
    }

    /// Returns the buffer for further input.
    pub(super) fn input(&mut self) -> &mut BytesMut {
        &mut self.input
    }

    /// Records that `count` bytes have been appended to the input; 0 is the end of the stream.
    ///
    /// # Errors
    ///
    /// The stream has ended.
    pub(super) fn has_read(&mut self, count: usize, now: Instant) -> Result<(), RpcError> {
        if count == 0 {
            return Err(self.handshake.end_of_stream());
        }
        if let Limit::KeepAlive { heard, pings, .. } = &mut self.limit {
            (*heard, *pings) = (now, 0);
        }
        Ok(())
    }

    /// Returns the output to be written.
    pub(super) fn take_output(&mut self) -> Bytes {
        self.handshake.take_output()
    }

    /// Accepts the peer, for which a session has been opened.
    pub(super) fn approve(&mut self, now: Instant) {
        self.approved = self.handshake.approve();
        if let Limit::KeepAlive { heard, .. } = &mut self.limit {
            *heard = now;
        }
    }

    /// Refuses the peer, with the reason in the output.
    pub(super) fn refuse(&mut self, error: &RpcError) {
        self.handshake.refuse(error);
    }

    /// Returns the time at which [`handle_timeout`](Self::handle_timeout) has to be called. `None`
    /// is never.
    pub(super) fn timeout(&self) -> Option<Instant> {
        match self.limit {
            Limit::Deadline => Some(self.handshake.deadline()),
            Limit::KeepAlive { interval, heard, pings } => {
                let intervals = if self.pings() { pings + 1 } else { SILENT_INTERVALS };
                heard.checked_add(interval.saturating_mul(intervals))
            }
        }
    }

    /// Sends the peer a ping, if it may take more time.
    ///
    /// # Errors
    ///
    /// The peer's time is over.
    pub(super) fn handle_timeout(&mut self, now: Instant) -> Result<(), RpcError> {
        if self.timeout().is_none_or(|timeout| now < timeout) {
            return Ok(());
        }
        if self.pings()
            && let Limit::KeepAlive { pings, .. } = &mut self.limit
            && *pings < SILENT_INTERVALS
        {
            *pings += 1;
            self.handshake.ping();
            return Ok(());
        }
        Err(self.give_up())
    }

    /// Returns the time by which a write that begins at `now` must be done. `None` is never.
    pub(super) fn write_timeout(&self, now: Instant) -> Option<Instant> {
        match self.limit {
            Limit::Deadline => Some(self.handshake.deadline()),
            Limit::KeepAlive { interval, .. } => now.checked_add(interval.saturating_mul(SILENT_INTERVALS)),
        }
    }

    /// Returns the error of a peer that has taken too long. For a peer that is merely slow, the
    /// error is also in the output.
    pub(super) fn give_up(&mut self) -> RpcError {
        match self.limit {
            Limit::Deadline => {
                let error = self.handshake.handle_timeout(self.handshake.deadline()).err();
                let error =
                    error.unwrap_or_else(|| RpcError::new(ErrorKind::PeerSilent, "the handshake took too long"));
                self.handshake.refuse(&error);
                error
            }
            Limit::KeepAlive { interval, .. } => {
                let limit = interval.saturating_mul(SILENT_INTERVALS);
                let text = format!("the peer does not answer: nothing was heard from it for {limit:?}");
                RpcError::new(ErrorKind::PeerSilent, text)
            }
        }
    }

    /// Returns the input that follows the handshake.
    pub(super) fn into_input(self) -> BytesMut {
        self.input
    }

    /// Returns true if this side pings the peer: while it withholds its approval. Later the peer
    /// would take a ping for a message of the session.
    fn pings(&self) -> bool {
        self.handshake.awaits_approval().is_some()
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::proto::{HandshakeConfig, Role};

    use super::*;
    use crate::handshake::identity_proofs::{Access, Security, Tokens, of_acceptor, of_dialler};

    const INTERVAL: Duration = Duration::from_millis(200);

    /// Returns both sides of a handshake in which the dialled side has been asked to open the
    /// session. The dialling side waits by the other side's keep-alive.
    fn waiting_for_approval(now: Instant) -> (HandshakeSteps, HandshakeSteps) {
        let (timeout, security) = (Duration::from_secs(10), Security::default());
        let mut hello = Hello::new(Role::Server);
        hello.keep_alive_ms = INTERVAL.as_millis() as u64;
        let identities = of_acceptor(&Access::default(), None, None, &security);
        let accept = Handshake::accept(HandshakeConfig { hello, identities, hold: true, timeout }, now);
        let mut accept = HandshakeSteps::new(accept, BytesMut::new());
        let (hello, identities) = (Hello::new(Role::Client), of_dialler(&Tokens::default(), &security));
        let dial = Handshake::dial(HandshakeConfig { hello, identities, hold: false, timeout }, now);
        let mut dial = HandshakeSteps::new(dial, BytesMut::new()).following_peer();
        assert_eq!(accept.timeout(), Some(now + timeout));
        for _ in 0..16 {
            transfer(&mut dial, &mut accept, now);
            if let Step::Open(..) = accept.advance(now).unwrap() {
                transfer(&mut accept, &mut dial, now);
                assert!(matches!(dial.advance(now).unwrap(), Step::Read));
                return (dial, accept);
            }
            transfer(&mut accept, &mut dial, now);
            assert!(matches!(dial.advance(now).unwrap(), Step::Read));
        }
        panic!("no side asked for an approval");
    }

    fn transfer(from: &mut HandshakeSteps, to: &mut HandshakeSteps, now: Instant) {
        let output = from.take_output();
        to.input().extend_from_slice(&output);
        if !output.is_empty() {
            to.has_read(output.len(), now).unwrap();
        }
    }

    #[test]
    fn pings_keep_both_sides_waiting_past_the_deadline() {
        let mut now = Instant::now();
        let (mut dial, mut accept) = waiting_for_approval(now);
        accept.start_keep_alive(INTERVAL, now);
        for _ in 0..100 {
            assert_eq!(accept.timeout(), Some(now + INTERVAL));
            assert!(dial.timeout() > Some(now + INTERVAL));
            now += INTERVAL;
            accept.handle_timeout(now).unwrap();
            transfer(&mut accept, &mut dial, now);
            assert!(matches!(dial.advance(now).unwrap(), Step::Read));
            transfer(&mut dial, &mut accept, now);
            assert!(matches!(accept.advance(now).unwrap(), Step::Open(..)));
        }
        accept.approve(now);
        transfer(&mut accept, &mut dial, now);
        assert!(matches!(dial.advance(now).unwrap(), Step::Finish(_)));
        transfer(&mut dial, &mut accept, now);
        assert!(matches!(accept.advance(now).unwrap(), Step::Finish(_)));
    }

    #[test]
    fn a_pong_under_way_at_the_approval_is_not_left_for_the_session() {
        let start = Instant::now();
        let (mut dial, mut accept) = waiting_for_approval(start);
        accept.start_keep_alive(INTERVAL, start);
        let now = start + INTERVAL;
        accept.handle_timeout(now).unwrap();
        accept.approve(now);
        assert!(matches!(accept.advance(now).unwrap(), Step::Read), "it waits for the pong");
        transfer(&mut accept, &mut dial, now);
        assert!(matches!(dial.advance(now).unwrap(), Step::Finish(_)));
        let mut output = dial.take_output().to_vec();
        assert!(!output.is_empty(), "the pong");
        output.extend_from_slice(b"what follows");
        accept.input().extend_from_slice(&output);
        accept.has_read(output.len(), now).unwrap();
        assert!(matches!(accept.advance(now).unwrap(), Step::Finish(_)));
        assert_eq!(accept.into_input(), b"what follows"[..]);
    }

    #[test]
    fn silence_ends_the_handshake_on_both_sides() {
        let start = Instant::now();
        let (mut dial, mut accept) = waiting_for_approval(start);
        assert_eq!(dial.timeout(), Some(start + INTERVAL * SILENT_INTERVALS));
        dial.handle_timeout(start + INTERVAL).unwrap();
        let error = dial.handle_timeout(start + INTERVAL * SILENT_INTERVALS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerSilent);
        accept.start_keep_alive(INTERVAL, start);
        for unanswered in 1..=SILENT_INTERVALS {
            accept.handle_timeout(start + INTERVAL * unanswered).unwrap();
            assert!(!accept.take_output().is_empty(), "a ping");
        }
        let error = accept.handle_timeout(start + INTERVAL * (SILENT_INTERVALS + 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerSilent);
    }

    #[test]
    fn a_peer_that_misses_the_deadline_is_told() {
        let start = Instant::now();
        let (_, mut accept) = waiting_for_approval(start);
        let deadline = accept.timeout().unwrap();
        accept.handle_timeout(deadline - Duration::from_millis(1)).unwrap();
        assert!(accept.take_output().is_empty());
        let error = accept.handle_timeout(deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerSilent);
        assert!(error.message().contains("handshake_timeout"), "{error}");
        assert!(!accept.take_output().is_empty(), "the refusal");
    }
}

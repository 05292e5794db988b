//! Detection of a peer whose port is closed, from the messages of ICMP that the system reports.
//!
//! Anybody can send such a message, so it is believed only if it quotes the beginning of a packet
//! that was sent: connection ids, packet numbers and contents are random to everyone who does not
//! see the packets. One message is no proof. A server that begins anew, or a path that changes, may
//! close a port for a moment. The port counts as closed after messages for two packets that were
//! sent some time apart, if nothing was received in between.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Number of bytes of a packet that a message has to quote. They hold the connection id (8 bytes
/// after the first) and encrypted ones. Routers that quote less are not believed.
pub(super) const QUOTED: usize = 24;

/// Number of packets that are remembered. In a flood of packets a message may be for a forgotten
/// one. The sender then soon waits for acknowledgements, and sends few.
const REMEMBERED: usize = 64;

/// Least time between two packets whose messages are a proof.
const APART: Duration = Duration::from_millis(200);

/// Silence after which a packet is sent to learn whether the port is open. With [`APART`] and the
/// way there and back it leaves room for detection within a second.
const SILENCE: Duration = Duration::from_millis(400);

/// Beginning of a packet.
pub(super) type Beginning = [u8; QUOTED];

/// Port of a peer, as far as packets and messages tell about it.
#[derive(Debug)]
pub(super) struct PeerPort {
    started: Instant,
    /// Time of the last packet from the peer, in milliseconds since the start.
    heard_ms: AtomicU64,
    /// True while a message is believed and not disproved.
    is_suspect: AtomicBool,
    is_closed: AtomicBool,
    packets: Mutex<SentPackets>,
}

#[derive(Debug, Default)]
struct SentPackets {
    /// Last packets, the latest one at the end.
    last: VecDeque<(Instant, Beginning)>,
    /// Time at which the first packet was sent whose message is believed.
    suspect_since: Option<Instant>,
}

impl PeerPort {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            started: now,
            heard_ms: AtomicU64::new(0),
            is_suspect: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            packets: Mutex::default(),
        }
    }

    /// Records a packet that is sent.
    pub(super) fn sent(&self, now: Instant, packet: &[u8]) {
        let Some(beginning) = packet.first_chunk::<QUOTED>() else { return };
        let mut packets = self.packets.lock();
        if packets.last.len() == REMEMBERED {
            packets.last.pop_front();
        }
        packets.last.push_back((now, *beginning));
    }

    /// Records that the peer has sent something.
    pub(super) fn received(&self, now: Instant) {
        self.heard_ms.store(self.since_start(now), Ordering::Relaxed);
        if self.is_suspect.swap(false, Ordering::AcqRel) {
            self.packets.lock().suspect_since = None;
        }
    }

    /// Records a message that the port is unreachable, with the beginning of the packet that it
    /// quotes.
    pub(super) fn reported(&self, quoted: &[u8]) {
        let Some(quoted) = quoted.first_chunk::<QUOTED>() else { return };
        let mut packets = self.packets.lock();
        let Some(sent) = packets.last.iter().rev().find(|(_, packet)| packet == quoted).map(|(sent, _)| *sent) else {
            return;
        };
        let since = *packets.suspect_since.get_or_insert(sent);
        self.is_suspect.store(true, Ordering::Release);
        if sent.saturating_duration_since(since) >= APART {
            self.is_closed.store(true, Ordering::Release);
        }
    }

    /// Returns true once the port is known to be closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Returns a packet to send in order to learn whether the port is open, if the peer has been
    /// silent for a while. It is the beginning of a packet that was sent before: a peer that lives
    /// drops it, because it is too short to be decrypted.
    pub(super) fn probe(&self, now: Instant) -> Option<Beginning> {
        let silence = self.since_start(now).saturating_sub(self.heard_ms.load(Ordering::Relaxed));
        let is_suspect = self.is_suspect.load(Ordering::Acquire);
        if !is_suspect && u128::from(silence) < SILENCE.as_millis() {
            return None;
        }
        self.packets.lock().last.back().map(|(_, packet)| *packet)
    }

    /// Returns the time until the next [`probe`](Self::probe) may be due.
    pub(super) fn pause(&self) -> Duration {
        if self.is_suspect.load(Ordering::Acquire) { APART } else { SILENCE }
    }

    fn since_start(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(number: u8) -> Vec<u8> {
        (0..60).map(|at: u8| at.wrapping_mul(31) ^ number).collect()
    }

    fn after(now: Instant, millis: u64) -> Instant {
        now + Duration::from_millis(millis)
    }

    #[test]
    fn two_messages_for_packets_that_were_sent_apart_are_a_proof() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        for (number, at) in [(1, 0), (2, 100), (3, 199), (4, 200)] {
            port.sent(after(now, at), &packet(number));
        }
        for number in [1, 1, 2, 3] {
            // A router may quote no more than the beginning.
            port.reported(&packet(number)[..QUOTED]);
            assert!(!port.is_closed(), "{number}");
        }
        port.reported(&packet(4));
        assert!(port.is_closed());
    }

    #[test]
    fn forged_and_short_messages_change_nothing() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        for at in 0..10 {
            port.sent(after(now, at * 100), &packet(u8::try_from(at).unwrap()));
        }
        for number in 0..10 {
            port.reported(&packet(number + 10));
            port.reported(&packet(number)[..QUOTED - 1]);
            let mut almost = packet(number);
            almost[QUOTED - 1] ^= 1;
            port.reported(&almost);
        }
        port.reported(&[]);
        assert!(!port.is_closed() && !port.is_suspect.load(Ordering::Relaxed));
        // A packet that is too short to be recognized is not remembered.
        port.sent(now, &[7; QUOTED - 1]);
        port.reported(&[7; QUOTED - 1]);
        assert!(!port.is_suspect.load(Ordering::Relaxed));
    }

    #[test]
    fn a_peer_that_is_heard_in_between_has_an_open_port() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        for round in 0..5_u8 {
            let began = after(now, u64::from(round) * 1000);
            port.sent(began, &packet(2 * round));
            port.reported(&packet(2 * round));
            port.received(after(began, 300));
            port.sent(after(began, 400), &packet(2 * round + 1));
            port.reported(&packet(2 * round + 1));
            assert!(!port.is_closed(), "{round}");
            port.received(after(began, 500));
        }
    }

    #[test]
    fn a_silent_peer_is_probed_with_what_it_cannot_take_for_a_packet() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        assert_eq!(port.probe(after(now, 1000)), None, "nothing was sent yet");
        port.sent(now, &packet(1));
        port.received(after(now, 100));
        assert_eq!((port.probe(after(now, 499)), port.pause()), (None, SILENCE));
        assert_eq!(port.probe(after(now, 500)).unwrap(), packet(1)[..QUOTED]);
        port.reported(&packet(1));
        assert!(port.probe(after(now, 101)).is_some() && port.pause() == APART);
        // The message that answers a probe counts like any other.
        port.sent(after(now, 300), &packet(1)[..QUOTED]);
        port.reported(&packet(1)[..QUOTED]);
        assert!(port.is_closed());
    }

    #[test]
    fn memory_is_bounded() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        for number in 0..=u8::MAX {
            port.sent(now, &packet(number));
        }
        assert_eq!(port.packets.lock().last.len(), REMEMBERED);
    }
}

//! Detection of a peer whose port is closed, from the messages of ICMP that the system reports.
//!
//! Anybody can send such a message, so it is believed only if it quotes the beginning of a packet
//! that was sent: connection ids, packet numbers and contents are random to everyone who does not
//! see the packets. One message is no proof: on a path that changes, a packet may come to another
//! machine. The port counts as closed after messages for two packets that were sent some time
//! apart, both of them after the last packet from the peer was received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};

/// Number of bytes of a packet that a message has to quote. They hold the connection id (8 bytes
/// after the first) and encrypted ones. Routers that quote less are not believed.
pub(super) const QUOTED: usize = 24;

/// Number of bytes that a probe has in common with an earlier packet. They hold the connection id
/// that the server has chosen.
const SHARED: usize = 16;

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
    /// Time of the last packet from the peer, in microseconds since the start.
    heard_us: AtomicU64,
    /// Number of channels that wait for the peer.
    waits: AtomicUsize,
    is_closed: AtomicBool,
    packets: Mutex<SentPackets>,
}

#[derive(Debug, Default)]
struct SentPackets {
    /// Last packets, the latest one at the end, with their times in microseconds since the start.
    last: VecDeque<(u64, Beginning)>,
    /// Time at which the first packet was sent whose message is believed. The message is disproved
    /// if the peer was heard later.
    suspect_since_us: Option<u64>,
    /// Time at which a probe was last sent, or was found to be needless.
    probed_us: u64,
}

/// Mark of a channel that waits for its peer.
#[derive(Debug)]
pub(super) struct Wait(Arc<PeerPort>);

impl Drop for Wait {
    fn drop(&mut self) {
        self.0.waits.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PeerPort {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            started: now,
            heard_us: AtomicU64::new(0),
            waits: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            packets: Mutex::default(),
        }
    }

    /// Counts a channel that waits for the peer, until the mark is dropped.
    pub(super) fn wait(self: &Arc<Self>) -> Wait {
        self.waits.fetch_add(1, Ordering::Relaxed);
        Wait(self.clone())
    }

    /// Records a packet that is sent.
    pub(super) fn sent(&self, now: Instant, packet: &[u8]) {
        let Some(beginning) = packet.first_chunk() else { return };
        self.packets.lock().remember(self.since_start(now), *beginning);
    }

    /// Records that the peer has sent something.
    pub(super) fn received(&self, now: Instant) {
        self.heard_us.store(self.since_start(now), Ordering::Release);
    }

    /// Records a message that the port is unreachable, with the beginning of the packet that it
    /// quotes.
    pub(super) fn reported(&self, quoted: &[u8]) {
        let Some(quoted) = quoted.first_chunk::<QUOTED>() else { return };
        let mut packets = self.packets.lock();
        let found = packets.last.iter().rev().find(|(_, packet)| packet == quoted);
        let Some(sent) = found.map(|(sent, _)| *sent) else { return };
        // The message may be late, and tell of a time before the peer was heard.
        if sent < self.heard_us.load(Ordering::Acquire) {
            return;
        }
        let since = self.suspect_since(&packets).map_or(sent, |since| since.min(sent));
        packets.suspect_since_us = Some(since);
        if sent - since >= micros(APART) {
            self.is_closed.store(true, Ordering::Release);
        }
    }

    /// Returns true once the port is known to be closed.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Returns the time until the next [`probe`](Self::probe) may be due. It gets longer when the
    /// peer is heard, and shorter with a message that is believed.
    pub(super) fn pause(&self, now: Instant) -> Duration {
        Duration::from_micros(self.probe_due(&self.packets.lock()).saturating_sub(self.since_start(now)))
    }

    /// Returns a packet to send in order to learn whether the port is open, and remembers it as
    /// sent. It is due if the peer has been silent for a while and a channel waits, or if a message
    /// has to be confirmed. The packet begins like one that was sent before and ends at random, so
    /// that a message tells which of several it is for. A peer that lives drops it, because it is
    /// too short to be decrypted.
    pub(super) fn probe(&self, now: Instant) -> Option<Beginning> {
        let mut packets = self.packets.lock();
        let now_us = self.since_start(now);
        if now_us < self.probe_due(&packets) {
            return None;
        }
        packets.probed_us = now_us;
        if self.suspect_since(&packets).is_none() && self.waits.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let (_, mut probe) = *packets.last.back()?;
        SystemRandom::new().fill(&mut probe[SHARED..]).ok()?;
        packets.remember(now_us, probe);
        Some(probe)
    }

    fn probe_due(&self, packets: &SentPackets) -> u64 {
        let (since, pause) = match self.suspect_since(packets) {
            Some(suspect_since) => (suspect_since, APART),
            None => (self.heard_us.load(Ordering::Acquire), SILENCE),
        };
        since.max(packets.probed_us).saturating_add(micros(pause))
    }

    fn suspect_since(&self, packets: &SentPackets) -> Option<u64> {
        packets.suspect_since_us.filter(|since| *since >= self.heard_us.load(Ordering::Acquire))
    }

    fn since_start(&self, now: Instant) -> u64 {
        micros(now.saturating_duration_since(self.started))
    }
}

impl SentPackets {
    fn remember(&mut self, sent_us: u64, packet: Beginning) {
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back((sent_us, packet));
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
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

    fn is_suspect(port: &PeerPort) -> bool {
        port.suspect_since(&port.packets.lock()).is_some()
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
        assert!(!port.is_closed() && !is_suspect(&port));
        // A packet that is too short to be recognized is not remembered.
        port.sent(now, &[7; QUOTED - 1]);
        port.reported(&[7; QUOTED - 1]);
        assert!(!is_suspect(&port));
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

    /// A regression: late messages counted as news, and two of them closed a live connection.
    #[test]
    fn messages_for_packets_from_before_the_peer_was_heard_change_nothing() {
        let now = Instant::now();
        let port = PeerPort::new(now);
        for (number, at) in [(1, 0), (2, 300), (3, 500)] {
            port.sent(after(now, at), &packet(number));
        }
        port.received(after(now, 400));
        for number in [1, 2] {
            port.reported(&packet(number));
            assert!(!is_suspect(&port) && !port.is_closed(), "{number}");
        }
        port.reported(&packet(3));
        assert!(is_suspect(&port) && !port.is_closed());
    }

    #[test]
    fn a_silent_peer_is_probed_with_what_it_cannot_take_for_a_packet() {
        let now = Instant::now();
        let port = Arc::new(PeerPort::new(now));
        let _wait = port.wait();
        assert_eq!(port.probe(after(now, 1000)), None, "nothing was sent yet");
        port.sent(after(now, 1050), &packet(1));
        port.received(after(now, 1100));
        assert_eq!((port.probe(after(now, 1499)), port.pause(after(now, 1400))), (None, Duration::from_millis(100)));
        let probe = port.probe(after(now, 1500)).unwrap();
        assert_eq!(probe[..SHARED], packet(1)[..SHARED]);
        // One that was just sent has time to be answered.
        assert_eq!(port.probe(after(now, 1899)), None);
        // The message that answers a probe counts like any other, and brings the next one forward.
        port.reported(&probe);
        assert_eq!(port.pause(after(now, 1600)), Duration::from_millis(100));
        port.reported(&port.probe(after(now, 1700)).unwrap());
        assert!(port.is_closed());
    }

    /// A regression: all probes were the same packet, and late messages for one that was sent at
    /// a bad moment passed for messages for later ones.
    #[test]
    fn a_late_message_for_a_probe_is_not_taken_for_one_for_another_probe() {
        let now = Instant::now();
        let port = Arc::new(PeerPort::new(now));
        let _wait = port.wait();
        port.sent(now, &packet(1));
        let probes = [400, 800, 1200].map(|at| port.probe(after(now, at)).unwrap());
        assert!(probes[0] != probes[1] && probes[1] != probes[2] && probes[0] != probes[2]);
        port.reported(&probes[0]);
        let fourth = port.probe(after(now, 1400)).unwrap();
        port.reported(&probes[0]);
        assert!(!port.is_closed());
        port.reported(&fourth);
        assert!(port.is_closed());
    }

    #[test]
    fn a_peer_for_which_nothing_waits_is_not_probed() {
        let now = Instant::now();
        let port = Arc::new(PeerPort::new(now));
        port.sent(now, &packet(1));
        assert_eq!(port.probe(after(now, 1000)), None);
        let waits = [port.wait(), port.wait()];
        assert!(port.probe(after(now, 2000)).is_some());
        let [first, second] = waits;
        drop(first);
        assert!(port.probe(after(now, 3000)).is_some());
        drop(second);
        assert_eq!(port.probe(after(now, 4000)), None);
        // A message has to be confirmed all the same.
        port.sent(after(now, 5000), &packet(2));
        port.reported(&packet(2));
        assert!(port.probe(after(now, 5200)).is_some());
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

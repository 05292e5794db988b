//! Pauses of random length between attempts.

use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

/// Pauses between attempts. Each is up to twice as long as the one before. Lengths are random, so
/// that clients that lost the same peer do not all come back at the same moment.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Creates pauses from `first` to `longest`. Each is shortened by a random part, up to a half.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// Returns the next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        let mut random = [0; 2];
        // Without random numbers no pause is shortened.
        let shortened = match SystemRandom::new().fill(&mut random) {
            Ok(()) => f64::from(u16::from_le_bytes(random)) / f64::from(u16::MAX) / 2.0,
            Err(_) => 0.0,
        };
        pause.mul_f64(1.0 - shortened)
    }

    /// Records a success: the next pause is a first one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_the_longest_and_begin_anew() {
        let (first, longest) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut backoff = Backoff::new(first, longest);
        for whole in [100, 200, 400, 800, 1000, 1000].map(Duration::from_millis) {
            let pause = backoff.pause();
            assert!(pause <= whole && pause >= whole / 2, "{pause:?} of {whole:?}");
        }
        backoff.reset();
        assert!(backoff.pause() <= first);
    }
}

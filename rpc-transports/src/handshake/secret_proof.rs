//! Proofs that both sides know a secret, which is never sent: what they are computed over, and how.

use ring::{digest, hmac};
use rpc_core::proto::Transcript;

use super::tokens::LEN;

/// Challenge and proof of one side so far.
pub(super) enum ProofState {
    Begin,
    /// State of the dialled side, which has sent this challenge.
    Challenged([u8; LEN]),
    /// State of the dialling side, which waits for a proof over this subject.
    Proved([u8; LEN]),
    Done,
}

/// Hellos and channel that proofs are bound to.
pub(super) struct ProofContext {
    binding: Option<[u8; LEN]>,
    /// Digest of the hellos of both sides and of the channel binding.
    digest: digest::Context,
}

impl ProofContext {
    pub(super) fn new(binding: Option<[u8; LEN]>) -> Self {
        Self { binding, digest: digest::Context::new(&digest::SHA256) }
    }

    /// Returns true if the proofs are bound to an encrypted channel.
    pub(super) fn is_bound(&self) -> bool {
        self.binding.is_some()
    }

    pub(super) fn begin(&mut self, transcript: &Transcript<'_>) {
        let binding = self.binding.as_ref().map_or(&[][..], |binding| binding);
        for part in [transcript.dialler_hello, transcript.acceptor_hello, binding] {
            self.digest.update(&(part.len() as u64).to_le_bytes());
            self.digest.update(part);
        }
    }

    /// Returns the subject of the proofs, given both challenges.
    pub(super) fn subject(&self, of_acceptor: &[u8], of_dialler: &[u8]) -> [u8; LEN] {
        let mut digest = self.digest.clone();
        digest.update(of_acceptor);
        digest.update(of_dialler);
        let mut subject = [0; LEN];
        subject.copy_from_slice(digest.finish().as_ref());
        subject
    }
}

/// Returns the proof of a secret. The two sides use different labels, so that neither's proof can
/// be sent back to it.
pub(super) fn prove(secret: &str, label: &[u8], subject: &[u8; LEN]) -> hmac::Tag {
    hmac::sign(&key(secret), &[label, subject].concat())
}

/// Returns true if the proof is that of this secret. It takes as long wherever the two differ.
pub(super) fn proves(secret: &str, label: &[u8], subject: &[u8; LEN], proof: &[u8]) -> bool {
    hmac::verify(&key(secret), &[label, subject].concat(), proof).is_ok()
}

fn key(secret: &str) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes())
}

//! Tickets: a tracker makes them for clients, and the server verifies them without asking the
//! tracker.
//!
//! A ticket is the text `t1.SERIAL.EXPIRES.PROOF`: its number; its expiry by the clock of the
//! server, in milliseconds; and an HMAC-SHA256 over these two in 64 hexadecimal digits. The two
//! numbers are decimal. The server makes the key for one registration. So a ticket is valid at no
//! other server, and not after the server has registered again. Any client that has a ticket may
//! use it, once.

use std::fmt;

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::{ErrorKind, RpcError};

/// Label in front of the proven facts, so that proofs for other purposes are not valid here.
const LABEL: &str = "rpc ticket";

/// First part of the text.
const FORM: &str = "t1";

/// Key with which the tickets of one registration are made and verified.
#[derive(Clone)]
pub struct TicketKey([u8; 32]);

/// Content of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Number of the ticket, unique within the registration.
    pub serial: u64,
    /// Expiry by the clock of the server.
    pub expires_ms: u64,
}

/// Reason why a text is not a valid ticket for this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The text does not have the form of a ticket.
    #[error("it does not have the form of one")]
    Malformed,
    /// The ticket was not made with the key of this registration.
    #[error("it is for another server, or for an earlier registration of this one")]
    Foreign,
}

impl TicketKey {
    /// Generates a new key.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`]: the system gives no random numbers.
    pub fn generate() -> rpc_core::Result<Self> {
        let mut key = [0; 32];
        let filled = SystemRandom::new().fill(&mut key);
        filled.map_err(|_| RpcError::new(ErrorKind::Internal, "the system gives no random numbers"))?;
        Ok(Self(key))
    }

    /// Returns the key whose bytes [`to_bytes`](Self::to_bytes) has given.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the key, for the tracker alone.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Makes a ticket.
    pub fn sign(&self, ticket: Ticket) -> String {
        let Ticket { serial, expires_ms } = ticket;
        let proof = hmac::sign(&self.hmac(), subject(ticket).as_bytes());
        let mut text = format!("{FORM}.{serial}.{expires_ms}.");
        for byte in proof.as_ref() {
            text += &format!("{byte:02x}");
        }
        text
    }

    /// Parses a ticket and checks that it was made with this key. The caller checks its expiry, and
    /// that it was not used before.
    ///
    /// # Errors
    ///
    /// The text is malformed, or was made with another key.
    pub fn verify(&self, text: &str) -> Result<Ticket, TicketError> {
        let parts: Vec<&str> = text.split('.').collect();
        let [FORM, serial, expires_ms, proof] = parts[..] else { return Err(TicketError::Malformed) };
        let ticket = Ticket { serial: number(serial)?, expires_ms: number(expires_ms)? };
        let proof = from_hex(proof).ok_or(TicketError::Malformed)?;
        // Takes constant time, wherever the two differ.
        hmac::verify(&self.hmac(), subject(ticket).as_bytes(), &proof).map_err(|_| TicketError::Foreign)?;
        Ok(ticket)
    }

    fn hmac(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

impl fmt::Debug for TicketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TicketKey")
    }
}

fn subject(Ticket { serial, expires_ms }: Ticket) -> String {
    format!("{LABEL} {FORM} {serial} {expires_ms}")
}

/// Parses a number in the form that `format!` writes, and in no other.
fn number(text: &str) -> Result<u64, TicketError> {
    let number: u64 = text.parse().map_err(|_| TicketError::Malformed)?;
    if number.to_string() == text { Ok(number) } else { Err(TicketError::Malformed) }
}

/// Parses a proof in the form that [`TicketKey::sign`] writes, and in no other.
fn from_hex(text: &str) -> Option<Vec<u8>> {
    if text.len() != 64 || !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    (0..32).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKET: Ticket = Ticket { serial: 7, expires_ms: 123_456 };

    #[test]
    fn a_ticket_is_good_under_its_key_alone() {
        let (key, other) = (TicketKey::generate().unwrap(), TicketKey::generate().unwrap());
        let text = key.sign(TICKET);
        assert_eq!(key.verify(&text), Ok(TICKET));
        assert_eq!(TicketKey::from_bytes(key.to_bytes()).verify(&text), Ok(TICKET));
        assert_eq!(other.verify(&text), Err(TicketError::Foreign));
    }

    /// Checks the description above, by which others may implement a server.
    #[test]
    fn the_text_of_a_ticket_is_as_described() {
        let text = TicketKey::from_bytes([0x0b; 32]).sign(TICKET);
        assert_eq!(text, "t1.7.123456.aae3cfd88aab2f67394fa0e668b5762329be79b06d7d698e08de858117b3abd4");
    }

    #[test]
    fn no_character_of_a_ticket_can_be_changed() {
        let key = TicketKey::generate().unwrap();
        let text = key.sign(TICKET);
        for at in 0..text.len() {
            for other in ["0", "1", "f", "A", "F", ".", "+", " ", "ü", ""] {
                let changed = format!("{}{other}{}", &text[..at], &text[at + 1..]);
                assert!(changed == text || key.verify(&changed).is_err(), "{changed}");
            }
        }
        for text in ["", "t1", "t1...", "t2.7.1.00", "t1.7.99999999999999999999.00"] {
            assert_eq!(key.verify(text), Err(TicketError::Malformed), "{text}");
        }
    }
}

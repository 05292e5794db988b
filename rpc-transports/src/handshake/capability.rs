//! Capabilities: secrets that a server makes for one connection of a peer whom it does not know,
//! and the method of identity by which both sides prove that they have the same one.
//!
//! A capability is the text `c1.ID.SECRET`. The dialler names it by its id and proves the secret by
//! an HMAC-SHA-256, as a token is proven: over both challenges, both hellos and the channel
//! binding. The dialled side proves it, too. So the secret is never sent, a proof is good for one
//! channel, and the dialler needs no other reason to trust the server.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rpc_core::proto::{Identity, IdentityStep, Transcript};
use rpc_core::{ErrorKind, RpcError};

use super::secret_proof::{ProofContext, ProofState, prove, proves};
use super::tokens::{LEN, Token, Tokens, random};

/// First part of the text of a capability.
const FORM: &str = "c1";

/// Length of an id in bytes.
const ID: usize = 16;

/// Name of the method in a hello.
pub(crate) const CAPABILITY: &str = "capability";

const BY_DIALLER: &[u8] = b"rpc capability 1: dialler knows";
const BY_ACCEPTOR: &[u8] = b"rpc capability 1: acceptor knows";

/// Public name of a capability.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CapabilityId([u8; ID]);

/// A secret by which one connection is served; see
/// [`CapabilitySessions`](crate::CapabilitySessions). `Debug` shows the id alone.
#[derive(Clone)]
pub struct Capability {
    id: CapabilityId,
    /// Secret in hexadecimal digits.
    secret: String,
}

/// Capabilities that a server has made, as its handshakes look them up.
pub trait CapabilityTable: Send + Sync + fmt::Debug {
    /// Returns the capability with this id, for the proof of a client. Must not block.
    ///
    /// # Errors
    ///
    /// The reason to refuse the client, which is told, and logged: the capability does not exist,
    /// has expired, or has been used.
    fn find(&self, id: CapabilityId) -> Result<Capability, RpcError>;
}

impl Capability {
    /// Generates a capability with a secret of 256 random bits.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Internal`]: the system gives no random numbers.
    pub fn generate() -> Result<Self, RpcError> {
        let (name, secret) = (random()?, random()?);
        let mut id = [0; ID];
        id.copy_from_slice(&name[..ID]);
        Ok(Self { id: CapabilityId(id), secret: hex(&secret) })
    }

    /// Returns the public name.
    #[must_use]
    pub fn id(&self) -> CapabilityId {
        self.id
    }

    /// Returns the text with the secret, for the party that is to connect.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!("{FORM}.{}.{}", self.id, self.secret)
    }
}

impl FromStr for Capability {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self, RpcError> {
        let parts: Vec<&str> = text.split('.').collect();
        let [FORM, id, secret] = parts[..] else { return Err(malformed_text()) };
        let is_secret = secret.len() == 2 * LEN && secret.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if is_secret { Ok(Self { id: id.parse()?, secret: secret.to_owned() }) } else { Err(malformed_text()) }
    }
}

impl fmt::Debug for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Capability({})", self.id)
    }
}

impl fmt::Display for CapabilityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for CapabilityId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CapabilityId({self})")
    }
}

impl FromStr for CapabilityId {
    type Err = RpcError;

    fn from_str(text: &str) -> Result<Self, RpcError> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? * 16 + digit(*low)?)).collect();
        match bytes.map(<[u8; ID]>::try_from) {
            Some(Ok(id)) if rest.is_empty() => Ok(Self(id)),
            _ => Err(malformed_text()),
        }
    }
}

impl Tokens {
    /// Returns the credentials of a side that dials by `capability` and by nothing else.
    #[must_use]
    pub fn capability(capability: Capability) -> Self {
        let Capability { id, secret } = capability;
        Self([Token { name: id.to_string(), secret, is_capability: true }].into())
    }

    /// Returns true if these credentials are a capability, which is good for one connection.
    #[cfg(feature = "quic")]
    pub(crate) fn is_capability(&self) -> bool {
        self.0.iter().any(|token| token.is_capability)
    }

    /// Returns the capability that these credentials are, if they are one.
    pub(super) fn as_capability(&self) -> Option<Capability> {
        let token = self.0.iter().find(|token| token.is_capability)?;
        Some(Capability { id: token.name.parse().ok()?, secret: token.secret.clone() })
    }
}

/// Method by which both sides prove that they have the same capability.
pub(super) struct CapabilityProof {
    side: ProofSide,
    context: ProofContext,
    state: ProofState,
}

/// Side of the proof, with what it proves by.
enum ProofSide {
    Dialler(Capability),
    Acceptor(Arc<dyn CapabilityTable>),
}

impl CapabilityProof {
    pub(super) fn of_dialler(capability: Capability, binding: Option<[u8; LEN]>) -> Self {
        Self::new(ProofSide::Dialler(capability), binding)
    }

    pub(super) fn of_acceptor(table: Arc<dyn CapabilityTable>, binding: Option<[u8; LEN]>) -> Self {
        Self::new(ProofSide::Acceptor(table), binding)
    }

    fn new(side: ProofSide, binding: Option<[u8; LEN]>) -> Self {
        Self { side, context: ProofContext::new(binding), state: ProofState::Begin }
    }
}

impl Identity for CapabilityProof {
    fn method(&self) -> &str {
        CAPABILITY
    }

    fn begin(&mut self, transcript: Transcript<'_>) {
        self.context.begin(&transcript);
    }

    fn step(&mut self, received: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        match (std::mem::replace(&mut self.state, ProofState::Done), &self.side, received) {
            (ProofState::Begin, ProofSide::Dialler(_), None) => {
                self.state = ProofState::Begin;
                Ok(IdentityStep::Wait)
            }
            (ProofState::Begin, ProofSide::Acceptor(_), None) => {
                let challenge = random()?;
                self.state = ProofState::Challenged(challenge);
                Ok(IdentityStep::Send(challenge.to_vec()))
            }
            (ProofState::Begin, ProofSide::Dialler(capability), Some(theirs)) if theirs.len() == LEN => {
                let ours = random()?;
                let subject = self.context.subject(theirs, &ours);
                let proof = prove(&capability.secret, BY_DIALLER, &subject);
                self.state = ProofState::Proved(subject);
                Ok(IdentityStep::Send([&ours[..], &capability.id.0, proof.as_ref()].concat()))
            }
            (ProofState::Challenged(challenge), ProofSide::Acceptor(table), Some(received)) => {
                let Some((theirs, rest)) = received.split_first_chunk::<LEN>() else { return Err(malformed()) };
                let Some((id, proof)) = rest.split_first_chunk::<ID>() else { return Err(malformed()) };
                if proof.len() != LEN {
                    return Err(malformed());
                }
                let capability = table.find(CapabilityId(*id))?;
                let subject = self.context.subject(&challenge, theirs);
                if !proves(&capability.secret, BY_DIALLER, &subject, proof) {
                    let text = format!("the client does not have the secret of the capability {}", capability.id);
                    return Err(RpcError::new(ErrorKind::Unauthenticated, text));
                }
                let last = prove(&capability.secret, BY_ACCEPTOR, &subject).as_ref().to_vec();
                Ok(IdentityStep::Proven { peer: capability.id.to_string(), last: Some(last) })
            }
            (ProofState::Proved(subject), ProofSide::Dialler(capability), Some(proof)) => {
                if proves(&capability.secret, BY_ACCEPTOR, &subject, proof) {
                    return Ok(IdentityStep::Proven { peer: "server".to_owned(), last: None });
                }
                let text = "the server does not have the capability, or the connection is intercepted";
                Err(RpcError::new(ErrorKind::Unauthenticated, text))
            }
            _ => Err(malformed()),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn malformed() -> RpcError {
    RpcError::new(ErrorKind::Protocol, "a malformed proof of a capability")
}

fn malformed_text() -> RpcError {
    RpcError::invalid_argument("a text that is no capability (c1.ID.SECRET)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct One(Capability);

    impl CapabilityTable for One {
        fn find(&self, id: CapabilityId) -> Result<Capability, RpcError> {
            if id == self.0.id { Ok(self.0.clone()) } else { Err(RpcError::new(ErrorKind::Refused, "unknown")) }
        }
    }

    fn capability(id: u8, secret: &str) -> Capability {
        format!("c1.{}.{}", hex(&[id; ID]), secret.repeat(LEN)).parse().unwrap()
    }

    fn begun(mut proof: CapabilityProof, hello: &[u8]) -> CapabilityProof {
        let dialler = matches!(proof.side, ProofSide::Dialler(_));
        proof.begin(Transcript { dialler, dialler_hello: hello, acceptor_hello: b"answer" });
        proof
    }

    fn near(capability: Capability, binding: Option<[u8; LEN]>) -> CapabilityProof {
        begun(CapabilityProof::of_dialler(capability, binding), b"hello")
    }

    fn far(capability: Capability, binding: Option<[u8; LEN]>) -> CapabilityProof {
        begun(CapabilityProof::of_acceptor(Arc::new(One(capability)), binding), b"hello")
    }

    fn sent(step: rpc_core::Result<IdentityStep>) -> Vec<u8> {
        match step.unwrap() {
            IdentityStep::Send(bytes) | IdentityStep::Proven { last: Some(bytes), .. } => bytes,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the outcome at the dialled side, and its last proof.
    fn meet(near: &mut CapabilityProof, far: &mut CapabilityProof) -> rpc_core::Result<IdentityStep> {
        assert_eq!(near.step(None).unwrap(), IdentityStep::Wait);
        let challenge = sent(far.step(None));
        let answer = sent(near.step(Some(&challenge)));
        far.step(Some(&answer))
    }

    #[test]
    fn both_sides_prove_the_same_capability() {
        let text = capability(7, "ab").to_text();
        assert_eq!(text, format!("c1.{}.{}", "07".repeat(ID), "ab".repeat(LEN)));
        let (mut near, mut far) = (near(capability(7, "ab"), None), far(capability(7, "ab"), None));
        let IdentityStep::Proven { peer, last: Some(last) } = meet(&mut near, &mut far).unwrap() else {
            panic!("not proven")
        };
        assert_eq!(peer, "07".repeat(ID));
        let server = near.step(Some(&last)).unwrap();
        assert_eq!(server, IdentityStep::Proven { peer: "server".to_owned(), last: None });
    }

    #[test]
    fn what_differs_proves_nothing() {
        let binding = |byte| Some([byte; LEN]);
        let cases = [
            (near(capability(7, "ab"), None), far(capability(7, "cd"), None), ErrorKind::Unauthenticated),
            (near(capability(8, "ab"), None), far(capability(7, "ab"), None), ErrorKind::Refused),
            (near(capability(7, "ab"), binding(1)), far(capability(7, "ab"), binding(2)), ErrorKind::Unauthenticated),
        ];
        for (mut near, mut far, kind) in cases {
            assert_eq!(meet(&mut near, &mut far).unwrap_err().kind(), kind);
        }
    }

    #[test]
    fn proofs_cannot_be_replayed_or_reflected() {
        let (mut first, mut server) = (near(capability(7, "ab"), None), far(capability(7, "ab"), None));
        let answer = sent(first.step(Some(&sent(server.step(None)))));
        let last = sent(server.step(Some(&answer)));
        // Another handshake has another challenge.
        let mut again = far(capability(7, "ab"), None);
        sent(again.step(None));
        assert_eq!(again.step(Some(&answer)).unwrap_err().kind(), ErrorKind::Unauthenticated);
        // The dialler's own proof, sent back to it, and the server's proof of another handshake.
        assert_eq!(first.step(Some(&answer[LEN + ID..])).unwrap_err().kind(), ErrorKind::Unauthenticated);
        let mut later = near(capability(7, "ab"), None);
        sent(later.step(Some(&sent(far(capability(7, "ab"), None).step(None)))));
        assert_eq!(later.step(Some(&last)).unwrap_err().kind(), ErrorKind::Unauthenticated);
    }

    #[test]
    fn malformed_texts_and_proofs_are_errors() {
        let (id, secret) = ("07".repeat(ID), "ab".repeat(LEN));
        for text in [
            String::new(),
            "c1".to_owned(),
            format!("c2.{id}.{secret}"),
            format!("c1.{id}.{secret}.x"),
            format!("c1.{}.{secret}", &id[1..]),
            format!("c1.{id}é.{secret}"),
            format!("c1.{id}.{}", secret.to_uppercase()),
            format!("c1.{id}.{}", &secret[2..]),
        ] {
            assert_eq!(text.parse::<Capability>().unwrap_err().kind(), ErrorKind::InvalidArgument, "{text}");
        }
        for len in [0, LEN, LEN + ID, LEN + ID + LEN - 1, LEN + ID + LEN + 1] {
            let mut server = far(capability(7, "ab"), None);
            sent(server.step(None));
            assert_eq!(server.step(Some(&vec![7; len])).unwrap_err().kind(), ErrorKind::Protocol);
        }
        assert!(near(capability(7, "ab"), None).step(Some(&[1; LEN - 1])).is_err());
    }

    /// Checks the example of PROTOCOL.md.
    #[test]
    fn proofs_are_what_the_protocol_says() {
        let proof = near(capability(7, "ab"), None);
        let subject = proof.context.subject(&[1; LEN], &[2; LEN]);
        let proofs =
            [BY_DIALLER, BY_ACCEPTOR].map(|label| hex(prove(&capability(7, "ab").secret, label, &subject).as_ref()));
        let expected = [
            "4f302fe0911d5e18adbbc5fbd2b1347d3fcf63e8aa0e7cffc2611b1bee57ed8a",
            "c6eba6c938cdc4b3de785043bc541027151f80c376eb6cb7d400ab39261bd505",
        ];
        assert_eq!(proofs, expected);
    }
}

//! Identities of peers and their proofs: shared tokens, certificates, and earlier proofs on the
//! same connection.
//!
//! A token is never sent. The dialled side sends a random challenge with its hello. The dialler
//! answers with a challenge of its own and, for each of its tokens, an HMAC-SHA-256 over both
//! challenges, both hellos and, under TLS, a value that only the two ends of that TLS connection
//! have. The dialled side answers with an HMAC of its own under the token that matched. The two
//! sides use different labels, so that neither's proof can be sent back to it.

use std::sync::Arc;

use rpc_core::proto::{Anonymous, Identity, IdentityStep, Transcript};
use rpc_core::{ErrorKind, RpcError};

use super::capability::{CapabilityProof, CapabilityTable};
use super::peer_identity::PeerIdentity;
use super::secret_proof::{ProofContext, ProofState, prove, proves};
pub(crate) use super::security::Connection;
pub use super::security::Security;
#[cfg(feature = "quic")]
pub(crate) use super::security::Standing;
use super::tokens::LEN;
pub(crate) use super::tokens::random;
pub use super::tokens::{MAX_TOKENS, Token, TokenError, Tokens};

/// Clients that a server serves.
#[derive(Clone, Debug)]
pub struct Access {
    /// True if clients need no proof. Clients without proof are known as `anonymous`.
    pub anonymous: bool,
    /// Tokens whose holders are served.
    pub tokens: Tokens,
    /// True if holders of a certificate that the listener's [`ServerTls`](crate::ServerTls) accepts
    /// are served.
    pub certificates: bool,
}

impl Default for Access {
    /// Access for all clients, without proof.
    fn default() -> Self {
        Self { anonymous: true, tokens: Tokens::default(), certificates: false }
    }
}

/// Number of the rules of the side that dials, which do not change.
pub(crate) const DIALLER: u64 = 0;

/// Returns the methods by which the dialling side can prove its identity over a channel, and check
/// the other side's proof.
pub(crate) fn of_dialler(tokens: &Tokens, security: &Security) -> Vec<Box<dyn Identity>> {
    if let Some(capability) = tokens.as_capability() {
        return vec![Box::new(CapabilityProof::of_dialler(capability, security.binding))];
    }
    let mut methods: Vec<Box<dyn Identity>> = Vec::new();
    if let Some(peer) = security.proven_earlier(DIALLER) {
        methods.push(Box::new(Known { method: SAME_CONNECTION, peer: peer.name().to_owned() }));
    }
    if security.showed_certificate && security.server_verified {
        methods.push(Box::new(Known { method: CERTIFICATE, peer: "server".to_owned() }));
    }
    if !tokens.is_empty() {
        methods.push(Box::new(TokenProof::new(tokens.clone(), security.binding)));
    }
    // With a token, the other side has to prove that it knows it, unless its certificate has been
    // verified.
    if tokens.is_empty() || security.server_verified {
        methods.push(Box::new(Anonymous));
    }
    methods
}

/// Returns the methods by which clients can prove their identity to a server over a channel.
/// `earlier` is the identity that is [known](Security::proven_earlier) for the connection, and
/// `capabilities` are those that the server has made, if it makes any.
pub(crate) fn of_acceptor(
    access: &Access,
    capabilities: Option<Arc<dyn CapabilityTable>>,
    earlier: Option<&PeerIdentity>,
    security: &Security,
) -> Vec<Box<dyn Identity>> {
    let mut methods: Vec<Box<dyn Identity>> = Vec::new();
    if let Some(peer) = earlier {
        methods.push(Box::new(Known { method: SAME_CONNECTION, peer: peer.name().to_owned() }));
    }
    if let Some(name) = security.certificate.as_ref().filter(|_| access.certificates) {
        methods.push(Box::new(Known { method: CERTIFICATE, peer: name.clone() }));
    }
    if !access.tokens.is_empty() {
        methods.push(Box::new(TokenProof::new(access.tokens.clone(), security.binding)));
    }
    if access.anonymous || security.is_parent {
        methods.push(Box::new(Anonymous));
    }
    if methods.is_empty() {
        methods.push(Box::new(CertificateMissing));
    }
    if let Some(table) = capabilities {
        methods.push(Box::new(CapabilityProof::of_acceptor(table, security.binding)));
    }
    methods
}

/// Returns the identity of a client that proves nothing in a handshake: the one that it has proven
/// on the same connection or by its certificate, or that of its Unix `user` or of nobody where no
/// proof is needed. Returns `None` if a proof is missing.
pub(crate) fn known_by_channel(
    access: &Access,
    rules: u64,
    security: &Security,
    user: Option<u32>,
) -> Option<PeerIdentity> {
    let certificate = || security.certificate.clone().filter(|_| access.certificates).map(PeerIdentity::Certificate);
    let unproven = || (access.anonymous || security.is_parent).then(|| PeerIdentity::without_proof(user));
    security.proven_earlier(rules).or_else(certificate).or_else(unproven)
}

pub(super) const SAME_CONNECTION: &str = "connection";
pub(super) const CERTIFICATE: &str = "certificate";
pub(super) const TOKEN: &str = "token";

/// Method of a peer whose identity was known before the handshake began.
struct Known {
    method: &'static str,
    peer: String,
}

impl Identity for Known {
    fn method(&self) -> &str {
        self.method
    }

    fn step(&mut self, _: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        Ok(IdentityStep::Proven { peer: self.peer.clone(), last: None })
    }
}

/// Method of a server that accepts only certificates, over a channel that brought none.
struct CertificateMissing;

impl Identity for CertificateMissing {
    fn method(&self) -> &str {
        CERTIFICATE
    }

    fn step(&mut self, _: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        Err(RpcError::new(ErrorKind::Unauthenticated, "the server wants a certificate, and the client has shown none"))
    }
}

/// Method by which both sides prove that they know the same token.
struct TokenProof {
    tokens: Tokens,
    dialler: bool,
    context: ProofContext,
    state: ProofState,
}

impl TokenProof {
    fn new(tokens: Tokens, binding: Option<[u8; 32]>) -> Self {
        Self { tokens, dialler: false, context: ProofContext::new(binding), state: ProofState::Begin }
    }

    /// Describes a proof that does not hold: `what`, or a party in between. Over TLS that may be a
    /// proxy of the operator's own, which has two connections with bindings of their own.
    fn mismatch(&self, what: &str) -> String {
        let proxy = match self.context.is_bound() {
            true => ", for example by a proxy that ends TLS and encrypts again: have it pass TLS through",
            false => "",
        };
        format!("{what}, or the connection is intercepted{proxy}")
    }
}

const BY_DIALLER: &[u8] = b"rpc token 1: dialler knows";
const BY_ACCEPTOR: &[u8] = b"rpc token 1: acceptor knows";

fn malformed() -> RpcError {
    RpcError::new(ErrorKind::Protocol, "a malformed proof of a token")
}

impl Identity for TokenProof {
    fn method(&self) -> &str {
        TOKEN
    }

    fn begin(&mut self, transcript: Transcript<'_>) {
        self.dialler = transcript.dialler;
        self.context.begin(&transcript);
    }

    fn step(&mut self, received: Option<&[u8]>) -> rpc_core::Result<IdentityStep> {
        match (std::mem::replace(&mut self.state, ProofState::Done), received) {
            (ProofState::Begin, None) if self.dialler => {
                self.state = ProofState::Begin;
                Ok(IdentityStep::Wait)
            }
            (ProofState::Begin, None) => {
                let challenge = random()?;
                self.state = ProofState::Challenged(challenge);
                Ok(IdentityStep::Send(challenge.to_vec()))
            }
            (ProofState::Begin, Some(theirs)) if self.dialler => {
                if theirs.len() != LEN {
                    return Err(malformed());
                }
                let ours = random()?;
                let subject = self.context.subject(theirs, &ours);
                self.state = ProofState::Proved(subject);
                let proofs = self.tokens.0.iter().map(|token| prove(&token.secret, BY_DIALLER, &subject));
                Ok(IdentityStep::Send(proofs.fold(ours.to_vec(), |mut all, proof| {
                    all.extend_from_slice(proof.as_ref());
                    all
                })))
            }
            (ProofState::Challenged(challenge), Some(received)) => {
                let Some((theirs, proofs)) = received.split_first_chunk::<LEN>() else { return Err(malformed()) };
                if proofs.len() % LEN != 0 || proofs.len() / LEN > MAX_TOKENS {
                    return Err(malformed());
                }
                let subject = self.context.subject(&challenge, theirs);
                // Timing may show which of the tokens matched, which is no secret. Each comparison
                // takes constant time.
                let proven = |token: &&Token| {
                    proofs.chunks_exact(LEN).any(|proof| proves(&token.secret, BY_DIALLER, &subject, proof))
                };
                let Some(token) = self.tokens.0.iter().find(proven) else {
                    return Err(RpcError::new(
                        ErrorKind::Unauthenticated,
                        self.mismatch("the client's token is not one of the server's"),
                    ));
                };
                let last = prove(&token.secret, BY_ACCEPTOR, &subject).as_ref().to_vec();
                Ok(IdentityStep::Proven { peer: token.name.clone(), last: Some(last) })
            }
            (ProofState::Proved(subject), Some(proof)) => {
                let token = self.tokens.0.iter().find(|token| proves(&token.secret, BY_ACCEPTOR, &subject, proof));
                match token {
                    Some(_) => Ok(IdentityStep::Proven { peer: "server".to_owned(), last: None }),
                    None => Err(RpcError::new(
                        ErrorKind::Unauthenticated,
                        self.mismatch("the server does not know the token"),
                    )),
                }
            }
            _ => Err(malformed()),
        }
    }
}

#[cfg(test)]
mod tests {
    use ring::digest;

    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    fn tokens(text: &str) -> Tokens {
        Tokens::parse(text).unwrap()
    }

    fn proof(text: &str, dialler: bool, hello: &[u8], binding: Option<[u8; 32]>) -> TokenProof {
        let mut proof = TokenProof::new(tokens(text), binding);
        proof.begin(Transcript { dialler, dialler_hello: hello, acceptor_hello: b"answer" });
        proof
    }

    fn sent(step: rpc_core::Result<IdentityStep>) -> Vec<u8> {
        match step.unwrap() {
            IdentityStep::Send(bytes) | IdentityStep::Proven { last: Some(bytes), .. } => bytes,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the outcome of each side.
    fn meet(mut near: TokenProof, mut far: TokenProof) -> (rpc_core::Result<String>, rpc_core::Result<String>) {
        assert_eq!(near.step(None).unwrap(), IdentityStep::Wait);
        let challenge = sent(far.step(None));
        let answer = sent(near.step(Some(&challenge)));
        let (peer, last) = match far.step(Some(&answer)) {
            Ok(IdentityStep::Proven { peer, last: Some(last) }) => (peer, last),
            Ok(other) => panic!("{other:?}"),
            Err(error) => return (Err(error.clone()), Err(error)),
        };
        match near.step(Some(&last)) {
            Ok(IdentityStep::Proven { peer: server, last: None }) => (Ok(server), Ok(peer)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => (Err(error), Ok(peer)),
        }
    }

    #[test]
    fn any_token_in_common_will_do() {
        let (old, new) = (format!("alice {SECRET}-old"), format!("alice {SECRET}-new"));
        let both = format!("# while it is replaced\n{new}\n\n {old} \n");
        for (near, far) in [(&old, &both), (&both, &old), (&new, &both), (&both, &both)] {
            let outcome = meet(proof(near, true, b"hello", None), proof(far, false, b"hello", None));
            assert_eq!(outcome, (Ok("server".to_owned()), Ok("alice".to_owned())));
        }
    }

    #[test]
    fn what_differs_proves_nothing() {
        let other = "fedcba9876543210fedcba9876543210";
        let differences = [
            (proof(SECRET, true, b"hello", None), proof(other, false, b"hello", None)),
            (proof(SECRET, true, b"hello", None), proof(SECRET, false, b"hellO", None)),
            (proof(SECRET, true, b"hello", Some([1; 32])), proof(SECRET, false, b"hello", Some([2; 32]))),
            (proof(SECRET, true, b"hello", Some([1; 32])), proof(SECRET, false, b"hello", None)),
        ];
        for (near, far) in differences {
            assert_eq!(meet(near, far).1.unwrap_err().kind(), ErrorKind::Unauthenticated);
        }
    }

    #[test]
    fn proofs_cannot_be_replayed_or_reflected() {
        let mut near = proof(SECRET, true, b"hello", None);
        let mut far = proof(SECRET, false, b"hello", None);
        let answer = sent(near.step(Some(&sent(far.step(None)))));
        let last = sent(far.step(Some(&answer)));
        // Another server has another challenge, and refuses the proof.
        let mut another = proof(SECRET, false, b"hello", None);
        sent(another.step(None));
        assert_eq!(another.step(Some(&answer)).unwrap_err().kind(), ErrorKind::Unauthenticated);
        // The side that made the proof refuses it.
        assert_eq!(near.step(Some(&answer[LEN..])).unwrap_err().kind(), ErrorKind::Unauthenticated);
        // The server's proof is valid for one handshake.
        let mut later = proof(SECRET, true, b"hello", None);
        let mut again = proof(SECRET, false, b"hello", None);
        sent(later.step(Some(&sent(again.step(None)))));
        assert_eq!(later.step(Some(&last)).unwrap_err().kind(), ErrorKind::Unauthenticated);
        // The client's proof is valid for one handshake as well.
        assert_eq!(far.step(Some(&answer)).unwrap_err().kind(), ErrorKind::Protocol);
    }

    /// Checks the example of PROTOCOL.md.
    #[test]
    fn proofs_are_what_the_protocol_says() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let parts = [&b"hello"[..], b"answer", b""].map(|part| [&(part.len() as u64).to_le_bytes(), part].concat());
        let by_hand = digest::digest(&digest::SHA256, &[&parts.concat()[..], &[1; LEN], &[2; LEN]].concat());
        let begun = proof(SECRET, true, b"hello", None);
        let subject = begun.context.subject(&[1; LEN], &[2; LEN]);
        assert_eq!(subject, by_hand.as_ref());
        assert_eq!(hex(&subject), "3d98887b9e0efe5ae1b93b514c108dab41bc43caff7eaea51f3835e7b5602f72");
        let token: Token = SECRET.parse().unwrap();
        let proofs = [BY_DIALLER, BY_ACCEPTOR].map(|label| hex(prove(&token.secret, label, &subject).as_ref()));
        assert_eq!(proofs[0], "f3ea23f756f7f1bffcb5c53c50a7d276b5cbc147fbdd2b7c9f7ca3034fae546f");
        assert_eq!(proofs[1], "a384280065e023a75e91ff42f0c11e56b2cfbfbf939fcb145eb57533d56e8a18");
    }

    #[test]
    fn malformed_proofs_are_errors() {
        for received in [&[][..], &[1; LEN - 1], &[1; LEN + 1], &[1; LEN * (MAX_TOKENS + 2)]] {
            let mut far = proof(SECRET, false, b"hello", None);
            sent(far.step(None));
            assert_eq!(far.step(Some(received)).unwrap_err().kind(), ErrorKind::Protocol);
            let mut near = proof(SECRET, true, b"hello", None);
            assert!(received.len() == LEN || near.step(Some(received)).is_err());
        }
    }
}

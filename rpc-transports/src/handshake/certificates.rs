//! Certificates and trust of both sides of a TLS or QUIC connection.
//!
//! TLS 1.3 only, with ring as the one provider of cryptography, passed explicitly.

use std::fmt::{self, Write as _};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::proto::ANONYMOUS;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
#[cfg(feature = "quic")]
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, InconsistentKeys, RootCertStore, SignatureScheme};
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;
use x509_parser::extensions::GeneralName;

use crate::address::Address;

/// Protocol that both sides have to name, so that a TLS connection meant for another protocol
/// cannot be redirected here.
pub(crate) const ALPN: &[u8] = b"rpc/1";

/// Label under which a TLS connection exports the value that binds a proof to it.
#[cfg(feature = "tls")]
pub(crate) const BINDING_LABEL: &[u8] = b"EXPORTER-rpc-channel-binding";

/// Length up to which the common name of a certificate is used as a name unchanged.
const MAX_NAME: usize = 64;

/// Chain of certificates, the owner's first, and the owner's private key.
pub struct Certificate {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Certificate {
    /// Reads PEM texts: one or more certificates, and one key in PKCS #8, PKCS #1 or SEC 1 form.
    ///
    /// # Errors
    ///
    /// The certificates or the key are malformed, or missing.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, CertificateError> {
        let key = PrivateKeyDer::from_pem_slice(key);
        let key = key.map_err(|error| CertificateError::Key { problem: error.to_string() })?;
        let chain = certificates(chain)?;
        let signer = provider().key_provider.load_private_key(key.clone_key());
        let signer = signer.map_err(|error| CertificateError::Key { problem: error.to_string() })?;
        match CertifiedKey::new(chain.clone(), signer).keys_match() {
            Err(rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => Err(CertificateError::Mismatch),
            _ => Ok(Self { chain, key }),
        }
    }

    /// Returns the time in which all certificates of the chain are valid. `None` if one of them
    /// cannot be parsed.
    #[must_use]
    pub fn validity(&self) -> Option<Range<SystemTime>> {
        let (mut from, mut until) = (SystemTime::UNIX_EPOCH, None::<SystemTime>);
        for certificate in &self.chain {
            let (_, certificate) = x509_parser::parse_x509_certificate(certificate).ok()?;
            let validity = certificate.validity();
            from = from.max(system_time(validity.not_before.timestamp())?);
            let end = system_time(validity.not_after.timestamp())?;
            until = Some(until.map_or(end, |until| until.min(end)));
        }
        Some(from..until?)
    }
}

/// Returns the time that is so many seconds after the epoch. Earlier times count as the epoch.
fn system_time(seconds: i64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("chain", &self.chain.len()).finish_non_exhaustive()
    }
}

/// Error of certificates that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    /// The text holds no certificate, or a malformed one.
    #[error("no certificates in PEM form: {problem}")]
    Chain {
        /// Description of the problem.
        problem: String,
    },
    /// The text holds no private key, or a malformed one.
    #[error("no private key in PEM form: {problem}")]
    Key {
        /// Description of the problem.
        problem: String,
    },
    /// The private key is that of another certificate.
    #[error("the private key belongs to another certificate")]
    Mismatch,
    /// The certificate and the key are well-formed, but do not fit this use.
    #[error("the certificates cannot be used: {problem}")]
    Unfit {
        /// Description of the problem.
        problem: String,
    },
}

fn unfit(error: impl fmt::Display) -> CertificateError {
    CertificateError::Unfit { problem: error.to_string() }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let problem = |problem: String| CertificateError::Chain { problem };
    let chain: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|error| problem(error.to_string()))?;
    if chain.is_empty() { Err(problem("there is none".to_owned())) } else { Ok(chain) }
}

fn authorities(pem: &[u8]) -> Result<RootCertStore, CertificateError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem)? {
        roots.add(certificate).map_err(unfit)?;
    }
    Ok(roots)
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Trust of a client in servers, and its own certificate. Cheap to clone.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<rustls::ClientConfig>,
    verifies: bool,
    shows_certificate: bool,
}

impl ClientTls {
    /// Returns settings that trust servers with a certificate for the name in their address, issued
    /// by one of the authorities in the PEM text. `certificate` is shown to servers that ask for
    /// one.
    ///
    /// # Errors
    ///
    /// The certificate or the authorities cannot be used.
    pub fn new(authorities: &[u8], certificate: Option<Certificate>) -> Result<Self, CertificateError> {
        let roots = self::authorities(authorities)?;
        let builder = Self::builder()?.with_root_certificates(roots);
        Self::build(builder, true, certificate)
    }

    /// Returns settings that accept any certificate, for example one that a server has made itself.
    /// Safe only together with a token, which both sides prove to know for just this connection: a
    /// [`Connector`](crate::Connector) refuses to connect without one.
    ///
    /// # Errors
    ///
    /// `certificate` cannot be used.
    pub fn unverified(certificate: Option<Certificate>) -> Result<Self, CertificateError> {
        let verifier = Arc::new(AnyServer(provider()));
        let builder = Self::builder()?.dangerous().with_custom_certificate_verifier(verifier);
        Self::build(builder, false, certificate)
    }

    fn builder() -> Result<rustls::ConfigBuilder<rustls::ClientConfig, rustls::WantsVerifier>, CertificateError> {
        rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unfit)
    }

    fn build(
        builder: rustls::ConfigBuilder<rustls::ClientConfig, rustls::client::WantsClientCert>,
        verifies: bool,
        certificate: Option<Certificate>,
    ) -> Result<Self, CertificateError> {
        let shows_certificate = certificate.is_some();
        let mut config = match certificate {
            Some(Certificate { chain, key }) => builder.with_client_auth_cert(chain, key).map_err(unfit)?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Self { config: Arc::new(config), verifies, shows_certificate })
    }

    /// Returns true if the certificates of servers are checked.
    #[must_use]
    pub fn verifies(&self) -> bool {
        self.verifies
    }

    pub(crate) fn shows_certificate(&self) -> bool {
        self.shows_certificate
    }

    pub(crate) fn config(&self) -> &Arc<rustls::ClientConfig> {
        &self.config
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls")
            .field("verifies", &self.verifies)
            .field("shows_certificate", &self.shows_certificate)
            .finish_non_exhaustive()
    }
}

/// Returns the name that the certificate of a server at `address` must be for.
pub(crate) fn server_name(address: &Address) -> Result<ServerName<'static>, CertificateError> {
    ServerName::try_from(host_in_certificate(address).to_owned()).map_err(unfit)
}

/// Returns the host of an address as a certificate has it: without the zone, which names an
/// interface of this machine.
pub(crate) fn host_in_certificate(address: &Address) -> &str {
    let host = address.host().unwrap_or_default();
    host.split('%').next().unwrap_or(host)
}

/// Certificate of a server, and its demand on the certificates of its clients. Clones share both.
/// [`replace`](Self::replace) changes them for all later connections.
#[derive(Clone)]
pub struct ServerTls(Arc<Mutex<Rules>>);

/// Rules for new connections.
struct Rules {
    config: Arc<rustls::ServerConfig>,
    /// Verifier of the certificates of clients.
    #[cfg(feature = "quic")]
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl ServerTls {
    /// Creates settings that show `certificate` to clients, and ask them for one of their own if
    /// there is a `demand`.
    ///
    /// # Errors
    ///
    /// The certificate or the authorities cannot be used.
    pub fn new(certificate: Certificate, demand: Option<&ClientCertificates<'_>>) -> Result<Self, CertificateError> {
        Ok(Self(Arc::new(Mutex::new(server_rules(certificate, demand)?))))
    }

    /// Replaces certificate and demand for new connections. Existing connections keep theirs. An
    /// error changes nothing.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn replace(
        &self,
        certificate: Certificate,
        demand: Option<&ClientCertificates<'_>>,
    ) -> Result<(), CertificateError> {
        *self.rules() = server_rules(certificate, demand)?;
        Ok(())
    }

    pub(crate) fn config(&self) -> Arc<rustls::ServerConfig> {
        self.rules().config.clone()
    }

    /// Returns true if a client with this chain of certificates would be accepted now. Rules change
    /// and certificates expire while connections go on.
    #[cfg(feature = "quic")]
    pub(crate) fn accepts(&self, chain: &[CertificateDer<'_>]) -> bool {
        let verifier = self.rules().verifier.clone();
        let (Some(verifier), Some((client, others))) = (verifier, chain.split_first()) else { return false };
        verifier.verify_client_cert(client, others, UnixTime::now()).is_ok()
    }

    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.0.lock()
    }
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

/// Demand of a server on the certificates of its clients.
#[derive(Clone, Copy, Debug)]
pub struct ClientCertificates<'a> {
    /// Authorities, one of which must have issued the certificate, as PEM text.
    pub authorities: &'a [u8],
    /// True if a client may have none, because it can prove its identity in another way.
    pub optional: bool,
}

fn server_rules(certificate: Certificate, demand: Option<&ClientCertificates<'_>>) -> Result<Rules, CertificateError> {
    let builder = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(unfit)?;
    let verifier = match demand {
        Some(demand) => {
            let roots = Arc::new(authorities(demand.authorities)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = if demand.optional { verifier.allow_unauthenticated() } else { verifier };
            Some(verifier.build().map_err(unfit)?)
        }
        None => None,
    };
    let builder = match &verifier {
        Some(verifier) => builder.with_client_cert_verifier(verifier.clone()),
        None => builder.with_no_client_auth(),
    };
    let Certificate { chain, key } = certificate;
    let mut config = builder.with_single_cert(chain, key).map_err(unfit)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed connection would carry a client's old certificate past its end.
    config.send_tls13_tickets = 0;
    Ok(Rules {
        config: Arc::new(config),
        #[cfg(feature = "quic")]
        verifier,
    })
}

/// Facts that the certificate of a client states about its holder.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    /// Name by which the holder is known. `None` without a certificate.
    pub(crate) name: Option<String>,
    /// Keys of the servers that the holder may use; empty for all servers.
    pub(crate) keys: Arc<[String]>,
}

impl Holder {
    /// Reads the certificate that a client has shown, if any. It has been verified, by a parser
    /// that is content with less than this one.
    ///
    /// # Errors
    ///
    /// [`InvalidData`](io::ErrorKind::InvalidData): the certificate cannot be read in full. It may
    /// be limited to keys that are not understood, so its holder must not be let in.
    pub(crate) fn of(shown: Option<&CertificateDer<'_>>) -> io::Result<Self> {
        let Some(certificate) = shown else { return Ok(Self::default()) };
        let malformed = |problem: &dyn fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("the client's certificate cannot be read: {problem}"))
        };
        let (_, certificate) = x509_parser::parse_x509_certificate(certificate).map_err(|error| malformed(&error))?;
        Ok(Self { name: Some(name_of(&certificate)), keys: keys_of(&certificate).map_err(|error| malformed(&error))? })
    }
}

/// Returns the name by which the holder of a client's certificate is known: the common name of its
/// subject if that is a valid name, else a digest of the subject.
fn name_of(certificate: &X509Certificate<'_>) -> String {
    let subject = certificate.subject();
    let common_name = subject.iter_common_name().next().and_then(|name| name.as_str().ok()).unwrap_or_default();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let taken = matches!(common_name, "" | "." | ".." | ANONYMOUS);
    if !taken && common_name.len() <= MAX_NAME && common_name.bytes().all(plain) {
        return common_name.to_owned();
    }
    let digest = ::ring::digest::digest(&::ring::digest::SHA256, subject.as_raw());
    let mut name = "subject-".to_owned();
    for byte in &digest.as_ref()[..16] {
        // Writing to a string cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// Prefix of the keys that a client's certificate is limited to, among the alternative names of its
/// subject.
pub const KEY_URI: &str = "urn:rpc:key:";

/// Tag of a URI among the alternative names of a subject.
const URI_TAG: u32 = 6;

/// Returns the keys of the servers that the holder of a client's certificate may use. Empty for all
/// servers.
///
/// # Errors
///
/// A name that may be a key cannot be read.
fn keys_of(certificate: &X509Certificate<'_>) -> Result<Arc<[String]>, X509Error> {
    let Some(names) = certificate.subject_alternative_name()? else { return Ok(Arc::default()) };
    let key = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => uri.strip_prefix(KEY_URI).map(|key| Ok(key.to_owned())),
        GeneralName::Invalid(tag, _) if tag.0 == URI_TAG => Some(Err(X509Error::InvalidExtensions)),
        _ => None,
    };
    names.value.general_names.iter().filter_map(key).collect()
}

/// Verifier that accepts any certificate, and makes sure that the peer has the key to it.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use rcgen::{CertificateParams, CustomExtension, KeyPair};

    use super::*;

    /// Returns a certificate with these bytes as the alternative names of its subject.
    fn certificate(names: &[u8]) -> CertificateDer<'static> {
        let mut params = CertificateParams::new([]).unwrap();
        params.custom_extensions.push(CustomExtension::from_oid_content(&[2, 5, 29, 17], names.to_vec()));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    /// Returns a list of names with one URI.
    fn uri(text: &[u8]) -> Vec<u8> {
        let len = text.len() as u8;
        [&[0x30, len + 2, 0x86, len][..], text].concat()
    }

    /// Regression: what could not be read counted as no limit.
    #[test]
    fn the_holder_of_a_certificate_whose_keys_cannot_be_read_is_refused() {
        let good = Holder::of(Some(&certificate(&uri(b"urn:rpc:key:board")))).unwrap();
        assert_eq!((&good.keys[..], good.name.is_some()), (&["board".to_owned()][..], true));
        assert!(Holder::of(Some(&certificate(&uri(b"https://example.invalid")))).unwrap().keys.is_empty());
        assert!(Holder::of(None).unwrap().name.is_none());
        let cut = &uri(b"urn:rpc:key:board")[..9];
        for names in [&uri(b"urn:rpc:key:b\xffard")[..], cut, b"", b"\x05\x00"] {
            let error = Holder::of(Some(&certificate(names))).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{names:?}");
        }
        assert!(Holder::of(Some(&CertificateDer::from(vec![0x30, 0]))).is_err());
    }
}

//! The certificate authority, and the certificates that it signs.

use std::io;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};

use super::existing::ExistingCertificate;
use super::{DAY, Made, PkiError, random};

/// Validity of an authority.
const CA_VALIDITY: Duration = Duration::from_secs(3652 * DAY);

/// Tolerated difference of clocks: certificates are valid from this long before they are made.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// A certificate that may sign others, with its key.
pub(super) struct Authority {
    /// In PEM.
    pub(super) certificate: String,
    /// In DER, for comparison with the issuer of others.
    pub(super) subject: Vec<u8>,
    pub(super) expires: SystemTime,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn generate(now: SystemTime) -> Result<Self, PkiError> {
        let mut params = CertificateParams::default();
        let tag: String = random::<4>()?.iter().map(|byte| format!("{byte:02x}")).collect();
        params.distinguished_name = DistinguishedName::new();
        // Unique names, so that an old authority is not taken for a new one.
        params.distinguished_name.push(DnType::CommonName, format!("rpc authority {tag}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(serial_number()?);
        (params.not_before, params.not_after) = ((now - CLOCK_SKEW).into(), (now + CA_VALIDITY).into());
        let key = KeyPair::generate().map_err(PkiError::signing)?;
        let certificate = params.self_signed(&key).map_err(PkiError::signing)?.pem();
        let existing = ExistingCertificate::parse(&certificate)
            .ok_or_else(|| PkiError::signing(io::Error::other("the certificate made here cannot be read")))?;
        Self::new(certificate, existing, key)
    }

    pub(super) fn new(certificate: String, existing: ExistingCertificate, key: KeyPair) -> Result<Self, PkiError> {
        let issuer = Issuer::from_ca_cert_pem(&certificate, key).map_err(PkiError::signing)?;
        Ok(Self { certificate, subject: existing.subject, expires: existing.expires, issuer })
    }

    pub(super) fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Signs a certificate for the key of `old`, if it is kept, or for a new key.
    pub(super) fn sign(
        &self,
        mut params: CertificateParams,
        old: ExistingLeaf,
        keep_key: bool,
        names: Vec<String>,
        now: SystemTime,
        expires: SystemTime,
    ) -> Result<Leaf, PkiError> {
        (params.not_before, params.not_after) = ((now - CLOCK_SKEW).into(), expires.into());
        let made = if old.certificate.is_some() { Made::Renewed } else { Made::Created };
        let (key, new_key) = match old.key.filter(|_| keep_key) {
            Some(key) => (key, None),
            None => {
                let key = KeyPair::generate().map_err(PkiError::signing)?;
                let pem = key.serialize_pem();
                (key, Some(pem))
            }
        };
        let certificate = params.signed_by(&key, &self.issuer).map_err(PkiError::signing)?.pem();
        Ok(Leaf { certificate, new_key, names, made })
    }
}

/// Existing certificate and key of a server or a client.
#[derive(Default)]
pub(super) struct ExistingLeaf {
    pub(super) certificate: Option<ExistingCertificate>,
    /// Key of the certificate.
    pub(super) key: Option<KeyPair>,
}

/// A certificate to be written.
pub(super) struct Leaf {
    /// In PEM.
    pub(super) certificate: String,
    /// In PEM; `None` to keep the existing key.
    pub(super) new_key: Option<String>,
    pub(super) names: Vec<String>,
    pub(super) made: Made,
}

pub(super) fn leaf_params(usage: ExtendedKeyUsagePurpose) -> Result<CertificateParams, PkiError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params.serial_number = Some(serial_number()?);
    Ok(params)
}

/// Random: a serial number derived from the key would repeat after a renewal, which is not allowed.
fn serial_number() -> Result<SerialNumber, PkiError> {
    let mut bytes = random::<16>()?;
    // Made positive and of full length.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

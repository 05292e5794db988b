//! Reader of an existing certificate: key, names and expiry.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use rcgen::{KeyPair, PublicKeyData};
use rpc_transports::KEY_URI;
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;

use super::{Host, ServerKey};

pub(super) struct ExistingCertificate {
    /// In DER.
    pub(super) subject: Vec<u8>,
    /// In DER.
    pub(super) issuer: Vec<u8>,
    pub(super) common_name: Option<String>,
    pub(super) expires: SystemTime,
    pub(super) is_ca: bool,
    hosts: Vec<Host>,
    /// Keys that a client's certificate is limited to.
    pub(super) server_keys: Vec<ServerKey>,
    /// In DER.
    public_key: Vec<u8>,
}

impl ExistingCertificate {
    /// Reads the first certificate in `pem`.
    pub(super) fn parse(pem: &str) -> Option<Self> {
        let (_, pem) = parse_x509_pem(pem.as_bytes()).ok()?;
        let certificate = pem.parse_x509().ok()?;
        let common_name = certificate.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let alternative_names = certificate.subject_alternative_name().ok().flatten();
        let names = alternative_names.map_or(&[][..], |extension| &extension.value.general_names);
        let expires = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        Some(Self {
            subject: certificate.subject().as_raw().to_vec(),
            issuer: certificate.issuer().as_raw().to_vec(),
            common_name: common_name.map(str::to_owned),
            expires: SystemTime::UNIX_EPOCH + Duration::from_secs(expires),
            is_ca: certificate.is_ca(),
            hosts: names.iter().filter_map(host).collect(),
            server_keys: names.iter().filter_map(server_key).collect(),
            public_key: certificate.public_key().raw.to_vec(),
        })
    }

    /// Returns its names and addresses.
    pub(super) fn hosts(&self) -> Vec<Host> {
        self.hosts.clone()
    }

    pub(super) fn belongs_to(&self, key: &KeyPair) -> bool {
        self.public_key == key.subject_public_key_info()
    }
}

fn server_key(name: &GeneralName<'_>) -> Option<ServerKey> {
    match name {
        GeneralName::URI(uri) => uri.strip_prefix(KEY_URI)?.parse().ok(),
        _ => None,
    }
}

fn host(name: &GeneralName<'_>) -> Option<Host> {
    match name {
        GeneralName::DNSName(name) => name.parse().ok(),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let v6 = <[u8; 16]>::try_from(*bytes).map(IpAddr::from);
            v4.or(v6).ok().map(Host::Address)
        }
        _ => None,
    }
}

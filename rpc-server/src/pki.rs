//! A small certificate authority and tokens, for the mutual authentication of servers and clients.
//!
//! [`CertificatePlan::write`] makes a small authority in a folder, and one certificate each for a
//! server and a client:
//!
//! | file | what it is | who needs it |
//! | --- | --- | --- |
//! | `ca.pem` | the certificate of the authority | both sides |
//! | `ca.key` | the key that signs new certificates | only the operator of the authority |
//! | `server.pem`, `server.key` | for the names and addresses of the server | the server |
//! | `client.pem`, `client.key` | for the name of the client | the client |
//!
//! A second run renews: the same authority signs new certificates for the existing keys. A
//! certificate and its key match at any time, because only the certificate is replaced, and in one
//! step. A key is replaced if it would otherwise pass from one client name to another.
//!
//! ```
//! use std::time::SystemTime;
//!
//! use rpc_server::pki::{CertificatePlan, Made};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let plan = CertificatePlan::new(folder.path());
//! let plan = plan.host("board.lan".parse()?).host("10.0.0.5".parse()?);
//! assert_eq!(plan.write(SystemTime::now())?.server.made, Made::Created);
//! let again = CertificatePlan::new(folder.path()).write(SystemTime::now())?;
//! assert_eq!((again.ca.made, again.server.made), (Made::Kept, Made::Renewed));
//! assert_eq!(again.server.names, ["board.lan", "10.0.0.5"]);
//! # Ok(())
//! # }
//! ```

mod authority;
mod error;
mod existing;
mod names;
pub(crate) mod private_file;
pub mod token_file;
pub mod trust;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rcgen::{DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};
use rpc_transports::KEY_URI;
use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use self::authority::{Authority, ExistingLeaf, Leaf, leaf_params};
use self::existing::ExistingCertificate;
use self::names::MAX_NAME;
use self::private_file::{Mode, read_if_there, write};

pub use error::PkiError;
pub use names::{ClientName, Host, ServerKey};

/// Default validity of certificates of servers and clients.
pub const DEFAULT_VALIDITY: Duration = Duration::from_secs(365 * DAY);

const DAY: u64 = 24 * 3600;

/// A plan of certificates to make in a folder.
#[derive(Clone, Debug)]
pub struct CertificatePlan {
    folder: PathBuf,
    hosts: Vec<Host>,
    client_name: Option<ClientName>,
    client_keys: Vec<ServerKey>,
    validity: Duration,
    force: bool,
}

impl CertificatePlan {
    /// Returns a plan for `folder`, which is created if it is missing.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            hosts: Vec::new(),
            client_name: None,
            client_keys: Vec::new(),
            validity: DEFAULT_VALIDITY,
            force: false,
        }
    }

    /// Adds a name or address under which clients reach the server. Without any, a renewed
    /// certificate keeps its names.
    #[must_use]
    pub fn host(mut self, host: Host) -> Self {
        if !self.hosts.contains(&host) {
            self.hosts.push(host);
        }
        self
    }

    /// Sets the name in the client's certificate. Default: its present name, or `client`.
    #[must_use]
    pub fn client_name(mut self, name: ClientName) -> Self {
        self.client_name = Some(name);
        self
    }

    /// Adds a key of a server that the client may use. Without any, a new certificate is valid for
    /// all servers, and a renewed one keeps its keys.
    #[must_use]
    pub fn client_key(mut self, key: ServerKey) -> Self {
        if !self.client_keys.contains(&key) {
            self.client_keys.push(key);
        }
        self
    }

    /// Sets the validity of the certificates of server and client. Default: a year, and no longer
    /// than that of the authority.
    #[must_use]
    pub fn validity(mut self, validity: Duration) -> Self {
        self.validity = validity;
        self
    }

    /// Replaces the authority and all keys. Certificates of the old authority are no longer
    /// accepted by those who have the new `ca.pem`.
    #[must_use]
    pub fn force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }

    /// Creates missing files and renews certificates, as of `now`. Blocks.
    ///
    /// Each file is replaced in one step. Only the owner can read keys, at any time.
    ///
    /// # Errors
    ///
    /// [`PkiError`]. Nothing has been written if an existing file is unusable.
    pub fn write(&self, now: SystemTime) -> Result<Issued, PkiError> {
        fs::create_dir_all(&self.folder).map_err(|source| PkiError::File {
            what: "make",
            file: self.folder.clone(),
            source,
        })?;
        let ca = if self.force { None } else { self.existing_ca()? };
        let new_ca = ca.is_none();
        let ca = match ca {
            Some(ca) => ca,
            None => Authority::generate(now)?,
        };
        if ca.expires <= now {
            return Err(PkiError::AuthorityExpired { file: self.path("ca.pem"), expired: ca.expires });
        }
        let expires = (now + self.validity).min(ca.expires);
        // All files are generated before the first is written.
        let server = self.server(&ca, new_ca, now, expires)?;
        let client = self.client(&ca, new_ca, now, expires)?;
        if new_ca {
            // Of two runs at the same time one creates the key and goes on, so that its files
            // match.
            let mode = if self.force { Mode::Private } else { Mode::PrivateNew };
            write(&self.path("ca.key"), &ca.key_pem(), mode)?;
            write(&self.path("ca.pem"), &ca.certificate, Mode::Public)?;
        }
        Ok(Issued {
            ca: IssuedPair {
                certificate: self.path("ca.pem"),
                key: self.path("ca.key"),
                names: Vec::new(),
                expires: ca.expires,
                made: if new_ca { Made::Created } else { Made::Kept },
            },
            server: self.write_leaf("server", server, expires)?,
            client: self.write_leaf("client", client, expires)?,
        })
    }

    fn existing_ca(&self) -> Result<Option<Authority>, PkiError> {
        let (certificate, key) = (self.path("ca.pem"), self.path("ca.key"));
        match (read_if_there(&certificate)?, read_if_there(&key)?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(PkiError::HalfAuthority { there: certificate, missing: key }),
            (None, Some(_)) => Err(PkiError::HalfAuthority { there: key, missing: certificate }),
            (Some(certificate_pem), Some(key_pem)) => {
                let existing = ExistingCertificate::parse(&certificate_pem)
                    .ok_or_else(|| PkiError::NotACertificate { file: certificate.clone() })?;
                let pair = KeyPair::from_pem(&key_pem)
                    .map_err(|source| PkiError::NotAKey { file: key.clone(), source: Box::new(source) })?;
                if !existing.is_ca {
                    return Err(PkiError::NotAnAuthority { file: certificate });
                }
                if !existing.belongs_to(&pair) {
                    return Err(PkiError::Mismatch { certificate, key });
                }
                Authority::new(certificate_pem, existing, pair).map(Some)
            }
        }
    }

    fn server(&self, ca: &Authority, new_ca: bool, now: SystemTime, expires: SystemTime) -> Result<Leaf, PkiError> {
        let old = self.existing_leaf("server", ca, new_ca)?;
        let mut hosts = self.hosts.clone();
        if hosts.is_empty() {
            hosts = old.certificate.as_ref().map(ExistingCertificate::hosts).unwrap_or_default();
        }
        let Some(first) = hosts.first() else { return Err(PkiError::NoHost) };
        let mut params = leaf_params(ExtendedKeyUsagePurpose::ServerAuth)?;
        // The subject is for people; programs read the names below.
        let name = Some(first.to_string()).filter(|name| name.len() <= MAX_NAME);
        params.distinguished_name.push(DnType::CommonName, name.as_deref().unwrap_or("server"));
        for host in &hosts {
            params.subject_alt_names.push(host.subject_alt_name()?);
        }
        let names = hosts.iter().map(ToString::to_string).collect();
        ca.sign(params, old, true, names, now, expires)
    }

    fn client(&self, ca: &Authority, new_ca: bool, now: SystemTime, expires: SystemTime) -> Result<Leaf, PkiError> {
        let old = self.existing_leaf("client", ca, new_ca)?;
        let old_name = old.certificate.as_ref().and_then(|certificate| certificate.common_name.clone());
        let name = match &self.client_name {
            Some(ClientName(name)) => name.clone(),
            None => old_name.clone().unwrap_or_else(|| ClientName::default().0),
        };
        // The holder of the old key must not become another client.
        let same_owner = old_name.is_none_or(|old_name| old_name == name);
        let mut params = leaf_params(ExtendedKeyUsagePurpose::ClientAuth)?;
        params.distinguished_name.push(DnType::CommonName, &*name);
        let mut keys = self.client_keys.clone();
        if keys.is_empty() && same_owner {
            keys = old.certificate.as_ref().map(|certificate| certificate.server_keys.clone()).unwrap_or_default();
        }
        let mut names = vec![name];
        for ServerKey(key) in keys {
            let uri = format!("{KEY_URI}{key}");
            params.subject_alt_names.push(SanType::URI(uri.as_str().try_into().map_err(PkiError::signing)?));
            names.push(format!("servers with the key {key}"));
        }
        ca.sign(params, old, same_owner, names, now, expires)
    }

    /// Reads an existing pair, if it may be replaced.
    fn existing_leaf(&self, name: &str, ca: &Authority, new_ca: bool) -> Result<ExistingLeaf, PkiError> {
        if self.force {
            return Ok(ExistingLeaf::default());
        }
        let (certificate, key) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        let mut leaf = ExistingLeaf::default();
        if let Some(pem) = read_if_there(&certificate)? {
            let existing = ExistingCertificate::parse(&pem)
                .ok_or_else(|| PkiError::NotACertificate { file: certificate.clone() })?;
            if new_ca || existing.issuer != ca.subject {
                return Err(PkiError::Foreign { file: certificate });
            }
            leaf.certificate = Some(existing);
        }
        if let Some(pem) = read_if_there(&key)? {
            let pair =
                KeyPair::from_pem(&pem).map_err(|source| PkiError::NotAKey { file: key, source: Box::new(source) })?;
            // A pair that does not match was left by a run that was interrupted between the two
            // files.
            if leaf.certificate.as_ref().is_none_or(|certificate| certificate.belongs_to(&pair)) {
                leaf.key = Some(pair);
            }
        }
        Ok(leaf)
    }

    fn write_leaf(&self, name: &str, leaf: Leaf, expires: SystemTime) -> Result<IssuedPair, PkiError> {
        let (certificate, key) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        if let Some(new_key) = &leaf.new_key {
            // The key is written first: the next run completes a key without a certificate.
            write(&key, new_key, Mode::Private)?;
        }
        write(&certificate, &leaf.certificate, Mode::Public)?;
        Ok(IssuedPair { certificate, key, names: leaf.names, expires, made: leaf.made })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// The files after [`CertificatePlan::write`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Issued {
    /// The authority.
    pub ca: IssuedPair,
    /// Pair of the server.
    pub server: IssuedPair,
    /// Pair of the client.
    pub client: IssuedPair,
}

/// A certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct IssuedPair {
    /// The file with the certificate.
    pub certificate: PathBuf,
    /// The file with the key.
    pub key: PathBuf,
    /// Names and addresses of a server; the name of a client; empty for an authority.
    pub names: Vec<String>,
    /// End of the validity; as text in the form of RFC 3339.
    #[serde(serialize_with = "serialize_time")]
    pub expires: SystemTime,
    /// Action that led to the pair.
    pub made: Made,
}

/// Action that led to a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Made {
    /// Created: there was none.
    Created,
    /// Renewed: it replaces an earlier one.
    Renewed,
    /// Kept: it existed and is unchanged.
    Kept,
}

/// Formats `time` as RFC 3339, to the second; empty for times that this format cannot express.
pub fn rfc3339(time: SystemTime) -> String {
    // Checked step by step: the time may come from a peer, and `OffsetDateTime::from` panics for
    // years that it does not know.
    let seconds = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_secs()).ok(),
        Err(before) => i64::try_from(before.duration().as_secs()).ok().map(|seconds| -seconds),
    };
    let time = seconds.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    time.and_then(|time| time.format(&Rfc3339).ok()).unwrap_or_default()
}

fn serialize_time<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&rfc3339(*time))
}

fn random<const N: usize>() -> Result<[u8; N], PkiError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| PkiError::Random(error.into()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;

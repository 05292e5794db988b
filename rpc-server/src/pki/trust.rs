//! Trust as settings: the files of certificates and tokens by which servers and clients
//! authenticate each other.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::Args;
use rpc_transports::{
    Access, Certificate, CertificateError, ClientCertificates, ClientTls, CredentialFileError, Dial, ServerTls, Tokens,
};

use super::rfc3339;

/// Files by which a client authenticates servers, and itself to them.
#[derive(Args, Clone, Debug, Default)]
pub struct ClientTrust {
    /// Certificates of the authorities of servers at tls:// and quic:// addresses, as a PEM file
    #[arg(long, global = true, env = "RPC_CLI_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Certificate for servers that ask for one, as a PEM file
    #[arg(long, global = true, env = "RPC_CLI_CERT", value_name = "FILE", requires = "cert_key")]
    pub cert: Option<PathBuf>,
    /// Private key of --cert, as a PEM file
    #[arg(long, global = true, env = "RPC_CLI_CERT_KEY", value_name = "FILE", requires = "cert")]
    pub cert_key: Option<PathBuf>,
    /// File of tokens that the server knows, too, one a line. With a token the certificate of the
    /// server is not checked
    #[arg(long, global = true, env = "RPC_CLI_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Go to servers at addresses without encryption, too, if a tracker that is reached with it
    /// gives them out
    #[arg(long, global = true, env = "RPC_CLI_PLAIN_SERVERS")]
    pub plain_servers: bool,
}

impl ClientTrust {
    /// Reads the files. Blocks, shortly.
    ///
    /// # Errors
    ///
    /// A file cannot be read or used.
    pub fn dial_options(&self) -> Result<Dial, TrustError> {
        let mut options = Dial { plain_grants: self.plain_servers, ..Dial::default() };
        if let Some(file) = &self.token_file {
            options.tokens = Tokens::from_file(file)?;
        }
        let certificate = certificate(self.cert.as_deref(), self.cert_key.as_deref())?;
        options.tls = match &self.ca {
            Some(ca) => Some(ClientTls::from_file(ca, certificate)?),
            None if !options.tokens.is_empty() => {
                let tls = ClientTls::unverified(certificate);
                Some(
                    tls.map_err(|error| TrustError::certificate(self.cert.as_deref().unwrap_or(Path::new("")), error))?,
                )
            }
            None => None,
        };
        Ok(options)
    }
}

/// Files by which a server authenticates clients, and itself to them.
#[derive(Clone, Debug, Default)]
pub struct ServerTrust {
    /// The server's certificate, and those between it and its authority, as a PEM file.
    pub cert: Option<PathBuf>,
    /// The private key of `cert`, as a PEM file.
    pub cert_key: Option<PathBuf>,
    /// Certificates of the authorities that clients must have theirs from, as a PEM file.
    pub client_ca: Option<PathBuf>,
    /// A file of tokens, one a line.
    pub token_file: Option<PathBuf>,
}

/// Credentials of a server, read from its files.
#[derive(Debug)]
pub struct ServerCredentials {
    /// For listeners at `tls://` and `quic://` addresses; `None` without a certificate or tokens.
    pub tls: Option<ServerTls>,
    /// Clients that the server admits.
    pub access: Access,
    /// Time in which the server's certificate is valid. `None` for one that was made at the start.
    pub validity: Option<Range<SystemTime>>,
}

impl ServerTrust {
    /// Returns true if clients must authenticate.
    pub fn demands(&self) -> bool {
        self.client_ca.is_some() || self.token_file.is_some()
    }

    /// Returns true if encrypted addresses can be served: there is a certificate, or there are
    /// tokens, with which a certificate of its own suffices.
    pub fn shows(&self) -> bool {
        self.cert.is_some() || self.token_file.is_some()
    }

    /// Reads the files. Blocks, shortly.
    ///
    /// # Errors
    ///
    /// A file cannot be read or used.
    pub fn load(&self) -> Result<ServerCredentials, TrustError> {
        let access = self.access()?;
        let certificate = self.certificate()?;
        let validity = self.validity(certificate.as_ref());
        let tls = match certificate {
            Some(certificate) => Some(self.with_demand(|demand| ServerTls::new(certificate, demand))?),
            None => None,
        };
        Ok(ServerCredentials { tls, access, validity })
    }

    /// Reads the files again, and uses them for all later connections: `tls` gets the new
    /// certificate, and is what the result holds. If a file cannot be used, nothing changes. Blocks
    /// shortly.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn reload(&self, tls: Option<&ServerTls>) -> Result<ServerCredentials, TrustError> {
        let access = self.access()?;
        let certificate = self.certificate()?;
        let validity = self.validity(certificate.as_ref());
        if let (Some(tls), Some(certificate)) = (tls, certificate) {
            self.with_demand(|demand| tls.replace(certificate, demand))?;
        }
        Ok(ServerCredentials { tls: tls.cloned(), access, validity })
    }

    fn validity(&self, certificate: Option<&Certificate>) -> Option<Range<SystemTime>> {
        // One that is made at the start lasts longer than any server.
        certificate.filter(|_| self.cert.is_some())?.validity()
    }

    fn access(&self) -> Result<Access, TrustError> {
        let tokens = self.token_file.as_ref().map(Tokens::from_file).transpose()?.unwrap_or_default();
        Ok(Access { anonymous: !self.demands(), tokens, certificates: self.client_ca.is_some() })
    }

    fn certificate(&self) -> Result<Option<Certificate>, TrustError> {
        match certificate(self.cert.as_deref(), self.cert_key.as_deref())? {
            None if self.token_file.is_some() => self_signed().map(Some),
            given => Ok(given),
        }
    }

    fn with_demand<T>(
        &self,
        make: impl FnOnce(Option<&ClientCertificates<'_>>) -> Result<T, CertificateError>,
    ) -> Result<T, TrustError> {
        let authorities = self.client_ca.as_deref().map(read).transpose()?;
        let optional = self.token_file.is_some();
        let demand = authorities.as_deref().map(|authorities| ClientCertificates { authorities, optional });
        let about = self.client_ca.as_deref().or(self.cert.as_deref()).unwrap_or(Path::new(""));
        make(demand.as_ref()).map_err(|error| TrustError::certificate(about, error))
    }
}

/// Makes a certificate without meaning, for a server that tokens authenticate.
fn self_signed() -> Result<Certificate, TrustError> {
    let made = rcgen::generate_simple_self_signed(vec!["rpc-server.invalid".to_owned()]);
    let made = made.map_err(|error| TrustError::SelfSigned { problem: error.to_string() })?;
    let key = made.signing_key.serialize_pem();
    let certificate = Certificate::from_pem(made.cert.pem().as_bytes(), key.as_bytes());
    certificate.map_err(|error| TrustError::SelfSigned { problem: error.to_string() })
}

fn certificate(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<Certificate>, TrustError> {
    let (cert, key) = match (cert, key) {
        (Some(cert), Some(key)) => (cert, key),
        (None, None) => return Ok(None),
        (cert, _) => return Err(TrustError::Half { missing: if cert.is_none() { "--cert" } else { "--cert-key" } }),
    };
    let certificate = Certificate::from_files(cert, key)?;
    match certificate.validity() {
        // The peer would refuse it, and could not say so before the handshake.
        Some(validity) if validity.end <= SystemTime::now() => {
            Err(TrustError::Expired { file: cert.to_owned(), expired: validity.end })
        }
        _ => Ok(Some(certificate)),
    }
}

fn read(file: &Path) -> Result<Vec<u8>, TrustError> {
    fs::read(file).map_err(|source| CredentialFileError::Read { file: file.to_owned(), source }.into())
}

/// Error of certificates or tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrustError {
    /// A file cannot be read or used.
    #[error(transparent)]
    File(#[from] CredentialFileError),
    /// A certificate is given without its key, or the other way round.
    #[error("a certificate and its key go together: {missing} is missing")]
    Half {
        /// The setting that is missing.
        missing: &'static str,
    },
    /// A certificate is shown to others, and has expired.
    #[error("the certificate in {} has expired on {}; renew it (rpc-cli cert)", file.display(), rfc3339(*expired))]
    Expired {
        /// The file.
        file: PathBuf,
        /// End of the validity.
        expired: SystemTime,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate for this server: {problem}")]
    SelfSigned {
        /// The reason.
        problem: String,
    },
}

impl TrustError {
    fn certificate(file: &Path, source: CertificateError) -> Self {
        CredentialFileError::Certificate { file: file.to_owned(), source }.into()
    }
}

//! Tokens and certificates from files.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[cfg(feature = "tls")]
use super::certificates::{Certificate, CertificateError, ClientTls};
use super::identity_proofs::{TokenError, Tokens};

/// Error of a file of tokens, certificates or a private key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialFileError {
    /// A file cannot be read.
    #[error("cannot read {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file has no certificate or key, or one that does not fit.
    #[cfg(feature = "tls")]
    #[error("cannot use {}", file.display())]
    Certificate {
        /// The file.
        file: PathBuf,
        /// The problem.
        source: CertificateError,
    },
    /// A certificate and a private key do not fit each other.
    #[cfg(feature = "tls")]
    #[error("the private key in {} is not that of the certificate in {}", key.display(), chain.display())]
    Mismatch {
        /// File of the certificate.
        chain: PathBuf,
        /// File of the private key.
        key: PathBuf,
    },
    /// A file of tokens cannot be used.
    #[error("cannot use the tokens in {}", file.display())]
    Tokens {
        /// The file.
        file: PathBuf,
        /// The problem.
        source: TokenError,
    },
}

impl Tokens {
    /// Reads a file with one token a line, in the form of [`parse`](Self::parse). Logs a warning if
    /// other users can read it. Blocks, shortly.
    ///
    /// # Errors
    ///
    /// The file cannot be read, a line is malformed, or there is no token.
    pub fn from_file(file: impl AsRef<Path>) -> Result<Self, CredentialFileError> {
        let file = file.as_ref();
        warn_if_readable(file);
        let text = fs::read_to_string(file);
        let text = text.map_err(|source| CredentialFileError::Read { file: file.to_owned(), source })?;
        Self::parse(&text).map_err(|source| CredentialFileError::Tokens { file: file.to_owned(), source })
    }
}

#[cfg(feature = "tls")]
impl Certificate {
    /// Reads PEM files: one or more certificates, and one key, as [`from_pem`](Self::from_pem)
    /// does. Logs a warning if other users can read the key. Blocks, shortly.
    ///
    /// # Errors
    ///
    /// A file cannot be read or used.
    pub fn from_files(chain: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, CredentialFileError> {
        let (chain, key) = (chain.as_ref(), key.as_ref());
        warn_if_readable(key);
        Self::from_pem(&read(chain)?, &read(key)?).map_err(|error| {
            let file = match error {
                CertificateError::Mismatch => {
                    return CredentialFileError::Mismatch { chain: chain.to_owned(), key: key.to_owned() };
                }
                CertificateError::Key { .. } => key,
                _ => chain,
            };
            CredentialFileError::Certificate { file: file.to_owned(), source: error }
        })
    }
}

#[cfg(feature = "tls")]
impl ClientTls {
    /// Returns settings that trust servers with a certificate issued by one of the authorities in a
    /// PEM file: see [`new`](Self::new). Blocks, shortly.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or a certificate cannot be used.
    pub fn from_file(
        authorities: impl AsRef<Path>,
        certificate: Option<Certificate>,
    ) -> Result<Self, CredentialFileError> {
        let file = authorities.as_ref();
        Self::new(&read(file)?, certificate)
            .map_err(|source| CredentialFileError::Certificate { file: file.to_owned(), source })
    }
}

#[cfg(feature = "tls")]
fn read(file: &Path) -> Result<Vec<u8>, CredentialFileError> {
    fs::read(file).map_err(|source| CredentialFileError::Read { file: file.to_owned(), source })
}

/// Warns of secrets that other users of the machine can read.
fn warn_if_readable(file: &Path) {
    if let Ok(facts) = fs::metadata(file)
        && facts.mode() & 0o077 != 0
    {
        tracing::warn!(file = %file.display(), "other users can read or change this secret; run: chmod 600 on it");
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    const TOKEN: &str = "alice 0123456789abcdef0123456789abcdef";

    #[test]
    fn tokens_come_from_a_file_and_errors_name_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokens");
        let error = Tokens::from_file(&file).unwrap_err();
        assert!(error.to_string().starts_with("cannot read") && error.to_string().contains("tokens"), "{error}");
        fs::write(&file, format!("# a comment\n{TOKEN}\n")).unwrap();
        assert!(!Tokens::from_file(&file).unwrap().is_empty());
        fs::write(&file, "short\n").unwrap();
        let error = Tokens::from_file(&file).unwrap_err();
        assert!(matches!(error, CredentialFileError::Tokens { .. }), "{error}");
        assert!(error.source().unwrap().to_string().contains("line 1"), "{error}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_come_from_files_and_errors_name_the_one_at_fault() {
        let folder = tempfile::tempdir().unwrap();
        let [chain, key] = ["chain.pem", "key.pem"].map(|name| folder.path().join(name));
        let made = rcgen::generate_simple_self_signed(vec!["board.lan".to_owned()]).unwrap();
        fs::write(&chain, made.cert.pem()).unwrap();
        fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let certificate = Certificate::from_files(&chain, &key).unwrap();
        assert!(ClientTls::from_file(&chain, Some(certificate)).unwrap().verifies());
        for (first, second, at_fault) in [(&chain, &chain, &chain), (&key, &key, &key)] {
            let error = Certificate::from_files(first, second).unwrap_err();
            assert!(error.to_string().contains(&at_fault.display().to_string()), "{error}");
        }
        // A regression: the error named the file of the authority.
        let other = folder.path().join("other.key");
        let made = rcgen::generate_simple_self_signed(vec!["board.lan".to_owned()]).unwrap();
        fs::write(&other, made.signing_key.serialize_pem()).unwrap();
        let text = Certificate::from_files(&chain, &other).unwrap_err().to_string();
        assert!(text.contains("other.key") && text.contains("chain.pem"), "{text}");
        let error = ClientTls::from_file(&key, None).unwrap_err();
        assert!(matches!(error, CredentialFileError::Certificate { .. }), "{error}");
    }
}

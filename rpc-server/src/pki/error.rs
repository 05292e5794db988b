//! What can go wrong with certificates and tokens, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rpc_transports::{AddressError, TokenError};

use super::rfc3339;

/// What keeps certificates or tokens from being made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A token cannot be made, or not for somebody of that name.
    #[error("cannot make the token")]
    Token(#[from] TokenError),
    /// A file of tokens holds something else, or too many.
    #[error("{} cannot be added to", file.display())]
    TokenFile {
        /// The file.
        file: PathBuf,
        /// Why.
        source: TokenError,
    },
    /// Neither a name nor an address.
    #[error(
        "'{text}' is no name and no address of a host; write for example board.lan, *.lab.example, 10.0.0.5 or ::1"
    )]
    Host {
        /// What was given.
        text: String,
    },
    /// Not a key of a server.
    #[error("that cannot be the key of a server")]
    ServerKey {
        /// Why.
        source: AddressError,
    },
    /// Not a name for a client.
    #[error(
        "'{text}' cannot be the name of a client; write 1 to 64 letters, digits and any of . - _ but not 'anonymous'"
    )]
    ClientName {
        /// What was given.
        text: String,
    },
    /// There is no certificate to take the names of the server from.
    #[error("nobody has said how clients reach the server; give its names and addresses with --host")]
    NoHost,
    /// A file or folder cannot be used.
    #[error("cannot {what} {}", file.display())]
    File {
        /// What should have been done.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is there that must not be overwritten.
    #[error("{} is there already; {hint}", file.display())]
    Exists {
        /// The file.
        file: PathBuf,
        /// What to do.
        hint: &'static str,
    },
    /// Not a certificate in PEM.
    #[error("{} is no certificate; move it away, or say --force to begin anew", file.display())]
    NotACertificate {
        /// The file.
        file: PathBuf,
    },
    /// Not a key in PEM, or of a kind that cannot be used.
    #[error("{} is no private key in PKCS #8 that can be used; move it away, or say --force to begin anew", file.display())]
    NotAKey {
        /// The file.
        file: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// One file of the two that an authority is.
    #[error(
        "{} is there and {} is not; put that back, or say --force for a new authority, which nobody trusts yet",
        there.display(), missing.display()
    )]
    HalfAuthority {
        /// The file that is there.
        there: PathBuf,
        /// The one that is not.
        missing: PathBuf,
    },
    /// The certificate may not sign others.
    #[error("{} may not sign other certificates; move it away, or say --force to begin anew", file.display())]
    NotAnAuthority {
        /// The file.
        file: PathBuf,
    },
    /// Certificate and key of the authority are of different pairs.
    #[error("{} does not belong to {}; put back the right one, or say --force to begin anew", key.display(), certificate.display())]
    Mismatch {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// The authority's time is over.
    #[error("{} expired on {}; say --force for a new authority, and give its ca.pem to all", file.display(), rfc3339(*expired))]
    AuthorityExpired {
        /// Its certificate.
        file: PathBuf,
        /// When.
        expired: SystemTime,
    },
    /// A certificate that another authority has signed would be overwritten.
    #[error("{} was signed by another authority than the ca.pem beside it; move it away, or say --force to replace it", file.display())]
    Foreign {
        /// The certificate.
        file: PathBuf,
    },
    /// Keys or signatures cannot be made.
    #[error("cannot make the certificate")]
    Signing(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The system has no random numbers to give.
    #[error("cannot get random numbers from the system")]
    Random(#[source] io::Error),
}

impl PkiError {
    pub(super) fn signing(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Signing(Box::new(source))
    }

    pub(super) fn file(what: &'static str, file: &Path, source: io::Error) -> Self {
        Self::File { what, file: file.to_owned(), source }
    }
}

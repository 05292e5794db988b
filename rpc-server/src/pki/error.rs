//! Errors of making certificates and tokens, with advice.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rpc_transports::{AddressError, TokenError};

use super::rfc3339;

/// Error of making certificates or tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A token cannot be made, or its name is malformed.
    #[error("cannot make the token")]
    Token(#[from] TokenError),
    /// A file of tokens has other content or too many tokens.
    #[error("{} cannot be added to", file.display())]
    TokenFile {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: TokenError,
    },
    /// A text is neither a name nor an address.
    #[error(
        "'{text}' is no name and no address of a host; write for example board.lan, *.lab.example, 10.0.0.5 or ::1"
    )]
    Host {
        /// The text as it was given.
        text: String,
    },
    /// A text is not a key of a server.
    #[error("that cannot be the key of a server")]
    ServerKey {
        /// The reason.
        source: AddressError,
    },
    /// A text is not a name of a client.
    #[error(
        "'{text}' cannot be the name of a client; write 1 to 64 letters, digits and any of . - _ but not 'anonymous'"
    )]
    ClientName {
        /// The text as it was given.
        text: String,
    },
    /// No name was given, and there is no certificate of a server to take the names from.
    #[error("the names and addresses of the server are unknown: give them with --host")]
    NoHost,
    /// A file or folder cannot be used.
    #[error("cannot {what} {}", file.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A file exists that must not be overwritten.
    #[error("{} is there already; {hint}", file.display())]
    Exists {
        /// The file.
        file: PathBuf,
        /// The advice.
        hint: &'static str,
    },
    /// A file is not a certificate in PEM.
    #[error("{} is no certificate; move it away, or say --force to begin anew", file.display())]
    NotACertificate {
        /// The file.
        file: PathBuf,
    },
    /// A file is not a key in PEM, or a key of an unusable kind.
    #[error("{} is not a usable private key in PKCS #8: move it away, or give --force to begin anew", file.display())]
    NotAKey {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// One of the two files of an authority is missing.
    #[error(
        "{} is there and {} is not; put that back, or say --force for a new authority, which no client trusts yet",
        there.display(), missing.display()
    )]
    HalfAuthority {
        /// The existing file.
        there: PathBuf,
        /// The missing file.
        missing: PathBuf,
    },
    /// The certificate is not one of an authority.
    #[error("{} may not sign other certificates; move it away, or say --force to begin anew", file.display())]
    NotAnAuthority {
        /// The file.
        file: PathBuf,
    },
    /// Certificate and key of the authority do not match.
    #[error(
        "{} does not match {}: put the right one back, or give --force to begin anew",
        key.display(),
        certificate.display()
    )]
    Mismatch {
        /// The certificate.
        certificate: PathBuf,
        /// The key.
        key: PathBuf,
    },
    /// The authority has expired.
    #[error(
        "{} expired on {}: give --force for a new authority, and distribute its ca.pem",
        file.display(),
        rfc3339(*expired)
    )]
    AuthorityExpired {
        /// The certificate.
        file: PathBuf,
        /// Time of expiry.
        expired: SystemTime,
    },
    /// A certificate that another authority has signed would be overwritten.
    #[error(
        "{} was signed by another authority than the ca.pem beside it: move it away, or give --force to replace it",
        file.display()
    )]
    Foreign {
        /// The certificate.
        file: PathBuf,
    },
    /// Keys or signatures cannot be made.
    #[error("cannot make the certificate")]
    Signing(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The system provides no random numbers.
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

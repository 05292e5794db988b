//! Certificates that a bench makes for all of its servers.

use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{fs, io};

use rpc_server::cli::Failure;
use rpc_server::pki::CertificatePlan;
use rpc_transports::ClientTls;

/// Folder with certificates for servers at 127.0.0.1.
#[derive(Clone, Debug)]
pub(crate) struct Certificates(PathBuf);

impl Certificates {
    /// Makes certificates in `folder`.
    pub(crate) fn make(folder: PathBuf) -> Result<Self, Failure> {
        CertificatePlan::new(&folder).host("127.0.0.1".parse()?).write(SystemTime::now())?;
        Ok(Self(folder))
    }

    /// Returns the certificates that [`make`](Self::make) has made in `folder`.
    pub(crate) fn existing(folder: PathBuf) -> Self {
        Self(folder)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    pub(crate) fn authority(&self) -> PathBuf {
        self.0.join("ca.pem")
    }

    pub(crate) fn certificate(&self) -> PathBuf {
        self.0.join("server.pem")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.0.join("server.key")
    }

    /// Returns the trust of clients of the servers. Clients with the same one share QUIC
    /// connections.
    pub(crate) fn client_tls(&self) -> Result<ClientTls, Failure> {
        let failed = |error| Failure::local("cannot use the certificate authority", error);
        let authority = fs::read(self.authority()).map_err(failed)?;
        ClientTls::new(&authority, None).map_err(|error| failed(io::Error::other(error)))
    }
}

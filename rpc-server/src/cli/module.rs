//! `--module`: functions of native modules from the shell.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Seek};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use rpc_core::client::{Digest, Modules};
use rpc_core::{RemoteFunction, RemoteModule, Session};

use super::failure::Failure;
use super::output::{Output, size};
use crate::modules::hash;

#[derive(Args, Debug)]
pub(super) struct ModuleArgs {
    /// Module with the function: a local shared library, which is sent to the server unless the
    /// server has it; sha256:DIGEST of one that the server has; or remote:PATH of a file of the
    /// workspace or of the server
    #[arg(short, long, env = "RPC_CLI_MODULE", value_name = "FILE")]
    module: Option<ModuleSource>,
}

/// Source of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ModuleSource {
    /// A local file.
    Local(PathBuf),
    /// A path for the server.
    Remote(String),
}

impl FromStr for ModuleSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.strip_prefix("remote:") {
            Some(path) => Self::Remote(path.to_owned()),
            None if Digest::from_module_path(text).is_some() => Self::Remote(text.to_owned()),
            None => Self::Local(text.into()),
        })
    }
}

impl ModuleArgs {
    pub(super) fn is_given(&self) -> bool {
        self.module.is_some()
    }

    /// Loads the module, if one was given.
    pub(super) async fn load(&self, session: &Session, output: &Output) -> Result<Option<RemoteModule>, Failure> {
        let path = match &self.module {
            None => return Ok(None),
            Some(ModuleSource::Remote(path)) => path.clone(),
            Some(ModuleSource::Local(file)) => upload(session, output, file).await?.module_path(),
        };
        Ok(Some(session.load_module(&path).await?))
    }

    /// Fetches the function `name` of the module, or of the server without a module.
    pub(super) async fn find(&self, session: &Session, output: &Output, name: &str) -> Result<RemoteFunction, Failure> {
        Ok(match self.load(session, output).await? {
            Some(module) => module.function(name).await?,
            None => session.get_function(name).await?,
        })
    }
}

/// Sends a file to the server, unless the server has it.
async fn upload(session: &Session, output: &Output, file: &Path) -> Result<Digest, Failure> {
    let cannot = |error| Failure::file("cannot read", file, error);
    let mut opened = File::open(file).map_err(cannot)?;
    // The file is read twice.
    if !opened.metadata().map_err(cannot)?.is_file() {
        return Err(cannot(io::Error::other("it is no regular file")));
    }
    let (digest, len) = hash(&opened).map_err(cannot)?;
    opened.rewind().map_err(cannot)?;
    let name = file.file_name().unwrap_or(file.as_os_str()).display().to_string();
    let bar = output.progress(&name, Some(len));
    let sent = Modules::new(session).upload(digest, len, opened).progress(|bytes| bar.set_position(bytes)).await?;
    bar.finish_and_clear();
    if sent {
        output.note(&format!("{name}: {} sent as {}", size(len), digest.module_path()));
    }
    Ok(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_local_file_without_a_prefix() {
        let parse = |text: &str| text.parse::<ModuleSource>().unwrap();
        for text in ["./kernels.so", "kernels.so", "/a/sha256:b.so", "sha256", "remote"] {
            assert_eq!(parse(text), ModuleSource::Local(text.into()));
        }
        for text in [format!("sha256:{}", "a".repeat(64)), "sha256:short".to_owned()] {
            assert_eq!(parse(&text), ModuleSource::Remote(text));
        }
        assert_eq!(parse("remote:lib/a.so"), ModuleSource::Remote("lib/a.so".to_owned()));
        assert_eq!(parse("remote:/opt/a.so"), ModuleSource::Remote("/opt/a.so".to_owned()));
    }
}

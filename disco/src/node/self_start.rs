//! Starting this program again as a worker: the check that it can be, its arguments, and the
//! settings that it takes over.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

use rpc_core::{Result, RpcError, SessionLimits};
use rpc_transports::program::{self, Program};
use rpc_transports::{Address, MessageFamily, self_start};
use serde::{Deserialize, Serialize};

use crate::node::settings::NodeSettings;
use crate::weights::folders::WeightFolders;

/// The first argument of a program that is started as its own worker.
pub(crate) const WORKER: &str = "--disco-worker";

/// Settings of workers. Up to version 8 they had the version of Disco's messages, and no rights.
const SETTINGS: MessageFamily = MessageFamily::new("the settings of Disco's workers", 9);

/// Latest version whose settings of a worker do not carry it.
const LAST_WITHOUT_NUMBER: u32 = 3;

/// True once the program has called `serve_if_worker`.
static SERVES_WORKERS: AtomicBool = AtomicBool::new(false);

/// Records that this program can be started as a worker.
pub(crate) fn serves_workers() {
    SERVES_WORKERS.store(true, Ordering::Relaxed);
}

/// Returns true once `serve_if_worker` has been called: this program can be started as a worker.
pub(crate) fn can_serve_workers() -> bool {
    SERVES_WORKERS.load(Ordering::Relaxed)
}

/// Settings that the session of a worker's process takes over from that of its node: the second
/// argument of the process, as JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkerSettings {
    /// Version of [`SETTINGS`] at the node. It differs from that of the worker only if the file of
    /// the program has been replaced since the node was started.
    pub(crate) version: u32,
    pub(crate) limits: SessionLimits,
    /// Limit of the descriptors that the process opens for its session.
    pub(crate) max_open_files: u64,
    pub(crate) weights: Option<WeightFolders>,
    /// Rights of the client of the session, as text; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) access: Option<String>,
    /// Settings of the program's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) settings: Option<NodeSettings>,
}

impl WorkerSettings {
    /// Settings of sessions with these limits and files of weights, and without a limit of open
    /// files.
    pub(crate) fn new(limits: SessionLimits, weights: Option<WeightFolders>) -> Self {
        Self { version: SETTINGS.version(), limits, max_open_files: u64::MAX, weights, access: None, settings: None }
    }

    /// Settings of the session of `context`.
    ///
    /// # Errors
    ///
    /// The rights of its client cannot be passed on.
    pub(super) fn of(context: &rpc_core::Context) -> Result<Self> {
        let weights = context.extension::<WeightFolders>();
        let settings = context.extension::<NodeSettings>();
        let access = context.access_control().map(|access| {
            access.to_text().ok_or_else(|| {
                RpcError::unsupported(
                    "the rights of the session's client cannot be passed on to processes of workers: the rules for it \
                     may be too long (32 KiB for rpc-server); have workers as threads, or shorten its rules",
                )
            })
        });
        Ok(Self {
            access: access.transpose()?,
            settings: settings.map(|settings| NodeSettings::clone(&settings)),
            max_open_files: context.max_open_files(),
            ..Self::new(context.limits().clone(), weights.map(|folders| WeightFolders::clone(&folders)))
        })
    }

    /// Decodes the argument of a worker's process.
    ///
    /// # Errors
    ///
    /// Those of [`MessageFamily::check`](rpc_transports::MessageFamily::check); malformed JSON.
    pub(super) fn decode(text: &[u8]) -> Result<Self> {
        /// The one field that all versions have from 4 on.
        #[derive(Deserialize)]
        struct Versioned {
            version: Option<u32>,
        }
        let malformed = |error| RpcError::invalid_argument(format!("malformed settings of a worker: {error}"));
        let Versioned { version } = serde_json::from_slice(text).map_err(malformed)?;
        SETTINGS.check(version.unwrap_or(LAST_WITHOUT_NUMBER), "the node of this worker", "the worker")?;
        serde_json::from_slice(text).map_err(malformed)
    }
}

/// Returns this program as the address of a worker, in a session like that of a node or of no node.
///
/// # Errors
///
/// `main` has not called [`serve_if_worker`](crate::serve_if_worker), so that the child would be
/// this program from its beginning; this process is itself such a child; or the path of the program
/// is unknown.
pub(crate) fn this_program_as_worker(node: Option<&WorkerSettings>) -> Result<String> {
    if !can_serve_workers() {
        return Err(RpcError::unsupported(
            "workers as processes are this program, started again, and its `main` has not called the hook for them: \
             add the line `disco::serve_if_worker(&registry);` before everything else in `main`",
        ));
    }
    self_start::check().map_err(|error| RpcError::unsupported(error.to_string()))?;
    let program = Program::this().words().ok();
    let program =
        program.and_then(|words| words.into_iter().map(OsString::into_string).collect::<Result<Vec<_>, _>>().ok());
    let program = program.ok_or_else(|| RpcError::unsupported("where this program lies is not known"))?;
    let node = node.map(serde_json::to_string).transpose();
    let node = node.map_err(|error| RpcError::internal(format!("its settings cannot be written: {error}")))?;
    let words = program.iter().map(String::as_str).chain([WORKER]).chain(node.as_deref());
    let address = Address::exec(words).map_err(|error| RpcError::invalid_argument(error.to_string()))?;
    Ok(address.to_string())
}

/// Returns the settings that this process takes over from its node, if it was started as a worker
/// of one.
pub(crate) fn settings_of_this_process() -> Option<Result<WorkerSettings>> {
    let mut args = program::args().skip(1);
    args.next().filter(|first| first == WORKER)?;
    // Arguments that are not UTF-8 are no JSON either, and refused as that.
    args.next().map(|text| WorkerSettings::decode(text.as_encoded_bytes()))
}

impl NodeSettings {
    /// Returns the settings of this process; `None` if it is not that of a worker, or its node has
    /// handed nothing down.
    pub fn of_this_process() -> Option<Self> {
        settings_of_this_process()?.ok()?.settings
    }
}

#[cfg(test)]
mod tests {
    use rpc_core::ErrorKind;

    use super::*;

    #[test]
    fn settings_of_another_version_are_refused_in_words() {
        let own = || WorkerSettings::new(SessionLimits::default(), None);
        let ours = SETTINGS.version();
        let of_version = |version| serde_json::to_vec(&WorkerSettings { version, ..own() }).unwrap();
        for (text, version, older) in [
            (of_version(ours + 1), ours + 1, "the worker"),
            // A worker of the last version without rights would serve with all of them.
            (of_version(8), 8, "the node of this worker"),
            (b"{}".to_vec(), LAST_WITHOUT_NUMBER, "the node of this worker"),
        ] {
            let error = WorkerSettings::decode(&text).unwrap_err();
            let expected = format!(
                "the node of this worker speaks version {version} of the settings of Disco's workers, and the worker \
                 version {ours}: update {older}"
            );
            assert_eq!((error.kind(), error.message()), (ErrorKind::VersionMismatch, expected.as_str()));
        }
        let mut unknown = serde_json::to_value(own()).unwrap();
        unknown["unknown"] = "{}".into();
        let error = WorkerSettings::decode(unknown.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        WorkerSettings::decode(&serde_json::to_vec(&own()).unwrap()).unwrap();
        assert_eq!(WorkerSettings::decode(b"x").unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

//! The functions that every server offers, under names that begin with `rpc.`.
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `rpc.echo` | anything | its first argument, or null |
//! | `rpc.sleep` | seconds | null, later |
//! | `rpc.noop` | anything | null; of the default kind, to measure what that costs |
//! | `rpc.new_object` | | a new object without content |
//! | `rpc.functions` | true for descriptions | a list of lists: name, signature, description |
//! | `rpc.info` | | [`ServerInfo`], packed |
//! | `rpc.can` | text of a [`Permission`] | [`Answer`](crate::policy::Answer), packed |
//! | `rpc.time_function` | those of [`time_function`] | seconds per call, a list |
//! | `rpc.trace.clock` | | nanoseconds by a clock of the process |
//! | `rpc.trace.call` | function, its arguments | its result, and its begin and end by that clock |
//! | `rpc.file.begin_write` | path, length or null | a writer |
//! | `rpc.file.write` | writer, offset, bytes | null |
//! | `rpc.file.commit`, `rpc.file.abort` | writer | null |
//! | `rpc.file.open` | path | a reader and the length in bytes |
//! | `rpc.file.read` | reader, offset, length (≤ [`MAX_READ_BYTES`]) | bytes, fewer at the end |
//! | `rpc.file.ls` | folder | a list of [`FileEntry`](rpc_core::client::FileEntry), packed |
//! | `rpc.file.rm` | path | null |
//! | `rpc.file.set_executable` | path, bool | null |
//! | `rpc.file.folders` | | a list of paths, packed |
//! | `rpc.file.create_folder` | path | null |
//! | `rpc.file.path` | path, empty for the folder | its absolute path, for code in the session |
//! | `rpc.file.digest` | path | SHA-256, in hexadecimal digits |
//! | `rpc.file.prefix_digest` | reader, length | SHA-256 of the beginning |
//! | `rpc.file.cache_limit` | | bytes that the cache of files may hold, 0 if there is none |
//! | `rpc.file.from_cache` | SHA-256, length, path, executable | true if the cache had the file |
//! | `rpc.file.to_cache` | path | SHA-256; null if there is no room for the file |
//! | `rpc.file.tensor_from_cache` | SHA-256, tensor | true if the cache had the content |
//! | `rpc.file.tensor_to_cache` | tensor | SHA-256; null if there is no room for the content |
//! | `rpc.lease.request` | device, priority, maximum milliseconds or null | a request for a lease |
//! | `rpc.lease.wait` | request | microseconds waited, and left, once it is granted |
//! | `rpc.lease.ahead` | request | number of requests that are granted before |
//! | `rpc.lease.release` | request | microseconds held; null if it was not granted |
//! | `rpc.lease.status` | | a list of [`LeasedDevice`], packed |
//! | `rpc.listen.open` | address | a listener, and the address with its port |
//! | `rpc.listen.accept` | listener | a connection, and the text of its peer, once one comes |
//! | `rpc.listen.read` | connection | bytes, once there are any; null at the end |
//! | `rpc.listen.write` | connection, bytes | null, once the socket has taken all |
//! | `rpc.listen.finish` | connection | null; the peer reads the end |
//! | `rpc.logs.read` | first line and milliseconds to wait, or null | [`LogPage`], packed |
//! | `rpc.disco.sessions` | | a list of [`HostReport`](disco::HostReport), packed |
//! | `rpc.module.find` | digest | whether the server has that [module](crate::modules) |
//! | `rpc.module.begin_upload` | digest, length | an upload |
//! | `rpc.module.write` | upload, offset, bytes, in order | null |
//! | `rpc.module.commit` | upload | null |
//! | `rpc.module.import` | path in the workspace, or absolute at the server | the digest |
//! | `rpc.module.link` | path of object files, path of the library that they become | null |
//! | `rpc.module.add_import` | module, module whose functions it gets beside its own | null |
//! | `rpc.module.own_function` | module, name | its function, and none of its imports |
//! | `rpc.module.import_tensor` | digest, a tensor whose bytes are the module | null |
//! | `rpc.module.functions` | module, of any kind | a list of pairs: name, signature |
//! | `rpc.peer.offer` | tensor, offset, length, terms | an offer, addresses, and a capability |
//! | `rpc.peer.withdraw` | offer | true if a peer has used it |
//! | `rpc.peer.send` | tensor, offset, length, offer | true and address, or false and reason |
//! | `rpc.run.start` | [`RunRequest`](rpc_core::client::RunRequest), packed | a running program |
//! | `rpc.run.read` | program | number of a stream (1 or 2) and bytes, or null at the end |
//! | `rpc.run.wait` | program | [`RunStatus`](rpc_core::client::RunStatus), packed, at its end |
//! | `rpc.run.write` | program, bytes for standard input | the number of bytes taken |
//! | `rpc.run.close_input`, `rpc.run.terminate` | program | null |
//!
//! [`Permission`]: rpc_core::Permission
//!
//! Writers, readers, uploads, requests, programs, listeners, connections and offers are objects of
//! the session and go with it.
//! [`rpc_core::client::Files`] is the client of the file functions, [`rpc_core::client::Modules`]
//! that of those for modules, which refuse without `--allow-modules`. With them comes the module
//! loader `tvm_ffi`. [`Session::lease`](rpc_core::Session::lease) is the client of `rpc.lease.*`.
//! [`rpc_core::client::RemoteCommand`] is the client of `rpc.run.*`, which refuse without
//! `--allow-run`, and [`Session::listen`](rpc_core::Session::listen) that of `rpc.listen.*`, which
//! refuse without `--allow-listen`. [`Session::send`](rpc_core::Session::send) is the client of
//! `rpc.peer.*`, of which `rpc.peer.send` connects nowhere without `--allow-peer`. `rpc.logs.read`
//! refuses without `--allow-logs`, which is the default with `--policy`. The functions of Disco
//! nodes, `disco.*`, refuse without `--allow-disco` where clients need not prove who they are.

mod disco_sessions;
mod file_cache;
mod files;
mod info;
mod leases;
mod listen;
mod logs;
mod modules;
mod peer;
mod run;
mod timing;
mod trace;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::function::Rest;
use rpc_core::{Context, ErrorKind, LocalValue, Registry, RpcError, Shared, Signature, Value};

use crate::config::ServeConfig;

pub use crate::leases::{LeaseClient, LeasedDevice, WaitingLease};
pub use crate::recent_logs::LogPage;
pub(crate) use disco_sessions::DISCO_SESSIONS;
pub use files::MAX_READ_BYTES;
pub(crate) use files::workspace;
pub(crate) use info::device_info;
pub use info::{DeviceInfo, ModulesInfo, SendsInfo, ServerInfo};
pub(crate) use listen::ListenQuota;
pub(crate) use logs::READ_LOGS;
pub use timing::{TimeOptions, time_function};
pub(crate) use trace::{TRACE_CALL, TRACE_CLOCK};

/// Interval at which a sleeping call checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(20);

/// Adds the functions of this module to `registry`, replacing functions of the same names.
pub fn register(registry: &Registry) {
    registry
        .add_inline("rpc.echo", |value: Option<LocalValue>, _: Rest| value.unwrap_or(Value::Null))
        .add_async("rpc.sleep", sleep)
        .add("rpc.noop", |_: Rest| ())
        .add_inline("rpc.new_object", || Shared(Arc::new(Blank)))
        .add_inline("rpc.functions", |context: Context, describe: Option<bool>| {
            let description = |name: &str| {
                let function = context.function(name).ok()?;
                Some(function.description().unwrap_or_default().to_owned())
            };
            let entry = |(name, signature): (String, Signature)| {
                let described = (describe == Some(true)).then(|| description(&name).unwrap_or_default());
                [name, signature.to_string()].into_iter().chain(described).collect::<Vec<_>>()
            };
            context.functions().into_iter().map(entry).collect::<Vec<_>>()
        });
    info::register(registry);
    timing::register(registry);
    files::register(registry);
    file_cache::register(registry);
    leases::register(registry);
    listen::register(registry);
    logs::register(registry);
    modules::register(registry);
    peer::register(registry);
    run::register(registry);
    disco_sessions::register(registry);
    trace::register(registry);
}

/// Adds the functions of a Disco node to `registry`, or those that refuse controllers.
pub(crate) fn register_disco(registry: &Registry, config: &ServeConfig) {
    if config.allow_disco == Some(true) {
        disco::register(registry);
    } else {
        disco::refuse(
            registry,
            "this server serves no controllers of Disco: its operator has switched that off, or has not given \
             --allow-disco where clients need not prove who they are",
        );
    }
}

/// Adds the functions by which TVM's own programs check a server to `registry`, if the operator has
/// asked for them.
pub(crate) fn register_tvm_self_test(registry: &Registry, config: &ServeConfig) {
    #[cfg(feature = "tvm")]
    if config.tvm_self_test {
        crate::tvm::self_test::register(registry);
    }
    // A build without the protocol refuses the setting.
    #[cfg(not(feature = "tvm"))]
    let _ = (registry, config);
}

/// Object without content, made by `rpc.new_object`.
struct Blank;

async fn sleep(context: Context, seconds: f64) -> rpc_core::Result<()> {
    let length = Duration::try_from_secs_f64(seconds)
        .map_err(|_| RpcError::invalid_argument(format!("cannot sleep for {seconds} seconds")))?;
    // A time that no clock can express is never reached.
    let end = Instant::now().checked_add(length);
    // Without a runtime the future has a thread of its own, and may block it.
    let in_runtime = tokio::runtime::Handle::try_current().is_ok();
    loop {
        if context.is_cancelled() {
            return Err(cancelled());
        }
        let left = end.map_or(CANCEL_CHECK, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Ok(());
        }
        let step = left.min(CANCEL_CHECK);
        if in_runtime { tokio::time::sleep(step).await } else { std::thread::sleep(step) }
    }
}

/// Runs `work`, which may take for ever, and stops it on cancellation. Looks for that at each
/// `interval`. Needs a tokio runtime.
async fn cancellable<T>(
    context: &Context,
    interval: Duration,
    work: impl Future<Output = rpc_core::Result<T>>,
) -> rpc_core::Result<T> {
    let watch = async {
        let mut ticks = tokio::time::interval(interval);
        while !context.is_cancelled() {
            ticks.tick().await;
        }
    };
    tokio::select! {
        biased;
        outcome = work => outcome,
        () = watch => Err(cancelled()),
    }
}

/// Returns the error of a cancelled function.
pub(crate) fn cancelled() -> RpcError {
    RpcError::new(ErrorKind::Cancelled, "no caller waits for the result any more")
}

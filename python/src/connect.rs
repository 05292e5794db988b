//! Opening sessions.

use std::path::PathBuf;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rpc_core::{RpcError, VirtualDevice};
use rpc_server::cli::resolve_named_servers;
use rpc_server::pki::trust::ClientTrust;
use rpc_transports::tracker::ServerRequest;
use rpc_transports::{Connector, RetryPolicy};

use crate::functions::runtime;
use crate::operation::{Operation, seconds, use_threads};
use crate::session::Session;

/// Terms on which requests are repeated: attempts, first and longest pause in seconds, and names of
/// idempotent functions.
type RetryTerms = (u32, f64, f64, Vec<String>);

/// Opens a session. `options` are those of `tensor_rpc.connect`. With `retry` it repeats requests.
#[pyfunction]
#[pyo3(signature = (address, options, retry = None))]
pub(crate) fn connect(address: String, options: &Bound<'_, PyDict>, retry: Option<RetryTerms>) -> PyResult<Operation> {
    let (connector, address) = connector(address, options)?;
    use_threads()?;
    let retry = match retry {
        Some((attempts, first, longest, idempotent)) => {
            let policy = RetryPolicy::default().attempts(attempts).pauses(seconds(first)?, seconds(longest)?);
            // The attempts are tasks of this runtime.
            Some((policy.idempotent(idempotent), runtime()?))
        }
        None => None,
    };
    let work = async move {
        // The dialling itself blocks a thread of its own, so that neither an event loop nor Ctrl-C
        // waits for it.
        let (send, receive) = tokio::sync::oneshot::channel();
        let dialled = address.clone();
        let dial = move || {
            let session = match retry {
                Some((policy, runtime)) => runtime.block_on(connector.connect_retrying(dialled.as_str(), policy)),
                None => connector.connect_blocking(dialled.as_str()),
            };
            let _ = send.send(session.map_err(|error| error.into_rpc_error()));
        };
        std::thread::Builder::new()
            .name("rpc-connect".to_owned())
            .spawn(dial)
            .map_err(|error| RpcError::internal(format!("no thread can be started: {error}")))?;
        let session = receive.await.map_err(|_| RpcError::internal("the thread that connects has ended"))??;
        Ok((session, address))
    };
    Ok(Operation::new(work, |py, form, (session, address)| {
        let native = Bound::new(py, Session::of(session, address))?;
        form.wrap(py, "Session", native.into_any()).map(Bound::unbind)
    }))
}

/// Returns a connector with the options of `tensor_rpc.connect`, and the address to connect to.
pub(crate) fn connector(mut address: String, options: &Bound<'_, PyDict>) -> PyResult<(Connector, String)> {
    let mut connector = Connector::new().transports(rpc_server::transports());
    let mut trust = ClientTrust::default();
    let mut via = Vec::new();
    let mut config: Option<PathBuf> = None;
    let (mut connect_timeout, mut keep_alive) = (None, None);
    let mut wanted: Option<ServerRequest> = None;
    for (name, value) in options {
        if value.is_none() {
            continue;
        }
        let name: String = name.extract()?;
        let seconds = || seconds(value.extract()?);
        match name.as_str() {
            "via" => via = value.extract()?,
            "config" => config = Some(value.extract()?),
            "connect_timeout" => connect_timeout = Some(seconds()?),
            "token_file" => trust.token_file = Some(value.extract()?),
            "ca" => trust.ca = Some(value.extract()?),
            "cert" => trust.cert = Some(value.extract()?),
            "cert_key" => trust.cert_key = Some(value.extract()?),
            "labels" => {
                let labels = value.try_iter()?.map(|label| label?.extract::<(String, String)>());
                for label in labels {
                    let (name, value) = label?;
                    wanted = Some(wanted.unwrap_or_else(ServerRequest::any).label(&name, &value));
                }
            }
            "devices" => {
                for device in value.extract::<Vec<String>>()? {
                    let device: VirtualDevice =
                        device.parse().map_err(|error: RpcError| PyValueError::new_err(error.message().to_owned()))?;
                    wanted = Some(wanted.unwrap_or_else(ServerRequest::any).virtual_device(device));
                }
            }
            "key" => connector = connector.key(&value.extract::<String>()?),
            "workspace" => connector = connector.workspace(&value.extract::<String>()?),
            "queue_timeout" => connector = connector.queue_timeout(seconds()?),
            "tracker_outage" => connector = connector.tracker_outage(seconds()?),
            "keep_alive" => keep_alive = Some(seconds()?),
            "spin" => connector = connector.spin(seconds()?),
            "shared_memory" => connector = connector.shared_memory(value.extract()?),
            other => return Err(PyTypeError::new_err(format!("connect has no option {other:?}"))),
        }
    }
    let named = resolve_named_servers(&mut address, &mut via, &mut trust, config.as_deref())
        .map_err(|error| PyValueError::new_err(chain(&error)))?;
    // This replaces all options of the link, so that it comes before those.
    let dial = trust.dial_options().map_err(|error| PyValueError::new_err(chain(&error)))?;
    connector = connector.dial(dial);
    if let Some(interval) = keep_alive {
        connector = connector.keep_alive(interval);
    }
    if let Some(limit) = connect_timeout.or(named) {
        connector = connector.connect_timeout(limit).handshake_timeout(limit);
    }
    if let Some(wanted) = wanted {
        connector = connector.server_request(wanted);
    }
    Ok((via.iter().fold(connector, |connector, hop| connector.via(hop)), address))
}

/// Returns an error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

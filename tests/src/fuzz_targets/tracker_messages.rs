//! Calls to a tracker's functions with any bytes as their messages.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{LocalSession, Packed, Registry, RemoteObject, Result, Session, Value};
use rpc_server::tracker::{Tracker, TrackerOptions};
use rpc_transports::TokioSpawner;
use rpc_transports::tracker::functions;

use super::{runtime, split};
use crate::simulated_network::{Conditions, SimulatedNetwork};

/// A history of a tracker: calls, each with the number of its kind and its message in front.
///
/// After the session has ended, the tracker holds nothing of it.
pub fn tracker_messages(input: &[u8]) {
    runtime().block_on(history(input));
}

async fn history(mut input: &[u8]) {
    let conditions = Conditions { delay: Duration::ZERO, jitter: Duration::ZERO, loss: 0 };
    let transports = SimulatedNetwork::new(1, conditions).host("tracker");
    let allow_advertise = vec!["sim://*".to_owned()];
    let tracker = Tracker::new(TrackerOptions { allow_advertise, transports, ..TrackerOptions::default() });
    let registry = Registry::new();
    tracker.register(&registry);
    let local = LocalSession::builder(registry).spawner(Arc::new(TokioSpawner::current())).build();
    let session = Session::new(local);
    let (mut servers, mut claims) = (Vec::new(), Vec::new());
    while let Some((kind, rest)) = input.split_first() {
        let (message, rest) = split(rest);
        input = rest;
        let message = Packed::from_bytes(message.to_vec().into());
        // A refusal is as good an answer as any other.
        let _ = call(&session, kind % 8, message, &mut servers, &mut claims).await;
    }
    drop((servers, claims, session));
    let summary = tracker.summary();
    assert!(summary.servers.is_empty(), "servers are left: {:?}", summary.servers);
    assert!(summary.queue.is_empty(), "requests are left: {:?}", summary.queue);
}

async fn call(
    session: &Session,
    kind: u8,
    message: Packed,
    servers: &mut Vec<RemoteObject>,
    claims: &mut Vec<RemoteObject>,
) -> Result<()> {
    match kind {
        0 => {
            let register = session.get_function(functions::REGISTER).await?;
            let (server, _): (RemoteObject, Packed) = register.call((message,)).await?;
            servers.push(server);
        }
        1 => {
            let renew = session.get_function(functions::RENEW).await?;
            if let Some(server) = servers.last() {
                let _: Value = renew.call((server, message)).await?;
            }
        }
        2 => {
            let request = session.get_function(functions::REQUEST).await?;
            claims.push(request.call((message,)).await?);
        }
        3 => {
            let give_back = session.get_function(functions::GIVE_BACK).await?;
            if let Some(claim) = claims.last() {
                give_back.call::<()>((claim, message)).await?;
            }
        }
        4 => drop(servers.pop()),
        5 => drop(claims.pop()),
        6 => {
            let wait = session.get_function(functions::WAIT).await?;
            if let Some(claim) = claims.last() {
                // Concurrent: it lasts until the claim is freed, and others go on meanwhile.
                let granted = wait.call::<Value>((claim,)).concurrent();
                let _ = tokio::time::timeout(Duration::from_secs(1), granted).await;
            }
        }
        _ => tokio::time::sleep(Duration::from_secs(8)).await,
    }
    Ok(())
}

//! Probes of our own sessions.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use rpc_core::{DataType, Device, Pending, RemoteFunction, RemoteObject, Session};
use rpc_server::cli::{Failure, close};
use rpc_transports::Connector;
use tokio::runtime::Runtime;

use super::probe::{Probe, rate, timed};

/// Returns a probe of round trips of the function `name`, one after the other, in µs.
pub(super) fn calls(runtime: &Rc<Runtime>, session: &Session, name: &str) -> Result<Probe, Failure> {
    let runtime = runtime.clone();
    let function = runtime.block_on(session.get_function(name).into_future())?;
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                small_call(&function).await?;
                samples.push(timed(start));
            }
            Ok(samples)
        })
    }))
}

fn small_call(function: &RemoteFunction) -> Pending<rpc_core::Value> {
    function.call((7,)).start()
}

/// Returns a probe as [`calls`] does, with a client that works on the caller's thread.
pub(super) fn blocking_calls(connector: &Connector, address: &str) -> Result<Probe, Failure> {
    let session = connector.connect_blocking(address).map_err(Failure::Connect)?;
    let echo = session.get_function("rpc.echo").wait()?;
    Ok(Box::new(move |count| {
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            small_call(&echo).wait()?;
            samples.push(timed(start));
        }
        Ok(samples)
    }))
}

/// Number of calls in flight.
pub(super) const WINDOW: usize = 64;

/// Returns a probe of calls per second with [`WINDOW`] of them in flight. A sample is `batch`
/// calls.
pub(super) fn pipelined(runtime: &Rc<Runtime>, session: &Session, batch: usize) -> Result<Probe, Failure> {
    let runtime = runtime.clone();
    let echo = runtime.block_on(session.get_function("rpc.echo").into_future())?;
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                let mut window = VecDeque::with_capacity(WINDOW);
                for _ in 0..batch {
                    if window.len() == WINDOW
                        && let Some(oldest) = window.pop_front()
                    {
                        let pending: Pending<rpc_core::Value> = oldest;
                        pending.await?;
                    }
                    window.push_back(small_call(&echo));
                }
                for pending in window {
                    pending.await?;
                }
                samples.push(rate(batch, start));
            }
            Ok(samples)
        })
    }))
}

/// Returns a probe of objects created and dropped per second, with [`WINDOW`] creations in flight.
/// A sample is `batch` objects.
pub(super) fn object_churn(runtime: &Rc<Runtime>, session: &Session, batch: usize) -> Result<Probe, Failure> {
    let runtime = runtime.clone();
    let new = runtime.block_on(session.get_function("rpc.new_object").into_future())?;
    let echo = runtime.block_on(session.get_function("rpc.echo").into_future())?;
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                let mut window: VecDeque<Pending<RemoteObject>> = VecDeque::with_capacity(WINDOW);
                for _ in 0..batch {
                    if window.len() == WINDOW
                        && let Some(oldest) = window.pop_front()
                    {
                        drop(oldest.await?);
                    }
                    window.push_back(new.call(()).start());
                }
                for pending in window {
                    drop(pending.await?);
                }
                // Requests are executed in order, so the last object has been freed when this call
                // returns.
                small_call(&echo).await?;
                samples.push(rate(batch, start));
            }
            Ok(samples)
        })
    }))
}

/// Returns a probe of the time to open a session, in µs.
pub(super) fn connects(runtime: &Rc<Runtime>, connector: &Connector, address: &str) -> Probe {
    let (runtime, connector, address) = (runtime.clone(), connector.clone(), address.to_owned());
    Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                let session = connector.connect(&address).await.map_err(Failure::Connect)?;
                samples.push(timed(start));
                close(&session).await;
            }
            Ok(samples)
        })
    })
}

/// Returns a probe of copies into a tensor, in GB/s.
pub(super) fn copies_to(runtime: &Rc<Runtime>, session: &Session, data: Bytes) -> Result<Probe, Failure> {
    let (runtime, session) = (runtime.clone(), session.clone());
    let tensor = runtime.block_on(session.alloc(Device::cpu(), DataType::U8, &[data.len() as i64]).into_future())?;
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                session.copy_to_remote(&tensor, data.clone()).await?;
                samples.push(rate(data.len(), start) / 1e9);
            }
            Ok(samples)
        })
    }))
}

/// Returns a probe of copies out of a tensor into one buffer that is reused, in GB/s.
pub(super) fn copies_from(runtime: &Rc<Runtime>, session: &Session, len: usize) -> Result<Probe, Failure> {
    let (runtime, session) = (runtime.clone(), session.clone());
    let tensor = runtime.block_on(session.alloc(Device::cpu(), DataType::U8, &[len as i64]).into_future())?;
    let mut buffer = BytesMut::new();
    Ok(Box::new(move |count| {
        runtime.block_on(async {
            let mut samples = Vec::with_capacity(count);
            for _ in 0..count {
                let start = Instant::now();
                buffer = session.copy_from_remote_into(&tensor, None, std::mem::take(&mut buffer)).await?;
                samples.push(rate(len, start) / 1e9);
            }
            Ok(samples)
        })
    }))
}

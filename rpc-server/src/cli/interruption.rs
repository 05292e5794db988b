//! Signals that ask the tool to end.

use std::process;
use std::thread;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::failure::Failure;
use super::runtime;

/// Time for a command to end by itself. It may not be able to: a read of a terminal, or a write to
/// a full pipe, keeps its thread.
const GRACE: Duration = Duration::from_secs(1);

/// SIGINT and SIGTERM, once one of them has come.
#[derive(Clone, Debug)]
pub(super) struct Interruption(watch::Receiver<Option<i32>>);

impl Interruption {
    /// Waits for the signals from now on, on a thread of its own, which exits the process a second
    /// after the first one.
    ///
    /// # Errors
    ///
    /// The system refuses the thread.
    pub(super) fn listen() -> Result<Self, Failure> {
        let (tell, told) = watch::channel(None);
        let listen = move || {
            let Ok(runtime) = runtime() else { return };
            let Ok(number) = runtime.block_on(end_signal()) else { return };
            _ = tell.send(Some(number));
            thread::sleep(GRACE);
            process::exit(Failure::Interrupted(number).exit_code().into());
        };
        let started = thread::Builder::new().name("rpc-cli-signals".into()).spawn(listen);
        started.map_err(|error| Failure::local("cannot start a thread", error))?;
        Ok(Self(told))
    }

    /// Returns an interruption as by SIGINT, and what triggers it.
    pub(super) fn manual() -> (impl Fn(), Self) {
        let (tell, told) = watch::channel(None);
        let trigger = move || _ = tell.send(Some(SignalKind::interrupt().as_raw_value()));
        (trigger, Self(told))
    }

    /// Waits for the first signal. Returns the failure that says so.
    pub(super) async fn wait(&self) -> Failure {
        let mut told = self.0.clone();
        match told.wait_for(Option::is_some).await.map(|number| *number) {
            Ok(Some(number)) => Failure::Interrupted(number),
            // Without the thread the signals kill the process.
            _ => std::future::pending().await,
        }
    }
}

/// Returns the failure of what SIGINT has ended.
pub(super) fn interrupted() -> Failure {
    Failure::Interrupted(SignalKind::interrupt().as_raw_value())
}

/// Waits for a signal that asks to end. Returns its number.
async fn end_signal() -> std::io::Result<i32> {
    let (interrupt, terminate) = (SignalKind::interrupt(), SignalKind::terminate());
    let (mut interrupted, mut terminated) = (signal(interrupt)?, signal(terminate)?);
    tokio::select! {
        _ = interrupted.recv() => Ok(interrupt.as_raw_value()),
        _ = terminated.recv() => Ok(terminate.as_raw_value()),
    }
}

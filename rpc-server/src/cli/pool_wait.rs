//! The wait for a server of a tracker: what it waits for and why, on a terminal and in time-outs.

use std::convert::Infallible;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::Session;
use rpc_transports::tracker::{Loan, ServerRequest, TrackerClient};
use rpc_transports::{Address, ConnectError, Connector};
use tokio::time::Instant;

use super::failure::Failure;
use super::output::Output;
use super::tracker_pool::{PoolVerdict, look_for};

/// Time after which the tracker is first asked for the reason of the wait. Most servers are given
/// out sooner.
const FIRST_QUESTION: Duration = Duration::from_millis(500);

/// Time after which people are told that they wait.
const UNNOTICED: Duration = Duration::from_secs(1);

/// Time between two questions, and longest time for an answer.
const INTERVAL: Duration = Duration::from_secs(2);

/// Longest wait without a time limit while the tracker has no server that suits.
const NO_SERVER_LIMIT: Duration = Duration::from_secs(60);

/// Reason of the present wait, shared by the command and its time limit.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitReason(Arc<Mutex<Option<String>>>);

impl WaitReason {
    /// Returns the reason, if the command waits for a server.
    pub(super) fn get(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, reason: Option<String>) {
        *self.0.lock() = reason;
    }
}

/// Request for a server of a tracker.
pub(super) struct PoolRequest<'a> {
    /// Address of the servers, as it was given.
    pub(super) address: &'a Address,
    /// Address of the tracker itself.
    pub(super) tracker: Address,
    pub(super) wanted: ServerRequest,
    pub(super) limit: Option<Duration>,
}

impl PoolRequest<'_> {
    /// Opens a session with a server that the tracker gives out. Tells what it waits for meanwhile,
    /// and keeps that in `reason`.
    ///
    /// # Errors
    ///
    /// [`Failure::NoServer`] without a limit, if no server that suits has been registered for a
    /// while; and those of connecting.
    pub(super) async fn connect(
        &self,
        connector: &Connector,
        reason: &WaitReason,
        output: &Output,
    ) -> Result<Session, Failure> {
        let asking = connector.clone().server_request(self.patient_request());
        self.report_until(asking.connect(self.address), connector, reason, output).await
    }

    /// Borrows a server from the tracker, as [`connect`](Self::connect) does.
    ///
    /// # Errors
    ///
    /// As there.
    pub(super) async fn borrow(
        &self,
        connector: &Connector,
        reason: &WaitReason,
        output: &Output,
    ) -> Result<Loan, Failure> {
        let loan = async {
            let client = TrackerClient::connect_with(connector.clone(), &self.tracker).await?;
            Ok(client.request(&self.patient_request()).await?)
        };
        self.report_until(loan, connector, reason, output).await
    }

    /// Returns the request without a time limit for servers that do not come: the command says more
    /// than the tracker then.
    fn patient_request(&self) -> ServerRequest {
        self.wanted.clone().unservable_timeout(Duration::MAX)
    }

    /// Tells the reason of the wait until `granted` is ready.
    async fn report_until<T>(
        &self,
        granted: impl Future<Output = Result<T, ConnectError>>,
        connector: &Connector,
        reason: &WaitReason,
        output: &Output,
    ) -> Result<T, Failure> {
        let outcome = tokio::select! {
            biased;
            granted = granted => granted.map_err(Failure::Connect),
            given_up = self.report(connector, reason, output) => match given_up {
                Ok(never) => match never {},
                Err(failure) => Err(failure),
            },
        };
        reason.set(None);
        outcome
    }

    /// Asks the tracker for the reason of the wait, again and again, and tells it.
    async fn report(&self, connector: &Connector, reason: &WaitReason, output: &Output) -> Result<Infallible, Failure> {
        let (began, first) = (Instant::now(), self.limit.map_or(FIRST_QUESTION, |limit| FIRST_QUESTION.min(limit / 4)));
        tokio::time::sleep(first).await;
        let line = WaitLine { bar: output.spinner(), output };
        let (mut client, mut without_server, mut is_told) = (None, None, false);
        loop {
            let (text, verdict) = match tokio::time::timeout(INTERVAL, self.ask(connector, &mut client)).await {
                Ok(Ok(PoolVerdict::Available(detail))) => (detail, None),
                Ok(Ok(PoolVerdict::Missing { detail, advice })) => (detail.clone(), Some((detail, advice))),
                Ok(Err(error)) => (format!("the tracker cannot be asked: {}", error.message()), None),
                Err(_) => ("the tracker does not answer".to_owned(), None),
            };
            reason.set(Some(text.clone()));
            if began.elapsed() < UNNOTICED {
                tokio::time::sleep_until(began + UNNOTICED).await;
            }
            line.tell(&format!("waiting for a server of {}: {text}", self.tracker), &mut is_told);
            match verdict {
                Some((detail, advice)) => {
                    let since = *without_server.get_or_insert(began);
                    if self.limit.is_none() && since.elapsed() >= NO_SERVER_LIMIT {
                        return Err(Failure::NoServer { detail, advice, limit: NO_SERVER_LIMIT });
                    }
                }
                None => without_server = Some(Instant::now()),
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn ask(&self, connector: &Connector, client: &mut Option<TrackerClient>) -> rpc_core::Result<PoolVerdict> {
        let asked = match client {
            Some(client) => client.clone(),
            None => TrackerClient::connect_with(connector.clone(), &self.tracker).await?,
        };
        let summary = client.insert(asked).summary().await?;
        Ok(look_for(&summary, &self.wanted))
    }
}

/// Line on which a wait is shown: on a terminal it changes, elsewhere it is printed once.
struct WaitLine<'a> {
    bar: indicatif::ProgressBar,
    output: &'a Output,
}

impl WaitLine<'_> {
    fn tell(&self, text: &str, is_told: &mut bool) {
        if io::stderr().is_terminal() {
            self.bar.set_message(rpc_core::printable_line(text).into_owned());
            self.bar.tick();
        } else if !*is_told {
            self.output.note(text);
        }
        *is_told = true;
    }
}

impl Drop for WaitLine<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

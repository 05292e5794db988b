//! The client of a tracker: asks for servers, opens sessions with them, and retries after failures
//! that may pass.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{ErrorKind, Fault, Pack, Packed, RemoteObject, Result, RpcError, Session};
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::TICKET_REFUSED;
use super::messages::{Drain, Grant, Kick, MESSAGES, Returned, ServerRequest, Summary, functions};
use crate::address::{Address, AddressError, ToAddress};
use crate::backoff::Backoff;
use crate::connect::{ConnectError, Connector, Hop, Tunnel};
use crate::runtime::run_in_background;

/// Number of unreachable servers that are tried, one after the other, for a request without a time
/// limit.
const ATTEMPTS: u32 = 8;

/// Number of servers that `request_and_run` may lose before it gives up.
const RUNS: u32 = 5;

/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Time to wait for the tracker after the end of a time limit: its own error says more about the
/// cause.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// A client of one tracker. Cheap to clone; clones share a session with it.
///
/// When the tracker goes away and comes back, for example after a restart, waiting requests are
/// repeated automatically, for as long as [`Connector::tracker_outage`] says. Requests that no
/// servers could serve end, too: [`ServerRequest::unservable_timeout`].
#[derive(Clone, Debug)]
pub struct TrackerClient(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Connector with the hops and credentials for the tracker and for the servers.
    connector: Connector,
    address: Address,
    session: Mutex<Option<Session>>,
}

impl TrackerClient {
    /// Opens a session with the tracker at `address`: `tracker://host:port`, or the address of a
    /// server of any kind.
    ///
    /// # Errors
    ///
    /// The address is malformed, or the tracker cannot be reached, or refuses. The error gives the
    /// reason.
    pub async fn connect<A: ToAddress + ?Sized>(address: &A) -> Result<Self> {
        Self::connect_with(Connector::new(), address).await
    }

    /// As [`connect`](Self::connect), through the hops of `connector` and with its credentials. The
    /// servers are reached in the same way.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with<A: ToAddress + ?Sized>(connector: Connector, address: &A) -> Result<Self> {
        let address = address.to_address().map_err(|error| ConnectError::Address(error).into_rpc_error())?;
        let this = Self::new(connector, &address);
        this.session().await?;
        Ok(this)
    }

    /// As [`connect_with`](Self::connect_with), on a plain thread.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect); and [`ErrorKind::ApiMisuse`] inside of async code.
    pub fn connect_blocking<A: ToAddress + ?Sized>(connector: Connector, address: &A) -> Result<Self> {
        let address = address.to_address().map_err(|error| ConnectError::Address(error).into_rpc_error())?;
        blocking(async move { Self::connect_with(connector, &address).await })
    }

    fn new(connector: Connector, address: &Address) -> Self {
        let address = address_of(address).unwrap_or_else(|| address.clone());
        Self(Arc::new(Inner { connector, address, session: Mutex::new(None) }))
    }

    /// Waits for a server, and opens a session with it. After a failure asks for another server,
    /// until the request's time is over.
    ///
    /// Dropping the future withdraws the request from the queue.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::DeadlineExceeded`]: the time is over, or no servers that could serve the
    ///   request have been registered for a while. The error says what was asked for, and what the
    ///   tracker has.
    /// * The tracker has been away for too long.
    /// * Refusals of the tracker, for example by a limit.
    /// * [`ErrorKind::VersionMismatch`]: the tracker speaks another version.
    /// * Errors of the server that another server would repeat: it does not know the client, or
    ///   speaks another version.
    pub async fn request(&self, request: &ServerRequest) -> Result<Loan> {
        let mut loans = self.obtain(&request.clone().count(1)).await?;
        loans.pop().ok_or_else(|| RpcError::new(ErrorKind::Protocol, "the tracker granted nothing"))
    }

    /// As [`request`](Self::request), for as many servers as the request says. Opens a session with
    /// each of them, or with none.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub async fn request_many(&self, request: &ServerRequest) -> Result<Vec<Loan>> {
        self.obtain(request).await
    }

    /// Runs `work` at a server, and gives the server back. If the server is lost meanwhile, `work`
    /// is run again at another one, so parts of it may run more than once. Errors of functions, and
    /// of `work` itself, are not repeated.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request); the error of `work`; and that of the last server, if too many
    /// were lost.
    pub async fn request_and_run<T, F, W>(&self, request: &ServerRequest, mut work: W) -> Result<T>
    where
        W: FnMut(Session) -> F,
        F: Future<Output = Result<T>>,
    {
        let mut runs = 0;
        loop {
            let loan = self.request(request).await?;
            let outcome = work(loan.session().clone()).await;
            runs += 1;
            match outcome {
                Err(error) if runs < RUNS && loan.has_died(&error).await => {
                    let server = loan.grant().server.as_str();
                    tracing::info!(server, %error, "a server was lost; running at another one");
                }
                outcome => return outcome,
            }
        }
    }

    /// Returns a summary of the tracker's state.
    ///
    /// # Errors
    ///
    /// The tracker cannot be reached, or the server is not a tracker, or speaks another version.
    pub async fn summary(&self) -> Result<Summary> {
        let session = self.session().await?;
        let summary = async {
            let summary = session.get_function(functions::SUMMARY).await?;
            let summary: Packed = summary.call(()).concurrent().await?;
            MESSAGES.decode(&summary, "the tracker", "this program")
        };
        match summary.await {
            Ok(summary) => Ok(summary),
            Err(error) => Err(self.failed(&session, error).await),
        }
    }

    /// Has a server end the session of a client. The server is told with its next report.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`]: the operator of the tracker does not allow it;
    /// [`ErrorKind::NotFound`]: there is no such session any more.
    pub async fn kick(&self, kick: Kick) -> Result<()> {
        self.command(functions::KICK, kick).await
    }

    /// Gives a server to no more clients, or to clients again. Its sessions go on. A server that
    /// registers again is given to clients.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`]: the operator of the tracker does not allow it;
    /// [`ErrorKind::NotFound`]: the server is not registered any more.
    pub async fn drain(&self, drain: Drain) -> Result<()> {
        self.command(functions::DRAIN, drain).await
    }

    /// Calls a function of the tracker that returns nothing.
    async fn command<T: Serialize>(&self, name: &str, argument: T) -> Result<()> {
        let session = self.session().await?;
        let done = async {
            let function = session.get_function(name).await?;
            function.call((Pack(argument),)).concurrent().await
        };
        match done.await {
            Ok(()) => Ok(()),
            // The tracker itself has answered.
            Err(error) if error.hop() > 0 => Err(error),
            Err(error) => Err(self.failed(&session, error).await),
        }
    }

    /// As [`request`](Self::request), on a plain thread.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request); and [`ErrorKind::ApiMisuse`] inside of async code.
    pub fn request_blocking(&self, request: &ServerRequest) -> Result<Loan> {
        let (this, request) = (self.clone(), request.clone());
        blocking(async move { this.request(&request).await })
    }

    /// As [`request_many`](Self::request_many), on a plain thread.
    ///
    /// # Errors
    ///
    /// As [`request_blocking`](Self::request_blocking).
    pub fn request_many_blocking(&self, request: &ServerRequest) -> Result<Vec<Loan>> {
        let (this, request) = (self.clone(), request.clone());
        blocking(async move { this.request_many(&request).await })
    }

    /// As [`summary`](Self::summary), on a plain thread.
    ///
    /// # Errors
    ///
    /// As [`summary`](Self::summary); and [`ErrorKind::ApiMisuse`] inside of async code.
    pub fn summary_blocking(&self) -> Result<Summary> {
        let this = self.clone();
        blocking(async move { this.summary().await })
    }

    async fn obtain(&self, request: &ServerRequest) -> Result<Vec<Loan>> {
        let limit = Limit::of(request);
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut failures = 0;
        loop {
            let claim = self.granted(request, limit).await?;
            let error = match self.open(&claim, limit).await {
                Ok(loans) => return Ok(loans),
                Err(error) => error,
            };
            failures += 1;
            let pause = backoff.pause();
            if !another_may_do(&error) || limit.is_over_in(pause) || (limit.0.is_none() && failures >= ATTEMPTS) {
                return Err(error);
            }
            tracing::debug!(%error, "a server that was granted gave no session; asking again");
            tokio::time::sleep(pause).await;
        }
    }

    /// Waits until the tracker has granted the request, even if the tracker restarts meanwhile.
    async fn granted(&self, request: &ServerRequest, limit: Limit) -> Result<Claim> {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut outage = None;
        loop {
            let (mut queued, asked) = (None, Instant::now());
            let error = match self.ask(request, limit, &mut queued).await {
                Ok(claim) => return Ok(claim),
                Err(error) => error,
            };
            if !is_outage(&error) {
                return Err(error);
            }
            if queued.is_some_and(|queued: Instant| queued.elapsed() > PAUSES.1) {
                // The tracker was there meanwhile.
                backoff.reset();
                outage = None;
            }
            // A tracker that fell silent has been away for as long as that, but no longer than this
            // request has asked it: an idle session may have ended by silence long before.
            let silence = match error.kind() {
                ErrorKind::PeerSilent => self.0.connector.silence_limit().min(asked.elapsed()),
                _ => Duration::ZERO,
            };
            let now = Instant::now();
            let outage = *outage.get_or_insert_with(|| now.checked_sub(silence).unwrap_or(now));
            let pause = backoff.pause();
            if limit.is_over_in(pause) || outage.elapsed() + pause > self.0.connector.outage_limit() {
                return Err(error.context(format_args!("the tracker at {} is away", self.0.address)));
            }
            let tracker = &self.0.address;
            rpc_core::log_limited!(WARN, %tracker, %error, "the tracker is away; asking again");
            tokio::time::sleep(pause).await;
        }
    }

    /// Asks the tracker once. Sets `queued` to the time at which the request is in the queue.
    async fn ask(&self, request: &ServerRequest, limit: Limit, queued: &mut Option<Instant>) -> Result<Claim> {
        let session = limit.within("the tracker", self.session()).await?;
        let request = ServerRequest { timeout_ms: limit.left_ms(), ..request.clone() };
        let asked = async {
            // Both functions are looked up at once, and their types are not compared: a new session
            // has cost enough time already.
            let ask = session.get_function(functions::REQUEST).start();
            let wait = session.get_function(functions::WAIT).start();
            let (ask, wait) = (ask.await?, wait.await?);
            let queue_entry: RemoteObject = ask.call((Pack(request),)).concurrent().await?;
            *queued = Some(Instant::now());
            let Pack(grants) = wait.call((&queue_entry,)).concurrent().await?;
            Ok(Claim { queue_entry, grants })
        };
        match limit.within("the tracker's answer", asked).await {
            Ok(claim) => Ok(claim),
            Err(error) => Err(self.failed(&session, error).await),
        }
    }

    /// Opens sessions with all servers of a claim. If one fails, gives back the servers that were
    /// not reached.
    async fn open(&self, claim: &Claim, limit: Limit) -> Result<Vec<Loan>> {
        let mut attempts = JoinSet::new();
        for (at, grant) in claim.grants.iter().cloned().enumerate() {
            let (connector, tracker) = (self.0.connector.clone(), self.0.address.clone());
            attempts.spawn(async move {
                let session = limit.within("the server", connect_to(connector, &grant, &tracker)).await;
                (at, grant, session)
            });
        }
        let mut opened: Vec<Option<Loan>> = claim.grants.iter().map(|_| None).collect();
        let (mut failure, mut returned) = (None, Vec::new());
        while let Some(attempt) = attempts.join_next().await {
            let (at, grant, session) =
                attempt.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
            match session {
                Ok((session, route)) => opened[at] = Some(Loan { session, grant, route: Arc::new(route) }),
                Err(error) => {
                    // A ticket that may have been used is not returned. It expires.
                    let is_unused = error.application_kind() == Some(PLAIN_GRANT);
                    if error.hop() > 0 || error.kind() == ErrorKind::PeerLost || is_unused {
                        returned.push(Returned { serial: grant.serial, why: error.to_string() });
                    }
                    failure = Some(error.with_peer(grant.address.join(",")));
                }
            }
        }
        let Some(failure) = failure else { return Ok(opened.into_iter().flatten().collect()) };
        if !returned.is_empty() {
            claim.give_back(returned).await;
        }
        Err(failure)
    }

    /// Returns the session with the tracker. Opens it if there is none.
    async fn session(&self) -> Result<Session> {
        let mut current = self.0.session.lock().await;
        if let Some(session) = &*current {
            return Ok(session.clone());
        }
        let connector = self.0.connector.clone().key("").workspace("").ticket("");
        let session = connector
            .connect_at(Hop { address: self.0.address.clone(), tunnel: false })
            .await
            .map_err(ConnectError::into_rpc_error)?;
        *current = Some(session.clone());
        Ok(session)
    }

    /// Forgets the session if it has ended. Returns its error, which names the address if the
    /// server is not a tracker.
    async fn failed(&self, session: &Session, error: RpcError) -> RpcError {
        let mut current = self.0.session.lock().await;
        let is_it = |current: &Session| Arc::ptr_eq(current.shared(), session.shared());
        if (error.ends_session() || error.fault() == Fault::Link) && current.as_ref().is_some_and(is_it) {
            *current = None;
        }
        if error.kind() == ErrorKind::NotFound {
            return error.context(format_args!("{} is no tracker", self.0.address));
        }
        error
    }
}

/// Opens a session with a server that the tracker at `address` grants, with the key and the
/// requirements of `connector`.
pub(super) async fn connect(connector: &Connector, address: &Address) -> Result<Session, ConnectError> {
    let mut request = connector.requested_server().cloned().unwrap_or_else(ServerRequest::any).count(1);
    if let Some(key) = connector.requested_key() {
        key.clone_into(&mut request.key);
    }
    if let Some(timeout) = connector.queue_limit() {
        request = request.timeout(timeout);
    }
    let tracker = TrackerClient::new(connector.clone(), address);
    // A tracker that has never been reached is not waited for.
    tracker.session().await?;
    let loan = tracker.request(&request).await?;
    Ok(loan.into_session())
}

/// Opens a session with a server that the tracker at `tracker` has granted. Returns the route to it
/// as well.
async fn connect_to(connector: Connector, grant: &Grant, tracker: &Address) -> Result<(Session, Route)> {
    let mut stops = Vec::new();
    for stop in &grant.address {
        // A tracker gives the locations of servers, and must not start programs here.
        let hop = stop.parse::<Hop>().ok().filter(|hop| connector.accepts_grant(&hop.address));
        let Some(hop) = hop else {
            let text = format!("the tracker granted '{stop}', which is not where a server is");
            return Err(RpcError::new(ErrorKind::Protocol, text));
        };
        stops.push(hop);
    }
    if !connector.accepts_encryption_of(&stops, tracker) {
        let text = format!(
            "the tracker is reached with encryption, and granted '{}' without: have the server advertise a tls:// or \
             quic:// address, or accept that (--plain-servers, Dial::plain_grants)",
            grant.address.join(",")
        );
        return Err(RpcError::new(ErrorKind::Refused, text).with_application_kind(PLAIN_GRANT));
    }
    let Some(target) = stops.pop() else {
        return Err(RpcError::new(ErrorKind::Protocol, "the tracker granted a server without an address"));
    };
    // The address identifies the server, so no key is asked for.
    let connector = stops.into_iter().fold(connector.key(""), Connector::through);
    let session = connector.clone().ticket(&grant.ticket).connect_at(target.clone()).await;
    Ok((session.map_err(ConnectError::into_rpc_error)?, Route { connector, target }))
}

/// Route to a server that a tracker has granted.
#[derive(Debug)]
struct Route {
    /// Connector with the hops in front of the server.
    connector: Connector,
    target: Hop,
}

/// Application kind of the error for a grant that this client does not follow, because it leads to
/// a server without encryption.
const PLAIN_GRANT: &str = "plain_grant";

/// Prefix of a tracker's scheme. The scheme by which the tracker is reached follows it; `tracker`
/// alone stands for TCP.
pub(super) const SCHEME: &str = "tracker";

/// Schemes that cannot lead to a tracker: the client would start it as a program, or reach no
/// server.
const NOT_ASKED: [&str; 3] = ["exec", "local", "ssh"];

/// Returns the address of the tracker itself, without a key, if `address` stands for the servers of
/// a tracker.
#[must_use]
pub fn address_of(address: &Address) -> Option<Address> {
    let scheme = match address.scheme().strip_prefix(SCHEME)? {
        "" => "tcp",
        other => other.strip_prefix('+').filter(|scheme| !NOT_ASKED.contains(scheme))?,
    };
    address.clone().without_key().with_scheme(scheme).ok()
}

impl Address {
    /// Returns the address of the servers that the tracker `at` gives out under `key`, or of all
    /// its servers without a key.
    ///
    /// # Errors
    ///
    /// [`AddressError::Invalid`]: the address cannot be that of a tracker; and for the key those of
    /// [`with_key`](Self::with_key).
    pub fn tracker(at: Self, key: Option<&str>) -> std::result::Result<Self, AddressError> {
        let scheme = match at.scheme() {
            "tcp" => SCHEME.to_owned(),
            scheme if scheme.starts_with(SCHEME) || NOT_ASKED.contains(&scheme) => {
                return Err(AddressError::invalid(&at, "no tracker can be asked there; write tracker://host:port/KEY"));
            }
            scheme => format!("{SCHEME}+{scheme}"),
        };
        let this = at.with_scheme(&scheme)?;
        match key {
            Some(key) => this.with_key(key),
            None => Ok(this.without_key()),
        }
    }
}

/// A server on loan to this client. When the loan and all clones of the session are dropped, the
/// session ends, and the server is free for the next client.
#[derive(Clone, Debug)]
pub struct Loan {
    session: Session,
    grant: Grant,
    route: Arc<Route>,
}

impl Loan {
    /// Returns the session with the server.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the session alone.
    pub fn into_session(self) -> Session {
        self.session
    }

    /// Returns the tracker's description of the server. The ticket has been used.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Opens a plain stream of bytes to `to`, as [`Connector::open_tunnel`] does, through this
    /// server. The stream does not keep the loan.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn open_tunnel(&self, to: &Address) -> std::result::Result<Tunnel, ConnectError> {
        let Route { connector, target } = &*self.route;
        connector.open_tunnel_at(target.clone(), to).await
    }

    /// Returns true if the server's end has caused `error`, and not the code that runs there.
    async fn has_died(&self, error: &RpcError) -> bool {
        // A function that has lost a peer of its own fails in the same way, but its session lives.
        let lost = error.fault() == Fault::Link || error.kind() == ErrorKind::Closed;
        lost && tokio::time::timeout(ANSWER_GRACE, self.session.ended()).await.is_ok()
    }
}

/// Servers that the tracker has granted. Dropping the claim releases those that have not been used.
struct Claim {
    queue_entry: RemoteObject,
    grants: Vec<Grant>,
}

impl Claim {
    /// Gives back servers that were not used. If this fails, they return when their tickets expire.
    async fn give_back(&self, returned: Vec<Returned>) {
        let session = self.queue_entry.session();
        let give_back = async {
            let give_back = session.get_function(functions::GIVE_BACK).await?;
            give_back.call((&self.queue_entry, Pack(returned))).concurrent().await
        };
        match tokio::time::timeout(ANSWER_GRACE, give_back).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "servers could not be given back, and expire"),
            Err(_) => tracing::debug!("the tracker does not answer; servers that were not used expire"),
        }
    }
}

/// End of a request's time. `None` is never.
#[derive(Clone, Copy)]
struct Limit(Option<Instant>);

impl Limit {
    fn of(request: &ServerRequest) -> Self {
        Self(request.timeout_ms.and_then(|millis| Instant::now().checked_add(Duration::from_millis(millis))))
    }

    fn left_ms(self) -> Option<u64> {
        let left = self.0?.saturating_duration_since(Instant::now());
        Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    }

    fn is_over_in(self, pause: Duration) -> bool {
        self.0.is_some_and(|end| Instant::now() + pause >= end)
    }

    async fn within<T>(self, peer: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let Some(end) = self.0 else { return work.await };
        match tokio::time::timeout_at(end + ANSWER_GRACE, work).await {
            Ok(outcome) => outcome,
            Err(_) => Err(RpcError::new(
                ErrorKind::DeadlineExceeded,
                format!("the time for the request is over, and it has been waiting for {peer}"),
            )),
        }
    }
}

/// Returns true if the tracker is away and may come back.
fn is_outage(error: &RpcError) -> bool {
    // A peer that closes the connection during the handshake may be a tracker that is about to
    // stop.
    let cut = error.kind() == ErrorKind::Refused && error.hop() == 0;
    cut || error.fault() == Fault::Link || matches!(error.kind(), ErrorKind::Closed | ErrorKind::SessionTimeout)
}

/// Returns true if another server may give a session although this one has not.
fn another_may_do(error: &RpcError) -> bool {
    let ticket = error.application_kind() == Some(TICKET_REFUSED);
    let cut = error.kind() == ErrorKind::Refused && error.hop() == 0;
    let full = matches!(error.kind(), ErrorKind::LimitExceeded | ErrorKind::Busy);
    // A relay has restarted, and the server has not come back to it yet.
    let away = error.kind() == ErrorKind::NotFound && error.hop() > 0;
    ticket || cut || full || away || error.fault() == Fault::Link
}

/// Runs `work` in the background, and blocks until it has finished.
fn blocking<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    run_in_background(async move { work.await.map_err(ConnectError::Session) }).map_err(ConnectError::into_rpc_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect::{OpenedBy, SessionOpener};
    #[cfg(feature = "tls")]
    use crate::transport::Dial;
    use crate::transport::{BoxFuture, Properties, Reach, Transports};

    #[test]
    fn the_address_of_a_tracker_gives_its_transport() {
        let parsed = |text: &str| text.parse::<Address>().unwrap();
        let address = parsed("tracker+tls://pool.lan:9190/h100");
        assert_eq!(address_of(&address), Some(parsed("tls://pool.lan:9190")));
        assert_eq!(Address::tracker(parsed("tls://pool.lan:9190"), Some("h100")).unwrap(), address);
        assert_eq!(address_of(&parsed("tracker://127.0.0.1:1")), Some(parsed("tcp://127.0.0.1:1")));
        let unix = parsed("tracker+unix:/run/pool.sock?key=h100");
        assert_eq!(address_of(&unix), Some(parsed("unix:/run/pool.sock")));
        assert_eq!(address_of(&parsed("tcp://127.0.0.1:1")), None);
        for text in ["exec:cat", "ssh://board", "tracker://h:1", "local:"] {
            assert!(Address::tracker(parsed(text), None).is_err(), "{text}");
        }
    }

    /// Regression: both were 15 s, and a request was never repeated after a silence.
    #[test]
    fn a_request_is_repeated_after_the_silence_of_a_tracker() {
        let connector = Connector::new();
        assert!(connector.silence_limit() + PAUSES.1 < connector.outage_limit());
    }

    fn tracker() -> Address {
        "tcp://127.0.0.1:1".parse().unwrap()
    }

    fn grant(address: &[&str]) -> Grant {
        Grant {
            serial: 1,
            ticket: String::new(),
            good_for_ms: 1000,
            server: String::new(),
            key: String::new(),
            labels: std::collections::BTreeMap::new(),
            devices: Vec::new(),
            address: address.iter().map(ToString::to_string).collect(),
        }
    }

    #[tokio::test]
    async fn a_tracker_does_not_make_its_clients_start_programs() {
        for address in [
            &["exec:touch /tmp/started"][..],
            &["ssh://board"],
            &["local:"],
            &["exec:touch /tmp/started", "tcp://127.0.0.1:1"],
            &["tunnel:exec:touch /tmp/started", "tcp://127.0.0.1:1"],
            &["tracker://127.0.0.1:1/key"],
            &["pigeon://roof"],
            &["nonsense"],
        ] {
            let error = connect_to(Connector::new(), &grant(address), &tracker()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{address:?}: {error}");
        }
    }

    #[cfg(feature = "tls")]
    #[tokio::test]
    async fn an_encrypted_tracker_does_not_send_its_clients_to_plain_servers() {
        let encrypted: Address = "tls://pool.lan:9190".parse().unwrap();
        let plain_allowed = Dial { plain_grants: true, ..Dial::default() };
        for (stops, is_accepted) in [
            (&["tcp://192.0.2.1:1"][..], false),
            (&["tunnel:tcp://192.0.2.2:1", "tcp://192.0.2.1:1"], false),
            (&["tcp://192.0.2.2:1", "tls://192.0.2.1:1"], false),
            (&["tls://192.0.2.1:1"], true),
            (&["tunnel:tcp://192.0.2.2:1", "tls://192.0.2.1:1"], true),
            (&["tls://192.0.2.2:1", "tcp://192.0.2.1:1"], true),
            (&["tcp://127.0.0.1:1"], true),
            (&["unix:/run/server.sock"], true),
        ] {
            let hops: Vec<Hop> = stops.iter().map(|stop| stop.parse().unwrap()).collect();
            let connector = Connector::new();
            assert_eq!(connector.accepts_encryption_of(&hops, &encrypted), is_accepted, "{stops:?}");
            assert!(connector.accepts_encryption_of(&hops, &tracker()), "{stops:?}");
            assert!(connector.dial(plain_allowed.clone()).accepts_encryption_of(&hops, &encrypted), "{stops:?}");
        }
        let error = connect_to(Connector::new(), &grant(&["tcp://192.0.2.1:1"]), &encrypted).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.message().contains("--plain-servers"), "{error}");
    }

    /// Opener of `vault:` addresses.
    #[derive(Debug)]
    struct Vault(Properties, OpenedBy);

    impl SessionOpener for Vault {
        fn schemes(&self) -> &[&str] {
            &["vault"]
        }

        fn check(&self, _: &Address) -> std::result::Result<Properties, AddressError> {
            Ok(self.0)
        }

        fn opened_by(&self) -> OpenedBy {
            self.1
        }

        fn open<'a>(
            &'a self,
            _: &'a Address,
            _: &'a Connector,
        ) -> BoxFuture<'a, std::result::Result<Session, ConnectError>> {
            let session: rpc_core::SharedSession = Arc::new(rpc_core::LocalSession::new(rpc_core::Registry::new()));
            Box::pin(async { Ok(session.into()) })
        }
    }

    #[tokio::test]
    async fn a_tracker_sends_its_clients_to_openers_under_the_rules_for_transports() {
        let plain = Properties::plain(Reach::Network);
        for (properties, opened_by, is_accepted) in [
            (plain, OpenedBy::LastHop, true),
            (plain, OpenedBy::Client, false),
            (Properties::default(), OpenedBy::LastHop, false),
        ] {
            let transports = Transports::default().with_opener(Vault(properties, opened_by));
            let outcome =
                connect_to(Connector::new().transports(transports), &grant(&["vault:north"]), &tracker()).await;
            assert_eq!(outcome.is_ok(), is_accepted, "{properties:?} {opened_by:?}: {outcome:?}");
        }
    }
}

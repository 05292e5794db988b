//! Trackers, servers that register with them, and clients that ask them for servers.

use std::collections::BTreeMap;
use std::env::consts::{ARCH, OS};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rpc_core::{DeviceType, ErrorKind, LocalSession, Pack, Registry, RemoteObject, RpcError, Session, Target, Value};
use rpc_server::config::{ListenAddress, ServeConfig, Span, TrackerAddress, TrackerConfig};
use rpc_server::pki::trust::ClientTrust;
use rpc_server::server::Client;
use rpc_server::tracker::{RunningTracker, Tracker, TrackerOptions};
use rpc_server::{RpcServer, Running};
use rpc_transports::tracker::{
    Grant, HolderState, Kick, LossReason, MESSAGES, PoolEventKind, Reach, RecentError, Registered, Registration,
    Renewed, Returned, ServerDetails, ServerRequest, ServerStatus, ServerSummary, Summary, TICKET_REFUSED,
    TrackerClient, Use, functions,
};
use rpc_transports::{Address, Connector, Machine};
use tempfile::TempDir;

use super::cli::unused;

use crate::NO_OPENCL;

/// A tracker, its configuration, and the folder for its servers.
struct Pool {
    folder: TempDir,
    config: TrackerConfig,
    tracker: Option<RunningTracker>,
}

impl Pool {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut TrackerConfig)) -> Self {
        let mut config = TrackerConfig { listen: vec![listen("tcp://127.0.0.1:0")], ..TrackerConfig::default() };
        change(&mut config);
        let tracker = Tracker::start(&config).await.unwrap();
        Self { folder: tempfile::tempdir().unwrap(), config, tracker: Some(tracker) }
    }

    fn running(&self) -> &RunningTracker {
        self.tracker.as_ref().unwrap()
    }

    fn address(&self) -> Address {
        self.running().server.addresses()[0].clone()
    }

    /// Returns the address `tracker://…/KEY`.
    fn key(&self, key: &str) -> String {
        Address::tracker(self.address(), Some(key)).unwrap().to_string()
    }

    async fn client(&self) -> TrackerClient {
        TrackerClient::connect(&self.address().to_string()).await.unwrap()
    }

    /// Starts a server, and waits until it has registered as `key`.
    async fn server(&self, key: &str, change: impl FnOnce(&mut ServeConfig)) -> Running {
        let before = self.servers(key).len();
        let running = self.server_somewhere(key, change).await;
        self.until(|summary| of_key(summary, key).count() > before).await;
        running
    }

    async fn server_somewhere(&self, key: &str, change: impl FnOnce(&mut ServeConfig)) -> Running {
        let mut config = ServeConfig {
            listen: vec![listen("tcp://127.0.0.1:0")],
            workdir: self.folder.path().join("work"),
            tracker: vec![TrackerAddress(self.address())],
            tracker_key: Some(key.to_owned()),
            ..ServeConfig::default()
        };
        change(&mut config);
        RpcServer::new(registry()).config(config).start().await.unwrap()
    }

    fn summary(&self) -> Summary {
        self.running().tracker.summary()
    }

    fn servers(&self, key: &str) -> Vec<ServerSummary> {
        of_key(&self.summary(), key).cloned().collect()
    }

    /// Waits until the summary satisfies the predicate.
    async fn until(&self, is_so: impl Fn(&Summary) -> bool) -> Summary {
        let wait = async {
            loop {
                let summary = self.summary();
                if is_so(&summary) {
                    return summary;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(60), wait).await {
            Ok(summary) => summary,
            Err(_) => panic!("it does not come to that: {:#?}", self.summary()),
        }
    }

    async fn until_free(&self, key: &str, places: u32) -> Summary {
        self.until(|summary| of_key(summary, key).map(|server| server.free).sum::<u32>() == places).await
    }

    /// Stops the tracker, and starts another one at the same address, which has to be one that
    /// no other program takes meanwhile.
    async fn restart(&mut self) {
        self.tracker.take().unwrap().server.drain().await;
        self.tracker = Some(Tracker::start(&self.config).await.unwrap());
    }
}

fn of_key<'a>(summary: &'a Summary, key: &'a str) -> impl Iterator<Item = &'a ServerSummary> {
    summary.servers.iter().filter(move |server| server.key == key)
}

fn listen(address: &str) -> ListenAddress {
    address.parse().unwrap()
}

/// Returns the registration of a server with one slot.
fn registration(key: &str, address: &str) -> Registration {
    Registration {
        version: MESSAGES.version(),
        name: "board".to_owned(),
        key: key.to_owned(),
        labels: BTreeMap::new(),
        devices: Vec::new(),
        capacity: 1,
        address: vec![address.to_owned()],
        ticket_key: [7; 32],
        status: ServerStatus::default(),
    }
}

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add("fail", || -> Result<i64, RpcError> { Err(RpcError::new(ErrorKind::Application, "no such board")) });
    registry
}

async fn works(session: &Session) {
    let add = session.function::<(i64, i64), i64>("add").await.unwrap();
    assert_eq!(add.call((1, 2)).await.unwrap(), 3);
}

fn soon(request: ServerRequest) -> ServerRequest {
    request.timeout(Duration::from_secs(60))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_given_out_used_and_given_back() {
    let pool = Pool::new().await;
    let server = pool.server("board", |config| config.label = vec!["arch=arm64".parse().unwrap()]).await;
    let client = pool.client().await;

    let target = Target::new("llvm").unwrap().with("mtriple", &format!("{}-{}", ARCH, OS)).unwrap();
    let wanted = ServerRequest::new("board").label("arch", "arm64").virtual_device(target).client("me");
    let loan = client.request(&soon(wanted)).await.unwrap();
    works(loan.session()).await;
    assert_eq!(loan.grant().address, [server.addresses()[0].to_string()]);
    let summary = pool.until(|summary| {
        of_key(summary, "board").any(|server| server.holders.iter().any(|held| held.state == HolderState::InUse))
    });
    let holder = summary.await.servers[0].holders[0].clone();
    assert!(holder.client.starts_with("me (tcp://127.0.0.1:"), "{holder:?}");

    // No other client gets the server meanwhile; afterwards the next one does.
    let other = pool.client().await;
    let next = tokio::spawn(async move { other.request(&soon(ServerRequest::new("board"))).await });
    pool.until(|summary| summary.queue.len() == 1).await;
    drop(loan);
    works(next.await.unwrap().unwrap().session()).await;
    pool.until_free("board", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_of_a_tracker_is_enough() {
    let pool = Pool::new().await;
    let _server = pool.server("board", |_| {}).await;
    works(&Connector::new().connect(&pool.key("board")).await.unwrap()).await;
    pool.until_free("board", 1).await;
    let address = pool.key("board");
    let blocking = move || {
        let session = Connector::new().connect_blocking(&address).unwrap();
        session.function::<(i64, i64), i64>("add").wait().unwrap().call((3, 4)).wait().unwrap()
    };
    assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), 7);
    pool.until_free("board", 1).await;

    let nobody = Connector::new().queue_timeout(Duration::from_millis(1)).connect(&pool.key("rasp4")).await;
    let error = nobody.unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains("'rasp4'") && error.message().contains("have 0"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_servers_are_granted_together_or_not_at_all() {
    let pool = Pool::new().await;
    let _servers = [pool.server("h100", |_| {}).await, pool.server("h100", |_| {}).await];
    let client = pool.client().await;
    let both = client.request_many(&soon(ServerRequest::new("h100").count(2).distinct())).await.unwrap();
    assert_ne!(both[0].grant().address, both[1].grant().address);
    for loan in &both {
        works(loan.session()).await;
    }
    drop(both);
    pool.until_free("h100", 2).await;
    let request = ServerRequest::new("h100").count(3).timeout(Duration::from_millis(1));
    let error = client.request_many(&request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains("3 slots") && error.message().contains("have 2"), "{error}");
    assert!(pool.summary().queue.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn request_ends_with_the_session_of_its_client() {
    let pool = Pool::new().await;
    let (client, doomed) = (pool.client().await, pool.client().await);
    let waiting = tokio::spawn(async move { client.request(&ServerRequest::new("board")).await.map(drop) });
    pool.until(|summary| summary.queue.len() == 1).await;
    // The future is dropped, and the session with the tracker lives on.
    waiting.abort();
    pool.until(|summary| summary.queue.is_empty()).await;

    // Another session ends altogether.
    let waiting = tokio::spawn(async move { doomed.request(&ServerRequest::new("board")).await.map(drop) });
    pool.until(|summary| summary.queue.len() == 1).await;
    pool.running().server.stop();
    pool.until(|summary| summary.queue.is_empty()).await;
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_without_a_valid_ticket_are_refused() {
    let pool = Pool::with(|config| config.ticket_lifetime = Span(Duration::from_secs(60))).await;
    let (server, other) = (pool.server("board", |_| {}).await, pool.server("other", |_| {}).await);
    let address = server.addresses()[0].to_string();
    let refusal = async |ticket: &str| {
        let error = Connector::new().ticket(ticket).connect(&address).await.unwrap_err().into_rpc_error();
        assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Refused, Some(TICKET_REFUSED)), "{error}");
        error.message().to_owned()
    };
    assert!(refusal("").await.contains("has no ticket"));
    assert!(refusal("nonsense").await.contains("form"));

    let client = pool.client().await;
    let loan = client.request(&soon(ServerRequest::new("board"))).await.unwrap();
    let ticket = loan.grant().ticket.clone();
    assert!(refusal(&ticket).await.contains("used before"));
    let forged = ticket.replacen(".1.", ".2.", 1);
    assert_ne!(forged, ticket);
    assert!(refusal(&forged).await.contains("another server"));
    let foreign = client.request(&soon(ServerRequest::new("other"))).await.unwrap();
    assert!(refusal(&foreign.grant().ticket).await.contains("another server"));
    drop(loan);
    pool.until_free("board", 1).await;
    assert!(refusal(&ticket).await.contains("used before"));
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_ticket_expires_and_frees_its_slot() {
    // The ticket is valid for 0 ms, since clocks count whole milliseconds: each client is too late.
    let pool = Pool::with(|config| config.ticket_lifetime = Span(Duration::from_nanos(1))).await;
    let server = pool.server("board", |_| {}).await;
    let client = pool.client().await;
    let error = client.request(&ServerRequest::new("board").timeout(Duration::from_millis(200))).await.unwrap_err();
    assert!(error.message().contains("expired") || error.kind() == ErrorKind::DeadlineExceeded, "{error}");
    drop(client);
    pool.until_free("board", 1).await;
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_whose_process_was_stopped_is_shown_as_silent() {
    // The server reports three times a lease.
    let pool = Pool::with(|config| config.lease = Span(Duration::from_secs(1))).await;
    let server = pool.server("board", |config| config.keep_alive = Span(Duration::from_secs(1))).await;
    let is_silent =
        |summary: &Summary| summary.servers.iter().flat_map(|server| &server.holders).any(|held| held.silent_ms > 0);
    let is_free = |summary: &Summary| of_key(summary, "board").any(|server| server.free == 1);
    // The server gives the client up three intervals after its last word. A machine that stands
    // still meanwhile shows none of that, and another client is stopped.
    for attempt in 0.. {
        assert!(attempt < 10, "no client is shown as silent before it is given up");
        let address = pool.address().to_string();
        // It runs only until it has its session.
        let stopped = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let loan = runtime.block_on(async {
                let client = TrackerClient::connect(&address).await.unwrap();
                client.request(&soon(ServerRequest::new("board"))).await.unwrap()
            });
            (runtime, loan)
        });
        let (runtime, loan) = stopped.await.unwrap();
        let was_shown = is_silent(&pool.until(|summary| is_silent(summary) || is_free(summary)).await);
        // The server gives it up.
        pool.until_free("board", 1).await;
        runtime.shutdown_background();
        drop(loan);
        if was_shown {
            break;
        }
    }
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_ended_from_outside_where_the_operator_allows_it() {
    for allow_kick in [false, true] {
        let pool = Pool::with(|config| {
            config.allow_kick = allow_kick;
            // The server is told with its next report, three times a lease. A server that does not
            // report for a lease gets another number.
            config.lease = Span(Duration::from_secs(3));
        })
        .await;
        let server = pool.server("board", |_| {}).await;
        let loan = pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap();
        let in_use = |summary: &Summary| {
            summary.servers.iter().any(|server| server.holders.iter().any(|held| held.session.is_some()))
        };
        let summary = pool.until(in_use).await;
        let kick = Kick { server: summary.servers[0].id, session: summary.servers[0].holders[0].session.unwrap() };
        let client = pool.client().await;
        let gone = client.kick(Kick { session: 99, ..kick }).await.unwrap_err();
        if !allow_kick {
            let refused = client.kick(kick).await.unwrap_err();
            assert_eq!([gone.kind(), refused.kind()], [ErrorKind::Refused; 2], "{refused}");
            assert!(refused.message().contains("--allow-kick"), "{refused}");
            works(loan.session()).await;
            continue;
        }
        assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone}");
        client.kick(kick).await.unwrap();
        let told = loan.session().ended().await;
        assert!(told.message().contains("rpc-cli kick"), "{told}");
        pool.until_free("board", 1).await;
        drop(server);
    }
}

/// Regression: the slot came back when the ticket expired, 20 s later by default.
#[tokio::test(flavor = "multi_thread")]
async fn a_requester_that_dies_with_an_unused_ticket_gives_its_slot_back() {
    let pool = Pool::with(|config| config.ticket_lifetime = Span(Duration::from_secs(3600))).await;
    let server = pool.server("board", |_| {}).await;
    // It holds the entry in the queue to its end, and never goes to the server.
    ask_and_leave(&pool, 1).await;
    drop(server);
}

/// Returns the grants of a client that has asked for all slots of the server, which are free again
/// because its session with the tracker has ended.
async fn ask_and_leave(pool: &Pool, slots: u32) -> Vec<Grant> {
    let session = Connector::new().connect(&pool.address().to_string()).await.unwrap();
    let ask = session.get_function(functions::REQUEST).await.unwrap();
    let place: RemoteObject = ask.call((Pack(ServerRequest::new("board").count(slots)),)).await.unwrap();
    let wait = session.get_function(functions::WAIT).await.unwrap();
    let Pack(grants): Pack<Vec<Grant>> = wait.call((&place,)).await.unwrap();
    assert_eq!((grants.len(), pool.servers("board")[0].free), (slots as usize, 0));
    session.shutdown().await.unwrap();
    pool.until_free("board", slots).await;
    drop(place);
    grants
}

/// Regression: each ticket of a client that had left its tracker opened one session more than the
/// server's capacity, since the tracker had given the slot to others meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn tickets_of_clients_that_left_do_not_pass_the_capacity() {
    let pool = Pool::with(|config| config.ticket_lifetime = Span(Duration::from_secs(3600))).await;
    let server = pool.server("board", |config| config.capacity = 2).await;
    let late = ask_and_leave(&pool, 2).await;
    let use_ticket = async |grant: &Grant| Connector::new().ticket(&grant.ticket).connect(&grant.address[0]).await;
    let both = soon(ServerRequest::new("board").count(2));
    let client = pool.client().await;
    let loans = client.request_many(&both).await.unwrap();
    let error = use_ticket(&late[0]).await.unwrap_err().into_rpc_error();
    assert_eq!((error.kind(), error.application_kind()), (ErrorKind::Refused, Some(TICKET_REFUSED)), "{error}");
    assert!(error.message().contains("all places") && error.message().contains("ask the tracker again"), "{error}");
    for loan in &loans {
        works(loan.session()).await;
    }
    drop(loans);
    pool.until_free("board", 2).await;

    // A late ticket is good for a slot that is free, and others wait for that.
    let session = use_ticket(&late[1]).await.unwrap();
    pool.until_free("board", 1).await;
    let next = tokio::spawn(async move { client.request_many(&both).await });
    pool.until(|summary| summary.queue.len() == 1).await;
    works(&session).await;
    assert!(!next.is_finished(), "two clients share a slot");
    drop(session);
    assert_eq!(next.await.unwrap().unwrap().len(), 2);
    pool.until_free("board", 2).await;
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_clients_are_admitted_if_the_operator_allows_it_and_take_a_slot() {
    let pool = Pool::new().await;
    let server = pool.server("board", |config| config.allow_direct = true).await;
    let direct = Connector::new().connect(&server.addresses()[0].to_string()).await.unwrap();
    works(&direct).await;
    let summary = pool.until_free("board", 0).await;
    assert_eq!(summary.servers[0].holders[0].state, HolderState::Direct);
    drop(direct);
    works(pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap().session()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_tracker_learns_its_servers_and_requests_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("tracker").display());
    let mut pool = Pool::with(|config| config.listen = vec![listen(&socket)]).await;
    let (_busy, _free) = (pool.server("board", |_| {}).await, pool.server("rasp4", |_| {}).await);
    let client = pool.client().await;
    let loan = client.request(&soon(ServerRequest::new("board"))).await.unwrap();
    pool.until(|summary| {
        of_key(summary, "board").any(|server| server.holders.iter().any(|held| held.state == HolderState::InUse))
    })
    .await;
    let waiting = {
        let client = pool.client().await;
        tokio::spawn(async move { client.request(&soon(ServerRequest::new("board"))).await })
    };
    pool.until(|summary| summary.queue.len() == 1).await;

    pool.restart().await;
    // The servers register again by themselves, the one in use as in use, and the waiting client
    // waits again.
    pool.until(|summary| summary.servers.len() == 2 && summary.queue.len() == 1).await;
    let board = &pool.servers("board")[0];
    assert_eq!((board.free, board.holders.len()), (0, 1));
    assert_eq!(board.holders[0].state, HolderState::InUse);
    works(loan.session()).await;
    drop(loan);
    works(waiting.await.unwrap().unwrap().session()).await;
    works(client.request(&soon(ServerRequest::new("rasp4"))).await.unwrap().session()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_slots_of_a_server_that_leaves_are_removed() {
    let pool = Pool::new().await;
    let server = pool.server("board", |_| {}).await;
    drop(server);
    let summary = pool.until(|summary| summary.servers.is_empty()).await;
    assert_eq!((summary.losses[0].key.as_str(), &summary.losses[0].reason), ("board", &LossReason::Gone));
    let _again = pool.server("board", |_| {}).await;
    assert!(pool.summary().losses.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn work_of_a_dead_server_runs_again_at_another() {
    let pool = Pool::new().await;
    let mut servers = [Some(pool.server("board", |_| {}).await), Some(pool.server("board", |_| {}).await)];
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.addresses()[0].to_string()).collect();
    let client = pool.client().await;
    let runs = Arc::new(AtomicU32::new(0));
    let (victim, mut doomed) = tokio::sync::mpsc::channel::<Session>(1);
    let work = {
        let (runs, client) = (runs.clone(), client.clone());
        tokio::spawn(async move {
            client
                .request_and_run(&soon(ServerRequest::new("board")), |session| {
                    let (run, victim) = (runs.fetch_add(1, Ordering::Relaxed), victim.clone());
                    async move {
                        if run == 0 {
                            victim.send(session.clone()).await.unwrap();
                            let ended = session.ended().await;
                            return Err(ended);
                        }
                        session.function::<(i64, i64), i64>("add").await?.call((20, 22)).await
                    }
                })
                .await
        })
    };
    let session = doomed.recv().await.unwrap();
    let summary = pool.until(|summary| summary.servers.iter().any(|server| server.free == 0)).await;
    let busy = summary.servers.iter().find(|server| server.free == 0).unwrap().address[0].clone();
    let at = addresses.iter().position(|address| *address == busy).unwrap();
    drop(servers[at].take());
    drop(session);
    assert_eq!(work.await.unwrap().unwrap(), 42);
    assert_eq!(runs.load(Ordering::Relaxed), 2);

    // An error of a function is not repeated at another server.
    let runs = AtomicU32::new(0);
    let error = client
        .request_and_run(&soon(ServerRequest::new("board")), |session| {
            runs.fetch_add(1, Ordering::Relaxed);
            async move { session.function::<(), i64>("fail").await?.call(()).await }
        })
        .await
        .unwrap_err();
    assert_eq!((error.kind(), runs.load(Ordering::Relaxed)), (ErrorKind::Application, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_address_is_reported_to_the_server_and_in_the_summary() {
    // Otherwise a server on this machine has to prove that it is there.
    let pool = Pool::with(|config| config.allow_advertise = vec!["tcp://127.0.0.1".to_owned()]).await;
    let nowhere = unused();
    let _server = pool.server("board", |config| config.advertise = vec![listen(&nowhere)]).await;
    let summary = pool.until(|summary| matches!(summary.servers[0].reach, Reach::Unreachable { .. })).await;
    let Reach::Unreachable { why } = &summary.servers[0].reach else { unreachable!() };
    assert!(why.contains("refused"), "{why}");
    // A server that is reached at its address is preferred.
    let good = pool.server("board", |_| {}).await;
    let loan = pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap();
    assert_eq!(loan.grant().address, [good.addresses()[0].to_string()]);
    pool.until(|summary| summary.servers.iter().any(|server| server.reach == Reach::Reached)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_of_a_tracker_is_not_a_refused_client() {
    let pool = Pool::new().await;
    let server = pool.server("board", |config| config.metrics = Some("127.0.0.1:0".parse().unwrap())).await;
    pool.until(|summary| summary.servers[0].reach == Reach::Reached).await;
    let metrics = server.metrics_address().unwrap();
    let refusals = async || {
        let text = scrape(metrics).await;
        text.lines().filter(|line| line.starts_with("rpc_refusals_total{")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(refusals().await.is_empty());
    let connector = Connector::new().ticket("not a ticket");
    connector.connect(&server.addresses()[0].to_string()).await.unwrap_err();
    // The client may have the reply before the server has counted the refusal.
    let counted = async {
        loop {
            let refusals = refusals().await;
            if !refusals.is_empty() {
                return refusals;
            }
        }
    };
    let counted = tokio::time::timeout(Duration::from_secs(60), counted).await.expect("the refusal is counted");
    assert_eq!(counted, ["rpc_refusals_total{reason=\"refused\"} 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_elsewhere_is_refused_unless_the_operator_allows_it() {
    let elsewhere = |config: &mut ServeConfig| config.advertise = vec![listen("tcp://192.0.2.1:9090")];
    let pool = Pool::new().await;
    let _server = pool.server_somewhere("board", elsewhere).await;
    let summary = pool.until(|summary| !summary.losses.is_empty()).await;
    let LossReason::Refused { why } = &summary.losses[0].reason else { panic!("{summary:?}") };
    assert!(why.contains("--allow-advertise"), "{why}");
    assert!(summary.servers.is_empty());
    let pool = Pool::with(|config| config.allow_advertise = vec!["tcp://192.0.2.*".to_owned()]).await;
    pool.server("board", elsewhere).await;
}

/// Regression: a peer on the tracker's machine, and so each one behind a proxy there, could
/// advertise any port of that machine. The tracker told it what is there, and sent clients to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_on_this_machine_has_to_prove_that_it_is_at_its_address() {
    let (pool, others) = (Pool::new().await, Pool::new().await);
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig { workdir: folder.path().to_owned(), ..ServeConfig::default() };
    let open = RpcServer::new(registry()).config(config).listen("tcp://127.0.0.1:0").start().await.unwrap();
    let of_others = others.server("board", |_| {}).await;
    let nowhere = unused();
    let session = Connector::new().connect(&pool.address().to_string()).await.unwrap();
    let register = session.get_function(functions::REGISTER).await.unwrap();
    for victim in [open.addresses()[0].to_string(), of_others.addresses()[0].to_string(), nowhere] {
        let call = register.call::<(RemoteObject, Pack<Registered>)>((Pack(registration("board", &victim)),));
        let error = call.await.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{victim}");
        // Nothing of what is there.
        let text = error.message().replace(&victim, "ADDRESS");
        assert!(
            text.starts_with("the tracker could not verify that this server is at ADDRESS, where it went"),
            "{text}"
        );
        assert!(!text.contains("refused") && !text.contains("session"), "{text}");
    }
    assert!(pool.summary().servers.is_empty());
    // A server that is there proves it, and is known to be reachable at once.
    let _server = pool.server("board", |_| {}).await;
    assert_eq!(pool.servers("board")[0].reach, Reach::Reached);
    works(pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap().session()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_exceeded_limit_is_refused_by_name() {
    let pool = Pool::with(|config| (config.max_servers_per_peer, config.max_waiting_per_client) = (2, 2)).await;
    let _servers = [pool.server("board", |_| {}).await, pool.server("board", |_| {}).await];
    let _third = pool.server_somewhere("board", |_| {}).await;
    let summary = pool.until(|summary| !summary.losses.is_empty()).await;
    let LossReason::Refused { why } = &summary.losses[0].reason else { panic!("{summary:?}") };
    assert!(why.contains("max_servers_per_peer is 2"), "{why}");
    assert_eq!(summary.servers.len(), 2);

    let client = pool.client().await;
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.request(&ServerRequest::new("rasp4")).await.map(drop) })
        })
        .collect();
    pool.until(|summary| summary.queue.len() == 2).await;
    let error = client.request(&ServerRequest::new("rasp4")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("max_waiting_per_client is 2"), "{error}");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);

    let long = "x".repeat(200);
    for (request, limit) in [
        (ServerRequest::new(&long), "length of a key"),
        (ServerRequest::any().label("a", &long), "length of a label"),
        ((0..100).fold(ServerRequest::any(), |request, _| request.virtual_device(DeviceType::CPU)), "virtual devices"),
        (
            ServerRequest::any().virtual_device(Target::on(&long.repeat(6), DeviceType::CPU).unwrap()),
            "length of a virtual device",
        ),
        ((0..100).fold(ServerRequest::any(), |request, at| request.label(&at.to_string(), "")), "labels"),
        (ServerRequest::any().count(1 << 20), "slots of a request"),
    ] {
        let error = client.request_many(&request).await.unwrap_err();
        assert!(error.message().starts_with(limit), "{error}");
    }
    let error = client.request_many(&ServerRequest::any().count(0)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// The text of a client's address is for people: a transport may write anything there.
#[tokio::test(flavor = "multi_thread")]
async fn a_tracker_judges_a_server_by_its_machine_and_not_by_the_text_of_its_address() {
    let tracker = Tracker::new(TrackerOptions { max_servers_per_peer: 1, ..TrackerOptions::default() });
    let registry = Registry::new();
    tracker.register(&registry);
    let at = |ip: &str| Machine::At(ip.parse().unwrap());
    let register = async |machine: Machine, address: &str| {
        // A text without a host, and one that names another machine.
        let text = if machine == Machine::Unknown { "tcp://127.0.0.1:7" } else { "a board behind the wall" };
        let identity = "anonymous".to_owned();
        let peer_identity = identity.clone();
        let client = Client { peer: text.to_owned(), machine, identity, peer_identity, through_hop: false };
        let session = Session::new(LocalSession::builder(registry.clone()).extension(Arc::new(client)).build());
        let register = session.get_function(functions::REGISTER).await.unwrap();
        let registered: Result<(RemoteObject, Pack<Registered>), _> =
            register.call((Pack(registration("k", address)),)).await;
        registered.map(|(object, Pack(registered))| (session, object, registered.address))
    };
    let refused = async |machine, address: &str| register(machine, address).await.unwrap_err().message().to_owned();
    assert!(refused(at("10.0.0.5"), "tcp://127.0.0.1:9090").await.contains("comes from 10.0.0.5 may not"));
    assert!(refused(at("2001:db8::5"), "tcp://[::1]:9090").await.contains("comes from 2001:db8::5 may not"));
    assert!(refused(Machine::Unknown, "tcp://127.0.0.1:9090").await.contains("from an unknown machine may not"));
    let first = register(at("10.0.0.5"), "tcp://0.0.0.0:9090").await.unwrap();
    assert_eq!(first.2, ["tcp://10.0.0.5:9090"]);
    // Each machine has a limit of its own, although the texts are equal.
    let second = register(at("2001:db8::5"), "tcp://[::]:9090").await.unwrap();
    assert_eq!(second.2, ["tcp://[2001:db8::5]:9090"]);
    assert!(refused(at("10.0.0.5"), "tcp://0.0.0.0:9091").await.contains("max_servers_per_peer is 1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_names_a_server_that_is_no_tracker() {
    let pool = Pool::new().await;
    let server = pool.server("board", |config| config.allow_direct = true).await;
    let client = TrackerClient::connect(&server.addresses()[0].to_string()).await.unwrap();
    for error in [
        client.summary().await.map(drop).unwrap_err(),
        client.request(&ServerRequest::any()).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains("is no tracker"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_hop_tracker_and_server_are_reached_from_the_hop() {
    let pool = Pool::new().await;
    let _server = pool.server("board", |_| {}).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = ServeConfig {
        listen: vec![listen("tcp://127.0.0.1:0")],
        workdir: folder.path().to_owned(),
        allow_forward: vec!["tcp://127.0.0.1:*".to_owned()],
        ..ServeConfig::default()
    };
    let gateway = RpcServer::default().config(gateway).start().await.unwrap();
    let connector = Connector::new().via(&gateway.addresses()[0].to_string());
    let session = connector.connect(&pool.key("board")).await.unwrap();
    works(&session).await;
    let error = session.function::<(), i64>("fail").await.unwrap().call(()).await.unwrap_err();
    assert_eq!(error.hop(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tracker_refuses_peers_of_another_version_and_says_which_side_to_update() {
    let pool = Pool::new().await;
    let session = Connector::new().connect(&pool.address().to_string()).await.unwrap();
    let register = session.get_function(functions::REGISTER).await.unwrap();
    let request = session.get_function(functions::REQUEST).await.unwrap();
    let current = MESSAGES.version();
    for (version, of_server, of_client) in [
        (current - 1, "update the server", "update the client"),
        (current + 1, "update the tracker", "update the tracker"),
    ] {
        let registration = Registration { version, ..registration("k", "tcp://127.0.0.1:9") };
        let error = register.call::<Value>((Pack(registration),)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
        assert!(error.message().ends_with(of_server), "{error}");
        let asked = ServerRequest { version, ..ServerRequest::any() };
        let error = request.call::<Value>((Pack(asked),)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
        assert!(error.message().ends_with(of_client), "{error}");
    }
    assert!(pool.summary().servers.is_empty() && pool.summary().queue.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_refuses_a_tracker_of_another_version() {
    for (version, advice) in [
        (None, "update the tracker"),
        (Some(MESSAGES.version() - 1), "update the tracker"),
        (Some(MESSAGES.version() + 1), "update this program"),
    ] {
        let registry = Registry::new();
        // The summary of a version whose other fields are unknown here.
        let summary = move || {
            Pack(version.map_or_else(BTreeMap::new, |version| BTreeMap::from([("version".to_owned(), version)])))
        };
        registry.add(functions::SUMMARY, summary);
        let folder = tempfile::tempdir().unwrap();
        let config = ServeConfig { workdir: folder.path().to_owned(), ..ServeConfig::default() };
        let server = RpcServer::new(registry).config(config).listen("tcp://127.0.0.1:0").start().await.unwrap();
        let client = TrackerClient::connect(&server.addresses()[0].to_string()).await.unwrap();
        let error = client.summary().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error}");
        assert!(error.message().ends_with(advice), "{error}");
    }
}

/// A peer that calls the functions of the tracker directly.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_registers_without_end_is_stopped_and_leaves_nothing() {
    let pool = Pool::with(|config| {
        // The registrations are not renewed.
        config.lease = Span(Duration::from_secs(3600));
        config.max_servers_per_peer = 50;
        config.allow_advertise = vec!["tcp://127.0.0.1:9".to_owned()];
    })
    .await;
    let session = Connector::new().connect(&pool.address().to_string()).await.unwrap();
    let register = session.get_function(functions::REGISTER).await.unwrap();
    let registration = |key: &str| Registration { name: "x".repeat(100), ..registration(key, "tcp://127.0.0.1:9") };
    let mut kept = Vec::new();
    for at in 0..1000 {
        let call = register.call::<(RemoteObject, Pack<Registered>)>((Pack(registration(&format!("k{at}"))),));
        match call.await {
            Ok((object, _)) => kept.push(object),
            Err(error) => assert!(error.message().contains("max_servers_per_peer is 50"), "{error}"),
        }
    }
    assert_eq!(kept.len(), 50);
    let summary = pool.summary();
    assert_eq!((summary.servers.len(), summary.losses.len()), (50, 256), "what is remembered of refusals is bounded");

    // Other malformed messages are errors.
    let refused = async |registration: Registration| {
        let call = register.call::<(RemoteObject, Pack<Registered>)>((Pack(registration),));
        call.await.map(drop).unwrap_err().message().to_owned()
    };
    for (registration, expected) in [
        (registration(""), "key"),
        (registration("a b"), "key"),
        (Registration { capacity: 0, ..registration("k") }, "capacity"),
        (Registration { capacity: u32::MAX, ..registration("k") }, "capacity"),
        (Registration { address: Vec::new(), ..registration("k") }, "address"),
        (Registration { address: vec!["tcp://127.0.0.1:9".to_owned(); 100], ..registration("k") }, "addresses"),
        (Registration { address: vec!["x".repeat(5000)], ..registration("k") }, "length of an address"),
    ] {
        let text = refused(registration).await;
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let renew = session.get_function(functions::RENEW).await.unwrap();
    let used = Use { id: 1, serial: Some(99), direct: false, client: "c".to_owned(), for_ms: u64::MAX, silent_ms: 0 };
    let wild = ServerStatus {
        now_ms: u64::MAX,
        uses: vec![used; 1000],
        spent: vec![1, 1, u64::MAX],
        leaving: false,
        details: None,
    };
    let _: Pack<Renewed> = renew.call((&kept[0], Pack(wild))).await.unwrap();

    // Details are counted and cut, and dropped where the session has no memory for them.
    let error = RecentError { ago_ms: u64::MAX, text: "x".repeat(100_000) };
    let report = async |errors| {
        let details = Some(ServerDetails { uptime_ms: u64::MAX, errors, ..ServerDetails::default() });
        renew.call::<Pack<Renewed>>((&kept[0], Pack(ServerStatus { details, ..ServerStatus::default() }))).await
    };
    let refused = report(vec![error.clone(); 9]).await.unwrap_err();
    assert!(refused.message().contains("errors of a report"), "{refused}");
    report(vec![error; 8]).await.unwrap();
    let kept_details = pool.summary().servers.into_iter().filter_map(|server| server.details).next().unwrap();
    assert_eq!((kept_details.uptime_ms, kept_details.errors[7].text.len()), (u64::MAX, 256));
    let wait = session.get_function(functions::WAIT).await.unwrap();
    let error = wait.call::<Value>((&kept[0],)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "a registration is no claim: {error}");
    let error = register.call::<Value>((Pack("nonsense"),)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");

    // The objects of the session end with it.
    drop((register, renew, wait, kept, session));
    pool.until(|summary| summary.servers.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_describes_itself_with_its_first_report_and_its_events_are_kept() {
    let pool = Pool::new().await;
    let server = pool.server("board", |_| {}).await;
    let summary = pool.until(|summary| summary.servers[0].details.is_some()).await;
    let details = summary.servers[0].details.clone().unwrap();
    assert_eq!(details.version, env!("CARGO_PKG_VERSION"));
    let cpu = details.devices.iter().find(|device| device.device == "cpu:0").unwrap();
    assert!(cpu.available_memory <= cpu.total_memory && cpu.total_memory > Some(0), "{cpu:?}");
    assert_eq!((cpu.lease.clone(), details.errors), (None, Vec::new()));
    let events: Vec<_> = summary.events.iter().map(|event| (event.kind, event.key.as_str())).collect();
    assert_eq!(events, [(PoolEventKind::Registered, "board")]);
    drop(server);
    let summary = pool.until(|summary| summary.servers.is_empty()).await;
    assert_eq!(summary.events[0].kind, PoolEventKind::Lost);
}

/// Requests a slot and gives it back at once.
async fn pass_through(session: &Session, request: ServerRequest) -> Vec<Grant> {
    let ask = session.get_function(functions::REQUEST).await.unwrap();
    let place: RemoteObject = ask.call((Pack(request),)).concurrent().await.unwrap();
    let wait = session.get_function(functions::WAIT).await.unwrap();
    let Pack(grants): Pack<Vec<Grant>> = wait.call((&place,)).concurrent().await.unwrap();
    let returned = |grant: &Grant| Returned { serial: grant.serial, why: "not needed".to_owned() };
    let returned: Vec<_> = grants.iter().map(returned).collect();
    let give_back = session.get_function(functions::GIVE_BACK).await.unwrap();
    let _: () = give_back.call((&place, Pack(returned))).concurrent().await.unwrap();
    grants
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_servers_serve_thousands_of_requests() {
    const SERVERS: usize = 2000;
    const CLIENTS: usize = 8;
    const REQUESTS: usize = 200;
    // The registrations are not renewed, so the lease is long; all clients are on this machine.
    let pool = Pool::with(|config| {
        config.lease = Span(Duration::from_secs(3600));
        config.ticket_lifetime = Span(Duration::from_secs(3600));
        config.max_waiting_per_client = CLIENTS * REQUESTS;
        config.allow_advertise = vec!["memory:nowhere".to_owned()];
    })
    .await;
    let address = pool.address().to_string();
    let mut kept = Vec::new();
    let mut sessions = Vec::new();
    for at in 0..SERVERS {
        if at % 500 == 0 {
            // A session may hold a limited number of objects.
            sessions.push(Connector::new().connect(&address).await.unwrap());
        }
        let register = sessions.last().unwrap().get_function(functions::REGISTER).await.unwrap();
        // Nothing but the tracker's own probe goes there.
        let registration = registration(&format!("k{}", at % 4), "memory:nowhere");
        let registration = Registration { name: format!("board-{at}"), ..registration };
        let (object, _): (RemoteObject, Pack<Registered>) = register.call((Pack(registration),)).await.unwrap();
        kept.push(object);
    }
    // The requests together exceed the slots, and some ask for several at once.
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let session = Connector::new().connect(&address).await.unwrap();
        for at in 0..REQUESTS {
            let session = session.clone();
            let count = if at % 50 == 0 { 100 } else { 1 };
            let request = ServerRequest::new(&format!("k{}", (client + at) % 4)).count(count);
            clients.spawn(async move { pass_through(&session, request).await.len() == count as usize });
        }
    }
    while let Some(whole) = clients.join_next().await {
        assert!(whole.unwrap());
    }
    let summary = pool.summary();
    let free: u32 = summary.servers.iter().map(|server| server.free).sum();
    assert_eq!((summary.servers.len(), free as usize, summary.queue.len()), (SERVERS, SERVERS, 0));
}

/// Over an encrypted channel both sides prove that they know the token.
#[tokio::test(flavor = "multi_thread")]
async fn a_tracker_and_its_servers_prove_a_token_to_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "lab 0123456789abcdef0123456789abcdef\n").unwrap();
    for scheme in ["tls", "quic"] {
        let at = listen(&format!("{scheme}://127.0.0.1:0"));
        let pool = Pool::with(|config| {
            config.listen = vec![at.clone()];
            config.token_file = Some(token_file.clone());
            config.forward_token_file = Some(token_file.clone());
        })
        .await;
        let _server = pool
            .server("board", |config| {
                config.listen = vec![at.clone()];
                config.token_file = Some(token_file.clone());
                config.forward_token_file = Some(token_file.clone());
            })
            .await;
        pool.until(|summary| summary.servers[0].reach == Reach::Reached).await;
        let trust = ClientTrust { token_file: Some(token_file.clone()), ..ClientTrust::default() };
        let connector = Connector::new().dial(trust.dial_options().unwrap());
        works(&connector.connect(&pool.key("board")).await.unwrap()).await;
        let error = Connector::new().connect(&pool.key("board")).await.unwrap_err().into_rpc_error();
        assert!(matches!(error.kind(), ErrorKind::Unauthenticated | ErrorKind::Unsupported), "{error}");
    }
}

/// Text after the path of a socket is no key.
#[tokio::test(flavor = "multi_thread")]
async fn a_tracker_behind_a_socket_file_is_asked_for_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| listen(&format!("unix:{}", folder.path().join(name).display()));
    let pool = Pool::with(|config| config.listen = vec![at("pool")]).await;
    let change = |config: &mut ServeConfig| {
        config.listen = vec![at("server")];
        config.key = Some("seven".to_owned());
    };
    let server = pool.server("board", change).await;
    let _other = pool.server("rasp4", |_| {}).await;
    let ListenAddress(tracker) = at("pool");
    let address = format!("tracker+{tracker}?key=board");
    assert_eq!(address, pool.key("board"));
    works(&Connector::new().connect(&address).await.unwrap()).await;
    pool.until_free("board", 1).await;
    let loan = pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap();
    assert_eq!(loan.grant().address, [format!("{}?key=seven", server.addresses()[0])]);

    let error = Connector::new().connect(&format!("tracker+{tracker}/board")).await.unwrap_err().into_rpc_error();
    assert!(error.message().contains("?key=KEY"), "{error}");
}

/// Makes certificates for this machine, with an authority of their own, in a folder.
fn certificates(folder: &std::path::Path) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    command.env_clear().env(NO_OPENCL.0, NO_OPENCL.1).args(["cert", "--host", "127.0.0.1", "--out"]).arg(folder);
    assert!(command.output().unwrap().status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn trust_for_probing_servers_is_reloaded() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    certificates(&ours);
    certificates(&theirs);
    let trusted = folder.path().join("trusted.pem");
    std::fs::copy(theirs.join("ca.pem"), &trusted).unwrap();
    let pool = Pool::with(|config| {
        config.forward_ca = Some(trusted.clone());
        // The stranger cannot prove where it is.
        config.allow_advertise = vec!["tls://127.0.0.1".to_owned()];
    })
    .await;
    let serve = |config: &mut ServeConfig| {
        config.listen = vec![listen("tls://127.0.0.1:0")];
        (config.cert, config.cert_key) = (Some(ours.join("server.pem")), Some(ours.join("server.key")));
    };
    let stranger = |config: &mut ServeConfig| {
        serve(config);
        config.metrics = Some("127.0.0.1:0".parse().unwrap());
    };
    let stranger = pool.server("stranger", stranger).await;
    // The tracker has probed the server by then, with the authorities that it trusted.
    let refused = "rpc_refusals_total{reason=\"unauthenticated\"} 1";
    let metrics = stranger.metrics_address().unwrap();
    let tried = async {
        while !scrape(metrics).await.lines().any(|line| line == refused) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), tried).await.expect("the tracker tries");

    std::fs::copy(ours.join("ca.pem"), &trusted).unwrap();
    pool.running().server.reload().unwrap();
    let _known = pool.server("known", serve).await;
    let summary = pool.until(|summary| of_key(summary, "known").all(|server| server.reach == Reach::Reached)).await;
    assert!(of_key(&summary, "stranger").all(|server| server.reach == Reach::Untried));
    // A file that cannot be used changes nothing.
    std::fs::write(&trusted, "nothing").unwrap();
    pool.running().server.reload().unwrap_err();
    let _another = pool.server("another", serve).await;
    pool.until(|summary| of_key(summary, "another").all(|server| server.reach == Reach::Reached)).await;
}

/// Returns the metrics of a server.
async fn scrape(metrics: SocketAddr) -> String {
    let scrape = move || {
        let mut stream = std::net::TcpStream::connect(metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    tokio::task::spawn_blocking(scrape).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_slots_and_requests() {
    let pool = Pool::with(|config| config.metrics = Some("127.0.0.1:0".parse().unwrap())).await;
    let _server = pool.server("board", |config| config.capacity = 2).await;
    let loan = pool.client().await.request(&soon(ServerRequest::new("board"))).await.unwrap();
    let client = pool.client().await;
    let waits = tokio::spawn(async move { client.request(&soon(ServerRequest::new("rasp4"))).await });
    pool.until(|summary| summary.queue.len() == 1).await;
    let metrics = pool.running().server.metrics_address().unwrap();
    let lines = [
        "rpc_tracker_servers 1",
        "rpc_tracker_slots 2",
        "rpc_tracker_slots_free 1",
        "rpc_tracker_requests_waiting 1",
        "# TYPE rpc_tracker_slots_granted_total counter",
        "rpc_tracker_slots_granted_total 1",
        "rpc_calls_total{function=\"tracker.register\",outcome=\"ok\"} 1",
    ];
    // The tracker may know of a server before the call that registers it is counted.
    let mut text = String::new();
    let counted = async {
        while !lines.iter().all(|line| text.lines().any(|other| other == *line)) {
            text = scrape(metrics).await;
        }
    };
    let counted = tokio::time::timeout(Duration::from_secs(60), counted).await;
    assert!(counted.is_ok(), "{text}");
    waits.abort();
    drop(loan);
}

/// A regression: each answer copied the labels of all granted servers, without a limit.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_to_a_request_is_bounded_however_long_the_labels_of_servers_are() {
    let pool = Pool::with(|config| config.allow_advertise = vec!["memory:nowhere".to_owned()]).await;
    let session = Connector::new().connect(&pool.address().to_string()).await.unwrap();
    let register = session.get_function(functions::REGISTER).await.unwrap();
    let text = "x".repeat(100);
    let registration = Registration {
        labels: (0..60).map(|at| (format!("{text}{at}"), text.clone())).collect(),
        capacity: 4096,
        ..registration("k", "memory:nowhere")
    };
    let (_registered, _): (RemoteObject, Pack<Registered>) = register.call((Pack(registration),)).await.unwrap();
    let ask = async |count| -> Result<usize, RpcError> {
        let request = soon(ServerRequest::new("k").count(count));
        let place: RemoteObject = session.get_function(functions::REQUEST).await?.call((Pack(request),)).await?;
        let Pack(grants): Pack<Vec<Grant>> = session.get_function(functions::WAIT).await?.call((&place,)).await?;
        Ok(grants.len())
    };
    assert_eq!(ask(100).await.unwrap(), 100);
    let error = ask(3000).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("ask for fewer servers"), "{error}");
}

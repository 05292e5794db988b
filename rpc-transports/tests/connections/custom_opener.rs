//! A session opener that this crate does not know: direct, blocking, behind hops, and refused.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use rpc_core::{ErrorKind, LocalSession, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Address, AddressError, Bind, BoxFuture, ConnectError, Connector, OpenRequest, OpenedBy, Properties, Reach,
    ServeOptions, Server, SessionOpener, Transports,
};

/// Opener of addresses `vault://NAME`, whose sessions say who has opened them.
#[derive(Clone, Debug)]
struct Vault {
    owner: &'static str,
    /// Declared properties. `None` declares nothing.
    properties: Option<Properties>,
    opened_by: OpenedBy,
    /// True if sessions can be opened without a runtime.
    is_blocking: bool,
}

impl Vault {
    fn of(owner: &'static str) -> Self {
        let properties = Some(Properties::plain(Reach::Network));
        Self { owner, properties, opened_by: OpenedBy::LastHop, is_blocking: false }
    }

    fn session(&self, to: &Address, connector: &Connector) -> Session {
        assert!(to.key().is_none(), "the key is the connector's");
        let (owner, thread) = (self.owner, thread::current().id());
        let key = connector.requested_key().unwrap_or_default().to_owned();
        let registry = Registry::new();
        registry.add("owner", move || owner.to_owned());
        registry.add("key", move || key.clone());
        registry.add("thread", move || format!("{thread:?}"));
        let session: SharedSession = Arc::new(LocalSession::new(registry));
        session.into()
    }
}

impl SessionOpener for Vault {
    fn schemes(&self) -> &[&str] {
        &["vault"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        match at.host() {
            Some(_) => Ok(self.properties.unwrap_or_default()),
            None => Err(AddressError::invalid(at, "no vault is named; write for example vault://north")),
        }
    }

    fn opened_by(&self) -> OpenedBy {
        self.opened_by
    }

    fn open<'a>(&'a self, to: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(async { Ok(self.session(to, connector)) })
    }

    fn open_blocking(&self, to: &Address, connector: &Connector) -> Option<Result<Session, ConnectError>> {
        self.is_blocking.then(|| Ok(self.session(to, connector)))
    }
}

async fn hop(name: &str, vault: Option<Vault>, allow_forward: &str) -> String {
    let nothing = |_: &OpenRequest| -> Result<SharedSession, RpcError> { panic!("no session is opened here") };
    let transports = vault.into_iter().fold(Transports::default(), Transports::with_opener);
    let allow_forward = vec![allow_forward.to_owned(), "memory:*".to_owned()];
    let options = ServeOptions { transports, allow_forward, ..ServeOptions::default() };
    let address = format!("memory:opener-{name}").parse().unwrap();
    Server::new(Arc::new(nothing), options).listen(&address, &Bind::default()).await.unwrap().to_string()
}

fn client(vault: Vault) -> Connector {
    Connector::new().transports(Transports::default().with_opener(vault))
}

async fn answer(session: &Session, function: &str) -> String {
    session.function::<(), String>(function).await.unwrap().call(()).await.unwrap()
}

fn refusal(outcome: Result<Session, ConnectError>) -> RpcError {
    outcome.expect_err("there is no session").into_rpc_error()
}

#[tokio::test]
async fn an_address_is_opened_with_the_key_that_is_asked_for() {
    let connector = client(Vault::of("client"));
    let session = connector.connect("vault://north").await.unwrap();
    assert_eq!((answer(&session, "owner").await, answer(&session, "key").await), ("client".into(), String::new()));
    let session = connector.clone().key("red").connect("vault://north").await.unwrap();
    assert_eq!(answer(&session, "key").await, "red");
    let session = connector.clone().key("red").connect("vault://north/blue").await.unwrap();
    assert_eq!(answer(&session, "key").await, "blue", "as for servers, the address decides");
    let error = refusal(connector.connect("vault:north").await);
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("no vault is named"), "{error}");
}

#[test]
fn a_blocking_client_opens_on_its_own_thread_where_the_opener_can() {
    let own = |connector: Connector| {
        let session = connector.connect_blocking("vault://north").unwrap();
        session.function::<(), String>("thread").wait().unwrap().call(()).wait().unwrap()
    };
    let this: ThreadId = thread::current().id();
    assert_eq!(own(client(Vault { is_blocking: true, ..Vault::of("client") })), format!("{this:?}"));
    assert_ne!(own(client(Vault::of("client"))), format!("{this:?}"), "the background runtime opens it");
}

#[tokio::test]
async fn behind_hops_the_last_one_opens_the_session() {
    let first = hop("first", Some(Vault::of("first")), "vault://*").await;
    // The first hop's operator allows the second hop; what is behind that is the second's business.
    let second = hop("second", Some(Vault::of("second")), "vault://north").await;
    for connector in [Connector::new(), client(Vault::of("client"))] {
        let one = connector.clone().via(&first);
        assert_eq!(answer(&one.connect("vault://north").await.unwrap(), "owner").await, "first");
        let two = one.via(&second);
        let session = two.connect("vault://north/red").await.unwrap();
        assert_eq!((answer(&session, "owner").await, answer(&session, "key").await), ("second".into(), "red".into()));
        let error = session.get_function("nothing").await.unwrap_err();
        assert_eq!((error.kind(), error.hop()), (ErrorKind::NotFound, 2));
        let blocking = move || {
            let session = two.connect_blocking("vault://north").unwrap();
            session.function::<(), String>("owner").wait().unwrap().call(()).wait().unwrap()
        };
        assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), "second");
    }
    let error = refusal(Connector::new().via(&first).via(&second).connect("vault://south").await);
    assert_eq!((error.kind(), error.hop()), (ErrorKind::Refused, 2), "{error}");
}

#[tokio::test]
async fn patterns_of_operators_stand_for_it_as_for_a_transport() {
    let undeclared = Vault { properties: None, ..Vault::of("hop") };
    for (number, (vault, pattern, is_allowed)) in [
        (undeclared.clone(), "*", false),
        (undeclared.clone(), "*://north", false),
        (undeclared, "vault://*", true),
        (Vault::of("hop"), "*", true),
        (Vault::of("hop"), "vault://south", false),
    ]
    .into_iter()
    .enumerate()
    {
        let hop = hop(&format!("pattern-{number}"), Some(vault), pattern).await;
        let outcome = Connector::new().via(&hop).connect("vault://north").await;
        match is_allowed {
            true => assert_eq!(answer(&outcome.unwrap(), "owner").await, "hop", "{pattern}"),
            false => assert_eq!(refusal(outcome).kind(), ErrorKind::Refused, "{pattern}"),
        }
    }
    let without = hop("without", None, "vault://north").await;
    let error = refusal(Connector::new().via(&without).connect("vault://north").await);
    assert_eq!((error.kind(), error.hop()), (ErrorKind::InvalidArgument, 1), "{error}");
    assert!(error.message().contains("tracker"), "the known schemes are listed: {error}");
}

#[tokio::test]
async fn what_the_client_opens_itself_is_opened_by_no_server() {
    let by_client = |owner| Vault { opened_by: OpenedBy::Client, ..Vault::of(owner) };
    let hop = hop("by-client", Some(by_client("hop")), "vault://*").await;
    let session = client(by_client("client")).via(&hop).connect("vault://north").await.unwrap();
    assert_eq!(answer(&session, "owner").await, "client");
    // A client that does not know the scheme leaves it to the hop.
    let error = refusal(Connector::new().via(&hop).connect("vault://north").await);
    assert_eq!((error.kind(), error.hop()), (ErrorKind::Refused, 1), "{error}");
}

#[tokio::test]
async fn it_is_the_last_stop_and_no_hop_and_no_end_of_a_tunnel() {
    let hop = hop("tunnel", Some(Vault::of("hop")), "*").await;
    for connector in [
        client(Vault::of("client")).via("vault://north"),
        client(Vault::of("client")).via("tunnel:vault://north"),
        client(Vault::of("client")).via(&hop).via("vault://north"),
    ] {
        let error = refusal(connector.connect("memory:anywhere").await);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
    let error = refusal(client(Vault::of("client")).via(&format!("tunnel:{hop}")).connect("vault://north").await);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let address = "vault://north".parse().unwrap();
    let transports = Transports::default().with_opener(Vault::of("server"));
    assert!(transports.bind(&address, &Bind::default()).await.is_err());
    assert!(transports.get("vault").is_none() && transports.opener("vault").is_some());
}

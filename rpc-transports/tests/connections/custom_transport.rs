//! A transport that this crate does not know, at all the places that take transports.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use rpc_core::Registry;
use rpc_transports::{
    Accept, Address, AddressError, Bind, BoxFuture, Channel, ConnectError, Connector, Dial, Listener, ParkOptions,
    Properties, Reach, ServeOptions, Server, Transport, TransportError, Transports,
};
use tokio::sync::mpsc;

/// Addresses `pigeon://NAME`, which lead to listeners of the same loft.
#[derive(Clone, Debug, Default)]
struct Pigeons {
    loft: Arc<Mutex<HashMap<String, mpsc::Sender<Channel>>>>,
    /// Properties that the transport declares, if any.
    properties: Option<Properties>,
    /// For each channel that was dialled, true if the user may have been asked for it.
    prompts: Arc<Mutex<Vec<bool>>>,
}

impl Pigeons {
    fn declared(properties: Properties) -> Self {
        Self { properties: Some(properties), ..Self::default() }
    }

    fn name(at: &Address) -> String {
        at.host().unwrap_or_default().to_owned()
    }
}

impl Transport for Pigeons {
    fn schemes(&self) -> &[&str] {
        &["pigeon"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        match at.host() {
            Some(_) => Ok(self.properties.unwrap_or_default()),
            None => Err(AddressError::invalid(at, "no loft is named; write for example pigeon://roof")),
        }
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(async move {
            self.prompts.lock().unwrap().push(with.may_prompt);
            let listener = self.loft.lock().unwrap().get(&Self::name(to)).cloned();
            let refused = || TransportError::from_io(to.to_string(), io::ErrorKind::ConnectionRefused.into());
            let (near, far) = tokio::io::duplex(1 << 16);
            let listener = listener.ok_or_else(refused)?;
            listener.send(Channel::new(far, "pigeon://")).await.map_err(|_| refused())?;
            Ok(Channel::new(near, to.to_string()))
        })
    }

    fn bind<'a>(&'a self, at: &'a Address, _: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(async move {
            let (sender, arrivals) = mpsc::channel(16);
            self.loft.lock().unwrap().insert(Self::name(at), sender);
            Ok(Listener::new(at.clone(), Perch(arrivals)))
        })
    }
}

struct Perch(mpsc::Receiver<Channel>);

impl Accept for Perch {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        self.0.poll_recv(cx).map(|channel| channel.ok_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }
}

fn server(transports: &Transports, allow_forward: &[&str]) -> Server {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    let allow_forward = allow_forward.iter().map(|&pattern| pattern.to_owned()).collect();
    Server::new(
        Arc::new(registry),
        ServeOptions { transports: transports.clone(), allow_forward, ..Default::default() },
    )
}

async fn listen(server: &Server, address: &str) {
    server.listen(&address.parse().unwrap(), &Bind::default()).await.unwrap();
}

async fn adds(connector: &Connector, target: &str) -> Result<(), ConnectError> {
    let session = connector.connect(target).await?;
    let add = session.function::<(i64, i64), i64>("add").await?;
    assert_eq!(add.call((1, 2)).await?, 3);
    Ok(())
}

fn flock() -> Pigeons {
    Pigeons::declared(Properties::plain(Reach::Network))
}

#[tokio::test]
async fn it_connects_serves_and_is_a_hop() {
    let transports = Transports::default().with(flock());
    let (origin, hop) = (server(&transports, &[]), server(&transports, &["pigeon://*"]));
    listen(&origin, "pigeon://origin").await;
    listen(&hop, "pigeon://hop").await;
    let connector = Connector::new().transports(transports);
    adds(&connector, "pigeon://origin").await.unwrap();
    adds(&connector.clone().via("pigeon://hop"), "pigeon://origin").await.unwrap();
    let blocking = tokio::task::spawn_blocking(move || connector.connect_blocking("pigeon://origin").map(drop));
    blocking.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_server_lets_it_ask_the_user_nothing() {
    let pigeons = flock();
    let transports = Transports::default().with(pigeons.clone());
    let (origin, hop) = (server(&transports, &[]), server(&transports, &["pigeon://*"]));
    listen(&origin, "pigeon://asked").await;
    listen(&hop, "pigeon://asking").await;
    let connector = Connector::new().transports(transports).via("pigeon://asking");
    adds(&connector, "pigeon://asked").await.unwrap();
    let options = ParkOptions { key: "board".into(), ..ParkOptions::default() };
    hop.park_once(&"pigeon://asked".parse().unwrap(), &options).await.unwrap_err();
    // The client dials for itself, and the hop for the client and for its own clients at a relay.
    assert_eq!(*pigeons.prompts.lock().unwrap(), [true, false, false]);
}

#[tokio::test]
async fn what_it_does_not_declare_is_refused_to_wildcards() {
    let transports = Transports::default().with(Pigeons::default());
    let origin = server(&transports, &[]);
    listen(&origin, "pigeon://origin").await;
    for (number, (pattern, is_allowed)) in
        [("*", false), ("*://*:*", false), ("pigeon://*", true)].into_iter().enumerate()
    {
        let (hop, address) = (server(&transports, &[pattern]), format!("memory:cautious-{number}"));
        listen(&hop, &address).await;
        let connector = Connector::new().transports(transports.clone()).via(&address);
        let outcome = adds(&connector, "pigeon://origin").await;
        assert_eq!(outcome.is_ok(), is_allowed, "{pattern}: {outcome:?}");
    }
}

#[tokio::test]
async fn a_tunnel_does_not_lead_where_the_transport_names_no_target() {
    let transports = Transports::default().with(flock());
    let (origin, hop) = (server(&transports, &[]), server(&transports, &["pigeon://*"]));
    listen(&origin, "pigeon://origin").await;
    listen(&hop, "memory:pigeon-tunnel").await;
    let connector = Connector::new().transports(transports).via("tunnel:memory:pigeon-tunnel");
    let error = adds(&connector, "pigeon://origin").await.unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), rpc_core::ErrorKind::Unsupported, "{error}");
}

#[tokio::test]
async fn without_it_the_error_lists_the_schemes_that_are_known() {
    let error = adds(&Connector::new(), "pigeon://origin").await.unwrap_err();
    assert!(matches!(error, ConnectError::Address(_)), "{error:?}");
    let text = error.into_rpc_error().to_string();
    assert!(text.contains("pigeon:") && text.contains("memory"), "{text}");
    let error = adds(&Connector::new().transports(Transports::empty().with(flock())), "pigeon:roof").await.unwrap_err();
    assert!(error.into_rpc_error().to_string().contains("no loft is named"));
}

#[tokio::test]
async fn a_server_refuses_channels_that_are_not_as_encrypted_as_declared() {
    let transports = Transports::default().with(Pigeons::declared(Properties::encrypted(Reach::Network)));
    let origin = server(&transports, &[]);
    listen(&origin, "pigeon://origin").await;
    // A client that checks nothing, as a connector of this crate would.
    let mut channel =
        transports.dial(&"pigeon://origin".parse().unwrap(), &rpc_transports::Dial::default()).await.unwrap();
    let mut answer = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(channel.io_mut(), &mut answer).await.unwrap();
    assert!(answer.is_empty(), "the server closes the channel, and says nothing over it");
    let error = adds(&Connector::new().transports(transports.clone()), "pigeon://origin").await.unwrap_err();
    assert!(error.into_rpc_error().to_string().contains("encrypted"));
    // As a relay, the peer is refused in the same words.
    let parks = ParkOptions { key: "board".into(), ..ParkOptions::default() };
    let error = origin.park_once(&"pigeon://origin".parse().unwrap(), &parks).await.unwrap_err();
    assert!(error.into_rpc_error().to_string().contains("are encrypted, their transport says"));
}

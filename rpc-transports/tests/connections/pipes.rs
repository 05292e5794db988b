//! Chains of calls that name each other's results: all of them are on their way before the first
//! reply is.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{
    LocalSession, Pipe, Registry, RemoteFunction, Request, RpcError, RpcSession, Session, SharedSession, Submission,
};
use rpc_transports::{Address, Bind, Connector, OpenRequest, ServeOptions, Server};
use tokio::sync::{Semaphore, watch};

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

/// Calls of a chain.
const CALLS: usize = 8;

/// Session that counts the requests that have come to the origin.
struct Counted {
    inner: LocalSession,
    arrived: watch::Sender<usize>,
}

impl RpcSession for Counted {
    fn submit(&self, request: Request) -> Submission {
        let submission = self.inner.submit(request);
        self.arrived.send_modify(|arrived| *arrived += 1);
        submission
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }
}

/// Origin whose function `held_add` waits for a permit before it returns, and its address.
async fn origin(arrived: watch::Sender<usize>, permits: Arc<Semaphore>) -> (Server, String) {
    let open = move |_: &OpenRequest| -> Result<SharedSession, RpcError> {
        let (registry, permits) = (Registry::new(), permits.clone());
        registry.add("held_add", move |a: i64, b: i64| {
            let permits = permits.clone();
            let acquired = rpc_core::blocking::block_on(async move { permits.acquire_owned().await });
            acquired.expect("blocking is possible").expect("permits come").forget();
            a + b
        });
        Ok(Arc::new(Counted { inner: LocalSession::new(registry), arrived: arrived.clone() }))
    };
    listen(Server::new(Arc::new(open), ServeOptions::default())).await
}

async fn hop() -> (Server, String) {
    let open = |_: &OpenRequest| -> Result<SharedSession, RpcError> { Err(RpcError::not_found("no session here")) };
    let options = ServeOptions { allow_forward: vec!["*".into()], ..ServeOptions::default() };
    listen(Server::new(Arc::new(open), options)).await
}

async fn listen(server: Server) -> (Server, String) {
    let address: Address = "tcp://127.0.0.1:0".parse().unwrap();
    let address = server.listen(&address, &Bind::default()).await.unwrap().to_string();
    (server, address)
}

/// Starts a chain of calls, and the look-up of their function, which is a result as well.
fn start(session: &Session) -> rpc_core::Pending<i64> {
    let add: Pipe<RemoteFunction> = session.get_function("held_add").pipe();
    let add = add.function().unwrap();
    let mut sum: Pipe<i64> = add.call((1, 1)).pipe();
    for _ in 2..CALLS {
        sum = add.call((sum, 1)).pipe();
    }
    add.call((sum, 1)).start()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_of_calls_is_on_its_way_before_the_first_reply() {
    let (arrived, permits) = (watch::Sender::new(0), Arc::new(Semaphore::new(0)));
    let (_origin, address) = origin(arrived.clone(), permits.clone()).await;
    let ((_first, first), (_second, second)) = (hop().await, hop().await);
    for connector in [Connector::new(), Connector::new().via(&first), Connector::new().via(&first).via(&second)] {
        for blocking in [false, true] {
            let before = *arrived.borrow();
            let (connector, address) = (connector.clone(), address.clone());
            let sum = tokio::spawn(async move {
                if !blocking {
                    return start(&connector.connect(&address).await.unwrap()).await;
                }
                let wait = move || start(&connector.connect_blocking(&address).unwrap()).wait();
                tokio::task::spawn_blocking(wait).await.unwrap()
            });
            // The function has not returned once, and all have come.
            let mut arrivals = arrived.subscribe();
            let all = arrivals.wait_for(|arrived| *arrived >= before + 1 + CALLS);
            tokio::time::timeout(LIMIT, all).await.expect("all calls come at once").unwrap();
            permits.add_permits(CALLS);
            let sum = tokio::time::timeout(LIMIT, sum).await.expect("the chain ends").unwrap();
            assert_eq!(sum.unwrap(), 1 + CALLS as i64);
        }
    }
}

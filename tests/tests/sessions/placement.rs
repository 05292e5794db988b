//! A placed graph over servers: with async sessions, and with blocking ones on a plain thread.

use std::future::IntoFuture;

use rpc_core::placement::{CallGraph, Constraint, Plan, Site, ValueId};
use rpc_core::tensor::{TensorView, TensorViewMut};
use rpc_core::{DataType, Registry, Result, Session, Value, blocking, dlpack};
use rpc_transports::{Bind, Connector, Server};

/// Number of elements that takes more than one piece of a copy between sessions.
const LEN: i64 = (5 << 20) / 4 + 1;

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add("scale", |x: TensorView, by: f32, mut y: TensorViewMut| -> Result<()> {
        let x = x.as_slice::<f32>()?;
        y.as_mut_slice::<f32>()?.iter_mut().zip(x).for_each(|(y, x)| *y = by * x);
        Ok(())
    });
    registry
}

async fn server() -> (Server, String) {
    let server = Server::serving(registry());
    let address = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
    (server, address.to_string())
}

/// Builds a graph that runs in the first session, the second, and the first again.
fn plan(sites: &[Site]) -> Plan {
    let mut graph = CallGraph::new();
    let mut last: ValueId = graph.input("x", DataType::F32, &[LEN]).into();
    for (step, place) in ["one", "two", "one"].into_iter().enumerate() {
        let arguments = vec![last.into(), Value::Float(2.0 + step as f64).into()];
        let call = graph.call("scale", arguments, &[(DataType::F32, &[LEN])]);
        graph.constrain(call, Constraint::session(place), "to see data move");
        last = call.result(0);
    }
    graph.output("y", last);
    graph.plan(sites).unwrap()
}

fn input() -> Vec<f32> {
    (0..LEN).map(|at| (at % 977) as f32).collect()
}

fn check(output: &[f32]) {
    assert!(output.iter().zip(input()).all(|(y, x)| *y == 2.0 * 3.0 * 4.0 * x));
}

#[tokio::test(flavor = "multi_thread")]
async fn over_async_sessions() {
    let servers = [server().await, server().await];
    let mut sessions = Vec::new();
    let mut sites = Vec::new();
    for (name, (_, address)) in ["one", "two"].into_iter().zip(&servers) {
        let session = Connector::new().connect(address).await.unwrap();
        sites.push(Site::of(name, &session).await.unwrap());
        sessions.push((name, session));
    }
    let plan = plan(&sites);
    assert_eq!(plan.copies(), 2);
    // Two runs of one plan at the same time do not disturb each other.
    let run = || plan.run(&sessions, vec![("x", dlpack::to_bytes(&input()).into())]).into_future();
    let (first, second) = tokio::join!(run(), run());
    for outputs in [first.unwrap(), second.unwrap()] {
        check(&sessions[0].1.download::<f32>(&outputs["y"]).await.unwrap());
    }
}

#[test]
fn over_blocking_sessions() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let servers = runtime.block_on(async { [server().await, server().await] });
    let connect = |address: &String| Connector::new().connect_blocking(address).unwrap();
    let sessions: Vec<(&str, Session)> =
        ["one", "two"].into_iter().zip(&servers).map(|(name, (_, address))| (name, connect(address))).collect();
    let site = |(name, session): &(&str, Session)| blocking::block_on(Site::of(name, session)).unwrap().unwrap();
    let plan = plan(&sessions.iter().map(site).collect::<Vec<_>>());
    let outputs = plan.run(&sessions, vec![("x", dlpack::to_bytes(&input()).into())]).wait().unwrap();
    check(&sessions[0].1.download::<f32>(&outputs["y"]).wait().unwrap());
}

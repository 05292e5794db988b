//! Trace contexts over the wire.

use std::sync::Arc;

use rpc_core::{Context, Registry, Session, TraceContext};
use rpc_transports::{Address, Bind, Connector, ServeOptions, Server};

async fn serve(registry: Registry) -> (Server, String) {
    let options = ServeOptions { allow_forward: vec!["tcp://127.0.0.1:*".into()], ..Default::default() };
    let server = Server::new(Arc::new(registry), options);
    let address = "tcp://127.0.0.1:0".parse::<Address>().unwrap();
    let address = server.listen(&address, &Bind::default()).await.unwrap().to_string();
    (server, address)
}

fn registry() -> Registry {
    let registry = Registry::new();
    let seen = |context: Context| context.trace().map(|trace| trace.to_string());
    registry
        .add("blocking", seen)
        .add_inline("inline", seen)
        .add_async("async", move |context: Context| async move { seen(context) });
    registry
}

fn context() -> TraceContext {
    // With flags that this version does not know.
    TraceContext::new([7; 16], [9; 8], 0xa3).unwrap()
}

async fn seen(session: &Session, name: &str, trace: Option<TraceContext>) -> Option<String> {
    let function = session.get_function(name).await.unwrap();
    let call = function.call::<Option<String>>(());
    match trace {
        Some(trace) => call.trace(trace).await.unwrap(),
        None => call.await.unwrap(),
    }
}

#[tokio::test]
async fn a_trace_context_crosses_tcp_and_hops_unchanged() {
    let (_origin, address) = serve(registry()).await;
    let (_hop, hop) = serve(Registry::new()).await;
    for connector in [Connector::new(), Connector::new().via(&hop)] {
        let session = connector.connect(&address).await.unwrap();
        for name in ["blocking", "inline", "async"] {
            assert_eq!(seen(&session, name, Some(context())).await, Some(context().to_string()), "{name}");
            assert_eq!(seen(&session, name, None).await, None, "{name}");
        }
    }
}

#[tokio::test]
async fn nested_calls_to_another_server_belong_to_the_same_trace() {
    let (_back, back) = serve(registry()).await;
    let registry = Registry::new();
    let session = Connector::new().connect(&back).await.unwrap();
    registry.add_async("async", move || {
        let session = session.clone();
        async move {
            let function = session.get_function("async").await.unwrap();
            tokio::task::yield_now().await;
            function.call::<Option<String>>(()).await.unwrap()
        }
    });
    let connecting = tokio::task::spawn_blocking(move || Connector::new().connect_blocking(&back).unwrap());
    let session = connecting.await.unwrap();
    registry.add("blocking", move || {
        let function = session.get_function("blocking").wait().unwrap();
        function.call::<Option<String>>(()).wait().unwrap()
    });
    let (_front, front) = serve(registry).await;
    let session = Connector::new().connect(&front).await.unwrap();
    for name in ["blocking", "async"] {
        assert_eq!(seen(&session, name, Some(context())).await, Some(context().to_string()), "{name}");
        assert_eq!(seen(&session, name, None).await, None, "{name}");
    }
}

//! A client in Python that was written from PROTOCOL.md alone, against a server of this checkout:
//! the document says all that such a client needs.

use std::process::Command;
use std::sync::Arc;

use rpc_core::{LocalSession, SharedSession, Spawner};
use rpc_tests::functions;
use rpc_transports::{Access, Bind, OpenRequest, ServeOptions, Server, Tokens, TokioSpawner};

const TOKEN: &str = "rpct_0123456789abcdef0123456789abcdef";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_written_from_the_protocol_document_passes_its_checks() {
    let factory = |_: &OpenRequest| -> Result<SharedSession, rpc_core::RpcError> {
        let spawner: Arc<dyn Spawner> = Arc::new(TokioSpawner::current());
        Ok(Arc::new(LocalSession::builder(functions::registry()).spawner(spawner).build()))
    };
    let access = Access { anonymous: false, tokens: Tokens::parse(TOKEN).unwrap(), certificates: false };
    let server = Server::new(Arc::new(factory), ServeOptions { access, ..ServeOptions::default() });
    let address = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/check_protocol.py");
    let run = tokio::task::spawn_blocking(move || {
        let (host, port) = address.host_and_port().unwrap();
        Command::new("python3").arg("-B").arg(script).args([&format!("{host}:{port}"), TOKEN]).output()
    });
    let output = run.await.unwrap().expect("there is Python");
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.lines().filter(|line| line.starts_with("ok ")).count() >= 20, "{printed}");
}

//! A worker process of tests: serves the functions of workers over its standard input and output.

// It serves tests: whatever goes wrong is a reason to panic.
#![allow(clippy::unwrap_used)]

use rpc_tests::spmd;
use rpc_transports::ServeOptions;
use rpc_transports::child::stdio_channel;

#[tokio::main]
async fn main() {
    let server = spmd::node(ServeOptions::default());
    server.serve_channel(stdio_channel().await.unwrap());
    server.idle().await;
}

//! An origin in a process of its own, for `exec:` and `ssh://` addresses: serves one session over
//! standard input and output, and ends with it. Its arguments are the limits of the session.

#[tokio::main]
async fn main() {
    rpc_conformance::fixture::serve_stdio(std::env::args().skip(1), rpc_tests::native::registry()).await;
}

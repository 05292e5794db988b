//! A node of Disco in a process of its own: a worker over standard input and output, or, with the
//! argument `serve`, a server behind TCP.

fn main() {
    disco::serve_if_worker(&rpc_tests::spmd::registry());
    match std::env::args().nth(1).as_deref() {
        Some("serve") => rpc_tests::spmd::serve_node(),
        other => panic!("this program is a worker, and was started with {other:?}"),
    }
}

//! A worker process of tests: serves the functions of workers over its standard input and output.

fn main() {
    disco::serve_if_worker(&rpc_tests::spmd::registry());
    panic!("this program is a worker, and was not started as one");
}

//! Clauses of the conformance suite over TVM's protocol: those that need nothing that the protocol
//! lacks. That is lanes and so calls beside each other, callbacks, kinds of errors, and values such
//! as lists, in which the suite's functions tell what they have counted.

use rpc_conformance::clauses;
use rpc_conformance::fixture::{BoxFuture, Fixture};
use rpc_conformance::functions;
use rpc_core::{Session, SessionLimits};
use rpc_server::config::{ByteSize, Isolate, ServeConfig};
use rpc_server::{RpcServer, Running};
use rpc_transports::Connector;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

/// Servers of the suite's functions that speak TVM's protocol, one for each session.
struct Tvm {
    runtime: Handle,
    folder: tempfile::TempDir,
    running: Mutex<Vec<Running>>,
}

impl Tvm {
    fn new() -> Self {
        Self { runtime: Handle::current(), folder: tempfile::tempdir().unwrap(), running: Mutex::default() }
    }

    /// Starts a server whose sessions have these limits. Returns its address.
    async fn start(&self, limits: SessionLimits) -> String {
        let config = ServeConfig {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            workdir: self.folder.path().join("work"),
            isolate: Isolate::None,
            tvm: true,
            max_handles: limits.max_handles,
            max_memory: ByteSize(limits.max_memory.min(1 << 40)),
            max_threads: limits.max_threads,
            ..ServeConfig::default()
        };
        let running = RpcServer::new(functions::registry()).config(config).start().await.unwrap();
        let address = running.addresses()[0].to_string().replace("tcp://", "tvm://");
        self.running.lock().await.push(running);
        address
    }
}

fn connector() -> Connector {
    Connector::new().transports(rpc_server::transports())
}

impl Fixture for Tvm {
    fn session(&self, limits: SessionLimits) -> BoxFuture<'_, Session> {
        Box::pin(async move { connector().connect(&self.start(limits).await).await.unwrap() })
    }

    fn blocking_session(&self, limits: SessionLimits) -> Session {
        connector().connect_blocking(&self.runtime.block_on(self.start(limits))).unwrap()
    }

    fn hops(&self) -> u16 {
        1
    }
}

clauses! { contract = Tvm::new(), in rpc_conformance::clauses;
    functions {
        a_function_is_found_by_its_name_and_called
        floats_keep_their_bits
    }
    handles {
        objects_keep_their_identity
        a_reference_may_be_dropped_right_behind_a_call
        handles_of_another_session_are_refused
    }
    tensors {
        tensors_are_copied_among_each_other
        vectors_go_up_and_come_down
    }
    order {
        copies_keep_their_place_among_calls
        lanes_share_the_objects
    }
    pipelining {
        copies_pass_a_small_queue
    }
    pipes {
        calls_take_the_results_of_earlier_ones
    }
    deadlines {
        a_deadline_that_is_kept_does_nothing
    }
    copies {
        every_size_arrives_as_it_was_sent
        parts_are_copied_and_nothing_else_is_touched
        views_are_copied_from_where_they_start
        progress_grows_to_the_whole
        a_buffer_that_is_passed_in_becomes_the_result
        the_blocking_form_reads_into_a_slice
        a_copy_keeps_its_tensor
    }
}

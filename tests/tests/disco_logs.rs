//! Log lines of workers, which come to the controller. The test has a process of its own, because
//! the subscriber belongs to the process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use disco::{DiscoSession, Options, SocketSession};
use rpc_tests::spmd::{Launch, Node};
use tracing_subscriber::fmt::MakeWriter;

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

fn say(session: &DiscoSession, by: &str, what: &str) {
    session.get_global_func(by).unwrap().call((what,)).unwrap();
    // Lines keep their order.
    session.sync_all().wait().unwrap();
}

#[test]
fn lines_of_workers_come_with_their_numbers_unless_they_are_turned_off() {
    let lines = Lines::default();
    tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false).init();
    for launch in [Launch::Processes(NODE), Launch::NodeOfProcesses(NODE)] {
        let fixture = launch.start(2, 1);
        say(&fixture.session, "log", "from everywhere");
        say(&fixture.session, "print", "printed");
        let text = lines.text();
        for worker in 0..2 {
            let expected = format!("WARN disco::worker: [{worker}] rpc_tests::spmd: from everywhere answer=42");
            assert!(text.contains(&expected), "{launch:?}: {text}");
        }
        assert!(!text.contains("in detail"), "{text}");
        // Printed lines arrive at an unknown time.
        for (worker, by) in [(0, "output"), (0, "error"), (1, "output"), (1, "error")] {
            let expected = format!("INFO disco::worker: [{worker}] stderr: printed, by standard {by}");
            let begun = Instant::now();
            while !lines.text().contains(&expected) {
                assert!(begun.elapsed() < Duration::from_secs(60), "{launch:?}: {expected} is not in {}", lines.text());
                thread::yield_now();
            }
        }
        lines.0.lock().unwrap().clear();
    }
    let mut options = Options::default();
    options.worker_logs = None;
    let fixture = Launch::Processes(NODE).try_start_with(2, 1, options).unwrap();
    say(&fixture.session, "log", "to nobody");
    assert!(!lines.text().contains("to nobody"));
    // The workers are threads of this program, and a span names the worker.
    let fixture = Launch::Threads.start(2, 1);
    say(&fixture.session, "log", "from a thread");
    let text = lines.text();
    assert!(text.contains("worker{id=1}: rpc_tests::spmd: from a thread"), "{text}");
    assert!(!text.contains("disco::worker: [1]"), "{text}");
    the_loss_of_many_workers_is_told_once(&lines);
}

/// Each of the workers of a node is lost with it, and so is the session with each of the others.
fn the_loss_of_many_workers_is_told_once(lines: &Lines) {
    const PER_NODE: u32 = 48;
    let mut nodes: Vec<Node> = (0..3).map(|_| Node::start(NODE)).collect();
    let addresses: Vec<String> = nodes.iter().map(|node| node.address().to_owned()).collect();
    let session = SocketSession::new(&addresses, PER_NODE, 1).start().wait().unwrap();
    session.sync_all().wait().unwrap();
    lines.0.lock().unwrap().clear();
    // Killed, and waited for.
    drop(nodes.remove(1));
    let error = loop {
        if let Err(error) = session.sync_all().wait() {
            break error;
        }
    };
    let text = error.to_string();
    assert!(text.contains(&format!("workers 48 to 95 at {} was lost", addresses[1])), "{text}");
    assert_eq!(session.sync_all().wait().unwrap_err(), error);
    session.shutdown().wait().unwrap();
    let text = lines.text();
    let told: Vec<&str> = text.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
    let [told] = told[..] else { panic!("{told:?}") };
    assert!(told.contains("a disco session has ended") && told.contains("workers 48 to 95"), "{told}");
}

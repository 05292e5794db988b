//! `rpc-cli disco top`: workers, who is missing in a collective, the trace, and the right to ask.

use std::fs;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use disco::{SocketSession, WorkerContext};
use rpc_core::{Registry, RpcError};
use rpc_server::config::ServeConfig;
use rpc_server::{RpcServer, Running};
use serde_json::Value as Json;
use tempfile::TempDir;

use super::cli::{command, run};

/// A latch that worker 1 waits for before it comes to the collective.
#[derive(Default)]
struct Latch(Mutex<bool>, Condvar);

impl Latch {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

async fn server(folder: &TempDir, latch: &Arc<Latch>, policy: Option<&str>) -> Running {
    let registry = Registry::new();
    let latch = latch.clone();
    registry.add("meet", move |worker: WorkerContext| -> Result<(), RpcError> {
        if worker.worker_id().0 == 1 {
            latch.wait();
        }
        worker.barrier(disco::Scope::World)
    });
    let policy = policy.map(|text| {
        let file = folder.path().join("policy.toml");
        fs::write(&file, text).unwrap();
        file
    });
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().join(if policy.is_some() { "restricted" } else { "open" }),
        allow_disco: Some(true),
        policy,
        ..ServeConfig::default()
    };
    RpcServer::new(registry).config(config).start().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn top_names_the_worker_that_a_collective_waits_for() {
    let (folder, latch) = (tempfile::tempdir().unwrap(), Arc::<Latch>::default());
    let (first, second) = (server(&folder, &latch, None).await, server(&folder, &latch, None).await);
    let addresses = [&first, &second].map(|server| server.addresses()[0].to_string());
    let trace = folder.path().join("trace.json");
    let (latch, folder) = (latch.clone(), folder);
    let work = move || {
        let _folder = folder;
        let [a, b] = &addresses;
        let none = run(command(&["disco", "top", a])).ok();
        assert_eq!(none, "no sessions of Disco\n");

        let session = SocketSession::new([a.as_str(), b.as_str()], 2, 1).start().wait().unwrap();
        let meet = session.get_global_func("meet").unwrap();
        let _met = meet.call(()).unwrap();
        let _queued = meet.call(()).unwrap();
        let began = Instant::now();
        let merged = loop {
            let top = run(command(&["--json", "disco", "top", a, b, "--trace", trace.to_str().unwrap()])).ok();
            let sessions: Json = serde_json::from_str(&top).unwrap();
            // Worker 1 may be the last one to begin its command.
            let late = &sessions[0]["workers"][1];
            let is_late = (&late["command"], &late["queued"]) == (&"meet".into(), &1.into());
            if is_late && sessions[0]["collectives"][0]["entered"] == serde_json::json!([0, 2, 3]) {
                break sessions[0].clone();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{sessions:#}");
        };
        assert_eq!((&merged["world_size"], merged["workers"].as_array().unwrap().len()), (&4.into(), 4));
        let collective = &merged["collectives"][0];
        assert_eq!((&collective["missing"], &collective["unknown"]), (&serde_json::json!([1]), &serde_json::json!([])));

        // Without the second server its workers are not known; and the text says all of it.
        let text = run(command(&["disco", "top", a])).ok();
        assert!(text.contains("entered by 0; MISSING: 1; not known of 2-3"), "{text}");

        let trace: Json = serde_json::from_slice(&fs::read(&trace).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let running = events.iter().filter(|event| event["args"]["outcome"] == "running");
        let lines: Vec<_> = running.map(|event| (event["pid"].as_u64(), event["tid"].as_u64())).collect();
        assert_eq!(lines, [(Some(1), Some(0)), (Some(2), Some(2)), (Some(2), Some(3))]);
        assert!(events.iter().all(|event| event["ph"] == "M" || event["ts"].as_i64() >= Some(0)), "{trace:#}");

        latch.open();
        session.sync_all().wait().unwrap();
        session.shutdown().wait().unwrap();
        // The servers may not have seen the end of the session yet.
        let ended = Instant::now();
        loop {
            let top = run(command(&["disco", "top", a, b])).ok();
            if top == "no sessions of Disco\n" {
                break;
            }
            assert!(ended.elapsed() < Duration::from_secs(60), "{top}");
        }
    };
    tokio::task::spawn_blocking(work).await.unwrap();
}

/// The work of others is shown to those whom a rule names the function for; rights to have workers
/// or to see `info` are not enough.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_shows_the_sessions_of_others_to_those_whom_a_rule_lets() {
    for (functions, is_shown) in [(r#"["meet"]"#, false), (r#"["rpc.disco.sessions"]"#, true)] {
        let folder = tempfile::tempdir().unwrap();
        let rule =
            format!("[[rule]]\nname = \"all\"\nidentities = [\"anonymous\"]\ndisco = true\nfunctions = {functions}\n");
        let server = server(&folder, &Arc::default(), Some(&rule)).await;
        let address = server.addresses()[0].to_string();
        let top = tokio::task::spawn_blocking(move || run(command(&["disco", "top", &address]))).await.unwrap();
        assert_eq!(top.code == 0, is_shown, "{top:?}");
        assert!(is_shown || top.stderr.contains("not 'rpc.disco.sessions'"), "{top:?}");
    }
}

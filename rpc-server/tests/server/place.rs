//! `rpc-cli place`: a graph of calls over two servers, planned and run from a file.

use std::fs;
use std::path::Path;

use rpc_core::{Registry, Result, TensorView, TensorViewMut};
use rpc_server::config::{Isolate, ServeConfig};
use rpc_server::{RpcServer, Running};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::cli::cli;

fn start(runtime: &Runtime, folder: &Path, name: &str, by: f32, allow_peer: &[&str]) -> Running {
    let registry = Registry::new();
    registry.add("add", move |x: TensorView, y: i64, mut out: TensorViewMut| -> Result<()> {
        let x = x.as_slice::<f32>()?;
        out.as_mut_slice::<f32>()?.iter_mut().zip(x).for_each(|(out, x)| *out = x + by * y as f32);
        Ok(())
    });
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.join(name),
        isolate: Isolate::None,
        allow_peer: allow_peer.iter().map(|pattern| (*pattern).to_owned()).collect(),
        ..ServeConfig::default()
    };
    runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap()
}

fn npy(values: &[f32]) -> Vec<u8> {
    let mut file = Vec::new();
    rpc_server::cli::npy::write_header(&mut file, rpc_core::DataType::F32, &[values.len() as i64]).unwrap();
    file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    file
}

#[test]
fn a_graph_is_planned_and_run_over_two_servers() {
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let everywhere: &[&str] = &["tcp://127.0.0.1:*"];
    let servers = [("near", 1.0, everywhere), ("far", 10.0, &[])]
        .map(|(name, by, allow_peer)| start(&runtime, folder.path(), name, by, allow_peer));
    let [near, far] = servers.each_ref().map(|server| server.addresses()[0].to_string());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("x.npy"), npy(&[1.0, 2.0])).unwrap();
    let graph_over = |near: &str, far: &str, scope: &str| {
        format!(
            "[[session]]\nname = 'near'\naddress = '{near}'\n[[session]]\nname = 'far'\naddress = '{far}'\n\
             [[input]]\nname = 'x'\nfile = 'x.npy'\n\
             [[call]]\nname = 'a'\nfunction = 'add'\nargs = ['x', 2]\nsession = 'near'\non = 'cpu{scope}'\n\
             results = [{{ dtype = 'float32', shape = [2] }}]\n\
             [[call]]\nname = 'b'\nfunction = 'add'\nargs = ['a.0', 3]\nsession = 'far'\n\
             results = [{{ dtype = 'float32', shape = [2] }}]\n\
             [[output]]\nof = 'b'\nfile = 'b.npy'\n[[output]]\nof = 'a'\nfile = 'a.npy'\n"
        )
    };
    let graph = |scope: &str| graph_over(&near, &far, scope);
    fs::write(path("graph.toml"), graph("")).unwrap();

    let planned = cli(&["place", &path("graph.toml"), "--plan"]).ok();
    let lines: Vec<_> = planned.lines().collect();
    assert_eq!(
        lines,
        [
            "input 'x' on near cpu:0 global",
            "call #0 'add' on near cpu:0 global",
            "copy result #0 of call #0 'add' from near cpu:0 global to far cpu:0 global",
            "call #1 'add' on far cpu:0 global",
            "output 'b.npy' on far cpu:0 global",
            "output 'a.npy' on near cpu:0 global",
        ]
    );
    assert!(!Path::new(&path("b.npy")).exists());
    let json = cli(&["place", &path("graph.toml"), "--plan", "--json"]).json();
    assert_eq!((json["copies"].as_u64(), json["steps"].as_array().unwrap().len()), (Some(1), 6));

    let ran = cli(&["place", &path("graph.toml")]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, ""), "{ran:?}");
    assert!(ran.stderr.contains("call #1 'add' on far") && ran.stderr.contains("2 files written"), "{ran:?}");
    assert_eq!(fs::read(path("a.npy")).unwrap(), npy(&[3.0, 4.0]));
    assert_eq!(fs::read(path("b.npy")).unwrap(), npy(&[33.0, 34.0]));
    // The copy has gone from the one server to the other, and says so.
    let copy = "copy result #0 of call #0 'add' from near cpu:0 global to far cpu:0 global";
    assert!(ran.stderr.contains(&format!("{copy}: directly, to {far}")), "{ran:?}");
    let ran = cli(&["place", &path("graph.toml"), "--json"]).json();
    let expected = json!({ "step": copy, "route": "direct", "address": far, "reason": null });
    assert_eq!(ran, json!({ "copies": [expected], "files": ["b.npy", "a.npy"] }));
    // From a server that may not connect to others.
    fs::write(path("back.toml"), graph_over(&far, &near, "")).unwrap();
    let ran = cli(&["place", &path("back.toml")]);
    assert!(ran.code == 0 && ran.stderr.contains(&format!("{copy}: through the client: ")), "{ran:?}");
    assert!(ran.stderr.contains("--allow-peer"), "{ran:?}");
    assert_eq!(fs::read(path("b.npy")).unwrap(), npy(&[24.0, 25.0]));

    // Memory that no device has, a function that no server has, and a file that is none.
    fs::write(path("bad.toml"), graph(",scope=texture")).unwrap();
    let bad = cli(&["place", &path("bad.toml")]);
    assert!(bad.code == 1 && bad.stderr.contains("texture"), "{bad:?}");
    fs::write(path("bad.toml"), graph("").replace("function = 'add'", "function = 'subtract'")).unwrap();
    let bad = cli(&["place", &path("bad.toml")]);
    assert!(bad.code == 1 && bad.stderr.contains("subtract"), "{bad:?}");
    fs::write(path("bad.toml"), "[[session]]\nname = 1").unwrap();
    let bad = cli(&["place", &path("bad.toml")]);
    assert!(bad.code == 2 && bad.stderr.contains("bad.toml"), "{bad:?}");
    fs::write(path("x.npy"), &npy(&[1.0, 2.0])[..130]).unwrap();
    let bad = cli(&["place", &path("graph.toml")]);
    assert!(bad.code == 1 && bad.stderr.contains("x.npy"), "{bad:?}");
    for server in servers {
        runtime.block_on(server.end());
    }
}

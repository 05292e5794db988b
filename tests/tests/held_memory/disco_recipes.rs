//! Floods of the functions by which controllers drive the workers of a Disco node. Their structures
//! are those of PROTOCOL.md, section 16.1.

use std::net::{IpAddr, Ipv4Addr};

use rpc_core::{ErrorKind, Packed, Value};
use serde::Serialize;

use super::peer::Peer;
use super::recipes::{Answer, Calls, LONG, large};

#[derive(Serialize)]
struct SetUp {
    version: i64,
    layout: Layout,
    first: u32,
    count: u32,
    hosting: &'static str,
    pin: bool,
    logs: Option<u8>,
    report_every: u64,
    keep_alive_ms: u64,
    children: [(); 0],
}

#[derive(Serialize)]
struct Layout {
    world_size: u32,
    num_groups: u32,
}

#[derive(Serialize)]
struct Mesh {
    axes: [MeshAxis; 2],
}

#[derive(Serialize)]
struct MeshAxis {
    name: String,
    size: u32,
}

#[derive(Serialize)]
struct RequestedFile {
    path: String,
    identity: FileIdentity,
}

#[derive(Serialize)]
struct FileIdentity {
    len: u64,
    header_len: u64,
    header: [u8; 32],
}

/// Files of one loader.
const FILES: usize = 100;

/// Returns the calls of one function.
pub(crate) fn calls(name: &str, peer: &mut Peer) -> Calls {
    match name {
        "disco.version" => Calls::new(|_| Vec::new()),
        "disco.open" => {
            let set_up = set_up(peer);
            Calls::new(move |_| vec![set_up.clone()])
        }
        // In order, and so on one lane.
        "disco.submit" => {
            let host = host(peer);
            let submit = move |number| vec![host.clone(), Value::Int(number as i64), loads(), Value::List(Vec::new())];
            Calls::new(submit).on_lane(|_| 1)
        }
        "disco.events" | "disco.relays" => {
            let host = host(peer);
            Calls::new(move |_| vec![host.clone()]).answered(Answer::Later)
        }
        "disco.offer" => {
            let host = host(peer);
            Calls::new(move |number| vec![host.clone(), Value::Int(number as i64), meshes()])
        }
        "disco.listen" => {
            let (host, addresses) = (host(peer), addresses());
            Calls::new(move |_| vec![host.clone(), addresses.clone(), meshes()])
        }
        "disco.break_ccl" => {
            let host = host(peer);
            // The epoch of a worker that has joined no others yet.
            let reason = "x".repeat(LONG);
            let args = vec![host, Value::Int(0), Value::Int(0), Value::Str(reason), Value::Bool(true)];
            Calls::new(move |_| args.clone())
        }
        "disco.abort" => {
            let host = host(peer);
            Calls::new(move |_| vec![host.clone()])
        }
        "disco.connect" => {
            let host = listening_host(peer);
            Calls::new(move |_| vec![host.clone(), Value::Int(0), Value::Int(0)])
        }
        "disco.answer" => {
            let end = end(peer);
            Calls::new(move |_| vec![end.clone(), Value::Str("x".repeat(LONG))])
        }
        "disco.take" => {
            let end = end(peer);
            Calls::new(move |_| vec![end.clone()]).answered(Answer::Later)
        }
        "disco.give" => {
            let end = end(peer);
            Calls::new(move |_| vec![end.clone(), large()])
        }
        "disco.weights.open" => Calls::new(|_| vec![files()]),
        "disco.weights.unreadable" => {
            let opened = peer.call("disco.weights.open", vec![files()]);
            Calls::new(move |_| vec![opened.clone()])
        }
        "disco.weights.cache_limit" => Calls::new(|_| Vec::new()),
        "disco.weights.is_found" => Calls::new(|_| vec![Value::Null]),
        // Only workers have what these need; the commands by which workers call them have floods of
        // their own.
        "disco.weights.load" | "disco.weights.take" => for_workers(2),
        "disco.weights.find" => for_workers(1),
        "disco.reshard.open" | "disco.reshard.join" | "disco.reshard.allocate" | "disco.reshard.read" => for_workers(2),
        "disco.reshard.send" | "disco.reshard.receive" => for_workers(3),
        "disco.reshard.write" => for_workers(4),
        // Objects that only these make.
        "disco.reshard.describe" | "disco.reshard.failure" => {
            Calls::new(|_| vec![large()]).answered(Answer::Error(ErrorKind::InvalidArgument))
        }
        "disco.reshard.is_done" => Calls::new(|_| vec![large()]),
        "disco.reshard.tensor" => Calls::new(|_| vec![Value::List(Vec::new()), Value::Int(0)])
            .answered(Answer::Error(ErrorKind::InvalidArgument)),
        other => panic!("the built-in function {other} has no recipe here: add one"),
    }
}

/// Returns calls of a function that only workers can call, with so many arguments.
fn for_workers(arguments: usize) -> Calls {
    // As much as a message may have beside its payload.
    let long = Value::Packed(Packed::from_bytes(vec![0xc0; LONG].into()));
    let all = [large(), long].into_iter().chain(std::iter::repeat(Value::Null));
    let all: Vec<_> = all.take(arguments).collect();
    Calls::new(move |_| all.clone()).answered(Answer::Error(ErrorKind::ApiMisuse))
}

fn packed(value: &impl Serialize) -> Value {
    Value::Packed(Packed::encode(value).unwrap())
}

/// Returns the set-up of the first one of two workers.
fn set_up(peer: &mut Peer) -> Value {
    let Value::Int(version) = peer.call("disco.version", Vec::new()) else { panic!("no version") };
    packed(&SetUp {
        version,
        layout: Layout { world_size: 2, num_groups: 1 },
        first: 0,
        count: 1,
        hosting: "Threads",
        pin: false,
        logs: None,
        report_every: 1,
        keep_alive_ms: 1000,
        children: [],
    })
}

/// Opens the host of a worker.
fn host(peer: &mut Peer) -> Value {
    let set_up = set_up(peer);
    match peer.call("disco.open", vec![set_up]) {
        Value::List(mut opened) => opened.remove(0),
        other => panic!("{other:?}"),
    }
}

fn addresses() -> Value {
    packed(&[IpAddr::V4(Ipv4Addr::LOCALHOST)])
}

/// Returns meshes of both workers, as many as a session may have: an axis of both, and one of each
/// worker by itself.
fn meshes() -> Value {
    let axis = |name: String, size| MeshAxis { name, size };
    let mesh = |number| Mesh { axes: [axis(format!("{number:064}"), 2), axis(format!("{number:063}"), 1)] };
    packed(&(0..16).map(mesh).collect::<Vec<_>>())
}

/// Opens the host of a worker that listens for the data of others.
fn listening_host(peer: &mut Peer) -> Value {
    let host = host(peer);
    peer.call("disco.listen", vec![host.clone(), addresses(), meshes()]);
    host
}

/// Opens a connection to a worker, which never reads from it.
fn end(peer: &mut Peer) -> Value {
    let host = listening_host(peer);
    peer.call("disco.connect", vec![host, Value::Int(0), Value::Int(0)])
}

/// Returns the batch of one command: to load a module whose path is too long, which makes an event.
fn loads() -> Value {
    let path = [b'x'; LONG];
    // No tensors, the number of the command, a register, the path, and no device.
    let body = [&[0; 4][..], &[4], &[0; 4], &(LONG as u32).to_le_bytes(), &path, &[0; 4]].concat();
    let head = [&1_u64.to_le_bytes()[..], &(body.len() as u32).to_le_bytes(), &[0; 4]].concat();
    Value::Bytes([head, body].concat().into())
}

/// Returns a list of files that there are not.
fn files() -> Value {
    let identity = || FileIdentity { len: 1 << 20, header_len: 100, header: [7; 32] };
    let files = (0..FILES).map(|number| RequestedFile { path: format!("/{number:0200}"), identity: identity() });
    packed(&files.collect::<Vec<_>>())
}

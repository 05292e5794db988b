//! Golden bytes of Disco's messages: what this program writes is compared with `golden.txt`, and
//! the fields in there with the tables of `PROTOCOL.md`.
//!
//! Names of fields and variants are part of the bytes. A change of a line of `golden.txt` is a new
//! version of [`MESSAGES`]; that of `WorkerSettings` is a new version of the settings alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use rpc_core::proto::{decode_value, encode_value};
use rpc_core::{Device, ErrorKind, Packed, Reference, RpcError, SessionLimits, Value};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};

use super::codec;
use super::event::{self, Event, LogLine, Report, decode_events};
use super::mesh::Mesh;
use super::plan::{JoinPlan, Layout, ListenAddresses, Plan, WorkerLocation};
use super::relayed_pair::RelayedPair;
use super::set_up::{ChildNode, CommandPosition, MESSAGES, MpiProcess, NodeInfo, SetUp, WorkerProcess};
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::SessionKey;
use crate::ccl::{BreakCause, Breakdown, Rank, poison_to_bytes};
use crate::error::{Failure, WorkerId};
use crate::node::self_start::WorkerSettings;
use crate::node::settings::NodeSettings;
use crate::options::Hosting;
use crate::weights::folders::WeightFolders;
use crate::weights::golden_requests;

/// The golden bytes, a line for each message: its name, ` = `, and the bytes in hexadecimal.
const GOLDEN: &str = include_str!("golden.txt");

/// Bytes that this program writes for a message, by the name of the message.
#[derive(Default)]
pub(crate) struct Samples(BTreeMap<String, String>);

impl Samples {
    /// Adds a message that `serde` writes as MessagePack. Checks that the golden bytes are read as
    /// that message.
    pub(crate) fn packed<T: Serialize + DeserializeOwned>(&mut self, name: &str, message: &T) {
        let bytes = Packed::encode(message).unwrap().as_bytes().clone();
        if let Some(golden) = golden().get(name) {
            let read: T = Packed::from_bytes(golden.clone()).decode().unwrap();
            assert_eq!(Packed::encode(&read).unwrap().as_bytes(), &bytes, "{name} is read as another message");
        }
        self.bytes(name, &bytes);
    }

    fn bytes(&mut self, name: &str, bytes: &[u8]) {
        let hex = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(self.0.insert(name.to_owned(), hex), None, "{name} is there twice");
    }
}

/// Returns the golden bytes by the name of the message.
fn golden() -> BTreeMap<String, Bytes> {
    let lines = GOLDEN.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let message = |line: &str| {
        let (name, hex) = line.split_once(" = ").unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (name.to_owned(), (0..hex.len()).step_by(2).map(byte).collect())
    };
    lines.filter(|line| !line.starts_with("version")).map(message).collect()
}

/// Returns all messages that `serde` writes.
fn packed_messages() -> Samples {
    let mut all = Samples::default();
    set_ups(&mut all);
    plans(&mut all);
    reports(&mut all);
    golden_requests(&mut all);
    all
}

fn set_ups(all: &mut Samples) {
    let layout = Layout { world_size: 4, num_groups: 2 };
    let child = ChildNode { address: "tcp://b:1".to_owned(), children: Vec::new() };
    let set_up = SetUp {
        version: MESSAGES.version(),
        layout,
        first: 2,
        count: 1,
        hosting: Hosting::Threads,
        pin: false,
        logs: Some(2),
        report_every: 2_097_152,
        keep_alive_ms: 200,
        children: vec![child.clone()],
        session: None,
        begin_after: None,
    };
    all.packed("SetUp", &set_up);
    all.packed("CommandPosition", &CommandPosition { sequence: 1 << 40, credit: 2 });
    all.packed("Layout", &layout);
    all.packed("ChildNode", &child);
    all.packed("Hosting Auto", &Hosting::Auto);
    all.packed("Hosting Threads", &Hosting::Threads);
    all.packed("Hosting Processes", &Hosting::Processes);
    let mpi = MpiProcess { job: "j".to_owned(), rank: 3 };
    all.packed("MpiProcess", &mpi);
    let process = WorkerProcess { count: 2, machine: "m".to_owned(), mpi: Some(mpi) };
    all.packed("WorkerProcess", &process);
    let info = NodeInfo {
        processes: vec![process],
        is_encrypted_below: true,
        data_addresses: vec![None, Some([10, 0, 0, 1].into())],
    };
    all.packed("NodeInfo", &info);
    let mut settings = WorkerSettings::new(SessionLimits::default(), Some(WeightFolders::new(["/w"])));
    settings.settings = Some(NodeSettings::new("s"));
    settings.access = Some("a".to_owned());
    let mut settings = serde_json::to_value(&settings).unwrap();
    // The limits are those of `rpc-core`, and their defaults are no part of this message.
    settings["limits"] = json!({});
    all.bytes("WorkerSettings", &serde_json::to_vec(&settings).unwrap());
}

fn plans(all: &mut Samples) {
    let [stall, join, direct] = [15, 30, 2].map(Duration::from_secs);
    let timeouts = CollectiveTimeouts { entry: None, stall, join, direct };
    all.packed("CollectiveTimeouts", &timeouts);
    let devices = vec![Device::cpu(), Device::cuda(1)];
    let mesh = Mesh::new([("dp", 2), ("tp", 3)]).unwrap();
    all.packed("Mesh", &mesh);
    all.packed("MeshAxis", mesh.first_axis());
    let (epoch, join, meshes) = (1, JoinPlan::Threads, vec![mesh]);
    all.packed("Plan", &Plan { epoch, join, nccl: true, timeouts, devices, is_tentative: true, meshes });
    let key: SessionKey = serde_json::from_value(Json::from(vec![7_u8; 32])).unwrap();
    let [world, group]: [SocketAddr; 2] = ["10.0.0.1:9".parse().unwrap(), "[::1]:9".parse().unwrap()];
    let location = WorkerLocation { machine: 1, is_local: true };
    all.packed("WorkerLocation", &location);
    all.packed("ListenAddresses", &ListenAddresses { world, groups: vec![group] });
    all.packed("JoinPlan Threads", &JoinPlan::Threads);
    #[cfg(target_os = "linux")]
    {
        let ticket = json!({"process": 1, "descriptor": 3, "nonce": vec![9_u8; 16], "size": 2, "epoch": 1});
        let ticket: crate::ccl::host::Ticket = serde_json::from_value(ticket).unwrap();
        all.packed("Ticket", &ticket);
        all.packed("JoinPlan Segments", &JoinPlan::Segments(vec![ticket]));
    }
    let (world, groups) = (vec![world], vec![vec![group]]);
    let sockets = JoinPlan::Sockets { key: key.clone(), encrypt: true, world, groups, locations: vec![location] };
    all.packed("JoinPlan Sockets", &sockets);
    all.packed("JoinPlan Mpi", &JoinPlan::Mpi { key, encrypt: false, ranks: vec![1, 0] });
    all.packed("JoinPlan Unconnected", &JoinPlan::Unconnected { reason: "no way".to_owned() });
    all.packed("RelayedPair", &RelayedPair { from: 1, to: 2, communicator: 1 });
}

fn reports(all: &mut Samples) {
    all.packed("LogLine", &LogLine { level: 1, target: "t".to_owned(), text: "x=1".to_owned(), missing_before: 7 });
    let cause = RpcError::new(ErrorKind::Application, "no").with_application_kind("E").with_backtrace("b");
    let failure = Failure { worker: WorkerId(3), sequence: 1 << 40, command: "f".to_owned(), cause: cause.clone() };
    all.packed("Failure", &failure);
    all.packed("Report", &Report { epoch: 1 << 33, culprit: Some(WorkerId(5)), cause: cause.clone() });
    let causes = [
        ("Died", BreakCause::Died),
        ("Left", BreakCause::Left),
        ("Silent", BreakCause::Silent),
        ("NeverEntered", BreakCause::NeverEntered),
        ("OutOfStep", BreakCause::OutOfStep),
        ("Aborted", BreakCause::Aborted("a".to_owned())),
        ("Link", BreakCause::Link("l".to_owned())),
        ("Protocol", BreakCause::Protocol("p".to_owned())),
        ("Backend", BreakCause::Backend("b".to_owned())),
    ];
    for (name, cause) in causes {
        all.packed(&format!("BreakCause {name}"), &cause);
    }
    let (during, flights) = ("barrier #7".to_owned(), "rank 0".to_owned());
    let breakdown = Breakdown { cause: BreakCause::Died, rank: Rank(2), noticed_by: Rank(0), during, flights };
    all.packed("Breakdown", &breakdown);
    all.bytes("PoisonCause", &poison_to_bytes(&cause.with_peer("tcp://a:1"), 2048));
}

/// Bytes of the credit at the head of a command. It follows the size of values in memory, and no
/// golden bytes hold it.
const CREDIT: usize = 8;

/// Adds all commands, as they are in a batch behind the credit: without the bulk that goes beside
/// them.
fn commands(all: &mut Samples) {
    for (number, command) in codec::tests::all().into_iter().enumerate() {
        let (name, encoded) = (format!("Command {number:02} {}", command.name()), command.encode().unwrap());
        if let Some(golden) = golden().get(&name) {
            let head = [&encoded.head[..CREDIT], &golden[..]].concat();
            let read = codec::decode_batch(head.into(), encoded.bulk.into_iter().collect()).unwrap();
            assert_eq!(*read[0].command, command, "{name}");
        }
        all.bytes(&name, &encoded.head[CREDIT..]);
    }
}

/// Adds all events, as the values of a session in the reply of `disco.events`.
fn events(all: &mut Samples) {
    for (number, event) in event::tests::all().into_iter().enumerate() {
        let debug = format!("{event:?}");
        let variant: String = debug.chars().take_while(char::is_ascii_alphanumeric).collect();
        let name = format!("Event {number:02} {variant}");
        let (body, payload) = encode_value(&as_value(event.clone()));
        let payload = payload.concat();
        let bytes = [&body[..], &payload].concat();
        if let Some(golden) = golden().get(&name) {
            let value = decode_value(&golden[..body.len()], golden.slice(body.len()..)).unwrap();
            assert_eq!(decode_events(Value::List(vec![value])).unwrap(), [event], "{name}");
        }
        all.bytes(&name, &bytes);
    }
}

fn as_value(event: Event) -> Value {
    event.into_value().unwrap().try_map(&mut |_| Err::<Reference, _>(())).unwrap()
}

#[test]
fn messages_have_their_golden_bytes() {
    let version = format!("version {}", MESSAGES.version());
    assert!(GOLDEN.lines().any(|line| line == version), "golden.txt is of another version");
    let mut all = packed_messages();
    commands(&mut all);
    events(&mut all);
    let golden: BTreeMap<_, _> = golden().into_iter().collect();
    let mut wrong = Vec::new();
    for (name, hex) in &all.0 {
        let found: String = golden.get(name).into_iter().flatten().map(|byte| format!("{byte:02x}")).collect();
        if found != *hex {
            wrong.push(format!("{name} = {hex}"));
        }
    }
    let unknown: Vec<_> = golden.keys().filter(|name| !all.0.contains_key(*name)).collect();
    assert!(wrong.is_empty() && unknown.is_empty(), "not in golden.txt:\n{}\nnot here: {unknown:?}", wrong.join("\n"));
}

#[test]
fn the_protocol_document_has_every_field_and_its_type() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../PROTOCOL.md");
    let document = std::fs::read_to_string(document).unwrap();
    let (_, section) = document.split_once("\n### 16.1 ").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let cell = |text: &str| text.trim().trim_matches('`').to_owned();
    let row = |line: &str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(cell).collect();
        <[String; 3]>::try_from(cells).ok()
    };
    let rows: BTreeMap<(String, String), String> = (section.lines().filter_map(row))
        .filter(|[message, ..]| message.starts_with(|first: char| first.is_ascii_uppercase()))
        .map(|[message, field, kind]| ((message, field), kind))
        .collect();
    let mut seen = BTreeSet::new();
    for (name, bytes) in golden() {
        if ["Command ", "Event "].iter().any(|other| name.starts_with(other)) {
            continue;
        }
        let message = name.split(' ').next().unwrap();
        let value: Json = match message {
            "WorkerSettings" => serde_json::from_slice(&bytes).unwrap(),
            _ => Packed::from_bytes(bytes).decode().unwrap(),
        };
        for (field, value) in fields(name.contains(' '), &value) {
            let kind = rows.get(&(message.to_owned(), field.clone()));
            let kind = kind.unwrap_or_else(|| panic!("{message} has a field `{field}` that PROTOCOL.md does not name"));
            assert!(is_of_kind(&value, kind), "{message}: {field} is {value}, and PROTOCOL.md says {kind}");
            seen.insert((message.to_owned(), field));
        }
    }
    let missing: Vec<_> = rows.keys().filter(|row| !seen.contains(*row)).collect();
    assert!(missing.is_empty(), "PROTOCOL.md names fields that golden.txt does not have: {missing:?}");
}

/// Returns the fields of a message and their values: of a variant of an enumeration, the name of
/// the variant, or `VARIANT.FIELD`.
fn fields(is_variant: bool, value: &Json) -> Vec<(String, Json)> {
    match value {
        Json::String(variant) if is_variant => vec![(variant.clone(), Json::Null)],
        Json::Object(map) if is_variant => {
            let (variant, content) = map.iter().next().unwrap();
            match content {
                // An address of a socket is a map of `V4` or `V6`, and no variant with fields.
                Json::Object(fields) if !fields.contains_key("V4") && !fields.contains_key("V6") => {
                    fields.iter().map(|(field, value)| (format!("{variant}.{field}"), value.clone())).collect()
                }
                content => vec![(variant.clone(), content.clone())],
            }
        }
        Json::Object(map) => map.iter().map(|(field, value)| (field.clone(), value.clone())).collect(),
        other => panic!("no message: {other}"),
    }
}

/// Returns true if a value can be of the type that the document names.
fn is_of_kind(value: &Json, kind: &str) -> bool {
    let (plain, may_be_null) = kind.strip_suffix('?').map_or((kind, false), |plain| (plain, true));
    match value {
        Json::Null => may_be_null || plain == "nothing",
        Json::Bool(_) => plain == "bool",
        Json::Number(_) => ["u8", "u16", "u32", "u64"].contains(&plain),
        Json::String(_) => plain == "text" || plain.starts_with(|first: char| first.is_ascii_uppercase()),
        Json::Array(_) => plain.starts_with("list of "),
        Json::Object(_) => plain.starts_with(|first: char| first.is_ascii_uppercase()),
    }
}

/// Checks that a message of another version, which `peer` has sent to `own`, is refused with an
/// error that names both versions and the older side.
pub(crate) fn assert_refused<T: Debug>(result: rpc_core::Result<T>, (peer, version): (&str, u32), own: &str) {
    let error = result.unwrap_err();
    let ours = MESSAGES.version();
    let older = if version < ours { peer } else { own };
    let text = format!("{peer} speaks version {version} of Disco's messages, and {own} version {ours}: update {older}");
    assert_eq!((error.kind(), error.message()), (ErrorKind::VersionMismatch, text.as_str()));
}

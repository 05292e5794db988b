//! Golden bytes of the messages of trackers. Names of fields and variants are part of them: a
//! change that alters `golden.txt` raises the version of [`MESSAGES`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use rpc_core::{Packed, Target};
use serde::de::DeserializeOwned;

use super::*;

/// Messages by name, as bytes.
struct Golden {
    messages: BTreeMap<&'static str, Vec<u8>>,
    checked: BTreeSet<&'static str>,
}

impl Golden {
    fn read() -> Self {
        let lines = include_str!("golden.txt").lines().filter(|line| !line.starts_with('#'));
        let parse = |line: &'static str| {
            let (name, hex) = line.split_once(" = ").unwrap();
            let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
            (name, digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect())
        };
        Self { messages: lines.map(parse).collect(), checked: BTreeSet::new() }
    }

    /// Compares a message with its bytes, in both directions.
    fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(&mut self, name: &'static str, message: &T) {
        let golden = self.messages.get(name).unwrap_or_else(|| panic!("golden.txt has no message '{name}'"));
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(Packed::encode(message).unwrap().as_bytes()), hex(golden), "{name}");
        let decoded: T = Packed::from_bytes(golden.clone().into()).decode().unwrap();
        assert_eq!(decoded, *message, "{name}");
        self.checked.insert(name);
    }
}

#[test]
fn messages_keep_their_bytes() {
    assert_eq!(MESSAGES.version(), 2);
    let mut golden = Golden::read();
    let labels = || BTreeMap::from([("arch".to_owned(), "arm64".to_owned())]);
    let address = || vec!["tcp://10.0.0.5:9090".to_owned()];
    let (name, key, client) = (|| "b".to_owned(), || "board".to_owned(), || "me".to_owned());

    let target: Target = "llvm".parse().unwrap();
    let cpu =
        DeviceOffer { target: Some(target), memory_scopes: vec!["shared".to_owned()], ..DeviceOffer::new("cpu", 1) };
    let used =
        Use { id: 1, serial: Some(7), direct: false, client: "tcp://10.0.0.9:1".to_owned(), for_ms: 20, silent_ms: 0 };
    let status = ServerStatus { now_ms: 5, uses: vec![used], spent: vec![3], leaving: false, details: None };
    golden.check("server status", &status);
    golden.check("last server status", &ServerStatus { leaving: true, ..status.clone() });
    let silent = Use { id: 1, serial: None, direct: false, client: "c".to_owned(), for_ms: 20, silent_ms: 7000 };
    let silent = ServerStatus { uses: vec![silent], spent: Vec::new(), ..status.clone() };
    golden.check("server status: silent client", &silent);
    let lease = DeviceLease { held_ms: 2, left_ms: 3, waiting: 4, ..DeviceLease::default() };
    let gpu = DeviceDetails {
        device: "cuda:0".to_owned(),
        name: Some("gpu".to_owned()),
        total_memory: Some(9),
        available_memory: Some(5),
        utilization_percent: Some(50),
        clock_mhz: None,
        lease: Some(lease),
    };
    let cpu_alone = DeviceDetails { device: "cpu:0".to_owned(), ..DeviceDetails::default() };
    let details = ServerDetails {
        version: "0.1.0".to_owned(),
        uptime_ms: 7,
        sessions: 1,
        memory_bytes: 6,
        devices: vec![gpu, cpu_alone],
        errors: vec![RecentError { ago_ms: 8, text: "w".to_owned() }],
    };
    golden.check("server status: details", &ServerStatus { details: Some(details.clone()), ..silent });
    let registration = Registration {
        version: 2,
        name: name(),
        key: key(),
        labels: labels(),
        devices: vec![cpu],
        capacity: 2,
        address: address(),
        ticket_key: std::array::from_fn(|at| at as u8),
        status,
    };
    golden.check("registration", &registration);
    golden.check("registered", &Registered { version: 2, lease_ms: 10_000, address: address() });
    let renewed = |reach| Renewed { reach, end: Vec::new() };
    golden.check("renewed: untried", &renewed(Reach::Untried));
    golden.check("renewed: reached", &renewed(Reach::Reached));
    golden.check("renewed: unreachable", &renewed(Reach::Unreachable { why: "w".to_owned() }));
    golden.check("renewed: kick", &Renewed { end: vec![9], ..renewed(Reach::Reached) });
    golden.check("kick", &Kick { server: 3, session: 9 });
    golden.check("drain", &Drain { server: 3, undo: false });
    golden.check("drain: undo", &Drain { server: 3, undo: true });

    let request = ServerRequest::new("board").count(2).distinct().label("arch", "arm64").device(DeviceType::CUDA, 1);
    let request = request.virtual_device(DeviceType::CUDA).priority(-1).client("me").timeout(Duration::from_secs(1));
    golden.check("server request", &request);
    let grant = Grant {
        serial: 7,
        ticket: "t1.7.9.00".to_owned(),
        good_for_ms: 20_000,
        server: name(),
        key: key(),
        labels: labels(),
        devices: vec![DeviceOffer::new("cpu", 1)],
        address: address(),
    };
    golden.check("grants", &vec![grant]);
    golden.check("returned", &vec![Returned { serial: 7, why: "w".to_owned() }]);

    let holder = |state| Holder { client: client(), for_ms: 3, state, session: None, silent_ms: 0 };
    let details = ServerDetails { devices: Vec::new(), errors: Vec::new(), ..details };
    let server = ServerSummary {
        id: 0,
        name: name(),
        key: key(),
        labels: BTreeMap::new(),
        devices: Vec::new(),
        capacity: 2,
        free: 1,
        address: address(),
        peer: "tcp://10.0.0.5:1".to_owned(),
        reach: Reach::Untried,
        registered_for_ms: 1,
        heard_ago_ms: 2,
        holders: [HolderState::Granted, HolderState::InUse, HolderState::Direct].map(holder).into(),
        draining: None,
        details: Some(details),
    };
    let draining = Draining { for_ms: 8, by: client() };
    golden.check("draining server", &ServerSummary { draining: Some(draining), details: None, ..server.clone() });
    let entry = QueueEntry {
        client: client(),
        key: String::new(),
        count: 1,
        distinct: false,
        labels: BTreeMap::new(),
        devices: Vec::new(),
        virtual_devices: Vec::new(),
        priority: 0,
        for_ms: 5,
        possible: 1,
    };
    let loss = |reason| {
        let (address, peer) = (Vec::new(), "p".to_owned());
        Loss { name: name(), key: key(), address, peer, ago_ms: 4, reason, orderly: false }
    };
    golden.check("orderly loss", &Loss { orderly: true, ..loss(LossReason::Gone) });
    let event = |kind| PoolEvent { ago_ms: 9, kind, key: key(), name: name(), why: String::new() };
    let kinds = [
        PoolEventKind::Registered,
        PoolEventKind::Refused,
        PoolEventKind::Stopped,
        PoolEventKind::Lost,
        PoolEventKind::Unreachable,
        PoolEventKind::Kicked,
    ];
    golden.check("event", &PoolEvent { why: "w".to_owned(), ..event(PoolEventKind::Refused) });
    let refused = LossReason::Refused { why: "w".to_owned() };
    let summary = Summary {
        version: 2,
        uptime_ms: 1,
        lease_ms: 10_000,
        servers: vec![server],
        queue: vec![entry],
        losses: [LossReason::Gone, LossReason::LeaseExpired, refused].map(loss).into(),
        history: vec![Sample { ago_ms: 6, capacity: 2, busy: 1, waiting: 1, granted: 3, waited_ms: 4 }],
        events: kinds.map(event).into(),
    };
    golden.check("summary", &summary);
    assert!(golden.messages.keys().eq(&golden.checked), "golden.txt has messages that are not checked");
}

//! Weights that workers get over the network once: the caches of their nodes (`--file-cache`), as
//! `ShardLoader` uses them.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use disco::{
    Advertise, Content, DRef, DiscoSession, Hosting, Options, Part, ShardLoader, SocketSession, TensorInfo, WorkerId,
};
use tempfile::TempDir;

use super::cli::Fixture;
use super::file_cache::{CountingProxy, cached};

/// Rows and columns of the tensors: 1 MiB of `float32`.
const ROWS: usize = 512;
const COLUMNS: usize = 512;
const LEN: u64 = (4 * ROWS * COLUMNS) as u64;

/// Bytes that a controller may send at most for loads whose parts are in the caches.
const LITTLE: u64 = 16 << 10;

/// Names of the tensors, and how they are cut.
const TENSORS: [&str; 3] = ["columns", "rows", "whole"];

fn part_of(name: &str) -> Part {
    match name {
        "columns" => Part::shard(1),
        "rows" => Part::shard(0),
        _ => Part::Whole,
    }
}

/// Returns the elements of a tensor of a model.
fn elements(model: u32, name: &str) -> Vec<f32> {
    let seed = model * 100 + name.len() as u32;
    (0..(ROWS * COLUMNS) as u32).map(|at| (at.wrapping_mul(2_654_435_761) ^ seed) as f32).collect()
}

/// Writes a model with three tensors, and one that is too small for a cache.
fn write_model(folder: &Path, model: u32) {
    let mut header = String::from(r#"{"small":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#);
    let mut data = rpc_core::dlpack::to_bytes(&[0.5_f32, 1.5]).to_vec();
    for name in TENSORS {
        let (start, end) = (data.len(), data.len() + LEN as usize);
        header += &format!(r#","{name}":{{"dtype":"F32","shape":[{ROWS},{COLUMNS}],"data_offsets":[{start},{end}]}}"#);
        data.extend_from_slice(&rpc_core::dlpack::to_bytes(&elements(model, name)));
    }
    header.push('}');
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

fn model(number: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), number);
    folder
}

fn session_with(addresses: &[&str], per_node: u32, options: Options) -> DiscoSession {
    SocketSession::new(addresses.iter().copied(), per_node, 1).options(options).start().wait().unwrap()
}

fn session(addresses: &[&str], per_node: u32, hosting: Hosting) -> DiscoSession {
    let mut options = Options::default();
    options.hosting = hosting;
    session_with(addresses, per_node, options)
}

/// Returns a loader that uses the caches of the nodes.
fn open(session: &DiscoSession, folder: &Path) -> ShardLoader {
    ShardLoader::open(session, folder).wait().unwrap().with_cache().unwrap()
}

/// Loads all tensors of a model, and checks what each worker has.
fn load(loader: &ShardLoader, session: &DiscoSession, model: u32) {
    let rule = |name: &str, _: &TensorInfo| Some(part_of(name));
    let loaded = loader.load_all(rule, None).unwrap();
    session.sync_all().wait().unwrap();
    assert_loaded(session, &loaded, model);
}

fn assert_loaded(session: &DiscoSession, loaded: &BTreeMap<String, DRef>, model: u32) {
    let n = session.num_workers() as usize;
    for (name, worker) in TENSORS.iter().flat_map(|name| (0..n).map(move |worker| (*name, worker))) {
        let content = session.debug_get_from_remote(&loaded[name], WorkerId(worker as u32)).wait().unwrap();
        let Content::Tensor(part) = content else { panic!("{content:?}") };
        let is_of_part = |at: usize| match name {
            "columns" => at % COLUMNS * n / COLUMNS == worker,
            "rows" => at / COLUMNS * n / ROWS == worker,
            _ => true,
        };
        let all = elements(model, name).into_iter().enumerate();
        let expected: Vec<f32> = all.filter(|(at, _)| is_of_part(*at)).map(|(_, element)| element).collect();
        assert!(part.read().unwrap().as_slice::<f32>().unwrap() == expected, "{name} of worker {worker}");
    }
}

/// Loads a model in a session of its own.
fn load_anew(addresses: &[&str], hosting: Hosting, folder: &TempDir, model: u32) {
    let session = session(addresses, 2, hosting);
    load(&open(&session, folder.path()), &session, model);
    session.shutdown().wait().unwrap();
}

#[test]
fn weights_that_the_controller_sends_are_sent_once() {
    for (hosting, isolate) in [(Hosting::Threads, "none"), (Hosting::Processes, "none"), (Hosting::Threads, "process")]
    {
        let server = Fixture::new(&["--isolate", isolate]);
        let proxy = CountingProxy::new(server.address());
        let folder = model(0);
        load_anew(&[&proxy.address], hosting, &folder, 0);
        assert!(proxy.take() > 3 * LEN, "{hosting:?}");
        load_anew(&[&proxy.address], hosting, &folder, 0);
        let sent = proxy.take();
        assert!(sent < LITTLE, "{hosting:?}, --isolate {isolate}: {sent} bytes were sent");
        // Another model is sent.
        let other = model(1);
        load_anew(&[&proxy.address], hosting, &other, 1);
        assert!(proxy.take() > 3 * LEN, "{hosting:?}");
        // Progress counts parts from the cache, too.
        let session = session(&[&proxy.address], 2, hosting);
        let counted = Arc::<Mutex<(u64, u64)>>::default();
        let count = Arc::clone(&counted);
        let loader = open(&session, folder.path()).progress(move |done, total| *count.lock().unwrap() = (done, total));
        load(&loader, &session, 0);
        assert_eq!(*counted.lock().unwrap(), (4 * LEN + 16, 4 * LEN + 16));
        assert!(proxy.take() < LITTLE);
        let known = cached(&server);
        let loader = ShardLoader::open(&session, folder.path()).wait().unwrap();
        load(&loader, &session, 0);
        assert!(proxy.take() > 3 * LEN && cached(&server) == known);
        session.shutdown().wait().unwrap();
    }
}

#[test]
fn a_damaged_part_is_noticed_and_sent_again() {
    let server = Fixture::new(&[]);
    let proxy = CountingProxy::new(server.address());
    let folder = model(0);
    load_anew(&[&proxy.address], Hosting::Threads, &folder, 0);
    // Two halves of each of the first two, and the whole third one.
    let files = cached(&server);
    assert_eq!(files.len(), 5);
    let whole = files.iter().find(|path| fs::metadata(path).unwrap().len() == LEN).unwrap();
    let half = files.iter().find(|path| *path != whole).unwrap();
    for (damaged, len) in [(half, LEN / 2), (whole, LEN)] {
        fs::set_permissions(damaged, fs::Permissions::from_mode(0o600)).unwrap();
        fs::OpenOptions::new().write(true).open(damaged).unwrap().write_all(b"damaged").unwrap();
        proxy.take();
        load_anew(&[&proxy.address], Hosting::Threads, &folder, 0);
        let sent = proxy.take();
        assert!((len..len + LITTLE).contains(&sent), "{sent} bytes were sent for {len}");
        load_anew(&[&proxy.address], Hosting::Threads, &folder, 0);
        assert!(proxy.take() < LITTLE);
        assert_eq!(cached(&server), files);
    }
}

#[test]
fn a_cache_that_is_smaller_than_the_model_keeps_what_fits_and_its_limit() {
    let server = Fixture::new(&["--file-cache", "2MiB"]);
    let proxy = CountingProxy::new(server.address());
    let folder = model(0);
    for round in 0..3 {
        load_anew(&[&proxy.address], Hosting::Threads, &folder, 0);
        let sent = proxy.take();
        // Three halves of tensors fit: seven eighths of the cache are a loader's.
        assert_eq!(sent < 2 * LEN, round > 0, "{sent} bytes were sent");
        let kept: u64 = cached(&server).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert_eq!(kept, 3 * LEN / 2);
    }
    let none = Fixture::new(&["--file-cache", "0"]);
    let proxy = CountingProxy::new(none.address());
    for _ in 0..2 {
        load_anew(&[&proxy.address], Hosting::Threads, &folder, 0);
        assert!(proxy.take() > 3 * LEN);
        assert_eq!(cached(&none), Vec::<std::path::PathBuf>::new());
    }
}

/// A node that has come new to the session is the only one that parts are sent to.
#[test]
fn a_part_goes_to_the_nodes_that_lack_it() {
    let folder = model(0);
    let servers = [(); 3].map(|()| Fixture::new(&[]));
    let proxies = servers.each_ref().map(|server| CountingProxy::new(server.address()));
    let [old, first, new] = proxies.each_ref().map(|proxy| proxy.address.as_str());
    let load = |addresses: &[&str]| {
        let session = session(addresses, 1, Hosting::Threads);
        load(&open(&session, folder.path()), &session, 0);
        session.shutdown().wait().unwrap();
        proxies.each_ref().map(CountingProxy::take)
    };
    load(&[old, first]);
    let [to_old, _, to_new] = load(&[old, new]);
    assert!(to_old < LITTLE, "{to_old} bytes were sent to the node that has all parts");
    assert!((2 * LEN..2 * LEN + LITTLE).contains(&to_new), "{to_new} bytes were sent");
}

#[test]
fn weights_that_a_worker_reads_for_another_are_sent_once() {
    let folder = model(0);
    let readable = folder.path().to_str().unwrap();
    let servers = [Fixture::new(&[]), Fixture::new(&["--weights", readable])];
    let addresses = servers.each_ref().map(Fixture::address);
    for round in 0..2 {
        // Worker 1 reads, and dials worker 0 for the data plane.
        let proxies = Arc::<Mutex<Vec<CountingProxy>>>::default();
        let made = Arc::clone(&proxies);
        let mut options = Options::default();
        options.data_addresses = vec![std::net::Ipv4Addr::LOCALHOST.into(); 2];
        options.advertise = Some(Advertise::new(move |_, bound| {
            let proxy = CountingProxy::new(&format!("tcp://{bound}"));
            let address = proxy.address.strip_prefix("tcp://").unwrap().parse().unwrap();
            made.lock().unwrap().push(proxy);
            address
        }));
        let session = session_with(&addresses, 1, options);
        let loader = open(&session, folder.path());
        assert_eq!(loader.unreadable().iter().map(|one| one.worker).collect::<Vec<_>>(), [WorkerId(0)]);
        let take = || proxies.lock().unwrap().iter().map(CountingProxy::take).sum::<u64>();
        take();
        load(&loader, &session, 0);
        let sent = take();
        assert_eq!(sent < LITTLE, round > 0, "{sent} bytes were sent");
        assert!(round > 0 || sent > 2 * LEN);
        let loader = ShardLoader::open(&session, folder.path()).wait().unwrap();
        load(&loader, &session, 0);
        assert!(take() > 2 * LEN);
        session.shutdown().wait().unwrap();
    }
    // The reader's node keeps nothing: it has the file.
    assert_eq!(servers.each_ref().map(|server| cached(server).len()), [3, 0]);
}

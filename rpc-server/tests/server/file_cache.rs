//! The cache of files (`--file-cache`): what `rpc-cli run` sends once, and who shares it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rpc_core::client::{Digest, FileCache, Files};
use rpc_core::{DataType, Device, ErrorKind, RemoteTensor, Session};
use rpc_server::modules::hash;
use rpc_transports::Connector;

use super::cli::{Fixture, Run, cli};

/// Length of the file that is sent.
const LEN: usize = 2 << 20;

/// Bytes that a client may send at most for a run whose files are in the cache.
const LITTLE: u64 = 16 << 10;

/// Forwards connections to `server`, and counts the bytes that its clients send.
pub(super) struct CountingProxy {
    pub(super) address: String,
    sent: Arc<AtomicU64>,
}

impl CountingProxy {
    pub(super) fn new(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let (server, sent) = (server.strip_prefix("tcp://").unwrap().to_owned(), Arc::<AtomicU64>::default());
        let count = sent.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(&server).unwrap();
                let (answers, back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                thread::spawn(move || forward(answers, back, &AtomicU64::new(0)));
                let count = count.clone();
                thread::spawn(move || forward(client, server, &count));
            }
        });
        Self { address, sent }
    }

    /// Returns the bytes that have been sent since the last call.
    pub(super) fn take(&self) -> u64 {
        self.sent.swap(0, Ordering::SeqCst)
    }
}

/// Forwards a stream, and adds the bytes to `count` before they are written.
fn forward(mut from: TcpStream, mut to: TcpStream, count: &AtomicU64) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        count.fetch_add(len as u64, Ordering::SeqCst);
        if to.write_all(&piece[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

fn content(seed: u32) -> Vec<u8> {
    (0..LEN as u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8).collect()
}

fn digest_of(content: &[u8]) -> Digest {
    hash(content).unwrap().0
}

fn connect(fixture: &Fixture) -> Session {
    Connector::new().connect_blocking(fixture.address()).unwrap()
}

fn cache_of(session: &Session) -> FileCache {
    Files::new(session).cache().wait().unwrap().expect("a cache")
}

/// Returns the files of the cache in a fixture's folder.
pub(super) fn cached(fixture: &Fixture) -> Vec<PathBuf> {
    let Ok(owners) = fs::read_dir(fixture.path("workdir/cache")) else { return Vec::new() };
    let folders = owners.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    let mut files: Vec<_> =
        folders.flat_map(|folder| fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path())).collect();
    files.sort();
    files
}

/// Returns the path of a file below `folder`.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let is_it = entry.file_name() == name;
        if is_it { Some(entry.path()) } else { find(&entry.path(), name) }
    })
}

fn get(files: &Files, path: &str) -> Vec<u8> {
    let mut content = Vec::new();
    files.get(path, &mut content).wait().unwrap();
    content
}

#[test]
fn a_file_that_a_program_gets_again_is_not_sent_again() {
    let fixture = Fixture::new(&["--allow-run", "sh"]);
    let hop = Fixture::new(&["--allow-forward", "tcp://127.0.0.1:*"]);
    let proxy = CountingProxy::new(fixture.address());
    let before_hop = CountingProxy::new(hop.address());
    let tree = fixture.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(format!("{tree}/data"), content(0)).unwrap();
    fs::write(format!("{tree}/none"), "").unwrap();
    fs::write(format!("{tree}/tool"), "#!/bin/sh\nsha256sum < tree/data").unwrap();
    fs::set_permissions(format!("{tree}/tool"), fs::Permissions::from_mode(0o755)).unwrap();
    let run = |address: &str, flags: &[&str]| -> Run {
        let script = "test -f tree/none && tree/tool && echo more >> tree/data && echo more >> tree/tool";
        let run = cli(&[&["run", "--send", &tree], flags, &[address, "--", "sh", "-c", script]].concat());
        assert!(run.stdout.starts_with(&digest_of(&fs::read(format!("{tree}/data")).unwrap()).to_string()), "{run:?}");
        run
    };
    let from_cache = |run: &Run, name: &str| {
        run.stderr.contains(&format!("tree/{name}: ")) && {
            let line = run.stderr.lines().find(|line| line.starts_with(&format!("tree/{name}: "))).unwrap();
            line.ends_with("from the server's cache")
        }
    };

    let first = run(&proxy.address, &[]);
    assert!(!from_cache(&first, "data") && !from_cache(&first, "tool"), "{first:?}");
    assert!(proxy.take() > LEN as u64);
    // The program has changed the copies that it got, and the next one gets what was sent.
    let second = run(&proxy.address, &[]);
    assert!(from_cache(&second, "data") && from_cache(&second, "tool"), "{second:?}");
    let sent = proxy.take();
    assert!(sent < LITTLE, "{sent} bytes were sent");
    // A file that has changed is sent, and the others are not.
    fs::write(format!("{tree}/data"), content(1)).unwrap();
    let changed = run(&proxy.address, &[]);
    assert!(!from_cache(&changed, "data") && from_cache(&changed, "tool"), "{changed:?}");
    assert!(proxy.take() > LEN as u64);

    // Without the cache nothing is taken from it or added.
    let known = cached(&fixture);
    assert_eq!(known.len(), 3);
    fs::write(format!("{tree}/data"), content(2)).unwrap();
    for _ in 0..2 {
        let without = run(&proxy.address, &["--no-cache"]);
        assert!(!without.stderr.contains("cache"), "{without:?}");
        assert!(proxy.take() > LEN as u64);
    }
    assert_eq!(cached(&fixture), known);

    // A kept folder is filled from the cache, too.
    fs::write(format!("{tree}/data"), content(1)).unwrap();
    let kept = run(&proxy.address, &["--keep", "--workspace", "w"]);
    assert!(from_cache(&kept, "data") && proxy.take() < LITTLE, "{kept:?}");

    // Through a hop. The server knows its clients by the identity of the hop, which has none.
    let through = run(fixture.address(), &["-J", &before_hop.address]);
    assert!(from_cache(&through, "data") && from_cache(&through, "tool"), "{through:?}");
    assert!(before_hop.take() < LITTLE);
}

#[test]
fn a_client_takes_from_the_cache_what_has_the_digest_or_nothing() {
    for isolate in ["none", "process"] {
        let fixture = Fixture::new(&["--isolate", isolate]);
        let (data, other) = (content(0), content(1));
        let digest = digest_of(&data);
        let session = connect(&fixture);
        let (files, cache) = (Files::new(&session), cache_of(&session));
        let copy = |path: &str, digest: Digest, len: usize| cache.copy_to(path, digest, len as u64, false).wait();
        assert_eq!(cache.limit(), 1 << 30);
        assert!(!copy("a", digest, LEN).unwrap());
        assert!(files.ls("").wait().unwrap().is_empty());

        // The server computes the digest, and believes none of a client.
        files.put_bytes("other", other.clone()).wait().unwrap();
        assert!(cache.put("b/c", digest, LEN as u64, true, &other[..]).wait().unwrap());
        assert!(!copy("a", digest, LEN).unwrap());
        assert_eq!(cache.add("other").wait().unwrap(), Some(digest_of(&other)));
        assert!(copy("a/copy", digest_of(&other), LEN).unwrap());
        assert!(get(&files, "a/copy") == other);
        let executable = |path: &str| files.ls(path).wait().unwrap()[0].executable;
        assert!(executable("b/c") && !executable("a/copy"));
        assert!(!cache.put("b/c", digest_of(&other), LEN as u64, false, &data[..]).wait().unwrap());
        assert!(!executable("b/c") && get(&files, "b/c") == other);

        // Another session has it, too; and one that is damaged is not given, but sent anew.
        drop(session);
        let session = connect(&fixture);
        let (files, cache) = (Files::new(&session), cache_of(&session));
        let copy = |path: &str| cache.copy_to(path, digest_of(&other), LEN as u64, true).wait();
        assert!(copy("copy").unwrap() && get(&files, "copy") == other);
        files.rm("copy").wait().unwrap();
        let known = cached(&fixture);
        let [path] = &known[..] else { panic!("{known:?}") };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::OpenOptions::new().write(true).open(path).unwrap().write_all(b"damaged").unwrap();
        assert!(!copy("copy").unwrap());
        assert!(files.ls("").wait().unwrap().is_empty() && cached(&fixture).is_empty());
        assert!(cache.put("copy", digest_of(&other), LEN as u64, false, &other[..]).wait().unwrap());
        assert!(copy("copy").unwrap() && get(&files, "copy") == other);

        // Errors.
        for (path, digest, kind) in [
            ("../copy", digest_of(&other).to_string(), ErrorKind::InvalidArgument),
            ("copy", "nonsense".to_owned(), ErrorKind::InvalidArgument),
        ] {
            let from_cache = session.get_function("rpc.file.from_cache").wait().unwrap();
            let error = from_cache.call::<bool>((digest, LEN as u64, path, false)).wait().unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
        }
        assert_eq!(cache.add("none").wait().unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn the_content_of_a_tensor_is_sent_once() {
    for isolate in ["none", "process"] {
        let fixture = Fixture::new(&["--isolate", isolate]);
        let proxy = CountingProxy::new(fixture.address());
        let (data, other) = (content(0), content(1));
        let digest = digest_of(&data);
        let connect = || Connector::new().connect_blocking(&proxy.address).unwrap();
        let session = connect();
        let (files, cache) = (Files::new(&session), cache_of(&session));
        let empty = |len: usize| session.alloc(Device::cpu(), DataType::U8, &[len as i64]).wait().unwrap();
        let tensor = empty(LEN);
        let read = |tensor: &RemoteTensor| session.copy_from_remote(tensor).wait().unwrap();
        assert!(!cache.fill(&tensor, digest).wait().unwrap());
        let mut done = 0;
        assert!(cache.upload(&tensor, digest, data.clone()).progress(|bytes| done = bytes).wait().unwrap());
        assert!(read(&tensor) == data && done == LEN as u64 && proxy.take() > LEN as u64);
        let again = empty(LEN);
        assert!(!cache.upload(&again, digest, data.clone()).wait().unwrap());
        assert!(read(&again) == data);
        // A part of a tensor is filled, and the rest stays. The elements may be of any type.
        let two = empty(2 * LEN);
        let half = two.view(LEN as u64, DataType::F32, &[LEN as i64 / 4], None);
        assert!(cache.fill(&half, digest).wait().unwrap());
        assert!(read(&two)[..LEN].iter().all(|byte| *byte == 0) && read(&two)[LEN..] == data);
        // Files and tensors are kept in the same way.
        assert!(cache.copy_to("file", digest, LEN as u64, false).wait().unwrap());
        assert!(get(&files, "file") == data);
        files.put_bytes("other", other.clone()).wait().unwrap();
        assert_eq!(cache.add("other").wait().unwrap(), Some(digest_of(&other)));
        assert!(cache.fill(&again, digest_of(&other)).wait().unwrap() && read(&again) == other);
        assert_eq!(cache.add_tensor(&half).wait().unwrap(), Some(digest));
        assert_eq!(cache.add_tensor(&empty(0)).wait().unwrap(), Some(digest_of(&[])));

        // The digest alone is not enough, nor is a claim of it.
        assert!(!cache.fill(&empty(LEN - 1), digest).wait().unwrap());
        assert!(cache.upload(&tensor, digest_of(b"claimed"), other.clone()).wait().unwrap());
        assert!(!cache.fill(&tensor, digest_of(b"claimed")).wait().unwrap());
        let strided = tensor.view(0, DataType::U8, &[LEN as i64 / 2], Some(&[2]));
        for error in [
            cache.fill(&strided, digest).wait().unwrap_err(),
            cache.add_tensor(&strided).wait().unwrap_err(),
            cache.upload(&tensor, digest, vec![0; 3]).wait().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }

        // Another session has it without sending it; and a damaged one is sent anew.
        drop((tensor, again, two, half, strided, files, cache));
        drop(session);
        let session = connect();
        let cache = cache_of(&session);
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[LEN as i64]).wait().unwrap();
        proxy.take();
        assert!(!cache.upload(&tensor, digest, data.clone()).wait().unwrap());
        let sent = proxy.take();
        assert!(sent < LITTLE, "{sent} bytes were sent");
        for path in cached(&fixture) {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            fs::OpenOptions::new().write(true).open(path).unwrap().write_all(b"damaged").unwrap();
        }
        assert!(cache.upload(&tensor, digest, data.clone()).wait().unwrap());
        assert!(session.copy_from_remote(&tensor).wait().unwrap() == data);
        assert!(cache.fill(&tensor, digest).wait().unwrap());
    }
}

#[test]
fn the_cache_is_bounded_by_its_size_the_quota_and_open_files() {
    let small = Fixture::new(&["--file-cache", "3MiB", "--workspace-quota", "5MiB"]);
    let session = connect(&small);
    let (files, cache) = (Files::new(&session), cache_of(&session));
    let put = |seed: u32| {
        let data = content(seed);
        cache.put(&seed.to_string(), digest_of(&data), LEN as u64, false, &data[..]).wait()
    };
    assert!(put(0).unwrap() && put(1).unwrap());
    // The second one has displaced the first one.
    assert_eq!(cached(&small).len(), 1);
    let copy = |seed: u32| cache.copy_to("copy", digest_of(&content(seed)), LEN as u64, false).wait();
    assert!(!copy(0).unwrap());
    // The workspace has room for two.
    assert_eq!(copy(1).unwrap_err().kind(), ErrorKind::LimitExceeded);
    assert_eq!(put(1).unwrap_err().kind(), ErrorKind::LimitExceeded);
    files.rm("0").wait().unwrap();
    assert!(copy(1).unwrap());
    files.rm("copy").wait().unwrap();
    files.rm("1").wait().unwrap();
    // A file that is longer than the cache is not kept.
    files.put_bytes("long", vec![1; (3 << 20) + 1]).wait().unwrap();
    assert_eq!(cache.add("long").wait().unwrap(), None);
    assert_eq!(cached(&small).len(), 1);

    // Where the session has too few open files for the cache, the file is sent.
    let few = Fixture::new(&["--max-open-files", "5", "--isolate", "none"]);
    let session = connect(&few);
    let (data, cache) = (content(0), cache_of(&session));
    assert!(cache.put("a", digest_of(&data), LEN as u64, false, &data[..]).wait().unwrap());
    assert_eq!(cache.add("a").wait().unwrap_err().kind(), ErrorKind::LimitExceeded);
    assert!(get(&Files::new(&session), "a") == data && cached(&few).is_empty());

    // Without a cache.
    let none = Fixture::new(&["--file-cache", "0", "--allow-run", "cat"]);
    assert!(Files::new(&connect(&none)).cache().wait().unwrap().is_none());
    let local = none.path("local");
    fs::write(&local, "sent").unwrap();
    for _ in 0..2 {
        let run = cli(&["run", "--send", &local, none.address(), "--", "cat", "local"]);
        assert!(run.stdout == "sent" && run.stderr.contains("local: 4 B sent"), "{run:?}");
    }
    assert!(!Path::new(&none.path("workdir/cache")).exists());
    // Where nothing of clients is kept, nothing would be cleaned up, either.
    let no_files = Fixture::new(&["--workspace-quota", "0"]);
    assert!(Files::new(&connect(&no_files)).cache().wait().unwrap().is_none());
}

#[test]
fn a_file_that_changes_while_it_is_added_is_told_from_a_cache_that_fails() {
    // Without bytes on the disk, and longer than can be copied before it is cut.
    const LONG: u64 = 64 << 30;

    let fixture = Fixture::new(&["--file-cache", "64GiB", "--isolate", "none"]);
    let session = connect(&fixture);
    let (files, cache) = (Files::new(&session), cache_of(&session));
    files.put_bytes("long-file", vec![1]).wait().unwrap();
    let path = find(Path::new(&fixture.path("workdir")), "long-file").expect("the file of the workspace");
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(LONG).unwrap();
    thread::scope(|scope| {
        let added = scope.spawn(|| cache.add("long-file").wait());
        while cached(&fixture).is_empty() && !added.is_finished() {
            thread::yield_now();
        }
        file.set_len(1).unwrap();
        let error = added.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("'long-file' changed while it was copied"), "{error}");
    });
    assert!(cached(&fixture).is_empty());
    assert!(cache.add("long-file").wait().unwrap().is_some());
}

#[test]
fn identities_share_no_files_and_those_with_the_same_name_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string().into_string().unwrap();
    cli(&["cert", "--out", &path("pki"), "--host", "127.0.0.1", "--client-name", "alice"]).ok();
    cli(&["token", "--out", &path("alice"), "--name", "alice"]).ok();
    cli(&["token", "--out", &path("bob"), "--name", "bob"]).ok();
    let tokens = ["alice", "bob"].map(|name| fs::read_to_string(path(name)).unwrap()).concat();
    fs::write(path("tokens"), tokens).unwrap();
    let pki = |name: &str| path(&format!("pki/{name}"));
    let (tls, cert, key) = ("tls://127.0.0.1:0", pki("server.pem"), pki("server.key"));
    let (ca, tokens) = (pki("ca.pem"), path("tokens"));
    let flags = ["--listen", tls, "--cert", &cert, "--cert-key", &key, "--client-ca", &ca, "--token-file", &tokens];
    let fixture = Fixture::listening(&[&flags[..], &["--allow-run", "cat"]].concat());
    fs::write(path("data"), "data of alice").unwrap();
    let (data, client_cert, client_key) = (path("data"), pki("client.pem"), pki("client.key"));
    let by_cert = ["--ca", &ca, "--cert", &client_cert, "--cert-key", &client_key];
    let (alice, bob) = (path("alice"), path("bob"));
    let (by_token, other) = (["--ca", &ca, "--token-file", &alice], ["--ca", &ca, "--token-file", &bob]);
    let run = |proof: &[&str], says: &str| {
        let run = cli(&[&["run", "--send", &data], proof, &[fixture.address(), "--", "cat", "data"]].concat());
        assert_eq!(run.stdout, "data of alice", "{run:?}");
        assert!(run.stderr.contains(says), "{says}: {run:?}");
    };
    run(&by_token, "sent");
    run(&by_token, "from the server's cache");
    run(&by_cert, "sent");
    run(&by_cert, "from the server's cache");
    run(&other, "sent");
}

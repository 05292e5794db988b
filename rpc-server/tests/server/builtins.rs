//! The built-in functions, on a session of this process.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rpc_core::blocking::block_on;
use rpc_core::client::CHUNK;
use rpc_core::client::Files;
use rpc_core::{ErrorKind, Lane, LocalSession, Pack, Registry, RemoteObject, Session, Value};
use rpc_server::builtins::{self, ServerInfo, TimeOptions, time_function};
use rpc_server::modules::hash;
use rpc_server::workspace::{Workspace, WorkspaceLimits, WorkspaceRoot};

fn registry() -> Registry {
    let registry = Registry::new();
    builtins::register(&registry);
    registry
}

/// A session, its workspace, and the folder that holds it.
struct Fixture {
    session: Session,
    workspace: Workspace,
    _folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = WorkspaceRoot::open(folder.path(), WorkspaceLimits::with_quota(64 << 20)).unwrap();
        let workspace = root.private().unwrap();
        let session = LocalSession::builder(registry()).workspace(Arc::new(workspace.clone())).build();
        Self { session: Session::new(session), workspace, _folder: folder }
    }

    fn files(&self) -> Files {
        Files::new(&self.session)
    }

    fn names(&self) -> Vec<String> {
        self.files().ls("").wait().unwrap().into_iter().map(|entry| entry.name).collect()
    }

    /// Waits until all earlier requests of the default lane have ended.
    fn settle(&self) {
        self.session.get_function("rpc.echo").wait().unwrap();
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 % 251) as u8).collect()
}

#[test]
fn echo_returns_its_first_argument_and_null_without_one() {
    let session = Session::new(LocalSession::new(registry()));
    let echo = session.get_function("rpc.echo").wait().unwrap();
    assert_eq!(echo.call::<i64>((7,)).wait().unwrap(), 7);
    assert_eq!(echo.call::<String>(("first", 2, 3)).wait().unwrap(), "first");
    assert_eq!(echo.call::<Value>(()).wait().unwrap(), Value::Null);
    let object: RemoteObject = session.get_function("rpc.new_object").wait().unwrap().call(()).wait().unwrap();
    let again: RemoteObject = echo.call((&object,)).wait().unwrap();
    assert_ne!(again.handle(), object.handle());
}

#[test]
fn functions_lists_every_name_with_its_signature() {
    let registry = registry();
    registry.add("user.scale", |x: f64, factor: Option<f64>| x * factor.unwrap_or(2.0)).describe("scales a number");
    let session = Session::new(LocalSession::new(registry));
    let functions: Vec<(String, String)> =
        session.get_function("rpc.functions").wait().unwrap().call(()).wait().unwrap();
    let signature =
        |name: &str| functions.iter().find(|(known, _)| known == name).map(|(_, signature)| signature.as_str());
    assert_eq!(signature("user.scale"), Some("(float, float?) -> float"));
    assert_eq!(signature("rpc.echo"), Some("(any?, ...) -> any"));
    assert_eq!(signature("rpc.sleep"), Some("(float) -> null"));
    assert!(functions.is_sorted());
    // Asked for descriptions, it returns one for each function.
    let described: Vec<Vec<String>> =
        session.get_function("rpc.functions").wait().unwrap().call((true,)).wait().unwrap();
    let entry = |name: &str| described.iter().find(|entry| entry[0] == name).unwrap();
    assert_eq!(entry("user.scale"), &["user.scale", "(float, float?) -> float", "scales a number"]);
    assert_eq!(entry("rpc.sleep"), &["rpc.sleep", "(float) -> null", ""]);
}

#[test]
fn info_counts_the_handles_of_the_session_and_names_its_devices() {
    let session = Session::new(LocalSession::new(registry()));
    let info = session.function::<(), Pack<ServerInfo>>("rpc.info").wait().unwrap();
    let Pack(before) = info.call(()).wait().unwrap();
    let tensor = session.alloc(rpc_core::Device::cpu(), rpc_core::DataType::F32, &[1024]).wait().unwrap();
    let Pack(after) = info.call(()).wait().unwrap();
    assert_eq!((after.handles - before.handles, after.memory_bytes - before.memory_bytes), (1, 4096));
    assert_eq!((after.sessions, after.pid, after.key), (1, std::process::id(), None));
    assert_eq!(after.devices[0].device, "cpu:0");
    assert!(after.devices[0].total_memory.is_some() && after.devices[0].absent.is_none());
    assert!(!after.host.is_empty() && after.uptime_seconds >= before.uptime_seconds);
    drop(tensor);
}

#[test]
fn sleep_lasts_for_the_given_time_and_refuses_other_arguments() {
    let session = Session::new(LocalSession::new(registry()));
    let sleep = session.function::<(f64,), ()>("rpc.sleep").wait().unwrap();
    let start = Instant::now();
    sleep.call((0.05,)).wait().unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
    for seconds in [-1.0, f64::NAN, 1e300] {
        assert_eq!(sleep.call((seconds,)).wait().unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_cancelled_sleep_frees_its_lane() {
    let session = Session::new(LocalSession::new(registry()));
    let sleep = session.function::<(f64,), ()>("rpc.sleep").wait().unwrap();
    let error = sleep.call((3600.0,)).timeout(Duration::from_millis(20)).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    sleep.call((0.0,)).wait().unwrap();
    drop(sleep.call((3600.0,)).start());
    sleep.call((0.0,)).wait().unwrap();
}

#[test]
fn a_file_of_any_length_is_read_as_it_was_written() {
    let fixture = Fixture::new();
    let files = fixture.files();
    for len in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 11 * CHUNK + 7] {
        let data = pattern(len);
        let mut sent = Vec::new();
        let put = files.put_sized("folder/file", len as u64, &data[..]).progress(|bytes| sent.push(bytes));
        assert_eq!(put.wait().unwrap(), len as u64);
        assert!(sent.is_sorted() && sent.last().copied().unwrap_or(0) == len as u64);
        let (mut copy, mut got) = (Vec::new(), 0);
        assert_eq!(files.get("folder/file", &mut copy).progress(|bytes| got = bytes).wait().unwrap(), len as u64);
        assert!(copy == data && got == len as u64);
        assert_eq!(files.put_bytes("bytes", data.clone()).wait().unwrap(), len as u64);
        copy.clear();
        files.get("bytes", &mut copy).wait().unwrap();
        assert!(copy == data);
    }
    let entries = files.ls("folder").wait().unwrap();
    assert_eq!((entries[0].name.as_str(), entries[0].size), ("folder/file", 11 * CHUNK as u64 + 7));
    assert!(entries[0].modified.elapsed().unwrap() < Duration::from_secs(600));
    files.rm("folder").wait().unwrap();
    assert_eq!(fixture.names(), ["bytes"]);
    assert_eq!(files.rm("folder").wait().unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(files.get("folder/file", io::sink()).wait().unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn the_async_forms_work_on_a_lane_of_their_own() {
    let fixture = Fixture::new();
    let files = fixture.files().lane(Lane(9));
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let copy = runtime.block_on(async {
        files.put_bytes("a", pattern(3 * CHUNK)).await.unwrap();
        let mut copy = Vec::new();
        files.get("a", &mut copy).await.unwrap();
        copy
    });
    assert!(copy == pattern(3 * CHUNK));
}

#[test]
fn no_path_leads_out_of_the_workspace() {
    let fixture = Fixture::new();
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(outside.path(), fixture.workspace.path().join("link")).unwrap();
    let files = fixture.files();
    for path in ["../secret", "/etc/passwd", "a/../../secret", "link/secret", "", "a\0b"] {
        assert_eq!(files.put_bytes(path, "x").wait().unwrap_err().kind(), ErrorKind::InvalidArgument, "put {path:?}");
        assert_eq!(files.get(path, io::sink()).wait().unwrap_err().kind(), ErrorKind::InvalidArgument, "get {path:?}");
        assert_eq!(files.rm(path).wait().unwrap_err().kind(), ErrorKind::InvalidArgument, "rm {path:?}");
        if !path.is_empty() {
            files.ls(path).wait().unwrap_err();
        }
    }
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"secret");
}

/// A reader that yields this number of bytes, and then an error.
struct Breaking(usize);

impl Read for Breaking {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::Error::other("the disk is gone"));
        }
        let len = buffer.len().min(self.0);
        self.0 -= len;
        Ok(len)
    }
}

#[test]
fn an_interrupted_upload_leaves_the_old_file_and_nothing_else() {
    let fixture = Fixture::new();
    let files = fixture.files();
    files.put_bytes("file", "old").wait().unwrap();
    let error = files.put("file", Breaking(12 * CHUNK)).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.message().contains("the disk is gone"), "{error}");
    let wrong_lens = [3, 5].map(|len| files.put_sized("file", len, &b"four"[..]));
    for put in wrong_lens {
        assert_eq!(put.wait().unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    fixture.settle();
    let mut content = Vec::new();
    files.get("file", &mut content).wait().unwrap();
    assert_eq!(content, b"old");
    assert_eq!((fixture.names(), fixture.workspace.used_bytes()), (vec!["file".to_owned()], 3));
}

#[test]
fn a_dropped_upload_and_an_ended_session_release_their_quota() {
    let fixture = Fixture::new();
    // Polled until it has begun, and then dropped.
    block_on(async {
        let mut put = fixture.files().put_bytes("never", pattern(12 * CHUNK)).into_future();
        while fixture.workspace.used_bytes() == 0 {
            let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut put).poll(cx))).await;
            assert!(polled.is_pending());
            std::thread::yield_now();
        }
    })
    .unwrap();
    fixture.settle();
    assert_eq!(fixture.workspace.used_bytes(), 0);

    let begin = fixture.session.get_function("rpc.file.begin_write").wait().unwrap();
    let writer: Value = begin.call(("left", 1000)).wait().unwrap();
    assert!(matches!(writer, Value::Object(_)));
    assert_eq!(fixture.workspace.used_bytes(), 1000);
    fixture.session.shutdown().wait().unwrap();
    assert_eq!(fixture.workspace.used_bytes(), 0);
}

#[test]
fn a_writer_is_used_up_by_commit_and_abort() {
    let fixture = Fixture::new();
    let get = |name: &str| fixture.session.get_function(name).wait().unwrap();
    let (begin, write) = (get("rpc.file.begin_write"), get("rpc.file.write"));
    for (end, left) in [("rpc.file.commit", 1), ("rpc.file.abort", 0)] {
        let writer: RemoteObject = begin.call((end,)).wait().unwrap();
        write.call::<()>((&writer, 0, bytes::Bytes::from_static(b"x"))).wait().unwrap();
        get(end).call::<()>((&writer,)).wait().unwrap();
        let again = get("rpc.file.commit").call::<()>((&writer,)).wait();
        assert_eq!(again.unwrap_err().kind(), ErrorKind::InvalidArgument);
        assert_eq!(fixture.names().iter().filter(|name| *name == end).count(), left);
    }
    let other: RemoteObject = get("rpc.new_object").call(()).wait().unwrap();
    assert_eq!(get("rpc.file.commit").call::<()>((&other,)).wait().unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn an_upload_that_fails_leaves_its_part_for_the_next_one_if_it_may() {
    let fixture = Fixture::new();
    let files = fixture.files();
    let (data, first) = (pattern(5 * CHUNK), 2 * CHUNK);
    let len = data.len() as u64;
    let upload = || files.put_resumable("file", len).wait().unwrap();
    let get = |name: &str| fixture.session.get_function(name).wait().unwrap();
    let begin = |from: usize| {
        let (writer, ..): (RemoteObject, u64, String) =
            get("rpc.file.resume_write").call(("file", len)).wait().unwrap();
        let piece = bytes::Bytes::copy_from_slice(&data[from..from + first]);
        get("rpc.file.write").call::<()>((&writer, 0, piece)).wait().unwrap();
        // What is behind a gap is no beginning.
        get("rpc.file.write").call::<()>((&writer, first + 1, bytes::Bytes::from_static(b"x"))).wait().unwrap();
        drop(writer);
        fixture.settle();
    };
    begin(0);
    assert_eq!((fixture.names(), fixture.workspace.used_bytes()), (vec!["file.rpc-part".to_owned()], first as u64));
    let resumed = upload();
    assert_eq!((resumed.part_len(), fixture.names().len()), (first as u64, 0));
    assert_eq!(resumed.part_digest(), hash(&data[..first]).unwrap().0);
    assert_eq!(fixture.workspace.used_bytes(), len);
    assert_eq!(resumed.finish(&data[first..]).wait().unwrap(), len);
    let mut copy = Vec::new();
    files.get("file", &mut copy).wait().unwrap();
    assert!(copy == data);

    // A part that is not wanted goes; so does one that is longer than the file, and a link.
    begin(1);
    upload().discard().wait().unwrap();
    assert_eq!((fixture.names(), fixture.workspace.used_bytes()), (vec!["file".to_owned()], len));
    let part = fixture.workspace.path().join("file.rpc-part");
    for make in [
        (|part| std::fs::write(part, vec![0; 6 * CHUNK])) as fn(&std::path::Path) -> io::Result<()>,
        |part| std::os::unix::fs::symlink("file", part),
        |part| std::fs::hard_link(part.with_extension(""), part),
    ] {
        make(&part).unwrap();
        let fresh = upload();
        assert_eq!(fresh.part_len(), 0);
        fresh.discard().wait().unwrap();
        std::fs::remove_file(&part).unwrap();
    }
    let opened = files.open("file").wait().unwrap();
    assert_eq!((opened.len(), opened.prefix_digest(7).wait().unwrap()), (len, hash(&data[..7]).unwrap().0));
    assert_eq!(opened.prefix_digest(len + 1).wait().unwrap_err().kind(), ErrorKind::InvalidArgument);
    let mut end = Vec::new();
    opened.read_from(len - 3, &mut end).wait().unwrap();
    assert_eq!(end, data[data.len() - 3..]);
}

#[test]
fn a_quota_is_an_error_that_names_it() {
    let fixture = Fixture::new();
    let put = fixture.files().put_bytes("large", vec![0; 65 << 20]);
    let error = put.wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("67108864"), "{error}");
}

/// A writer that runs a callback when the first bytes arrive.
struct AtFirst<F>(Option<F>, Vec<u8>);

impl<F: FnOnce()> Write for AtFirst<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(action) = self.0.take() {
            action();
        }
        self.1.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_download_reads_one_file_although_another_replaces_it() {
    let fixture = Fixture::new();
    let files = fixture.files();
    let old = pattern(20 * CHUNK);
    files.put_bytes("file", old.clone()).wait().unwrap();
    let path = fixture.workspace.path().join("file");
    let mut sink = AtFirst(
        Some(|| {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, "new").unwrap();
        }),
        Vec::new(),
    );
    files.get("file", &mut sink).wait().unwrap();
    assert!(sink.1 == old);
}

#[test]
fn a_download_of_a_file_that_shrinks_is_an_error() {
    let fixture = Fixture::new();
    let files = fixture.files();
    files.put_bytes("file", pattern(20 * CHUNK)).wait().unwrap();
    let path = fixture.workspace.path().join("file");
    let shrink = || std::fs::File::options().write(true).open(&path).unwrap().set_len(CHUNK as u64).unwrap();
    let error = files.get("file", AtFirst(Some(shrink), Vec::new())).wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.message().contains("changed"), "{error}");
}

#[test]
fn one_read_is_bounded_and_ends_with_the_file() {
    let fixture = Fixture::new();
    fixture.files().put_bytes("file", "hello").wait().unwrap();
    let get = |name: &str| fixture.session.get_function(name).wait().unwrap();
    let (reader, len): (RemoteObject, u64) = get("rpc.file.open").call(("file",)).wait().unwrap();
    let read = |offset: u64, len: u64| get("rpc.file.read").call::<bytes::Bytes>((&reader, offset, len)).wait();
    assert_eq!((len, read(3, 100).unwrap().as_ref()), (5, &b"lo"[..]));
    assert!(read(5, 1).unwrap().is_empty() && read(u64::MAX >> 1, 1).unwrap().is_empty());
    assert_eq!(read(0, builtins::MAX_READ_BYTES + 1).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_session_without_a_workspace_says_so() {
    let session = Session::new(LocalSession::new(registry()));
    let error = Files::new(&session).ls("").wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// A session with a function that counts its calls.
fn counting() -> (Session, Arc<AtomicU64>) {
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    let registry = registry();
    registry.add("count", move |step: u64| {
        counter.fetch_add(step, Ordering::Relaxed);
    });
    registry.add("fail", || -> Result<(), String> { Err("no".to_owned()) });
    (Session::new(LocalSession::new(registry)), calls)
}

fn options(number: u64, repeat: u64, min_repeat: Duration, warmup: u64) -> TimeOptions {
    TimeOptions { number, repeat, min_repeat, warmup, ..TimeOptions::default() }
}

#[test]
fn timing_makes_the_requested_number_of_calls() {
    let (session, calls) = counting();
    let count = session.get_function("count").wait().unwrap();
    let samples = block_on(time_function(&session, &count, &options(3, 4, Duration::ZERO, 2), (10,))).unwrap().unwrap();
    assert_eq!((samples.len(), calls.load(Ordering::Relaxed)), (4, (2 + 3 * 4) * 10));
    assert!(samples.iter().all(|seconds| *seconds > 0.0 && *seconds < 1.0));
}

#[test]
fn timing_makes_more_calls_until_a_sample_takes_long_enough() {
    let wanted = options(1, 3, Duration::from_millis(4), 0);
    // One call takes far less than 4 ms, unless the machine stands still meanwhile.
    for is_last in [false, false, false, false, true] {
        let (session, calls) = counting();
        let count = session.get_function("count").wait().unwrap();
        let start = Instant::now();
        let samples = block_on(time_function(&session, &count, &wanted, (1,))).unwrap().unwrap();
        assert!(start.elapsed() >= 3 * wanted.min_repeat);
        let calls = calls.load(Ordering::Relaxed);
        if calls > 100 && samples.iter().all(|seconds| *seconds < 1e-3) {
            break;
        }
        assert!(!is_last, "{calls} calls: {samples:?}");
    }
}

#[test]
fn timing_works_for_functions_that_return_futures() {
    let (session, _) = counting();
    let sleep = session.get_function("rpc.sleep").wait().unwrap();
    let samples =
        block_on(time_function(&session, &sleep, &options(1, 3, Duration::ZERO, 1), (0.002,))).unwrap().unwrap();
    assert!(samples.len() == 3 && samples.iter().all(|seconds| *seconds >= 0.002), "{samples:?}");
}

#[test]
fn timing_ends_with_the_functions_first_error_and_refuses_nonsense() {
    let (session, _) = counting();
    let fail = session.get_function("fail").wait().unwrap();
    let time = |options| block_on(time_function(&session, &fail, &options, ())).unwrap().unwrap_err().kind();
    assert_eq!(time(TimeOptions::default()), ErrorKind::Application);
    assert_eq!(time(options(0, 1, Duration::ZERO, 0)), ErrorKind::InvalidArgument);
    assert_eq!(time(options(1, u64::MAX >> 1, Duration::ZERO, 0)), ErrorKind::InvalidArgument);
}

#[test]
fn a_cancelled_timing_frees_its_lane() {
    let (session, _) = counting();
    let count = session.get_function("count").wait().unwrap();
    let timer = session.get_function("rpc.time_function").wait().unwrap();
    let endless = timer.call::<Vec<f64>>((&count, u64::MAX >> 1, 1, 0.0, 0, 0, 1)).timeout(Duration::from_millis(20));
    assert_eq!(endless.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    count.call::<()>((1,)).wait().unwrap();
}

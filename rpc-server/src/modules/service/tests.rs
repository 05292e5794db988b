//! Unit tests of the functions by which clients bring modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rpc_core::client::Modules;
use rpc_core::{ErrorKind, FunctionModule, LocalSession, Registry, Session, SessionLimits};

use super::*;
use crate::builtins;
use crate::modules::hash;
use crate::workspace::{WorkspaceLimits, WorkspaceRoot};

/// Loader that loads no code: its modules have a function that returns the file's content.
#[derive(Default)]
struct FakeLoader {
    loads: AtomicUsize,
}

impl NativeLoader for FakeLoader {
    fn load(&self, file: &Path, name: &str) -> Result<Arc<dyn Module>> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        let content = fs::read_to_string(file).map_err(RpcError::from)?;
        if content.starts_with("broken") {
            return Err(RpcError::invalid_argument(format!("{name} is broken")));
        }
        Ok(Arc::new(FunctionModule::new(name).add("content", move || content.clone())))
    }

    fn check_library(&self) -> Result<()> {
        Ok(())
    }

    fn register_globals(&self, _: &Registry) -> Result<usize> {
        Ok(0)
    }
}

/// A session with a workspace that takes modules.
struct Fixture {
    session: Session,
    pretence: Arc<FakeLoader>,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new(admitted: Option<DigestList>) -> Self {
        Self::with_limits(admitted, SessionLimits::default())
    }

    fn with_limits(admitted: Option<DigestList>, limits: SessionLimits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("modules");
        let store = ModuleStore::open(&store, StoreLimits::default(), admitted.map(Arc::new)).unwrap();
        let pretence = Arc::new(FakeLoader::default());
        let service = Arc::new(ModuleService::new(store, pretence.clone()));
        let workspace = WorkspaceRoot::open(folder.path(), WorkspaceLimits::default()).unwrap().private().unwrap();
        let registry = Registry::new();
        builtins::register(&registry);
        // Programs that are their own server register twice; the loader must be there once
        // nevertheless.
        builtins::register(&registry);
        let session = LocalSession::builder(registry).limits(limits);
        let session = session.workspace(Arc::new(workspace)).extension(service).build();
        Self { session: Session::new(session), pretence, folder }
    }

    /// Loads a module, and returns its content.
    fn content(&self, path: &str) -> Result<String> {
        self.session.load_module(path).wait()?.function("content").wait()?.call(()).wait()
    }

    fn loads(&self) -> usize {
        self.pretence.loads.load(Ordering::Relaxed)
    }

    /// Creates a file of the server, outside the workspace, last changed an hour ago.
    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, content).unwrap();
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(&path).unwrap().set_modified(hour_ago).unwrap();
        path
    }

    fn put(&self, path: &str, content: &str) {
        rpc_core::client::Files::new(&self.session).put_bytes(path, content.to_owned()).wait().unwrap();
    }
}

fn digest_of(content: &str) -> Digest {
    hash(content.as_bytes()).unwrap().0
}

#[test]
fn modules_are_charged_as_long_as_they_stay_loaded() {
    let limits = SessionLimits { max_memory: 1 << 20, ..SessionLimits::default() };
    let fixture = Fixture::with_limits(None, limits);
    let load = |start: &str| {
        fixture.put("module.so", &start.repeat((300 << 10) / start.len()));
        fixture.session.load_module("module.so").wait()
    };
    // None of these stays.
    for _ in 0..8 {
        assert_eq!(load("broken").unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    for start in ["a", "b", "c"] {
        load(start).unwrap();
    }
    let error = load("d").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.message().contains("max_memory"), "{error}");
    // It is loaded already, and takes no more.
    load("a").unwrap();
}

#[test]
fn a_module_is_sent_once_and_loaded_once() {
    let fixture = Fixture::new(None);
    let modules = Modules::new(&fixture.session);
    // The module takes several pieces, and the last one is not whole.
    let content = "kernels ".repeat(300_000);
    let digest = digest_of(&content);
    let mut progress = Vec::new();
    let upload = modules.upload(digest, content.len() as u64, content.as_bytes());
    assert!(upload.progress(|bytes| progress.push(bytes)).wait().unwrap());
    assert!(progress.is_sorted() && progress.last() == Some(&(content.len() as u64)));
    assert!(modules.has(digest).wait().unwrap());
    let unread = std::io::repeat(0);
    assert!(!modules.upload(digest, content.len() as u64, unread).wait().unwrap());
    for _ in 0..2 {
        assert_eq!(fixture.content(&digest.module_path()).unwrap(), content);
    }
    assert_eq!(fixture.loads(), 1);
    let module = modules.load(digest).wait().unwrap();
    assert_eq!(modules.functions(&module).wait().unwrap(), [("content".to_owned(), "() -> str".to_owned())]);
}

#[test]
fn a_changed_file_is_another_module_and_the_first_one_is_kept() {
    let fixture = Fixture::new(None);
    fixture.put("lib/a.so", "one");
    assert_eq!(fixture.content("lib/a.so").unwrap(), "one");
    fixture.put("lib/a.so", "two");
    assert_eq!(fixture.content("lib/a.so").unwrap(), "two");
    assert_eq!(fixture.content(&digest_of("one").module_path()).unwrap(), "one");
    fixture.put("b.so", "two");
    assert_eq!(fixture.content("b.so").unwrap(), "two");
    assert_eq!(fixture.loads(), 2);
}

#[test]
fn an_unchanged_file_is_not_read_again() {
    let fixture = Fixture::new(None);
    let path = fixture.file("a.so", "one");
    let text = path.to_str().unwrap();
    assert_eq!(fixture.content(text).unwrap(), "one");
    // Another import would restore it.
    let entry = fixture.folder.path().join(format!("modules/{}.so", digest_of("one")));
    fs::remove_file(&entry).unwrap();
    assert_eq!(fixture.content(text).unwrap(), "one");
    assert!(!entry.exists(), "the file was imported again");
    fixture.file("a.so", "two");
    assert_eq!(fixture.content(text).unwrap(), "two");
}

#[test]
fn failed_load_is_reported_each_time_and_can_be_repaired() {
    let fixture = Fixture::new(None);
    fixture.put("a.so", "broken");
    for _ in 0..2 {
        let error = fixture.content("a.so").unwrap_err();
        assert!(error.message().contains("a.so is broken"), "{error}");
    }
    assert_eq!(fixture.loads(), 2);
    let missing = fixture.content(&digest_of("missing").module_path()).unwrap_err();
    assert!(missing.kind() == ErrorKind::NotFound && missing.message().contains("upload it"), "{missing}");
    let none = fixture.content("sha256:abc").unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn relative_paths_are_files_of_the_workspace_and_absolute_ones_of_the_server() {
    let fixture = Fixture::new(None);
    let secret = fixture.file("secret.so", "secret");
    std::os::unix::fs::symlink(&secret, fixture.folder.path().join("link.so")).unwrap();
    for path in ["../secret.so", "a/../../secret.so", "none.so", "."] {
        let error = Modules::new(&fixture.session).import(path).wait().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::NotFound), "{path}: {error}");
    }
    for path in [&*secret, &fixture.folder.path().join("link.so")] {
        let digest = Modules::new(&fixture.session).import(path.to_str().unwrap()).wait().unwrap();
        assert_eq!(digest, digest_of("secret"));
    }
    let missing = Modules::new(&fixture.session).import("/nowhere/a.so").wait().unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    let folder = Modules::new(&fixture.session).import("/").wait().unwrap_err();
    assert_eq!(folder.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn with_a_list_errors_do_not_describe_unlisted_files_of_the_server() {
    let fixture = Fixture::new(Some([digest_of("listed")].into_iter().collect()));
    let import = |path: &Path| Modules::new(&fixture.session).import(path.to_str().unwrap()).wait();
    assert_eq!(import(&fixture.file("a.so", "listed")).unwrap(), digest_of("listed"));
    let mut words = Vec::new();
    for path in [&fixture.file("b.so", "other"), Path::new("/nowhere"), Path::new("/"), Path::new("/proc/version")] {
        let error = import(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        words.push(error.message().replace(&format!("{path:?}"), "PATH"));
    }
    assert!(words.iter().all(|text| *text == words[0] && text.contains("--module-digests")), "{words:?}");
    // For its own files a client gets the exact error.
    fixture.put("c.so", "other");
    let error = fixture.content("c.so").unwrap_err();
    assert!(error.message().contains(&digest_of("other").to_string()), "{error}");
}

#[test]
fn an_upload_without_a_commit_leaves_no_file() {
    let fixture = Fixture::new(None);
    let function = |name: &str| fixture.session.get_function(name).wait().unwrap();
    let (begin, write, commit) =
        (function("rpc.module.begin_upload"), function("rpc.module.write"), function("rpc.module.commit"));
    let digest = digest_of("module").to_string();
    let upload: rpc_core::RemoteObject = begin.call((digest.clone(), 6)).wait().unwrap();
    write.call::<()>((&upload, 0, bytes::Bytes::from_static(b"module"))).wait().unwrap();
    commit.call::<()>((&upload,)).wait().unwrap();
    for over in [
        commit.call::<()>((&upload,)).wait().unwrap_err(),
        write.call::<()>((&upload, 6, bytes::Bytes::new())).wait().unwrap_err(),
    ] {
        assert!(over.kind() == ErrorKind::InvalidArgument && over.message().contains("is over"), "{over}");
    }
    let dropped: rpc_core::RemoteObject = begin.call((digest, 6)).wait().unwrap();
    dropped.free().wait().unwrap();
    let left = fs::read_dir(fixture.folder.path().join("modules")).unwrap().count();
    assert_eq!(left, 2, "the lock and the module");
}

//! Native modules of clients at a server without the library that loads them: accepted uploads,
//! refusals, and error messages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use disco::{Hosting, Options, SocketSession};
use rpc_core::client::Files;
use rpc_core::client::{Digest, Modules};
use rpc_core::{ErrorKind, Pack, RpcError, Session};
use rpc_server::builtins::{ModulesInfo, ServerInfo};
use rpc_server::config::{ByteSize, ConfigError, Isolate, ServeConfig, ServeError};
use rpc_server::modules::{ModuleError, hash};
use rpc_server::{RpcServer, Running, ServerProcess};
use rpc_transports::Connector;
use tempfile::TempDir;

/// A server whose sessions are in this process, and a session.
struct Fixture {
    running: Running,
    session: Session,
    folder: TempDir,
}

impl Fixture {
    async fn start(change: impl FnOnce(&mut ServeConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let running = try_start(&folder, change).await.unwrap();
        let session = Connector::new().connect(&running.addresses()[0].to_string()).await.unwrap();
        Self { running, session, folder }
    }

    fn modules(&self) -> Modules {
        Modules::new(&self.session)
    }

    async fn upload(&self, content: &[u8]) -> Result<Digest, RpcError> {
        let digest = digest_of(content);
        self.modules().upload_bytes(digest, content.to_vec()).await.map(|_| digest)
    }

    async fn info(&self) -> Option<ModulesInfo> {
        let Pack(info): Pack<ServerInfo> = self.session.get_function("rpc.info").await.unwrap().call(()).await.unwrap();
        info.modules
    }
}

async fn try_start(folder: &TempDir, change: impl FnOnce(&mut ServeConfig)) -> Result<Running, ServeError> {
    let mut config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().join("work"),
        allow_modules: true,
        isolate: Isolate::None,
        tvm_ffi: Some(no_library(folder.path())),
        ..ServeConfig::default()
    };
    change(&mut config);
    RpcServer::default().config(config).start().await
}

/// Makes a file with the name of the library that is none, so that loading fails on any machine.
fn no_library(folder: &Path) -> PathBuf {
    let file = folder.join("libtvm_ffi.so");
    fs::write(&file, "none").unwrap();
    file
}

fn digest_of(content: &[u8]) -> Digest {
    hash(content).unwrap().0
}

/// Checks the kind of an error and words of its message.
#[track_caller]
fn check(error: &RpcError, kind: ErrorKind, words: &[&str]) {
    assert_eq!(error.kind(), kind, "{error}");
    for word in words {
        assert!(error.message().contains(word), "{word}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_are_off_by_default_and_the_refusal_names_the_flag() {
    let fixture = Fixture::start(|config| config.allow_modules = ServeConfig::default().allow_modules).await;
    let digest = digest_of(b"module");
    let modules = fixture.modules();
    Files::new(&fixture.session).put_bytes("kernels.so", "module").await.unwrap();
    let refusals = [
        modules.has(digest).await.unwrap_err(),
        fixture.upload(b"module").await.unwrap_err(),
        modules.import("kernels.so").await.unwrap_err(),
        modules.load(digest).await.unwrap_err(),
        fixture.session.load_module("kernels.so").await.unwrap_err(),
        fixture.session.load_module_with("tvm_ffi", "/lib/kernels").await.unwrap_err(),
    ];
    for error in refusals {
        check(&error, ErrorKind::Refused, &["--allow-modules"]);
    }
    assert_eq!(fixture.info().await, None);
    assert!(!fixture.folder.path().join("work/modules").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_module_is_kept_across_sessions_and_loaded() {
    let fixture = Fixture::start(|_| {}).await;
    let content = vec![7; (3 << 20) + 5];
    let digest = fixture.upload(&content).await.unwrap();
    let entry = fixture.folder.path().join(format!("work/modules/{digest}.so"));
    assert!(fs::read(&entry).unwrap() == content);
    let again = Connector::new().connect(&fixture.running.addresses()[0].to_string()).await.unwrap();
    assert!(Modules::new(&again).has(digest).await.unwrap());
    // The upload succeeds; loading needs the library.
    let error = fixture.modules().load(digest).await.unwrap_err();
    assert!(error.message().contains("libtvm_ffi.so"), "{error}");
    let info = fixture.info().await.unwrap();
    assert!(info.max_bytes == 512 << 20 && !info.listed_only);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_errors_that_name_them() {
    let fixture = Fixture::start(|config| {
        config.max_module = ByteSize(8192);
        config.module_store_size = ByteSize(12288);
    })
    .await;
    let error = fixture.upload(&[1; 8193]).await.unwrap_err();
    check(&error, ErrorKind::LimitExceeded, &["8193", "8KiB", "--max-module"]);
    fixture.upload(&[1; 8192]).await.unwrap();
    let error = fixture.upload(&[2; 8192]).await.unwrap_err();
    check(&error, ErrorKind::LimitExceeded, &["8192 bytes of 12KiB", "--module-store-size", "--module-expiry"]);
    Files::new(&fixture.session).put_bytes("large.so", vec![3; 8193]).await.unwrap();
    let error = fixture.session.load_module("large.so").await.unwrap_err();
    check(&error, ErrorKind::LimitExceeded, &["--max-module"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_list_of_digests_only_listed_modules_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("digests");
    fs::write(&list, format!("# admitted\n{}  kernels.so\n", digest_of(b"listed"))).unwrap();
    let fixture = Fixture::start(|config| config.module_digests = Some(list.clone())).await;
    // Read at the start.
    fs::remove_file(&list).unwrap();
    fixture.upload(b"listed").await.unwrap();
    let error = fixture.upload(b"other").await.unwrap_err();
    check(&error, ErrorKind::Refused, &[&digest_of(b"other").to_string(), "--module-digests"]);
    Files::new(&fixture.session).put_bytes("other.so", "other").await.unwrap();
    let error = fixture.session.load_module("other.so").await.unwrap_err();
    check(&error, ErrorKind::Refused, &["--module-digests"]);
    assert!(fixture.info().await.unwrap().listed_only);
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_are_those_of_the_workspace_or_absolute() {
    let fixture = Fixture::start(|_| {}).await;
    Files::new(&fixture.session).put_bytes("lib/kernels.so", "module").await.unwrap();
    let modules = fixture.modules();
    assert_eq!(modules.import("lib/kernels.so").await.unwrap(), digest_of(b"module"));
    let outside = fixture.folder.path().join("outside.so");
    fs::write(&outside, "outside").unwrap();
    assert_eq!(modules.import(outside.to_str().unwrap()).await.unwrap(), digest_of(b"outside"));
    let error = modules.import("../../../../../../outside.so").await.unwrap_err();
    check(&error, ErrorKind::InvalidArgument, &["outside the workspace"]);
    let error = fixture.session.load_module("none.so").await.unwrap_err();
    check(&error, ErrorKind::NotFound, &["none.so"]);
    let error = modules.load(digest_of(b"unknown")).await.unwrap_err();
    check(&error, ErrorKind::NotFound, &["upload it"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_module_settings_are_errors_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("digests");
    fs::write(&list, "kernels.so\n").unwrap();
    let error = try_start(&folder, |config| config.module_digests = Some(list.clone())).await.unwrap_err();
    assert!(matches!(error, ServeError::Modules(ModuleError::Digests { line: 1, .. })), "{error:?}");

    let shared = folder.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let error = try_start(&folder, |config| config.module_store = Some(shared.clone())).await.unwrap_err();
    assert!(matches!(error, ServeError::Modules(ModuleError::Exposed { mode: 0o777, .. })), "{error:?}");

    let error = try_start(&folder, |config| config.library = vec!["/nowhere/lib.so".into()]).await.unwrap_err();
    let ServeError::Library(error) = error else { panic!("{error:?}") };
    assert!(error.message().contains("/nowhere/lib.so"), "{error}");

    // This program calls no hook for session processes, and the settings do not choose `none`.
    let error = try_start(&folder, |config| config.isolate = Isolate::Auto).await.unwrap_err();
    assert!(matches!(error, ServeError::Config(ConfigError::NoIsolationHook)), "{error:?}");
}

/// `rpc-server` as a program, whose sessions have processes of their own.
fn server(folder: &Path, flags: &[&str]) -> Command {
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
    command.arg("--tvm-ffi").arg(no_library(folder));
    command.arg("--workdir").arg(folder.join("work")).args(flags);
    command
}

#[test]
fn sessions_with_processes_of_their_own_share_the_store_and_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("digests");
    fs::write(&list, digest_of(b"listed").to_string()).unwrap();
    let flags = ["--allow-modules", "--module-digests", list.to_str().unwrap()];
    let server = ServerProcess::spawn(server(folder.path(), &flags)).unwrap();
    // Session processes use the list that the server has read.
    fs::write(&list, "").unwrap();
    let connect = || Connector::new().connect_blocking(server.address()).unwrap();
    let (first, second) = (connect(), connect());
    let pid = |session: &Session| {
        let Pack(info): Pack<ServerInfo> = session.get_function("rpc.info").wait().unwrap().call(()).wait().unwrap();
        assert!(info.modules.unwrap().listed_only);
        info.pid
    };
    assert_ne!(pid(&first), pid(&second));
    let upload = |session: &Session, content: &'static [u8]| {
        Modules::new(session).upload_bytes(digest_of(content), content).wait()
    };
    assert!(upload(&first, b"listed").unwrap());
    assert!(!upload(&second, b"listed").unwrap());
    check(&upload(&second, b"other").unwrap_err(), ErrorKind::Refused, &["--module-digests"]);
    let error = Modules::new(&second).load(digest_of(b"listed")).wait().unwrap_err();
    assert!(error.message().contains("libtvm_ffi.so"), "{error}");
}

#[test]
fn a_library_that_cannot_be_loaded_keeps_the_server_from_starting() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libmissing.so");
    for isolate in ["auto", "process", "none"] {
        let flags = ["--library", library.to_str().unwrap(), "--isolate", isolate];
        let output = server(folder.path(), &flags).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(78), "{stderr}");
        assert!(output.stdout.is_empty());
        assert!(stderr.contains("--library") && stderr.contains(library.to_str().unwrap()), "{stderr}");
    }
}

#[test]
fn workers_as_threads_and_as_processes_take_the_modules_of_their_node() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("digests");
    fs::write(&list, digest_of(b"listed").to_string()).unwrap();
    let flags = ["--allow-modules", "--module-digests", list.to_str().unwrap()];
    let server = ServerProcess::spawn(server(folder.path(), &flags)).unwrap();
    let session = Connector::new().connect_blocking(server.address()).unwrap();
    Modules::new(&session).upload_bytes(digest_of(b"listed"), &b"listed"[..]).wait().unwrap();
    for hosting in [Hosting::Threads, Hosting::Processes] {
        let mut options = Options::default();
        options.hosting = hosting;
        let session = SocketSession::new([server.address()], 2, 1).options(options).start().wait().unwrap();
        for (content, word) in [(&b"listed"[..], "libtvm_ffi.so"), (b"other", "--module-digests")] {
            let _module = session.load_module(&digest_of(content).module_path(), None).unwrap();
            let error = session.sync_all().wait().unwrap_err().to_string();
            assert!(error.contains(word), "{hosting:?}: {error}");
        }
        session.shutdown().wait().unwrap();
    }
}

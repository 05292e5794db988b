//! Forging: handles of other sessions, and paths out of a workspace.

use super::*;

async fn forged_handles_reach_nothing_of_another_session(transport: Transport) {
    let site = Site::new(transport, ServeOptions::default()).await;
    forge::handles_of_others(site.connector(), &site.address, 1_200_000).await;
}

/// A freed handle stays invalid, however often its slot is used again.
async fn stale_handles_reach_nothing(transport: Transport) {
    let site = Site::new(transport, ServeOptions::default()).await;
    let session = soon("connect", site.connector().connect(&site.address)).await.unwrap();
    let new = soon("get", session.get_function("tagged.new")).await.unwrap();
    let tag = format!("stale-{transport:?}");
    let mut stale = Vec::new();
    for _ in 0..200 {
        let object: RemoteObject = soon("call", new.call((tag.clone(),))).await.unwrap();
        stale.push(object.handle());
        soon("free", object.free()).await.unwrap();
    }
    assert_eq!(stale.iter().collect::<HashSet<_>>().len(), stale.len(), "no handle comes twice");
    let kept: RemoteObject = soon("call", new.call((tag.clone(),))).await.unwrap();
    for _ in 0..100 {
        let mut pending = Vec::new();
        for handle in &stale {
            pending.push(session.shared().submit(Request::new(Operation::Free { handle: *handle })).reply());
        }
        for reply in pending {
            assert_eq!(soon("a request", reply).await.unwrap_err().kind(), ErrorKind::InvalidHandle);
        }
        let release = Operation::Release { handles: stale.repeat(50) };
        soon("release", session.shared().submit(Request::new(release)).reply()).await.unwrap();
    }
    let alive = soon("get", session.function::<(String,), i64>("tagged.alive")).await.unwrap();
    assert_eq!(soon("call", alive.call((tag,))).await.unwrap(), 1);
    drop(kept);
}

/// Makes a symbolic link in the workspace of the session, as native code in a function could.
fn workspace_of(context: &rpc_core::Context) -> rpc_core::Result<std::path::PathBuf> {
    let files = context.workspace().unwrap();
    Ok(files.as_any().downcast_ref::<SessionWorkspace>().unwrap().open()?.path().to_owned())
}

async fn no_path_leads_out_of_a_workspace(scheme: &str) {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let registry = functions::registry();
    registry.add("link", |context: rpc_core::Context, to: String, name: String| -> rpc_core::Result<()> {
        symlink(to, workspace_of(&context)?.join(name)).map_err(|error| RpcError::internal(error.to_string()))
    });
    let address = if scheme == "unix" {
        format!("unix:{}", folder.path().join("socket").display())
    } else {
        "tcp://127.0.0.1:0".to_owned()
    };
    let config = ServeConfig {
        listen: vec![address.parse().unwrap()],
        workdir: folder.path().join("work"),
        ..ServeConfig::default()
    };
    let running = RpcServer::new(registry).config(config).start().await.unwrap();
    let address = running.addresses()[0].to_string();
    let neighbour = soon("connect", Connector::new().connect(&address)).await.unwrap();
    soon("put", Files::new(&neighbour).put_bytes("private", "neighbour")).await.unwrap();
    let session = soon("connect", Connector::new().connect(&address)).await.unwrap();
    let files = Files::new(&session);
    soon("put", files.put_bytes("inside/file", "mine")).await.unwrap();
    let link = soon("get", session.get_function("link")).await.unwrap();
    let links = [
        (secret.to_str().unwrap(), "to-file"),
        (outside.path().to_str().unwrap(), "to-folder"),
        ("..", "up"),
        ("../..", "inside/up"),
        ("../staging", "staging"),
        ("/", "root"),
        ("/proc/self/root", "proc"),
        ("to-folder", "chain"),
        ("loop", "loop"),
    ];
    for (to, name) in links {
        soon("link", link.call::<()>((to, name))).await.unwrap();
    }
    let absolute = secret.to_str().unwrap();
    let from_root = &absolute[1..];
    let mut paths: Vec<String> = [
        "..",
        "../",
        "../secret",
        "./..",
        "inside/../../x",
        "inside/../..",
        "/",
        "/etc/passwd",
        absolute,
        "//etc/passwd",
        "a\0b",
        "\0",
        "inside/file\0",
        "../private",
        "inside/./../../staging/x",
        "to-file",
        "to-folder/secret",
        "to-folder/new",
        "up/x",
        "up",
        "inside/up/x",
        "staging/x",
        "chain/secret",
        "chain/new",
        "loop",
        "loop/x",
        "root/etc/passwd",
        "inside/file/..//../..",
        "...//../../x",
    ]
    .map(str::to_owned)
    .to_vec();
    paths.extend([format!("root/{from_root}"), format!("proc/{from_root}")]);
    paths.extend([
        format!("{}etc/passwd", "../".repeat(300)),
        "x".repeat(256),
        "x".repeat(5000),
        "y/".repeat(3000) + "z",
    ]);
    paths.push("n".repeat(1 << 20));
    let refused = [ErrorKind::InvalidArgument, ErrorKind::NotFound, ErrorKind::Io];
    for path in &paths {
        let shown: String = path.chars().take(60).collect();
        let mut taken = Vec::new();
        let error = soon("get", files.get(path, &mut taken)).await.expect_err(&shown);
        assert!(refused.contains(&error.kind()) && taken.is_empty(), "get {shown:?}: {error}");
        let error = soon("put", files.put_bytes(path, "intruder")).await.expect_err(&shown);
        assert!(refused.contains(&error.kind()), "put {shown:?}: {error}");
        let error = soon("load", session.load_module(path)).await.expect_err(&shown);
        assert!(!error.message().contains("secret\n"), "load {shown:?}: {error}");
        // A link to a folder inside the workspace may be listed, and one that leads outside may
        // not.
        for entry in soon("ls", files.ls(path)).await.unwrap_or_default() {
            assert!(!entry.name.ends_with("secret") && !entry.name.ends_with("passwd"), "ls {shown:?}: {entry:?}");
        }
    }
    // Links can be removed, which leaves their targets.
    for path in &paths {
        let _ = soon("rm", files.rm(path)).await;
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
    assert_eq!(names_in(outside.path()), ["secret"]);
    assert!(Path::new("/etc/passwd").exists());
    let mut own = Vec::new();
    soon("get", files.get("inside/file", &mut own)).await.unwrap();
    assert_eq!(own, b"mine");
    let mut theirs = Vec::new();
    soon("get", Files::new(&neighbour).get("private", &mut theirs)).await.unwrap();
    assert_eq!(theirs, b"neighbour");
    running.stop();
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

each! {
    forged_handles_reach_nothing_of_another_session: tcp(Tcp) tls(Tls) quic(Quic);
    stale_handles_reach_nothing: tcp(Tcp) tls(Tls) quic(Quic);
}

once! {
    no_path_leads_out_of_a_workspace_over_tcp: no_path_leads_out_of_a_workspace("tcp");
    no_path_leads_out_of_a_workspace_over_unix_sockets: no_path_leads_out_of_a_workspace("unix");
}

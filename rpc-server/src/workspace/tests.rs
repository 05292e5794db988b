//! Unit tests of workspaces: paths, quotas, removal.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::*;

fn root(dir: &TempDir, quota_bytes: u64) -> WorkspaceRoot {
    WorkspaceRoot::open(dir.path(), WorkspaceLimits::with_quota(quota_bytes)).unwrap()
}

/// A private workspace in a folder of its own, both to be kept.
fn private() -> (TempDir, Workspace) {
    let dir = TempDir::new().unwrap();
    let workspace = root(&dir, 1 << 20).private().unwrap();
    (dir, workspace)
}

fn put(workspace: &Workspace, path: &str, bytes: &[u8]) -> Result<(), WorkspaceError> {
    let mut writer = workspace.begin_write(path, None)?;
    writer.write_at(0, bytes)?;
    writer.commit()
}

fn get(workspace: &Workspace, path: &str) -> Result<Vec<u8>, WorkspaceError> {
    let reader = workspace.open_read(path)?;
    let mut bytes = vec![0; usize::try_from(reader.len()).unwrap()];
    assert_eq!(reader.read_at(0, &mut bytes)?, bytes.len());
    Ok(bytes)
}

fn names(workspace: &Workspace, folder: &str) -> Vec<String> {
    let entries = workspace.list(folder).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

/// Returns the entries of a folder on disk.
fn on_disk(path: impl AsRef<Path>) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every operation that takes the path of a file gives the same kind of error.
fn assert_refused(workspace: &Workspace, path: &str, expected: fn(&WorkspaceError) -> bool) {
    let errors = [
        workspace.resolve(path).unwrap_err(),
        workspace.open_read(path).unwrap_err(),
        workspace.begin_write(path, None).unwrap_err(),
    ];
    for error in errors {
        assert!(expected(&error), "{path:?}: {error:?}");
    }
}

fn outside(error: &WorkspaceError) -> bool {
    matches!(error, WorkspaceError::OutsideWorkspace { .. })
}

#[test]
fn files_are_written_read_listed_resolved_and_removed() {
    let (_dir, workspace) = private();
    put(&workspace, "b.txt", b"bee").unwrap();
    put(&workspace, "deep/er/a.txt", b"ay").unwrap();
    put(&workspace, "deep.txt", b"").unwrap();
    assert_eq!(get(&workspace, "deep/er/a.txt").unwrap(), b"ay");
    assert_eq!(names(&workspace, ""), ["b.txt", "deep.txt", "deep/er/a.txt"]);
    assert_eq!(names(&workspace, "deep"), ["deep/er/a.txt"]);
    assert_eq!(names(&workspace, "deep/"), ["deep/er/a.txt"]);
    assert_eq!(names(&workspace, "./b.txt"), ["b.txt"]);
    assert_eq!(workspace.list("b.txt").unwrap()[0].size, 3);
    let real = workspace.resolve("deep//er/./../er/a.txt").unwrap();
    assert_eq!(real, workspace.path().join("deep/er/a.txt"));
    assert_eq!(fs::read(real).unwrap(), b"ay");

    workspace.remove("b.txt").unwrap();
    workspace.remove("deep").unwrap();
    assert_eq!(names(&workspace, "."), ["deep.txt"]);
    for path in ["b.txt", "deep", "deep/er/a.txt"] {
        let error = workspace.remove(path).unwrap_err();
        assert!(matches!(error, WorkspaceError::NotFound { .. }), "{error:?}");
    }
    assert!(matches!(workspace.list("deep"), Err(WorkspaceError::NotFound { .. })));
}

#[test]
fn zeros_count_wherever_they_are_written() {
    let (_dir, workspace) = private();
    // Whole blocks, which become holes.
    let (zeros, ones) = (vec![0; 196_608], vec![1; 196_608]);
    let written = |pieces: &[(u64, &[u8])]| {
        let mut writer = workspace.begin_write("file", None).unwrap();
        pieces.iter().for_each(|(offset, piece)| writer.write_at(*offset, piece).unwrap());
        writer.commit().unwrap();
        get(&workspace, "file").unwrap()
    };
    // At the end, alone, over other bytes, and before what is there already.
    assert!(written(&[(0, &ones), (196_608, &zeros)]) == [&ones[..], &zeros].concat());
    assert!(written(&[(0, &zeros)]) == zeros);
    assert!(written(&[(0, &ones), (0, &zeros)]) == zeros);
    assert!(written(&[(100_000, &ones), (0, &zeros)]) == [&zeros[..], &ones[..100_000]].concat());
    assert!(written(&[(0, &zeros), (100_000, &ones)]) == [&zeros[..100_000], &ones].concat());

    // What a writer leaves for the next one has them, too.
    let mut writer = workspace.resume_write("file", 589_824).unwrap();
    writer.write_at(0, &ones).unwrap();
    writer.write_at(196_608, &zeros).unwrap();
    drop(writer);
    let mut writer = workspace.resume_write("file", 589_824).unwrap();
    assert_eq!(writer.len(), 393_216);
    writer.write_at(393_216, &zeros).unwrap();
    writer.commit().unwrap();
    assert!(get(&workspace, "file").unwrap() == [&ones[..], &zeros, &zeros].concat());
}

#[test]
fn malformed_paths_are_refused() {
    let (_dir, workspace) = private();
    assert_refused(&workspace, "", |error| matches!(error, WorkspaceError::EmptyPath));
    assert_refused(&workspace, "/etc/passwd", |error| matches!(error, WorkspaceError::AbsolutePath { .. }));
    assert_refused(&workspace, "a\0b", |error| matches!(error, WorkspaceError::NulByte { .. }));
    for path in ["..", "../x", "a/../../x", "./../files/x"] {
        assert_refused(&workspace, path, outside);
        assert!(outside(&workspace.remove(path).unwrap_err()));
        assert!(outside(&workspace.list(path).unwrap_err()));
    }
    for path in ["x".repeat(256), format!("a/{}", "x".repeat(256)), "a/".repeat(513)] {
        assert_refused(&workspace, &path, |error| matches!(error, WorkspaceError::PathTooLong { .. }));
    }
    put(&workspace, &"x".repeat(255), b"fits").unwrap();
    let deep = format!("{}x", "d/".repeat(511));
    put(&workspace, &deep, b"fits").unwrap();
    assert_eq!(get(&workspace, &deep).unwrap(), b"fits");
    for path in [".", "a/..", "./"] {
        let error = workspace.remove(path).unwrap_err();
        assert!(matches!(error, WorkspaceError::IsWorkspace { .. }), "{error:?}");
    }
}

#[test]
fn a_folder_in_place_of_a_file_and_the_reverse_are_refused() {
    let (_dir, workspace) = private();
    put(&workspace, "folder/file", b"1").unwrap();
    for path in ["folder", "folder/", ".", "folder/file/"] {
        assert_refused(&workspace, path, |error| matches!(error, WorkspaceError::IsFolder { .. }));
    }
    assert_refused(&workspace, "folder/file/more", |error| matches!(error, WorkspaceError::NotAFolder { .. }));
    // One that comes to be a folder only after the writing has begun.
    let writer = workspace.begin_write("later", None).unwrap();
    fs::create_dir(workspace.path().join("later")).unwrap();
    assert!(matches!(writer.commit(), Err(WorkspaceError::IsFolder { .. })));
}

#[test]
fn links_that_lead_outside_are_refused_anywhere_in_a_path() {
    let (dir, workspace) = private();
    fs::write(dir.path().join("secret"), b"secret").unwrap();
    let files = workspace.path();
    put(&workspace, "sub/file", b"1").unwrap();
    symlink("/etc/passwd", files.join("absolute")).unwrap();
    symlink("../../../../secret", files.join("relative")).unwrap();
    symlink("/no/such/thing", files.join("dangling")).unwrap();
    symlink(dir.path(), files.join("folder")).unwrap();
    symlink("../..", files.join("sub/up")).unwrap();
    symlink("folder", files.join("chain")).unwrap();
    symlink("../staging", files.join("staging")).unwrap();
    for path in [
        "absolute",
        "relative",
        "dangling",
        "folder/secret",
        "sub/up/secret",
        "chain/secret",
        "folder/new/file",
        "chain/new",
        "staging/x",
    ] {
        assert_refused(&workspace, path, outside);
    }
    for path in ["folder/secret", "sub/up/staging", "chain/secret", "staging/x"] {
        assert!(outside(&workspace.remove(path).unwrap_err()), "{path}");
    }
    for path in ["folder", "chain", "sub/up"] {
        assert!(outside(&workspace.list(path).unwrap_err()), "{path}");
    }
    assert_eq!(names(&workspace, ""), ["sub/file"]);
    // The links themselves can be removed, and what they lead to stays.
    for path in ["absolute", "folder", "sub"] {
        workspace.remove(path).unwrap();
    }
    assert_eq!(fs::read(dir.path().join("secret")).unwrap(), b"secret");
    assert!(Path::new("/etc/passwd").exists());
}

#[test]
fn a_link_put_in_the_way_of_a_write_is_not_followed() {
    let (dir, workspace) = private();
    let mut writer = workspace.begin_write("sub/file", None).unwrap();
    writer.write_at(0, b"1").unwrap();
    symlink(dir.path(), workspace.path().join("sub")).unwrap();
    assert!(outside(&writer.commit().unwrap_err()));
    assert!(!dir.path().join("file").exists());

    // As the last name, the link is what is replaced.
    fs::write(dir.path().join("victim"), b"old").unwrap();
    let mut writer = workspace.begin_write("file", None).unwrap();
    writer.write_at(0, b"new").unwrap();
    symlink(dir.path().join("victim"), workspace.path().join("file")).unwrap();
    writer.commit().unwrap();
    assert_eq!(fs::read(dir.path().join("victim")).unwrap(), b"old");
    assert_eq!(get(&workspace, "file").unwrap(), b"new");
}

#[test]
fn links_that_stay_inside_are_followed() {
    let (_dir, workspace) = private();
    put(&workspace, "real/file", b"1").unwrap();
    symlink("real/file", workspace.path().join("link")).unwrap();
    symlink("real", workspace.path().join("folder")).unwrap();
    symlink("loop", workspace.path().join("loop")).unwrap();
    assert_eq!(get(&workspace, "link").unwrap(), b"1");
    assert_eq!(get(&workspace, "folder/file").unwrap(), b"1");
    let real = workspace.path().join("real/file");
    assert_eq!(workspace.resolve("link").unwrap(), real);
    assert_eq!(workspace.resolve("folder/file").unwrap(), real);
    // The links to folders are not gone into, so that there is no end-less listing.
    assert_eq!(names(&workspace, ""), ["link", "real/file"]);
    put(&workspace, "folder/second", b"2").unwrap();
    assert_eq!(get(&workspace, "real/second").unwrap(), b"2");
    assert_refused(&workspace, "loop", |error| matches!(error, WorkspaceError::Io { .. }));
}

#[test]
fn devices_and_pipes_are_refused_without_waiting() {
    let (_dir, workspace) = private();
    let fifo = workspace.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    symlink("fifo", workspace.path().join("link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(workspace.path().join("socket")).unwrap();
    for path in ["fifo", "link", "socket"] {
        assert_refused(&workspace, path, |error| matches!(error, WorkspaceError::NotARegularFile { .. }));
        assert!(workspace.list(path).is_err());
    }
    assert!(names(&workspace, "").is_empty());
    workspace.remove("fifo").unwrap();
    assert!(!fifo.exists());
}

#[test]
fn an_interrupted_write_leaves_the_old_file() {
    let (_dir, workspace) = private();
    put(&workspace, "file", b"old").unwrap();
    let mut writer = workspace.begin_write("file", None).unwrap();
    writer.write_at(0, b"newer").unwrap();
    assert_eq!(get(&workspace, "file").unwrap(), b"old");
    assert_eq!(names(&workspace, ""), ["file"]);
    drop(writer);
    assert_eq!(get(&workspace, "file").unwrap(), b"old");
    assert_eq!(workspace.used_bytes(), 3);
    assert!(on_disk(workspace.path().with_file_name("staging")).is_empty());

    // A new folder is not made before its file is there.
    drop(workspace.begin_write("new/file", None).unwrap());
    assert_eq!(on_disk(workspace.path()), ["file"]);
}

#[test]
fn pieces_may_be_written_in_any_order_and_readers_keep_their_version() {
    let (_dir, workspace) = private();
    put(&workspace, "file", b"old").unwrap();
    let before = workspace.open_read("file").unwrap();
    let mut writer = workspace.begin_write("file", Some(6)).unwrap();
    writer.write_at(3, b"def").unwrap();
    writer.write_at(0, b"abc").unwrap();
    writer.commit().unwrap();
    let mut buffer = [0; 8];
    assert_eq!(before.read_at(1, &mut buffer).unwrap(), 2);
    assert_eq!(&buffer[..2], b"ld");
    let after = workspace.open_read("file").unwrap();
    assert_eq!(after.len(), 6);
    assert_eq!(after.read_at(2, &mut buffer).unwrap(), 4);
    assert_eq!(&buffer[..4], b"cdef");
    assert_eq!(after.read_at(6, &mut buffer).unwrap(), 0);
    assert_eq!(after.read_at(u64::MAX, &mut buffer).unwrap(), 0);
}

#[test]
fn readers_never_see_a_part_of_a_file() {
    let (_dir, workspace) = private();
    let versions = [vec![1_u8; 5000], vec![2_u8; 9000]];
    put(&workspace, "file", &versions[0]).unwrap();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for round in 0..200 {
                put(&workspace, "file", &versions[round % 2]).unwrap();
            }
        });
        while !writing.is_finished() {
            let seen = get(&workspace, "file").unwrap();
            assert!(versions.contains(&seen), "{} bytes", seen.len());
        }
    });
    assert_eq!(workspace.used_bytes(), 9000);
}

#[test]
fn a_file_of_another_length_than_announced_is_refused() {
    let (_dir, workspace) = private();
    put(&workspace, "file", b"old").unwrap();
    let mut writer = workspace.begin_write("file", Some(4)).unwrap();
    writer.write_at(0, b"abc").unwrap();
    let error = writer.commit().unwrap_err();
    assert!(matches!(error, WorkspaceError::Incomplete { expected_bytes: 4, got_bytes: 3, .. }), "{error:?}");

    let mut writer = workspace.begin_write("file", Some(4)).unwrap();
    for offset in [2, u64::MAX] {
        let error = writer.write_at(offset, b"abc").unwrap_err();
        let expected = matches!(error, WorkspaceError::PastExpectedEnd { .. } | WorkspaceError::WriteFailed { .. });
        assert!(expected, "{error:?}");
    }
    assert!(matches!(writer.commit(), Err(WorkspaceError::WriteFailed { .. })));
    assert_eq!(get(&workspace, "file").unwrap(), b"old");
    assert_eq!(workspace.used_bytes(), 3);
}

#[test]
fn the_quota_counts_files_and_writes_in_progress() {
    let dir = TempDir::new().unwrap();
    let workspace = root(&dir, 100).private().unwrap();
    let quota = |result: Result<(), WorkspaceError>, needed: u64, used: u64| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains("limited to 100"), "{error}");
        assert!(
            matches!(
                error,
                WorkspaceError::QuotaExceeded { needed_bytes, used_bytes, limit_bytes: 100, .. }
                    if (needed_bytes, used_bytes) == (needed, used)
            ),
            "{error:?}"
        );
    };
    put(&workspace, "a", &[0; 60]).unwrap();
    let mut writer = workspace.begin_write("b", None).unwrap();
    writer.write_at(0, &[0; 30]).unwrap();
    quota(put(&workspace, "c", &[0; 11]), 11, 90);
    quota(workspace.begin_write("c", Some(11)).map(drop), 11, 90);
    quota(writer.write_at(30, &[0; 11]), 11, 90);
    drop(writer);
    assert_eq!(workspace.used_bytes(), 60);

    // Writing the same bytes again costs nothing; far offsets and sums cannot get around the count.
    let mut writer = workspace.begin_write("b", None).unwrap();
    writer.write_at(0, &[0; 40]).unwrap();
    writer.write_at(10, &[0; 30]).unwrap();
    quota(writer.write_at(u64::MAX, &[0; 1]), u64::MAX - 40, 100);
    drop(writer);
    quota(workspace.begin_write("b", Some(u64::MAX)).map(drop), u64::MAX, 60);

    // Replacing gives the old bytes back, removing too.
    put(&workspace, "a", &[0; 40]).unwrap();
    assert_eq!(workspace.used_bytes(), 40);
    put(&workspace, "d/e/f", &[0; 50]).unwrap();
    assert_eq!(workspace.used_bytes(), 90);
    workspace.remove("d").unwrap();
    workspace.remove("a").unwrap();
    assert_eq!(workspace.used_bytes(), 0);

    // Changes by foreign code are found when the quota is measured again.
    put(&workspace, "a", &[0; 100]).unwrap();
    fs::remove_file(workspace.path().join("a")).unwrap();
    put(&workspace, "b", &[0; 10]).unwrap();
    fs::write(workspace.path().join("foreign"), [0; 50]).unwrap();
    put(&workspace, "c", &[0; 90]).unwrap();
    quota(put(&workspace, "d", &[0; 1]), 1, 150);
}

#[test]
fn the_number_of_files_and_folders_is_limited() {
    let dir = TempDir::new().unwrap();
    let limits = WorkspaceLimits { max_entries: 3, ..WorkspaceLimits::default() };
    let workspace = WorkspaceRoot::open(dir.path(), limits).unwrap().private().unwrap();
    let full = |result| assert!(matches!(result, Err(WorkspaceError::TooManyEntries { limit: 3, .. })));
    full(put(&workspace, "a/b/c/d", b""));
    workspace.remove("a").unwrap();
    put(&workspace, "a/b", b"").unwrap();
    put(&workspace, "c", b"").unwrap();
    full(put(&workspace, "d", b""));
    workspace.remove("a").unwrap();
    put(&workspace, "d", b"").unwrap();
}

#[test]
fn writes_in_progress_have_no_name_in_the_workspace() {
    let (_dir, workspace) = private();
    let mut writer = workspace.begin_write("file", None).unwrap();
    writer.write_at(0, b"1").unwrap();
    assert!(names(&workspace, "").is_empty());
    assert!(on_disk(workspace.path()).is_empty());
    let staged = on_disk(workspace.path().with_file_name("staging"));
    assert_eq!(staged.len(), 1);
    assert!(outside(&workspace.open_read(&format!("../staging/{}", staged[0])).unwrap_err()));
    assert!(matches!(workspace.open_read(&staged[0]), Err(WorkspaceError::NotFound { .. })));
}

#[test]
fn a_private_workspace_is_removed_with_its_last_reference() {
    let dir = TempDir::new().unwrap();
    let root = root(&dir, 1 << 20);
    let workspace = root.private().unwrap();
    let other = root.private().unwrap();
    let path = workspace.path().to_owned();
    assert_ne!(path, other.path());
    let mut writer = workspace.begin_write("a/b", None).unwrap();
    writer.write_at(0, b"1").unwrap();
    put(&workspace, "c/d/e", b"1").unwrap();
    // Foreign code may lock its folders and nest them deeper than a stack or the open files would
    // allow.
    let mut deep = path.clone();
    for _ in 0..200 {
        deep.push("d");
        fs::create_dir(&deep).unwrap();
    }
    fs::set_permissions(path.join("c"), fs::Permissions::from_mode(0o500)).unwrap();
    fs::set_permissions(path.join("c/d"), fs::Permissions::from_mode(0o000)).unwrap();
    let clone = workspace.clone();
    drop(workspace);
    drop(clone);
    assert!(path.exists(), "the writer still holds it");
    drop(writer);
    assert!(!path.parent().unwrap().exists());
    assert!(other.path().exists());

    drop((other, root));
    assert!(on_disk(dir.path().join("private")).is_empty());
}

#[test]
fn very_deep_trees_are_removed() {
    let (_dir, workspace) = private();
    fs::create_dir(workspace.path().join("top")).unwrap();
    let mut at =
        cap_std::fs::Dir::open_ambient_dir(workspace.path().join("top"), cap_std::ambient_authority()).unwrap();
    for _ in 0..1500 {
        at.create_dir("d").unwrap();
        at = at.open_dir("d").unwrap();
    }
    at.write("file", b"1").unwrap();
    assert!(names(&workspace, "").is_empty());
    workspace.remove("top").unwrap();
    assert!(on_disk(workspace.path()).is_empty());
    assert!(on_disk(workspace.path().with_file_name("staging")).is_empty());
}

#[test]
fn folders_are_closed_to_other_users() {
    let dir = TempDir::new().unwrap();
    let workdir = dir.path().join("made/for/it");
    let root = WorkspaceRoot::open(&workdir, WorkspaceLimits::default()).unwrap();
    let private = root.private().unwrap();
    let named = root.named("alice", "cli").unwrap();
    put(&private, "a/b", b"1").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for path in [&workdir, &workdir.join("private"), &workdir.join("named")] {
        assert_eq!(mode(path), 0o700, "{path:?}");
    }
    for path in [private.path(), named.path(), &private.path().join("a"), named.path().parent().unwrap()] {
        assert_eq!(mode(path), 0o700, "{path:?}");
    }
    assert_eq!(mode(&private.path().join("a/b")), 0o600);
    assert_eq!(mode(&workdir.join("lock")), 0o600);
}

#[test]
fn folders_are_made_and_listed_and_count_as_entries() {
    let dir = TempDir::new().unwrap();
    let limits = WorkspaceLimits { max_entries: 4, ..WorkspaceLimits::default() };
    let root = WorkspaceRoot::open(dir.path(), limits).unwrap();
    let workspace = root.private().unwrap();
    let folders = || workspace.list_folders_counted(|_| Ok::<_, WorkspaceError>(())).unwrap();
    workspace.create_folder("a/b").unwrap();
    workspace.create_folder("a/b").unwrap();
    put(&workspace, "file", b"1").unwrap();
    assert_eq!((folders(), workspace.list("").unwrap().len()), (vec!["a".to_owned(), "a/b".to_owned()], 1));
    for path in ["file", "file/c"] {
        assert!(matches!(workspace.create_folder(path), Err(WorkspaceError::NotAFolder { .. })), "{path}");
    }
    for path in ["", "/tmp/x", "../x"] {
        assert!(workspace.create_folder(path).is_err(), "{path}");
    }
    assert!(matches!(workspace.create_folder("c/d"), Err(WorkspaceError::TooManyEntries { .. })));
    std::os::unix::fs::symlink("/tmp", workspace.path().join("out")).unwrap();
    assert!(workspace.create_folder("out/x").is_err());
}

#[test]
fn a_named_workspace_is_kept_and_belongs_to_its_identity() {
    let dir = TempDir::new().unwrap();
    {
        let root = root(&dir, 100);
        let first = root.named("alice", "cli").unwrap();
        let second = root.named("alice", "cli").unwrap();
        put(&first, "file", &[7; 60]).unwrap();
        assert_eq!(get(&second, "file").unwrap(), [7; 60]);
        assert_eq!(second.used_bytes(), 60, "one account for both");
        for (identity, name) in [("bob", "cli"), ("alice", "other")] {
            assert!(names(&root.named(identity, name).unwrap(), "").is_empty());
        }
    }
    let again = root(&dir, 100).named("alice", "cli").unwrap();
    assert_eq!(names(&again, ""), ["file"]);
    assert_eq!(again.used_bytes(), 60, "counted on opening");
}

#[test]
fn malformed_names_of_workspaces_are_refused() {
    let dir = TempDir::new().unwrap();
    let root = root(&dir, 100);
    let long = "x".repeat(65);
    for name in ["", ".", "..", "a/b", "../a", "a b", "é", "a\0", "a\n", &long] {
        for result in [root.named(name, "cli"), root.named("alice", name)] {
            let error = result.unwrap_err();
            assert!(matches!(error, WorkspaceError::InvalidName { .. }), "{error:?}");
        }
    }
    root.named("A-b_c.9", &"x".repeat(64)).unwrap();
    root.named("...", ".hidden").unwrap();
}

#[test]
fn the_workspaces_of_an_identity_are_limited_in_number() {
    let dir = TempDir::new().unwrap();
    let limits = WorkspaceLimits { max_named: 2, ..WorkspaceLimits::default() };
    let root = WorkspaceRoot::open(dir.path(), limits).unwrap();
    root.named("alice", "one").unwrap();
    root.named("alice", "two").unwrap();
    let error = root.named("alice", "three").unwrap_err();
    assert!(matches!(error, WorkspaceError::TooManyWorkspaces { limit: 2, .. }));
    root.named("alice", "two").unwrap();
    root.named("bob", "one").unwrap();
}

#[test]
fn unused_named_workspaces_expire_and_used_ones_do_not() {
    let dir = TempDir::new().unwrap();
    let first = root(&dir, 1 << 20);
    let second = root(&dir, 1 << 20);
    let unused = first.named("alice", "unused").unwrap();
    put(&unused, "a/b", b"1").unwrap();
    drop(unused);
    let used = first.named("alice", "used").unwrap();
    let elsewhere = second.named("bob", "elsewhere").unwrap();
    drop(first.named("carol", "unused").unwrap());

    let day = Duration::from_secs(24 * 60 * 60);
    let now = SystemTime::now();
    assert_eq!(first.expire(now).unwrap(), 0);
    assert_eq!(first.expire(now + 29 * day).unwrap(), 0);
    assert_eq!(first.expire(now - 1000 * day).unwrap(), 0);
    assert_eq!(first.expire(now + 31 * day).unwrap(), 2);
    assert_eq!(on_disk(dir.path().join("named")), ["alice", "bob"]);
    assert_eq!(on_disk(dir.path().join("named/alice")), ["used"]);
    put(&used, "still", b"1").unwrap();
    put(&elsewhere, "still", b"1").unwrap();

    drop((used, elsewhere));
    assert_eq!(second.expire(now + 31 * day).unwrap(), 2);
    assert!(on_disk(dir.path().join("named")).is_empty());
    // An expired one can be made anew, empty.
    assert!(names(&first.named("alice", "used").unwrap(), "").is_empty());
    drop((first, second));
    assert!(on_disk(dir.path().join("private")).is_empty());
}

#[test]
fn the_last_use_is_when_the_last_session_ends() {
    let dir = TempDir::new().unwrap();
    let root = root(&dir, 1 << 20);
    let workspace = root.named("alice", "cli").unwrap();
    let lock = workspace.path().with_file_name("lock");
    let file = File::options().write(true).open(&lock).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    drop(workspace);
    assert_eq!(root.expire(SystemTime::now()).unwrap(), 0);
    file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(root.expire(SystemTime::now()).unwrap(), 1);
}

#[test]
fn leftovers_of_a_dead_server_are_removed_and_those_of_a_living_one_are_not() {
    let dir = TempDir::new().unwrap();
    let living = root(&dir, 1 << 20);
    let workspace = living.private().unwrap();
    put(&workspace, "file", b"1").unwrap();
    // A dead server: its lock file is there, and nobody holds the lock. One that died while it
    // started or cleaned up has left a folder only.
    let private = dir.path().join("private");
    fs::create_dir_all(private.join("77-dead/session/files/a")).unwrap();
    fs::write(private.join("77-dead/session/files/a/b"), b"1").unwrap();
    fs::write(private.join("77-dead.lock"), b"").unwrap();
    fs::create_dir_all(private.join("78-dead/x")).unwrap();

    let second = root(&dir, 1 << 20);
    assert_eq!(get(&workspace, "file").unwrap(), b"1");
    assert_eq!(on_disk(&private).len(), 4, "two folders and two locks");
    assert!(on_disk(&private).iter().all(|name| !name.contains("dead")));
    let other = second.private().unwrap();
    put(&other, "file", b"2").unwrap();
    drop((workspace, living));
    assert_eq!(get(&other, "file").unwrap(), b"2");
}

#[test]
fn staged_files_of_a_dead_server_are_swept_and_those_of_a_living_one_are_not() {
    let dir = TempDir::new().unwrap();
    let (first, second) = (root(&dir, 1 << 20), root(&dir, 1 << 20));
    let workspace = first.named("alice", "cli").unwrap();
    let mut writer = workspace.begin_write("file", None).unwrap();
    writer.write_at(0, b"first").unwrap();
    let staging = workspace.path().with_file_name("staging");
    fs::write(staging.join("write-dead-0"), b"1").unwrap();
    fs::create_dir_all(staging.join("removed-dead-1/a/b")).unwrap();

    let shared = second.named("alice", "cli").unwrap();
    assert_eq!(on_disk(&staging).len(), 1);
    put(&shared, "file", b"second").unwrap();
    writer.commit().unwrap();
    assert_eq!(get(&shared, "file").unwrap(), b"first");
}

#[test]
fn workspaces_in_use_survive_a_concurrent_expiry() {
    let dir = TempDir::new().unwrap();
    let limits = WorkspaceLimits { named_expiry: Duration::ZERO, ..WorkspaceLimits::default() };
    let open = || WorkspaceRoot::open(dir.path(), limits.clone()).unwrap();
    let servers = [open(), open()];
    std::thread::scope(|scope| {
        for (session, root) in servers.iter().cycle().take(6).enumerate() {
            scope.spawn(move || {
                let file = format!("file{session}");
                for _ in 0..50 {
                    let workspace = root.named("alice", "cli").unwrap();
                    put(&workspace, &file, b"1").unwrap();
                    root.expire(SystemTime::now()).unwrap();
                    assert_eq!(get(&workspace, &file).unwrap(), b"1");
                }
            });
        }
        // Servers that start beside them take nothing from them either.
        for _ in 0..20 {
            let root = open();
            put(&root.private().unwrap(), "file", b"1").unwrap();
        }
    });
    drop(servers);
    assert!(on_disk(dir.path().join("private")).is_empty());
}

#[test]
fn workspaces_outlive_their_root() {
    let (_dir, workspace) = private();
    put(&workspace, "file", b"1").unwrap();
    assert_eq!(get(&workspace, "file").unwrap(), b"1");
}

#[test]
fn errors_say_what_to_do_in_one_level() {
    let (_dir, workspace) = private();
    for path in ["", "..", "/a", "a\0", "none", "."] {
        let text = workspace.resolve(path).unwrap_err().to_string();
        assert!(!text.ends_with('.') && !text.contains('\0'), "{text}");
        assert!(text.starts_with(|first: char| !first.is_uppercase()), "{text}");
    }
}

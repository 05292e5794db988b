//! Unit tests of the store of modules.

use std::os::unix::fs::symlink;
use std::sync::Barrier;
use std::thread;

use super::*;

const LIMITS: StoreLimits =
    StoreLimits { max_bytes: 4 * LEAST, max_module_bytes: 2 * LEAST, expiry: Duration::from_secs(3600) };

/// A store in a folder of its own.
struct Fixture {
    store: ModuleStore,
    folder: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { store: ModuleStore::open(folder.path(), LIMITS, None).unwrap(), folder }
    }

    /// Returns another reference to the same folder, as another process has it.
    fn again(&self) -> ModuleStore {
        ModuleStore::open(self.folder.path(), LIMITS, None).unwrap()
    }

    /// Returns the entries beside the lock file.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != LOCK).collect();
        names.sort();
        names
    }

    /// Sets the last use of a module back by this time.
    fn age(&self, digest: &Digest, by: Duration) {
        let file = File::open(self.folder.path().join(entry_name(digest))).unwrap();
        file.set_modified(SystemTime::now() - by).unwrap();
    }
}

fn digest_of(bytes: &[u8]) -> Digest {
    hash(bytes).unwrap().0
}

/// Returns a module that differs from others by its number.
fn module(number: u8, len: u64) -> Vec<u8> {
    vec![number; len as usize]
}

fn put(store: &ModuleStore, bytes: &[u8]) -> Result<Digest, ModuleError> {
    let digest = digest_of(bytes);
    let mut upload = store.begin_upload(digest, bytes.len() as u64)?;
    for piece in bytes.chunks(1000) {
        upload.write(upload.len(), piece)?;
    }
    upload.commit()?;
    Ok(digest)
}

#[test]
fn uploaded_module_is_stored_by_its_digest_and_read_only() {
    let fixture = Fixture::new();
    let bytes = module(1, 5000);
    assert!(!fixture.store.contains(&digest_of(&bytes)).unwrap());
    let digest = put(&fixture.store, &bytes).unwrap();
    assert!(fixture.again().contains(&digest).unwrap());
    let path = fixture.store.verified(&digest).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o400);
    assert_eq!(fixture.names(), [format!("{digest}.so")]);
}

#[test]
fn an_upload_that_differs_from_its_announcement_is_removed() {
    let fixture = Fixture::new();
    let digest = digest_of(b"module");
    let begin = || fixture.store.begin_upload(digest, 6).unwrap();

    let mut other = begin();
    other.write(0, b"nodule").unwrap();
    let error = other.commit().unwrap_err();
    assert!(matches!(error, ModuleError::Mismatch { announced, .. } if announced == digest), "{error}");

    let mut short = begin();
    short.write(0, b"mod").unwrap();
    assert!(!fixture.store.contains(&digest).unwrap());
    assert!(matches!(short.commit().unwrap_err(), ModuleError::TooShort { len: 6, got: 3 }));

    let mut long = begin();
    long.write(0, b"mod").unwrap();
    assert!(matches!(long.write(3, b"ules").unwrap_err(), ModuleError::TooLong { len: 6, end: 7 }));
    assert!(matches!(long.write(3, b"ule").unwrap_err(), ModuleError::Broken));
    assert!(matches!(long.commit().unwrap_err(), ModuleError::Broken));

    for offset in [0, 4, u64::MAX] {
        let mut gap = begin();
        gap.write(0, b"mod").unwrap();
        assert!(matches!(gap.write(offset, b"ule").unwrap_err(), ModuleError::OutOfOrder { expected: 3, .. }));
    }

    let mut dropped = begin();
    dropped.write(0, b"module").unwrap();
    drop(dropped);
    assert!(fixture.names().is_empty());
    assert!(matches!(fixture.store.verified(&digest).unwrap_err(), ModuleError::NotFound { .. }));
}

#[test]
fn empty_and_too_large_modules_are_refused() {
    let fixture = Fixture::new();
    put(&fixture.store, &module(1, LIMITS.max_module_bytes)).unwrap();
    for len in [LIMITS.max_module_bytes + 1, u64::MAX] {
        let error = fixture.store.begin_upload(digest_of(b""), len).unwrap_err();
        assert!(matches!(error, ModuleError::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains("8KiB, --max-module"), "{error}");
    }
    assert!(matches!(fixture.store.begin_upload(digest_of(b""), 0).unwrap_err(), ModuleError::Empty));
}

#[test]
fn a_full_store_names_its_limit_and_removes_modules_that_are_long_unused() {
    let fixture = Fixture::new();
    // The smallest module counts as much as a block.
    let first = put(&fixture.store, b"small").unwrap();
    let second = put(&fixture.store, &module(2, LEAST)).unwrap();
    let third = put(&fixture.store, &module(3, 2 * LEAST)).unwrap();
    let error = put(&fixture.again(), &module(4, LEAST)).unwrap_err();
    assert!(matches!(error, ModuleError::Full { held, .. } if held == 4 * LEAST), "{error}");
    for word in ["16384 bytes of 16KiB", "--module-store-size", "1h", "--module-expiry"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    // A query or a load counts as a use.
    for digest in [&first, &second, &third] {
        fixture.age(digest, 2 * LIMITS.expiry);
    }
    assert!(fixture.store.contains(&first).unwrap());
    fixture.store.verified(&third).unwrap();
    let fourth = put(&fixture.again(), &module(4, LEAST)).unwrap();
    let mut left = [first, third, fourth].map(|digest| entry_name(&digest));
    left.sort();
    assert_eq!(fixture.names(), left);
}

#[test]
fn uploads_in_progress_count_against_the_store_and_are_limited_in_number() {
    let fixture = Fixture::new();
    let begin = |store: &ModuleStore, number| store.begin_upload(digest_of(&module(number, 1)), 2 * LEAST);
    let uploads = [begin(&fixture.store, 1).unwrap(), begin(&fixture.again(), 2).unwrap()];
    assert!(matches!(begin(&fixture.store, 3).unwrap_err(), ModuleError::Full { .. }));
    drop(uploads);
    begin(&fixture.store, 3).unwrap();

    let roomy = StoreLimits { max_bytes: u64::MAX, ..LIMITS };
    let store = ModuleStore::open(fixture.folder.path(), roomy, None).unwrap();
    let uploads: Vec<_> = (0..MAX_UPLOADS).map(|_| begin(&store, 1).unwrap()).collect();
    assert!(matches!(begin(&store, 1).unwrap_err(), ModuleError::TooManyUploads { .. }));
    drop(uploads);
    begin(&store, 1).unwrap();
}

#[test]
fn abandoned_uploads_are_removed_and_running_ones_are_kept() {
    let fixture = Fixture::new();
    let living = fixture.store.begin_upload(digest_of(b"module"), 6).unwrap();
    fs::write(fixture.folder.path().join("upload-dead"), "mod").unwrap();
    fs::write(fixture.folder.path().join("notes"), "of the operator").unwrap();
    fixture.again();
    let names = fixture.names();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names[0] == "notes" && names[1].starts_with(UPLOAD) && names[1] != "upload-dead", "{names:?}");
    drop(living);
    assert_eq!(fixture.names(), ["notes"]);
}

#[test]
fn concurrent_uploads_of_one_module_succeed_and_the_first_file_is_kept() {
    let fixture = Fixture::new();
    let bytes = module(7, LEAST);
    let digest = digest_of(&bytes);
    const WRITERS: usize = 4;
    let barrier = Barrier::new(WRITERS);
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                // Each thread has a lock and a folder of its own, as processes have.
                let store = fixture.again();
                let mut upload = store.begin_upload(digest, LEAST).unwrap();
                upload.write(0, &bytes).unwrap();
                barrier.wait();
                upload.commit().unwrap();
            });
        }
    });
    assert_eq!(fixture.names(), [entry_name(&digest)]);
    let path = fixture.store.verified(&digest).unwrap();
    let before = fs::metadata(&path).unwrap().ino();
    put(&fixture.store, &bytes).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().ino(), before);
}

#[test]
fn foreign_entries_do_not_count_as_modules() {
    let fixture = Fixture::new();
    let bytes = module(1, 100);
    let digest = digest_of(&bytes);
    let entry = fixture.folder.path().join(entry_name(&digest));
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().join("module.so");
    fs::write(&target, &bytes).unwrap();

    symlink(&target, &entry).unwrap();
    assert!(!fixture.store.contains(&digest).unwrap());
    assert!(matches!(fixture.store.verified(&digest).unwrap_err(), ModuleError::NotFound { .. }));

    fs::write(&entry, &bytes).unwrap();
    fs::set_permissions(&entry, fs::Permissions::from_mode(0o622)).unwrap();
    assert!(!fixture.store.contains(&digest).unwrap());

    symlink(&target, &entry).unwrap();
    put(&fixture.store, &bytes).unwrap();
    assert!(fs::symlink_metadata(&entry).unwrap().is_file());
    fixture.store.verified(&digest).unwrap();
    assert_eq!(fs::read(&target).unwrap(), bytes);
}

#[test]
fn a_stored_module_with_another_digest_is_removed_and_not_loaded() {
    let fixture = Fixture::new();
    let digest = put(&fixture.store, &module(1, 100)).unwrap();
    let entry = fixture.folder.path().join(entry_name(&digest));
    fs::set_permissions(&entry, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&entry, "").unwrap();
    assert!(matches!(fixture.store.verified(&digest).unwrap_err(), ModuleError::Damaged { .. }));
    assert!(!fixture.store.contains(&digest).unwrap());
}

#[test]
fn with_a_list_other_modules_are_neither_stored_nor_loaded() {
    let fixture = Fixture::new();
    let (listed, other) = (module(1, 10), module(2, 10));
    let other_digest = put(&fixture.store, &other).unwrap();
    let list: DigestList = [digest_of(&listed)].into_iter().collect();
    let store = ModuleStore::open(fixture.folder.path(), LIMITS, Some(Arc::new(list))).unwrap();
    let listed = put(&store, &listed).unwrap();
    store.verified(&listed).unwrap();
    let refusals = [
        store.contains(&other_digest).unwrap_err(),
        store.begin_upload(other_digest, 10).unwrap_err(),
        store.verified(&other_digest).unwrap_err(),
    ];
    for error in refusals {
        assert!(matches!(error, ModuleError::NotListed { digest } if digest == other_digest), "{error}");
    }
}

#[test]
fn the_folder_is_private_and_one_that_other_users_may_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("new/modules");
    ModuleStore::open(&made, LIMITS, None).unwrap();
    assert_eq!(fs::metadata(&made).unwrap().mode() & 0o777, 0o700);
    for mode in [0o770, 0o702] {
        fs::set_permissions(&made, fs::Permissions::from_mode(mode)).unwrap();
        let error = ModuleStore::open(&made, LIMITS, None).unwrap_err();
        assert!(matches!(error, ModuleError::Exposed { .. }) && error.to_string().contains("chmod"), "{error}");
    }
    fs::set_permissions(&made, fs::Permissions::from_mode(0o755)).unwrap();
    ModuleStore::open(&made, LIMITS, None).unwrap();
    // Others could rename the store in such a parent folder; in a sticky one they could not.
    let above = folder.path().join("above");
    let below = above.join("between/store");
    ModuleStore::open(&below, LIMITS, None).unwrap();
    for (mode, refused) in [(0o777, true), (0o1777, false), (0o755, false)] {
        fs::set_permissions(&above, fs::Permissions::from_mode(mode)).unwrap();
        match ModuleStore::open(&below, LIMITS, None) {
            Err(ModuleError::Exposed { folder, .. }) if refused => assert_eq!(folder, above.canonicalize().unwrap()),
            outcome => assert!(outcome.is_ok() && !refused, "{mode:o}"),
        }
    }
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(ModuleStore::open(&file, LIMITS, None).unwrap_err(), ModuleError::Folder { .. }));
}

#[test]
fn files_are_imported_once_and_only_files() {
    let fixture = Fixture::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernels.so");
    let bytes = module(5, 3000);
    fs::write(&path, &bytes).unwrap();
    let import = |path: &Path| fixture.store.import("kernels.so", &File::open(path).unwrap());
    let digest = import(&path).unwrap();
    assert_eq!(digest, digest_of(&bytes));
    assert_eq!(import(&path).unwrap(), digest);
    // Later changes of the file do not matter.
    fs::write(&path, "changed").unwrap();
    assert_eq!(fs::read(fixture.store.verified(&digest).unwrap()).unwrap(), bytes);
    assert!(matches!(import(folder.path()).unwrap_err(), ModuleError::NoFile { .. }));
    fs::write(&path, module(6, LIMITS.max_module_bytes + 1)).unwrap();
    assert!(matches!(import(&path).unwrap_err(), ModuleError::TooLarge { .. }));
    fs::write(&path, "").unwrap();
    assert!(matches!(import(&path).unwrap_err(), ModuleError::Empty));
}

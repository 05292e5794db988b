//! Unit tests of the cache of files: digests, identities, room, and what is left.

use std::os::unix::fs::symlink;
use std::thread;

use tempfile::TempDir;

use super::*;
use crate::config::{ByteSize, RelayConfig};
use crate::modules::hash;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Caller that waits for the result.
const WAITS: IsCancelled<'static> = &|| false;

/// A cache of `limit_bytes` in a folder of its own.
fn cache(limit_bytes: u64) -> (TempDir, Arc<FileCache>) {
    let folder = tempfile::tempdir().unwrap();
    let cache = opened(folder.path(), limit_bytes);
    (folder, cache)
}

/// The cache in `folder`, as another process would open it. It waits for the lock for as long as a
/// test may take.
fn opened(folder: &Path, limit_bytes: u64) -> Arc<FileCache> {
    Arc::new(FileCache { lock_timeout: DAY, ..FileCache::open(folder, limit_bytes, 30 * DAY) })
}

fn add(cache: &Arc<FileCache>, identity: &str, content: &[u8]) -> Option<Digest> {
    let mut writer = cache.begin(identity, content.len() as u64, WAITS).unwrap()?;
    content.chunks(1000).for_each(|piece| writer.write(piece).unwrap());
    let digest = writer.commit(WAITS).unwrap().unwrap();
    assert_eq!(digest, digest_of(content));
    Some(digest)
}

fn digest_of(content: &[u8]) -> Digest {
    hash(content).unwrap().0
}

fn has(cache: &FileCache, identity: &str, content: &[u8]) -> bool {
    let found = cache.find(identity, &digest_of(content), content.len() as u64).unwrap();
    let Some(file) = found else { return false };
    hash(file).unwrap().0 == digest_of(content)
}

/// Sets the time of the last use of a file to `at`.
fn set_used(cache: &FileCache, identity: &str, content: &[u8], at: SystemTime) {
    open(&cache.path_of(identity, &digest_of(content))).unwrap().set_modified(at).unwrap();
}

/// Returns the bytes that all files count as, by a search.
fn counted(cache: &FileCache) -> u64 {
    let _held = cache.lock(WAITS).unwrap().unwrap();
    cache.search().unwrap().used
}

fn recorded(cache: &FileCache) -> u64 {
    cache.read_used().unwrap()
}

#[test]
fn a_file_is_found_by_its_digest_length_and_identity_alone() {
    let (folder, cache) = cache(1 << 20);
    assert!(!has(&cache, "token:alice", b"data") && !folder.path().join("cache").exists());
    let digest = add(&cache, "token:alice", b"data").unwrap();
    assert!(has(&cache, "token:alice", b"data"));
    for (identity, digest, len) in [
        ("cert:alice", digest, 4),
        ("anonymous", digest, 4),
        ("token:alice", digest, 5),
        ("token:alice", digest_of(b"other"), 5),
    ] {
        assert!(cache.find(identity, &digest, len).unwrap().is_none(), "{identity}");
    }
    // Its owner may only read it, and other users may not.
    let path = cache.path_of("token:alice", &digest);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap()), mode(&cache.folder)), (0o400, 0o700, 0o700));
    // No other file is taken for it.
    assert!(cache.discard("token:alice", &digest, WAITS).unwrap());
    fs::write(folder.path().join("secret"), "data").unwrap();
    symlink(folder.path().join("secret"), &path).unwrap();
    cache.find("token:alice", &digest, 4).unwrap_err();
    assert!(FileCache::new(folder.path(), 0, DAY).is_none());
}

#[test]
fn what_was_not_committed_is_not_there_and_takes_no_room() {
    let (_folder, cache) = cache(100_000);
    let mut writer = cache.begin("a", 60_000, WAITS).unwrap().unwrap();
    writer.write(&[1; 50_000]).unwrap();
    // Its room is taken before it is written.
    assert!(cache.begin("a", 60_000, WAITS).unwrap().is_none());
    assert!(writer.commit(WAITS).unwrap_err().to_string().contains("shorter"));
    let mut writer = cache.begin("a", 60_000, WAITS).unwrap().unwrap();
    assert!(writer.write(&[1; 60_001]).unwrap_err().to_string().contains("longer"));
    drop(writer);
    assert_eq!((recorded(&cache), counted(&cache)), (0, 0));
    assert!(cache.begin("a", 100_001, WAITS).unwrap().is_none());
    // The same file twice is kept once.
    for _ in 0..3 {
        add(&cache, "a", &[2; 40_000]).unwrap();
    }
    // What it replaces may have been counted otherwise, and so all is counted anew.
    assert_eq!((cache.read_used(), counted(&cache)), (None, 40_000));
    add(&cache, "a", &[3; 10_000]).unwrap();
    assert_eq!((recorded(&cache), counted(&cache)), (50_000, 50_000));
    assert!(cache.discard("a", &digest_of(&[2; 40_000]), WAITS).unwrap());
    assert_eq!((cache.read_used(), counted(&cache)), (None, 10_000));
    add(&cache, "a", &[4; 10_000]).unwrap();
    assert_eq!((recorded(&cache), counted(&cache)), (20_000, 20_000));
}

#[test]
fn room_is_made_by_the_largest_identity_with_what_it_has_used_least_recently() {
    let (_folder, cache) = cache(100_000);
    let file = |number: u8| vec![number; 10_000];
    let then = SystemTime::now() - DAY;
    add(&cache, "small", &file(0)).unwrap();
    set_used(&cache, "small", &file(0), then);
    for number in 1..=9 {
        add(&cache, "large", &file(number)).unwrap();
        set_used(&cache, "large", &file(number), then + Duration::from_secs(number.into()));
    }
    assert!(has(&cache, "large", &file(1)));
    assert_eq!(recorded(&cache), 100_000);
    add(&cache, "third", &file(0)).unwrap();
    let left: Vec<_> = (1..=9).filter(|number| has(&cache, "large", &file(*number))).collect();
    // An eighth of the limit is free before the new file comes.
    assert_eq!(left, [1, 5, 6, 7, 8, 9], "the first was used again");
    assert!(has(&cache, "small", &file(0)) && has(&cache, "third", &file(0)));
    assert_eq!((recorded(&cache), counted(&cache)), (80_000, 80_000));
}

#[test]
fn a_large_file_displaces_no_files_of_identities_that_take_less() {
    let (_folder, cache) = cache(100_000);
    add(&cache, "small", &[0; 10_000]).unwrap();
    add(&cache, "large", &[1; 50_000]).unwrap();
    // A file as large as the cache displaces nothing: neither those of others nor, as it would not
    // fit even so, those of its own identity.
    for identity in ["large", "third"] {
        assert!(cache.begin(identity, 100_000, WAITS).unwrap().is_none(), "{identity}");
        assert!(has(&cache, "small", &[0; 10_000]) && has(&cache, "large", &[1; 50_000]));
    }
    assert_eq!((recorded(&cache), counted(&cache)), (60_000, 60_000));
    // It displaces files of its own identity, and of those that take as much.
    add(&cache, "large", &[2; 90_000]).unwrap();
    assert!(has(&cache, "small", &[0; 10_000]) && !has(&cache, "large", &[1; 50_000]));
    add(&cache, "third", &[3; 30_000]).unwrap();
    assert!(has(&cache, "small", &[0; 10_000]) && !has(&cache, "large", &[2; 90_000]));

    // Files that are being added count, too: they keep others from adding, and displace nothing.
    let writer = cache.begin("third", 50_000, WAITS).unwrap().unwrap();
    assert!(cache.begin("third", 20_000, WAITS).unwrap().is_some());
    assert!(has(&cache, "small", &[0; 10_000]) && !has(&cache, "third", &[3; 30_000]));
    assert!(cache.begin("third", 50_000, WAITS).unwrap().is_none());
    assert!(cache.begin("small", 60_000, WAITS).unwrap().is_none());
    assert!(has(&cache, "small", &[0; 10_000]));
    drop(writer);
    assert_eq!((recorded(&cache), counted(&cache)), (10_000, 10_000));
    assert!(add(&cache, "small", &[4; 90_000]).is_some());
}

#[test]
fn many_small_files_are_bounded_by_their_number() {
    let (_folder, cache) = cache(40_960);
    for number in 0..30_u8 {
        add(&cache, "a", &[number]).unwrap();
    }
    let files = (0..30_u8).filter(|number| has(&cache, "a", &[*number])).count();
    assert!((8..=10).contains(&files), "{files}");
    assert!(has(&cache, "a", &[29]));
    let large = FileCache::new(Path::new("/nowhere"), MAX_FILES << 20, DAY).unwrap();
    assert_eq!(large.charge(1), 1 << 20);
}

#[test]
fn what_a_dead_process_has_left_is_removed_and_what_is_lost_is_counted_anew() {
    let (_folder, cache) = cache(200_000);
    add(&cache, "a", &[1; 40_000]).unwrap();
    let writer = cache.begin("a", 10_000, WAITS).unwrap().unwrap();
    let alive = writer.path.clone();
    // As a process leaves them that is killed while it adds a file.
    let left = cache.folder_of("a").join("new-0123456789abcdef");
    fs::write(&left, [0; 50_000]).unwrap();
    for used in ["200000", "", "nonsense"] {
        fs::write(cache.folder.join(USED), used).unwrap();
        add(&cache, "a", &[2; 30_000]).unwrap();
        assert!(!left.exists() && alive.exists());
        assert_eq!(counted(&cache), 80_000, "{used}");
        fs::write(&left, [0; 50_000]).unwrap();
    }
    assert_eq!(cache.expire(SystemTime::now()).unwrap(), 0);
    assert!(!left.exists() && alive.exists());
    assert_eq!(recorded(&cache), 80_000);
    drop(writer);
    assert_eq!((recorded(&cache), counted(&cache)), (70_000, 70_000));
}

#[test]
fn files_expire_after_the_time_of_named_workspaces() {
    let (folder, cache) = cache(1 << 20);
    assert_eq!(cache.expire(SystemTime::now()).unwrap(), 0);
    assert!(!folder.path().join("cache").exists());
    let now = SystemTime::now();
    add(&cache, "a", b"old").unwrap();
    add(&cache, "b", b"new").unwrap();
    set_used(&cache, "a", b"old", now - 31 * DAY);
    set_used(&cache, "b", b"new", now - 29 * DAY);
    assert_eq!(cache.expire(now).unwrap(), 1);
    assert!(!cache.folder_of("a").exists() && has(&cache, "b", b"new"));
    assert_eq!(recorded(&cache), cache.charge(3));
}

#[test]
fn a_lower_limit_makes_the_cache_smaller_and_none_empties_it() {
    let (folder, cache) = cache(100_000);
    let then = SystemTime::now() - DAY;
    for number in 0..8 {
        add(&cache, "large", &[number; 10_000]).unwrap();
        set_used(&cache, "large", &[number; 10_000], then + Duration::from_secs(number.into()));
    }
    add(&cache, "small", &[8; 10_000]).unwrap();
    let lower = opened(folder.path(), 40_000);
    assert_eq!(lower.expire(SystemTime::now()).unwrap(), 6);
    let left: Vec<_> = (0..8).filter(|number| has(&cache, "large", &[*number; 10_000])).collect();
    assert_eq!(left, [6, 7]);
    assert!(has(&cache, "small", &[8; 10_000]));
    assert_eq!((recorded(&cache), counted(&cache)), (30_000, 30_000));
    assert_eq!(lower.expire(SystemTime::now()).unwrap(), 0);

    // A file that another server is adding stays.
    let writer = cache.begin("small", 5_000, WAITS).unwrap().unwrap();
    let off = opened(folder.path(), 0);
    assert_eq!(off.expire(SystemTime::now()).unwrap(), 3);
    assert!(!has(&cache, "small", &[8; 10_000]) && writer.path.exists());
    assert!(!cache.folder_of("large").exists());
    drop(writer);
    assert_eq!((off.expire(SystemTime::now()).unwrap(), recorded(&cache)), (0, 0));
    assert!(!cache.folder_of("small").exists());

    // A server that has it off removes the files; a relay or tracker in the same folder does not.
    let config = ServeConfig { file_cache: ByteSize(0), ..ServeConfig::default() };
    assert!(FileCache::of(&config).is_none() && FileCache::to_clean(&config).is_some());
    assert!(FileCache::to_clean(&RelayConfig::default().serve_config()).is_none());
}

#[test]
fn threads_that_opened_the_cache_apart_add_find_and_expire_at_once() {
    let (folder, _) = cache(1);
    let content = |number: usize| vec![number as u8; 3_000 + number];
    thread::scope(|scope| {
        for worker in 0..4 {
            // Each has the folder open as a process of its own would.
            let cache = opened(folder.path(), 64_000);
            scope.spawn(move || {
                for round in 0..60 {
                    let number = (worker * 7 + round) % 24;
                    if let Some(file) =
                        cache.find("a", &digest_of(&content(number)), content(number).len() as u64).unwrap()
                    {
                        assert_eq!(hash(file).unwrap().0, digest_of(&content(number)));
                    }
                    add(&cache, "a", &content(number));
                    if round % 16 == worker {
                        cache.expire(SystemTime::now()).unwrap();
                    }
                }
            });
        }
    });
    let cache = opened(folder.path(), 64_000);
    let used = counted(&cache);
    assert!(used > 0 && used <= 64_000, "{used}");
    assert!(cache.read_used().is_none_or(|recorded| recorded == used), "{used}: {:?}", cache.read_used());
    cache.expire(SystemTime::now()).unwrap();
    assert_eq!(recorded(&cache), used);
    let new = fs::read_dir(cache.folder_of("a")).unwrap().flatten();
    assert!(new.filter(|entry| entry.file_name().to_str().unwrap().starts_with(NEW)).count() == 0);
}

#[test]
fn a_lock_that_another_process_keeps_is_not_waited_for_without_end() {
    let (folder, cache) = cache(100_000);
    let digest = add(&cache, "a", &[1; 10_000]).unwrap();
    let mut writer = cache.begin("a", 20_000, WAITS).unwrap().unwrap();
    writer.write(&[2; 20_000]).unwrap();
    let impatient = FileCache::open(folder.path(), 100_000, 30 * DAY);
    let impatient = Arc::new(FileCache { lock_timeout: Duration::ZERO, ..impatient });
    let mut other = impatient.begin("a", 30_000, WAITS).unwrap().unwrap();
    other.write(&[3; 30_000]).unwrap();
    let held = cache.lock(WAITS).unwrap().unwrap();

    // A caller that is gone ends the wait, and so does the end of its time.
    let is_gone = || true;
    assert!(cache.begin("a", 1, &is_gone).unwrap().is_none());
    assert!(!cache.discard("a", &digest, &is_gone).unwrap());
    assert_eq!(writer.commit(&is_gone).unwrap(), None);
    assert!(impatient.begin("a", 1, WAITS).unwrap().is_none());
    assert!(!impatient.discard("a", &digest, WAITS).unwrap());
    assert_eq!(impatient.expire(SystemTime::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
    drop(other);

    // Files are found meanwhile, and what was given up takes room until the cache is searched.
    assert!(has(&cache, "a", &[1; 10_000]));
    drop(held);
    assert_eq!((recorded(&cache), counted(&cache)), (60_000, 10_000));
    assert!(add(&cache, "a", &[4; 50_000]).is_some());
    assert_eq!((recorded(&cache), counted(&cache)), (60_000, 60_000));
}

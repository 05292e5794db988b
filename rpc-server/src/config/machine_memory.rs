//! Memory of the machine or the control group, for default limits.

use std::fs;
use std::path::{Path, PathBuf};

use super::ByteSize;

/// Returns nine tenths of the memory: the rest is for the server itself and for other programs.
/// Unlimited if the memory is unknown.
pub(super) fn most_of_memory() -> ByteSize {
    memory().map_or(ByteSize::UNLIMITED, |bytes| ByteSize(bytes / 10 * 9))
}

/// Returns a quarter of the memory; unlimited if the memory is unknown.
pub(super) fn quarter_of_memory() -> ByteSize {
    memory().map_or(ByteSize::UNLIMITED, |bytes| ByteSize(bytes / 4))
}

/// Returns the memory of the machine or the limit of the control group, whichever is less.
fn memory() -> Option<u64> {
    let machine = machine_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default());
    let groups = group_folders(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
    let limits = groups.iter().filter_map(|file| group_limit(&fs::read_to_string(file).ok()?));
    limits.chain(machine).min()
}

fn machine_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the files that may limit the memory of a process with this `/proc/self/cgroup`: those of
/// its group and of all groups above, in the unified and the older hierarchy. In a container the
/// own group is often the topmost that is visible.
fn group_folders(cgroup: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        files.extend(path.ancestors().map(|group| Path::new(root).join(group).join(file)));
    }
    files
}

/// Parses a limit; `None` for no limit, such as "max".
fn group_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_the_machine_is_read_from_the_kernel() {
        assert_eq!(machine_memory("MemTotal:        2048 kB\nMemFree: 1 kB\n"), Some(2 << 20));
        assert_eq!(machine_memory("nothing"), None);
        let files = group_folders("12:cpu,memory:/a\n0::/user/b\n3:cpu:/c\nnonsense\n");
        let files: Vec<_> = files.iter().map(|file| file.to_str().unwrap()).collect();
        let expected = [
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/user/b/memory.max",
            "/sys/fs/cgroup/user/memory.max",
            "/sys/fs/cgroup/memory.max",
        ];
        assert_eq!(files, expected);
        assert_eq!((group_limit("1048576\n"), group_limit("max\n")), (Some(1 << 20), None));
        assert!(most_of_memory().0 > 1 << 20);
    }
}

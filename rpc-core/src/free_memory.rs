//! Memory that the program has freed, and that the allocator keeps for later.

/// Gives memory back to the system that was freed and is kept by the C library for later. After
/// many sessions have ended at a time, that is most of what they took. Takes milliseconds, in which
/// other threads may wait for memory. Does nothing where the C library is not that of GNU.
pub fn give_back_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    gnu::trim();
}

#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
#[allow(unsafe_code)]
mod gnu {
    use std::ffi::c_int;

    // SAFETY: the function is declared as in malloc.h of the GNU C library, where it has been since
    // 1995. It may be called at any time, on any thread.
    unsafe extern "C" {
        safe fn malloc_trim(pad: usize) -> c_int;
    }

    pub(super) fn trim() {
        // The result says if there was anything to give back.
        _ = malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    /// Returns the memory of this process in bytes.
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    fn resident() -> usize {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        // Pages of 4 KiB at least.
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }

    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    #[test]
    fn freed_memory_below_memory_in_use_is_given_back() {
        // Other tests of the process may take memory in between.
        let mut attempts = (0..10).map(|_| take_and_give_back());
        assert!(attempts.any(|(before, after)| after + TAKEN / 2 < before));
    }

    /// Bytes that the test takes, nearly all of which it frees.
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    const TAKEN: usize = 64 << 20;

    /// Returns the memory of this process before and after free memory is given back.
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    fn take_and_give_back() -> (usize, usize) {
        let mut blocks: Vec<_> = (0..TAKEN / 1024).map(|_| vec![1_u8; 1024]).collect();
        // Without one block in each MiB the allocator would give the memory back by itself.
        for (at, block) in blocks.iter_mut().enumerate() {
            if at % 1024 != 0 {
                *block = Vec::new();
            }
        }
        let before = resident();
        super::give_back_free_memory();
        let after = resident();
        println!("{before} bytes before and {after} after");
        drop(blocks);
        (before, after)
    }
}

//! The limit of the system on the open files of this process, and the defaults that fit it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::ServeConfig;

/// Descriptors that are not for peers: standard streams, the runtime, listeners, libraries and
/// drivers.
const OWN_FILES: u64 = 64;

/// Raises the limit on open files of this process to the maximum that the system permits it: many
/// systems start programs with a low one, for the sake of programs that use `select`.
///
/// The programs of this crate call it first in `main`. A program that embeds a server should do the
/// same, before it reads the settings: their defaults follow from the limit.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::debug!(%error, "cannot raise the limit on open files");
    }
}

/// Returns the default for a limit on something that takes a descriptor each: `eighths` eighths of
/// what this process may open for peers, and no more than `most`.
pub(crate) fn share(eighths: u64, most: u64) -> u64 {
    fit(limit(), eighths, most)
}

fn fit(limit: u64, eighths: u64, most: u64) -> u64 {
    let share = u128::from(limit.saturating_sub(OWN_FILES)) * u128::from(eighths) / 8;
    u64::try_from(share).unwrap_or(u64::MAX).clamp(1, most)
}

/// Logs a warning if peers may make this process open more files than the system permits it.
pub(crate) fn warn_if_exceeded_by(config: &ServeConfig) {
    let (limit, needed) = (limit(), needed_by(config));
    if needed > limit {
        let ServeConfig { max_sessions, max_handshakes, max_total_open_files, .. } = config;
        tracing::warn!(
            limit,
            needed,
            max_sessions,
            max_handshakes,
            max_total_open_files,
            "this process may open fewer files than the settings admit: clients beyond the limit will be refused; \
             raise it (ulimit -n, LimitNOFILE) or lower the settings"
        );
    }
}

fn needed_by(config: &ServeConfig) -> u64 {
    let ServeConfig { max_sessions, max_handshakes, max_total_open_files, .. } = config;
    [*max_sessions as u64, *max_handshakes as u64, *max_total_open_files]
        .into_iter()
        .fold(OWN_FILES, u64::saturating_add)
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_the_limit_and_are_never_zero() {
        assert_eq!((fit(1024, 3, 4096), fit(1024, 1, 1024), fit(1024, 4, u64::MAX)), (360, 120, 480));
        assert_eq!((fit(1 << 20, 3, 4096), fit(u64::MAX, 8, u64::MAX)), (4096, u64::MAX - OWN_FILES));
        assert_eq!((fit(0, 3, 4096), fit(OWN_FILES, 8, 4096)), (1, 1));
    }

    #[test]
    fn the_defaults_fit_the_limit_of_this_process() {
        assert!(needed_by(&ServeConfig::default()) <= limit());
        let greedy = ServeConfig { max_sessions: usize::MAX, ..ServeConfig::default() };
        assert_eq!(needed_by(&greedy), u64::MAX);
    }
}

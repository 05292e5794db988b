//! Failures of `ssh` and of the program that it starts, told apart by the exit status.

use std::process::ExitStatus;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

use super::Destination;
use super::stderr::StderrTail;
use crate::channel::ExplainEnd;
use crate::transports::exec::ChildGuard;

/// Explanation of a channel's end by the exit status and the standard error of `ssh`. It keeps no
/// `ssh` alive.
pub(super) struct SshEnd {
    pub(super) ssh: Weak<ChildGuard>,
    pub(super) destination: Destination,
    /// True if `ssh` may ask the user.
    pub(super) asks: bool,
    pub(super) tail: Arc<StderrTail>,
}

/// Time that `ssh` may take to exit after its connection has ended, and again that the end of its
/// standard error may take to arrive here. It counts anew, since the exit may be seen late.
const EXIT: Duration = Duration::from_secs(1);

#[async_trait]
impl ExplainEnd for SshEnd {
    async fn explain(&self) -> Option<String> {
        let guard = self.ssh.upgrade()?;
        let status = tokio::time::timeout(EXIT, guard.exited()).await.ok()?.ok()?;
        let tail = Arc::clone(&self.tail);
        let lines = tokio::task::spawn_blocking(move || tail.lines(EXIT)).await.ok()?;
        Some(self.explained(status, &lines))
    }

    fn explain_blocking(&self) -> Option<String> {
        let status = self.ssh.upgrade()?.exited_within(EXIT).ok()??;
        let lines = self.tail.lines(EXIT);
        Some(self.explained(status, &lines))
    }
}

/// Exit status of `ssh` when it has failed itself. Otherwise it exits like the remote program.
const SSH_FAILED: i32 = 255;
/// Exit status of a shell for a program that is not there.
const NOT_FOUND: i32 = 127;
/// Exit status of a shell for a file that cannot be executed.
const NOT_EXECUTABLE: i32 = 126;
/// Exit status of `rpc-server` for arguments that it does not know.
const BAD_USAGE: i32 = 2;

impl SshEnd {
    fn explained(&self, status: ExitStatus, lines: &[String]) -> String {
        let Destination { host, program, .. } = &self.destination;
        let login = self.destination.login();
        let quoted = |line: Option<&String>| line.map(|line| format!(", with {line:?}")).unwrap_or_default();
        let last = quoted(lines.last());
        // Some shells, such as csh, say it in words alone.
        let not_found = || lines.last().is_some_and(|line| line.to_ascii_lowercase().contains("command not found"));
        match status.code() {
            None => format!("ssh was killed ({status}){last}"),
            Some(SSH_FAILED) if self.asks => format!("ssh failed{last} (does `ssh {login}` work in a terminal?)"),
            Some(SSH_FAILED) => format!(
                "ssh failed{last} (does `ssh -oBatchMode=yes {login}` work there where ssh was started? it could not \
                 ask questions)"
            ),
            Some(code) if code == NOT_FOUND || not_found() => format!(
                "there is no program {program} on {host} (install it there, or name its path by ?program=PATH in the \
                 address)"
            ),
            Some(NOT_EXECUTABLE) => format!("the program {program} on {host} cannot be executed{last}"),
            Some(BAD_USAGE) => {
                let error = quoted(lines.iter().find(|line| line.contains("error")).or(lines.last()));
                format!("the program {program} on {host} does not know `serve --stdio`{error} (update it there)")
            }
            Some(_) => format!("the program {program} on {host} ended ({status}){last}"),
        }
    }
}

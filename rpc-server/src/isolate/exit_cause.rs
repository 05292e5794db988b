//! The exit cause of a session process, and its description.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::Signal;

use crate::config::ServeConfig;

/// Limits on a session process that may have ended it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProcessLimits {
    memory: Option<crate::config::ByteSize>,
    cpu_time: Option<crate::config::Span>,
}

impl ProcessLimits {
    pub(super) fn of(config: &ServeConfig) -> Self {
        let unlimited = config.isolate_memory == crate::config::ByteSize::UNLIMITED;
        Self { memory: (!unlimited).then_some(config.isolate_memory), cpu_time: config.isolate_cpu_time }
    }
}

/// Exit cause of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExitCause {
    /// Exit status; `None` if other code has reaped the process.
    pub(super) status: Option<ExitStatus>,
    /// True if the supervisor has killed the process.
    pub(super) killed: bool,
}

impl ExitCause {
    pub(super) fn describe(&self, limits: &ProcessLimits) -> String {
        const SUBJECT: &str = "the process that served this session";
        if self.killed {
            return format!("{SUBJECT} let go of its connection, and was killed");
        }
        let Some(status) = self.status else { return format!("{SUBJECT} ended") };
        let Some(signal) = status.signal() else {
            return format!("{SUBJECT} exited with code {}", status.code().unwrap_or_default());
        };
        let mut text = format!("{SUBJECT} was killed by signal {signal}");
        if let Some(name) = name(signal) {
            text += &format!(" ({name})");
        }
        if signal == Signal::XCPU.as_raw()
            && let Some(limit) = limits.cpu_time
        {
            text += &format!(": it had used the processor time that isolate_cpu_time allows, {limit}");
        }
        let by_memory = [Signal::ABORT, Signal::SEGV, Signal::BUS].map(Signal::as_raw);
        if by_memory.contains(&signal)
            && let Some(limit) = limits.memory
        {
            text += &format!("; programs that get no more memory end like that, and isolate_memory is {limit}");
        }
        if signal == Signal::KILL.as_raw() {
            text += ", as the kernel does when memory runs out";
        }
        text
    }
}

fn name(signal: i32) -> Option<&'static str> {
    let names = [
        (Signal::HUP, "SIGHUP"),
        (Signal::INT, "SIGINT"),
        (Signal::QUIT, "SIGQUIT"),
        (Signal::ILL, "SIGILL"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::ABORT, "SIGABRT"),
        (Signal::BUS, "SIGBUS"),
        (Signal::FPE, "SIGFPE"),
        (Signal::KILL, "SIGKILL"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::ALARM, "SIGALRM"),
        (Signal::TERM, "SIGTERM"),
        (Signal::XCPU, "SIGXCPU"),
        (Signal::XFSZ, "SIGXFSZ"),
        (Signal::SYS, "SIGSYS"),
    ];
    names.into_iter().find(|(known, _)| known.as_raw() == signal).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ByteSize, Span};

    #[test]
    fn exit_causes_name_signals_codes_and_exceeded_limits() {
        let none = ProcessLimits::default();
        let tight =
            ProcessLimits { memory: Some(ByteSize(64 << 20)), cpu_time: Some(Span(std::time::Duration::from_secs(2))) };
        let describe = |raw, limits: &ProcessLimits| {
            ExitCause { status: Some(ExitStatus::from_raw(raw)), killed: false }.describe(limits)
        };
        let segv = describe(11, &none);
        assert_eq!(segv, "the process that served this session was killed by signal 11 (SIGSEGV)");
        assert_eq!(describe(7 << 8, &tight), "the process that served this session exited with code 7");
        assert!(describe(Signal::ABORT.as_raw(), &tight).contains("isolate_memory is 64MiB"));
        assert!(describe(Signal::XCPU.as_raw(), &tight).contains("isolate_cpu_time allows, 2s"));
        assert!(!describe(Signal::XCPU.as_raw(), &none).contains("isolate"));
    }
}

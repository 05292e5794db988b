//! Logs of workers, on their way to the controller.
//!
//! A worker runs in a span that names it, so that the log of a program with its workers as threads
//! shows the worker of each line. In other processes a layer of the subscriber forwards the lines
//! of workers' threads, and the controller logs them again.

use std::cell::Cell;
use std::fmt::{self, Write};
use std::io;
use std::os::fd::OwnedFd;

use rpc_transports::Transports;
use rpc_transports::exec::{ChildStderr, Exec};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::unix::pipe;
use tracing::field::{Field, Visit};
use tracing::{Event as LogEvent, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

pub use crate::ccl::host::OPERATOR_LOG;
use crate::error::WorkerId;
use crate::wire::event::LogLine;
use crate::worker::context::WorkerContext;

/// The most bytes of one line.
const MAX_LINE: usize = 16 << 10;

/// Layer that forwards the log lines of this process's workers to their controllers, up to the
/// level that these ask for: see [`Options::worker_logs`](crate::Options::worker_logs). It is for
/// the subscriber of a program whose servers are nodes;
/// [`serve_if_worker`](crate::serve_if_worker) installs it by itself.
///
/// Lines of other threads than the worker's are not passed on, nor those of the target
/// `disco::operator`, which tell the operator of a node what a controller may not know.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerLogLayer;

thread_local! {
    /// True while the thread forwards a line, which may log in turn.
    static PASSING_ON: Cell<bool> = const { Cell::new(false) };
}

/// Ends the passing on, also where a field panics.
struct Done;

impl Drop for Done {
    fn drop(&mut self) {
        PASSING_ON.set(false);
    }
}

impl<S: Subscriber> Layer<S> for WorkerLogLayer {
    fn on_event(&self, event: &LogEvent<'_>, _: Context<'_, S>) {
        let level = number(*event.metadata().level());
        if event.metadata().target() == OPERATOR_LOG {
            return;
        }
        let Some(worker) = WorkerContext::current().filter(|worker| worker.wants_logs(level)) else { return };
        if PASSING_ON.replace(true) {
            return;
        }
        let _done = Done;
        let mut text = Text(String::new());
        event.record(&mut text);
        let target = event.metadata().target().to_owned();
        worker.log(LogLine { level, target, text: text.0, missing_before: 0 });
    }
}

/// The message, and behind it the other fields.
struct Text(String);

impl Text {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => {
                let fields = std::mem::take(&mut self.0);
                write!(self.0, "{value}{fields}")
            }
            name => write!(self.0, " {name}={value}"),
        };
        if self.0.len() > MAX_LINE {
            let end = (0..=MAX_LINE).rev().find(|at| self.0.is_char_boundary(*at)).unwrap_or(0);
            self.0.truncate(end);
        }
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

/// Installs a subscriber that forwards the log lines of this process's workers, if the program has
/// no subscriber of its own. Lines of other threads go to standard error, from warnings on.
pub(crate) fn install() {
    let elsewhere = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_filter(filter_fn(|metadata| *metadata.level() <= Level::WARN && WorkerContext::current().is_none()));
    // A subscriber that is there already was the program's own choice.
    let _ = tracing_subscriber::registry().with(WorkerLogLayer).with(elsewhere).try_init();
}

/// Returns transports whose children's standard error becomes lines of a worker's log, up to the
/// level `wanted`; otherwise it goes to this process's own standard error.
pub(crate) fn of_stderr(wanted: Option<u8>, log: impl Fn(LogLine) + Clone + Send + Sync + 'static) -> Transports {
    let level = number(Level::INFO);
    let take = move |pipe| {
        let log = log.clone();
        // Without a runtime there was no child.
        let Ok(runtime) = crate::runtime::runtime() else { return };
        runtime.spawn(async move {
            let read = read_lines(pipe, |text| {
                log(LogLine { level, target: "stderr".to_owned(), text, missing_before: 0 });
            });
            if let Err(error) = read.await {
                tracing::warn!(%error, "the standard error of a worker cannot be read any more");
            }
        });
    };
    let transports = Transports::default();
    if wanted >= Some(level) { transports.with(Exec::new().stderr(ChildStderr::new(take))) } else { transports }
}

/// Reads until the end; a line that is too long becomes several.
async fn read_lines(pipe: OwnedFd, mut each: impl FnMut(String)) -> io::Result<()> {
    let mut input = BufReader::new(pipe::Receiver::from_owned_fd(pipe)?);
    let mut line = Vec::new();
    loop {
        let room = (MAX_LINE - line.len()) as u64;
        let read = (&mut input).take(room).read_until(b'\n', &mut line).await?;
        if read > 0 && !line.ends_with(b"\n") && line.len() < MAX_LINE {
            // The end of the stream, which the next read reports.
            continue;
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if !text.is_empty() {
            each(text);
        }
        line.clear();
        if read == 0 {
            return Ok(());
        }
    }
}

/// Returns the number of a level, 0 for errors.
pub(crate) fn number(level: Level) -> u8 {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        _ => 4,
    }
}

/// Logs a line of a worker here: by this program's subscriber, or on standard error if it has none.
/// Control characters of terminals are escaped.
pub(crate) fn show(worker: WorkerId, line: &LogLine) {
    let LogLine { level, target, text, missing_before } = line;
    let (target, text) = (rpc_core::printable_line(target), rpc_core::printable_line(text));
    let missing = match missing_before {
        0 => String::new(),
        count => format!(" ({count} lines before this one are missing)"),
    };
    macro_rules! log {
        ($level:ident) => {
            tracing::event!(target: "disco::worker", Level::$level, "[{worker}] {target}: {text}{missing}")
        };
    }
    if !tracing::dispatcher::has_been_set() {
        let level = ["ERROR", "WARN", "INFO", "DEBUG"].get(usize::from(*level)).unwrap_or(&"TRACE");
        // If standard error is closed, the line is lost.
        let _ = io::Write::write_fmt(
            &mut io::stderr().lock(),
            format_args!("[{worker}] {level} {target}: {text}{missing}\n"),
        );
        return;
    }
    match level {
        0 => log!(ERROR),
        1 => log!(WARN),
        2 => log!(INFO),
        3 => log!(DEBUG),
        _ => log!(TRACE),
    }
}

//! Logs: structured events on standard error, as text or as JSON lines.

use std::io::{self, IsTerminal};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// How log events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// A JSON object on a line of its own.
    Json,
}

/// Which events are logged: a level such as `info`, or directives such as `info,rpc_server=debug`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LogFilter(String);

impl FromStr for LogFilter {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        EnvFilter::try_new(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for LogFilter {
    type Error = ParseError;

    fn try_from(text: String) -> Result<Self, ParseError> {
        text.parse()
    }
}

impl From<LogFilter> for String {
    fn from(filter: LogFilter) -> Self {
        filter.0
    }
}

impl Default for LogFilter {
    /// `info`.
    fn default() -> Self {
        Self("info".to_owned())
    }
}

/// Sends the events of this program to standard error. What is sent there already by an earlier call stays as it is.
pub fn init(filter: &LogFilter, format: LogFormat) {
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_span_events(FmtSpan::NONE);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let lines = lines.with_filter(EnvFilter::new(&filter.0));
    // What workers log goes to their controllers, too, as far as those want it.
    // A subscriber that is there already was the program's own choice.
    let _ = tracing_subscriber::registry().with(lines).with(disco::WorkerLogLayer).try_init();
}

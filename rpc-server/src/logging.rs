//! Logs: structured events on standard error, as text or as JSON lines.

use std::io::{self, IsTerminal};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::format::FmtSpan;

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
    let filter = EnvFilter::new(&filter.0);
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_span_events(FmtSpan::NONE);
    // A subscriber that is there already was the program's own choice.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}

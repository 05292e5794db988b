//! Logs: structured events on standard error, as text or as JSON lines.

use std::io::{self, IsTerminal};
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::{FilterExt, LevelFilter, ParseError, filter_fn};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, FmtSpan, Writer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::config::ServeConfig;
use crate::recent_logs::{self, LogRing, RingWriter};

/// Format of log events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text for each event.
    #[default]
    Text,
    /// One line with a JSON object for each event.
    Json,
}

/// Filter of logged events: a level such as `info`, or directives such as `info,rpc_server=debug`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LogFilter(String);

/// Error of a text that is not a [`LogFilter`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogFilterError {
    /// A directive without `=` is not a level. tracing would take it for the name of a module and
    /// log nothing else.
    #[error("'{0}' is not a log level; write error, warn, info, debug, trace or off, or MODULE=LEVEL for one module")]
    Level(String),
    /// A directive cannot be parsed.
    #[error(transparent)]
    Syntax(#[from] ParseError),
}

impl FromStr for LogFilter {
    type Err = LogFilterError;

    fn from_str(text: &str) -> Result<Self, LogFilterError> {
        // Directives may contain commas and `=` in the fields of a span, in brackets; such filters
        // are left to tracing.
        if !text.contains('[') {
            // An empty text would parse as `error`.
            let is_level = |directive: &str| !directive.is_empty() && directive.parse::<LevelFilter>().is_ok();
            let mut directives = text.split(',').map(str::trim);
            if let Some(wrong) = directives.find(|directive| !directive.contains('=') && !is_level(directive)) {
                return Err(LogFilterError::Level(wrong.to_owned()));
            }
        }
        EnvFilter::try_new(text)?;
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for LogFilter {
    type Error = LogFilterError;

    fn try_from(text: String) -> Result<Self, LogFilterError> {
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

/// Sends the events of this program to standard error. A second call changes nothing.
pub fn init(filter: &LogFilter, format: LogFormat) {
    install(filter, format, None);
}

/// As [`init`], for a server with these settings: keeps the last lines where clients may read them.
pub(crate) fn init_for_server(config: &ServeConfig) {
    let ring = config.shows_logs().then(Arc::<LogRing>::default);
    if install(&config.log_level, config.log_format, ring.clone())
        && let Some(ring) = ring
    {
        recent_logs::keep(ring);
    }
}

/// Installs the subscriber of this program. Returns false if there is one already, which stays.
fn install(filter: &LogFilter, format: LogFormat, ring: Option<Arc<LogRing>>) -> bool {
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_span_events(FmtSpan::NONE);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let lines = lines.with_filter(EnvFilter::new(&filter.0));
    let kept = ring.map(|ring| kept_lines(filter, ring));
    // Events of Disco workers go to their controllers as well, if those ask for them.
    tracing_subscriber::registry().with(lines).with(kept).with(disco::WorkerLogLayer).try_init().is_ok()
}

/// Returns the layer whose lines clients may read: text, whatever the format of standard error, and
/// nothing that is for the operator alone.
fn kept_lines<S>(filter: &LogFilter, ring: Arc<LogRing>) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    let is_for_clients = filter_fn(|metadata| metadata.target() != disco::OPERATOR_LOG);
    let lines = tracing_subscriber::fmt::layer().fmt_fields(PlainFields(DefaultFields::new()));
    let lines = lines.with_ansi(false).with_writer(RingWriter(ring));
    lines.with_filter(EnvFilter::new(&filter.0).and(is_for_clients))
}

/// Format of the fields of spans for lines that are kept. Layers share the text of those fields by
/// the type of the format, and that of standard error may be coloured.
struct PlainFields(DefaultFields);

impl<'writer> FormatFields<'writer> for PlainFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> std::fmt::Result {
        self.0.format_fields(writer, fields)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::recent_logs::LogService as _;

    /// A regression: fields of spans were kept with the colours of the terminal.
    #[tokio::test]
    async fn lines_that_are_kept_have_no_colour_and_nothing_for_the_operator_alone() {
        let ring = Arc::<LogRing>::default();
        let coloured = tracing_subscriber::fmt::layer().with_ansi(true).with_writer(io::sink);
        let kept = kept_lines(&LogFilter("info".to_owned()), ring.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(coloured).with(kept), || {
            let _span = tracing::info_span!("session", number = 7).entered();
            tracing::info!("for all");
            tracing::info!(target: disco::OPERATOR_LOG, "for the operator");
            tracing::debug!("too detailed");
        });
        let lines = ring.read(None, Duration::ZERO).await.unwrap().lines;
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("session{number=7}") && lines[0].contains("for all"), "{lines:?}");
        assert!(!lines[0].contains("1b"), "{lines:?}");
    }

    /// `--log-level inof` was taken for the name of a module, and the server logged nothing.
    #[test]
    fn misspelt_level_is_an_error_that_names_the_levels() {
        for wrong in ["inof", "", "info,debgu", "rpc_server", "warn, ,info"] {
            let error = wrong.parse::<LogFilter>().unwrap_err().to_string();
            assert!(error.contains("error, warn, info, debug, trace or off"), "{wrong}: {error}");
        }
        assert!("rpc_server=inof".parse::<LogFilter>().is_err());
        for right in ["info", "INFO", "off", "3", "info,rpc_server=debug", "rpc_server=trace", "[session{id=1}]=debug"]
        {
            assert_eq!(right.parse::<LogFilter>().unwrap().0, right);
        }
    }
}

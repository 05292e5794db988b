//! `logs`: recent log lines of a server, and those that come.

use std::time::Duration;

use clap::Args;
use rpc_core::{Pack, RemoteFunction};
use serde_json::json;

use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::interruption::Interruption;
use super::limited;
use super::output::{Output, counted};
use crate::builtins::{LogPage, READ_LOGS};

/// Time for which the server waits for a line before it answers without one.
const WAIT: Duration = Duration::from_secs(20);

/// Time after an answer without lines: servers wait before they give one.
const PAUSE: Duration = Duration::from_millis(50);

/// Number of a line that no server ever has: it stands for the end of the log.
const END: u64 = i64::MAX as u64;

#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Go on with the lines that come, until interrupted
    #[arg(short, long, env = "RPC_CLI_FOLLOW")]
    follow: bool,
    /// Number of lines to begin with, of the last few thousand that the server keeps
    #[arg(short = 'n', long, env = "RPC_CLI_LINES", value_name = "NUMBER", default_value_t = 100)]
    lines: u64,
}

/// Prints log lines of a server.
pub(super) async fn logs(
    options: &CommonOptions,
    output: &Output,
    args: LogsArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let LogsArgs { address, follow, lines } = args;
    let read = options.with_session(&address, Files::None, async |session| {
        let function: RemoteFunction = session.get_function(READ_LOGS).await?;
        let end = page(&function, END, Duration::ZERO).await?.next;
        let mut from = end.saturating_sub(lines);
        let mut is_first = true;
        while follow || from < end {
            let wait = if follow { WAIT } else { Duration::ZERO };
            let mut page = page(&function, from, wait).await?;
            if !follow {
                leave_out_from(&mut page, end);
            }
            // A server keeps fewer lines than may have been asked for.
            if page.lost > 0 && !is_first {
                missing(output, page.lost)?;
            }
            is_first = false;
            // Also if the numbers of a server do not grow.
            if page.next <= from {
                if !follow {
                    break;
                }
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            print(output, &page)?;
            from = page.next;
        }
        Ok(())
    });
    if !follow {
        return limited((options, interruption), read).await;
    }
    tokio::select! {
        outcome = read => outcome,
        _ = interruption.wait() => Ok(()),
    }
}

async fn page(function: &RemoteFunction, from: u64, wait: Duration) -> Result<LogPage, Failure> {
    let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    let Pack(page): Pack<LogPage> = function.call((from, wait_ms)).await?;
    Ok(page)
}

/// Returns the number of the first line of a page.
fn first_number(page: &LogPage) -> u64 {
    page.next.saturating_sub(page.lines.len() as u64)
}

/// Leaves out the lines that have come since the end was asked for.
fn leave_out_from(page: &mut LogPage, end: u64) {
    let first = first_number(page);
    page.lines.truncate(usize::try_from(end.saturating_sub(first)).unwrap_or(usize::MAX));
    page.next = first + page.lines.len() as u64;
}

fn print(output: &Output, page: &LogPage) -> Result<(), Failure> {
    let first = first_number(page);
    for (number, line) in (first..).zip(&page.lines) {
        if output.is_json() {
            output.json(&json!({ "number": number, "line": line }))?;
        } else {
            output.untrusted_line(line)?;
        }
    }
    Ok(())
}

/// Tells of lines that the server had to forget before they were read.
fn missing(output: &Output, lost: u64) -> Result<(), Failure> {
    if output.is_json() {
        return output.json(&json!({ "lost": lost }));
    }
    output.warn(&format!("{} lost: the server logs faster than they are read here", counted(lost, "line")));
    Ok(())
}

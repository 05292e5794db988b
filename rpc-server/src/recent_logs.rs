//! Recent log lines of a server, which it shows to clients where its operator allows that:
//! `rpc.logs.read`.
//!
//! The lines are the events that the program logs, by the filter of `--log-level`, as text whatever
//! the format on standard error, and without those for the operator alone. What functions log with
//! `tracing` in the server's process is among them; what they print, and what processes of isolated
//! sessions log, is not. A session sees a
//! [`LogService`]: in the server's own process that is the [`LogRing`] itself, and in the process
//! of an isolated session the link to the server.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::{Result, printable_line};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of lines that are kept.
const MAX_LINES: usize = 4096;

/// Maximum number of bytes of the lines that are kept.
const MAX_BYTES: usize = 1 << 20;

/// Maximum length of a line in bytes; longer ones are cut.
const MAX_LINE_BYTES: usize = 1024;

/// End of a line that was cut.
const CUT: &str = "…";

/// Maximum number of bytes of the lines of one page. As JSON they fit a datagram to the process of
/// an isolated session.
pub(crate) const MAX_PAGE_BYTES: usize = 16 << 10;

/// Maximum number of lines of one page.
const MAX_PAGE_LINES: usize = 256;

/// Longest time for which a read waits for a line.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(30);

/// Time after the first line that a read has waited for, in which further ones join it. It also
/// bounds how often a read can be answered that causes a log line itself.
const JOIN_TIME: Duration = Duration::from_millis(50);

/// Consecutive log lines of a server: the result of `rpc.logs.read`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LogPage {
    /// Lines, the oldest first. The last one has the number before [`next`](Self::next).
    pub lines: Vec<String>,
    /// Number of the first line that is not in the page, or not there yet.
    pub next: u64,
    /// Number of lines that were asked for, come before these, and are kept no more.
    #[serde(default)]
    pub lost: u64,
}

/// Recent log lines as one session sees them.
#[async_trait]
pub(crate) trait LogService: Send + Sync {
    /// Returns lines from the number `from` on; without a number from the oldest that is kept. If
    /// there is none yet, waits up to `wait`.
    ///
    /// # Errors
    ///
    /// The server does not let the client read them, or does not answer.
    async fn read(&self, from: Option<u64>, wait: Duration) -> Result<LogPage>;
}

/// The log service of a session, for its functions
/// ([`Context::extension`](rpc_core::Context::extension)).
pub(crate) struct Logs(pub(crate) Arc<dyn LogService>);

/// The last log lines of this process.
#[derive(Debug)]
pub(crate) struct LogRing {
    kept: Mutex<KeptLines>,
    /// Number of the next line.
    next: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct KeptLines {
    lines: VecDeque<String>,
    bytes: usize,
    /// Number of the next line.
    next: u64,
}

impl Default for LogRing {
    fn default() -> Self {
        Self { kept: Mutex::default(), next: watch::Sender::new(0) }
    }
}

impl LogRing {
    /// Adds a line, of which control characters are escaped.
    fn add(&self, text: &str) {
        let mut line = printable_line(text.trim_end()).into_owned();
        if line.len() > MAX_LINE_BYTES {
            let fits = |at: &usize| line.is_char_boundary(*at);
            let end = (0..=MAX_LINE_BYTES - CUT.len()).rev().find(fits).unwrap_or(0);
            line.truncate(end);
            line.push_str(CUT);
        }
        line.shrink_to_fit();
        let next = {
            let mut kept = self.kept.lock();
            kept.bytes += line.len();
            kept.lines.push_back(line);
            while kept.lines.len() > MAX_LINES || kept.bytes > MAX_BYTES {
                let Some(oldest) = kept.lines.pop_front() else { break };
                kept.bytes -= oldest.len();
            }
            kept.next += 1;
            kept.next
        };
        // Another thread may have gone further meanwhile.
        self.next.send_if_modified(|known| std::mem::replace(known, next.max(*known)) < next);
    }

    /// Returns the lines from the number `from` on that are there, as far as a page holds them.
    fn page(&self, from: Option<u64>) -> LogPage {
        let kept = self.kept.lock();
        let oldest = kept.next - kept.lines.len() as u64;
        let wanted = from.unwrap_or(oldest).min(kept.next);
        let first = wanted.max(oldest);
        let mut page = LogPage { lines: Vec::new(), next: first, lost: first - wanted };
        let mut room = MAX_PAGE_BYTES;
        let after = kept.lines.iter().skip(usize::try_from(first - oldest).unwrap_or(usize::MAX));
        for line in after.take(MAX_PAGE_LINES) {
            let Some(left) = room.checked_sub(line.len()) else { break };
            room = left;
            page.lines.push(line.clone());
            page.next += 1;
        }
        page
    }
}

#[async_trait]
impl LogService for LogRing {
    async fn read(&self, from: Option<u64>, wait: Duration) -> Result<LogPage> {
        let mut next = self.next.subscribe();
        let page = self.page(from);
        if !page.lines.is_empty() || wait.is_zero() {
            return Ok(page);
        }
        let comes = async {
            let from = from.unwrap_or(page.next);
            // The ring lives as long as the process.
            let _ = next.wait_for(|next| *next > from).await;
            tokio::time::sleep(JOIN_TIME).await;
        };
        let _ = tokio::time::timeout(wait.min(MAX_WAIT), comes).await;
        Ok(self.page(from))
    }
}

/// Ring of this process, once lines are kept.
static RING: OnceLock<Arc<LogRing>> = OnceLock::new();

/// Returns the ring of this process, if its log lines are kept.
pub(crate) fn ring() -> Option<Arc<LogRing>> {
    RING.get().cloned()
}

/// Keeps the lines of `ring` for [`ring`]. Another one may be kept already.
pub(crate) fn keep(ring: Arc<LogRing>) {
    let _ = RING.set(ring);
}

/// Writer of a subscriber that adds each event to a ring. The subscriber writes an event by one
/// call.
#[derive(Clone, Debug)]
pub(crate) struct RingWriter(pub(crate) Arc<LogRing>);

impl Write for RingWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.0.add(&String::from_utf8_lossy(event));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for RingWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(page: &LogPage) -> Vec<u64> {
        page.lines.iter().map(|line| line.trim_start_matches("line ").parse().unwrap()).collect()
    }

    #[test]
    fn lines_are_read_in_order_and_lost_ones_are_counted() {
        let ring = LogRing::default();
        assert_eq!(ring.page(None), LogPage::default());
        (0..MAX_LINES + 10).for_each(|number| ring.add(&format!("line {number}\n")));
        let all: u64 = MAX_LINES as u64 + 10;
        let first = ring.page(Some(3));
        assert_eq!((first.lost, first.lines.len()), (7, MAX_PAGE_LINES));
        assert_eq!(numbered(&first), (10..10 + MAX_PAGE_LINES as u64).collect::<Vec<_>>());
        let (mut from, mut seen) = (first.next, first.lines.len());
        loop {
            let page = ring.page(Some(from));
            assert_eq!(page.lost, 0);
            if page.lines.is_empty() {
                break;
            }
            assert_eq!(numbered(&page)[0], from);
            seen += page.lines.len();
            from = page.next;
        }
        assert_eq!((from, seen), (all, MAX_LINES));
        assert_eq!(ring.page(Some(u64::MAX)), LogPage { lines: Vec::new(), next: all, lost: 0 });
        assert_eq!(numbered(&ring.page(None))[0], 10);
    }

    #[test]
    fn what_is_kept_is_bounded_and_steers_no_terminal() {
        let ring = LogRing::default();
        (0..3000).for_each(|_| ring.add(&"é".repeat(4000)));
        let kept = ring.kept.lock();
        assert!(kept.bytes <= MAX_BYTES && kept.lines.iter().map(String::len).sum::<usize>() == kept.bytes);
        assert!(kept.lines.iter().all(|line| line.len() <= MAX_LINE_BYTES && line.ends_with(CUT)));
        drop(kept);
        let page = ring.page(None);
        assert!(page.lines.iter().map(String::len).sum::<usize>() <= MAX_PAGE_BYTES);
        // Even if all is escaped once more.
        let ring = LogRing::default();
        (0..400).for_each(|_| ring.add(&"\"\\".repeat(600)));
        assert!(serde_json::to_vec(&ring.page(None)).unwrap().len() < 48 << 10);
        ring.add("two\nlines \x1b[2J");
        let last = ring.kept.lock().lines.back().cloned().unwrap();
        assert!(!last.contains(char::is_control), "{last}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_waits_for_the_next_line_and_no_longer_than_it_is_told() {
        let ring = Arc::new(LogRing::default());
        let began = tokio::time::Instant::now();
        let page = ring.read(None, Duration::from_secs(3)).await.unwrap();
        assert_eq!((page, began.elapsed()), (LogPage::default(), Duration::from_secs(3)));
        ring.read(None, Duration::MAX).await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(3) + MAX_WAIT);
        let reading = tokio::spawn({
            let ring = ring.clone();
            async move { ring.read(Some(0), Duration::from_secs(20)).await.unwrap() }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        ring.add("line 0");
        tokio::time::sleep(JOIN_TIME / 2).await;
        ring.add("line 1");
        assert_eq!(numbered(&reading.await.unwrap()), [0, 1]);
        assert_eq!(began.elapsed(), Duration::from_secs(4) + MAX_WAIT + JOIN_TIME);
    }
}

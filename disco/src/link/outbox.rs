//! Outbox of a link: commands that wait to be sent over its session.

use std::collections::VecDeque;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::wire::codec::Encoded;

/// Number of bytes of commands are put into one message, if there are several.
const MAX_BATCH: usize = 4 << 20;

/// Commands that wait to be sent. Credit bounds those of a controller, and [`Link::held`] tells a
/// node how much it is.
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: Mutex<QueuedCommands>,
    more: Notify,
}

#[derive(Default)]
struct QueuedCommands {
    commands: VecDeque<Encoded>,
    bytes: usize,
    /// True once the sender has ended.
    closed: bool,
}

/// Size that a command has in a queue beside its bytes.
pub(crate) const QUEUED: usize = 128;

fn size(encoded: &Encoded) -> usize {
    encoded.head.len() + encoded.bulk.as_ref().map_or(0, Bytes::len)
}

impl Outbox {
    /// Returns how many bytes of commands wait to be sent.
    pub(crate) fn held(&self) -> usize {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, QueuedCommands> {
        self.waiting.lock()
    }

    pub(crate) fn push(&self, encoded: Encoded) {
        let mut waiting = self.lock();
        if waiting.closed {
            return;
        }
        waiting.bytes += QUEUED + size(&encoded);
        waiting.commands.push_back(encoded);
        let first = waiting.commands.len() == 1;
        drop(waiting);
        if first {
            self.more.notify_one();
        }
    }

    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        let rest = std::mem::replace(&mut *waiting, QueuedCommands { closed: true, ..QueuedCommands::default() });
        drop(waiting);
        drop(rest);
    }

    /// Takes the next commands, once there are any.
    pub(crate) async fn take(&self) -> Vec<Encoded> {
        loop {
            {
                let mut waiting = self.lock();
                let mut bytes = 0;
                let mut count = 0;
                for encoded in &waiting.commands {
                    bytes += size(encoded);
                    if count > 0 && bytes > MAX_BATCH {
                        break;
                    }
                    count += 1;
                }
                if count > 0 {
                    let taken: Vec<_> = waiting.commands.drain(..count).collect();
                    waiting.bytes -= taken.iter().map(|encoded| QUEUED + size(encoded)).sum::<usize>();
                    return taken;
                }
            }
            self.more.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(len: usize) -> Encoded {
        Encoded { head: Bytes::from(vec![0; len]), bulk: (len > 10).then(|| Bytes::from(vec![0; 7])) }
    }

    /// Waiting commands are counted until they are taken, and a closed outbox keeps none.
    #[test]
    fn an_outbox_knows_what_it_holds_and_holds_nothing_once_closed() {
        let outbox = Outbox::default();
        for len in [1, 100, MAX_BATCH] {
            outbox.push(encoded(len));
        }
        assert_eq!(outbox.lock().bytes, 3 * QUEUED + 1 + 107 + MAX_BATCH + 7);
        let taken = rpc_core::blocking::block_on(outbox.take()).unwrap();
        assert_eq!(taken.len(), 2);
        assert_eq!(outbox.lock().bytes, QUEUED + MAX_BATCH + 7);
        outbox.close();
        outbox.push(encoded(5));
        let waiting = outbox.lock();
        assert_eq!((waiting.bytes, waiting.commands.len()), (0, 0));
    }
}

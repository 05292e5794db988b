//! The link of a session process to its server beside the session: usage reports, questions,
//! leases, and log lines.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::unix::net;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::{Device, DeviceUse, ErrorKind, Result, RpcError, Usage, clock};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::Instant;

use super::messages::{ControlAnswer, ControlMessage, LeaseAnswer, LeaseCommand, LogAnswer, LogCommand, Report};
use super::process_logs::{MAX_READ_WAIT, MAX_READS};
use crate::leases::{LeaseGrant, LeaseRequest, LeaseService, LeasedDevice, QueuedRequest};
use crate::recent_logs::{LogPage, LogService, MAX_WAIT};
use crate::server::server_state::ServerTotals;

/// Longest time for an answer. The thread that answers does nothing else that takes long, and a
/// loaded machine may keep it from the processor for seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Link to the server; see the [module](self).
pub(super) struct ControlLink {
    this: Weak<Self>,
    /// Queue of the task that sends. Its entries are reports, few a second, commands about leases,
    /// whose number the limits on requests and handles bound, and answers to lists of reserved
    /// devices.
    outgoing: UnboundedSender<ControlMessage>,
    /// Lock of the thread that waits for totals.
    asking: Mutex<()>,
    /// Usage that was reported last.
    reported: Mutex<Usage>,
    awaited: Mutex<Awaited>,
    /// Places of reads of log lines that the server has not answered.
    log_reads: Arc<Semaphore>,
    device_uses: Mutex<DeviceUses>,
    /// Socket to the server, with a buffer for what it receives. Locked while an answer is acted
    /// on, so that answers are taken in their order by whichever thread reads them.
    socket: Mutex<(net::UnixDatagram, Vec<u8>)>,
    /// Runtime of the task that resumes requests.
    runtime: Handle,
}

/// Devices that are reserved for other sessions, and the uses of this one.
#[derive(Default)]
struct DeviceUses {
    /// The reserved devices; `None` until the server has told.
    reserved: Option<Vec<Device>>,
    /// Number of the list of reserved devices.
    list: u64,
    /// Numbers of uses, of devices that are used.
    counts: HashMap<Device, usize>,
    /// Waker of requests that wait for a change.
    waker: Option<Waker>,
}

/// Receivers of answers.
#[derive(Default)]
struct Awaited {
    last_number: u64,
    totals: Option<SyncSender<ServerTotals>>,
    grants: HashMap<u64, watch::Sender<Option<LeaseGrant>>>,
    questions: HashMap<u64, oneshot::Sender<LeaseAnswer>>,
    log_reads: HashMap<u64, LogRead>,
}

/// Read of log lines that the server has not answered. One that was cancelled keeps its place until
/// then, as it does at the server.
struct LogRead {
    asker: oneshot::Sender<Result<LogPage>>,
    _permit: OwnedSemaphorePermit,
}

impl Awaited {
    /// Adds the receiver of an answer. Returns the number of its question.
    fn await_answer(&mut self, asker: oneshot::Sender<LeaseAnswer>) -> u64 {
        self.last_number += 1;
        self.questions.insert(self.last_number, asker);
        self.last_number
    }

    /// Adds the receiver of log lines. Returns the number of its question.
    fn await_log_lines(&mut self, read: LogRead) -> u64 {
        self.last_number += 1;
        self.log_reads.insert(self.last_number, read);
        self.last_number
    }
}

impl ControlLink {
    /// Returns a link, and its queue for [`run`](Self::run). Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// The system refuses.
    pub(super) fn new(socket: net::UnixDatagram) -> io::Result<(Arc<Self>, UnboundedReceiver<ControlMessage>)> {
        socket.set_nonblocking(true)?;
        let (outgoing, queue) = unbounded_channel();
        let link = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            outgoing,
            asking: Mutex::default(),
            reported: Mutex::default(),
            awaited: Mutex::default(),
            log_reads: Arc::new(Semaphore::new(MAX_READS)),
            device_uses: Mutex::default(),
            socket: Mutex::new((socket, vec![0; ControlAnswer::MAX_LEN])),
            runtime: Handle::current(),
        });
        Ok((link, queue))
    }

    /// Sends what is queued, and receives answers, for as long as the process lives.
    ///
    /// # Errors
    ///
    /// The server is gone, or the system refuses. The process cannot go on: the server would not
    /// learn of leases that it releases.
    pub(super) async fn run(&self, mut queue: UnboundedReceiver<ControlMessage>) -> io::Result<()> {
        let socket = UnixDatagram::from_std(self.socket.lock().0.try_clone()?)?;
        loop {
            tokio::select! {
                Some(message) = queue.recv() => {
                    socket.send(&message.to_bytes()).await?;
                }
                readable = socket.readable() => {
                    readable?;
                    match socket.try_io(Interest::READABLE, || self.take_answers()) {
                        Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Acts on the answers that have arrived. Ends with an error, `WouldBlock` when there is none
    /// any more.
    fn take_answers(&self) -> io::Result<()> {
        let mut socket = self.socket.lock();
        let (socket, buffer) = &mut *socket;
        loop {
            match socket.recv(buffer)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                len => {
                    ControlAnswer::from_bytes(&buffer[..len]).into_iter().for_each(|answer| self.take_answer(answer))
                }
            }
        }
    }

    fn take_answer(&self, answer: ControlAnswer) {
        if let ControlAnswer::Lease(LeaseAnswer::ReservedForOthers { number, devices }) = answer {
            return self.set_reserved(number, devices);
        }
        let mut awaited = self.awaited.lock();
        match answer {
            ControlAnswer::Totals(totals) => {
                // An answer that is late has no receiver any more.
                if let Some(asker) = awaited.totals.take() {
                    let _ = asker.try_send(totals);
                }
            }
            ControlAnswer::Lease(LeaseAnswer::Granted { number, waited, duration }) => {
                let grant = LeaseGrant { since: clock::now(), waited, duration };
                if let Some(sender) = awaited.grants.remove(&number) {
                    let _ = sender.send(Some(grant));
                }
            }
            ControlAnswer::Logs(LogAnswer { question, outcome }) => {
                if let Some(read) = awaited.log_reads.remove(&question) {
                    let _ = read.asker.send(outcome);
                }
            }
            ControlAnswer::Lease(answer) => {
                if let Some(asker) = answer.number().and_then(|number| awaited.questions.remove(&number)) {
                    let _ = asker.send(answer);
                }
            }
        }
    }

    /// Takes the list of reserved devices, and answers which of them are not used. From here on
    /// none of them is used by a new request.
    fn set_reserved(&self, list: u64, devices: Vec<Device>) {
        let mut uses = self.device_uses.lock();
        let unused: Vec<_> = devices.iter().copied().filter(|device| !uses.counts.contains_key(device)).collect();
        (uses.reserved, uses.list) = (Some(devices), list);
        for devices in unused.chunks(LeaseCommand::UNUSED_AT_ONCE) {
            let devices = devices.to_vec();
            self.send(ControlMessage::Lease(LeaseCommand::Unused { list, devices }));
        }
        if let Some(waker) = uses.waker.take() {
            // Not here: the thread that reads may hold locks of the session.
            self.runtime.spawn(async move { waker.wake() });
        }
    }

    fn send(&self, message: ControlMessage) {
        // Without the task this process ends.
        let _ = self.outgoing.send(message);
    }

    /// Reports the usage and asks for the totals of the server; `None` without an answer. Blocks.
    pub(super) fn totals(&self, usage: Usage) -> Option<ServerTotals> {
        let _asking = self.asking.lock();
        let (asker, answer) = mpsc::sync_channel(1);
        self.awaited.lock().totals = Some(asker);
        self.send(ControlMessage::Report(Report { usage, asks: true }));
        answer.recv_timeout(ANSWER_TIMEOUT).ok()
    }

    /// Reports the usage if it has changed. Returns true if it had.
    pub(super) fn report(&self, usage: Usage) -> bool {
        let mut reported = self.reported.lock();
        let changed = *reported != usage;
        if changed {
            self.send(ControlMessage::Report(Report { usage, asks: false }));
            *reported = usage;
        }
        changed
    }

    /// Sends a command with a number of its own, and waits for the answer.
    async fn ask(&self, command: impl FnOnce(u64) -> LeaseCommand) -> Result<LeaseAnswer> {
        let (asker, answer) = oneshot::channel();
        let number = self.awaited.lock().await_answer(asker);
        self.outgoing.send(ControlMessage::Lease(command(number))).map_err(|_| server_is_gone())?;
        answer.await.map_err(|_| server_is_gone())
    }
}

#[async_trait]
impl LogService for ControlLink {
    /// Waits for a turn, and asks again if a longer wait than one read may have is over.
    async fn read(&self, from: Option<u64>, wait: Duration) -> Result<LogPage> {
        let ends = Instant::now() + wait.min(MAX_WAIT);
        loop {
            let permit = self.log_reads.clone().acquire_owned().await.map_err(|_| server_is_gone())?;
            let left = ends.saturating_duration_since(Instant::now());
            let wait_ms = u64::try_from(left.min(MAX_READ_WAIT).as_millis()).unwrap_or(u64::MAX);
            let (asker, answer) = oneshot::channel();
            let question = self.awaited.lock().await_log_lines(LogRead { asker, _permit: permit });
            self.send(ControlMessage::Logs(LogCommand { question, from, wait_ms }));
            let page = answer.await.map_err(|_| server_is_gone())??;
            if !page.lines.is_empty() || left <= MAX_READ_WAIT {
                return Ok(page);
            }
        }
    }
}

#[async_trait]
impl LeaseService for ControlLink {
    async fn request(&self, request: LeaseRequest) -> Result<QueuedRequest> {
        let (granted, grant) = watch::channel(None);
        let command = |number| {
            // Before the command is sent: the grant may come before the answer.
            self.awaited.lock().grants.insert(number, granted);
            LeaseCommand::Request { number, request }
        };
        match self.ask(command).await? {
            LeaseAnswer::Queued { number } => Ok(QueuedRequest { number, grant }),
            LeaseAnswer::Refused { number, error } => {
                self.awaited.lock().grants.remove(&number);
                Err(error)
            }
            _ => Err(wrong_answer()),
        }
    }

    fn release(&self, number: u64) {
        let granted = self.awaited.lock().grants.remove(&number);
        drop(granted);
        self.send(ControlMessage::Lease(LeaseCommand::Release { number }));
    }

    async fn ahead(&self, number: u64) -> Result<u64> {
        match self.ask(|question| LeaseCommand::Ahead { question, number }).await? {
            LeaseAnswer::Ahead { ahead, .. } => Ok(ahead),
            _ => Err(wrong_answer()),
        }
    }

    async fn leased_devices(&self) -> Result<Vec<LeasedDevice>> {
        match self.ask(|question| LeaseCommand::LeasedDevices { question }).await? {
            LeaseAnswer::LeasedDevices { devices, .. } => Ok(devices),
            _ => Err(wrong_answer()),
        }
    }

    fn poll_use(&self, device: Device, waker: &Waker) -> Poll<Option<DeviceUse>> {
        // The server tells of a reservation before the holder learns of its lease, and the message
        // may still be in the socket. An error is seen by the task as well, and ends the process.
        let _ = self.take_answers();
        let mut uses = self.device_uses.lock();
        let is_reserved = uses.reserved.as_ref().map(|devices| devices.contains(&device));
        if is_reserved != Some(false) {
            uses.waker = Some(waker.clone());
            return is_reserved.map_or(Poll::Pending, |_| Poll::Ready(None));
        }
        *uses.counts.entry(device).or_default() += 1;
        Poll::Ready(Some(DeviceUse::counted(ProcessUse { link: self.this.clone(), device })))
    }
}

/// Use of a device by a request of this process, until dropped.
struct ProcessUse {
    link: Weak<ControlLink>,
    device: Device,
}

impl Drop for ProcessUse {
    fn drop(&mut self) {
        // Without the link this process ends.
        let Some(link) = self.link.upgrade() else { return };
        let mut uses = link.device_uses.lock();
        let Entry::Occupied(mut count) = uses.counts.entry(self.device) else { return };
        *count.get_mut() -= 1;
        if *count.get() > 0 {
            return;
        }
        count.remove();
        if uses.reserved.as_ref().is_some_and(|devices| devices.contains(&self.device)) {
            let (list, devices) = (uses.list, vec![self.device]);
            link.send(ControlMessage::Lease(LeaseCommand::Unused { list, devices }));
        }
    }
}

fn server_is_gone() -> RpcError {
    RpcError::new(ErrorKind::PeerLost, "the server of this session is gone")
}

fn wrong_answer() -> RpcError {
    RpcError::internal("the server has answered another question")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A regression: a read beyond the places was refused or never answered, and those that a
    /// client had cancelled kept theirs for half a minute.
    #[tokio::test]
    async fn reads_of_the_log_wait_for_their_turn() {
        let (server, process) = net::UnixDatagram::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let server = UnixDatagram::from_std(server).unwrap();
        let (link, queue) = ControlLink::new(process).unwrap();
        let running = tokio::spawn({
            let link = link.clone();
            async move { link.run(queue).await }
        });
        let mut buffer = vec![0; ControlMessage::MAX_LEN];
        let mut next = async || {
            let len = server.recv(&mut buffer).await.unwrap();
            match ControlMessage::from_bytes(&buffer[..len]) {
                Some(ControlMessage::Logs(command)) => command,
                _ => panic!("no read of the log"),
            }
        };
        let answer = async |question, line: Option<&str>| {
            let mut page = LogPage::default();
            page.lines.extend(line.map(str::to_owned));
            let answer = ControlAnswer::Logs(LogAnswer { question, outcome: Ok(page) });
            server.send(&answer.to_bytes()).await.unwrap();
        };
        let start = |number: usize| {
            let reading = (0..number).map(|_| {
                let link = link.clone();
                tokio::spawn(async move { link.read(None, MAX_WAIT).await.unwrap() })
            });
            reading.collect::<Vec<_>>()
        };
        // Of those that wait for long the server is asked for a part.
        let cancelled = start(MAX_READS);
        let mut questions = Vec::new();
        for _ in 0..MAX_READS {
            let command = next().await;
            assert!(u128::from(command.wait_ms) <= MAX_READ_WAIT.as_millis());
            questions.push(command.question);
        }
        cancelled.iter().for_each(tokio::task::JoinHandle::abort);
        for reading in cancelled {
            assert!(reading.await.unwrap_err().is_cancelled());
        }
        assert_eq!(link.log_reads.available_permits(), 0);
        let readings = start(2 * MAX_READS);
        // Those that were cancelled are answered, and others have their turn, which have to ask
        // again.
        for question in questions {
            answer(question, None).await;
            let again = next().await;
            answer(again.question, None).await;
        }
        for _ in 0..2 * MAX_READS {
            let question = next().await.question;
            answer(question, Some("line")).await;
        }
        for reading in readings {
            assert_eq!(reading.await.unwrap().lines, ["line"]);
        }
        assert_eq!(link.log_reads.available_permits(), MAX_READS);
        running.abort();
    }
}

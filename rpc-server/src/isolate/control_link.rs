//! The link of a session process to its server beside the session: usage reports, questions,
//! leases, and log lines.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::limits::GrantingQuota;
use rpc_core::{Device, DeviceUse, ErrorKind, Result, RpcError, Usage, clock};
use rpc_transports::EndReport;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::Instant;

use super::messages::{
    ControlAnswer, ControlMessage, LeaseAnswer, LeaseCommand, LogAnswer, LogCommand, Report, SessionNotice,
    SessionOrder,
};
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
    socket: Mutex<Socket>,
    /// Runtime of the task that resumes requests.
    runtime: Handle,
    /// Orders about the session that this process serves over the socket of its client.
    orders: UnboundedSender<PassedOrder>,
}

/// Waits until a socket is ready, on the calling thread.
fn wait(socket: &net::UnixDatagram, events: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(socket, events)], Some(&left)) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The server's quota of queued bytes, for the session of this process.
#[derive(Debug)]
pub(super) struct QueueOfServer {
    pub(super) link: Arc<ControlLink>,
    granted: AtomicU64,
}

impl QueueOfServer {
    pub(super) fn new(link: Arc<ControlLink>) -> Self {
        Self { link, granted: AtomicU64::new(0) }
    }
}

impl GrantingQuota for QueueOfServer {
    fn resize(&self, bytes: u64, lasting: bool) -> Result<()> {
        // The quota that this is part of makes one call at a time.
        if bytes > self.granted.load(Ordering::Relaxed) {
            self.link.request_queue(bytes, lasting)?;
        } else {
            self.link.give_back_queue(bytes);
        }
        self.granted.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl fmt::Debug for ControlLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlLink")
    }
}

/// Order about the session, with the descriptors that came with it.
pub(super) type PassedOrder = (SessionOrder, Vec<OwnedFd>);

/// Queues of a link: that of the messages for [`ControlLink::run`], and that of the orders.
pub(super) struct LinkQueues {
    pub(super) messages: UnboundedReceiver<ControlMessage>,
    pub(super) orders: UnboundedReceiver<PassedOrder>,
}

/// Socket to the server, and a buffer for what it receives.
type Socket = (net::UnixDatagram, Vec<u8>);

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
    /// Last answer about queued bytes, with the number of its request.
    queued: Option<(u64, Result<()>)>,
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
    /// Returns a link and its queues. Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// The system refuses.
    pub(super) fn new(socket: net::UnixDatagram) -> io::Result<(Arc<Self>, LinkQueues)> {
        socket.set_nonblocking(true)?;
        let (outgoing, messages) = unbounded_channel();
        let (orders, ordered) = unbounded_channel();
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
            orders,
        });
        Ok((link, LinkQueues { messages, orders: ordered }))
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

    /// Sends a message at once, in front of those in the queue.
    fn send_now((socket, _): &Socket, message: &ControlMessage, deadline: Instant) -> io::Result<()> {
        let bytes = message.to_bytes();
        loop {
            match socket.send(&bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(socket, PollFlags::OUT, deadline)?,
                sent => return sent.map(drop),
            }
        }
    }

    /// Tells the server how many bytes are queued, which are fewer than before.
    fn give_back_queue(&self, bytes: u64) {
        let notice = SessionNotice::Queue { bytes, lasting: false, number: None };
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        // A server that is gone needs nothing back.
        let _ = Self::send_now(&self.socket.lock(), &ControlMessage::Session(notice), deadline);
    }

    /// Requests memory of the server's quota for queued bytes, and waits for the answer.
    fn request_queue(&self, bytes: u64, lasting: bool) -> Result<()> {
        let failed = |error: io::Error| RpcError::new(ErrorKind::Io, error.to_string()).context("no memory is granted");
        // Locked all the time, so that no other thread takes the answer out of the socket while
        // this one waits for it there.
        let mut socket = self.socket.lock();
        let number = {
            let mut awaited = self.awaited.lock();
            awaited.last_number += 1;
            awaited.last_number
        };
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let notice = SessionNotice::Queue { bytes, lasting, number: Some(number) };
        Self::send_now(&socket, &ControlMessage::Session(notice), deadline).map_err(failed)?;
        loop {
            match self.take_answers_of(&mut socket) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(failed(error)),
                _ => {}
            }
            let answer = self.awaited.lock().queued.take();
            if let Some((_, outcome)) = answer.filter(|(answered, _)| *answered == number) {
                return outcome;
            }
            wait(&socket.0, PollFlags::IN, deadline).map_err(failed)?;
        }
    }

    /// Tells the server that the session ends, before anything that is sent as its objects are
    /// freed.
    pub(super) fn session_ends(&self) {
        self.send(ControlMessage::Session(SessionNotice::Ending));
    }

    /// Sends the report on the end of the session. The process may end afterwards.
    pub(super) async fn report_end(&self, report: EndReport, functions: Vec<String>) -> io::Result<()> {
        let socket = UnixDatagram::from_std(self.socket.lock().0.try_clone()?)?;
        socket.send(&ControlMessage::ended(report, functions).to_bytes()).await.map(drop)
    }

    /// Acts on the answers that have arrived. Ends with an error, `WouldBlock` when there is none
    /// any more.
    fn take_answers(&self) -> io::Result<()> {
        self.take_answers_of(&mut self.socket.lock())
    }

    fn take_answers_of(&self, (socket, buffer): &mut Socket) -> io::Result<()> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SessionOrder::DESCRIPTORS))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let len = {
                let buffer = &mut [IoSliceMut::new(buffer)];
                recvmsg(&*socket, buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes
            };
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match ControlAnswer::from_bytes(&buffer[..len]) {
                Some(ControlAnswer::Order(SessionOrder::Queued { number, outcome })) => {
                    self.awaited.lock().queued = Some((number, outcome));
                }
                Some(ControlAnswer::Order(order)) => {
                    let passed = ancillary.drain().filter_map(|message| match message {
                        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                        _ => None,
                    });
                    // Without a receiver the process is about to end.
                    let _ = self.orders.send((order, passed.flatten().collect()));
                }
                Some(answer) => self.take_answer(answer),
                None => {}
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
            // Handled where its descriptors are.
            ControlAnswer::Order(_) => {}
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
        let (link, LinkQueues { messages: queue, .. }) = ControlLink::new(process).unwrap();
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

//! Channels inside one process: the reference that the network transports must match.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;

use crate::address::{Address, AddressError, is_name};
use crate::channel::{Channel, Machine, Peer};
use crate::error::TransportError;
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, Dial, Properties, Reach, Transport};

/// Creates the two ends of one pipe: bytes written into one end are read from the other.
///
/// Each direction holds up to 256 KiB, about as much as the buffer of a socket. Beyond that, writes
/// wait. Dropping an end is the end of the stream for the other.
#[must_use]
pub fn duplex() -> (Channel, Channel) {
    named_duplex("memory:".into())
}

fn named_duplex(peer: String) -> (Channel, Channel) {
    let (left, right) = tokio::io::duplex(CAPACITY_BYTES);
    let peer = Peer::new(peer).on(Machine::This);
    (Channel::new(left, peer.clone()), Channel::new(right, peer))
}

const CAPACITY_BYTES: usize = 256 * 1024;

/// The transport of `memory:` addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory;

impl Transport for Memory {
    fn schemes(&self) -> &[&str] {
        &["memory"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        name_of(at).map(|_| Properties::plain(Reach::Process))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, with))
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        Some(to.clone())
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(bind(at, with))
    }
}

async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
    let name = name_of(address)?;
    let refused = || {
        let error = io::Error::from(io::ErrorKind::ConnectionRefused);
        TransportError::from_io(address.to_string(), error)
    };
    let listener = listeners().get(name).cloned().ok_or_else(refused)?;
    let (ours, theirs) = named_duplex(address.to_string());
    let limit = options.limit();
    match tokio::time::timeout(limit, listener.send(theirs)).await {
        Ok(Ok(())) => Ok(ours),
        Ok(Err(_)) => Err(refused()),
        Err(_) => Err(TransportError::TimedOut { address: address.to_string(), limit }),
    }
}

async fn bind(address: &Address, options: &Bind) -> Result<Listener, TransportError> {
    let name = name_of(address)?;
    let backlog = usize::try_from(options.backlog).unwrap_or(usize::MAX);
    let (sender, receiver) = mpsc::channel(backlog.clamp(1, BACKLOG_MAX));
    match listeners().entry(name.into()) {
        Entry::Occupied(_) => {
            let error = io::Error::from(io::ErrorKind::AddrInUse);
            return Err(TransportError::from_io(address.to_string(), error));
        }
        Entry::Vacant(place) => place.insert(sender),
    };
    let source = MemoryListener { name: name.into(), receiver };
    Ok(Listener::new(address.clone(), source))
}

fn name_of(address: &Address) -> Result<&str, AddressError> {
    let problem = "its name must consist of letters, digits and -._~:@+=; write for example memory:test-1";
    match address.rest() {
        Some(name) if is_name(name) && address.parameters().next().is_none() && address.key().is_none() => Ok(name),
        _ => Err(AddressError::invalid(address, problem)),
    }
}

impl Address {
    /// Returns the address of a listener inside this process.
    ///
    /// # Errors
    ///
    /// [`AddressError::Invalid`] if the name is empty or has characters other than those of a key.
    pub fn memory(name: &str) -> Result<Self, AddressError> {
        let address = Self::opaque("memory", name)?;
        name_of(&address)?;
        Ok(address)
    }
}

/// Longest backlog, as long as kernels allow for sockets.
const BACKLOG_MAX: usize = 4096;

/// Source of a listener's channels. Holds its name in [`LISTENERS`] until dropped.
struct MemoryListener {
    name: Arc<str>,
    receiver: mpsc::Receiver<Channel>,
}

impl Accept for MemoryListener {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let next = self.receiver.poll_recv(cx);
        next.map(|channel| channel.ok_or_else(|| io::ErrorKind::BrokenPipe.into()))
    }
}

impl Drop for MemoryListener {
    fn drop(&mut self) {
        // The entry belongs to this listener: a name is given to one listener at a time.
        listeners().remove(&self.name);
    }
}

type Listeners = HashMap<Arc<str>, mpsc::Sender<Channel>>;

/// Queues of the listeners, by name.
static LISTENERS: LazyLock<Mutex<Listeners>> = LazyLock::new(Mutex::default);

fn listeners() -> MutexGuard<'static, Listeners> {
    LISTENERS.lock()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn address(name: &str) -> Address {
        Address::memory(name).unwrap()
    }

    async fn listen(name: &str, backlog: u32) -> Result<Listener, TransportError> {
        let options = Bind { backlog, ..Default::default() };
        bind(&address(name), &options).await
    }

    async fn connect(name: &str) -> Result<Channel, TransportError> {
        dial(&address(name), &Dial::default()).await
    }

    #[tokio::test]
    async fn bytes_cross_both_ways_and_a_drop_is_the_end() {
        let mut listener = listen("both-ways", 1).await.unwrap();
        let mut near = connect("both-ways").await.unwrap();
        let mut far = listener.accept().await.unwrap();
        near.io_mut().write_all(b"ping").await.unwrap();
        let mut buffer = [0; 4];
        far.io_mut().read_exact(&mut buffer).await.unwrap();
        far.io_mut().write_all(&buffer).await.unwrap();
        drop(far);
        let mut answer = Vec::new();
        near.io_mut().read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"ping");
        assert_eq!(near.peer(), "memory:both-ways");
    }

    #[tokio::test]
    async fn dialling_a_name_without_a_listener_is_refused() {
        let error = connect("nobody").await.unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_name_is_taken_until_its_listener_is_dropped() {
        let listener = listen("taken", 1).await.unwrap();
        let error = listen("taken", 1).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");
        drop(listener);
        listen("taken", 1).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_backlog_times_the_dialler_out() {
        let _listener = listen("full", 1).await.unwrap();
        let _waiting = connect("full").await.unwrap();
        let error = connect("full").await.unwrap_err();
        let TransportError::TimedOut { limit, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(limit, Duration::from_secs(10));
    }

    #[tokio::test]
    async fn a_channel_never_accepted_ends_with_the_listener() {
        let listener = listen("unaccepted", 1).await.unwrap();
        let mut near = connect("unaccepted").await.unwrap();
        drop(listener);
        assert_eq!(near.io_mut().read(&mut [0]).await.unwrap(), 0);
    }
}

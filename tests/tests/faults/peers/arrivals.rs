//! Bytes that the kernel has received for a stopped process, from `/proc/net`.

use std::collections::HashMap;
use std::fs;

use rpc_transports::Address;

/// Size of a QUIC client's first datagram in bytes, which the protocol prescribes.
const FIRST_DATAGRAM: u64 = 1200;

/// Connections and bytes that have arrived at a listener whose process is stopped, since a moment.
pub struct Arrivals {
    listener: Listener,
    before: HashMap<String, u64>,
}

enum Listener {
    Tcp(u16),
    Udp(u16),
    Unix(String),
}

impl Arrivals {
    /// Remembers what has arrived so far. The process must have stopped.
    pub fn at(address: &str) -> Self {
        let address: Address = address.parse().unwrap();
        let listener = match (address.scheme(), address.port()) {
            ("quic", Some(port)) => Listener::Udp(port),
            (_, Some(port)) => Listener::Tcp(port),
            _ => Listener::Unix(address.rest().unwrap().to_owned()),
        };
        let before = listener.received();
        Self { listener, before }
    }

    /// Returns true once a new connection is there, with bytes where the kernel tells. A socket of
    /// QUIC serves all connections: there it is so much more that a client has begun.
    pub fn have_come(&self) -> bool {
        let received = self.listener.received();
        let mut received = received.iter();
        match self.listener {
            Listener::Udp(_) => received.any(|(socket, bytes)| {
                let had = self.before.get(socket).copied().unwrap_or_default();
                *bytes >= had + FIRST_DATAGRAM
            }),
            _ => received.any(|(connection, bytes)| *bytes > 0 && !self.before.contains_key(connection)),
        }
    }
}

impl Listener {
    /// Returns the number of received bytes that wait to be read, by connection. A Unix socket has
    /// no such number: it has the connections, each as one byte.
    fn received(&self) -> HashMap<String, u64> {
        match self {
            Self::Tcp(port) => inet_sockets("tcp", *port, Some("01")),
            Self::Udp(port) => inet_sockets("udp", *port, None),
            Self::Unix(path) => {
                let table = fs::read_to_string("/proc/net/unix").unwrap();
                let of_listener = table.lines().filter(|line| line.ends_with(path));
                // The last number in front of the path is the socket's inode.
                of_listener.map(|line| (line.to_owned(), 1)).collect()
            }
        }
    }
}

/// Returns the bytes that wait at the sockets of a local port, by their local and remote addresses.
fn inet_sockets(protocol: &str, port: u16, state: Option<&str>) -> HashMap<String, u64> {
    let tables = ["", "6"].map(|version| fs::read_to_string(format!("/proc/net/{protocol}{version}")));
    let mut sockets = HashMap::new();
    for line in tables.iter().flatten().flat_map(|table| table.lines().skip(1)) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, local, remote, in_state, queues, ..] = fields[..] else { continue };
        if !local.ends_with(&format!(":{port:04X}")) || state.is_some_and(|state| state != in_state) {
            continue;
        }
        let received = queues.split_once(':').unwrap().1;
        sockets.insert(format!("{local} {remote}"), u64::from_str_radix(received, 16).unwrap());
    }
    sockets
}

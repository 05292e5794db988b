//! The contract of sessions over WebSockets: directly, encrypted, and behind hops.

use rpc_conformance::conformance;
use rpc_conformance::fixture::{Link, Remote};
use rpc_transports::Transports;
use rpc_websocket::{Proxies, WebSocket};

fn along<const N: usize>(links: [Link; N]) -> Remote {
    Remote::along(links).transports(Transports::default().with(WebSocket::new().proxies(Proxies::none())))
}

fn ws() -> Link {
    Link::at("ws://127.0.0.1:0")
}

fn wss() -> Link {
    Link::at("wss://127.0.0.1:0").encrypted()
}

conformance!(direct = along([ws()]));
conformance!(encrypted = along([wss()]));
// The form of the client makes no difference behind its first link.
conformance!(through_two_hops = along([ws(), Link::tcp(), wss()]), blocking: #[cfg(feature = "long")]);

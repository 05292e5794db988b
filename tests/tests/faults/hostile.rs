//! Hostile peers: they claim false identities, intercept, stall, flood, forge and send rubbish.
//! None gets in, none makes the server grow, and no good client notices.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use rpc_core::client::Files;
use rpc_core::proto::{FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, Role};
use rpc_core::{DataType, Device, ErrorKind, Lane, Operation, Packed, RemoteObject, Request, RpcError};
use rpc_server::config::ServeConfig;
use rpc_server::server::RpcServer;
use rpc_server::server::SessionWorkspace;
use rpc_tests::forwarder::{Random, UdpForwarder, Weather};
use rpc_tests::functions;
use rpc_tests::harness::on_thread;
use rpc_transports::{
    Access, Address, Bind, Certificate, ClientCertificates, ClientTls, ConnectError, Connector, Dial, ServeOptions,
    ServerTls, Tokens, TransportError, WireLimits,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinHandle;

use crate::peers::forge;
use crate::peers::raw::{
    OVER, Raw, cut_off, error_in, frame, frames, function_in, last_word, mutated, request, trickle, was_accepted,
};
use crate::peers::site::{Authority, GoodClient, SECRET, Site, TIME_LIMIT, soon, tokens, works};
use crate::peers::{self, Transport, within};

/// Makes a test for each transport.
macro_rules! each {
    ($($test:ident: $($name:ident($transport:ident))*;)*) => {$(
        mod $test {
            use super::*;

            $(#[test]
            fn $name() {
                peers::run(|| super::$test(Transport::$transport));
            })*
        }
    )*};
}

/// Makes tests that do not depend on the transport.
macro_rules! once {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        fn $name() {
            peers::run(|| $body);
        }
    )*};
}

mod flooding;
mod forging;
mod identities;
mod rubbish;
mod stalling;

/// Time limit of handshakes in tests that draw one out.
const HANDSHAKE: Duration = Duration::from_secs(2);

fn by_token() -> Access {
    Access { anonymous: false, tokens: tokens(SECRET), certificates: false }
}

fn with_token() -> ServeOptions {
    ServeOptions { access: by_token(), ..ServeOptions::default() }
}

/// Byte pipe that records the written bytes.
struct Recorder<I> {
    io: I,
    written: Arc<Mutex<Vec<u8>>>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Recorder<I> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Recorder<I> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        if let Poll::Ready(Ok(count)) = &written {
            self.written.lock().unwrap().extend_from_slice(&bytes[..*count]);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Returns the bytes that a client with the token writes, inside of any encryption, until it has
/// called a function.
async fn recorded(site: &Site) -> Vec<u8> {
    let raw = Raw::dial(site).await;
    let written = Arc::new(Mutex::new(Vec::new()));
    let channel = raw.channel.map_io(|io| Recorder { io, written: written.clone() });
    let session = soon("it connects", site.with_token().connect_channel(channel)).await.unwrap();
    works(&session).await;
    let written = written.lock().unwrap();
    written.clone()
}

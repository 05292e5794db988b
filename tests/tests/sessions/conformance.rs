//! The conformance suite over every kind of session. A new transport is one more line for each way to it.

use rpc_tests::conformance;
use rpc_tests::fixture::Transport::{Quic, Tcp, Tls, Unix};
use rpc_tests::fixture::{Local, Remote, Transport};

/// The program that `exec:` addresses start.
const ORIGIN: Transport = Transport::Exec(env!("CARGO_BIN_EXE_origin"));

conformance!(local = Local::new());
conformance!(local_with_a_runtime = Local::spawning());
conformance!(memory = Remote::direct(Transport::Memory));
conformance!(memory_through_a_hop = Remote::through(1, Transport::Memory));
conformance!(tcp = Remote::direct(Transport::Tcp));
conformance!(tcp_through_a_hop = Remote::through(1, Transport::Tcp));
conformance!(tls = Remote::direct(Transport::Tls));
conformance!(quic = Remote::direct(Transport::Quic));
conformance!(quic_through_a_hop = Remote::through(1, Transport::Quic));
conformance!(unix = Remote::direct(Transport::Unix));
conformance!(unix_through_a_hop = Remote::through(1, Transport::Unix));
conformance!(exec = Remote::direct(super::ORIGIN));
conformance!(exec_through_a_hop = Remote::through(1, super::ORIGIN));

// Two hops, and each transport behind each other one, and behind itself.
conformance!(tcp_tcp_tls = Remote::along(&[Tcp, Tcp, Tls]));
conformance!(tls_tcp_quic = Remote::along(&[Tls, Tcp, Quic]));
conformance!(quic_tcp_unix = Remote::along(&[Quic, Tcp, Unix]));
conformance!(unix_tls_tls = Remote::along(&[Unix, Tls, Tls]));
conformance!(tls_quic_tls = Remote::along(&[Tls, Quic, Tls]));
conformance!(tls_unix_quic = Remote::along(&[Tls, Unix, Quic]));
conformance!(quic_quic_unix = Remote::along(&[Quic, Quic, Unix]));
conformance!(unix_unix_tcp = Remote::along(&[Unix, Unix, Tcp]));

// Four hops, likewise.
conformance!(tcp_tcp_tls_tcp_quic = Remote::along(&[Tcp, Tcp, Tls, Tcp, Quic]));
conformance!(quic_tcp_unix_tls_tls = Remote::along(&[Quic, Tcp, Unix, Tls, Tls]));
conformance!(tls_quic_tls_unix_quic = Remote::along(&[Tls, Quic, Tls, Unix, Quic]));
conformance!(quic_quic_unix_unix_tcp = Remote::along(&[Quic, Quic, Unix, Unix, Tcp]));

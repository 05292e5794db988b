//! The conformance suite over every kind of session. A new transport needs one line for each kind
//! of route. `ssh.rs` runs it over `ssh://`.

use rpc_conformance::fixture::{Link, Local, Remote, Retrying};
use rpc_conformance::{clauses, conformance};

/// Returns the link to the program that `exec:` addresses start.
fn program() -> Link {
    Link::program(env!("CARGO_BIN_EXE_origin"))
}

/// Makes tests of the suite's clauses and of those about native modules, with both forms of the
/// client.
macro_rules! every_clause {
    ($($(#[$attribute:meta])* $name:ident = $fixture:expr;)*) => {$(
        $(#[$attribute])*
        mod $name {
            use super::*;

            conformance!(contract = $fixture);
            clauses! { modules = $fixture.registry(rpc_tests::native::registry), in rpc_tests;
                native {
                    functions_of_native_modules_are_functions
                    native_code_calls_closures_of_the_client
                }
            }
        }
    )*};
}

/// Makes the same tests, without those of the blocking form unless many chains are wanted: the form
/// of the client makes no difference behind its first link.
macro_rules! every_async_clause {
    ($($(#[$attribute:meta])* $name:ident = $fixture:expr;)*) => {$(
        $(#[$attribute])*
        mod $name {
            use super::*;

            conformance!(contract = $fixture, blocking: #[cfg(feature = "long")]);
            clauses! {
                modules = $fixture.registry(rpc_tests::native::registry), in rpc_tests,
                blocking: #[cfg(feature = "long")];
                native {
                    functions_of_native_modules_are_functions
                    native_code_calls_closures_of_the_client
                }
            }
        }
    )*};
}

/// Makes tests with a model that TVM has compiled. Loading TVM takes a second each time, so that
/// there are few of them.
macro_rules! compiled_model {
    ($($name:ident = $fixture:expr;)*) => {
        mod compiled_model {
            use super::*;

            $(clauses! { $name = $fixture.registry(rpc_tests::native::registry), in rpc_tests;
                native { a_compiled_model_gives_the_numbers_that_it_gives_at_home }
            })*
        }
    };
}

every_clause! {
    local = Local::new();
    local_with_a_runtime = Local::spawning();
    memory = Remote::direct(Link::memory());
    tcp = Remote::direct(Link::tcp());
    tcp_through_a_hop = Remote::through(1, Link::tcp());
    tls = Remote::direct(Link::tls());
    quic = Remote::direct(Link::quic());
    unix = Remote::direct(Link::unix());
    unix_through_a_hop_with_spinning = Remote::through(1, Link::unix()).spinning();
    exec = Remote::direct(program());
}

every_async_clause! {
    // What these test is in chains above and below as well, but for one combination each.
    #[cfg(feature = "long")]
    memory_through_a_hop = Remote::through(1, Link::memory());
    #[cfg(feature = "long")]
    quic_through_a_hop = Remote::through(1, Link::quic());
    #[cfg(feature = "long")]
    unix_through_a_hop = Remote::through(1, Link::unix());
    #[cfg(feature = "long")]
    tcp_with_spinning = Remote::direct(Link::tcp()).spinning();
    #[cfg(feature = "long")]
    exec_through_a_hop = Remote::through(1, program());

    // Two hops. With the chain of four, each transport stands behind each other one, and where many
    // chains are wanted, behind itself.
    #[cfg(feature = "long")]
    tcp_tcp_tls = Remote::along([Link::tcp(), Link::tcp(), Link::tls()]);
    tls_tcp_quic = Remote::along([Link::tls(), Link::tcp(), Link::quic()]);
    quic_tcp_unix = Remote::along([Link::quic(), Link::tcp(), Link::unix()]);
    unix_tls_tls = Remote::along([Link::unix(), Link::tls(), Link::tls()]);
    #[cfg(feature = "long")]
    tls_quic_tls = Remote::along([Link::tls(), Link::quic(), Link::tls()]);
    #[cfg(feature = "long")]
    tls_unix_quic = Remote::along([Link::tls(), Link::unix(), Link::quic()]);
    #[cfg(feature = "long")]
    quic_quic_unix = Remote::along([Link::quic(), Link::quic(), Link::unix()]);
    #[cfg(feature = "long")]
    unix_unix_tcp = Remote::along([Link::unix(), Link::unix(), Link::tcp()]);

    // Four hops. Each chain has other neighbours; the four together take a minute and a half.
    #[cfg(feature = "long")]
    tcp_tcp_tls_tcp_quic =
        Remote::along([Link::tcp(), Link::tcp(), Link::tls(), Link::tcp(), Link::quic()]);
    #[cfg(feature = "long")]
    quic_tcp_unix_tls_tls =
        Remote::along([Link::quic(), Link::tcp(), Link::unix(), Link::tls(), Link::tls()]);
    tls_quic_tls_unix_quic =
        Remote::along([Link::tls(), Link::quic(), Link::tls(), Link::unix(), Link::quic()]);
    #[cfg(feature = "long")]
    quic_quic_unix_unix_tcp =
        Remote::along([Link::quic(), Link::quic(), Link::unix(), Link::unix(), Link::tcp()]);
}

/// A session that repeats requests keeps the contract of the session inside.
mod retrying {
    use super::*;

    conformance!(local = Retrying::new(Local::spawning()), blocking: #[cfg(feature = "long")]);
    conformance!(tcp = Retrying::new(Remote::direct(Link::tcp())), blocking: #[cfg(feature = "long")]);
}

compiled_model! {
    local = Local::new();
    tcp = Remote::direct(Link::tcp());
    quic_through_a_hop = Remote::through(1, Link::quic());
    exec = Remote::direct(program());
    tls_quic_tls_unix_quic =
        Remote::along([Link::tls(), Link::quic(), Link::tls(), Link::unix(), Link::quic()]);
}

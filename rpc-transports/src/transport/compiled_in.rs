//! The default registry: the transports and session openers that this crate was compiled with.

use std::sync::LazyLock;

use super::Transports;
use crate::connect::local::Local;
use crate::tracker::TrackerOpener;
use crate::transports;

impl Default for Transports {
    fn default() -> Self {
        static COMPILED_IN: LazyLock<Transports> = LazyLock::new(|| {
            let transports = Transports::empty().with_opener(Local).with_opener(TrackerOpener);
            #[cfg(feature = "exec")]
            let transports = transports.with(transports::exec::Exec::new()).with(transports::ssh::Ssh::new());
            let transports = transports.with(transports::memory::Memory);
            #[cfg(feature = "unix")]
            let transports = transports.with(transports::unix::Unix::new());
            #[cfg(feature = "quic")]
            let transports = transports.with(transports::quic::Quic);
            #[cfg(feature = "tls")]
            let transports = transports.with(transports::tls::Tls);
            #[cfg(feature = "tcp")]
            let transports = transports.with(transports::tcp::Tcp);
            transports
        });
        COMPILED_IN.clone()
    }
}

//! [`Session`], the client's handle of a session, and its options. Its operations are in the other
//! files of this folder.
//!
//! Every operation returns an [`Action`], which does nothing until it is awaited, waited for on a
//! plain thread ([`Action::wait`]), or started. All forms are the same code.
//!
//! ```
//! use rpc_core::{LocalSession, Registry, Session};
//!
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! let session = Session::new(LocalSession::new(registry));
//! let add = session.function::<(i64, i64), i64>("add").wait()?;
//! assert_eq!(add.call((1, 2)).wait()?, 3);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```
//!
//! In the other direction, a function of the session may call a closure of the client, see
//! [`crate::client::callbacks`]:
//!
//! ```
//! use rpc_core::{Context, Function, LocalSession, Registry, Result, Session};
//!
//! let registry = Registry::new();
//! registry.add("train", |context: Context, epochs: i64, report: Function| -> Result<()> {
//!     for epoch in 1..=epochs {
//!         context.call(&report, vec![epoch.into(), (1.0 / epoch as f64).into()])?;
//!     }
//!     Ok(())
//! });
//! let session = Session::new(LocalSession::new(registry));
//! let (sender, losses) = std::sync::mpsc::channel();
//! let report = session.callback(move |_epoch: i64, loss: f64| sender.send(loss)).wait()?;
//! session.get_function("train").wait()?.call::<()>((3, &report)).wait()?;
//! drop(report);
//! assert_eq!(losses.iter().collect::<Vec<_>>(), [1.0, 0.5, 1.0 / 3.0]);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```

use std::fmt;

use crate::error::{ErrorKind, RpcError};
use crate::reply::Submission;
use crate::session::{InPlaceWrite, Lane, Request, RpcSession, SharedSession, release};
use crate::value::{TensorRef, Value};

/// A session of any kind, with all operations. Cheap to clone; clones are the same session.
#[derive(Clone)]
pub struct Session(SharedSession);

impl Session {
    /// Makes the operations of `session` available.
    ///
    /// Objects belong to the session that created them, and all of its handles know them: clones of
    /// this, another `Session` of the same [`SharedSession`], and other clones of a session that
    /// [is cheap to clone](RpcSession::into_shared).
    pub fn new(session: impl RpcSession) -> Self {
        Self(session.into_shared())
    }

    /// Returns the session itself, to submit requests to it or to wrap it.
    pub fn shared(&self) -> &SharedSession {
        &self.0
    }

    /// Returns true if the session's objects live in this process.
    pub fn is_local(&self) -> bool {
        self.0.is_local()
    }

    /// Returns true if others can neither read nor change the traffic between this process and the
    /// first peer on the way to the objects, as with TLS and QUIC. Makes no statement about the
    /// links behind that peer.
    pub fn is_encrypted(&self) -> bool {
        self.0.is_encrypted()
    }

    /// Resolves when the session has ended, to the error that ended it.
    pub async fn ended(&self) -> RpcError {
        match self.0.ended().reply().await {
            Err(error) => error,
            Ok(_) => RpcError::new(ErrorKind::Closed, "the session has ended"),
        }
    }

    /// Frees all objects that a raw value names.
    pub fn release(&self, value: &Value) {
        release(&self.0, value);
    }
}

impl From<SharedSession> for Session {
    fn from(session: SharedSession) -> Self {
        Self(session)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Session")
    }
}

impl RpcSession for Session {
    fn submit(&self, request: Request) -> Submission {
        self.0.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.0)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn into_shared(self) -> SharedSession {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::{DataType, Device, ErrorKind, LocalSession, Registry, Session};

    #[test]
    fn every_handle_of_a_session_knows_its_objects() {
        let local = LocalSession::new(Registry::new());
        let session = Session::new(local.clone());
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[4]).wait().unwrap();
        let shared = session.shared().clone();
        for same in [
            session.clone(),
            Session::new(shared.clone()),
            Session::from(shared),
            Session::new(session.clone()),
            Session::new(local.clone()),
        ] {
            same.copy_to_remote(&tensor, vec![1; 4]).wait().unwrap();
            assert!(same.is_local());
        }
        // Another session, and a wrapper that is a session of its own.
        for other in [Session::new(LocalSession::new(Registry::new())), Session::from(Arc::new(local) as Arc<_>)] {
            let error = other.copy_from_remote(&tensor).wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidHandle);
        }
    }
}

//! Leases, from the client's side: exclusive use of a device among the sessions of a server.
//!
//! A server registers the functions `rpc.lease.*`; this module calls them. Requests for a device
//! are granted one at a time, by priority and then in the order of arrival. Sessions without a
//! lease share the device with its holder, unless the operator of the server says otherwise: then
//! they wait or are refused, and a lease begins when what they have begun has ended.
//!
//! ```no_run
//! # fn example(session: &rpc_core::Session) -> rpc_core::Result<()> {
//! use std::time::Duration;
//!
//! use rpc_core::Device;
//! use rpc_core::client::LeaseOptions;
//!
//! let options = LeaseOptions::default().max_duration(Duration::from_secs(600));
//! let lease = session.lease(Device::cuda(0), &options).wait()?;
//! println!("waited {:?}", lease.waited());
//! // Measure on the device here: no other session has a lease on it.
//! let held = lease.release().wait()?;
//! println!("held {held:?}");
//! # Ok(())
//! # }
//! ```

use std::time::{Duration, Instant};

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::files::call_by_name;
use crate::client::references::RemoteObject;
use crate::client::session::Session;
use crate::dlpack::Device;
use crate::error::Result;

/// Options of a request for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LeaseOptions {
    /// Maximum time of the lease. Default: that of the server, which is also the longest.
    pub max_duration: Option<Duration>,
    /// Priority of the request; the highest is granted first. Default 0.
    pub priority: i32,
}

impl LeaseOptions {
    /// Sets the maximum time of the lease, in whole milliseconds, rounded up.
    #[must_use]
    pub fn max_duration(mut self, max_duration: Duration) -> Self {
        self.max_duration = Some(max_duration);
        self
    }

    /// Sets the priority.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }
}

impl Session {
    /// Waits for a lease on `device`: until it is dropped or released, no other session of the
    /// server has one. Concurrent with other operations of the session.
    ///
    /// Dropping the action leaves the queue at once. A session may ask for several leases, also on
    /// one device, where they wait for each other like those of other sessions.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if the server offers no leases,
    /// [`ErrorKind::DeviceUnavailable`](crate::ErrorKind::DeviceUnavailable) if it has no such
    /// device, and [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded) if too many
    /// requests wait.
    pub fn lease(&self, device: Device, options: &LeaseOptions) -> Action<Lease> {
        let (session, lease_options) = (self.clone(), options.clone());
        ScopedAction::steps(async move |options: Options<'static>| {
            let request = request(&session, device, &lease_options, &options).await?;
            wait(request, &options).await
        })
        .concurrent()
    }

    /// Asks for a lease without waiting for it. The request is in the queue when this returns, and
    /// leaves it when it is dropped.
    ///
    /// # Errors
    ///
    /// As [`lease`](Self::lease).
    pub fn request_lease(&self, device: Device, options: &LeaseOptions) -> Action<LeaseRequest> {
        let (session, lease_options) = (self.clone(), options.clone());
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            request(&session, device, &lease_options, &options).await
        });
        action.concurrent()
    }
}

async fn request(
    session: &Session,
    device: Device,
    lease_options: &LeaseOptions,
    options: &Options<'_>,
) -> Result<LeaseRequest> {
    // Rounded up, so that a short time is not zero, which is refused.
    let max_ms = lease_options.max_duration.map(|max| u64::try_from(max.as_nanos().div_ceil(1_000_000)));
    let max_ms = max_ms.map(|millis| millis.unwrap_or(u64::MAX).min(i64::MAX as u64));
    let args = (device, lease_options.priority, max_ms);
    let object = call_by_name(session, options, "rpc.lease.request", args).await?;
    Ok(LeaseRequest { device, object })
}

async fn wait(request: LeaseRequest, options: &Options<'_>) -> Result<Lease> {
    let LeaseRequest { device, object } = request;
    let (waited_us, left_us) = call_by_name(&object.session(), options, "rpc.lease.wait", (&object,)).await?;
    let [waited, left] = [waited_us, left_us].map(Duration::from_micros);
    let granted = crate::clock::now();
    Ok(Lease { device, object, waited, granted, expires: granted.checked_add(left) })
}

/// A request for a lease, which waits in the queue of its device. Cheap to clone; dropping the last
/// clone leaves the queue.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    device: Device,
    object: RemoteObject,
}

impl LeaseRequest {
    /// Returns the device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Asks for the number of requests that are granted before this one as things stand, with the
    /// one that holds the device. Servers count up to 1,000. Zero once it is granted, and while it
    /// waits for nothing but the requests of other sessions that still use the device.
    ///
    /// # Errors
    ///
    /// Errors of the session.
    pub fn ahead(&self) -> Action<u64> {
        let object = self.object.clone();
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            call_by_name(&object.session(), &options, "rpc.lease.ahead", (&object,)).await
        });
        action.concurrent()
    }

    /// Waits for the lease, which ends when it is released, or when it and this request have been
    /// dropped. The request stays in the queue if the action is dropped. All results of one request
    /// are the same lease: releasing one ends it for all.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Cancelled`](crate::ErrorKind::Cancelled) if the lease has been released, and
    /// errors of the session.
    pub fn granted(&self) -> Action<Lease> {
        let request = self.clone();
        ScopedAction::steps(async move |options: Options<'static>| wait(request, &options).await).concurrent()
    }
}

/// Exclusive use of a device among the sessions of a server. Dropping it ends the lease, and never
/// blocks.
///
/// It also ends with the session. A lease that is held for longer than it may is taken back by
/// ending the session, with an error of the kind
/// [`SessionTimeout`](crate::ErrorKind::SessionTimeout).
#[derive(Debug)]
pub struct Lease {
    device: Device,
    object: RemoteObject,
    waited: Duration,
    granted: Instant,
    /// Time at which the session is ended, if a clock can express it.
    expires: Option<Instant>,
}

impl Lease {
    /// Returns the device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the time for which the request has waited at the server.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns the time since the grant became known here.
    pub fn held(&self) -> Duration {
        crate::clock::now().saturating_duration_since(self.granted)
    }

    /// Returns the time after which the server ends the session; zero if that time is over. Longer
    /// than at the server by the time that the grant took to come here.
    pub fn expires_in(&self) -> Duration {
        self.expires.map_or(Duration::MAX, |expires| expires.saturating_duration_since(crate::clock::now()))
    }

    /// Ends the lease. The result is the time for which it was held, as measured by the server.
    ///
    /// # Errors
    ///
    /// Errors of the session, which has ended the lease as well.
    pub fn release(self) -> Action<Duration> {
        let action = ScopedAction::steps(async move |options: Options<'static>| {
            let session = self.object.session();
            let held_us = call_by_name(&session, &options, "rpc.lease.release", (&self.object,)).await?;
            Ok(Duration::from_micros(held_us))
        });
        action.concurrent()
    }
}

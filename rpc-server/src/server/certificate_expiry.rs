//! Expiry of the server's certificate: a metric, and a warning that is repeated every day.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use crate::monitor::CertificateGauge;
use crate::pki::rfc3339;

/// Longest time before the end in which there are warnings. Certificates that are valid for less
/// than three times as long have them in the last third.
const SOON: Duration = Duration::from_secs(14 * 24 * 3600);

/// Interval of the warnings.
const WARNING_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Validity of the certificate that the server shows at present.
#[derive(Debug)]
pub(super) struct CertificateExpiry {
    validity: Mutex<Option<Range<SystemTime>>>,
    gauge: Option<CertificateGauge>,
}

impl CertificateExpiry {
    pub(super) fn new(validity: Option<Range<SystemTime>>, gauge: Option<CertificateGauge>) -> Arc<Self> {
        let this = Self { validity: Mutex::new(None), gauge };
        this.set(validity);
        Arc::new(this)
    }

    /// Sets the validity of a new certificate.
    pub(super) fn set(&self, validity: Option<Range<SystemTime>>) {
        if let (Some(gauge), Some(validity)) = (&self.gauge, &validity) {
            gauge.set(validity.end);
        }
        *self.validity.lock() = validity;
    }

    /// Warns each day on which the certificate ends soon, from now on.
    pub(super) async fn warn_daily(&self) {
        let mut ticks = tokio::time::interval(WARNING_INTERVAL);
        loop {
            ticks.tick().await;
            self.warn_if_soon();
        }
    }

    /// Warns if the certificate ends soon.
    pub(super) fn warn_if_soon(&self) {
        let validity = self.validity.lock().clone();
        let Some(validity) = validity else { return };
        let (now, expires) = (SystemTime::now(), rfc3339(validity.end));
        if validity.end <= now {
            tracing::error!(
                expires,
                "the server's certificate has expired, and clients refuse it: renew it (rpc-cli cert), and send SIGHUP"
            );
        } else if ends_soon(&validity, now) {
            tracing::warn!(expires, "the server's certificate expires soon: renew it (rpc-cli cert), and send SIGHUP");
        }
    }
}

fn ends_soon(validity: &Range<SystemTime>, now: SystemTime) -> bool {
    let third = validity.end.duration_since(validity.start).unwrap_or_default() / 3;
    validity.end.duration_since(now).unwrap_or_default() < third.min(SOON)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_soon_in_the_last_fortnight_or_third() {
        let (start, day) = (SystemTime::UNIX_EPOCH, Duration::from_secs(24 * 3600));
        let year = start..start + 365 * day;
        assert_eq!([350, 352, 366].map(|at| ends_soon(&year, start + at * day)), [false, true, true]);
        let week = start..start + 6 * day;
        assert_eq!([3, 5].map(|at| ends_soon(&week, start + at * day)), [false, true]);
    }
}

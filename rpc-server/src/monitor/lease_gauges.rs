//! Gauges and counters of leases.

use std::sync::Arc;

use super::Gauges;
use crate::leases::{LeaseTable, LeaseTotals};
use crate::tracker::millis;

const METRICS: &[(&str, &str)] = &[
    ("rpc_leases", "Leases on devices that sessions hold."),
    ("rpc_lease_requests_waiting", "Requests for leases that wait."),
    ("rpc_leases_granted_total", "Leases that were granted."),
    ("rpc_leases_overdue_total", "Sessions that were ended because a lease lasted too long."),
    ("rpc_lease_wait_milliseconds_total", "Time that granted requests have waited."),
    ("rpc_lease_held_milliseconds_total", "Time for which ended leases were held."),
];

/// Source of the numbers of one server's leases.
pub(crate) struct LeaseGauges(pub(crate) Arc<LeaseTable>);

impl Gauges for LeaseGauges {
    fn described(&self) -> &'static [(&'static str, &'static str)] {
        METRICS
    }

    fn now(&self) -> Vec<u64> {
        let LeaseTotals { held, waiting, granted, overdue, waited, held_time } = self.0.totals();
        vec![held, waiting, granted, overdue, millis(waited), millis(held_time)]
    }
}

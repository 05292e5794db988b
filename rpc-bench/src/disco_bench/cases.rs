//! Cases, measured on one session for each kind of launch and number of workers.

use std::time::{Duration, Instant};

use disco::{Content, DPackedFunc, DRef, DiscoSession, WorkerId};
use rpc_core::{Tensor, Value};
use rpc_server::cli::Failure;
use serde::Serialize;

use super::functions::{COLLECTIVE, EMPTY};
use super::launch::Testbed;
use crate::statistics::{Limits, quantile, rounded};

/// Names of all cases, in the order in which they are measured.
pub(super) const NAMES: [&str; 17] = [
    "start",
    "issue",
    "complete",
    "round_trip",
    "copy_to_0",
    "copy_from_0",
    "copy_to_last",
    "copy_from_last",
    "allreduce",
    "reduce_scatter",
    "allgather",
    "broadcast",
    "scatter",
    "gather",
    "all_to_all",
    "send_recv",
    "barrier",
];

/// Samples that are taken regardless of the time limit.
const MIN_SAMPLES: usize = 5;

/// Result of one case: a line of the JSON output. Fields that do not apply are null.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CaseResult {
    pub(super) over: String,
    pub(super) workers: u32,
    pub(super) case: &'static str,
    pub(super) bytes: Option<u64>,
    pub(super) unit: &'static str,
    pub(super) median: f64,
    /// 99th percentile, counted from the fast end.
    pub(super) p99: f64,
    pub(super) n: usize,
    /// `lower` or `higher`: the better direction.
    pub(super) better: &'static str,
    pub(super) algorithm_gb_s: Option<f64>,
    pub(super) bus_gb_s: Option<f64>,
}

/// Measured configuration: one kind of launch and number of workers, with a session that most cases
/// share.
pub(super) struct Subject<'a> {
    // Dropped before the servers of the testbed.
    session: Option<Open>,
    testbed: Testbed,
    limits: Limits,
    sizes: &'a [usize],
}

/// Session and its functions.
struct Open {
    session: DiscoSession,
    empty: DPackedFunc,
    collective: DPackedFunc,
}

impl<'a> Subject<'a> {
    pub(super) fn new(testbed: Testbed, limits: Limits, sizes: &'a [usize]) -> Self {
        Self { session: None, testbed, limits, sizes }
    }

    /// Measures a case, for each size if it has sizes. Returns no result if there are too few
    /// workers for it.
    pub(super) fn measure(&mut self, name: &'static str) -> Result<Vec<CaseResult>, Failure> {
        if name == "start" {
            return Ok(vec![self.starts()?]);
        }
        if self.testbed.workers == 1 && (name.ends_with("_last") || name == "send_recv") {
            return Ok(Vec::new());
        }
        if self.session.is_none() {
            let session = self.testbed.start()?;
            let empty = session.get_global_func(EMPTY)?;
            let collective = session.get_global_func(COLLECTIVE)?;
            session.sync_all().wait()?;
            self.session = Some(Open { session, empty, collective });
        }
        let Some(open) = &self.session else { return Ok(Vec::new()) };
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        Ok(match name {
            "issue" | "complete" => vec![self.commands(open, name)?],
            "round_trip" => vec![self.round_trips(open)?],
            "copy_to_0" | "copy_from_0" => vec![self.copies(open, name, WorkerId(0), largest)?],
            "copy_to_last" | "copy_from_last" => {
                vec![self.copies(open, name, WorkerId(self.testbed.workers - 1), largest)?]
            }
            "barrier" => vec![self.collective(open, name, 0)?],
            _ => self.sizes.iter().map(|bytes| self.collective(open, name, *bytes)).collect::<Result<_, _>>()?,
        })
    }

    fn starts(&self) -> Result<CaseResult, Failure> {
        let samples = self.samples(|| {
            let began = Instant::now();
            let session = self.testbed.start()?;
            let took = began.elapsed();
            session.shutdown().wait()?;
            Ok(took.as_secs_f64() * 1e3)
        })?;
        Ok(self.line("start", "ms", &samples))
    }

    /// Measures batches of calls that take at least 20 ms each.
    fn commands(&self, open: &Open, name: &'static str) -> Result<CaseResult, Failure> {
        let mut batch = 64;
        let rate = |batch: usize, took: Duration| batch as f64 / took.as_secs_f64().max(1e-9);
        let run = |batch: usize| -> Result<(Duration, Duration), Failure> {
            let began = Instant::now();
            for _ in 0..batch {
                open.empty.call(())?;
            }
            let issued = began.elapsed();
            open.session.sync_all().wait()?;
            Ok((issued, began.elapsed()))
        };
        while run(batch)?.1 < Duration::from_millis(20) && self.limits.iterations > 1 {
            batch *= 2;
        }
        let samples = self.samples(|| {
            let (issued, completed) = run(batch)?;
            Ok(rate(batch, if name == "issue" { issued } else { completed }))
        })?;
        Ok(self.line(name, "calls/s", &samples))
    }

    fn round_trips(&self, open: &Open) -> Result<CaseResult, Failure> {
        let samples = self.samples(|| {
            let began = Instant::now();
            open.empty.call(())?;
            open.session.sync_all().wait()?;
            Ok(began.elapsed().as_secs_f64() * 1e6)
        })?;
        Ok(self.line("round_trip", "µs", &samples))
    }

    fn copies(&self, open: &Open, name: &'static str, worker: WorkerId, bytes: usize) -> Result<CaseResult, Failure> {
        let Open { session, .. } = open;
        let elements = bytes / 4;
        let source = Tensor::from_slice([elements as i64], &vec![1.0_f32; elements])?;
        let there = session.empty(&[elements as i64], source.dtype(), None)?;
        let pair = [(WorkerId(0), worker)];
        session.copy_to_worker_0(&source, Some(&there))?;
        session.sync_all().wait()?;
        let rate = |began: Instant| (elements * 4) as f64 / began.elapsed().as_secs_f64().max(1e-9) / 1e9;
        let once = || -> Result<f64, Failure> {
            let began = Instant::now();
            match name {
                "copy_from_0" => drop(session.copy_from_worker_0(&there).wait()?),
                "copy_from_last" => drop(session.debug_get_from_remote(&there, worker).wait()?),
                _ => {
                    session.copy_to_worker_0(&source, Some(&there))?;
                    if worker.0 > 0 {
                        session.send_recv(&there, &there, &pair)?;
                    }
                    session.sync_worker(worker).wait()?;
                }
            }
            Ok(rate(began))
        };
        once()?;
        let samples = self.samples(once)?;
        let mut line = self.line(name, "GB/s", &samples);
        line.bytes = Some((elements * 4) as u64);
        Ok(line)
    }

    fn collective(&self, open: &Open, name: &'static str, bytes: usize) -> Result<CaseResult, Failure> {
        let workers = self.testbed.workers as usize;
        // Rounded so that the elements divide evenly among the workers.
        let elements = if bytes == 0 { 0 } else { (bytes / 4 / workers * workers).max(workers) };
        let run = |batch: u32, batches: u32| -> Result<Vec<f64>, Failure> {
            let times = open.collective.call((name, elements as u64, batch, batches))?;
            let times = times_of(&open.session, &times)?;
            open.session.sync_all().wait()?;
            Ok(times)
        };
        let tried = run(1, 3)?;
        let once = quantile(&tried, 0.5).max(1e-7);
        let batch = (0.002 / once).clamp(1.0, 2000.0).min(self.limits.iterations as f64 * 100.0);
        let batches = (self.limits.time.as_secs_f64() / (once * batch)).clamp(MIN_SAMPLES as f64, 201.0);
        let batches = (batches as usize).min(self.limits.iterations);
        let samples: Vec<f64> = run(batch as u32, batches as u32)?.into_iter().map(|seconds| seconds * 1e6).collect();
        let mut line = self.line(name, "µs", &samples);
        if elements > 0 {
            let rate = (elements * 4) as f64 / line.median / 1e3;
            line.bytes = Some((elements * 4) as u64);
            line.algorithm_gb_s = Some(rounded(rate));
            line.bus_gb_s = Some(rounded(rate * bus_factor(name, workers as f64)));
        }
        Ok(line)
    }

    fn samples(&self, mut once: impl FnMut() -> Result<f64, Failure>) -> Result<Vec<f64>, Failure> {
        let began = Instant::now();
        let mut samples = Vec::new();
        while samples.len() < self.limits.iterations
            && (samples.len() < MIN_SAMPLES || began.elapsed() < self.limits.time)
        {
            samples.push(once()?);
        }
        Ok(samples)
    }

    fn line(&self, case: &'static str, unit: &'static str, samples: &[f64]) -> CaseResult {
        let lower_is_better = matches!(unit, "µs" | "ms");
        CaseResult {
            over: self.testbed.launch.to_string(),
            workers: self.testbed.workers,
            case,
            bytes: None,
            unit,
            median: rounded(quantile(samples, 0.5)),
            p99: rounded(quantile(samples, if lower_is_better { 0.99 } else { 0.01 })),
            n: samples.len(),
            better: if lower_is_better { "lower" } else { "higher" },
            algorithm_gb_s: None,
            bus_gb_s: None,
        }
    }
}

impl Drop for Subject<'_> {
    fn drop(&mut self) {
        if let Some(Open { session, empty, collective }) = self.session.take() {
            drop((empty, collective));
            // The cases have reported errors of the session already.
            let _ = session.shutdown().wait();
        }
    }
}

/// Fetches the times that worker 0 has measured.
fn times_of(session: &DiscoSession, times: &DRef) -> Result<Vec<f64>, Failure> {
    let Content::Value(Value::List(times)) = session.debug_get_from_remote(times, WorkerId(0)).wait()? else {
        return Err(Failure::Remote(rpc_core::RpcError::internal("a worker has returned no times")));
    };
    Ok(times.into_iter().filter_map(|time| if let Value::Float(time) = time { Some(time) } else { None }).collect())
}

/// Returns the factor by which nccl-tests multiplies the bandwidth of the algorithm.
fn bus_factor(name: &str, workers: f64) -> f64 {
    match name {
        "allreduce" => 2.0 * (workers - 1.0) / workers,
        "reduce_scatter" | "allgather" | "scatter" | "gather" | "all_to_all" => (workers - 1.0) / workers,
        _ => 1.0,
    }
}

//! The cases, each measured on a session of its own kind and size.

use std::time::{Duration, Instant};

use disco::{Content, DPackedFunc, DRef, DiscoSession, WorkerId};
use rpc_core::{Tensor, Value};
use serde::Serialize;

use super::functions::{COLLECTIVE, NOTHING};
use super::launch::Lab;
use crate::cli::bench::{quantile, rounded};
use crate::cli::failure::Failure;

/// All cases, in the order in which they are measured.
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

/// When a case has been measured enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) iterations: usize,
    pub(super) time: Duration,
}

/// Samples that are taken whatever the time limit says.
const MIN_SAMPLES: usize = 5;

/// The result of one case: a line of the JSON output. What does not apply is null.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    pub(super) over: String,
    pub(super) workers: u32,
    pub(super) case: &'static str,
    pub(super) bytes: Option<u64>,
    pub(super) unit: &'static str,
    pub(super) median: f64,
    /// The slow end.
    pub(super) p99: f64,
    pub(super) n: usize,
    /// `lower` or `higher`.
    pub(super) better: &'static str,
    pub(super) algorithm_gb_s: Option<f64>,
    pub(super) bus_gb_s: Option<f64>,
}

/// What is measured: sessions of one kind and size, of which one is kept for most cases.
pub(super) struct Subject<'a> {
    // The session ends before what it stands on.
    session: Option<Open>,
    lab: Lab,
    limits: Limits,
    sizes: &'a [usize],
}

/// A session, and its functions.
struct Open {
    session: DiscoSession,
    nothing: DPackedFunc,
    collective: DPackedFunc,
}

impl<'a> Subject<'a> {
    pub(super) fn new(lab: Lab, limits: Limits, sizes: &'a [usize]) -> Self {
        Self { session: None, lab, limits, sizes }
    }

    /// Measures a case, over all sizes if it has any. None where there are too few workers for it.
    pub(super) fn measure(&mut self, name: &'static str) -> Result<Vec<Line>, Failure> {
        if name == "start" {
            return Ok(vec![self.starts()?]);
        }
        if self.lab.workers == 1 && (name.ends_with("_last") || name == "send_recv") {
            return Ok(Vec::new());
        }
        if self.session.is_none() {
            let session = self.lab.start()?;
            let nothing = session.get_global_func(NOTHING)?;
            let collective = session.get_global_func(COLLECTIVE)?;
            session.sync_all().wait()?;
            self.session = Some(Open { session, nothing, collective });
        }
        let Some(open) = &self.session else { return Ok(Vec::new()) };
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        Ok(match name {
            "issue" | "complete" => vec![self.commands(open, name)?],
            "round_trip" => vec![self.round_trips(open)?],
            "copy_to_0" | "copy_from_0" => vec![self.copies(open, name, WorkerId(0), largest)?],
            "copy_to_last" | "copy_from_last" => {
                vec![self.copies(open, name, WorkerId(self.lab.workers - 1), largest)?]
            }
            "barrier" => vec![self.collective(open, name, 0)?],
            _ => self.sizes.iter().map(|bytes| self.collective(open, name, *bytes)).collect::<Result<_, _>>()?,
        })
    }

    fn starts(&self) -> Result<Line, Failure> {
        let samples = self.samples(|| {
            let began = Instant::now();
            let session = self.lab.start()?;
            let took = began.elapsed();
            session.shutdown().wait()?;
            Ok(took.as_secs_f64() * 1e3)
        })?;
        Ok(self.line("start", "ms", &samples))
    }

    /// Batches of calls that are as long as they take at least 20 ms.
    fn commands(&self, open: &Open, name: &'static str) -> Result<Line, Failure> {
        let mut batch = 64;
        let rate = |batch: usize, took: Duration| batch as f64 / took.as_secs_f64().max(1e-9);
        let run = |batch: usize| -> Result<(Duration, Duration), Failure> {
            let began = Instant::now();
            for _ in 0..batch {
                open.nothing.call(())?;
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

    fn round_trips(&self, open: &Open) -> Result<Line, Failure> {
        let samples = self.samples(|| {
            let began = Instant::now();
            open.nothing.call(())?;
            open.session.sync_all().wait()?;
            Ok(began.elapsed().as_secs_f64() * 1e6)
        })?;
        Ok(self.line("round_trip", "µs", &samples))
    }

    fn copies(&self, open: &Open, name: &'static str, worker: WorkerId, bytes: usize) -> Result<Line, Failure> {
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

    fn collective(&self, open: &Open, name: &'static str, bytes: usize) -> Result<Line, Failure> {
        let workers = self.lab.workers as usize;
        // So that it can be shared.
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

    fn line(&self, case: &'static str, unit: &'static str, samples: &[f64]) -> Line {
        let lower_is_better = matches!(unit, "µs" | "ms");
        Line {
            over: self.lab.over.to_string(),
            workers: self.lab.workers,
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
        if let Some(Open { session, nothing, collective }) = self.session.take() {
            drop((nothing, collective));
            // What it could say has been said by the cases.
            let _ = session.shutdown().wait();
        }
    }
}

/// The times that worker 0 has measured.
fn times_of(session: &DiscoSession, times: &DRef) -> Result<Vec<f64>, Failure> {
    let Content::Value(Value::List(times)) = session.debug_get_from_remote(times, WorkerId(0)).wait()? else {
        return Err(Failure::Remote(rpc_core::RpcError::internal("a worker has measured nothing")));
    };
    Ok(times.into_iter().filter_map(|time| if let Value::Float(time) = time { Some(time) } else { None }).collect())
}

/// What nccl-tests multiplies the algorithm's bandwidth with.
fn bus_factor(name: &str, workers: f64) -> f64 {
    match name {
        "allreduce" => 2.0 * (workers - 1.0) / workers,
        "reduce_scatter" | "allgather" | "scatter" | "gather" | "all_to_all" => (workers - 1.0) / workers,
        _ => 1.0,
    }
}

//! `ping`: round trips through the whole stack, in the manner of ping(8).

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::time::Instant;

use super::call::Summary;
use super::connect::{CommonOptions, Files, close};
use super::failure::Failure;
use super::interruption::Interruption;
use super::output::Output;
use crate::config::Span;

#[derive(Args, Debug)]
pub(super) struct PingArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Number of round trips. Default: until interrupted
    #[arg(short, long, env = "RPC_CLI_COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Time between two round trips
    #[arg(short, long, env = "RPC_CLI_INTERVAL", value_name = "TIME", default_value = "1s")]
    interval: Span,
}

/// Measures round trips until there are enough, or the interruption comes. A summary ends them.
pub(super) async fn ping(
    options: &CommonOptions,
    output: &Output,
    args: PingArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let started = Instant::now();
    let connect = async {
        let session = options.connect(&args.address, Files::None).await?;
        output.note(&format!("connected to {} in {}", args.address, millis(started.elapsed())));
        let echo = session.get_function("rpc.echo").await?;
        Ok::<_, Failure>((session, echo))
    };
    let (session, echo) = tokio::select! {
        connected = connect => connected?,
        failure = interruption.wait() => return Err(failure),
    };
    let mut samples = Vec::new();
    let trips = async {
        let mut next = Instant::now();
        for number in 1..=args.count.unwrap_or(u64::MAX) {
            tokio::time::sleep_until(next).await;
            let start = Instant::now();
            let mut call = echo.call::<u64>((number,));
            if let Some(limit) = options.timeout() {
                call = call.timeout(limit);
            }
            call.await?;
            let elapsed = start.elapsed();
            samples.push(elapsed.as_secs_f64() * 1e3);
            if !output.is_json() {
                output.line(&format!("reply from {}: seq={number} time={}", args.address, millis(elapsed)))?;
            }
            next = start + args.interval.0;
        }
        Ok(())
    };
    let outcome: Result<(), Failure> = tokio::select! {
        outcome = trips => outcome,
        _ = interruption.wait() => Ok(()),
    };
    let Summary { mean, median, min, max, std, .. } = Summary::of(&samples);
    if output.is_json() {
        output.json(&json!({
            "address": args.address,
            "replies": samples.len(),
            "unit": "ms",
            "min": min,
            "mean": mean,
            "median": median,
            "max": max,
            "std": std,
            "samples": samples,
        }))?;
    } else if !samples.is_empty() {
        output.line(&format!(
            "{} replies, min/avg/median/max/mdev = {min:.3}/{mean:.3}/{median:.3}/{max:.3}/{std:.3} ms",
            samples.len()
        ))?;
    }
    close(&session).await;
    outcome
}

fn millis(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

//! `call` and `time`: calls of functions from the shell.

mod trace;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;
use rpc_core::client::LeaseOptions;
use rpc_core::{Device, DeviceType, Pack, RemoteTensor, Session, Value};
use serde_json::json;

use self::trace::TracedCall;
use super::argument::{Argument, Arguments, GRAMMAR};
use super::connect::{CommonOptions, Files};
use super::failure::Failure;
use super::lease;
use super::module::ModuleArgs;
use super::new_file::NewFile;
use super::output::{Output, seconds};
use super::show::Shown;
use super::tensor;
use crate::builtins::{ServerInfo, TimeOptions, time_function};
use crate::config::ByteSize;

#[derive(Args, Debug)]
#[command(after_help = GRAMMAR, allow_negative_numbers = true)]
pub(super) struct CallArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// The name of the function
    function: String,
    /// The arguments, as below
    args: Vec<Argument>,
    #[command(flatten)]
    module: ModuleArgs,
    /// Store the returned tensor in this .npy file; repeated, the tensors of a list. Bytes are
    /// stored as they are. With a number in front, as in 0=x.npy, store that argument as the call
    /// has left it; the first one has the number 0
    #[arg(short, long, env = "RPC_CLI_OUTPUT", value_name = "[NUMBER=]FILE")]
    output: Vec<OutputFile>,
    /// Also write the call in time, here, at each hop and at the server, to this file, for
    /// ui.perfetto.dev or chrome://tracing
    #[arg(long, env = "RPC_CLI_TRACE", value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// A file for a tensor that a call has returned or changed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OutputFile {
    Returned(PathBuf),
    /// File for the tensor that is the argument of this number.
    Argument(usize, PathBuf),
}

impl FromStr for OutputFile {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let numbered = text.split_once('=').and_then(|(number, file)| Some((number.parse().ok()?, file)));
        Ok(match numbered {
            Some((number, file)) => Self::Argument(number, file.into()),
            None => Self::Returned(text.into()),
        })
    }
}

pub(super) async fn call(options: &CommonOptions, output: &Output, args: CallArgs) -> Result<(), Failure> {
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let deadline = options.timeout().and_then(|limit| Instant::now().checked_add(limit));
            let function = args.module.find(&session, output, &args.function).await.map_err(Failure::without_effect)?;
            let arguments = Arguments::upload(&session, output, args.args).await.map_err(Failure::without_effect)?;
            let (mut returned, mut changed) = (Vec::new(), Vec::new());
            for file in args.output {
                match file {
                    OutputFile::Returned(file) => returned.push(file),
                    OutputFile::Argument(number, file) => match arguments.tensor(number) {
                        Some(tensor) => changed.push((tensor, file)),
                        None => {
                            let text = format!("-o {number}={}: argument {number} is no tensor", file.display());
                            return Err(Failure::Usage(text));
                        }
                    },
                }
            }
            let result = match &args.trace {
                Some(file) => {
                    let (address, name) = (args.address.as_str(), args.function.as_str());
                    let traced = TracedCall { address, name, function: &function, arguments: &arguments, deadline };
                    traced.run(options, &session, output, file).await?
                }
                None => {
                    let mut action = function.call::<Value>(&arguments);
                    if let Some(deadline) = deadline {
                        action = action.deadline(deadline);
                    }
                    action.await?
                }
            };
            let mut shown = Shown::new(&session, result)?;
            for (tensor, file) in changed {
                store_tensor(&session, output, tensor, &file).await?;
            }
            store(&session, output, &shown, &returned).await?;
            shown.read_small_tensors(&session).await?;
            if output.is_json() {
                return output.json(&shown.to_json());
            }
            match shown {
                // A stored result is not printed.
                Shown::Tensor { .. } | Shown::Bytes(_) if !returned.is_empty() => Ok(()),
                Shown::Null => Ok(()),
                shown => output.line(&shown.to_text()),
            }
        })
        .await
}

/// Stores the tensors of a result in `files`.
async fn store(session: &Session, output: &Output, result: &Shown, files: &[PathBuf]) -> Result<(), Failure> {
    if let (Shown::Bytes(bytes), [file]) = (result, files) {
        let mut target = NewFile::create(file, output)?;
        std::io::Write::write_all(&mut target, bytes).map_err(|error| Failure::file("cannot write", file, error))?;
        return target.persist();
    }
    let tensors = result.tensors();
    if !files.is_empty() && tensors.len() != files.len() {
        let (tensors, files) = (tensors.len(), files.len());
        return Err(Failure::Unsuitable(format!(
            "the function returned {tensors} tensors, and -o was given {files} times"
        )));
    }
    for (tensor, file) in tensors.into_iter().zip(files) {
        store_tensor(session, output, tensor, file).await?;
    }
    Ok(())
}

async fn store_tensor(session: &Session, output: &Output, tensor: &RemoteTensor, file: &Path) -> Result<(), Failure> {
    tensor::store(session, output, tensor, file).await?;
    output.note(&format!("{} {:?} stored in {}", tensor.dtype(), tensor.shape(), file.display()));
    Ok(())
}

#[derive(Args, Debug)]
#[command(after_help = GRAMMAR, allow_negative_numbers = true)]
pub(super) struct TimeArgs {
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// The name of the function
    function: String,
    /// The arguments, as below
    args: Vec<Argument>,
    #[command(flatten)]
    module: ModuleArgs,
    /// Number of calls in a sample; more if a sample would be shorter than --min-repeat-ms
    #[arg(long, env = "RPC_CLI_NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    number: u64,
    /// Number of samples
    #[arg(long, env = "RPC_CLI_REPEAT", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    repeat: u64,
    /// Minimum time of a sample
    #[arg(long, env = "RPC_CLI_MIN_REPEAT_MS", value_name = "MILLISECONDS", default_value_t = 0)]
    min_repeat_ms: u64,
    /// Number of calls before the first sample
    #[arg(long, env = "RPC_CLI_WARMUP", default_value_t = 1)]
    warmup: u64,
    /// Device to lease for the time of the measurement, such as cuda:0, so that no other client
    /// that asks for a lease uses it
    #[arg(long, env = "RPC_CLI_LEASE", value_name = "DEVICE")]
    lease: Option<Device>,
    /// Write this much memory at the server before each sample, so that its caches hold nothing
    /// else; 256MiB if no size is given
    #[arg(long, env = "RPC_CLI_FLUSH_CACHE", value_name = "SIZE", num_args = 0..=1, require_equals = true)]
    #[arg(default_value = "0", default_missing_value = "256MiB", hide_default_value = true)]
    flush_cache: ByteSize,
}

pub(super) async fn time(options: &CommonOptions, output: &Output, args: TimeArgs) -> Result<(), Failure> {
    options
        .with_session(&args.address, Files::Workspace, async |session| {
            let function = args.module.find(&session, output, &args.function).await.map_err(Failure::without_effect)?;
            let arguments = Arguments::upload(&session, output, args.args).await.map_err(Failure::without_effect)?;
            let min_repeat = Duration::from_millis(args.min_repeat_ms);
            let lease = match args.lease {
                Some(device) => {
                    let request = session.request_lease(device, &LeaseOptions::default()).await;
                    let request = request.map_err(|error| Failure::from(error).without_effect())?;
                    // --timeout limits the whole command.
                    Some(lease::granted(&session, &request, None, output).await.map_err(Failure::without_effect)?)
                }
                None => None,
            };
            let time_options = TimeOptions {
                number: args.number,
                repeat: args.repeat,
                min_repeat,
                warmup: args.warmup,
                cache_flush_bytes: args.flush_cache.0,
                // Asked for above, where the place in the queue is shown.
                lease: None,
            };
            let clock_before = clock(&session, args.lease).await;
            let samples = time_function(&session, &function, &time_options, &arguments).await?;
            let clock_after = clock(&session, args.lease).await;
            drop(lease);
            let summary = Summary::of(&samples);
            if output.is_json() {
                return output.json(&json!({
                    "function": args.function,
                    "mean": summary.mean,
                    "median": summary.median,
                    "min": summary.min,
                    "p95": summary.p95,
                    "max": summary.max,
                    "std": summary.std,
                    "count": samples.len(),
                    "unit": "s",
                    "samples": samples,
                    "clock_mhz_before": clock_before,
                    "clock_mhz_after": clock_after,
                }));
            }
            let Summary { mean, median, min, p95, max, std } = summary;
            let [mean, median, min, p95, max, std] = [mean, median, min, p95, max, std].map(seconds);
            output.line(&format!(
                "{}: mean {mean}, median {median}, min {min}, p95 {p95}, max {max}, std {std} ({} samples)",
                args.function,
                samples.len()
            ))?;
            if let (Some(device), Some(before), Some(after)) = (args.lease, clock_before, clock_after) {
                output.line(&format!("clock of {device}: {before} MHz before, {after} MHz after"))?;
            }
            Ok(())
        })
        .await
}

/// Returns the present clock of a device in MHz, if it tells.
async fn clock(session: &Session, device: Option<Device>) -> Option<u32> {
    // The host's processors do not tell, and asking takes time.
    let device = device.filter(|device| device.kind != DeviceType::CPU)?.to_string();
    let Pack(info) = session.get_function("rpc.info").await.ok()?.call::<Pack<ServerInfo>>(()).await.ok()?;
    info.devices.into_iter().find(|info| info.device == device)?.clock_mhz
}

/// Statistics of samples.
pub(super) struct Summary {
    pub(super) mean: f64,
    pub(super) median: f64,
    pub(super) min: f64,
    /// Least sample that is not exceeded by 95 % of them.
    pub(super) p95: f64,
    pub(super) max: f64,
    pub(super) std: f64,
}

impl Summary {
    /// Computes the statistics; all zero without samples.
    pub(super) fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = samples.len().max(1) as f64;
        let mean = samples.iter().sum::<f64>() / count;
        let variance = samples.iter().map(|sample| (sample - mean).powi(2)).sum::<f64>() / count;
        let at = |at: usize| sorted.get(at).copied().unwrap_or(0.0);
        let half = sorted.len() / 2;
        let median =
            if sorted.len().is_multiple_of(2) { (at(half.saturating_sub(1)) + at(half)) / 2.0 } else { at(half) };
        let p95 = at((sorted.len() * 95).div_ceil(100).saturating_sub(1));
        Self { mean, median, min: at(0), p95, max: at(sorted.len().saturating_sub(1)), std: variance.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::Summary;

    #[test]
    fn a_summary_of_few_and_of_no_samples() {
        let summary = Summary::of(&[3.0, 1.0, 2.0, 10.0]);
        assert_eq!((summary.mean, summary.median, summary.min, summary.max), (4.0, 2.5, 1.0, 10.0));
        let hundred: Vec<_> = (1..=100).map(f64::from).collect();
        assert_eq!((summary.p95, Summary::of(&hundred).p95), (10.0, 95.0));
        assert_eq!(Summary::of(&[]).median, 0.0);
    }
}

//! `rpc-bench long-link`: copies between a client and a server over a link with a long round trip
//! and a known rate.

mod delay_line;

use std::process::Command;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use clap::Args;
use rpc_core::{DataType, Device};
use rpc_server::ServerProcess;
use rpc_server::cli::{CommonOptions, Failure, Output, digits};
use rpc_server::config::{ByteSize, Span};
use rpc_transports::{Address, Connector};
use serde::Serialize;

use self::delay_line::{DelayLine, Link};
use crate::statistics::quantile;

const DETAILS: &str = "\
Without an address a server is started on this machine, and the link is a part of this program: it takes TCP
connections, and passes each byte on at the rate and after the delay. The sockets on both sides of it are then short
links of their own, so that the kernel's windows play no part. With an address the copies go there, and --delay and
--rate only say what the link is like: tests/benches/long_link.py does so over a virtual network.

Output:
  rate                    the median of the copies in Mbit/s, from nothing in flight to the last reply
  ratio                   of the rate of the link; the first round trip and the growth of the window count";

#[derive(Args, Debug)]
#[command(after_long_help = DETAILS)]
pub(crate) struct LongLinkArgs {
    /// Address of a server behind a link; without it both are started here
    address: Option<Address>,
    /// Round trip of the link
    #[arg(long, env = "RPC_BENCH_DELAY", value_name = "TIME", default_value = "150ms")]
    delay: Span,
    /// Rate of the link in each direction, in Mbit/s
    #[arg(long, env = "RPC_BENCH_RATE", value_name = "MBIT", default_value_t = 1000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    rate: u64,
    /// Size of a copy
    #[arg(long, env = "RPC_BENCH_SIZE", value_name = "SIZE", default_value = "512MiB")]
    size: ByteSize,
    /// Number of copies in each direction
    #[arg(long, env = "RPC_BENCH_ROUNDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Result of one direction: a line of the JSON output.
#[derive(Debug, Serialize)]
struct LongLinkResult {
    case: &'static str,
    delay_ms: f64,
    link_mbit: u64,
    bytes: u64,
    mbit: f64,
    ratio: f64,
    n: usize,
}

pub(crate) fn run(options: &CommonOptions, output: &Output, args: &LongLinkArgs) -> Result<(), Failure> {
    let size = usize::try_from(args.size.0).ok().filter(|size| (1..=isize::MAX as usize).contains(size));
    let size = size.ok_or_else(|| Failure::Usage("--size must be between 1 byte and what fits into memory".into()))?;
    let Some(address) = &args.address else {
        let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
        let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
        let mut server = Command::new(program);
        server.arg("run-server").arg(folder.path());
        let server = ServerProcess::spawn(server)?;
        let link = Link { one_way: args.delay.0 / 2, bytes_per_second: args.rate * 1_000_000 / 8 };
        let line = DelayLine::start(server.address().strip_prefix("tcp://").unwrap_or(server.address()), link)
            .map_err(|error| Failure::local("cannot start the link", error))?;
        return measure(output, args, size, &Connector::new(), &format!("tcp://{}", line.address()));
    };
    measure(output, args, size, &options.connector()?, &address.to_string())
}

/// Measures copies in both directions in turn.
fn measure(
    output: &Output,
    args: &LongLinkArgs,
    size: usize,
    connector: &Connector,
    address: &str,
) -> Result<(), Failure> {
    let session = connector.connect_blocking(address).map_err(Failure::Connect)?;
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[size as i64]).wait()?;
    let data = Bytes::from(vec![7; size]);
    let mut buffer = BytesMut::zeroed(size);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..args.rounds {
        let began = Instant::now();
        session.copy_to_remote(&tensor, data.clone()).wait()?;
        times[0].push(began.elapsed());
        let began = Instant::now();
        buffer = session.copy_from_remote_into(&tensor, None, buffer).wait()?;
        times[1].push(began.elapsed());
        if buffer != data {
            return Err(Failure::local("what was copied came back as something else", std::io::Error::other("data")));
        }
    }
    for (case, times) in ["copy to the server", "copy from the server"].into_iter().zip(times) {
        let result = result(case, args, size, &times);
        if output.is_json() {
            output.json(&result)?;
        } else {
            let LongLinkResult { mbit, ratio, n, .. } = result;
            let (mbit, ratio) = (digits(mbit), digits(ratio));
            output.line(&format!("{case}: {mbit} Mbit/s, {ratio} of the link's {} ({n} copies)", args.rate))?;
        }
    }
    Ok(())
}

fn result(case: &'static str, args: &LongLinkArgs, size: usize, times: &[Duration]) -> LongLinkResult {
    let rates: Vec<_> = times.iter().map(|time| size as f64 * 8e-6 / time.as_secs_f64()).collect();
    let mbit = quantile(&rates, 0.5);
    LongLinkResult {
        case,
        delay_ms: args.delay.0.as_secs_f64() * 1e3,
        link_mbit: args.rate,
        bytes: size as u64,
        mbit,
        ratio: mbit / args.rate as f64,
        n: times.len(),
    }
}

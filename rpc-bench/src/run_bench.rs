//! `rpc-bench run`: programs at a server, beside the same programs started here; and leases that
//! are granted at once, beside a call.

use std::io::{self, Read as _};
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use rpc_core::client::LeaseOptions;
use rpc_core::{Device, Session};
use rpc_server::ServerProcess;
use rpc_server::cli::{Failure, Output, digits};
use rpc_server::config::ServeConfig;
use rpc_transports::{Address, Connector};

use crate::statistics::quantile;

/// Bytes of output of one sample.
const OUTPUT_BYTES: u64 = 256 << 20;

/// Number of programs at once, as a Disco session with as many workers runs.
const MANY: usize = 64;

#[derive(Args, Debug)]
pub(crate) struct RunBenchArgs {
    /// Number of pairs of samples
    #[arg(long, env = "RPC_BENCH_PAIRS", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
}

#[derive(Args, Debug)]
pub(crate) struct RunServerArgs {
    workdir: std::path::PathBuf,
}

/// Measures in pairs, here and at the server in turn.
pub(crate) fn run(output: &Output, args: &RunBenchArgs) -> Result<(), Failure> {
    let local = |error| Failure::local("cannot run a program here", error);
    let folder = tempfile::tempdir().map_err(|error| Failure::local("cannot make a folder", error))?;
    let program = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let mut server = Command::new(program);
    server.arg("run-server").arg(folder.path());
    let server = ServerProcess::spawn(server)?;
    let session = Connector::new().connect_blocking(server.address()).map_err(Failure::Connect)?;

    let (mut starts, mut rates) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut many = [Vec::new(), Vec::new()];
    for _ in 0..args.pairs {
        let began = Instant::now();
        Command::new("true").status().map_err(local)?;
        starts[0].push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        session.run("true").status().wait()?;
        starts[1].push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        let started = (0..MANY).map(|_| Command::new("true").spawn()).collect::<io::Result<Vec<_>>>().map_err(local)?;
        for mut child in started {
            child.wait().map_err(local)?;
        }
        many[0].push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let run = || session.run("true").start().wait()?.status().wait();
            let running: Vec<_> = (0..MANY).map(|_| scope.spawn(run)).collect();
            running.into_iter().try_for_each(|thread| thread.join().map(|ended| ended.map(drop)).unwrap_or(Ok(())))
        })?;
        many[1].push(began.elapsed().as_secs_f64() * 1e3);
        rates[0].push(rate(|| local_output().map_err(local))?);
        rates[1].push(rate(|| remote_output(&session))?);
    }
    let cases =
        [("start and end of true", "ms", &starts), ("64 of them at once", "ms", &many), ("output", "MB/s", &rates)];
    for (case, unit, samples) in cases {
        let [here, there] = samples.each_ref().map(|samples| quantile(samples, 0.5));
        let [shown_here, shown_there, ratio] = [here, there, there / here].map(digits);
        output.line(&format!("{case}: {shown_there} {unit} at the server, {shown_here} here, ratio {ratio}"))?;
    }
    let [call, lease] = lease_times(&session, args.pairs)?.map(|samples| quantile(&samples, 0.5));
    let [shown_call, shown_lease, ratio] = [call, lease, lease / call].map(digits);
    output.line(&format!("lease on a free device: {shown_lease} ms, a call {shown_call} ms, ratio {ratio}"))?;
    Ok(())
}

/// Returns the times of calls that do nothing, and of leases on a free device, in milliseconds.
fn lease_times(session: &Session, pairs: u32) -> Result<[Vec<f64>; 2], Failure> {
    let noop = session.get_function("rpc.noop").wait()?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..pairs {
        let began = Instant::now();
        noop.call::<()>(()).wait()?;
        times[0].push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        let lease = session.lease(Device::cpu(), &LeaseOptions::default()).wait()?;
        times[1].push(began.elapsed().as_secs_f64() * 1e3);
        lease.release().wait()?;
    }
    Ok(times)
}

/// Returns the rate of `transfer`, which returns its bytes, in MB/s.
fn rate(transfer: impl FnOnce() -> Result<u64, Failure>) -> Result<f64, Failure> {
    let began = Instant::now();
    let bytes = transfer()?;
    Ok(bytes as f64 / 1e6 / began.elapsed().as_secs_f64())
}

/// Arguments of `head` for the output.
fn head() -> [String; 3] {
    ["-c".to_owned(), OUTPUT_BYTES.to_string(), "/dev/zero".to_owned()]
}

/// Reads the output from a pipe. Returns its length in bytes.
fn local_output() -> io::Result<u64> {
    let mut child = Command::new("head").args(head()).stdout(Stdio::piped()).spawn()?;
    let (mut bytes, mut piece) = (0, vec![0; 256 << 10]);
    if let Some(stdout) = &mut child.stdout {
        while let read @ 1.. = stdout.read(&mut piece)? {
            bytes += read as u64;
        }
    }
    child.wait()?;
    Ok(bytes)
}

/// Reads the output from the server. Returns its length in bytes.
fn remote_output(session: &Session) -> Result<u64, Failure> {
    let mut bytes = 0;
    let count = |piece: &[u8]| {
        bytes += piece.len() as u64;
        Ok(())
    };
    session.run("head").args(head()).on_stdout(count).status().wait()?;
    Ok(bytes)
}

/// Runs the server until standard input ends.
pub(crate) fn run_server(args: RunServerArgs) -> Result<(), Failure> {
    let config = ServeConfig {
        listen: vec![Address::from(std::net::SocketAddr::from(([127, 0, 0, 1], 0))).into()],
        exit_with_stdin: true,
        workdir: args.workdir,
        allow_run: vec!["true".to_owned(), "head".to_owned()],
        ..ServeConfig::default()
    };
    match rpc_server::server::exit_code::of_server(&rpc_server::RpcServer::default().config(config).run_blocking()) {
        0 => Ok(()),
        code => Err(Failure::Reported(code)),
    }
}

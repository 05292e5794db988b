//! `lease`: exclusive use of a device while a program runs here.

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use clap::Args;
use rpc_core::client::{Lease, LeaseOptions, LeaseRequest};
use rpc_core::{Device, Pack, Session};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use serde_json::{Value as Json, json};
use tokio::process::{Child, Command};

use super::connect::{CommonOptions, Files, close};
use super::failure::Failure;
use super::info::lease_text;
use super::interruption::Interruption;
use super::output::{Output, seconds};
use crate::builtins::LeasedDevice;
use crate::config::Span;

/// Interval at which the position in the queue is asked for.
const POSITION_INTERVAL: Duration = Duration::from_secs(1);

/// Time that the program has to end after SIGTERM, before the lease is overdue.
const STOP_TIME: Duration = Duration::from_secs(5);

/// The same after an interruption: a second after it, this process is ended.
const INTERRUPTED_STOP_TIME: Duration = Duration::from_millis(500);

/// With the number of a signal added: the exit code of a program that the signal has killed, as
/// shells report it.
const SIGNALLED: i32 = 128;

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(super) struct LeaseArgs {
    /// The device, such as cuda:0
    device: Device,
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
    /// Maximum time of the lease, at which the program is ended. Default: that of the server
    #[arg(long = "for", env = "RPC_CLI_FOR", value_name = "TIME")]
    limit: Option<Span>,
    /// Priority of the request; the highest is granted first
    #[arg(long, env = "RPC_CLI_PRIORITY", value_name = "NUMBER", default_value_t = 0)]
    priority: i32,
    /// Program to run here while the lease is held, and its arguments. It is ended with the lease,
    /// and so is its process group if standard input is no terminal. Without a program, the lease
    /// is held until --for has passed or a signal interrupts
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Holds a lease while a program runs here, or until interrupted.
pub(super) async fn lease(
    options: &CommonOptions,
    output: &Output,
    args: LeaseArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let session = tokio::select! {
        connected = options.connect(&args.address, Files::None) => connected?,
        failure = interruption.wait() => return Err(failure),
    };
    let outcome = hold(&session, options, output, &args, interruption).await;
    close(&session).await;
    outcome
}

async fn hold(
    session: &Session,
    options: &CommonOptions,
    output: &Output,
    args: &LeaseArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let mut lease_options = LeaseOptions::default().priority(args.priority);
    if let Some(Span(limit)) = args.limit {
        // The server ends the session at the end of this time, so the program is ended before.
        lease_options = lease_options.max_duration(limit.saturating_add(STOP_TIME));
    }
    let request = session.request_lease(args.device, &lease_options).await?;
    let lease = tokio::select! {
        lease = granted(session, &request, options.timeout(), output) => lease?,
        failure = interruption.wait() => return Err(failure),
    };
    // From now on the lease alone keeps the device.
    drop(request);
    let (device, waited) = (args.device, lease.waited().as_secs_f64());
    if args.program.is_empty() && output.is_json() {
        output.json(&json!({ "device": device.to_string(), "waited_seconds": waited }))?;
    } else {
        output.note(&format!("leased {device} after {}", seconds(waited)));
    }
    let ended = use_lease(session, &lease, args, interruption).await;
    let held = lease.release().await.map(|held| held.as_secs_f64()).ok();
    if output.is_json() {
        let exit_code = ended.as_ref().ok().and_then(|code| *code);
        output.json(&json!({
            "device": device.to_string(),
            "waited_seconds": waited,
            "held_seconds": held,
            "exit_code": exit_code.map_or(Json::Null, Json::from),
        }))?;
    } else if let Some(held) = held {
        output.note(&format!("released {device}, held for {}", seconds(held)));
    }
    match ended? {
        None | Some(0) => Ok(()),
        Some(code) => Err(Failure::Reported(code)),
    }
}

/// Waits for the grant, and prints who holds the device and the number of requests that are before
/// this one when they change.
pub(super) async fn granted(
    session: &Session,
    request: &LeaseRequest,
    limit: Option<Duration>,
    output: &Output,
) -> Result<Lease, Failure> {
    let mut shown = None;
    let show_position = async {
        loop {
            let position = match position(session, request).await {
                Ok(position) => position,
                Err(error) => break error,
            };
            if let Some(WaitPosition { why, text }) = position
                && shown.as_ref() != Some(&why)
            {
                output.note(&text);
                shown = Some(why);
            }
            tokio::time::sleep(POSITION_INTERVAL).await;
        }
    };
    let granted = async {
        tokio::select! {
            biased;
            lease = request.granted() => lease,
            error = show_position => Err(error),
        }
    };
    match limit {
        None => Ok(granted.await?),
        Some(limit) => match tokio::time::timeout(limit, granted).await {
            Ok(lease) => Ok(lease?),
            Err(_) => {
                let what = format!("waiting for {}", request.device());
                Err(Failure::TimedOut { what, limit, why: Some("other requests are before this one".to_owned()) })
            }
        },
    }
}

/// Position of a request that waits.
struct WaitPosition {
    /// Number of requests before it, the session that holds the device, and the number of sessions
    /// that still use it. The position is shown again when these change.
    why: (u64, Option<u64>, u64),
    text: String,
}

/// Asks for the position of a request; `None` if nothing keeps it waiting.
async fn position(session: &Session, request: &LeaseRequest) -> rpc_core::Result<Option<WaitPosition>> {
    let (ahead, device) = (request.ahead().await?, request.device());
    let leased = async {
        let status = session.get_function("rpc.lease.status").concurrent().await?;
        status.call::<Pack<Vec<LeasedDevice>>>(()).concurrent().await
    };
    // The client may have no right to ask who holds the device.
    let Pack(leased) = leased.await.unwrap_or(Pack(Vec::new()));
    let leased = leased.into_iter().find(|leased| leased.device == device.to_string());
    let used_by = leased.as_ref().map_or(0, |leased| leased.used_by);
    let holder = leased.as_ref().and_then(|leased| leased.holder.as_ref());
    let why = (ahead, holder.map(|holder| holder.session), used_by);
    let before = format!("waiting for {device}: {ahead} before this request");
    let text = match (ahead, &leased) {
        (0, Some(leased)) if used_by > 0 => format!("waiting for {device}: held {}", lease_text(leased)),
        (0, _) => return Ok(None),
        (_, Some(leased)) => format!("{before}; held {}", lease_text(leased)),
        // The device has been freed in between.
        (_, None) => before,
    };
    Ok(Some(WaitPosition { why, text }))
}

/// Runs the program, or waits for the end of the lease. Returns the exit code of the program.
async fn use_lease(
    session: &Session,
    lease: &Lease,
    args: &LeaseArgs,
    interruption: &Interruption,
) -> Result<Option<u8>, Failure> {
    let left = lease.expires_in();
    // A tenth of a short lease is enough to end what takes no longer than that.
    let left = left.saturating_sub(STOP_TIME.min(left / 10));
    let limit = args.limit.map_or(left, |Span(limit)| limit.min(left));
    let Some((program, program_args)) = args.program.split_first() else {
        return tokio::select! {
            error = session.ended() => Err(error.into()),
            () = tokio::time::sleep(limit) => Ok(None),
            _ = interruption.wait() => Ok(None),
        };
    };
    let mut program =
        Program::start(program, program_args).map_err(|error| Failure::file("cannot run", program.as_ref(), error))?;
    let (failure, stop_time) = tokio::select! {
        status = program.wait() => return exit_code(status).map(Some),
        error = session.ended() => (error.into(), STOP_TIME),
        () = tokio::time::sleep(limit) => {
            (Failure::TimedOut { what: "the program".to_owned(), limit, why: None }, STOP_TIME)
        }
        failure = interruption.wait() => (failure, INTERRUPTED_STOP_TIME),
    };
    program.stop(stop_time).await;
    Err(failure)
}

/// A running program.
struct Program {
    child: Child,
    /// True if the program has a process group of its own, which ends with it.
    has_own_group: bool,
}

impl Program {
    fn start(program: &OsStr, args: &[OsString]) -> io::Result<Self> {
        let mut command = Command::new(program);
        // At a terminal the program stays in the foreground group: others may not read from it.
        let has_own_group = !io::stdin().is_terminal();
        if has_own_group {
            command.process_group(0);
        }
        Ok(Self { child: command.args(args).kill_on_drop(true).spawn()?, has_own_group })
    }

    /// Waits for the end of the program, and kills what is left of its group.
    async fn wait(&mut self) -> io::Result<ExitStatus> {
        if let (true, Some(pid)) = (self.has_own_group, self.pid()) {
            // The id of the group is free for others once the program has been reaped.
            let exited = move || waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            let _ = tokio::task::spawn_blocking(exited).await;
            let _ = kill_process_group(pid, Signal::KILL);
        }
        self.child.wait().await
    }

    /// Asks the program to end, and kills it if it has not ended within `limit`.
    async fn stop(&mut self, limit: Duration) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(limit, self.wait()).await.is_err() {
            self.signal(Signal::KILL);
            let _ = self.wait().await;
        }
    }

    /// Returns the id of the program; `None` once it has been reaped.
    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()))
    }

    /// Sends a signal to the program, and to the others of its group if that is its own.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            let _ = if self.has_own_group { kill_process_group(pid, signal) } else { kill_process(pid, signal) };
        }
    }
}

fn exit_code(status: std::io::Result<ExitStatus>) -> Result<u8, Failure> {
    let status = status.map_err(|error| Failure::local("cannot wait for the program", error))?;
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNALLED + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

//! `call --trace`: one call in time, in the JSON that Perfetto and Chrome read, with a process for
//! this side, each hop and the server.
//!
//! The server tells when the call has arrived, begun and ended, by its own clock, which round trips
//! align with the one of this process: to within half of the shortest. Hops record nothing. Their
//! slices are estimated from round trips to each of them, and say so.

use std::path::Path;
use std::time::{Duration, Instant};

use rpc_core::function::{ArgScope, IntoArg, IntoArgs};
use rpc_core::{RemoteFunction, RpcError, Session, Value};
use serde_json::{Value as Json, json};

use super::super::argument::Arguments;
use super::super::connect::{CommonOptions, close};
use super::super::failure::Failure;
use super::super::failure_report::TUNNEL;
use super::super::new_file::NewFile;
use super::super::output::Output;
use crate::builtins::{TRACE_CALL, TRACE_CLOCK};

/// Number of round trips from which the shortest counts.
const ROUNDS: usize = 8;

/// A call to be traced.
pub(super) struct TracedCall<'a> {
    pub(super) address: &'a str,
    pub(super) name: &'a str,
    pub(super) function: &'a RemoteFunction,
    pub(super) arguments: &'a Arguments,
    pub(super) deadline: Option<Instant>,
}

/// Times of a call, from its submission here.
#[derive(Clone, Debug, Default)]
struct Times {
    /// Address of each hop, and the round trip to it, if it could be measured.
    hops: Vec<(String, Option<Duration>)>,
    took: Duration,
    /// Times at the server, in nanoseconds since the submission here.
    arrived: i64,
    began: i64,
    ended: i64,
    /// Shortest round trip to the server.
    round_trip: Duration,
}

impl TracedCall<'_> {
    /// Calls the function, and writes the trace to `file`. Returns the result.
    pub(super) async fn run(
        &self,
        options: &CommonOptions,
        session: &Session,
        output: &Output,
        file: &Path,
    ) -> Result<Value, Failure> {
        let functions = async {
            let clock: RemoteFunction = session.get_function(TRACE_CLOCK).await?;
            let call: RemoteFunction = session.get_function(TRACE_CALL).await?;
            Ok::<_, RpcError>((clock, call))
        };
        let (clock, call) = functions.await.map_err(|error| Failure::from(error).without_effect())?;
        let new = NewFile::create(file, output)?;
        let hops = hop_round_trips(options).await;
        let (offset, round_trip) = clock_offset(&clock).await.map_err(|error| Failure::from(error).without_effect())?;
        let sent = Instant::now();
        let sent_nanos = offset.at(sent);
        let mut action = call.call::<(Value, i64, i64)>(Traced { function: self.function, arguments: self.arguments });
        if let Some(deadline) = self.deadline {
            action = action.deadline(deadline);
        }
        // The clock is asked right in front of the call, in no lane: its answer is the time at
        // which the call has come.
        let arrival = clock.call::<i64>(()).concurrent();
        let (arrived, called) = tokio::join!(arrival.into_future(), action.into_future());
        let took = sent.elapsed();
        let (result, began, ended) = called?;
        let since_sent = |nanos: i64| nanos.saturating_sub(sent_nanos);
        let times = Times {
            hops,
            took,
            arrived: since_sent(arrived?),
            began: since_sent(began),
            ended: since_sent(ended),
            round_trip,
        };
        let text = times.document(self.name, self.address).to_string();
        std::io::Write::write_all(&mut new.writer()?, text.as_bytes())
            .map_err(|error| Failure::file("cannot write", file, error))?;
        new.persist()?;
        output.note(&format!("wrote {}", file.display()));
        Ok(result)
    }
}

/// The arguments of `rpc.trace.call`.
struct Traced<'a> {
    function: &'a RemoteFunction,
    arguments: &'a Arguments,
}

impl IntoArgs for Traced<'_> {
    fn into_args(self, scope: &mut ArgScope<'_>) -> rpc_core::Result<Vec<Value>> {
        let mut args = vec![self.function.into_arg(scope)?];
        args.extend(self.arguments.into_args(scope)?);
        Ok(args)
    }
}

/// Relation of the server's clock to the one of this process.
#[derive(Clone, Copy, Debug)]
struct ClockOffset {
    here: Instant,
    /// Time of the server's clock at that time, in nanoseconds.
    there: i64,
}

impl ClockOffset {
    /// Returns the server's time at a later time here, in nanoseconds.
    fn at(self, later: Instant) -> i64 {
        self.there.saturating_add(nanos(later.saturating_duration_since(self.here)))
    }
}

/// Measures the offset of the server's clock, and the round trip to it.
async fn clock_offset(clock: &RemoteFunction) -> rpc_core::Result<(ClockOffset, Duration)> {
    let mut best: Option<(ClockOffset, Duration)> = None;
    for _ in 0..ROUNDS {
        let here = Instant::now();
        let there: i64 = clock.call(()).concurrent().await?;
        let round_trip = here.elapsed();
        if best.is_none_or(|(_, shortest)| round_trip < shortest) {
            let there = there.saturating_sub(nanos(round_trip / 2));
            best = Some((ClockOffset { here, there }, round_trip));
        }
    }
    best.ok_or_else(|| RpcError::internal("no round trip was made"))
}

/// Measures the round trip to each hop that forwards requests.
async fn hop_round_trips(options: &CommonOptions) -> Vec<(String, Option<Duration>)> {
    let mut hops = Vec::new();
    for (number, hop) in options.jump().iter().enumerate().filter(|(_, hop)| !hop.starts_with(TUNNEL)) {
        let measured = async {
            let session = options.connect_to_hop(number).await?;
            let echo: RemoteFunction = session.get_function("rpc.echo").await?;
            let mut shortest = Duration::MAX;
            for number in 0..ROUNDS as u64 {
                let here = Instant::now();
                echo.call::<u64>((number,)).await?;
                shortest = shortest.min(here.elapsed());
            }
            close(&session).await;
            Ok::<_, Failure>(shortest)
        };
        hops.push((hop.clone(), measured.await.ok()));
    }
    hops
}

impl Times {
    /// Returns the document of the trace.
    fn document(&self, name: &str, address: &str) -> Json {
        let mut events = Vec::new();
        let took = nanos(self.took);
        let mut process = |title: String, slices: &[(&str, i64, i64, Json)]| {
            // Processes are shown in the order of their numbers.
            let pid = events.iter().filter(|event: &&Json| event["ph"] == "M").count() + 1;
            events.push(json!({ "ph": "M", "name": "process_name", "pid": pid, "args": { "name": title } }));
            for (name, from, to, args) in slices {
                events.push(json!({
                    "ph": "X", "name": name, "cat": "call", "pid": pid, "tid": 1,
                    "ts": micros(*from), "dur": micros(to.saturating_sub(*from).max(0)), "args": args,
                }));
            }
        };
        let of_call = json!({ "round_trip_us": micros(nanos(self.round_trip)), "hops": self.hops.len() });
        process("rpc-cli".to_owned(), &[(&format!("call {name}"), 0, took, of_call)]);
        for (hop, round_trip) in &self.hops {
            let title = format!("hop {hop}");
            match round_trip {
                Some(round_trip) => {
                    let way = nanos(*round_trip / 2).min(took / 2);
                    let args = json!({ "estimated": true, "round_trip_us": micros(nanos(*round_trip)) });
                    process(title, &[("forwards", way, took - way, args)]);
                }
                None => process(format!("{title} (cannot be measured)"), &[]),
            }
        }
        let Self { arrived, began, ended, .. } = *self;
        process(format!("server {address}"), &[("queued", arrived, began, json!({})), (name, began, ended, json!({}))]);
        json!({ "displayTimeUnit": "ms", "traceEvents": events })
    }
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

fn micros(nanos: i64) -> f64 {
    nanos as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_has_a_process_for_each_party() {
        let hops = vec![("tcp://gate:1".to_owned(), Some(Duration::from_micros(40))), ("tcp://b:1".to_owned(), None)];
        let times = Times {
            hops,
            took: Duration::from_micros(500),
            arrived: 60_000,
            began: 100_000,
            ended: 400_000,
            round_trip: Duration::from_micros(120),
        };
        let document = times.document("f", "tcp://origin:1");
        let events = document["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        let expected = ["rpc-cli", "hop tcp://gate:1", "hop tcp://b:1 (cannot be measured)", "server tcp://origin:1"];
        assert_eq!(names, expected);
        let slices = events.iter().filter(|event| event["ph"] == "X");
        let slices: Vec<_> = slices
            .map(|event| {
                (event["name"].as_str().unwrap(), event["pid"].as_u64(), event["ts"].as_f64(), event["dur"].as_f64())
            })
            .collect();
        assert_eq!(
            slices,
            [
                ("call f", Some(1), Some(0.0), Some(500.0)),
                ("forwards", Some(2), Some(20.0), Some(460.0)),
                ("queued", Some(4), Some(60.0), Some(40.0)),
                ("f", Some(4), Some(100.0), Some(300.0)),
            ]
        );
    }
}

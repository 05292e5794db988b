//! Trace of the last collectives of all workers, in the JSON that Perfetto and Chrome read:
//! a process for each server of a session, a thread for each worker, and a slice for each call.
//!
//! Times of different servers are aligned by the round trips in which they were asked.

use serde_json::{Value as Json, json};

use super::{MergedSession, ServerAnswer};

/// Returns the document of a trace.
pub(super) fn document(answers: &[ServerAnswer], sessions: &[MergedSession]) -> Json {
    let calls = sessions.iter().flat_map(|session| &session.workers).flat_map(|worker| &worker.calls);
    // Times count from the first call.
    let first = calls.map(|call| call.entered_micros).min().unwrap_or(0);
    let mut events = Vec::new();
    let mut process = 0_u64;
    for session in sessions {
        for answer in answers {
            let workers: Vec<_> = session.workers.iter().filter(|worker| worker.server == answer.server).collect();
            if workers.is_empty() {
                continue;
            }
            process += 1;
            let name = format!("session {} at {}", session.name, answer.server);
            events.push(json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
            for worker in workers {
                let (thread, name) = (worker.worker, format!("worker {}", worker.worker));
                events.push(json!({
                    "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": { "name": name },
                }));
                for call in &worker.calls {
                    let report = &call.call;
                    // A call that runs lasts until the time of the report.
                    let duration = report.took_micros.unwrap_or(report.entered_micros);
                    let outcome = match (report.took_micros, report.has_failed) {
                        (None, _) => "running",
                        (Some(_), true) => "failed",
                        (Some(_), false) => "done",
                    };
                    events.push(json!({
                        "ph": "X",
                        "name": report.call,
                        "cat": if report.is_transfer { "transfer" } else { "collective" },
                        "pid": process,
                        "tid": thread,
                        "ts": call.entered_micros.saturating_sub(first),
                        "dur": duration,
                        "args": {
                            "sequence": report.sequence,
                            "of": match report.grouping {
                                _ if report.is_world => "all workers".to_owned(),
                                Some(grouping) => format!("{grouping}"),
                                None => "the group".to_owned(),
                            },
                            "outcome": outcome,
                        },
                    }));
                }
            }
        }
    }
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

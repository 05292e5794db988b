//! Sessions of Disco as several servers report them, merged: all workers, and the collectives in
//! progress with those who are missing.

use std::collections::BTreeMap;
use std::fmt;

use disco::{CallReport, Grouping, HostReport, WorkerId, WorkerReport};
use serde::Serialize;

use super::ServerAnswer;
use crate::cli::output::seconds;

/// A session of Disco, with all workers of it that the servers have reported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct MergedSession {
    /// Number of the session, or of its server for a controller that gives none.
    pub(super) name: String,
    pub(super) client: String,
    pub(super) world_size: u32,
    pub(super) num_groups: u32,
    /// Workers in the order of their numbers.
    pub(super) workers: Vec<MergedWorker>,
    /// Number of workers that the servers know to be below them.
    pub(super) workers_below: u32,
    pub(super) collectives: Vec<CollectiveInProgress>,
}

/// A worker of a [`MergedSession`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct MergedWorker {
    pub(super) worker: u32,
    pub(super) server: String,
    /// Time of the report, counted from the begin of the command that merges.
    pub(super) reported_micros: i64,
    /// Command that the worker executes.
    pub(super) command: Option<String>,
    /// Time since the worker has begun its last command.
    pub(super) for_seconds: f64,
    pub(super) executed: u64,
    pub(super) queued: u64,
    /// Last calls in collectives.
    pub(super) calls: Vec<MergedCall>,
}

/// Call of a worker, with its time counted from the begin of the command that merges: earlier times
/// are negative.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct MergedCall {
    pub(super) entered_micros: i64,
    #[serde(flatten)]
    pub(super) call: CallReport,
}

/// A collective that some workers are in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CollectiveInProgress {
    /// Group of the collective; `None` for all workers.
    pub(super) group: Option<u32>,
    /// Grouping that the group is one of; `None` for the session's own groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grouping: Option<Grouping>,
    pub(super) sequence: u64,
    pub(super) call: String,
    /// Time since the first of them has entered it.
    pub(super) for_seconds: f64,
    /// Workers that have entered it.
    pub(super) entered: Vec<u32>,
    /// Workers that had not entered it when they were reported, after the first has.
    pub(super) missing: Vec<u32>,
    /// Workers that were not reported, or only before the first has entered it.
    pub(super) unknown: Vec<u32>,
}

impl fmt::Display for CollectiveInProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, grouping, sequence, call, for_seconds, entered, missing, unknown } = self;
        write!(f, "{call} #{sequence} ")?;
        match group {
            Some(group) => write!(f, "in group {group}")?,
            None => f.write_str("of all workers")?,
        }
        if let Some(grouping) = grouping {
            write!(f, " ({grouping})")?;
        }
        write!(f, " for {}: entered by {}", seconds(*for_seconds), Numbers(entered))?;
        if !missing.is_empty() {
            write!(f, "; MISSING: {}", Numbers(missing))?;
        }
        if !unknown.is_empty() {
            write!(f, "; not known of {}", Numbers(unknown))?;
        }
        Ok(())
    }
}

/// Numbers of workers in order, written as ranges.
struct Numbers<'a>(&'a [u32]);

impl fmt::Display for Numbers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            f.write_str(if at == 0 { "" } else { ", " })?;
            match range {
                [] => {}
                [one] => write!(f, "{one}")?,
                [first, .., last] => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl MergedSession {
    /// Merges the reports of several servers.
    pub(super) fn merge(answers: &[ServerAnswer]) -> Vec<Self> {
        // Reports without a number are sessions of their own. Controllers choose the numbers, so
        // that a session is told from those of other clients by their identities.
        let mut sessions: BTreeMap<(Option<u64>, &str, usize), Self> = BTreeMap::new();
        let reports = answers.iter().flat_map(|answer| answer.reports.iter().map(move |report| (answer, report)));
        for (at, (answer, report)) in reports.enumerate() {
            let HostReport { session, client, world_size, num_groups, workers, workers_below, .. } = report;
            let key = (*session, client.as_str(), if session.is_some() { 0 } else { at });
            let merged = sessions.entry(key).or_insert_with(|| Self {
                name: session.map_or_else(|| format!("at {}", answer.server), |number| format!("{number:016x}")),
                client: client.clone(),
                world_size: *world_size,
                num_groups: *num_groups,
                workers: Vec::new(),
                workers_below: 0,
                collectives: Vec::new(),
            });
            merged.workers_below = merged.workers_below.saturating_add(*workers_below);
            merged.workers.extend(workers.iter().map(|worker| MergedWorker::new(answer, worker)));
        }
        let mut sessions: Vec<_> = sessions.into_values().collect();
        for session in &mut sessions {
            session.workers.sort_by_key(|worker| worker.worker);
            // A server that was named twice.
            session.workers.dedup_by_key(|worker| worker.worker);
            session.collectives = session.collectives_in_progress();
        }
        sessions
    }

    /// Returns the collectives that workers are in: those of all workers, and those of each group.
    fn collectives_in_progress(&self) -> Vec<CollectiveInProgress> {
        let size = self.world_size / self.num_groups.max(1);
        let mut running: BTreeMap<GroupAndSequence, (u32, &MergedCall, i64)> = BTreeMap::new();
        for MergedWorker { worker, calls, .. } in &self.workers {
            for call in calls.iter().filter(|call| call.call.took_micros.is_none() && !call.call.is_transfer) {
                let grouping = call.call.grouping;
                let group = match grouping {
                    _ if call.call.is_world => None,
                    Some(grouping) => Some(grouping.group(WorkerId(*worker))),
                    None => worker.checked_div(size),
                };
                let key = (grouping.map(|grouping| (grouping.size(), grouping.stride())), group, call.call.sequence);
                let first = running.entry(key).or_insert((*worker, call, call.entered_micros));
                first.2 = first.2.min(call.entered_micros);
            }
        }
        let describe = |((_, group, sequence), (worker, call, since)): (GroupAndSequence, (u32, &MergedCall, i64))| {
            let grouping = call.call.grouping;
            let mut collective = CollectiveInProgress {
                group,
                grouping,
                sequence,
                call: call.call.call.clone(),
                for_seconds: self.latest_micros().saturating_sub(since).max(0) as f64 / 1e6,
                entered: Vec::new(),
                missing: Vec::new(),
                unknown: Vec::new(),
            };
            let members: Box<dyn Iterator<Item = u32>> = match (grouping, group) {
                (Some(grouping), Some(_)) => Box::new(grouping.members(WorkerId(worker)).map(|member| member.0)),
                (None, Some(group)) => Box::new(group * size..(group * size).saturating_add(size)),
                (_, None) => Box::new(0..self.world_size),
            };
            for member in members.take(MAX_LISTED) {
                let found = self.workers.binary_search_by_key(&member, |worker| worker.worker);
                let list = match found.ok().and_then(|at| self.workers.get(at)) {
                    None => &mut collective.unknown,
                    Some(worker) if worker.last_collective(&call.call) >= Some(sequence) => &mut collective.entered,
                    // Servers are asked one after the other, and sessions go on meanwhile.
                    Some(worker) if worker.reported_micros < since => &mut collective.unknown,
                    Some(_) => &mut collective.missing,
                };
                list.push(member);
            }
            collective
        };
        running.into_iter().map(describe).collect()
    }

    /// Returns the time of the latest report.
    fn latest_micros(&self) -> i64 {
        self.workers.iter().map(|worker| worker.reported_micros).max().unwrap_or(0)
    }
}

/// Size and stride of a grouping, unless it is the session's own; the number of a group, unless it
/// is all workers; and the number of a collective there.
type GroupAndSequence = (Option<(u32, u32)>, Option<u32>, u64);

/// Maximum number of workers that are looked for. Sizes come from servers.
const MAX_LISTED: usize = 1 << 16;

impl MergedWorker {
    fn new(answer: &ServerAnswer, report: &WorkerReport) -> Self {
        let WorkerReport { worker, command, since_micros, executed, queued, calls, .. } = report.clone();
        let made = i64::try_from(answer.made.as_micros()).unwrap_or(i64::MAX);
        let at =
            |call: CallReport| MergedCall { entered_micros: made.saturating_sub(signed(call.entered_micros)), call };
        Self {
            worker,
            server: answer.server.clone(),
            reported_micros: made,
            command,
            for_seconds: since_micros as f64 / 1e6,
            executed,
            queued,
            calls: calls.into_iter().map(at).collect(),
        }
    }

    /// Returns the number of the last collective that the worker has entered in the same grouping.
    fn last_collective(&self, like: &CallReport) -> Option<u64> {
        let calls = self.calls.iter().map(|call| &call.call);
        let is_alike = |call: &&CallReport| (call.is_world, call.grouping) == (like.is_world, like.grouping);
        calls.filter(is_alike).filter(|call| !call.is_transfer).map(|call| call.sequence).max()
    }
}

fn signed(micros: u64) -> i64 {
    i64::try_from(micros).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value as Json, json};

    use super::*;

    fn call(is_world: bool, sequence: u64, entered_micros: u64, took_micros: Option<u64>) -> Json {
        json!({
            "is_world": is_world, "is_transfer": false, "sequence": sequence, "call": "barrier",
            "entered_micros": entered_micros, "took_micros": took_micros, "has_failed": false,
        })
    }

    fn answer(server: &str, made_micros: u64, session: Option<u64>, workers: &[(u32, Json)]) -> ServerAnswer {
        let worker = |(worker, calls): &(u32, Json)| {
            json!({
                "worker": worker, "command": null, "since_micros": 0, "executed": 0, "queued": 0, "calls": calls,
            })
        };
        let report = json!({
            "session": session, "client": "me", "world_size": 6, "num_groups": 2,
            "workers": workers.iter().map(worker).collect::<Vec<_>>(), "workers_below": 0,
        });
        let reports = vec![serde_json::from_value(report).unwrap()];
        ServerAnswer { server: server.to_owned(), made: Duration::from_micros(made_micros), reports }
    }

    #[test]
    fn those_who_are_missing_are_found_in_each_group_over_several_servers() {
        // Worker 4 has gone on to the next call of its group, which worker 3 has not entered yet.
        let group = |running: u64, ago: u64| json!([call(false, 1, 900, Some(5)), call(false, running, ago, None)]);
        let answers = [
            answer("a", 2_000_000, Some(7), &[(0, json!([call(true, 1, 10, Some(3))])), (1, json!([]))]),
            answer("b", 3_000_000, Some(7), &[(3, group(2, 1_500_000)), (4, group(3, 500_000))]),
        ];
        let sessions = MergedSession::merge(&answers);
        let texts: Vec<_> = sessions[0].collectives.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "barrier #2 in group 1 for 1.500 s: entered by 3-4; not known of 5",
                "barrier #3 in group 1 for 500.0 ms: entered by 4; MISSING: 3; not known of 5",
            ]
        );
        assert_eq!((sessions.len(), sessions[0].workers[2].calls[1].entered_micros), (1, 1_500_000));

        // A worker that was reported before the first has entered may be there by now.
        let answers = [
            answer("a", 2_000_000, Some(7), &[(0, json!([]))]),
            answer("b", 3_000_000, Some(7), &[(3, json!([call(true, 9, 400_000, None)])), (4, json!([]))]),
        ];
        let text = MergedSession::merge(&answers)[0].collectives[0].to_string();
        assert_eq!(text, "barrier #9 of all workers for 400.0 ms: entered by 3; MISSING: 4; not known of 0-2, 5");
    }

    #[test]
    fn those_who_are_missing_are_found_along_each_axis_of_a_mesh() {
        // Workers 1, 3 and 5 along an axis, at the same time as the group of workers 3 to 5.
        let along = |sequence: u64| {
            let mut call = call(false, sequence, 100_000, None);
            call["grouping"] = json!({"size": 3, "stride": 2});
            json!([call])
        };
        let own = json!([call(false, 7, 100_000, None)]);
        let workers = [(1, along(7)), (3, along(6)), (4, own), (5, along(7))];
        let sessions = MergedSession::merge(&[answer("a", 2_000_000, Some(7), &workers)]);
        let texts: Vec<_> = sessions[0].collectives.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "barrier #7 in group 1 for 100.0 ms: entered by 4; MISSING: 3, 5",
                "barrier #6 in group 1 (groups of 3 workers, 2 apart) for 100.0 ms: entered by 1, 3, 5",
                "barrier #7 in group 1 (groups of 3 workers, 2 apart) for 100.0 ms: entered by 1, 5; MISSING: 3",
            ]
        );
    }

    #[test]
    fn sessions_without_numbers_are_apart_and_wild_sizes_cost_little() {
        let mut wild = answer("b", 0, None, &[(5, json!([call(false, 1, u64::MAX, None)]))]);
        wild.reports[0].world_size = u32::MAX;
        wild.reports[0].num_groups = 0;
        let sessions = MergedSession::merge(&[answer("a", 0, None, &[]), wild]);
        assert_eq!(sessions.iter().map(|session| session.name.as_str()).collect::<Vec<_>>(), ["at a", "at b"]);
        assert_eq!(sessions[1].collectives[0].unknown.len() + sessions[1].collectives[0].entered.len(), MAX_LISTED);
    }
}

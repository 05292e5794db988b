//! The report of an examination: its steps, and what was found.

use rpc_transports::{Connector, Dial, Transports};
use serde::Serialize;

use super::super::output::Output;

/// Report of one step.
#[derive(Debug, Serialize)]
pub(super) struct Step {
    step: String,
    ok: bool,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// Problem, advice, and exit code.
pub(super) struct Finding {
    pub(super) detail: String,
    pub(super) advice: String,
    pub(super) code: u8,
}

impl Finding {
    pub(super) fn new(detail: impl Into<String>, advice: impl Into<String>, code: u8) -> Self {
        Self { detail: detail.into(), advice: advice.into(), code }
    }
}

/// State of an examination: the steps so far.
pub(super) struct Examination<'a> {
    pub(super) output: &'a Output,
    pub(super) steps: Vec<Step>,
    pub(super) connector: Connector,
    pub(super) dial: Dial,
    pub(super) transports: &'a Transports,
}

impl Examination<'_> {
    pub(super) fn ok(&mut self, step: &str, detail: impl Into<String>) {
        self.record(Step { step: step.to_owned(), ok: true, detail: detail.into(), advice: None });
    }

    /// Records a failure. Returns the exit code with which the examination ends.
    pub(super) fn failed(&mut self, step: &str, finding: Finding) -> u8 {
        let Finding { detail, advice, code } = finding;
        self.record(Step { step: step.to_owned(), ok: false, detail, advice: Some(advice) });
        code
    }

    /// Returns the step that failed, and what was found there.
    pub(super) fn fault(&self) -> Option<(&str, &str)> {
        self.steps.last().filter(|step| !step.ok).map(|step| (&*step.step, &*step.detail))
    }

    fn record(&mut self, step: Step) {
        if !self.output.is_json() {
            // Standard output may be closed, which is no reason to fail.
            let word = if step.ok { "ok    " } else { "failed" };
            let _ = self.output.verdict(step.ok, word, &format!("{:10} {}", step.step, step.detail));
            if let Some(advice) = &step.advice {
                let _ = self.output.line(&format!("       {:10} {advice}", "advice"));
            }
        }
        self.steps.push(step);
    }
}

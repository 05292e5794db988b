//! Error output of a command: a [`Failure`] as text for people, or as JSON.

use std::error::Error;
use std::io;

use rpc_core::RpcError;
use serde_json::json;

use super::failure::Failure;
use super::output::Output;

impl Failure {
    /// Prints the failure on standard error.
    pub fn report(&self, output: &Output) {
        match self {
            Self::Reported(_) => return,
            // The reader of the output has closed the pipe.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
            _ => {}
        }
        if output.is_json() { self.report_json(output) } else { self.report_text(output) }
    }

    fn report_text(&self, output: &Output) {
        let rpc = self.rpc_error();
        if let (Self::Remote(_), Some(error)) = (self, rpc) {
            output.error(error.message());
        } else {
            output.error(&self.to_string());
            let mut cause = self.source();
            while let Some(error) = cause {
                match error.downcast_ref::<RpcError>() {
                    Some(error) => output.detail("because", error.message()),
                    None => output.detail("because", &error.to_string()),
                }
                cause = error.source();
            }
        }
        let Some(error) = rpc else { return };
        output.detail("kind", &error.kind().to_string());
        if let Some(kind) = error.application_kind() {
            output.detail("type", kind);
        }
        output.detail("at", &origin(error));
        if error.request_may_have_run() {
            output.detail("note", "the request may have had an effect");
        }
        if let Some(backtrace) = error.backtrace() {
            output.detail("remote backtrace", "");
            for line in backtrace.lines() {
                output.detail("", line);
            }
        }
    }

    fn report_json(&self, output: &Output) {
        let mut causes = Vec::new();
        let mut cause = self.source();
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let mut report = json!({ "message": self.to_string(), "causes": causes, "exit_code": self.exit_code() });
        if let Some(error) = self.rpc_error() {
            report["message"] = error.message().into();
            report["kind"] = error.kind().name().into();
            report["hop"] = error.hop().into();
            report["peer"] = error.peer().into();
            report["application_kind"] = error.application_kind().into();
            report["backtrace"] = error.backtrace().into();
            report["may_have_run"] = error.request_may_have_run().into();
        }
        output.error_json(&json!({ "error": report }));
    }
}

/// Describes the origin of an error.
pub(super) fn origin(error: &RpcError) -> String {
    let hop = match error.hop() {
        0 => "this side of the link".to_owned(),
        1 => "the server".to_owned(),
        hop => format!("hop {hop}"),
    };
    match error.peer() {
        Some(peer) => format!("{hop} ({peer})"),
        None => hop,
    }
}

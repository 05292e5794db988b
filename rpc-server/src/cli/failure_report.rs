//! Error output of a command: a [`Failure`] as text for people, or as JSON.

use std::error::Error;
use std::io;

use rpc_core::RpcError;
use serde_json::json;

use super::failure::Failure;
use super::output::Output;

impl Failure {
    /// Prints the failure on standard error. `jump` are the hops on the way to the server, for the
    /// place at which an error of the request arose.
    pub fn report(&self, output: &Output, jump: &[String]) {
        match self {
            Self::Reported(_) => return,
            Self::Examined { .. } if !output.is_json() => return,
            // The reader of the output has closed the pipe.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
            _ => {}
        }
        if output.is_json() { self.report_json(output, jump) } else { self.report_text(output, jump) }
    }

    fn report_text(&self, output: &Output, jump: &[String]) {
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
        output.detail("at", &origin(error, jump));
        if self.may_have_run() {
            output.detail("note", "the request may have had an effect");
        }
        if let Some(backtrace) = error.backtrace() {
            output.detail("remote backtrace", "");
            for line in backtrace.lines() {
                output.detail("", line);
            }
        }
    }

    fn report_json(&self, output: &Output, jump: &[String]) {
        let mut causes = Vec::new();
        let mut cause = self.source();
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let rpc = self.rpc_error();
        output.error_json(&json!({ "error": {
            "message": rpc.map_or_else(|| self.to_string(), |error| error.message().to_owned()),
            "causes": causes,
            "kind": rpc.map_or_else(|| self.local_kind(), |error| error.kind().name()),
            "exit_code": self.exit_code(),
            "may_have_run": self.may_have_run(),
            "hop": rpc.map(RpcError::hop),
            "at": rpc.map(|error| origin(error, jump)),
            "peer": rpc.and_then(RpcError::peer),
            "application_kind": rpc.and_then(RpcError::application_kind),
            "backtrace": rpc.and_then(RpcError::backtrace),
        } }));
    }
}

/// Describes the place at which an error arose, for a session through these hops.
pub(super) fn origin(error: &RpcError, jump: &[String]) -> String {
    // A tunnel passes bytes, and is no link of the session.
    let mut hops = jump.iter().filter(|hop| !hop.starts_with(TUNNEL));
    let place = match error.hop() {
        0 => "this side of the link".to_owned(),
        hop => match hops.nth(usize::from(hop) - 1) {
            Some(address) => format!("the hop {address}"),
            // A process of the server, or a server behind the one that a tracker has given out, is
            // the server to its clients.
            None => "the server".to_owned(),
        },
    };
    match error.peer() {
        Some(peer) if !place.ends_with(peer) => format!("{place} ({peer})"),
        _ => place,
    }
}

/// Prefix of a hop that passes bytes without looking into them.
pub(super) const TUNNEL: &str = "tunnel:";

#[cfg(test)]
mod tests {
    use rpc_core::ErrorKind;

    use super::*;

    /// A regression: with a hop its errors were "at: the server" and those of the server "at: hop
    /// 2", which also was where the errors of isolated sessions came from.
    #[test]
    fn the_place_of_an_error_is_a_hop_that_was_given_or_the_server() {
        let at = |links: u16, jump: &[&str]| {
            let error = RpcError::new(ErrorKind::NotFound, "no function");
            let error = (0..links).fold(error, |error, _| error.from_next_hop());
            origin(&error, &jump.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!([0, 1, 2].map(|links| at(links, &[])), ["this side of the link", "the server", "the server"]);
        let jump = ["tcp://gate:1", "tunnel:tcp://pipe:1", "tcp://inner:1"];
        let places = [1, 2, 3, 4].map(|links| at(links, &jump));
        assert_eq!(places, ["the hop tcp://gate:1", "the hop tcp://inner:1", "the server", "the server"]);
    }
}

//! `drain`: gives a server of a tracker to no more clients, or to clients again.

use clap::Args;
use rpc_core::RpcError;
use rpc_transports::tracker::{Drain, ServerSummary, Summary, TrackerClient};

use super::connect::CommonOptions;
use super::failure::Failure;
use super::output::{Output, counted};
use crate::tracker::display::plain;

#[derive(Args, Debug)]
pub(super) struct DrainArgs {
    /// The tracker, such as tracker://pool.lan. Default: that of rpc-cli use
    #[arg(long, env = "RPC_CLI_TRACKER", value_name = "ADDRESS")]
    pub(super) tracker: String,
    /// Give the server to clients again
    #[arg(long, env = "RPC_CLI_UNDO")]
    undo: bool,
    /// The server: its name or address, as status shows them; a part is enough if no other server
    /// has it
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    server: String,
}

/// Has the tracker give the one server that the argument stands for to no more clients, or undoes
/// that.
pub(super) async fn drain(options: &CommonOptions, output: &Output, args: DrainArgs) -> Result<(), Failure> {
    let client = TrackerClient::connect_with(options.connector()?, &args.tracker).await?;
    let summary = client.summary().await?;
    let server = find(&summary, &args.server)?;
    client.drain(Drain { server: server.id, undo: args.undo }).await?;
    let name = plain(&server.name);
    if args.undo {
        output.note(&format!("clients may get '{name}' again"));
    } else {
        let clients = match server.holders.len() as u64 {
            0 => "no client has it".to_owned(),
            clients => format!("{} may go on", counted(clients, "client")),
        };
        output.note(&format!("no more clients get '{name}'; {clients}; --undo, or its next registration, ends that"));
    }
    Ok(())
}

/// Returns the one server with this name or address, or else with this part of them.
fn find<'a>(summary: &'a Summary, text: &str) -> Result<&'a ServerSummary, RpcError> {
    let is_it = |server: &&ServerSummary| server.name == text || server.address.iter().any(|address| address == text);
    let has_it = |server: &&ServerSummary| {
        server.name.contains(text) || server.address.iter().any(|address| address.contains(text))
    };
    let mut found: Vec<_> = summary.servers.iter().filter(is_it).collect();
    if found.is_empty() {
        found = summary.servers.iter().filter(has_it).collect();
    }
    match found[..] {
        [] => Err(RpcError::not_found(format!("no server has the name or address '{text}'"))),
        [server] => Ok(server),
        _ => {
            let named = |server: &&ServerSummary| plain(&format!("{} at {}", server.name, server.address.join(", ")));
            let all: Vec<_> = found.iter().take(MAX_LISTED).map(named).collect();
            let others = if found.len() > MAX_LISTED { ", and others" } else { "" };
            let all = format!("{}{others}", all.join("; "));
            Err(RpcError::invalid_argument(format!("'{text}' stands for several servers: {all}; write the address")))
        }
    }
}

/// Largest number of servers that an error lists.
const MAX_LISTED: usize = 8;

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{MESSAGES, Reach};

    use super::*;

    #[test]
    fn a_server_is_found_by_its_name_or_address_or_a_part_that_no_other_has() {
        let server = |id, name: &str, address: &str| ServerSummary {
            id,
            name: name.to_owned(),
            key: "board".to_owned(),
            labels: Default::default(),
            devices: Vec::new(),
            capacity: 1,
            free: 1,
            address: vec![address.to_owned()],
            peer: String::new(),
            reach: Reach::Untried,
            registered_for_ms: 0,
            heard_ago_ms: 0,
            holders: Vec::new(),
            draining: None,
            details: None,
        };
        let summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 0,
            lease_ms: 0,
            servers: vec![
                server(3, "rack7", "tcp://10.0.0.7:9090"),
                server(4, "rack71", "tcp://10.0.0.71:9090"),
                server(5, "rack71", "tcp://10.0.0.71:9091"),
            ],
            queue: Vec::new(),
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        };
        // The name of one server may be a part of those of others.
        for (text, id) in [("rack7", 3), ("tcp://10.0.0.71:9090", 4), (":9091", 5), ("0.7:", 3)] {
            assert_eq!(find(&summary, text).unwrap().id, id, "{text}");
        }
        for (text, says) in [("rack71", "10.0.0.71:9091; write the address"), ("rack8", "no server")] {
            let error = find(&summary, text).unwrap_err();
            assert!(error.message().contains(says), "{error}");
        }
    }
}

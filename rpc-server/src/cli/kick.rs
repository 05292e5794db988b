//! `kick`: ends the session of a client of a tracker's server.

use clap::Args;
use rpc_core::RpcError;
use rpc_transports::tracker::{Holder, Kick, Summary, TrackerClient};

use super::connect::CommonOptions;
use super::failure::Failure;
use super::output::Output;
use crate::tracker::display::{holder, plain};

#[derive(Args, Debug)]
pub(super) struct KickArgs {
    /// The tracker, such as tracker://pool.lan. Default: that of rpc-cli use
    #[arg(long, env = "RPC_CLI_TRACKER", value_name = "ADDRESS")]
    pub(super) tracker: String,
    /// The client, as status shows it; a part is enough if no other client has it
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    client: String,
}

/// Has the tracker end the session of the one client that the argument stands for.
pub(super) async fn kick(options: &CommonOptions, output: &Output, args: KickArgs) -> Result<(), Failure> {
    let client = TrackerClient::connect_with(options.connector()?, &args.tracker).await?;
    let summary = client.summary().await?;
    let (kick, found) = find(&summary, &args.client)?;
    client.kick(kick).await?;
    output.note(&format!("the server is told with its next report to end the session of {}", holder(found)));
    Ok(())
}

/// Returns the session of the one client whose description has this text.
fn find<'a>(summary: &'a Summary, text: &str) -> Result<(Kick, &'a Holder), RpcError> {
    let sessions = summary.servers.iter().flat_map(|server| {
        let of_server = server.holders.iter();
        of_server.filter_map(|holder| Some((Kick { server: server.id, session: holder.session? }, holder)))
    });
    let mut found = sessions.filter(|(_, holder)| holder.client.contains(text));
    let Some(first) = found.next() else {
        return Err(RpcError::not_found(format!("no client with a session is called '{text}'")));
    };
    let others: Vec<_> = found.map(|(_, holder)| plain(&holder.client)).collect();
    if others.is_empty() {
        return Ok(first);
    }
    let all = [plain(&first.1.client), others.join(", ")].join(", ");
    Err(RpcError::invalid_argument(format!("'{text}' stands for several clients: {all}; write more of the name")))
}

#[cfg(test)]
mod tests {
    use rpc_transports::tracker::{HolderState, MESSAGES, Reach, ServerSummary};

    use super::*;

    #[test]
    fn a_client_is_found_by_a_part_of_its_name_that_no_other_has() {
        let holder = |client: &str, session, state| Holder {
            client: client.to_owned(),
            for_ms: 0,
            state,
            session,
            silent_ms: 0,
        };
        let server = ServerSummary {
            id: 3,
            name: "machine".to_owned(),
            key: "board".to_owned(),
            labels: Default::default(),
            devices: Vec::new(),
            capacity: 3,
            free: 0,
            address: Vec::new(),
            peer: String::new(),
            reach: Reach::Untried,
            registered_for_ms: 0,
            heard_ago_ms: 0,
            holders: vec![
                holder("alice (tcp://10.0.0.6:1)", Some(7), HolderState::InUse),
                holder("bob (tcp://10.0.0.6:2)", Some(8), HolderState::InUse),
                holder("carol (tcp://10.0.0.7:1)", None, HolderState::Granted),
            ],
            draining: None,
            details: None,
        };
        let summary = Summary {
            version: MESSAGES.version(),
            uptime_ms: 0,
            lease_ms: 0,
            servers: vec![server],
            queue: Vec::new(),
            losses: Vec::new(),
            history: Vec::new(),
            events: Vec::new(),
        };
        assert_eq!(find(&summary, "alice").unwrap().0, Kick { server: 3, session: 7 });
        assert_eq!(find(&summary, ":2)").unwrap().0, Kick { server: 3, session: 8 });
        for (text, says) in [("10.0.0.6", "several clients"), ("carol", "no client"), ("dave", "no client")] {
            let error = find(&summary, text).unwrap_err();
            assert!(error.message().contains(says), "{error}");
        }
    }
}

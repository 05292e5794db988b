//! `use`: the default server, and the other named servers of the user's file.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value as Json, json};

use super::connect::{CommonOptions, parse_address};
use super::failure::Failure;
use super::named_servers::{NamedServer, NamedServers};
use super::output::Output;

#[derive(Args, Debug)]
pub(super) struct UseArgs {
    /// Server of the file that becomes the default one. Without it, the servers are listed
    name: Option<String>,
    /// Address of a server that is added to the file under this name, with the --jump,
    /// --token-file, --ca, --cert, --cert-key and --timeout of this command
    address: Option<String>,
}

/// Lists the named servers, or makes one of them the default, which is added with an address.
pub(super) fn use_server(options: &CommonOptions, output: &Output, args: UseArgs) -> Result<(), Failure> {
    let servers = NamedServers::read(options.config())?;
    let Some(name) = &args.name else { return list(&servers, output) };
    let file = servers.file().to_owned();
    match args.address {
        Some(address) => {
            // A malformed address is refused now, and not when it is used.
            let parsed = parse_address(&address)?;
            servers.add(name, options.named_server(parsed.to_string())?)?;
        }
        None => servers.set_default(name)?,
    }
    output.note(&format!("'{name}' is the default server now, in {}", file.display()));
    Ok(())
}

fn list(servers: &NamedServers, output: &Output) -> Result<(), Failure> {
    let default = servers.default_name();
    if output.is_json() {
        let entry = |(name, server): (&str, &NamedServer)| {
            let NamedServer { address, via, key, token_file, ca, cert, cert_key, timeout } = server;
            let path = |path: &Option<PathBuf>| path.as_deref().map(|path| servers.resolve_path(path));
            json!({
                "name": name, "default": default == Some(name), "address": address, "via": via, "key": key,
                "token_file": path(token_file), "ca": path(ca), "cert": path(cert), "cert_key": path(cert_key),
                "timeout": timeout,
            })
        };
        return output.json(&servers.servers().map(entry).collect::<Vec<Json>>());
    }
    let width = servers.servers().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, server) in servers.servers() {
        let mark = if default == Some(name) { '*' } else { ' ' };
        let key = server.key.as_ref().map(|key| format!(", key {key}")).unwrap_or_default();
        let via = if server.via.is_empty() { String::new() } else { format!(" via {}", server.via.join(", ")) };
        output.line(&format!("{mark} {name:width$}  {}{key}{via}", server.address))?;
    }
    if width == 0 {
        output.note(&format!("{} names no servers: rpc-cli use NAME ADDRESS adds one", servers.file().display()));
    }
    Ok(())
}

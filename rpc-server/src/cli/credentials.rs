//! `cert` and `token`: certificates and tokens for authentication.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use serde_json::json;

use super::failure::Failure;
use super::output::Output;
use crate::pki::{CertificatePlan, ClientName, Host, IssuedPair, Made, ServerKey, rfc3339, token_file as tokens};

#[derive(Args, Debug)]
pub(super) struct CertArgs {
    /// Folder for the certificates and keys, created if it is missing
    #[arg(long, env = "RPC_CLI_OUT", value_name = "FOLDER")]
    out: PathBuf,
    /// Names and addresses under which clients reach the server, such as board.lan or 10.0.0.5; may
    /// be several. Default: those of the renewed certificate
    #[arg(long, env = "RPC_CLI_HOST", value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    host: Vec<Host>,
    /// Name in the client's certificate. Default: 'client', or that of the renewed certificate.
    /// Another name gets another key
    #[arg(long, env = "RPC_CLI_CLIENT_NAME", value_name = "NAME")]
    client_name: Option<ClientName>,
    /// Keys of the servers that the client may use. Default: all servers, or the keys of the
    /// renewed certificate
    #[arg(long, env = "RPC_CLI_CLIENT_KEY", value_name = "KEY", num_args = 1.., value_delimiter = ',')]
    client_key: Vec<ServerKey>,
    /// Validity in days of the certificates of server and client; the authority is valid for ten
    /// years
    #[arg(long, env = "RPC_CLI_DAYS", value_name = "DAYS", default_value_t = 365)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=3652))]
    days: u32,
    /// Replace the authority and all keys in the folder
    #[arg(long, env = "RPC_CLI_FORCE")]
    force: bool,
}

#[derive(Args, Debug)]
pub(super) struct TokenArgs {
    /// Write the token to this file, readable by its owner only, instead of printing it
    #[arg(long, env = "RPC_CLI_OUT", value_name = "FILE")]
    out: Option<PathBuf>,
    /// Append the token to the file, so that a server accepts the old token and the new one
    #[arg(long, env = "RPC_CLI_APPEND", requires = "out")]
    append: bool,
    /// Name by which the server knows the holder of the token. Default: 'token'
    #[arg(long, env = "RPC_CLI_NAME", value_name = "NAME")]
    name: Option<String>,
}

pub(super) fn cert(output: &Output, args: CertArgs) -> Result<(), Failure> {
    let now = SystemTime::now();
    let validity = Duration::from_secs(u64::from(args.days) * 24 * 3600);
    let mut plan = CertificatePlan::new(args.out).validity(validity).force(args.force);
    plan = args.host.into_iter().fold(plan, CertificatePlan::host);
    plan = args.client_key.into_iter().fold(plan, CertificatePlan::client_key);
    if let Some(name) = args.client_name {
        plan = plan.client_name(name);
    }
    let issued = plan.write(now)?;
    if issued.server.expires < now + validity {
        let expires = rfc3339(issued.ca.expires);
        output.warn(&format!("the authority ends on {expires}, and all that it signs ends with it; see --force"));
    }
    if output.is_json() {
        return output.json(&issued);
    }
    for (what, pair) in [("authority", &issued.ca), ("server", &issued.server), ("client", &issued.client)] {
        output.line(&line(what, pair))?;
    }
    output.note("Server and clients need ca.pem; keep ca.key to yourself. Run this again to renew.");
    Ok(())
}

fn line(what: &str, pair: &IssuedPair) -> String {
    let made = match pair.made {
        Made::Created => "new",
        Made::Renewed => "renewed",
        Made::Kept => "kept",
    };
    let names = if pair.names.is_empty() { String::new() } else { format!(" for {}", pair.names.join(", ")) };
    let (certificate, key) = (pair.certificate.display(), pair.key.display());
    format!("{what:9}  {made}, until {}{names}: {certificate}, {key}", rfc3339(pair.expires))
}

pub(super) fn token(output: &Output, args: TokenArgs) -> Result<(), Failure> {
    let token = tokens::generate(args.name.as_deref())?;
    let Some(file) = args.out else {
        return if output.is_json() { output.json(&json!({ "token": token })) } else { output.line(&token) };
    };
    let count = if args.append {
        tokens::append(&token, &file)?
    } else {
        tokens::store(&token, &file)?;
        1
    };
    if output.is_json() {
        return output.json(&json!({ "file": file, "tokens": count }));
    }
    let noun = if count == 1 { "token" } else { "tokens" };
    output.note(&format!("{} holds {count} {noun}", file.display()));
    Ok(())
}

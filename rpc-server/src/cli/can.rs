//! `can`: what the user of the tool may do at a server.

use clap::Args;
use rpc_core::{Pack, Permission};

use super::connect::{CommonOptions, Files};
use super::failure::{FAILURE, Failure};
use super::output::Output;
use crate::policy::Answer;

#[derive(Args, Debug)]
pub(super) struct CanArgs {
    /// Permission: call:NAME, device:DEVICE, run:PROGRAM, modules, disco, forward:ADDRESS,
    /// port:ADDRESS, listen:ADDRESS, peer:ADDRESS, logs or lease-priority:NUMBER
    permission: String,
    /// The server. Default: that of rpc-cli use
    pub(super) address: String,
}

pub(super) async fn can(options: &CommonOptions, output: &Output, args: CanArgs) -> Result<(), Failure> {
    Permission::parse(&args.permission).map_err(|error| Failure::Usage(error.message().to_owned()))?;
    options
        .with_session(&args.address, Files::None, async |session| {
            let can = session.get_function("rpc.can").await?;
            let Pack(answer): Pack<Answer> = can.call((args.permission,)).await?;
            if output.is_json() {
                output.json(&answer)?;
            } else {
                output.line(&answer.to_string())?;
            }
            if answer.allowed { Ok(()) } else { Err(Failure::Reported(FAILURE)) }
        })
        .await
}

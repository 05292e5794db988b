//! `up` and `down`: a server on another machine, started and stopped by `ssh`.

mod machine;

use std::env::consts::{ARCH, OS};
use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rpc_transports::Address;
use serde_json::json;

use self::machine::{Machine, Probe};
use super::connect::{CommonOptions, Files, close, parse_address};
use super::failure::Failure;
use super::interruption::Interruption;
use super::named_servers::{NamedServer, NamedServers};
use super::output::Output;
use crate::config::SERVER_PORT;
use crate::modules::hash;
use crate::pki::private_file::{Mode, write};
use crate::pki::token_file;

/// Time limit of the first connection to a server that has started.
const FIRST_CONNECTION: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(super) struct UpArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Address on which the server listens
    #[arg(long, env = "RPC_CLI_LISTEN", value_name = "ADDRESS", default_value = "tls://0.0.0.0:9090")]
    listen: String,
    /// Program there, by its path or its name in the PATH. Default: a copy of the rpc-server beside
    /// this program, which is put into ~/.local/state/rpc-up there
    #[arg(long, env = "RPC_CLI_PROGRAM", value_name = "PROGRAM")]
    program: Option<String>,
    /// Further arguments of rpc-server serve, after --
    #[arg(last = true, value_name = "ARGUMENT")]
    serve: Vec<String>,
}

#[derive(Args, Debug)]
pub(super) struct DownArgs {
    #[command(flatten)]
    target: TargetArgs,
}

#[derive(Args, Debug)]
struct TargetArgs {
    /// Machine, as ssh takes it: [USER@]HOST, or an alias of its configuration
    destination: String,
    /// Name of the server in the file that rpc-cli use shows. Default: the HOST
    #[arg(long, env = "RPC_CLI_NAME", value_name = "NAME")]
    name: Option<String>,
    /// Command in place of ssh, with its options, such as 'ssh -i key'
    #[arg(long, env = "RPC_CLI_SSH", value_name = "COMMAND", default_value = "ssh")]
    ssh: String,
}

impl TargetArgs {
    fn machine(&self) -> Result<Machine, Failure> {
        Machine::new(&self.ssh, &self.destination)
    }

    /// Returns the name of the server.
    fn name(&self) -> &str {
        let host = self.destination.rsplit_once('@').map_or(&*self.destination, |(_, host)| host);
        self.name.as_deref().unwrap_or(host)
    }
}

/// Starts a server, gives it a token, and names it.
pub(super) async fn up(
    options: &CommonOptions,
    output: &Output,
    args: UpArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let (name, machine) = (args.target.name(), args.target.machine()?);
    let servers = NamedServers::read(options.config())?;
    let token_file = token_file_of(&servers, name);
    let known = servers.check_new(name, |server| server.token_file.as_deref() == Some(&*token_file))?;
    parse_address(&args.listen)?;

    let start = async {
        let probe = machine.probe().await?;
        if let Some(pid) = probe.running {
            return Err(Failure::Unsuitable(format!(
                "a server that was started so runs on {} already, as process {pid}: stop it with rpc-cli down",
                machine.destination()
            )));
        }
        let program = match &args.program {
            Some(program) => program.clone(),
            None => install(&machine, &probe, output).await?,
        };
        if let Some(folder) = token_file.parent() {
            std::fs::create_dir_all(folder).map_err(|error| Failure::file("cannot make the folder", folder, error))?;
        }
        let token = token_file::generate(None)?;
        // A file that belongs to no server of this command is not replaced.
        let mode = if known.is_some() { Mode::Private } else { Mode::PrivateNew };
        write(&token_file, &format!("{token}\n"), mode)?;
        let named = start_and_name(options, &machine, &args, &program, &token, known.as_deref()).await;
        if named.is_err() {
            // Nobody could use it. The first failure is the one to tell.
            _ = machine.stop().await;
            _ = std::fs::remove_file(&token_file);
        }
        named
    };
    let address = tokio::select! {
        address = start => address?,
        failure = interruption.wait() => {
            output.note("the server may have started: rpc-cli down stops it");
            return Err(failure);
        }
    };
    match &known {
        Some(before) if *before != address.to_string() => output.warn(&format!(
            "'{name}' is {before} in {}, and the server is at {address}: change the file",
            servers.file().display()
        )),
        _ => {}
    }
    let reached = first_connection(options, name).await;
    if let Err(failure) = &reached {
        output.warn(&format!(
            "the server runs, and cannot be reached from here: {}; a firewall may be between, and {} may lead to a \
             server there all the same",
            reason(failure),
            machine.ssh_address(),
        ));
    }
    if output.is_json() {
        return output.json(&json!({
            "name": name, "address": address.to_string(), "token_file": token_file, "reached": reached.is_ok(),
        }));
    }
    output.line(&format!("rpc-cli info @{name}"))?;
    output.note(&format!(
        "'{name}' is {address}, with the token in {}; others need both: rpc-cli --token-file FILE info {address}",
        token_file.display()
    ));
    Ok(())
}

/// Starts the server, and makes it the default one under its name. Returns its address.
async fn start_and_name(
    options: &CommonOptions,
    machine: &Machine,
    args: &UpArgs,
    program: &str,
    token: &str,
    known: Option<&str>,
) -> Result<Address, Failure> {
    let listening = machine.start(program, token, &args.listen, &args.serve).await?;
    let address = address_of(&listening, machine).await?;
    // Read again: another command may have changed the file while the server was started.
    let (name, servers) = (args.target.name(), NamedServers::read(options.config())?);
    if known.is_some() {
        servers.set_default(name)?;
    } else {
        let token_file = Some(token_file_of(&servers, name));
        let server = options.named_server(address.to_string())?;
        servers.add(name, NamedServer { token_file, ..server })?;
    }
    Ok(address)
}

/// Stops the server, and removes its token.
pub(super) async fn down(
    options: &CommonOptions,
    output: &Output,
    args: DownArgs,
    interruption: &Interruption,
) -> Result<(), Failure> {
    let (name, machine) = (args.target.name(), args.target.machine()?);
    let servers = NamedServers::read(options.config())?;
    let was_running = tokio::select! {
        stopped = machine.stop() => stopped?,
        failure = interruption.wait() => return Err(failure),
    };
    let token_file = token_file_of(&servers, name);
    let is_ours = |server: &NamedServer| server.token_file.as_deref() == Some(&*token_file);
    // The token of another server stays.
    if matches!(servers.check_new(name, is_ours), Ok(Some(_))) {
        match std::fs::remove_file(&token_file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::file("cannot remove", &token_file, error));
            }
            _ => {}
        }
    }
    if output.is_json() {
        return output.json(&json!({ "name": name, "was_running": was_running }));
    }
    let text = if was_running { "stopped the server" } else { "no server that was started so runs" };
    output.note(&format!("{text} on {}", machine.destination()));
    Ok(())
}

/// Returns the file with the token of a server: beside the file that names it.
fn token_file_of(servers: &NamedServers, name: &str) -> PathBuf {
    let file = servers.file().with_file_name(format!("{name}.token"));
    std::path::absolute(&file).unwrap_or(file)
}

/// Copies the server beside this program to the machine, if it is not there already. Returns its
/// path there.
async fn install(machine: &Machine, probe: &Probe, output: &Output) -> Result<String, Failure> {
    if rpc_transports::program::is_embedded() {
        let host = machine.destination();
        let text = format!(
            "this rpc-cli has no program that could be copied: install rpc-server on {host}, and give its \
                            path there: --program PATH"
        );
        return Err(Failure::Unsuitable(text));
    }
    let own = std::env::current_exe().map_err(|error| Failure::local("cannot find this program", error))?;
    let server = own.with_file_name("rpc-server");
    let advice = format!("install rpc-server on {0}, and give its path there: --program PATH", machine.destination());
    if !server.is_file() {
        return Err(Failure::Unsuitable(format!("there is no {}: {advice}", server.display())));
    }
    let system = format!("{OS} {ARCH}");
    if probe.system != system {
        return Err(Failure::Unsuitable(format!(
            "{} is {}, and the rpc-server here is for {system}: {advice}",
            machine.destination(),
            probe.system
        )));
    }
    let cannot = |error| Failure::file("cannot read", &server, error);
    let program = std::fs::read(&server).map_err(cannot)?;
    let (digest, _) = hash(&*program).map_err(cannot)?;
    if probe.digest.as_deref() == Some(&*digest.to_string()) {
        return Ok(machine::INSTALLED.to_owned());
    }
    output.note(&format!("copying {} to {}", server.display(), machine.destination()));
    machine.install(program).await.map_err(|failure| match failure {
        Failure::Unsuitable(text) => Failure::Unsuitable(format!("{text}; {advice}")),
        other => other,
    })?;
    Ok(machine::INSTALLED.to_owned())
}

/// Returns the address at which clients reach a server that listens on `listening`.
async fn address_of(listening: &str, machine: &Machine) -> Result<Address, Failure> {
    let address = parse_address(listening)?;
    if !matches!(address.host(), Some("0.0.0.0" | "::")) {
        return Ok(address);
    }
    let host = machine.host_name().await?;
    address.with_host(&host).map_err(|error| Failure::Connect(error.into()))
}

/// Returns the failure and its causes as one text.
fn reason(failure: &Failure) -> String {
    let causes = std::iter::successors(failure.source(), |error| (*error).source());
    causes.fold(failure.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Connects to a named server, as other commands do.
async fn first_connection(options: &CommonOptions, name: &str) -> Result<(), Failure> {
    let mut options = options.clone();
    let mut address = format!("@{name}");
    options.resolve_servers(&mut address, SERVER_PORT)?;
    let connected = tokio::time::timeout(FIRST_CONNECTION, options.connect(&address, Files::None)).await;
    let timed_out = |_| Failure::TimedOut { what: "connecting".to_owned(), limit: FIRST_CONNECTION, why: None };
    close(&connected.map_err(timed_out)??).await;
    Ok(())
}

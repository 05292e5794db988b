//! The command line: parsed with the address that a command needs, or for the default server
//! without it.

use std::env;
use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};
use rpc_transports::Transports;

use super::Cli;
use super::argument::rewrite_negative_numbers;
use super::failure::Failure;
use super::named_servers::is_reference;

/// Ids of the arguments that name the server of a command.
const SERVER_ARGUMENTS: [&str; 2] = ["address", "tracker"];

/// Name of the default server.
pub(super) const DEFAULT_SERVER: &str = "@";

/// Parses the command line. If the address is left out, it is [`DEFAULT_SERVER`]: `call add 1 2` is
/// `call @ add 1 2`, since `add` is no address. Without a command, it is `shell` if there is a
/// default server.
///
/// # Errors
///
/// The command line is wrong, or asks for help.
pub(super) fn parse(args: impl Iterator<Item = OsString>, transports: &Transports) -> Result<Cli, clap::Error> {
    let args = rewrite_negative_numbers(args);
    let command = Cli::command();
    let complete = command.clone().try_get_matches_from(&args);
    let completed = match &complete {
        Err(error) if is_missing_command(error) => {
            let shell = args.into_iter().chain(["shell".into()]).collect();
            parse_without_address(shell, transports).ok().filter(|cli| cli.options.has_default_server())
        }
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
            parse_without_address(args, transports).ok()
        }
        Ok(matches) if leading_address(&command, matches).is_some_and(|text| !is_address(text, transports)) => {
            parse_without_address(args, transports).ok()
        }
        _ => None,
    };
    match completed {
        Some(cli) => Ok(cli),
        None => Cli::from_arg_matches(&complete?),
    }
}

/// Returns the failure of a wrong command line: the message of the parser without the usage.
pub(super) fn usage_failure(error: &clap::Error) -> Failure {
    let text = error.to_string();
    let message = text.strip_prefix("error: ").unwrap_or(&text);
    Failure::Usage(message.split("\n\n").next().unwrap_or(message).trim_end().to_owned())
}

/// Returns true if a command line that cannot be parsed asks for JSON, or the environment does.
pub(super) fn asks_for_json(args: &[OsString]) -> bool {
    let is_on =
        |value: OsString| !["", "0", "false", "n", "no", "off"].iter().any(|off| value.eq_ignore_ascii_case(off));
    let mut flags = args.iter().take_while(|arg| *arg != "--");
    flags.any(|arg| arg == "--json") || env::var_os("RPC_CLI_JSON").is_some_and(is_on)
}

fn is_missing_command(error: &clap::Error) -> bool {
    matches!(error.kind(), ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand)
}

/// Parses the command line of a command whose address is left out: it is [`DEFAULT_SERVER`].
///
/// # Errors
///
/// The command line is wrong, also since it has an address.
pub(super) fn parse_without_address(args: Vec<OsString>, transports: &Transports) -> Result<Cli, clap::Error> {
    let command = without_address(Cli::command());
    let matches = command.clone().try_get_matches_from(args)?;
    if leading_address(&Cli::command(), &matches).is_some()
        && first_positional(&command, &matches).is_some_and(|text| is_address(&text, transports))
    {
        return Err(Cli::command().error(ErrorKind::MissingRequiredArgument, "the address is left out here"));
    }
    Cli::from_arg_matches(&matches)
}

/// Makes the address of each command an option that has a default value.
fn without_address(command: Command) -> Command {
    let names: Vec<_> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |subcommand| {
            SERVER_ARGUMENTS.into_iter().fold(subcommand, |subcommand, id| {
                let is_needed = subcommand.get_arguments().any(|arg| arg.get_id() == id && arg.is_required_set());
                let optional = |arg: Arg| arg.long(id).hide(true).required(false).default_value(DEFAULT_SERVER);
                if is_needed { subcommand.mut_arg(id, optional) } else { subcommand }
            })
        })
    })
}

/// Returns the address that a command line has, if that is the first argument of the command.
fn leading_address<'a>(command: &Command, matches: &'a ArgMatches) -> Option<&'a str> {
    let (name, matches) = matches.subcommand()?;
    let first = command.find_subcommand(name)?.get_positionals().next()?.get_id().as_str();
    (first == SERVER_ARGUMENTS[0]).then(|| matches.get_one::<String>(first).map(String::as_str))?
}

/// Returns the first argument of the command as text, if it is before any `--`.
fn first_positional(command: &Command, matches: &ArgMatches) -> Option<String> {
    let (name, matches) = matches.subcommand()?;
    let first = command.find_subcommand(name)?.get_positionals().find(|arg| !arg.is_last_set())?;
    let text = matches.get_raw(first.get_id().as_str())?.next()?;
    text.to_str().map(str::to_owned)
}

/// Returns true if the text is meant as an address, and not as the name of a function or a file.
fn is_address(text: &str, transports: &Transports) -> bool {
    let Some((scheme, rest)) = text.split_once(':') else { return is_reference(text) };
    let is_port = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_reference(text)
        || rest.starts_with("//")
        || rest.rsplit(':').next().is_some_and(is_port)
        || transports.get(scheme).is_some()
        || transports.opener(scheme).is_some()
}

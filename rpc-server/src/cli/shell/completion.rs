//! Completion in the shell: commands, functions, and files here and at the server.

use std::time::Duration;

use clap::CommandFactory as _;
use rpc_core::client::Files;
use rpc_core::printable_line;
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::validate::Validator;
use rustyline::{Context, Helper};
use tokio::runtime::Handle;

use super::SharedConnection;
use crate::cli::Cli;
use crate::cli::info::server_functions;

/// Longest wait for names from the server, as the terminal takes no key meanwhile.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

/// Completer of lines. It is called on the thread that reads the terminal.
pub(super) struct LineHelper {
    connection: SharedConnection,
    runtime: Handle,
    commands: Vec<String>,
    local_files: FilenameCompleter,
}

/// Kind of the word that is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WordKind {
    Command,
    Function,
    RemoteFile,
    LocalFile,
}

impl LineHelper {
    pub(super) fn new(connection: SharedConnection) -> Self {
        let command = Cli::command();
        let mut commands: Vec<_> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
        commands.extend(["exit", "help"].map(str::to_owned));
        commands.sort_unstable();
        Self { connection, runtime: Handle::current(), commands, local_files: FilenameCompleter::new() }
    }

    /// Asks the server for names of a kind. Without an answer there are none.
    fn remote_names(&self, kind: WordKind) -> Vec<String> {
        let ask = async {
            let session = self.connection.current().await?.ok()?;
            match kind {
                WordKind::Function => {
                    let functions = server_functions(&session).await.ok()?;
                    Some(functions.into_iter().filter_map(|parts| parts.into_iter().next()).collect())
                }
                _ => {
                    let entries = Files::new(&session).ls("").await.ok()?;
                    Some(entries.into_iter().map(|entry| entry.name).collect())
                }
            }
        };
        let asked = self.runtime.block_on(async { tokio::time::timeout(ANSWER_LIMIT, ask).await });
        asked.ok().flatten().unwrap_or_default()
    }
}

impl Helper for LineHelper {}

impl Highlighter for LineHelper {}

impl Hinter for LineHelper {
    type Hint = String;
}

impl Validator for LineHelper {}

impl Completer for LineHelper {
    type Candidate = Pair;

    fn complete(&self, line: &str, pos: usize, ctx: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let (start, word, kind) = word_at(&line[..pos]);
        let names = match kind {
            WordKind::LocalFile => return self.local_files.complete(line, pos, ctx),
            WordKind::Command => self.commands.clone(),
            kind => self.remote_names(kind),
        };
        // A name with characters that a shell splits at, or that steer a terminal, is typed.
        let is_plain = |name: &&String| {
            !name.contains(|c: char| c.is_whitespace() || "'\"\\".contains(c)) && printable_line(name) == name.as_str()
        };
        let matching = names.iter().filter(|name| name.starts_with(word)).filter(is_plain);
        Ok((start, matching.map(|name| Pair { display: name.clone(), replacement: name.clone() }).collect()))
    }
}

/// Returns where the last word of the line begins, the word, and its kind.
fn word_at(line: &str) -> (usize, &str, WordKind) {
    let start =
        line.rfind(char::is_whitespace).map_or(0, |at| at + line[at..].chars().next().map_or(0, char::len_utf8));
    let (before, word) = line.split_at(start);
    let before: Vec<_> = before.split_whitespace().filter(|word| !word.starts_with('-')).collect();
    let kind = match (before.first().copied(), before.len()) {
        (None, _) => WordKind::Command,
        (Some("help"), 1) => WordKind::Command,
        (Some("call" | "time" | "functions"), 1) => WordKind::Function,
        (Some("get"), 1) | (Some("ls" | "rm"), _) => WordKind::RemoteFile,
        _ => WordKind::LocalFile,
    };
    (start, word, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_says_what_a_word_is() {
        for (line, start, word, kind) in [
            ("", 0, "", WordKind::Command),
            ("ca", 0, "ca", WordKind::Command),
            ("help c", 5, "c", WordKind::Command),
            ("call ma", 5, "ma", WordKind::Function),
            ("call --json ma", 12, "ma", WordKind::Function),
            ("call add x", 9, "x", WordKind::LocalFile),
            ("get mod", 4, "mod", WordKind::RemoteFile),
            ("get model ", 10, "", WordKind::LocalFile),
            ("rm a b", 5, "b", WordKind::RemoteFile),
            ("put ü", 4, "ü", WordKind::LocalFile),
        ] {
            assert_eq!(word_at(line), (start, word, kind), "{line}");
        }
    }
}

//! Runs the shell blocks of the documents with the programs of this checkout, as a reader would in
//! one folder, and parses those that need other machines. The Rust blocks are documentation tests
//! of `rpc_tests::documents`.
//!
//! A block that begins with "```sh" is run after the earlier blocks of its document. A "```text"
//! block behind it has lines that it prints, in their order. One with "```sh no_run" is parsed,
//! and the flags of its `rpc-*` commands are looked up in their help texts. The same holds for the
//! block of the two commands in README.md.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::collections::HashMap;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Time limit of one document, longer than any takes on a slow machine.
const LIMIT: Duration = Duration::from_secs(120);

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns the folder of the programs, beside which the tests are built.
fn programs() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().to_owned()
}

/// Returns all documents: those of the workspace, of `docs/`, and of the crates.
fn documents() -> Vec<PathBuf> {
    let folders = fs::read_dir(workspace()).unwrap().map(|entry| entry.unwrap().path());
    let folders = folders.filter(|path| path.join("Cargo.toml").is_file() || path.ends_with("docs"));
    let mut documents: Vec<_> = folders
        .chain([workspace().to_owned()])
        .flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.sort();
    documents
}

/// A fenced block of shell commands.
struct Block {
    line: usize,
    runs: bool,
    commands: String,
    /// Lines that the commands print, among others.
    expected: Vec<String>,
}

fn blocks(document: &Path) -> Vec<Block> {
    let text = fs::read_to_string(document).unwrap();
    let (mut blocks, mut open, mut marked) = (Vec::<Block>::new(), None, false);
    // True directly behind a block of commands that are run.
    let mut is_behind_run = false;
    for (number, line) in text.lines().enumerate() {
        match &mut open {
            None => {
                marked = (marked || line == "<!-- ci:begin -->") && line != "<!-- ci:end -->";
                if let Some(fence) = line.strip_prefix("```") {
                    let words: Vec<_> = fence.split([' ', ',']).collect();
                    let runs = words == ["sh"] && !marked;
                    let block = Block { line: number + 1, runs, commands: String::new(), expected: Vec::new() };
                    open = Some((words[0].to_owned(), block));
                }
            }
            Some((_, block)) if line != "```" => block.commands.extend([line, "\n"]),
            Some(_) => {
                let Some((language, block)) = open.take() else { continue };
                if language == "text"
                    && is_behind_run
                    && let Some(last) = blocks.last_mut()
                {
                    last.expected = block.commands.lines().map(str::to_owned).collect();
                }
                is_behind_run = language == "sh" && block.runs;
                blocks.extend((language == "sh").then_some(block));
            }
        }
    }
    assert!(open.is_none(), "{}: a block is not closed", document.display());
    blocks
}

/// Returns a shell that runs the script. It has a network of its own where the machine can make
/// one: documents have fixed ports, which others may use here.
fn bash(script: &str) -> Command {
    let mut command = Command::new("bash");
    let mut script = script.to_owned();
    if std::env::var_os("RPC_TESTS_REQUIRE_NETNS").is_some() {
        command = Command::new("unshare");
        command.args(["--net", "bash"]);
        script.insert_str(0, "ip link set lo up\n");
    }
    command.args(["-euo", "pipefail", "-c", &script]).stdin(Stdio::null());
    command
}

#[test]
fn every_block_of_shell_commands_can_be_parsed() {
    for document in documents() {
        for block in blocks(&document) {
            let output = Command::new("bash").args(["-n", "-c", &block.commands]).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}:{}: {error}", document.display(), block.line);
        }
    }
}

/// Help texts by command. Commands that do not exist are left out.
#[derive(Default)]
struct Help(HashMap<Vec<String>, Option<String>>);

impl Help {
    fn of(&mut self, command: &[String]) -> Option<&str> {
        let text = self.0.entry(command.to_vec()).or_insert_with(|| {
            let mut program = Command::new(programs().join(&command[0]));
            let output = program.args(&command[1..]).arg("--help").output().unwrap();
            output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
        });
        text.as_deref()
    }
}

/// Returns the commands of a block that begin with one of our programs, as words.
fn our_commands(block: &Block) -> Vec<Vec<String>> {
    let text = block.commands.replace("\\\n", " ");
    let parts =
        text.lines().flat_map(|line| line.split(" #").next().unwrap_or_default().split(['|', ';', '&', '(', ')']));
    let words = parts.map(|part| part.split_whitespace().map(|word| word.trim_matches(['\'', '"']).to_owned()));
    // The program may follow a launcher such as `mpirun`. Behind cargo it is an argument of
    // cargo.
    let words =
        words.map(Iterator::collect::<Vec<_>>).filter(|words| words.first().is_some_and(|word| word != "cargo"));
    let words = words.map(|words| words.into_iter().skip_while(|word| !word.starts_with("rpc-")).collect::<Vec<_>>());
    words.filter(|words| words.first().is_some_and(|program| programs().join(program).is_file())).collect()
}

#[test]
fn every_flag_of_our_programs_is_in_their_help() {
    let (mut help, mut seen) = (Help::default(), 0);
    for document in documents() {
        for block in blocks(&document) {
            for words in our_commands(&block) {
                let is_name = |word: &&String| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
                let names: Vec<_> =
                    words.iter().filter(is_name).filter(|word| !word.starts_with('-')).cloned().collect();
                // The texts of the program, of its command, and of a command within that, as far as
                // they exist.
                let mut texts = vec![help.of(&names[..1]).unwrap_or_default().to_owned()];
                for len in 2..=names.len().min(3) {
                    texts.extend(help.of(&names[..len]).map(str::to_owned));
                }
                for flag in words.iter().filter(|word| word.starts_with("--") && word.len() > 2) {
                    let flag = flag.split('=').next().unwrap();
                    let known =
                        texts.iter().any(|text| text.split([' ', ',', '[', ']', '\n', '=']).any(|word| word == flag));
                    let place = format!("{}:{}", document.display(), block.line);
                    assert!(known, "{place}: {} has no flag {flag}", names.join(" "));
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 0, "no document shows a flag, or the programs are not built");
}

#[test]
fn every_document_runs_from_its_first_block_to_its_last() {
    for document in documents() {
        let blocks: Vec<_> = blocks(&document).into_iter().filter(|block| block.runs).collect();
        if blocks.is_empty() {
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let head = |block: &Block| format!("== {}:{}", document.display(), block.line);
        let script: String =
            blocks.iter().map(|block| format!("echo '{}' >&2\n{}", head(block), block.commands)).collect();
        let printed = run(&script, folder.path());
        for block in &blocks {
            let head = head(block);
            let of_block = printed.lines().skip_while(|line| *line != head).skip(1);
            let mut lines = of_block.take_while(|line| !line.starts_with("== "));
            for expected in &block.expected {
                assert!(lines.any(|line| line == expected), "{head} does not print '{expected}' then:\n{printed}");
            }
        }
    }
}

#[test]
fn the_tour_of_the_readme_is_one_of_a_first_run() {
    let blocks = blocks(&workspace().join("README.md"));
    let tour = blocks.iter().find(|block| block.runs).unwrap();
    let commands = our_commands(tour).into_iter().map(|words| words[1].clone());
    assert!(commands.eq(["serve", "call", "run", "lease", "forward", "call"]), "{:?}", our_commands(tour));
    assert!(!tour.expected.is_empty());
}

#[test]
fn every_document_with_rust_blocks_has_documentation_tests() {
    let list = fs::read_to_string(workspace().join("tests/src/documents.rs")).unwrap();
    for document in documents() {
        if !fs::read_to_string(&document).unwrap().contains("\n```rust") {
            continue;
        }
        let name = document.strip_prefix(workspace()).unwrap().to_str().unwrap();
        // Front pages of crates include their READMEs.
        let front_page = fs::read_to_string(document.with_file_name("src/lib.rs")).unwrap_or_default();
        let listed = list.contains(&format!("\"{name}\"")) || front_page.contains("include_str!(\"../README.md\")");
        assert!(listed, "{name} is neither in tests/src/documents.rs nor the front page of its crate");
    }
}

/// Runs a script in a folder, and then ends the processes that it has left running. Returns what it
/// has printed.
fn run(script: &str, folder: &Path) -> String {
    let path = std::env::join_paths(
        [programs()].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
    );
    let log = folder.join("log");
    let written = fs::File::create(&log).unwrap();
    let mut command = bash(script);
    command.current_dir(folder).env("PATH", path.unwrap()).env("HOME", folder).process_group(0);
    command.env("XDG_STATE_HOME", folder).env("XDG_CONFIG_HOME", folder).env("XDG_RUNTIME_DIR", folder);
    command.stdout(written.try_clone().unwrap()).stderr(written);
    let mut child = command.spawn().unwrap();
    let group = Pid::from_child(&child);
    let began = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if began.elapsed() > LIMIT => break None,
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    // The servers that the blocks have started in the background.
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
    let mut said = String::new();
    fs::File::open(log).unwrap().read_to_string(&mut said).unwrap();
    assert!(status.is_some_and(|status| status.success()), "{status:?} after\n{said}");
    said
}

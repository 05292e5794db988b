//! Another machine, on which `ssh` runs scripts of the shell.
//!
//! All that is kept there is in one folder, which only its owner can enter: the program, the token,
//! the process id, the log and the folder for workspaces. The folder has the name of the machine,
//! since machines may share a home.

use std::process::{Output, Stdio};

use rpc_transports::{Address, exec};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::cli::failure::Failure;

/// Path of the copied program there.
pub(super) const INSTALLED: &str = "./rpc-server";

/// Beginning of each script. `is_running` is true if the process of the file is the server, and no
/// other that has got its number. No script has a single quote or a line break, so that every login
/// shell takes it as one word.
const PROLOGUE: &str = "umask 077; d=\"${XDG_STATE_HOME:-$HOME/.local/state}/rpc-up/$(uname -n)\"; mkdir -p \"$d\" && \
                        cd \"$d\" || exit 1; p=$(cat pid 2>/dev/null); is_running() { [ -n \"$p\" ] && \
                        tr \"\\0\" \" \" 2>/dev/null <\"/proc/$p/cmdline\" | grep -qF \"$d/ready\"; }; ";

/// Prints what there is.
const PROBE: &str = "echo \"system $(uname -s) $(uname -m)\"; if is_running; then echo \"running $p\"; fi; \
                     if [ -x rpc-server ]; then echo \"digest $(sha256sum rpc-server 2>/dev/null)\"; fi";

/// Puts the program of `$1` bytes on standard input in its place, if it can be run.
const INSTALL: &str = "cat >new && [ \"$(wc -c <new)\" -eq \"$1\" ] && chmod 700 new && ./new --version >/dev/null \
                       && mv new rpc-server || { rm -f new; exit 1; }";

/// Starts the program `$1`, with the token on standard input, and prints its addresses.
const START: &str = "s=\"$1\"; shift; cat >new && mv new token && rm -f ready || exit 1; \
                     nohup \"$s\" serve --token-file \"$d/token\" --ready-file \"$d/ready\" \
                     --workdir \"$d/work\" \"$@\" >log 2>&1 </dev/null & p=$!; echo $p >pid; i=0; \
                     while [ ! -e ready ] && kill -0 $p 2>/dev/null && [ $i -lt 100 ]; do sleep 0.1; \
                     i=$((i+1)); done; \
                     if [ -e ready ]; then while read -r a; do echo \"listening $a\"; done <ready; else \
                     kill $p 2>/dev/null; rm -f pid token; tail -n 20 log >&2; exit 1; fi";

/// Stops the server: in order, then at once. The second signal does not wait for sessions.
const STOP: &str = "if is_running; then echo running; for s in TERM TERM KILL; do kill -$s $p 2>/dev/null; i=0; \
                    while is_running && [ $i -lt 20 ]; do sleep 0.1; i=$((i+1)); done; done; fi; \
                    if is_running; then exit 1; fi; rm -f pid token ready";

/// Exit code of `ssh` for failures of its own.
const SSH_FAILED: i32 = 255;

/// A machine that `ssh` reaches.
pub(super) struct Machine {
    ssh: Vec<String>,
    destination: String,
}

/// State of a machine.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Probe {
    /// Operating system and processor, in Rust's names.
    pub(super) system: String,
    /// Process id of the server that runs.
    pub(super) running: Option<String>,
    /// SHA-256 of the program that has been copied, in hexadecimal digits.
    pub(super) digest: Option<String>,
}

impl Machine {
    /// Returns the machine that the command `ssh` calls `destination`.
    ///
    /// # Errors
    ///
    /// [`Failure::Usage`] for a destination that is none.
    pub(super) fn new(ssh: &str, destination: &str) -> Result<Self, Failure> {
        // `ssh` would take it as an option.
        if destination.is_empty() || destination.starts_with('-') || destination.contains("://") {
            return Err(Failure::Usage(format!("'{destination}' is no [USER@]HOST")));
        }
        let command = Address::opaque("exec", ssh).and_then(|address| exec::argv_of(&address));
        let ssh = command.map_err(|error| Failure::Usage(format!("--ssh '{ssh}': {error}")))?;
        Ok(Self { ssh, destination: destination.to_owned() })
    }

    pub(super) fn destination(&self) -> &str {
        &self.destination
    }

    /// Returns the address by which `ssh` leads to a server that it starts for one session.
    pub(super) fn ssh_address(&self) -> String {
        format!("ssh://{}", self.destination)
    }

    /// Returns the state of the machine.
    pub(super) async fn probe(&self) -> Result<Probe, Failure> {
        let text = self.run(PROBE, &[], Vec::new()).await?;
        Ok(Probe::parse(&text))
    }

    /// Copies a program to [`INSTALLED`].
    pub(super) async fn install(&self, program: Vec<u8>) -> Result<(), Failure> {
        let len = program.len().to_string();
        self.run(INSTALL, &[&len], program).await.map(|_| ())
    }

    /// Starts a server. Returns the first address on which it listens.
    pub(super) async fn start(
        &self,
        program: &str,
        token: &str,
        listen: &str,
        more: &[String],
    ) -> Result<String, Failure> {
        let mut args = vec![program, "--listen", listen];
        args.extend(more.iter().map(String::as_str));
        let addresses = self.run(START, &args, format!("{token}\n").into_bytes()).await?;
        // A login shell may print lines of its own.
        let address = addresses.lines().find_map(|line| line.strip_prefix("listening "));
        let none = || Failure::Unsuitable(format!("the server on {} tells no address", self.destination));
        address.map(str::to_owned).ok_or_else(none)
    }

    /// Stops the server. Returns true if it ran.
    pub(super) async fn stop(&self) -> Result<bool, Failure> {
        Ok(self.run(STOP, &[], Vec::new()).await?.lines().any(|line| line == "running"))
    }

    /// Returns the name or the number of the machine in the network: `destination` may be an alias
    /// that only `ssh` knows.
    pub(super) async fn host_name(&self) -> Result<String, Failure> {
        let output = self.ssh(&["-G", "--", &self.destination], Vec::new()).await?;
        let text = String::from_utf8_lossy(&output.stdout);
        let host = text.lines().find_map(|line| line.strip_prefix("hostname "));
        let plain = self.destination.rsplit_once('@').map_or(&*self.destination, |(_, host)| host);
        Ok(host.unwrap_or(plain).to_owned())
    }

    /// Runs a script there. Returns its standard output.
    async fn run(&self, script: &str, args: &[&str], input: Vec<u8>) -> Result<String, Failure> {
        let words = args.iter().map(|word| format!(" {}", quoted(word))).collect::<String>();
        let command = format!("exec sh -c {} up{words}", quoted(&format!("{PROLOGUE}{script}")));
        let options =
            ["-T", "-a", "-x", "-oClearAllForwardings=yes", "-oPermitLocalCommand=no", "-oRemoteCommand=none"];
        let output = self.ssh(&[&options[..], &["--", &self.destination, &command]].concat(), input).await?;
        let text = |bytes: &[u8]| rpc_core::printable(String::from_utf8_lossy(bytes).trim()).to_string();
        match output.status.code() {
            Some(0) => Ok(text(&output.stdout)),
            Some(SSH_FAILED) => {
                Err(Failure::Ssh { destination: self.destination.clone(), detail: text(&output.stderr) })
            }
            _ => Err(Failure::Unsuitable(format!("on {}: {}", self.destination, text(&output.stderr)))),
        }
    }

    async fn ssh(&self, args: &[&str], input: Vec<u8>) -> Result<Output, Failure> {
        let (program, own) = self.ssh.split_first().expect("a command has a program");
        let cannot = |error| Failure::local(format!("cannot run {program}"), error);
        let mut command = Command::new(program);
        command.args(own).args(args).kill_on_drop(true);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(cannot)?;
        let mut stdin = child.stdin.take();
        let write = async {
            // The script may end before it has read all, and says why.
            if let Some(stdin) = &mut stdin {
                let _ = stdin.write_all(&input).await;
            }
            drop(stdin.take());
        };
        let (output, ()) = tokio::join!(child.wait_with_output(), write);
        output.map_err(cannot)
    }
}

impl Probe {
    fn parse(text: &str) -> Self {
        let mut probe = Self::default();
        for line in text.lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["system", system, machine] => {
                    let processor = match machine {
                        "arm64" => "aarch64",
                        "armv7l" | "armv6l" => "arm",
                        "i386" | "i586" | "i686" => "x86",
                        other => other,
                    };
                    probe.system = format!("{} {processor}", system.to_lowercase());
                }
                ["running", pid] => probe.running = Some(pid.to_owned()),
                ["digest", digest, ..] if !digest.is_empty() => probe.digest = Some(digest.to_owned()),
                _ => {}
            }
        }
        probe
    }
}

/// Returns the text as one word of every shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_one_line_without_single_quotes() {
        for script in [PROLOGUE, PROBE, INSTALL, START, STOP] {
            assert!(!script.contains(['\'', '\n']), "{script}");
        }
    }

    #[test]
    fn the_state_is_read_from_what_the_script_prints() {
        let text = "Welcome!\nsystem Linux armv7l\nrunning 77\ndigest 0a1b  rpc-server";
        let expected =
            Probe { system: "linux arm".to_owned(), running: Some("77".to_owned()), digest: Some("0a1b".to_owned()) };
        assert_eq!(Probe::parse(text), expected);
        assert_eq!(
            Probe::parse("system Linux x86_64\ndigest "),
            Probe { system: "linux x86_64".to_owned(), ..Probe::default() }
        );
    }

    #[test]
    fn destinations_that_ssh_would_take_for_options_are_refused() {
        for bad in ["", "-oProxyCommand=x", "ssh://board"] {
            assert!(Machine::new("ssh", bad).is_err(), "{bad}");
        }
        assert!(Machine::new("ssh 'x", "board").is_err());
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}

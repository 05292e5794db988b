//! `rpc-cli shell`: scripts of lines, and a terminal.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::cli::{Fixture, Run, command};

/// Runs `rpc-cli` with these lines as its standard input.
fn script(mut command: Command, lines: &str) -> Run {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    Run { code: output.status.code().unwrap_or(-1), stdout, stderr }
}

/// As [`script`], at a server that takes one session at a time, and that may not have seen the end
/// of the one before.
fn script_in_turn(args: &[&str], lines: &str) -> Run {
    let begun = Instant::now();
    loop {
        let run = script(command(args), lines);
        if !run.stderr.contains("max_sessions") || begun.elapsed() > Duration::from_secs(60) {
            return run;
        }
    }
}

#[test]
fn a_script_runs_over_one_connection_until_a_line_fails() {
    let fixture = Fixture::new(&["--max-sessions", "1"]);
    let shell = |lines: &str| script_in_turn(&["shell", fixture.address()], lines);
    let file = fixture.path("two words");
    std::fs::write(&file, "data").unwrap();
    let lines = format!(
        "# A comment, and an empty line.\n\ncall rpc.echo 'two words'\ncall rpc.echo -1e-3 --json\n\
         put '{file}' copy\nls\nget copy -\nfunctions rpc.noop\ntime rpc.noop -q --json\nexit\ncall nothing\n"
    );
    let run = shell(&lines);
    assert_eq!(run.code, 0, "{run:?}");
    let expected = "two words\n-0.001\ncopy\ndatarpc.noop(...) -> null\n{";
    assert!(run.stdout.starts_with(expected), "{run:?}");
    assert!(shell("help call\n").ok().contains("Arguments:"));

    for (lines, code, says) in [
        ("call no.such.function\nput x\n", 1, "no.such.function"),
        ("info tcp://127.0.0.1:1\n", 2, "unexpected argument"),
        ("call tcp://127.0.0.1:1 rpc.echo\n", 2, "left out here"),
        ("call 'open\n", 2, "not closed"),
        ("call -J tcp://127.0.0.1:1 rpc.echo 1\n", 2, "give it to rpc-cli shell"),
        ("shell\n", 2, "a shell already"),
        ("put - name\n", 2, "standard input is this script"),
        ("nothing\n", 2, "unrecognized"),
    ] {
        let run = shell(&format!("{lines}call rpc.echo behind\n"));
        assert!(run.code == code && run.stderr.contains(says) && run.stdout.is_empty(), "{lines}: {run:?}");
    }

    // Without a command, a shell of the default server.
    let config = fixture.path("config");
    std::fs::write(&config, format!("default = 'a'\n[server.a]\naddress = '{}'\n", fixture.address())).unwrap();
    assert_eq!(script_in_turn(&["--config", &config], "call rpc.echo 1\n").ok(), "1\n");
    assert_eq!(script(command(&[]), "call rpc.echo 1\n").code, 2);
}

/// Starts `rpc-cli shell` at a terminal. Returns it with what it prints.
fn terminal(address: &str, home: &str) -> (Child, BufReader<impl Read>) {
    // `script` makes the terminal, and puts the shell into its foreground.
    let mut command = Command::new("script");
    command.args(["-qec", &format!("exec {} shell {address}", env!("CARGO_BIN_EXE_rpc-cli")), "/dev/null"]);
    command.env("HOME", home).env("TERM", "xterm").env_remove("XDG_STATE_HOME");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, output)
}

#[test]
fn a_terminal_has_history_and_completion_and_an_interrupt_ends_the_command_alone() {
    let fixture = Fixture::new(&[]);
    let home = fixture.path("home");
    let (mut child, mut output) = terminal(fixture.address(), &home);
    let mut input = child.stdin.take().unwrap();
    let mut until = |text: &str| {
        let mut seen = String::new();
        while !seen.contains(text) {
            let mut byte = [0];
            assert_eq!(output.read(&mut byte).unwrap(), 1, "{seen}");
            seen.push(char::from(byte[0]));
        }
        seen
    };
    until("rpc> ");
    input.write_all(b"ping -i 1ms\r").unwrap();
    until("reply from");
    input.write_all(b"\x03").unwrap();
    until("replies, min/avg");
    until("rpc> ");
    // A prefix of one function only, and a key that ends the completed line.
    input.write_all(b"call rpc.ech\t 41\r").unwrap();
    until("\n41");
    until("rpc> ");
    // The key for the last line of the history.
    input.write_all(b"\x1b[A\x7f2\r").unwrap();
    until("\n42");
    until("rpc> ");
    input.write_all(b"exit\r").unwrap();
    assert!(child.wait().unwrap().success());
    let history = std::fs::read_to_string(format!("{home}/.local/state/rpc/history")).unwrap();
    assert!(history.lines().any(|line| line == "call rpc.echo 42"), "{history}");
}

/// Passes connections on to `server`. Returns the address, and a receiver that gets each connection
/// when it begins, and again when the client has closed it.
fn proxy(server: &str) -> (String, mpsc::Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let server = server.strip_prefix("tcp://").unwrap().to_owned();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        for mut client in listener.incoming().map(Result::unwrap) {
            let mut server = TcpStream::connect(&server).unwrap();
            tell.send(client.try_clone().unwrap()).unwrap();
            let (mut answers, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut answers, &mut to_client));
            let tell = tell.clone();
            thread::spawn(move || {
                let _ = io::copy(&mut client, &mut server);
                let _ = server.shutdown(Shutdown::Both);
                let _ = tell.send(client);
            });
        }
    });
    (address, told)
}

#[test]
fn a_lost_connection_is_made_anew() {
    let fixture = Fixture::new(&[]);
    let (address, connections) = proxy(fixture.address());
    let mut shell = command(&["shell", &address]);
    let mut child = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut input, mut lines) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
    writeln!(input, "call rpc.echo 1").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "1");
    connections.recv().unwrap().shutdown(Shutdown::Write).unwrap();
    connections.recv().unwrap();
    writeln!(input, "call rpc.echo 2").unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.success(), stderr.contains("was lost, and is made anew")), (true, true), "{stderr}");
    assert_eq!(lines.next().unwrap().unwrap(), "2");
}

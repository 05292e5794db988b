//! Tests of `ssh://` addresses: command lines, refused addresses, explanations of failures.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::mpsc;

use super::*;
use crate::transport::Transports;
use crate::{ConnectError, Connector};

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

fn destination(text: &str) -> Destination {
    Destination::of(&address(text)).unwrap()
}

/// Returns a transport whose `ssh` is a script of the shell. Its arguments are those of `ssh`.
fn stand_in(script: &str) -> Ssh {
    Ssh::new().command("sh", ["-c", script, "ssh"])
}

#[test]
fn each_part_of_the_address_has_its_place_on_the_command_line() {
    let arguments = destination("ssh://me@board.lan:2222/key").arguments(true, Duration::from_millis(2500));
    let [options @ .., host, command] = &arguments[..] else { panic!("{arguments:?}") };
    assert_eq!((host.as_str(), command.as_str()), ("board.lan", "'rpc-server' serve --stdio"));
    assert_eq!(options[options.len() - 5..], ["-l", "me", "-p", "2222", "--"]);
    assert!(options.contains(&"-oConnectTimeout=2".to_owned()), "{options:?}");
    let arguments = destination("ssh://[fe80::1%eth0]").arguments(true, Duration::ZERO);
    assert_eq!(arguments[arguments.len() - 3..][..2], ["--", "fe80::1%eth0"]);
    assert!(arguments.contains(&"-oConnectTimeout=1".to_owned()), "{arguments:?}");
    assert!(!arguments.iter().any(|argument| argument == "-l" || argument == "-p"), "{arguments:?}");
}

/// Returns the command line by which `with` dials.
fn command_line(with: &Dial) -> Vec<String> {
    Ssh::new().attempt(&address("ssh://board"), with).unwrap().command.argv
}

/// With as long a limit as that of the handshake, `ssh` was ended before it said why.
#[test]
fn ssh_has_half_of_the_time_to_reach_the_host() {
    assert!(command_line(&Dial::default()).contains(&"-oConnectTimeout=5".to_owned()));
    let short = Dial { connect_timeout: Duration::from_millis(1500), ..Dial::default() };
    assert!(command_line(&short).contains(&"-oConnectTimeout=1".to_owned()));
}

#[test]
fn questions_are_for_a_user_who_dials_at_a_terminal() {
    let (user, server) = (Dial::default(), Dial { may_prompt: false, ..Dial::default() });
    assert!(may_ask(&user, || true));
    assert!(!may_ask(&user, || false));
    assert!(!may_ask(&server, || true));
    assert!(command_line(&server).contains(&"-oBatchMode=yes".to_owned()));
}

#[test]
fn ssh_is_told_to_ask_no_questions() {
    let batch = "-oBatchMode=yes".to_owned();
    assert!(destination("ssh://board").arguments(false, Duration::ZERO).contains(&batch));
    assert!(!destination("ssh://board").arguments(true, Duration::ZERO).contains(&batch));
}

#[test]
fn the_shell_takes_any_program_as_one_word() {
    for (written, program) in [
        ("rpc-server", "rpc-server"),
        ("/opt/rpc%20server/bin", "/opt/rpc server/bin"),
        ("it's", "it's"),
        ("a%3Bb%26%26c|d$(e)`f`", "a;b&&c|d$(e)`f`"),
        ("%22%5C*%3F~", "\"\\*?~"),
        ("PATH%3D/tmp", "PATH=/tmp"),
        ("if", "if"),
        ("ü", "ü"),
    ] {
        let destination = destination(&format!("ssh://board?program={written}"));
        assert_eq!(destination.program, program);
        // The shell prints the words that it has found, one a line.
        let script = format!("printf '%s\\n' {}", destination.remote_command());
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{program}\nserve\n--stdio\n"));
    }
}

#[test]
fn addresses_that_could_become_options_or_commands_are_refused() {
    for text in [
        "ssh:board",
        "ssh://-oProxyCommand",
        "ssh://-l@board",
        "ssh://board:0",
        "ssh://board?program=",
        "ssh://board?program=-c",
        "ssh://board?program=a%0Ab",
        "ssh://board?program=a%00",
        "ssh://board?program=%FF",
        "ssh://board?proxy=none",
    ] {
        let error = Transports::default().check(&address(text)).unwrap_err();
        assert!(matches!(error, TransportError::Address(AddressError::Invalid { .. })), "{text}: {error:?}");
        assert!(error.to_string().contains("ssh://me@board.lan"), "{error}");
    }
    for text in ["ssh://-oProxyCommand=x@board", "ssh://a b"] {
        assert!(text.parse::<Address>().is_err(), "{text}");
    }
}

#[test]
fn channels_start_programs_on_the_network_and_do_not_count_as_encrypted() {
    let properties = Transports::default().check(&address("ssh://localhost")).unwrap();
    assert_eq!(properties, Properties::program(Reach::Network));
    assert!(properties.starts_programs && !properties.encrypted && !properties.is_local());
}

#[tokio::test]
async fn a_command_that_is_not_installed_is_a_spawn_error_that_names_it() {
    let ssh = Ssh::new().command("/does/not/exist/ssh", ["-i", "key"]);
    let (to, with) = (address("ssh://board"), Dial::default());
    for error in [ssh.dial(&to, &with).await.unwrap_err(), ssh.dial_blocking(&to, &with).unwrap().unwrap_err()] {
        assert!(matches!(error, TransportError::Spawn { .. }), "{error:?}");
        assert!(error.to_string().starts_with("cannot start /does/not/exist/ssh for ssh://board;"), "{error}");
    }
}

#[tokio::test]
async fn each_failure_is_explained_in_both_forms() {
    for (script, words) in [
        ("echo 'ssh: no such host' >&2; exit 255", &["ssh failed", "ssh: no such host", "me@board"][..]),
        ("printf 'a\\033[1mb\\r\\n' >&2; exit 255", &["a\u{fffd}[1mb", "-p 22 me@board"]),
        ("exit 127", &["no program /opt/rpc-server on board", "?program=PATH"]),
        ("echo '/opt/rpc-server: Command not found.' >&2; exit 1", &["no program /opt/rpc-server on board"]),
        ("echo 'Permission denied' >&2; exit 126", &["cannot be executed", "Permission denied"]),
        (
            "printf \"error: unexpected argument '--stdio'\\n\\nUsage: rpc-server\\n\" >&2; exit 2",
            &["does not know `serve --stdio`", "unexpected argument", "update it"],
        ),
        ("echo busy >&2; exit 69", &["/opt/rpc-server on board ended (exit status: 69)", "busy"]),
        ("exit 0", &["/opt/rpc-server on board ended (exit status: 0)"]),
        ("kill -9 $$", &["ssh was killed (signal: 9"]),
    ] {
        let connector = Connector::new().transports(Transports::default().with(stand_in(script)));
        let to = "ssh://me@board:22?program=/opt/rpc-server";
        let told = |error: ConnectError| {
            let text = error.into_rpc_error().to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{script}: {text}");
        };
        told(connector.connect(to).await.unwrap_err());
        let blocking = tokio::task::spawn_blocking(move || connector.connect_blocking(to));
        told(blocking.await.unwrap().unwrap_err());
    }
}

#[test]
fn standard_error_is_passed_on_to_its_receiver() {
    let (pipes, received) = mpsc::channel::<OwnedFd>();
    let ssh = stand_in("echo first >&2; cat; echo last >&2").stderr(ChildStderr::new(move |pipe| {
        pipes.send(pipe).unwrap();
    }));
    let mut channel = ssh.dial_blocking(&address("ssh://board"), &Dial::default()).unwrap().unwrap();
    channel.write_all(b"ping").unwrap();
    let mut echoed = [0; 4];
    channel.read_exact(&mut echoed).unwrap();
    assert_eq!(&echoed, b"ping");
    channel.io().shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    std::fs::File::from(received.recv().unwrap()).read_to_string(&mut text).unwrap();
    assert_eq!(text, "first\nlast\n");
}

#[test]
fn only_the_end_of_standard_error_is_kept() {
    let tail = Arc::new(StderrTail::default());
    let (read, write) = rustix::pipe::pipe().unwrap();
    let pipes = std::sync::Mutex::new(Vec::new());
    let receiver = tail.receiver(Some(ChildStderr::new(move |pipe| pipes.lock().unwrap().push(pipe))));
    receiver.take(read);
    let mut write = std::fs::File::from(write);
    write.write_all(&b"a long line\n".repeat(1000)).unwrap();
    write.write_all(b"the last line\n\n").unwrap();
    drop(write);
    let lines = tail.lines(Duration::from_secs(60));
    assert_eq!(lines.last().map(String::as_str), Some("the last line"));
    assert!(lines.len() < 500, "{}", lines.len());
}

//! Tests of `exec:` addresses.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::launcher::POLL_MIN;
use super::*;

/// Time limit against hanging, far longer than any step of these tests takes.
const TIME_LIMIT: Duration = Duration::from_secs(60);

fn exec(argv: &[&str]) -> Address {
    Address::exec(argv.iter().copied()).unwrap()
}

fn guard(channel: &Channel) -> &ChildGuard {
    channel.guard().unwrap().downcast_ref::<Arc<ChildGuard>>().unwrap()
}

async fn started(argv: &[&str]) -> Channel {
    dial(&exec(argv), None).await.unwrap()
}

fn started_blocking(argv: &[&str]) -> BlockingChannel {
    dial_blocking(&exec(argv), None).unwrap()
}

fn pid(guard: &ChildGuard) -> Pid {
    Pid::from_raw(guard.pid().try_into().unwrap()).unwrap()
}

/// Waits until no process, not even a zombie, has this id. Returns the time that it took.
fn reaped(pid: Pid) -> Duration {
    let start = Instant::now();
    while rustix::process::test_kill_process(pid).is_ok() {
        assert!(start.elapsed() < TIME_LIMIT, "{pid:?} is still there");
        thread::sleep(POLL_MIN);
    }
    start.elapsed()
}

#[tokio::test]
async fn bytes_cross_async() {
    let mut channel = started(&["cat"]).await;
    assert!(channel.peer().starts_with("exec:cat (process "));
    channel.io_mut().write_all(b"ping").await.unwrap();
    let mut buffer = [0; 4];
    channel.io_mut().read_exact(&mut buffer).await.unwrap();
    assert_eq!(&buffer, b"ping");
    assert_eq!(guard(&channel).exit_status().unwrap(), None);
    channel.io_mut().shutdown().await.unwrap();
    assert_eq!(channel.io_mut().read(&mut buffer).await.unwrap(), 0);
    assert!(guard(&channel).exited().await.unwrap().success());
}

#[test]
fn bytes_cross_blocking() {
    let mut channel = started_blocking(&["cat"]);
    channel.write_all(b"ping").unwrap();
    let mut buffer = [0; 4];
    channel.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
    channel.io().shutdown(Shutdown::Write).unwrap();
    assert_eq!(channel.read(&mut buffer).unwrap(), 0);
    let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
    assert!(guard.exited_within(TIME_LIMIT).unwrap().unwrap().success());
}

#[test]
fn every_argv_round_trips() {
    for argv in [
        &["a"][..],
        &["a", "", " ", "'", "\"", "\\", "it's", "$HOME", "*", "\n", "ü", "a\\'b", "a?key=b"],
        &["a b", "trailing "],
        &["//host/program", "x"],
        &["-", "--x=1,2", "#no-comment"],
    ] {
        let address = Address::exec(argv.iter().copied()).unwrap();
        let parsed: Address = address.to_string().parse().unwrap();
        assert_eq!((&parsed, argv_of(&parsed).unwrap()), (&address, argv.iter().map(ToString::to_string).collect()));
    }
    for text in ["exec:", "exec: ", "exec:''", "exec:'a", "exec:a\0"] {
        assert!(Exec::new().check(&text.parse().unwrap()).is_err(), "{text}");
    }
}

#[test]
fn words_split_as_in_a_shell() {
    for (line, words) in [
        ("", &[][..]),
        (" \t ", &[]),
        ("a  b", &["a", "b"]),
        ("a'b c'd", &["ab cd"]),
        (r#""a \" \\ \n \$x""#, &[r#"a " \ \n $x"#]),
        (r"a\ b \'", &["a b", "'"]),
        ("'' \"\"", &["", ""]),
        ("a|b > $c;d #e", &["a|b", ">", "$c;d", "#e"]),
    ] {
        assert_eq!(split_words(line).unwrap(), words, "{line}");
    }
    for line in ["'a", "\"a", "a\\", "\"a\\\""] {
        assert!(split_words(line).is_err(), "{line}");
    }
}

#[tokio::test]
async fn a_command_that_does_not_exist_is_a_spawn_error() {
    let address = exec(&["/does/not/exist"]);
    for error in [dial(&address, None).await.unwrap_err(), dial_blocking(&address, None).unwrap_err()] {
        let TransportError::Spawn { source, .. } = &error else {
            panic!("{error:?}");
        };
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
        assert_eq!(error.address(), "exec:/does/not/exist");
    }
}

#[tokio::test]
async fn an_early_exit_can_be_explained_after_the_end_of_the_stream() {
    let mut channel = started(&["sh", "-c", "exit 7"]).await;
    assert_eq!(channel.io_mut().read(&mut [0]).await.unwrap(), 0);
    assert_eq!(guard(&channel).exited().await.unwrap().code(), Some(7));
    assert_eq!(guard(&channel).exit_status().unwrap().unwrap().code(), Some(7));
}

#[tokio::test]
async fn a_child_that_exits_at_the_end_of_the_stream_is_reaped_within_the_grace() {
    // Where the machine stands still for the whole grace, the test begins anew.
    for _ in 0..5 {
        let mut channel = started(&["cat"]).await;
        // The program runs.
        channel.io_mut().write_all(b"x").await.unwrap();
        channel.io_mut().read_exact(&mut [0]).await.unwrap();
        let pid = pid(guard(&channel));
        drop(channel);
        if reaped(pid) < GRACE {
            return;
        }
    }
    panic!("each child was there for as long as the grace lasts");
}

#[tokio::test]
async fn a_child_that_ignores_the_end_of_the_stream_is_killed_and_reaped() {
    let channel = started(&["sleep", "1000"]).await;
    let pid = pid(guard(&channel));
    drop(channel);
    reaped(pid);
}

#[tokio::test]
async fn dropping_the_guard_ends_the_stream_while_others_hold_the_bytes() {
    let channel = started(&["cat"]).await;
    let pid = pid(guard(&channel));
    let (mut io, _, guard) = channel.into_parts();
    drop(guard);
    assert_eq!(io.read(&mut [0]).await.unwrap(), 0);
    reaped(pid);
}

#[tokio::test]
async fn memory_can_be_shared_with_a_child() {
    let channel = started(&["cat"]).await;
    assert_eq!(channel.process(), Some(guard(&channel).pid()));
    assert!(started_blocking(&["cat"]).shares_memory());
}

#[tokio::test]
async fn a_kill_needs_no_grace() {
    let mut channel = started(&["sleep", "1000"]).await;
    guard(&channel).kill().unwrap();
    assert_eq!(channel.io_mut().read(&mut [0]).await.unwrap(), 0);
    assert!(!guard(&channel).exited().await.unwrap().success());
    guard(&channel).kill().unwrap();
}

#[test]
fn a_child_outlives_the_thread_that_asked_for_it() {
    let asking = thread::spawn(|| started_blocking(&["cat"]));
    let mut channel = asking.join().unwrap();
    channel.write_all(b"x").unwrap();
    channel.read_exact(&mut [0]).unwrap();
}

// The tests below need a process that runs code of this crate. They start this test binary with
// an environment variable that selects the role. Output of the test harness comes before
// `READY`.

const ROLE: &str = "RPC_TRANSPORTS_CHILD_TEST_ROLE";
const READY: &str = "ready\n";

fn acting(role: &str) -> Vec<String> {
    let binary = std::env::current_exe().unwrap();
    let test = "transports::exec::tests::play_a_role";
    vec![
        "env".into(),
        format!("{ROLE}={role}"),
        binary.to_str().unwrap().into(),
        "--exact".into(),
        "--ignored".into(),
        "--nocapture".into(),
        test.into(),
    ]
}

#[test]
#[ignore = "run by other tests in a process of its own"]
fn play_a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("echo") => {
            println!("as yet this goes to the parent");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let channel = stdio_channel().await.unwrap();
                println!("this must not break the protocol");
                assert_eq!(io::stdin().read(&mut [0]).unwrap(), 0);
                let again = take_stdio().unwrap_err();
                assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
                let (io, _, _) = channel.into_parts();
                let (mut read, mut write) = tokio::io::split(io);
                write.write_all(READY.as_bytes()).await.unwrap();
                tokio::io::copy(&mut read, &mut write).await.unwrap();
            });
        }
        Ok("parent") => {
            let channel = started_blocking(&["sleep", "1000"]);
            let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
            println!("{READY}{}", guard.pid());
            // The process lives until it is killed.
            let _ = io::stdin().read(&mut [0]);
        }
        _ => {}
    }
}

fn skip_to_ready(output: &mut impl BufRead) {
    let mut line = String::new();
    while !line.ends_with(READY) {
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "{line:?}");
    }
}

#[test]
fn a_child_over_one_socket_serves_and_may_print() {
    let address = Address::exec(acting("echo")).unwrap();
    let channel = dial_blocking(&address, None).unwrap();
    let mut output = BufReader::new(channel.io());
    skip_to_ready(&mut output);
    channel.io().write_all(b"ping").unwrap();
    channel.io().shutdown(Shutdown::Write).unwrap();
    let mut echoed = Vec::new();
    output.read_to_end(&mut echoed).unwrap();
    assert_eq!(echoed, b"ping");
    let guard: &Arc<ChildGuard> = channel.guard().unwrap().downcast_ref().unwrap();
    assert!(guard.exited_within(TIME_LIMIT).unwrap().unwrap().success());
}

#[test]
fn a_child_over_two_pipes_serves_and_may_print() {
    let argv = acting("echo");
    let mut child =
        Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    skip_to_ready(&mut output);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"ping").unwrap();
    drop(input);
    let mut echoed = Vec::new();
    output.read_to_end(&mut echoed).unwrap();
    assert_eq!(echoed, b"ping");
    assert!(child.wait().unwrap().success());
}

#[cfg(target_os = "linux")]
#[test]
fn children_die_with_a_parent_that_is_killed() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{PidfdFlags, pidfd_open};

    let argv = acting("parent");
    let mut parent =
        Command::new(&argv[0]).args(&argv[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(parent.stdout.take().unwrap());
    skip_to_ready(&mut output);
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let grandchild = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
    let grandchild = pidfd_open(grandchild, PidfdFlags::empty()).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    // The descriptor is readable once the process has ended, even if another process reaps it.
    let mut watched = [PollFd::new(&grandchild, PollFlags::IN)];
    let limit = Timespec::try_from(TIME_LIMIT).unwrap();
    assert_eq!(poll(&mut watched, Some(&limit)).unwrap(), 1);
}

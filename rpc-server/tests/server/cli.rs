//! `rpc-cli` against `rpc-server`, both as the programs that they are.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::DataType;
use rpc_core::dlpack::to_bytes;
use rpc_server::ServerProcess;
use rpc_server::cli::npy::{read_header, write_header};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
#[cfg(target_os = "linux")]
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

/// Exit code and output of the tool.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) code: i32,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Run {
    pub(super) fn json(&self) -> Json {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the standard output of a run that succeeded.
    pub(super) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.stdout
    }
}

pub(super) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rpc-cli"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("RPC_CLI_") {
            command.env_remove(name);
        }
    }
    // Named servers of whoever runs the tests.
    command.env("XDG_CONFIG_HOME", "/nonexistent");
    command.args(args).stdin(Stdio::null());
    command
}

pub(super) fn run(mut command: Command) -> Run {
    let output = command.output().unwrap();
    Run {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(super) fn cli(args: &[&str]) -> Run {
    run(command(args))
}

/// As [`cli`], for a command that is to fail: one that runs for a minute is killed.
pub(super) fn failing_cli(args: &[&str]) -> Run {
    let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Run { code: child.wait().unwrap().code().unwrap_or(-1), stdout, stderr }
}

/// A server, its workspaces, and a folder for files here.
pub(super) struct Fixture {
    pub(super) server: ServerProcess,
    pub(super) folder: TempDir,
}

impl Fixture {
    pub(super) fn new(flags: &[&str]) -> Self {
        Self::listening(&[&["--listen", "tcp://127.0.0.1:0"], flags].concat())
    }

    /// Starts a server whose flags have its address.
    pub(super) fn listening(flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = crate::server_program();
        command.args(["serve", "--exit-with-stdin", "--log-level", "error"]);
        command.arg("--workdir").arg(folder.path().join("workdir")).args(flags);
        Self { server: ServerProcess::spawn(command).unwrap(), folder }
    }

    pub(super) fn address(&self) -> &str {
        self.server.address()
    }

    /// Runs `rpc-cli COMMAND ADDRESS ARGS…`.
    fn cli(&self, name: &str, args: &[&str]) -> Run {
        let mut all = vec![name, self.address()];
        all.extend(args);
        cli(&all)
    }

    pub(super) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }
}

/// Listens with a foreign protocol: sends `greeting` to each client.
fn stranger(greeting: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || {
                let mut stream = stream.unwrap();
                // Reads first: a connection that is closed with unread input is reset, and the
                // greeting may be lost.
                let mut buffer = [0; 1024];
                let _ = stream.read(&mut buffer);
                let _ = stream.write_all(greeting);
                if !greeting.is_empty() {
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                }
                // Reads until the client has closed the connection.
                while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
            });
        }
    });
    address
}

/// Returns an address at which nothing listens. A socket that has it, and does not listen either,
/// keeps it from others until this process ends.
pub(super) fn unused() -> String {
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::empty(), None).unwrap();
    fcntl_setfd(&socket, FdFlags::CLOEXEC).unwrap();
    bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let socket = Box::leak(Box::new(TcpListener::from(socket)));
    format!("tcp://{}", socket.local_addr().unwrap())
}

fn write_npy(path: &str, shape: &[i64], elements: &[f32]) {
    let mut file = Vec::new();
    write_header(&mut file, DataType::F32, shape).unwrap();
    file.extend_from_slice(&to_bytes(elements));
    std::fs::write(path, file).unwrap();
}

#[test]
fn types_of_arguments_follow_from_their_text() {
    let fixture = Fixture::new(&[]);
    let echo = |arg: &str| fixture.cli("call", &["--json", "rpc.echo", arg]).json();
    for (written, meant) in [
        ("null", json!(null)),
        ("true", json!(true)),
        ("false", json!(false)),
        ("7", json!(7)),
        ("-7", json!(-7)),
        ("-1.5e3", json!(-1500.0)),
        ("7.0", json!(7.0)),
        ("word", json!("word")),
        ("two words", json!("two words")),
        ("str:7", json!("7")),
        ("str:-x", json!("-x")),
        ("str:@a.npy", json!("@a.npy")),
        ("nan", json!("nan")),
        ("-1e-3", json!(-0.001)),
        ("-.5", json!(-0.5)),
        ("-1e3", json!(-1000.0)),
        (r#"[1, -2.5, "@a", [true, null]]"#, json!([1, -2.5, "@a", [true, null]])),
        (r#"{"a": [1], "b": {}}"#, json!({ "a": [1], "b": {} })),
        ("hex:00ff", json!({ "bytes": 2, "hex": "00ff", "complete": true })),
    ] {
        assert_eq!(echo(written), meant, "{written}");
    }
    assert_eq!(fixture.cli("call", &["rpc.echo", "7.0"]).ok(), "7.0\n");
    assert_eq!(fixture.cli("call", &["rpc.echo", "a\"b"]).ok(), "a\"b\n");
    assert_eq!(fixture.cli("call", &["rpc.echo", "--", "-x"]).ok(), "-x\n");
    assert_eq!(fixture.cli("call", &["rpc.noop"]).ok(), "");
    let file = fixture.path("file");
    std::fs::write(&file, "content").unwrap();
    assert_eq!(fixture.cli("call", &["rpc.echo", &format!("bytes:@{file}")]).ok(), "b\"content\" (7 bytes)\n");
    for wrong in ["@", "99999999999999999999", "[1,", "hex:f", "bytes:x"] {
        assert_eq!(fixture.cli("call", &["rpc.echo", wrong]).code, 2, "{wrong}");
    }
}

#[test]
fn tensors_are_sent_from_files_and_returned_to_files() {
    let fixture = Fixture::new(&[]);
    let (small, large, back) = (fixture.path("small.npy"), fixture.path("large.npy"), fixture.path("back.npy"));
    write_npy(&small, &[2, 2], &[1.0, 2.5, -3.0, 0.1]);
    let shown = fixture.cli("call", &["rpc.echo", &format!("@{small}")]).ok();
    assert_eq!(shown, "tensor float32 [2, 2] on cpu:0, 16 B\n[[1.0, 2.5],\n [-3.0, 0.1]]\n");
    let shown = fixture.cli("call", &["--json", "rpc.echo", &format!("@{small}")]).json();
    assert_eq!(shown["tensor"]["elements"], json!([[1.0, 2.5], [-3.0, 0.1]]));

    // Several pieces, the last one not full.
    let elements: Vec<f32> = (0..5_000_001).map(|at| at as f32).collect();
    write_npy(&large, &[elements.len() as i64], &elements);
    let run = fixture.cli("call", &["rpc.echo", &format!("@{large}"), "-o", &back]);
    assert_eq!(run.ok(), "");
    assert!(std::fs::read(&large).unwrap() == std::fs::read(&back).unwrap());
    let header = read_header(&mut std::fs::File::open(&back).unwrap()).unwrap();
    assert_eq!(header.shape, [elements.len() as i64]);

    // An argument as the call has left it.
    let (argument, file) = (format!("@{large}"), format!("1={back}"));
    std::fs::remove_file(&back).unwrap();
    assert_eq!(fixture.cli("call", &["rpc.noop", "0", &argument, "-o", &file]).ok(), "");
    assert!(std::fs::read(&large).unwrap() == std::fs::read(&back).unwrap());
    let none = fixture.cli("call", &["rpc.noop", "0", "-o", &format!("0={back}")]);
    assert!(none.code == 2 && none.stderr.contains("argument 0 is no tensor"), "{none:?}");

    std::fs::write(&small, &std::fs::read(&large).unwrap()[..1000]).unwrap();
    let cut = fixture.cli("call", &["rpc.echo", &format!("@{small}")]);
    assert!(cut.code == 1 && cut.stderr.contains("copy or save it again"), "{cut:?}");
    std::fs::write(&small, "no array").unwrap();
    let text = fixture.cli("call", &["rpc.echo", &format!("@{small}")]);
    assert!(text.code == 1 && text.stderr.contains("not a .npy file"), "{text:?}");
    let none = fixture.cli("call", &["rpc.echo", "1", "-o", &back]);
    assert!(none.code == 1 && none.stderr.contains("0 tensors"), "{none:?}");
}

#[test]
fn a_file_that_is_put_can_be_got_from_the_named_workspace() {
    let fixture = Fixture::new(&[]);
    let (local, copy) = (fixture.path("local.bin"), fixture.path("copy.bin"));
    let data: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    std::fs::write(&local, &data).unwrap();
    let put = fixture.cli("put", &[&local]);
    assert!(put.stderr.starts_with("local.bin: 2.86 MiB in ") && put.stderr.ends_with("/s\n"), "{put:?}");
    assert_eq!(put.ok(), "");
    assert_eq!(fixture.cli("put", &["--json", &local, "folder/"]).json()["path"], "folder/local.bin");
    assert_eq!(fixture.cli("ls", &[]).ok(), "folder/local.bin\nlocal.bin\n");
    let entries = fixture.cli("ls", &["--json", "folder"]).json();
    assert_eq!((entries[0]["name"].as_str(), entries[0]["size"].as_u64()), (Some("folder/local.bin"), Some(3_000_000)));
    assert!(fixture.cli("ls", &["-l", "folder"]).ok().starts_with("3000000 2"));

    fixture.cli("get", &["folder/local.bin", &copy]).ok();
    assert!(std::fs::read(&copy).unwrap() == data);
    let folder = fixture.path("into");
    std::fs::create_dir(&folder).unwrap();
    fixture.cli("get", &["folder/local.bin", &folder]).ok();
    assert!(Path::new(&folder).join("local.bin").exists());

    assert_eq!(fixture.cli("ls", &["--workspace", "other"]).ok(), "");
    fixture.cli("rm", &["folder", "local.bin"]).ok();
    assert_eq!(fixture.cli("ls", &[]).ok(), "");
    for (name, args) in [("get", &["nothing"][..]), ("rm", &["nothing"]), ("ls", &["nothing"]), ("get", &["../x"])] {
        assert_eq!(fixture.cli(name, args).code, 1, "{name} {args:?}");
    }
    assert!(!Path::new("nothing").exists());
}

#[test]
fn folders_and_patterns_are_transferred_and_links_do_not_lead_out() {
    let fixture = Fixture::new(&[]);
    let (tree, into) = (fixture.path("tree"), fixture.path("into"));
    std::fs::create_dir_all(format!("{tree}/sub/none")).unwrap();
    std::fs::write(fixture.path("outside"), "secret").unwrap();
    for (name, mode) in [("a.txt", 0o644), ("b.txt", 0o644), ("sub/tool", 0o755)] {
        std::fs::write(format!("{tree}/{name}"), name).unwrap();
        std::fs::set_permissions(format!("{tree}/{name}"), Permissions::from_mode(mode)).unwrap();
    }
    for (link, target) in [("inner", "sub/tool"), ("outer", "../outside"), ("loop", "..")] {
        symlink(target, format!("{tree}/{link}")).unwrap();
    }
    let put = fixture.cli("put", &[&tree]);
    assert!(put.stderr.contains("tree/outer is not sent") && put.stderr.contains("tree/loop is not"), "{put:?}");
    assert!(put.stderr.contains("\n4 files: 26 B in ") && put.code == 0, "{put:?}");
    assert_eq!(fixture.cli("ls", &[]).ok(), "tree/a.txt\ntree/b.txt\ntree/inner\ntree/sub/tool\n");

    fixture.cli("get", &["tree", &format!("{into}/copy")]).ok();
    assert_eq!(std::fs::read_to_string(format!("{into}/copy/sub/tool")).unwrap(), "sub/tool");
    let mode = |name: &str| std::fs::metadata(format!("{into}/copy/{name}")).unwrap().permissions().mode() & 0o100;
    assert_eq!((mode("sub/tool"), mode("inner"), mode("a.txt")), (0o100, 0o100, 0));
    assert!(Path::new(&format!("{into}/copy/sub/none")).is_dir());

    let pattern = format!("{tree}/*.txt");
    let flat = fixture.cli("put", &["--json", &pattern, &format!("{tree}/sub"), "flat"]).json();
    let names: Vec<_> = flat["files"].as_array().unwrap().iter().map(|file| file["path"].as_str().unwrap()).collect();
    assert_eq!(names, ["flat/a.txt", "flat/b.txt", "flat/sub/tool"]);
    assert_eq!((flat["bytes"].as_u64(), flat["transferred"].as_u64()), (Some(18), Some(18)));
    fixture.cli("get", &["tree/s*", "flat/?.txt", &into]).ok();
    let there = |name: &str| Path::new(&into).join(name).exists();
    assert!(there("sub/tool") && there("a.txt") && there("b.txt") && !there("inner"));

    for (command, args, code, says) in [
        ("get", &["tree/a.txt", "flat/a.txt", "x"][..], 2, "would both be x/a.txt"),
        ("get", &["*.bin"], 1, "no file of the workspace matches"),
        ("get", &["a[", "x"], 2, "a["),
        ("put", &[&format!("{tree}/*.bin")], 1, "no file matches"),
        ("put", &["-", &tree, "x"], 2, "- stands alone"),
    ] {
        let refused = fixture.cli(command, args);
        assert!(refused.code == code && refused.stderr.contains(says), "{args:?}: {refused:?}");
    }
    assert!(!Path::new("x").exists());
}

#[test]
fn an_interrupted_transfer_is_continued_behind_what_is_proven_the_same() {
    let fixture = Fixture::new(&[]);
    let (local, copy) = (fixture.path("local"), fixture.path("copy"));
    let data: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let other = vec![1; 1000];
    std::fs::write(&local, &data).unwrap();
    let transferred = |run: Run| (run.json()["bytes"].as_u64().unwrap(), run.json()["transferred"].as_u64().unwrap());

    // What an upload of before would have left.
    let part = fixture.path("part");
    for (left, sent, says) in [(&data[..200_000], 100_000, "continued after"), (&other[..], 300_000, "of another file")]
    {
        std::fs::write(&part, left).unwrap();
        fixture.cli("put", &[&part, "name.rpc-part"]).ok();
        let put = fixture.cli("put", &["--resume", &local, "name"]);
        assert!(put.code == 0 && put.stderr.contains(says), "{put:?}");
        assert_eq!(fixture.cli("ls", &[]).ok(), "name\n");
        assert_eq!(transferred(fixture.cli("put", &["--json", "--resume", &local, "name"])), (300_000, 0));
        fixture.cli("get", &["name", &copy]).ok();
        assert!(std::fs::read(&copy).unwrap() == data);

        std::fs::write(format!("{copy}.rpc-part"), left).unwrap();
        std::fs::write(&copy, "old").unwrap();
        assert_eq!(transferred(fixture.cli("get", &["--json", "--resume", "name", &copy])), (300_000, sent));
        assert!(std::fs::read(&copy).unwrap() == data && !Path::new(&format!("{copy}.rpc-part")).exists());
        assert_eq!(transferred(fixture.cli("get", &["--json", "--resume", "name", &copy])), (300_000, 0));
        fixture.cli("rm", &["name"]).ok();
    }
}

/// Returns the bytes that a file takes on the disk.
#[cfg(target_os = "linux")]
fn on_disk(path: impl AsRef<Path>) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_with_holes_has_holes_on_the_other_side() {
    let fixture = Fixture::new(&[]);
    let (local, copy) = (fixture.path("local"), fixture.path("copy"));
    let mut data = vec![0; 8 << 20];
    data[5 << 20] = 1;
    std::fs::write(&local, &data).unwrap();
    for resume in [&[][..], &["--resume"]] {
        fixture.cli("put", &[resume, &[&local, "name"]].concat()).ok();
        // What an earlier download has left ends in the middle of a hole.
        std::fs::write(format!("{copy}.rpc-part"), &data[..3_000_000]).unwrap();
        fixture.cli("get", &[resume, &["name", &copy]].concat()).ok();
        assert!(std::fs::read(&copy).unwrap() == data);
        assert!(on_disk(&copy) < 6 << 20, "{}", on_disk(&copy));
        let workdir = Path::new(&fixture.path("workdir")).join("named/anonymous/cli/files/name");
        assert!(std::fs::read(&workdir).unwrap() == data);
        assert!(on_disk(&workdir) < 4 << 20, "{}", on_disk(&workdir));
        std::fs::remove_file(&copy).unwrap();
        fixture.cli("rm", &["name"]).ok();
    }
}

#[test]
fn files_are_read_from_standard_input_and_written_to_standard_output() {
    let fixture = Fixture::new(&[]);
    let mut put = command(&["put", fixture.address(), "-", "text"]);
    let mut child = put.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from a pipe\n").unwrap();
    assert!(child.wait().unwrap().success());
    let got = fixture.cli("get", &["text", "-"]);
    assert!(got.stderr.starts_with("text: 12 B in ") && got.stderr.ends_with("/s\n"), "{got:?}");
    assert_eq!(got.ok(), "from a pipe\n");
    assert_eq!(fixture.cli("get", &["text", "-", "--json"]).ok(), "from a pipe\n");
    assert_eq!(fixture.cli("put", &["-"]).code, 2);
}

/// Sends the signal once the program waits for it.
#[cfg(target_os = "linux")]
fn interrupt(child: &mut Child, signal: Signal) {
    let status = format!("/proc/{}/status", child.id());
    let is_caught = || {
        let status = std::fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
    };
    while !is_caught() {
        assert_eq!(child.try_wait().unwrap(), None, "it has ended by itself");
        thread::yield_now();
    }
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Returns once a file whose path begins with `path`, and which may have lost its name, is open in
/// the program and no longer empty.
#[cfg(target_os = "linux")]
fn until_it_has_written_to(child: &mut Child, path: &str) {
    let is_written = |descriptor: std::io::Result<std::fs::DirEntry>| {
        let link = descriptor.unwrap().path();
        let leads_there = std::fs::read_link(&link).is_ok_and(|file| file.to_string_lossy().starts_with(path));
        leads_there && std::fs::metadata(&link).is_ok_and(|file| file.len() > 0)
    };
    let descriptors = format!("/proc/{}/fd", child.id());
    while !std::fs::read_dir(&descriptors).unwrap().any(is_written) {
        assert_eq!(child.try_wait().unwrap(), None, "it has ended by itself");
        thread::yield_now();
    }
}

fn spawn(args: &[&str]) -> Child {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_command_says_so_and_what_it_sent_in_part_is_not_there() {
    let fixture = Fixture::new(&[]);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        // It waits for its standard input.
        let mut child = spawn(&["put", fixture.address(), "-", "name"]);
        let _open = child.stdin.take();
        interrupt(&mut child, signal);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains("interrupted"), "{stderr}");
        assert_eq!(fixture.cli("ls", &[]).ok(), "");
    }
}

/// Passes a connection on to `server`, and stops after so many bytes of its answers. Returns the
/// address, and a receiver that gets a message then.
fn stalling(server: &str, answered: u64) -> (String, mpsc::Receiver<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    let server = server.strip_prefix("tcp://").unwrap().to_owned();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(server).unwrap();
        let (mut requests, mut on) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut requests, &mut on));
        std::io::copy(&mut (&mut server).take(answered), &mut client).unwrap();
        tell.send(()).unwrap();
        // Both connections stay open until the test ends.
        thread::park();
        drop((client, server));
    });
    (address, told)
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_download_leaves_the_old_file_and_nothing_beside_it() {
    let fixture = Fixture::new(&[]);
    let (local, folder) = (fixture.path("local"), fixture.path("downloads"));
    std::fs::write(&local, vec![7; 4 << 20]).unwrap();
    fixture.cli("put", &[&local, "name"]).ok();
    std::fs::create_dir(&folder).unwrap();
    let target = Path::new(&folder).join("name");
    std::fs::write(&target, "old").unwrap();
    let (address, stalls) = stalling(fixture.address(), 2 << 20);
    let mut child = spawn(&["get", &address, "name", target.to_str().unwrap()]);
    stalls.recv().unwrap();
    until_it_has_written_to(&mut child, &folder);
    interrupt(&mut child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("name: incomplete, and not kept"), "{stderr}");
    assert_eq!(std::fs::read_to_string(&target).unwrap(), "old");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_download_leaves_its_part_for_the_next_one_if_it_may() {
    let fixture = Fixture::new(&[]);
    let (local, target) = (fixture.path("local"), fixture.path("target"));
    std::fs::write(&local, vec![7; 4 << 20]).unwrap();
    fixture.cli("put", &[&local, "name"]).ok();
    let (address, stalls) = stalling(fixture.address(), 2 << 20);
    let mut child = spawn(&["get", "--resume", &address, "name", &target]);
    stalls.recv().unwrap();
    until_it_has_written_to(&mut child, &target);
    interrupt(&mut child, Signal::INT);
    let stderr = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(stderr.contains("target.rpc-part: ") && stderr.contains("are kept"), "{stderr}");
    assert!(!Path::new(&target).exists());
    let got = fixture.cli("get", &["--json", "--resume", "name", &target]).json();
    assert!(got["transferred"].as_u64().unwrap() < 4 << 20, "{got}");
    assert!(std::fs::read(&target).unwrap() == vec![7; 4 << 20]);
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_ping_prints_its_summary() {
    let fixture = Fixture::new(&[]);
    let mut child = spawn(&["ping", fixture.address(), "--interval", "1ms"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().starts_with("reply from "));
    let rest = thread::spawn(move || lines.last());
    interrupt(&mut child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let summary = rest.join().unwrap().unwrap();
    assert!(summary.contains("replies, min/avg/median/max/mdev"), "{summary}");
}

#[test]
fn exit_codes_say_what_went_wrong() {
    let fixture = Fixture::new(&["--key", "board"]);
    let silent = stranger(b"");
    let code = |args: &[&str]| cli(args).code;
    assert_eq!(code(&["info", fixture.address()]), 0);
    assert_eq!(code(&["info", &format!("{}/board", fixture.address())]), 0);
    assert_eq!(code(&["call", fixture.address(), "no.such.function"]), 1);
    assert_eq!(code(&["call", fixture.address(), "rpc.sleep", "str:long"]), 1);
    assert_eq!(code(&["call", fixture.address()]), 2);
    assert_eq!(code(&["info", "127.0.0.1:9090"]), 2);
    assert_eq!(code(&["info", &unused()]), 69);
    assert_eq!(code(&["info", "unix:/no/such/socket"]), 69);
    assert_eq!(code(&["info", &stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n")]), 76);
    assert_eq!(code(&["info", &format!("{}/desk", fixture.address())]), 77);
    assert_eq!(code(&["info", &silent, "--timeout", "200ms"]), 124);
    assert_eq!(code(&["call", fixture.address(), "rpc.sleep", "3600", "--timeout", "200ms"]), 124);
}

#[test]
fn a_remote_error_is_printed_with_kind_origin_and_backtrace() {
    let fixture = Fixture::new(&[]);
    let run = fixture.cli("call", &["no.such.function"]);
    assert!(run.stdout.is_empty(), "{run:?}");
    for fact in ["no.such.function", "kind: not found", "at: the server"] {
        assert!(run.stderr.contains(fact), "{fact}: {run:?}");
    }
    let run = fixture.cli("call", &["--json", "no.such.function"]);
    let error: Json = serde_json::from_str(&run.stderr).unwrap();
    assert_eq!(error["error"]["kind"], "not_found");
    assert_eq!((&error["error"]["hop"], &error["error"]["exit_code"]), (&json!(1), &json!(1)));

    // Errors of all commands have the same fields.
    let (missing, closed) = (fixture.path("missing"), unused());
    for (args, kind, code) in [
        (&["info", "--json", &closed][..], "unreachable", 69),
        (&["put", "--json", fixture.address(), &missing], "local", 1),
        (&["info", "--json", "nonsense"], "usage", 2),
        (&["call", "--json", fixture.address()], "usage", 2),
        (&["ls", "--json", "@nobody"], "usage", 2),
        (&["nothing", "--json"], "usage", 2),
        (&["status", "--json", "--tracker", &closed], "peer_lost", 69),
        (&["call", "--json", fixture.address(), "rpc.sleep", "9", "--timeout", "100ms"], "deadline_exceeded", 124),
    ] {
        let run = cli(args);
        let other: Json = serde_json::from_str(&run.stderr).unwrap_or_else(|_| panic!("{run:?}"));
        let fields = |error: &Json| error["error"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(fields(&other), fields(&error), "{args:?}");
        assert_eq!((&other["error"]["kind"], run.code), (&json!(kind), code), "{run:?}");
    }
}

#[test]
fn what_a_peer_says_does_not_steer_the_terminal() {
    let fixture = Fixture::new(&[]);
    let (local, name) = (fixture.path("local"), "a\u{1b}[2J\u{9b}1mb");
    std::fs::write(&local, "data").unwrap();
    let put = fixture.cli("put", &[&local, name]);
    assert_eq!(put.code, 0, "{put:?}");
    assert!(put.stderr.starts_with("a\\u{1b}[2J\\u{9b}1mb: "), "{put:?}");
    // A pipe gets names as they are, and JSON escapes them as JSON does.
    assert_eq!(fixture.cli("ls", &[]).ok(), format!("{name}\n"));
    let listed = fixture.cli("ls", &["--json"]);
    assert!(!listed.stdout.trim_end().contains(char::is_control), "{listed:?}");
    assert_eq!(listed.json()[0]["name"], name);
    for arguments in [&[name][..], &["--json", name]] {
        let failed = fixture.cli("call", arguments);
        assert_eq!(failed.code, 1, "{failed:?}");
        assert!(failed.stderr.lines().all(|line| !line.contains(char::is_control)), "{failed:?}");
    }
}

#[test]
fn reports_are_printed_as_text_and_as_json() {
    let fixture = Fixture::new(&["--key", "board"]);
    let functions = fixture.cli("functions", &["--json", "--all"]).json();
    let names: Vec<_> = functions.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"rpc.echo") && names.is_sorted(), "{names:?}");
    assert_eq!(fixture.cli("functions", &["rpc.sle*"]).ok(), "rpc.sleep(float) -> null\n");
    assert_eq!(fixture.cli("functions", &["sleep", "--all"]).ok(), "rpc.sleep(float) -> null\n");
    let own = fixture.cli("functions", &[]);
    assert!(own.stdout.is_empty() && own.stderr.contains("--all"), "{own:?}");
    // The server may not have seen the ends of the sessions before.
    let begun = Instant::now();
    let info = loop {
        let info = fixture.cli("info", &["--json"]).json();
        if info["sessions"] == 1 {
            break info;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{info}");
    };
    assert_eq!(info["key"], "board");
    assert!(info["version"].is_string() && info["handles"].is_u64() && info["memory_bytes"].is_u64(), "{info}");
    assert!(info["devices"].as_array().unwrap().iter().any(|device| device["device"] == "cpu:0"), "{info}");
    assert!(fixture.cli("info", &[]).ok().contains("key        board"));

    let ping = fixture.cli("ping", &["-c", "3", "-i", "1ms"]).ok();
    assert_eq!(ping.lines().filter(|line| line.starts_with("reply from")).count(), 3);
    let ping = fixture.cli("ping", &["-c", "3", "-i", "1ms", "--json"]).json();
    assert_eq!((&ping["replies"], ping["samples"].as_array().unwrap().len()), (&json!(3), 3));

    let time = fixture.cli("time", &["rpc.echo", "1", "--repeat", "4", "--number", "10", "--json"]).json();
    assert_eq!(time["samples"].as_array().unwrap().len(), 4);
    assert!(time["min"].as_f64().unwrap() <= time["mean"].as_f64().unwrap());
}

#[test]
fn flags_come_from_the_environment_too() {
    let fixture = Fixture::new(&[]);
    let mut command = command(&["call", fixture.address(), "rpc.echo", "a"]);
    command.env("RPC_CLI_JSON", "true");
    assert_eq!(run(command).ok(), "\"a\"\n");
}

#[test]
fn calls_and_the_doctor_go_through_hops() {
    let origin = Fixture::new(&[]);
    let hop = Fixture::new(&["--allow-forward", origin.address()]);
    assert_eq!(origin.cli("call", &["-J", hop.address(), "rpc.echo", "7"]).ok(), "7\n");
    let report = origin.cli("doctor", &["-J", hop.address(), "--json"]).json();
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(step(&report, "hop 1")["ok"], true);

    let refused = hop.cli("call", &["-J", origin.address(), "rpc.echo", "7"]);
    assert_eq!(refused.code, 77, "{refused:?}");
    let run = hop.cli("doctor", &["-J", origin.address(), "--json"]);
    let report = run.json();
    assert_eq!((run.code, &step(&report, "hop 1")["ok"]), (77, &json!(false)), "{report}");
    assert!(step(&report, "hop 1")["advice"].as_str().unwrap().contains("--allow-forward"), "{report}");
}

#[test]
fn a_local_port_leads_to_a_service_near_the_server() {
    let service = stranger(b"it is I");
    let origin = Fixture::new(&["--allow-port", &service]);
    let port = service.rsplit_once(':').unwrap().1;
    let forward = |to: &str| {
        let mut command = command(&["forward", to, origin.address(), "--json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Json = serde_json::from_str(&line).unwrap();
        let local = started["local"].as_str().unwrap().strip_prefix("tcp://").unwrap().to_owned();
        (child, TcpStream::connect(local).unwrap())
    };
    let (mut child, mut stream) = forward(&format!("0:{port}"));
    stream.write_all(b"who is there?").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "it is I");
    child.kill().unwrap();
    child.wait().unwrap();

    // A service that is not allowed is an error before anything listens.
    let refused = failing_cli(&["forward", "0:1", origin.address(), "--json"]);
    assert!(refused.code == 77 && refused.stdout.is_empty(), "{refused:?}");
    assert!(refused.stderr.contains("--allow-port") && refused.stderr.contains("tcp://127.0.0.1:1"), "{refused:?}");

    // One that does not run closes the connection, and the tool says why and goes on.
    let absent = unused();
    let origin = Fixture::new(&["--allow-port", &absent]);
    let mut command = command(&["forward", &format!("0:{}", absent.rsplit_once(':').unwrap().1), origin.address()]);
    let mut child = command.arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let started: Json = serde_json::from_str(&line).unwrap();
    let local = started["local"].as_str().unwrap().strip_prefix("tcp://").unwrap().to_owned();
    answer.clear();
    // It is closed or reset.
    let _ = TcpStream::connect(local).unwrap().read_to_string(&mut answer);
    assert_eq!(answer, "");
    line.clear();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&absent), "{line}");
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
}

fn step<'a>(report: &'a Json, name: &str) -> &'a Json {
    let steps = report["steps"].as_array().unwrap();
    steps.iter().find(|step| step["step"] == name).unwrap_or_else(|| panic!("no step {name}: {report}"))
}

#[test]
fn the_doctor_finds_the_step_that_fails() {
    let fixture = Fixture::new(&["--key", "board"]);
    let diagnose = |address: &str, flags: &[&str]| {
        let mut args = vec!["doctor", "--json", address];
        args.extend(flags);
        let run = cli(&args);
        let report = run.json();
        assert_eq!(report["exit_code"], run.code, "{report}");
        assert_eq!(report["ok"], run.code == 0, "{report}");
        let steps = report["steps"].as_array().unwrap().clone();
        let last = steps.last().unwrap().clone();
        assert!(steps.iter().rev().skip(1).all(|step| step["ok"] == true), "{report}");
        // The error is a document of its own, in the schema of all commands.
        if run.code == 0 {
            assert_eq!(run.stderr, "");
        } else {
            let error: Json = serde_json::from_str(&run.stderr).unwrap_or_else(|error| panic!("{error}: {run:?}"));
            let message = format!("{}: {}", last["step"].as_str().unwrap(), last["detail"].as_str().unwrap());
            let error = &error["error"];
            assert_eq!((&error["message"], &error["exit_code"]), (&json!(message), &json!(run.code)), "{error}");
            assert_eq!((&error["may_have_run"], &error["hop"]), (&json!(false), &Json::Null), "{error}");
            assert!(error["kind"].is_string() && error["causes"] == json!([]), "{error}");
        }
        (run.code, last["step"].as_str().unwrap().to_owned(), last["detail"].as_str().unwrap().to_owned())
    };
    let found = |address: &str, flags: &[&str], code: i32, step: &str, detail: &str| {
        let (found_code, found_step, found_detail) = diagnose(address, flags);
        assert_eq!((found_code, &*found_step), (code, step), "{address}: {found_detail}");
        assert!(found_detail.contains(detail), "{address}: {found_detail}");
    };
    let server = fixture.address();
    found(server, &[], 0, "echo", "a call returned");
    found(&format!("{server}/board"), &[], 0, "echo", "a call returned");
    found(&format!("{server}/desk"), &[], 77, "key", "desk");
    found("tcp:127.0.0.1:1", &[], 2, "parse", "slashes");
    found(&unused(), &[], 69, "connect", "refused");
    found("unix:/no/such/socket", &[], 69, "connect", "missing");
    found("exec:/no/such/program", &[], 69, "connect", "does not start");
    found(&stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n"), &[], 76, "protocol", "HTTP/1.1 400");
    found(&stranger(b""), &["--timeout", "200ms"], 124, "protocol", "sent nothing");
    found(&format!("exec:{} --version", env!("CARGO_BIN_EXE_rpc-server")), &[], 76, "protocol", "rpc-server");

    let text = cli(&["doctor", &unused()]);
    assert!(text.stdout.contains("advice") && text.stderr.is_empty(), "{text:?}");
    let full = Fixture::new(&["--max-sessions", "1"]);
    let mut occupant = command(&["ping", full.address()]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // A reply means that its session is open.
    let mut byte = [0];
    occupant.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
    found(full.address(), &[], 77, "session", "max_sessions");
    occupant.kill().unwrap();
    occupant.wait().unwrap();
}

/// A file that was put into a workspace without a name was gone when the session ended, and the
/// exit code was 0.
#[test]
fn a_workspace_needs_a_name() {
    let fixture = Fixture::new(&[]);
    let local = fixture.path("data");
    std::fs::write(&local, "data").unwrap();
    let run = fixture.cli("put", &[&local, "--workspace", ""]);
    assert!(run.code == 2 && run.stderr.contains("--workspace"), "{run:?}");
}

/// A regression: the doctor advised an address without encryption.
#[test]
fn the_doctor_asks_for_the_authority_that_checks_a_certificate() {
    for address in ["tls://127.0.0.1:1", "quic://127.0.0.1:1"] {
        let run = cli(&["doctor", address]);
        assert!(run.stdout.contains("--ca") && run.stdout.contains("--token-file"), "{run:?}");
        assert!(!run.stdout.contains("tcp://"), "{run:?}");
    }
}

#[test]
fn help_completions_and_manual() {
    let help = cli(&["--help"]).ok();
    let section = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names: Vec<_> = section
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("    "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let expected = [
        "call",
        "functions",
        "info",
        "can",
        "put",
        "get",
        "ls",
        "rm",
        "run",
        "forward",
        "lease",
        "ping",
        "time",
        "place",
        "logs",
        "status",
        "kick",
        "drain",
        "disco",
        "doctor",
        "shell",
        "use",
        "up",
        "down",
        "cert",
        "token",
        "completions",
        "man",
        "help",
    ];
    assert_eq!(names, expected);
    assert!(help.contains("Exit codes:") && help.contains("124"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(cli(&["completions", shell]).ok().contains("doctor"), "{shell}");
    }
    assert!(cli(&["man"]).ok().starts_with(".ie"));
    let folder = tempfile::tempdir().unwrap();
    cli(&["man", folder.path().to_str().unwrap()]).ok();
    assert!(folder.path().join("rpc-cli-call.1").exists());
}

#[cfg(feature = "tvm-ffi")]
#[test]
fn a_module_is_sent_unless_the_server_has_it_and_failures_are_reported() {
    // The library is none, so that loading fails at once.
    let libraries = tempfile::tempdir().unwrap();
    let library = libraries.path().join("libtvm_ffi.so");
    std::fs::write(&library, "none").unwrap();
    let library = library.to_str().unwrap();
    let fixture = Fixture::new(&["--allow-modules", "--isolate", "none", "--tvm-ffi", library]);
    let file = fixture.path("kernels.so");
    std::fs::write(&file, "kernels").unwrap();
    let digest = rpc_server::modules::hash(&b"kernels"[..]).unwrap().0;
    let first = fixture.cli("call", &["--module", &file, "scale", "2"]);
    assert!(first.code == 1 && first.stderr.contains(&format!("sent as sha256:{digest}")), "{first:?}");
    assert!(first.stderr.contains("libtvm_ffi.so"), "{first:?}");
    for (command, args) in [("call", &["scale", "2"][..]), ("time", &["scale", "2"]), ("functions", &[])] {
        for module in [file.clone(), digest.module_path()] {
            let again = fixture.cli(command, &[&["--module", &module], args].concat());
            assert!(again.code == 1 && !again.stderr.contains("sent as"), "{again:?}");
            assert!(again.stderr.contains("libtvm_ffi.so"), "{again:?}");
        }
    }
    let missing = fixture.cli("call", &["--module", &fixture.path("none.so"), "scale"]);
    assert!(missing.code == 1 && missing.stderr.contains("none.so"), "{missing:?}");
    let remote = fixture.cli("functions", &["--module", "remote:none.so"]);
    assert!(remote.code == 1 && remote.stderr.contains("\"none.so\" in the workspace"), "{remote:?}");
    let folder = fixture.cli("functions", &["--module", &fixture.path("")]);
    assert!(folder.code == 1 && folder.stderr.contains("no regular file"), "{folder:?}");
    let info = fixture.cli("info", &[]).ok();
    assert!(info.contains("modules    any, up to 512.00 MiB; none can be loaded: "), "{info}");
    // A regression: the doctor reported such a server as working.
    let doctor = fixture.cli("doctor", &[]);
    assert!(doctor.code == 1 && doctor.stdout.contains("libtvm_ffi.so"), "{doctor:?}");
    assert!(doctor.stdout.contains("--tvm-ffi") && !doctor.stdout.contains("works\n"), "{doctor:?}");
}

#[test]
fn a_traced_call_shows_this_side_the_hop_and_the_server() {
    for isolate in ["none", "process"] {
        let hop = Fixture::new(&["--allow-forward", "tcp://127.0.0.1:*"]);
        let server = Fixture::new(&["--isolate", isolate]);
        let file = server.path("trace.json");
        let args = ["-J", hop.address(), "call", "--trace", &file, server.address(), "rpc.echo", "42"];
        assert_eq!(cli(&args).ok(), "42\n");
        let slow = server.path("slow.json");
        cli(&["call", "--trace", &slow, server.address(), "rpc.sleep", "0.1"]).ok();
        let read = |file: &str| serde_json::from_str::<Json>(&std::fs::read_to_string(file).unwrap()).unwrap();
        let named = |document: &Json, name: &str| {
            let events = document["traceEvents"].as_array().unwrap();
            events.iter().find(|event| event["name"] == name).unwrap_or_else(|| panic!("{name}: {document}")).clone()
        };
        let document = read(&file);
        for name in ["call rpc.echo", "forwards", "queued", "rpc.echo"] {
            assert!(named(&document, name)["dur"].as_f64().unwrap() >= 0.0, "{document}");
        }
        let text = document.to_string();
        assert!(text.contains(&format!("hop {}", hop.address())), "{text}");
        assert!(text.contains(&format!("server {}", server.address())), "{text}");
        let document = read(&slow);
        let (call, run) = (named(&document, "call rpc.sleep"), named(&document, "rpc.sleep"));
        let [call, run] = [call, run].map(|slice| slice["dur"].as_f64().unwrap());
        assert!(100_000.0 <= run && run <= call, "{document}");
        // A call that fails leaves no file.
        let none = server.path("none.json");
        let failed = cli(&["call", "--trace", &none, server.address(), "rpc.sleep", "text"]);
        assert!(failed.code == 1 && !Path::new(&none).exists(), "{failed:?}");
    }
}

#[test]
fn a_server_takes_no_modules_by_default() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("kernels.so");
    std::fs::write(&file, "kernels").unwrap();
    let refused = fixture.cli("call", &["--module", &file, "scale"]);
    assert!(refused.code == 77 && refused.stderr.contains("--allow-modules"), "{refused:?}");
    assert!(fixture.cli("info", &[]).ok().contains("modules    not taken (--allow-modules)"));
}

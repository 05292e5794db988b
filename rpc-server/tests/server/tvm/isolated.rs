//! Clients of TVM whose sessions have processes of their own: the process serves the socket of its
//! client, and the server watches over both.

use super::*;

/// A server whose sessions have processes.
fn server(folder: &Path, args: &[&str]) -> ServerProcess {
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error", "--workdir"]);
    command.arg(folder).args(["--tvm", "--tvm-self-test", "--isolate", "process"]).args(args);
    ServerProcess::spawn(command).unwrap()
}

fn pid(server: &ServerProcess) -> Pid {
    Pid::from_raw(server.id().try_into().unwrap()).unwrap()
}

/// Waits until the server has this number of processes.
fn has_processes(server: &ServerProcess, count: usize) {
    let start = Instant::now();
    loop {
        let processes = processes_of(server.id());
        if processes.len() == count {
            return;
        }
        assert!(start.elapsed() < LIMIT, "{} processes, and not {count}", processes.len());
        thread::yield_now();
    }
}

/// Calls and copies go on while the server stands still; for room to send large ones, the process
/// asks it.
#[test]
fn the_process_serves_the_socket_of_its_client() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    let mut client = Client::connect(server.address(), "");
    let add = client.function("rpc.test.addone");
    kill_process(pid(&server), Signal::STOP).unwrap();
    let len = 3 << 20;
    let content: Vec<u8> = (0..len).map(|at| (at % 239) as u8).collect();
    let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        assert_eq!(client.call(add, &[int(1)]), Ok((1, int(2))));
        let data = client.alloc(U8, &[len]);
        client.copy_to(&header(data, U8, &[len], 0), &content).unwrap();
        assert_eq!(client.copy_from(&header(data, U8, &[len], 239), 5).unwrap(), [0, 1, 2, 3, 4]);
        client.copy_to(&header(data, U8, &[len], 239), &[7; 5]).unwrap();
        data
    }));
    kill_process(pid(&server), Signal::CONT).unwrap();
    let Ok(data) = served else { panic!("the server is on the way") };
    let copy = client.copy_from(&header(data, U8, &[len], 0), len as u64).unwrap();
    assert!(copy[..239] == content[..239] && copy[239..244] == [7; 5] && copy[244..] == content[244..]);
    // The session has begun, for the process, too.
    assert!(client.ask(&init_frame(&[])).unwrap_err().contains("already been initialized"));
    // One that leaves in good order, and the process that waits for the next client.
    client.send(&frame(SHUTDOWN, &[]));
    has_processes(&server, 1);
}

/// The server has read them before the process gets the socket.
#[test]
fn requests_that_follow_the_first_one_at_once_are_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    // The second time there are more than the server passes on, so that it serves them.
    for (count, name) in [(20, "rpc.noop"), (60, "\u{fe}\u{ff}\u{fe}\u{ff}".repeat(32).as_str())] {
        let (mut client, code, _) = Client::hello(server.address(), "client:");
        assert_eq!(code, 0xff271);
        let requests = frame(GET_FUNCTION, &sequence(&[text(name)])).repeat(count);
        client.send(&[init_frame(&[]), requests].concat());
        assert_eq!(client.reply(), Ok(vec![NONE]));
        for _ in 0..count {
            let function = client.reply().unwrap();
            assert_eq!(function[0] == pointer(0), name != "rpc.noop", "{function:?}");
        }
        assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    }
}

#[test]
fn the_time_that_a_client_has_asked_for_also_ends_what_stands_still() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    for stands_still in [false, true] {
        let mut seconds = 1.5;
        // On a slow machine the time may be over before there is a call.
        let (mut client, error) = loop {
            let (mut client, code, _) = Client::hello(server.address(), &format!("client: -timeout={seconds}"));
            assert_eq!(code, 0xff271);
            let sleep = client.ask(&init_frame(&[])).and_then(|_| client.request(GET_FUNCTION, &[text("rpc.sleep")]));
            seconds *= 2.0;
            if let Ok(Val(4, sleep)) = sleep {
                client.send(&call_frame(number(&sleep), &[float(600.0)]));
                if stands_still {
                    signal_processes(server.id(), Signal::STOP);
                }
                let error = client.reply().unwrap_err();
                break (client, error);
            }
        };
        let expected = if stands_still { "the client's session has lasted" } else { "session has expired" };
        assert!(error.starts_with("RPCSessionTimeoutError: ") && error.contains(expected), "{error}");
        assert!(client.is_at_end());
    }
    // The last one is that of the next client.
    has_processes(&server, 1);
    assert_eq!(Client::connect(server.address(), "").call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
}

#[test]
fn the_longest_duration_and_the_idle_time_end_sessions() {
    for (option, calls) in [("--session-duration", true), ("--idle-timeout", false)] {
        let folder = tempfile::tempdir().unwrap();
        let server = server(folder.path(), &[option, "3s"]);
        let mut client = Client::connect(server.address(), "");
        let sleep = client.function("rpc.sleep");
        if calls {
            client.send(&call_frame(sleep, &[float(600.0)]));
        }
        let error = client.reply().unwrap_err();
        assert!(error.starts_with("RPCSessionTimeoutError: "), "{option}: {error}");
        assert!(client.is_at_end());
        has_processes(&server, 1);
    }
}

#[test]
fn a_client_that_leaves_takes_a_process_that_stands_still_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    let mut client = Client::connect(server.address(), "");
    client.function("rpc.noop");
    // The process that waits for the next client is there, too.
    has_processes(&server, 2);
    signal_processes(server.id(), Signal::STOP);
    drop(client);
    has_processes(&server, 1);
    let mut next = Client::connect(server.address(), "");
    assert_eq!(next.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
}

#[test]
fn a_server_that_is_told_to_stop_tells_the_clients_of_its_processes() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    let mut client = Client::connect(server.address(), "");
    client.function("rpc.noop");
    kill_process(pid(&server), Signal::TERM).unwrap();
    let error = client.reply().unwrap_err();
    assert!(error.contains("going away"), "{error}");
    assert!(client.is_at_end());
}

/// Of a request that is larger than what is read ahead, the room is taken before it has come.
#[test]
fn what_processes_hold_of_requests_counts_for_all_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &["--max-total-queued", "24MiB"]);
    let (mut large, mut other) = (Client::connect(server.address(), ""), Client::connect(server.address(), ""));
    let (echo, others) = (large.function("testing.echo"), other.function("testing.echo"));
    let content = vec![7; 14 << 20];
    let request = call_frame(echo, &[bytes(&content)]);
    large.send(&request[..1 << 20]);
    // The process has asked for the room once it refuses another client's request.
    let start = Instant::now();
    let mut ask_other = || other.call(others, &[bytes(&content)]);
    let error = loop {
        match ask_other() {
            Ok(_) => assert!(start.elapsed() < LIMIT, "there is room for both"),
            Err(error) => break error,
        }
    };
    assert!(error.contains("max_total_queued is 25165824"), "{error}");
    large.send(&request[1 << 20..]);
    assert_eq!(large.reply().unwrap()[1], Val(9, sized(&content)));
    drop(large);
    while let Err(error) = ask_other() {
        assert!(start.elapsed() < LIMIT, "the room is not given back: {error}");
    }
}

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

#[test]
fn clients_that_neither_read_nor_send_what_they_owe_are_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &["--write-timeout", "500ms", "--min-rate", "1MiB"]);
    let reads_nothing: fn(&mut Client, u64) = |client, data| {
        let header = header(data, U8, &[KILLED_LEN], 0);
        client.send(&frame(COPY_FROM, &[&header[..], &KILLED_LEN.to_le_bytes()].concat()));
    };
    let sends_a_part: fn(&mut Client, u64) = |client, data| {
        let copy = copy_to_frame(&header(data, U8, &[KILLED_LEN], 0), &vec![1; KILLED_LEN as usize]);
        client.send(&copy[..1 << 20]);
    };
    for owes in [reads_nothing, sends_a_part] {
        let mut client = Client::connect(server.address(), "");
        let data = client.alloc(U8, &[KILLED_LEN]);
        owes(&mut client, data);
        has_processes(&server, 1);
        let mut next = Client::connect(server.address(), "");
        assert_eq!(next.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
        next.send(&frame(SHUTDOWN, &[]));
        has_processes(&server, 1);
    }
}

#[test]
fn handles_of_another_process_name_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    let (mut owner, mut other) = (Client::connect(server.address(), ""), Client::connect(server.address(), ""));
    let (add, data) = (owner.function("rpc.test.addone"), owner.alloc(U8, &[4]));
    let header = header(data, U8, &[4], 0);
    owner.copy_to(&header, b"mine").unwrap();
    assert!(other.call(add, &[int(1)]).is_err());
    assert!(other.copy_from(&header, 4).is_err() && other.copy_to(&header, b"evil").is_err());
    for handle in [add, data] {
        assert!(other.request(FREE, &[pointer(handle)]).is_err());
    }
    assert_eq!(owner.copy_from(&header, 4).unwrap(), b"mine");
    assert_eq!(owner.call(add, &[int(1)]), Ok((1, int(2))));
}

/// Rubbish in the place of frames, by a generator with a seed, and behind every part of a session.
#[test]
fn rubbish_ends_its_own_session_alone() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path(), &[]);
    let mut other = Client::connect(server.address(), "");
    let add = other.function("rpc.test.addone");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut rubbish = || {
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        std::iter::repeat_with(next).take(512).flatten().collect::<Vec<u8>>()
    };
    for round in 0..24 {
        let mut client = match round % 3 {
            0 => Client(TcpStream::connect(server.address().strip_prefix("tcp://").unwrap()).unwrap()),
            1 => Client::hello(server.address(), "client:").0,
            _ => Client::connect(server.address(), ""),
        };
        client.0.set_read_timeout(Some(LIMIT)).unwrap();
        // A server that has ended the connection by then takes no more.
        let _ = client.0.write_all(&rubbish());
        let _ = client.0.shutdown(std::net::Shutdown::Write);
        let end = client.0.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
        assert!(end.is_ok() || end == Err(std::io::ErrorKind::ConnectionReset), "{round}: {end:?}");
        assert_eq!(other.call(add, &[int(1)]), Ok((1, int(2))));
    }
    drop(other);
    has_processes(&server, 1);
}

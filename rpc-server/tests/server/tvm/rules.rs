//! Rules for servers of TVM's protocol, one by one: at a server whose sessions are its own,
//! and at one whose sessions have processes.

use super::*;

/// Runs a test of a rule at both servers. It is given the address.
fn at_both(rule: impl Fn(&str)) {
    for isolate in ["none", "process"] {
        let folder = tempfile::tempdir().unwrap();
        let server = server_process(folder.path(), isolate);
        rule(server.address());
        // Whatever clients do, the next one is served.
        assert_eq!(Client::connect(server.address(), "").call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    }
}

#[test]
fn rule_1_each_request_has_one_reply_in_order_and_nothing_is_sent_unasked() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let add = client.function("rpc.test.addone");
        let calls: Vec<u8> = (0..50).flat_map(|value| call_frame(add, &[int(value)])).collect();
        client.send(&[calls, frame(SHUTDOWN, &[])].concat());
        for value in 0..50 {
            assert_eq!(client.reply(), Ok(vec![int(1), int(value + 1)]));
        }
        assert!(client.is_at_end());
    });
}

#[test]
fn rule_2_requests_have_their_effects_in_order() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let (data, copy) = (client.alloc(U8, &[3]), client.alloc(U8, &[3]));
        let (from, to) = (header(data, U8, &[3], 0), header(copy, U8, &[3], 0));
        let read = |of: &[u8]| frame(COPY_FROM, &[of, &3_u64.to_le_bytes()].concat());
        let among = [Val(7, from.clone()), Val(7, to.clone()), NONE];
        let sync = frame(STREAM_SYNC, &sequence(&[cpu(), pointer(0)]));
        let requests = [
            copy_to_frame(&from, b"abc"),
            frame(COPY_AMONG, &sequence(&among)),
            copy_to_frame(&from, b"def"),
            sync,
            read(&to),
            read(&from),
        ];
        client.send(&requests.concat());
        for _ in 0..4 {
            assert_eq!(client.reply(), Ok(vec![NONE]));
        }
        assert_eq!(client.read_frame(), (COPY_ACK, b"abc".to_vec()));
        assert_eq!(client.read_frame(), (COPY_ACK, b"def".to_vec()));
    });
}

/// `reply`, `request` and `handle` check the forms of exceptions, of system calls and of pointers.
#[test]
fn rule_3_results_have_their_forms() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let echo = client.function("testing.echo");
        assert_eq!(client.ask(&call_frame(echo, &[int(7)])), Ok(vec![int(1), int(7)]));
        let data = client.alloc(F32, &[2]);
        let result = client.ask(&call_frame(echo, &[tensor(data, F32, &[2], 0)])).unwrap();
        let [Val(1, kind), Val(7, _), Val(4, _)] = &result[..] else { panic!("{result:?}") };
        assert_eq!(number(kind), 70);
        assert_eq!(client.request(SET_DEVICE, &[cpu()]), Ok(NONE));
        assert_eq!(client.call_by_name("rpc.test.except", &[text("abc")]), Err("abc".to_owned()));
    });
}

#[test]
fn rule_4_functions_that_are_not_there_are_no_errors() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        assert_eq!(client.request(GET_FUNCTION, &[text("no.such.function")]), Ok(pointer(0)));
        let (73, Val(4, library)) = client.call_by_name("ffi.SystemLib", &[]).unwrap() else { panic!() };
        for imports in [boolean(true), boolean(false), int(1)] {
            let args = [module(number(&library)), text("missing"), imports];
            assert_eq!(client.call_by_name("tvm.rpc.server.ModuleGetFunction", &args), Ok((0, NONE)));
        }
    });
}

#[test]
fn rule_5_every_form_of_a_value_is_taken() {
    at_both(|address| {
        let (mut client, code, _) = Client::hello(address, "client: -unknown=1 -timeout=600.5 other");
        assert_eq!(code, 0xff271);
        // Empty frames mean nothing, also within the session's beginning.
        client.send(&[&[0; 8][..], &init_frame(&[]), &[0; 16][..]].concat());
        assert_eq!(client.reply(), Ok(vec![NONE]));
        let echo = client.function("testing.echo");
        for form in [text("ab"), boxed(11, 65, b"ab"), boxed(65, 65, b"ab")] {
            let (65 | 11, Val(8 | 65, content)) = client.call(echo, &[form]).unwrap() else { panic!() };
            assert!(content.ends_with(b"ab"));
        }
        for form in [Val(9, sized(b"ab")), boxed(12, 66, b"ab"), boxed(66, 66, b"ab")] {
            let (66 | 12, Val(9, content)) = client.call(echo, &[form]).unwrap() else { panic!() };
            assert_eq!(content, sized(b"ab"));
        }
        assert_ne!(client.handle(GET_FUNCTION, &[boxed(65, 65, b"testing.echo")]), 0);
        assert_eq!(client.request(FREE, &[NONE]), Ok(NONE), "no pointer");
    });
}

#[test]
fn rule_6_what_was_returned_is_freed_once_and_the_rest_is_an_error_of_its_own() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let (add, data) = (client.function("rpc.test.addone"), client.alloc(U8, &[1]));
        let (71 | 69, Val(4, shape)) = client.call_by_name("ffi.Shape", &[int(1), int(2)]).unwrap() else { panic!() };
        assert_eq!(client.request(FREE_DATA, &[cpu(), pointer(data)]), Ok(NONE));
        for handle in [add, number(&shape)] {
            assert_eq!(client.request(FREE, &[pointer(handle)]), Ok(NONE));
            assert!(client.request(FREE, &[pointer(handle)]).is_err(), "twice");
        }
        assert!(client.request(FREE, &[pointer(0x1234_5678_9abc)]).is_err(), "made up");
        assert_eq!(client.call_by_name("rpc.test.addone", &[int(1)]), Ok((1, int(2))));
    });
}

#[test]
fn rule_7_handles_and_offsets_stay_within_their_memory() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let data = client.alloc(F32, &[4]);
        client.copy_to(&header(data, F32, &[4], 0), &[7; 16]).unwrap();
        assert_eq!(client.copy_from(&header(data, U8, &[2, 3], 10), 6).unwrap(), [7; 6]);
        for beyond in [header(data, U8, &[7], 10), header(data, F32, &[4], u64::MAX), header(data + 1, U8, &[1], 0)] {
            assert!(client.copy_from(&beyond, 7).is_err());
            assert!(client.copy_to(&beyond, &[1; 7]).is_err());
        }
    });
}

#[test]
fn rule_8_the_time_of_a_session_counts_from_its_hello() {
    at_both(|address| {
        let (mut client, code, _) = Client::hello(address, "client: -timeout=1.0");
        assert_eq!(code, 0xff271);
        let begun = client.ask(&init_frame(&[]));
        let error = begun.and_then(|_| client.reply()).unwrap_err();
        assert!(error.starts_with("RPCSessionTimeoutError: Your 1.0s session has expired"), "{error}");
        assert!(client.is_at_end());
    });
}

#[test]
fn rule_9_several_sessions_are_served_at_once() {
    at_both(|address| {
        let mut clients = [(); 3].map(|()| Client::connect(address, ""));
        let adds: Vec<_> = clients.iter_mut().map(|client| client.function("rpc.test.addone")).collect();
        for (client, add) in clients.iter_mut().zip(&adds).rev() {
            assert_eq!(client.call(*add, &[int(1)]), Ok((1, int(2))));
        }
    });
}

#[test]
fn rule_10_the_folder_of_a_session_is_empty_at_first_and_gone_at_last() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        client.call_by_name("tvm.rpc.server.upload", &[text("a"), bytes(b"content")]).unwrap();
        for outside in ["../a", "/etc/a", "b/../../a"] {
            assert!(client.call_by_name("tvm.rpc.server.upload", &[text(outside), bytes(b"")]).is_err(), "{outside}");
            assert!(client.call_by_name("tvm.rpc.server.download", &[text(outside)]).is_err(), "{outside}");
        }
        let (_, Val(_, path)) = client.call_by_name("tvm.rpc.server.workpath", &[text("a")]).unwrap();
        let path = std::path::PathBuf::from(String::from_utf8(path[path.len() - number_of(&path)..].to_vec()).unwrap());
        assert!(path.is_absolute() && std::fs::read(&path).unwrap() == b"content");
        let mut other = Client::connect(address, "");
        assert!(other.call_by_name("tvm.rpc.server.download", &[text("a")]).is_err());
        drop(client);
        let start = Instant::now();
        while path.exists() {
            assert!(start.elapsed() < LIMIT, "the folder is left");
            thread::yield_now();
        }
    });
}

/// Returns the length of a text, in the form of a result with or without a second type.
fn number_of(payload: &[u8]) -> usize {
    let at = if number(&payload[..8]) as usize == payload.len() - 8 { 0 } else { 4 };
    number(&payload[at..at + 8]) as usize
}

#[test]
fn rule_11_a_malformed_frame_ends_its_own_connection_alone() {
    at_both(|address| {
        let mut other = Client::connect(address, "");
        let add = other.function("rpc.test.addone");
        for malformed in [frame(99, &[]), frame(CALL, &[1]), vec![3, 0, 0, 0, 0, 0, 0, 0, 9], frame(COPY_TO, &[7; 64])]
        {
            let mut client = Client::connect(address, "");
            client.send(&malformed);
            let (code, _) = client.read_frame();
            assert!([SHUTDOWN, EXCEPTION].contains(&code), "{code}");
            assert!(client.is_at_end());
            assert_eq!(other.call(add, &[int(1)]), Ok((1, int(2))));
        }
    });
}

#[test]
fn rule_12_packets_may_have_any_size() {
    at_both(|address| {
        let mut client = Client::connect(address, "");
        let (1, Val(1, size)) = client.call_by_name("tvm.rpc.server.GetCRTMaxPacketSize", &[]).unwrap() else {
            panic!()
        };
        assert_eq!(number(&size), i64::MAX.unsigned_abs());
    });
}

/// `reply` reads the texts of errors as UTF-8.
#[test]
fn rule_13_texts_are_utf_8() {
    at_both(|address| {
        for form in [Val(8, sized(b"\xff\xfe")), boxed(65, 65, b"a\xff")] {
            let mut client = Client::connect(address, "");
            let echo = client.function("testing.echo");
            assert!(client.call(echo, std::slice::from_ref(&form)).is_err());
        }
        let mut client = Client::connect(address, "");
        let echo = client.function("testing.echo");
        let (65 | 11, Val(_, content)) = client.call(echo, &[text("grün")]).unwrap() else { panic!() };
        assert!(content.ends_with("grün".as_bytes()));
    });
}

#[test]
fn rule_14_clients_that_vanish_leave_nothing_behind() {
    for isolate in ["none", "process"] {
        let folder = tempfile::tempdir().unwrap();
        let server = server_process(folder.path(), isolate);
        for (_, point) in KILL_POINTS {
            let mut client = Client::connect(server.address(), "");
            let (function, data) = (client.function("rpc.noop"), client.alloc(U8, &[KILLED_LEN]));
            point(&mut client, function, data);
        }
        // Only the processes of the server itself are left, and no files of sessions.
        let files = || walk(&folder.path().join("private"));
        let start = Instant::now();
        while processes_of(server.id()).len() > 1 || files() > 1 {
            assert!(start.elapsed() < LIMIT, "{} processes, {} files", processes_of(server.id()).len(), files());
            thread::yield_now();
        }
    }
}

/// Returns the number of folders of sessions under the folder of private workspaces.
fn walk(private: &Path) -> usize {
    let Ok(servers) = std::fs::read_dir(private) else { return 0 };
    let sessions = servers.flatten().filter_map(|server| std::fs::read_dir(server.path()).ok());
    sessions.map(|folder| folder.flatten().count()).sum()
}

//! Named servers: `rpc-cli use`, `@NAME` in place of an address, and commands without an address.

use serde_json::{Value as Json, json};

use super::cli::{Fixture, Run, command, run};

/// Runs `rpc-cli` with the file `config` of the fixture's folder.
fn cli(fixture: &Fixture, args: &[&str]) -> Run {
    let mut command = command(args);
    command.env("RPC_CLI_CONFIG", fixture.path("config"));
    run(command)
}

#[test]
fn a_server_has_a_name_and_the_default_one_needs_none() {
    let fixture = Fixture::new(&[]);
    let hop = Fixture::new(&["--allow-forward", fixture.address()]);
    let cli = |args: &[&str]| cli(&fixture, args);
    let missing = cli(&["call", "rpc.echo", "1"]);
    assert!(missing.code == 2 && missing.stderr.contains("rpc-cli use NAME"), "{missing:?}");

    cli(&["use", "board", fixture.address()]).ok();
    cli(&["use", "gate", hop.address()]).ok();
    cli(&["use", "behind", fixture.address(), "-J", "@gate", "--timeout", "20s"]).ok();
    cli(&["use", "board"]).ok();
    let list = cli(&["use"]).ok();
    assert!(list.contains(&format!("* board   {}\n", fixture.address())), "{list}");
    assert!(list.contains(&format!("  behind  {} via @gate\n", fixture.address())), "{list}");
    let listed: Json = serde_json::from_str(&cli(&["use", "--json"]).ok()).unwrap();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["timeout"], &listed[1]["default"]),
        (&json!("behind"), &json!("20s"), &json!(true))
    );

    // The default server, a name, and a name with a hop.
    for target in [&[][..], &["@"], &["@board"], &["@behind"], &["-J", "@gate", "@board"]] {
        assert_eq!(cli(&[&["call"], target, &["rpc.echo", "1"]].concat()).ok(), "1\n", "{target:?}");
    }
    let file = fixture.path("data");
    std::fs::write(&file, "data").unwrap();
    for (args, printed) in [
        (&["put", &file][..], ""),
        (&["put", &file, "folder/"], ""),
        (&["ls"], "data\nfolder/data\n"),
        (&["ls", "folder"], "folder/data\n"),
        (&["get", "data", "-"], "data"),
        (&["rm", "data", "folder"], ""),
        (&["lease", "cpu:0", "--", "echo", "leased"], "leased\n"),
    ] {
        assert_eq!(cli(args).ok(), printed, "{args:?}");
    }
    for args in [&["info"][..], &["functions"], &["doctor"], &["ping", "-c", "1"], &["time", "rpc.echo", "1"]] {
        assert_eq!(cli(args).code, 0, "{args:?}");
    }

    // One connection has one set of credentials.
    cli(&["use", "locked", fixture.address(), "-J", "@gated", "--token-file", &fixture.path("a")]).ok();
    cli(&["use", "gated", hop.address(), "--token-file", &fixture.path("b")]).ok();
    let apart = cli(&["info", "@locked"]);
    assert!(apart.code == 2 && apart.stderr.contains("different files as token-file"), "{apart:?}");
    cli(&["use", "board"]).ok();

    // What an address stands before is never the name of a function or a file.
    for args in [&["call", fixture.address()][..], &["get", "tpc://board"], &["call", "@board"]] {
        let short = cli(args);
        assert!(short.code == 2 && short.stderr.contains("required"), "{short:?}");
    }
    let unknown = cli(&["info", "@bord"]);
    assert!(unknown.code == 2 && unknown.stderr.contains("did you mean 'board'"), "{unknown:?}");
}

#[test]
fn flags_override_the_file_and_bad_addresses_end_with_2() {
    let fixture = Fixture::new(&["--key", "board"]);
    let token = fixture.path("token");
    run(command(&["token", "--out", &token])).ok();
    let text = format!(
        "[server.closed]\naddress = 'quic://127.0.0.1:1'\nca = 'none.pem'\n\
         [server.open]\naddress = '{0}'\ntoken-file = 'missing'\n\n\
         [server.other]\naddress = '{0}'\nkey = 'desk'\n",
        fixture.address()
    );
    let config = fixture.path("config");
    std::fs::write(&config, text).unwrap();
    // The folder of the file is where its own files are.
    let missing = cli(&fixture, &["info", "@closed"]);
    assert!(missing.stderr.contains(&fixture.path("none.pem")), "{missing:?}");
    let unknown = cli(&fixture, &["info", "@open", "--token-file", &token]);
    assert!(unknown.code == 77 && unknown.stderr.contains("the other 'token'"), "{unknown:?}");
    let key = cli(&fixture, &["info", "@other"]);
    assert!(key.code == 77 && key.stderr.contains("desk"), "{key:?}");
    assert_eq!(cli(&fixture, &["info", "@other/board"]).code, 0);

    for args in [
        &["info", "tcp://"][..],
        &["call", "tpc://board", "rpc.echo"],
        &["info", "127.0.0.1:9090"],
        &["info", "-J", "nonsense", "tcp://127.0.0.1:1"],
        &["info", "-J", "tcp://127.0.0.1:1", "tcp://a b"],
        &["forward", "0:80", "nonsense"],
        &["lease", "cpu:0", "tcp://[::1"],
        &["run", "foo:bar", "--", "true"],
        &["put", "tcp://a:b", "file"],
        &["ping", "@open/a b"],
        &["logs", "--follow", "nonsense"],
        &["status", "--tracker", "nonsense"],
        &["kick", "--tracker", "foo://a", "client"],
        &["drain", "--tracker", "foo://a", "server"],
        &["doctor", "nonsense"],
        &["use", "name", "nonsense"],
    ] {
        let run = cli(&fixture, args);
        assert_eq!(run.code, 2, "{args:?}: {run:?}");
    }
}

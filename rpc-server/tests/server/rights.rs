//! Rights of clients (`--policy`): what each identity may do, in sessions of both kinds and on
//! workers of Disco, and the answers beforehand.

use std::fs;
use std::net::TcpListener;

use disco::{Hosting, Options, SocketSession};
use rpc_core::{DataType, Device, ErrorKind, Pack, RpcError, Session};
use rpc_server::ServerProcess;
use rpc_server::builtins::ServerInfo;
use rpc_server::policy::Answer;
use rpc_transports::{Connector, Tokens};
use serde_json::Value as Json;

use super::cli::{cli, run};

/// Returns the line of a token file for the holder `name`. The second number tells tokens of one
/// holder apart.
fn token(name: &str, number: u32) -> String {
    format!("{name} {number:032}-secret-of-{name}")
}

/// A server with a policy, and a service whose port one of its clients may reach.
struct Fixture {
    server: ServerProcess,
    service: TcpListener,
    _folder: tempfile::TempDir,
}

/// Rights of the holders of the tokens `ci`, `guest` and `alone`; `stranger` has none.
const POLICY: &str = r#"
    [[rule]]
    name = "everybody"
    identities = ["token:ci", "token:guest"]
    functions = ["rpc.new_object"]
    max-handles = 3

    [[rule]]
    name = "ci"
    identities = ["token:ci", "cert:guest", "unix:*", "anonymous", "via:ci/guest"]
    functions = ["rpc.time*"]
    run = ["true"]
    port = ["tcp://127.0.0.1:PORT"]
    listen = ["tcp://127.0.0.1:*"]
    forward = ["tcp://localhost:*"]
    disco = true
    lease-priority = 2
    devices = ["cuda"]
    max-handles = 50

    [[rule]]
    name = "alone"
    identities = ["token:alone"]
    max-sessions = 1
"#;

impl Fixture {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let service = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = service.local_addr().unwrap().port().to_string();
        let file = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).unwrap();
            folder.path().join(name).into_os_string().into_string().unwrap()
        };
        let tokens = [("ci", 1), ("guest", 1), ("alone", 1), ("alone", 2), ("stranger", 1)];
        let tokens = tokens.map(|(name, number)| token(name, number)).join("\n");
        let mut command = crate::server_program();
        command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--exit-with-stdin", "--log-level", "error"]);
        command.args(["--forward-token-file", &file("hop", &token("ci", 1))]);
        command
            .args(["--token-file", &file("tokens", &tokens), "--policy"])
            .arg(file("policy", &POLICY.replace("PORT", &port)));
        command.arg("--workdir").arg(folder.path().join("state")).args(args);
        Self { server: ServerProcess::spawn(command).unwrap(), service, _folder: folder }
    }

    fn connector(token: &str) -> Connector {
        Connector::new().tokens(Tokens::parse(token).unwrap())
    }

    fn connect(&self, name: &str) -> Session {
        Self::connector(&token(name, 1)).connect_blocking(self.server.address()).unwrap()
    }

    /// Returns the text of the permission to reach the service.
    fn port(&self) -> String {
        format!("port:tcp://{}", self.service.local_addr().unwrap())
    }

    /// Returns the outcome of an attempt to do what the text of a permission says.
    fn attempt(&self, name: &str, session: &Session, permission: &str) -> Result<(), RpcError> {
        match permission.split_once(':') {
            Some(("call", function)) => session.get_function(function).wait().map(drop),
            Some(("run", program)) => session.run(program).output().wait().map(drop),
            Some(("device", device)) => session.alloc(device.parse::<Device>()?, DataType::F32, &[1]).wait().map(drop),
            Some(("lease-priority", priority)) => {
                let request = session.get_function("rpc.lease.request").wait()?;
                request
                    .call::<rpc_core::RemoteObject>((Device::cpu(), priority.parse::<i32>().unwrap(), ()))
                    .wait()
                    .map(drop)
            }
            Some(("forward", address)) => {
                let connector = Self::connector(&token(name, 1)).via(self.server.address());
                connector.connect_blocking(address).map(drop).map_err(|error| error.into_rpc_error())
            }
            Some(("port", address)) => {
                let (connector, service) = (Self::connector(&token(name, 1)), address.parse().unwrap());
                let runtime = tokio::runtime::Runtime::new().unwrap();
                let tunnel = runtime.block_on(connector.open_tunnel(self.server.address(), &service));
                tunnel.map(drop).map_err(|error| error.into_rpc_error())
            }
            Some(("listen", address)) => session.listen(address).wait().map(drop),
            None if permission == "disco" => session.get_function("disco.open").wait().map(drop),
            None if permission == "modules" => session.load_module("none").wait().map(drop),
            _ => panic!("{permission}"),
        }
    }
}

fn can(session: &Session, permission: &str) -> Answer {
    let Pack(answer) = session.get_function("rpc.can").wait().unwrap().call((permission,)).wait().unwrap();
    answer
}

#[test]
fn clients_do_what_the_rules_for_them_say_and_nothing_else() {
    for args in [&["--isolate", "none"][..], &["--isolate", "process", "--allow-run", "true,sh"]] {
        let ports = ["--allow-port", "tcp://127.0.0.1:*", "--allow-forward", "*", "--allow-listen", "tcp://127.*:0"];
        let fixture = Fixture::start(&[args, &ports].concat());
        let (ci, guest, isolated) = (fixture.connect("ci"), fixture.connect("guest"), args.len() > 2);
        let (port, other_port) = (fixture.port(), "port:tcp://127.0.0.1:1".to_owned());
        // The server itself, by two names.
        let other_forward = format!("forward:{}", fixture.server.address());
        let forward = other_forward.replace("127.0.0.1", "localhost");
        let forwarded_port = forward.replace("forward", "port");
        let table = [
            // Permission, and the rule by which ci and guest have it.
            ("call:rpc.echo", Some("everybody"), Some("everybody")),
            ("call:rpc.new_object", Some("everybody"), Some("everybody")),
            ("call:rpc.time_function", Some("ci"), None),
            ("call:rpc.sleep", None, None),
            ("call:rpc.file.ls", Some("ci"), None),
            ("call:rpc.module.find", None, None),
            ("run:true", Some("ci").filter(|_| isolated), None),
            ("run:sh", None, None),
            ("device:cpu:0", Some("everybody"), Some("everybody")),
            ("device:vulkan:0", None, None),
            ("lease-priority:2", Some("ci"), None),
            ("lease-priority:3", None, None),
            (&port, Some("ci"), None),
            (&other_port, None, None),
            ("listen:tcp://127.0.0.1:0", Some("ci"), None),
            // What the policy allows beyond the settings, and the settings beyond the policy.
            ("listen:tcp://127.0.0.1:1", None, None),
            ("listen:tcp://127.0.0.2:0", None, None),
            ("call:rpc.listen.open", Some("ci"), None),
            // Forwarding includes tunnels.
            (&forwarded_port, Some("ci"), None),
            (&forward, Some("ci"), None),
            (&other_forward, None, None),
            ("disco", Some("ci"), None),
            ("modules", None, None),
        ];
        for (permission, of_ci, of_guest) in table {
            for (name, session, rule) in [("ci", &ci, of_ci), ("guest", &guest, of_guest)] {
                let (answer, outcome) = (can(session, permission), fixture.attempt(name, session, permission));
                let context = format!("{args:?}, {name}, {permission}: {answer:?}, {outcome:?}");
                assert_eq!((answer.allowed, answer.rule.as_deref()), (rule.is_some(), rule), "{context}");
                match rule {
                    Some(_) => assert!(outcome.is_ok(), "{context}"),
                    None => assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Refused, "{context}"),
                }
            }
        }
        // Functions that the settings leave nothing to do can be looked up, and the answer is no.
        let answer = can(&ci, "call:rpc.run.start");
        assert_eq!(answer.allowed, isolated, "{args:?}: {answer:?}");
        fixture.attempt("ci", &ci, "call:rpc.run.start").unwrap();
        assert!(!can(&guest, "call:rpc.run.start").allowed);
        assert_eq!(fixture.attempt("guest", &guest, "call:rpc.run.start").unwrap_err().kind(), ErrorKind::Refused);
        // Refusals name the rules, and what they give.
        let refusal = |permission: &str| fixture.attempt("ci", &ci, permission).unwrap_err().message().to_owned();
        let expected = "the policy lets 'token:ci' call rpc.new_object (rule 'everybody'), rpc.time* (rule 'ci') and \
                        not 'rpc.sleep'";
        assert_eq!(refusal("call:rpc.sleep"), expected);
        assert!(refusal("call:rpc.module.find").contains("'modules'"), "{}", refusal("call:rpc.module.find"));
        // What may not be called is not listed either.
        let names: Vec<(String, String)> = guest.get_function("rpc.functions").wait().unwrap().call(()).wait().unwrap();
        assert!(names.iter().any(|(name, _)| name == "rpc.new_object"));
        assert!(!names.iter().any(|(name, _)| name == "rpc.sleep" || name.starts_with("disco.")), "{names:?}");
        let Pack(info): Pack<ServerInfo> = ci.get_function("rpc.info").wait().unwrap().call(()).wait().unwrap();
        assert_eq!(info.identity.as_deref(), Some("token:ci"));
        assert_eq!(info.rules.unwrap(), ["everybody", "ci"]);

        // Of several rules the greatest limit holds, and a limit of sessions is one of the holder
        // of a name, by whichever of its tokens.
        let make = guest.get_function("rpc.new_object").wait().unwrap();
        let made: Vec<_> = (0..2).map(|_| make.call::<rpc_core::RemoteObject>(()).wait().unwrap()).collect();
        let error = make.call::<rpc_core::RemoteObject>(()).wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        drop(made);
        let _first = fixture.connect("alone");
        let second = Fixture::connector(&token("alone", 2)).connect_blocking(fixture.server.address());
        assert_eq!(second.unwrap_err().into_rpc_error().kind(), ErrorKind::LimitExceeded);

        let stranger = Fixture::connector(&token("stranger", 1)).connect_blocking(fixture.server.address());
        let stranger = stranger.unwrap_err().into_rpc_error();
        assert_eq!(stranger.kind(), ErrorKind::Refused);
        assert!(stranger.message().contains("no rule of the server's policy is for 'token:stranger'"), "{stranger}");
    }
}

#[test]
fn workers_of_disco_have_the_rights_of_the_client_that_has_started_them() {
    for isolate in ["none", "process"] {
        let fixture = Fixture::start(&["--isolate", isolate]);
        for hosting in [Hosting::Threads, Hosting::Processes] {
            let connector = Fixture::connector(&token("ci", 1));
            let mut options = Options::default();
            options.hosting = hosting;
            let session = SocketSession::new([fixture.server.address()], 2, 1).connector(connector).options(options);
            let session = session.start().wait().unwrap();
            session.get_global_func("rpc.echo").unwrap().call((42,)).unwrap();
            session.sync_all().wait().unwrap();
            let _refused = session.get_global_func("rpc.sleep").unwrap();
            let error = session.sync_all().wait().unwrap_err();
            assert!(error.to_string().contains("'token:ci'"), "--isolate {isolate}, {hosting:?}: {error}");
            session.shutdown().wait().unwrap();
        }
    }
    // A node opens others within the right of its client to be forwarded.
    let fixture = Fixture::start(&["--isolate", "none", "--allow-forward", "*"]);
    let (node, connector) = (fixture.server.address(), Fixture::connector(&token("ci", 1)));
    let further = node.replace("127.0.0.1", "localhost");
    let start = |further: &str| {
        let session = SocketSession::new([node, further], 1, 1).connector(connector.clone());
        session.fan_out(1).start().wait()
    };
    let session = start(&further).unwrap();
    assert_eq!(session.num_workers(), 2);
    session.shutdown().wait().unwrap();
    let error = start(node).unwrap_err().to_string();
    assert!(error.contains("'token:ci'") && error.contains("be forwarded to"), "{error}");
}

#[test]
fn the_user_at_a_unix_socket_is_known_and_asks_beforehand() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let policy = folder.join("policy").into_os_string().into_string().unwrap();
    fs::write(&policy, POLICY.replace("PORT", "1")).unwrap();
    let mut command = crate::server_program();
    let socket = format!("unix:{}", folder.join("socket").display());
    command.args(["serve", "--listen", &socket, "--exit-with-stdin", "--policy", &policy, "--log-level", "error"]);
    command.arg("--workdir").arg(folder.join("unix"));
    let server = ServerProcess::spawn(command).unwrap();
    let user = rustix::process::getuid().as_raw();
    for (permission, code) in [("call:rpc.time_function", 0), ("call:rpc.sleep", 1), ("nonsense", 2)] {
        assert_eq!(cli(&["can", permission, server.address()]).code, code, "{permission}");
    }
    let refused: Json = serde_json::from_str(&cli(&["can", "run:true", server.address(), "--json"]).stdout).unwrap();
    assert_eq!(refused["allowed"], false);
    assert_eq!(refused["reason"], "the server's settings do not allow it (--allow-run)");
    let info = cli(&["info", server.address()]).ok();
    assert!(info.contains(&format!("you are    unix:{user} (rules of the policy: ci)")), "{info}");

    // The same questions without a server.
    let check = |args: &[&str]| {
        let mut command = crate::server_program();
        command.args(["policy", "check", &policy]).args(args);
        run(command)
    };
    assert_eq!(check(&[]).ok(), format!("{policy}: 3 rules\n"));
    for (identity, permission, code) in [
        ("token:ci", "run:true", 0),
        ("token:guest", "run:true", 1),
        ("cert:guest", "run:true", 0),
        ("cert:ci", "run:true", 1),
        ("via:ci/guest", "run:true", 0),
        ("via:guest/ci", "run:true", 1),
        ("unix:0", "disco", 0),
        ("anonymous", "disco", 0),
        ("anonymous", "shell:x", 2),
        ("nobody", "disco", 2),
    ] {
        assert_eq!(check(&[identity, permission]).code, code, "{identity} {permission}");
    }
    fs::write(&policy, "[[rule]]\nname = \"x\"\nidentitys = [\"*\"]\n").unwrap();
    let broken = check(&[]);
    assert_eq!(broken.code, 78);
    let advice = "did you mean 'identities'?";
    assert!(broken.stderr.contains("line 3") && broken.stderr.contains(advice), "{}", broken.stderr);
}

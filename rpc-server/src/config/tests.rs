//! Unit tests of settings: flags, variables, files, and what is refused.

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::Path;

use clap::{Args, CommandFactory, FromArgMatches, Parser};

use super::units::seconds;
use super::*;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    settings: ServeSettings,
}

fn flags(args: &[&str]) -> ServeSettings {
    let matches = Command::command().no_binary_name(true).get_matches_from(args);
    Command::from_arg_matches(&matches).unwrap().settings
}

fn file(text: &str) -> Result<ServeSettings, ConfigError> {
    ServeSettings::from_toml(text, Path::new("test.toml"))
}

#[test]
fn data_addresses_are_those_of_one_machine() {
    let resolve = |address: &str| {
        let settings = ServeSettings { data_address: Some(address.parse().unwrap()), ..ServeSettings::default() };
        settings.resolve()
    };
    assert_eq!(resolve("10.0.0.5").unwrap().data_address, Some("10.0.0.5".parse().unwrap()));
    for address in ["0.0.0.0", "::", "224.0.0.1"] {
        let error = resolve(address).unwrap_err();
        assert!(matches!(error, ConfigError::DataAddress { .. }), "{error}");
    }
}

/// Without a word of the operator, Disco is for clients who prove who they are or are on this
/// machine.
#[test]
fn disco_is_served_to_known_and_to_local_clients() {
    let serves = |args: &[&str]| flags(args).resolve().unwrap().serves_disco(&crate::transports());
    let open = ["--listen", "tcp://0.0.0.0:0", "--insecure"];
    for (args, default) in [
        (&["--listen", "unix:/a,tcp://127.0.0.1:0", "--insecure"][..], true),
        (&["--stdio"], true),
        (&open, false),
        (&["--listen", "unix:/a,tcp://0.0.0.0:0", "--insecure"], false),
        (&["--relay", "tcp://10.0.0.1:9290/name", "--insecure"], false),
        (&["--listen", "unix:/a", "--relay", "tcp://127.0.0.1:9290/name"], false),
        (&["--listen", "unix:/a", "--relay", "tcp://127.0.0.1:9290/name", "--token-file", "/token"], true),
        (&["--listen", "unix:/a", "--tvm", "--tvm-proxy", "127.0.0.1:9090"], false),
        (&[&open[..], &["--token-file", "/token"]].concat(), true),
        (&[&open[..], &["--client-ca", "/ca"]].concat(), true),
    ] {
        assert_eq!(serves(args), default, "{args:?}");
        assert!(serves(&[args, &["--allow-disco"]].concat()), "{args:?}");
        assert!(!serves(&[args, &["--allow-disco=false"]].concat()), "{args:?}");
    }
}

/// Programs are run for known clients alone, whatever the operator says otherwise, and outside of
/// the server's process.
#[test]
fn programs_need_identity_and_isolation() {
    let run = |args: &[&str]| flags(&[args, &["--allow-run", "sh,/opt/tool"]].concat()).resolve();
    let open = ["--listen", "tcp://0.0.0.0:0", "--insecure"];
    assert_eq!(run(&[]).unwrap().allow_run, ["sh", "/opt/tool"]);
    assert!(run(&["--listen", "unix:/a", "--isolate", "process"]).is_ok());
    assert!(run(&[&open[..], &["--token-file", "/token"]].concat()).is_ok());
    assert!(matches!(run(&open), Err(ConfigError::RunWithoutIdentity)));
    // Clients of a relay can be anywhere.
    let relayed = ["--listen", "unix:/a", "--relay", "tcp://127.0.0.1:9290/name"];
    assert!(matches!(run(&relayed), Err(ConfigError::RunWithoutIdentity)));
    assert!(matches!(run(&[&relayed[..], &["--client-ca", "/ca"]].concat()), Err(ConfigError::RunWithoutIdentity)));
    assert!(run(&[&relayed[..], &["--token-file", "/token"]].concat()).is_ok());
    // The controller that a node dials is a client, too.
    let worker = |args: &[&str]| {
        let command = WorkerSettings::augment_args(clap::Command::new("worker"));
        let args = [&["worker", "--allow-run", "any", "--insecure", "--controller"], args].concat();
        WorkerSettings::from_arg_matches(&command.get_matches_from(args)).unwrap().resolve()
    };
    assert!(matches!(worker(&["tcp://192.0.2.1:9700"]), Err(ConfigError::RunWithoutIdentity)));
    for known in [&["tcp://127.0.0.1:9700"][..], &["tcp://192.0.2.1:9700", "--token-file", "/token"]] {
        assert!(worker(known).is_ok(), "{known:?}");
    }
    assert!(matches!(run(&["--isolate", "none"]), Err(ConfigError::RunWithoutIsolation)));
    for program in ["", "./tool", "bin/tool"] {
        assert!(matches!(flags(&["--allow-run", program]).resolve(), Err(ConfigError::RunProgram { .. })), "{program}");
    }
    // `*` is no way to say any.
    for program in ["*", "/opt/*", "python?", " sh"] {
        let error = flags(&["--allow-run", &format!("make,{program}")]).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::RunPattern { .. }), "{error}");
        assert!(error.to_string().contains("any for all programs"), "{error}");
    }
    assert!(flags(&["--allow-run", "[,g++,tool 2"]).resolve().is_ok());
}

#[test]
fn a_flag_overrides_the_file_and_the_file_the_default() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.toml");
    fs::write(
        &path,
        "max-message = \"1MiB\"\nkeep-alive = \"7s\"\nlisten = [\"unix:/tmp/from-file\"]\ninsecure = true",
    )
    .unwrap();
    let config = path.to_str().unwrap();
    let effective = flags(&[
        "--config",
        config,
        "--max-message",
        "2MiB",
        "--listen",
        "unix:/a",
        "--listen",
        "tcp://0.0.0.0:0,unix:/b",
    ])
    .resolve()
    .unwrap();
    assert_eq!(effective.max_message, ByteSize(2 << 20));
    assert_eq!(effective.keep_alive, seconds(7));
    assert_eq!(effective.handshake_timeout, seconds(10));
    assert!(effective.insecure);
    let listen: Vec<_> = effective.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, ["unix:/a", "tcp://0.0.0.0:0", "unix:/b"]);
}

#[test]
fn a_switch_can_be_turned_off_again_by_flag() {
    let lower = file("insecure = true").unwrap();
    assert_eq!(flags(&["--insecure=false"]).or(lower.clone()).insecure, Some(false));
    assert_eq!(flags(&["--insecure"]).insecure, Some(true));
    assert_eq!(flags(&[]).or(lower).insecure, Some(true));
}

#[test]
fn every_setting_is_a_flag_a_variable_and_a_key_of_the_same_name() {
    let command = ServeSettings::augment_args(clap::Command::new("test"));
    let mut flags = BTreeSet::new();
    for arg in command.get_arguments() {
        let long = arg.get_long().unwrap();
        let variable = format!("RPC_SERVER_{}", long.replace('-', "_").to_uppercase());
        assert_eq!(arg.get_env().unwrap(), variable.as_str());
        assert!(arg.get_help().is_some(), "{long}");
        flags.insert(long.to_owned());
    }
    let config = ServeConfig {
        key: Some("board".to_owned()),
        tracker_key: Some("rasp4".to_owned()),
        allow_disco: Some(true),
        allow_logs: Some(true),
        data_address: Some("10.0.0.5".parse().unwrap()),
        port_range: Some(PortRange(1..=2)),
        isolate_cpu_time: Some(seconds(60)),
        max_total_memory: Some(ByteSize(3 << 30)),
        session_duration: Some(seconds(3600)),
        idle_timeout: Some(seconds(600)),
        cert: Some("server.pem".into()),
        cert_key: Some("server.key".into()),
        client_ca: Some("ca.pem".into()),
        token_file: Some("tokens".into()),
        forward_ca: Some("ca.pem".into()),
        forward_cert: Some("hop.pem".into()),
        forward_cert_key: Some("hop.key".into()),
        forward_token_file: Some("tokens".into()),
        ready_file: Some("ready".into()),
        metrics: Some("127.0.0.1:9464".parse().unwrap()),
        otlp_endpoint: Some("http://127.0.0.1:4318".parse().unwrap()),
        module_digests: Some("digests".into()),
        module_store: Some("modules".into()),
        tvm_ffi: Some("libtvm_ffi.so".into()),
        tvm_tracker: Some("pool.lan:9190".parse().unwrap()),
        tvm_proxy: Some("gateway.lan:9090".parse().unwrap()),
        policy: Some("policy.toml".into()),
        ..ServeConfig::default()
    };
    let keys: toml::Table = config.to_toml().unwrap().parse().unwrap();
    let mut keys: BTreeSet<_> = keys.keys().cloned().collect();
    keys.insert("config".to_owned());
    assert_eq!(keys, flags);
}

#[test]
fn every_setting_of_a_tracker_is_a_flag_a_variable_and_a_key_of_the_same_name() {
    let command = TrackerSettings::augment_args(clap::Command::new("test"));
    let mut flags = BTreeSet::new();
    for arg in command.get_arguments() {
        let long = arg.get_long().unwrap();
        let variable = format!("RPC_TRACKER_{}", long.replace('-', "_").to_uppercase());
        assert_eq!(arg.get_env().unwrap(), variable.as_str());
        assert!(arg.get_help().is_some(), "{long}");
        flags.insert(long.to_owned());
    }
    let config = TrackerConfig {
        cert: Some("server.pem".into()),
        cert_key: Some("server.key".into()),
        client_ca: Some("ca.pem".into()),
        token_file: Some("tokens".into()),
        forward_ca: Some("ca.pem".into()),
        forward_token_file: Some("tokens".into()),
        ready_file: Some("ready".into()),
        http: Some("127.0.0.1:9191".parse().unwrap()),
        metrics: Some("127.0.0.1:9192".parse().unwrap()),
        ..TrackerConfig::default()
    };
    let text = config.to_toml().unwrap();
    let keys: toml::Table = text.parse().unwrap();
    let mut keys: BTreeSet<_> = keys.keys().cloned().collect();
    keys.insert("config".to_owned());
    assert_eq!(keys, flags);
    assert_eq!(TrackerSettings::from_toml(&text, Path::new("test.toml")).unwrap().resolve().unwrap(), config);
}

#[test]
fn every_setting_of_a_relay_is_a_flag_a_variable_and_a_key_of_the_same_name() {
    let command = RelaySettings::augment_args(clap::Command::new("test"));
    let mut flags = BTreeSet::new();
    for arg in command.get_arguments() {
        let long = arg.get_long().unwrap();
        let variable = format!("RPC_RELAY_{}", long.replace('-', "_").to_uppercase());
        assert_eq!(arg.get_env().unwrap(), variable.as_str());
        assert!(arg.get_help().is_some(), "{long}");
        flags.insert(long.to_owned());
    }
    let config = RelayConfig {
        cert: Some("server.pem".into()),
        cert_key: Some("server.key".into()),
        client_ca: Some("ca.pem".into()),
        token_file: Some("tokens".into()),
        ready_file: Some("ready".into()),
        metrics: Some("127.0.0.1:9292".parse().unwrap()),
        tvm_tracker: Some("pool.lan:9190".parse().unwrap()),
        ..RelayConfig::default()
    };
    let keys: toml::Table = config.to_toml().unwrap().parse().unwrap();
    let mut keys: BTreeSet<_> = keys.keys().cloned().collect();
    keys.insert("config".to_owned());
    assert_eq!(keys, flags);
    let config = RelayConfig { tvm: true, tvm_tracker: config.tvm_tracker, ..RelayConfig::default() };
    let text = config.to_toml().unwrap();
    assert_eq!(RelaySettings::from_toml(&text, Path::new("test.toml")).unwrap().resolve().unwrap(), config);
}

#[test]
fn the_effective_configuration_reads_back_as_itself() {
    let config = flags(&[
        "--key",
        "board-1",
        "--port-range",
        "9090-9099",
        "--weights",
        "/models,/more/models",
        "--max-total-memory",
        "3GB",
        "--allow-forward",
        "tcp://a,unix:/b",
        "--allow-port",
        "tcp://127.0.0.1:80",
        "--allow-listen",
        "tcp://127.0.0.1:*",
        "--allow-peer",
        "tls://10.0.0.*",
        "--peer-address",
        "tls://10.0.0.5:9090,tcp://10.0.0.5:9091",
        "--isolate",
        "process",
        "--isolate-cpu-time",
        "1h",
        "--max-memory",
        "1GB",
    ])
    .resolve()
    .unwrap();
    let again = file(&config.to_toml().unwrap()).unwrap().resolve().unwrap();
    assert_eq!(again, config);
    assert_eq!(ServeConfig::default(), ServeSettings::default().resolve().unwrap());
}

#[test]
fn a_list_of_one_is_written_as_a_string() {
    let list = file("listen = ['tcp://127.0.0.1:1']\nallow-forward = [ 'unix:/a' ] # one\nweights = []\n").unwrap();
    let single = file("listen = 'tcp://127.0.0.1:1'\nallow-forward = \"unix:/a\" # one\nweights = []\n").unwrap();
    assert_eq!(single, list);
    // An error is in its line still, and what is no list takes no other kind of value.
    let error = file("listen = 'unix:/a'\nallow-forward = 'unix:/b'\nkey = ['a']").unwrap_err();
    assert!(error.source().unwrap().to_string().contains("line 3"), "{error}");
}

#[test]
fn an_unknown_key_and_a_malformed_value_are_errors_with_their_line() {
    for (text, hint) in [
        ("max-mesage = \"1MiB\"", "max-mesage"),
        ("keep-alive = \"soon\"", "30s"),
        ("max-memory = \"many\"", "64MiB"),
        ("listen = [\"localhost:9090\"]", "tcp://"),
        ("log-format = \"xml\"", "json"),
        ("log-level = \"a=b=c\"", "log-level"),
        ("config = \"other.toml\"", "config"),
        ("insecure", "insecure"),
    ] {
        let error = file(text).unwrap_err();
        assert_eq!(error.to_string().contains("did you mean 'max-message'?"), hint == "max-mesage", "{error}");
        let detail = error.source().unwrap().to_string();
        assert!(detail.contains(hint) && detail.contains("line 1"), "{detail}");
    }
}

#[test]
fn an_address_on_the_network_is_refused_without_insecure() {
    let unknown = flags(&["--listen", "tcp://nohost.invalid:1"]).resolve().unwrap_err();
    assert!(unknown.to_string().contains("cannot find the host of tcp://nohost.invalid:1"), "{unknown}");
    for address in ["tcp://0.0.0.0:9090", "tcp://[::]:0", "tcp://192.0.2.1:1"] {
        let error = flags(&["--listen", address]).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::Insecure { .. }), "{error:?}");
        assert!(error.to_string().contains("--insecure") && error.to_string().contains("127.0.0.1"), "{error}");
        flags(&["--listen", address, "--insecure"]).resolve().unwrap();
    }
    flags(&["--listen", "tcp://127.0.0.1:0", "--listen", "tcp://[::1]:0,unix:/tmp/x"]).resolve().unwrap();
}

#[test]
fn metrics_on_the_network_are_refused_without_insecure() {
    for address in ["0.0.0.0:9464", "[::]:9464", "10.0.0.5:0"] {
        let error = flags(&["--metrics", address]).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::InsecureMetrics { .. }), "{error:?}");
        flags(&["--metrics", address, "--insecure"]).resolve().unwrap();
    }
    for address in ["127.0.0.1:9464", "localhost:0", "[::1]:0"] {
        flags(&["--metrics", address]).resolve().unwrap();
    }
}

#[test]
fn a_status_page_on_the_network_is_refused_without_insecure() {
    let tracker = |address: &str, insecure| TrackerConfig {
        http: Some(address.parse().unwrap()),
        insecure,
        ..TrackerConfig::default()
    };
    for address in ["0.0.0.0:9191", "[::]:9191", "10.0.0.5:0"] {
        let error = tracker(address, false).check().unwrap_err();
        assert!(matches!(error, ConfigError::InsecurePage { .. }), "{error:?}");
        tracker(address, true).check().unwrap();
    }
    for address in ["127.0.0.1:9191", "localhost:0", "[::1]:9191"] {
        tracker(address, false).check().unwrap();
    }
}

#[test]
fn an_endpoint_for_spans_needs_the_feature_otel() {
    let resolved = flags(&["--otlp-endpoint", "http://127.0.0.1:4318"]).resolve();
    if cfg!(feature = "otel") {
        assert_eq!(resolved.unwrap().otlp_endpoint.unwrap().traces(), "http://127.0.0.1:4318/v1/traces");
    } else {
        let error = resolved.unwrap_err();
        assert!(matches!(error, ConfigError::NoOtel) && error.to_string().contains("--features otel"), "{error}");
    }
}

#[test]
fn address_that_cannot_be_listened_on_is_refused() {
    for address in ["exec:program", "local:", "tcp://127.0.0.1:1/key"] {
        let error = flags(&["--listen", address]).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::NotListenable { .. }), "{error:?}");
    }
    assert!(matches!(flags(&["--key", "a b"]).resolve().unwrap_err(), ConfigError::Key { .. }));
    let both = flags(&["--stdio", "--exit-with-stdin"]).resolve();
    assert!(matches!(both.unwrap_err(), ConfigError::StdinTaken));
}

/// A regression: these were taken without a word, and did nothing.
#[test]
fn settings_without_effect_are_refused() {
    for label in [&["--label", "arch=arm64"][..], &["--advertise", "tcp://h:1"], &["--tracker-key", "board"]] {
        let error = flags(label).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::NeedsTracker { setting } if setting == label[0]), "{error}");
        flags(&[label, &["--tracker", "tcp://pool:1", "--key", "board"]].concat()).resolve().unwrap();
    }
    flags(&["--relay", "tcp://127.0.0.1:1", "--tracker-key", "board"]).resolve().unwrap();
    for pattern in ["tpc://10.0.0.5", "10.0.0.5:9090", "tcp://10.0.0.5:port"] {
        for setting in ["--allow-forward", "--allow-port", "--allow-listen", "--allow-peer"] {
            let error = flags(&[setting, pattern]).resolve().unwrap_err();
            assert!(matches!(error, ConfigError::Pattern { .. }), "{error}");
            assert!(error.to_string().contains(setting) && error.source().is_some(), "{error}");
        }
    }
    let tracker = |pattern: &str| TrackerConfig { allow_advertise: vec![pattern.into()], ..TrackerConfig::default() };
    assert!(matches!(tracker("10.0.0.5").check().unwrap_err(), ConfigError::Pattern { .. }));
    // Another server may have the transport.
    tracker("pigeon://roof").check().unwrap();
}

#[test]
fn paths_that_are_opened_later_are_checked_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let with = |weights: &Path, tvm_ffi: &Path| {
        let (weights, tvm_ffi) = (vec![weights.to_owned()], Some(tvm_ffi.to_owned()));
        ServeConfig { weights, tvm_ffi, ..ServeConfig::default() }.check_paths()
    };
    with(folder.path(), &file).unwrap();
    with(folder.path(), folder.path()).unwrap();
    let nowhere = folder.path().join("nowhere");
    for (weights, tvm_ffi, wrong) in
        [(&*nowhere, &*file, "--weights"), (&*file, &*file, "--weights"), (folder.path(), &*nowhere, "--tvm-ffi")]
    {
        let error = with(weights, tvm_ffi).unwrap_err();
        assert!(error.to_string().contains(wrong) && error.source().is_some(), "{error}");
    }
}

#[test]
fn isolation_refuses_limits_that_cannot_hold() {
    let resolve = |args: &[&str]| flags(&[&["--isolate", "process"], args].concat()).resolve();
    let error = resolve(&["--max-total-memory", "1GiB"]).unwrap_err();
    assert!(matches!(error, ConfigError::NoShare { .. }) && error.to_string().contains("1GiB"), "{error}");
    resolve(&["--max-total-memory", "1GiB", "--max-memory", "1GiB"]).unwrap();
    assert!(matches!(resolve(&["--isolate-files", "3"]).unwrap_err(), ConfigError::TooFewFiles { .. }));
    assert!(matches!(resolve(&["--max-open-files", "7"]).unwrap_err(), ConfigError::TooFewOpenFiles { needed: 8, .. }));
    assert_eq!(flags(&["--isolate-files", "3"]).resolve().unwrap().isolate, Isolate::Auto);
}

#[test]
fn modules_are_off_and_bounded_by_default() {
    let config = flags(&[]).resolve().unwrap();
    assert!(
        !config.allow_modules
            && config.library.is_empty()
            && config.runtime_library.is_empty()
            && config.module_digests.is_none()
    );
    assert_eq!(
        (config.module_store_size, config.max_module, config.module_expiry),
        (ByteSize(4 << 30), ByteSize(512 << 20), seconds(30 * 24 * 3600))
    );
    for flag in ["--max-module", "--module-store-size"] {
        assert!(matches!(flags(&[flag, "0"]).resolve().unwrap_err(), ConfigError::Zero { .. }), "{flag}");
    }
}

#[cfg(feature = "tvm-ffi")]
#[test]
fn with_native_code_the_limits_are_those_of_sessions_with_processes_by_default() {
    for native in [&["--allow-modules"][..], &["--library", "/lib/a.so,/lib/b.so"]] {
        let with = |more: &[&str]| flags(&[native, &["--max-total-memory", "1GiB"], more].concat()).resolve();
        let error = with(&[]).unwrap_err();
        assert!(
            matches!(error, ConfigError::NoShare { .. }) && error.to_string().contains("--allow-modules"),
            "{error}"
        );
        with(&["--isolate", "process"]).unwrap_err();
        with(&["--isolate", "none"]).unwrap();
        let config = with(&["--max-memory", "1GiB"]).unwrap();
        assert_eq!(file(&config.to_toml().unwrap()).unwrap().resolve().unwrap(), config);
        assert_eq!(flags(native).resolve().unwrap().total_memory(), ByteSize::UNLIMITED);
    }
}

#[cfg(not(feature = "tvm-ffi"))]
#[test]
fn settings_for_native_code_need_a_build_with_the_loader() {
    for native in [["--allow-modules=true", "--stdio"], ["--library", "/lib/a.so"], ["--tvm-ffi", "/lib/b.so"]] {
        let error = flags(&native).resolve().unwrap_err();
        assert!(matches!(error, ConfigError::NoTvmFfi) && error.to_string().contains("--features tvm-ffi"), "{error}");
    }
    flags(&["--max-module", "1MiB"]).resolve().unwrap();
}

#[test]
fn without_an_address_the_default_is_used_but_not_beside_stdio() {
    assert_eq!(flags(&[]).resolve().unwrap().listen[0].to_string(), "tcp://127.0.0.1:9090");
    assert!(flags(&["--stdio"]).resolve().unwrap().listen.is_empty());
}

#[test]
fn a_missing_file_is_an_error() {
    let error = flags(&["--config", "/nonexistent/server.toml"]).resolve().unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }));
}

#[test]
fn a_configuration_with_a_path_that_is_not_text_is_an_error() {
    use std::os::unix::ffi::OsStringExt as _;
    let file = std::ffi::OsString::from_vec(vec![b'a', 0xff]);
    let config = ServeConfig { ready_file: Some(file.into()), ..ServeConfig::default() };
    assert!(matches!(config.to_toml(), Err(ConfigError::NotText { .. })));
}

//! The Debian package: what its metadata lists is there, or comes from the programs.

use std::path::Path;
use std::process::Command;

/// Returns the pairs of source and destination that `rpc-server/Cargo.toml` lists.
fn assets() -> Vec<(String, String)> {
    let manifest = include_str!("../../Cargo.toml").parse::<toml::Table>().unwrap();
    let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
    let text = |asset: &toml::Value, at: usize| asset[at].as_str().unwrap().to_owned();
    assets.iter().map(|asset| (text(asset, 0), text(asset, 1))).collect()
}

#[test]
fn every_file_of_the_package_exists_or_is_made_by_the_programs() {
    let script = include_str!("../../deploy/debian.sh");
    let mut generated = 0;
    for (source, destination) in assets() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(&source);
        if let Some(program) = source.strip_prefix("target/release/") {
            assert!(["rpc-server", "rpc-cli"].contains(&program), "{source}");
        } else if source == "../target/deb/man/*.1" {
            assert!(script.contains(r#""$release/$program" man "$generated/man""#));
            generated += 1;
        } else if let Some(completions) = source.strip_prefix("../target/deb/") {
            let (program, shell) = completions.split_once('.').unwrap();
            let program = match program {
                "rpc-cli" => env!("CARGO_BIN_EXE_rpc-cli"),
                "rpc-server" => env!("CARGO_BIN_EXE_rpc-server"),
                other => panic!("{other}"),
            };
            let output = Command::new(program).args(["completions", shell]).output().unwrap();
            assert!(output.status.success() && !output.stdout.is_empty(), "{source}: {output:?}");
            assert!(script.contains(r#"completions "$shell" >"$generated/$program.$shell""#));
            generated += 1;
        } else {
            assert!(file.is_file(), "{source}");
        }
        assert!(destination.starts_with("usr/"), "{destination}");
    }
    assert_eq!(generated, 7);
    let unit = include_str!("../../deploy/rpc-server.service");
    assert!(unit.contains("ExecStart=/usr/bin/rpc-server serve"));
}

#!/usr/bin/env bash
# Builds the Debian package: both programs, their completions and manual pages, and the unit for systemd. Prints its path.
#
# Needs cargo-deb (cargo install cargo-deb) and dpkg-dev. `--no-build` packs the programs that are in target/release.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ "${1:-}" = --no-build ] || cargo build --locked --release -p rpc-server --bins >&2
release="${CARGO_TARGET_DIR:-target}/release"
# What the programs say about themselves; rpc-server/Cargo.toml lists it.
generated=target/deb
rm -rf "$generated"
mkdir -p "$generated/man"
for program in rpc-server rpc-cli; do
    for shell in bash zsh fish; do
        "$release/$program" completions "$shell" >"$generated/$program.$shell"
    done
    "$release/$program" man "$generated/man"
done
cargo deb -p rpc-server --no-build --output "$generated/rpc-server.deb" >&2
echo "$PWD/$generated/rpc-server.deb"

#!/bin/sh
# Brings what the tests of modules need, into target/tvm-ffi: a Python environment with TVM-FFI, and TVM unless the first
# argument is --without-tvm. Needs Python 3.9 or later and a package registry. Does nothing where that has been done.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p target/tvm-ffi
venv=target/tvm-ffi/venv
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
pip="$venv/bin/pip --disable-pip-version-check install --quiet"
$pip 'apache-tvm-ffi>=0.1.15,<0.2'
if [ "${1:-}" != --without-tvm ]; then
    # The models that the tests compile are written for this version.
    $pip 'apache-tvm==0.27.0.post1' || echo "there is no TVM for this machine: its tests are skipped" >&2
fi

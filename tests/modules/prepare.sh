#!/bin/sh
# Brings what the tests of modules need, into target/tvm-ffi/packages: the Python packages of TVM-FFI, and of TVM with what its
# tracker and its proxy need unless the first argument is --without-tvm. Needs Python 3.9 or later with pip, and a package
# registry. Does nothing where that has been done.
set -eu
cd "$(dirname "$0")/../.."
packages=target/tvm-ffi/packages
install() {
    python3 -m pip --disable-pip-version-check install --quiet --target "$packages" "$@"
}
[ -e "$packages/tvm_ffi/lib/libtvm_ffi.so" ] || install 'apache-tvm-ffi>=0.1.15,<0.2' numpy
if [ "${1:-}" != --without-tvm ] && [ ! -e "$packages/tvm/lib/libtvm_runtime.so" ]; then
    # The model that the tests compile is written for this version. It brings nothing of TVM-FFI that is not there.
    install --no-deps 'apache-tvm==0.27.0.post1' ml_dtypes typing_extensions ||
        echo "there is no TVM for this machine: its tests are skipped" >&2
fi
if [ -e "$packages/tvm/lib/libtvm_runtime.so" ] && [ ! -e "$packages/tornado" -o ! -e "$packages/cloudpickle" ]; then
    install --no-deps cloudpickle tornado psutil || echo "the tests of TVM's tracker and proxy are skipped" >&2
fi

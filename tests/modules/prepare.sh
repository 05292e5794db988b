#!/bin/sh
# Brings what the tests of modules need, into target/tvm-ffi/packages: the Python packages of TVM-FFI, and of TVM with what its
# tracker and its proxy need unless the first argument is --without-tvm. Older versions of TVM come beside them, into
# target/tvm-ffi/tvm-VERSION. Needs Python 3.9 or later with pip, and a package registry. Does nothing where that has been done.
set -eu
cd "$(dirname "$0")/../.."
packages=target/tvm-ffi/packages
install() {
    install_into "$packages" "$@"
}
install_into() {
    folder="$1"
    shift
    python3 -m pip --disable-pip-version-check install --quiet --target "$folder" "$@"
}
# Installs an older version of TVM, with the TVM-FFI that it was built for; the rest is that of the packages. The compiler is
# half of it, and not used.
older() {
    version="target/tvm-ffi/tvm-$1"
    shift
    [ ! -e "$version" ] || return 0
    rm -rf "$version.new"
    install_into "$version.new" --no-deps --no-compile "$@" && rm -f "$version.new/tvm/lib/libtvm_compiler.so" &&
        mv "$version.new" "$version"
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
if [ "${1:-}" != --without-tvm ] && [ -e "$packages/tvm/lib/libtvm_runtime.so" ]; then
    older 0.25 'apache-tvm==0.25.0.post1' 'apache-tvm-ffi==0.1.12' || echo "the tests with TVM 0.25 are skipped" >&2
    older 0.26 'apache-tvm==0.26.0' 'apache-tvm-ffi==0.1.14.post1' || echo "the tests with TVM 0.26 are skipped" >&2
fi

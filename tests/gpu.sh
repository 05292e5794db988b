#!/bin/sh
# Runs all that needs a GPU, and prints one report: the GPUs and their driver, NVIDIA's libraries, the
# tests, and the figures beside the bare calls. Without a GPU it says so and succeeds.
set -u
cd "$(dirname "$0")/.." || exit 1

# Without a driver it fails, and says so where the list would be.
gpus=$(nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader 2>/dev/null) || gpus=
if [ -z "$gpus" ]; then
    echo "no GPU: nvidia-smi finds none"
    exit 0
fi

echo "== GPUs: index, name, driver, memory"
echo "$gpus"
echo "== libraries of the linker's cache"
ldconfig -p 2>/dev/null | grep -E 'lib(cuda|nccl|cublas)\.so' || echo "none"

# Tests that find no GPU, or lack a part, fail instead of passing.
export RPC_TESTS_REQUIRE_GPU=1
failed=

step() {
    name=$1
    shift
    echo "== $name"
    "$@" || failed="$failed, $name"
}

step "tests of the device" cargo test --quiet -p rpc-cuda --test gpu
step "tests of servers and workers" cargo test --quiet -p rpc-server --test server cuda::
step "copies beside the driver's own" cargo bench --quiet -p rpc-tests --bench cuda
step "collectives beside bare NCCL" cargo bench --quiet -p disco --features cuda --bench nccl

if [ -n "$failed" ]; then
    echo "failed: ${failed#, }"
    exit 1
fi
echo "all passed"

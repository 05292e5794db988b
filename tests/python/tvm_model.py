"""A model that TVM has compiled, for the scenarios of other files: it is uploaded, run and timed in a session, and
has to return the numbers that it returns at home.

The folder with the model and its numbers is that of `RPC_TESTS_MODEL`. By itself it does that at a server, as the client
of the installed version of TVM:

    python tvm_model.py HOST:PORT VERSION
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import rpc

SHAPES = {"x": (4, 64), "hidden": (64, 32), "output": (32, 10)}

# Flags by which a server of this project takes such models.
SERVER_FLAGS = ["--allow-modules", "--tvm-ffi", os.environ.get("RPC_TESTS_TVM_FFI", "")]
SERVER_FLAGS += ["--runtime-library", os.environ.get("RPC_TESTS_TVM_RUNTIME", "")]


def check(session):
    folder = Path(os.environ["RPC_TESTS_MODEL"])
    session.upload(str(folder / "model.so"))
    machine = session.load_module("model.so")["vm_load_executable"]()
    # Three numbers for each device: its kind, its index, and its kind of allocator; 2 is a pool.
    machine["vm_initialization"](1, 0, 2)
    cpu = session.cpu()
    arrays = [np.fromfile(folder / f"{name}.f32", "<f4").reshape(shape) for name, shape in SHAPES.items()]
    args = [tvm.runtime.tensor(array, cpu) for array in arrays]
    for _ in range(2):
        classes = machine["main"](*args).numpy()
        assert classes.tobytes() == (folder / "classes.f32").read_bytes(), "the numbers differ"
    times = machine.time_evaluator("main", cpu, number=2, repeat=3)(*args)
    assert len(times.results) == 3 and min(times.results) > 0, times


def check_ours(address):
    """The same, and calls and copies, by the client of this project: the program of tests/server/tvm_client.rs."""
    command = [os.environ["RPC_TESTS_CLIENT"], "--exact", "--nocapture", "tvm_client::a_client_of_a_scenario"]
    environment = {**os.environ, "RPC_TESTS_CLIENT_AT": address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    is_done = done.returncode == 0 and "the client has done its work" in done.stdout
    assert is_done, f"{address}: {done.stdout}{done.stderr}"


def main():
    address, version = sys.argv[1:]
    assert tvm.__version__.startswith(version), tvm.__version__
    host, port = address.rsplit(":", 1)
    check(rpc.connect(host, int(port), "board"))


if __name__ == "__main__":
    main()

"""A server of TVM on a free port of this machine, which it prints: the loop of `tvm.exec.rpc_server`,
whose own choice of a port begins at a fixed one.

    python tvm_server.py
"""

import os
import socket
import time
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm.rpc import server


@tvm_ffi.register_global_func("test.add")
def add(left, right):
    return left + right


@tvm_ffi.register_global_func("test.raise")
def fail(text):
    raise ValueError(text)


@tvm_ffi.register_global_func("test.echo")
def echo(value):
    return value


@tvm_ffi.register_global_func("test.adder")
def adder(left):
    return lambda right: left + right


@tvm_ffi.register_global_func("test.ones")
def ones(count):
    return tvm.runtime.tensor(np.ones(count, "float32"))


@tvm_ffi.register_global_func("test.sum")
def total(tensor):
    return float(tensor.numpy().sum())


@tvm_ffi.register_global_func("test.sleep")
def sleep(seconds):
    time.sleep(seconds)


@tvm_ffi.register_global_func("test.show")
def show(value):
    """Show a list, a map or a shape, and what is in it."""
    if isinstance(value, (tvm_ffi.Map, tvm_ffi.Dict)):
        return "{" + ", ".join(f"{show(key)}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tvm_ffi.Shape, tuple)):
        return f"({', '.join(str(size) for size in value)})"
    if isinstance(value, (tvm_ffi.Array, tvm_ffi.List)):
        return f"[{', '.join(show(item) for item in value)}]"
    return str(value)


@tvm_ffi.register_global_func("test.wait")
def wait(path):
    """Say that the call has begun by a file, and wait until that is removed."""
    Path(path).touch()
    while os.path.exists(path):
        time.sleep(0.01)


def main():
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    port = listener.getsockname()[1]
    print(port, flush=True)
    server._listen_loop(listener, port, "board", None, None, None)


if __name__ == "__main__":
    main()

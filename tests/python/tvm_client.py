"""Scenarios of the client of TVM at a server with --tvm --tvm-self-test --key board --allow-modules.

Run by rpc-server/tests/server/tvm.rs, with the server's HOST:PORT as argument.
"""

import os
import sys
import tempfile

import numpy as np
import tvm
import tvm_model
from tvm import rpc, te

HOST, PORT = sys.argv[1].rsplit(":", 1)


def connect(key="board", **options):
    return rpc.connect(HOST, int(PORT), key, **options)


def error_of(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def values(session):
    echo = session.get_function("testing.echo")
    plain = [1, -(2**63), 1.5, True, None, tvm.DataType("int8")]
    for value in [*plain, "s", "a longer text, ä", b"b", b"more than seven\0"]:
        assert echo(value) == value, value
    assert session.get_function("rpc.test.strcat")("abc", 11) == "abc:11"
    assert session.get_function("rpc.test.add_to_lhs")(10)(5) == 15
    error = error_of(session.get_function("rpc.test.except"), "abc")
    assert error == "RPCError: RPCError: Error caught from RPC call:\nabc", error
    assert "has no function" in error_of(session.get_function, "no.such.function")
    shape = session.get_function("ffi.Shape")(4, 5, 6)
    assert session.get_function("rpc.testing.GetShapeElem")(shape, 2) == 6


def tensors(session):
    cpu, echo = session.cpu(), session.get_function("testing.echo")
    for dtype in ["int8", "uint16", "float16", "bool", "float64"]:
        array = (np.arange(35).reshape(5, 7) % 3).astype(dtype)
        there = tvm.runtime.tensor(array, cpu)
        np.testing.assert_array_equal(there.numpy(), array)
        np.testing.assert_array_equal(echo(there).numpy(), array)
    source = tvm.runtime.tensor(np.arange(12, dtype="float32").reshape(3, 4), cpu)
    target = tvm.runtime.empty((3, 4), "float32", cpu)
    source.copyto(target)
    np.testing.assert_array_equal(target.numpy(), source.numpy())
    assert tvm.runtime.empty((0, 3), "float32", cpu).numpy().shape == (0, 3)
    session.get_function("rpc.test.remote_tensor_func")(tvm.runtime.tensor(np.ones((3, 4)), cpu))
    make = session.get_function("rpc.test.remote_return_nd")
    zeros = make("get_arr")()
    assert zeros.numpy().tolist() == [0.0] * 10 and make("get_arr_elem")(zeros, 3) == 0.0
    assert cpu.exist and not session.device("opencl").exist and cpu.total_global_memory > 0
    cpu.sync()


def files(session):
    blob = bytearray(np.random.default_rng(1).bytes(2 << 20))
    session.upload(blob, "blob.bin")
    assert session.download("blob.bin") == blob
    session.remove("blob.bin")
    session.remove("blob.bin")
    session.remove("")
    assert "outside" in error_of(session.upload, bytearray(b"x"), "../x")


def add_one(module, cpu, n):
    x = tvm.runtime.tensor(np.arange(n, dtype="float32"), cpu)
    y = tvm.runtime.tensor(np.zeros(n, dtype="float32"), cpu)
    module["add_one"](x, y)
    np.testing.assert_array_equal(y.numpy(), np.arange(n) + 1)
    return x, y


def modules(session):
    n = 1024
    a = te.placeholder((n,), name="a")
    b = te.compute((n,), lambda i: a[i] + 1.0, name="b")
    built = tvm.compile(te.create_prim_func([a, b]).with_attr("global_symbol", "add_one"), target="llvm")
    with tempfile.TemporaryDirectory() as folder:
        for name in ["add.so", "add.tar"]:
            built.export_library(os.path.join(folder, name))
            session.upload(os.path.join(folder, name))
    cpu = session.cpu()
    add_one(session.load_module("add.tar"), cpu, n)
    assert session.download_linked_module("add.tar").startswith(b"\x7fELF")
    add_one(session.load_module("add.tar.so"), cpu, n)
    module = session.load_module("add.so")
    x, y = add_one(module, cpu, n)
    times = module.time_evaluator("add_one", cpu, number=5, repeat=3)(x, y)
    assert len(times.results) == 3 and 0 < times.mean < 1
    times = module.time_evaluator("add_one", cpu, repeat=2, cooldown_interval_ms=1, f_preproc="rpc.noop")(x, y)
    assert len(times.results) == 2
    times = module.time_evaluator("add_one", cpu, number=1, f_preproc="cache_flush_cpu_non_first_arg")(x, y)
    assert len(times.results) == 1
    session.get_function("tvm.contrib.random.random_fill_for_measure")(y)
    assert not (y.numpy() == np.arange(n) + 1).any()
    assert "has no function" in error_of(lambda: module["missing"])
    twice = te.compute((n,), lambda i: a[i] * 2.0, name="twice")
    built = tvm.compile(te.create_prim_func([a, twice]).with_attr("global_symbol", "twice"), target="llvm")
    with tempfile.TemporaryDirectory() as folder:
        built.export_library(os.path.join(folder, "twice.so"))
        session.upload(os.path.join(folder, "twice.so"))
    other = session.load_module("twice.so")
    assert "has no function" in error_of(lambda: module["twice"])
    module.import_module(other)
    del other
    module["twice"](x, y)
    np.testing.assert_array_equal(y.numpy(), np.arange(n) * 2)
    find = session.get_function("tvm.rpc.server.ModuleGetFunction")
    assert find(module, "twice", False) is None and find(module, "missing", True) is None
    for name, imports in [("twice", True), ("add_one", False)]:
        find(module, name, imports)(x, y)
        np.testing.assert_array_equal(y.numpy(), np.arange(n) * 2 if imports else np.arange(n) + 1)
    assert len(module.time_evaluator("twice", cpu, number=2, repeat=2)(x, y).results) == 2
    assert "yclic" in error_of(module.import_module, module)
    for missing in ["missing.so", "missing.tar"]:
        assert "there is no" in error_of(session.load_module, missing)
    session.upload(bytearray(b"no archive" * 100), "broken.tar")
    assert "is no number of an archive" in error_of(session.load_module, "broken.tar")


def sessions(session):
    assert "cannot find server that matches key" in error_of(connect, "other")
    second = connect(session_constructor_args=["rpc.LocalSession"])
    assert second.get_function("rpc.test.addone")(1) == session.get_function("rpc.test.addone")(1) == 2
    nowhere = ["rpc.Connect", HOST, 1, "board", False]
    assert "session constructor rpc.Connect" in error_of(connect, session_constructor_args=nowhere)
    assert "by rpc.PopenSession" in error_of(connect, session_constructor_args=["rpc.PopenSession", b"x"])
    # On a slow machine the time is over before the call.
    error = error_of(lambda: connect(session_timeout=1.5).get_function("rpc.sleep")(600.0))
    assert error.startswith("RPCSessionTimeoutError") and "1.5s session has expired" in error, error


def chains(session):
    """The same through the server to itself, and through it twice."""
    hop = ["rpc.Connect", HOST, int(PORT), "board", False]
    chained = connect(session_constructor_args=hop)
    for scenario in [values, tensors, files, modules]:
        scenario(chained)
    values(connect(session_constructor_args=[*hop, *hop]))
    # By its address, the server is spoken to in the protocol of this project.
    native = connect(session_constructor_args=["rpc.Connect", f"tcp://{HOST}:{PORT}", 0, "board"])
    for scenario in [values, tensors, files, modules]:
        scenario(native)
    elsewhere = ["rpc.Connect", f"tls://{HOST}:{PORT}", 0, "board"]
    assert "may not be used to reach" in error_of(connect, session_constructor_args=elsewhere)


def main():
    session = connect()
    for scenario in [values, tensors, files, modules, tvm_model.check, sessions, chains]:
        scenario(session)
        print(scenario.__name__, "passed")


if __name__ == "__main__":
    main()

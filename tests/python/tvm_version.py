"""A client of the installed version of TVM at a server with --tvm --tvm-self-test --key board, and then a server of
that version, which is that of `tvm_server.py`. Run by rpc-server/tests/server/tvm_client.rs, and stopped by it.

    python tvm_version.py HOST:PORT VERSION
"""

import sys

import numpy as np
import tvm
import tvm_server
from tvm import rpc


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return str(error)
    raise AssertionError("no error")


def check(host, port):
    session = rpc.connect(host, port, "board")
    echo = session.get_function("testing.echo")
    plain = [1, -(2**63), 1.5, True, None, tvm.DataType("int8")]
    for value in [*plain, "s", "a longer text, ä", b"b", b"more than seven\0"]:
        assert echo(value) == value, value
    assert session.get_function("rpc.test.add_to_lhs")(10)(5) == 15
    shape = session.get_function("ffi.Shape")(4, 5, 6)
    assert session.get_function("rpc.testing.GetShapeElem")(shape, 2) == 6
    assert "no luck" in error_of(session.get_function("rpc.test.except"), "no luck")
    assert "has no function" in error_of(session.get_function, "no.such.function")
    cpu = session.cpu()
    sent = np.random.default_rng(7).standard_normal((1024, 1024)).astype("float32")
    there = tvm.runtime.tensor(sent, cpu)
    np.testing.assert_array_equal(there.numpy(), sent)
    np.testing.assert_array_equal(echo(there).numpy(), sent)
    copy = tvm.runtime.empty(sent.shape, "float32", cpu)
    there.copyto(copy)
    np.testing.assert_array_equal(copy.numpy(), sent)
    assert cpu.exist and not session.device("opencl").exist
    blob = bytearray(sent.tobytes())
    session.upload(blob, "blob.bin")
    assert session.download("blob.bin") == blob
    session.remove("blob.bin")
    second = rpc.connect(host, port, "board")
    assert second.get_function("rpc.test.addone")(1) == session.get_function("rpc.test.addone")(1) == 2
    assert "matches key" in error_of(rpc.connect, host, port, "other")


def main():
    address, version = sys.argv[1:]
    assert tvm.__version__.startswith(version), tvm.__version__
    host, port = address.rsplit(":", 1)
    check(host, int(port))
    tvm_server.main()


if __name__ == "__main__":
    main()

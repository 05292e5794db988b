"""The names of `tvm.rpc` over this package, at servers and a tracker of this project."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program, environment
from test_documents import blocks

import tensor_rpc
from tensor_rpc.compat import tvm as rpc

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that speaks both protocols."""
    chains = [f"tvm://{HOST}:*", f"tvm://{HOST}:*?then=*"]
    program = Program(
        tmp_path_factory.mktemp("tvm"), tvm=True, tvm_self_test=True, isolate="none", allow_forward=chains
    )
    yield program.address
    program.kill()


@pytest.fixture(params=["tvm", "native"])
def session(request: pytest.FixtureRequest, address: str) -> Iterator[rpc.RPCSession]:
    """A session by each protocol."""
    with rpc.connect(address) if request.param == "native" else over_tvm(address) as session:
        yield session


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def over_tvm(address: str, **options: Any) -> rpc.RPCSession:
    return rpc.connect(HOST, port_of(address), **options)


def test_functions_take_and_return_values(session: rpc.RPCSession) -> None:
    assert session.get_function("rpc.test.addone")(41) == 42
    assert session.get_function("rpc.test.addone")(np.int64(1)) == 2
    assert session.get_function("rpc.test.strcat")("abc", 11) == "abc:11"
    assert session.get_function("testing.echo")(bytearray(b"\0a")) == b"\0a"
    assert session.get_function("testing.echo")(None) is None
    add = session.get_function("rpc.test.add_to_lhs")(10)
    assert isinstance(add, rpc.Function)
    assert add(12) == 22


def test_errors_are_runtime_errors_with_a_kind(session: rpc.RPCSession) -> None:
    with pytest.raises(RuntimeError, match="went wrong") as failed:
        session.get_function("rpc.test.except")("it went wrong")
    assert isinstance(failed.value, rpc.RPCError)
    assert failed.value.kind == "application"
    assert isinstance(failed.value.__cause__, tensor_rpc.RpcError)
    with pytest.raises(rpc.FunctionNotFoundError) as missing:
        session.get_function("no.such.function")
    assert isinstance(missing.value, AttributeError)
    with pytest.raises(rpc.RPCError):
        session.load_module("no_such_module.so")


def test_tensors_go_both_ways(session: rpc.RPCSession) -> None:
    elements = np.arange(12, dtype="float32").reshape(3, 4)
    x = rpc.tensor(elements.T, session.cpu())
    assert (x.shape, x.dtype, len(x), x.device) == ((4, 3), "float32", 4, session.cpu())
    assert (x.numpy() == elements.T).all()
    y = rpc.empty((4, 3), "float32", session.cpu())
    assert x.copyto(y) is y
    assert y.copyfrom(y.numpy() * 2) is y
    assert (y.numpy() == elements.T * 2).all()
    assert (y.copyfrom(x).numpy() == elements.T).all()
    assert (rpc.tensor(y, session.cpu()).numpy() == elements.T).all()
    # Other data types are converted, as in TVM.
    assert y.copyfrom(np.ones((4, 3), "float64")).numpy().sum() == 12
    assert y.copyfrom([[2, 2, 2]] * 4).numpy().sum() == 24
    with rpc.LocalSession() as local:
        assert (x.copyto(local.cpu()).copyto(y).numpy() == elements.T).all()


def test_functions_take_and_return_tensors(session: rpc.RPCSession) -> None:
    check = session.get_function("rpc.test.remote_tensor_func")
    check(rpc.tensor(np.ones((3, 4)), session.cpu()))
    with pytest.raises(rpc.RPCError, match="ones"):
        check(rpc.tensor(np.zeros((3, 4)), session.cpu()))
    returned = session.get_function("rpc.test.remote_return_nd")("get_arr")()
    assert isinstance(returned, rpc.Tensor)
    assert returned.device == session.cpu()
    assert returned.numpy().tolist() == [0.0] * 10
    assert session.get_function("rpc.test.remote_return_nd")("get_arr_elem")(returned, 3) == 0.0


def test_wrong_tensors_are_refused_here(session: rpc.RPCSession) -> None:
    x = rpc.empty((2, 3), "float32", session.cpu())
    with pytest.raises(ValueError, match="shapes"):
        x.copyfrom(np.zeros((3, 2), "float32"))
    with pytest.raises(ValueError, match="match"):
        x.copyto(rpc.empty((2, 3), "int32", session.cpu()))
    with pytest.raises(ValueError, match="target"):
        x.copyto(np.zeros((2, 3)))  # type: ignore[arg-type]
    with pytest.raises(tensor_rpc.UnsupportedError, match="devices of sessions"):
        rpc.tensor(np.zeros(1))
    # What a function wrote into it would be lost.
    with pytest.raises(TypeError, match="tensor"):
        session.get_function("testing.echo")(np.zeros(1))
    with pytest.raises(TypeError, match="callback"):
        session.get_function("testing.echo")(print)
    with pytest.raises(rpc.RPCError):
        rpc.empty((1,), "float32", session.ext_dev(7))


def test_devices_have_tvms_names(session: rpc.RPCSession) -> None:
    cpu = session.cpu()
    assert (cpu.type, cpu.index, cpu.dlpack_device_type(), cpu.exist) == ("cpu", 0, 1, True)
    assert session.device("llvm") == cpu and session.device(1) == cpu
    assert session.device("cuda:1") == session.cuda(1)
    assert session.cl(2).dlpack_device_type() == 4
    assert not session.ext_dev(3).exist
    assert cpu.warp_size is None or cpu.warp_size > 0
    cpu.sync()
    wrong: list[tuple[Any, int]] = [("no", 0), ("cuda:x", 0), ("cuda:1", 1), (0, 0), (128, 0), ("cpu", -1)]
    for kind, index in wrong:
        with pytest.raises(ValueError):
            session.device(kind, index)


def test_files_are_those_of_the_session(session: rpc.RPCSession, tmp_path: Path) -> None:
    local = tmp_path / "local.bin"
    local.write_bytes(bytes(range(256)))
    session.upload(str(local))
    session.upload(local, "folder/b.bin")
    session.upload(bytearray(b"content"), "folder/a.bin")
    assert session.download("local.bin") == bytearray(range(256))
    assert session.download("folder/a.bin") == b"content"
    assert session.listdir("") == session.listdir(".") == "folder,local.bin"
    assert session.listdir("folder") == session.listdir("./folder/") == "a.bin,b.bin"
    session.remove("folder/a.bin")
    session.remove("local.bin")
    assert session.listdir("folder") == "b.bin"
    with pytest.raises(rpc.RPCError):
        session.download("local.bin")
    for use in (session.download, session.remove, session.listdir):
        with pytest.raises(rpc.RPCError):
            use("../beyond")
    with pytest.raises(ValueError, match="target"):
        session.upload(bytearray(b"content"))
    with pytest.raises(FileNotFoundError):
        session.upload(tmp_path / "missing")


def test_functions_are_measured(session: rpc.RPCSession) -> None:
    evaluate = session.time_evaluator("rpc.test.addone", session.cpu(), number=3, repeat=4, cache_flush_bytes=4096)
    result = evaluate(1)
    assert len(result.results) == 4
    assert 0.0 <= result.min <= result.median <= result.max
    assert result.min <= result.mean <= result.max and result.std >= 0.0
    with pytest.raises(rpc.FunctionNotFoundError):
        session.time_evaluator("no.such.function", session.cpu())
    wrongs: list[dict[str, Any]] = [{"number": 0}, {"repeat": 0}, {"min_repeat_ms": -1}, {"repeats_to_cooldown": 0}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="measurement"):
            session.time_evaluator("rpc.test.addone", session.cpu(), **wrong)
    with rpc.LocalSession() as other, pytest.raises(ValueError, match="session"):
        session.time_evaluator("rpc.test.addone", other.cpu())


def test_options_of_measurements_are_refused_where_there_are_none(address: str) -> None:
    options: list[dict[str, Any]] = [
        {"f_preproc": "rpc.test.addone"},
        {"cooldown_interval_ms": 1},
        {"repeats_to_cooldown": 2},
    ]
    with rpc.connect(address) as native, over_tvm(address) as session:
        for option in options:
            with pytest.raises(tensor_rpc.UnsupportedError, match="native"):
                native.time_evaluator("rpc.test.addone", native.cpu(), **option)
            evaluate = session.time_evaluator("rpc.test.addone", session.cpu(), number=1, repeat=2, **option)
            assert len(evaluate(1).results) == 2
        with pytest.raises(rpc.RPCError, match=r"no\.such\.function"):
            session.time_evaluator("rpc.test.addone", session.cpu(), f_preproc="no.such.function")(1)


def test_the_system_library_is_a_module(address: str) -> None:
    with over_tvm(address) as session:
        module = session.system_lib()
        assert module.entry_name == "main"
        assert not module.implements_function("main")
        with pytest.raises(rpc.FunctionNotFoundError):
            module["main"]
        assert not module.implements_function("main", query_imports=False)
        with pytest.raises(rpc.FunctionNotFoundError) as missing:
            module.get_function("main", query_imports=False)
        assert missing.value.kind == "not_found"
        with pytest.raises(rpc.FunctionNotFoundError):
            module()
        with pytest.raises(rpc.FunctionNotFoundError):
            module.time_evaluator("main", session.cpu())
        with pytest.raises(rpc.RPCError, match="the system library imports no modules"):
            module.import_module(module)
    with rpc.connect(address) as native:
        with pytest.raises(tensor_rpc.UnsupportedError, match="system_lib"):
            native.system_lib()
        with pytest.raises(tensor_rpc.UnsupportedError, match="link"):
            native.download_linked_module("x.tar")


def test_calls_and_sessions_have_a_time(address: str, session: rpc.RPCSession) -> None:
    with pytest.raises(rpc.RPCError) as late:
        session.get_function("rpc.sleep")(3600.0, timeout=0.05)
    assert late.value.kind == "deadline_exceeded"
    with over_tvm(address, session_timeout=0.2) as short, pytest.raises(rpc.RPCSessionTimeoutError):
        short.get_function("rpc.sleep")(3600.0)


def test_the_block_of_the_guide_runs(address: str) -> None:
    found = [body for _, body in blocks("docs/tvm.md") if "tensor_rpc.compat" in body]
    assert len(found) == 1 and found[0].count("9090") == 1
    exec(found[0].replace("9090", str(port_of(address))), {})


def test_servers_may_stand_behind_the_first_one(address: str) -> None:
    stop = ["rpc.Connect", HOST, port_of(address), "", False]
    for constructor in (stop, [*stop, *stop, *stop], [*stop, "rpc.LocalSession"], ["rpc.LocalSession"]):
        with over_tvm(address, session_constructor_args=constructor, session_timeout=60) as session:
            assert session.get_function("rpc.test.addone")(41) == 42
            assert rpc.tensor(np.ones(3), session.cpu()).numpy().tolist() == [1.0] * 3
    with pytest.raises(rpc.RPCError, match="has not the key 'other'"):
        over_tvm(address, session_constructor_args=[*stop[:3], "other", False])
    with pytest.raises(ValueError, match="is no port"):
        over_tvm(address, session_constructor_args=["rpc.Connect", HOST, 0, "", False])
    with pytest.raises(tensor_rpc.UnsupportedError, match="session_constructor_args"):
        rpc.connect(address, session_constructor_args=stop)


def test_a_program_that_ends_leaves_no_part_of_a_request() -> None:
    """A server of TVM that gets a part of a request serves nobody any more."""
    size = 48 << 20
    code = f"""if True:
        import sys, threading
        from tensor_rpc.compat import tvm as rpc
        session = rpc.connect("{HOST}", int(sys.argv[1]))
        threading.Thread(target=session.upload, args=(bytes({size}), "x"), daemon=True).start()
        sys.stdin.read()
    """

    def frame(peer: socket.socket) -> tuple[int, int]:
        """Take the header of a frame: its code, and the length of the rest."""
        length, number = struct.unpack("<qi", take(peer, 12))
        return number, length - 4

    def take(peer: socket.socket, count: int) -> bytes:
        taken = peer.recv(count, socket.MSG_WAITALL)
        assert len(taken) == count, "the program ended within a request"
        return taken

    with socket.create_server((HOST, 0)) as listener:
        command = [sys.executable, "-c", code, str(listener.getsockname()[1])]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment())
        peer, _ = listener.accept()
        with peer:
            take(peer, 4 + 4 + len("client:"))
            peer.sendall(struct.pack("<ii", 0xFF271, len("server:")) + b"server:")
            none = struct.pack("<qiii", 12, 4, 1, 0)
            # The session, the size of packets, of which there is none, and the function for files.
            for answer in (none, struct.pack("<qiiiq", 20, 4, 1, 4, 0), struct.pack("<qiiiq", 20, 4, 1, 4, 16)):
                take(peer, frame(peer)[1])
                peer.sendall(answer)
            number, length = frame(peer)
            assert number == 3
            assert length > size
            assert program.stdin
            program.stdin.close()
            while length:
                length -= len(take(peer, min(length, 1 << 20)))
        assert program.wait(timeout=30) == 0


def test_what_is_not_supported_is_an_error(address: str) -> None:
    options: list[dict[str, Any]] = [{"enable_logging": True}, {"session_constructor_args": ["rpc.Connect", "x", 1]}]
    for option in options:
        with pytest.raises(tensor_rpc.UnsupportedError, match=next(iter(option))):
            over_tvm(address, **option)
    with pytest.raises(tensor_rpc.UnsupportedError, match="session_timeout"):
        rpc.connect(address, session_timeout=1)
    with pytest.raises(tensor_rpc.UnsupportedError, match="exec:"):
        rpc.PopenSession()
    at_proxy: list[dict[str, Any]] = [
        {"tracker_addr": (HOST, 1), "is_proxy": True},
        {"custom_addr": HOST, "is_proxy": True},
    ]
    refused: list[dict[str, Any]] = [{"no_fork": True}, {"reuse_addr": False}, {"timeout": 1.0}, *at_proxy]
    for option in refused:
        with pytest.raises(tensor_rpc.UnsupportedError, match=next(iter(option))):
            rpc.Server(port=1 if "is_proxy" in option else 0, **option)
    of_trackers: list[dict[str, Any]] = [{"reuse_addr": False}, {"timeout": 1.0}]
    for option in of_trackers:
        with pytest.raises(tensor_rpc.UnsupportedError, match=next(iter(option))):
            rpc.Tracker(HOST, 0, **option)
    of_proxies: list[dict[str, Any]] = [{"index_page": "index.html"}, {"resource_files": ["a.js"]}]
    for option in of_proxies:
        with pytest.raises(tensor_rpc.UnsupportedError, match=next(iter(option))):
            rpc.Proxy(HOST, 0, **option)
    with pytest.raises(ValueError, match="time"):
        rpc.Proxy(HOST, 0, timeout_client=0)


def test_wrong_addresses_are_errors(address: str) -> None:
    wrong: list[tuple[str, int | None]] = [
        (HOST, None),
        (HOST, 0),
        (HOST, 1 << 16),
        ("", 9090),
        ("a host", 9090),
        ("host/key", 9090),
        (address, 9090),
    ]
    for url, port in wrong:
        with pytest.raises(ValueError):
            rpc.connect(url, port)
    for seconds in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            over_tvm(address, session_timeout=seconds)
    with pytest.raises(rpc.RPCError, match="key"):
        over_tvm(address, key="a key")
    with pytest.raises(ValueError, match="tracker://"):
        rpc.connect_tracker(address, 1)
    with socket.socket() as free:
        # Nothing listens, and no other program can.
        free.bind((HOST, 0))
        with pytest.raises(RuntimeError):
            rpc.connect(HOST, free.getsockname()[1])


def test_a_server_is_started_and_wants_its_key() -> None:
    def triple(number: int) -> int:
        return number * 3

    server = rpc.Server(HOST, port=0, key="board", silent=True, functions=[triple])
    try:
        with rpc.connect(HOST, server.port, "board") as session:
            assert session.get_function("triple")(4) == 12
        with pytest.raises(RuntimeError):
            rpc.connect(HOST, server.port, "another").get_function("triple")
        with pytest.raises(RuntimeError, match="port"):
            rpc.Server(HOST, server.port, server.port + 1, silent=True)
    finally:
        server.terminate()


@pytest.fixture
def tracker() -> Iterator[int]:
    """Port of a tracker that speaks TVM's protocol."""
    tracker = rpc.Tracker(HOST, 0, silent=True)
    yield tracker.port
    tracker.terminate()


def test_servers_wait_at_a_proxy(tracker: int) -> None:
    def triple(number: int) -> int:
        return number * 3

    proxy = rpc.Proxy(HOST, 0, silent=True)
    server = rpc.Server(HOST, proxy.port, is_proxy=True, key="board", silent=True, functions=[triple])
    try:
        assert (proxy.host, server.port) == (HOST, proxy.port)
        for _ in range(2):
            with rpc.connect(HOST, proxy.port, "board") as session:
                assert session.get_function("triple")(4) == 12
        # The first port that is free is taken.
        further = rpc.Proxy(HOST, proxy.port, min(proxy.port + 100, 1 << 16), silent=True)
        assert further.port > proxy.port
        further.terminate()
        with pytest.raises(RuntimeError, match="port"):
            rpc.Proxy(HOST, proxy.port, proxy.port + 1, silent=True)
    finally:
        server.terminate()
        proxy.terminate()
    proxy.terminate()
    with pytest.raises(RuntimeError):
        rpc.connect(HOST, proxy.port, "board")


def test_a_proxy_registers_its_servers_at_a_tracker(tracker: int) -> None:
    proxy = rpc.Proxy(HOST, 0, tracker_addr=(HOST, tracker), silent=True)
    server = rpc.Server(HOST, proxy.port, is_proxy=True, key="board", silent=True, tvm_self_test=True)
    try:
        session = rpc.connect_tracker(HOST, tracker)
        with session.request("board", session_timeout=60) as remote:
            assert remote.get_function("rpc.test.addone")(41) == 42
        refused = rpc.Proxy(HOST, 0, timeout_client=0.1, silent=True)
        with pytest.raises(RuntimeError, match="none is there"):
            rpc.connect(HOST, refused.port, "board")
        refused.terminate()
    finally:
        server.terminate()
        proxy.terminate()


def test_a_daemon_whose_settings_are_wrong_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="78"):
        rpc.Proxy("0.0.0.0", 0, silent=True)
    assert "--insecure" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="code 2"):
        rpc.Tracker(HOST, 0, no_such_setting=1)


def test_a_tracker_gives_servers(tracker: int) -> None:
    server = rpc.Server(HOST, port=0, tracker_addr=(HOST, tracker), key="board", silent=True, tvm_self_test=True)
    try:
        trackers = rpc.connect_tracker(HOST, tracker)
        # It waits until the server has registered.
        with trackers.request("board", priority=2) as session:
            assert session.get_function("rpc.test.addone")(1) == 2
        assert trackers.request_and_run("board", lambda one: one.get_function("rpc.test.addone")(2)) == 3
        assert "board" in trackers.summary()["queue_info"]
        text = trackers.text_summary()
        assert f"{HOST}:{server.port}" in text and "server:board" in text

        runs = []

        def fail(session: rpc.RPCSession) -> None:
            runs.append(session.get_function("rpc.test.addone")(1))
            session.get_function("rpc.test.except")("never")

        with pytest.raises(rpc.RPCError, match=r"after 2 attempts: .*never"):
            trackers.request_and_run("board", fail)
        assert runs == [2, 2]
        with pytest.raises(rpc.RPCSessionTimeoutError):
            trackers.request_and_run("board", lambda one: one.get_function("rpc.sleep")(3600.0), session_timeout=0.2)
        trackers.close()
        assert trackers.request_and_run("board", lambda one: one.get_function("rpc.test.addone")(3)) == 4
        trackers.close()
    finally:
        server.terminate()


MAGIC = struct.pack("<i", 0x2F271)


def reply(text: bytes) -> bytes:
    return struct.pack("<i", len(text)) + text


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (b"", "closed"),
        (b"HTTP", "no tracker"),
        (MAGIC, "closed"),
        (MAGIC + struct.pack("<i", -1), "-1 bytes"),
        (MAGIC + struct.pack("<i", 1 << 30), "bytes"),
        (MAGIC + reply(b"{"), "malformed"),
        (MAGIC + reply(b"\xff\xff"), "malformed"),
        (MAGIC + reply(b"{}"), "malformed"),
        (MAGIC + reply(b"[]"), "malformed"),
        (MAGIC + reply(b'[-1, "full"]'), "refuses: full"),
        (MAGIC + reply(b"[0, 1]"), "no server"),
        (MAGIC + reply(b'[0, ["a host", 1, "key"]]'), "no server"),
        (MAGIC + reply(b'[0, ["127.0.0.1", 65536, "key"]]'), "no server"),
        (MAGIC + reply(b"[" * 100_000), "malformed"),
    ],
)
def test_a_tracker_that_breaks_the_protocol_is_an_error(sent: bytes, wanted: str) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            # The client may be gone before it has read all.
            with peer, contextlib.suppress(OSError):
                peer.sendall(sent)
                peer.shutdown(socket.SHUT_WR)
                # A connection that is closed with bytes unread is reset, and what was sent is lost.
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises((rpc.RPCError, OSError), match=wanted):
                trackers = rpc.connect_tracker(HOST, listener.getsockname()[1])
                try:
                    trackers.request("board", max_retry=1)
                finally:
                    trackers.close()
        finally:
            thread.join()

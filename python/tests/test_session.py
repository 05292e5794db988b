"""Operations of sessions, in both forms."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import signal
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forms import TIME_LIMIT, Form

import tensor_rpc as rpc

Steps = Generator[Any, Any, None]


class Mine:
    """A type of this program."""


@dataclasses.dataclass
class Packed:
    """A type that travels packed."""


def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


def join(a: str, b: str | None = None) -> str:
    """Return the text of both."""
    return a + (b or "")


def total(x: np.ndarray, names: list[str]) -> float:
    """Return a number."""
    return float(x.sum()) + len(names)


def apply(function: Callable[..., Any], options: dict[str, int]) -> Any:
    """Call a function."""
    return function(**options)


@pytest.fixture(params=["blocking", "aio"])
def functions(request: pytest.FixtureRequest) -> Form:
    """Both forms, with these functions in this process."""
    module: Any = rpc if request.param == "blocking" else rpc.aio
    return Form(request.param, lambda: module.local(add, join, total, apply))


def test_values_arrive_as_they_were(anywhere: Form) -> None:
    values = [
        None,
        True,
        False,
        0,
        -(2**63),
        2**63 - 1,
        1.5,
        float("inf"),
        "",
        "grüße \U0001f980",
        b"",
        b"\0" * 10_000,
        [],
        [1, [2.5, "three"], None],
        {"a": 1, "b": [True], 3: None},
        rpc.Shape([2, 3]),
        rpc.DataType("float16"),
        rpc.Device("cuda:1"),
    ]

    def body(session: Any) -> Steps:
        echo = yield session.get_function("rpc.echo")
        for value in values:
            returned = yield echo(value)
            assert returned == value
            assert type(returned) is type(value)
        assert (yield echo((1, 2))) == [1, 2]
        assert (yield echo(bytearray(b"abc"))) == b"abc"
        assert (yield session.call("rpc.echo", [1.5] * 3)) == [1.5] * 3

    anywhere.run(body)


@dataclasses.dataclass
class Point:
    """A structured value."""

    x: int
    name: str


def test_a_dataclass_arrives_as_a_dictionary(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        assert (yield session.call("rpc.echo", Point(1, "one"))) == {"x": 1, "name": "one"}

    anywhere.run(body)


def test_objects_of_a_session_are_arguments_and_results(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        made = yield session.call("rpc.new_object")
        assert isinstance(made, anywhere.module.Object)
        again = yield session.call("rpc.echo", made)
        assert isinstance(again, anywhere.module.Object)
        echo = yield session.get_function("rpc.echo")
        returned = yield echo(echo)
        assert isinstance(returned, anywhere.module.Function)
        assert (yield returned(7)) == 7
        tensor = yield session.empty([2, 3], "int16")
        returned = yield echo([tensor, {"nested": tensor}])
        assert returned[0].shape == (2, 3)
        assert returned[1]["nested"].dtype == rpc.DataType("int16")
        yield made.free()

    anywhere.run(body)


def test_calls_take_the_results_of_earlier_ones(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        echo = yield session.get_function("rpc.echo")
        first = echo.pipe([1, "two"])
        assert isinstance(first, anywhere.module.Pipe)
        second = echo.pipe(first)
        assert (yield echo({"both": [first, (second,)]})) == {"both": [[1, "two"], [[1, "two"]]]}
        assert (yield second.result()) == [1, "two"]
        assert (yield echo.pipe(5, lane=2).result(timeout=20)) == 5

        new = yield session.get_function("rpc.new_object")
        made = new.pipe()
        assert isinstance((yield echo(made)), anywhere.module.Object)
        assert isinstance((yield made.result()), anywhere.module.Object)

        with pytest.raises(rpc.ApiMisuseError, match="lane"):
            yield echo(first, lane=3)
        with pytest.raises(rpc.ApiMisuseError, match="concurrent"):
            yield echo.pipe(1, lane=rpc.CONCURRENT).result()
        for alive in [np.zeros(3), lambda: 1]:
            with pytest.raises(TypeError, match="several requests"):
                echo.pipe(alive)

    anywhere.run(body)


def test_look_ups_and_allocations_are_not_waited_for() -> None:
    gate = threading.Event()

    def hold() -> bool:
        return gate.wait(TIME_LIMIT)

    def total(x: np.ndarray) -> float:
        return float(x.sum())

    with rpc.Server(hold, total) as server, rpc.connect(server.address) as session:
        held = session["hold"].pipe()
        # The lane is held, so that none of these has an answer.
        tensor, function = session.pipe_empty([3], "float32"), session.pipe_function("total")
        assert isinstance(tensor, rpc.Tensor) and tensor.shape == (3,)
        assert isinstance(function, rpc.Function) and function.name == "total"
        zeros = function.pipe(tensor)
        gate.set()
        assert held.result() is True and zeros.result() == 0
        tensor.copy_from(np.ones(3, "float32"))
        assert function(tensor) == 3 and tensor.tolist() == [1, 1, 1]
        with pytest.raises(rpc.ApiMisuseError, match="lane"):
            function(tensor, lane=3)

        missing, nowhere = session.pipe_function("no such"), session.pipe_empty([1], device="cuda:99")
        with pytest.raises(rpc.NotFoundError, match="no such"):
            missing(1)
        with pytest.raises(rpc.DeviceError):
            nowhere.tolist()
        with pytest.raises(rpc.ApiMisuseError, match="concurrent"):
            session.pipe_function("total", lane=rpc.CONCURRENT)
        with pytest.raises(ValueError, match="load sends it"):
            session.pipe_module("kernels.so")
        absent = session.pipe_module("remote:no-such-module")
        with pytest.raises(rpc.RpcError):
            absent.pipe_function("f")(1)


def test_look_ups_of_both_forms_are_of_their_classes(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        echo, tensor = session.pipe_function("rpc.echo", lane=4), session.pipe_empty([2], "int8", lane=4)
        assert isinstance(echo, anywhere.module.Function) and isinstance(tensor, anywhere.module.Tensor)
        assert (yield echo(5, lane=4)) == 5
        assert (yield tensor.read(lane=4)) == bytes(2)

    anywhere.run(body)


def test_tensors_are_sent_to_another_session(form: Form, sending_server: str) -> None:
    def body(session: Any) -> Steps:
        other = yield form.module.connect(sending_server)
        data = np.arange(300_000, dtype="int64")
        source = yield other.tensor(data)
        destination = yield session.empty(data.shape, "int64")
        seen: list[int] = []
        route = yield other.send(source, session, destination, progress=seen.append, timeout=20)
        assert route == rpc.SendRoute("direct", address=session.address)
        assert route.is_direct
        assert seen[-1] == data.nbytes
        assert (np.asarray((yield destination.download())) == data).all()

        # Back from a server that may connect to none.
        yield destination.copy_from(-data)
        route = yield session.send(destination, other, source, start=8, stop=24, offset=16)
        assert (route.kind, route.address) == ("client", None)
        assert "--allow-peer" in route.reason
        assert np.asarray((yield source.download()))[:5].tolist() == [0, 1, -1, -2, 4]

        copy = yield session.empty(data.shape, "int64")
        assert (yield session.send(destination, session, copy)).kind == "session"
        assert (np.asarray((yield copy.download())) == -data).all()
        with pytest.raises(rpc.InvalidArgumentError, match="the source"):
            yield other.send(source, session, destination, stop=data.nbytes + 1)
        with pytest.raises(rpc.RpcError, match="another session"):
            yield session.send(source, session, destination)
        yield other.close()

    form.run(body)


def test_an_error_is_carried_to_the_calls_that_take_the_result(functions: Form) -> None:
    def body(session: Any) -> Steps:
        add = yield session.get_function("add")
        failed = add.pipe("one", 2)
        last = add.pipe(add.pipe(failed, 1), 1)
        with pytest.raises(rpc.RpcError) as own:
            yield failed.result()
        with pytest.raises(type(own.value), match="the earlier 'add' failed") as carried:
            yield last.result()
        assert not carried.value.may_have_run
        assert (yield add(add.pipe(1, 1), 1)) == 3

    functions.run(body)


def test_functions_have_names_and_signatures(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        functions = yield session.functions()
        names = [function.name for function in functions]
        assert "rpc.echo" in names
        timer = yield session.get_function("rpc.time_function")
        signature = yield timer.signature
        assert signature == next(f.signature for f in functions if f.name == "rpc.time_function")
        assert signature.startswith("(")
        assert ") -> " in signature
        returned = yield session.call("rpc.echo", timer)
        assert (yield returned.signature) is None
        assert (timer.name, returned.name) == ("rpc.time_function", None)

    anywhere.run(body)


def test_types_are_compared_with_the_signature_at_once(functions: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = type((yield session.empty([1])))
        fit: list[tuple[str, Any, Any]] = [
            ("add", [int, int], int),
            ("add", None, int),
            ("add", [int, bool], Any),
            ("add", [Any, int | str], float),
            ("join", [str], str),
            ("join", [str, str], str),
            ("join", [str, None], str),
            ("total", [np.ndarray, list[str]], float),
            ("total", [tensor, tuple[str, ...]], float),
            ("total", [tensor, Packed], float),
            ("apply", [Callable[[int], int], dict[str, int]], Any),
            ("apply", [type((yield session.get_function("add"))), dict], Any),
        ]
        for name, params, returns in fit:
            yield session.get_function(name, params=params, returns=returns)
        add = yield session.get_function("add", params=(int, int), returns=int)
        assert (yield add(1, 2)) == 3
        refused: list[tuple[str, Any, Any, str]] = [
            ("add", [int, str], Any, "argument 1 of `add`: expected int, got str"),
            ("add", [int, list[int]], Any, "argument 1 of `add`: expected int, got list"),
            ("add", [int], Any, "1 arguments are given, and `add` takes 2"),
            ("add", None, str, "return of `add`: expected str, got int"),
            ("join", [str, int], Any, "argument 1 of `join`"),
            ("total", [float, list[str]], Any, "argument 0 of `total`: expected mut tensor, got float"),
            ("total", [np.ndarray, Mine], Any, "argument 1 of `total`: expected [str], got object"),
            ("total", [np.ndarray, list[str]], np.ndarray, "return of `total`"),
            ("apply", [int, dict], Any, "argument 0 of `apply`: expected function, got int"),
        ]
        for name, params, returns, text in refused:
            with pytest.raises(rpc.InvalidArgumentError) as caught:
                yield session.get_function(name, params=params, returns=returns)
            assert text in str(caught.value)
        with pytest.raises(rpc.NotFoundError):
            yield session.get_function("missing", params=[int])

    functions.run(body)


def test_unknown_names_are_errors_of_the_caller(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for fails in (session.get_function, session.call, session.__getitem__):
            with pytest.raises(rpc.NotFoundError, match=r"did you mean 'rpc\.echo'") as raised:
                yield fails("rpc.ecko")
            assert isinstance(raised.value, KeyError)
            assert (raised.value.kind, raised.value.may_have_run) == ("not_found", False)
        assert (yield session.call("rpc.echo", 1)) == 1

    anywhere.run(body)


def test_a_deadline_ends_a_call(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        with pytest.raises(TimeoutError) as raised:
            yield session.call("rpc.sleep", 3600.0, timeout=0.05)
        assert isinstance(raised.value, rpc.DeadlineExceededError)
        for timeout in (-1.0, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                yield session.call("rpc.echo", timeout=timeout)
        assert (yield session.call("rpc.echo", 1, timeout=float("inf"))) == 1
        assert (yield session.call("rpc.echo", 1, timeout=1e300)) == 1

    anywhere.run(body)


def test_lanes_do_not_wait_for_each_other(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        sleep = yield session.get_function("rpc.sleep")
        if anywhere.name == "aio":
            sleeping = sleep(3600.0, lane=1)
        else:
            thread = threading.Thread(target=_sleep, args=(sleep,))
            thread.start()
        assert (yield session.call("rpc.echo", 1)) == 1
        assert (yield session.call("rpc.echo", 1, lane=2)) == 1
        assert (yield session.call("rpc.echo", 1, lane=rpc.CONCURRENT)) == 1
        if anywhere.name == "aio":
            sleeping.cancel()
        else:
            thread.join()

    anywhere.run(body)


def _sleep(sleep: Any) -> None:
    with pytest.raises(TimeoutError):
        sleep(3600.0, lane=1, timeout=0.3)


def test_attributes_and_streams_of_devices(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        assert (yield session.attribute("cpu", "exists")) is True
        assert (yield session.attribute("cuda:77", "exists")) is False
        assert (yield session.attribute(rpc.Device("cpu"), "compute_units")) > 0
        with pytest.raises(ValueError, match="total_memory"):
            yield session.attribute("cpu", "memory")
        stream = yield session.create_stream("cpu")
        yield session.set_stream("cpu", stream)
        yield session.stream_wait("cpu", stream)
        yield session.set_stream("cpu")
        yield session.stream_wait("cpu")
        other = yield session.create_stream("cpu")
        yield session.sync_stream_from_to(("cpu", stream), ("cpu", other))
        yield session.sync_stream_from_to(("cpu", None), ("cpu", other))
        with pytest.raises(rpc.DeviceError):
            yield session.sync_stream_from_to(("cuda:77", None), ("cpu", other))
        yield stream.free()
        with pytest.raises(rpc.InvalidHandleError):
            yield session.sync_stream_from_to(("cpu", stream), ("cpu", other))
        with pytest.raises(rpc.InvalidHandleError):
            yield session.set_stream("cpu", stream)

    anywhere.run(body)


def test_tensors_are_allocated_aligned_and_where_a_constraint_says(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        for device in ("cpu", "cpu:0", "*", "*,scope=host", "cpu,target=llvm"):
            tensor = yield session.empty((2, 2), "int8", device, alignment=1 << 16)
            assert tensor.device == rpc.Device("cpu")
        yield session.empty((2,), "int8", "cpu", "host", alignment=4096)
        yield session.tensor(b"abc", "*,scope=host")
        for device in ("cuda,scope=host", "*:77", "cpu,scope=texture"):
            with pytest.raises(rpc.DeviceError):
                yield session.empty((2,), "int8", device)
        with pytest.raises(ValueError, match="scope"):
            yield session.empty((2,), "int8", "cpu,scope=host", "global")
        with pytest.raises(ValueError, match="neither"):
            yield session.empty((2,), "int8", "cpu,memory=host")
        with pytest.raises(rpc.InvalidArgumentError, match="power of two"):
            yield session.empty((2,), "int8", alignment=3)

    anywhere.run(body)


def test_files_come_and_go(form: Form, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    local = tmp_path / "local.bin"
    local.write_bytes(content)

    def body(session: Any) -> Steps:
        files = session.files
        seen: list[int] = []
        assert (yield files.put("a/bytes", content, progress=seen.append)) == len(content)
        assert seen[-1] == len(content)
        assert seen == sorted(seen)
        assert (yield files.put("a/path", local, executable=True)) == len(content)
        assert (yield files.put("a/name", str(local))) == len(content)
        assert (yield files.put("a/object", io.BytesIO(content))) == len(content)
        assert (yield files.put("a/again", local, resumable=True)) == len(content)
        assert (yield files.put_cached("a/cached", local)) in (True, False)
        entries = yield files.ls("a")
        names = ["again", "bytes", "cached", "name", "object", "path"]
        assert [entry.name for entry in entries] == [f"a/{name}" for name in names]
        assert {entry.size for entry in entries} == {len(content)}
        assert [entry.name for entry in entries if entry.executable] == ["a/path"]
        for name in names:
            assert (yield files.get(f"a/{name}")) == content
        back, written = tmp_path / f"back-{form.name}", io.BytesIO()
        assert (yield files.get("a/path", back)) == len(content)
        assert back.read_bytes() == content
        assert (yield files.get("a/path", written)) == len(content)
        assert written.getvalue() == content
        digest = hashlib.sha256(content).hexdigest()
        assert (yield files.digest("a/path")) == digest
        opened = yield files.open("a/path")
        assert opened.size == len(content)
        assert (yield opened.read(len(content) - 3)) == content[-3:]
        prefix = yield opened.prefix_digest(10)
        assert prefix == hashlib.sha256(content[:10]).hexdigest()
        yield files.set_executable("a/bytes")
        yield files.create_folder("b/c")
        assert (yield files.folders()) == ["a", "b", "b/c"]
        yield files.rm("a")
        assert (yield files.ls()) == []

    form.run(body)


def test_transfers_that_fail_leave_nothing(form: Form, tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ZeroDivisionError("of this file")

        def write(self, data: Any) -> int:
            raise ZeroDivisionError("of this file")

    def refuse(count: int) -> None:
        raise ZeroDivisionError("of the progress")

    def body(session: Any) -> Steps:
        files = session.files
        with pytest.raises(FileNotFoundError):
            yield files.put("x", tmp_path / "none")
        with pytest.raises(TypeError):
            yield files.put("x", 3)
        with pytest.raises(ZeroDivisionError, match="of this file"):
            yield files.put("x", Broken())
        with pytest.raises(ZeroDivisionError, match="of the progress"):
            yield files.put("there", b"abc", progress=refuse)
        for path in ("../x", "/x"):
            with pytest.raises(ValueError):
                yield files.put(path, b"abc")
        yield files.put("there", b"abc")
        with pytest.raises(rpc.NotFoundError):
            yield files.get("none", tmp_path / "got")
        with pytest.raises(ZeroDivisionError, match="of the progress"):
            yield files.get("there", tmp_path / "got", progress=refuse)
        with pytest.raises(ZeroDivisionError, match="of this file"):
            yield files.get("there", Broken())
        with pytest.raises(OSError):
            yield files.get("there", tmp_path)
        with pytest.raises(OSError):
            yield files.get("there", tmp_path / "no" / "folder")
        assert list(tmp_path.iterdir()) == []
        assert [entry.name for entry in (yield files.ls())] == ["there"]

    form.run(body)


def test_a_program_runs_to_its_end(isolated: Form) -> None:
    def body(session: Any) -> Steps:
        script = 'cat; echo "$0 $A" >&2; exit 3'
        result = yield session.run("sh", "-c", script, "name", stdin=b"input", env={"A": "1"})
        assert (result.returncode, result.signal, result.ended_by) == (3, None, None)
        assert (result.stdout, result.stderr) == (b"input", b"name 1\n")
        with pytest.raises(rpc.ProgramError, match=r"code 3:\nname 1"):
            result.check()
        result = yield session.run("sh", "-c", "kill -USR1 $$")
        assert (result.returncode, result.signal) == (None, signal.SIGUSR1)
        pieces: list[bytes] = []
        result = yield session.run(
            "cat", stdin=io.BytesIO(b"x" * 300_000), on_stdout=pieces.append, output_limit=300_000
        )
        assert (result.check().stdout, result.stderr) == (None, b"")
        assert b"".join(pieces) == b"x" * 300_000
        result = yield session.run("sleep", "3600", time_limit=0.05)
        assert result.signal == signal.SIGTERM
        assert "time limit" in result.ended_by

        def refuse(piece: bytes) -> None:
            raise ZeroDivisionError(piece)

        with pytest.raises(ZeroDivisionError, match="hello"):
            yield session.run("sh", "-c", "echo hello; exec sleep 3600", on_stdout=refuse)
        with pytest.raises(rpc.NotFoundError):
            yield session.run("no-such-program")
        with pytest.raises(rpc.DeadlineExceededError):
            yield session.run("sleep", "3600", timeout=0.05)

    isolated.run(body)


def test_a_program_is_driven_while_it_runs(isolated: Form) -> None:
    def body(session: Any) -> Steps:
        process = yield session.start("cat", piped_input=True)
        yield process.write_input(b"one\n")
        assert (yield process.read_output()) == ("stdout", b"one\n")
        yield process.close_input()
        assert (yield process.read_output()) is None
        assert (yield process.wait()).success
        process = yield session.start("sleep", "3600")
        yield process.terminate()
        result = yield process.wait()
        assert (result.signal, result.ended_by) == (signal.SIGTERM, "the client has ended it")

    isolated.run(body)


def test_leases_exclude_each_other(form: Form) -> None:
    def body(session: Any) -> Steps:
        lease = yield session.lease("cpu:0", max_duration=3600.0)
        assert (lease.device, lease.is_released) == (rpc.Device("cpu:0"), False)
        assert 0 <= lease.held < lease.expires_in <= 3600
        assert lease.waited >= 0
        request = yield session.request_lease("cpu:0", priority=1)
        assert (yield request.ahead()) == 1
        with pytest.raises(TimeoutError):
            yield request.granted(timeout=0.05)
        assert (yield lease.release()) >= 0
        assert lease.is_released
        with pytest.raises(RuntimeError, match="released"):
            yield lease.release()
        with pytest.raises(RuntimeError, match="released"):
            lease.held  # noqa: B018
        second = yield request.granted()
        yield second.release()
        with pytest.raises(rpc.DeviceError):
            yield session.lease("cuda:77")

    form.run(body)


def test_connections_near_the_server_are_served_here(form: Form) -> None:
    def body(session: Any) -> Steps:
        listener = yield session.listen("tcp://127.0.0.1:0")
        host, port = listener.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as peer:
            connection = yield listener.accept()
            assert connection.peer
            peer.sendall(b"request")
            assert (yield connection.read()) == b"request"
            yield connection.write(b"reply")
            yield connection.finish()
            assert peer.makefile("rb").read() == b"reply"
            peer.shutdown(socket.SHUT_WR)
            assert (yield connection.read()) is None
        with pytest.raises(TimeoutError):
            yield listener.accept(timeout=0.05)
        with pytest.raises(rpc.RpcError):
            yield session.listen("nonsense")

    form.run(body)


def test_run_times_are_measured_there(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        noop = yield session.get_function("rpc.noop")
        timing = yield session.time(noop, 1, "two", number=3, repeat=4)
        assert len(timing.results) == 4
        assert 0 < timing.min <= timing.median <= timing.max
        assert timing.min <= timing.mean <= timing.max
        assert timing.std >= 0
        assert "median" in str(timing)
        with pytest.raises(rpc.InvalidArgumentError, match="repeat"):
            yield session.time(noop, repeat=0)
        with pytest.raises(OverflowError):
            yield session.time(noop, repeat=-1)

    anywhere.run(body)


def test_run_times_are_measured_under_a_lease(form: Form) -> None:
    def body(session: Any) -> Steps:
        lease = yield session.lease("cpu:0")
        noop = yield session.get_function("rpc.noop")
        with pytest.raises(TimeoutError):
            yield session.time(noop, lease="cpu:0", timeout=0.05)
        yield lease.release()
        assert (yield session.time(noop, lease="cpu:0")).mean > 0

    form.run(body)


def test_functions_of_this_process_are_called_from_there(anywhere: Form) -> None:
    def body(session: Any) -> Steps:
        seen: list[Any] = []

        def record(*args: Any) -> int:
            seen.append((args, threading.current_thread() is threading.main_thread()))
            return len(args)

        timer = yield session.get_function("rpc.trace.call")
        callback = yield session.callback(record)
        result = yield timer(callback, 1, "two")
        assert result[0] == 2
        assert seen == [((1, "two"), False)]
        assert (yield timer(record, [3]))[0] == 1

        def fail() -> None:
            raise LookupError("of the callback")

        with pytest.raises(rpc.RemoteError, match="of the callback") as raised:
            yield timer(fail)
        assert raised.value.remote_class == "LookupError"
        assert "in fail" in (raised.value.remote_traceback or "")
        with pytest.raises(TypeError, match="cannot be called"):
            yield session.callback(3)

    anywhere.run(body)


def test_a_module_has_to_be_there(isolated: Form, tmp_path: Path) -> None:
    def body(session: Any) -> Steps:
        with pytest.raises(FileNotFoundError):
            yield session.load(tmp_path / "kernels.so")
        with pytest.raises(ValueError, match="regular"):
            yield session.load(tmp_path)
        for path in ("remote:none.so", "sha256:" + "0" * 64):
            with pytest.raises(rpc.NotFoundError):
                yield session.load(path)
        garbage = tmp_path / f"garbage-{isolated.name}.so"
        garbage.write_bytes(b"no module" + isolated.name.encode())
        with pytest.raises(rpc.RpcError):
            yield session.load(garbage)

    isolated.run(body)


def test_a_session_tells_when_and_why_it_ended(form: Form) -> None:
    def body(session: Any) -> Steps:
        tensor = yield session.empty([3])
        echo = yield session.get_function("rpc.echo")
        assert not session.is_closed
        assert (session.is_local, session.is_encrypted) == (False, False)
        yield session.close()
        yield session.close()
        assert session.is_closed
        assert "closed" in repr(session)
        attempts: list[Callable[[], Any]] = [
            lambda: session.call("rpc.echo"),
            lambda: session.empty([3]),
            lambda: echo(1),
            lambda: tensor.numpy(),
            lambda: session.files.ls(),
        ]
        for fails in attempts:
            with pytest.raises(rpc.SessionClosedError):
                yield fails()

    form.run(body)


def test_named_servers_stand_for_addresses(server: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"default = 'board'\n[server.board]\naddress = '{server}'\n")
    config.chmod(0o600)
    for name in ("@board", "@"):
        with rpc.connect(name, config=config) as session:
            assert session.address == server
            assert session.call("rpc.echo", 1) == 1
    with pytest.raises(ValueError, match="did you mean 'board'"):
        rpc.connect("@bord", config=config)


def test_sessions_go_through_hops(tmp_path_factory: pytest.TempPathFactory, server: str) -> None:
    with rpc.connect(server, via=[server]) as session, pytest.raises(rpc.RpcError) as raised:
        session.call("rpc.none")
    assert raised.value.hop >= 1


def test_wrong_ways_to_connect_are_errors(server: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ConnectionError):
            rpc.connect(f"tcp://127.0.0.1:{port}", connect_timeout=5.0)
    for address in ("nonsense://x", "", "tcp://"):
        with pytest.raises((ValueError, rpc.RpcError)):
            rpc.connect(address)
    with pytest.raises(ValueError, match="cannot read"):
        rpc.connect(server, token_file="/no/such/file")
    with pytest.raises(ValueError):
        rpc.connect(server, keep_alive=-1.0)
    with pytest.raises(ValueError):
        rpc.connect(server, devices=["no such device"])
    with pytest.raises(rpc.RpcError):
        rpc.connect(server, key="another")
    options: dict[str, Any] = {"spam": 1}
    with pytest.raises(TypeError):
        rpc.connect(server, **options)

"""Servers of functions of Python."""

from __future__ import annotations

import asyncio
import datetime
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from forms import TIME_LIMIT

import tensor_rpc as rpc
from tensor_rpc import _aio, _aio_server, _child

PACKAGE = pathlib.Path(rpc.__file__).parent.parent


def add(a: int, b: int) -> int:
    return a + b


def test_a_server_serves_functions_until_it_is_stopped() -> None:
    server = rpc.Server(add)
    assert not server.is_running
    with server:
        assert len(server.addresses) == 1 and server.address.startswith("tcp://127.0.0.1:")
        with rpc.connect(server.address) as session:
            assert session["add"](1, 2) == 3
            assert server.sessions == 1
        session = rpc.connect(server.address)
        call = session["add"]
    assert not server.is_running
    assert isinstance(session.ended(), rpc.SessionClosedError)
    with pytest.raises(ConnectionError):
        call(1, 2)
    with pytest.raises(RuntimeError, match="has been stopped"):
        _ = server.addresses
    server.stop()


def test_a_server_listens_on_several_addresses_and_takes_settings(tmp_path: pathlib.Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("someone 0123456789abcdef0123456789abcdef\n")
    tokens.chmod(0o600)
    unix = f"unix:{tmp_path}/socket"
    with rpc.Server(
        add,
        listen=["tls://127.0.0.1:0", unix],
        token_file=tokens,
        max_handles=5,
        idle_timeout=datetime.timedelta(minutes=1),
        workdir=tmp_path,
    ) as server:
        assert server.addresses[1] == unix
        with pytest.raises(rpc.RefusedError):
            rpc.connect(unix)
        with rpc.connect(server.address, token_file=tokens) as session:
            assert session.is_encrypted
            assert session["add"](2, 2) == 4


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"max_memry": "1GiB"}, TypeError, "did you mean 'max-memory'?"),
        ({"max_memory": "much"}, ValueError, "'much' is not a size"),
        ({"listen": "board"}, ValueError, "board"),
        ({"listen": "tcp://0.0.0.0:0"}, ValueError, "can be reached from other machines"),
        ({"max_sessions": object()}, TypeError, "the setting max_sessions is text"),
    ],
)
def test_a_wrong_setting_is_an_error_when_the_server_is_made(
    settings: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        rpc.Server(add, **settings)
    assert text in str(caught.value)
    assert "configuration file" not in str(caught.value)


def test_an_address_that_is_taken_is_an_error_at_the_start(tmp_path: pathlib.Path) -> None:
    with rpc.Server(add) as server, pytest.raises(OSError, match="in use"):
        rpc.Server(add, listen=server.address).start()


def test_python_code_of_one_session_does_not_stop_the_others() -> None:
    release = threading.Event()
    begun = threading.Event()

    def spin() -> int:
        count = 0
        begun.set()
        while not release.is_set():
            count += 1
        return count

    with rpc.Server(add, spin) as server:
        with (
            rpc.connect(server.address) as busy,
            rpc.connect(server.address, keep_alive=0.2) as other,
        ):
            caller = threading.Thread(target=busy.call, args=("spin",))
            caller.start()
            assert begun.wait(20)
            # The function of one session runs all the time.
            for number in range(20):
                assert other.call("add", number, 1, timeout=20) == number + 1
            release.set()
            caller.join(20)


SCRIPT = """
import tensor_rpc as rpc

@rpc.function
def add(a: int, b: int) -> int:
    return a + b

rpc.Server(add, drain_timeout="20s").serve()
print("the end", flush=True)
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Callable[[str], subprocess.Popen[str]]:
    def start(text: str) -> subprocess.Popen[str]:
        path = tmp_path / "script.py"
        path.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        return subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_in_the_foreground_drains_at_a_signal(
    script: Callable[[str], subprocess.Popen[str]], number: signal.Signals
) -> None:
    with script(SCRIPT) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening on ").strip()
        with rpc.connect(address) as session:
            assert session["add"](1, 2) == 3
            process.send_signal(number)
            ended = session.ended()
            assert isinstance(ended, ConnectionError)
        assert process.stdout.read() == "the end\n"
        assert process.wait(20) == 0


def test_a_hangup_reloads_and_a_file_that_is_wrong_stops_nothing(
    script: Callable[[str], subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    tokens = [f"someone {letter * 32}\n" for letter in "ab"]
    files = [tmp_path / "first", tmp_path / "second", tmp_path / "tokens"]
    for file, text in zip(files, [*tokens, tokens[0]], strict=True):
        file.write_text(text)
        file.chmod(0o600)
    settings = f"token_file={str(files[2])!r}, listen='tls://127.0.0.1:0', log_level='info'"
    with script(SCRIPT.replace('drain_timeout="20s"', settings)) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().removeprefix("listening on ").strip()
        rpc.connect(address, token_file=files[0]).close()
        files[2].write_text("no token")
        process.send_signal(signal.SIGHUP)
        assert any("cannot reload" in line for line in iter(process.stderr.readline, ""))
        rpc.connect(address, token_file=files[0]).close()
        files[2].write_text(tokens[1])
        process.send_signal(signal.SIGHUP)
        for _ in range(100_000):
            try:
                rpc.connect(address, token_file=files[1]).close()
                break
            except rpc.RefusedError:
                continue
        with pytest.raises(rpc.RefusedError):
            rpc.connect(address, token_file=files[0])
        process.send_signal(signal.SIGINT)
        assert "the end" in process.stdout.read()
        assert process.wait(20) == 0


def test_a_second_signal_stops_a_server_at_once(
    script: Callable[[str], subprocess.Popen[str]],
) -> None:
    text = SCRIPT.replace("return a + b", "import threading; threading.Event().wait()")
    with script(text) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening on ").strip()
        session = rpc.connect(address)
        failed: list[BaseException] = []

        def call() -> None:
            try:
                session.call("add", 1, 2)
            except rpc.RpcError as error:
                failed.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        process.send_signal(signal.SIGTERM)
        # It refuses new sessions once it drains.
        for _ in range(10_000):
            try:
                rpc.connect(address).close()
            except rpc.RpcError:
                break
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "the end\n"
        assert process.wait(20) == 0
        caller.join(20)
        assert isinstance(failed[0], ConnectionError)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on an event loop of its own."""
    asyncio.run(asyncio.wait_for(work, TIME_LIMIT))


def test_an_event_loop_serves_and_calls() -> None:
    async def work() -> None:
        server = rpc.aio.Server(add)
        assert not server.is_running
        async with server as entered:
            assert entered is server and server.is_running and server.sessions == 0
            async with rpc.aio.connect(server.address) as session:
                # The sessions of this server and the wait for the call are of one thread.
                assert await asyncio.gather(*(session.call("add", n, 1) for n in range(8))) == list(range(1, 9))
                assert server.sessions == 1
                address = server.address
                with pytest.raises(RuntimeError, match="started once"):
                    await server.start()
        assert not server.is_running
        with pytest.raises(ConnectionError):
            await rpc.aio.connect(address)
        with pytest.raises(RuntimeError, match="started once"):
            await server.start()
        # It has stopped already.
        await server.stop()

    run(work())


def test_a_server_of_an_event_loop_serves_until_it_is_drained_or_cancelled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def ends(server: rpc.aio.Server, end: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
        await server.start()
        serving = asyncio.create_task(server.serve())
        async with rpc.aio.connect(server.address) as session:
            assert await session.call("add", 1, 2) == 3
        assert not serving.done()
        await end(serving)
        assert not server.is_running

    async def drain(serving: asyncio.Task[None]) -> None:
        await drained.drain()
        await serving

    async def cancel(serving: asyncio.Task[None]) -> None:
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    drained = rpc.aio.Server(add)
    run(ends(drained, drain))
    run(ends(rpc.aio.Server(add), cancel))
    assert capsys.readouterr().out.count("listening on tcp://127.0.0.1:") == 2


def test_a_drain_goes_on_if_its_wait_is_cancelled() -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return gate.wait(TIME_LIMIT)

    async def work() -> None:
        server = rpc.aio.Server(hold, drain_timeout="1h")
        await server.start()
        serving = asyncio.create_task(server.serve(announce=False))
        async with rpc.aio.connect(server.address) as session:
            call = session.call("hold")
            assert await asyncio.to_thread(begun.wait, TIME_LIMIT)
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0)
            draining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await draining
            assert server.is_running and not serving.done()
            gate.set()
            assert await call is True
        await serving
        assert not server.is_running

    run(work())


@pytest.fixture
def port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
        return found


def assert_is_free(port: int) -> None:
    """Check that nothing listens on a port."""
    socket.create_server(("127.0.0.1", port)).close()


def test_a_start_that_is_cancelled_takes_no_address_and_may_be_repeated(port: int) -> None:
    async def work() -> None:
        address = f"tcp://127.0.0.1:{port}"
        server = rpc.aio.Server(add, listen=address)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(rpc.RemoteIOError):
            await server.start()
        for turns in range(10):
            starting = asyncio.create_task(server.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            # The start has begun, and its outcome comes by the loop.
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not server.is_running
            assert_is_free(port)
        await server.start()
        async with rpc.aio.connect(address) as session:
            assert await session.call("add", 1, 2) == 3
        await server.stop()

    run(work())


def test_a_start_that_is_cancelled_when_it_is_complete_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        server = rpc.aio.Server(add, listen=f"tcp://127.0.0.1:{port}")
        complete: list[bool] = []

        def begin_start(operation: Any) -> Any:
            monkeypatch.undo()
            begun = _aio._begin(operation)
            begun.add_done_callback(cancel)
            return begun

        def cancel(begun: object) -> None:
            """Cancel the task when the outcome is there, before the task goes on with it."""
            complete.append(server.is_running)
            starting.cancel()

        monkeypatch.setattr(_aio_server, "_begin", begin_start)
        starting = asyncio.create_task(server.start())
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert complete == [True] and not server.is_running
        assert_is_free(port)
        async with server, rpc.aio.connect(server.address) as session:
            assert await session.call("add", 1, 2) == 3

    run(work())


def test_a_stop_gives_up_a_start_in_progress(port: int) -> None:
    async def work() -> None:
        for turns in range(10):
            server = rpc.aio.Server(add, listen=f"tcp://127.0.0.1:{port}")
            serving = asyncio.create_task(server.serve(announce=False))
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            # A task that has not run yet begins the start after this.
            if turns > 0:
                assert_is_free(port)
                await serving
            else:
                serving.cancel()
        server = rpc.aio.Server(add, listen=f"tcp://127.0.0.1:{port}")
        starting = asyncio.create_task(server.start())
        await asyncio.sleep(0)
        await server.stop()
        with pytest.raises(RuntimeError, match="has been stopped"):
            await starting
        assert_is_free(port)

    run(work())


def test_a_stop_gives_up_a_start_whose_processes_are_prepared(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    set_up = _child.set_up

    def prepare(*args: Any) -> list[str]:
        begun.set()
        assert gate.wait(TIME_LIMIT)
        return set_up(*args)

    async def work() -> None:
        begun.clear()
        gate.clear()
        server = rpc.aio.Server(listen=f"tcp://127.0.0.1:{port}", isolate="process")
        serving = asyncio.create_task(server.serve(announce=False))
        assert await asyncio.to_thread(begun.wait, TIME_LIMIT)
        await server.stop()
        gate.set()
        await serving
        assert not server.is_running
        assert_is_free(port)

    monkeypatch.setattr(_child, "set_up", prepare)
    run(work())
    begun.clear()
    gate.clear()
    server = rpc.Server(listen=f"tcp://127.0.0.1:{port}", isolate="process")
    serving = threading.Thread(target=server.serve, kwargs={"announce": False})
    serving.start()
    assert begun.wait(TIME_LIMIT)
    server.stop()
    gate.set()
    serving.join(TIME_LIMIT)
    assert not serving.is_alive() and not server.is_running
    assert_is_free(port)


def test_a_stop_before_the_start_ends_nothing() -> None:
    async def work() -> None:
        server = rpc.aio.Server(add)
        await server.stop()
        await server.start()
        serving = asyncio.create_task(server.serve(announce=False))
        async with rpc.aio.connect(server.address) as session:
            assert await session.call("add", 1, 2) == 3
        assert not serving.done()
        await server.stop()
        await serving

    run(work())
    server = rpc.Server(add)
    server.stop()
    with pytest.raises(RuntimeError, match="not been started"):
        server.drain()
    server.start()
    serving = threading.Thread(target=server.serve, kwargs={"announce": False})
    serving.start()
    serving.join(0.05)
    assert serving.is_alive()
    server.stop()
    serving.join(TIME_LIMIT)
    assert not serving.is_alive()

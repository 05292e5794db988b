"""Sessions of Disco that an event loop of asyncio starts and waits for."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import environment
from forms import TIME_LIMIT

import tensor_rpc as rpc
from tensor_rpc import disco

gate = threading.Event()
"""Gate of `hold`: only the event loop of a test opens it."""


@rpc.function
def hold() -> None:
    """Hold the worker until the event loop has run."""
    assert gate.wait(TIME_LIMIT)


@rpc.function
def process_number() -> int:
    """Return the process of the worker."""
    return os.getpid()


@rpc.function
def fail() -> None:
    """Fail on all workers."""
    raise LookupError("a word of a worker")


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on an event loop of its own."""
    gate.clear()
    asyncio.run(asyncio.wait_for(work, TIME_LIMIT))


def test_the_event_loop_runs_while_workers_are_waited_for() -> None:
    async def work() -> None:
        async with disco.start(disco.ThreadedSession, 2, functions=[hold, fail]) as session:
            assert type(session) is disco.ThreadedSession and session.num_workers == 2
            waits: dict[str, asyncio.Future[Any]] = {}
            await session.aio.init_ccl("host")
            x = session.broadcast(np.arange(3, dtype="float32"))
            session.get_global_func("hold")()
            out = np.zeros(3, "float32")
            waits["sync"] = session.aio.sync_all()
            waits["worker 0"] = session.aio.sync_worker_0()
            waits["copy"] = session.aio.copy_from_worker_0(x)
            waits["into"] = session.aio.copy_from_worker_0(out, x)
            waits["value"] = session.aio.debug_get_from_remote(x, 1)
            # It is issued behind the others, and its wait is given up.
            given_up = session.aio.sync_worker(1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(given_up, 0.01)
            assert not any(wait.done() for wait in waits.values())
            gate.set()
            await asyncio.gather(*waits.values())
            assert waits["copy"].result().tolist() == waits["value"].result().tolist() == [0, 1, 2]
            assert waits["into"].result() is out and out.tolist() == [0, 1, 2]

            mesh = await session.aio.mesh(dp=1, tp=2)
            total = session.allreduce(x, in_group=mesh.group("tp"))
            assert (await session.aio.debug_get_from_remote(total, 1)).tolist() == [0, 2, 4]
            await session.aio.reinit_ccl()
            session.get_global_func("fail")()
            with pytest.raises(disco.WorkersError, match="a word of a worker") as failed:
                await session.aio.sync_all()
            assert [failure.worker for failure in failed.value.failures] == [0, 1]
            await session.aio.sync_all()
        with pytest.raises(rpc.RpcError):
            await session.aio.sync_all()

    run(work())


def test_a_loop_that_is_faster_than_its_workers_awaits_room() -> None:
    async def work() -> None:
        async with disco.start(disco.ThreadedSession, 1, functions=[hold], window=4096) as session:
            call = session.get_global_func("hold")
            call()
            await session.aio.room()
            issued = 0
            while True:
                room = session.aio.room()
                if not room.done():
                    break
                await room
                call()
                issued += 1
                assert issued < 4096
            assert issued > 0
            gate.set()
            await room
            await session.aio.sync_all()

    run(work())


def test_the_event_loop_runs_while_content_is_fetched_from_workers_behind_by_a_window() -> None:
    async def work() -> None:
        async with disco.start(disco.ThreadedSession, 1, functions=[hold], window=4096) as session:
            x = session.broadcast(np.arange(3, dtype="float32"))
            await session.aio.sync_all()
            call = session.get_global_func("hold")
            while session.aio.room().done():
                call()
            # Any other command would wait by now.
            copied, read = session.aio.copy_from_worker_0(x), session.aio.debug_get_from_remote(x, 0)
            assert not copied.done() and not read.done()
            # Only this thread lets the worker go on, for which that needs the interpreter.
            gate.set()
            # Behind both, and so it does not change what they fetch.
            await session.aio.room()
            session.broadcast(np.zeros(3, "float32"), x)
            assert (await copied).tolist() == (await read).tolist() == [0, 1, 2]
            assert (await session.aio.copy_from_worker_0(x)).tolist() == [0, 0, 0]

    run(work())


def test_a_session_is_started_once() -> None:
    async def work() -> None:
        starting = disco.start(disco.ThreadedSession, 1)
        session = await starting
        with pytest.raises(RuntimeError, match="started once"):
            await starting
        with pytest.raises(RuntimeError, match="started once"):
            async with starting:
                pass
        await session.aio.shutdown()

    run(work())


def test_sessions_of_all_kinds_are_started_by_an_event_loop(server: str) -> None:
    async def work() -> None:
        async with disco.start(disco.ProcessSession, 2, functions=[process_number]) as processes:
            number = processes.get_global_func("process_number")()
            found = {await processes.aio.debug_get_from_remote(number, worker) for worker in range(2)}
            assert len(found | {os.getpid()}) == 3
        async with disco.start(disco.SocketSession, 1, 2, functions=[process_number]) as nodes:
            number = nodes.get_global_func("process_number")()
            assert await nodes.aio.debug_get_from_remote(number, 1) == os.getpid()
        session = await disco.start(disco.servers, [server], 2, hosting="threads")
        assert type(session) is disco.Session
        async with session:
            await session.aio.sync_all()
        async with rpc.aio.connect(server) as there:
            async with disco.start(disco.over, [there], hosting="threads") as over:
                await over.aio.sync_all()
        with pytest.raises(ConnectionError):
            await disco.start(disco.servers, ["tcp://127.0.0.1:1"])
        with pytest.raises(ValueError, match="functions or entrypoint"):
            await disco.start(disco.ProcessSession, 1, entrypoint=["program"], functions=[process_number])
        wrong: Any = print
        with pytest.raises(TypeError, match="no constructor"):
            disco.start(wrong)

    run(work())


def test_a_start_that_is_cancelled_ends_its_workers_once_it_is_complete() -> None:
    code = "from tensor_rpc._commands import rpc_server; rpc_server()"

    async def work() -> None:
        address = asyncio.get_running_loop().create_future()

        async def start() -> None:
            await disco.start(disco.SocketSession, 2, 1, on_listen=address.set_result)

        starting = asyncio.create_task(start())
        command = [sys.executable, "-c", code, "worker", "--controller", await address]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        node = await asyncio.create_subprocess_exec(*command, env=environment(), stdin=asyncio.subprocess.DEVNULL)
        assert await node.wait() == 0

    run(work())


def test_cancelled_programs_end(isolated_server: str, token: Path) -> None:
    async def work() -> None:
        options = {"token_file": str(token)}
        async with disco.start(disco.servers, [isolated_server], 2, connect=options) as session:
            lines: asyncio.Queue[bytes] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def on_line(worker: int, stream: str, line: bytes) -> None:
                loop.call_soon_threadsafe(lines.put_nowait, line)

            done = await session.aio.run_all("sh", "-c", "exit $RANK", on_line=on_line)
            assert [result.returncode for result in done] == [0, 1]
            running = session.aio.run_all("sh", "-c", "echo ready; exec sleep 3600", on_line=on_line)
            assert {await lines.get() for _ in range(2)} == {b"ready"}
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            # The shutdown does not wait for an hour.

    run(work())

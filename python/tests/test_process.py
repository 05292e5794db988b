"""Sessions and the process: forks, signals, threads, the end of the interpreter, and memory."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from conftest import environment, python
from forms import TIME_LIMIT

import tensor_rpc as rpc

EXITS = {
    "blocking": """
import sys, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
tensors = [session.tensor(b"abc") for _ in range(10)]
tensors.append(tensors)
echo = session["rpc.echo"]
callback = session.callback(print)
lease = session.lease("cpu:0")
class Late:
    def __del__(self):
        tensors[0].free()
late = Late()
""",
    "asyncio": """
import asyncio, sys, tensor_rpc as rpc
kept = []
async def main():
    session = await rpc.aio.connect(sys.argv[1])
    kept.append(session)
    kept.append(await session.tensor(b"abc"))
    kept.append(session.call("rpc.sleep", 3600.0))
    kept.append(await session.callback(print))
    kept.append(kept)
asyncio.run(main())
""",
    "thread": """
import sys, threading, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
sleep = session["rpc.sleep"]
for _ in range(4):
    options = {"lane": rpc.CONCURRENT}
    threading.Thread(target=sleep, args=(3600.0,), kwargs=options, daemon=True).start()
session.call("rpc.echo", 1, lane=1)
""",
    "callback": """
import sys, threading, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
called = threading.Event()
def wait():
    called.set()
    threading.Event().wait()
call = session["rpc.trace.call"]
threading.Thread(target=call, args=(wait,), daemon=True).start()
called.wait()
""",
    "exception": """
import sys, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
tensor = session.tensor(b"abc")
sys.exit(0)
""",
    # Their threads come back to an interpreter that has begun to end, at some point of that.
    "callbacks_that_sleep": """
import sys, threading, time, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
began = threading.Barrier(17)
def sleeper(seconds):
    def sleep():
        began.wait()
        time.sleep(seconds)
    return sleep
def call(seconds):
    session.call("rpc.trace.call", sleeper(seconds), lane=1 + int(seconds * 1000))
for number in range(16):
    threading.Thread(target=call, args=(number / 1000,), daemon=True).start()
began.wait()
""",
}


@pytest.mark.parametrize("code", EXITS.values(), ids=EXITS.keys())
def test_the_interpreter_ends_with_everything_alive(code: str, server: str) -> None:
    ended = python(code, server)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


INTERRUPTED = {
    "call": "session.call('rpc.sleep', 3600.0)",
    "ended": "session.ended()",
    "file": "session.files.put('x', Endless())",
    "callback": "session.call('rpc.trace.call', interrupt)",
}


@pytest.mark.parametrize("work", INTERRUPTED.values(), ids=INTERRUPTED.keys())
def test_ctrl_c_ends_a_wait_and_cancels_it_there(work: str, server: str) -> None:
    code = f"""
import os, signal, sys, threading, tensor_rpc as rpc
interrupted = threading.Event()
class Endless:
    def read(self, size):
        return b"x" * size
session = rpc.connect(sys.argv[1], workspace="interrupted")
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    interrupted.wait()
try:
    print("ready", flush=True)
    {work}
except KeyboardInterrupt:
    interrupted.set()
    assert session.call("rpc.echo", 1, timeout={TIME_LIMIT / 2}) == 1
    print("interrupted")
"""
    command = [sys.executable, "-c", code, server]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if "interrupt" not in work:
            process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.kill()
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


def test_a_handler_of_a_signal_may_use_the_session(server: str) -> None:
    code = """
import signal, sys, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
session.call("rpc.echo", 1)
class Done(Exception):
    pass
def on_alarm(number, frame):
    raise Done(session.call("rpc.echo", "in the handler", lane=1))
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    session.call("rpc.sleep", 3600.0)
except Done as done:
    print(done)
"""
    ended = python(code, server)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("in the handler\n", "", 0)


def test_the_child_of_a_fork_has_no_part_in_sessions_of_its_parent(server: str) -> None:
    code = """
import asyncio, gc, os, sys, tensor_rpc as rpc
session = rpc.connect(sys.argv[1])
tensor, echo = session.tensor(b"abc"), session["rpc.echo"]
def fails(use):
    try:
        use()
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError
child = os.fork()
if child == 0:
    assert session.is_closed
    for use in (lambda: echo(1), tensor.tolist, lambda: session.call("rpc.echo"), session.ended):
        fails(use)
    del tensor, echo
    session.close()
    del session
    gc.collect()
    fails(lambda: rpc.connect(sys.argv[1]))
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert tensor.read() == b"abc"
assert echo(3) == 3
session.close()
print("well")
"""
    ended = python(code, server)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("well\n", "", 0)


def test_the_child_of_a_fork_does_not_write_what_its_parent_has_begun(server: str) -> None:
    code = """
import asyncio, os, sys, tensor_rpc as rpc
async def main():
    async with rpc.aio.connect(sys.argv[1]) as session:
        echo = await session["rpc.echo"]
        sleeping = session.call("rpc.sleep", 3600.0, lane=rpc.CONCURRENT)
        for _ in range(20):
            calls = [echo(number) for number in range(3)]
            child = os.fork()
            if child == 0:
                # The loop goes on, to the end of its turn.
                await asyncio.sleep(0)
                os._exit(7)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
            assert await asyncio.gather(*calls) == [0, 1, 2]
        sleeping.cancel()
asyncio.run(main())
print("well")
"""
    ended = python(code, server)
    assert (ended.stdout, ended.returncode) == ("well\n", 0), ended.stderr


def test_a_process_that_forks_first_connects_on_both_sides(server: str) -> None:
    code = """
import asyncio, os, sys, tensor_rpc as rpc
child = os.fork()
with rpc.connect(sys.argv[1]) as session:
    assert session.call("rpc.echo", 2) == 2
async def main():
    async with rpc.aio.connect(sys.argv[1]) as session:
        assert await session.call("rpc.echo", 2) == 2
asyncio.run(main())
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    print("well")
"""
    ended = python(code, server)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("well\n", "", 0)


def test_many_threads_use_one_session(server: str) -> None:
    with rpc.connect(server) as session:
        failed: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for index in range(100):
                    lane = number if index % 2 else None
                    assert session.call("rpc.echo", [number, index], lane=lane) == [number, index]
                    tensor = session.tensor(bytes([number]) * 10)
                    assert tensor.read() == bytes([number]) * 10
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []


def test_other_threads_run_while_one_waits(server: str) -> None:
    with rpc.connect(server) as session:

        def sleep() -> None:
            with pytest.raises(TimeoutError):
                session.call("rpc.sleep", 3600.0, lane=1, timeout=0.3)

        sleeping = threading.Thread(target=sleep)
        sleeping.start()
        for index in range(100):
            assert session.call("rpc.echo", index) == index
        sleeping.join()


def rss() -> int:
    """Return the resident memory in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_calls_and_tensors_leave_nothing_behind(server: str) -> None:
    marker = object()
    payload = ["text", 1.5, {"key": b"bytes"}]
    before = after = 0
    with rpc.connect(server) as session:
        echo = session["rpc.echo"]

        def round_trip() -> None:
            echo(payload)
            session.tensor(b"abc").read()
            with pytest.raises(TypeError):
                echo(marker)
            with pytest.raises(rpc.NotFoundError):
                session["none"]

        before, after = growth(round_trip)
    assert after - before < 8 << 20
    assert sys.getrefcount(marker) == 2
    assert sys.getrefcount(payload) == 2


def test_calls_and_tensors_of_asyncio_leave_nothing_behind(server: str) -> None:
    marker = object()

    async def work() -> tuple[int, int]:
        async with rpc.aio.connect(server) as session:
            echo = await session["rpc.echo"]

            async def round_trip() -> None:
                await asyncio.gather(*(echo(index) for index in range(8)))
                await (await session.tensor(b"abc")).read()
                with pytest.raises(TypeError):
                    await echo(marker)
                with pytest.raises(rpc.NotFoundError):
                    await session["none"]
                cancelled = session.call("rpc.sleep", 3600.0, lane=rpc.CONCURRENT)
                cancelled.cancel()

            numbers = []
            for _ in range(3):
                for _ in range(300):
                    await round_trip()
                gc.collect()
                numbers.append((rss(), len(gc.get_objects())))
            assert numbers[2][1] - numbers[1][1] < 100
            return numbers[1][0], numbers[2][0]

    before, after = asyncio.run(asyncio.wait_for(work(), TIME_LIMIT))
    assert after - before < 8 << 20
    assert sys.getrefcount(marker) == 2


def growth(round_trip: Callable[[], None]) -> tuple[int, int]:
    """Return the memory before and after many repetitions."""
    numbers = []
    for _ in range(3):
        for _ in range(1000):
            round_trip()
        gc.collect()
        numbers.append((rss(), len(gc.get_objects())))
    assert numbers[2][1] - numbers[1][1] < 100
    return numbers[1][0], numbers[2][0]

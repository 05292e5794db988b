"""What only the asyncio form has: event loops, tasks and their cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest
from forms import TIME_LIMIT

import tensor_rpc as rpc
from tensor_rpc import _aio

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(work, TIME_LIMIT))


def test_both_forms_have_the_same_operations() -> None:
    for name in rpc.aio.__all__:
        if name in ("Opening", "Pending"):
            continue
        blocking, asyncio_form = getattr(rpc, name), getattr(rpc.aio, name)
        if not inspect.isclass(blocking):
            if callable(blocking):
                assert parameters(blocking) == parameters(asyncio_form), name
            continue
        members = {m for m in vars(blocking) if not m.startswith("_")}
        assert members == {m for m in vars(asyncio_form) if not m.startswith("_")}, name
        for member in members:
            one, other = getattr(blocking, member), getattr(asyncio_form, member)
            if callable(one):
                assert parameters(one) == parameters(other), f"{name}.{member}"


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters of a function."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def test_calls_of_one_lane_are_in_the_order_in_which_they_were_made(server: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            echo = await session["rpc.echo"]
            order: list[int] = []
            calls = [echo(index) for index in range(64)]
            for call in calls:
                call.add_done_callback(lambda call: order.append(call.result()))
            assert await asyncio.gather(*calls) == list(range(64))
            assert order == list(range(64))
            names = [session.call("rpc.echo", index) for index in range(64)]
            assert await asyncio.gather(*names) == list(range(64))

    run(work())


def test_operations_begin_although_the_loop_is_held_up() -> None:
    heard = [threading.Event() for _ in range(3)]

    def hear(index: int) -> None:
        heard[index].set()

    async def work(address: str) -> None:
        # No ping has the session look at its requests.
        async with rpc.aio.connect(address, keep_alive=3600.0) as session:
            call = await session["hear"]
            sleep = await session["rpc.sleep"]
            # There is a reply to wait for already, so that the others do not begin alone.
            sleeping = sleep(3600.0, lane=rpc.CONCURRENT)
            for _ in range(20):
                for each in heard:
                    each.clear()
                # All of one turn of the loop, which then waits for what they do at the server.
                started = [call(index, lane=rpc.CONCURRENT) for index in range(3)]
                assert all([each.wait(TIME_LIMIT / 2) for each in heard])
                await asyncio.gather(*started)
            sleeping.cancel()

    with rpc.Server(hear, keep_alive="1h") as server:
        run(work(server.address))


def test_operations_begin_late_in_a_turn_of_the_loop() -> None:
    heard = [threading.Event() for _ in range(2)]

    def hear(index: int) -> None:
        heard[index].set()

    async def work(address: str) -> None:
        async with rpc.aio.connect(address, keep_alive=3600.0) as session:
            call = await session["hear"]
            sleeping = session.call("rpc.sleep", 3600.0, lane=rpc.CONCURRENT)
            early = call(0, lane=rpc.CONCURRENT)
            assert heard[0].wait(TIME_LIMIT / 2)
            # By now the session no longer looks for requests by itself.
            time.sleep(0.2)
            late = call(1, lane=rpc.CONCURRENT)
            assert heard[1].wait(TIME_LIMIT / 2)
            await asyncio.gather(early, late)
            sleeping.cancel()

    with rpc.Server(hear, keep_alive="1h") as server:
        run(work(server.address))


class Tap:
    """A relay to a server, which tells that its client has sent something."""

    def __init__(self, address: str) -> None:
        """Relay one connection."""
        self.sent = threading.Event()
        host, port = address.removeprefix("tcp://").split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        with self._listener, self._listener.accept()[0] as client, socket.create_connection(self._server) as server:
            back = threading.Thread(target=self._pass_on, args=(server, client))
            back.start()
            self._pass_on(client, server, self.sent)
            back.join()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket, passed: threading.Event | None = None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                if passed is not None:
                    passed.set()
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    "begin",
    [
        lambda session, echo: echo.pipe(1),
        lambda session, echo: session.pipe_function("rpc.echo"),
        lambda session, echo: session.pipe_empty([1]),
        lambda session, echo: session.pipe_module("remote:none.so"),
        lambda session, echo: session.pipe_module("remote:none.so").pipe_function("none"),
    ],
    ids=["call", "function", "tensor", "module", "function of a module"],
)
def test_piped_operations_begin_although_nothing_is_waited_for(begin: Callable[[Any, Any], Any]) -> None:
    with rpc.Server(keep_alive="1h") as server:
        tap = Tap(server.address)
        with rpc.connect(tap.address, keep_alive=3600.0) as session:
            echo = session["rpc.echo"]
            assert echo(1) == 1
            # By now the session no longer looks for requests by itself.
            time.sleep(0.2)
            tap.sent.clear()
            begun = begin(session, echo)
            assert tap.sent.wait(TIME_LIMIT / 2), begun


def test_operations_of_several_sessions_and_loops_go_on_side_by_side(server: str) -> None:
    shared = rpc.connect(server)

    async def caller(call: Any, first: int) -> None:
        for number in range(first, first + 50):
            assert await call("rpc.echo", number, lane=rpc.CONCURRENT) == number

    async def work() -> None:
        async with rpc.aio.connect(server) as one, rpc.aio.connect(server) as other:
            sessions = (one, other, rpc.aio.Session(shared))
            await asyncio.gather(*(caller(session.call, 50 * at) for at, session in enumerate(3 * sessions)))

    def thread() -> None:
        try:
            run(work())
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    threads = [threading.Thread(target=thread) for _ in range(3)]
    with shared:
        for each in threads:
            each.start()
        for number in range(100):
            assert shared.call("rpc.echo", number, lane=rpc.CONCURRENT) == number
        for each in threads:
            each.join()
    assert not failed


def test_an_operation_is_a_future_and_a_coroutine(server: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            call = session.call("rpc.echo", 1)
            assert asyncio.isfuture(call)
            assert asyncio.iscoroutine(call)
            assert await asyncio.create_task(call) == 1
            assert await call == await call == 1
            with pytest.raises(rpc.NotFoundError):
                await asyncio.create_task(session.call("none"))
            assert await asyncio.wait_for(session.call("rpc.echo", 2), TIME_LIMIT) == 2
            calls = [session.call("rpc.echo", index) for index in range(3)]
            assert [await call for call in asyncio.as_completed(calls)] == [0, 1, 2]

    run(work())


def test_cancellation_reaches_the_server(server: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            sleep = await session.get_function("rpc.sleep")
            for cancel in (as_task, as_future, by_timeout):
                # Lane 0 goes on only once the server has given the sleeping call up.
                await cancel(sleep)
                assert await session.call("rpc.echo", 1, timeout=TIME_LIMIT / 2) == 1

    async def as_task(sleep: Any) -> None:
        async def inner() -> None:
            await sleep(3600.0)

        task = asyncio.create_task(inner())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        task = asyncio.create_task(sleep(3600.0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def as_future(sleep: Any) -> None:
        call = sleep(3600.0)
        assert call.cancel()
        assert not call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        sleep(3600.0).close()

    async def by_timeout(sleep: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sleep(3600.0), 0.01)

    run(work())


def test_an_operation_may_be_cancelled_by_code_that_it_calls(server: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            calls: list[rpc.aio.Pending[int]] = []

            def cancel(count: int) -> None:
                calls[0].cancel()

            calls.append(session.files.put("x", b"a" * (8 << 20), progress=cancel))
            with pytest.raises(asyncio.CancelledError):
                await calls[0]
            assert await session.call("rpc.echo", 1) == 1

    run(work())


def test_coroutine_functions_are_called_from_there(server: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            thread = threading.get_ident()

            async def twice(number: int) -> Any:
                assert threading.get_ident() == thread
                return 2 * await session.call("rpc.echo", number, lane=rpc.CONCURRENT)

            async def keep(tensor: Any) -> str:
                assert isinstance(tensor, rpc.aio.Tensor)
                return str(await tensor.tolist(lane=rpc.CONCURRENT))

            call = await session["rpc.trace.call"]
            assert (await call(twice, 4))[0] == 8
            callback = await session.callback(twice)
            assert (await call(callback, 5))[0] == 10
            assert (await call(keep, await session.empty([2])))[0] == "[0.0, 0.0]"

        with rpc.connect(server) as blocking:
            caller = blocking["rpc.trace.call"]
            assert caller(lambda: isinstance(blocking.empty([1], lane=5), rpc.Tensor))[0] is True
            with pytest.raises(rpc.RemoteError, match="event loop"):
                caller(twice, 1)

    run(work())


def test_leases_and_sessions_are_entered_at_once(server: str) -> None:
    async def work() -> None:
        session = await rpc.aio.connect(server)
        async with session, session.lease("cpu:0") as lease:
            assert not lease.is_released
            request = await session.request_lease("cpu:0")
            assert await request.ahead() == 1
        assert lease.is_released
        with pytest.raises(rpc.RpcError):
            async with rpc.aio.connect("nonsense://x"):
                pass

    run(work())


def test_leases_are_entered_in_the_blocking_form(server: str) -> None:
    with rpc.connect(server) as session:
        with session.lease("cpu:0") as lease:
            assert session.request_lease("cpu:0").ahead() == 1
        assert lease.is_released
        with session.lease("cpu:0") as lease:
            session.close()
    assert session.is_closed


def test_one_session_serves_many_loops_and_threads(server: str) -> None:
    blocking = rpc.connect(server)
    failed: list[BaseException] = []

    def thread(number: int) -> None:
        try:
            if number < 6:
                run(use(number))
            else:
                for index in range(50):
                    assert blocking.call("rpc.echo", [number, index]) == [number, index]
        except BaseException as error:
            failed.append(error)

    async def use(number: int) -> None:
        session = rpc.aio.Session(blocking)
        calls = [session.call("rpc.echo", [number, index], lane=number) for index in range(50)]
        assert await asyncio.gather(*calls) == [[number, index] for index in range(50)]

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    blocking.close()


def test_closed_loops_are_forgotten(server: str) -> None:
    async def leave_some() -> weakref.ref[Any]:
        session = await rpc.aio.connect(server)
        for _ in range(3):
            session.call("rpc.sleep", 3600.0, lane=rpc.CONCURRENT)
        assert await session.call("rpc.echo", 1) == 1
        return weakref.ref(asyncio.get_running_loop())

    async def nothing() -> None:
        async with rpc.aio.connect(server):
            pass

    run(nothing())
    loop = run(leave_some())
    run(nothing())
    gc.collect()
    # Not even operations that nobody has waited for keep it.
    assert loop() is None
    assert len(_aio._loops) <= 1


def test_there_has_to_be_a_loop(server: str) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        rpc.aio.connect(server)


def test_outcomes_that_asyncio_refuses_are_errors_all_the_same(server: str) -> None:
    def stop(count: int) -> None:
        raise StopIteration

    async def work() -> None:
        async with rpc.aio.connect(server) as session:
            with pytest.raises((TypeError, RuntimeError)):
                await session.files.put("x", b"a", progress=stop)

    run(work())

"""Sessions that repeat requests, and open the next session when one was lost."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from forms import TIME_LIMIT

import tensor_rpc as rpc


class Place:
    """A server that can be started again at its address, and counts its calls."""

    def __init__(self, folder: Path) -> None:
        """Start it."""
        self.address = f"unix:{folder}/socket"
        self.calls: dict[str, int] = {"get": 0, "put": 0, "get_from": 0}
        self.called = threading.Event()
        # Calls of the first server do not return.
        self.gate = threading.Event()
        self.server = self._start()

    def _start(self) -> rpc.Server:
        return rpc.Server(self.get, self.put, self.get_from, self.quick, listen=self.address).start()

    def restart(self) -> None:
        """End the server with all its sessions, and start the next one."""
        self.server.stop()
        self.gate.set()
        self.server = self._start()

    def _call(self, name: str) -> int:
        self.calls[name] += 1
        self.called.set()
        assert self.gate.wait(TIME_LIMIT)
        return self.calls[name]

    def get(self) -> int:
        """Return the number of calls of this function."""
        return self._call("get")

    def put(self) -> int:
        """Return the number of calls of this function."""
        return self._call("put")

    def get_from(self, source: Any) -> int:
        """Return the number of calls of this function."""
        return self._call("get_from")

    def quick(self, number: int) -> int:
        """Return a number."""
        return number


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a server, which ends with its test."""
    return Place(tmp_path)


POLICY = rpc.RetryPolicy(idempotent=["ge*"], attempts=8, first_pause=0.1)
"""Attempts for some seconds, which a machine that is busy may need for the next start."""


def test_requests_go_on_in_the_next_session(place: Place) -> None:
    with (
        rpc.connect(place.address, retry=POLICY) as session,
        rpc.connect(place.address) as other,
    ):
        quick, lost = session["quick"], other["quick"]
        tensor = session.empty([2])
        assert quick(1) == 1
        place.restart()
        assert quick(2) == 2
        assert session.call("quick", 3) == 3
        with pytest.raises(rpc.InvalidHandleError):
            tensor.read()
        with pytest.raises(ConnectionError):
            lost(2)
        with pytest.raises(rpc.UnsupportedError, match="keeps no results"):
            quick.pipe(1).result()
    place.server.stop()


@pytest.mark.parametrize("name", ["get", "put"])
def test_a_call_that_was_lost_is_repeated_if_it_may_run_twice(place: Place, name: str) -> None:
    async def work() -> None:
        async with rpc.aio.connect(place.address, retry=POLICY) as session:
            call = session.call(name)
            assert await asyncio.to_thread(place.called.wait, TIME_LIMIT)
            await asyncio.to_thread(place.restart)
            if name == "get":
                assert await call == 2
            else:
                with pytest.raises(rpc.SessionClosedError) as lost:
                    await call
                assert lost.value.may_have_run and place.calls["put"] == 1
                # A new one is another matter.
                assert await session.call(name) == 2
        await asyncio.to_thread(place.server.stop)

    asyncio.run(asyncio.wait_for(work(), TIME_LIMIT))


def test_a_call_that_takes_an_array_or_a_function_has_the_error_of_its_connection(place: Place) -> None:
    async def work() -> None:
        async with rpc.aio.connect(place.address, retry=POLICY) as session:
            sources: list[Any] = [memoryview(b"an array"), [memoryview(b"in a list")], lambda: 1]
            for number, source in enumerate(sources, 1):
                place.called.clear()
                place.gate.clear()
                call = session.call("get_from", source)
                assert await asyncio.to_thread(place.called.wait, TIME_LIMIT)
                await asyncio.to_thread(place.restart)
                with pytest.raises(rpc.SessionClosedError) as lost:
                    await call
                assert lost.value.may_have_run and place.calls["get_from"] == number
                assert await session.call("quick", number) == number
        await asyncio.to_thread(place.server.stop)

    asyncio.run(asyncio.wait_for(work(), TIME_LIMIT))


def test_attempts_are_bounded_and_terms_are_checked(place: Place) -> None:
    with rpc.connect(place.address, retry=rpc.RetryPolicy(attempts=2, first_pause=0.001)) as session:
        quick = session["quick"]
        place.server.stop()
        with pytest.raises(ConnectionError):
            quick(1)
    with pytest.raises(ConnectionError):
        rpc.connect(place.address, retry=rpc.RetryPolicy())
    with pytest.raises(TypeError, match="several names"):
        rpc.connect(place.address, retry=rpc.RetryPolicy("get"))
    with pytest.raises(ValueError, match="seconds"):
        rpc.connect(place.address, retry=rpc.RetryPolicy(first_pause=-1.0))

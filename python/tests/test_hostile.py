"""What clients and careless functions do to a server of Python functions."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensor_rpc as rpc
from tensor_rpc import disco

LIMIT = 30.0


@dataclasses.dataclass
class Node:
    """A list that is linked."""

    value: int
    next: Node | None = None


@dataclasses.dataclass
class Many:
    """A packed value with many in it."""

    items: list[Any]


@rpc.function
def to_list(x: rpc.DenseArray) -> Any:
    """Return the elements."""
    return x.tolist()


@rpc.function
def keep_in_a_cycle(x: np.ndarray) -> None:
    """Leave an array in an exception that its own frame holds."""
    try:
        raise ValueError(x)
    except ValueError as error:
        kept = error  # noqa: F841


@rpc.function
def write_and_fail(x: np.ndarray) -> None:
    """Do something, and fail."""
    x[:] = 1
    raise rpc.PeerLostError("a server that this one uses")


@rpc.function
def second(node: Node) -> int:
    """Return the second value of a list."""
    assert node.next is not None
    return node.next.value


class Gate:
    """What keeps the event loop of coroutines busy until a test says so."""

    is_in = threading.Event()
    opened = threading.Event()


@rpc.function
async def block_the_loop() -> None:
    """Let no other coroutine run."""
    Gate.is_in.set()
    Gate.opened.wait(LIMIT)


@rpc.function
async def touch(x: np.ndarray) -> None:
    """Use an array."""
    await asyncio.sleep(0)
    x[:] = 2


@pytest.fixture
def session() -> Iterator[rpc.Session]:
    """Return a session with these functions, over a socket."""
    functions = (to_list, keep_in_a_cycle, write_and_fail, second, block_the_loop, touch)
    with rpc.Server(*functions) as server, rpc.connect(server.address) as made:
        yield made


def test_a_view_that_repeats_elements_is_not_copied(session: rpc.Session) -> None:
    """It would take more memory than anybody has counted, and there may be none."""
    x = session.tensor(np.arange(4, dtype="float32"))
    assert session["to_list"](x.view((2,), strides=(2,))) == [0, 2]
    with pytest.raises(rpc.RpcError, match="repeats elements"):
        session["to_list"](x.view((1 << 45,), strides=(0,)))
    assert session["to_list"](x) == [0, 1, 2, 3]


def test_a_cycle_does_not_keep_a_tensor(session: rpc.Session) -> None:
    """The next call gets it."""
    x = session.tensor(np.zeros(4, "float32"))
    session["keep_in_a_cycle"](x, timeout=LIMIT)
    assert session["to_list"](x, timeout=LIMIT) == [0, 0, 0, 0]


def test_a_function_that_fails_may_have_run(session: rpc.Session) -> None:
    """Whatever it raises, and arguments that do not fit have changed nothing."""
    x = session.tensor(np.zeros(2, "float32"))
    with pytest.raises(rpc.PeerLostError) as caught:
        session["write_and_fail"](x)
    assert caught.value.may_have_run
    assert not caught.value.is_retryable
    with pytest.raises(rpc.InvalidArgumentError) as refused:
        session["write_and_fail"](7)
    assert not refused.value.may_have_run


def test_a_callback_that_fails_may_have_run() -> None:
    """It has, whoever asks."""
    seen: list[bool] = []

    def ask(function: Any) -> None:
        try:
            function()
        except rpc.RpcError as error:
            seen.append(error.may_have_run)

    def fail() -> None:
        raise ValueError("after it has done something")

    with rpc.Server(ask) as server, rpc.connect(server.address) as session:
        session["ask"](fail)
    assert seen == [True]


def test_a_coroutine_that_is_cancelled_before_it_begins_gives_its_tensor_back(session: rpc.Session) -> None:
    """Another call of the loop was busy meanwhile."""
    x = session.tensor(np.zeros(2, "float32"))
    Gate.is_in.clear()
    Gate.opened.clear()
    blocked = threading.Thread(target=lambda: session["block_the_loop"](lane=1))
    blocked.start()
    try:
        assert Gate.is_in.wait(LIMIT)
        with pytest.raises(TimeoutError):
            session["touch"](x, timeout=0.01, lane=2)
    finally:
        Gate.opened.set()
        blocked.join(LIMIT)
    session["touch"](x, timeout=LIMIT, lane=3)
    assert x.tolist() == [2, 2]


def test_dataclasses_may_contain_themselves(session: rpc.Session) -> None:
    """What is inside is converted, and checked, as what is outside."""
    assert session["second"](Node(1, Node(2))) == 2
    with pytest.raises(rpc.InvalidArgumentError, match="field 'next'"):
        session["second"]({"value": 1, "next": {"value": "no number"}})


def test_packed_values_have_a_limit(session: rpc.Session) -> None:
    """An object of Python is larger than what a peer sends for it."""
    with pytest.raises(rpc.RpcError, match="more than 1048576 values"):
        session["to_list"](Many([None] * (1 << 20)))


def test_workers_may_import_what_clients_may_not() -> None:
    """A registry that a session of Disco has used is unchanged."""
    registry = rpc.Registry(to_list)
    with disco.ThreadedSession(1, functions=registry) as workers:
        workers.import_python_module("served_functions")
        workers.sync_all()
    with rpc.local(registry) as session, pytest.raises(rpc.NotFoundError):
        session["tensor_rpc.import_module"]


def test_words_of_a_peer_do_not_reach_the_terminal_as_they_are() -> None:
    """Control characters are shown, and the message has them."""

    def fail() -> None:
        raise ValueError("a\x1b[2J\rb\n\tc")

    with rpc.local(fail) as session, pytest.raises(rpc.RemoteError) as caught:
        session["fail"]()
    assert caught.value.message == "a\x1b[2J\rb\n\tc"
    assert str(caught.value).startswith("a\\x1b[2J\\x0db\n\tc")


def test_a_copy_is_a_copy() -> None:
    """It is asked for by `copy`, and other devices are refused."""
    with rpc.local(to_list) as session:
        array = session.tensor(np.zeros(2, "float32")).download()
    shared, copied = array.numpy(), np.from_dlpack(array, copy=True)
    shared[0] = 5
    assert (copied[0], array.tolist()) == (0, [5, 0])
    with pytest.raises(BufferError, match="lies on cpu:0"):
        array.__dlpack__(dl_device=(2, 0))


def test_types_and_devices_are_equal_to_their_names() -> None:
    """Also as keys."""
    assert rpc.DataType("float32") == "float32" == rpc.DataType(np.float32)
    assert rpc.DataType("float32") == np.dtype("float32") and rpc.DataType("float32") != "int8"
    assert {"cpu:0": 1, "float32": 2}[rpc.Device("cpu")] == 1  # type: ignore[index]
    assert {"float32": 2}[rpc.DataType("float32")] == 2  # type: ignore[index]

"""Functions that the tests of isolated sessions serve."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import tensor_rpc as rpc
from tensor_rpc import _child

if _child._importing:
    # The connections of a child are out of reach of what it imports.
    assert os.read(0, 1) == b"" and os.path.sameopenfile(1, 2)
    print("an import may print")

state: dict[str, int] = {}


@rpc.function
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@rpc.function
def process() -> int:
    return os.getpid()


@rpc.function
def put(name: str, value: int) -> None:
    state[name] = value


@rpc.function
def get(name: str) -> int | None:
    return state.get(name)


@rpc.function
def leave(code: int) -> None:
    sys.exit(code)


@rpc.function
def end(code: int) -> None:
    os._exit(code)


@rpc.function
def crash() -> None:
    ctypes.string_at(0)


@rpc.function
def abort() -> None:
    os.abort()


@rpc.function
def spin() -> None:
    while True:
        pass


@rpc.function
def eat(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


@rpc.function
async def gather(n: int) -> list[int]:
    import asyncio

    async def one(i: int) -> int:
        await asyncio.sleep(0)
        return i

    return list(await asyncio.gather(*(one(i) for i in range(n))))


def undeclared() -> Any:
    return 1

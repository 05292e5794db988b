"""What the origin of a session under test serves: as the functions of `rpc-conformance` in Rust.

What a clause controls at the origin (gates, counters, journals) are objects of the session, which
it works through functions, because the origin may be several hops away.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tensor_rpc as rpc

LIMIT = 20.0
"""Seconds after which a function that waits gives up."""


class Waitable:
    """A number that can be waited for."""

    def __init__(self) -> None:
        """Begin with 0."""
        self.value = 0
        self._changed = threading.Condition()

    def add(self, by: int) -> int:
        """Add, and return the sum."""
        with self._changed:
            self.value += by
            self._changed.notify_all()
            return self.value

    def reach(self, least: int) -> int:
        """Wait until the number is as large as this."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.value >= least, LIMIT):
                raise LookupError(f"{self.value} is not {least} after {LIMIT} s")
            return self.value


class Counter(Waitable):
    """What the functions that begin with ``counter`` work on."""


NAMED: dict[str, Counter] = {}


class Gate:
    """Holds calls back until it is opened, and counts those that have come to it."""

    def __init__(self) -> None:
        """Begin closed."""
        self.reached = Waitable()
        self.opened = Waitable()


class Journal:
    """Events, in order."""

    def __init__(self) -> None:
        """Begin empty."""
        self.entries: list[int] = []


class Probe:
    """An object whose end is noticed."""

    def __init__(self, dropped: Counter, payload: int) -> None:
        """Count the end with this counter."""
        self.dropped = dropped
        self.payload = payload

    def __del__(self) -> None:
        """Count."""
        self.dropped.add(1)


@dataclasses.dataclass
class Point:
    """A structure that travels packed."""

    at: tuple[float, float]
    label: str
    tags: list[int | None]


class OutOfPaper(Exception):
    """An error of a function."""


def echo(value: Any) -> Any:
    return value


async def echo_async(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


def add(a: int, b: int) -> int:
    return a + b


def narrow(small: int, text: str, flag: bool) -> str:
    return f"{small} {text} {flag}"


def move_point(point: Point, by: float) -> Point:
    return Point((point.at[0] + by, point.at[1]), point.label, point.tags)


def make_adder(by: int) -> Callable[[int], int]:
    def adder(x: int) -> int:
        return x + by

    return adder


def compose(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: second(first(value))


def apply(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def gate_new() -> Any:
    return Gate()


def gate_wait(gate: Gate) -> None:
    gate.reached.add(1)
    gate.opened.reach(1)


async def gate_wait_async(gate: Gate) -> None:
    gate.reached.add(1)
    while not gate.opened.value:
        await asyncio.sleep(0.001)


def gate_open(gate: Gate) -> None:
    gate.opened.add(1)


def gate_reach(gate: Gate, calls: int) -> None:
    gate.reached.reach(calls)


def gate_probes(gate: Gate, dropped: Counter, count: int) -> Any:
    gate_wait(gate)
    return [Probe(dropped, payload) for payload in range(count)]


def gate_hold_object(gate: Gate, probe: Probe) -> int:
    gate_wait(gate)
    return probe.payload


def counter_new() -> Any:
    return Counter()


def counter_named(name: str) -> Any:
    """Return a counter of the process: one that another session can see."""
    return NAMED.setdefault(name, Counter())


def counter_add(counter: Counter, by: int) -> int:
    return counter.add(by)


async def counter_add_async(counter: Counter, by: int) -> int:
    return counter.add(by)


def counter_value(counter: Counter) -> int:
    return counter.value


def counter_reach(counter: Counter, least: int) -> int:
    return counter.reach(least)


def journal_new() -> Any:
    return Journal()


def journal_push(journal: Journal, entry: int) -> None:
    journal.entries.append(entry)


async def journal_push_async(journal: Journal, entry: int) -> None:
    await asyncio.sleep(0)
    journal.entries.append(entry)


def journal_entries(journal: Journal) -> list[int]:
    return list(journal.entries)


def hold(context: rpc.Context, started: Counter, ended: Counter) -> int:
    """Run until nobody waits for the call any more."""
    started.add(1)
    end = time.monotonic() + LIMIT
    while not context.is_cancelled and time.monotonic() < end:
        time.sleep(0.001)
    return ended.add(1)


async def hold_async(context: rpc.Context, started: Counter, ended: Counter) -> int:
    started.add(1)
    try:
        await asyncio.sleep(LIMIT)
    finally:
        ended.add(1)
    return ended.value


def remaining(context: rpc.Context) -> float | None:
    return context.remaining


def probe_new(dropped: Counter, payload: int) -> Any:
    return Probe(dropped, payload)


def probe_many(dropped: Counter, count: int) -> Any:
    return [Probe(dropped, payload) for payload in range(count)]


def probe_payload(probe: Probe) -> int:
    return probe.payload


def probe_same(a: Probe, b: Probe) -> bool:
    return a is b


def fail(message: str) -> int:
    raise OutOfPaper(message)


async def fail_async(message: str) -> int:
    await asyncio.sleep(0)
    raise OutOfPaper(message)


def fail_rpc() -> None:
    raise rpc.UnsupportedError("not on a Sunday")


def fail_holding(x: np.ndarray) -> None:
    x[:] = 1
    raise OutOfPaper("with a tensor in hand")


def tensor_new(context: rpc.Context, elements: int) -> rpc.DenseArray:
    return context.allocate((elements,))


def tensor_sum(x: np.ndarray) -> float:
    return float(x.sum())


def tensor_fill(x: np.ndarray, value: float) -> None:
    x[:] = value


def tensor_add(a: np.ndarray, b: np.ndarray, to: np.ndarray) -> None:
    to[:] = a + b


def tensor_fill_gated(x: np.ndarray, value: float, gate: Gate, journal: Journal) -> None:
    x[: x.size // 2] = value
    gate_wait(gate)
    x[:] = value
    journal.entries.append(1)


def tensor_sum_noted(x: np.ndarray, journal: Journal) -> float:
    journal.entries.append(2)
    return float(x.sum())


def tensor_same(x: rpc.DenseArray) -> rpc.DenseArray:
    return x


def call_nested(context: rpc.Context, name: str, *args: Any) -> Any:
    return context.call(name, *args)


FUNCTIONS: list[Callable[..., Any]] = [
    value
    for value in list(globals().values())
    if callable(value) and not isinstance(value, type) and value.__module__ == __name__
]

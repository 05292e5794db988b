"""Futures of asyncio for operations of a session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from tensor_rpc import _native

T = TypeVar("T")

_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _native.EventLoop] = WeakKeyDictionary()
_loop = asyncio.get_running_loop


class Pending(asyncio.Future[T], Coroutine[Any, Any, T]):
    """An operation of a session that has begun: a future of asyncio.

    It can be awaited any number of times. Cancelling it cancels the operation at the server. Where
    a coroutine is wanted, as by ``asyncio.create_task``, it is one. ``asyncio.wait`` takes no
    coroutines, and so it wants tasks; ``asyncio.gather`` and the others take this as it is.
    """

    _task: _native.Task | None = None
    _steps: Generator[Any, None, T] | None = None

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the operation, unless it is over."""
        cancelled = super().cancel(msg)
        if cancelled and self._task is not None:
            self._task.cancel()
        return cancelled

    def send(self, value: Any) -> Any:
        """Go on as a coroutine."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where a coroutine waits; this cancels the operation."""
        if not self.done():
            self.cancel()
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """Cancel the operation, as a coroutine that is closed."""
        self.cancel()


class Opening(Pending[T], Generic[T]):
    """An operation whose outcome is a context manager: ``async with session.lease(...) as x``."""

    async def __aenter__(self) -> T:
        """Wait for the outcome, and enter it."""
        opened: Any = await self
        entered: T = await opened.__aenter__()
        return entered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the outcome."""
        opened: Any = self.result()
        await opened.__aexit__(kind, error, traceback)


def _begin(operation: _native.Operation[T]) -> Pending[T]:
    loop = _loop()
    pending: Pending[T] = Pending(loop=loop)
    pending._task = _driver(loop).start(operation, pending)
    return pending


def _open(operation: _native.Operation[T]) -> Opening[T]:
    loop = _loop()
    opening: Opening[T] = Opening(loop=loop)
    opening._task = _driver(loop).start(operation, opening)
    return opening


def _driver(loop: asyncio.AbstractEventLoop) -> _native.EventLoop:
    driver = _loops.get(loop)
    if driver is None:
        _forget_closed_loops()
        driver = _loops[loop] = _native.EventLoop()
        loop.add_reader(driver.fileno(), driver.run_ready)
    return driver


def _forget_closed_loops() -> None:
    for loop, driver in list(_loops.items()):
        if loop.is_closed():
            del _loops[loop]
            driver.close()


# The child of a fork has loops of its own: those of the parent share pipes with it.
os.register_at_fork(after_in_child=_loops.clear)

"""Futures of asyncio for operations of a session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from tensor_rpc import _native

T = TypeVar("T")

_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _native.EventLoop] = WeakKeyDictionary()
_loop = asyncio.get_running_loop

_Latest = tuple[ref[asyncio.AbstractEventLoop] | Callable[[], None], _native.EventLoop | None]
_latest: _Latest = (lambda: None, None)
"""The loop that was last used, and its driver: a program mostly has one loop."""


class Pending(asyncio.Future[T], Coroutine[Any, Any, T]):
    """An operation of a session that has begun: a future of asyncio.

    It can be awaited any number of times. Cancelling it cancels the operation at the server. Where
    a coroutine is wanted, as by ``asyncio.create_task``, it is one. ``asyncio.wait`` takes no
    coroutines, and so it wants tasks; ``asyncio.gather`` and the others take this as it is.
    """

    # Without them each operation would have a dictionary.
    __slots__ = ("_steps", "_task")

    _task: _native.Task | None
    _steps: Generator[Any, None, T]

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the operation, unless it is over."""
        cancelled = super().cancel(msg)
        task = getattr(self, "_task", None)
        if cancelled and task is not None:
            task.cancel()
        return cancelled

    def send(self, value: Any) -> Any:
        """Go on as a coroutine."""
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where a coroutine waits; this cancels the operation."""
        if not self.done():
            self.cancel()
        return self._coroutine().throw(*error)

    def close(self) -> None:
        """Cancel the operation, as a coroutine that is closed."""
        self.cancel()

    def _coroutine(self) -> Generator[Any, None, T]:
        try:
            return self._steps
        except AttributeError:
            self._steps = self.__await__()
            return self._steps


class Opening(Pending[T], Generic[T]):
    """An operation whose outcome is a context manager: ``async with session.lease(...) as x``."""

    __slots__ = ()

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
    latest, driver = _latest
    if driver is None or latest() is not loop:
        driver = _driver(loop)
    pending: Pending[T] = Pending(loop=loop)
    pending._task = driver.start(operation, pending)
    return pending


def _call(function: _native.Function, args: tuple[Any, ...], timeout: float | None, lane: int | None) -> Pending[Any]:
    # As `_begin` of the operation, without an object for it.
    loop = _loop()
    latest, driver = _latest
    if driver is None or latest() is not loop:
        driver = _driver(loop)
    pending: Pending[Any] = Pending(loop=loop)
    pending._task = driver.call(function, args, timeout, lane, pending)
    return pending


def _open(operation: _native.Operation[T]) -> Opening[T]:
    loop = _loop()
    opening: Opening[T] = Opening(loop=loop)
    opening._task = _driver(loop).start(operation, opening)
    return opening


def _driver(loop: asyncio.AbstractEventLoop) -> _native.EventLoop:
    global _latest
    driver = _loops.get(loop)
    if driver is None:
        _forget_closed_loops()
        driver = _loops[loop] = _native.EventLoop()
        loop.add_reader(driver.fileno(), driver.run_ready)
    _latest = (ref(loop, _forget_latest), driver)
    return driver


def _forget_latest(gone: object) -> None:
    global _latest
    # As the interpreter ends, it is None.
    if _latest and _latest[0] is gone:
        _latest = (lambda: None, None)


def _forget_closed_loops() -> None:
    for loop, driver in list(_loops.items()):
        if loop.is_closed():
            if _latest[1] is driver:
                _forget_latest(_latest[0])
            del _loops[loop]
            driver.close()


def _forget_all() -> None:
    global _latest
    _latest = (lambda: None, None)
    _loops.clear()


# The child of a fork has loops of its own: those of the parent share pipes with it.
os.register_at_fork(after_in_child=_forget_all)

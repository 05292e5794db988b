"""Servers that an event loop of asyncio starts and stops: `tensor_rpc.aio.Server`."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Sequence
from typing import Any

from tensor_rpc import _child
from tensor_rpc._aio import _begin
from tensor_rpc._functions import Registry
from tensor_rpc._server import BaseServer


class Server(BaseServer):
    """A server of functions, as `tensor_rpc.Server`, for programs that have an event loop.

    It serves on threads of the package, whatever the event loop does; functions that are
    coroutines run on a loop of their own. It may be used by one event loop.

    Parameters
    ----------
    *functions, listen, **settings
        As for `tensor_rpc.Server`.

    Examples
    --------
    >>> import asyncio
    >>> import tensor_rpc as rpc
    >>> def add(a: int, b: int) -> int:
    ...     return a + b
    >>> async def main() -> int:
    ...     async with rpc.aio.Server(add) as server, rpc.aio.connect(server.address) as session:
    ...         return await session.call("add", 1, 2)
    >>> asyncio.run(main())
    3
    """

    def __init__(
        self,
        *functions: Callable[..., Any] | types.ModuleType | Registry,
        listen: str | Sequence[str] = "tcp://127.0.0.1:0",
        **settings: Any,
    ) -> None:
        """Check the settings; nothing is started yet."""
        super().__init__(*functions, listen=listen, **settings)
        self._ended = asyncio.Event()

    async def start(self) -> Server:
        """Start to serve in the background, on threads of the package.

        A start that is cancelled leaves no address taken, and may be repeated.

        Returns
        -------
        Server
            This one. All its addresses are listened on.

        Raises
        ------
        RemoteIOError
            An address cannot be listened on, or a file not be used.
        TypeError
            With ``isolate="process"``: a function cannot be imported by the processes of sessions.
        RuntimeError
            They have failed to import the functions; this process is one of them; or another task
            has stopped the server meanwhile.
        """
        if not await self._start():
            raise RuntimeError("the server has been stopped")
        return self

    async def _start(self) -> bool:
        _child.refuse_while_importing()
        self._native.begin_start()
        try:
            words = None
            if self._has_processes:
                # A process that imports the functions is waited for.
                words = await asyncio.to_thread(_child.set_up, self._registry)
            return await _begin(self._native.start_op(words))
        except BaseException as error:
            # Also if it is complete, and the cancellation was there before this task went on.
            given_up = self._native.give_up_start_op()
            if isinstance(error, asyncio.CancelledError):
                await _begin(given_up)
            raise

    async def stop(self) -> None:
        """End all sessions, and stop. A function that runs goes on, and its result is dropped.

        It goes on if the wait for it is cancelled. A start in progress is given up. A server that
        was not started can still be.
        """
        try:
            await _begin(self._native.stop_op())
        finally:
            if self._native.is_stopped:
                self._ended.set()

    async def drain(self) -> None:
        """Refuse new sessions, wait for the open ones (``drain_timeout``), and stop.

        It goes on if the wait for it is cancelled; `stop` then ends what is left.
        """
        draining = _begin(self._native.drain_op())
        draining.add_done_callback(lambda _: self._ended.set())
        await asyncio.shield(draining)

    async def serve(self, *, announce: bool = True) -> None:
        """Serve until another task stops or drains the server, or this is cancelled, which stops it.

        Signals are the program's own: ``loop.add_signal_handler`` can drain the server.

        Parameters
        ----------
        announce : bool
            Print ``listening on ADDRESS`` for each address.
        """
        if not self.is_running and not await self._start():
            return
        try:
            if announce:
                self._announce()
            await self._ended.wait()
        finally:
            await self.stop()

    async def __aenter__(self) -> Server:
        """Start to serve, unless the server serves already."""
        return self if self.is_running else await self.start()

    async def __aexit__(self, *error: object) -> None:
        """Stop."""
        await self.stop()


__all__ = ["Server"]

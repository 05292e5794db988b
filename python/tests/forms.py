"""Test bodies that run over both forms of the package: blocking and asyncio.

A body is a generator function. It yields what an operation returns, and gets the outcome: with the
blocking form that is the same object, with the asyncio form it is awaited. So an operation that
fails raises where the body calls or yields it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import tensor_rpc as rpc

Body = Callable[[Any], Generator[Any, Any, None]]

TIME_LIMIT = 30.0
"""Seconds after which a test has hung."""


@dataclass(frozen=True)
class Form:
    """One form of the package, and the address of the server that its sessions go to."""

    name: str
    connect: Callable[[], Any]

    @property
    def module(self) -> ModuleType:
        """The module with the classes of this form."""
        return rpc.aio if self.name == "aio" else rpc

    def run(self, body: Body) -> None:
        """Run a body with a session, which is closed behind it."""
        if self.name == "aio":
            asyncio.run(asyncio.wait_for(self._run_async(body), TIME_LIMIT))
            return
        with self.connect() as session:
            steps = body(session)
            value: Any = None
            try:
                while True:
                    value = steps.send(value)
            except StopIteration:
                pass

    async def _run_async(self, body: Body) -> None:
        async with self.connect() as session:
            steps = body(session)
            value: Any = None
            raised: BaseException | None = None
            try:
                while True:
                    yielded = steps.send(value) if raised is None else steps.throw(raised)
                    raised = value = None
                    try:
                        value = await yielded if inspect.isawaitable(yielded) else yielded
                    except Exception as error:
                        raised = error
            except StopIteration:
                pass

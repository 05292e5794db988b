"""Disco for asyncio: `Session.aio`, and `tensor_rpc.disco.start`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensor_rpc import _disco_start, _native
from tensor_rpc._aio import Pending, _begin
from tensor_rpc._native import Mesh
from tensor_rpc._types import RunResult

if TYPE_CHECKING:
    from tensor_rpc._functions import Registry
    from tensor_rpc.disco import DRef, Session

S = TypeVar("S", bound="Session")


class AsyncSession:
    """Awaitable operations of a session of Disco: `Session.aio`.

    Its methods are those of the session with the same names, and return a `Pending`, a future of
    the event loop that runs. Each is issued when it is called, behind the commands so far.
    Cancelling the future ends the wait, and the programs of `run_all`; workers execute what was
    issued in any case.
    """

    def __init__(self, session: Session) -> None:
        """Use `Session.aio` instead."""
        self._session = session
        self._native = session._native_session

    def init_ccl(self, ccl: str = "host", *device_ids: int) -> Pending[None]:
        """Make the collectives, and wait until all workers have met; see `Session.init_ccl`."""
        return _begin(self._native.init_ccl_op(ccl, list(device_ids)))

    def reinit_ccl(self) -> Pending[None]:
        """Make the collectives anew, whether they have broken or not."""
        return _begin(self._native.reinit_ccl_op())

    def mesh(self, **axes: int) -> Pending[Mesh]:
        """Arrange all workers as a grid with named axes; see `Session.mesh`."""
        return _begin(self._native.mesh_op(axes))

    def copy_from_worker_0(self, host_array: Any, remote_array: DRef | None = None) -> Pending[Any]:
        """Copy the tensor of worker 0 here; see `Session.copy_from_worker_0`."""
        from tensor_rpc.disco import _filled

        remote = host_array if remote_array is None else remote_array
        target = None if remote_array is None else host_array
        return _begin(self._native.copy_from_worker_0_op(remote).then(lambda copied: _filled(target, copied)))

    def debug_get_from_remote(self, ref: DRef, worker_id: int) -> Pending[Any]:
        """Copy the value of one worker here; see `DRef.debug_get_from_remote`."""
        from tensor_rpc.disco import _array

        return _begin(self._native.get_register_op(ref, worker_id).then(_array))

    def sync_worker_0(self) -> Pending[None]:
        """Wait until worker 0 has executed everything."""
        return self.sync_worker(0)

    def sync_worker(self, worker_id: int) -> Pending[None]:
        """Wait until a worker has executed everything that was issued before.

        Raises
        ------
        WorkersError
            Commands have failed there since the last time.
        """
        return _begin(self._native.sync_op(worker_id))

    def sync_all(self) -> Pending[None]:
        """Wait until all workers have executed everything."""
        return _begin(self._native.sync_op(None))

    def room(self) -> Pending[None]:
        """Wait until the next command can be issued without waiting.

        Commands block the thread that issues them while the workers are behind by a whole window
        (``window=``, 16 MiB by default). A loop that issues faster than they execute awaits this
        first.
        """
        return _begin(self._native.room_op())

    def run_all(
        self,
        program: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        time_limit: float | None = None,
        output_limit: int | None = None,
        on_line: Callable[[int, str, bytes], object] | None = None,
    ) -> Pending[list[RunResult]]:
        """Run a program once for each worker, to the end of all; see `Session.run_all`.

        Cancelling it ends the programs. `on_line` is called on a thread of its own.
        """
        return _begin(self._session._run_all_op(program, args, env, time_limit, output_limit, on_line))

    def shutdown(self) -> Pending[None]:
        """Let the workers finish what was issued, and end the session."""
        return _begin(self._native.shutdown_op())


class Starting(Generic[S]):
    """A session of Disco that starts when it is awaited, or entered by ``async with``, once."""

    def __init__(self, steps: _disco_start.Steps, make: Callable[[_native.DiscoSession, Registry | None], S]) -> None:
        """Use `tensor_rpc.disco.start` instead."""
        self._steps: _disco_start.Steps | None = steps
        self._make = make
        self._session: S | None = None

    def __await__(self) -> Generator[Any, None, S]:
        """Start the session, and return it."""
        return self._start().__await__()

    async def _start(self) -> S:
        steps, self._steps = self._steps, None
        if steps is None:
            raise RuntimeError("a session of Disco is started once: keep what the first await returned")
        outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                return self._make(*end.value)
            outcome = await (_begin(step) if isinstance(step, _native.Operation) else asyncio.to_thread(step))

    async def __aenter__(self) -> S:
        """Start the session, and return it."""
        self._session = await self
        return self._session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the workers down; see `Session`."""
        if self._session is not None:
            await self._session.__aexit__(kind, error, traceback)

"""Disco: one controller drives many workers.

The names and their meaning are those of ``tvm.runtime.disco``; where something differs, the
docstring says so. Commands return at once, and the workers execute them in the order in which they
were issued. What fails on a worker is raised by the next ``sync_…``, ``copy_from_worker_0`` or
``debug_get_from_remote``, with the worker and the command; the session goes on.

>>> import numpy as np
>>> from tensor_rpc import disco
>>> with disco.ThreadedSession(num_workers=4) as session:
...     session.init_ccl("host")
...     x = session.broadcast(np.ones(2, "float32"))
...     y = session.allreduce(x, op="sum")
...     print(session.copy_from_worker_0(y))
[4. 4.]
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tensor_rpc import _arrays, _disco_start, _native
from tensor_rpc._disco_program import Program
from tensor_rpc._disco_start import install
from tensor_rpc._disco_weights import ShardLoader, TensorInfo, Unreadable
from tensor_rpc._errors import RpcError
from tensor_rpc._functions import Registry
from tensor_rpc._native import Group, Mesh, Part, Recorded, WeightReader, WorkerContext
from tensor_rpc._types import RunResult

if TYPE_CHECKING:
    from tensor_rpc._aio_disco import AsyncSession, Starting

P = ParamSpec("P")
S = TypeVar("S", bound="Session")

__all__ = [
    "CclState",
    "DModule",
    "DPackedFunc",
    "DRef",
    "Failure",
    "Group",
    "Mesh",
    "Part",
    "ProcessSession",
    "Program",
    "Recorded",
    "Session",
    "ShardLoader",
    "SocketSession",
    "TensorInfo",
    "ThreadedSession",
    "Unreadable",
    "WeightReader",
    "WorkerContext",
    "WorkersError",
    "from_tracker",
    "install",
    "over",
    "servers",
    "start",
]


@dataclass(frozen=True)
class Failure:
    """A command that failed on a worker.

    Attributes
    ----------
    worker : int
        Number of the worker.
    sequence : int
        Number of the command in its session, from 1.
    command : str
        Name of the function, or of the operation.
    cause : RpcError
        Why it failed.
    """

    worker: int
    sequence: int
    command: str
    cause: RpcError


@dataclass(frozen=True)
class CclState:
    """State of a session's collectives, as far as the controller knows.

    Attributes
    ----------
    name : str
        ``running``; ``broken``, when they raise the cause, and all other commands run;
        ``reinitialising``, while they are made anew; ``ended`` with the session.
    cause : RpcError or None
        Why they are broken, and the call that each worker was in; or why the session has ended.
    culprit : int or None
        The worker that died, fell silent or never came; None if no worker is at fault.
    noticed_by : list of int
        The workers that have found them broken so far.
    """

    name: str
    cause: BaseException | None
    culprit: int | None
    noticed_by: list[int]


class WorkersError(RpcError):
    """Commands failed on workers. The session lives; the values that they should have made do not.

    Attributes
    ----------
    failures : list of Failure
        All of them, by worker.
    """

    failures: list[Failure]


def _workers_error(error: RpcError, failures: list[tuple[int, int, str, RpcError]]) -> WorkersError:
    """Return the exception for failures of workers. The native part calls this."""
    made = WorkersError(*error.args)
    made.__dict__.update(error.__dict__)
    made.failures = [Failure(*failure) for failure in failures]
    return made


class DRef(_native.DiscoRef):
    """A value that each worker has, each its own.

    When the last reference is gone the values are freed, behind all commands that use them.
    """

    session: Session

    def __new__(cls, native: _native.DiscoRef, session: Session) -> DRef:
        """Wrap a native reference; commands of a session return them."""
        self = super().__new__(cls, native)
        self.session = session
        return self

    def debug_get_from_remote(self, worker_id: int) -> Any:
        """Copy the value of one worker here, once it has executed all that was issued before.

        Returns
        -------
        object
            A value, or an array of numpy (without numpy: a `DenseArray`).
        """
        return _array(self.session._native_session.get_register_op(self, worker_id).wait())

    def debug_copy_from(self, worker_id: int, value: Any) -> None:
        """Set the value of one worker: an array, or a plain value.

        An array that meets one of the same type and shape is copied into it.
        """
        self.session._native_session.set_register(self, worker_id, value)

    def __repr__(self) -> str:
        """Return the number of the value."""
        return f"<{type(self).__name__} {self.reg_id} of Disco>"


class DPackedFunc(DRef):
    """A function that each worker has."""

    def __call__(self, *args: Any) -> DRef:
        """Call the function on all workers, and return the results without waiting for them.

        Parameters
        ----------
        *args
            Values, `DRef`, and arrays of up to 64 KiB. TVM's takes no arrays.
        """
        return self.session.call_packed(self, *args)


class DModule(DRef):
    """A module that each worker has."""

    def __getitem__(self, name: str) -> DPackedFunc:
        """Return the function `name` of the module on each worker."""
        session = self.session
        return DPackedFunc(session._native_session.module_function(self, name), session)


def _print_line(worker: int, stream: str, line: bytes) -> None:
    """Print a line of a worker's program; a stream that is closed loses it."""
    with contextlib.suppress(OSError):
        print(f"[{worker}] {line.decode(errors='replace')}", file=getattr(sys, stream), flush=True)


def _array(value: Any) -> Any:
    if not isinstance(value, _native.DenseArray):
        return value
    try:
        return _arrays.to_numpy(value)
    except ImportError:
        return value


def _filled(target: Any, copied: Any) -> Any:
    """Return the array that was copied, or the given one with its elements."""
    copied = _array(copied)
    if target is None:
        return copied
    target[...] = copied
    return target


class Session:
    """A controller and its workers: what the constructors of this module return.

    As a context manager it shuts the workers down. Any number of threads may issue commands.

    The `in_group` of an operation is about the workers of each of the session's own groups, and not
    about all workers; or about those along an axis, as ``mesh.group("tp")`` gives it.
    """

    _native_session: _native.DiscoSession

    def __init__(self, native: _native.DiscoSession, registry: Registry | None = None) -> None:
        """Wrap a native session; use the constructors of this module instead."""
        self._native_session = native
        # Functions of workers in this process.
        self._registry = registry
        self._import: DPackedFunc | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._native_session.num_workers

    @property
    def num_groups(self) -> int:
        """Number of groups of equal size that the workers are in."""
        return self._native_session.num_groups

    def _ref(self, native: _native.DiscoRef, to: DRef | None = None) -> DRef:
        return DRef(native, self) if to is None else to

    def empty(
        self,
        shape: Sequence[int],
        dtype: Any = "float32",
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool | Group = True,
    ) -> DRef:
        """Allocate a tensor on every worker; it is zeroed.

        Parameters
        ----------
        shape : sequence of int
            Dimensions.
        dtype : data type
            Type of the elements.
        device : Device or str, optional
            The default device of each worker, unless given.
        worker0_only : bool
            Only on the first worker of each group, or with ``in_group=False`` on worker 0 alone;
            the others have `None`.
        """
        device = None if device is None else str(device if isinstance(device, str) else _native.Device(device))
        native = self._native_session.empty(list(shape), dtype, device, worker0_only, in_group)
        return DRef(native, self)

    def get_global_func(self, name: str) -> DPackedFunc:
        """Look up the function that is registered as `name` on every worker."""
        return DPackedFunc(self._native_session.function(name), self)

    def call_packed(self, func: DRef, *args: Any) -> DRef:
        """Call a function on all workers; see `DPackedFunc.__call__`."""
        return DRef(self._native_session.call(func, args), self)

    def import_python_module(self, module_name: str) -> None:
        """Import a module of Python on each worker, and register its functions there.

        Those are the ones that ``@tensor_rpc.function`` marks. Workers must be processes of
        Python, or threads of this one.
        """
        if self._import is None:
            self._import = self.get_global_func("tensor_rpc.import_module")
        self._import(module_name)

    def load_vm_module(self, path: str | os.PathLike[str], device: Any = None) -> DModule:
        """Load a module on each worker: on `device`, or on each one's default device."""
        return DModule(self._native_session.module(os.fspath(path), device), self)

    def init_ccl(self, ccl: str = "host", *device_ids: int) -> None:
        """Make the collectives, and wait until all workers have met.

        Parameters
        ----------
        ccl : str
            ``host`` (tensors in host memory; TVM has no such), ``nccl`` or ``mpi``.
        *device_ids : int
            Device of each worker; with none, each has its own number.
        """
        self._native_session.init_ccl_op(ccl, list(device_ids)).wait()

    def reinit_ccl(self) -> None:
        """Make the collectives anew, whether they have broken or not."""
        self._native_session.reinit_ccl_op().wait()

    def mesh(self, **axes: int) -> Mesh:
        """Arrange all workers as a grid with named axes, whose groups operations take as `in_group`.

        The collectives are made anew for that, and it waits until all workers have met. Functions on
        workers find an axis by ``WorkerContext.axis``. TVM has no such.

        Parameters
        ----------
        **axes : int
            Size of each axis; they multiply to the number of workers, which have their numbers in
            row-major order.

        Examples
        --------
        >>> session = ThreadedSession(4)
        >>> mesh = session.mesh(dp=2, tp=2)
        >>> x = session.scatter(np.arange(2, dtype="float32"), in_group=mesh.group("tp"))
        >>> total = session.allreduce(x, in_group=mesh.group("dp"))
        >>> [float(total.debug_get_from_remote(worker)) for worker in range(4)]
        [0.0, 2.0, 0.0, 2.0]
        >>> session.shutdown()
        """
        return self._native_session.mesh_op(axes).wait()

    def broadcast(self, src: Any, dst: DRef | None = None, in_group: bool | Group = True) -> DRef:
        """Give every worker a copy of an array of the controller.

        The array may be changed at once: its content is taken before this returns.

        Returns
        -------
        DRef
            `dst`, or a new tensor on every worker.
        """
        return self._ref(self._native_session.send("broadcast", src, dst, in_group), dst)

    def broadcast_from_worker0(self, src: DRef, dst: DRef, in_group: bool | Group = True) -> DRef:
        """Copy the tensor of worker 0 (or of the first worker of each group) to the others."""
        return self._ref(self._native_session.collective("broadcast", src, dst, "sum", in_group), dst)

    def scatter(self, src: Any, dst: DRef | None = None, in_group: bool | Group = True) -> DRef:
        """Give each worker its part of an array of the controller.

        The first dimension of `src` is the number of workers (of a group, with `in_group`).
        """
        return self._ref(self._native_session.send("scatter", src, dst, in_group), dst)

    def scatter_from_worker0(self, from_array: DRef, to_array: DRef, in_group: bool | Group = True) -> DRef:
        """Give each worker its part of the tensor of worker 0."""
        native = self._native_session.collective("scatter", from_array, to_array, "sum", in_group)
        return self._ref(native, to_array)

    def gather_to_worker0(self, from_array: DRef, to_array: DRef, in_group: bool | Group = True) -> DRef:
        """Collect the tensors of all workers in that of worker 0, one behind the other."""
        native = self._native_session.collective("gather", from_array, to_array, "sum", in_group)
        return self._ref(native, to_array)

    def allreduce(self, src: DRef, dst: DRef | None = None, op: str = "sum", in_group: bool | Group = True) -> DRef:
        """Reduce the tensors of all workers, element by element.

        Parameters
        ----------
        src : DRef
            A tensor of the same shape on each worker.
        dst : DRef, optional
            What gets the result, which may be `src`; a new tensor by default.
        op : str
            ``sum``, ``prod``, ``min``, ``max`` or ``avg``.
        """
        return self._ref(self._native_session.collective("allreduce", src, dst, op, in_group), dst)

    def allgather(self, src: DRef, dst: DRef | None = None, in_group: bool | Group = True) -> DRef:
        """Give every worker the tensors of all, one behind the other."""
        return self._ref(self._native_session.collective("allgather", src, dst, "sum", in_group), dst)

    def reduce_scatter(
        self, src: DRef, dst: DRef | None = None, op: str = "sum", in_group: bool | Group = True
    ) -> DRef:
        """Reduce the tensors of all workers, and give each worker its part of the result."""
        return self._ref(self._native_session.collective("reduce_scatter", src, dst, op, in_group), dst)

    def all_to_all(self, src: DRef, dst: DRef | None = None, in_group: bool | Group = True) -> DRef:
        """Give the part number j of the tensor of worker i to worker j, as its part i."""
        return self._ref(self._native_session.collective("all_to_all", src, dst, "sum", in_group), dst)

    def barrier(self, in_group: bool | Group = True) -> None:
        """Let no worker go on before all have come here."""
        self._native_session.barrier(in_group)

    def send_recv(self, src: DRef, dst: DRef, pairs: Sequence[tuple[int, int]]) -> None:
        """Send the tensor `src` of the first worker of each pair to the tensor `dst` of the second.

        One pair after the other. A `dst` that no pair receives into stays as it is. TVM has no such.

        Raises
        ------
        InvalidArgumentError
            A pair of workers that there are not, or of one with itself.
        """
        self._native_session.send_recv(src, dst, list(pairs))

    def ccl_state(self) -> CclState:
        """Return whether the collectives work, and what has broken them. It never waits."""
        return CclState(*self._native_session.ccl_state())

    def abort_ccl(self, reason: str) -> None:
        """Break the collectives: those that workers are in, and all later ones, fail.

        It passes all commands that wait, and never waits itself. `reinit_ccl` makes them anew.

        Parameters
        ----------
        reason : str
            What the failures say.
        """
        self._native_session.abort_ccl(reason)

    def copy_from_worker_0(self, host_array: Any, remote_array: DRef | None = None) -> Any:
        """Copy the tensor of worker 0 here.

        Called with two arguments as TVM's, it fills `host_array`, which is one of numpy. Called
        with the remote tensor alone, it returns a new array.
        """
        remote = host_array if remote_array is None else remote_array
        copied = self._native_session.copy_from_worker_0_op(remote).wait()
        return _filled(None if remote_array is None else host_array, copied)

    def copy_to_worker_0(self, host_array: Any, remote_array: DRef | None = None) -> DRef:
        """Copy an array of the controller to worker 0: into `remote_array`, or into a new tensor.

        The other workers have `None` in the latter case.
        """
        return self._ref(self._native_session.send("copy", host_array, remote_array, True), remote_array)

    def sync_worker_0(self) -> None:
        """Wait until worker 0 has executed everything."""
        self.sync_worker(0)

    def sync_worker(self, worker_id: int) -> None:
        """Wait until a worker has executed everything that was issued before.

        Raises
        ------
        WorkersError
            Commands have failed there since the last time.
        """
        self._native_session.sync_op(worker_id).wait()

    _sync_worker = sync_worker  # Its name in TVM.

    def sync_all(self) -> None:
        """Wait until all workers have executed everything. TVM has no such."""
        self._native_session.sync_op(None).wait()

    def record(self) -> Program:
        """Record a program: commands that the workers keep, and run as often as one likes.

        A run is one small command, whatever the number of steps. TVM has no such.

        Returns
        -------
        Program
            A context manager, whose methods record the steps.

        Examples
        --------
        >>> session = ThreadedSession(2)
        >>> with session.record() as program:
        ...     x = program.tensor_parameter("float32")
        ...     program.returns(program.allreduce(x))
        >>> for value in ([1.0], [2.0]):
        ...     (total,) = program.run(session.broadcast(np.array(value, "float32")))
        ...     print(session.copy_from_worker_0(total))
        [2.]
        [4.]
        >>> session.shutdown()
        """
        return Program(self)

    def run_all(
        self,
        program: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        time_limit: float | None = None,
        output_limit: int | None = None,
        on_line: Callable[[int, str, bytes], object] | None = None,
    ) -> list[RunResult]:
        """Run a program once for each worker, in the workspaces of their nodes, to the end of all.

        Each program has the variables ``RANK`` and ``WORLD_SIZE``, its worker's number and the
        number of all workers, and ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, the same within its node.
        The workers of one node share its workspace. All programs end with the first error, and with
        Ctrl-C. TVM has no such.

        Each program takes a thread of its node's session, beside that of its worker: a node needs
        ``--max-threads`` of twice its workers, or programs that wait for each other may wait for
        ever.

        Parameters
        ----------
        program : str
            A name that is looked up at the nodes, or a path relative to the workspace.
        *args : str
            Its arguments.
        env : mapping, optional
            Further variables of its environment, as far as the operators of the nodes allow them.
        time_limit : float, optional
            Seconds after which a node ends its programs.
        output_limit : int, optional
            Bytes of output after which a node ends a program; no limit by default.
        on_line : function of int, str and bytes, optional
            Called with the worker, ``stdout`` or ``stderr``, and a line without its end; lines of
            more than 64 KiB come in pieces. It is called on a thread of its own, and while it runs
            the programs wait in their pipes. What it raises ends the programs, and is raised here.
            By default lines are printed to the same stream of this program, with the worker's
            number in brackets in front.

        Returns
        -------
        list of RunResult
            Exit codes or signals, by worker, without the output.

        Raises
        ------
        RefusedError
            A node runs no programs, or not this one.
        InvalidArgumentError
            Workers are threads or child processes of this program, or are behind other nodes.
        NotFoundError
            There is no such program.

        Examples
        --------
        >>> for result in session.run_all("python3", "train.py"):  # doctest: +SKIP
        ...     result.check()
        """
        return self._run_all_op(program, args, env, time_limit, output_limit, on_line).wait()

    def _run_all_op(
        self,
        program: str,
        args: Sequence[str],
        env: Mapping[str, str] | None,
        time_limit: float | None,
        output_limit: int | None,
        on_line: Callable[[int, str, bytes], object] | None,
    ) -> _native.Operation[list[RunResult]]:
        variables = [] if env is None else list(env.items())
        line = _print_line if on_line is None else on_line
        operation = _native.run_all_op(
            self._native_session, program, list(args), variables, line, time_limit, output_limit
        )
        return operation.then(lambda results: [RunResult(*facts) for facts in results])

    @property
    def aio(self) -> AsyncSession:
        """Awaitable operations of this session: ``await session.aio.sync_all()``.

        Commands, which return at once, have one form. As a context manager, ``async with session``
        awaits the shutdown.
        """
        from tensor_rpc._aio_disco import AsyncSession

        return AsyncSession(self)

    def shutdown(self) -> None:
        """Let the workers finish what was issued, and end the session."""
        self._native_session.shutdown_op().wait()

    def __enter__(self) -> Session:
        """Return the session."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the workers down; what fails then does not hide an exception that is raised."""
        try:
            self.shutdown()
        except RpcError:
            if kind is None:
                raise

    async def __aenter__(self) -> Session:
        """Return the session."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the workers down; what fails then does not hide an exception that is raised."""
        try:
            await self.aio.shutdown()
        except RpcError:
            if kind is None:
                raise

    def __repr__(self) -> str:
        """Return the number of workers."""
        return f"<session of Disco with {self.num_workers} workers>"


class ThreadedSession(Session):
    """A session whose workers are threads of this process.

    Python code of the workers takes turns, and native code runs side by side: for tests, and for
    programs whose work is native.
    """

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        *,
        functions: Sequence[Callable[..., Any]] | Registry = (),
        **settings: Any,
    ) -> None:
        """Start the workers.

        Parameters
        ----------
        num_workers : int
            Number of workers.
        num_groups : int
            Number of groups of equal size that they are in.
        functions : sequence of functions or Registry
            Functions of the workers, beside those of modules that they import.
        **settings
            `window` (bytes), `keep_alive`, `collective_timeout`, `stall_timeout`, `init_timeout`,
            `direct_timeout`, `shutdown_timeout` (seconds), `pin_workers`, `hosting`,
            `data_addresses` (IP address of each node), `allow_controller_relay`.
        """
        super().__init__(
            *_disco_start.wait(_disco_start.threads(num_workers, num_groups, functions=functions, **settings))
        )


class ProcessSession(Session):
    """A session whose workers are child processes, each an interpreter of its own.

    A script that starts one must do so under ``if __name__ == "__main__":``, as with
    multiprocessing: the workers import it to find its functions.
    """

    def __init__(
        self,
        num_workers: int,
        num_groups: int = 1,
        entrypoint: Sequence[str] | None = None,
        *,
        functions: Sequence[Callable[..., Any]] = (),
        **settings: Any,
    ) -> None:
        """Start the workers.

        Parameters
        ----------
        num_workers, num_groups, **settings
            As for `ThreadedSession`.
        entrypoint : sequence of str, optional
            Another program as worker, with its arguments, such as a native one. TVM's takes the
            name of a module of Python.
        functions : sequence of functions
            Functions of the workers, which they must be able to import: not lambdas, functions in
            functions, or those of a notebook.
        """
        steps = _disco_start.processes(num_workers, num_groups, entrypoint, functions=functions, **settings)
        super().__init__(*_disco_start.wait(steps))


class SocketSession(Session):
    """A session whose workers are at nodes: this process, and others that dial it.

    As in TVM, this process is the first node. Start ``rpc-server worker --controller HOST:PORT`` on
    each of the others.
    """

    def __init__(
        self,
        num_nodes: int,
        num_workers_per_node: int,
        num_groups: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        join_timeout: float | None = None,
        on_listen: Callable[[str], None] | None = None,
        controller_is_node: bool = True,
        functions: Sequence[Callable[..., Any]] | Registry = (),
        **settings: Any,
    ) -> None:
        """Wait until all other nodes have dialled in, and start the workers.

        Parameters
        ----------
        num_nodes, num_workers_per_node, num_groups : int
            Number of nodes, of workers of each, and of groups over all. This process is one of the
            nodes.
        host, port : str, int
            Where to listen. An address that other machines reach is also where the data of the
            workers of this process goes.
        join_timeout : float, optional
            Seconds to wait for the nodes: 60 by default.
        on_listen : function of str, optional
            Called with the address that nodes dial, as soon as they can.
        controller_is_node : bool
            False if all nodes dial in, and this process has no workers.
        functions : sequence of functions or Registry
            Functions of the workers of this process, which are threads here (those of TVM are
            processes).
        **settings
            As for `ThreadedSession`. `data_addresses` has that of this process first.
        """
        steps = _disco_start.nodes(
            num_nodes,
            num_workers_per_node,
            num_groups,
            host,
            port,
            join_timeout=join_timeout,
            on_listen=on_listen,
            controller_is_node=controller_is_node,
            functions=functions,
            **settings,
        )
        super().__init__(*_disco_start.wait(steps))


def servers(
    addresses: Sequence[str],
    workers_per_server: int = 1,
    num_groups: int = 1,
    *,
    connect: dict[str, Any] | None = None,
    **settings: Any,
) -> Session:
    """Start workers at the servers of these addresses. TVM has no such.

    Parameters
    ----------
    addresses : sequence of str
        Addresses of servers.
    workers_per_server, num_groups : int
        Number of workers of each server, and of groups over all.
    connect : dict, optional
        Options as of `tensor_rpc.connect`, such as ``{"token_file": "tokens"}``.
    **settings
        As for `ThreadedSession`.
    """
    steps = _disco_start.servers(addresses, workers_per_server, num_groups, connect=connect, **settings)
    return Session(*_disco_start.wait(steps))


def from_tracker(
    tracker: str,
    key: str,
    count: int,
    workers_per_server: int = 1,
    num_groups: int = 1,
    *,
    connect: dict[str, Any] | None = None,
    **settings: Any,
) -> Session:
    """Start workers at `count` servers that a tracker hands out; they are given back at the end.

    The other parameters are those of `servers`. TVM has no such.
    """
    steps = _disco_start.from_tracker(tracker, key, count, workers_per_server, num_groups, connect=connect, **settings)
    return Session(*_disco_start.wait(steps))


def over(
    sessions: Sequence[_native.Session],
    workers_per_session: int = 1,
    num_groups: int = 1,
    **settings: Any,
) -> Session:
    """Start workers at the far ends of any sessions, such as ones behind hops. TVM has no such.

    Sessions of `tensor_rpc.aio` are as good as others.
    """
    return Session(*_disco_start.wait(_disco_start.over(sessions, workers_per_session, num_groups, **settings)))


def start(constructor: Callable[P, S], *args: P.args, **kwargs: P.kwargs) -> Starting[S]:
    """Start a session from an event loop of asyncio, which runs meanwhile.

    If it is cancelled, the start goes on in the background, and its workers end once it is complete.

    Parameters
    ----------
    constructor
        `ThreadedSession`, `ProcessSession`, `SocketSession`, `servers`, `from_tracker` or `over`.
    *args, **kwargs
        Those of the constructor.

    Returns
    -------
    Starting
        What is awaited, or entered by ``async with``, which awaits the shutdown behind it.

    Examples
    --------
    >>> import asyncio
    >>> async def main() -> None:
    ...     async with start(ThreadedSession, 4) as session:
    ...         await session.aio.init_ccl("host")
    ...         x = session.broadcast(np.ones(2, "float32"))
    ...         print(await session.aio.copy_from_worker_0(session.allreduce(x)))
    >>> asyncio.run(main())
    [4. 4.]
    """
    from tensor_rpc._aio_disco import Starting

    steps: Any = _STEPS.get(constructor)
    if steps is None:
        raise TypeError(f"{constructor!r} is no constructor of sessions of Disco")

    def make(native: _native.DiscoSession, registry: Registry | None) -> S:
        kind: Any = constructor if isinstance(constructor, type) else Session
        session: S = kind.__new__(kind)
        Session.__init__(session, native, registry)
        return session

    return Starting(steps(*args, **kwargs), make)


_STEPS: dict[Any, Callable[..., _disco_start.Steps]] = {
    ThreadedSession: _disco_start.threads,
    ProcessSession: _disco_start.processes,
    SocketSession: _disco_start.nodes,
    servers: _disco_start.servers,
    from_tracker: _disco_start.from_tracker,
    over: _disco_start.over,
}

"""Programs that the workers of Disco keep, and run by one command."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensor_rpc import _native
from tensor_rpc._native import DataType, Device, Group, Recorded
from tensor_rpc._types import Shape

# Names of types alone: a session makes programs, and what they return are references of that session.
if TYPE_CHECKING:
    from tensor_rpc.disco import DRef, Session


class Program:
    """A sequence of commands that the workers keep, and run as one: made by `Session.record`.

    As a context manager it is recorded: its methods are those of the session, and what they return
    stands for what the step makes at each run. Nothing is executed, and nothing is sent before the
    block ends; if it raises, nothing is sent at all. Wherever a step takes a recorded value it takes
    a `DRef` as well, which the program keeps and uses as it is at each run.

    Copies from and to the controller, looks into values, syncs, and the loading of functions and
    modules cannot be recorded.

    The workers keep the program until this object is gone.
    """

    def __init__(self, session: Session) -> None:
        """Begin the recording."""
        self._session = session
        self._recorder = _native.DiscoRecorder(session._native_session)
        self._outputs: list[Recorded] = []
        self._program: _native.DiscoProgram | None = None

    def parameter(self, kind: type | None = None) -> Recorded:
        """Add a parameter, which each run is given a value for; the first call makes the first one.

        Parameters
        ----------
        kind : type, optional
            `bool`, `int`, `float` (which takes no `int`), `str`, `bytes`, `list`, `dict`, `Shape`,
            `DataType`, `Device`, `DPackedFunc`, `DModule`, or a dataclass, which stands for all of
            them. Any value by default. A run with another value is refused at once, and a `DRef`
            with other content on a worker fails the run there.
        """
        return self._recorder.parameter("any" if kind is None else _kind(kind))

    def tensor_parameter(self, dtype: Any = None, shape: Sequence[int] | None = None) -> Recorded:
        """Add a parameter that is a tensor.

        Parameters
        ----------
        dtype : data type, optional
            Type of the elements; any by default.
        shape : sequence of int, optional
            Dimensions, of which -1 stands for any length; any shape by default.
        """
        return self._recorder.tensor_parameter(dtype, None if shape is None else list(shape))

    def call(self, func: DRef | Recorded, *args: Any) -> Recorded:
        """Call a function on all workers.

        Parameters
        ----------
        func : DPackedFunc or Recorded
            The function, which may be a parameter.
        *args
            What `DPackedFunc.__call__` takes, and recorded values.
        """
        return self._recorder.call(func, args)

    def empty(self, shape: Sequence[int], dtype: Any = "float32", device: Any = None) -> Recorded:
        """Allocate a zeroed tensor on every worker, at each run; see `Session.empty`."""
        device = None if device is None else str(device if isinstance(device, str) else Device(device))
        return self._recorder.empty(list(shape), dtype, device)

    def broadcast_from_worker0(
        self, src: DRef | Recorded, dst: DRef | Recorded | None = None, in_group: bool | Group = True
    ) -> Recorded:
        """Copy the tensor of worker 0 (or of the first worker of each group) to the others."""
        return self._recorder.collective("broadcast", src, dst, "sum", in_group)

    def scatter_from_worker0(
        self, from_array: DRef | Recorded, to_array: DRef | Recorded | None = None, in_group: bool | Group = True
    ) -> Recorded:
        """Give each worker its part of the tensor of worker 0."""
        return self._recorder.collective("scatter", from_array, to_array, "sum", in_group)

    def gather_to_worker0(
        self, from_array: DRef | Recorded, to_array: DRef | Recorded | None = None, in_group: bool | Group = True
    ) -> Recorded:
        """Collect the tensors of all workers in that of worker 0, one behind the other."""
        return self._recorder.collective("gather", from_array, to_array, "sum", in_group)

    def allreduce(
        self, src: DRef | Recorded, dst: DRef | Recorded | None = None, op: str = "sum", in_group: bool | Group = True
    ) -> Recorded:
        """Reduce the tensors of all workers, element by element; see `Session.allreduce`."""
        return self._recorder.collective("allreduce", src, dst, op, in_group)

    def allgather(
        self, src: DRef | Recorded, dst: DRef | Recorded | None = None, in_group: bool | Group = True
    ) -> Recorded:
        """Give every worker the tensors of all, one behind the other."""
        return self._recorder.collective("allgather", src, dst, "sum", in_group)

    def reduce_scatter(
        self, src: DRef | Recorded, dst: DRef | Recorded | None = None, op: str = "sum", in_group: bool | Group = True
    ) -> Recorded:
        """Reduce the tensors of all workers, and give each worker its part of the result."""
        return self._recorder.collective("reduce_scatter", src, dst, op, in_group)

    def all_to_all(
        self, src: DRef | Recorded, dst: DRef | Recorded | None = None, in_group: bool | Group = True
    ) -> Recorded:
        """Give the part number j of the tensor of worker i to worker j, as its part i."""
        return self._recorder.collective("all_to_all", src, dst, "sum", in_group)

    def barrier(self, in_group: bool | Group = True) -> None:
        """Let no worker go on before all have come here."""
        self._recorder.barrier(in_group)

    def send_recv(self, src: DRef | Recorded, dst: DRef | Recorded, pairs: Sequence[tuple[int, int]]) -> None:
        """Send the tensor `src` of the first worker of each pair to the tensor `dst` of the second.

        A `dst` that no pair receives into stays as it is.
        """
        self._recorder.send_recv(src, dst, list(pairs))

    def returns(self, *values: Recorded) -> None:
        """Make these values the outputs, in place of earlier ones: what `run` returns, in this order.

        Parameters
        ----------
        *values : Recorded
            Values that steps make, each of them once. All other values are let go when a run ends.
        """
        self._outputs = list(values)

    def __enter__(self) -> Program:
        """Return the program, which is being recorded."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the recording, and send the program to the workers unless the block raises.

        Raises
        ------
        InvalidArgumentError
            Outputs that no step makes, or one of them twice; a program that is too large.
        """
        if kind is None:
            self._program = self._recorder.finish(self._outputs)
        else:
            self._recorder.discard()

    @property
    def number(self) -> int:
        """Number by which failures name the program."""
        return self._recorded().number

    def run(self, *args: Any) -> list[DRef]:
        """Run all steps on every worker, as one command in its order among the others.

        A step that fails lets the next ones run, but what it should have made is missing in them;
        its failure says which step of which program it was.

        Parameters
        ----------
        *args
            One for each parameter: what `DPackedFunc.__call__` takes.

        Returns
        -------
        list of DRef
            The outputs. It does not wait for them, unless the workers are behind by a whole window.

        Raises
        ------
        InvalidArgumentError
            Another number of arguments than parameters, or one of another type than its parameter.
        """
        return [self._session._ref(made) for made in self._recorded().run(args)]

    def _recorded(self) -> _native.DiscoProgram:
        if self._program is None:
            raise RuntimeError("the program is not recorded: its with block has not ended, or has raised")
        return self._program

    def __repr__(self) -> str:
        """Return the number of the program."""
        return "<program that is not recorded>" if self._program is None else f"<program {self.number} of Disco>"


def _kind(kind: type) -> str:
    from tensor_rpc import disco

    kinds: dict[type, str] = {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
        bytes: "bytes",
        list: "list",
        dict: "map",
        Shape: "shape",
        DataType: "dtype",
        Device: "device",
        disco.DPackedFunc: "function",
        disco.DModule: "module",
    }
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return "packed"
    try:
        return kinds[kind]
    except (KeyError, TypeError):
        raise TypeError(f"{kind!r} is no type of a parameter; of tensors it is tensor_parameter") from None

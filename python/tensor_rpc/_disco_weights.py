"""Weights of safetensors files, which the workers of Disco load by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tensor_rpc import _native
from tensor_rpc._native import DataType, Device, Part
from tensor_rpc._types import Shape

# Names of types alone: a loader belongs to a session, and what it loads are references of that session.
if TYPE_CHECKING:
    from tensor_rpc.disco import DRef, Session


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes
    ----------
    dtype : DataType
        Type of the elements.
    shape : Shape
        Dimensions, outermost first; none for a scalar.
    size_bytes : int
        Its size.
    """

    dtype: DataType
    shape: Shape
    size_bytes: int


@dataclass(frozen=True)
class Unreadable:
    """A file that a worker cannot read by itself.

    Attributes
    ----------
    worker : int
        Number of the worker.
    file : Path
        The file, where the controller has it.
    reason : str
        Why the worker cannot read it.
    """

    worker: int
    file: Path
    reason: str


class ShardLoader:
    """Loads tensors of safetensors files to the workers of a session.

    A worker that can read a file reads its own part of each tensor, directly into its tensor. One
    that cannot gets its part from a worker that can, and if there is none the controller reads the
    tensor and sends the parts. A worker can read a file if its node allows it (threads and child
    processes of this program, and ``rpc-server --weights FOLDER``), and if a file of the same length
    and with the same header is at the same path; what is in the tensors is not compared.

    Loads return at once, and each worker does them one after the other. Issue all of them, and then
    call `Session.sync_all`, which raises what could not be loaded.

    Files stay open at the workers until this object is gone.
    """

    def __init__(
        self,
        session: Session,
        path: str | os.PathLike[str],
        *,
        folder: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Read the headers of the files, and let the workers look for them.

        Parameters
        ----------
        session : Session
            Whose workers load.
        path : path
            A ``.safetensors`` file, the ``.safetensors.index.json`` of a model, or a folder with
            ``model.safetensors.index.json`` or ``model.safetensors`` in it.
        folder : path, optional
            Where the workers have the files, if that is not where the controller has them.
        progress : function of two int, optional
            Called with the bytes that all workers together have loaded, and the bytes that all loads
            so far will bring, whenever one of them changes; they are equal once everything was
            loaded. It is called on other threads, one call after the other, and must neither use the
            loader nor wait for the workers. What it raises goes to `sys.unraisablehook`, and it is
            called no more.

        Raises
        ------
        RpcError
            A file cannot be read here, or is not of the format.
        """
        self._session = session
        self._loader = _native.open_weights_op(session._native_session, path, folder, progress).wait()
        found = self._loader.tensors()
        self._tensors = {name: TensorInfo(dtype, Shape(shape), size) for name, dtype, shape, size in found}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the files, in the order of their names."""
        return MappingProxyType(self._tensors)

    @property
    def unreadable(self) -> list[Unreadable]:
        """The files that workers cannot read; these workers get their parts from others."""
        return [Unreadable(*each) for each in self._loader.unreadable()]

    def load(self, name: str, part: Part, device: Any = None) -> DRef:
        """Load a tensor to all workers, as a new tensor of each.

        It waits only while the workers are behind by a whole window, and where the controller has to
        read the file.

        Parameters
        ----------
        name : str
            Name of the tensor.
        part : Part
            What each worker gets of it.
        device : Device or str, optional
            The default device of each worker, unless given.

        Raises
        ------
        NotFoundError
            There is no tensor of that name.
        InvalidArgumentError
            It cannot be divided so.
        """
        return self._load({name: part}, device)[name]

    def load_all(self, rule: Callable[[str, TensorInfo], Part | None], device: Any = None) -> dict[str, DRef]:
        """Load all tensors for which `rule` returns a part.

        If one of them cannot be divided so, none is loaded.

        Parameters
        ----------
        rule : function of str and TensorInfo
            Called for each tensor, before any is loaded.
        device : Device or str, optional
            As for `load`.

        Returns
        -------
        dict
            The tensors by their names.
        """
        parts = ((name, rule(name, info)) for name, info in self._tensors.items())
        return self._load({name: part for name, part in parts if part is not None}, device)

    def _load(self, parts: dict[str, Part], device: Any) -> dict[str, DRef]:
        device = None if device is None else str(device if isinstance(device, str) else Device(device))
        loaded = self._loader.load_op(parts, device).wait()
        return {name: self._session._ref(native) for name, native in zip(sorted(parts), loaded, strict=True)}

    def __repr__(self) -> str:
        """Return the number of tensors."""
        return f"<loader of {len(self._tensors)} tensors>"

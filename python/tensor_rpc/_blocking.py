"""Sessions whose operations block the calling thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from tensor_rpc import _arrays, _native
from tensor_rpc._native import DataType, Device

CONCURRENT = 0xFFFF_FFFF
"""The lane of requests that wait for no other request, and for which none waits."""


class Function(_native.Function):
    """A function of a session.

    Calling it blocks until it has returned. Arguments are values (see the guide), objects of the
    session, arrays, and functions of this process; arrays and functions become tensors and
    callbacks for the time of the call, and what the function writes into such a tensor is lost.
    """

    def __call__(self, *args: Any, timeout: float | None = None, lane: int | None = None) -> Any:
        """Call the function.

        Parameters
        ----------
        *args
            Its arguments.
        timeout : float, optional
            Seconds after which the call fails with `DeadlineExceededError`, and is cancelled there.
        lane : int, optional
            Calls of one lane run one after the other, and those of different lanes side by side.
            0 is the lane of all operations that name none; `CONCURRENT` is a new one.

        Returns
        -------
        object
            What the function returned: a value, or an object of the session.

        Raises
        ------
        RpcError
            It, or one of its subclasses, which say what went wrong.
        """
        return self.call_op(args, timeout, lane).wait()

    def __repr__(self) -> str:
        """Return the name."""
        return f"<function {self.name or 'without a name'} of a session>"


class Tensor(_native.Tensor):
    """A tensor in a session. The last reference frees it there."""

    def download(self, *, timeout: float | None = None, lane: int | None = None) -> _native.DenseArray:
        """Copy the elements into memory of this process, densely packed.

        Returns
        -------
        DenseArray
            What ``numpy.from_dlpack`` and its like take without a further copy.
        """
        return self.download_op(timeout, lane).wait()  # type: ignore[no-any-return]

    def numpy(self, *, timeout: float | None = None, lane: int | None = None) -> Any:
        """Copy the elements into an array of numpy."""
        return _arrays.to_numpy(self.download(timeout=timeout, lane=lane))

    def torch(self, *, timeout: float | None = None, lane: int | None = None) -> Any:
        """Copy the elements into a tensor of torch."""
        return _arrays.to_torch(self.download(timeout=timeout, lane=lane))

    def tolist(self, *, timeout: float | None = None, lane: int | None = None) -> Any:
        """Copy the elements into nested lists; needs no numpy."""
        return _arrays.to_list(self.download(timeout=timeout, lane=lane))

    def __dlpack__(self, **options: Any) -> Any:
        """Copy the elements here, for readers of DLPack."""
        return self.download().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the copy, which is host memory."""
        return (1, 0)

    def copy_from(self, source: Any, *, timeout: float | None = None, lane: int | None = None) -> None:
        """Fill the tensor from an array, or from another tensor of the session.

        Raises
        ------
        ValueError
            The array has another shape or data type.
        """
        self.copy_from_op(source, timeout, lane).wait()

    def view(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        *,
        byte_offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> Tensor:
        """Return another layout of the same memory.

        Parameters
        ----------
        shape : sequence of int
            Dimensions of the view.
        dtype : data type, optional
            That of the tensor by default.
        byte_offset : int
            Bytes from the first element of this tensor to that of the view.
        strides : sequence of int, optional
            Distance of neighbours in each dimension, in elements; dense by default.

        Notes
        -----
        Whether it fits is checked where it is used.
        """
        dtype = None if dtype is None else DataType(dtype)
        layout = None if strides is None else list(strides)
        return Tensor(self.view_of(list(shape), dtype, byte_offset, layout))

    def free(self) -> None:
        """Free the tensor now. It is freed anyway once nothing refers to it."""
        self.free_op().wait()

    def __repr__(self) -> str:
        """Return shape, type and place; no element is copied for it."""
        return f"<tensor {tuple(self.shape)} {self.dtype} on {self.device} of a session>"


class Module(_native.Module):
    """A module of a session: functions that are found by name."""

    def __getitem__(self, name: str) -> Function:
        """Return the function `name`."""
        return self.get_function(name)

    def get_function(self, name: str, *, timeout: float | None = None) -> Function:
        """Return the function `name`.

        Raises
        ------
        NotFoundError
            The module has no such function.
        """
        return self.get_function_op(name, timeout).wait()  # type: ignore[no-any-return]


class Object(_native.Object):
    """An object of a type that the application defines. The last reference frees it there."""

    def free(self) -> None:
        """Free the object now."""
        self.free_op().wait()


class Session(_native.Session):
    """A place where functions run and memory lives.

    `connect` and `local` make one. As a context manager it closes itself. Any number of threads may
    use it at once.
    """

    _functions: dict[str, Function]

    def __init__(self, native: _native.Session) -> None:
        """Wrap a native session; use `connect` instead."""
        super().__init__()
        self._functions = {}

    def __getitem__(self, name: str) -> Function:
        """Return the function `name`; the same as `get_function`."""
        return self.get_function(name)

    def get_function(self, name: str, *, timeout: float | None = None) -> Function:
        """Return the function that is registered as `name`.

        Raises
        ------
        NotFoundError
            There is none; the message names a similar one.
        """
        return self.get_function_op(name, timeout).wait()  # type: ignore[no-any-return]

    def call(self, name: str, *args: Any, timeout: float | None = None, lane: int | None = None) -> Any:
        """Call the function `name`, which is looked up the first time only.

        See `Function.__call__`.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self.get_function(name, timeout=timeout)
        return function(*args, timeout=timeout, lane=lane)

    def tensor(
        self, array: Any, device: Any = None, *, timeout: float | None = None, lane: int | None = None
    ) -> Tensor:
        """Make a tensor with the content of an array.

        Parameters
        ----------
        array
            Anything with ``__dlpack__`` or the buffer protocol; with numpy, also nested lists.
        device : Device or str, optional
            ``cpu:0`` by default.
        """
        return self.tensor_op(array, device, timeout, lane).wait()  # type: ignore[no-any-return]

    def empty(
        self,
        shape: Sequence[int],
        dtype: Any = "float32",
        device: Any = None,
        scope: str | None = None,
        *,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Tensor:
        """Allocate a tensor, whose content is unspecified; in a memory scope of the device, or not."""
        return self.empty_op(list(shape), dtype, device, scope, timeout, lane).wait()  # type: ignore[no-any-return]

    def load(self, path: str, loader: str | None = None, *, timeout: float | None = None) -> Module:
        """Load a module of the server, or of the workspace of this session."""
        return self.load_module_op(os.fspath(path), loader, timeout).wait()  # type: ignore[no-any-return]

    def callback(self, function: Callable[..., Any]) -> _native.Callback:
        """Make a function of this process a function of the session, until it is dropped.

        It runs on a thread of its own while the function that calls it waits.
        """
        return self.callback_op(function).wait()  # type: ignore[no-any-return]

    def ended(self) -> BaseException:
        """Wait until the session ends, and return why."""
        return self.ended_op().wait()  # type: ignore[no-any-return]

    def functions(self) -> Iterator[tuple[str, str]]:
        """Iterate over the names and signatures of all functions of the server."""
        for name, signature in self.call("rpc.functions"):
            yield name, signature

    def close(self) -> None:
        """End the session. Objects of it do not work any more."""
        if not self.is_closed:
            try:
                self.shutdown_op().wait()
            finally:
                self.forget()

    def __enter__(self) -> Session:
        """Return the session."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session. If the peer is gone already, that is no error."""
        try:
            self.close()
        except ConnectionError:
            pass

    def __repr__(self) -> str:
        """Return where the session leads."""
        return f"<session at {self.address}{', closed' if self.is_closed else ''}>"


def connect(
    address: str,
    *,
    via: Sequence[str] = (),
    key: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    cert_key: str | os.PathLike[str] | None = None,
    workspace: str | None = None,
    connect_timeout: float | None = None,
    queue_timeout: float | None = None,
    keep_alive: float | None = None,
    spin: float | None = None,
) -> Session:
    """Open a session, and wait for it.

    Parameters
    ----------
    address : str
        Of a server (``tcp://board:9090``, ``tls://``, ``quic://``, ``ws://``, ``unix:PATH``,
        ``ssh://host``, ``exec:PROGRAM``) or of a tracker (``tracker://host:9190/key``), which gives
        a free server of that key.
    via : sequence of str
        Addresses of hops on the way, the first one dialled from here.
    key : str, optional
        Key that the server must have.
    token_file, ca, cert, cert_key : path, optional
        A file of tokens that both sides know; authorities that the server's certificate must come
        from; and the own certificate with its key, as PEM files. With a token and no `ca` the
        server may have any certificate, because the token proves both sides to each other.
    workspace : str, optional
        Folder for files that the server keeps under this name; without one it has none.
    connect_timeout : float, optional
        Seconds for each step of connecting.
    queue_timeout : float, optional
        Seconds to wait for a free server of a tracker.
    keep_alive : float, optional
        Seconds between pings; a peer that is silent for three times as long is given up.
    spin : float, optional
        Seconds for which a thread polls before it sleeps; 0 by default.

    Returns
    -------
    Session
        It is closed when it is left as a context manager, or when its last object is gone.

    Raises
    ------
    PeerLostError, PeerSilentError
        Nobody answers there.
    RefusedError
        The server wants another proof of identity, or has no place.
    InvalidArgumentError
        The address is malformed.
    """
    options = {
        "via": list(via) or None,
        "key": key,
        "token_file": token_file,
        "ca": ca,
        "cert": cert,
        "cert_key": cert_key,
        "workspace": workspace,
        "connect_timeout": connect_timeout,
        "queue_timeout": queue_timeout,
        "keep_alive": keep_alive,
        "spin": spin,
    }
    return _native.connect(address, options).wait()  # type: ignore[no-any-return]


__all__ = ["CONCURRENT", "DataType", "Device", "Function", "Module", "Object", "Session", "Tensor", "connect"]

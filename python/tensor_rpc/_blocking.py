"""Sessions whose operations block the calling thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tensor_rpc import _arrays, _native, _types
from tensor_rpc._errors import DeadlineExceededError
from tensor_rpc._native import Callback, DataType, DenseArray, Device
from tensor_rpc._types import FileEntry, FunctionInfo, RetryPolicy, RunResult, SendRoute, Timing

CONCURRENT = 0xFFFF_FFFF
"""The lane of requests that wait for no other request, and for which none waits."""


class Function(_native.Function):
    """A function of a session.

    Calling it blocks until it has returned: ``f(*args, timeout=None, lane=None)``. Arguments are
    values (see the guide), objects of the session, arrays, and functions of this process; arrays
    and functions become tensors and callbacks for the time of the call, and what the function
    writes into such a tensor is lost. The result is a value, or an object of the session. Errors
    are an `RpcError`, or one of its subclasses, which say what went wrong.

    Parameters
    ----------
    timeout : float, optional
        Seconds after which a call fails with `DeadlineExceededError`, and is cancelled there.
    lane : int, optional
        Calls of one lane run one after the other, and those of different lanes side by side. 0 is
        the lane of all operations that name none; `CONCURRENT` is a new one.
    """

    def pipe(self, *args: Any, timeout: float | None = None, lane: int | None = None) -> Pipe:
        """Start the call, and leave its result in the session for later calls of the same lane.

        Parameters
        ----------
        *args
            As for calls, but for arrays and functions of this process: make tensors and callbacks
            of them first.
        timeout : float, optional
            As for calls.
        lane : int, optional
            As for calls, but not `CONCURRENT`.

        Returns
        -------
        Pipe
            What later calls take as an argument.
        """
        return Pipe(self.pipe_call(args, timeout, lane))

    @property
    def signature(self) -> str | None:
        """Types of the parameters and of the result, such as ``(i64, i64) -> i64``.

        The server is asked for them. None if it does not tell, or the function was not found by a
        name.
        """
        return self.signature_op().wait()

    def __repr__(self) -> str:
        """Return the name."""
        return f"<function {self.name or 'without a name'} of a session>"


class Pipe(_native.Pipe):
    """The result of a call in progress, as an argument of later calls of the same lane.

    The server keeps the result, and puts it in place when the later call begins: a chain of calls
    takes one round trip. If the call fails, so does each that takes its result, before it begins,
    with the same class of error. The last reference frees the result.
    """

    def result(self, *, timeout: float | None = None) -> Any:
        """Fetch the result, which stays in the session.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which fetching it fails.

        Returns
        -------
        object
            What the function returned: a value, or an object of the session.

        Raises
        ------
        RpcError
            The error of the call, if it has failed.
        """
        return self.result_op(timeout).wait()


class Tensor(_native.Tensor):
    """A tensor in a session. The last reference frees it there."""

    def download(
        self,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> DenseArray:
        """Copy the elements into memory of this process, densely packed.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of bytes that have arrived so far. What it raises ends the copy,
            unless that is complete by then.
        timeout : float, optional
            Seconds after which the copy fails.
        lane : int, optional
            As for calls.

        Returns
        -------
        DenseArray
            What ``numpy.from_dlpack`` and its like take without a further copy.
        """
        return self.download_op(progress, timeout, lane).wait()

    def numpy(
        self,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Any:
        """Copy the elements into an array of numpy; see `download`."""
        return self.download_op(progress, timeout, lane).then(_arrays.to_numpy).wait()

    def torch(
        self,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Any:
        """Copy the elements into a tensor of torch; see `download`."""
        return self.download_op(progress, timeout, lane).then(_arrays.to_torch).wait()

    def tolist(self, *, timeout: float | None = None, lane: int | None = None) -> Any:
        """Copy the elements into nested lists, or a number without dimensions; needs no numpy."""
        return self.download_op(None, timeout, lane).then(_arrays.to_list).wait()

    def __dlpack__(self, **options: Any) -> Any:
        """Copy the elements here, for readers of DLPack."""
        return self.download().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device of the copy, which is host memory."""
        return (1, 0)

    def copy_from(
        self,
        source: Any,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Fill the tensor from an array, or from another tensor of the session.

        Parameters
        ----------
        source : array or Tensor
            Of the same shape and data type. The bytes of a tensor stay at the server.
        progress : callable, optional
            Called with the number of bytes of an array that were taken so far.
        timeout : float, optional
            Seconds after which the copy fails. What was written of the tensor is unspecified then.
        lane : int, optional
            As for calls.

        Raises
        ------
        ValueError
            The array has another shape or data type.
        """
        return self.copy_from_op(source, progress, timeout, lane).wait()

    def copy_to(
        self,
        array: Any,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Copy the elements into an array that there is already.

        Parameters
        ----------
        array : array
            With ``__dlpack__``, of the same shape and data type, densely packed and writable. No
            other thread should use it until the copy is over.
        progress : callable, optional
            Called with the number of bytes that have been written so far. What it raises ends the
            copy, unless that is complete by then.
        timeout : float, optional
            Seconds after which the copy fails. Part of the array may have been written then, and
            nothing writes to it any more.
        lane : int, optional
            As for calls.

        Raises
        ------
        ValueError
            The array has another shape or data type, has gaps, or cannot be written.
        """
        return self.copy_to_op(array, progress, timeout, lane).wait()

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> bytes:
        """Copy bytes of a dense tensor into this process.

        Parameters
        ----------
        start, stop : int
            Range in bytes from the start of the tensor, by default all.
        progress : callable, optional
            Called with the number of bytes copied so far. What it raises ends the copy,
            unless that is complete by then.
        timeout, lane
            As for calls of functions.
        """
        return self.read_op(start, stop, progress, timeout, lane).wait()

    def write(
        self,
        data: Any,
        offset: int = 0,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Copy bytes into a dense tensor.

        Parameters
        ----------
        data : bytes-like
            Of any layout; the bytes are taken as they are.
        offset : int
            Bytes from the start of the tensor.
        progress : callable, optional
            Called with the number of bytes copied so far. What it raises ends the copy,
            unless that is complete by then.
        timeout, lane
            As for calls of functions.
        """
        return self.write_op(data, offset, progress, timeout, lane).wait()

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
        return self.free_op().wait()

    def __repr__(self) -> str:
        """Return shape, type and place; no element is copied for it."""
        return f"<tensor {tuple(self.shape)} {self.dtype} on {self.device} of a session>"


class Module(_native.Module):
    """A module of a session: functions that are found by name."""

    def __getitem__(self, name: str) -> Function:
        """Return the function `name`; the same as `get_function`."""
        return self.get_function(name)

    def get_function(self, name: str, *, timeout: float | None = None, lane: int | None = None) -> Function:
        """Return the function `name`.

        Raises
        ------
        NotFoundError
            The module has no such function.
        """
        made: Function = self.get_function_op(name, timeout, lane).wait()
        return made

    def pipe_function(self, name: str, *, timeout: float | None = None, lane: int | None = None) -> Function:
        """Start to look a function up, and return it at once; see `Session.pipe_function`."""
        return Function(_native.pipe_module_function(self, name, timeout, lane))

    def functions(self, *, timeout: float | None = None, lane: int | None = None) -> list[FunctionInfo]:
        """Return the functions of the module, with their signatures."""
        return self.functions_op(timeout, lane).then(_types.functions).wait()

    def free(self) -> None:
        """Free the module now. Functions of it stay."""
        return self.free_op().wait()


class Object(_native.Object):
    """An object of a type that the application defines, or a stream of a device.

    The last reference frees it there.
    """

    def free(self) -> None:
        """Free the object now."""
        return self.free_op().wait()


class RemoteFile(_native.RemoteFile):
    """A file of a workspace, open for reading.

    Its content is that of the time when it was opened, even if another file replaces it meanwhile.
    """

    def read(
        self,
        start: int = 0,
        to: Any = None,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Any:
        """Copy the bytes from `start` to the end.

        Parameters
        ----------
        start : int
            First byte.
        to, progress
            As for `Files.get`.
        timeout, lane
            As for calls of functions.
        """
        return self.read_op(start, to, progress, timeout, lane).wait()

    def prefix_digest(self, size: int, *, timeout: float | None = None, lane: int | None = None) -> str:
        """Return the SHA-256 of the first `size` bytes, which the server computes."""
        return self.prefix_digest_op(size, timeout, lane).wait()


class Files(_native.Files):
    """Files of a session's workspace: `Session.files`.

    Paths are relative to the workspace, with ``/`` between names, and cannot lead out of it. A
    session that was opened without a workspace has one of its own, which ends with it.
    """

    def put(
        self,
        path: str,
        source: Any,
        *,
        executable: bool = False,
        resumable: bool = False,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> int:
        """Write a file, which appears in one step when it is complete.

        Parameters
        ----------
        path : str
            Path in the workspace.
        source : path, bytes-like or file object
            Path of a local file, as str or os.PathLike; the content; or an object whose ``read(n)``
            returns it.
        executable : bool
            Let the file be executed.
        resumable : bool
            If the transfer is cut, keep what has arrived, as a file with ``.rpc-part`` at its end,
            and go on behind it the next time. For local files.
        progress : callable, optional
            Called with the number of bytes that have arrived there. What it raises ends the
            transfer, unless that is complete by then.
        timeout, lane
            As for calls of functions.

        Returns
        -------
        int
            Length in bytes.

        Raises
        ------
        InvalidArgumentError
            The path leaves the workspace.
        LimitExceededError
            The workspace is full.
        """
        return self.put_op(path, source, executable, resumable, progress, timeout, lane).wait()

    def put_cached(
        self,
        path: str,
        source: str | os.PathLike[str],
        *,
        executable: bool = False,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> bool:
        """Write a file like `put`, by the server's cache of files if it has one.

        Returns
        -------
        bool
            False if the cache had the file, so that it was not sent.
        """
        return self.put_cached_op(path, source, executable, progress, timeout, lane).wait()

    def get(
        self,
        path: str,
        to: Any = None,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Any:
        """Read a file.

        Parameters
        ----------
        path : str
            Path in the workspace.
        to : path or file object, optional
            Path of a local file, which appears in one step when it is complete; or an object with
            ``write(bytes)``.
        progress : callable, optional
            Called with the number of bytes that have arrived. What it raises ends the transfer,
            unless that is complete by then.
        timeout, lane
            As for calls of functions.

        Returns
        -------
        bytes or int
            The content; with `to`, its length in bytes.

        Raises
        ------
        NotFoundError
            There is no such file.
        """
        return self.get_op(path, to, progress, timeout, lane).wait()

    def open(self, path: str, *, timeout: float | None = None, lane: int | None = None) -> RemoteFile:
        """Open a file for reading: to know its length first, or to read a part."""
        made: RemoteFile = self.open_op(path, timeout, lane).wait()
        return made

    def ls(self, folder: str = "", *, timeout: float | None = None, lane: int | None = None) -> list[FileEntry]:
        """List the files in a folder and in all folders below it, sorted by name."""
        return self.ls_op(folder, timeout, lane).then(_types.files).wait()

    def rm(self, path: str, *, timeout: float | None = None, lane: int | None = None) -> None:
        """Remove a file, or a folder with its content."""
        return self.rm_op(path, timeout, lane).wait()

    def set_executable(
        self,
        path: str,
        executable: bool = True,
        *,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Set or clear the permission to execute a file."""
        return self.set_executable_op(path, executable, timeout, lane).wait()

    def folders(self, *, timeout: float | None = None, lane: int | None = None) -> list[str]:
        """List all folders, sorted by name."""
        return self.folders_op(timeout, lane).wait()

    def create_folder(self, path: str, *, timeout: float | None = None, lane: int | None = None) -> None:
        """Create a folder, with those that it is in, unless it is there."""
        return self.create_folder_op(path, timeout, lane).wait()

    def digest(self, path: str, *, timeout: float | None = None, lane: int | None = None) -> str:
        """Return the SHA-256 of a file, which the server computes."""
        return self.digest_op(path, timeout, lane).wait()


class Process(_native.Process):
    """A program that runs at a session's server.

    Dropping the last reference ends it, with all processes that it has started. Nothing waits for
    another operation: the output may be read while input is written.
    """

    def read_output(self, *, timeout: float | None = None) -> tuple[str, bytes] | None:
        """Wait for output: the name of the stream, ``stdout`` or ``stderr``, and bytes.

        None once there will be no more.
        """
        return self.read_output_op(timeout).wait()

    def write_input(self, data: Any, *, timeout: float | None = None) -> None:
        """Write bytes to standard input, and wait until the program or a pipe has taken them."""
        return self.write_input_op(data, timeout).wait()

    def close_input(self) -> None:
        """Close standard input: the program reads its end."""
        return self.close_input_op().wait()

    def terminate(self) -> None:
        """End the program with SIGTERM, and shortly afterwards with SIGKILL, without waiting."""
        return self.terminate_op().wait()

    def wait(self, *, timeout: float | None = None) -> RunResult:
        """Wait for the end of the program, whose output has to be read before."""
        return self.status_op(timeout).then(_types.run_status).wait()


class Lease(_native.Lease):
    """Exclusive use of a device among the sessions of a server.

    It ends when it is left as a context manager, when it is released, and when it is dropped.
    """

    def release(self) -> float:
        """End the lease, and return the seconds for which it was held."""
        return self.release_op().wait()

    def __enter__(self) -> Lease:
        """Return the lease."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the lease. It has ended already if the session has."""
        if not self.is_released:
            try:
                self.release()
            except ConnectionError:
                pass


class LeaseRequest(_native.LeaseRequest):
    """A request for a lease, which waits in the queue of its device.

    Dropping it leaves the queue.
    """

    def ahead(self) -> int:
        """Return the number of requests that are granted before this one, as things stand."""
        return self.ahead_op().wait()

    def granted(self, *, timeout: float | None = None) -> Lease:
        """Wait for the lease. The request stays in the queue if that fails or is cancelled."""
        made: Lease = self.granted_op(timeout).wait()
        return made


class Connection(_native.Connection):
    """A connection that was accepted near a session's server. Dropping it closes it."""

    def read(self, *, timeout: float | None = None) -> bytes | None:
        """Wait for bytes; None once the peer has sent its last."""
        return self.read_op(timeout).wait()

    def write(self, data: Any, *, timeout: float | None = None) -> None:
        """Send bytes, and wait until the server's socket has taken them."""
        return self.write_op(data, timeout).wait()

    def finish(self) -> None:
        """End the sending direction: the peer reads the end, and may still send."""
        return self.finish_op().wait()


class Listener(_native.Listener):
    """A listener near a session's server. Dropping it closes the port."""

    def accept(self, *, timeout: float | None = None) -> Connection:
        """Wait for the next connection."""
        made: Connection = self.accept_op(timeout).wait()
        return made


class Session(_native.Session):
    """A place where functions run and memory lives.

    `connect` and `local` make one. As a context manager it closes itself.
    Any number of threads may use it at once.
    """

    def __getitem__(self, name: str) -> Function:
        """Return the function `name`; the same as `get_function`."""
        return self.get_function(name)

    def get_function(
        self,
        name: str,
        *,
        params: Sequence[Any] | None = None,
        returns: Any = Any,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Function:
        """Return the function that is registered as `name`.

        Parameters
        ----------
        name : str
            Its name.
        params : sequence of types, optional
            Types of the arguments that it will be called with, as annotations have them: ``int``,
            ``list[str]``, ``np.ndarray``. They are compared with its signature at once; each call is
            checked in any case. Classes of one's own stand for objects of the session; dataclasses,
            unions and `typing.Any` fit everything.
        returns : type
            Type of the result, which is compared as well.
        timeout, lane
            As for calls of functions.

        Raises
        ------
        NotFoundError
            There is none; the message names a similar one.
        InvalidArgumentError
            The types do not fit the signature.
        """
        from tensor_rpc._functions import client_types

        made: Function = self.get_function_op(name, timeout, lane, client_types(params, returns)).wait()
        return made

    def call(self, name: str, *args: Any, timeout: float | None = None, lane: int | None = None) -> Any:
        """Call the function `name`, which is looked up the first time only.

        See `Function.__call__`.
        """
        return super().call_op(name, args, timeout, lane).wait()

    def functions(self, *, timeout: float | None = None, lane: int | None = None) -> list[FunctionInfo]:
        """Return all functions of the server, with signatures and descriptions."""
        return self.functions_op(timeout, lane).then(_types.functions).wait()

    def tensor(
        self,
        array: Any,
        device: Any = None,
        scope: str | None = None,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Tensor:
        """Make a tensor with the content of an array.

        Parameters
        ----------
        array
            Anything with ``__dlpack__`` or the buffer protocol, in host memory; with numpy, also
            nested lists. Arrays with gaps are packed.
        device : Device or str, optional
            ``cpu:0`` by default.
        scope : str, optional
            Memory scope of the device.
        progress : callable, optional
            Called with the number of bytes that were taken so far. What it raises ends the copy,
            unless that is complete by then.
        timeout : float, optional
            Seconds after which the operation fails.
        lane : int, optional
            As for calls.

        Raises
        ------
        TypeError
            This is no array, or its elements have no data type of DLPack.
        ValueError
            The array lies on another device.
        OutOfMemoryError, LimitExceededError
            There is no room for it there.
        """
        made: Tensor = self.tensor_op(array, device, scope, progress, timeout, lane).wait()
        return made

    def empty(
        self,
        shape: Sequence[int],
        dtype: Any = "float32",
        device: Any = None,
        scope: str | None = None,
        *,
        alignment: int = 0,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Tensor:
        """Allocate a tensor of zeros.

        Parameters
        ----------
        shape : sequence of int
            Dimensions, outermost first.
        dtype : data type
            A name, or what numpy and torch take for a data type.
        device : Device or str, optional
            ``cpu:0`` by default. A text with a comma or an asterisk is a constraint, such as
            ``cuda,scope=host`` or ``*,target=cuda -arch=sm_90``; the tensor is on the first device
            that satisfies it.
        scope : str, optional
            Memory scope of the device, such as ``global``.
        alignment : int, optional
            Power of two whose multiple the tensor's address is, in bytes; 0 leaves it to the device.
        timeout, lane
            As for calls of functions.
        """
        made: Tensor = self.empty_op(list(shape), dtype, device, scope, alignment, timeout, lane).wait()
        return made

    def send(
        self,
        source: Tensor,
        session: Session,
        destination: Tensor,
        *,
        start: int = 0,
        stop: int | None = None,
        offset: int = 0,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> SendRoute:
        """Copy bytes of a tensor of this session to a tensor of another session.

        The servers connect to each other where both support that and the source's operator allows
        it. Elsewhere the bytes go through this process, a window of pieces at a time.

        Parameters
        ----------
        source : Tensor
            A dense tensor of this session.
        session : Session
            The other session; it may be this one.
        destination : Tensor
            A dense tensor of the other session.
        start, stop : int
            Bytes of the source, by default all of them.
        offset : int
            Byte of the destination that the first one goes to.
        progress : callable, optional
            Called with the number of bytes that have been sent so far; a direct send calls it at
            its end.
        timeout, lane
            As for calls of functions. The lane is that of both sessions.

        Returns
        -------
        SendRoute
            The route of the bytes, and the reason if it was not the direct one.

        Raises
        ------
        InvalidArgumentError
            The bytes do not fit, or a tensor has gaps.
        """
        operation = self.send_op(source, session, destination, start, stop, offset, progress, timeout, lane)
        return operation.then(_types.send_route).wait()

    def load(
        self,
        path: str | os.PathLike[str],
        loader: str | None = None,
        *,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Module:
        """Load a module, such as a shared library with functions.

        Parameters
        ----------
        path : str or os.PathLike
            Path of a local file, which is sent unless the server has it. ``remote:PATH`` is a file
            of the workspace or a name that the server knows, and ``sha256:DIGITS`` a module that
            the server has.
        loader : str, optional
            Name of the loader; by default the first one that takes the file.
        progress : callable, optional
            Called with the number of bytes that were sent so far.
        timeout, lane
            As for calls of functions.

        Raises
        ------
        FileNotFoundError
            There is no such local file.
        RefusedError
            The server accepts no modules, or not from this client.
        """
        name = os.fspath(path)
        if name.startswith(("remote:", "sha256:")):
            there = name.removeprefix("remote:")
            operation = self.load_module_op(there, loader, timeout, lane)
        else:
            operation = self.upload_module_op(name, loader, progress, timeout, lane)
        made: Module = operation.wait()
        return made

    def pipe_function(self, name: str, *, timeout: float | None = None, lane: int | None = None) -> Function:
        """Start to look a function up, and return it at once, for calls of the same lane.

        Neither this nor its calls by `Function.pipe` wait for an answer, so that a look-up and the
        calls behind it take one round trip. If there is no such function, its calls fail.

        Parameters
        ----------
        name : str
            Its name.
        timeout, lane
            As for calls of functions, but not `CONCURRENT`.
        """
        return Function(_native.pipe_function(self, name, timeout, lane))

    def pipe_module(
        self, path: str, loader: str | None = None, *, timeout: float | None = None, lane: int | None = None
    ) -> Module:
        """Start to load a module that the server has, and return it at once; see `pipe_function`.

        Parameters
        ----------
        path : str
            ``remote:PATH`` or ``sha256:DIGITS``, as for `load`. Local files are sent by that.
        loader, timeout, lane
            As for `load`, but not `CONCURRENT`.
        """
        if not path.startswith(("remote:", "sha256:")):
            raise ValueError(f"{path!r} is a file of this machine: load sends it; remote:PATH is one of the server")
        return Module(_native.pipe_module(self, path.removeprefix("remote:"), loader, timeout, lane))

    def pipe_empty(
        self,
        shape: Sequence[int],
        dtype: Any = "float32",
        device: Any = None,
        scope: str | None = None,
        *,
        alignment: int = 0,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Tensor:
        """Start to allocate a tensor, and return it at once; see `pipe_function`.

        Copies to it and calls with it go on the same lane. If it cannot be allocated, they fail.

        Parameters
        ----------
        shape, dtype, device, scope, alignment, timeout, lane
            As for `empty`, but not `CONCURRENT`.
        """
        return Tensor(_native.pipe_empty(self, list(shape), dtype, device, scope, alignment, timeout, lane))

    def import_module(self, path: str, *, timeout: float | None = None, lane: int | None = None) -> str:
        """Make the server keep a file of its own as a module.

        Parameters
        ----------
        path : str
            Path in the workspace, or an absolute one at the server.
        timeout, lane
            As for calls of functions.

        Returns
        -------
        str
            ``sha256:DIGITS``, which `load` takes.
        """
        return self.import_module_op(path, timeout, lane).wait()

    def callback(self, function: Callable[..., Any], *, timeout: float | None = None) -> Callback:
        """Make a function of this process a function of the session, until it is dropped.

        It runs on a thread of its own while the function that calls it waits.
        It may use the session on another lane than that of its caller, such as `CONCURRENT`.
        """
        return self.callback_op(function, timeout).wait()

    def attribute(self, device: Any, name: str, *, timeout: float | None = None, lane: int | None = None) -> Any:
        """Return an attribute of a device; None if the device does not have it.

        Parameters
        ----------
        device : Device or str
            Such as ``cuda:0``.
        name : str
            Such as ``name``, ``exists``, ``total_memory`` or ``compute_version``.
        timeout, lane
            As for calls of functions.

        Raises
        ------
        ValueError
            No attribute has that name; the message lists all.
        """
        return self.attribute_op(device, name, timeout, lane).wait()

    def create_stream(self, device: Any, *, timeout: float | None = None, lane: int | None = None) -> Object:
        """Create a stream of a device. `Object.free` frees it; work that was issued completes."""
        made: Object = self.create_stream_op(device, timeout, lane).wait()
        return made

    def set_stream(
        self,
        device: Any,
        stream: Object | None = None,
        *,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Make a stream the current one of a device for later requests of the same lane.

        None is the default stream.
        """
        return self.set_stream_op(device, stream, timeout, lane).wait()

    def stream_wait(
        self,
        device: Any,
        stream: Object | None = None,
        *,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Wait until all work that was issued to a stream has completed.

        None is the lane's current stream of the device.
        """
        return self.stream_wait_op(device, stream, timeout, lane).wait()

    def sync_stream_from_to(
        self,
        source: tuple[Any, Object | None],
        destination: tuple[Any, Object | None],
        *,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> None:
        """Let later work of one stream begin after the work issued to another stream so far.

        Nothing is waited for here, unless a device has no better way.

        Parameters
        ----------
        source : (device, Object or None)
            Device and stream that is waited for; None is the lane's current stream of the device.
        destination : (device, Object or None)
            Device and stream that waits.
        timeout, lane
            As in `call`.

        Raises
        ------
        UnsupportedError
            The server is too old to know the operation.
        """
        return self.sync_stream_from_to_op(source, destination, timeout, lane).wait()

    @property
    def files(self) -> Files:
        """Files of the session's workspace."""
        return Files(self)

    def time(
        self,
        function: Function,
        *args: Any,
        number: int = 1,
        repeat: int = 10,
        min_repeat_ms: float = 0.0,
        warmup: int = 1,
        cache_flush_bytes: int = 0,
        lease: Any = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> Timing:
        """Measure the run time of a function at the server.

        Parameters
        ----------
        function : Function
            What is called, and freed of its results at once.
        *args
            Its arguments.
        number : int
            Calls in one sample, at first.
        repeat : int
            Samples.
        min_repeat_ms : float
            Shortest time of a sample in milliseconds; `number` grows until it is reached.
        warmup : int
            Calls before the first sample.
        cache_flush_bytes : int
            Bytes of host memory that are written before each sample, so that caches hold nothing
            else.
        lease : Device or str, optional
            Device that is leased for the time of the measurement.
        timeout, lane
            As for calls of functions.

        Returns
        -------
        Timing
            Seconds per call, with mean, median and so on.
        """
        counts = (number, repeat, warmup, cache_flush_bytes)
        return self.time_op(function, args, counts, min_repeat_ms, lease, timeout, lane).then(_types.timing).wait()

    def run(
        self,
        program: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        time_limit: float | None = None,
        output_limit: int | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        timeout: float | None = None,
        lane: int | None = None,
    ) -> RunResult:
        """Run a program of the server in the session's workspace, to its end.

        Parameters
        ----------
        program : str
            A name that is looked up there, or a path relative to the workspace.
        *args : str
            Its arguments.
        env : mapping, optional
            Variables of its environment, as far as the server's operator allows them.
        stdin : bytes-like or file object, optional
            What it reads; nothing by default. An object with ``read(n)`` is read on a thread of its
            own.
        time_limit : float, optional
            Seconds after which the server ends it, with SIGTERM and then SIGKILL.
        output_limit : int, optional
            Bytes of output of both streams after which the server ends it; 16 MiB by default if the
            output is collected.
        on_stdout, on_stderr : callable, optional
            Called with each piece of output as it comes, which is not collected then. What it
            raises ends the program.
        timeout : float, optional
            Seconds after which the operation fails; the program is ended then.
        lane : int, optional
            Lane that the program occupies to its end.

        Returns
        -------
        RunResult
            Exit code or signal, and the output. ``check()`` raises if it has failed.

        Raises
        ------
        RefusedError
            The server runs no programs, or not this one.
        NotFoundError
            There is no such program.
        """
        options = {
            "env": None if env is None else dict(env),
            "stdin": stdin,
            "time_limit": time_limit,
            "output_limit": output_limit,
            "on_stdout": on_stdout,
            "on_stderr": on_stderr,
        }
        return _native.run_op(self, program, list(args), options, timeout, lane).then(_types.run_result).wait()

    def start(
        self,
        program: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        piped_input: bool = False,
        time_limit: float | None = None,
        output_limit: int | None = None,
        timeout: float | None = None,
    ) -> Process:
        """Start a program, and return as soon as it runs.

        Parameters
        ----------
        piped_input : bool
            Give it a standard input for `Process.write_input`.
        program, *args, env, stdin, time_limit, output_limit
            As for `run`.
        timeout
            As for calls of functions.
        """
        options = {
            "env": None if env is None else dict(env),
            "stdin": stdin,
            "piped_input": piped_input,
            "time_limit": time_limit,
            "output_limit": output_limit,
        }
        made: Process = _native.start_op(self, program, list(args), options, timeout).wait()
        return made

    def lease(
        self,
        device: Any,
        *,
        max_duration: float | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Lease:
        """Wait for a lease on a device: until it ends, no other session of the server has one.

        Parameters
        ----------
        device : Device or str
            Such as ``cuda:0``.
        max_duration : float, optional
            Seconds after which the server ends the session, if the lease is still held.
        priority : int
            The highest is granted first.
        timeout : float, optional
            Seconds to wait. Giving up leaves the queue at once.
        """
        made: Lease = _native.lease_op(self, device, max_duration, priority, timeout).wait()
        return made

    def request_lease(
        self,
        device: Any,
        *,
        max_duration: float | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> LeaseRequest:
        """Ask for a lease without waiting for it; see `lease`."""
        made: LeaseRequest = _native.request_lease_op(self, device, max_duration, priority, timeout).wait()
        return made

    def listen(self, address: str, *, timeout: float | None = None) -> Listener:
        """Have the server listen at an address, for connections that this side serves.

        Parameters
        ----------
        address : str
            Such as ``tcp://127.0.0.1:0`` or ``unix:/run/x.sock``, at the server.
        timeout
            As for calls of functions.
        """
        made: Listener = _native.listen_op(self, address, timeout).wait()
        return made

    def ended(self) -> BaseException:
        """Wait until the session ends, and return why."""
        return self.ended_op().wait()

    def close(self, *, timeout: float | None = None) -> None:
        """End the session. Objects of it do not work any more.

        Parameters
        ----------
        timeout : float, optional
            Seconds for which requests that are under way may go on; by default they complete.
        """
        if not self.is_closed:
            try:
                self.shutdown_op(timeout).wait()
            except DeadlineExceededError:
                pass
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
        """Close the session. If the peer is gone already, that is no error.

        An exception does not wait for requests that are under way.
        """
        try:
            self.close(timeout=None if kind is None else 1.0)
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
    labels: Mapping[str, str] | None = None,
    devices: Sequence[str] = (),
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    cert_key: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    workspace: str | None = None,
    connect_timeout: float | None = None,
    queue_timeout: float | None = None,
    tracker_outage: float | None = None,
    keep_alive: float | None = None,
    spin: float | None = None,
    shared_memory: bool = True,
    retry: RetryPolicy | None = None,
) -> Session:
    """Open a session, and wait for it.

    Parameters
    ----------
    address : str
        Of a server (``tcp://board:9090``, ``tls://``, ``quic://``, ``ws://``, ``unix:PATH``,
        ``ssh://host``, ``exec:PROGRAM``) or of a tracker (``tracker://host:9190/key``), which gives
        a free server of that key. ``@NAME`` is a server that the file `config` names, and ``@`` its
        default one, as for rpc-cli.
    via : sequence of str
        Addresses of hops on the way, the first one dialled from here.
    key : str, optional
        Key that the server must have.
    labels : mapping, optional
        Labels that a tracker's server must have.
    devices : sequence of str
        Devices that a tracker's server must have, such as ``cuda`` or
        ``cuda,target=cuda -arch=sm_90``.
    token_file, ca, cert, cert_key : path, optional
        A file of tokens that both sides know; authorities that the server's certificate must come
        from; and the own certificate with its key, as PEM files. With a token and no `ca` the
        server may have any certificate, because the token proves both sides to each other.
    config : path, optional
        File with named servers; ``~/.config/rpc/config.toml`` by default.
    workspace : str, optional
        Folder for files that the server keeps under this name; without one, files end with the
        session.
    connect_timeout : float, optional
        Seconds for each step of connecting; 10 by default.
    queue_timeout : float, optional
        Seconds to wait for a free server of a tracker.
    tracker_outage : float, optional
        Seconds for which an unreachable tracker is asked again while a request waits.
    keep_alive : float, optional
        Seconds between pings; a peer that is silent for three times as long is given up.
    spin : float, optional
        Seconds for which a thread polls before it sleeps; 0 by default.
    shared_memory : bool
        Let copies go through shared memory if the server runs on this machine.
    retry : RetryPolicy, optional
        Repeat requests, and open the next session when this one was lost: functions that were found
        by their names go on there, and all other objects went with it. Requests of one lane then
        wait for each other, and `Function.pipe` and its like fail.

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
        "labels": None if labels is None else list(labels.items()),
        "devices": list(devices) or None,
        "token_file": token_file,
        "ca": ca,
        "cert": cert,
        "cert_key": cert_key,
        "config": config,
        "workspace": workspace,
        "connect_timeout": connect_timeout,
        "queue_timeout": queue_timeout,
        "tracker_outage": tracker_outage,
        "keep_alive": keep_alive,
        "spin": spin,
        "shared_memory": shared_memory,
    }
    made: Session = _native.connect(address, options, None if retry is None else retry._terms()).wait()
    return made


__all__ = [
    "CONCURRENT",
    "Callback",
    "Connection",
    "DataType",
    "DenseArray",
    "Device",
    "Files",
    "Function",
    "Lease",
    "LeaseRequest",
    "Listener",
    "Module",
    "Object",
    "Process",
    "RemoteFile",
    "Session",
    "Tensor",
    "connect",
]

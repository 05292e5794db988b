"""The names of TVM's `tvm.rpc` over the sessions of this package, without TVM.

>>> from tensor_rpc.compat import tvm as rpc
>>> session = rpc.connect("board.lan", 9090, "rasp3b")  # doctest: +SKIP
>>> x = rpc.tensor(np.ones(4, "float32"), session.cpu())  # doctest: +SKIP

A host and a port are those of a server that speaks TVM's protocol: one of TVM, or one of this project
with ``--tvm``. An address with a scheme (``tcp://board:9090``, ``tracker://host:9190/key``) is taken as
it is, and has no port beside it: the session is a native one, with all that such sessions have.

What fails at the peer is an `RPCError`, which is a `RuntimeError` as that of TVM. Options that this
package has no use for are refused with a `tensor_rpc.UnsupportedError`, and never ignored.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import numbers
import os
import posixpath
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import PurePath
from typing import Any, ClassVar, TypeVar

import tensor_rpc as _rpc

T = TypeVar("T")


class RPCError(RuntimeError):
    """An operation of a session or of a tracker has failed. ``__cause__`` is the package's own exception.

    Attributes
    ----------
    kind : str
        What went wrong, in one word, as `tensor_rpc.RpcError` has it.
    may_have_run : bool
        False if the request certainly had no effect.
    is_retryable : bool
        True if the same request may succeed later.
    """

    kind: str = "internal"
    may_have_run: bool = False
    is_retryable: bool = False


class RPCSessionTimeoutError(RPCError):
    """The time of the session (`session_timeout`) has passed."""


class FunctionNotFoundError(RPCError, AttributeError):
    """The server or the module has no function of that name."""


class Device:
    """A device of a session, as `RPCSession.device` makes it."""

    def __init__(self, session: RPCSession, device: _rpc.Device) -> None:
        """Make it; programs use `RPCSession.device`."""
        self._rpc_sess = session
        self._device = device

    @property
    def type(self) -> str:
        """Kind of the device, such as ``cpu``."""
        return self._device.kind

    @property
    def index(self) -> int:
        """Index among the devices of that kind."""
        return self._device.index

    def dlpack_device_type(self) -> int:
        """Return DLPack's number of the kind, without the session in it."""
        for number in range(1, _KINDS):
            if _rpc.Device((number, 0)).kind == self.type:
                return number
        raise ValueError(f"DLPack has no number for {self.type}")

    @property
    def exist(self) -> bool:
        """True if the device exists at the server."""
        return bool(self._attribute("exists"))

    @property
    def max_threads_per_block(self) -> int | None:
        """Largest number of threads of one block."""
        return self._number("max_threads_per_block")

    @property
    def warp_size(self) -> int | None:
        """Threads that run in lockstep."""
        return self._number("warp_size")

    @property
    def max_shared_memory_per_block(self) -> int | None:
        """Largest shared memory of one block, in bytes."""
        return self._number("max_shared_memory_per_block")

    @property
    def compute_version(self) -> str | None:
        """Compute capability, such as ``9.0``."""
        return self._text("compute_version")

    @property
    def device_name(self) -> str | None:
        """Vendor's name of the device."""
        return self._text("name")

    @property
    def max_clock_rate(self) -> int | None:
        """Highest clock rate in kHz."""
        return self._number("max_clock_rate")

    @property
    def multi_processor_count(self) -> int | None:
        """Number of processors that run independently."""
        return self._number("compute_units")

    @property
    def api_version(self) -> int | None:
        """Version of the API that drives the device."""
        return self._number("api_version")

    @property
    def driver_version(self) -> str | None:
        """Version of the driver."""
        return self._text("driver_version")

    @property
    def l2_cache_size_bytes(self) -> int | None:
        """Size of the L2 cache in bytes."""
        return self._number("l2_cache_size")

    @property
    def total_global_memory(self) -> int | None:
        """Size of the memory in bytes."""
        return self._number("total_memory")

    def sync(self, stream: Any = None) -> None:
        """Wait until the work of the device's current stream has completed."""
        if stream is not None:
            raise _rpc.UnsupportedError("sync waits for the current stream: use tensor_rpc.Session.stream_wait")
        with _errors():
            self._rpc_sess._session.stream_wait(self._device)

    def _attribute(self, name: str) -> Any:
        with _errors():
            return self._rpc_sess._session.attribute(self._device, name)

    def _number(self, name: str) -> int | None:
        value = self._attribute(name)
        return None if value is None else int(value)

    def _text(self, name: str) -> str | None:
        value = self._attribute(name)
        return None if value is None else str(value)

    def __eq__(self, other: object) -> bool:
        """Return true for the same device of the same session."""
        return isinstance(other, Device) and self._rpc_sess is other._rpc_sess and self._device == other._device

    def __hash__(self) -> int:
        """Return a hash of the device's name."""
        return hash(self._device)

    def __repr__(self) -> str:
        """Return the device and its session."""
        return f"<device {self._device} of {self._rpc_sess!r}>"


class Tensor:
    """A tensor on a device of a session. The last reference frees it there."""

    def __init__(self, session: RPCSession, tensor: _rpc.Tensor) -> None:
        """Make it; programs use `tensor` and `empty`."""
        self._rpc_sess = session
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """Data type of the elements, such as ``float32``."""
        return str(self._tensor.dtype)

    @property
    def device(self) -> Device:
        """Device that the elements are on."""
        return Device(self._rpc_sess, self._tensor.device)

    def numpy(self) -> Any:
        """Copy the elements into a new array of numpy."""
        with _errors():
            return self._tensor.numpy()

    def copyfrom(self, source: Any) -> Tensor:
        """Fill the tensor, and return it.

        Parameters
        ----------
        source : array or Tensor
            Of the same shape. An array of numpy, or a list, of another data type is converted. The
            bytes of a tensor of the same session stay at the server.

        Raises
        ------
        ValueError
            The shape is another one.
        """
        if isinstance(source, Tensor):
            source.copyto(self)
            return self
        source = _array_of(source, self.dtype)
        shape = getattr(source, "shape", None)
        if shape is not None and tuple(shape) != self.shape:
            raise ValueError(f"the shapes do not match: {tuple(shape)} and {self.shape}")
        with _errors():
            self._tensor.copy_from(source)
        return self

    def copyto(self, target: Tensor | Device, mem_scope: str | None = None) -> Tensor:
        """Copy the elements to another tensor, or to a new one, and return that.

        Parameters
        ----------
        target : Tensor or Device
            Tensor of the same shape and data type, or device of a new one. Between sessions the
            elements go through this process.
        mem_scope : str, optional
            Memory scope of a new tensor.
        """
        if isinstance(target, Device):
            target = empty(self.shape, self.dtype, target, mem_scope)
        elif not isinstance(target, Tensor):
            raise ValueError(f"the target is a tensor or a device, and not {target!r}")
        elif mem_scope is not None:
            raise ValueError("the target has a memory scope already")
        if target.shape != self.shape or target.dtype != self.dtype:
            ours, theirs = (f"{each.shape} {each.dtype}" for each in (self, target))
            raise ValueError(f"the tensors do not match: {ours} and {theirs}")
        with _errors():
            is_near = target._rpc_sess is self._rpc_sess
            target._tensor.copy_from(self._tensor if is_near else self._tensor.download())
        return target

    def __len__(self) -> int:
        """Return the outermost dimension."""
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """Return shape, type and place; no element is copied for it."""
        return repr(self._tensor)


class Function:
    """A function of a session or of a module."""

    def __init__(self, session: RPCSession, function: _rpc.Function) -> None:
        """Make it; programs use `RPCSession.get_function`."""
        self._rpc_sess = session
        self._function = function

    def __call__(self, *args: Any, timeout: float | None = None) -> Any:
        """Call the function, and wait for it.

        Parameters
        ----------
        *args
            Values, and objects of the session. Arrays are made tensors there first (`tensor`).
        timeout : float, optional
            Seconds after which the call fails. TVM's functions have no such parameter.

        Raises
        ------
        RPCError
            It, or one of its subclasses.
        """
        sent = [_sent(each) for each in args]
        with _errors():
            result = self._function(*sent, timeout=timeout)
        return _received(self._rpc_sess, result)

    def __repr__(self) -> str:
        """Return the name."""
        return repr(self._function)


class BenchmarkResult(_rpc.Timing):
    """Run times of a function in seconds: `results`, `mean`, `median`, `min`, `max` and `std`."""


class Module:
    """A module of a session."""

    entry_name: ClassVar[str] = "main"

    def __init__(self, session: RPCSession, module: _rpc.Module) -> None:
        """Make it; programs use `RPCSession.load_module`."""
        self._rpc_sess = session
        self._module = module

    def get_function(self, name: str, query_imports: bool = True) -> Function:
        """Return the function `name`.

        With `query_imports`, a function that the module lacks is looked up in those that it imports, which is
        what TVM's clients always ask for.

        Raises
        ------
        FunctionNotFoundError
            The module has no such function.
        """
        if query_imports:
            return Function(self._rpc_sess, _found(name, self._module.get_function))
        session = self._rpc_sess
        find = session._of_tvm("tvm.rpc.server.ModuleGetFunction")
        args: list[Any] = [self._module, name, False]
        if find is None:
            find, args = session._of_tvm("rpc.module.own_function"), [self._module, name]
        if find is None:
            raise _rpc.UnsupportedError("query_imports=False is not supported: the server has no function for that")
        ask = find
        found = _found(name, lambda _: ask(*args))
        if not isinstance(found, _rpc.Function):
            # A server of TVM finds nothing, which is no error there.
            missing = FunctionNotFoundError(f"the module itself has no function '{name}'")
            missing.kind = "not_found"
            raise missing
        return Function(session, found)

    def implements_function(self, name: str, query_imports: bool = True) -> bool:
        """Return true if the module has the function `name`; see `get_function`."""
        try:
            self.get_function(name, query_imports)
        except FunctionNotFoundError:
            return False
        return True

    def import_module(self, module: Module) -> None:
        """Let functions that this module lacks be found in `module`, for its own code, too.

        Raises
        ------
        RPCError
            The modules would import each other; or the sessions of the server share their modules.
        """
        session = self._rpc_sess
        function = session._of_tvm("tvm.rpc.server.ImportModule") or session._of_tvm("rpc.module.add_import")
        if function is None:
            raise _rpc.UnsupportedError("the server has no import_module: link the modules into one library")
        Function(session, function)(self, module)

    def time_evaluator(
        self,
        func_name: str,
        dev: Device,
        number: int = 10,
        repeat: int = 1,
        min_repeat_ms: int = 0,
        limit_zero_time_iterations: int = 100,
        cooldown_interval_ms: int = 0,
        repeats_to_cooldown: int = 1,
        cache_flush_bytes: int = 0,
        f_preproc: str = "",
    ) -> Callable[..., BenchmarkResult]:
        """Return a function that measures another one at the server.

        Parameters
        ----------
        func_name : str
            Name of the function in the module.
        dev : Device
            Device of the session that the function runs on.
        number : int
            Calls in one sample, at first.
        repeat : int
            Samples.
        min_repeat_ms : int
            Shortest time of a sample; the number of calls grows until it is reached.
        limit_zero_time_iterations : int
            Attempts of a server whose clock stands still. For servers of TVM alone.
        cooldown_interval_ms, repeats_to_cooldown : int
            Pause, and number of samples after which it is made. By TVM's protocol alone.
        cache_flush_bytes : int
            Bytes that are written before each sample, so that caches hold nothing else.
        f_preproc : str
            Name of a function that is called before each sample. By TVM's protocol alone.

        Returns
        -------
        callable
            It takes the arguments of the function, and returns a `BenchmarkResult`.

        Raises
        ------
        FunctionNotFoundError
            The module has no such function.
        tensor_rpc.UnsupportedError
            The session is a native one, which has no such option.
        """
        options = _Options(
            number,
            repeat,
            min_repeat_ms,
            limit_zero_time_iterations,
            cooldown_interval_ms,
            repeats_to_cooldown,
            cache_flush_bytes,
            f_preproc,
        )
        function = self.get_function(func_name)
        return self._rpc_sess._evaluator(self._module, func_name, function, dev, options)

    def __getitem__(self, name: str) -> Function:
        """Return the function `name`; the same as `get_function`."""
        return self.get_function(name)

    def __call__(self, *args: Any) -> Any:
        """Call the function `entry_name`."""
        return self.get_function(self.entry_name)(*args)


class RPCSession:
    """A session with a server, which ends with the last reference to it or to an object of it.

    Unlike that of TVM it is a context manager, too, and can be closed.
    """

    def __init__(self, session: _rpc.Session) -> None:
        """Make it of a session of the package; programs use `connect`."""
        self._session = session

    def get_function(self, name: str) -> Function:
        """Return the function `name` of the server.

        Raises
        ------
        FunctionNotFoundError
            The server has no such function.
        """
        return Function(self, _found(name, self._session.get_function))

    def system_lib(self) -> Module:
        """Return the module of the functions that are linked into the server.

        Raises
        ------
        tensor_rpc.UnsupportedError
            The session is a native one, where functions of the server are those of the session.
        """
        function = self._of_tvm("ffi.SystemLib")
        if function is None:
            raise _rpc.UnsupportedError("a native session has no system_lib: use get_function")
        module = Function(self, function)()
        if not isinstance(module, Module):
            raise RPCError(f"the system library is a module, and the server has sent {module!r}")
        return module

    def load_module(self, path: str) -> Module:
        """Load a module of which the file was uploaded before."""
        with _errors():
            return Module(self, self._session.load(f"remote:{path}"))

    def download_linked_module(self, path: str) -> bytearray:
        """Link an uploaded file at the server, and download the module."""
        function = self._of_tvm("tvm.rpc.server.download_linked_module")
        if function is None:
            raise _rpc.UnsupportedError("a native session has no download_linked_module: link the module here")
        return bytearray(Function(self, function)(path))

    def upload(self, data: str | os.PathLike[str] | bytes | bytearray, target: str | None = None) -> None:
        """Send a file to the session's folder.

        Parameters
        ----------
        data : path or bytes
            Path of a local file, or the content.
        target : str, optional
            Path in the folder; the name of the local file by default.
        """
        if isinstance(data, (bytes, bytearray)):
            if not target:
                raise ValueError("the content of a file needs a target")
            source: Any = bytes(data)
        else:
            source = os.fspath(data)
            target = target or PurePath(source).name
        with _errors():
            self._session.files.put(target, source)

    def download(self, path: str) -> bytearray:
        """Fetch a file of the session's folder."""
        with _errors():
            return bytearray(self._session.files.get(path))

    def remove(self, path: str) -> None:
        """Remove a file of the session's folder, or a folder in it with its content."""
        with _errors():
            self._session.files.rm(path)

    def listdir(self, path: str) -> str:
        """Return the names in a folder of the session's folder, with commas between them."""
        folder = posixpath.normpath(path) if path else "."
        inside = "" if folder == "." else f"{folder}/"
        with _errors():
            listed = [entry.name for entry in self._session.files.ls(inside.rstrip("/"))]
            # TVM's protocol lists folders among the files.
            if self._of_tvm("tvm.rpc.server.listdir") is None:
                listed += self._session.files.folders()
        below = (name.removeprefix(inside) for name in listed if name.startswith(inside))
        return ",".join(sorted({name.split("/")[0] for name in below} - {""}))

    def device(self, dev_type: int | str, dev_id: int = 0) -> Device:
        """Return a device of the session.

        Parameters
        ----------
        dev_type : int or str
            Number of DLPack, or a name: ``cuda``, ``cuda:1``, ``cl``.
        dev_id : int
            Index among the devices of that kind.
        """
        if isinstance(dev_type, str):
            name, colon, index = dev_type.partition(":")
            if colon:
                if dev_id != 0 or not index.isdecimal():
                    raise ValueError(f"{dev_type!r} with index {dev_id} is no device: one like 'cuda:1' is wanted")
                dev_id = int(index)
            if name not in _DEVICE_TYPES:
                raise ValueError(f"{name!r} is no type of devices: {', '.join(_DEVICE_TYPES)}")
            dev_type = _DEVICE_TYPES[name]
        if not 1 <= int(dev_type) < _KINDS:
            raise ValueError(f"types of devices are 1 to {_KINDS - 1}, and not {dev_type}")
        if not 0 <= dev_id < 1 << 31:
            raise ValueError(f"{dev_id} is no index of a device")
        return Device(self, _rpc.Device((int(dev_type), dev_id)))

    def cpu(self, dev_id: int = 0) -> Device:
        """Return the CPU."""
        return self.device("cpu", dev_id)

    def cuda(self, dev_id: int = 0) -> Device:
        """Return a GPU of CUDA."""
        return self.device("cuda", dev_id)

    def cl(self, dev_id: int = 0) -> Device:
        """Return a device of OpenCL."""
        return self.device("opencl", dev_id)

    def vulkan(self, dev_id: int = 0) -> Device:
        """Return a device of Vulkan."""
        return self.device("vulkan", dev_id)

    def metal(self, dev_id: int = 0) -> Device:
        """Return a device of Metal."""
        return self.device("metal", dev_id)

    def rocm(self, dev_id: int = 0) -> Device:
        """Return a GPU of ROCm."""
        return self.device("rocm", dev_id)

    def ext_dev(self, dev_id: int = 0) -> Device:
        """Return an extension device."""
        return self.device("ext_dev", dev_id)

    def hexagon(self, dev_id: int = 0) -> Device:
        """Return a Hexagon device."""
        return self.device("hexagon", dev_id)

    def webgpu(self, dev_id: int = 0) -> Device:
        """Return a device of WebGPU."""
        return self.device("webgpu", dev_id)

    def time_evaluator(
        self,
        func_name: str,
        dev: Device,
        number: int = 10,
        repeat: int = 1,
        min_repeat_ms: int = 0,
        limit_zero_time_iterations: int = 100,
        cooldown_interval_ms: int = 0,
        repeats_to_cooldown: int = 1,
        cache_flush_bytes: int = 0,
        f_preproc: str = "",
    ) -> Callable[..., BenchmarkResult]:
        """Return a function that measures a function of the server; see `Module.time_evaluator`.

        TVM's own session has no such method: functions of servers of this project need no module.
        """
        options = _Options(
            number,
            repeat,
            min_repeat_ms,
            limit_zero_time_iterations,
            cooldown_interval_ms,
            repeats_to_cooldown,
            cache_flush_bytes,
            f_preproc,
        )
        return self._evaluator(None, func_name, self.get_function(func_name), dev, options)

    def _evaluator(
        self, module: _rpc.Module | None, name: str, function: Function, dev: Device, options: _Options
    ) -> Callable[..., BenchmarkResult]:
        if not isinstance(dev, Device) or dev._rpc_sess is not self:
            raise ValueError(f"the device is one of the session, and not {dev!r}")
        there = self._of_tvm("runtime.RPCTimeEvaluator")
        if there is None:
            return self._native_evaluator(function, options)
        terms = [module, name, dev.dlpack_device_type(), dev.index, *astuple(options)]
        with _errors():
            timer = Function(self, there(*terms))

        def evaluate(*args: Any) -> BenchmarkResult:
            samples = timer(*args)
            if not isinstance(samples, bytes) or len(samples) != 8 * options.repeat:
                raise RPCError(f"{options.repeat} samples were wanted, and the server has sent {samples!r}")
            return BenchmarkResult(struct.unpack(f"<{options.repeat}d", samples))

        return evaluate

    def _native_evaluator(self, function: Function, options: _Options) -> Callable[..., BenchmarkResult]:
        pause = (options.limit_zero_time_iterations, options.cooldown_interval_ms, options.repeats_to_cooldown)
        if pause != (100, 0, 1) or options.f_preproc:
            raise _rpc.UnsupportedError(
                "a native session measures without limit_zero_time_iterations, cooldown_interval_ms, "
                "repeats_to_cooldown and f_preproc: connect by host and port"
            )

        def evaluate(*args: Any) -> BenchmarkResult:
            sent = [_sent(each) for each in args]
            with _errors():
                timing = self._session.time(
                    function._function,
                    *sent,
                    number=options.number,
                    repeat=options.repeat,
                    min_repeat_ms=options.min_repeat_ms,
                    cache_flush_bytes=options.cache_flush_bytes,
                )
            return BenchmarkResult(timing.results)

        return evaluate

    def _of_tvm(self, name: str) -> _rpc.Function | None:
        """Return a function of TVM's protocol; None if the session is a native one."""
        with _errors():
            try:
                return self._session.get_function(name)
            except _rpc.NotFoundError:
                return None

    def close(self) -> None:
        """End the session. Calls that still run are given up after a second."""
        with _errors():
            self._session.close(timeout=_CLOSE_TIMEOUT)

    def __enter__(self) -> RPCSession:
        """Return the session."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the session. If it has ended already, that is no error."""
        with contextlib.suppress(ConnectionError, _rpc.SessionTimeoutError):
            self._session.close(timeout=_CLOSE_TIMEOUT)

    def __repr__(self) -> str:
        """Return where the session leads."""
        return repr(self._session)


class LocalSession(RPCSession):
    """A session in this process, with the functions that every session has."""

    def __init__(self) -> None:
        """Open it."""
        super().__init__(_rpc.local())


class PopenSession:
    """Not there: a session with a program that TVM starts and talks to through pipes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error."""
        raise _rpc.UnsupportedError(
            "PopenSession is not supported: connect('exec:rpc-server serve --stdio') starts a server of this project"
        )


class TrackerSession:
    """A connection to a tracker, which gives the client servers: one of TVM, or of this project with ``--tvm``.

    One thread uses it at a time.
    """

    def __init__(self, addr: tuple[str, int]) -> None:
        """Connect to the tracker at a host and a port."""
        self._addr = addr
        self._sock: socket.socket | None = None
        self._connected()

    def close(self) -> None:
        """Close the connection. The next request opens it again."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def summary(self) -> dict[str, Any]:
        """Return what the tracker tells: ``queue_info`` by key, and ``server_info``."""
        told = self._ask([_SUMMARY])
        if not isinstance(told, dict) or not {"queue_info", "server_info"} <= told.keys():
            raise RPCError(f"the tracker has sent another summary than TVM's: {told!r}")
        return told

    def text_summary(self) -> str:
        """Return the summary as two tables."""
        told = self.summary()
        totals: dict[str, int] = {}
        servers = []
        for item in told["server_info"]:
            key = str(item["key"])
            servers.append((key, ":".join(str(part) for part in item["addr"])))
            plain = key.removeprefix("server:")
            totals[plain] = totals.get(plain, 0) + 1
        lines = ["Server List", f"{'server-address':<24} key"]
        lines += [f"{at:<24} {key}" for key, at in sorted(servers)]
        lines += ["", "Queue Status", f"{'key':<24} {'total':>7} {'free':>7} {'pending':>7}"]
        for key, queue in sorted(told["queue_info"].items()):
            lines.append(f"{key:<24} {totals.get(key, 0):>7} {queue['free']:>7} {queue['pending']:>7}")
        return "\n".join(lines) + "\n"

    def request(
        self,
        key: str,
        priority: int = 1,
        session_timeout: float = 0,
        max_retry: int = 5,
        session_constructor_args: Sequence[Any] | None = None,
    ) -> RPCSession:
        """Wait for a free server, and connect to it.

        Parameters
        ----------
        key : str
            Key of the server.
        priority : int
            The highest is served first.
        session_timeout : float
            Seconds after which the server ends the session; 0 is no limit.
        max_retry : int
            Number of attempts.
        session_constructor_args
            Servers behind that one; see `connect`.

        Raises
        ------
        RPCError
            All attempts have failed; ``__cause__`` is the last failure.
        """
        _check_timeout(session_timeout)
        _stops(session_constructor_args or ())
        last: Exception | None = None
        for _ in range(max_retry):
            try:
                granted = self._ask([_REQUEST, key, "", priority])
                try:
                    host, port, match_key = granted
                    at = _at(str(host), int(port))
                except (TypeError, ValueError):
                    raise RPCError(f"the tracker has sent no server: {granted!r}") from None
                return connect(at.host, at.port, str(match_key), session_timeout, session_constructor_args)
            except (OSError, RPCError) as error:
                last = error
        raise RPCError(f"no server of key {key!r} after {max_retry} attempts: {last}") from last

    def request_and_run(
        self,
        key: str,
        func: Callable[[RPCSession], T],
        priority: int = 1,
        session_timeout: float = 0,
        max_retry: int = 2,
    ) -> T:
        """Call a function with a session of a free server, and again with another one if that fails.

        Parameters
        ----------
        func : callable
            Function of a session, which may be called more than once.
        key, priority, session_timeout
            As for `request`.
        max_retry : int
            Number of attempts.

        Raises
        ------
        RPCSessionTimeoutError
            The time of the session has passed while the function ran, which is not tried again.
        RPCError
            All attempts have failed.
        """
        last: Exception | None = None
        for _ in range(max_retry):
            try:
                return self._run(func, self.request(key, priority, session_timeout))
            except (RPCSessionTimeoutError, _rpc.UnsupportedError):
                raise
            except RuntimeError as error:
                last = error
        raise RPCError(f"no success with key {key!r} after {max_retry} attempts: {last}") from last

    @staticmethod
    def _run(func: Callable[[RPCSession], T], session: RPCSession) -> T:
        try:
            # The session ends with the last reference, since the result may be an object of it.
            return func(session)
        except BaseException as error:
            # The error refers to the session, which would keep its place at the server.
            with contextlib.suppress(_rpc.RpcError):
                session.__exit__(type(error), error, None)
            raise

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.create_connection(self._addr, timeout=_TRACKER_TIMEOUT)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(struct.pack("<i", _TRACKER_MAGIC))
                if _receive(sock, 4) != struct.pack("<i", _TRACKER_MAGIC):
                    raise RPCError(f"no tracker of TVM's protocol answers at {self._addr}")
                # A request waits as long as no server is free.
                sock.settimeout(None)
            except BaseException:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def _ask(self, message: list[Any]) -> Any:
        """Send a message, and return the result in its reply."""
        try:
            sock = self._connected()
            data = json.dumps(message).encode()
            sock.sendall(struct.pack("<i", len(data)) + data)
            (size,) = struct.unpack("<i", _receive(sock, 4))
            if not 0 < size <= _MAX_TRACKER_REPLY:
                raise RPCError(f"the tracker announces a reply of {size} bytes")
            reply = json.loads(_receive(sock, size))
            if not isinstance(reply, list) or not reply:
                raise ValueError("a reply is a list")
        except (ValueError, RecursionError) as error:
            self.close()
            raise RPCError(f"the tracker has sent a malformed reply: {error}") from error
        except BaseException:
            # A reply that is still on its way would be taken for that to the next message.
            self.close()
            raise
        if reply[0] != _SUCCESS:
            raise RPCError(f"the tracker refuses: {', '.join(str(part) for part in reply[1:])}")
        return reply[1] if len(reply) > 1 else None

    def __del__(self) -> None:
        """Close the connection."""
        if getattr(self, "_sock", None) is not None:
            self.close()


class Server:
    """A server of this project that clients of TVM can use, in this process.

    Parameters
    ----------
    host : str
        Address to listen on, by default that of this machine alone, and not all as TVM's. Others need
        ``insecure=True``, because the protocol has no identity.
    port, port_end : int
        The first free port from `port` on is taken, below `port_end`; 0 is any.
    tracker_addr : (str, int), optional
        Tracker of TVM's protocol to register at. A `key` is needed then.
    key : str
        Key of the server.
    load_library : str or sequence of str, optional
        Libraries with functions that the server loads; a str has ``:`` between them.
    custom_addr : str, optional
        Host that the tracker tells clients.
    silent : bool
        Do not write events to standard error.
    is_proxy : bool
        `host` and `port` are those of a proxy at which the server waits, instead of its own: a `Proxy`, or
        one of TVM. It serves one client at a time, or as many as the setting ``capacity`` says.
    no_fork, server_init_callback, reuse_addr, timeout
        Not supported: anything but the default is an error.
    functions : sequence
        Functions of Python that are served; see `tensor_rpc.Server`.
    **settings
        Further settings of `tensor_rpc.Server`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9091,
        port_end: int = 9199,
        is_proxy: bool = False,
        tracker_addr: tuple[str, int] | None = None,
        key: str = "",
        load_library: str | Sequence[str] | None = None,
        custom_addr: str | None = None,
        silent: bool = False,
        no_fork: bool = False,
        server_init_callback: Callable[[], object] | None = None,
        reuse_addr: bool = True,
        timeout: float | None = None,
        *,
        functions: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        """Start the server."""
        _refuse("no_fork", no_fork, "the setting isolate says whether sessions have processes of their own")
        _refuse("server_init_callback", server_init_callback is not None, "call it before the server starts")
        _refuse("reuse_addr=False", not reuse_addr, "addresses are always used again")
        _refuse("timeout", timeout is not None, "the setting idle_timeout ends idle sessions")
        given: dict[str, Any] = {"tvm": True, "key": key or None}
        if load_library:
            given["library"] = load_library.split(":") if isinstance(load_library, str) else list(load_library)
        if tracker_addr is not None:
            _refuse("tracker_addr", is_proxy, "the proxy registers the servers that wait there")
            tracker = _at(*tracker_addr)
            given["tvm_tracker"] = f"{tracker.name}:{tracker.port}"
        if not silent:
            given["log_level"] = "info"
        given.update(settings)
        self.host = host
        if is_proxy:
            _refuse("custom_addr", custom_addr is not None, "clients reach the proxy")
            proxy = _at(host, port)
            self.port = proxy.port
            given["tvm_proxy"] = f"{proxy.name}:{proxy.port}"
            self._server = _rpc.Server(*functions, listen=(), **given).start()
            return
        self._server = self._start(host, port, port_end, custom_addr, functions, given)
        self.port = int(self._server.address.rpartition(":")[2])

    def _start(
        self,
        host: str,
        port: int,
        port_end: int,
        custom_addr: str | None,
        functions: Sequence[Any],
        settings: dict[str, Any],
    ) -> _rpc.Server:
        if custom_addr is not None and port == 0:
            raise _rpc.UnsupportedError("custom_addr needs a port, which is told to the tracker")
        last: Exception | None = None
        for each in range(port, port_end) if port else (0,):
            at = _at(host, each, lowest=0)
            if custom_addr is not None:
                settings["advertise"] = [f"tcp://{_at(custom_addr, each).name}:{each}"]
            try:
                return _rpc.Server(*functions, listen=f"tcp://{at.name}:{each}", **settings).start()
            except _rpc.RemoteIOError as error:
                last = error
        raise RPCError(f"no port of {host} from {port} to {port_end} can be listened on: {last}") from last

    def terminate(self) -> None:
        """End all sessions, and stop."""
        self._server.stop()

    def __repr__(self) -> str:
        """Return the addresses."""
        return repr(self._server)


class _Daemon:
    """A program of this package that runs as a process of its own, on the first free port of a range."""

    def __init__(
        self, command: str, host: str, port: int, port_end: int, web_port: int, silent: bool, settings: dict[str, Any]
    ) -> None:
        for each in range(port, port_end) if port else (0,):
            chosen = [each, web_port] if web_port else [each]
            listen = [f"tcp://{_at(host, each, lowest=0).name}:{each}" for each in chosen]
            if _are_free(host, each, web_port):
                self._process, address = _start(command, {"listen": listen, **settings}, silent)
                if address:
                    break
        else:
            raise RPCError(f"no port of {host} from {port} to {port_end} can be listened on")
        self.host = host
        self.port = int(address.rpartition(":")[2])

    def terminate(self) -> None:
        """End the process."""
        process = self.__dict__.pop("_process", None)
        if process is not None:
            _end(process)

    def __del__(self) -> None:
        """End the process."""
        self.terminate()


class Tracker(_Daemon):
    """A tracker of this project with ``--tvm``, as a process, which ends with this program.

    Parameters
    ----------
    host : str
        Address to listen on, by default that of this machine alone, and not all as TVM's. Others need
        ``insecure=True``, because the protocol has no identity.
    port, port_end : int
        The first free port from `port` on is taken, below `port_end`; 0 is any.
    silent : bool
        Do not write events to standard error.
    reuse_addr, timeout
        Not supported: anything but the default is an error.
    **settings
        Further settings of ``rpc-server tracker``, with underscores.

    Attributes
    ----------
    host : str
        As given.
    port : int
        The port that was taken.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9190,
        port_end: int = 9199,
        silent: bool = False,
        reuse_addr: bool = True,
        timeout: float | None = None,
        **settings: Any,
    ) -> None:
        """Start the tracker, and wait until it listens."""
        _refuse("reuse_addr=False", not reuse_addr, "addresses are always used again")
        _refuse("timeout", timeout is not None, "requests at a tracker wait until there is a server")
        super().__init__("tracker", host, port, port_end, 0, silent, {"tvm": True, **settings})


class Proxy(_Daemon):
    """A relay of this project with ``--tvm``, as a process, which ends with this program.

    Servers wait there (``Server(…, is_proxy=True)``, or those of TVM), and clients reach them by their
    keys. Its ports speak WebSocket, too.

    Parameters
    ----------
    host : str
        Address to listen on. Others than those of this machine need ``insecure=True``, because the
        protocol has no identity.
    port, port_end : int
        The first free port from `port` on is taken, below `port_end`; 0 is any.
    web_port : int
        Further port, for servers that come by WebSocket; 0 for none.
    timeout_client, timeout_server : float
        Seconds that a client waits for a server, and a server for a client.
    tracker_addr : (str, int), optional
        Tracker of TVM's protocol at which waiting servers are registered. Clients get a match key there.
    index_page, resource_files
        Not supported: anything but the default is an error.
    silent : bool
        Do not write events to standard error.
    **settings
        Further settings of ``rpc-server relay``, with underscores.

    Attributes
    ----------
    host : str
        As given.
    port : int
        The port that was taken.
    """

    def __init__(
        self,
        host: str,
        port: int = 9091,
        port_end: int = 9199,
        web_port: int = 0,
        timeout_client: float = 600,
        timeout_server: float = 600,
        tracker_addr: tuple[str, int] | None = None,
        index_page: str | None = None,
        resource_files: Sequence[str] | None = None,
        *,
        silent: bool = False,
        **settings: Any,
    ) -> None:
        """Start the relay, and wait until it listens."""
        _refuse("index_page", index_page is not None, "it serves no pages")
        _refuse("resource_files", resource_files is not None, "it serves no files")
        given: dict[str, Any] = {"tvm": True}
        for name, seconds in (("tvm_client_timeout", timeout_client), ("tvm_server_timeout", timeout_server)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{seconds} is no time to wait")
            given[name] = f"{math.ceil(seconds * 1000)}ms"
        if tracker_addr is not None:
            tracker = _at(*tracker_addr)
            given["tvm_tracker"] = f"{tracker.name}:{tracker.port}"
        super().__init__("relay", host, port, port_end, web_port, silent, {**given, **settings})


def connect(
    url: str,
    port: int | None = None,
    key: str = "",
    session_timeout: float = 0,
    session_constructor_args: Sequence[Any] | None = None,
    enable_logging: bool = False,
) -> RPCSession:
    """Open a session, and wait for it.

    Parameters
    ----------
    url : str
        Host, for TVM's protocol; or an address with a scheme, as `tensor_rpc.connect` takes it.
    port : int, optional
        Port of the host. Addresses with a scheme have theirs already.
    key : str
        Key that the server must have, or a match key of a tracker.
    session_timeout : float
        Seconds after which the server ends the session; 0 is no limit. By TVM's protocol alone.
    session_constructor_args
        Servers behind the first one, each of which is dialled by the one before: ``"rpc.Connect"``, host, port, key
        and a truth value that means nothing, again and again. By TVM's protocol alone.
    enable_logging
        Not supported: anything but the default is an error.

    Raises
    ------
    RPCError
        Nobody answers there, or the server refuses the session.
    ValueError
        Host, port or time are wrong.
    tensor_rpc.UnsupportedError
        An option is not supported.
    """
    _check_timeout(session_timeout)
    stops = _stops(session_constructor_args or ())
    _refuse("enable_logging", enable_logging, "the server has a log of its own")
    if _SCHEME.match(url):
        if port is not None:
            raise ValueError(f"{url!r} is an address, which has no port beside it")
        address = url
        if session_timeout and not url.startswith("tvm://"):
            raise _rpc.UnsupportedError(
                "session_timeout is of TVM's protocol: connect by host and port, or limit calls with timeout="
            )
        if session_timeout and "?" in url:
            raise ValueError(f"the address {url!r} has parameters: write the time there, as ?timeout=60")
        if stops:
            raise _rpc.UnsupportedError(
                "session_constructor_args are of a host and a port: use tensor_rpc.connect(…, via=[…]), "
                "or an address such as tvm://host:9090?then=next:9090"
            )
    elif port is None:
        raise ValueError(f"the host {url!r} needs a port, or an address a scheme, as in tcp://{url}")
    else:
        at = _at(url, port)
        address = f"tvm://{at.name}:{at.port}"
    parameters = [f"timeout={float(session_timeout)!r}"] if session_timeout else []
    if stops:
        parameters.append(f"then={';'.join(stops)}")
    if parameters:
        address += "?" + "&".join(parameters)
    with _errors():
        return RPCSession(_rpc.connect(address, key=key or None))


def connect_tracker(url: str, port: int) -> TrackerSession:
    """Connect to a tracker that speaks TVM's protocol: one of TVM, or of this project with ``--tvm``.

    Parameters
    ----------
    url : str
        Host. Servers of a native tracker are had by ``connect("tracker://host:9190/key")``.
    port : int
        Its port.
    """
    if _SCHEME.match(url):
        raise ValueError(f"{url!r} is no host: a native tracker gives servers by connect('tracker://host:9190/key')")
    at = _at(url, port)
    return TrackerSession((at.host, at.port))


def empty(
    shape: Sequence[int], dtype: Any = "float32", device: Device | None = None, mem_scope: str | None = None
) -> Tensor:
    """Allocate a tensor on a device of a session.

    Parameters
    ----------
    shape : sequence of int
        Dimensions, outermost first.
    dtype : data type
        A name, or a data type of numpy.
    device : Device
        Device of a session.
    mem_scope : str, optional
        Memory scope of the device.
    """
    session, there = _place(device)
    with _errors():
        made = session._session.empty([int(size) for size in shape], dtype, there, mem_scope)
    return Tensor(session, made)


def tensor(arr: Any, device: Device | None = None, mem_scope: str | None = None) -> Tensor:
    """Make a tensor on a device of a session, with the elements of an array.

    Parameters
    ----------
    arr : array or Tensor
        Array in host memory; with numpy, nested lists, too; or a tensor of any session.
    device : Device
        Device of a session.
    mem_scope : str, optional
        Memory scope of the device.
    """
    session, there = _place(device)
    if isinstance(arr, Tensor):
        return arr.copyto(Device(session, there), mem_scope)
    with _errors():
        return Tensor(session, session._session.tensor(arr, there, mem_scope))


@dataclass(frozen=True)
class _Options:
    """Options of a measurement."""

    number: int
    repeat: int
    min_repeat_ms: int
    limit_zero_time_iterations: int
    cooldown_interval_ms: int
    repeats_to_cooldown: int
    cache_flush_bytes: int
    f_preproc: str

    def __post_init__(self) -> None:
        counts = (self.number, self.repeat, self.limit_zero_time_iterations, self.repeats_to_cooldown)
        times = (self.min_repeat_ms, self.cooldown_interval_ms, self.cache_flush_bytes)
        if min(counts) < 1 or min(times) < 0:
            raise ValueError("counts of a measurement are at least 1, and times and sizes are not negative")


@dataclass(frozen=True)
class _Location:
    """A host and a port."""

    host: str
    port: int

    @property
    def name(self) -> str:
        """Host as it is written in addresses."""
        return f"[{self.host}]" if ":" in self.host else self.host


def _at(host: str, port: int, lowest: int = 1) -> _Location:
    if not _HOST.match(host):
        raise ValueError(f"{host!r} is no host")
    if not lowest <= int(port) < 1 << 16:
        raise ValueError(f"{port} is no port")
    return _Location(host, int(port))


def _are_free(host: str, *ports: int) -> bool:
    """Return whether ports can be listened on."""
    with contextlib.ExitStack() as stack:
        for port in filter(None, ports):
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(address)
            except OSError:
                return False
    return True


def _start(command: str, settings: dict[str, Any], silent: bool) -> tuple[subprocess.Popen[str], str]:
    """Start a program of the package, and return it with its first address; without, if there is none."""
    words = [sys.executable, "-c", _PROGRAM, "\x1f".join(sys.path), command, "--exit-with-stdin"]
    words += ["--log-level", "off" if silent else "info"]
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        words.append(f"--{name.replace('_', '-')}={text.lower() if isinstance(value, bool) else text}")
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line:
        return process, line.split()[-1]
    code = process.wait()
    _end(process)
    if code == _NOT_AVAILABLE:
        return process, ""
    raise RPCError(f"{command} does not start, and ends with code {code}; it has said why on standard error")


def _end(process: subprocess.Popen[str]) -> None:
    """End a program that ends with its standard input."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _place(device: Device | None) -> tuple[RPCSession, _rpc.Device]:
    if not isinstance(device, Device):
        raise _rpc.UnsupportedError(f"tensors are on devices of sessions, such as session.cpu(), and not on {device!r}")
    return device._rpc_sess, device._device


def _check_timeout(session_timeout: float) -> None:
    if not (math.isfinite(session_timeout) and session_timeout >= 0):
        raise ValueError(f"{session_timeout} is no number of seconds")


def _stops(constructor: Sequence[Any]) -> list[str]:
    """Return the servers that a constructor of TVM names, as addresses do behind ``then=``."""
    stops: list[str] = []
    rest = list(constructor)
    while rest and rest != ["rpc.LocalSession"]:
        if len(rest) < 4 or rest[0] != "rpc.Connect":
            raise _rpc.UnsupportedError(
                "session_constructor_args are supported as servers: ['rpc.Connect', host, port, key, False, …]"
            )
        _, host, port, key = rest[:4]
        at = _at(str(host), int(port))
        stops.append(f"{at.name}:{at.port}" + (f"/{key}" if key else ""))
        rest = rest[5:]
    return stops


def _refuse(name: str, is_given: bool, instead: str) -> None:
    if is_given:
        raise _rpc.UnsupportedError(f"{name} is not supported: {instead}")


def _found(name: str, look_up: Callable[[str], _rpc.Function]) -> _rpc.Function:
    with _errors():
        try:
            return look_up(name)
        except _rpc.NotFoundError as error:
            raise _translated(error, FunctionNotFoundError) from error


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise the errors of sessions as those of TVM."""
    try:
        yield
    except _rpc.RpcError as error:
        # The text comes from servers of TVM, too, which have no kinds of errors.
        is_time = error.kind == "session_timeout" or "RPCSessionTimeoutError" in error.message
        raise _translated(error, RPCSessionTimeoutError if is_time else RPCError) from error


def _translated(error: _rpc.RpcError, kind: type[RPCError]) -> RPCError:
    made = kind(str(error))
    made.kind, made.may_have_run, made.is_retryable = error.kind, error.may_have_run, error.is_retryable
    return made


def _sent(value: Any) -> Any:
    """Return an argument as the package takes it."""
    if isinstance(value, Tensor):
        return value._tensor
    if isinstance(value, Function):
        return value._function
    if isinstance(value, Module):
        return value._module
    if isinstance(value, Device):
        return value._device
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [_sent(each) for each in value]
    if isinstance(value, dict):
        return {_sent(key): _sent(each) for key, each in value.items()}
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    is_of_package = isinstance(value, (_rpc.Tensor, _rpc.Function, _rpc.Callback))
    if not is_of_package and (hasattr(value, "__dlpack__") or isinstance(value, (array.array, memoryview))):
        raise TypeError("an array is no argument: make it a tensor on a device of the session first")
    if not is_of_package and callable(value):
        raise TypeError("a function of this process is no argument: use tensor_rpc.Session.callback")
    return value


def _received(session: RPCSession, value: Any) -> Any:
    """Return a result as TVM's programs take it."""
    if isinstance(value, _rpc.Tensor):
        return Tensor(session, value)
    if isinstance(value, _rpc.Function):
        return Function(session, value)
    if isinstance(value, _rpc.Module):
        return Module(session, value)
    if isinstance(value, _rpc.Device):
        return Device(session, value)
    if type(value) is list:
        return [_received(session, each) for each in value]
    if type(value) is dict:
        return {_received(session, key): _received(session, each) for key, each in value.items()}
    return value


def _array_of(source: Any, dtype: str) -> Any:
    """Return a source of elements with this data type, as far as numpy knows it."""
    if isinstance(source, (list, tuple, int, float)):
        import numpy

        return numpy.array(source, dtype=dtype)
    if type(source).__module__ == "numpy" and str(source.dtype) != dtype:
        return source.astype(dtype)
    return source


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise ConnectionResetError("the tracker has closed the connection")
        data += piece
    return bytes(data)


_DEVICE_TYPES = {
    "cpu": 1,
    "llvm": 1,
    "c": 1,
    "cuda": 2,
    "cuda_host": 3,
    "opencl": 4,
    "cl": 4,
    "vulkan": 7,
    "metal": 8,
    "vpi": 9,
    "rocm": 10,
    "rocm_host": 11,
    "ext_dev": 12,
    "cuda_managed": 13,
    "oneapi": 14,
    "webgpu": 15,
    "hexagon": 16,
    "maia": 17,
    "trn": 18,
}
"""DLPack's numbers of the names that TVM has for types of devices."""

_KINDS = 128
"""Bound of the numbers of types: TVM's clients have the session in the bits above."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\x1f'); "
    "from tensor_rpc._commands import rpc_server; rpc_server()"
)
"""Program of Python that is ``rpc-server``, with the path of modules as its first argument."""
_NOT_AVAILABLE = 69
"""Exit code of ``rpc-server`` if an address cannot be listened on."""
_END_TIMEOUT = 5.0
"""Seconds for a program to end."""

_SCHEME = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*://|unix:|exec:|@)")
_HOST = re.compile(r"[^\s/?#@\[\]]+\Z")

_TRACKER_MAGIC = 0x2F271
_SUCCESS = 0
_REQUEST = 4
_SUMMARY = 6
_TRACKER_TIMEOUT = 10.0
"""Seconds to wait for a tracker's greeting."""
_MAX_TRACKER_REPLY = 16 << 20
_CLOSE_TIMEOUT = 1.0
"""Seconds for which calls go on when a session is closed: a server of TVM does not stop them."""


__all__ = [
    "BenchmarkResult",
    "Device",
    "Function",
    "FunctionNotFoundError",
    "LocalSession",
    "Module",
    "PopenSession",
    "Proxy",
    "RPCError",
    "RPCSession",
    "RPCSessionTimeoutError",
    "Server",
    "Tensor",
    "Tracker",
    "TrackerSession",
    "connect",
    "connect_tracker",
    "empty",
    "tensor",
]

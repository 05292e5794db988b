"""Drive devices on other machines: calls, tensors, servers, and many workers from one program.

>>> import tensor_rpc as rpc
>>> with rpc.connect("tcp://board:9090") as session:  # doctest: +SKIP
...     print(session["add"](1, 2))
3

`tensor_rpc.aio` has the same operations for asyncio, and `tensor_rpc.disco` drives many workers.
"""

import atexit as _atexit
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tensor_rpc import _native
from tensor_rpc._blocking import (
    CONCURRENT,
    Connection,
    Files,
    Function,
    Lease,
    LeaseRequest,
    Listener,
    Module,
    Object,
    Pipe,
    Process,
    RemoteFile,
    Session,
    Tensor,
    connect,
)
from tensor_rpc._child import freeze_support, set_child_command
from tensor_rpc._errors import *  # noqa: F403
from tensor_rpc._errors import __all__ as _error_names
from tensor_rpc._functions import Registry, function, local
from tensor_rpc._native import Callback, Context, DataType, DenseArray, Device
from tensor_rpc._server import Server
from tensor_rpc._types import (
    FileEntry,
    FunctionInfo,
    ProgramError,
    RetryPolicy,
    RunResult,
    SendRoute,
    Shape,
    Timing,
)

if _TYPE_CHECKING:
    from tensor_rpc import aio

_os.register_at_fork(after_in_child=_native.forked)
_atexit.register(_native.finish_requests)


def __getattr__(name: str) -> _Any:
    """Import the parts that not every program needs."""
    if name == "aio":
        from importlib import import_module

        return import_module("tensor_rpc.aio")
    raise AttributeError(f"module 'tensor_rpc' has no attribute {name!r}")


__all__ = [
    "CONCURRENT",
    "Callback",
    "Connection",
    "Context",
    "DataType",
    "DenseArray",
    "Device",
    "FileEntry",
    "Files",
    "Function",
    "FunctionInfo",
    "Lease",
    "LeaseRequest",
    "Listener",
    "Module",
    "Object",
    "Pipe",
    "Process",
    "ProgramError",
    "Registry",
    "RemoteFile",
    "RetryPolicy",
    "RunResult",
    "SendRoute",
    "Server",
    "Session",
    "Shape",
    "Tensor",
    "Timing",
    "aio",
    "connect",
    "freeze_support",
    "function",
    "local",
    "set_child_command",
    *_error_names,
]

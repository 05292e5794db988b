"""Drive devices on other machines: calls, tensors, servers, and many workers from one program.

>>> import tensor_rpc as rpc
>>> with rpc.connect("tcp://board:9090") as session:  # doctest: +SKIP
...     print(session["add"](1, 2))
3

`tensor_rpc.aio` has the same operations for asyncio, and `tensor_rpc.disco` drives many workers.
"""

import os as _os

from tensor_rpc import _native
from tensor_rpc._blocking import (
    CONCURRENT,
    Function,
    Module,
    Object,
    Session,
    Tensor,
    connect,
)
from tensor_rpc._child import freeze_support, set_child_command
from tensor_rpc._errors import *  # noqa: F403
from tensor_rpc._errors import __all__ as _error_names
from tensor_rpc._functions import Registry, function, local
from tensor_rpc._native import Context, DataType, DenseArray, Device
from tensor_rpc._server import Server
from tensor_rpc._types import Shape

_os.register_at_fork(after_in_child=_native.forked)

__all__ = [
    "CONCURRENT",
    "Context",
    "DataType",
    "DenseArray",
    "Device",
    "Function",
    "Module",
    "Object",
    "Registry",
    "Server",
    "Session",
    "Shape",
    "Tensor",
    "connect",
    "freeze_support",
    "function",
    "local",
    "set_child_command",
    *_error_names,
]

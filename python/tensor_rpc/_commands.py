"""The commands that come with the package: the same programs as those without Python."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

from tensor_rpc import _child, _native
from tensor_rpc._functions import Registry


def rpc_cli() -> NoReturn:
    """Run ``rpc-cli`` with the arguments of this process."""
    _prepare("rpc-cli")
    sys.exit(_native.run_rpc_cli())


def rpc_server() -> NoReturn:
    """Run ``rpc-server`` with the arguments of this process.

    ``rpc-server serve --python package.module`` serves the functions of a module, which is searched
    for in the current folder, too.
    """
    _prepare("rpc-server")
    sys.exit(_native.run_rpc_server(_import))


def _prepare(name: str) -> None:
    # While the native part runs, no handler of Python would.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _child.embed([name, *sys.argv[1:]])


def _import(modules: list[str]) -> Registry:
    """Import modules, and make sure that the processes of sessions do."""
    sys.path.insert(0, os.getcwd())
    specification = _child.Specification(modules=modules, argv=sys.argv[:1])
    _child.embed(["rpc-server", *sys.argv[1:]], specification)
    registry = Registry()
    for each in modules:
        registry.add_module(importlib.import_module(each))
    return registry

"""Processes that servers and Disco start: how functions get into them.

A server with ``isolate="process"``, and Disco with workers as processes, start the interpreter
again. Like the children of `multiprocessing` with the method "spawn", such a process imports the
functions that it serves from the modules in which they are defined. A script is imported by its
path, under another name than ``__main__``, so that what stands under ``if __name__ == "__main__":``
does not run.

For the author of something that starts processes:

>>> words = set_up(registry)  # doctest: +SKIP

checks that all functions of a registry can be imported, in a process of their own, and returns the
words of the command that becomes such a process. What the process is to be follows as further words
(``--disco-worker``), or is added by the native part (``Server.start(words)``).
`refuse_while_importing` belongs at the head of everything that starts processes or listens.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tensor_rpc import _native

if TYPE_CHECKING:
    from tensor_rpc._functions import Registry

_MAIN = "__rpc_main__"
"""Name of the main script in a child."""

_MAINS = ("__main__", "__mp_main__", _MAIN)

_FLAG = "--tensor-rpc-child"
"""First argument of a child that is a frozen program."""

_CHECK = "--check-imports"
"""Argument of a child that ends once its imports have succeeded."""

_HELPERS = (
    "--describe-devices",
    "--guard-socket-files",
    "--load-libraries",
    "--reap-run-program",
    "--start-reapers",
)
"""First arguments of children that serve no functions."""

# The path of modules comes first, so that nothing is imported from the current folder.
_BOOTSTRAP = "import sys; sys.path[:] = sys.argv[1].split('\\x1f'); from tensor_rpc._child import main; main()"

_importing = False
_command: list[str] | None = None
_lock = threading.Lock()
_embedded = False
_hooked_in: int | None = None
"""Process that can be started again."""

_checked: set[str] = set()


@dataclasses.dataclass
class Specification:
    """What a child imports.

    Attributes
    ----------
    main : dict of str to str, or None
        The main script or archive (``{"path": …}``), module (``{"module": …}``), or frozen program
        (``{"frozen": …}``).
    functions : list
        For each function its name for clients, its description, its module and its qualified name.
    modules : list of str
        Modules all of whose declared functions are served.
    setup : list of str
        Functions, as ``module:name``, that are called with the registry before it is served.
    argv : list of str
        Arguments of the script.
    """

    main: dict[str, str] | None = None
    functions: list[tuple[str, str | None, str, str]] = dataclasses.field(default_factory=list)
    modules: list[str] = dataclasses.field(default_factory=list)
    setup: list[str] = dataclasses.field(default_factory=list)
    argv: list[str] = dataclasses.field(default_factory=list)


def specification_of(
    functions: Iterable[tuple[str, str | None, Callable[..., Any]]], setup: Sequence[str] = ()
) -> Specification:
    """Return how a child imports functions.

    Parameters
    ----------
    functions : iterable of (name, description, function)
        The functions.
    setup : sequence of str
        Functions that the child calls with its registry, as ``module:name``.

    Raises
    ------
    TypeError
        A function cannot be imported; the message says which, and why.
    """
    specification = Specification(setup=list(setup), argv=list(sys.argv))
    for name, description, function in functions:
        module, qualified = _reference(name, function)
        if module == _MAIN and specification.main is None:
            specification.main = _main_program(name)
        specification.functions.append((name, description, module, qualified))
    return specification


def _reference(name: str, function: Callable[..., Any]) -> tuple[str, str]:
    """Return module and qualified name by which a child finds a function."""

    def refused(reason: str) -> TypeError:
        return TypeError(
            f"the function {name!r} cannot be imported by another process: {reason}; define it by "
            "def at the top of a module, or serve without processes (isolate='none')"
        )

    module, qualified = (
        getattr(function, "__module__", None),
        getattr(function, "__qualname__", None),
    )
    if not isinstance(module, str) or not isinstance(qualified, str):
        raise refused(f"{function!r} is no function of a module")
    if "<lambda>" in qualified:
        raise refused("it is a lambda function")
    if "<locals>" in qualified:
        raise refused(f"it is defined inside of another function ({qualified})")
    if module in _MAINS:
        _main_program(name)
    holder: Any = sys.modules.get(module)
    for part in qualified.split("."):
        holder = getattr(holder, part, None)
    if holder is not function:
        raise refused(f"{module}.{qualified} is another object")
    return (_MAIN if module in _MAINS else module, qualified)


def _main_program(name: str) -> dict[str, str]:
    """Return how a child imports the main program."""
    main = sys.modules["__main__"]
    if getattr(sys, "frozen", False):
        # A child is this program again, which has defined its functions once it calls `freeze_support`.
        return {"frozen": sys.executable}
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in _MAINS:
        return {"module": spec.name}
    # A program in an archive (zipapp) has a path in that.
    path = getattr(getattr(main, "__loader__", None), "archive", getattr(main, "__file__", None))
    if path is None or not os.path.exists(path):
        raise TypeError(
            f"the function {name!r} cannot be imported by another process: it is defined in a "
            "notebook, at a prompt, or by python -c; put it into a module (a file) and import it, "
            "or serve without processes (isolate='none')"
        )
    return {"path": os.path.abspath(path)}


def set_child_command(words: Sequence[str] | None) -> None:
    """Set the command that children are started by, where it is not this interpreter.

    Parameters
    ----------
    words : sequence of str, or None
        Such as ``["/opt/python/bin/python3", "-m", "tensor_rpc._child"]``; further words follow.
        `None` is this interpreter again.
    """
    global _command
    if _importing:
        # This process is such a child already, and has been told what it is.
        return
    _command = None if words is None else [os.fspath(word) for word in words]
    if _embedded:
        embed([_program_name()])


def freeze_support() -> None:
    """Become a child, if this process was started as one.

    A program that was made one executable of (by PyInstaller and its like) calls it first under
    ``if __name__ == "__main__":``, if it starts processes. In all other programs it does nothing.
    """
    if sys.argv[1:2] == [_FLAG]:
        del sys.argv[1]
        main()


def words_of(specification: Specification) -> list[str]:
    """Return the words of the command that starts a child."""
    path = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    words = ["\x1f".join(path), json.dumps(dataclasses.asdict(specification))]
    if _command is not None:
        return [*_command, *words]
    if getattr(sys, "frozen", False):
        return [sys.executable, _FLAG, *words]
    import subprocess

    # What multiprocessing uses, too: such as -O, -X utf8 and -W error.
    flags_of_this: Callable[[], list[str]] = getattr(subprocess, "_args_from_interpreter_flags", list)
    return [sys.executable, *flags_of_this(), "-c", _BOOTSTRAP, *words]


def _program_name() -> str:
    return sys.argv[0] if getattr(sys, "argv", None) and sys.argv[0] else "python"


def embed(arguments: Sequence[str], specification: Specification | None = None) -> None:
    """Tell the native part the arguments of this program, and how it is started again."""
    global _embedded
    _embedded = True
    _native.embed(list(arguments), words_of(specification or Specification()))


def set_up(registry: Registry, setup: Sequence[str] = ()) -> list[str]:
    """Make sure that children can serve the functions of a registry.

    Parameters
    ----------
    registry : Registry
        The functions.
    setup : sequence of str
        Functions that the child calls with its registry before it serves, as ``module:name``.

    Returns
    -------
    list of str
        Words of the command that starts a child.

    Raises
    ------
    TypeError
        A function cannot be imported.
    RuntimeError
        A child has failed to import them; the message has what it printed. Or this process is
        itself a child that is importing its functions.
    """
    global _hooked_in
    refuse_while_importing()
    specification = specification_of(registry.entries(), setup)
    words = words_of(specification)
    with _lock:
        if _hooked_in not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked from one that has started processes, and the thread that "
                "looks after them is not here: start children with multiprocessing's method "
                '"spawn", or start the server in the parent'
            )
        if words[-1] not in _checked:
            check(words)
            _checked.add(words[-1])
        if _hooked_in is None:
            from tensor_rpc._functions import Registry

            if not _embedded:
                embed([_program_name()])
            # Without arguments it returns, and this program can be started again from then on.
            _native.become_child(Registry())
            _hooked_in = os.getpid()
    return words


def command(functions: Iterable[Any] | Registry) -> list[str]:
    """Return the words of the command that starts a worker of Disco, less ``--disco-worker``.

    Parameters
    ----------
    functions : iterable of functions, or Registry
        Functions of the workers.

    Raises
    ------
    TypeError, RuntimeError
        As `set_up`.
    """
    from tensor_rpc._functions import Registry, registry_of

    registry = functions if isinstance(functions, Registry) else registry_of(functions)
    return set_up(registry, ["tensor_rpc.disco:install"])


def check(words: Sequence[str]) -> None:
    """Start a child that imports its functions and ends.

    Raises
    ------
    RuntimeError
        It has failed; the message has what it printed.
    """
    import subprocess

    child = subprocess.run(
        [*words, _CHECK],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if child.returncode != 0:
        told = child.stderr.decode(errors="replace").rstrip()
        raise RuntimeError(
            f"a process could not import the functions that it is to serve (it ended with code "
            f"{child.returncode}):\n{told}"
        )


def refuse_while_importing() -> None:
    """Fail in a child that is importing its functions: it would start children without end.

    Raises
    ------
    RuntimeError
        This process is such a child, or a frozen program that does not become one.
    """
    if getattr(sys, "frozen", False) and sys.argv[1:2] == [_FLAG]:
        raise RuntimeError(
            "this process was started to serve the functions of a program that is one executable, and it "
            "does what the program does. Call tensor_rpc.freeze_support() first under\n\n"
            '    if __name__ == "__main__":\n        ...\n'
        )
    if _importing:
        raise RuntimeError(
            "this process was started to serve the functions of a script, and the script starts "
            "servers or processes while it is imported. Put what the script does under\n\n"
            '    if __name__ == "__main__":\n        ...\n\n'
            "and leave imports and functions above it"
        )


def main() -> None:
    """Run a child: import what the arguments say, and become what they say."""
    path, text, *arguments = sys.argv[1:]
    if not getattr(sys, "frozen", False):
        # A frozen program has modules of its own, which may lie elsewhere in each process.
        sys.path[:] = path.split("\x1f")
    specification = Specification(**json.loads(text))
    embed(["tensor-rpc-child", *arguments], specification)
    from tensor_rpc._functions import Registry

    if arguments and arguments[0] in _HELPERS:
        _native.become_child(Registry())
        sys.exit(2)
    # Standard input and output are connections, which nothing that is imported may touch.
    kept = [os.dup(0), os.dup(1)]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    try:
        registry = import_functions(specification)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if arguments == [_CHECK]:
        sys.stderr.flush()
        os._exit(0)
    sys.stdout.flush()
    for descriptor, number in zip(kept, (0, 1), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if hasattr(sys.stdout, "reconfigure"):
        # The process may be killed at any time.
        sys.stdout.reconfigure(line_buffering=True)
    _native.become_child(registry)
    sys.exit("only servers start a program with these arguments")


def import_functions(specification: Specification) -> Registry:
    """Return a registry of what a specification says."""
    global _importing
    from tensor_rpc._functions import Registry

    registry = Registry()
    _importing = True
    try:
        sys.argv = list(specification.argv)
        if specification.main is not None:
            _import_main(specification.main)
        for name, description, module, qualified in specification.functions:
            holder: Any = importlib.import_module(module)
            for part in qualified.split("."):
                holder = getattr(holder, part)
            registry.add(name, holder, description=description)
        for each in specification.modules:
            registry.add_module(importlib.import_module(each))
        for each in specification.setup:
            module, name = each.split(":")
            getattr(importlib.import_module(module), name)(registry)
    finally:
        _importing = False
    return registry


def _import_main(program: dict[str, str]) -> None:
    if "frozen" in program:
        sys.modules[_MAIN] = sys.modules["__main__"]
        return

    import runpy

    module = types.ModuleType(_MAIN)
    # Found under both names while it runs, as dataclasses and typing need it.
    sys.modules[_MAIN] = module
    if "module" in program:
        content = runpy.run_module(program["module"], run_name=_MAIN, alter_sys=False)
    else:
        content = runpy.run_path(program["path"], run_name=_MAIN)
    sys.modules["__main__"] = sys.modules[_MAIN] = module
    module.__dict__.update(content)


# This process runs a program that is not its executable. How that is started again is said once it
# matters, because it costs some milliseconds.
_native.embed([_program_name()], [sys.executable or "python"])

if __name__ == "__main__":
    # This module is another one than that which the package knows.
    from tensor_rpc import _child

    _child.main()

"""Functions that sessions call: how they are declared, and how arguments become what they take.

The annotations of a function say what it takes and returns. What a client sends is checked against
them, and converted, before the function runs.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import os
import threading
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, Union, overload

from tensor_rpc import _native
from tensor_rpc._blocking import Session
from tensor_rpc._errors import InvalidArgumentError
from tensor_rpc._native import Context, DataType, DenseArray, Device
from tensor_rpc._types import Shape

_F = TypeVar("_F", bound=Callable[..., Any])

_MARK = "__tensor_rpc_function__"


@dataclasses.dataclass(frozen=True)
class Mark:
    """What `function` has noted of a function."""

    name: str
    description: str | None


@overload
def function(wrapped: _F, /) -> _F: ...


@overload
def function(*, name: str | None = None, description: str | None = None) -> Callable[[_F], _F]: ...


def function(
    wrapped: _F | None = None, /, *, name: str | None = None, description: str | None = None
) -> _F | Callable[[_F], _F]:
    """Declare a function that sessions may call. It stays the function that it is.

    Parameters
    ----------
    wrapped : callable
        The function.
    name : str, optional
        Name for clients; that of the function by default.
    description : str, optional
        A phrase for people; the first line of the docstring by default.

    Notes
    -----
    Annotations say what is taken and returned: ``int``, ``float``, ``str``, ``bytes``, ``bool``,
    ``None``, unions, ``list``, ``tuple``, ``dict``, dataclasses (clients send and get
    dictionaries), ``numpy.ndarray``, ``torch.Tensor`` and `DenseArray` (the memory of a tensor of
    the session, without a copy; what is written into it stays there), callables (functions of the
    session, which may be the client's), any other class (objects that a function of this server
    has returned).
    Without an annotation a value is passed on as it is, and a tensor as a `DenseArray`. A parameter
    with the annotation `Context` takes no argument, and gets the context of the call.

    Arrays that a function returns become tensors of the session by one copy, callables become
    functions, and objects of other classes become objects that the client can pass on.

    A tensor is in use until the call ends, and for as long as an array over its memory is kept.
    """

    def mark(wrapped: _F) -> _F:
        if not callable(wrapped):
            raise TypeError(f"a function is wanted, and not a {type(wrapped).__name__}")
        own = getattr(wrapped, "__name__", None)
        chosen = name if name is not None else own
        if chosen is None or chosen == "<lambda>":
            raise TypeError("the function has no name: give one (name=…)")
        setattr(wrapped, _MARK, Mark(chosen, description or _first_line(wrapped)))
        return wrapped

    return mark if wrapped is None else mark(wrapped)


def _first_line(wrapped: Callable[..., Any]) -> str | None:
    text = inspect.getdoc(wrapped) if getattr(wrapped, "__doc__", None) else None
    return text.splitlines()[0].rstrip(".") if text else None


def mark_of(wrapped: Callable[..., Any]) -> Mark:
    """Return name and description of a function, whether it is declared by `function` or not."""
    mark = getattr(wrapped, _MARK, None)
    if isinstance(mark, Mark):
        return mark
    name = getattr(wrapped, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(
            f"{wrapped!r} has no name: declare it with tensor_rpc.function(name=…), or add it to a Registry by name"
        )
    return Mark(name, _first_line(wrapped))


class Registry(_native.Registry):
    """Functions that a server or a local session offers."""

    _added: dict[str, tuple[str | None, Callable[..., Any]]]

    def __new__(cls, *functions: Callable[..., Any] | types.ModuleType) -> Registry:
        """Make an empty registry."""
        return super().__new__(cls)

    def __init__(self, *functions: Callable[..., Any] | types.ModuleType) -> None:
        """Make a registry of some functions, and of those that modules declare."""
        super().__init__()
        self._added = {}
        for each in functions:
            if isinstance(each, types.ModuleType):
                self.add_module(each)
            else:
                self.add(each)

    def add(
        self,
        function: Callable[..., Any] | str,
        named: Callable[..., Any] | None = None,
        /,
        *,
        description: str | None = None,
    ) -> Registry:
        """Add a function, ``add(function)`` or ``add(name, function)``.

        A function under a name that is taken replaces the one before, for later calls.

        Returns
        -------
        Registry
            This one.

        Raises
        ------
        TypeError
            It is no function, has no name, or parameters that no argument could reach.
        """
        name: str | None
        if isinstance(function, str):
            name, function = function, named  # type: ignore[assignment]
        else:
            name = None
        if not callable(function):
            raise TypeError(f"a function is wanted, and not {function!r}")
        mark = mark_of(function) if name is None else None
        name = name if mark is None else mark.name
        assert name is not None
        if name == "<lambda>":
            raise TypeError("a lambda function has no name: add it by one, add(name, function)")
        told = description or (mark.description if mark else _first_line(function))
        plan = Plan(name, function)
        self.add_function(
            name,
            function,
            plan.convert if plan.converts else None,
            plan.finish,
            plan.param_names,
            plan.return_name,
            told,
            plan.is_coroutine,
        )
        if plan.is_coroutine:
            _start_loop()
        self._added[name] = (told, function)
        return self

    def add_module(self, module: types.ModuleType) -> Registry:
        """Add all functions of a module that are declared by `function`."""
        found = [each for each in vars(module).values() if isinstance(getattr(each, _MARK, None), Mark)]
        if not found:
            raise ValueError(
                f"the module {module.__name__} has no functions for sessions: declare them with @tensor_rpc.function"
            )
        for each in found:
            self.add(each)
        return self

    def entries(self) -> list[tuple[str, str | None, Callable[..., Any]]]:
        """Return name, description and function of all that was added."""
        return [(name, told, function) for name, (told, function) in self._added.items()]


def registry_of(functions: Iterable[Any]) -> Registry:
    """Return the registry among the arguments of `local` and its like, or one of the functions."""
    given = list(functions)
    if len(given) == 1 and isinstance(given[0], Registry):
        return given[0]
    registry = Registry()
    for each in given:
        if isinstance(each, Registry):
            for name, told, added in each.entries():
                registry.add(name, added, description=told)
        elif isinstance(each, types.ModuleType):
            registry.add_module(each)
        else:
            registry.add(each)
    return registry


def local(*functions: Callable[..., Any] | types.ModuleType | Registry) -> Session:
    """Open a session in this process, without any connection.

    Parameters
    ----------
    *functions
        Functions, modules that declare some, or a registry.

    Returns
    -------
    Session
        It behaves like one over a network: for tests, and for programs that run alone.
    """
    return Session(_native.local(registry_of(functions)))


# Conversion of arguments and results


class _Mismatch(Exception):
    """A value does not fit. The text says what does, and what it is."""


_Converter = Callable[[Any], Any]


def _any(value: Any) -> Any:
    return value


def kind_name(value: Any) -> str:
    """Return the name of a value's type for errors."""
    if value is None:
        return "null"
    if isinstance(value, DenseArray):
        return "a tensor"
    return type(value).__name__


class _Type:
    """A type of an annotation: its name for clients, and its conversion in both directions."""

    def __init__(self, name: str, convert: _Converter, exact: type | None = None) -> None:
        self.name = name
        self.convert = convert
        self.exact = exact


def _expected(name: str, value: Any) -> _Mismatch:
    return _Mismatch(f"expected {name}, got {kind_name(value)}")


def _scalar(kind: type, name: str) -> _Converter:
    def convert(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is not bool and isinstance(value, bool):
            raise _expected(name, value)
        if isinstance(value, kind):
            return value
        # A number of an array library.
        if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", ()):
            return convert(value.item())
        if kind is bytes and isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        raise _expected(name, value)

    return convert


def _null(value: Any) -> None:
    if value is not None:
        raise _expected("null", value)


def _instance(kind: type, name: str) -> _Converter:
    def convert(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        raise _expected(name, value)

    return convert


def _callable(value: Any) -> Any:
    if callable(value):
        return value
    raise _expected("function", value)


def _within(where: str, convert: _Converter, value: Any) -> Any:
    try:
        return convert(value)
    except _Mismatch as mismatch:
        raise _Mismatch(f"{where}: {mismatch}") from None


def _sequence(item: _Type, make: type, name: str) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or isinstance(value, Shape):
            raise _expected(name, value)
        if item.convert is _any:
            return make(value)
        return make(_within(f"item {at}", item.convert, each) for at, each in enumerate(value))

    return convert


def _fixed_tuple(items: list[_Type], name: str) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _expected(name, value)
        if len(value) != len(items):
            raise _Mismatch(f"expected {name}, got {len(value)} items")
        pairs = enumerate(zip(items, value, strict=True))
        return tuple(_within(f"item {at}", item.convert, each) for at, (item, each) in pairs)

    return convert


def _mapping(key: _Type, item: _Type, name: str) -> _Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _expected(name, value)
        if key.convert is _any and item.convert is _any:
            return value
        return {
            _within("a key", key.convert, at): _within(f"at {at!r}", item.convert, each) for at, each in value.items()
        }

    return convert


def _union(options: list[_Type], name: str) -> _Converter:
    def convert(value: Any) -> Any:
        for option in options:
            if option.exact is not None and type(value) is option.exact:
                return option.convert(value)
        for option in options:
            try:
                return option.convert(value)
            except _Mismatch:
                continue
        raise _expected(name, value)

    return convert


def _literal(values: tuple[Any, ...], name: str) -> _Converter:
    def convert(value: Any) -> Any:
        for each in values:
            if type(value) is type(each) and value == each:
                return each
        raise _Mismatch(f"expected {name}, got {value!r}")

    return convert


def _dataclass(kind: Any, name: str, out: bool, seen: tuple[type, ...]) -> _Converter:
    if kind in seen and not out:
        # It contains itself: what is inside is converted as it is met.
        def convert_inner(value: Any) -> Any:
            return _compiled(kind).convert(value)

        return convert_inner
    if out or kind in seen:
        # It becomes a dictionary at the client. A class that contains itself is checked there.
        return _instance(kind, name) if out else _any
    hints = typing.get_type_hints(kind)
    fields = {
        each.name: compile_type(hints.get(each.name, Any), out, (*seen, kind))
        for each in dataclasses.fields(kind)
        if each.init
    }
    needed = {
        each.name
        for each in dataclasses.fields(kind)
        if each.init and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    }

    def convert(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, dict):
            raise _expected(f"the fields of {name}", value)
        unknown = [at for at in value if at not in fields]
        if unknown:
            raise _Mismatch(f"{name} has no field {unknown[0]!r}; there are: {', '.join(fields)}")
        missing = needed - set(value)
        if missing:
            raise _Mismatch(f"the field {min(missing)!r} of {name} is missing")
        return kind(**{at: _within(f"field {at!r}", fields[at].convert, each) for at, each in value.items()})

    return convert


@functools.cache
def _compiled(kind: Any) -> _Type:
    return compile_type(kind)


def _is_class(annotation: Any, module: str, name: str) -> bool:
    return (
        isinstance(annotation, type) and annotation.__name__ == name and annotation.__module__.split(".")[0] == module
    )


def _numpy(arguments: tuple[Any, ...], out: bool) -> _Type:
    dtype = None
    if len(arguments) == 2:
        scalars = typing.get_args(arguments[1])
        if scalars and isinstance(scalars[0], type) and not typing.get_origin(scalars[0]):
            try:
                dtype = DataType(scalars[0])
            except (TypeError, ValueError):
                dtype = None  # A kind of many types, such as numpy.floating.
    name = "tensor" if dtype is None else f"a tensor of {dtype}"

    def convert(value: Any) -> Any:
        if out:
            if not hasattr(value, "__dlpack__"):
                raise _expected("tensor", value)
            return value
        if not isinstance(value, DenseArray):
            raise _expected(name, value)
        if dtype is not None and value.dtype != dtype:
            raise _Mismatch(f"expected {name}, got one of {value.dtype}")
        try:
            return value.numpy()
        except (TypeError, ImportError) as error:
            raise _Mismatch(str(error)) from None

    return _Type("tensor" if out else "mut tensor", convert)


def _torch(out: bool) -> _Type:
    def convert(value: Any) -> Any:
        if out:
            if not hasattr(value, "__dlpack__"):
                raise _expected("tensor", value)
            return value
        if not isinstance(value, DenseArray):
            raise _expected("tensor", value)
        return value.torch()

    return _Type("tensor" if out else "mut tensor", convert)


_SCALARS: dict[Any, str] = {int: "int", float: "float", str: "str", bytes: "bytes", bool: "bool"}

_SEQUENCES = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)

_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def compile_type(annotation: Any, out: bool = False, seen: tuple[type, ...] = ()) -> _Type:
    """Return the conversion that an annotation stands for.

    Parameters
    ----------
    annotation
        The annotation, with all names resolved.
    out : bool
        True for a result, and False for an argument.
    seen : tuple of type
        Dataclasses around it.
    """
    if annotation in (Any, object, inspect.Parameter.empty) or isinstance(annotation, TypeVar):
        return _Type("any", _any)
    if annotation is None or annotation is type(None):
        return _Type("null", _null, type(None))
    name = _SCALARS.get(annotation) if isinstance(annotation, type) else None
    if name is not None:
        return _Type(name, _scalar(annotation, name), annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return compile_type(arguments[0], out, seen)
    if origin is typing.Literal:
        name = " or ".join(repr(each) for each in arguments)
        return _Type(f"literal<{name}>", _literal(arguments, name))
    if origin is Union or origin is types.UnionType:
        return _compile_union(arguments, out, seen)
    base = annotation if origin is None else origin
    if base in _SEQUENCES:
        item = compile_type(arguments[0], out, seen) if arguments else _Type("any", _any)
        name = f"[{item.name}]" if arguments else "list"
        return _Type(name, _sequence(item, list, name), list)
    if base is tuple:
        if not arguments or (len(arguments) == 2 and arguments[1] is ...):
            item = compile_type(arguments[0], out, seen) if arguments else _Type("any", _any)
            name = f"[{item.name}]" if arguments else "list"
            return _Type(name, _sequence(item, tuple, name), tuple)
        items = [compile_type(each, out, seen) for each in arguments if each != ()]
        name = f"({', '.join(item.name for item in items)})"
        return _Type(name, _fixed_tuple(items, name), tuple)
    if base in _MAPPINGS:
        key, item = (
            (compile_type(each, out, seen) for each in arguments)
            if arguments
            else (_Type("any", _any), _Type("any", _any))
        )
        name = f"{{{key.name}: {item.name}}}" if arguments else "map"
        return _Type(name, _mapping(key, item, name), dict)
    if base is collections.abc.Callable:
        return _Type("function", _callable)
    if base is DenseArray:
        name = "tensor" if out else "mut tensor"
        return _Type(name, _instance(DenseArray, "tensor"), DenseArray)
    if base is Shape:
        return _Type("shape", _instance(Shape, "shape"), Shape)
    if base is DataType:
        return _Type("dtype", _instance(DataType, "dtype"), DataType)
    if base is Device:
        return _Type("device", _instance(Device, "device"), Device)
    if _is_class(base, "numpy", "ndarray"):
        return _numpy(arguments, out)
    if _is_class(base, "torch", "Tensor"):
        return _torch(out)
    if isinstance(base, type):
        if dataclasses.is_dataclass(base):
            return _Type(base.__name__, _dataclass(base, base.__name__, out, seen))
        return _Type(f"object<{base.__name__}>", _instance(base, f"an object of {base.__name__}"))
    return _Type("any", _any)


def client_types(params: Sequence[Any] | None, returns: Any) -> tuple[list[str] | None, str] | None:
    """Return the names that signatures have for the types of a client; None if it gives none."""
    if params is None and returns is Any:
        return None
    return None if params is None else [_client_type(each) for each in params], _client_type(returns)


_REFERENCES: list[tuple[type, str]] = [
    (_native.Tensor, "tensor"),
    (_native.Function, "function"),
    (_native.Callback, "function"),
    (_native.Module, "module"),
    (_native.Object, "object"),
]


def _client_type(annotation: Any) -> str:
    if isinstance(annotation, type):
        for kind, name in _REFERENCES:
            if issubclass(annotation, kind):
                return name
    return compile_type(annotation).name


def _compile_union(arguments: tuple[Any, ...], out: bool, seen: tuple[type, ...]) -> _Type:
    options = [compile_type(each, out, seen) for each in arguments]
    others = [option for option in options if option.convert is not _null]
    name = " | ".join(option.name for option in others) or "null"
    if len(others) < len(options):
        name = f"{name}?" if len(others) == 1 else f"{name} | null"
    return _Type(name, _union(options, name))


def _hints(wrapped: Any) -> dict[str, Any]:
    target = wrapped
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target) and callable(target):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except NameError as error:
        raise TypeError(f"an annotation of {wrapped!r} cannot be resolved: {error}") from None
    except TypeError:
        return {}


class Plan:
    """How the arguments of a function are checked and converted, and its result."""

    def __init__(self, name: str, wrapped: Callable[..., Any]) -> None:
        """Read the annotations of a function.

        Raises
        ------
        TypeError
            It has parameters that are given by name only.
        """
        self.name = name
        self.is_coroutine = inspect.iscoroutinefunction(wrapped) or inspect.iscoroutinefunction(
            getattr(wrapped, "__call__", None)  # noqa: B004
        )
        self.param_names: list[str] = []
        self.return_name = "any"
        self.finish: _Converter | None = None
        self.converts = True
        try:
            signature = inspect.signature(wrapped)
        except (TypeError, ValueError):
            # A function of another language, which does not tell.
            self.param_names, self.converts = ["..."], False
            return
        hints = _hints(wrapped)
        # For each parameter: its name, its type (None for the context), whether it may be missing.
        self._params: list[tuple[str, _Type | None, bool]] = []
        self._rest: _Type | None = None
        for at, parameter in enumerate(signature.parameters.values()):
            annotation = hints.get(parameter.name, parameter.annotation)
            optional = parameter.default is not inspect.Parameter.empty
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                continue
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                if optional:
                    continue
                raise TypeError(
                    f"the parameter {parameter.name!r} of {name} is given by name only, and "
                    "clients give arguments by position"
                )
            if annotation is Context:
                if any(missing for _, _, missing in self._params):
                    raise TypeError(f"parameter {at} of {name} is a Context after one with a default")
                self._params.append((parameter.name, None, False))
                continue
            kind = compile_type(annotation)
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                self._rest = kind
                self.param_names.append("...")
                continue
            self._params.append((parameter.name, kind, optional))
            is_open = kind.name.endswith("?") or kind.name == "any"
            self.param_names.append(f"{kind.name}?" if optional and not is_open else kind.name)
        returns = hints.get("return", signature.return_annotation)
        if returns is not inspect.Signature.empty:
            result = compile_type(returns, out=True)
            self.return_name = result.name
            if result.convert is not _any:
                self.finish = functools.partial(self._finish, result)

    def convert(self, context: Context, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments as the function takes them.

        Raises
        ------
        InvalidArgumentError
            One is missing, or one too many, or has the wrong type.
        """
        converted: list[Any] = []
        at = 0
        for name, kind, optional in self._params:
            if kind is None:
                converted.append(context)
                continue
            if at == len(arguments):
                if optional:
                    break
                raise InvalidArgumentError(f"argument {at} ({name}) of `{self.name}` is missing: expected {kind.name}")
            try:
                converted.append(kind.convert(arguments[at]))
            except _Mismatch as mismatch:
                text = f"argument {at} ({name}) of `{self.name}`: {mismatch}"
                raise InvalidArgumentError(text) from None
            at += 1
        if at < len(arguments):
            if self._rest is None:
                raise InvalidArgumentError(f"{len(arguments)} arguments were given, and `{self.name}` takes {at}")
            for index, each in enumerate(arguments[at:], at):
                try:
                    converted.append(self._rest.convert(each))
                except _Mismatch as mismatch:
                    text = f"argument {index} of `{self.name}`: {mismatch}"
                    raise InvalidArgumentError(text) from None
        return tuple(converted)

    def _finish(self, result: _Type, returned: Any) -> Any:
        try:
            return result.convert(returned)
        except _Mismatch as mismatch:
            text = f"what `{self.name}` returned is not what its annotation says: {mismatch}"
            raise TypeError(text) from None


# The event loop of coroutines

_CANCEL_INTERVAL = 0.1
"""Seconds between two looks for coroutines that nobody waits for."""

_loop_lock = threading.Lock()
_loop_of: int | None = None
"""Process whose event loop runs."""


def _start_loop() -> None:
    """Start the thread of the event loop on which coroutines run, unless it runs already."""
    global _loop_of
    with _loop_lock:
        if _loop_of == os.getpid():
            return
        # Most programs need no event loop.
        import asyncio

        descriptor = _native.coroutine_queue()
        loop = asyncio.new_event_loop()
        tasks: dict[int, tuple[_native.CoroutineCall, asyncio.Task[None]]] = {}
        looks = False

        async def run(call: _native.CoroutineCall, coroutine: Coroutine[Any, Any, Any]) -> None:
            try:
                returned = await coroutine
            except BaseException as error:
                inner = error.__traceback__.tb_next if error.__traceback__ else None
                call.fail(error.with_traceback(inner))
            else:
                call.finish(returned)

        def forget(call: _native.CoroutineCall, coroutine: Coroutine[Any, Any, Any], task: asyncio.Task[None]) -> None:
            tasks.pop(call.id, None)
            if task.cancelled():
                # Cancelled before its first step, so that nothing in `run` has been executed.
                coroutine.close()
                call.fail(asyncio.CancelledError())

        def cancel_unwanted() -> None:
            nonlocal looks
            for call, task in list(tasks.values()):
                if call.is_cancelled:
                    task.cancel()
            looks = bool(tasks)
            if looks:
                loop.call_later(_CANCEL_INTERVAL, cancel_unwanted)

        def take() -> None:
            nonlocal looks
            for call in _native.take_coroutine_calls():
                if call.id in tasks:
                    if call.is_cancelled:
                        tasks[call.id][1].cancel()
                    continue
                if call.is_cancelled:
                    call.fail(asyncio.CancelledError())
                    continue
                coroutine = call.begin()
                if coroutine is not None:
                    task = loop.create_task(run(call, coroutine))
                    tasks[call.id] = (call, task)
                    task.add_done_callback(functools.partial(forget, call, coroutine))
            if tasks and not looks:
                looks = True
                loop.call_later(_CANCEL_INTERVAL, cancel_unwanted)

        loop.add_reader(descriptor, take)
        threading.Thread(target=loop.run_forever, name="rpc-coroutines", daemon=True).start()
        _loop_of = os.getpid()


async def call_in_thread(call: Callable[..., Any], function: Any, arguments: Sequence[Any]) -> Any:
    """Call a function of the session from a coroutine, on another thread."""
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(call, function, *arguments))


__all__ = ["Context", "Registry", "function", "local", "registry_of"]

"""Functions of Python in a session: arguments, results, tensors, objects, errors, coroutines."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import pathlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

import tensor_rpc as rpc


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


@dataclasses.dataclass
class Line:
    ends: list[Point]
    name: str | None = None


class Counter:
    def __init__(self) -> None:
        self.count = 0


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with rpc.local(rpc.Registry().add("f", function)) as session:
        return session.call("f", *args, **options)


def refusal(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(rpc.InvalidArgumentError) as caught:
        call(function, *args)
    assert caught.value.remote_traceback is None
    return caught.value.message


def test_a_function_is_registered_with_its_name_signature_and_description() -> None:
    @rpc.function
    def add(a: int, b: float = 1.0, *rest: str) -> float:
        """Adds two numbers.

        More of it.
        """
        return a + b

    @rpc.function(name="other.name", description="something else")
    def other(point: Point, values: dict[str, list[int]], maybe: int | None) -> tuple[int, str]:
        """Is not shown."""
        return (1, "a")

    assert add(1, 2.0) == 3.0
    registry = rpc.Registry(add, other)
    signatures = dict(registry.signatures())
    assert signatures["add"] == "(int, float?, ...) -> float"
    assert signatures["other.name"] == "(Point, {str: [int]}, int?) -> (int, str)"
    with rpc.local(registry) as session:
        assert {"add", "other.name"} <= {listed.name for listed in session.functions()}
        described = {entry[0]: entry for entry in session.call("rpc.functions")}
        assert "add" in described


def test_arguments_are_converted_as_the_annotations_say() -> None:
    def echo(i: int, f: float, s: str, b: bytes, t: bool, n: None, o: int | None, p: Point, q: Line) -> list[Any]:
        assert type(f) is float and type(p) is Point and type(q.ends[1]) is Point
        return [i, f, s, b, t, n, o, p.x, p.y, q.ends[1].x, q.name]

    returned = call(echo, 1, 2, "ä", b"\0", True, None, None, {"x": 3}, {"ends": [{"x": 4}, {"x": 5, "y": 1}]})
    # A dataclass of the client is one of the function.
    assert call(echo, 1, 2, "", b"", True, None, 4, Point(3, 2), Line([Point(4), Point(6)]))[7:] == [
        3,
        2.0,
        6,
        None,
    ]
    assert returned == [1, 2.0, "ä", b"\0", True, None, None, 3, 0.5, 5, None]
    assert type(returned[1]) is float

    def shapes(a: tuple[int, ...], b: tuple[int, str], c: dict[str, float], d: list[int]) -> str:
        return f"{a!r} {b!r} {c!r} {d!r}"

    assert call(shapes, [1, 2], [3, "x"], {"k": 1}, (5,)) == "(1, 2) (3, 'x') {'k': 1.0} [5]"

    def chosen(mode: Literal["fast", "slow"], number: int | str = 3) -> str:
        return f"{mode} {number!r}"

    assert call(chosen, "fast", "7") == "fast '7'"
    assert call(chosen, "slow") == "slow 3"


def test_an_argument_of_a_wrong_type_is_an_error_that_names_it() -> None:
    def f(a: int, b: list[str], c: Point, d: Literal["x"] = "x") -> None: ...

    good = (1, ["a"], {"x": 1})
    assert call(f, *good) is None
    assert refusal(f, "1", *good[1:]) == "argument 0 (a) of `f`: expected int, got str"
    assert refusal(f, True, *good[1:]) == "argument 0 (a) of `f`: expected int, got bool"
    assert refusal(f, 1, ["a", 2], good[2]) == "argument 1 (b) of `f`: item 1: expected str, got int"
    assert refusal(f, 1, [], {"x": "1"}) == "argument 2 (c) of `f`: field 'x': expected int, got str"
    assert refusal(f, 1, [], {}) == "argument 2 (c) of `f`: the field 'x' of Point is missing"
    unknown = refusal(f, 1, [], {"x": 1, "z": 2})
    assert unknown == "argument 2 (c) of `f`: Point has no field 'z'; there are: x, y"
    assert refusal(f, *good, "y") == "argument 3 (d) of `f`: expected 'x', got 'y'"
    assert refusal(f, 1, []) == "argument 2 (c) of `f` is missing: expected Point"
    assert refusal(f, *good, "x", 5) == "5 arguments were given, and `f` takes 4"

    def tensor(x: np.ndarray[Any, np.dtype[np.float32]]) -> None: ...

    assert refusal(tensor, 1) == "argument 0 (x) of `f`: expected a tensor of float32, got int"
    wrong = refusal(tensor, np.zeros(2, np.int32))
    assert wrong == "argument 0 (x) of `f`: expected a tensor of float32, got one of int32"


def test_a_result_that_is_not_what_the_annotation_says_is_an_error_of_the_function() -> None:
    def wrong() -> int:
        return "1"  # type: ignore[return-value]

    with pytest.raises(rpc.RemoteError) as caught:
        call(wrong)
    assert caught.value.remote_class == "TypeError"
    assert caught.value.message == "what `f` returned is not what its annotation says: expected int, got str"

    def made() -> float:
        number: float = np.float64(2.5)
        return number

    assert call(made) == 2.5

    def packed() -> Line:
        return Line([Point(1)], "l")

    assert call(packed) == {"ends": [{"x": 1, "y": 0.5}], "name": "l"}


def test_tensors_are_memory_of_the_session_without_a_copy() -> None:
    def fill(x: np.ndarray[Any, Any], value: float) -> None:
        assert x.flags.writeable
        x[:] = value

    def untyped(x, value):  # type: ignore[no-untyped-def]
        assert isinstance(x, rpc.DenseArray) and x.shape == (2, 3)
        x.numpy()[0, 0] = value
        return x.tolist()

    def same(x: rpc.DenseArray) -> rpc.DenseArray:
        return x

    with rpc.local(fill, untyped, same) as session:
        x = session.empty((2, 3), "float32")
        session.call("fill", x, 1.5)
        assert session.call("untyped", x, 7) == [[7.0, 1.5, 1.5], [1.5] * 3]
        # The tensor itself comes back: what is written through it is in both.
        again = session.call("same", x)
        session.call("fill", again, 2.0)
        assert x.tolist() == [[2.0] * 3] * 2
        # A view with strides is one of the function, too.
        column = x.view((2,), strides=(3,))
        session.call("fill", column, 9)
        assert x.tolist() == [[9.0, 2.0, 2.0]] * 2


def test_arrays_that_a_function_returns_are_tensors() -> None:
    def made(kind: str) -> Any:
        base = np.arange(6, dtype=np.float32).reshape(2, 3)
        return {"dense": base, "turned": base.T, "nested": {"a": [base[0]]}, "number": np.int32(4)}[kind]

    def allocated(context: rpc.Context, n: int) -> Any:
        array = context.allocate((n,), "int16")
        array.numpy()[:] = 3
        return array

    with rpc.local(made, allocated) as session:
        assert session.call("made", "dense").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert session.call("made", "turned").tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert session.call("made", "nested")["a"][0].tolist() == [0.0, 1.0, 2.0]
        assert session.call("made", "number") == 4
        tensor = session.call("allocated", 4)
        assert isinstance(tensor, rpc.Tensor)
        assert str(tensor.dtype) == "int16" and tensor.tolist() == [3] * 4


def test_a_tensor_is_in_use_while_an_array_over_it_is_kept() -> None:
    kept: list[Any] = []

    def keep(x: np.ndarray[Any, Any]) -> None:
        kept.append(x)

    def get(x: np.ndarray[Any, Any]) -> float:
        return float(x[0])

    with rpc.local(keep, get) as session:
        x = session.tensor(np.array([4.0]))
        session.call("keep", x)
        with pytest.raises(rpc.DeadlineExceededError):
            session.call("get", x, timeout=0.05)
        kept[0][0] = 5.0
        kept.clear()
        assert session.call("get", x, timeout=20) == 5.0


def test_a_function_that_fails_gives_its_tensors_back() -> None:
    def fail(x: np.ndarray[Any, Any]) -> None:
        kept = x.reshape(-1)
        raise ValueError(f"of {kept.size} elements")

    def get(x: np.ndarray[Any, Any]) -> float:
        return float(x[0])

    with rpc.local(fail, get) as session:
        x = session.tensor(np.array([4.0]))
        with pytest.raises(rpc.RemoteError, match="of 1 elements"):
            session.call("fail", x)
        assert session.call("get", x, timeout=20) == 4.0


def test_an_object_comes_back_as_the_same_object_and_is_freed_with_its_last_reference() -> None:
    freed = threading.Event()
    made: list[weakref.ref[Counter]] = []

    def new() -> Counter:
        counter = Counter()
        made.append(weakref.ref(counter, lambda _: freed.set()))
        return counter

    def increment(counter: Counter, by: int = 1) -> int:
        assert counter is made[-1]()
        counter.count += by
        return counter.count

    with rpc.local(new, increment) as session:
        counter = session.call("new")
        assert isinstance(counter, rpc.Object)
        assert session.call("increment", counter) == 1
        assert session.call("increment", counter, 5) == 6
        with pytest.raises(rpc.InvalidArgumentError, match="expected an object of Counter, got int"):
            session.call("increment", 3)
        counter.free()
        assert freed.wait(20)


def test_functions_are_passed_in_both_directions() -> None:
    def adder(n: int) -> Callable[[int], int]:
        return lambda m: n + m

    def apply(f: Callable[..., Any], *args: Any) -> Any:
        return f(*args)

    def is_plain(f: Callable[..., Any]) -> bool:
        return not isinstance(f, rpc._native.LocalFunction)

    def by_name(context: rpc.Context, name: str, *args: Any) -> Any:
        return context.call(name, *args)

    with rpc.local(adder, apply, is_plain, by_name) as session:
        add = session.call("adder", 3)
        assert add(4) == 7
        assert session.call("apply", add, 5) == 8
        # A function of this server is the same object when it comes back.
        assert session.call("is_plain", add)
        # A function of the client.
        assert session.call("apply", lambda a, b: [a, b], 1, "x") == [1, "x"]
        assert session.call("by_name", "apply", add, 1) == 4

        def refuse() -> None:
            raise LookupError("no such thing")

        with pytest.raises(rpc.RemoteError) as caught:
            session.call("apply", refuse)
        assert caught.value.remote_class == "LookupError" and "refuse" in str(caught.value.remote_traceback)


def test_a_callback_may_use_the_tensors_of_the_call_that_calls_it() -> None:
    def through(x: np.ndarray[Any, Any], raw: Any, change: Callable[..., Any]) -> list[float]:
        x[0] = 1.0
        change(raw)
        return [float(each) for each in x]

    with rpc.local(through) as session:
        x = session.tensor(np.zeros(2))

        def change(tensor: rpc.Tensor) -> None:
            # The lane of the call waits for this function.
            seen = tensor.numpy(timeout=20, lane=rpc.CONCURRENT).copy()
            tensor.copy_from(seen + 1, timeout=20, lane=rpc.CONCURRENT)

        assert session.call("through", x, x, change, timeout=30) == [2.0, 1.0]
        assert x.tolist() == [2.0, 1.0]


def test_an_exception_arrives_with_its_class_and_a_traceback_of_the_function_alone() -> None:
    def fail() -> None:
        raise ValueError("wrong here")

    with pytest.raises(rpc.RemoteError) as caught:
        call(fail)
    error = caught.value
    assert (error.message, error.remote_class) == ("wrong here", "ValueError")
    assert error.remote_traceback is not None
    assert "raise ValueError" in error.remote_traceback
    assert error.remote_traceback.count('File "') == 1

    def refuse() -> None:
        raise rpc.NotFoundError("no such model")

    with pytest.raises(rpc.NotFoundError) as found:
        call(refuse)
    assert (found.value.message, found.value.kind) == ("no such model", "not_found")

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(rpc.RemoteError) as left:
        call(leave)
    assert left.value.remote_class == "SystemExit"


def test_a_coroutine_serves_many_calls_on_one_thread() -> None:
    threads: set[int] = set()
    gate: list[asyncio.Event] = []

    async def wait(context: rpc.Context, n: int) -> int:
        threads.add(threading.get_ident())
        if not gate:
            gate.append(asyncio.Event())
        if n == 99:
            gate[0].set()
        await gate[0].wait()
        return n

    with rpc.local(wait) as session:
        returned: list[int] = []
        callers = [
            threading.Thread(target=lambda n=n: returned.append(session.call("wait", n, lane=n + 1)))
            for n in range(100)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(30)
        assert sorted(returned) == list(range(100))
    assert len(threads) == 1


def test_a_coroutine_converts_fails_is_cancelled_and_calls_back() -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def scaled(x: np.ndarray[Any, Any], by: float) -> np.ndarray[Any, Any]:
        await asyncio.sleep(0)
        return x * by

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("gone")

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    async def back(context: rpc.Context, f: Callable[..., Any], n: int) -> Any:
        return await context.call_async(f, n)

    with rpc.local(scaled, fail, forever, back) as session:
        assert session.call("scaled", np.array([1.0, 2.0]), 3).tolist() == [3.0, 6.0]
        with pytest.raises(rpc.InvalidArgumentError, match=r"argument 1 \(by\) of `scaled`: expected float"):
            session.call("scaled", np.array([1.0]), "x")
        with pytest.raises(rpc.RemoteError) as caught:
            session.call("fail")
        assert caught.value.remote_class == "KeyError"
        assert str(caught.value.remote_traceback).count('File "') == 1
        assert session.call("back", lambda n: n + 1, 4) == 5
        with pytest.raises(rpc.DeadlineExceededError):
            session.call("forever", timeout=0.2, lane=7)
        with pytest.raises(TimeoutError):
            session.call("forever", timeout=0.2, lane=8)
    assert begun.wait(20) and cancelled.wait(20)


def test_a_context_tells_of_its_call() -> None:
    def remaining(context: rpc.Context) -> float | None:
        assert not context.is_cancelled
        return context.remaining

    assert call(remaining) is None
    left = call(remaining, timeout=50.0)
    assert 0 < left <= 50


def test_what_a_function_allocates_counts_against_its_session() -> None:
    def make(context: rpc.Context, n: int) -> Any:
        return context.allocate((n,), "uint8")

    def made(n: int) -> Any:
        return np.zeros(n, np.uint8)

    with rpc.local(make, made) as session:
        before = session.call("rpc.info")["memory_bytes"]
        first, second = session.call("make", 1000), session.call("made", 2000)
        assert session.call("rpc.info")["memory_bytes"] == before + 3000
        first.free()
        second.free()
        assert session.call("rpc.info")["memory_bytes"] == before


def test_functions_that_cannot_be_served_are_refused_when_they_are_added() -> None:
    registry = rpc.Registry()

    def only_named(*, a: int) -> None: ...

    with pytest.raises(TypeError, match="'a' of only_named is given by name only"):
        registry.add(only_named)
    with pytest.raises(TypeError, match="has no name: add it by one"):
        registry.add(lambda: 1)
    with pytest.raises(TypeError, match="a function is wanted"):
        registry.add(3)  # type: ignore[arg-type]

    def unresolved(a: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037

    with pytest.raises(TypeError, match="cannot be resolved: name 'Missing'"):
        registry.add(unresolved)
    with pytest.raises(ValueError, match="has no functions for sessions"):
        rpc.Registry(gc)


FORKS = """
import os
import tensor_rpc as rpc

class Thing:
    def __del__(self):
        freed.set()

def new():
    return Thing()

async def double(x: int) -> int:
    return 2 * x

def work():
    global freed
    import threading
    freed = threading.Event()
    with rpc.local(new, double) as session:
        session.call("new").free()
        assert freed.wait(30)
        return session.call("double", 4, timeout=30)

before = rpc.Registry(double)
assert work() == 8
child = os.fork()
if child == 0:
    assert work() == 8
    try:
        rpc.local(before)
    except RuntimeError as error:
        assert "forked" in str(error)
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert work() == 8
print("done")
"""


def test_functions_are_served_in_the_child_of_a_fork_too() -> None:
    package = pathlib.Path(rpc.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr

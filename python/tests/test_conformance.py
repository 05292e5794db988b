"""The contract of a session, as far as Python can ask for it.

The clauses are those of `rpc-conformance`, which has the same names: it checks the crates, and this
the binding on both sides. Each runs in both forms, blocking and for asyncio, over four ways to an
origin in Python: in this process, over TCP, over a Unix socket, and behind a server that forwards.
What the blocking form starts and does not wait for is started on a thread.

Clauses that are not covered, by the reason:

* only a peer that keeps to no rule does it, or a client that builds its requests by hand:
  ``forged_handles_name_nothing``, ``a_handle_of_the_wrong_kind_is_refused`` (but for objects of
  another class), ``a_cancelled_request_that_had_not_begun_is_answered_as_cancelled`` and
  ``a_cancelled_request_that_runs_is_answered_with_its_own_reply`` (who cancels here waits no more);
* the client of Python has no types: ``typed_calls_convert_arguments_and_returns``,
  ``typed_maps_have_each_key_once``, ``returns_that_do_not_fit_are_refused_and_freed``,
  ``closures_convert_arguments_and_returns``, ``arguments_that_do_not_fit_a_closure_are_refused_…``,
  ``vectors_go_up_and_come_down``;
* a function of Python does not have it: ``a_function_learns_its_lane``, the use of memory and handles
  (``memory_is_counted_…``, ``each_reference_owns_a_handle_of_its_own``), drops that panic
  (``an_object_that_panics_when_it_is_freed_…``), borrows for reading and conflicts within one call
  (``two_readers_hold_a_tensor_at_once``, ``a_conflict_within_one_call_is_busy``: it borrows each of
  its tensors once, for writing);
* the operator of a server does not set the limit: queues by number and by bytes (*pipelining*, and
  ``a_shutdown_waits_for_requests_that_waited_for_room``);
* the crates do it alone: ``futures_dropped_at_every_await_point_leak_nothing``,
  ``a_blocking_form_inside_a_runtime_is_misuse``, ``a_call_may_be_started_here_and_waited_for_there``,
  ``a_buffer_that_is_passed_in_becomes_the_result``, ``the_blocking_form_reads_into_a_slice``,
  ``dropping_a_session_frees_all_that_it_held``, ``a_function_that_runs_learns_that_its_session_…``,
  ``a_call_keeps_the_callback_that_it_was_given``;
* other files have it: devices, streams and modules (``test_session.py``), sizes, views and progress
  of copies (``test_arrays.py``), threads and loops together (``test_aio.py``).

Cancellation is asked for in the form for asyncio alone: in the blocking form a deadline does it, and
Ctrl-C (``test_process.py``).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import conformance_functions as functions
import numpy as np
import pytest
from conformance_functions import LIMIT, Point
from forms import Form

import tensor_rpc as rpc

Steps = Generator[Any, Any, None]

SHORT = 0.02
"""Seconds after which deadlines pass; requests that must have begun by then get longer ones if they have not."""


class Started:
    """An operation of the blocking form, on a thread of its own."""

    def __init__(self, operation: Callable[[], Any]) -> None:
        """Begin it."""
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(operation,), daemon=True)
        self._thread.start()

    def _run(self, operation: Callable[[], Any]) -> None:
        try:
            self._outcome = operation()
        except BaseException as error:
            self._error = error

    def wait(self) -> Any:
        """Return its outcome, or raise its error."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "it has not ended"
        if self._error is not None:
            raise self._error
        return self._outcome


class Client:
    """A session, and what clauses do with it in both forms."""

    def __init__(self, place: Place, session: Any) -> None:
        """Use the session of a place."""
        self.place = place
        self.session = session
        self.found: dict[str, Any] = {}

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a function by its name."""
        found = self.found.get(name)
        return found(*args, **options) if found else self.session.call(name, *args, **options)

    def start(self, operation: str | Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Begin an operation, or a call by a name; `wait` gives the outcome."""
        function = functools.partial(self.call, operation) if isinstance(operation, str) else operation
        begin = functools.partial(function, *args, **options)
        return begin() if self.place.is_aio else Started(begin)

    def wait(self, started: Any) -> Any:
        """Return what a clause yields for the outcome."""
        return started.wait() if isinstance(started, Started) else started

    def find(self, *names: str) -> Generator[Any, Any, None]:
        """Look functions up, for clauses about order: `Session.call` does so the first time."""
        for name in names:
            self.found[name] = yield self.session.get_function(name)

    def all(self, started: Iterable[Any]) -> Generator[Any, Any, list[Any]]:
        """Wait for several operations, and return their outcomes."""
        outcomes = []
        for each in started:
            outcomes.append((yield self.wait(each)))
        return outcomes


@dataclass(frozen=True)
class Place:
    """One form of sessions, and one way to an origin."""

    form: Form
    way: str
    hops: int

    @property
    def is_aio(self) -> bool:
        """True in the form for asyncio."""
        return self.form.name == "aio"

    def run(self, clause: Callable[[Client], Steps]) -> None:
        """Run a clause with a session."""
        self.form.run(lambda session: clause(Client(self, session)))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.Server]:
    """Return a server of the functions, on TCP and on a Unix socket."""
    path = tmp_path_factory.mktemp("origin") / "socket"
    with rpc.Server(*functions.FUNCTIONS, listen=["tcp://127.0.0.1:0", f"unix:{path}"]) as server:
        yield server


WAYS = ["local", "tcp", "unix", "chain"]


@pytest.fixture(params=[f"{form}-{way}" for form in ("blocking", "aio") for way in WAYS])
def place(request: pytest.FixtureRequest, origin: rpc.Server, server: str) -> Place:
    """Both forms, over each way to the origin."""
    form, way = request.param.split("-")
    return place_of(form, way, origin, server)


@pytest.fixture(params=WAYS)
def aio_place(request: pytest.FixtureRequest, origin: rpc.Server, server: str) -> Place:
    """The form for asyncio, over each way to the origin."""
    return place_of("aio", request.param, origin, server)


@pytest.fixture(params=WAYS)
def blocking_place(request: pytest.FixtureRequest, origin: rpc.Server, server: str) -> Place:
    """The blocking form, over each way to the origin."""
    return place_of("blocking", request.param, origin, server)


def place_of(form: str, way: str, origin: rpc.Server, server: str) -> Place:
    """Return one form over one way."""
    module: Any = rpc if form == "blocking" else rpc.aio
    tcp, unix = origin.addresses
    connect: dict[str, Callable[[], Any]] = {
        "local": lambda: module.local(*functions.FUNCTIONS),
        "tcp": lambda: module.connect(tcp),
        "unix": lambda: module.connect(unix),
        "chain": lambda: module.connect(tcp, via=[server]),
    }
    hops = {"local": 0, "tcp": 1, "unix": 1, "chain": 2}
    return Place(Form(form, connect[way]), way, hops[way])


@pytest.fixture(params=["blocking", "aio"])
def limited(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Both forms, at a server with low limits."""
    module: Any = rpc if request.param == "blocking" else rpc.aio
    with rpc.Server(*functions.FUNCTIONS, max_memory="1MiB", max_handles=128) as server:
        yield Place(Form(request.param, lambda: module.connect(server.address)), "tcp", 1)


# Functions.


def test_a_function_is_found_by_its_name_and_called(place: Place) -> None:
    def clause(c: Client) -> Steps:
        add = yield c.session.get_function("add")
        assert (yield add(20, 22)) == 42
        assert (yield c.call("add", -1, 1)) == 0
        assert (yield c.call("echo_async", 7, lane=rpc.CONCURRENT)) == 7

    place.run(clause)


def test_an_unknown_function_is_not_found_at_the_origin(place: Place) -> None:
    def clause(c: Client) -> Steps:
        for ask, args in ((c.session.get_function, ("missing",)), (c.call, ("missing", 1))):
            with pytest.raises(rpc.NotFoundError, match="missing") as caught:
                yield ask(*args)
            assert caught.value.hop == place.hops
            assert not caught.value.may_have_run

    place.run(clause)


def test_every_value_comes_back_as_it_went(place: Place) -> None:
    values: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        0.5,
        "",
        "Grüße 🦀",
        b"",
        b"\0\xff",
        [],
        [1, ["a", None]],
    ]
    values += [
        {},
        {"a": 1, 2: [3.5], b"k": {"n": None}},
        rpc.Shape((2, 3)),
        rpc.DataType("bfloat16"),
        rpc.Device("cpu"),
    ]

    def clause(c: Client) -> Steps:
        for name in ("echo", "echo_async"):
            came = yield c.call(name, values)
            assert came == values
            assert [type(value) for value in came] == [type(value) for value in values]

    place.run(clause)


def test_floats_keep_their_bits(place: Place) -> None:
    bits = [0, 1, 1 << 63, 0x7FF0 << 48, 0x7FF8_0000_0000_0123, 0xFFF8_0000_0000_0001, 0x3FF0_0000_0000_0001]
    floats = [struct.unpack("<d", struct.pack("<Q", each))[0] for each in bits]

    def clause(c: Client) -> Steps:
        came = yield c.call("echo", floats)
        assert [struct.unpack("<Q", struct.pack("<d", each))[0] for each in came] == bits

    place.run(clause)


def test_bytes_larger_than_a_chunk_come_back(place: Place) -> None:
    data = bytes(range(256)) * (3 << 12)

    def clause(c: Client) -> Steps:
        assert (yield c.call("echo", data)) == data

    place.run(clause)


def test_lists_and_maps_nest_to_the_limit(place: Place) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for level in range(depth):
            value = [value] if level % 2 else {"k": value}
        return value

    def clause(c: Client) -> Steps:
        for depth in (1, 10, 63):
            assert (yield c.call("echo", nested(depth))) == nested(depth)
        with pytest.raises(ValueError, match="nested 64 deep"):
            yield c.call("echo", nested(66))
        assert (yield c.call("add", 1, 1)) == 2

    place.run(clause)


def test_maps_and_lists_hold_objects(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        one = yield c.call("probe_new", dropped, 5)
        came = yield c.call("echo", {"objects": [one, {"again": one}], "add": (yield c.session.get_function("add"))})
        assert (yield c.call("probe_same", came["objects"][0], came["objects"][1]["again"]))
        assert (yield came["add"](1, 2)) == 3

    place.run(clause)


def test_arguments_that_do_not_fit_are_refused_with_their_place(place: Place) -> None:
    def clause(c: Client) -> Steps:
        assert (yield c.call("narrow", 1, "a", True)) == "1 a True"
        counter = yield c.call("counter_new")
        wrong: list[tuple[tuple[Any, ...], str]] = [
            (("1", "a", True), "small"),
            ((1, 2, True), "text"),
            ((1, "a", 0), "flag"),
            ((1, "a", counter), "flag"),
            ((1, "a"), "flag"),
            ((1, "a", True, 4), "4"),
        ]
        for args, match in wrong:
            with pytest.raises(rpc.InvalidArgumentError, match=match) as caught:
                yield c.call("narrow", *args)
            assert (caught.value.hop, caught.value.may_have_run) == (place.hops, False)
        with pytest.raises(rpc.InvalidArgumentError, match="an object of Probe"):
            yield c.call("probe_payload", counter)

    place.run(clause)


def test_structs_travel_packed(place: Place) -> None:
    def clause(c: Client) -> Steps:
        moved = yield c.call("move_point", Point((1.0, 2.0), "Größe", [1, None]), 0.5)
        assert moved == {"at": [1.5, 2.0], "label": "Größe", "tags": [1, None]}
        with pytest.raises(rpc.InvalidArgumentError, match="label"):
            yield c.call("move_point", {"at": [1.0, 2.0], "label": 3, "tags": []}, 0.5)

    place.run(clause)


def test_functions_are_returned_and_passed(place: Place) -> None:
    def clause(c: Client) -> Steps:
        plus_five = yield c.call("make_adder", 5)
        assert (yield plus_five(37)) == 42
        composed = yield c.call("compose", plus_five, plus_five)
        assert (yield composed(1)) == 11
        assert (yield c.call("apply", (yield c.session.get_function("add")), 1, 2)) == 3

    place.run(clause)


# Handles.


def test_objects_keep_their_identity(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        one = yield c.call("probe_new", dropped, 1)
        other = yield c.call("probe_new", dropped, 1)
        echoed = yield c.call("echo", one)
        for a, b, same in [(one, one, True), (one, echoed, True), (one, other, False)]:
            assert (yield c.call("probe_same", a, b)) is same

    place.run(clause)


def test_dropping_the_last_reference_frees_the_object(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        one = yield c.call("probe_new", dropped, 9)
        echoed = yield c.call("echo", one)
        del one
        yield
        assert (yield c.call("probe_payload", echoed)) == 9
        assert (yield c.call("counter_value", dropped)) == 0
        del echoed
        yield
        assert (yield c.call("counter_reach", dropped, 1)) == 1

    place.run(clause)


def test_a_thousand_objects_come_and_go(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        objects = yield c.call("probe_many", dropped, 1000)
        assert (yield c.call("probe_payload", objects[432])) == 432
        del objects
        yield
        assert (yield c.call("counter_reach", dropped, 1000)) == 1000

    place.run(clause)


def test_an_object_in_use_outlives_its_handle(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, dropped = (yield c.call("gate_new")), (yield c.call("counter_new"))
        probe = yield c.call("probe_new", dropped, 17)
        running = c.start("gate_hold_object", gate, probe, lane=1)
        yield c.call("gate_reach", gate, 1)
        yield probe.free()
        with pytest.raises(rpc.InvalidHandleError):
            yield c.call("probe_payload", probe)
        assert (yield c.call("counter_value", dropped)) == 0
        yield c.call("gate_open", gate)
        assert (yield c.wait(running)) == 17
        assert (yield c.call("counter_reach", dropped, 1)) == 1

    place.run(clause)


def test_a_reference_may_be_dropped_right_behind_a_call(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        calls = []
        for payload in range(20):
            probe = yield c.call("probe_new", dropped, payload)
            calls.append(c.start("probe_payload", probe))
            del probe
        for payload, call in enumerate(calls):
            assert (yield c.wait(call)) == payload
        del calls, call
        yield
        assert (yield c.call("counter_reach", dropped, 20)) == 20

    place.run(clause)


def test_stale_handles_name_nothing(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        probe = yield c.call("probe_new", dropped, 0)
        add = yield c.call("make_adder", 1)
        x = yield c.session.empty([4], "uint8")
        yield probe.free()
        yield x.free()
        # Their places are in use again.
        again = yield c.call("probe_many", dropped, 8)
        attempts: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (probe.free, ()),
            (c.call, ("probe_payload", probe)),
            (c.call, ("echo", [probe])),
            (x.free, ()),
            (x.read, ()),
            (x.write, (b"1234",)),
            (c.call, ("tensor_sum", x)),
        ]
        for fails, args in attempts:
            with pytest.raises(rpc.InvalidHandleError) as caught:
                yield fails(*args)
            assert not caught.value.may_have_run
        del caught
        assert (yield add(1)) == 2
        # The reference that is left over frees nobody else's.
        del probe, x, attempts, fails, args
        gc.collect()
        yield
        for payload, each in enumerate(again):
            assert (yield c.call("probe_payload", each)) == payload
        assert (yield c.call("counter_value", dropped)) == 1

    place.run(clause)


def test_handles_of_another_session_are_refused(place: Place) -> None:
    def clause(c: Client) -> Steps:
        other = place.form.connect() if not place.is_aio else (yield place.form.connect())
        foreign = yield other.call("counter_new")
        x = yield other.empty([4])
        adder = yield other.call("make_adder", 1)
        for args in ((foreign, 1), (x, 1), (adder, 1), ([{"k": foreign}], 1)):
            with pytest.raises(rpc.InvalidHandleError) as caught:
                yield c.call("echo", *args)
            assert not caught.value.may_have_run
        with pytest.raises(rpc.InvalidHandleError):
            yield (yield c.session.empty([4])).copy_from(x)
        assert (yield other.call("counter_add", foreign, 3)) == 3
        yield other.close()
        assert (yield c.call("add", 1, 1)) == 2

    place.run(clause)


def test_the_limit_on_handles_is_an_error_and_leaks_nothing(limited: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("counter_new", "counter_reach", "probe_new", "probe_many")
        dropped = yield c.call("counter_new")
        made = []
        with pytest.raises(rpc.LimitExceededError, match="handles"):
            for payload in range(200):
                made.append((yield c.call("probe_new", dropped, payload)))
        with pytest.raises(rpc.LimitExceededError):
            yield c.call("probe_many", dropped, 50)
        assert 100 < len(made) < 128
        held = len(made)
        del made[:]
        yield
        # With those that found no room.
        yield c.call("counter_reach", dropped, held + 51)
        assert len((yield c.call("probe_many", dropped, 50))) == 50

    limited.run(clause)


# Tensors.


def test_a_fresh_tensor_is_zero(place: Place) -> None:
    def clause(c: Client) -> Steps:
        for shape in [(), (0,), (1,), (2, 3, 4), (3, 0, 5), (1 << 14,)]:
            x = yield c.session.empty(shape)
            assert (tuple(x.shape), x.dtype, x.device) == (shape, "float32", "cpu:0")
            zeros = yield x.numpy()
            assert zeros.shape == shape and not zeros.any()
            # Memory that was used before is zero again.
            yield x.write(b"\x55" * zeros.nbytes)

    place.run(clause)


def test_views_share_storage(place: Place) -> None:
    def clause(c: Client) -> Steps:
        x = yield c.session.tensor(np.arange(1, 7, dtype="float32"))
        middle = x.view((2,), byte_offset=8)
        yield c.call("tensor_fill", middle, 10.0)
        assert (yield c.call("tensor_sum", x)) == 1 + 2 + 10 + 10 + 5 + 6
        returned = yield c.call("tensor_same", middle)
        del x, middle
        yield
        assert (yield c.call("tensor_sum", returned)) == 20

    place.run(clause)


def test_bad_layouts_are_refused(place: Place) -> None:
    layouts: list[dict[str, Any]] = [
        {"shape": (9,)},
        {"shape": (8,), "byte_offset": 4},
        {"shape": (1,), "byte_offset": 32},
        {"shape": (-1,)},
        {"shape": (2**62, 2**62)},
        {"shape": (2,), "strides": (8,)},
        {"shape": (2,), "strides": (-1,)},
        {"shape": (2,), "strides": (1, 1)},
    ]

    def clause(c: Client) -> Steps:
        x = yield c.session.tensor(np.ones(8, "float32"))
        for layout in layouts:
            # A size that is no number of bytes is refused here already.
            with pytest.raises(ValueError):
                yield c.call("tensor_sum", x.view(**layout))
        assert (yield c.call("tensor_sum", x)) == 8

    place.run(clause)


def test_impossible_allocations_are_refused(place: Place) -> None:
    def clause(c: Client) -> Steps:
        impossible: list[tuple[type[rpc.RpcError], Callable[[], Any]]] = [
            (rpc.DeviceError, lambda: c.session.empty([1], device="cpu:1")),
            (rpc.InvalidArgumentError, lambda: c.session.empty([-1])),
            (rpc.InvalidArgumentError, lambda: c.session.empty([2**62, 2])),
            (rpc.UnsupportedError, lambda: c.session.empty([1], scope="texture")),
        ]
        for error, attempt in impossible:
            with pytest.raises(error):
                yield attempt()
        with pytest.raises((rpc.OutOfMemoryError, rpc.LimitExceededError)):
            yield c.session.empty([1 << 58])
        assert (yield c.call("add", 1, 1)) == 2

    place.run(clause)


def test_the_limit_on_memory_is_an_error(limited: Place) -> None:
    def clause(c: Client) -> Steps:
        first = yield c.session.empty([600_000], "uint8")
        with pytest.raises(rpc.LimitExceededError, match="memory"):
            yield c.session.empty([600_000], "uint8")
        with pytest.raises(rpc.LimitExceededError, match="memory"):
            yield c.call("tensor_new", 150_000)
        yield first.free()
        yield c.session.empty([600_000], "uint8")

    limited.run(clause)


def test_tensors_are_copied_among_each_other(place: Place) -> None:
    def clause(c: Client) -> Steps:
        x = yield c.session.tensor(np.arange(1, 5, dtype="float32"))
        y = yield c.session.empty([4])
        yield y.copy_from(x)
        yield y.view((2,), byte_offset=8).copy_from(x.view((2,)))
        assert (yield y.tolist()) == [1, 2, 1, 2]
        with pytest.raises(ValueError):
            yield y.view((3,)).copy_from(y.view((3,), byte_offset=4))
        with pytest.raises(ValueError):
            yield y.copy_from(x.view((3,)))
        assert (yield y.tolist()) == [1, 2, 1, 2]

    place.run(clause)


def test_calls_and_copies_wait_for_a_writer_on_another_lane(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, journal = (yield c.call("gate_new")), (yield c.call("journal_new"))
        x = yield c.session.tensor(np.array([1, 2], "float32"))
        y = yield c.session.empty([2])
        writer = c.start("tensor_fill_gated", x, 5.0, gate, journal, lane=1)
        yield c.call("gate_reach", gate, 1)
        reader = c.start("tensor_sum_noted", x, journal, lane=2)
        copies = [c.start(x.read, lane=3), c.start(y.copy_from, x, lane=4)]
        with pytest.raises(TimeoutError) as caught:
            yield x.numpy(timeout=SHORT, lane=5)
        del caught
        assert (yield c.call("journal_entries", journal)) == []
        yield c.call("gate_open", gate)
        yield c.wait(writer)
        assert (yield c.wait(reader)) == 10
        assert (yield c.wait(copies[0])) == struct.pack("<2f", 5, 5)
        yield c.wait(copies[1])
        assert (yield y.tolist()) == [5, 5]
        assert (yield c.call("journal_entries", journal)) == [1, 2]

    place.run(clause)


def test_calls_with_the_same_tensors_in_another_order_do_not_deadlock(place: Place) -> None:
    def clause(c: Client) -> Steps:
        x, y, z = yield from c.all(c.session.tensor(np.ones(8, "float32")) for _ in range(3))
        orders = [(x, y, z), (y, z, x), (z, x, y), (y, x, z)]
        calls = [c.start("tensor_add", *orders[n % 4], lane=n % 6) for n in range(24)]
        yield from c.all(calls)

    place.run(clause)


def test_a_tensor_that_comes_twice_is_borrowed_once(place: Place) -> None:
    """A function of Python borrows all its tensors for writing, and so there is no conflict."""

    def clause(c: Client) -> Steps:
        x = yield c.session.tensor(np.ones(4, "float32"))
        yield c.call("tensor_add", x, x, x)
        yield c.call("tensor_add", x.view((2,)), x.view((2,)), x.view((2,), byte_offset=8))
        assert (yield x.tolist()) == [2, 2, 4, 4]

    place.run(clause)


def test_a_tensor_freed_during_a_call_stays_until_the_call_is_done(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, journal = (yield c.call("gate_new")), (yield c.call("journal_new"))
        x = yield c.session.empty([1000])
        writer = c.start("tensor_fill_gated", x, 1.0, gate, journal, lane=1)
        yield c.call("gate_reach", gate, 1)
        yield x.free()
        with pytest.raises(rpc.InvalidHandleError):
            yield x.read(lane=2)
        yield c.call("gate_open", gate)
        yield c.wait(writer)
        assert (yield c.call("journal_entries", journal)) == [1]

    place.run(clause)


# Order.


def test_a_lane_keeps_the_order_of_pipelined_calls(place: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("journal_push", "journal_push_async")
        for lane in (0, 3):
            journal = yield c.call("journal_new")
            pushes = ["journal_push", "journal_push_async"]
            # The blocking form starts a call when the one before has ended.
            count = 200 if place.is_aio else 20
            calls = [c.call(pushes[(n // 7 + n) % 2], journal, n, lane=lane) for n in range(count)]
            yield from c.all(calls)
            assert (yield c.call("journal_entries", journal)) == list(range(count))

    place.run(clause)


def test_copies_keep_their_place_among_calls(place: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("tensor_sum", "tensor_fill")
        x = yield c.session.empty([4])
        rounds = []
        for n in range(30 if place.is_aio else 5):
            write = x.write(struct.pack("<4f", n, n, n, n), lane=2)
            total = c.call("tensor_sum", x, lane=2)
            fill = c.call("tensor_fill", x, n + 0.5, lane=2)
            rounds.append((n, write, total, fill, x.read(lane=2)))
        for n, write, total, fill, read in rounds:
            yield write
            yield fill
            assert (yield total) == 4 * n
            assert struct.unpack("<4f", (yield read)) == (n + 0.5,) * 4

    place.run(clause)


@pytest.mark.parametrize("wait", ["gate_wait", "gate_wait_async"])
def test_a_lane_that_is_held_up_holds_up_no_other(place: Place, wait: str) -> None:
    def clause(c: Client) -> Steps:
        gate, counter = (yield c.call("gate_new")), (yield c.call("counter_new"))
        held = c.start(wait, gate, lane=1)
        yield c.call("gate_reach", gate, 1)
        behind = [c.start("counter_add", counter, 1, lane=1) for _ in range(5)]
        for lane in (0, 2, rpc.CONCURRENT, 2**32 - 2):
            for echo in ("echo", "echo_async"):
                assert (yield c.call(echo, 5, lane=lane)) == 5
            x = yield c.session.tensor(np.arange(3, dtype="uint8"), lane=lane)
            assert (yield x.read(lane=lane)) == b"\0\1\2"
            yield x.free()
        assert (yield c.call("counter_value", counter)) == 0
        yield c.call("gate_open", gate)
        yield c.wait(held)
        assert sorted((yield from c.all(behind))) == [1, 2, 3, 4, 5]

    place.run(clause)


def test_concurrent_calls_run_beside_each_other(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate = yield c.call("gate_new")
        waits = ["gate_wait", "gate_wait_async"] * 6
        calls = [c.start(wait, gate, lane=rpc.CONCURRENT) for wait in waits]
        yield c.call("gate_reach", gate, len(calls))
        yield c.call("gate_open", gate)
        yield from c.all(calls)

    place.run(clause)


def test_every_lane_keeps_its_own_order(place: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("journal_push", "journal_push_async")
        journals = yield from c.all(c.call("journal_new") for _ in range(4))

        def push(lane: int, entry: int) -> Any:
            name = ["journal_push", "journal_push_async"][(entry + lane) % 2]
            return c.call(name, journals[lane], entry, lane=lane * lane)

        def push_all(lane: int) -> None:
            for entry in range(30):
                push(lane, entry)

        if place.is_aio:
            yield from c.all([push(lane, entry) for entry in range(30) for lane in range(4)])
        else:
            threads = [c.start(push_all, lane) for lane in range(4)]
            yield from c.all(threads)
        for journal in journals:
            assert (yield c.call("journal_entries", journal)) == list(range(30))

    place.run(clause)


def test_requests_that_fail_keep_their_place(place: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("journal_push", "fail", "add", "fail_rpc")
        journal = yield c.call("journal_new")
        wrong: list[tuple[str, tuple[Any, ...]]] = [("fail", ("n",)), ("add", ("no", 1)), ("fail_rpc", ())]
        calls = []
        for n in range(12):
            name, args = wrong[n % 3]
            calls.append((True, c.start("journal_push", journal, n, lane=n % 2)))
            calls.append((False, c.start(name, *args, lane=n % 2)))
        for succeeds, call in calls:
            try:
                yield c.wait(call)
            except rpc.RpcError:
                assert not succeeds
            else:
                assert succeeds
        entries = yield c.call("journal_entries", journal)
        assert sorted(entries) == list(range(12))
        if place.is_aio:
            for lane in range(2):
                assert [n for n in entries if n % 2 == lane] == list(range(lane, 12, 2))

    place.run(clause)


def test_lanes_share_the_objects(place: Place) -> None:
    def clause(c: Client) -> Steps:
        dropped = yield c.call("counter_new")
        probe = yield c.call("probe_new", dropped, 6, lane=1)
        assert (yield c.call("probe_payload", probe, lane=2)) == 6

    place.run(clause)


# Pipelining.


def test_each_reply_goes_to_its_request(place: Place) -> None:
    def clause(c: Client) -> Steps:
        count = 200 if place.is_aio else 24

        def echo(n: int) -> Any:
            return c.call(("echo", "echo_async")[n % 2], [n, str(n)], lane=rpc.CONCURRENT if n % 4 == 0 else n % 5)

        calls = [c.start(echo, n) for n in range(count)]
        for n, call in reversed(list(enumerate(calls))):
            assert (yield c.wait(call)) == [n, str(n)]

    place.run(clause)


def test_every_request_gets_exactly_one_reply(aio_place: Place) -> None:
    """Those that succeed, that fail, and that are cancelled before they begin, while they run, and after."""

    def clause(c: Client) -> Steps:
        yield from c.find("gate_wait", "fail", "echo", "echo_async")
        gate = yield c.call("gate_new")
        replies: list[int] = []
        calls: list[Any] = []

        def reply(n: int, call: Any) -> None:
            replies.append(n)

        for n in range(60):
            name = "gate_wait" if n == 0 else "fail" if n % 7 == 0 else "echo" if n % 2 else "echo_async"
            call = c.call(name, gate if n == 0 else str(n), lane=n % 3)
            call.add_done_callback(functools.partial(reply, n))
            if n % 4 == 1:
                call.cancel()
                call.cancel()
            calls.append(call)
        yield c.call("gate_reach", gate, 1, lane=9)
        yield c.call("gate_open", gate, lane=9)
        outcomes = yield asyncio.gather(*calls, return_exceptions=True)
        for call in calls:
            assert not call.cancel()
        for n, outcome in enumerate(outcomes):
            if n % 4 == 1:
                assert isinstance(outcome, asyncio.CancelledError)
            elif n == 0:
                assert outcome is None
            elif n % 7 == 0:
                assert isinstance(outcome, rpc.RemoteError) and outcome.message == str(n)
            else:
                assert outcome == str(n)
        for lane in range(3):
            assert (yield c.call("add", 1, 1, lane=lane)) == 2
        assert sorted(replies) == list(range(60))

    aio_place.run(clause)


# Deadlines, and cancellation.


def longer_and_longer() -> Iterator[float]:
    """Return time limits of attempts to have a request begin before its deadline."""
    yield from (SHORT * 2**doubled for doubled in range(10))
    raise AssertionError("one of the calls is under way at its deadline")


@pytest.mark.parametrize("hold", ["hold", "hold_async"])
def test_the_deadline_of_a_running_call_fails_the_caller_at_once(place: Place, hold: str) -> None:
    """And the function learns that nobody waits, and lets the lane go on."""

    def clause(c: Client) -> Steps:
        started, ended = (yield c.call("counter_new")), (yield c.call("counter_new"))
        for limit in longer_and_longer():
            with pytest.raises(rpc.DeadlineExceededError) as caught:
                yield c.call(hold, started, ended, lane=1, timeout=limit)
            assert (yield c.call("add", 1, 1, lane=1)) == 2
            if (yield c.call("counter_value", started)):
                assert caught.value.may_have_run
                break
        assert (yield c.call("counter_reach", ended, 1)) == 1

    place.run(clause)


@pytest.mark.parametrize("wait", ["gate_wait", "gate_wait_async"])
def test_the_deadline_does_not_wait_for_the_function(place: Place, wait: str) -> None:
    def clause(c: Client) -> Steps:
        gate = yield c.call("gate_new")
        for limit in longer_and_longer():
            with pytest.raises(rpc.DeadlineExceededError) as caught:
                yield c.call(wait, gate, lane=1, timeout=limit)
            if caught.value.may_have_run:
                break
        assert (yield c.call("add", 1, 1)) == 2
        yield c.call("gate_open", gate)
        assert (yield c.call("add", 1, 1, lane=1)) == 2

    place.run(clause)


def test_a_call_that_is_still_queued_at_its_deadline_never_runs(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, counter = (yield c.call("gate_new")), (yield c.call("counter_new"))
        held = c.start("gate_wait", gate, lane=1)
        yield c.call("gate_reach", gate, 1)
        for name in ("counter_add", "counter_add_async"):
            with pytest.raises(rpc.DeadlineExceededError) as caught:
                yield c.call(name, counter, 1, lane=1, timeout=SHORT)
            # A client that has sent the request cannot know that, and does not wait for the origin to say so.
            assert place.hops > 0 or not caught.value.may_have_run
        yield c.call("gate_open", gate)
        yield c.wait(held)
        assert (yield c.call("counter_add", counter, 100, lane=1)) == 100

    place.run(clause)


def test_a_deadline_that_has_passed_already_runs_nothing(place: Place) -> None:
    def clause(c: Client) -> Steps:
        counter = yield c.call("counter_new")
        x = yield c.session.empty([4], "uint8")
        add = yield c.session.get_function("counter_add")
        attempts: list[Callable[[], Any]] = [
            lambda: add(counter, 1, timeout=0),
            lambda: c.call("counter_add_async", counter, 1, timeout=0),
            lambda: c.session.get_function("add", timeout=0),
            lambda: c.session.empty([1], timeout=0),
            lambda: x.write(b"1234", timeout=0),
            lambda: x.read(timeout=0),
        ]
        for attempt in attempts:
            with pytest.raises(rpc.DeadlineExceededError):
                yield attempt()
        assert (yield x.read()) == bytes(4)
        assert (yield c.call("counter_value", counter)) == 0

    place.run(clause)


def test_the_deadline_reaches_the_function_as_time_remaining(place: Place) -> None:
    def clause(c: Client) -> Steps:
        assert (yield c.call("remaining")) is None
        assert 15 < (yield c.call("remaining", timeout=30)) <= 30
        assert (yield c.call("remaining", timeout=365 * 86400)) > 300 * 86400
        # Beyond what a clock can say is no deadline.
        assert (yield c.call("add", 1, 1, timeout=1e300)) == 2

    place.run(clause)


def test_a_copy_fails_at_its_deadline(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate = yield c.call("gate_new")
        x = yield c.session.empty([3 << 20], "uint8")
        held = c.start("gate_wait", gate, lane=1)
        yield c.call("gate_reach", gate, 1)
        with pytest.raises(rpc.DeadlineExceededError):
            yield x.write(b"\1" * (3 << 20), lane=1, timeout=SHORT)
        with pytest.raises(rpc.DeadlineExceededError):
            yield x.read(lane=1, timeout=SHORT)
        yield c.call("gate_open", gate)
        yield c.wait(held)
        yield x.write(b"\2" * (3 << 20), lane=1)
        assert (yield x.read(lane=1)) == b"\2" * (3 << 20)

    place.run(clause)


def test_a_deadline_passes_while_a_call_waits_for_a_tensor(place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, journal = (yield c.call("gate_new")), (yield c.call("journal_new"))
        x = yield c.session.empty([4])
        writer = c.start("tensor_fill_gated", x, 1.0, gate, journal, lane=1)
        yield c.call("gate_reach", gate, 1)
        with pytest.raises(rpc.DeadlineExceededError):
            yield c.call("tensor_sum_noted", x, journal, lane=2, timeout=SHORT)
        yield c.call("gate_open", gate)
        yield c.wait(writer)
        assert (yield c.call("add", 1, 1, lane=2)) == 2
        assert (yield c.call("journal_entries", journal)) == [1]

    place.run(clause)


def test_a_call_that_is_cancelled_before_it_begins_never_runs(aio_place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, counter = (yield c.call("gate_new")), (yield c.call("counter_new"))
        held = c.call("gate_wait", gate, lane=1)
        yield c.call("gate_reach", gate, 1)
        for name in ("counter_add", "counter_add_async"):
            call = c.call(name, counter, 1, lane=1)
            # A round trip behind it: it is in the queue of its lane.
            yield c.call("add", 1, 1)
            call.cancel()
            assert call.cancelled()
        yield c.call("add", 1, 1)
        yield c.call("gate_open", gate)
        yield held
        assert (yield c.call("counter_add", counter, 100, lane=1)) == 100

    aio_place.run(clause)


def test_the_result_of_a_call_that_is_cancelled_while_it_runs_is_freed(aio_place: Place) -> None:
    def clause(c: Client) -> Steps:
        gate, dropped = (yield c.call("gate_new")), (yield c.call("counter_new"))
        call = c.call("gate_probes", gate, dropped, 10, lane=1)
        yield c.call("gate_reach", gate, 1)
        call.cancel()
        yield c.call("gate_open", gate)
        assert (yield c.call("counter_reach", dropped, 10)) == 10

    aio_place.run(clause)


@pytest.mark.parametrize("hold", ["hold", "hold_async"])
def test_a_function_learns_that_its_caller_has_gone(aio_place: Place, hold: str) -> None:
    def clause(c: Client) -> Steps:
        started, ended = (yield c.call("counter_new")), (yield c.call("counter_new"))
        call = c.call(hold, started, ended, lane=1)
        yield c.call("counter_reach", started, 1)
        call.cancel()
        yield c.call("counter_reach", ended, 1)
        assert (yield c.call("add", 1, 1, lane=1)) == 2

    aio_place.run(clause)


# Errors.


def test_application_errors_keep_their_facts(place: Place) -> None:
    def clause(c: Client) -> Steps:
        for name in ("fail", "fail_async"):
            with pytest.raises(rpc.RemoteError) as caught:
                yield c.call(name, "the printer is out of paper")
            error = caught.value
            assert (error.kind, error.message) == ("application", "the printer is out of paper")
            assert error.remote_class == "OutOfPaper"
            assert name in (error.remote_traceback or "")
            assert (error.hop, error.may_have_run, error.is_retryable) == (place.hops, True, False)

    place.run(clause)


def test_errors_that_a_function_passes_on_keep_their_kind(place: Place) -> None:
    def clause(c: Client) -> Steps:
        with pytest.raises(rpc.UnsupportedError) as caught:
            yield c.call("fail_rpc")
        assert (caught.value.message, caught.value.may_have_run) == ("not on a Sunday", True)

    place.run(clause)


def test_a_failure_harms_nobody_else(place: Place) -> None:
    """Its lane goes on, its tensor is free again, and other calls end well."""

    def clause(c: Client) -> Steps:
        gate = yield c.call("gate_new")
        x = yield c.session.empty([16])
        bystander = c.start("gate_wait", gate, lane=1)
        yield c.call("gate_reach", gate, 1)
        for n in range(3):
            with pytest.raises(rpc.RemoteError, match=f"number {n}"):
                yield c.call("fail_async", f"number {n}")
            with pytest.raises(rpc.RemoteError, match="in hand"):
                yield c.call("fail_holding", x)
            yield c.call("tensor_fill", x, float(n))
            assert (yield c.call("tensor_sum", x)) == 16 * n
        yield c.call("gate_open", gate)
        yield c.wait(bystander)

    place.run(clause)


def test_each_caller_gets_its_own_error(place: Place) -> None:
    def clause(c: Client) -> Steps:
        calls = [c.start("fail", str(n), lane=n % 4) for n in range(20)]
        for n, call in reversed(list(enumerate(calls))):
            with pytest.raises(rpc.RemoteError) as caught:
                yield c.wait(call)
            assert caught.value.message == str(n)

    place.run(clause)


def test_nested_calls_are_not_queued(place: Place) -> None:
    def clause(c: Client) -> Steps:
        assert (yield c.call("call_nested", "add", 1, 2)) == 3
        assert (yield c.call("call_nested", "call_nested", "call_nested", "add", 1, 2)) == 3
        with pytest.raises(rpc.RemoteError, match="inside") as caught:
            yield c.call("call_nested", "fail", "inside")
        assert caught.value.remote_class == "OutOfPaper"
        with pytest.raises(rpc.NotFoundError):
            yield c.call("call_nested", "missing")

    place.run(clause)


# Copies.


def test_parts_are_copied_and_nothing_else_is_touched(place: Place) -> None:
    def clause(c: Client) -> Steps:
        size = (2 << 20) + 17
        data = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
        x = yield c.session.empty([size], "uint8")
        yield x.write(data)
        assert (yield x.read()) == data
        for start, part in [(0, b"ab"), (size - 1, b"z"), (1 << 20, b"\0" * (1 << 20)), (5, b"")]:
            yield x.write(part, start)
            data = data[:start] + part + data[start + len(part) :]
        assert (yield x.read()) == data
        assert (yield x.read(3, 9)) == data[3:9]
        for attempt, args in [(x.write, (b"ab", size - 1)), (x.read, (0, size + 1)), (x.read, (5, 4))]:
            with pytest.raises(ValueError):
                yield attempt(*args)
        assert (yield x.read()) == data

    place.run(clause)


def test_a_cancelled_copy_leaves_the_session_in_order(aio_place: Place) -> None:
    def clause(c: Client) -> Steps:
        data = b"\3" * (12 << 20)
        x = yield c.session.empty([len(data)], "uint8")
        for begin, args in [(x.write, (data,)), (x.read, ()), (x.write, (data,))]:
            copy = begin(*args)
            yield asyncio.sleep(0)
            copy.cancel()
        yield x.write(data)
        assert (yield x.read()) == data

    aio_place.run(clause)


# Callbacks.


def test_a_closure_takes_and_returns_every_value(place: Place) -> None:
    def clause(c: Client) -> Steps:
        values = [None, True, -5, 0.5, "text", b"bytes", [1, ["a"]], {"k": 2}]
        seen: list[Any] = []

        def twice(value: Any) -> Any:
            seen.append(value)
            return [value, value]

        for value in values:
            assert (yield c.call("apply", twice, value)) == [value, value]
        assert seen == values

    place.run(clause)


def test_errors_of_a_closure_keep_their_facts(place: Place) -> None:
    def clause(c: Client) -> Steps:
        def closure() -> None:
            raise functions.OutOfPaper("of the closure")

        for _ in range(2):
            with pytest.raises(rpc.RemoteError) as caught:
                yield c.call("apply", closure)
            assert (caught.value.remote_class, caught.value.message) == ("OutOfPaper", "of the closure")
            assert caught.value.may_have_run
        assert (yield c.call("apply", lambda: 1)) == 1

    place.run(clause)


def test_closures_nest(place: Place) -> None:
    def clause(c: Client) -> Steps:
        if place.is_aio:
            # A coroutine runs on the loop, and may await.
            async def factorial(n: int) -> int:
                return n * (await c.call("apply", factorial, n - 1, lane=rpc.CONCURRENT)) if n else 1

            assert (yield c.call("apply", factorial, 6)) == 720
            return

        def blocking(n: int) -> int:
            return n * int(c.call("apply", blocking, n - 1, lane=rpc.CONCURRENT)) if n else 1

        assert (yield c.call("apply", blocking, 6)) == 720

    place.run(clause)


def test_two_closures_call_each_other(blocking_place: Place) -> None:
    def clause(c: Client) -> Steps:
        def turn(steps: int) -> Callable[..., Any]:
            def closure(this: Any, other: Any, x: int) -> list[int]:
                if x <= 0:
                    return []
                return [x, *c.call("apply", other, other, this, x - steps, lane=rpc.CONCURRENT)]

            return closure

        one, two = (yield c.session.callback(turn(1))), (yield c.session.callback(turn(2)))
        assert (yield c.call("apply", one, one, two, 9)) == [9, 8, 6, 5, 3, 2]

    blocking_place.run(clause)


def test_a_closure_reads_tensors_and_calls_and_returns_functions(place: Place) -> None:
    def clause(c: Client) -> Steps:
        x = yield c.session.tensor(np.arange(4, dtype="float32"))
        add = yield c.session.get_function("add")
        if place.is_aio:

            async def total(x: Any) -> float:
                return float((await x.numpy(lane=rpc.CONCURRENT)).sum())

            async def adder_of(function: Any, x: int) -> Any:
                by = await function(x, 1, lane=rpc.CONCURRENT)
                return await c.call("make_adder", by, lane=rpc.CONCURRENT)

        else:

            def total(x: Any) -> float:  # type: ignore[misc]
                return float(x.numpy(lane=rpc.CONCURRENT).sum())

            def adder_of(function: Any, x: int) -> Any:  # type: ignore[misc]
                return c.call("make_adder", function(x, 1, lane=rpc.CONCURRENT), lane=rpc.CONCURRENT)

        assert (yield c.call("apply", total, x)) == 6
        plus_five = yield c.call("apply", adder_of, add, 4)
        assert (yield plus_five(37)) == 42

    place.run(clause)


def test_a_callback_that_is_dropped_fails_its_calls(place: Place) -> None:
    def clause(c: Client) -> Steps:
        callback = yield c.session.callback(abs)
        # The origin's copy outlives the client's.
        later = yield c.call("compose", callback, (yield c.session.get_function("echo")))
        assert (yield later(-1)) == 1
        del callback
        yield
        # The end of the callback is told beside the calls.
        with pytest.raises(rpc.InvalidHandleError, match="let go"):
            for _ in range(1000):
                yield later(-1)
        assert (yield c.call("add", 1, 1)) == 2

    place.run(clause)


def test_a_shutdown_lets_go_of_callbacks(aio_place: Place) -> None:
    def clause(c: Client) -> Steps:
        started, go = asyncio.Event(), asyncio.Event()

        async def closure() -> bool:
            started.set()
            return await go.wait()

        call = c.call("apply", (yield c.session.callback(closure)), lane=3)
        yield started.wait()
        yield c.session.close()
        with pytest.raises(rpc.InvalidHandleError, match="let go"):
            yield call

    aio_place.run(clause)


def test_a_closure_runs_for_several_lanes_at_once(place: Place) -> None:
    def clause(c: Client) -> Steps:
        together = threading.Barrier(4, timeout=LIMIT)

        def meet(value: int) -> int:
            together.wait()
            return value

        callback = yield c.session.callback(meet)
        calls = [c.start("apply", callback, lane, lane=lane) for lane in range(4)]
        for lane, call in enumerate(calls):
            assert (yield c.wait(call)) == lane

    place.run(clause)


def test_a_request_on_the_waiting_lane_is_misuse(blocking_place: Place) -> None:
    def clause(c: Client) -> Steps:

        def closure(x: int) -> Any:
            with pytest.raises(rpc.ApiMisuseError):
                c.call("add", x, 1)
            return c.call("add", x, 1, lane=9)

        assert (yield c.call("apply", closure, 1)) == 2

    blocking_place.run(clause)


def test_a_deadline_passes_while_the_closure_runs(place: Place) -> None:
    def clause(c: Client) -> Steps:
        go = threading.Event()

        def closure() -> bool:
            return go.wait(LIMIT)

        callback = yield c.session.callback(closure)
        with pytest.raises(rpc.DeadlineExceededError):
            yield c.call("apply", callback, lane=3, timeout=SHORT)
        go.set()
        assert (yield c.call("apply", callback, lane=3)) is True

    place.run(clause)


# Threads.


def test_several_threads_share_one_session(blocking_place: Place) -> None:
    def clause(c: Client) -> Steps:
        counter = yield c.call("counter_new")

        def work(thread: int) -> None:
            for n in range(10):
                assert c.call("add", thread, n, lane=thread) == thread + n
                c.call("counter_add", counter, 1, lane=rpc.CONCURRENT if n % 2 else 0)

        threads = [c.start(work, thread) for thread in range(4)]
        yield from c.all(threads)
        assert (yield c.call("counter_value", counter)) == 40

    blocking_place.run(clause)


# Ends.


def test_a_shutdown_completes_what_was_admitted_and_refuses_the_rest(aio_place: Place) -> None:
    def clause(c: Client) -> Steps:
        yield from c.find("journal_push_async", "journal_entries")
        journal = yield c.call("journal_new")
        calls = [c.call("journal_push_async", journal, n, lane=n % 3) for n in range(30)]
        entries = c.call("journal_entries", journal)
        yield c.session.close()
        assert (yield from c.all(calls)) == [None] * 30
        assert len((yield entries)) >= 10
        with pytest.raises(rpc.SessionClosedError) as caught:
            yield c.call("add", 1, 2)
        assert not caught.value.may_have_run

    aio_place.run(clause)


def test_after_the_end_everything_fails_with_the_reason(place: Place) -> None:
    def clause(c: Client) -> Steps:
        x = yield c.session.empty([4], "uint8")
        counter = yield c.call("counter_new")
        add = yield c.session.get_function("add")
        waiting = [c.start(c.session.ended) for _ in range(3)]
        yield c.session.close()
        for ended in waiting:
            assert isinstance((yield c.wait(ended)), rpc.SessionClosedError)
        attempts: list[Callable[[], Any]] = [
            lambda: add(1, 2),
            lambda: c.call("add", 1, 2, lane=rpc.CONCURRENT),
            lambda: c.session.get_function("add"),
            lambda: c.session.empty([1]),
            lambda: c.session.callback(print),
            lambda: x.write(b"1"),
            x.read,
            x.free,
            counter.free,
        ]
        for attempt in attempts:
            with pytest.raises(rpc.SessionClosedError) as caught:
                yield attempt()
            assert not caught.value.may_have_run
        yield c.session.close()

    place.run(clause)


def test_a_shutdown_frees_all_that_the_session_held(place: Place) -> None:
    def clause(c: Client) -> Steps:
        name = f"{place.form.name} {place.way}"
        counter = yield c.call("counter_named", name)
        kept = yield c.call("probe_many", counter, 50)
        yield c.session.close()
        # The origin is in this process.
        assert functions.counter_named(name).reach(50) == 50
        assert len(kept) == 50

    place.run(clause)


def test_the_end_of_one_session_does_not_touch_another(place: Place) -> None:
    def clause(c: Client) -> Steps:
        other = place.form.connect() if not place.is_aio else (yield place.form.connect())
        counter = yield other.call("counter_new")
        x = yield other.empty([4], "uint8")
        yield c.session.close()
        assert (yield other.call("counter_add", counter, 1)) == 1
        yield x.write(b"1234")
        assert (yield x.read()) == b"1234"
        yield other.close()

    place.run(clause)

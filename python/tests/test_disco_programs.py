"""Programs that the workers of Disco keep."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensor_rpc as rpc
from tensor_rpc import disco


@rpc.function
def add(x: np.ndarray, value: float) -> None:
    """Add a number to all elements."""
    x += value


@rpc.function
def plus(a: Any, b: Any) -> Any:
    """Return the sum."""
    return a + b


@rpc.function
def fail_on(worker: int) -> int:
    """Fail on this worker."""
    if disco.WorkerContext.current().worker_id == worker:
        raise LookupError("a word of the step")
    return 1


@rpc.function
def rank(x: np.ndarray) -> None:
    """Fill an array with the number of the worker."""
    x[:] = disco.WorkerContext.current().worker_id


@dataclasses.dataclass
class Point:
    """A packed value."""

    x: int


@pytest.fixture
def session() -> Iterator[disco.Session]:
    """Return a session with four workers in two groups."""
    functions: list[Callable[..., Any]] = [add, plus, fail_on, rank]
    with disco.ThreadedSession(4, 2, functions=functions) as made:
        yield made


def test_a_program_runs_as_often_as_one_likes(session: disco.Session) -> None:
    """With other arguments each time, and with what it has captured as it is at each run."""
    weights = session.broadcast(np.zeros(2, "float32"), in_group=False)
    added, summed = session.get_global_func("add"), session.get_global_func("plus")
    with session.record() as program:
        x, step = program.parameter(), program.parameter(float)
        program.call(added, x, step)
        program.call(added, weights, 1.0)
        total = program.allreduce(x, in_group=False)
        all_weights = program.allgather(weights)
        number = program.call(summed, step, 0.5)
        program.barrier(in_group=False)
        program.returns(number, total, all_weights)
    del weights
    assert repr(program) == f"<program {program.number} of Disco>"
    given = session.empty((3,), "float32")
    for run in (1, 2, 3):
        outputs = program.run(given, 2.0)
        assert outputs[0].debug_get_from_remote(3) == 2.5
        assert session.copy_from_worker_0(outputs[1]).tolist() == [4 * 2.0 * run] * 3
        assert outputs[2].debug_get_from_remote(2).tolist() == [[run, run], [run, run]]
    session.sync_all()


def test_every_collective_is_recorded(session: disco.Session) -> None:
    """They do what those of the session do."""
    with session.record() as program:
        own = program.empty((4,), "float32", "cpu")
        program.call(session.get_global_func("rank"), own)
        first = program.broadcast_from_worker0(own)
        part = program.scatter_from_worker0(own, in_group=False)
        all_of_them = program.gather_to_worker0(own, in_group=False)
        shared = program.reduce_scatter(own, op="max", in_group=False)
        exchanged = program.all_to_all(own, in_group=False)
        into = program.empty((4,))
        program.allreduce(own, into, op="avg", in_group=False)
        moved = program.empty((4,))
        program.send_recv(own, moved, [(1, 0), (2, 3)])
        program.returns(first, part, all_of_them, shared, exchanged, into, moved)
    outputs = program.run()
    assert [outputs[0].debug_get_from_remote(worker).tolist() for worker in (1, 3)] == [[0] * 4, [2] * 4]
    assert outputs[1].debug_get_from_remote(3) == 0
    assert session.copy_from_worker_0(outputs[2])[:, 0].tolist() == [0, 1, 2, 3]
    assert outputs[3].debug_get_from_remote(2) == 3
    assert outputs[4].debug_get_from_remote(1).tolist() == [0, 1, 2, 3]
    assert session.copy_from_worker_0(outputs[5]).tolist() == [1.5] * 4
    assert [outputs[6].debug_get_from_remote(worker)[0] for worker in range(4)] == [1, 0, 0, 2]


def test_functions_may_be_parameters(session: disco.Session) -> None:
    """A step calls the one that the run gives."""
    with session.record() as program:
        function, value = program.parameter(disco.DPackedFunc), program.parameter()
        program.returns(program.call(function, value, value))
    (made,) = program.run(session.get_global_func("plus"), [1])
    assert made.debug_get_from_remote(1) == [1, 1]


def test_arguments_are_checked_against_their_types(session: disco.Session) -> None:
    """Before anything is sent, or on the worker that has another value."""
    wanted: list[tuple[type | None, Any, Any]] = [
        (None, None, None),
        (bool, True, 1),
        (int, 1, 1.0),
        (float, 1.0, 1),
        (str, "a", b"a"),
        (bytes, b"a", "a"),
        (list, [1], {1: 2}),
        (dict, {1: 2}, [1]),
        (rpc.Shape, rpc.Shape((1,)), [1]),
        (rpc.DataType, rpc.DataType("int8"), "int8"),
        (rpc.Device, rpc.Device("cpu"), "cpu"),
        (Point, Point(1), {"x": 1}),
    ]
    for kind, fits, refused in wanted:
        with session.record() as program:
            program.parameter(kind)
        assert program.run(fits) == []
        if kind is not None:
            with pytest.raises(ValueError, match="parameter 1 takes"):
                program.run(refused)
    with session.record() as program:
        x = program.tensor_parameter("float32", (2, -1))
        program.returns(program.call(session.get_global_func("add"), x, 1.0))
    program.run(np.zeros((2, 3), "float32"))
    for array in (np.zeros((2, 3)), np.zeros((3, 2), "float32")):
        with pytest.raises(ValueError, match=r"takes tensor of float32 \[2, -1\]"):
            program.run(array)
    with pytest.raises(ValueError, match="2 arguments for a program with 1 parameters"):
        program.run(1, 2)
    session.sync_all()
    program.run(session.empty((2,)))
    with pytest.raises(disco.WorkersError, match="parameter 1 takes tensor"):
        session.sync_all()


def test_a_failure_names_the_step(session: disco.Session) -> None:
    """The other steps run, and so does the next run."""
    with session.record() as program:
        worker = program.parameter(int)
        bad = program.call(session.get_global_func("fail_on"), worker)
        program.returns(bad, program.call(session.get_global_func("plus"), 1, 2))
    _, fine = program.run(1)
    with pytest.raises(disco.WorkersError, match="a word of the step") as caught:
        session.sync_all()
    (failure,) = caught.value.failures
    assert (failure.worker, failure.command) == (1, f"fail_on, step 1 of program {program.number}")
    assert fine.debug_get_from_remote(1) == 3
    unharmed, _ = program.run(7)
    assert unharmed.debug_get_from_remote(1) == 1


def test_recordings_that_make_no_program(session: disco.Session) -> None:
    """Nothing is sent, and the session goes on."""
    plus_function = session.get_global_func("plus")
    with session.record() as program:
        with pytest.raises(RuntimeError, match="not recorded"):
            program.run()
    kept = program
    with pytest.raises(RuntimeError, match="has ended"):
        kept.parameter()
    with pytest.raises(LookupError), session.record() as program:
        program.call(plus_function, 1, 2)
        raise LookupError
    assert repr(program) == "<program that is not recorded>"
    with pytest.raises(RuntimeError, match="has ended"):
        program.barrier()
    for twice in (True, False):
        with pytest.raises(ValueError, match="values that its steps make"), session.record() as program:
            given = program.parameter()
            made = program.call(plus_function, given, given)
            program.returns(*[made, made] if twice else [given])
    with session.record() as other:
        stolen = other.parameter()
    with session.record() as program:
        with pytest.raises(ValueError, match="another program"):
            program.call(plus_function, stolen, 1)
        with pytest.raises(ValueError, match="call with its recorder"):
            plus_function(program.parameter(), 1)
        with pytest.raises(TypeError, match="a value of the program"):
            program.allreduce(np.zeros(1))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="is no type of a parameter"):
            program.parameter(np.ndarray)
        with pytest.raises(TypeError, match="is no type of a parameter"):
            program.parameter([])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no reduction"):
            program.allreduce(session.empty((1,)), op="mean")
        with disco.ThreadedSession(1) as far, pytest.raises(ValueError, match="another session"):
            program.allreduce(far.empty((1,)))
    del program, other, kept
    gc.collect()
    assert plus_function(1, 2).debug_get_from_remote(0) == 3
    session.sync_all()


def test_a_program_of_a_session_that_has_ended() -> None:
    """It cannot be run, and none can be recorded."""
    session = disco.ThreadedSession(1)
    with session.record() as program:
        pass
    session.shutdown()
    with pytest.raises(rpc.RpcError, match="shut down"):
        program.run()
    with pytest.raises(rpc.RpcError, match="shut down"), session.record() as program:
        pass


def test_a_recording_that_could_not_be_sent_is_still_there() -> None:
    """What ends the wait for the workers, such as Ctrl-C, leaves it."""
    session = disco.ThreadedSession(1)
    program = session.record()
    session.shutdown()
    for _ in range(2):
        with pytest.raises(rpc.RpcError, match="shut down"):
            program._recorder.finish([])
    program.parameter()

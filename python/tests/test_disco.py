"""Sessions of Disco: threads, processes, servers; collectives, errors, imports."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import environment

import tensor_rpc as rpc
from tensor_rpc import disco

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 60.0


@rpc.function
def double(x: np.ndarray) -> Any:
    """Return twice an array."""
    return x * 2


@rpc.function
def worker_number() -> int:
    """Return the number of the worker."""
    return disco.WorkerContext.current().worker_id


@rpc.function
def process_number() -> int:
    """Return the process of the worker."""
    return os.getpid()


@rpc.function
def fail_on_worker_1() -> None:
    """Fail on one worker."""
    if disco.WorkerContext.current().worker_id == 1:
        raise LookupError("a word of worker 1")


@rpc.function
def meet(x: np.ndarray) -> Any:
    """Sum an array over all workers, and stack the sums."""
    worker = disco.WorkerContext.current()
    total = np.from_dlpack(worker.allreduce(x, in_group=False))
    return np.from_dlpack(worker.allgather(total + worker.worker_id, in_group=False))


@rpc.function
def along(axis: str) -> Any:
    """Return the numbers of the workers along an axis, and this one's among them."""
    worker = disco.WorkerContext.current()
    group = worker.axis(axis)
    assert worker.meshes[0].coordinates(worker.worker_id)[axis] == worker.rank_in(group)
    assert worker.size_of(group) == 2
    numbers = np.from_dlpack(worker.allgather(np.array([worker.worker_id]), in_group=group)).ravel()
    return np.append(numbers, worker.rank_in(group))


@rpc.function
def collect() -> None:
    """Call all collectives, with and without a place for the result."""
    worker = disco.WorkerContext.current()
    rank, n = worker.worker_id, worker.num_workers
    assert (n, worker.num_groups, worker.group_size, worker.group) == (4, 2, 2, rank // 2)
    rows = np.arange(8, dtype="float32").reshape(4, 2) + 100 * rank
    everyone = np.stack([np.arange(8, dtype="float32").reshape(4, 2) + 100 * other for other in range(n)])

    def check(method: str, array: Any, expected: Any, **options: Any) -> None:
        before = array.copy()
        made = getattr(worker, method)(array, in_group=False, **options)
        assert np.array_equal(np.from_dlpack(made), expected), method
        assert np.array_equal(array, before), method
        out = np.full_like(expected, -1)
        assert getattr(worker, method)(array, in_group=False, out=out, **options) is out
        assert np.array_equal(out, expected), method
        assert np.array_equal(array, before), method

    check("allreduce", rows, everyone.sum(0))
    check("allreduce", rows, everyone.max(0), op="max")
    check("reduce_scatter", rows, everyone.sum(0)[rank : rank + 1])
    check("allgather", rows, everyone)
    check("broadcast_from_worker0", rows, everyone[0])
    check("scatter_from_worker0", rows, everyone[0][rank : rank + 1])
    check("all_to_all", rows, everyone[:, rank])
    # An array with gaps, and one that cannot be written to, are copied.
    check("allreduce", np.repeat(rows, 2, axis=1)[:, ::2], everyone.sum(0))
    fixed = rows.copy()
    fixed.flags.writeable = False
    check("allgather", fixed, everyone)
    # Into the array itself, and into its part, or from a part, that is this worker's share.
    x = rows.copy()
    assert worker.allreduce(x, in_group=False, out=x) is x
    assert np.array_equal(x, everyone.sum(0))
    x = rows.copy()
    worker.reduce_scatter(x, in_group=False, out=x[rank : rank + 1])
    assert np.array_equal(x[rank], everyone.sum(0)[rank])
    x = np.zeros_like(everyone)
    x[rank] = rows
    worker.allgather(x[rank], in_group=False, out=x)
    assert np.array_equal(x, everyone)

    gathered = worker.gather_to_worker0(rows, in_group=False)
    assert (gathered is None) == (rank > 0)
    assert gathered is None or np.array_equal(np.from_dlpack(gathered), everyone)
    out = np.zeros((2, 4, 2), "float32")
    group = worker.gather_to_worker0(rows, out=out if rank % 2 == 0 else None)
    assert (group is out) == (rank % 2 == 0)
    assert rank % 2 or np.array_equal(out, everyone[rank : rank + 2])

    right, left = (rank + 1) % n, (rank - 1) % n
    if rank % 2 == 0:
        worker.send(rows, right)
        worker.send(rows[1:], right)
    received = np.from_dlpack(worker.recv((4, 2), "float32", left)) if rank % 2 else None
    assert received is None or np.array_equal(received, everyone[left])
    if rank % 2:
        worker.recv_into(out[0, :3], left)
        assert np.array_equal(out[0, :3], everyone[left][1:])

    # Errors that all workers find before they meet.
    overlapping = np.zeros(12, "float32")
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: worker.allreduce(rows, out=fixed)),
        (TypeError, lambda: worker.allreduce(rows, out=[[0.0, 0.0]] * 4)),
        (TypeError, lambda: worker.recv_into(bytearray(8), right)),
        (ValueError, lambda: worker.allreduce(rows, out=np.zeros((8, 2), "float32")[::2])),
        (ValueError, lambda: worker.allreduce(overlapping[:8], out=overlapping[4:])),
        (TypeError, lambda: worker.allreduce(object())),
        (ValueError, lambda: worker.allreduce(rows, op="mean")),
        (ValueError, lambda: worker.reduce_scatter(np.zeros(3), in_group=False)),
        # Those that the collective finds.
        (ValueError, lambda: worker.allreduce(rows, out=np.zeros(7, "float32"))),
        (ValueError, lambda: worker.allreduce(rows, out=np.zeros((4, 2), "float64"))),
    ]
    for error, attempt in refused:
        with pytest.raises(error):
            attempt()
    worker.barrier(in_group=False)


@rpc.function
def total(x: np.ndarray) -> Any:
    """Sum an array over all workers, in place, and return another sum without a copy."""
    worker = disco.WorkerContext.current()
    worker.allreduce(x, in_group=False, out=x)
    return worker.allreduce(x, in_group=False)


FUNCTIONS: list[Callable[..., Any]] = [
    double,
    worker_number,
    process_number,
    fail_on_worker_1,
    along,
    meet,
    collect,
    total,
]


@pytest.fixture(params=["threads", "processes", "servers"])
def session(request: pytest.FixtureRequest) -> Iterator[disco.Session]:
    """Return a session with four workers in two groups."""
    if request.param == "threads":
        with disco.ThreadedSession(4, 2, functions=FUNCTIONS) as made:
            yield made
    elif request.param == "processes":
        with disco.ProcessSession(4, 2, functions=FUNCTIONS) as made:
            yield made
    else:
        with rpc.Server(*FUNCTIONS) as server:
            with disco.servers(server.addresses, 4, 2, hosting="threads") as made:
                yield made


def test_tensors_go_around(session: disco.Session) -> None:
    """Every collective moves what its docstring says."""
    session.init_ccl("host")
    x = np.arange(8, dtype="float32").reshape(4, 2)
    everywhere = session.broadcast(x, in_group=False)
    x[:] = -1  # What was broadcast is what the array was.
    for worker in range(4):
        assert everywhere.debug_get_from_remote(worker).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    parts = session.scatter(np.arange(8, dtype="float32").reshape(4, 2), in_group=False)
    assert parts.debug_get_from_remote(2).tolist() == [4, 5]
    total = session.allreduce(parts, op="sum", in_group=False)
    assert session.copy_from_worker_0(total).tolist() == [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]
    of_group = session.allreduce(parts, op="max")
    assert [of_group.debug_get_from_remote(worker).tolist() for worker in (0, 3)] == [[2, 3], [6, 7]]
    gathered = session.empty((4, 2), "float32", worker0_only=True, in_group=False)
    session.gather_to_worker0(parts, gathered, in_group=False)
    host = np.zeros((4, 2), "float32")
    session.copy_from_worker_0(host, gathered)
    assert host.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert gathered.debug_get_from_remote(1) is None
    alone = session.copy_to_worker_0(np.full(2, 7, "float32"))
    copied = session.empty((2,), "float32")
    session.broadcast_from_worker0(alone, copied, in_group=False)
    assert copied.debug_get_from_remote(3).tolist() == [7, 7]
    large = np.arange(300_000, dtype="float32")
    copied.debug_copy_from(2, large)
    assert (copied.debug_get_from_remote(2) == large).all()
    assert copied.debug_get_from_remote(3).tolist() == [7, 7]


def test_axes_of_a_mesh_are_groups(session: disco.Session) -> None:
    """Every operation that takes a group takes an axis of a mesh, here and on workers."""
    mesh = session.mesh(dp=2, tp=2)
    assert (mesh.axes, mesh.num_workers, repr(mesh)) == ({"dp": 2, "tp": 2}, 4, "<mesh (dp=2, tp=2)>")
    assert mesh == session.mesh(**mesh.axes)
    assert mesh.coordinates(2) == {"dp": 1, "tp": 0}
    assert mesh.worker(tp=0, dp=1) == 2
    dp, tp = mesh.group("dp"), mesh.group("tp")
    assert (dp != tp, repr(dp), dp == mesh.group("dp")) == (True, "<groups of 2 workers, 2 apart>", True)
    x = session.scatter(np.array([[1, 2], [3, 4]], "float32"), in_group=tp)
    total = session.allreduce(x, in_group=dp)
    assert [total.debug_get_from_remote(worker).tolist() for worker in range(4)] == [[2, 4], [6, 8]] * 2
    first = session.empty((1,), worker0_only=True, in_group=dp)
    assert [first.debug_get_from_remote(worker) is None for worker in range(4)] == [False, False, True, True]
    with session.record() as program:
        program.returns(program.allgather(program.tensor_parameter(), in_group=dp))
    (all_of_dp,) = program.run(x)
    assert all_of_dp.debug_get_from_remote(3).tolist() == [[3, 4], [3, 4]]
    along = session.get_global_func("along")
    for axis, expected in (("dp", [[0, 2, 0], [1, 3, 0], [0, 2, 1], [1, 3, 1]]), ("tp", [[0, 1, 0], [0, 1, 1]])):
        found = along(axis)
        for worker, ranks in enumerate(expected):
            assert found.debug_get_from_remote(worker).tolist() == ranks
    session.sync_all()
    assert repr(disco.Part.shard(1, dp)) == "Part.shard(1, in_group=<groups of 2 workers, 2 apart>)"
    assert disco.Part.shard(1, dp) != disco.Part.shard(1, tp)
    with pytest.raises(rpc.InvalidArgumentError, match="has 6 workers, and the session 4"):
        session.mesh(dp=2, tp=3)
    with pytest.raises(rpc.InvalidArgumentError, match=r"the mesh .* has no axis"):
        mesh.group("pp")
    with pytest.raises(TypeError):
        session.barrier(in_group="dp")  # type: ignore[arg-type]


def test_tensors_are_sent_between_pairs(session: disco.Session) -> None:
    """The others keep theirs."""
    x = session.scatter(np.arange(8, dtype="int32").reshape(4, 2), in_group=False)
    y = session.empty((2,), "int32")
    session.send_recv(x, y, [(0, 1), (3, 2)])
    assert [y.debug_get_from_remote(worker).tolist() for worker in range(4)] == [[0, 0], [0, 1], [6, 7], [0, 0]]
    for pair in ((0, 4), (1, 1)):
        with pytest.raises(ValueError):
            session.send_recv(x, y, [pair])
    session.sync_all()


def test_collectives_break_and_are_made_anew(session: disco.Session) -> None:
    """While they are broken all else works."""
    assert session.ccl_state() == disco.CclState("running", None, None, [])
    session.abort_ccl("no more of this")
    state = session.ccl_state()
    assert (state.name, state.culprit) == ("broken", None)
    assert "no more of this" in str(state.cause)
    x = session.empty((1,))
    end = time.monotonic() + LIMIT
    # Workers at servers hear of it beside the commands, perhaps after the first one.
    with pytest.raises(disco.WorkersError, match="no more of this"):
        while time.monotonic() < end:
            session.allreduce(x, in_group=False)
            session.sync_all()
    assert session.get_global_func("worker_number")().debug_get_from_remote(2) == 2
    session.reinit_ccl()
    assert session.ccl_state().name == "running"
    session.allreduce(x, in_group=False)
    session.sync_all()
    session.shutdown()
    state = session.ccl_state()
    assert state.name == "ended" and isinstance(state.cause, rpc.RpcError)
    with pytest.raises(rpc.RpcError, match="shut down"):
        session.abort_ccl("again")


def test_functions_of_python_run_on_workers(session: disco.Session) -> None:
    """They get tensors, know their worker, and return values and tensors."""
    session.init_ccl("host")
    x = session.broadcast(np.ones(3, "float32"), in_group=False)
    assert session.get_global_func("double")(x).debug_get_from_remote(3).tolist() == [2, 2, 2]
    numbers = session.call_packed(session.get_global_func("worker_number"))
    assert [numbers.debug_get_from_remote(worker) for worker in range(4)] == [0, 1, 2, 3]
    met = session.get_global_func("meet")(x)
    assert met.debug_get_from_remote(1)[:, 0].tolist() == [4, 5, 6, 7]
    small = session.get_global_func("double")(np.arange(2, dtype="int64"))
    assert small.debug_get_from_remote(2).tolist() == [0, 2]


def test_workers_have_the_collectives_on_arrays(session: disco.Session) -> None:
    """New arrays, or where the caller wants them."""
    session.get_global_func("collect")()
    session.sync_all()
    x = session.scatter(np.arange(8, dtype="float32").reshape(4, 2), in_group=False)
    again = session.get_global_func("total")(x)
    assert x.debug_get_from_remote(3).tolist() == [12, 16]
    assert again.debug_get_from_remote(1).tolist() == [48, 64]


def test_a_failure_names_its_worker_and_the_session_goes_on(session: disco.Session) -> None:
    """The exception is that of the worker, with its traceback."""
    session.get_global_func("fail_on_worker_1")()
    session.sync_worker(0)
    with pytest.raises(disco.WorkersError, match="a word of worker 1") as caught:
        session.sync_all()
    (failure,) = caught.value.failures
    assert (failure.worker, failure.command) == (1, "fail_on_worker_1")
    assert failure.cause.remote_class == "LookupError"
    assert "fail_on_worker_1" in (failure.cause.remote_traceback or "")
    session.sync_all()


def test_bad_input_is_an_error_here(session: disco.Session) -> None:
    """It changes nothing on the workers."""
    x = session.empty((2,), "float32")
    with pytest.raises(ValueError, match="no reduction"):
        session.allreduce(x, op="mean")
    with pytest.raises(ValueError, match="broadcast it first"):
        session.get_global_func("double")(np.zeros(100_000))
    with pytest.raises(TypeError, match="functions of this process"):
        session.get_global_func("double")(lambda: None)
    with pytest.raises(ValueError, match="no worker 9"):
        x.debug_get_from_remote(9)
    with pytest.raises(TypeError, match="no setting"):
        disco.ThreadedSession(1, windov=3)
    with pytest.raises(ValueError, match="IP addresses"):
        disco.ThreadedSession(1, data_addresses=["localhost"])
    with disco.ThreadedSession(1) as other:
        with pytest.raises(ValueError, match="another session"):
            other.call_packed(other.get_global_func("double"), x)
    session.sync_all()


def test_workers_are_processes_of_their_own() -> None:
    """Each is another interpreter, and all end with the session."""
    with disco.ProcessSession(2, functions=[process_number]) as session:
        numbers = session.get_global_func("process_number")()
        found = {numbers.debug_get_from_remote(worker) for worker in range(2)}
    assert len(found | {os.getpid()}) == 3


def test_arrays_that_are_borrowed_for_reading_are_not_filled() -> None:
    """Those that share the memory of a tensor of the controller."""
    with disco.ThreadedSession(1) as session, rpc.local() as other:
        ref = session.empty((2,), "float32")
        borrowed = session._native_session.copy_from_worker_0_op(ref).wait()
        tensor = other.tensor(np.ones(2, "float32"))
        for array in (borrowed, borrowed.bits()):
            with pytest.raises(ValueError, match="borrowed for reading"):
                tensor.copy_to(array)
        assert borrowed.tolist() == [0, 0]
        own = tensor.download()
        other.tensor(np.full(2, 3, "float32")).copy_to(own)
        assert own.tolist() == [3, 3]


def test_a_module_is_imported_on_workers(tmp_path: Path) -> None:
    """Its functions can be called then."""
    (tmp_path / "functions_of_workers.py").write_text(
        "import tensor_rpc as rpc\n@rpc.function(name='far.add')\ndef add(a: int, b: int) -> int:\n    return a + b\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = (
        "from tensor_rpc import disco\n"
        "with disco.ProcessSession(2) as session:\n"
        "    session.import_python_module('functions_of_workers')\n"
        "    print(session.get_global_func('far.add')(1, 2).debug_get_from_remote(1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_session_that_is_over_leaves_no_functions_behind() -> None:
    """Those of its workers, and what imports modules there."""

    def own() -> int:
        return 5

    with disco.ThreadedSession(1, functions=[own]) as session:
        assert session.get_global_func("own")().debug_get_from_remote(0) == 5
        session.import_python_module("test_disco")
        assert session.get_global_func("process_number")().debug_get_from_remote(0) == os.getpid()
        registry = session._registry
    gone = weakref.ref(registry), weakref.ref(own)
    del session, own, registry
    deadline = time.monotonic() + LIMIT
    # Threads of the package drop the functions.
    while any(each() is not None for each in gone):
        assert time.monotonic() < deadline, gone
        gc.collect()
        time.sleep(0.01)


def test_this_process_is_the_first_node_of_a_session_that_others_dial() -> None:
    """Its workers come first and have its functions; without it all nodes dial in."""
    code = "from tensor_rpc._commands import rpc_server; rpc_server()"
    nodes: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> None:
        command = [sys.executable, "-c", code, "worker", "--controller", address]
        nodes.append(subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL))

    data = ["127.0.0.1"] * 2
    with disco.SocketSession(2, 2, 2, on_listen=start, functions=[process_number], data_addresses=data) as session:
        assert session.num_workers == 4
        x = session.empty((2,), "float32")
        session.sync_all()
        session.allreduce(x, x)
        with pytest.raises(disco.WorkersError, match="process_number") as missing:
            number = session.get_global_func("process_number")()
            session.sync_all()
        # The other node is another program, which has no such function.
        assert "worker 2" in str(missing.value)
        assert "worker 0" not in str(missing.value)
        assert number.debug_get_from_remote(1) == os.getpid()
    with disco.SocketSession(1, 1, on_listen=start, controller_is_node=False) as session:
        assert session.num_workers == 1
    with disco.SocketSession(1, 2, functions=[process_number]) as session:
        assert session.get_global_func("process_number")().debug_get_from_remote(0) == os.getpid()
    for node in nodes:
        assert node.wait(LIMIT) == 0
    with pytest.raises(ValueError, match="this process is one"):
        disco.SocketSession(0, 1)
    with pytest.raises(ValueError, match="no node"):
        disco.SocketSession(1, 1, controller_is_node=False, functions=[process_number])


def test_a_program_runs_once_for_each_worker(
    isolated_server: str, token: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It knows its number; its lines come here; a function for them that fails ends it."""
    script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE$A; echo error >&2; exit $RANK"
    with disco.servers([isolated_server], 2, connect={"token_file": str(token)}) as session:
        lines: list[tuple[int, str, bytes]] = []
        results = session.run_all("sh", "-c", script, env={"A": "!"}, on_line=lambda *line: lines.append(line))
        assert [result.returncode for result in results] == [0, 1]
        assert results[0].check().stdout is None
        with pytest.raises(rpc.ProgramError):
            results[1].check()
        out = [(worker, "stdout", f"{worker} of 2, {worker} of 2!".encode()) for worker in range(2)]
        assert sorted(lines) == sorted([*out, (0, "stderr", b"error"), (1, "stderr", b"error")])

        session.run_all("sh", "-c", "echo $RANK; echo e$RANK >&2")
        printed = capfd.readouterr()
        assert sorted(printed.out.splitlines()) == ["[0] 0", "[1] 1"]
        assert sorted(printed.err.splitlines()) == ["[0] e0", "[1] e1"]

        refused: list[bytes] = []

        def refuse(worker: int, stream: str, line: bytes) -> None:
            refused.append(line)
            raise LookupError(line)

        # Many lines have arrived with the first one.
        with pytest.raises(LookupError, match="first"):
            session.run_all("yes", "first", on_line=refuse)
        limited = session.run_all("sleep", "3600", time_limit=0.05)
        assert [result.success for result in limited] == [False, False]
        with pytest.raises(rpc.NotFoundError, match="worker "):
            session.run_all("no-such-program")
        with pytest.raises(ValueError):
            session.run_all("sh", time_limit=-1.0)
        session.sync_all()
    assert refused == [b"first"]
    with disco.ThreadedSession(1) as threads, pytest.raises(rpc.RpcError, match="worker 0"):
        threads.run_all("true")


@pytest.mark.parametrize("over", ["threads", "processes"])
def test_the_digits_are_learnt(over: str) -> None:
    """The example reaches its accuracy, or fails by its exit code."""
    program = [sys.executable, str(EXAMPLES / "digits.py"), "--over", over]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("test accuracy: 0.9"), done.stdout

"""Weights of safetensors files, loaded by the workers of Disco."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensor_rpc as rpc
from tensor_rpc import disco

TENSORS = {
    "bias": np.array([0.5, 1.5], "float32"),
    "count": np.array(7, "int64"),
    "weight": np.arange(24, dtype="float32").reshape(4, 6),
}


@rpc.function
def rows(weight: disco.WeightReader) -> Any:
    """Read the rows of this worker, of which the last one has one more."""
    worker = disco.WorkerContext.current()
    assert (weight.name, str(weight.dtype), weight.shape, str(weight.device)) == ("weight", "float32", (4, 6), "cpu:0")
    assert "weight" in repr(weight)
    whole = np.from_dlpack(weight.read())
    start, stop = 4 * worker.worker_id // 3, 4 * (worker.worker_id + 1) // 3
    part = weight.read_range(0, start, stop)
    assert np.array_equal(part.numpy(), whole[start:stop])
    assert np.array_equal(weight.read_box([(1, 3), (2, 5)]).numpy(), whole[1:3, 2:5])
    return part


@rpc.function
def beyond(weight: disco.WeightReader) -> Any:
    """Read what there is not."""
    return weight.read_range(1, 0, 7)


def save(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors as any library for the format does."""
    kinds = {"float32": "F32", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": kinds[str(tensor.dtype)], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model."""
    save(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def test_each_worker_loads_its_part(model: Path) -> None:
    """Whole tensors, shards among all and in groups, and what a function reads."""
    with disco.ThreadedSession(4, 2) as session:
        loader = disco.ShardLoader(session, model)
        assert list(loader.tensors) == sorted(TENSORS)
        assert loader.tensors["weight"] == disco.TensorInfo(rpc.DataType("float32"), rpc.Shape((4, 6)), 96)
        assert loader.tensors["count"].shape == ()
        assert loader.unreadable == []
        assert repr(loader) == "<loader of 3 tensors>"

        def rule(name: str, info: disco.TensorInfo) -> disco.Part | None:
            return (
                None
                if name == "count"
                else disco.Part.shard(1, in_group=True)
                if info.shape[1:]
                else disco.Part.whole()
            )

        loaded = loader.load_all(rule)
        assert list(loaded) == ["bias", "weight"]
        shard = loader.load("weight", disco.Part.shard(0), device="cpu")
        session.sync_all()
        for worker in range(4):
            assert loaded["bias"].debug_get_from_remote(worker).tolist() == [0.5, 1.5]
            of_group = loaded["weight"].debug_get_from_remote(worker)
            assert np.array_equal(of_group, np.split(TENSORS["weight"], 2, axis=1)[worker % 2])
            assert np.array_equal(shard.debug_get_from_remote(worker), TENSORS["weight"][worker : worker + 1])
        assert loader.load_all(lambda name, info: None) == {}


def test_functions_read_what_their_worker_needs(model: Path) -> None:
    """Also shards of unequal length; and their failures name the tensor's function."""
    with disco.ThreadedSession(3, functions=[rows, beyond]) as session:
        loader = disco.ShardLoader(session, model / "model.safetensors")
        loaded = loader.load("weight", disco.Part.by_function("rows"))
        session.sync_all()
        parts = [loaded.debug_get_from_remote(worker) for worker in range(3)]
        assert [len(part) for part in parts] == [1, 1, 2]
        assert np.array_equal(np.concatenate(parts), TENSORS["weight"])
        loader.load("weight", disco.Part.by_function("beyond"))
        with pytest.raises(disco.WorkersError, match="function 'beyond'"):
            session.sync_all()


def test_progress_grows_to_the_whole(model: Path) -> None:
    """Both numbers are equal in the end; a function that raises is called no more."""
    seen: list[tuple[int, int]] = []
    with disco.ThreadedSession(2) as session:
        loader = disco.ShardLoader(session, model, progress=lambda done, total: seen.append((done, total)))
        loader.load("weight", disco.Part.shard(0))
        loader.load("bias", disco.Part.whole())
        session.sync_all()
        assert seen[-1] == (96 + 2 * 8, 96 + 2 * 8)
        assert seen == sorted(seen)
        del loader
        gc.collect()

        calls: list[int] = []
        raised: list[Any] = []

        def refuse(done: int, total: int) -> None:
            calls.append(done)
            raise LookupError("no progress")

        def note(unraisable: Any) -> None:
            if unraisable.object is refuse:
                raised.append(type(unraisable.exc_value))

        hook, sys.unraisablehook = sys.unraisablehook, note
        try:
            loader = disco.ShardLoader(session, model, progress=refuse)
            loaded = loader.load_all(lambda name, info: disco.Part.whole())
            session.sync_all()
        finally:
            sys.unraisablehook = hook
        assert (calls, raised) == ([0], [LookupError])
        assert loaded["count"].debug_get_from_remote(1) == 7


def test_a_loader_goes_while_its_progress_is_told(model: Path) -> None:
    """Nothing waits for the other for ever."""
    with disco.ThreadedSession(2) as session:
        for _ in range(20):
            loader = disco.ShardLoader(session, model, progress=lambda done, total: sum(range(1000)))
            for _ in range(20):
                loader.load("weight", disco.Part.whole())
            del loader
        session.sync_all()


def test_workers_that_cannot_read_get_their_parts_from_others(model: Path, server: str) -> None:
    """A server's operator has named no folders."""
    with disco.servers([server], 2, hosting="threads") as session:
        loader = disco.ShardLoader(session, model)
        assert [each.worker for each in loader.unreadable] == [0, 1]
        assert loader.unreadable[0].file == model / "model.safetensors"
        assert "--weights" in loader.unreadable[0].reason
        shard = loader.load("weight", disco.Part.shard(1))
        session.sync_all()
        assert np.array_equal(shard.debug_get_from_remote(1), TENSORS["weight"][:, 3:])


def test_what_cannot_be_loaded(model: Path) -> None:
    """It is an error here, and nothing is sent to the workers."""
    with disco.ThreadedSession(4) as session:
        with pytest.raises(rpc.RpcError, match="nowhere"):
            disco.ShardLoader(session, model / "nowhere")
        garbage = model / "garbage.safetensors"
        garbage.write_bytes(b"no header")
        with pytest.raises(rpc.RpcError, match="garbage"):
            disco.ShardLoader(session, garbage)
        loader = disco.ShardLoader(session, model)
        with pytest.raises(rpc.NotFoundError, match="no tensor 'wait'"):
            loader.load("wait", disco.Part.whole())
        with pytest.raises(ValueError, match="bias"):
            loader.load_all(lambda name, info: disco.Part.shard(0))
        with pytest.raises(TypeError):
            loader.load("bias", "whole")  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            loader.load_all(lambda name, info: disco.Part.shard(1 // 0))
        elsewhere = disco.ShardLoader(session, model, folder=model / "not")
        assert [each.worker for each in elsewhere.unreadable] == [0, 1, 2, 3]
        session.sync_all()
    with pytest.raises(rpc.RpcError, match="shut down"):
        loader.load("bias", disco.Part.whole())


def test_parts_are_values() -> None:
    """They are equal if they say the same."""
    part = disco.Part
    assert part.whole() == part.whole() != part.shard(0)
    assert part.shard(1, in_group=True) != part.shard(1) == part.shard(1)
    assert len({part.shard(1), part.shard(1), part.by_function("f"), part.by_function("f")}) == 2
    assert repr(part.shard(1, in_group=True)) == "Part.shard(1, in_group=True)"
    assert [repr(each) for each in (part.whole(), part.shard(2), part.by_function("f"))] == [
        "Part.whole()",
        "Part.shard(2)",
        'Part.by_function("f")',
    ]

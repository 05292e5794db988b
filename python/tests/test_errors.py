"""Exceptions: their classes, their facts, and the parents by which users catch them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from conftest import Program

import tensor_rpc as rpc
from tensor_rpc import _errors


def test_every_kind_has_a_class_and_its_facts() -> None:
    for kind, wanted in _errors._CLASSES.items():
        error = _errors.from_facts(kind, "words", 2, "peer", "trace\n", "KeyError", True, False)
        assert type(error) is wanted
        assert isinstance(error, rpc.RpcError)
        assert (error.kind, error.message, error.hop, error.peer) == (kind, "words", 2, "peer")
        assert (error.may_have_run, error.is_retryable) == (True, False)
        assert "words" in str(error)
        assert "trace" in str(error)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is wanted
            assert vars(again) == vars(error)
    assert type(_errors.from_facts("new", "", 0, None, None, None, False, False)) is rpc.RpcError


def test_exceptions_have_the_parents_that_users_catch() -> None:
    for error, parent in [
        (rpc.NotFoundError, KeyError),
        (rpc.InvalidArgumentError, ValueError),
        (rpc.DeadlineExceededError, TimeoutError),
        (rpc.PeerLostError, ConnectionError),
        (rpc.PeerSilentError, TimeoutError),
        (rpc.SessionClosedError, ConnectionError),
        (rpc.RefusedError, PermissionError),
        (rpc.OutOfMemoryError, MemoryError),
        (rpc.RemoteIOError, OSError),
        (rpc.UnsupportedError, NotImplementedError),
    ]:
        assert issubclass(error, parent)


def test_a_server_that_dies_ends_its_calls(tmp_path: Path) -> None:
    program = Program(tmp_path)
    session = rpc.connect(program.address)
    program.kill()
    with pytest.raises(ConnectionError):
        session.call("rpc.sleep", 3600.0)
    assert isinstance(session.ended(), rpc.PeerLostError)
    session.close()

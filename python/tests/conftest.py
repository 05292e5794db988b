"""Servers and sessions for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forms import TIME_LIMIT, Form

import tensor_rpc as rpc

# A shell starts jobs in the background with this signal ignored, which processes started here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Program:
    """A server as a process of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Start it, and wait until it listens."""
        settings = {"workdir": str(folder / "work"), **settings}
        code = f"import tensor_rpc as rpc; rpc.Server(**{settings!r}).serve()"
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def kill(self) -> None:
        """End it without a word to its clients."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of built-in functions."""
    local = ["tcp://127.0.0.1:*"]
    program = Program(tmp_path_factory.mktemp("server"), allow_listen=local, allow_forward=local, isolate="none")
    yield program.address
    program.kill()


@pytest.fixture(scope="session")
def sending_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that sends tensors to the other servers of this machine."""
    folder = tmp_path_factory.mktemp("sending")
    program = Program(folder, allow_peer=["tcp://127.0.0.1:*"], isolate="none")
    yield program.address
    program.kill()


@pytest.fixture(scope="session")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with a token, by which clients prove who they are."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text("tester:0123456789abcdef0123456789abcdef\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="session")
def isolated_server(tmp_path_factory: pytest.TempPathFactory, token: Path) -> Iterator[str]:
    """Address of a server with a process for each session, which runs programs and modules."""
    folder = tmp_path_factory.mktemp("isolated")
    program = Program(
        folder, isolate="process", allow_run=["any"], run_client_env=["A"], allow_modules=True, token_file=str(token)
    )
    yield program.address
    program.kill()


@pytest.fixture(params=["blocking", "aio"])
def form(request: pytest.FixtureRequest, server: str) -> Form:
    """Both forms, over TCP."""
    connect = rpc.connect if request.param == "blocking" else rpc.aio.connect
    return Form(request.param, lambda: connect(server))


@pytest.fixture(params=["blocking", "aio"])
def isolated(request: pytest.FixtureRequest, isolated_server: str, token: Path) -> Form:
    """Both forms, with sessions that may do everything."""
    connect = rpc.connect if request.param == "blocking" else rpc.aio.connect
    return Form(request.param, lambda: connect(isolated_server, token_file=token))


@pytest.fixture(params=["blocking-tcp", "aio-tcp", "blocking-local", "aio-local"])
def anywhere(request: pytest.FixtureRequest, server: str) -> Form:
    """Both forms, over TCP and in this process."""
    name, place = request.param.split("-")
    module: Any = rpc if name == "blocking" else rpc.aio
    return Form(name, lambda: module.connect(server) if place == "tcp" else module.local())


def environment() -> dict[str, str]:
    """Environment of a process that uses the package, too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def python(code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of Python that uses the package, to its end."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        **options,
    )

"""Sessions in interpreters of their own, and how functions get there."""

from __future__ import annotations

import functools
import os
import pathlib
import select
import shlex
import subprocess
import sys
import zipapp
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import served_functions

import tensor_rpc as rpc
from tensor_rpc import _child

PACKAGE = pathlib.Path(rpc.__file__).parent.parent

TESTS = pathlib.Path(__file__).parent

LIMIT = 60
"""Seconds for what takes one or two."""


def connect(address: str) -> rpc.Session:
    """Open a session, with patience."""
    return rpc.connect(address, connect_timeout=LIMIT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rpc.Server]:
    with rpc.Server(
        served_functions,
        isolate="process",
        isolate_memory="3GiB",
        # The start of an interpreter takes long on a machine that is busy.
        handshake_timeout=f"{LIMIT}s",
        workdir=tmp_path_factory.mktemp("sessions"),
    ) as server:
        yield server


def test_each_session_has_an_interpreter_of_its_own(server: rpc.Server) -> None:
    with connect(server.address) as one, connect(server.address) as other:
        assert one.call("add", 1, 2) == 3
        processes = {one.call("process"), other.call("process"), os.getpid()}
        assert len(processes) == 3
        one.call("put", "x", 5)
        assert (one.call("get", "x"), other.call("get", "x")) == (5, None)
        assert one.call("gather", 3) == [0, 1, 2]
        with pytest.raises(rpc.InvalidArgumentError, match=r"argument 1 \(b\) of `add`"):
            one.call("add", 1, "2")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("end", (7,), "7"),
        ("crash", (), "SIGSEGV"),
        ("abort", (), "SIGABRT"),
    ],
)
def test_the_end_of_an_interpreter_is_one_clients_error(
    server: rpc.Server, name: str, arguments: tuple[int, ...], words: str
) -> None:
    with connect(server.address) as other, connect(server.address) as session:
        with pytest.raises(rpc.PeerLostError) as caught:
            session.call(name, *arguments, timeout=LIMIT)
        assert words in caught.value.message
        assert caught.value.may_have_run
        assert other.call("add", 1, 1, timeout=LIMIT) == 2


def test_sys_exit_is_an_exception_and_the_session_goes_on(server: rpc.Server) -> None:
    with connect(server.address) as session:
        with pytest.raises(rpc.RemoteError) as caught:
            session.call("leave", 3, timeout=LIMIT)
        assert caught.value.remote_class == "SystemExit"
        assert session.call("add", 1, 1, timeout=LIMIT) == 2


def test_too_much_memory_is_one_clients_error(server: rpc.Server) -> None:
    with connect(server.address) as session:
        with pytest.raises(rpc.RemoteError) as caught:
            session.call("eat", 8 << 10, timeout=LIMIT)
        assert caught.value.remote_class == "MemoryError"
        assert session.call("eat", 1, timeout=LIMIT) == 1 << 20


def test_an_endless_loop_ends_with_its_session(server: rpc.Server) -> None:
    session = connect(server.address)
    process = session.call("process")
    with pytest.raises(rpc.DeadlineExceededError):
        session.call("spin", timeout=0.3)
    del session
    with connect(server.address) as other:
        assert other.call("add", 1, 1, timeout=LIMIT) == 2
    try:
        ended = os.pidfd_open(process)
    except ProcessLookupError:
        return  # It has ended already.
    try:
        assert select.select([ended], [], [], LIMIT)[0] == [ended]
    finally:
        os.close(ended)


def test_clients_that_may_bring_code_have_processes_by_default(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"workdir": tmp_path, "handshake_timeout": f"{LIMIT}s"}
    with rpc.Server(served_functions, allow_run="/bin/echo", **settings) as server:
        with connect(server.address) as session:
            assert session.call("process", timeout=LIMIT) != os.getpid()


def outside() -> int:
    return 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: lambda: 1, "it is a lambda function"),
        (lambda: functools.partial(outside), "is no function of a module"),
        (lambda: replaced, "test_isolation.outside is another object"),
    ],
)
def test_a_function_that_cannot_be_imported_is_an_error_before_anything_starts(
    make: Callable[[], Callable[[], int]], reason: str
) -> None:
    with pytest.raises(TypeError) as caught:
        rpc.Server(rpc.Registry().add("f", make()), isolate="process").start()
    assert "the function 'f' cannot be imported by another process" in str(caught.value)
    assert reason in str(caught.value)


def replaced() -> int:
    return 1


replaced.__qualname__ = "outside"


def test_a_function_within_another_one_cannot_be_imported() -> None:
    def inner() -> int:
        return 1

    with pytest.raises(TypeError, match=r"it is defined inside of another function \(test_a_func"):
        rpc.Server(inner, isolate="process").start()
    # Without processes it is served.
    with rpc.Server(inner) as server, connect(server.address) as session:
        assert session.call("inner") == 1


def run(*words: str, folder: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}:{TESTS}"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT,
        cwd=folder,
        check=False,
    )


SCRIPT = """
import sys
import tensor_rpc as rpc

@rpc.function
def add(a: int, b: int) -> int:
    return a + b

def work():
    with rpc.Server(add, isolate="process", handshake_timeout="60s") as server:
        with rpc.connect(server.address, connect_timeout=60) as session:
            print("sum", session.call("add", 1, 2))
"""

GUARDED = SCRIPT + "\nif __name__ == '__main__':\n    work()\n"


def test_a_script_is_imported_by_the_processes_of_its_sessions(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(GUARDED)
    done = run(str(script))
    assert (done.stdout, done.returncode) == ("sum 3\n", 0), done.stderr
    # As a module, too.
    done = run("-m", "script", folder=tmp_path)
    assert (done.stdout, done.returncode) == ("sum 3\n", 0), done.stderr


def test_a_script_may_start_servers_in_processes_of_multiprocessing(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT
        + """
def refused():
    try:
        work()
    except RuntimeError as error:
        print(error)

if __name__ == "__main__":
    import multiprocessing

    for method, target in [("spawn", work), ("fork", work), (None, work), ("fork", refused)]:
        if method is None:
            target()
            continue
        process = multiprocessing.get_context(method).Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == 0, method
"""
    )
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["sum 3"] * 3
    assert "this process was forked from one that has started processes" in lines[3]


def test_a_worker_of_disco_is_started_by_the_same_words(tmp_path: pathlib.Path) -> None:
    words = [*_child.set_up(rpc.Registry(served_functions)), "--disco-worker"]
    script = tmp_path / "worker"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    script.chmod(0o700)
    with connect(f"exec:{script}") as session:
        assert session.call("add", 1, 2, timeout=LIMIT) == 3
        assert session.call("process", timeout=LIMIT) != os.getpid()


def test_a_script_that_starts_a_server_when_it_is_imported_is_told_so(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\nwork()\n")
    done = run(str(script))
    assert done.returncode == 1 and done.stdout == ""
    assert "RuntimeError: a process could not import the functions that it is to serve" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


@pytest.mark.parametrize("words", [("-c", SCRIPT + "\nwork()\n"), ("-",)])
def test_functions_without_a_file_cannot_be_imported(words: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, *words],
        input=SCRIPT + "\nwork()\n",
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 1
    assert "it is defined in a notebook, at a prompt, or by python -c" in done.stderr


def test_functions_of_modules_are_served_from_a_command_line_too() -> None:
    text = (
        "import served_functions, tensor_rpc as rpc\n"
        "with rpc.Server(served_functions.add, isolate='process', handshake_timeout='60s') as s:\n"
        "    with rpc.connect(s.address, connect_timeout=60) as session:\n"
        "        print('sum', session.call('add', 1, 2))\n"
    )
    done = run("-c", text)
    assert done.stdout.endswith("sum 3\n"), done.stderr


def test_the_command_of_children_can_be_set() -> None:
    specification = _child.Specification(modules=["served_functions"])
    try:
        rpc.set_child_command([sys.executable, "-m", "tensor_rpc._child"])
        words = _child.words_of(specification)
        assert words[:3] == [sys.executable, "-m", "tensor_rpc._child"]
        assert run(*words[1:], "--check-imports").returncode == 0
        # Nothing is imported from the current folder.
        missing = _child.words_of(_child.Specification(modules=["no_such_module"]))
        failed = run(*missing[1:], "--check-imports")
        assert failed.returncode == 1 and "no_such_module" in failed.stderr
    finally:
        rpc.set_child_command(None)
    assert _child.words_of(specification)[0] == sys.executable


FROZEN = GUARDED.replace(
    "import sys\n",
    # As a program that was made one executable of: it is its interpreter, and its script is no file.
    "import sys\nsys.frozen, sys.executable = True, sys.argv[0]\n"
    "import __main__\n__main__.__file__ = '/no/such/script.py'\n",
).replace("    work()\n", "    rpc.freeze_support()\n    work()\n")


@pytest.fixture
def executable(tmp_path: pathlib.Path) -> Callable[[str], str]:
    """Return what makes an executable of a program."""

    def make(text: str) -> str:
        file = tmp_path / "program"
        file.write_text(f"#!{sys.executable}\n{text}")
        file.chmod(0o700)
        return str(file)

    return make


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """Run an executable to its end."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    return subprocess.run([program], capture_output=True, text=True, env=environment, timeout=LIMIT, check=False)


def test_a_frozen_program_becomes_its_children(executable: Callable[[str], str]) -> None:
    done = run_alone(executable(FROZEN))
    assert (done.returncode, done.stdout) == (0, "sum 3\n"), done.stderr


def test_a_frozen_program_that_does_not_is_told_so(executable: Callable[[str], str]) -> None:
    done = run_alone(executable(FROZEN.replace("    rpc.freeze_support()\n", "")))
    assert done.returncode == 1 and done.stdout == ""
    assert "a process could not import the functions" in done.stderr
    assert "tensor_rpc.freeze_support() first" in done.stderr


@pytest.mark.parametrize("functions_are_in", ["__main__", "parts"])
def test_a_program_in_an_archive_is_imported_by_its_processes(tmp_path: pathlib.Path, functions_are_in: str) -> None:
    folder, archive = tmp_path / "program", tmp_path / "program.pyz"
    folder.mkdir()
    if functions_are_in == "__main__":
        (folder / "__main__.py").write_text(GUARDED)
        zipapp.create_archive(folder, archive)
    else:
        (folder / "parts.py").write_text(SCRIPT)
        # Its `__main__` calls the function without a guard.
        zipapp.create_archive(folder, archive, main="parts:work")
    done = run(str(archive))
    assert (done.returncode, done.stdout) == (0, "sum 3\n"), done.stderr


def test_rpc_server_serves_modules_of_python(tmp_path: pathlib.Path) -> None:
    command = "from tensor_rpc._commands import rpc_server; rpc_server()"
    for isolate in ("none", "process"):
        words = ["serve", "--python", "served_functions", "--listen", "tcp://127.0.0.1:0"]
        words += [
            "--handshake-timeout",
            f"{LIMIT}s",
            "--isolate",
            isolate,
            "--workdir",
            str(tmp_path),
            "--exit-with-stdin",
        ]
        with subprocess.Popen(
            [sys.executable, "-c", command, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGE)},
            cwd=TESTS,
        ) as server:
            assert server.stdin is not None and server.stdout is not None
            lines = iter(server.stdout.readline, "")
            address = next(line for line in lines if line.startswith("listening on ")).split()[-1]
            with connect(address) as session:
                assert session.call("add", 1, 2, timeout=LIMIT) == 3
                own = session.call("process", timeout=LIMIT) == server.pid
                assert own == (isolate == "none")
            server.stdin.close()
            assert server.wait(LIMIT) == 0


def test_the_commands_are_the_programs(tmp_path: pathlib.Path) -> None:
    for name in ("rpc_cli", "rpc_server"):
        command = f"from tensor_rpc._commands import {name}; {name}()"
        done = run("-c", command, "--version")
        assert done.returncode == 0 and done.stdout.startswith(name.replace("_", "-"))
        assert run("-c", command, "--no-such-flag").returncode == 2
    command = "from tensor_rpc._commands import rpc_server; rpc_server()"
    wrong = run("-c", command, "serve", "--python", "no_such_module", "--workdir", str(tmp_path))
    assert wrong.returncode == 78 and "No module named 'no_such_module'" in wrong.stderr
    none = run("-c", command, "serve", "--python", "json", "--workdir", str(tmp_path))
    assert none.returncode == 78 and "json has no functions for sessions" in none.stderr

"""Speed of the package: calls, copies, commands of Disco; beside TVM, gRPC and Ray, if installed.

    python benches/speed.py [--server ADDRESS] [--peers PYTHON]

The server is a process of its own: `rpc-server` of this package, and that of each other package.
Those are looked for in the Python that runs this, or in the one that `--peers` names. Each figure
is the median of several rounds, in turn with its counterpart; nothing is pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import tensor_rpc as rpc
from tensor_rpc import disco

ROUNDS = 7
COPY = 64 << 20
PEERS = {"tvm": "TVM", "grpc": "grpcio", "ray": "Ray"}
SERVE = "import sys; sys.argv[0] = 'rpc-server'; from tensor_rpc._commands import rpc_server; rpc_server()"


def median(measure: Callable[[], float]) -> float:
    """Return the median of some rounds."""
    return statistics.median(measure() for _ in range(ROUNDS))


def per_call(call: Callable[[int], object], count: int = 3000) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    for number in range(count):
        call(number)
    return (time.perf_counter() - begin) / count


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one piece of work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def start() -> tuple[subprocess.Popen[str], str]:
    """Start a server, and return its address."""
    ready = Path(tempfile.mkdtemp()) / "ready"
    words = ["serve", "--listen", "tcp://127.0.0.1:0", "--ready-file", str(ready), "--log-level", "error"]
    folders = [str(Path(rpc.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, *words], text=True, stdout=subprocess.DEVNULL, env=environment
    )
    while not ready.exists():
        if server.poll() is not None:
            raise SystemExit("the server has ended")
        time.sleep(0.02)
    return server, ready.read_text().split()[0]


@contextlib.contextmanager
def peer(python: str, name: str) -> Iterator[Callable[[str], float | None] | str]:
    """Start another package, and yield its measure of a case, or else what is missing."""
    words = [python, str(Path(__file__).with_name("speed_peers.py")), name]
    with subprocess.Popen(
        words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None and told is not None

        def measure(case: str) -> float | None:
            print(case, file=asked, flush=True)
            figure = told.readline().strip()
            return None if figure in ("none", "") else float(figure)

        word = told.readline().strip()
        yield measure if word == "ready" else word or "does not start"
        asked.close()


async def in_flight(address: str, calls: int = 20_000) -> float:
    """Return the calls per second of 64 that are always in progress."""
    async with rpc.aio.connect(address) as session:
        echo = await session.get_function("rpc.echo")

        async def caller(count: int) -> None:
            for number in range(count):
                await echo(number, lane=rpc.CONCURRENT)

        begin = time.perf_counter()
        await asyncio.gather(*(caller(calls // 64) for _ in range(64)))
        return calls / (time.perf_counter() - begin)


def commands_per_second(count: int = 100_000) -> float:
    """Return the rate at which 4 workers as threads execute calls that do nothing."""
    with disco.ThreadedSession(4) as session:
        # A native function that does next to nothing.
        call = session.get_global_func("rpc.signature")
        session.sync_all()
        begin = time.perf_counter()
        for _ in range(count):
            call("")
        session.sync_all()
        return count / (time.perf_counter() - begin)


@contextlib.contextmanager
def ours(address: str) -> Iterator[dict[str, Callable[[], float]]]:
    """Return measures of this package: seconds, and for calls in flight their rate."""
    with rpc.connect(address) as session:
        echo = session["rpc.echo"]
        data = np.ones(COPY, "uint8")
        there = session.empty(data.shape, "uint8")
        out = np.empty_like(data)
        yield {
            "call": lambda: per_call(echo),
            "in flight": lambda: asyncio.run(in_flight(address)),
            "there": lambda: seconds(lambda: there.copy_from(data)),
            "back": lambda: seconds(there.numpy),
            "back, into an array": lambda: seconds(lambda: there.copy_to(out)),
        }


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "call": ("blocking call", lambda figure: f"{figure * 1e6:8.1f} us"),
    "in flight": ("64 in flight, asyncio", lambda figure: f"{figure / 1e3:8.1f} k calls/s"),
    "there": ("copy of 64 MiB, there", lambda figure: f"{COPY / figure / 1e9:8.2f} GB/s"),
    "back": ("copy of 64 MiB, back", lambda figure: f"{COPY / figure / 1e9:8.2f} GB/s"),
    "back, into an array": ("back, into an array", lambda figure: f"{COPY / figure / 1e9:8.2f} GB/s"),
}


def show(case: str, figures: list[float]) -> None:
    """Print the median of a case."""
    name, text = FIGURES[case]
    print(f"{name:26}{text(statistics.median(figures))}")


def compare(address: str, python: str) -> None:
    """Measure the cases beside those of other packages, in turn."""
    with ours(address) as measures:
        for case, measure in measures.items():
            show(case, [measure() for _ in range(ROUNDS)])
        for package, name in PEERS.items():
            with peer(python, package) as theirs:
                if isinstance(theirs, str):
                    print(f"\n{name}: left out, {theirs}")
                    continue
                print(f"\n{name}")
                for case, measure in measures.items():
                    # The first figure of a peer is one of a cold start.
                    theirs(case)
                    pairs = [(theirs(case), measure()) for _ in range(ROUNDS)]
                    known = [(their, our) for their, our in pairs if their is not None]
                    if not known:
                        print(f"{FIGURES[case][0]:26}    none")
                        continue
                    show(case, [their for their, _ in known])
                    times = statistics.median(
                        our / their if case == "in flight" else their / our for their, our in known
                    )
                    print(f"{'':26}{times:8.2f} x as fast here")


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="address of a server that runs already")
    parser.add_argument("--peers", default=sys.executable, help="Python with other packages to measure beside")
    arguments = parser.parse_args()
    address, server = arguments.server, None
    if address is None:
        server, address = start()
    try:
        fresh = [sys.executable, "-c", "import tensor_rpc"]
        bare = [sys.executable, "-c", "pass"]
        loaded = median(lambda: seconds(lambda: subprocess.run(fresh, check=True)))
        empty = median(lambda: seconds(lambda: subprocess.run(bare, check=True)))
        print(f"import tensor_rpc         {(loaded - empty) * 1e3:8.1f} ms")
        print(f"Disco, 4 worker threads   {median(commands_per_second) / 1e3:8.1f} k commands/s")
        compare(address, arguments.peers)
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()

"""Speed of the package: calls, copies, commands of Disco; beside TVM's, where that is installed.

    python benches/speed.py [--server ADDRESS]

The server is a process of its own: `rpc-server` of this package, and TVM's own for TVM's client.
Each figure is the median of several rounds, in turn with its counterpart; nothing is pinned.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import tensor_rpc as rpc
from tensor_rpc import disco

ROUNDS = 7
COPY = 64 << 20
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
    server = subprocess.Popen([sys.executable, "-c", SERVE, *words], text=True, stdout=subprocess.DEVNULL)
    while not ready.exists():
        time.sleep(0.02)
    return server, ready.read_text().split()[0]


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


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="address of a server that runs already")
    address = parser.parse_args().server
    server = None
    if address is None:
        server, address = start()
    try:
        fresh = [sys.executable, "-c", "import tensor_rpc"]
        bare = [sys.executable, "-c", "pass"]
        loaded = median(lambda: seconds(lambda: subprocess.run(fresh, check=True)))
        empty = median(lambda: seconds(lambda: subprocess.run(bare, check=True)))
        print(f"import tensor_rpc         {(loaded - empty) * 1e3:8.1f} ms")
        with rpc.connect(address) as session:
            echo = session["rpc.echo"]
            print(f"blocking call             {median(lambda: per_call(echo)) * 1e6:8.1f} us")
            data = np.ones(COPY, "uint8")
            there = session.empty(data.shape, "uint8")
            up = median(lambda: seconds(lambda: there.copy_from(data)))
            down = median(lambda: seconds(there.numpy))
            print(f"copy of 64 MiB, there     {COPY / up / 1e9:8.2f} GB/s")
            print(f"copy of 64 MiB, back      {COPY / down / 1e9:8.2f} GB/s")
        rate = median(lambda: asyncio.run(in_flight(address)))
        print(f"64 in flight, asyncio     {rate / 1e3:8.1f} k calls/s")
        print(f"Disco, 4 worker threads   {median(commands_per_second) / 1e3:8.1f} k commands/s")
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()

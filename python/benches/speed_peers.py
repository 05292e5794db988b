"""Other packages, measured like this one by `speed.py`, each in a process of its own.

    python benches/speed_peers.py tvm|grpc|ray

starts a server of the package, and prints `ready`, or what is missing. For each line with the name
of a case that it then reads it prints the figure: seconds of a call, calls per second of 64 that are
always in progress, or seconds of a copy of 64 MiB; or `none` where the package has no such thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

CALLS = 1000
COPY = 64 << 20
IN_FLIGHT = 64

Cases = dict[str, Callable[[], float]]


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one piece of work."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def per_call(call: Callable[[int], object], count: int = CALLS) -> float:
    """Return the seconds of one call."""
    return seconds(lambda: [call(number) for number in range(count)]) / count


async def rate(call: Callable[[int], Awaitable[object]], calls: int = 6400) -> float:
    """Return the calls per second of 64 that are always in progress."""

    async def caller() -> None:
        for number in range(calls // IN_FLIGHT):
            await call(number)

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return calls / (time.perf_counter() - begin)


@contextlib.contextmanager
def tvm() -> Iterator[Cases]:
    """TVM's client on TVM's own server. A session of it has one call in progress."""
    import numpy

    rpc, runtime = importlib.import_module("tvm.rpc"), importlib.import_module("tvm.runtime")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)]
    server = subprocess.Popen([sys.executable, *words, "--silent"], stdout=sys.stderr)
    try:
        while True:
            try:
                session = rpc.connect("127.0.0.1", port)
                break
            except (OSError, RuntimeError):
                if server.poll() is not None:
                    raise
                time.sleep(0.1)
        echo = session.get_function("testing.echo")
        data = numpy.ones(COPY, "uint8")
        there = runtime.empty(data.shape, "uint8", device=session.cpu(0))
        yield {
            "call": lambda: per_call(echo),
            "there": lambda: seconds(lambda: there.copyfrom(data)),
            "back": lambda: seconds(there.numpy),
        }
    finally:
        server.terminate()
        server.wait()


def serve_grpc(ready: Any) -> None:
    """Serve echoes until the process is ended."""
    grpc = importlib.import_module("grpc")

    async def echo(request: bytes, context: object) -> bytes:
        return request

    async def take(request: bytes, context: object) -> bytes:
        return b""

    async def give(request: bytes, context: object) -> bytes:
        return data

    async def serve() -> None:
        server = grpc.aio.server(options=UNLIMITED)
        methods = {"echo": echo, "take": take, "give": give}
        handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.put(port)
        await server.wait_for_termination()

    data = bytes(COPY)
    asyncio.run(serve())


UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@contextlib.contextmanager
def grpc() -> Iterator[Cases]:
    """Unary calls of grpcio, with bytes as they are, on a server of grpc.aio."""
    import numpy

    module = importlib.import_module("grpc")
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    server = context.Process(target=serve_grpc, args=(ready,), daemon=True)
    server.start()
    address = f"127.0.0.1:{ready.get(timeout=60)}"
    channel = module.insecure_channel(address, options=UNLIMITED)
    echo, take, give = (channel.unary_unary(f"/bench/{name}") for name in ("echo", "take", "give"))
    data = numpy.ones(COPY, "uint8")

    async def in_flight() -> float:
        async with module.aio.insecure_channel(address, options=UNLIMITED) as channel:
            echo = channel.unary_unary("/bench/echo")
            return await rate(lambda number: echo(str(number).encode()))

    yield {
        "call": lambda: per_call(lambda number: echo(str(number).encode())),
        "in flight": lambda: asyncio.run(in_flight()),
        "there": lambda: seconds(lambda: take(data.tobytes())),
        "back": lambda: seconds(lambda: numpy.frombuffer(give(b""), "uint8")),
    }
    channel.close()
    server.terminate()


@contextlib.contextmanager
def ray() -> Iterator[Cases]:
    """Calls of an actor of Ray on this machine. Copies go through its shared memory, not a socket."""
    import numpy

    module = importlib.import_module("ray")
    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    class Echo:
        def echo(self, value: Any) -> Any:
            return value

        def take(self, array: Any) -> None:
            pass

        def give(self) -> Any:
            return numpy.ones(COPY, "uint8")

    actor = module.remote(Echo).remote()
    data = numpy.ones(COPY, "uint8")

    async def call(number: int) -> None:
        await actor.echo.remote(number)

    yield {
        "call": lambda: per_call(lambda number: module.get(actor.echo.remote(number))),
        "in flight": lambda: asyncio.run(rate(call)),
        "there": lambda: seconds(lambda: module.get(actor.take.remote(data))),
        "back": lambda: seconds(lambda: module.get(actor.give.remote())),
    }
    module.shutdown()


def main() -> None:
    """Measure one package as the lines of standard input want it."""
    # Packages print messages of their own, which are no figures.
    figures, sys.stdout = sys.stdout, sys.stderr
    try:
        with {"tvm": tvm, "grpc": grpc, "ray": ray}[sys.argv[1]]() as cases:
            print("ready", file=figures, flush=True)
            for line in sys.stdin:
                case = cases.get(line.strip())
                print("none" if case is None else case(), file=figures, flush=True)
    except ImportError as error:
        print(f"not installed: {error}", file=figures, flush=True)


if __name__ == "__main__":
    main()

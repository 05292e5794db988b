"""Time a kernel on a board that a tracker hands out, or at any server.

On the board, and then on the laptop:

    python board.py serve --listen tcp://0.0.0.0:9090 --tracker tcp://pool:9190 --key board --insecure
    python board.py time tracker://pool:9190/board

Without an address the kernel is served and timed on this machine.
"""

from __future__ import annotations

import argparse

import numpy as np

import tensor_rpc as rpc


@rpc.function
def gemm(a: np.ndarray, b: np.ndarray, product: np.ndarray) -> None:
    """Multiply two matrices into a third one."""
    np.matmul(a, b, out=product)


def serve(listen: str, tracker: str | None, key: str | None, insecure: bool) -> None:
    """Serve the kernel until a signal."""
    rpc.Server(gemm, listen=listen, tracker=tracker, key=key, insecure=insecure).serve()


def measure(address: str, size: int) -> None:
    """Check the kernel against numpy, and print how fast it is."""
    with rpc.connect(address) as session:
        random = np.random.default_rng(1)
        a, b = (random.random((size, size), dtype="float32") for _ in range(2))
        there = [session.tensor(a), session.tensor(b), session.empty((size, size), "float32")]
        kernel = session["gemm"]
        kernel(*there)
        np.testing.assert_allclose(there[2].numpy(), a @ b, rtol=1e-3)
        timing = session.time(kernel, *there, number=10, repeat=5)
        print(f"gemm {size}: {timing.median * 1e3:.3f} ms, {2 * size**3 / timing.median / 1e9:.1f} GFLOP/s")


def main() -> None:
    """Serve, or time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve the kernel")
    server.add_argument("--listen", default="tcp://127.0.0.1:9090")
    server.add_argument("--tracker")
    server.add_argument("--key")
    server.add_argument("--insecure", action="store_true")
    timer = commands.add_parser("time", help="time the kernel")
    timer.add_argument("address", nargs="?")
    timer.add_argument("--size", type=int, default=256)
    given = parser.parse_args()
    if given.command == "serve":
        serve(given.listen, given.tracker, given.key, given.insecure)
    elif given.address:
        measure(given.address, given.size)
    else:
        with rpc.Server(gemm) as here:
            measure(here.address, given.size)


if __name__ == "__main__":
    main()

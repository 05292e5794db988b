#!/usr/bin/python3
"""The collectives of `disco` and of Open MPI (through mpi4py), in turn on the same machine, as one table.

    apt-get install openmpi-bin python3-mpi4py python3-numpy
    tests/benches/collectives.py [--rounds N] [--json]

Each round runs both once, so that both see the same weather; a figure is the median of its rounds. The last column is how many
times as long Open MPI takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

CASES = [
    ("barrier", 0, 1000, 11),
    ("allreduce", 4 << 10, 1000, 11),
    ("allreduce", 1 << 20, 10, 21),
    ("allreduce", 64 << 20, 1, 11),
    ("broadcast", 4 << 10, 1000, 11),
    ("broadcast", 1 << 20, 10, 21),
    ("broadcast", 64 << 20, 1, 11),
    ("allgather", 64 << 20, 1, 11),
    ("reduce_scatter", 64 << 20, 1, 11),
]


def rank_of_open_mpi():
    """What mpirun starts: measures every case as the bench of `disco` does, and rank 0 prints."""
    import time

    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for name, size, batch, batches in CASES:
        elements = size // 4
        part = elements // world.size
        source = numpy.ones(part if name == "allgather" else elements, dtype=numpy.float32)
        target = numpy.ones(part if name == "reduce_scatter" else elements, dtype=numpy.float32)
        calls = {
            "barrier": lambda: world.Barrier(),
            "allreduce": lambda: world.Allreduce(source, target, MPI.SUM),
            "broadcast": lambda: world.Bcast(source, 0),
            "allgather": lambda: world.Allgather(source, target),
            "reduce_scatter": lambda: world.Reduce_scatter_block(source, target, MPI.SUM),
        }
        call = calls[name]
        call()
        call()
        times = []
        for _ in range(batches):
            world.Barrier()
            began = time.perf_counter()
            for _ in range(batch):
                call()
            world.Barrier()
            times.append((time.perf_counter() - began) / batch * 1e6)
        if world.rank == 0:
            print(json.dumps({"ranks": world.size, "op": name, "bytes": size, "median_us": statistics.median(times)}))


def run(command):
    """The figures that a command prints, a JSON object a line."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["ranks"], line["op"], line["bytes"]): line["median_us"] for line in lines}


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--json", action="store_true")
    arguments = arguments.parse_args()
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    bench = ["cargo", "bench", "-q", "--manifest-path", os.path.join(root, "disco", "Cargo.toml"), "--bench", "ccl"]
    subprocess.run(bench + ["--no-run"], check=True)
    rows = {}
    for _ in range(arguments.rounds):
        for ranks in arguments.ranks:
            mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
            mpi += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl", "self,vader"]
            columns = {
                "threads": bench + ["--", "--json", "--over", "threads", "--ranks", str(ranks)],
                "processes": bench + ["--", "--json", "--over", "processes", "--ranks", str(ranks)],
                "open mpi": mpi + [sys.executable, os.path.abspath(__file__), "--rank"],
            }
            for column, command in columns.items():
                for key, micros in run(command).items():
                    rows.setdefault(key, {}).setdefault(column, []).append(micros)
    if not arguments.json:
        print(f"{'ranks':>5} {'operation':<15} {'bytes':>9} {'threads':>12} {'processes':>12} {'open mpi':>12} {'ratio':>6}")
    for (ranks, name, size), columns in sorted(rows.items(), key=lambda row: (row[0][0], CASES_ORDER[row[0][1:]])):
        median = {column: statistics.median(values) for column, values in columns.items()}
        if arguments.json:
            print(json.dumps({"ranks": ranks, "op": name, "bytes": size, "median_us": median}))
            continue
        cells = " ".join(f"{median[column]:>9.1f} µs" for column in ("threads", "processes", "open mpi"))
        print(f"{ranks:>5} {name:<15} {size:>9} {cells} {median['open mpi'] / median['processes']:>6.2f}")


CASES_ORDER = {(name, size): place for place, (name, size, _, _) in enumerate(CASES)}

if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank_of_open_mpi()
    else:
        main()

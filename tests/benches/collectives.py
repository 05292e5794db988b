#!/usr/bin/python3
"""The collectives of `disco`, of Open MPI (through mpi4py) and of gloo (through torch), in turn on the same machine, as
one table.

    apt-get install openmpi-bin python3-mpi4py python3-numpy python3-torch
    tests/benches/collectives.py [--rounds N] [--ranks N...] [--json]

Each round runs all once, so that all see the same weather; a figure is the median of its rounds. `threads` and
`processes` share memory, as the ranks of Open MPI do; `tcp` are processes with connections over the loopback
interface, as those of gloo and of Open MPI made to use TCP (`mpi tcp`); `mpi` are ours over Open MPI's messages,
where there is an `mpicc` to build that with. The last two columns are how many times as long the better of Open MPI
and gloo takes as `processes`, and the better of gloo and Open MPI over TCP as `tcp`. Who is not installed is left
out, and --columns leaves out more.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

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
ORDER = {(name, size): place for place, (name, size, _, _) in enumerate(CASES)}
COLUMNS = ["threads", "processes", "tcp", "mpi", "open mpi", "mpi tcp", "gloo"]


def measure(ranks, rank, barrier, calls_for, at_most=1000):
    """Measures every case that there is a call for, as the bench of `disco` does; rank 0 prints."""
    for name, size, batch, batches in CASES:
        call = calls_for(name, size // 4)
        if call is None:
            continue
        batch = min(batch, at_most)
        call()
        call()
        times = []
        for _ in range(batches):
            barrier()
            began = time.perf_counter()
            for _ in range(batch):
                call()
            barrier()
            times.append((time.perf_counter() - began) / batch * 1e6)
        if rank == 0:
            print(json.dumps({"ranks": ranks, "op": name, "bytes": size, "median_us": statistics.median(times)}))


def rank_of_open_mpi():
    """What mpirun starts."""
    import numpy
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def calls_for(name, elements):
        part = elements // world.size
        source = numpy.ones(part if name == "allgather" else elements, dtype=numpy.float32)
        target = numpy.ones(part if name == "reduce_scatter" else elements, dtype=numpy.float32)
        return {
            "barrier": lambda: world.Barrier(),
            "allreduce": lambda: world.Allreduce(source, target, MPI.SUM),
            "broadcast": lambda: world.Bcast(source, 0),
            "allgather": lambda: world.Allgather(source, target),
            "reduce_scatter": lambda: world.Reduce_scatter_block(source, target, MPI.SUM),
        }[name]

    measure(world.size, world.rank, world.Barrier, calls_for)


def rank_of_gloo(rank, ranks, store):
    """One process of gloo's group. It has no reduce_scatter."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def calls_for(name, elements):
        tensor = torch.ones(elements)
        parts = list(torch.ones(elements).chunk(ranks)) if elements else []
        return {
            "barrier": distributed.barrier,
            "allreduce": lambda: distributed.all_reduce(tensor),
            "broadcast": lambda: distributed.broadcast(tensor, 0),
            "allgather": lambda: distributed.all_gather(parts, tensor[: elements // ranks]),
        }.get(name)

    # Small ones take it milliseconds, of which a thousand times eleven would be minutes.
    measure(ranks, rank, distributed.barrier, calls_for, at_most=20)


def figures(text):
    """Those that were printed, a JSON object a line."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {(line["ranks"], line["op"], line["bytes"]): line["median_us"] for line in lines}


def run(command):
    return figures(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def run_gloo(ranks):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), "--gloo"]
        start = lambda rank: subprocess.Popen(
            command + [str(rank), str(ranks), os.path.join(folder, "store")], stdout=subprocess.PIPE, text=True
        )
        children = [start(rank) for rank in range(ranks)]
        outputs = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit("a rank of gloo has failed")
        return figures(outputs[0])


def open_mpi(ranks, transports):
    """The command that runs the ranks of Open MPI over these transports of its own."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command += ["--mca", "mpi_yield_when_idle", "1", "--mca", "btl", transports]
    return [*command, sys.executable, os.path.abspath(__file__), "--rank"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments.add_argument("--columns", nargs="+", default=COLUMNS, choices=COLUMNS, help="only these")
    arguments.add_argument("--program", help="the bench `ccl` of disco, if it is built already")
    arguments.add_argument("--json", action="store_true")
    arguments = arguments.parse_args()
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    bench = ["cargo", "bench", "-q", "--manifest-path", os.path.join(root, "disco", "Cargo.toml"), "--bench", "ccl"]
    has_mpi = shutil.which("mpicc") and shutil.which("mpirun")
    if has_mpi:
        bench += ["--features", "mpi"]
    if arguments.program:
        bench = [arguments.program]
    else:
        subprocess.run(bench + ["--no-run"], check=True)
        bench.append("--")
    found = importlib.util.find_spec
    rows = {}
    for _ in range(arguments.rounds):
        for ranks in arguments.ranks:
            ours = lambda over: lambda: run(bench + ["--json", "--over", over, "--ranks", str(ranks)])
            columns = {column: ours(column) for column in COLUMNS[: 4 if has_mpi else 3]}
            if shutil.which("mpirun") and found("mpi4py") and found("numpy"):
                columns["open mpi"] = lambda: run(open_mpi(ranks, "self,vader"))
                columns["mpi tcp"] = lambda: run(open_mpi(ranks, "self,tcp"))
            if found("torch"):
                columns["gloo"] = lambda: run_gloo(ranks)
            columns = {column: columns[column] for column in arguments.columns if column in columns}
            for column, measured in columns.items():
                for key, micros in measured().items():
                    rows.setdefault(key, {}).setdefault(column, []).append(micros)
    show(rows, arguments.json)


def show(rows, as_json):
    if not as_json:
        heads = " ".join(f"{column:>12}" for column in COLUMNS)
        print(f"{'ranks':>5} {'operation':<15} {'bytes':>9} {heads} {'others':>7} {'on TCP':>6}")
    for (ranks, name, size), columns in sorted(rows.items(), key=lambda row: (row[0][0], ORDER[row[0][1:]])):
        median = {column: statistics.median(values) for column, values in columns.items()}
        if as_json:
            print(json.dumps({"ranks": ranks, "op": name, "bytes": size, "median_us": median}))
            continue
        cell = lambda column: f"{median[column]:>9.1f} µs" if column in median else f"{'–':>12}"
        others = [median[column] for column in ("open mpi", "gloo") if column in median]
        ratio = f"{min(others) / median['processes']:.2f}" if others and "processes" in median else "–"
        others = [median[column] for column in ("mpi tcp", "gloo") if column in median]
        over_tcp = f"{min(others) / median['tcp']:.2f}" if others and "tcp" in median else "–"
        cells = " ".join(cell(column) for column in COLUMNS)
        print(f"{ranks:>5} {name:<15} {size:>9} {cells} {ratio:>7} {over_tcp:>6}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank_of_open_mpi()
    elif sys.argv[1:2] == ["--gloo"]:
        rank_of_gloo(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()

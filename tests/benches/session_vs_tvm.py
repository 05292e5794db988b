#!/usr/bin/env python3
"""Sessions beside those of TVM's RPC, in one run:

    python3 tests/benches/session_vs_tvm.py            (--json for a line of JSON for each result)

Makes a virtual environment under target/tvm-venv with TVM, builds our programs in release, and starts a server of each kind. Then,
in rounds that alternate, for each pair of a client and a server that speak TVM's protocol with each other:

* connect: from nothing to a session (TVM's server starts a process for each);
* call: `rpc.test.addone` of a number, one call after the other;
* to, from: copies of --mib MiB into a tensor at the server and back.

The client of TVM is its Python client, `tvm.rpc.connect`; ours is `Connector::connect_blocking("tvm://…")`, in Rust. Our server runs
sessions in its own process (`--isolate none`), and once more each in a process of its own (`--isolate process`).
Everything is on this machine, over loopback TCP. The figures are medians over all rounds.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from tracker_vs_tvm import ROOT, TARGET, fail, running, tvm_python

SERVER_OF_TVM = ROOT / "tests/python/tvm_server.py"


def ours():
    """Our programs: the server's, and the bench that is the client."""
    subprocess.run(["cargo", "build", "--locked", "--release", "-p", "rpc-server", "--bin", "rpc-server"], cwd=ROOT, check=True)
    build = ["cargo", "bench", "--locked", "-p", "rpc-tests", "--bench", "tvm_session", "--no-run", "--message-format", "json"]
    built = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = map(json.loads, built.stdout.splitlines())
    bench = next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "tvm_session")
    return TARGET / "release/rpc-server", bench


def rows(command):
    """Runs a client, which prints what it has measured and the time in microseconds."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} failed")
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(line[0], float(line[1])) for line in lines if len(line) == 2]


def compare(args):
    python = tvm_python()
    server, bench = ours()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        start = lambda command: stack.enter_context(running(command, log, stdout=subprocess.PIPE, text=True))
        ports = {"TVM": start([python, SERVER_OF_TVM]).stdout.readline().strip()}
        for isolate in ["none", "process"]:
            serve = ["serve", "--listen", "tcp://127.0.0.1:0", "--log-level", "error", "--workdir", work / isolate]
            process = start([server, *serve, "--tvm", "--tvm-self-test", "--key", "board", "--isolate", isolate])
            name = "ours" if isolate == "none" else "ours, isolated"
            ports[name] = process.stdout.readline().strip().rpartition(":")[2]
        if not all(port.isdigit() for port in ports.values()):
            log.seek(0)
            fail(f"a server does not listen:\n{log.read().decode(errors='replace')[-2000:]}")
        sizes = [args.calls, args.copies, args.mib]
        clients = {
            "TVM": lambda port: rows([python, __file__, "tvm", port, *sizes]),
            "ours": lambda port: rows([bench, f"tvm://127.0.0.1:{port}/board", *sizes]),
        }
        results = {}
        medians = {}
        for _ in range(args.rounds):
            for who, measure in clients.items():
                for at, port in ports.items():
                    measured = {}
                    for what, time_us in measure(port):
                        measured.setdefault(what, []).append(time_us)
                    for what, times in measured.items():
                        results.setdefault((what, who, at), []).extend(times)
                        medians.setdefault((what, who, at), []).append(statistics.median(times))
    if not args.json:
        print(f"{'':8} {'client':7} {'server':15} {'median':>10} µs   of TVM's with TVM's, {args.rounds} rounds")
    for (what, who, at), times in results.items():
        base = medians[what, "TVM", "TVM"]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(medians[what, who, at], base))
        figure = statistics.median(times)
        if args.json:
            told = {"case": what, "client": who, "server": at, "n": len(times), "median_us": figure, "of_tvm": ratio}
            print(json.dumps({"suite": "session_vs_tvm"} | told))
        else:
            print(f"{what:8} {who:7} {at:15} {figure:10.0f}      {ratio:.2f}")


def tvm_client(port, calls, copies, mib):
    """TVM's own client. TVM's server takes one client at a time, so that the session before it has to be gone."""
    import numpy as np
    from tvm import rpc
    from tvm.runtime import tensor

    def timed(what, work):
        begun = time.perf_counter()
        result = work()
        print(what, (time.perf_counter() - begun) * 1e6)
        return result

    session = timed("connect", lambda: rpc.connect("127.0.0.1", port, "board"))
    add = session.get_function("rpc.test.addone")
    for number in range(calls):
        if timed("call", lambda: add(number)) != number + 1:
            fail("a wrong result")
    data = np.full(mib << 20, 7, "uint8")
    remote = tensor(data, session.cpu())
    for _ in range(copies):
        timed("to", lambda: remote.copyfrom(data))
        if not (timed("from", remote.numpy) == data).all():
            fail("a wrong copy")


def main():
    if len(sys.argv) == 6 and sys.argv[1] == "tvm":
        return tvm_client(*map(int, sys.argv[2:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="calls of each client in each round")
    parser.add_argument("--copies", type=int, default=3, help="copies of each client in each round")
    parser.add_argument("--mib", type=int, default=64, help="size of a copy")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

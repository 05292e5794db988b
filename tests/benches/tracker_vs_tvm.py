#!/usr/bin/env python3
"""Our tracker beside TVM's Python tracker, in one run:

    python3 tests/benches/tracker_vs_tvm.py            (--json for a line of JSON for each result)

Makes a virtual environment under target/tvm-venv with apache-tvm, tornado, cloudpickle and psutil, builds our programs in
release, and starts the trackers and a server of each. Then, in rounds that alternate, one client after the other:

* grant: the trackers alone. One process plays a server and a client, each with a connection that stays, and speaks the
  tracker's own protocol; for TVM it is Python with TVM's own helpers, for us the Rust client. The time from the request until the
  client knows its server; and `+back`, until the tracker has heard that it is free again.
* session: all of it, with the clients and servers that people run. The time from the request until there is a session with the
  server; and `+back`, until one call has been made and the session is left. There is one server, so each request waits for the
  one before it to be given back.

Where TVM gives grants by the tracker's word alone, ours come with a ticket that the server checks, and a use is reported when it begins
and when it ends: two messages of the server, where TVM's has one.

TVM's tracker and its clients write a length and then a message, in two packets, without TCP_NODELAY, so that the second one
waits for the acknowledgement of the first, which is delayed by 40 ms. `TVM*` is the same with a client that acknowledges at
once and does not wait itself, which TVM's own clients do not do: what the tracker itself takes. `TVM@ours` is TVM's client at our
tracker (`--tvm`), with our server for its sessions: the tracker acknowledges the first packet at once.

Everything is on this machine, over loopback TCP. The figures are over all rounds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
VENV = TARGET / "tvm-venv"
PACKAGES = ["apache-tvm", "tornado", "cloudpickle", "psutil"]
PATIENCE = 60


def fail(why):
    sys.exit(f"cannot compare: {why}")


def tvm_python():
    """A Python in which TVM's RPC can be imported."""
    python = VENV / "bin/python"
    probe = [python, "-c", "import tvm.rpc.tracker, tvm.rpc.server, tornado, cloudpickle, psutil"]
    if not python.exists() or subprocess.run(probe, capture_output=True).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        if subprocess.run(install).returncode != 0:
            fail(f"pip could not install {' '.join(PACKAGES)}")
        tried = subprocess.run(probe, capture_output=True, text=True)
        if tried.returncode != 0:
            fail(f"TVM is installed, but its RPC cannot be imported:\n{tried.stderr.strip()}")
    return python


def ours():
    """Our programs: the server's, and the bench that is the client."""
    subprocess.run(["cargo", "build", "--locked", "--release", "-p", "rpc-server", "--bin", "rpc-server"], cwd=ROOT, check=True)
    build = ["cargo", "bench", "--locked", "-p", "rpc-tests", "--bench", "tracker", "--no-run", "--message-format", "json"]
    built = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    messages = map(json.loads, built.stdout.splitlines())
    bench = next(m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "tracker")
    return TARGET / "release/rpc-server", bench


@contextlib.contextmanager
def running(command, log, **options):
    process = subprocess.Popen([str(part) for part in command], stderr=log, start_new_session=True, **options)
    try:
        yield process
    finally:
        # Its own group: TVM's programs start others.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(port, process, name, log):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    log.seek(0)
    fail(f"{name} does not listen:\n{log.read().decode(errors='replace')[-2000:]}")


def rows(command):
    """What a client prints: pairs of microseconds."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} failed")
    return [tuple(map(float, line.split())) for line in done.stdout.splitlines() if line[:1].isdigit()]


def quantile(values, fraction):
    values = sorted(values)
    return values[round((len(values) - 1) * fraction)]


def compare(args):
    python = tvm_python()
    server, bench = ours()
    tvm_port = free_port()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        start = lambda command, **options: stack.enter_context(running(command, log, **options))
        tracker = ["-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--silent"]
        process = start([python, *tracker, "--port", tvm_port, "--port-end", tvm_port + 1], stdout=log)
        listening(tvm_port, process, "TVM's tracker", log)
        port = free_port()
        tvm_server = ["-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", port, "--port-end", port + 1, "--key", "board", "--silent"]
        start([python, *tvm_server, "--tracker", f"127.0.0.1:{tvm_port}"], stdout=log)

        work = stack.enter_context(tempfile.TemporaryDirectory())
        tracker = [server, "tracker", "--listen", "tcp://127.0.0.1:0", "--log-level", "error"]
        # The client under test also plays a server, which is not at its address.
        process = start([*tracker, "--allow-advertise", "tcp://127.0.0.1"], stdout=subprocess.PIPE, text=True)
        our_tracker = process.stdout.readline().strip().removeprefix("listening on ")
        if not our_tracker:
            fail("our tracker does not listen")
        process = start([*tracker, "--tvm"], stdout=subprocess.PIPE, text=True)
        both_dialects = process.stdout.readline().strip().removeprefix("listening on ")
        if not both_dialects:
            fail("our tracker for peers of TVM does not listen")
        for name, of, flags in [("native", our_tracker, []), ("tvm", both_dialects, ["--tvm"])]:
            board = ["--tracker", of, "--tracker-key", "board", "--max-sessions", "1", "--workdir", pathlib.Path(work) / name]
            start([server, "serve", "--listen", "tcp://127.0.0.1:0", "--log-level", "error", *board, *flags], stdout=log)
        both_port = both_dialects.rsplit(":", 1)[1]

        sides = {
            ("grant", "TVM"): lambda: rows([python, __file__, "tvm-grants", tvm_port, args.grants]),
            ("grant", "TVM*"): lambda: rows([python, __file__, "tvm-grants-at-once", tvm_port, args.grants]),
            ("grant", "TVM@ours"): lambda: rows([python, __file__, "tvm-grants", both_port, args.grants]),
            ("grant", "ours"): lambda: rows([bench, "grants", our_tracker, args.grants]),
            ("session", "TVM"): lambda: rows([python, __file__, "tvm-cycles", tvm_port, args.sessions]),
            ("session", "TVM@ours"): lambda: rows([python, __file__, "tvm-cycles", both_port, args.sessions]),
            ("session", "ours"): lambda: rows([bench, "cycles", our_tracker, args.sessions]),
        }
        results = {name: [] for name in sides}
        medians = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, measure in sides.items():
                # The first ones open connections.
                measured = measure()[5:]
                results[name] += measured
                medians[name].append(statistics.median(first for first, _ in measured))
    if not args.json:
        print(f"{'':8} {'':8} {'median':>10} {'p99':>10} {'+back':>10} {'p99':>10}   µs, {args.rounds} rounds")
    for case in ["grant", "session"]:
        everybody = [who for of, who in sides if of == case]
        for who in everybody:
            measured = results[case, who]
            columns = [[pair[at] for pair in measured] for at in (0, 1)]
            figures = [quantile(column, fraction) for column in columns for fraction in (0.5, 0.99)]
            if args.json:
                names = ["median_us", "p99_us", "back_median_us", "back_p99_us"]
                print(json.dumps({"suite": "tracker_vs_tvm", "case": case, "who": who, "n": len(measured)} | dict(zip(names, figures))))
            else:
                print(f"{case:8} {who:8} " + " ".join(f"{figure:10.0f}" for figure in figures))
        for who in everybody[:-1]:
            ratio = statistics.median(theirs / our for theirs, our in zip(medians[case, who], medians[case, "ours"]))
            if args.json:
                print(json.dumps({"suite": "tracker_vs_tvm", "case": case, "who": who, "median_over_ours": ratio}))
            else:
                print(f"{case:8} {who}: the median is {ratio:.1f} × ours (the median of the rounds' ratios)")


def tvm_grants(port, count, at_once=False):
    """A server and a client of TVM's tracker, as tvm/rpc/server.py and tvm/rpc/client.py speak with it."""
    import struct

    from tvm.rpc import base

    def connect():
        sock = base.connect_with_retry(("127.0.0.1", port))
        sock.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
        if struct.unpack("<i", base.recvall(sock, 4))[0] != base.RPC_TRACKER_MAGIC:
            fail("that is not TVM's tracker")
        return sock

    def ask(sock, message):
        if at_once:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        base.sendjson(sock, message)
        if at_once:
            # Holds for a while only.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        answer = base.recvjson(sock)
        code = answer[0] if isinstance(answer, list) else answer
        if code != base.TrackerCode.SUCCESS:
            fail(f"TVM's tracker says {answer} to {message}")

    server, client = connect(), connect()
    ask(server, [base.TrackerCode.UPDATE_INFO, {"key": "server:alone", "addr": ["127.0.0.1", 1]}])
    match = base.random_key("alone")
    put = lambda: ask(server, [base.TrackerCode.PUT, "alone", (1, match), "127.0.0.1"])
    put()
    for _ in range(count):
        begun = time.perf_counter()
        ask(client, [base.TrackerCode.REQUEST, "alone", "", 1])
        granted = time.perf_counter()
        put()
        print((granted - begun) * 1e6, (time.perf_counter() - begun) * 1e6)


def tvm_cycles(port, count):
    """TVM's own client with TVM's own server."""
    from tvm import rpc

    tracker = rpc.connect_tracker("127.0.0.1", port)
    for _ in range(count):
        begun = time.perf_counter()
        session = tracker.request("board")
        opened = time.perf_counter()
        # A small call.
        session.get_function("tvm.rpc.server.workpath")("x")
        del session
        print((opened - begun) * 1e6, (time.perf_counter() - begun) * 1e6)


def main():
    roles = {
        "tvm-grants": tvm_grants,
        "tvm-grants-at-once": lambda port, count: tvm_grants(port, count, at_once=True),
        "tvm-cycles": tvm_cycles,
    }
    if len(sys.argv) == 4 and sys.argv[1] in roles:
        return roles[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grants", type=int, default=500, help="grants in each round")
    parser.add_argument("--sessions", type=int, default=25, help="sessions in each round")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

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

A bare peer shows what a client can do at all: it answers at once, drops what it gets, sends what it has, and is no server. The
column "of bare" is the speed of a client at a server as a fraction of its speed at the bare peer, in the same rounds.
"""

import argparse
import contextlib
import json
import pathlib
import socket
import statistics
import struct
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
        ports["bare"] = start([sys.executable, __file__, "bare", str(args.mib)]).stdout.readline().strip()
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
        print(f"{'':8} {'client':7} {'server':15} {'median':>10} µs   time of TVM's with TVM's, speed of bare, {args.rounds} rounds")
    for (what, who, at), times in results.items():
        base = medians[what, "TVM", "TVM"]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(medians[what, who, at], base))
        bare = zip(medians[what, who, at], medians[what, who, "bare"])
        of_bare = statistics.median(theirs / mine for mine, theirs in bare)
        figure = statistics.median(times)
        if args.json:
            told = {"case": what, "client": who, "server": at, "n": len(times), "median_us": figure, "of_tvm": ratio}
            print(json.dumps({"suite": "session_vs_tvm"} | told | {"of_bare": of_bare}))
        else:
            print(f"{what:8} {who:7} {at:15} {figure:10.0f}      {ratio:.2f}  {of_bare:.2f}")


# Codes of frames, by shared knowledge of the protocol (docs of `rpc_tvm::wire`).
SHUTDOWN, INIT, CALL, RETURN, COPY_FROM, COPY_TO, COPY_ACK, GET_FUNCTION, ALLOC = 1, 2, 3, 4, 6, 7, 8, 9, 17
MAGIC = 0xFF271


def bare_peer(mib):
    """Serves one client after the other with what the clients here ask for, and with nothing behind it."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    content = memoryview(bytes([7]) * (mib << 20))
    sink = memoryview(bytearray(1 << 20))
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, contextlib.suppress(EOFError, ConnectionError):
            serve_bare(client, content, sink)


def serve_bare(client, content, sink):
    def read(length):
        data = bytearray(length)
        left = memoryview(data)
        while left:
            count = client.recv_into(left)
            if count == 0:
                raise EOFError
            left = left[count:]
        return bytes(data)

    def returned(*values):
        body = struct.pack("<ii", RETURN, len(values)) + b"".join(struct.pack("<iq", *value) for value in values)
        client.sendall(struct.pack("<Q", len(body)) + body)

    nothing = struct.pack("<Qiii", 12, RETURN, 1, 0)
    functions = {b"rpc.test.addone": 1, b"tvm.rpc.server.GetCRTMaxPacketSize": 2}
    _, key = struct.unpack("<ii", read(8))
    read(key)
    client.sendall(struct.pack("<ii", MAGIC, 12) + b"server:board")
    while True:
        (length,) = struct.unpack("<Q", read(8))
        if length == 0:
            continue
        (code,) = struct.unpack("<i", read(4))
        length -= 4
        if code == COPY_TO:
            while length > 0:
                count = client.recv_into(sink[: min(length, len(sink))])
                if count == 0:
                    return
                length -= count
            client.sendall(nothing)
            continue
        body = read(length)
        if code == SHUTDOWN:
            return
        if code == GET_FUNCTION:
            returned((4, functions.get(body[16:], 0)))
        elif code == CALL:
            function, _, kind = struct.unpack_from("<Qii", body + bytes(4))
            number = struct.unpack_from("<q", body, 16)[0] + 1 if kind == 1 and function == 1 else 2**63 - 1
            returned((1, 1), (1, number))
        elif code == COPY_FROM:
            (count,) = struct.unpack_from("<Q", body, length - 8)
            client.sendall(struct.pack("<Qi", 4 + count, COPY_ACK))
            client.sendall(content[:count])
        elif code == ALLOC:
            returned((4, 1))
        else:
            client.sendall(nothing)


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
    if len(sys.argv) == 3 and sys.argv[1] == "bare":
        return bare_peer(int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each result")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000, help="calls of each client in each round")
    parser.add_argument("--copies", type=int, default=3, help="copies of each client in each round")
    parser.add_argument("--mib", type=int, default=64, help="size of a copy")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()

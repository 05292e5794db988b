"""Scenarios of TVM's own servers, clients and tools at a tracker with --tvm.

Run by rpc-server/tests/server/tvm_tracker.rs, with the tracker's HOST:PORT and the program rpc-server as
arguments. The tracker has a server of this project under the key "ours".
"""

import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import tvm_model
from tvm import rpc

HOST, PORT = sys.argv[1].rsplit(":", 1)
LIMIT = 60

# TVM's server, with its test functions.
SERVER = "import runpy, tvm.rpc.testing; runpy.run_module('tvm.exec.rpc_server', None, '__main__')"


def demand_tools():
    """Fail if what TVM's tracker and proxy need has been installed, and so must be found."""
    assert "RPC_TESTS_REQUIRE_TVM_TOOLS" not in os.environ, "there are neither tornado nor cloudpickle"


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.01)


def free(tracker, key):
    return tracker.summary()["queue_info"].get(key, {}).get("free", 0)


def start_server(key, tracker):
    # It takes the first port that is free.
    port = random.randrange(20000, 31000)
    command = [sys.executable, "-c", SERVER, "--host", "127.0.0.1", "--port", str(port), "--port-end", "32000"]
    command += ["--tracker", tracker, "--key", key]
    log = subprocess.DEVNULL
    # Its processes end together.
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def add_one(session):
    add = session.get_function("rpc.test.addone")
    return add(41)


def main():
    # Clients of TVM wait without limit.
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    tracker = rpc.connect_tracker(HOST, int(PORT))
    server = start_server("rasp", f"{HOST}:{PORT}")
    try:
        ours = tracker.request("ours", session_timeout=LIMIT)
        assert add_one(ours) == 42
        until(lambda: free(tracker, "ours") == 0)
        del ours
        until(lambda: free(tracker, "ours") == 1)

        until(lambda: free(tracker, "rasp") == 1)
        session = tracker.request("rasp", session_timeout=LIMIT)
        assert session.get_function("testing.echo")(7) == 7
        assert free(tracker, "rasp") == 0
        tvm_model.check(session)
        # A second client gets the server as soon as the first one's session is over.
        results = []

        def second():
            other = rpc.connect_tracker(HOST, int(PORT)).request("rasp", priority=2, session_timeout=LIMIT)
            results.append(other.get_function("testing.echo")("second"))

        waiting = threading.Thread(target=second, daemon=True)
        waiting.start()
        until(lambda: tracker.summary()["queue_info"]["rasp"]["pending"] == 1)
        del session
        waiting.join(LIMIT)
        assert results == ["second"], results
        until(lambda: free(tracker, "rasp") == 1)
        # Clients of this project, in both protocols of the tracker.
        for address in [f"tracker://{HOST}:{PORT}/rasp", f"tvm-tracker://{HOST}:{PORT}/rasp"]:
            tvm_model.check_ours(address)
            until(lambda: free(tracker, "rasp") == 1)

        query = [sys.executable, "-m", "tvm.exec.query_rpc_tracker", "--host", HOST, "--port", PORT]
        printed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=LIMIT).stdout
        lines = [" ".join(line.split()) for line in printed.splitlines()]
        assert "ours 1 1 0" in lines and "rasp 1 1 0" in lines, printed
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(LIMIT)
    until(lambda: free(tracker, "rasp") == 0)


def registering(host, port):
    """A server of this project registers in TVM's protocol."""
    command = [sys.argv[2], "serve", "--listen", "tcp://127.0.0.1:0", "--tvm", "--tvm-self-test", "--exit-with-stdin"]
    command += ["--log-level", "off", "--tvm-tracker", f"{host}:{port}", "--key", "board", *tvm_model.SERVER_FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--workdir", folder]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        tracker = rpc.connect_tracker(host, port)
        for check in [lambda session: None, tvm_model.check]:
            until(lambda: free(tracker, "board") == 1)
            session = tracker.request("board", session_timeout=LIMIT)
            assert add_one(session) == 42 and free(tracker, "board") == 0
            check(session)
            del session
        until(lambda: free(tracker, "board") == 1)
        tvm_model.check_ours(f"tvm-tracker://{host}:{port}/board?priority=2")
        until(lambda: free(tracker, "board") == 1)
        assert "server:board" in [info["key"] for info in tracker.summary()["server_info"]]
        server.stdin.close()
        server.wait(LIMIT)
        until(lambda: free(tracker, "board") == 0)


def at_a_tracker_of_tvm():
    try:
        from tvm.rpc.tracker import Tracker
    except ImportError:
        demand_tools()
        print("SKIPPED: TVM's tracker needs the package tornado")
        return
    there = Tracker("127.0.0.1", random.randrange(20000, 31000), 32000, silent=True)
    registering("127.0.0.1", there.port)
    server = start_server("rasp", f"127.0.0.1:{there.port}")
    try:
        # It waits for the server, which is about to start.
        tvm_model.check_ours(f"tvm-tracker://127.0.0.1:{there.port}/rasp?timeout={LIMIT}")
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(LIMIT)
    there.terminate()


if __name__ == "__main__":
    main()
    registering(HOST, int(PORT))
    at_a_tracker_of_tvm()

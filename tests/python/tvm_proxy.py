"""Scenarios of TVM's own servers and clients at a relay with --tvm, and of servers of this project at TVM's proxy.

Run by rpc-server/tests/server/tvm_proxy.rs, with the programs rpc-server and rpc-cli as arguments.
"""

import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import tvm
import tvm_model
from tvm import rpc

RPC_SERVER, RPC_CLI = sys.argv[1:]
HOST = "127.0.0.1"
LIMIT = 60

SERVER = "import sys, tvm.rpc.testing; from tvm.rpc import server; server._connect_proxy_loop"
SERVER += f"(('{HOST}', int(sys.argv[1])), sys.argv[2], None)"

WEB_SERVER = "import sys, tvm.rpc.testing; from tvm.rpc import proxy; proxy.websocket_proxy_server"
WEB_SERVER += f"('ws://{HOST}:' + sys.argv[1] + '/ws', sys.argv[2])"

CLIENT = "import sys; from tvm import rpc; add = rpc.connect"
CLIENT += f"('{HOST}', int(sys.argv[1]), sys.argv[2]).get_function('rpc.test.addone'); print('begun', flush=True)\n"
CLIENT += "while True: add(1)"


def demand_tools():
    """Fail if what TVM's tracker and proxy need has been installed, and so must be found."""
    assert "RPC_TESTS_REQUIRE_TVM_TOOLS" not in os.environ, "there are neither tornado nor cloudpickle"


def until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.01)


@contextlib.contextmanager
def ours(command, *flags):
    """A program of this project. Yields the first port that it listens on."""
    words = [RPC_SERVER, command, "--tvm", "--exit-with-stdin", "--log-level", "off", *flags]
    listen = [] if "--tvm-proxy" in flags else ["--listen", f"tcp://{HOST}:0"]
    with subprocess.Popen([*words, *listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield int(process.stdout.readline().rpartition(":")[2]) if listen else None
        process.stdin.close()
        process.wait(LIMIT)


@contextlib.contextmanager
def server_of_ours(port, key):
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--tvm-self-test", "--tvm-proxy", f"{HOST}:{port}", "--key", key, "--workdir", folder]
        flags += tvm_model.SERVER_FLAGS
        with ours("serve", *flags):
            yield


@contextlib.contextmanager
def of_tvm(program, port, key):
    """A program of TVM with its processes, which end together."""
    words = [sys.executable, "-c", program, str(port), key]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def use(session):
    assert session.get_function("rpc.test.addone")(41) == 42
    assert session.get_function("rpc.test.strcat")("abc", 11) == "abc:11"
    elements = np.arange(100_000, dtype="float32")
    there = tvm.runtime.tensor(elements, session.cpu(0))
    assert (there.numpy() == elements).all()


def at_our_relay():
    with ours("relay") as port:
        with of_tvm(SERVER, port, "rasp"):
            for _ in range(2):
                use(rpc.connect(HOST, port, "rasp", session_timeout=LIMIT))
            # A client that is killed during its calls costs the server nothing.
            with of_tvm(CLIENT, port, "rasp") as client:
                assert client.stdout.readline() == "begun\n"
            session = rpc.connect(HOST, port, "rasp")
            use(session)
            tvm_model.check(session)
            # Both go by the server, which has one session at a time.
            del session
            command = [RPC_CLI, "call", f"tvm://{HOST}:{port}/rasp", "rpc.test.addone", "41"]
            printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout
            assert printed == "42\n", printed
            tvm_model.check_ours(f"tvm://{HOST}:{port}/rasp")
        with server_of_ours(port, "board"):
            for check in [use, tvm_model.check]:
                check(rpc.connect(HOST, port, "board", session_timeout=LIMIT))
            tvm_model.check_ours(f"tvm://{HOST}:{port}/board")
        try:
            import tornado  # noqa: F401
        except ImportError:
            demand_tools()
            print("SKIPPED: TVM's WebSocket server needs the package tornado")
            return
        with of_tvm(WEB_SERVER, port, "web"):
            use(rpc.connect(HOST, port, "web"))


def with_trackers():
    with ours("tracker") as port:
        with_a_tracker(port)
    try:
        from tvm.rpc.tracker import Tracker

        there = Tracker(HOST, random.randrange(20000, 31000), 32000, silent=True)
    except ImportError:
        demand_tools()
        print("SKIPPED: TVM's tracker needs the packages tornado and cloudpickle")
        return
    with_a_tracker(there.port)
    for tracker_port in [there.port, None]:
        with contextlib.ExitStack() as stack:
            a_proxy_of_tvm_with_a_tracker(tracker_port or stack.enter_context(ours("tracker")))
    there.terminate()


def a_proxy_of_tvm_with_a_tracker(tracker_port):
    """The proxy registers the servers that wait there, and its keys are what only proxies make."""
    from tvm.rpc.proxy import Proxy

    there = Proxy(HOST, random.randrange(20000, 31000), 32000, tracker_addr=(HOST, tracker_port))
    tracker = rpc.connect_tracker(HOST, tracker_port)

    def free():
        return tracker.summary()["queue_info"].get("rasp", {}).get("free", 0)

    with of_tvm(SERVER, there.port, "rasp"):
        until(lambda: free() == 1)
        session = tracker.request("rasp", session_timeout=LIMIT)
        use(session)
        del session
        until(lambda: free() == 1)
        tvm_model.check_ours(f"tvm-tracker://{HOST}:{tracker_port}/rasp")
    there.terminate()


def with_a_tracker(tracker_port):
    with ours("relay", "--tvm-tracker", f"{HOST}:{tracker_port}") as port:
        tracker = rpc.connect_tracker(HOST, tracker_port)

        def free():
            return tracker.summary()["queue_info"].get("rasp", {}).get("free", 0)

        with of_tvm(SERVER, port, "rasp"), of_tvm(SERVER, port, "rasp"):
            until(lambda: free() == 2)
            session = tracker.request("rasp", session_timeout=LIMIT)
            use(session)
            tvm_model.check(session)
            assert free() == 1
            del session
            until(lambda: free() == 2)
            tvm_model.check_ours(f"tvm-tracker://{HOST}:{tracker_port}/rasp")
            until(lambda: free() == 2)
        until(lambda: free() == 0)


def at_a_proxy_of_tvm():
    try:
        from tvm.rpc.proxy import Proxy

        there = Proxy(HOST, random.randrange(20000, 31000), 32000)
    except ImportError:
        demand_tools()
        print("SKIPPED: TVM's proxy needs the packages tornado and cloudpickle")
        return
    with server_of_ours(there.port, "board"):
        for check in [use, tvm_model.check]:
            check(rpc.connect(HOST, there.port, "board", session_timeout=LIMIT))
        tvm_model.check_ours(f"tvm://{HOST}:{there.port}/board")
    with of_tvm(SERVER, there.port, "rasp"):
        tvm_model.check_ours(f"tvm://{HOST}:{there.port}/rasp")
    there.terminate()


if __name__ == "__main__":
    # Clients of TVM wait without limit.
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    at_our_relay()
    with_trackers()
    at_a_proxy_of_tvm()

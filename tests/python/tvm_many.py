"""Two hundred and ten sessions of TVM's own client at one time, at a server with --tvm --tvm-self-test --key board.

    python tvm_many.py RPC_SERVER        (the program; with and without a process for each session)

A process of TVM has 32 sessions at most, so there are seven. Each opens its sessions and says so; once all are
open, each calls a function in every one of them.
"""

import subprocess
import sys
import tempfile

PROCESSES, SESSIONS = 7, 30
HOST = "127.0.0.1"
LIMIT = 300


def client(port):
    from tvm import rpc

    sessions = [rpc.connect(HOST, port, "board") for _ in range(SESSIONS)]
    functions = [session.get_function("rpc.test.addone") for session in sessions]
    print("open", flush=True)
    assert sys.stdin.readline() == "go\n"
    for number, add_one in enumerate(functions):
        assert add_one(number) == number + 1
    print("done", flush=True)


def serve(program, isolate):
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "serve", "--listen", f"tcp://{HOST}:0", "--tvm", "--tvm-self-test", "--key", "board"]
        command += ["--isolate", isolate, "--max-sessions", "1000", "--workdir", folder, "--exit-with-stdin"]
        command += ["--log-level", "off"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen(command, **pipes)
        port = server.stdout.readline().rpartition(":")[2].strip()
        words = [sys.executable, __file__, "client", port]
        clients = [subprocess.Popen(words, **pipes) for _ in range(PROCESSES)]
        for process in clients:
            assert process.stdout.readline() == "open\n"
        for process in clients:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in clients:
            assert process.communicate(timeout=LIMIT)[0] == "done\n" and process.returncode == 0
        server.communicate(timeout=LIMIT)
        print(f"{PROCESSES * SESSIONS} sessions at one time, --isolate {isolate}")


if __name__ == "__main__":
    if sys.argv[1] == "client":
        client(int(sys.argv[2]))
    else:
        for isolate in ["none", "process"]:
            serve(sys.argv[1], isolate)

#!/usr/bin/env python3
"""Copies over a long link with the kernel's TCP, or with QUIC:

    python3 tests/benches/long_link.py --bin target/release            (as root, on Linux)

Makes two network namespaces, each with a TUN device. This program is the link between them: it passes packets on at the rate
(--rate, in Mbit/s) and after half of the round trip (--delay, in ms), with a bounded queue in front. `rpc-server` runs in one of
the namespaces, and `rpc-bench long-link` in the other. Nothing of the machine's own network is touched.

The kernel bounds a TCP connection by what a socket may buffer. By default that is 4 MiB at the sender (tcp_wmem), so that 150 ms
cannot be filled; --buffers sets the limit in both namespaces, in MiB (0 leaves the default). The kernel moves packets of up to
--mtu bytes; with QUIC they are 1.5 kB, and this program cannot move more than some 20,000 a second: --rate 200 --delay 750 has as
much in flight as 1 Gbit/s with 150 ms.
"""

import argparse
import collections
import ctypes
import fcntl
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000

ADDRESSES = ["10.77.0.1", "10.77.0.2"]


class Namespace:
    """A process in a network namespace of its own, which runs programs there, and the TUN device in it."""

    def __init__(self, index, mtu, buffers):
        self.control, other = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.unshare(CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "unshare")
                tun = os.open("/dev/net/tun", os.O_RDWR)
                fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", b"tun0", IFF_TUN | IFF_NO_PI))
                for command in [
                    "ip link set lo up",
                    f"ip addr add {ADDRESSES[index]} peer {ADDRESSES[1 - index]} dev tun0",
                    f"ip link set dev tun0 mtu {mtu} txqueuelen 1000 up",
                ]:
                    subprocess.run(command.split(), check=True)
                if buffers:
                    for name in ["tcp_rmem", "tcp_wmem"]:
                        limits = f"4096 131072 {buffers << 20}"
                        pathlib.Path(f"/proc/sys/net/ipv4/{name}").write_text(limits, encoding="utf-8")
                socket.send_fds(other, [b"!"], [tun])
                os.close(tun)
                other.recv(1)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"namespace: {error}", file=sys.stderr)
            os._exit(0)
        other.close()
        _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not fds:
            sys.exit("cannot make a TUN device in a network namespace: this needs root and /dev/net/tun")
        self.tun = fds[0]
        self.namespace = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)

    def start(self, command, **options):
        def enter():
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(self.namespace, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

        return subprocess.Popen(command, preexec_fn=enter, pass_fds=[self.namespace], **options)

    def close(self):
        # A copy of the socket may be open in the other namespace's process, so that its end is not seen.
        self.control.send(b"!")
        os.waitpid(self.pid, 0)


class Direction:
    """Passes packets from one TUN device to the other."""

    def __init__(self, source, sink, one_way, bytes_per_second, queue):
        self.source, self.sink = source, sink
        self.one_way, self.bytes_per_second, self.queue = one_way, bytes_per_second, queue
        self.flight = collections.deque()
        self.arrival = threading.Semaphore(0)
        self.dropped = 0
        for target in [self.take, self.give]:
            threading.Thread(target=target, daemon=True).start()

    def take(self):
        free = 0.0
        while True:
            packet = os.read(self.source, 65536)
            now = time.monotonic()
            if free - now > self.queue:
                self.dropped += 1
                continue
            free = max(free, now) + len(packet) / self.bytes_per_second
            self.flight.append((free + self.one_way, packet))
            self.arrival.release()

    def give(self):
        while True:
            self.arrival.acquire()
            due, packet = self.flight.popleft()
            left = due - time.monotonic()
            if left > 0:
                time.sleep(left)
            try:
                os.write(self.sink, packet)
            except OSError:
                self.dropped += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"))
    parser.add_argument("--transport", choices=["tcp", "tls", "quic"], default="tcp")
    parser.add_argument("--delay", type=float, default=150, help="round trip in ms")
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s in each direction")
    parser.add_argument("--queue", type=float, default=100, help="most that a packet waits for the link, in ms")
    parser.add_argument("--buffers", type=int, default=64, help="limit of a socket's buffers, in MiB")
    parser.add_argument("--mtu", type=int, default=65000)
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # Threads switch at packets, and not after the default of 5 ms.
    sys.setswitchinterval(0.0002)
    sites = [Namespace(index, args.mtu, args.buffers) for index in range(2)]
    one_way, rate, queue = args.delay / 2e3, args.rate * 125e3, args.queue / 1e3
    lines = [Direction(sites[a].tun, sites[1 - a].tun, one_way, rate, queue) for a in range(2)]
    server = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            listen = ["--listen", f"{args.transport}://{ADDRESSES[0]}:9090", "--workdir", str(folder / "work")]
            trust = []
            if args.transport == "tcp":
                listen.append("--insecure")
            else:
                pki = folder / "pki"
                subprocess.run([args.bin / "rpc-cli", "cert", "--out", pki, "--host", ADDRESSES[0]], check=True,
                               stdout=subprocess.DEVNULL)
                listen += ["--cert", pki / "server.pem", "--cert-key", pki / "server.key", "--client-ca", pki / "ca.pem"]
                trust = ["--ca", pki / "ca.pem", "--cert", pki / "client.pem", "--cert-key", pki / "client.key"]
            server = sites[0].start([args.bin / "rpc-server", "serve", *listen], stdout=subprocess.PIPE, text=True)
            address = server.stdout.readline().split()[-1]
            bench = sites[1].start([
                args.bin / "rpc-bench", *trust, "long-link", address, "--delay", f"{round(args.delay)}ms",
                "--rate", str(args.rate), "--size", args.size, "--rounds", str(args.rounds),
            ])
            code = bench.wait()
            print(f"packets dropped at the link: {lines[0].dropped} and {lines[1].dropped}")
            return code
    finally:
        if server is not None:
            server.send_signal(signal.SIGTERM)
            server.wait()
        for site in sites:
            site.close()


if __name__ == "__main__":
    sys.exit(main())

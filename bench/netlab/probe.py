"""Measures a lab: the rate of one TCP stream from h1 to h0, and their round trip."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # This file is also run by itself, where no package can be imported.
    from bench.netlab.system import Result

_TRIPS = 25


class Hosts(Protocol):
    """What runs a command on two hosts or more, such as `bench.netlab.lab.Lab`."""

    def run(self, command: Sequence[str], *, timeout: float) -> list[Result]:
        """Returns what each rank has given."""


def measure(hosts: Hosts, seconds: float = 1.0) -> tuple[float, float]:
    """Mbit/s of payload in one TCP stream, and the median of round trips in ms."""
    results = hosts.run([sys.executable, "-I", "-S", __file__, str(seconds)], timeout=seconds + 60)
    for result in results:
        if result.returncode:
            raise RuntimeError(f"the probe's rank {result.rank} gave {result.returncode}, expected 0: {result.stderr}")
    return float(results[0].stdout), float(results[1].stdout)


def _receive(port: int) -> float:
    with socket.create_server(("h0", port)) as server:
        server.settimeout(30)
        peer, _ = server.accept()
    with peer:
        peer.settimeout(30)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIPS):
            peer.sendall(peer.recv(1))
        # Counted from the first byte on, so that the way to here is not taken for a slow one.
        size, start = len(peer.recv(1)), time.monotonic()
        while read := len(peer.recv(1 << 20)):
            size += read
        return size * 8e-6 / (time.monotonic() - start)


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("h0", port), timeout=30)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _send(port: int, seconds: float) -> float:
    trips = []
    with _connect(port) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIPS):
            start = time.monotonic()
            peer.sendall(b"x")
            peer.recv(1)
            trips.append(time.monotonic() - start)
        block, end = bytes(1 << 18), time.monotonic() + seconds
        while time.monotonic() < end:
            peer.sendall(block)
    return statistics.median(trips) * 1e3


def _main() -> None:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank < 2:
        print(_receive(port) if rank == 0 else _send(port, float(sys.argv[1])))


if __name__ == "__main__":
    _main()

"""Bytes that leave rank 0 for heartbeats while all ranks wait for one that does not come.

python -m bench.heartbeats [--ranks 64] [--timeout 30] [--output bench/results/heartbeats.json]

The ranks are threads of this process. Each has its own connection to a store of heartbeats, as in a job, and counts as the only
rank of a host. The kernel counts for each connection what has come through it (`TCP_INFO`). Each segment counts 66 bytes
more, for the headers of Ethernet, IPv4 and TCP. Needs Linux.
"""

from __future__ import annotations

import argparse
import functools
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.liveness_client import Client
from bagua_kernels.comm.failures.liveness_store import Host
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.joining import hello
from bagua_kernels.comm.joining.evidence import Process
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CollectiveTimeoutError

_FRAME = 66
_INFO = struct.Struct("@8B24I4Q2I")  # struct tcp_info of Linux, up to the number of segments that came in


class Standstill:
    """An operation that never moves, with the methods of torch's work."""

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        time.sleep(limit.total_seconds())
        raise RuntimeError("it is still under way")


def arrived(socks: Sequence[socket.socket]) -> int:
    """Returns the bytes that have come through connections, with headers."""
    total = 0
    for sock in socks:
        *_, received, _, segments = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
        total += received + _FRAME * segments
    return total


def measure(size: int, timeout: float, heartbeat: float) -> dict[str, float]:
    """Returns bytes a second: at rest, in a wait up to its timeout, at most in ten seconds of it, and a fault's bytes."""
    key = Secret.random()
    host = Host("127.0.0.1", key, size)
    host.wait_until_ready(60.0)
    socks = [hello.call(host.address, key, rank, 0, 0, 60.0) for rank in range(size)]
    processes = [Process(f"{rank:036d}/4026531836", 10_000 + rank, 123_456_789) for rank in range(size)]
    ranks = [
        Liveness(Client(sock), rank, size, heartbeat=heartbeat, process=processes[rank])
        for rank, sock in enumerate(socks)
    ]
    members, over, named = tuple(range(size)), threading.Event(), []

    def wait(rank: int) -> None:
        session = Session("world/sockets", timeout, rank, members, ranks[rank])
        number = session.enter("all_reduce", "synchronize()")
        work = SessionWork(session, Standstill(), "all_reduce", number, None, None, None)
        try:
            work.wait()
        except CollectiveTimeoutError as error:
            named.append(error.ranks)
        over.set()

    time.sleep(4 * heartbeat)
    begun = arrived(socks)
    time.sleep(10.0)
    rest = (arrived(socks) - begun) / 10.0
    threads = [threading.Thread(target=functools.partial(wait, rank), daemon=True) for rank in range(size - 1)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    points = [(0.0, arrived(socks))]
    # The wait proper: near its end the first diagnosis begins, which is a fault.
    while time.monotonic() - started < timeout - 2.5 * heartbeat and not over.is_set():
        time.sleep(0.25)
        points.append((time.monotonic() - started, arrived(socks)))
    for thread in threads:
        thread.join()
    time.sleep(4 * heartbeat)
    end = arrived(socks)
    windows = [(b1 - b0) / (t1 - t0) for t0, b0 in points for t1, b1 in points if 9.9 < t1 - t0 < 10.4]
    for rank in ranks:
        rank.stop("the measurement is over")
    host.close()
    if named != [(size - 1,)] * (size - 1):
        raise RuntimeError(f"expected all to name rank {size - 1}, got {named}")
    return {
        "rest": rest,
        "wait": (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]),
        "wait_most": max(windows),
        "fault": end - points[-1][1],
    }


def main(arguments: Sequence[str]) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of the wait")
    parser.add_argument("--heartbeat", type=float, default=0.5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    found = measure(options.ranks, options.timeout, options.heartbeat)
    print(
        f"{options.ranks} ranks: {found['rest'] / 1e3:.1f} kB/s out of rank 0 at rest, {found['wait'] / 1e3:.1f} kB/s while all "
        f"wait, at most {found['wait_most'] / 1e3:.1f} kB/s in 10 s of that; a fault {found['fault'] / 1e3:.0f} kB"
    )
    if options.output:
        told = {"ranks": options.ranks, "timeout": options.timeout, "heartbeat": options.heartbeat}
        options.output.write_text(json.dumps(told | found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

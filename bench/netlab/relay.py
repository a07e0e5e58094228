"""Delays the frames of the lab's links: a process of its own, which `bench.netlab` starts and ends.

A link with a delay is two TAP devices instead of a veth pair, since many kernels come without the qdisc netem. This
process makes them inside their namespaces and carries frames from one to the other: from a host to the switch after the
delay, back at once, so that two hosts are one delay apart. Segments that were left to the hardware to cut up pass whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from typing import TypedDict

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04

_LARGEST_FRAME = 70_000
_HELD = 64 << 20  # bytes that a link holds back at most; more are lost
_TURN = 32  # frames that are read from a device before the next has its turn


class Links(TypedDict):
    """What to do, as JSON on the command line.

    Attributes:
        pairs: for each link the namespace and name of the host's device, then those of the switch's.
        delay: seconds from host to switch.
        jitter: at most so many seconds more or less, uniformly.
        loss: the share of frames from host to switch that is lost. A frame may be a segment of several packets.
    """

    pairs: list[tuple[str, str, str, str]]
    delay: float
    jitter: float
    loss: float


def _enter(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _tap(namespace: str, name: str) -> int:
    """Makes a TAP device in a namespace; it exists as long as the file that is returned."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _enter(file)
    os.close(file)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return tap


def _put(tap: int, frame: bytes) -> None:
    # A device that is down refuses frames: they are lost, as on a wire.
    with contextlib.suppress(OSError):
        os.write(tap, frame)


class _Line:
    """One direction of a link with a delay: frames and when each is due."""

    def __init__(self, to: int, links: Links) -> None:
        self.to = to
        self.delay, self.jitter, self.loss = links["delay"], links["jitter"], links["loss"]
        self.frames: deque[tuple[float, bytes]] = deque()
        self.held = 0

    def take(self, frame: bytes) -> None:
        if self.held + len(frame) > _HELD or (self.loss and random.random() < self.loss):
            return
        due = time.monotonic() + self.delay
        if self.jitter:
            # Frames never overtake each other: TCP takes another order for loss.
            due = max(due + random.uniform(-self.jitter, self.jitter), self.frames[-1][0] if self.frames else 0.0)
        self.frames.append((due, frame))
        self.held += len(frame)

    def deliver(self) -> None:
        now = time.monotonic()
        while self.frames and self.frames[0][0] <= now:
            frame = self.frames.popleft()[1]
            self.held -= len(frame)
            _put(self.to, frame)


def carry(taps: list[tuple[int, int]], links: Links, owner: int) -> None:
    """Carries frames until the other end of the pipe `owner` is closed or the devices are gone."""
    back = {switch: host for host, switch in taps}
    lines = {host: _Line(switch, links) for host, switch in taps}
    files = [owner, *back, *lines]
    while True:
        due = min((line.frames[0][0] for line in lines.values() if line.frames), default=None)
        # Neither poll nor epoll takes less than a millisecond.
        ready, _, _ = select.select(files, [], [], None if due is None else max(0.0, due - time.monotonic()))
        if owner in ready:
            return
        for tap in ready:
            for _ in range(_TURN):
                try:
                    frame = os.read(tap, _LARGEST_FRAME)
                except BlockingIOError:
                    break
                if tap in lines:
                    lines[tap].take(frame)
                else:
                    _put(back[tap], frame)
        for line in lines.values():
            line.deliver()


def main() -> None:
    links: Links = json.loads(sys.argv[1])
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    taps = [(_tap(host, name), _tap(switch, port)) for host, name, switch, port in links["pairs"]]
    # This process leaves the host's namespace, so that it is not ended with the processes there.
    _enter(home)
    # A late relay is more delay than was asked for; where this is not permitted, it competes with the ranks.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    carry(taps, links, sys.stdin.fileno())


if __name__ == "__main__":
    main()

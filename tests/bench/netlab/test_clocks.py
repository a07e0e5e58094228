"""Where the lab counts seconds: its relay holds frames back, and its probe turns bytes and seconds into a rate."""

from __future__ import annotations

import random
import select
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from bench.netlab import probe as netlab_probe
from bench.netlab import relay as netlab_relay
from tests import limits
from tests.clocks import VirtualClock


class Devices:
    """The two ends of one link, whose frames a relay carries by a clock that moves only while the relay waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay: float, jitter: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.arrived: list[tuple[float, bytes]] = []
        self.host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.switch, outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.owner, mine = socket.socketpair()
        self._sockets = [self.host, inside, self.switch, outside, self.owner, mine]
        for each in self._sockets[:4]:
            each.setblocking(False)
        self._taps = [(inside.fileno(), outside.fileno())]
        self._links = netlab_relay.Links(pairs=[], delay=delay, jitter=jitter, loss=0.0)
        self._mine = mine
        monkeypatch.setattr(netlab_relay, "time", self.clock)
        monkeypatch.setattr(netlab_relay, "select", SimpleNamespace(select=self._select))
        self.later: list[tuple[float, bytes]] = []

    def _select(self, files: list[int], *others: Any) -> tuple[list[int], list[int], list[int]]:
        """Lets the clock jump to the next event: a frame that is due, or one that the host sends."""
        self._take()
        ready = select.select(files, [], [], 0)
        due = others[2]
        if ready[0]:
            return ready
        moments = [] if due is None else [self.clock.now + due]
        if self.later:
            moments.append(self.later[0][0])
        if not moments:
            self.owner.close()
            return select.select(files, [], [], limits.seconds(20))
        self.clock.now = min(moments)
        while self.later and self.later[0][0] <= self.clock.now:
            self.host.send(self.later.pop(0)[1])
        return select.select(files, [], [], 0)

    def _take(self) -> None:
        while select.select([self.switch], [], [], 0)[0]:
            self.arrived.append((self.clock.now, self.switch.recv(100)))

    def carry(self, frames: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
        """Carries frames that the host sends at some times; returns when each has arrived at the switch."""
        self.later = frames
        netlab_relay.carry(self._taps, self._links, self._mine.fileno())
        self._take()
        for each in self._sockets:
            each.close()
        return self.arrived


def test_relay_holds_frames_back_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [(0.0, b"a"), (0.003, b"b"), (0.1, b"c")]
    arrived = Devices(monkeypatch, delay=0.005).carry(list(sent))
    assert [frame for _, frame in arrived] == [b"a", b"b", b"c"]
    assert [at for at, _ in arrived] == pytest.approx([at + 0.005 for at, _ in sent])


def test_relay_keeps_the_order_under_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that follow one another closely wait for those before them; the others are held back for what was drawn."""
    monkeypatch.setattr(netlab_relay, "random", random.Random(0))
    sent = [(n * 1e-4 if n < 100 else 0.02 * n, bytes([n])) for n in range(150)]
    arrived = Devices(monkeypatch, delay=0.005, jitter=0.004).carry(list(sent))
    assert [frame for _, frame in arrived] == [frame for _, frame in sent]
    held = [end - begin for (end, _), (begin, _) in zip(arrived, sent, strict=True)]
    assert 0.001 <= min(held) < 0.005 < max(held) <= 0.009 + 1e-9


def test_probe_counts_payload_and_the_median_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 Mbit/s and 10 ms, by a clock that the other side moves; one round trip takes a second."""
    clock, trips = VirtualClock(), iter([1.0, *[0.010] * 24])
    chunks = iter([(1, 0.0)] * 25 + [(1, 0.5)] + [(125_000, 0.010)] * 50 + [(0, 0.0)])

    class Peer:
        def __enter__(self) -> Peer:
            return self

        def __exit__(self, *_: object) -> None: ...
        def settimeout(self, limit: float) -> None: ...
        def setsockopt(self, *option: int) -> None: ...

    class Sender(Peer):
        def recv(self, most: int) -> bytes:
            size, took = next(chunks)
            clock.sleep(took)
            assert size <= most
            return bytes(size)

        def sendall(self, data: bytes) -> None:
            assert data == b"\0"

    class Receiver(Peer):
        def recv(self, most: int) -> bytes:
            clock.sleep(next(trips))
            return b"x"

        def sendall(self, data: bytes) -> None:
            if len(data) > 1:
                clock.sleep(0.25)
                blocks.append(len(data))

    class Server(Peer):
        def accept(self) -> tuple[Peer, None]:
            return Sender(), None

    blocks: list[int] = []
    fake = SimpleNamespace(
        create_server=lambda _: Server(), create_connection=lambda *_, **__: Receiver(), IPPROTO_TCP=0, TCP_NODELAY=0
    )
    monkeypatch.setattr(netlab_probe, "socket", fake)
    monkeypatch.setattr(netlab_probe, "time", clock)
    assert netlab_probe._receive(1) == pytest.approx(100, rel=1e-3)
    assert netlab_probe._send(1, seconds=1.0) == pytest.approx(10)
    assert blocks == [1 << 18] * 4

"""A clock for heartbeats, on which no rank falls silent because the machine is busy."""

from __future__ import annotations

import threading

from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.records import Records


class HeartbeatClock:
    """A clock that goes on by one period when every rank has sent a heartbeat since it last did."""

    period = 0.02  # seconds

    def __init__(self, size: int) -> None:
        self._size = size
        self._members: list[Liveness] = []
        self._before: list[int] = []
        self._periods = 0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            beats = [member._beats for member in self._members]
            if len(beats) == self._size and all(n > before for n, before in zip(beats, self._before, strict=True)):
                self._periods, self._before = self._periods + 1, beats
            return self._periods * self.period

    def join(self, store: Records, rank: int) -> Liveness:
        """Starts the heartbeats of a rank."""
        member = Liveness(store, rank, self._size, heartbeat=self.period, clock=self)
        with self._lock:
            self._members.append(member)
            self._before.append(0)
        return member

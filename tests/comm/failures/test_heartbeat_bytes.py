"""How many bytes leave rank 0 for heartbeats when all ranks wait, with a clock of our own."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from bagua_kernels.comm.failures.diagnose import FailedOperation
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.liveness_server import LENGTH
from bagua_kernels.comm.failures.records import Records
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.stillness import Stillness
from bagua_kernels.comm.joining.evidence import Process
from tests.clocks import VirtualClock

SIZE, BEAT, TIMEOUT, LOOK = 64, 0.5, 60.0, 1.0
FRAME = 66  # bytes of Ethernet, IPv4 and TCP around an answer
MOST = 40_000  # bytes a second


class Counted(Records):
    """A store that counts the bytes of its answers in each second, as the server sends them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(SIZE, clock.monotonic)
        self.virtual = clock
        self.sent: Counter[int] = Counter()

    def beat(self, *arguments: Any) -> Any:
        answer = super().beat(*arguments)
        text = json.dumps({"value": answer}, separators=(",", ":"))
        self.sent[int(self.virtual.now)] += LENGTH + len(text) + FRAME
        return answer


def test_ranks_that_all_wait_cost_rank_0_little() -> None:
    """From the start to the timeout, on hosts of their own; a fault costs more for a moment, and names the rank."""
    clock = VirtualClock()
    store = Counted(clock)
    ranks = [
        Liveness(
            store, rank, SIZE, heartbeat=BEAT, clock=clock.monotonic, background=False,
            process=Process(f"{rank:036d}/4026531836", 10_000 + rank, 123_456_789),
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    sessions = [Session("world/sockets", TIMEOUT, rank, tuple(range(SIZE)), ranks[rank]) for rank in range(SIZE)]
    stills = [Stillness(0.0) for _ in ranks]
    for rank in ranks[:-1]:
        rank.entered("world/sockets", 7, "all_reduce", "synchronize()")
    while all(session.left(0.0, clock.now) > LOOK for session in sessions):
        for session, still, liveness in zip(sessions, stills, ranks, strict=True):
            if not clock.now % LOOK:
                assert not session.reported()
                session.look(still, None, 0, clock.now)
            liveness.beat()
        clock.now += BEAT
    assert all(still.since() < 2 * BEAT for still in stills)  # what has not moved puts nothing off
    seconds = [store.sent[second] for second in range(int(clock.now))]
    assert all(sum(seconds[at : at + 10]) <= 10 * MOST for at in range(len(seconds) - 10)), seconds
    case = FailedOperation("world/sockets", range(SIZE), 7, "all_reduce", clock.now, timed_out=True)
    for liveness in ranks:
        liveness.inquire()
        liveness.beat()
    found = ranks[3].diagnosis(case)
    assert found is not None
    assert (found.kind, found.ranks) == ("late", (SIZE - 1,))

"""Kernels are compiled in the first steps: that is no communication, and is not counted as such."""

import threading

import pytest

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.engine import runtime
from bagua_kernels.algorithms.exchanges.mean import Mean
from bagua_kernels.comm import run_ranks
from bagua_kernels.jit import compiling
from tests import limits
from tests.algorithms.ranks import train
from tests.clocks import VirtualClock

pytestmark = pytest.mark.compiled

COMPILATION = 0.5


def test_wait_seconds_leave_compilation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's training waits while its communication thread compiles a kernel, which alone takes time."""
    clock, waiting = VirtualClock(), [threading.Event(), threading.Event()]
    monkeypatch.setattr(compiling, "time", clock)
    monkeypatch.setattr(runtime, "time", clock)
    read = compiling.clock

    def begin_to_wait() -> float:
        now = read()
        waiting[int(threading.current_thread().name.removeprefix("rank "))].set()
        return now

    monkeypatch.setattr(compiling, "clock", begin_to_wait)

    class Compiles(GradientAllReduce):
        def exchange_for(self, bucket, communicator):
            class Compiled(Mean):
                def run(self, step):
                    assert waiting[communicator.rank].wait(limits.seconds(20))
                    compiling.begin("folder")
                    clock.sleep(COMPILATION)
                    compiling.end()
                    yield from super().run(step)

            return Compiled(bucket, communicator)

    def rank(communicator):
        _, algorithm = train(communicator, Compiles, steps=1)
        return algorithm.stats()

    for stats in run_ranks(2, rank):
        assert stats.exchange_seconds >= COMPILATION
        assert stats.wait_seconds == 0

"""Kernels are compiled in the first steps: that is no communication, and is not counted as such."""

import time

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.gradient_all_reduce import Mean
from bagua_kernels.comm import run_ranks
from bagua_kernels.jit import compiling
from tests.algorithms.ranks import train

COMPILATION = 0.4


class Compiles(GradientAllReduce):
    """Its communication thread compiles a kernel before it exchanges anything."""

    def exchange_for(self, bucket, communicator):
        class Compiled(Mean):
            def run(self, step):
                compiling.begin("folder")
                time.sleep(COMPILATION)
                compiling.end()
                yield from super().run(step)

        return Compiled(bucket, communicator)


def test_wait_seconds_leave_compilation_out() -> None:
    def rank(communicator):
        _, algorithm = train(communicator, Compiles, steps=1)
        return algorithm.stats()

    for stats in run_ranks(2, rank):
        assert stats.exchange_seconds >= COMPILATION
        assert stats.wait_seconds < COMPILATION

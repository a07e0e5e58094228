"""Ranks of several nodes as processes over sockets, with many sums under way at a time."""

from __future__ import annotations

import os

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.comm.hierarchical.communicator import TieredCommunicator
from bagua_kernels.comm.hierarchical.nodes import Nodes
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.compression import MinMaxUInt8
from tests import limits

SIZE = 4
SUMS, ROUNDS = 3, 3
N = 3_500_000  # of float32, in three pieces


def begin(communicator: Communicator, vector: torch.Tensor) -> Work:
    """Begins a sum; ranks with odd numbers wait for it before they begin the next, and the others do not."""
    work = communicator.all_reduce(vector)
    if communicator.rank % 2:
        work.wait()
    return work


def many_sums() -> None:
    """Exact sums of vectors of several pieces, some under way at a time, with a compressed one among them."""
    torch.set_num_threads(1)
    os.environ["BAGUA_KERNELS_NODE"] = f"node {int(os.environ['RANK']) // 2}"
    world = comm.init(timeout=limits.seconds(60))
    nodes = Nodes.find(world)
    assert [list(node) for node in nodes.members] == [[0, 1], [2, 3]]
    communicator = TieredCommunicator(world.duplicate(), nodes)
    compressed = communicator.all_reduce_for(MinMaxUInt8(), N, 0, torch.float32)
    for number in range(ROUNDS):
        vectors = [torch.full((N + place,), float(communicator.rank + place)) for place in range(2 * SUMS)]
        same = torch.full((N,), float(number))
        works = [begin(communicator, vector) for vector in vectors[:SUMS]]
        compressed(same, seed=number)
        works += [begin(communicator, vector) for vector in vectors[SUMS:]]
        for work in works:
            work.wait()
        for place, vector in enumerate(vectors):
            expected = sum(range(SIZE)) + SIZE * place
            assert bool((vector == expected).all()), (number, place)
        assert bool((same == number).all())
    communicator.close()
    comm.shutdown()
    print("FINE", flush=True)


@pytest.mark.slow
def test_many_sums_at_a_time() -> None:
    for result in run_processes(many_sums, SIZE, timeout=limits.seconds(110)):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr[-3000:]

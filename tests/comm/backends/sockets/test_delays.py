"""How many delays and bytes collectives take among many ranks on long lines, by a clock of their own."""

from __future__ import annotations

import functools
import math
from functools import partial

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.sockets import costs
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.costs import Line, fitted
from bagua_kernels.comm.backends.sockets.tuning import EVER, WAYS, Tuning
from bagua_kernels.comm.work import Work
from tests.comm.backends.sockets.simulated import Network
from tests.comm.values import check, oracle, same, values
from tests.grids import grid

MANY, DELAY = 64, 0.05
LONG = Line(DELAY, 12.5e6, message=0.0)


@functools.cache
def zeros(n: int) -> torch.Tensor:
    """Returns the same memory at each call."""
    return torch.zeros(n)


def start(operation: str, nbytes: int, c: StripedCommunicator) -> Work:
    """Starts a collective on memory that all ranks share, since its contents do not matter."""
    few = zeros(nbytes // 4)
    if operation == "all_reduce":
        return c.all_reduce(few)
    if operation == "broadcast":
        return c.broadcast(few, 1)
    if operation == "barrier":
        return c.barrier()
    many = zeros(nbytes // 4 * c.size)
    return c.all_gather(many, few) if operation == "all_gather" else c.reduce_scatter(few, many)


@pytest.mark.parametrize("nbytes", [16 << 10, pytest.param(10 << 20, marks=pytest.mark.slow)])
def test_an_all_reduce_of_many_ranks_waits_for_few_delays(nbytes: int) -> None:
    """By the ways that are taken by default: 14 delays for 16 KiB, and 2 log2 P beside the bytes for 10 MiB."""
    network = Network(MANY, LONG, copy=False)
    took = network.seconds(partial(start, "all_reduce", nbytes))
    least = 2 * (MANY - 1) / MANY * nbytes / LONG.rate
    if nbytes == 16 << 10:
        assert took <= 14 * DELAY
    else:
        assert took - least <= 2 * math.log2(MANY) * DELAY, (took, least)
    assert max(network.sent) <= 1.01 * 2 * (MANY - 1) / MANY * nbytes


@grid(
    cover=1, size=[13, 16], operation=sorted(set(WAYS) - {"all_to_all"}), line=[LONG, Line(1e-4, 1.25e9, message=0.0)]
)
def test_predictions_are_what_the_code_does(operation: str, size: int, line: Line) -> None:
    """Each way, with its delays and its bytes; the choice rests on that."""
    for way in WAYS[operation]:
        for nbytes in (1 << 10, 1 << 17):
            if way == "base" or (operation == "barrier" and nbytes > 1 << 10):
                continue
            network = Network(size, line, Tuning(**{operation: ((EVER, way),)}), copy=False)  # type: ignore[arg-type]
            took = network.seconds(partial(start, operation, nbytes))
            told = costs.seconds(operation, way, size, 0 if operation == "barrier" else nbytes, line)
            assert 0.6 * told <= took <= 1.25 * told, (way, nbytes, took, told)
            assert max(network.sent) <= 1.05 * costs.bytes_sent(operation, way, size, nbytes) + 4 * size, (way, nbytes)


@grid(cover=1, size=[5, 13, 24], way=[way for way in WAYS["all_reduce"] if way != "base"])
def test_sums_of_many_ranks(size: int, way: str) -> None:
    """The same bits on all ranks."""
    tensors = [values(rank, 1003, torch.float32) for rank in range(size)]
    expected = oracle(tensors, ReduceOp.AVG)
    network = Network(size, LONG, Tuning(all_reduce=((EVER, way),), piece=2000, link=200))
    network.seconds(lambda c: c.all_reduce(tensors[c.rank], ReduceOp.AVG))
    check(tensors[0], expected)
    assert all(same(tensor, tensors[0]) for tensor in tensors)


def test_few_ranks_on_short_lines_keep_the_measured_table() -> None:
    """More ranks, or longer lines, get a table by what ways cost, in which a ring is for large tensors on short lines."""
    assert fitted(8, Line.measured(60e-6)) == Tuning()
    assert fitted(2, Line.measured(0.0)) == Tuning()
    near, far = fitted(MANY, Line.measured(60e-6)), fitted(MANY, Line.measured(DELAY))
    assert [near.way("all_reduce", 1 << shift) for shift in (14, 20, 30)] == ["doubling", "halving", "ring"]
    assert [far.way("all_reduce", 1 << shift) for shift in (14, 20, 30)] == ["direct", "direct", "halving"]
    assert (near.way("barrier", 0), far.way("barrier", 0)) == ("rounds", "direct")


@pytest.mark.parametrize("size", [9, 64, 1000])
def test_no_small_tensor_goes_to_everybody(size: int) -> None:
    """A rank sends what log2 P messages take, or twice the tensor in parts."""
    for delay in (1e-4, 1e-2, 0.1):
        table = fitted(size, Line.measured(delay))
        for nbytes in (1 << shift for shift in range(10, 31)):
            sent = costs.bytes_sent("all_reduce", table.way("all_reduce", nbytes), size, nbytes)
            assert sent <= (costs.rounds(size) + 1) * nbytes


def test_delays_are_rounded_so_that_another_start_takes_the_same_ways() -> None:
    assert Line.measured(0.04) == Line.measured(0.2)
    assert Line.measured(0.0) == Line.measured(90e-6) == Line.measured(2e-4)
    assert Line.measured(3e-3).delay == 1e-3

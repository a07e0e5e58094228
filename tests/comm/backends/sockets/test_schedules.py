"""Every way of every collective among 2 to 9 and 16 ranks, against NumPy; the ranks are loops in one process."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch

from bagua_kernels.comm.backends.sockets import schedules
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.schedules import Ranks, chunks, cut
from bagua_kernels.comm.backends.sockets.scratch import Scratch
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfers, signature
from bagua_kernels.comm.reduction import ReduceOp, reduce_in_order
from tests import limits
from tests.comm.values import bits, check, oracle, same, values
from tests.grids import grid

WAYS = {
    "exchange": schedules.exchange,
    "doubling": schedules.doubling,
    "direct": schedules.direct,
    "halving": schedules.halving,
    "ring": schedules.ring,
}
RANKS = (2, 3, 4, 5, 6, 7, 8, 9, 16)
KINDS = (
    (torch.float32, ReduceOp.SUM),
    (torch.float32, ReduceOp.AVG),
    (torch.bfloat16, ReduceOp.AVG),
    (torch.bfloat16, ReduceOp.MAX),
    (torch.int64, ReduceOp.SUM),
    (torch.bool, ReduceOp.BOR),
)


class World:
    """Some ranks, and one operation after the other among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.everyone = range(size)
        self.sent = [0] * size
        links: list[dict[int, list[socket.socket]]] = [{} for _ in self.everyone]
        for low, high in itertools.combinations(self.everyone, 2):
            links[low][high], links[high][low] = ([end] for end in socket.socketpair())
        self.ranks = [Ranks(rank, size) for rank in self.everyone]
        self.loops = [Loop(f"rank {rank}", links[rank], self.counter(rank)) for rank in self.everyone]
        self.numbers = itertools.count()

    def counter(self, rank: int) -> Callable[[int], None]:
        """Adds up what a rank sends."""

        def count(n: int) -> None:
            self.sent[rank] += n

        return count

    def start(self, lanes: Callable[[int], list[Callable[[Lane], Transfers]]], window: int = 3) -> list[Operation]:
        """Starts an operation whose lanes on a rank are `lanes(rank)`."""
        number = next(self.numbers)
        works = [Operation("barrier", number, signature("barrier"), iter(lanes(r)), window) for r in self.everyone]
        for loop, work in zip(self.loops, works, strict=True):
            loop.submit(work)
        return works

    def run(self, lanes: Callable[[int], list[Callable[[Lane], Transfers]]], window: int = 3) -> None:
        """Starts an operation and waits for it."""
        finish(self.start(lanes, window))

    def all_reduce(self, way: str, parts: list[torch.Tensor], op: ReduceOp) -> list[torch.Tensor]:
        """Returns the result of every rank."""
        outputs = [part.clone() for part in parts]
        self.run(lambda rank: [partial(WAYS[way], self.ranks[rank], outputs[rank], op)])
        return outputs


def finish(works: list[Operation]) -> None:
    """Waits for an operation on all ranks."""
    for work in works:
        work.wait(timedelta(seconds=limits.seconds(10)))


@contextlib.contextmanager
def ranks(size: int) -> Iterator[World]:
    """A world whose loops are stopped in the end."""
    world = World(size)
    try:
        yield world
    finally:
        for loop in world.loops:
            loop.stop("over")


def sizes(size: int) -> list[int]:
    """Few elements, and numbers around multiples of the ranks."""
    return sorted({0, 1, 2, 3, 4, 5, size - 1, size, size + 1, 3 * size - 1, 3 * size, 3 * size + 1, 1013})


@grid(way=list(WAYS), size=RANKS, cover=1)
def test_all_reduce(way: str, size: int) -> None:
    """Every number of elements and every kind of number, the same bits on all ranks."""
    with ranks(size) as world:
        for i, n in enumerate(sizes(size)):
            # A kind for each number of elements, and all of them for the largest.
            for dtype, op in KINDS if n == 1013 else (KINDS[i % len(KINDS)], KINDS[(i + way.count("i")) % len(KINDS)]):
                parts = [values(r, n, dtype, salt=i) for r in range(size)]
                results = world.all_reduce(way, parts, op)
                check(results[0], oracle(parts, op))
                assert all(same(result, results[0]) for result in results), (way, size, n, dtype, op)


@grid(cover=1, way=["exchange", "direct"])
def test_ways_in_which_one_rank_reduces_do_so_in_rank_order(way: str) -> None:
    """Bit for bit what the ranks as threads compute."""
    with ranks(5) as world:
        for dtype, op in ((torch.float32, ReduceOp.AVG), (torch.float16, ReduceOp.AVG), (torch.bfloat16, ReduceOp.SUM)):
            parts = [values(r, 999, dtype) for r in range(5)]
            expected = reduce_in_order(parts, op)
            assert all(same(result, expected) for result in world.all_reduce(way, parts, op))


@grid(way=list(WAYS), size=[2, 3, 5, 8], cover=1)
def test_special_values_have_the_same_bits_on_all_ranks(way: str, size: int) -> None:
    """NaNs that differ in their payload and sign, infinities of both signs, zeros of both signs."""
    patterns = torch.tensor(
        [0x7FC00001, 0x7FC00ABC, -0x3FFFF1, 0x7F800000, -0x800000, 0, -0x80000000, 0x3F800000], dtype=torch.int32
    )
    generator = torch.Generator().manual_seed(size)
    with ranks(size) as world:
        for n in (1, 37, 1003):
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN):
                parts = [
                    patterns[torch.randint(0, len(patterns), (n,), generator=generator)].view(torch.float32)
                    for _ in range(size)
                ]
                results = world.all_reduce(way, parts, op)
                assert all(same(result, results[0]) for result in results), (n, op)
                stacked = torch.stack(parts).double()
                if op in (ReduceOp.SUM, ReduceOp.AVG):
                    expected = stacked.sum(0) / (size if op is ReduceOp.AVG else 1)
                    torch.testing.assert_close(results[0].double(), expected, equal_nan=True)
            halves = [torch.tensor([0x7E01 + r, -0x1F0 + r, 0x7C00], dtype=torch.int16).repeat(9) for r in range(size)]
            for dtype in (torch.float16, torch.bfloat16):
                results = world.all_reduce(way, [half.view(dtype) for half in halves], ReduceOp.SUM)
                assert len(set(map(bits, results))) == 1


@grid(way=list(WAYS), size=[2, 3, 16], cover=1)
def test_average_of_large_halves(way: str, size: int) -> None:
    """float16 divides before it sums."""
    with ranks(size) as world:
        for n in (1, 5, 100):
            parts = [torch.full((n,), 60000.0, dtype=torch.float16)] * size
            for result in world.all_reduce(way, parts, ReduceOp.AVG):
                torch.testing.assert_close(result, parts[0], rtol=2e-2, atol=0)


@grid(cover=1, size=RANKS)
def test_reduce_scatter_and_reduce(size: int) -> None:
    """In rank order, wherever the output lies; inputs, and other ranks' tensors, stay as they are."""
    with ranks(size) as world:
        for i, n in enumerate((1, 2, 5, size, 1013)):
            dtype, op = KINDS[i % len(KINDS)]
            parts = [values(r, n * size, dtype) for r in range(size)]
            inputs, outputs = [part.clone() for part in parts], [torch.empty(n, dtype=dtype) for _ in range(size)]
            expected = reduce_in_order(parts, op)
            split = [x.view(size, -1).unbind(0) for x in inputs]
            world.run(lambda r: [partial(schedules.reduce_scatter, world.ranks[r], outputs[r], split[r], op)])  # noqa: B023
            assert same(torch.cat(outputs), expected)
            assert all(same(*pair) for pair in zip(inputs, parts, strict=True))
            in_place = [part.clone() for part in parts]
            slots = [x[r * n : (r + 1) * n] for r, x in enumerate(in_place)]
            rows = [[x[s * n : (s + 1) * n] for s in range(size)] for x in in_place]
            world.run(lambda r: [partial(schedules.reduce_scatter, world.ranks[r], slots[r], rows[r], op)])  # noqa: B023
            assert same(torch.cat(slots), expected)
            root = n % size
            tensors = [part.clone() for part in parts]
            world.run(lambda r: [partial(schedules.rooted_reduce, world.ranks[r], root, tensors[r], op)])  # noqa: B023
            assert same(tensors[root], expected)
            assert all(same(tensors[r], parts[r]) for r in range(size) if r != root)


@grid(cover=1, size=RANKS)
def test_rings_and_rounds(size: int) -> None:
    """Reduce-scatter and all-gather around a ring, all-to-all in rounds: at any size, in pieces, and in place."""
    with ranks(size) as world:
        everyone = range(size)
        for i, n in enumerate((1, 2, 5, 101)):
            dtype, op = KINDS[i]
            wide = [values(r, n * size, dtype) for r in everyone]
            expected = oracle(wide, op)
            inputs = [[part.clone() for part in x.view(size, n)] for x in wide]
            for outputs in ([torch.empty(n, dtype=dtype) for _ in everyone], [inputs[r][r] for r in everyone]):
                ring = schedules.ring_reduce_scatter
                world.run(
                    lambda r: [
                        partial(ring, world.ranks[r], outputs[r][p], [x[p] for x in inputs[r]], op)  # noqa: B023
                        for p in cut(n, 40)  # noqa: B023
                    ]
                )
                check(torch.cat(outputs), expected)
            assert all(same(inputs[r][s], wide[r][s * n : s * n + n]) for r in everyone for s in everyone if r != s)
            mine = [values(r, n, dtype) for r in everyone]
            got = [[torch.empty(n, dtype=dtype) for _ in everyone] for _ in everyone]
            got[0][0] = mine[0]
            world.run(lambda r: [partial(schedules.ring_all_gather, world.ranks[r], got[r], mine[r])])  # noqa: B023
            assert all(same(torch.cat(row), torch.cat(mine)) for row in got)
            got = [[torch.empty(n, dtype=dtype) for _ in everyone] for _ in everyone]
            sent = [list(x.view(size, n)) for x in wide]
            world.run(lambda r: [partial(schedules.all_to_all, world.ranks[r], got[r], sent[r])])  # noqa: B023
            assert all(same(got[r][s], sent[s][r]) for r in everyone for s in everyone)


@grid(cover=1, size=[2, 3, 8], way=["direct", "halving", "ring"])
def test_frugal_ways_send_no_more_than_they_must(way: str, size: int) -> None:
    """2 (n - 1) / n of the tensor on each rank, also where the ranks are no power of two."""
    with ranks(size) as world:
        world.all_reduce(way, [torch.zeros(240)] * size, ReduceOp.SUM)
        assert world.sent == [2 * (size - 1) * 240 * 4 // size] * size


@grid(way=list(WAYS), window=[1, 2, 7], cover=1)
def test_pieces_and_operations_under_way_at_once(way: str, window: int) -> None:
    """Many pieces of many tensors do not mix, whatever the window."""
    with ranks(3) as world:
        x = [[values(r, 500, torch.float32, salt=i) for i in range(6)] for r in range(3)]
        expected = [oracle([x[r][i] for r in range(3)], ReduceOp.SUM) for i in range(6)]
        works = [
            world.start(
                lambda r: [partial(WAYS[way], world.ranks[r], x[r][i][part], ReduceOp.SUM) for part in cut(500, 37)],  # noqa: B023
                window,
            )
            for i in range(6)
        ]
        for work in reversed(works):
            finish(work)
        for r, i in itertools.product(range(3), range(6)):
            check(x[r][i], expected[i])


@grid(cover=1, size=[2, 5])
def test_chain_and_star_broadcast(size: int) -> None:
    """From every rank."""
    with ranks(size) as world:
        for source in range(size):
            x = [values(r, 333, torch.float32) for r in range(size)]
            world.run(lambda r: [partial(schedules.chain, world.ranks[r], source, x[r][p]) for p in cut(333, 50)])  # noqa: B023
            assert all(same(one, values(source, 333, torch.float32)) for one in x)
            x = [values(r, 333, torch.float32) for r in range(size)]
            world.run(
                lambda r: [partial(schedules.star, world.ranks[r], source, [x[r]], [x[r]] * size, inward=False)]  # noqa: B023
            )
            assert all(same(one, values(source, 333, torch.float32)) for one in x)


@grid(cover=1, size=RANKS)
def test_rounds(size: int) -> None:
    """Reduce-scatter, all-gather and broadcasts in rounds, at any size, in pieces and in place; inputs stay as they are."""
    with ranks(size) as world:
        everyone = range(size)
        for i, n in enumerate((0, 1, 2, 5, 101)):
            dtype, op = KINDS[i]
            wide = [values(r, n * size, dtype) for r in everyone]
            expected = oracle(wide, op)
            inputs = [[part.clone() for part in x.view(size, n)] for x in wide]
            for outputs in ([torch.empty(n, dtype=dtype) for _ in everyone], [inputs[r][r] for r in everyone]):
                world.run(
                    lambda r: [
                        partial(
                            schedules.reduce_scatter_in_rounds, world.ranks[r], outputs[r][p], [x[p] for x in inputs[r]], op  # noqa: B023
                        )
                        for p in cut(n, 40)  # noqa: B023
                    ]
                )  # fmt: skip
                check(torch.cat(outputs), expected)
            assert all(same(inputs[r][s], wide[r][s * n : s * n + n]) for r in everyone for s in everyone if r != s)
            mine = [values(r, n, dtype) for r in everyone]
            got = [[torch.empty(n, dtype=dtype) for _ in everyone] for _ in everyone]
            got[0][0] = mine[0]
            before = list(world.sent)
            world.run(lambda r: [partial(schedules.gather_in_rounds, world.ranks[r], got[r], mine[r])])  # noqa: B023
            assert all(same(torch.cat(row), torch.cat(mine)) for row in got)
            assert world.sent == [b + (size - 1) * mine[0].nbytes for b in before]
            for make in (schedules.tree, schedules.scattered):
                source = n % size
                x = [values(r, n, dtype) for r in everyone]
                world.run(lambda r: [partial(make, world.ranks[r], source, x[r][p]) for p in cut(n, 40)])  # noqa: B023
                assert all(same(one, values(source, n, dtype)) for one in x)


@grid(cover=1, size=RANKS)
def test_barrier_in_rounds_waits_for_all_ranks(size: int) -> None:
    """Whoever comes last, no rank is through before."""
    with ranks(size) as world:
        last, number = size - 1, next(world.numbers)
        works = [
            Operation("barrier", number, signature("barrier"), iter([partial(schedules.barrier_in_rounds, ours)]), 1)
            for ours in world.ranks
        ]
        for rank in range(last):
            world.loops[rank].submit(works[rank])
        assert not any(work.is_completed() for work in works)
        world.loops[last].submit(works[last])
        finish(works)


def test_scratch_is_bounded_and_used_again() -> None:
    """However many sizes come, few tensors are kept."""
    scratch = Scratch()
    tensor = scratch.take(10, torch.float32)
    scratch.give(tensor)
    assert scratch.take(10, torch.float32) is tensor
    assert scratch.take(10, torch.float32) is not tensor
    for n in range(1, 200):
        for _ in range(40):
            scratch.give(torch.empty(n))
    assert sum(map(len, scratch._free.values())) <= 256
    with ranks(2) as world:
        for n in range(1, 60):
            world.all_reduce("direct", [torch.zeros(n)] * 2, ReduceOp.SUM)
            world.all_reduce("exchange", [torch.zeros(n)] * 2, ReduceOp.SUM)
        for kept in (*(r.scratch for r in world.ranks), *(loop._inbox.scratch for loop in world.loops)):
            assert 0 < sum(map(len, kept._free.values())) <= 256


def test_scratch_does_not_keep_much_memory() -> None:
    """Large buffers of many sizes are not all kept for ever: a gigabyte would be missed."""
    scratch = Scratch()
    for n in range(16):
        for _ in range(16):
            scratch.give(torch.empty((4 << 20) + n, dtype=torch.uint8))
    assert sum(tensor.nbytes for free in scratch._free.values() for tensor in free) <= 256 << 20


def test_chunks() -> None:
    """They cover everything once, in order, and differ by one element at most."""
    for n, parts in itertools.product((0, 1, 5, 16, 1001), (1, 2, 3, 16)):
        found = chunks(n, parts)
        assert [i for part in found for i in range(n)[part]] == list(range(n))
        assert len(found) == parts
        lengths = [part.stop - part.start for part in found]
        assert max(lengths) - min(lengths) <= 1
    assert [range(10)[part] for part in cut(10, 4)] == [range(4), range(4, 8), range(8, 10)]

"""A communicator over sockets of its own: the contract, its tables, its stripes and its splits."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.world import LocalWorld
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import ALL_REDUCE, EVER, Tuning
from tests import limits
from tests.comm import contract
from tests.comm.backends.sockets.common import HEADER, LIGHT, by_way, leaving_nothing, striped
from tests.comm.contract import CASES
from tests.comm.values import bits, check, oracle, same, values
from tests.grids import grid, only

BASE = Tuning(
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"), ((EVER, "base"),))
)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a thread or a file descriptor."""
    with leaving_nothing():
        yield


@grid(case=CASES, size=[1, 2, 3, 4], cover=1)
def test_contract(case: Callable[[Communicator], None], size: int) -> None:
    """All of it holds, with small pieces and several sockets."""
    if case is contract.case_millions:
        if size == 4:
            pytest.skip("two and three ranks are enough of this one")
        striped(size, case, Tuning(piece=100_000, window=3, stripes=2, split=30_000))
    else:
        striped(size, case)


@pytest.mark.slow
@pytest.mark.parametrize("size", only([2, 3], 3))
def test_contract_around_rings(size: int) -> None:
    """Where the table says so for every size."""
    rings = Tuning(
        all_reduce=((EVER, "ring"),), all_gather=((EVER, "ring"),), reduce_scatter=((EVER, "ring"),),
        broadcast=((EVER, "chain"),), piece=5000, link=2000, window=2, stripes=2, split=100,
    )  # fmt: skip

    def all_of_it(c: Communicator) -> None:
        for case in (*LIGHT, contract.case_movement, contract.case_bytes_sent, contract.case_reductions):
            case(c)

    striped(size, all_of_it, rings)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 16])
def test_contract_among_more_ranks(size: int) -> None:
    """The lighter part of it."""

    def light(c: Communicator) -> None:
        for case in LIGHT:
            case(c)

    striped(size, light, stripes=1)


@grid(cover=1, size=[2, 3, 5], way=ALL_REDUCE)
def test_each_way_of_all_reduce(way: str, size: int) -> None:
    """Against NumPy, at sizes that are cut into no piece, one, and several with a short one at the end."""

    def fn(c: Communicator) -> None:
        for n, op in itertools.product((1, 2, 5, size + 1, 5000, 5001, 23_456), (ReduceOp.SUM, ReduceOp.AVG)):
            parts = [values(r, n, torch.float32) for r in range(size)]
            x = parts[c.rank].clone()
            c.all_reduce(x, op).wait()
            check(x, oracle(parts, op))
            assert len(set(c.all_gather_object(bits(x)))) == 1

    striped(size, fn, by_way(way))


def test_base_carries_out_what_the_table_says() -> None:
    """The contract holds, and what the base sends counts."""

    def fn(c: StripedCommunicator) -> None:
        for case in (*LIGHT[:2], contract.case_movement, contract.case_bytes_sent):
            case(c)
        mine, beneath = c.bytes_sent, c.base.bytes_sent
        c.all_reduce(torch.zeros(999)).wait()
        assert c.bytes_sent - mine == c.base.bytes_sent - beneath == 2 * 2 * 999 * 4 // 3

    striped(3, fn, BASE)


@grid(cover=1, size=[2, 3])
def test_uneven_all_to_all_where_the_base_takes_even_ones(size: int) -> None:
    """A rank whose own parts happen to be of one length goes the way of the others."""

    def fn(c: Communicator) -> None:
        table = [[2 if a == b == size - 1 else 1 for b in range(size)] for a in range(size)]
        received = [row[c.rank] for row in table]
        output = torch.empty(sum(received))
        c.all_to_all_v(output, torch.full((sum(table[c.rank]),), float(c.rank)), received, table[c.rank]).wait()
        assert output.tolist() == [float(r) for r in range(size) for _ in range(received[r])]

    striped(size, fn, BASE, timeout=limits.seconds(2))


class Counting:
    """A socket that counts what goes into it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.payload = 0

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        sent = self.sock.sendmsg(buffers)
        whole = len(buffers[0]) == HEADER.size
        self.payload += sent - HEADER.size * whole
        return sent

    def send(self, data: memoryview) -> int:
        sent = self.sock.send(data)
        self.payload += sent
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


def count(c: StripedCommunicator) -> dict[int, list[Counting]]:
    """Wraps the sockets of a communicator that has nothing under way."""
    assert c._loop is not None
    for channels in c._loop._links.values():
        for channel in channels:
            channel.sock = Counting(channel.sock)  # type: ignore[assignment]
    return {peer: [channel.sock for channel in channels] for peer, channels in c._loop._links.items()}  # type: ignore[misc]


@grid(cover=1, way=[way for way in ALL_REDUCE if way != "base"])
def test_bytes_sent_is_what_goes_into_the_sockets(way: str) -> None:
    """Of every operation, without headers."""

    def fn(c: StripedCommunicator) -> None:
        c.barrier().wait()
        sockets = list(itertools.chain(*count(c).values()))
        before = c.bytes_sent
        x, wide = torch.zeros(30_000), torch.zeros(90_000)
        c.all_reduce(x).wait()
        c.all_gather(wide, x).wait()
        c.reduce_scatter(x, wide).wait()
        c.all_to_all(torch.zeros(30_000), x).wait()
        c.broadcast(x, 1).wait()
        c.broadcast(wide, 2).wait()
        c.reduce(x, 1).wait()
        c.gather(x, wide if c.rank == 2 else None, 2).wait()
        c.scatter(x, wide if c.rank == 0 else None, 0).wait()
        c.barrier().wait()
        works = [c.send(x, (c.rank + 1) % 3), c.recv(torch.zeros(30_000), (c.rank - 1) % 3)]
        for work in works:
            work.wait()
        assert sum(sock.payload for sock in sockets) == c.bytes_sent - before > 0

    striped(3, fn, by_way(way))


def test_large_messages_go_through_all_sockets() -> None:
    """In about equal parts; where the table says one socket, through one."""

    def fn(c: StripedCommunicator) -> None:
        c.barrier().wait()
        sockets = count(c)[1 - c.rank]
        x = values(c.rank, 300_000, torch.float32)
        other, got = values(1 - c.rank, 300_000, torch.float32), torch.zeros(300_000)
        for work in (c.send(x, 1 - c.rank), c.recv(got, 1 - c.rank)):
            work.wait()
        assert same(got, other)
        assert all(abs(sock.payload - 400_000) <= 4096 * 3 for sock in sockets)
        c.retune(Tuning())
        c.barrier().wait()
        c.all_reduce(x).wait()
        assert sum(sock.payload > 450_000 for sock in sockets) == 1

    striped(2, fn, Tuning(stripes=3, split=100_000), stripes=3)


def test_other_tables_between_operations() -> None:
    """Every rank follows them at once."""

    def fn(c: StripedCommunicator) -> None:
        parts = [values(r, 5003, torch.float32) for r in range(3)]
        for way, stripes in itertools.product((*ALL_REDUCE, *reversed(ALL_REDUCE)), (1, 2, 3)):
            c.retune(Tuning(all_reduce=((EVER, way),), stripes=stripes, split=100, piece=5000, window=stripes))
            x = parts[c.rank].clone()
            c.all_reduce(x).wait()
            check(x, oracle(parts, ReduceOp.SUM))

    striped(3, fn)


def test_one_rank_needs_no_sockets() -> None:
    """And no thread; it can be split and closed."""

    def fn(c: StripedCommunicator) -> None:
        assert c._loop is None
        x = torch.ones(3)
        c.all_reduce(x, ReduceOp.AVG).wait()
        part = c.split([0])
        assert part is not None
        part.close()
        assert x.tolist() == [1.0] * 3
        assert c.bytes_sent == 0

    striped(1, fn)


def test_what_it_is_made_of_is_checked() -> None:
    """Only a communicator on the CPU, and at least one socket."""
    world = LocalWorld(1, device=torch.device("meta"))
    with pytest.raises(ValueError, match="on the CPU, got one on meta"):
        StripedCommunicator(LocalCommunicator(world, world.group("world", (0,)), 0))
    world = LocalWorld(1)
    with pytest.raises(ValueError, match="at least one socket"):
        StripedCommunicator(LocalCommunicator(world, world.group("world", (0,)), 0), stripes=0)


def test_splits_of_one_another() -> None:
    """Rows and columns of a grid, which overlap, and a row of a row, all in use at once."""

    def fn(c: StripedCommunicator) -> None:
        row = c.split([0, 1] if c.rank < 2 else [2, 3])
        column = c.split([0, 2] if c.rank % 2 == 0 else [1, 3])
        again = c.duplicate()
        assert row is not None
        assert column is not None
        inner = row.split([0])
        assert (inner is None) == (row.rank == 1)
        tensors = [torch.full((3000,), float(c.rank)) for _ in range(4)]
        works = [one.all_reduce(x) for one, x in zip((again, column, row, c), tensors, strict=True)]
        for work in works:
            work.wait()
        sums = [x.unique().tolist() for x in tensors]
        assert sums == [[6.0], [2.0 * (c.rank % 2) + 2], [1.0 if c.rank < 2 else 5.0], [6.0]]
        for one in (inner, again, row, column):
            if one is not None:
                one.close()

    striped(4, fn)


def test_two_threads_with_a_communicator_each() -> None:
    """They do not wait for one another."""

    def fn(c: StripedCommunicator) -> None:
        both = [c.duplicate(), c.duplicate()]
        wrong: list[float] = []

        def reduce(one: Communicator) -> None:
            for i in range(40):
                x = torch.full((500,), float(i))
                one.all_reduce(x).wait()
                wrong.extend(x[x != 2.0 * i].tolist())

        threads = [threading.Thread(target=reduce, args=(one,)) for one in both]
        for thread in threads[:: 1 - 2 * c.rank]:
            thread.start()
        for thread in threads:
            thread.join(limits.seconds(20))
        assert not wrong
        for one in both:
            one.close()

    striped(2, fn)

"""A mailbox over NCCL, on a stand-in that moves real data and checks groups; and over communicators that heed tags."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator, Mailbox
from bagua_kernels.comm import run_ranks as run_threads
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.nccl.mailbox import DeviceMailbox
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.errors import CommunicationError, RankLostError
from tests.comm.backends.nccl.fake_cuda import MisuseError
from tests.comm.backends.nccl.fake_nccl import World, run_ranks
from tests.comm.backends.sockets.common import leaving_nothing, until
from tests.comm.mailbox import cases
from tests.comm.mailbox.cases import neighbours, value
from tests.grids import grid

pytestmark = pytest.mark.usefixtures("short_breaks")
CASES = [
    cases.case_all_with_all,
    cases.case_one_tensor_for_all,
    cases.case_letters,
    cases.case_bytes_sent,
    cases.case_arguments,
    cases.case_late_neighbour,
]


@pytest.fixture
def short_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of NCCL looks often."""
    monkeypatch.setattr("bagua_kernels.comm.backends.nccl.watchdog._PERIOD", 0.005)
    monkeypatch.setattr("bagua_kernels.comm.backends.nccl.watchdog._PATIENT", 0.1)


def opened(communicator: Communicator) -> DeviceMailbox:
    letters = SocketMailbox(communicator, host="127.0.0.1", tensors=False)
    return DeviceMailbox(communicator.duplicate(), letters)


@grid(case=CASES, size=[2, 3], run=[run_ranks, run_threads], cover=1)
def test_contract(case: Callable[[Mailbox], None], size: int, run: Callable[..., object]) -> None:
    def fn(communicator: Communicator) -> None:
        with opened(communicator) as box:
            assert (box.rank, box.size, box.timeout) == (communicator.rank, size, communicator.timeout)
            case(box)
            communicator.barrier().wait()

    with leaving_nothing():
        run(size, fn)


def test_exchange_is_one_group_on_a_communicator_of_its_own() -> None:
    """All sends and receives of an exchange, with all partners, are issued together."""
    world = World(3)

    def fn(communicator: NcclCommunicator) -> None:
        with opened(communicator) as box:
            left, right = neighbours(box)
            log = box._tensors._queue.endpoint.stream.log  # type: ignore[attr-defined]
            before = len(log), len(communicator._queue.endpoint.stream.log)
            got = {left: torch.empty(5, dtype=torch.float64), right: torch.empty(5, dtype=torch.float64)}
            box.exchange(got, dict.fromkeys(got, value(box.rank, 0, 0)), 1 << 40).wait()
            assert log[before[0] :] == ["wait", "group", "record"]
            assert len(communicator._queue.endpoint.stream.log) == before[1]
            assert all(one.equal(value(src, 0, 0)) for src, one in got.items())
            communicator.barrier().wait()

    run_ranks(3, fn, world=world)


def test_order_decides_not_the_number() -> None:
    """What docs/communication.md says of NCCL: the first exchange of one rank is that of the other."""

    def fn(communicator: NcclCommunicator) -> None:
        with opened(communicator) as box:
            peer = 1 - box.rank
            got = torch.empty(2, 5, dtype=torch.float64)
            for place in range(2):
                number = place if box.rank else 1 - place
                box.exchange({peer: got[place]}, {peer: value(box.rank, 0, number)}, number).wait()
            for place in range(2):
                assert got[place].equal(value(peer, 0, place if peer else 1 - place))
            communicator.barrier().wait()

    run_ranks(2, fn)


def test_sizes_that_differ_are_found_by_nccl() -> None:
    def fn(communicator: NcclCommunicator) -> None:
        with opened(communicator) as box:
            peer = 1 - box.rank
            box.exchange({peer: torch.empty(5)}, {peer: torch.ones(5 + box.rank)}, 0).wait()

    with pytest.raises(MisuseError, match=r"sends 24 .* receives 20"):
        run_ranks(2, fn)


def test_rank_that_leaves_ends_the_tensors_and_not_the_letters() -> None:
    """What it had sent has arrived."""

    def fn(communicator: NcclCommunicator) -> None:
        box = opened(communicator)
        got = torch.empty(5, dtype=torch.float64)
        if box.rank == 0:
            box.exchange({}, {1: value(0, 1, 0)}, 0).wait()
            box.leave("enough")
            with pytest.raises(CommunicationError, match="it left: enough"):
                box.exchange({1: got}, {}, 1)
        elif box.rank == 1:
            box.exchange({0: got}, {}, 0).wait()
            assert got.equal(value(0, 1, 0))
            until(lambda: 0 in box.lost())
            assert box.lost() == {0: "it left: enough"}
            with pytest.raises(RankLostError, match=r"rank 0 was lost \(it left: enough\)") as caught:
                box.exchange({0: got}, {}, 1).wait()
            assert caught.value.ranks == (0,)
        if box.rank:
            other = 3 - box.rank
            box.post(other, b"still here")
            assert box.take(10.0) == (other, b"still here")
        communicator.barrier().wait()
        box.leave()

    run_ranks(3, fn)

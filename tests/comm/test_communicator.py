"""One contract for all communicators: ranks as threads, and processes over Gloo, against NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, RankLostError
from tests import limits
from tests.comm.contract import CASES, battery
from tests.comm.trouble import abort_of_a_duplicate, failure_reaches_all_threads, late_neighbour
from tests.comm.values import same, values
from tests.grids import grid, only


@grid(case=CASES, size=[1, 2, 3, 4, 7], cover=1)
def test_threads(case: Callable[[Communicator], None], size: int) -> None:
    """The contract holds for ranks that are threads."""
    run_ranks(size, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_many_threads(case: Callable[[Communicator], None]) -> None:
    """The contract holds for sixteen ranks."""
    run_ranks(16, case, timeout=limits.seconds(60))


PROCESSES = [1, 2, 3, 4]


@grid(
    size=[pytest.param(n, marks=[] if n == 3 else pytest.mark.slow) for n in PROCESSES],
    sockets=only(["0", "2"], "2"),
    cover=1,
)
def test_processes(size: int, sockets: str) -> None:
    """The contract holds for processes over Gloo alone, and with sockets of their own beside it."""
    for rank, result in enumerate(
        run_processes(battery, size, timeout=limits.seconds(110), env={"BAGUA_KERNELS_SOCKETS": sockets})
    ):
        assert "FAILURES {}\n" in result.stdout, f"rank {rank}:\n{result.stdout}\n{result.stderr}"
        assert result.returncode == 0, result.stderr


def aborting() -> None:
    """One rank of two."""
    abort_of_a_duplicate(comm.init(timeout=limits.seconds(60)))
    print("FINE", flush=True)


@pytest.mark.slow
def test_gloo_abort() -> None:
    """Only the communicator that was aborted is lost, and the processes end without waiting for its work."""
    for result in run_processes(aborting, 2, timeout=limits.seconds(50)):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


def late() -> None:
    """One rank of two or three."""
    c = comm.init(timeout=limits.seconds(60))
    late_neighbour(c)
    failure_reaches_all_threads(c)
    print("FINE", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sockets"), [(2, "0"), (3, "0"), (3, "2")])
def test_late_neighbour_between_processes(size: int, sockets: str) -> None:
    """Gloo closes its connections when a wait for a message runs out of time: nothing of it may show."""
    for result in run_processes(late, size, timeout=limits.seconds(90), env={"BAGUA_KERNELS_SOCKETS": sockets}):
        assert (result.returncode, result.stdout) == (0, "FINE\n"), result.stderr


@grid(cover=1, size=[2, 3])
def test_late_neighbour_among_threads(size: int) -> None:
    """A message may be late, whatever carries it."""
    run_ranks(size, late_neighbour)
    run_ranks(size, failure_reaches_all_threads)


def test_results_have_the_same_bits_in_any_order_of_arrival() -> None:
    """Reductions run in rank order, whoever comes last."""

    def reduce(c: Communicator) -> torch.Tensor:
        x = values(c.rank, 1000, torch.float16)
        c.all_reduce(x).wait()
        return x

    expected = values(0, 1000, torch.float16)
    for r in range(1, 5):
        expected += values(r, 1000, torch.float16)
    for _ in range(5):
        assert all(same(result, expected) for result in run_ranks(5, reduce))


def test_outputs_are_written_by_wait() -> None:
    """An algorithm that forgets to wait sees no result."""

    def reduce(c: Communicator) -> tuple[float, float]:
        x = torch.ones(1)
        work = c.all_reduce(x)
        c.barrier().wait()
        before = x.item()
        work.wait()
        return before, x.item()

    assert run_ranks(2, reduce) == [(1.0, 2.0)] * 2


def test_timeout_names_the_ranks_that_did_not_come() -> None:
    """Ranks 1 and 2 stay away until the others have given up."""
    seen: list[tuple[int, ...]] = []

    given_up = threading.Barrier(4, timeout=limits.seconds(10))

    def fn(c: Communicator) -> None:
        if c.rank in (0, 3):
            with pytest.raises(CollectiveTimeoutError, match="rank 1, 2 did not take part") as caught:
                c.all_reduce(torch.ones(1)).wait()
            seen.append(caught.value.ranks)
        given_up.wait()

    run_ranks(4, fn, timeout=limits.seconds(0.3))
    assert seen == [(1, 2), (1, 2)]


def test_error_of_one_rank_reaches_the_caller_and_names_it_to_the_others() -> None:
    """The first error is raised; whoever waits for that rank learns why."""
    seen: list[RankLostError] = []

    def fn(c: Communicator) -> None:
        if c.rank == 1:
            raise ZeroDivisionError("boom")
        try:
            c.barrier().wait()
        except RankLostError as error:
            seen.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        run_ranks(3, fn)
    assert "raised by rank 1 of 3" in caught.value.__notes__
    assert [error.ranks for error in seen] == [(1,), (1,)]
    assert "boom" in str(seen[0])


def test_different_operations_are_told_apart() -> None:
    """All ranks get an error that names both calls."""

    def fn(c: Communicator) -> None:
        with pytest.raises(CommunicationError, match=r"broadcast.*all_reduce|all_reduce.*broadcast"):
            (c.all_reduce(torch.ones(2)) if c.rank else c.broadcast(torch.ones(2))).wait()

    run_ranks(3, fn)


def test_abort_releases_pending_work() -> None:
    """Later calls raise on the rank that aborted, and the others see that it left."""

    def fn(c: Communicator) -> None:
        if c.rank == 0:
            work = c.barrier()
            c.abort()
            with pytest.raises(CommunicationError, match="aborted"):
                work.wait()
            with pytest.raises(CommunicationError, match="aborted"):
                c.all_reduce(torch.ones(1))
        else:
            with pytest.raises(RankLostError, match="rank 0") as caught:
                c.all_reduce(torch.ones(1)).wait() if c.rank == 3 else c.recv(torch.ones(1), 0).wait()
            assert caught.value.ranks == (0,)

    run_ranks(3, fn)

"""Wrappers that nobody closes: deleted ones end, and `comm.shutdown` ends the others."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from bagua_kernels import comm
from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, DiLoCo, Wagma
from bagua_kernels.comm import Communicator, open_mailbox, run_ranks
from bagua_kernels.comm.mailbox.courier import Courier, weakly
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.asynchronous.common import made, train
from tests.grids import grid

KINDS: dict[str, Any] = {
    "average": partial(AsyncModelAverage, interval_ms=1),
    "codec": partial(AsyncModelAverage, interval_ms=1, codec="minmax_uint8:block=64"),
    "wagma": Wagma,
    "pairs": AsyncDecentralized,
    "quorum": partial(DiLoCo, interval=2, quorum=1),
}


def courier_of(model: Any) -> Any:
    return model.rounds.collection.merges.courier if isinstance(model, DiLoCo) else model.averages.courier


@grid(cover=1, make=KINDS)
def test_a_deleted_wrapper_ends(make: Any) -> None:
    """As a cell of a notebook that runs again leaves it: the thread ends, and the module can be wrapped anew."""

    def rank(communicator: Communicator) -> None:
        module, optimizer, model = made(make, communicator)
        train(model, optimizer, communicator.rank, range(3))
        communicator.barrier().wait()
        found, thread = weakref.ref(model), courier_of(model)._thread
        del model
        # Another rank may collect at the same time, when this call does nothing.
        limits.until(lambda: gc.collect() >= 0 and found() is None, "the wrapper is deleted")
        thread.join(limits.seconds(20))
        assert not thread.is_alive()
        communicator.barrier().wait()
        make(module, optimizer, communicator=communicator).close()

    run_ranks(2, rank, timeout=limits.seconds(20))


def test_one_whose_courier_has_failed_is_deleted() -> None:
    """What ended it was raised within a method of the wrapper."""

    class Owner:
        def __init__(self, courier: Courier) -> None:
            self.courier = courier
            courier.work(weakly(self.fail))
            courier.end_with(self)
            courier.start()

        def fail(self) -> bool:
            raise ZeroDivisionError("of the wrapper")

    def rank(communicator: Communicator) -> None:
        owner = Owner(Courier(open_mailbox(communicator)))
        found, thread = weakref.ref(owner), owner.courier._thread
        owner.courier.wake()
        thread.join(limits.seconds(20))
        del owner
        limits.until(lambda: gc.collect() >= 0 and found() is None, "the owner is deleted")

    run_ranks(1, rank)


def shut_down() -> None:
    """Wrappers of both kinds, still held, whose threads end with the job."""
    comm.init(timeout=limits.seconds(30))
    models = []
    for name in ("average", "quorum"):
        module, optimizer, model = made(KINDS[name], comm.world())
        train(model, optimizer, comm.rank(), range(3))
        models.append(model)
    assert [thread.name for thread in threading.enumerate() if "courier" in thread.name]
    comm.shutdown()
    for model in models:
        thread = courier_of(model)._thread
        thread.join(limits.seconds(20))
        assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        models[0].wait()
    print("ENDED", flush=True)


def test_shutdown_ends_what_was_not_closed() -> None:
    for result in run_processes(shut_down, 2, timeout=limits.seconds(60)):
        assert result.returncode == 0, result.stderr[-3000:]
        assert "ENDED" in result.stdout

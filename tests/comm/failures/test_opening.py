"""A rank that does not come, or does not come through, while a communicator is opened: the others learn of it, and of which."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from bagua_kernels import comm
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.opening import connect
from bagua_kernels.comm.failures.records import Records
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining.bounded import GivenUpError, PatientStore, bounded
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError
from tests import limits

ENVIRONMENT = {"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.1)}"}
TIMEOUT = limits.seconds(4)


def opens(how: str, victim: int, timeout: float) -> None:
    """One rank makes a duplicate; the victim does something else."""
    world = comm.init(timeout=limits.seconds(60))
    world.barrier().wait()
    world.set_timeout(timeout)
    print("HERE", flush=True)
    group = sys.modules["bagua_kernels.comm.backends.torch_distributed.group"]
    made = group._open  # type: ignore[attr-defined]

    def hindered(*arguments: Any) -> Any:
        if how == "raises":
            raise KeyError("no such thing")
        if how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        made(*arguments)
        os._exit(5)

    if world.rank == victim:
        if how == "leaves":
            raise SystemExit
        if how == "is late":
            # It answers, and stays until it is ended.
            threading.Event().wait()
        group._open = hindered  # type: ignore[attr-defined]
    try:
        world.duplicate().barrier().wait()
    except CommunicationError as error:
        told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ()))}
        print("RAISED", json.dumps({**told, "text": str(error)}), flush=True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("leaves", 1),
        ("is late", 1),
        pytest.param("raises", 2, marks=pytest.mark.slow),
        pytest.param("stops", 0, marks=pytest.mark.slow),
        pytest.param("dies after it has connected", 1, marks=pytest.mark.slow),
    ],
)
def test_the_rank_at_fault_is_named(how: str, victim: int) -> None:
    """Without waiting for the timeout, unless the rank still answers or is stopped."""
    # A duplicate of sockets opens nothing, and one of Gloo a group.
    environment = {**ENVIRONMENT, "BAGUA_KERNELS_SOCKETS": "2" if how in ("leaves", "is late") else "0"}
    timeout = TIMEOUT if how in ("is late", "stops") else limits.NEVER
    survivors = [rank for rank in range(3) if rank != victim]
    with Processes(opens, 3, args=[how, victim, timeout], env=environment) as processes:
        for rank in survivors:
            processes.wait_for_output(rank, "RAISED", timeout=limits.seconds(60))
            raised = json.loads(processes.output(rank).split("RAISED ", 1)[1].splitlines()[0])
            assert raised["kind"] == ("CollectiveTimeoutError" if how == "is late" else "RankLostError"), raised
            assert raised["ranks"] == [victim], raised


def test_a_call_that_does_not_come_back_is_left_alone() -> None:
    """What it returns in the end is undone."""
    release, undone = threading.Event(), list[int]()
    with pytest.raises(TimeoutError, match="did not come back"):
        bounded(lambda _: int(release.wait(limits.seconds(30))), 0.05, undo=undone.append)
    release.set()
    limits.until(lambda: undone == [1], "what it returned is undone")

    def look() -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        bounded(lambda given_up: given_up.wait(limits.seconds(30)), limits.NEVER, look)
    with pytest.raises(ValueError, match="wrong"):
        bounded(lambda _: int("wrong"), limits.NEVER)


def test_a_store_is_asked_no_longer_than_somebody_waits() -> None:
    """A wait ends when it is given up; until then it has no limit."""
    given_up, store = threading.Event(), HashStore()
    patient = PatientStore(store, given_up)
    threading.Timer(0.05, store.set, ("key", "value")).start()
    assert patient.get("key") == b"value"
    threading.Timer(0.05, given_up.set).start()
    with pytest.raises(GivenUpError):
        patient.wait(["nowhere"])


def test_all_waits_of_an_opening_have_one_limit() -> None:
    """Nested ones end with the first."""
    session = Session("world", 100.0, 0, (0, 1), None)
    now = time.monotonic()
    with session.within(now + 50.0):
        assert session.left(now) <= 50.0
        with session.within(now + 80.0):
            assert session.left(now) <= 50.0
    assert session._due is None
    with session.within(now + 0.1), pytest.raises(CollectiveTimeoutError, match="connect of communicator 'world'"):
        connect(session, lambda given_up: given_up.wait(limits.seconds(30)))


def test_a_farewell_does_not_wait_for_a_rank_that_was_named() -> None:
    """Until that has come after all."""
    liveness = Liveness(Records(2), 0, 2, heartbeat=0.5, background=False)
    session = Session("world", 100.0, 0, (0, 1), liveness)
    session.hurry(None)
    assert session.timeout == 100.0
    liveness.blamed.add(1)
    session.finished(0)
    assert not liveness.blamed
    liveness.blamed.add(1)
    session.hurry(None)
    assert session.timeout == 1.0
    session.leaving = True
    failure = session.failure("barrier", 0, None, None, timed_out=True)
    assert isinstance(failure, CollectiveTimeoutError)
    assert failure.ranks == (1,)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e7])
def test_a_timeout_that_no_backend_can_keep_is_refused(seconds: float) -> None:
    """As the environment's is."""
    alone = LocalCommunicator.alone()
    with pytest.raises(ValueError, match=r"expected a timeout from 0\.001 to 1000000 s"):
        alone.set_timeout(seconds)
    alone.set_timeout(1e6)
    assert alone.timeout == 1e6

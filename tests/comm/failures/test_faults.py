"""A rank is killed, stopped or unplugged in the middle of each collective: every survivor raises and ends in order."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.comm.hosts import on_hosts
from tests.grids import grid

RANKS, VICTIM, N = 3, 1, 300_000
TIMEOUT = limits.seconds(4)
ENVIRONMENT = {"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.1)}"}


def calls(c: Communicator) -> dict[str, Callable[[], object]]:
    """Each collective, blocking, on a megabyte a rank."""
    x, wide = torch.ones(N), torch.ones(N * c.size)
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    y, out = torch.empty(N), torch.empty(N * c.size)
    at_root = c.rank == 0

    def pass_on() -> None:
        works = [c.send(x, right), c.recv(y, left)]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: c.all_reduce(x, comm.ReduceOp.MAX).wait(),
        "small_all_reduce": lambda: c.all_reduce(x[:10], comm.ReduceOp.MAX).wait(),
        "all_gather": lambda: c.all_gather(out, x).wait(),
        "reduce_scatter": lambda: c.reduce_scatter(y, wide).wait(),
        "all_to_all": lambda: c.all_to_all(out, wide).wait(),
        "broadcast": lambda: c.broadcast(x, 0).wait(),
        "reduce": lambda: c.reduce(x, 0, comm.ReduceOp.MAX).wait(),
        "gather": lambda: c.gather(x, out if at_root else None, 0).wait(),
        "scatter": lambda: c.scatter(y, wide if at_root else None, 0).wait(),
        "send_recv": pass_on,
        "neighbour_exchange": lambda: c.neighbour_exchange({left: y}, {right: x}).wait(),
        "barrier": lambda: c.barrier().wait(),
        "all_gather_object": lambda: c.all_gather_object({"rank": c.rank}),
    }


OPERATIONS = sorted(
    [
        "all_reduce", "small_all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
        "scatter", "send_recv", "neighbour_exchange", "barrier", "all_gather_object",
    ]
)  # fmt: skip


def repeat(operation: str, timeout: float) -> None:
    """One rank: repeats an operation until it fails, and prints what it raised."""
    c = comm.init(timeout=limits.seconds(60))
    c.set_timeout(timeout)
    call = calls(c)[operation]
    for _ in range(5):
        call()
    print("GOING", flush=True)
    while True:
        try:
            call()
            if operation in ("broadcast", "gather", "scatter", "reduce"):
                # A rank that only sends could run ahead for ever.
                c.barrier().wait()
        except CommunicationError as error:
            told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ()))}
            print("RAISED", json.dumps({**told, "text": str(error)}), flush=True)
            break
    comm.shutdown()
    print("ENDED", flush=True)


def check_survivor(rank: int, output: str, returncode: int | None, errors: str, victim: int) -> None:
    """It raised, naming the victim and the operation, and ended in order."""
    assert returncode == 0, f"rank {rank}: {returncode}\n{output}\n{errors}"
    assert output.splitlines()[-1] == "ENDED", output
    raised = json.loads(output.split("RAISED ", 1)[1].splitlines()[0])
    assert raised["kind"] in ("RankLostError", "CollectiveTimeoutError"), raised
    assert raised["ranks"] == [victim], raised


@grid(
    operation=[op if op in ("all_reduce",) else pytest.param(op, marks=pytest.mark.slow) for op in OPERATIONS],
    fault=[
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, id="stopped"),
    ],
)
def test_killed_or_stopped(operation: str, fault: signal.Signals) -> None:
    """A rank that was killed is missed through its sockets, whatever the timeout; one that is stopped when it is over."""
    timeout = limits.NEVER if fault is signal.SIGKILL else TIMEOUT
    with Processes(repeat, RANKS, args=[operation, timeout], env=ENVIRONMENT) as processes:
        for rank in range(RANKS):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        time.sleep(0.1)
        processes.send_signal(VICTIM, fault)
        survivors = [rank for rank in range(RANKS) if rank != VICTIM]
        for rank, result in zip(survivors, processes.wait(limits.seconds(40), ranks=survivors), strict=True):
            check_survivor(rank, result.stdout, result.returncode, result.stderr, VICTIM)


@pytest.mark.slow
@grid(operation=OPERATIONS, victim=[VICTIM, 0], most=1)
def test_unplugged(operation: str, victim: int) -> None:
    """The unplugged rank raises too, though it cannot know whether it is itself that was cut off."""
    with on_hosts(repeat, [operation, TIMEOUT], RANKS, ENVIRONMENT) as hosts:
        hosts.wait_for_output("GOING")
        time.sleep(0.2)
        hosts.unplug(victim)
        for rank in range(RANKS):
            output = hosts.end(rank)
            if rank != victim:
                check_survivor(rank, output, 0, "", victim)
            else:
                assert "RAISED" in output, output
                assert output.splitlines()[-1] == "ENDED", output

"""A campaign of random faults by processes: every survivor is told who is at fault, and ends in order.

`python -m tests.comm.failures.test_random_faults 30` runs the cases of 30 seeds and counts what was told.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import rendezvous
from bagua_kernels.comm.backends import selection
from bagua_kernels.comm.backends.torch_distributed import communicator as torch_backend
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits

TIMEOUT = limits.seconds(8)  # of operations and of the start
PAUSE = 3.0  # seconds for which an innocent interpreter is busy
FAULTS = ("kill", "stop", "exit", "raise")
PLACES = ("init", "collective", "messages", "shutdown")


@dataclass(frozen=True)
class FailedOperation:
    """One fault.

    Attributes:
        size: the number of ranks.
        victim: the rank at fault.
        fault: what happens to it.
        place: what the ranks are in.
        child: whether the victim has a forked child that lives on.
        busy: a rank whose interpreter is busy at the time; -1 for none.
        sockets: the package's own sockets between two ranks.
        step: how many operations went well.
        elements: of each tensor.
    """

    size: int
    victim: int
    fault: str
    place: str
    child: bool
    busy: int
    sockets: int
    step: int
    elements: int

    @property
    def needs_no_timeout(self) -> bool:
        """True if all hear of the fault at once: the process is gone, or has said why it leaves."""
        return self.fault in ("kill", "raise") and self.place in ("collective", "messages")

    @classmethod
    def draw(cls, seed: int) -> FailedOperation:
        """Draws a case."""
        rng = random.Random(seed)
        size = rng.randint(2, 4)
        victim = rng.randrange(size)
        innocent = rng.choice([rank for rank in range(size) if rank != victim])
        fault, place = rng.choice(FAULTS), rng.choice(PLACES)
        child = place != "init" and rng.random() < 0.5
        busy = innocent if place in ("collective", "messages") and rng.random() < 0.4 else -1
        return cls(
            size,
            victim,
            fault,
            place,
            child,
            busy,
            rng.choice([0, 2]),
            rng.randint(3, 20),
            rng.choice([1, 3_000, 300_000]),
        )


def take_part(fields: dict[str, Any]) -> None:
    """One rank of a case."""
    case = FailedOperation(**fields)
    rank = int(os.environ["RANK"])
    at_fault = rank == case.victim

    def act() -> None:
        print("FAULT", flush=True)
        if case.fault == "exit":
            sys.exit(0)
        if case.fault == "raise":
            raise KeyError("no such batch")
        os.kill(os.getpid(), signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)

    if at_fault and case.place == "init":
        module, name = random.Random(case.step).choice(
            [(rendezvous.dist, "init_process_group"), (torch_backend, "group_beside"), (selection, "agreed_settings")]
        )
        setattr(module, name, lambda *_, **__: act())
    try:
        world = comm.init(timeout=TIMEOUT)
        if case.needs_no_timeout:
            world.set_timeout(limits.NEVER)
        if at_fault and case.child:
            fork()
        x, y = torch.ones(case.elements), torch.empty(case.elements)
        right, left = (rank + 1) % case.size, (rank - 1) % case.size
        for step in range(case.step + 1 if case.place in ("init", "shutdown") else 10_000):
            if step == case.step and case.place in ("collective", "messages"):
                if at_fault:
                    act()
                if rank == case.busy:
                    # Called through PyDLL it keeps the interpreter's lock.
                    ctypes.PyDLL(None).usleep(int(PAUSE * 1e6))
            if case.place == "messages":
                works = [world.send(x, right), world.recv(y, left)]
            else:
                works = [world.all_reduce(x, comm.ReduceOp.MAX)]
            for work in works:
                work.wait()
        if at_fault and case.place == "shutdown":
            act()
    except CommunicationError as error:
        told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ()))}
        print("TOLD", json.dumps({**told, "text": str(error)}), flush=True)
    comm.shutdown()
    print("ENDED", flush=True)


def fork() -> None:
    """Leaves a child behind, as a loader of data does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        time.sleep(limits.NEVER)
        os._exit(0)
    print("CHILD", child, flush=True)


def run(case: FailedOperation) -> list[str]:
    """Runs a case; returns what was wrong."""
    environment = {"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.2)}", "BAGUA_KERNELS_SOCKETS": str(case.sockets)}
    wrong = []
    with Processes(take_part, case.size, args=[asdict(case)], env=environment) as processes:
        survivors = [rank for rank in range(case.size) if rank != case.victim]
        try:
            results = processes.wait(limits.seconds(90) + 3 * TIMEOUT, survivors)
        except TimeoutError as error:
            return [f"a survivor hangs: {error}"]
        finally:
            output = processes.output(case.victim)
            for line in output.splitlines():
                if line.startswith("CHILD"):
                    os.kill(int(line.split()[1]), signal.SIGKILL)
        if "FAULT" not in output:
            return [
                f"the victim did not come to its fault: {output}{[result.stdout + result.stderr for result in results]}"
            ]
        for rank, result in zip(survivors, results, strict=True):
            lines = dict(line.partition(" ")[::2] for line in result.stdout.splitlines())
            if result.returncode != 0 or "ENDED" not in lines:
                wrong.append(f"rank {rank} ended with {result.returncode}: {result.stdout}{result.stderr}")
            elif case.place == "shutdown":
                continue
            elif "TOLD" not in lines:
                wrong.append(f"rank {rank} was told nothing: {result.stdout}{result.stderr}")
            else:
                told = json.loads(lines["TOLD"])
                named = told["kind"] in ("RankLostError", "CollectiveTimeoutError") and told["ranks"] == [case.victim]
                # A rank that ends in order is in the barrier of its farewell, which is another operation.
                named |= case.fault == "exit" and told["kind"] == "MismatchError" and case.victim in told["ranks"]
                if not named:
                    wrong.append(f"rank {rank} was told: {told}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        FailedOperation(3, 1, "kill", "collective", child=True, busy=2, sockets=2, step=5, elements=3_000),
        *(pytest.param(FailedOperation.draw(seed), id=f"seed{seed}") for seed in range(12)),
    ],
)
def test_every_survivor_is_told_who_is_at_fault(case: FailedOperation) -> None:
    """By an error of this package, and ends in order."""
    assert run(case) == []


def main() -> None:
    """Runs as many seeds as the command line says, and counts."""
    first, count = (0, *map(int, sys.argv[1:]))[-2:]
    failed = 0
    for seed in range(first, first + count):
        case = FailedOperation.draw(seed)
        started = time.monotonic()
        wrong = run(case)
        failed += bool(wrong)
        print(seed, case, f"{time.monotonic() - started:.0f} s", *(wrong or ["fine"]), sep="\n    ", flush=True)
    print(f"{count} cases, {failed} failed")


if __name__ == "__main__":
    main()

"""The asynchronous algorithms on processes: recorded and recomputed, killed, stopped, and ended again and again."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, Wagma, simulate
from bagua_kernels.algorithms.asynchronous.order import file_of, load
from bagua_kernels.comm import run_ranks
from bagua_kernels.comm.testing import Processes, run_processes
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.algorithms.asynchronous.common import ALL, flat, made, train
from tests.algorithms.asynchronous.test_replay import loss, make
from tests.algorithms.ranks import Odd, batch
from tests.comm.backends.sockets.common import leaving_nothing
from tests.grids import grid, only

KINDS: dict[str, Any] = {"wagma": Wagma, "average": AsyncModelAverage, "pairs": AsyncDecentralized}
TIMEOUT = limits.seconds(6)


def recorded(folder: str, replayed: str | None) -> None:
    """One rank: trains with pauses of its own, and prints its parameters."""
    comm.init(timeout=limits.seconds(60))
    draws = random.Random(f"{replayed} {comm.rank()}")
    module, optimizer = make(comm.rank())
    with Wagma(module, optimizer, period=5, record=folder, replay=replayed) as model:
        for step in range(15):
            time.sleep(draws.choice([0.0, 0.0, 0.02]))
            loss(model, comm.rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("PARAMETERS", json.dumps(flat(module).double().tolist()), flush=True)
    comm.shutdown()


def parameters(outputs: list[Any]) -> list[torch.Tensor]:
    found = []
    for each in outputs:
        assert each.returncode == 0, each
        line = next(line for line in each.stdout.splitlines() if line.startswith("PARAMETERS"))
        found.append(torch.tensor(json.loads(line.removeprefix("PARAMETERS")), dtype=torch.float64).float())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_recorded_run_is_recomputed_and_repeated(size: int, tmp_path: Path) -> None:
    folders, limit = [str(tmp_path / name) for name in "ab"], limits.seconds(100)
    first = parameters(run_processes(recorded, size, args=(folders[0], None), timeout=limit))
    records = [load(file_of(tmp_path / "a", rank)) for rank in range(size)]
    modules = simulate.replay(records, make, loss)
    assert all(torch.equal(flat(module), expected) for module, expected in zip(modules, first, strict=True))
    again = parameters(
        run_processes(recorded, size, args=(str(tmp_path / "b"), str(tmp_path / "a")), timeout=limits.seconds(100))
    )
    assert all(map(torch.equal, again, first))


def until_it_fails(kind: str, state: str, victim: int, timeout: float) -> None:
    """One rank: trains until it hears that the victim is gone, or waits at the end of its block."""
    comm.init(timeout=limits.seconds(60)).set_timeout(timeout)
    module = Odd()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    try:
        with KINDS[kind](module, optimizer) as model:
            for step in range(10**6):
                model(batch(comm.rank(), step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 20:
                    print("GOING", flush=True)
                if state == "rest" and step == 40 and comm.rank() != victim:
                    break
                time.sleep(0.001)
    except CommunicationError as error:
        told = {"kind": type(error).__name__, "ranks": list(getattr(error, "ranks", ())), "text": str(error)}
        print("RAISED", json.dumps(told), flush=True)
    print("ENDED", flush=True)


@pytest.mark.slow
@grid(
    kind=only(KINDS, next(iter(KINDS))),
    how=only(["SIGKILL", "SIGSTOP"], "SIGSTOP"),
    state=only(["training", "rest"], "training"),
    cover=1,
)
def test_a_lost_rank_is_named(kind: str, how: str, state: str) -> None:
    """In the middle of training, and while the others wait at the end of their blocks."""
    victim = 1
    # A rank that is killed is missed at once: the timeout of the others must not end their wait.
    timeout = limits.NEVER if how == "SIGKILL" else TIMEOUT
    with Processes(until_it_fails, 3, args=(kind, state, victim, timeout)) as processes:
        for rank in range(3):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        time.sleep(0.5)
        processes.send_signal(victim, signal.Signals[how])
        for rank in (0, 2):
            processes.wait_for_output(rank, "ENDED", timeout=limits.seconds(30))
            line = next(line for line in processes.output(rank).splitlines() if line.startswith("RAISED"))
            told = json.loads(line.removeprefix("RAISED"))
            assert victim in told["ranks"] or f"rank {victim}" in told["text"], told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wagma", "average, codec", "pairs"])
def test_two_hundred_starts_leave_nothing(name: str) -> None:
    def cycle(communicator: Any) -> None:
        module, optimizer, model = made(ALL[name], communicator)
        train(model, optimizer, communicator.rank, range(2))
        model.close()

    with leaving_nothing():
        for _ in range(200):
            run_ranks(2, cycle)

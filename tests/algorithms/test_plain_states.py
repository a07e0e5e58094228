"""States hold plain values: `torch.load` takes what `torch.save` wrote, both with their defaults."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Algorithm, CompressedAllReduce, Guard, OneBitAdam, PowerSGD, QAdam, SignSGD
from bagua_kernels.algorithms.choosing.turns import BLOCK
from bagua_kernels.algorithms.policy.only_if_faster import BLOCKS
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import Cast
from tests.algorithms.ranks import Odd, batch
from tests.algorithms.test_contract import ALGORITHMS, ALL
from tests.grids import only

GUARD = {action: Guard(every=2, bound=1e-4, action=action) for action in ("warn", "widen", "exact")}
GROUPS = {"*second*": "absmax_int4", "*scale*": {0: None, 2: "sign"}}
DECIDING: dict[str, Callable[..., Algorithm]] = {
    **{f"sign_{a}": lambda *args, g=g, **kw: SignSGD(*args, guard=g, **ALL, **kw) for a, g in GUARD.items()},
    "groups": lambda *args, **kw: CompressedAllReduce(
        *args, codec={0: "sign", 2: "absmax_int8"}, groups=GROUPS, warmup_steps=1, guard=GUARD["widen"], **kw
    ),
    "trial": lambda *args, **kw: SignSGD(*args, only_if_faster=True, guard=GUARD["widen"], **ALL, **kw),
    "powersgd_trial": lambda *args, **kw: PowerSGD(*args, only_if_faster=True, min_compression=0.5, **kw),
    "qadam_frozen": lambda *args, **kw: QAdam(*args, freeze_step=2, error_feedback=True, guard=GUARD["exact"], **kw),
    "onebit_adam_frozen": lambda *args, **kw: OneBitAdam(*args, freeze_step=2, guard=GUARD["widen"], **ALL, **kw),
    "onebit_adam_auto": lambda *args, **kw: OneBitAdam(*args, freeze_step="auto", betas=(0.9, 0.5), **ALL, **kw),
}
ROWS = {**ALGORITHMS, **DECIDING}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def train(algorithm: Algorithm, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        algorithm(batch(rank, step)).square().mean().backward()
        optimizer.step()


def optimizer_of(algorithm: Algorithm) -> torch.optim.Optimizer:
    return getattr(algorithm, "optimizer", None) or torch.optim.SGD(algorithm.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.filterwarnings("ignore:the mean of bucket:RuntimeWarning")
@pytest.mark.parametrize("name", only(ROWS, *list(ROWS)[::4]))
def test_states_survive_a_file_and_go_on_bit_for_bit(name: str) -> None:
    first = BLOCK * BLOCKS + 2 if "trial" in name else 4

    def rank(communicator: Communicator) -> None:
        make = ROWS[name]
        whole = make(Odd(), communicator=communicator, bucket_bytes=600)
        optimizer = optimizer_of(whole)
        train(whole, optimizer, communicator.rank, range(first))
        state, inner = through_a_file(whole.algorithm_state_dict()), through_a_file(optimizer.state_dict())
        again = make(Odd(), communicator=communicator, bucket_bytes=600)
        again.load_state_dict(through_a_file(whole.state_dict()))
        other = optimizer_of(again)
        other.load_state_dict(inner)
        again.load_algorithm_state_dict(state)
        assert (
            again.algorithm_state_dict()["decisions"] == whole.algorithm_state_dict()["decisions"] == state["decisions"]
        )
        if name in DECIDING and name not in ("sign_warn", "onebit_adam_auto"):
            assert state["decisions"]
        train(whole, optimizer, communicator.rank, range(first, first + 2))
        train(again, other, communicator.rank, range(first, first + 2))
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))

    run_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:the mean of bucket:RuntimeWarning")
def test_states_that_hold_schedules_and_codecs_are_still_taken() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = SignSGD(Odd(), communicator=communicator, guard=GUARD["widen"], **ALL)
        state = algorithm.algorithm_state_dict()
        schedule = algorithm.assignment.default
        algorithm.load_algorithm_state_dict({**state, "decisions": [(schedule, Cast())]})
        (bucket,) = algorithm._engine.buckets.all
        assert algorithm.policy.codec(bucket.kind, 0) == Cast()
        assert algorithm.policy.state() == [("guard", [("", "cast:dtype=bfloat16")])]

    run_ranks(2, rank)

"""Parameters that are frozen, and trained again, after they were wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import DGC, Algorithm, AutoTune, GradientAllReduce, OneBitAdam, QAdam, RandomK, TopK
from bagua_kernels.algorithms.exchanges.repaying import owed_by
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, fill
from tests.algorithms.test_contract import ALGORITHMS, ALL
from tests.grids import grid, only

OWN: dict[str, Callable[..., Algorithm]] = {
    "qadam_frozen": lambda *args, **kw: QAdam(*args, freeze_step=2, error_feedback=True, **kw),
    "onebit_adam_frozen": lambda *args, **kw: OneBitAdam(*args, freeze_step=2, **ALL, **kw),
}
DGCS = {
    "dgc_masked": lambda *args, **kw: DGC(*args, ratio=0.3, masking=True, nesterov=True, **{**ALL, **kw}),
    "dgc_exact": lambda *args, **kw: DGC(*args, ratio=0.3, exact="1d", min_numel=0, **kw),
}
# So much that each parameter is drawn in a few steps.
RANDOM = {"randomk": lambda *args, **kw: RandomK(*args, ratio=0.7, **{**ALL, **kw})}
ROWS = {**ALGORITHMS, **OWN, **DGCS, **RANDOM}
MODES = {
    "after": {},
    "in_backward": {"apply_in_backward": True},
}
# Of `Odd`: with either the model goes on to train.
FROZEN = ("first.weight", "scale")
CASES = [
    (name, mode)
    for name in ROWS
    for mode in MODES
    if mode == "after" or name not in (*OWN, "qadam", "onebit_adam")  # they have no steps in backward
]
# Of steps in backward one for each way in which means arrive.
SAMPLE = only(
    CASES,
    *((name, "after") for name in list(ROWS)[::2]),
    *((name, "in_backward") for name in ("bytegrad", "onebit", "dgc_masked")),
)


def optimizer_of(algorithm: Algorithm, module: nn.Module) -> torch.optim.Optimizer:
    return getattr(algorithm, "optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.05)


def state_of(algorithm: Algorithm, names: tuple[str, ...] = FROZEN) -> dict[str, torch.Tensor]:
    """What is remembered of some parameters; of a tuner, whose candidates remember different things, what is owed to them."""
    vectors = algorithm.algorithm_state_dict()["vectors"]
    if isinstance(algorithm, AutoTune):
        return {name: owed for name, owed in owed_by(vectors).items() if name in names and owed.any()}
    return {
        f"{key} {name}": named[name].clone()
        for key, named in vectors.items()
        for name in names
        if name in named and key != "compressed_steps"
    }


@grid(bucket_bytes=[600, 10 << 20], name__mode=SAMPLE, cover=1)
def test_frozen_parameters_stay_and_are_trained_again_later(name: str, mode: str, bucket_bytes: int) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Odd()
        options = {**MODES[mode], "bucket_bytes": bucket_bytes, "communicator": communicator}
        if mode == "after":
            algorithm = ROWS[name](module, **options)
            optimizer = optimizer_of(algorithm, module)
        else:
            momentum = 0.0 if "dgc" in name else 0.9
            optimizer = optim.SGD(module.parameters(), lr=0.05, momentum=momentum)
            algorithm = ROWS[name](module, optimizer, **options)

        def steps(first: int, last: int) -> None:
            for step in range(first, last):
                optimizer.zero_grad()
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                optimizer.step()

        chosen = [p for n, p in module.named_parameters() if n in FROZEN]
        steps(0, 4)
        for parameter in chosen:
            parameter.requires_grad_(False)
        before, remembered = [p.clone() for p in chosen], state_of(algorithm)
        trained = [p for p in module.parameters() if p.requires_grad]
        others = [p.clone() for p in trained]
        steps(4, 8)
        for parameter, was in zip(chosen, before, strict=True):
            assert parameter.grad is None
            assert torch.equal(parameter, was)
        assert any(not torch.equal(a, b) for a, b in zip(others, trained, strict=True))
        now = state_of(algorithm)
        assert now.keys() == remembered.keys()
        for key, value in remembered.items():
            assert torch.equal(now[key], value), key
        for parameter in chosen:
            parameter.requires_grad_(True)
        moved = [False, False]
        for step in range(8, 14):
            steps(step, step + 1)
            moved = [m or not torch.equal(p, was) for m, p, was in zip(moved, chosen, before, strict=True)]
        assert all(moved)
        return [p.detach().clone() for p in module.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@grid(cover=1, mode=list(MODES))
def test_a_parameter_that_only_some_ranks_freeze_is_an_error(mode: str) -> None:
    """Also where nobody has a gradient for it, and what is remembered would move it."""

    def rank(communicator: Communicator) -> str:
        module = Branches()
        optimizer = optim.SGD(module.parameters(), lr=0.05)
        given = (module,) if mode == "after" else (module, optimizer)
        algorithm = TopK(*given, ratio=0.1, communicator=communicator, **ALL, **MODES[mode])
        for step in range(2):
            algorithm(batch(communicator.rank, step), left=True).square().mean().backward()
        if communicator.rank == 1:
            module.left.weight.requires_grad_(False)
        loss = algorithm(batch(communicator.rank, 2), left=False).square().mean()
        if communicator.rank == 0:
            loss.backward()
            return ""
        with pytest.raises(RuntimeError, match=r"'left.weight' is frozen on this rank .*freeze it on all ranks"):
            loss.backward()
        return "raised"

    assert run_ranks(2, rank) == ["", "raised"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 3)
        self.right = nn.Linear(7, 3)
        fill(self)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def test_ranks_that_are_through_object_to_no_freezing() -> None:
    """Rank 1 ends before the parameter is frozen, and takes part by zeros."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Odd()
        algorithm = TopK(module, ratio=0.3, communicator=communicator, **ALL)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with algorithm.join():
            for step in range(2 if communicator.rank else 6):
                module.second.weight.requires_grad_(step < 3)
                optimizer.zero_grad()
                algorithm(batch(communicator.rank, step)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_was_accumulated_before_freezing_is_dropped() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        algorithm = GradientAllReduce(module, communicator=communicator)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            with algorithm.no_sync():
                algorithm(batch(communicator.rank, step)).square().mean().backward()
            if step == 2:
                module.scale.requires_grad_(False)
                before = module.scale.clone()
            algorithm(batch(communicator.rank, 10 + step)).square().mean().backward()
            optimizer.step()
        assert module.scale.grad is None
        assert torch.equal(module.scale, before)

    run_ranks(2, rank)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7, sparse=True)
        self.out = nn.Linear(7, 3)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x))


def test_frozen_sparse_embeddings_stay() -> None:
    def rank(communicator: Communicator) -> None:
        module = Table()
        algorithm = GradientAllReduce(module, communicator=communicator)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(4):
            module.table.weight.requires_grad_(step < 2)
            before = module.table.weight.clone()
            algorithm(torch.tensor([step, communicator.rank + 3])).square().mean().backward()
            assert (module.table.weight.grad is None) == (step >= 2)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert torch.equal(module.table.weight, before) == (step >= 2)
        if communicator.rank == 0:
            module.table.weight.requires_grad_(True)
            algorithm(torch.tensor([0])).square().mean().backward()
        else:
            loss = algorithm(torch.tensor([0])).square().mean()
            with pytest.raises(RuntimeError, match=r"'table.weight' is frozen on this rank"):
                loss.backward()

    run_ranks(2, rank)


def test_a_parameter_that_was_frozen_when_wrapped_may_not_be_trained_later() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        algorithm.module.frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'frozen' was frozen when .* wrap the module again"):
            algorithm(batch(communicator.rank, 0))

    run_ranks(2, rank)

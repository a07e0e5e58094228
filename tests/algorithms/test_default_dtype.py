"""`torch.set_default_dtype` is the user's: no algorithm's results depend on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from bagua_kernels.algorithms import Algorithm, OneBitAdam, QAdam
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch
from tests.algorithms.test_contract import ALGORITHMS, ALL
from tests.grids import grid, only

RANKS, STEPS = 2, 5
# Those that have an optimizer of their own freeze it, since what they send until then is not compressed.
OWN: dict[str, Callable[..., Algorithm]] = {
    "qadam": lambda *args, **kw: QAdam(*args, freeze_step=2, **kw),
    "qadam_feedback": lambda *args, **kw: QAdam(*args, freeze_step=2, error_feedback=True, **kw),
    "onebit_adam": lambda *args, **kw: OneBitAdam(*args, freeze_step=2, **ALL, **kw),
    "onebit_adam_auto": lambda *args, **kw: OneBitAdam(*args, freeze_step="auto", betas=(0.9, 0.5), **ALL, **kw),
}
ROWS = {**ALGORITHMS, **OWN}

Result = list[list[torch.Tensor]]


@pytest.fixture
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def trained(wrap: Callable[..., Algorithm], set_default: Callable[[], None]) -> Result:
    """Parameters and what is remembered, of each rank; module and batches are float32 whatever the default is."""
    modules = [Odd(seed=rank) for rank in range(RANKS)]
    batches = [[batch(rank, step) for step in range(STEPS)] for rank in range(RANKS)]
    set_default()

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        algorithm = wrap(modules[communicator.rank], communicator=communicator, bucket_bytes=600)
        optimizer = getattr(algorithm, "optimizer", None) or torch.optim.SGD(algorithm.parameters(), lr=0.1)
        for x in batches[communicator.rank]:
            optimizer.zero_grad()
            algorithm(x).square().mean().backward()
            optimizer.step()
        vectors = algorithm.algorithm_state_dict()["vectors"]
        algorithm.stats()
        named = [vectors[key][name] for key in sorted(vectors) for name in sorted(vectors[key])]
        return [*(p.detach() for p in algorithm.parameters()), *named]

    return run_ranks(RANKS, rank)


@functools.cache
def expected(name: str) -> Result:
    return trained(ROWS[name], lambda: torch.set_default_dtype(torch.float32))


@grid(
    name=only(ROWS, *list(ROWS)[::3]),
    default=[torch.bfloat16, torch.float16, torch.float64],
    indirect=["default"],
    cover=1,
)
def test_the_default_dtype_changes_no_bit(name: str, default: Callable[[], None]) -> None:
    wanted = expected(name)
    found = trained(ROWS[name], default)
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)

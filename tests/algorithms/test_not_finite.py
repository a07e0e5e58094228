"""One infinity or NaN anywhere, on any rank: all ranks see it, and nothing remembers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bagua_kernels.algorithms import Algorithm, CompressedAllReduce, OneBitAdam, QAdam
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression.codec import names
from tests import grids
from tests.algorithms.test_contract import ALGORITHMS
from tests.algorithms.training import Given, draw
from tests.grids import grid, only
from tests.oracles.algorithms import Shapes

# Of many blocks and of a few elements; sizes are divisible by nothing.
SHAPES: Shapes = {"matrix": (37, 29), "bias": (11,), "second": (7, 3, 5), "scale": ()}
RANKS, STEPS, BAD_STEP = 3, 6, 3

CODECS: dict[str, Callable[..., Algorithm]] = {
    f"codec_{spec}": lambda *args, spec=spec, **kw: CompressedAllReduce(*args, codec=spec, **kw)
    for spec in (
        *names(),
        *("randomk:unbiased=true", "randomk:values=absmax_int8", "randomk:values=cast", "topk:values=absmax_int8"),
        *("cast:dtype=float16", "qsgd:norm=l2", "sign:two_means=true", "terngrad:shared=true", "fp8:format=e5m2"),
    )
}
# Frozen before the bad step.
ADAMS: dict[str, Callable[..., Algorithm]] = {
    "qadam": lambda *args, **kw: QAdam(*args, freeze_step=2, **kw),
    "onebit_adam": lambda *args, **kw: OneBitAdam(*args, freeze_step=2, exact=(), min_numel=0, **kw),
}
EVERY = {**ALGORITHMS, **ADAMS, **CODECS}


def remembered(value: Any) -> list[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in remembered(item)]


def follow(communicator: Communicator, name: str, where: tuple[int, str, int, float], **arguments: Any) -> None:
    """Takes some steps, with one bad element in one of them, in which no optimizer takes a step."""
    owner, tensor, element, bad = where
    algorithm = EVERY[name](Given(SHAPES), communicator=communicator, **arguments)
    for step, everyone in enumerate(draw(SHAPES, RANKS, STEPS)):
        own = {key: torch.from_numpy(g.copy()) for key, g in everyone[communicator.rank].items()}
        if step == BAD_STEP and communicator.rank == owner:
            own[tensor].view(-1)[element] = bad
        algorithm.zero_grad(set_to_none=True)
        algorithm(own).backward()
        grads = {key: p.grad for key, p in algorithm.module.named_parameters() if p.grad is not None}
        if step == BAD_STEP:
            assert not grads[tensor].isfinite().all(), where
        else:
            assert all(g.isfinite().all() for g in grads.values()), (step, where)
            if isinstance(algorithm, (QAdam, OneBitAdam)):
                algorithm.optimizer.step()
        assert all(t.isfinite().all() for t in remembered(algorithm.algorithm_state_dict())), (step, where)
    algorithm.close()


@grid(cover=1, name=only(EVERY, *ALGORITHMS, *ADAMS))
def test_one_element_arrives_everywhere_and_is_not_kept(name: str) -> None:
    rng = np.random.default_rng(list(name.encode()))
    bad = rng.permutation([float("nan"), float("inf"), float("-inf"), float("nan")]).tolist()
    cases = list(zip(SHAPES.items(), bad, strict=True))
    # By default in one of the tensors, another one for each algorithm.
    for (tensor, shape), value in cases if grids.EVERYTHING else [cases[len(name) % len(cases)]]:
        where = int(rng.integers(RANKS)), tensor, int(rng.integers(np.prod(shape, dtype=int))), value
        run_ranks(RANKS, follow, name, where)

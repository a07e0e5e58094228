"""Wrappers of algorithms on parameters that are deleted: what they had is free, and their hooks are gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests import limits
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

SPECS = [
    "d2",
    "decentralized:peers=all",
    "lowprec",
    "diloco:interval=2",
    "diloco:interval=2,quorum=2",
    "slow_mo:interval=2",
]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing that is in a circle of references is deleted; the circles of a first use, such as of imports, are gone."""
    run_ranks(2, lambda communicator: trained("d2", communicator)[0].close())
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trained(spec: str, communicator: Communicator) -> tuple[Any, torch.optim.Optimizer]:
    module = Odd()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    algorithm = from_spec(spec, module, optimizer, communicator=communicator, bucket_bytes=600)
    for step in range(2):
        optimizer.zero_grad()
        algorithm(batch(communicator.rank, step)).square().mean().backward()
        optimizer.step()
    algorithm.wait()
    communicator.barrier()
    return algorithm, optimizer


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("spec", SPECS)
def test_memory_is_free_at_once(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        algorithm, _ = trained(spec, communicator)
        module, flat = algorithm.module, weakref.ref(algorithm.local.flat)
        hooks = len(module._forward_pre_hooks)
        algorithm.close()
        del algorithm
        # The thread that made the exchanges may be on its way out of the last one.
        limits.until(lambda: flat() is None, "the vectors are free")
        assert (hooks, len(module._forward_pre_hooks)) == (1, 0)

    run_ranks(2, rank)


@grid(spec=SPECS, closes=[True, False])
def test_one_that_a_hook_of_its_optimizer_has_is_deleted(spec: str, closes: bool) -> None:
    """A program may log what `stats()` returns from a hook of its own."""

    def rank(communicator: Communicator) -> weakref.ref[Any]:
        algorithm, optimizer = trained(spec, communicator)
        optimizer.register_step_post_hook(lambda *_: algorithm.stats())
        if closes:
            algorithm.close()
        return weakref.ref(algorithm)

    found = run_ranks(2, rank)
    gc.collect()
    assert [each() for each in found] == [None, None]

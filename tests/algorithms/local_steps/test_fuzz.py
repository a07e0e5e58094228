"""Random trainings with local steps: no difference between ranks, nor from plain PyTorch with outer steps by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.algorithms.local_steps.draws import Training, draw
from tests.algorithms.local_steps.fuzz import compared, main
from tests.grids import sample

pytestmark = pytest.mark.usefixtures("one_thread")


def test_draws_cover_what_matters() -> None:
    drawn = [draw(seed) for seed in range(300)]
    segments = [segment for training in drawn for segment in training.segments]
    names = {"local_sgd", "post_local_sgd", "slow_mo", "diloco", "sparse_loco", "allreduce"}
    assert {segment.name for segment in segments} == names
    assert {segment.begins for segment in segments} == {"new", "switch", "resume", "resize"}
    assert {training.optimizer for training in drawn} == {"SGD", "Adam", "AdamW", "Adagrad"}
    assert {training.dtype for training in drawn} == {torch.float32, torch.float64, torch.bfloat16}
    assert sum(any(segment.join for segment in training.segments) for training in drawn) > 10
    assert sum(bool(training.overflows) for training in drawn) > 30
    assert sum(any(len(set(everyone)) > 1 for everyone in training.used) for training in drawn) > 100


def features(training: Training) -> set[Any]:
    """What a training can find a defect of, if it is compared with the simulation."""
    if training.lossy:
        return {"lossy"}
    found: set[Any] = {training.dtype, training.library, training.optimizer, *training.kinds}
    for segment in training.segments:
        found |= {segment.name, segment.begins, *({"join"} if segment.join else ())}
        found |= {option for option in ("delay", "blend") if option in segment.options}
    return found | ({"overflow"} if training.overflows else set()) | ({"frozen"} if any(training.frozen) else set())


def test_threads() -> None:
    """Few trainings that together have every feature."""
    seeds = sample([features(draw(seed)) for seed in range(200)])
    assert {seed: problems for seed in seeds if (problems := compared(draw(seed)))} == {}


def test_ranks_that_are_through_have_no_learning_rate() -> None:
    """SlowMo, whose momentum follows the learning rate, while a scheduler goes on where ranks still train."""
    assert compared(draw(5120)) == []


@pytest.mark.slow
def test_many_by_threads() -> None:
    """More: `python -m tests.algorithms.local_steps.fuzz --threads 2000`."""
    assert main(["--threads", "150", "--first", "1000"]) == 0

"""What lies within algorithms on parameters, for tests."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms import Algorithm, ModelAlgorithm
from bagua_kernels.algorithms.asynchronous.averages import Averages
from bagua_kernels.algorithms.asynchronous.courier_algorithm import CourierAlgorithm
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop
from bagua_kernels.algorithms.local_steps.outer_rounds import OuterRounds
from bagua_kernels.algorithms.models.loop import Loop
from bagua_kernels.bucket import Bucket


def loop(model: Algorithm) -> Loop:
    """What exchanges the parameters of a model."""
    assert isinstance(model, ModelAlgorithm)
    assert model._loop is not None
    return model._loop


def averages(model: Algorithm) -> Averages:
    """What a courier does for a model."""
    assert isinstance(model, CourierAlgorithm)
    assert model.averages is not None
    return model.averages


def outer_rounds(model: Algorithm) -> OuterRounds:
    """The rounds of an outer loop."""
    assert isinstance(model, OuterLoop)
    assert isinstance(model.rounds, OuterRounds)
    return model.rounds


def start(model: Algorithm, bucket: Bucket) -> torch.Tensor:
    """The outer parameters of a bucket."""
    assert isinstance(model, ModelAlgorithm)
    return model.local.flat.kept(bucket, "start")


def vectors(model: Algorithm) -> dict[str, dict[str, torch.Tensor]]:
    """What checkpoints contain beside parameters; nothing for one rank alone."""
    assert isinstance(model, ModelAlgorithm)
    return {} if model._loop is None else model._loop.vectors()

"""How an engine works."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.algorithms.engine.backward_steps import BackwardSteps
from bagua_kernels.algorithms.engine.healing import Healing


@dataclass(frozen=True)
class BucketOptions:
    """How gradients are put together.

    Attributes:
        align: the alignment of tensors in a bucket, in elements.
        bucket_bytes: size from which a bucket takes no more tensors.
        small_first: True if the first buckets take less, so that the wire is in use early.
    """

    align: int = 1
    bucket_bytes: int = 10 << 20
    small_first: bool = True


@dataclass(frozen=True)
class Manner:
    """How exchanges are carried out, which may change between backward passes.

    Attributes:
        buckets: how gradients are put together.
        in_flight: exchanges at a time, no more than at first; None for as many.
        in_backward: where the engine updates parameters, False to do so when all exchanges have ended.
    """

    buckets: BucketOptions
    in_flight: int | None = None
    in_backward: bool = True


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works.

    Attributes:
        buckets: how gradients are put together.
        in_flight: exchanges at a time; by default 2 on CPUs, where one is encoded or decoded while the other has the wire, and 1
            on GPUs: kernels of two NCCL communicators, in turn, may each wait for the other's place.
        steps: what updates parameters on the communication threads, if anything does.
        scaler: that by which losses are scaled, if any: what is remembered changes its unit with it.
        name: of the algorithm, for profilers.
        title: of its class, likewise.
        healing: what lets passes go on when a rank is lost; None to raise.
    """

    buckets: BucketOptions
    in_flight: int | None = None
    steps: BackwardSteps | None = None
    scaler: torch.amp.GradScaler | None = None
    name: str = ""
    title: str = ""
    healing: Healing | None = None

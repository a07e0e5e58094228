"""Rounds through every codec: the same bits on all ranks, no change without steps, and nothing lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import DiLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression.codec import names
from tests.algorithms import parts
from tests.algorithms.gossip.common import BUCKET_BYTES, Quadratic, Task, falling, flat
from tests.grids import grid, only

VARIANTS = [
    *("absmax_int4:stochastic=true", "minmax_uint8:stochastic=true", "qsgd:bits=2", "sign:two_means=true", "fp8:format=e5m2"),
    *("terngrad:shared=true", "randomk:unbiased=true", "topk:values=absmax_int8", "chunked_topk:k=5,chunk=32"),
]  # fmt: skip
CODECS = [*names(), *VARIANTS]
FEW = only(CODECS, "minmax_uint8", "absmax_int4", "sign", "topk", "chunked_topk:k=5,chunk=32")
# Codecs whose payloads lack something that error feedback remembers.
LOSSY = only(
    [
        *(
            "minmax_uint8",
            "minmax_uint4",
            "absmax_int4",
            "fp8",
            "sign",
            "sign:two_means=true",
            "qsgd:bits=2",
            "terngrad",
        ),
        *("topk", "threshold_topk", "randomk", "chunked_topk:k=5,chunk=32"),
    ],
    "absmax_int4",
    "sign",
    "topk",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERYTHING: dict[str, Any] = {"exact": (), "min_numel": 0, "bucket_bytes": BUCKET_BYTES}


def made(communicator: Communicator, dtype: torch.dtype, **options: Any) -> tuple[Any, Quadratic, Any, Task]:
    module = Quadratic(dtype=dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model = DiLoCo(module, optimizer, communicator=communicator, **{**EVERYTHING, **options})
    return model, module, optimizer, Task(flat(module).numel())


def take(model: Any, optimizer: Any, task: Task, rank: int, step: int) -> None:
    optimizer.param_groups[0]["lr"] = falling(step)
    optimizer.zero_grad()
    task.loss(model, rank, step).backward()
    optimizer.step()


@grid(codec=FEW, dtype=DTYPES, size=[2, 3, 4, 5, 8], cover=1, most=2)
def test_all_ranks_have_the_same_bits_after_each_round(codec: str, dtype: torch.dtype, size: int) -> None:
    """The outer parameters, and the parameters, which are the outer ones rounded to their dtype."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        options: dict[str, Any] = {"codec": codec, "interval": 2, "outer_lr": 0.5, "outer_momentum": 0.5}
        model, module, optimizer, task = made(communicator, dtype, **options)
        rounds = []
        for step in range(8):
            take(model, optimizer, task, communicator.rank, step)
            if step % 2:
                apart = flat(module)
                model.wait()
                assert not torch.equal(flat(module), apart)
                for bucket in model.local.flat.buckets:
                    assert torch.equal(bucket.flat, parts.start(model, bucket).to(dtype))
                rounds += [
                    flat(module).float(),
                    *(parts.start(model, bucket).clone() for bucket in model.local.flat.buckets),
                ]
        model.close()
        return rounds

    first, *others = run_ranks(size, rank)
    assert all(x.isfinite().all() for x in first)
    for other in others:
        assert all(map(torch.equal, first, other))


@grid(codec=FEW, dtype=DTYPES, options=[{}, {"fragments": 2, "delay": 1, "blend": 0.5}, {"delay": 1}], cover=1)
def test_rounds_without_steps_change_nothing(codec: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Outer parameters have more bits than those of a model in bfloat16, which must not be seen as a change."""

    def rank(communicator: Communicator) -> None:
        model, module, optimizer, _ = made(communicator, dtype, codec=codec, interval=4, **options)
        with torch.no_grad():
            for (
                bucket
            ) in model.local.flat.buckets:  # as after rounds whose steps were smaller than a parameter's last bit
                parts.start(model, bucket).mul_(1 + 2.0**-12 if dtype != torch.float32 else 1.0)
                bucket.flat.copy_(parts.start(model, bucket))
        before = flat(module)
        for _ in range(12):
            optimizer.step()
            model.wait()
            assert torch.equal(flat(module), before)
        model.close()

    run_ranks(2, rank)


@grid(codec=LOSSY, size=[2, 3, 4, 5, 8], cover=1)
def test_nothing_is_lost(codec: str, size: int) -> None:
    """What ranks have learned in the mean is in the outer parameters, or ranks remember it."""

    def rank(communicator: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        options: dict[str, Any] = {"codec": codec, "outer_lr": 1.0, "outer_momentum": 0.0}
        model, module, optimizer, task = made(communicator, torch.float32, interval=3, error_feedback=True, **options)
        begin = flat(module).double().numpy()
        learned, size_of_all = np.zeros_like(begin), 0.0
        for step in range(12):
            if step % 3 == 0:
                before = flat(module).double().numpy()
            take(model, optimizer, task, communicator.rank, step)
            if step % 3 == 2:
                learned += before - flat(module).double().numpy()
                size_of_all += float(np.linalg.norm(before - flat(module).double().numpy()))
                model.wait()
        applied = begin - flat(module).double().numpy()
        vectors = parts.vectors(model)
        kept = np.zeros_like(begin)
        for key in {"worker", "owner"} & vectors.keys():
            kept += torch.cat([vectors[key][name].flatten() for name, _ in module.named_parameters()]).double().numpy()
        assert model.stats().residual_norm > 0
        model.close()
        return learned, applied, kept, size_of_all

    everyone = run_ranks(size, rank)
    learned, kept = (np.mean([each[place] for each in everyone], axis=0) for place in (0, 2))
    assert all(np.array_equal(each[1], everyone[0][1]) for each in everyone)
    lost = learned - everyone[0][1] - kept
    assert np.linalg.norm(lost) <= 1e-5 * max(each[3] for each in everyone)
    assert np.linalg.norm(kept) > 1e-3 * np.linalg.norm(learned)


@pytest.mark.parametrize("size", only([2, 3], 3))
def test_a_codec_that_changes_keeps_what_is_owed(size: int) -> None:
    """By rounds: signs, then exact means, which hand over all residuals, then 8 bits."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], list[float]]:
        codec = {0: "sign", 2: None, 3: "minmax_uint8"}
        options: dict[str, Any] = {"codec": codec, "outer_lr": 1.0, "outer_momentum": 0.0, "interval": 2}
        model, module, optimizer, task = made(communicator, torch.float32, **options)
        start, learned, residuals = flat(module).double(), torch.zeros(flat(module).numel()).double(), []
        for step in range(8):
            if step % 2 == 0:
                before = flat(module).double()
            take(model, optimizer, task, communicator.rank, step)
            if step % 2:
                learned += before - flat(module).double()
                model.wait()
                residuals.append(model.stats().residual_norm)
            if step == 5:
                applied = start - flat(module).double()
                until = learned.clone()
        model.close()
        return [applied, until], residuals

    everyone = run_ranks(size, rank)
    mean = torch.stack([until for (_, until), _ in everyone]).mean(0)
    for (applied, _), residuals in everyone:
        assert torch.allclose(applied, mean, atol=1e-5)
        assert residuals[0] > 0
        assert residuals[2] == 0

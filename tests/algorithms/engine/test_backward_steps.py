"""Optimizers whose step is taken in backward: with the results of a step after it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import (
    DGC,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    FP8AllReduce,
    GradientAllReduce,
    Guard,
    OneBitAdam,
    PowerSGD,
    SignSGD,
    TopK,
)
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.low_rank import LowRankExchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, LocalCommunicator, Work, run_ranks
from bagua_kernels.optim.step.compressed import PayloadStep
from tests import limits
from tests.algorithms.ranks import batch, fill
from tests.grids import grid, only

ALGORITHMS: dict[str, tuple[type[Algorithm], dict[str, Any]]] = {
    "allreduce": (GradientAllReduce, {}),
    "bytegrad": (ByteGrad, {}),
    "bytegrad, some exact": (ByteGrad, {"exact": "1d"}),
    "bytegrad, guarded": (ByteGrad, {"guard": Guard(every=2, bound=1e9)}),
    "int4 after warm-up": (CompressedAllReduce, {"codec": {0: "minmax_uint8", 3: "absmax_int4"}, "warmup_steps": 1}),
    "sign": (SignSGD, {}),
    "majority vote": (SignSGD, {"majority_vote": True}),
    "double squeeze": (DoubleSqueeze, {}),
    "fp8": (FP8AllReduce, {}),
    "topk": (TopK, {"ratio": 0.1, "min_numel": 0}),
    "dgc": (DGC, {"ratio": 0.1}),
    "powersgd": (PowerSGD, {}),
    "powersgd in turn": (PowerSGD, {"rank": 2, "alternate": True, "min_compression": 0.0}),
    "powersgd after others": (PowerSGD, {"rank": 2, "start_step": 2, "min_compression": 0.0}),
}
# Adam is given to all algorithms here, whether they go together or not.
pytestmark = pytest.mark.filterwarnings("ignore::bagua_kernels.algorithms.OptimizerFitWarning")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "lamb": lambda p: optim.LAMB(p, lr=0.01),
}


class Parts(nn.Module):
    """Layers of which some take part in some steps only, on some ranks only, and one never does."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(7, 40)
        self.second = nn.Linear(40, 33)
        self.sometimes = nn.Linear(33, 33)
        self.never = nn.Linear(3, 3)
        self.picture = nn.Conv2d(1, 4, (3, 2)).to(memory_format=torch.channels_last)
        fill(self)
        self.to(dtype)

    def forward(self, x: torch.Tensor, more: bool) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if more:
            x = self.sometimes(x)
        picture = torch.nn.functional.pad(x, (0, 3)).view(-1, 1, 6, 6)
        return x.square().mean() + self.picture(picture).square().mean()


def trained(
    communicator: Communicator,
    name: str,
    make: Callable[..., torch.optim.Optimizer],
    apply_in_backward: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], dict[Any, Any], list[bool]]:
    module = Parts(dtype)
    optimizer = make(module.parameters())
    kind, arguments = ALGORITHMS[name]
    if name == "dgc":
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    arguments = {**arguments, "bucket_bytes": 4000, "apply_in_backward": apply_in_backward}
    algorithm = kind(module, optimizer, communicator=communicator, **arguments)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    left = []
    for step in range(5):
        optimizer.zero_grad()
        x = batch(communicator.rank, step).to(dtype)
        if step == 2:
            with algorithm.no_sync():
                algorithm(x, True).backward()
        # Other ranks, and other steps, lack a layer.
        algorithm(x, (step + communicator.rank) % 3 == 1).backward()
        left.append(any(p.grad is not None for p in module.parameters()))
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in module.parameters()], copy.deepcopy(optimizer.state_dict()), left


CASES = [
    *((name, "adamw", 2) for name in ALGORITHMS),
    *(("bytegrad", each, ranks) for each in OPTIMIZERS for ranks in (1, 3)),
    *(("powersgd", each, ranks) for each in OPTIMIZERS for ranks in (1, 3)),
    ("topk", "sgd momentum", 2),
    ("allreduce", "lamb", 2),
]
# The same kernels decode bytes and apply them for all algorithms, and what needs another optimizer needs it once.
SAMPLE = only(
    CASES,
    *((name, "adamw", 2) for name in ("allreduce", "bytegrad", "onebit_lamb", "topk") if name in ALGORITHMS),
    *(("bytegrad", "sgd momentum", 3), ("bytegrad", "adamw", 1), ("powersgd", "sgd", 1), ("powersgd", "lamb", 3)),
    ("allreduce", "lamb", 2),
)


@grid(cover=1, name__optimizer__ranks=SAMPLE)
def test_results_are_those_of_a_step_after_backward(name: str, optimizer: str, ranks: int) -> None:
    make = OPTIMIZERS[optimizer]
    expected = run_ranks(ranks, lambda c: trained(c, name, make, False))
    found = run_ranks(ranks, lambda c: trained(c, name, make, True))
    for (params, state, left), (ours, own, kept) in zip(expected, found, strict=True):
        assert all(left)
        assert any(kept) == (ranks == 1)  # where nothing is exchanged, all is left to the optimizer
        for one, other in zip(params, ours, strict=True):
            assert torch.equal(one, other)
        assert own["state"].keys() == state["state"].keys()
        for key, values in state["state"].items():
            for what, value in values.items():
                assert torch.equal(torch.as_tensor(own["state"][key][what]), torch.as_tensor(value))


def test_half_precision_is_rounded_alike() -> None:
    make = OPTIMIZERS["adamw"]
    after, meanwhile = (
        run_ranks(2, lambda c, early=early: trained(c, "bytegrad", make, early, torch.bfloat16)[0])
        for early in (False, True)
    )
    for expected, found in zip(after, meanwhile, strict=True):
        assert all(map(torch.equal, expected, found))


def test_payloads_are_decoded_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    original = PayloadStep.apply

    def counted(self: PayloadStep, parameter: torch.Tensor, *arguments: Any, **options: Any) -> None:
        applied.append(parameter.numel())
        original(self, parameter, *arguments, **options)

    monkeypatch.setattr(PayloadStep, "apply", counted)

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(64, 64)
        algorithm = ByteGrad(
            module, optim.AdamW(module.parameters()), communicator=communicator, apply_in_backward=True
        )
        algorithm(torch.ones(1, 64)).sum().backward()

    run_ranks(2, rank)
    # On each of two ranks, from each of two owners' payloads, the weight at least.
    assert applied.count(64 * 64) == 4


class Watching(PowerSGD):
    """Looks at the mean after it has come."""

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        outer = self

        class Seen(LowRankExchange):
            def run(self, step: int) -> Iterator[Work]:
                yield from super().run(step)
                outer.seen = bucket.flat.clone()

        return Seen(bucket, communicator, self.policy, self.config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PowerSGD, Watching])
def test_factors_are_multiplied_where_they_are_used(kind: type[PowerSGD]) -> None:
    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], torch.Tensor]:
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        fill(module)
        algorithm = kind(
            module,
            optim.AdamW(module.parameters()),
            communicator=communicator,
            bucket_bytes=1 << 20,
            apply_in_backward=True,
        )
        algorithm(torch.linspace(communicator.rank, 1, 64)).square().sum().backward()
        assert all(p.grad is None for p in module.parameters())
        assert algorithm._engine is not None
        (bucket,) = algorithm._engine.buckets.all
        left = algorithm.seen if isinstance(algorithm, Watching) else bucket.flat
        return [p.detach().clone() for p in module.parameters()], left.clone()

    (params, left), (others, right) = run_ranks(2, rank)
    assert all(map(torch.equal, params, others))
    assert torch.equal(left, right)
    # A subclass may want the mean; else nothing is written, and gradients never were in the bucket.
    assert bool(left.any()) == (kind is Watching)


@pytest.mark.slow
def test_sizes_of_powersgd_buckets() -> None:
    def sizes(communicator: Communicator, width: int, **options: Any) -> list[int]:
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
        algorithm = PowerSGD(module, communicator=communicator, **options)
        assert algorithm._engine is not None
        return [len(bucket.views) for bucket in algorithm._engine.buckets.all]

    # Layers of 16 KiB; of 4 MiB; of 16 MiB, of which seven tenths are too much for one bucket.
    assert run_ranks(2, lambda c: sizes(c, 64)) == [[5, 1]] * 2
    assert run_ranks(2, lambda c: sizes(c, 64, bucket_bytes=1)) == [[1] * 6] * 2
    assert run_ranks(2, lambda c: sizes(c, 1024)) == [[5, 1]] * 2
    assert run_ranks(2, lambda c: sizes(c, 2048)) == [[2, 2, 2]] * 2
    assert run_ranks(2, lambda c: sizes(c, 1024, only_if_faster=True)) == [[1, 2, 3]] * 2


def test_parameters_change_while_backward_goes_on() -> None:
    def rank(communicator: Communicator) -> bool:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        module = nn.Sequential(first, second)
        algorithm = ByteGrad(
            module,
            optim.SGD(module.parameters(), lr=0.1),
            communicator=communicator,
            bucket_bytes=1,
            apply_in_backward=True,
        )
        changed = []
        for _ in range(2):  # buckets follow the order of gradients from the second pass on
            before = second.weight.detach().clone()

            def wait(_: torch.Tensor, before: torch.Tensor = before) -> None:
                deadline = time.monotonic() + limits.seconds(20)
                while torch.equal(second.weight.detach(), before) and time.monotonic() < deadline:
                    time.sleep(0.001)
                changed.append(not torch.equal(second.weight.detach(), before))

            hidden = first(torch.ones(2, 8))
            hidden.register_hook(wait)
            algorithm.module[0] = nn.Identity()
            algorithm(hidden).square().sum().backward()
            algorithm.module[0] = first
        return changed[-1]

    assert run_ranks(2, rank) == [True, True]


def test_a_parameter_that_backward_still_needs_is_not_changed_unnoticed() -> None:
    def rank(communicator: Communicator) -> None:
        layer = nn.Linear(4, 4, bias=False)
        algorithm = GradientAllReduce(
            layer, optim.SGD(layer.parameters(), lr=0.1), communicator=communicator, apply_in_backward=True
        )
        hidden = torch.ones(1, 4, requires_grad=True)

        def wait(_: torch.Tensor) -> None:
            deadline = time.monotonic() + limits.seconds(20)
            version = layer.weight._version
            while layer.weight._version == version and time.monotonic() < deadline:
                time.sleep(0.001)

        # Backward reaches this use of the weight, of which it has no gradient, after the weight's own is complete.
        earlier = torch.nn.functional.linear(hidden, layer.weight.detach())
        between = earlier * 1.0
        between.register_hook(wait)
        algorithm(between).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(2, rank)


def test_refusals() -> None:
    def rank(communicator: Communicator) -> None:
        def wrap(kind: type[Algorithm], *arguments: Any, **options: Any) -> Algorithm:
            return kind(nn.Linear(2, 2), *arguments, communicator=communicator, apply_in_backward=True, **options)

        with pytest.raises(TypeError, match=r"pass an optimizer of bagua_kernels\.optim, got none"):
            wrap(GradientAllReduce)
        module = nn.Linear(2, 2)
        with pytest.raises(TypeError, match="got Adam"):
            wrap(ByteGrad, torch.optim.Adam(module.parameters()))
        differentiable = optim.SGD(module.parameters(), differentiable=True)
        with pytest.raises(TypeError, match="neither with differentiable"):
            wrap(ByteGrad, differentiable)
        for kind in (ByteGrad, PowerSGD):
            with pytest.raises(ValueError, match="leave out apply_in_backward, or scaler"):
                wrap(kind, optim.SGD(module.parameters()), scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(TypeError, match="after backward"):
            wrap(OneBitAdam, freeze_step=3)
        algorithm = GradientAllReduce(
            module, optim.SGD(module.parameters()), communicator=communicator, apply_in_backward=True
        )
        algorithm(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            algorithm.clip_grad_norm_(1.0)

    run_ranks(2, rank)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_of_used_gradients_is_refused(clip: Callable[[Iterator[nn.Parameter], float], Any]) -> None:
    """It would find no gradients, and clip nothing."""

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(4, 3)
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        with GradientAllReduce(module, optimizer, communicator=communicator, apply_in_backward=True) as model:
            model(torch.ones(2, 4)).sum().backward()
            assert list(model.parameters()) == list(module.parameters())
            with pytest.raises(RuntimeError, match="apply_in_backward=True"):
                clip(model.parameters(), 1.0)
        with GradientAllReduce(module, optimizer, communicator=communicator) as model:
            model(torch.ones(2, 4)).sum().backward()
            clip(model.parameters(), 0.25)
            assert all(float(p.grad.abs().max()) <= 0.25 for p in module.parameters() if p.grad is not None)

    run_ranks(2, rank)
    alone = nn.Linear(4, 3)
    model = GradientAllReduce(alone, optim.SGD(alone.parameters()), communicator=LocalCommunicator.alone())
    model(torch.ones(2, 4)).sum().backward()
    clip(model.parameters(), 1.0)


def test_what_the_optimizer_lacks_keeps_its_gradient() -> None:
    def rank(communicator: Communicator) -> list[bool]:
        module = nn.Linear(4, 4)
        algorithm = ByteGrad(
            module, optim.SGD([module.weight], lr=0.1), communicator=communicator, apply_in_backward=True
        )
        algorithm(torch.ones(1, 4)).sum().backward()
        return [module.weight.grad is None, module.bias.grad is not None]

    assert run_ranks(2, rank) == [[True, True]] * 2


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), torch.bfloat16),
        (lambda p: optim.LARS(p, lr=0.1, momentum=0.9, dampening=0.5), torch.float32),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, extras=optim.Extras(average=0.9)),
            torch.float32,
        ),
    ],
    ids=["half", "norms", "extras"],
)
def test_first_steps_are_known_as_such_where_means_are_decoded(make: Callable[..., Any], dtype: torch.dtype) -> None:
    """The first momentum is not dampened, however many plans a bucket takes."""
    after, meanwhile = (
        run_ranks(2, lambda c, early=early: trained(c, "bytegrad, some exact", make, early, dtype)[0])
        for early in (False, True)
    )
    for expected, found in zip(after, meanwhile, strict=True):
        assert all(map(torch.equal, expected, found))


def test_interrupted_backward_keeps_accumulated_gradients() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    def rank(communicator: Communicator) -> None:
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        module = nn.Sequential(first, second)
        algorithm = GradientAllReduce(
            module, optim.SGD(module.parameters(), lr=1.0), communicator=communicator, apply_in_backward=True
        )
        with algorithm.no_sync():
            algorithm(torch.ones(1, 4)).sum().backward()
        before = second.weight.grad.clone()
        with pytest.raises(ValueError, match="broken"):
            second(Broken.apply(first(torch.ones(1, 4)))).sum().backward()
        assert torch.equal(second.weight.grad, 2 * before)

    run_ranks(2, rank)


def test_what_is_prepared_does_not_grow_with_the_steps() -> None:
    def rank(communicator: Communicator) -> int:
        module = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        algorithm = ByteGrad(
            module, optim.AdamW(module.parameters()), communicator=communicator, apply_in_backward=True
        )
        for step in range(20):
            used = [layer for i, layer in enumerate(module) if (step * 7 + i * (1 + communicator.rank)) % 5]
            torch.stack([layer(torch.ones(4)) for layer in used]).sum().backward()
        return max(len(bucket._parts) for bucket in algorithm._engine._bucket_steps)

    assert max(run_ranks(2, rank)) <= 4

"""QAdam and 1-bit Adam: both phases against NumPy, what happens between them, and that training goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.adam import momentum_exchange
from bagua_kernels.algorithms.adam.frozen_adam import FrozenAdam
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.adam.onebit_adam import OneBitAdam
from bagua_kernels.algorithms.adam.qadam import QAdam
from bagua_kernels.algorithms.registry import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, fill
from tests.grids import grid
from tests.oracles import minmax_uint8

Kind = Callable[..., MomentumAllReduce]
OneBit = partial(OneBitAdam, exact=(), min_numel=0)  # the models here are small
KINDS: dict[str, Kind] = {"qadam": QAdam, "onebit_adam": OneBit}
both = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
CORRECTIONS = {"default": {}, "none": {"v_correction": "none"}, "frozen": {"v_correction": "frozen"}}
every_correction = pytest.mark.parametrize("corrected", CORRECTIONS.values(), ids=CORRECTIONS.keys())
F64 = np.ndarray[Any, np.dtype[np.float64]]
# With v's usual decay, five steps would leave next to nothing of it without correction, and steps grow by `limit`.
BETAS = (0.9, 0.9)


# -------------------------------------------------------------------------------------------- given gradients


class Given(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, int(np.prod(shape))).view(shape)))

    def forward(self, **gradients: torch.Tensor) -> torch.Tensor:
        return torch.stack([(getattr(self, name) * g).sum() for name, g in gradients.items()]).sum()


def draw(step: int, rank: int, shape: tuple[int, ...], name: str = "w") -> torch.Tensor:
    """A gradient: common to the ranks in part, and of other sizes at other places."""
    common, own = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7919 * step + 31 * len(name) + add))
        for add in (0, rank + 1)
    )
    return (common + own) * torch.logspace(-2, 0, int(np.prod(shape))).view(shape)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run(
    communicator: Communicator,
    *,
    kind: Kind,
    steps: int,
    shapes: dict[str, tuple[int, ...]],
    **arguments: Any,
) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step."""
    model = kind(Given(**shapes), communicator=communicator, **arguments)
    found = []
    for step in range(steps):
        model.optimizer.zero_grad()
        model(**{name: draw(step, communicator.rank, shape, name) for name, shape in shapes.items()}).backward()
        model.optimizer.step()
        found.append(parameters(model.module))
    return found


# ---------------------------------------------------------------------------------------- NumPy, from the papers


class SignCode:
    """Both passes of one bit with residuals, in float64, on vectors of whole blocks."""

    def __init__(self, ranks: int, n: int) -> None:
        self.worker = np.zeros((ranks, n))
        self.owner = np.zeros(n)

    @staticmethod
    def code(x: F64) -> F64:
        blocks = x.reshape(-1, 256)
        return (np.abs(blocks).mean(1, keepdims=True) * np.where(blocks < 0, -1.0, 1.0)).reshape(-1)

    def mean(self, vectors: F64) -> F64:
        total = vectors + self.worker
        sent = np.stack([self.code(x) for x in total])
        self.worker = total - sent
        mean = sent.mean(0) + self.owner
        result = self.code(mean)
        self.owner = mean - result
        return result


class ByteCode:
    """Both passes of a byte, bit by bit as the wire format says."""

    def __init__(self, ranks: int, n: int) -> None:
        self.n = n

    def code(self, x: F64) -> F64:
        return minmax_uint8.decode(minmax_uint8.encode(x.astype(np.float32), 256), self.n, 256).astype(np.float64)

    def mean(self, vectors: F64) -> F64:
        return self.code(np.stack([self.code(x) for x in vectors]).mean(0))


CODES: dict[Kind, Any] = {QAdam: ByteCode, OneBit: SignCode}


def simulate(
    code: Any,
    gradients: F64,
    start: F64,
    freeze: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    exact: bool = False,
    v_correction: str = "continued",
) -> list[F64]:
    """1-bit Adam for given gradients (steps, ranks, elements): the parameters after each step.

    Up to the freeze Adam of Kingma and Ba. After it v is no longer corrected in the paper ("none"), as at the freeze
    ("frozen"), or as Adam's would be ("continued").
    """
    x, m, v, found = start.astype(np.float64), np.zeros(start.size), np.zeros(start.size), []
    correction = 1.0
    for t, local in enumerate(gradients.astype(np.float64), 1):
        if t <= freeze:
            g = local.mean(0)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            correction = 1 - betas[1] ** t
        else:
            moved = betas[0] * m + (1 - betas[0]) * local
            m = (moved.mean(0) if exact else code.mean(moved)) * (v > 0)
            correction = {"none": 1.0, "frozen": 1 - betas[1] ** freeze, "continued": 1 - betas[1] ** t}[v_correction]
        x = x * (1 - lr * decay)
        x = x - lr * m / (1 - betas[0] ** t) / (np.sqrt(v / correction) + eps)
        found.append(x)
    return found


def drawn(steps: int, ranks: int, shape: tuple[int, ...], name: str = "w") -> F64:
    return np.stack([[draw(s, r, shape, name).numpy().reshape(-1) for r in range(ranks)] for s in range(steps)])


def assert_close(ours: torch.Tensor, expected: F64, what: object) -> None:
    """Equal but for float32, and for few elements that it rounds to another level or sign."""
    error = np.abs(ours.numpy().reshape(-1) - expected)
    assert np.quantile(error, 0.995) < 2e-6, what
    assert error.max() < 0.02, what


@grid(
    corrected=CORRECTIONS,
    decay=[0.0, 0.1],
    size=[2, 3, 4],
    kind=KINDS,
)
def test_both_phases_are_those_of_the_paper(kind: Kind, size: int, decay: float, corrected: dict[str, str]) -> None:
    """Every step, so that none is lost at the freeze either; and with the bits of rank 0 on all ranks."""
    shapes, steps, freeze = {"w": (32, 40), "bias": (70,), "other": (256, 3)}, 14, 5
    arguments = {"freeze_step": freeze, "lr": 0.01, "weight_decay": decay, "exact": "1d", "bucket_bytes": 2000}
    arguments |= {"betas": BETAS, **corrected}
    everyone = run_ranks(size, partial(run, kind=kind, steps=steps, shapes=shapes, **arguments))
    start = parameters(Given(**shapes))
    for name, shape in shapes.items():
        first = start[name].numpy().reshape(-1)
        code, exact = CODES[kind](size, first.size), len(shape) == 1
        local = drawn(steps, size, shape, name)
        settings = {"lr": 0.01, "betas": BETAS, "decay": decay, "exact": exact, **corrected}
        expected = simulate(code, local, first, freeze, **settings)
        for step in range(steps):
            assert_close(everyone[0][step][name], expected[step], (name, step))
            assert all(torch.equal(ranks[step][name], everyone[0][step][name]) for ranks in everyone)


@grid(size=[2, 3, 4], kind=KINDS, cover=1)
def test_before_the_freeze_it_is_adam_on_mean_gradients(kind: Kind, size: int) -> None:
    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Odd(communicator.rank), communicator=communicator, lr=0.01, freeze_step=6)
        for step in range(6):
            model.optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    everyone = run_ranks(size, rank)
    plain = Odd()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        torch.stack([plain(batch(r, step)).square().mean() for r in range(size)]).mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(everyone[0][name], p, rtol=1e-6, atol=2e-6)
        assert all(torch.equal(everyone[0][name], other[name]) for other in everyone)


@both
def test_groups_have_betas_of_their_own(kind: Kind) -> None:
    shapes, steps, freeze, ranks = {"a": (16, 16), "b": (16, 32)}, 10, 4, 2
    options = {"a": {"betas": (0.8, 0.95), "lr": 0.02}, "b": {"betas": (0.95, 0.9), "eps": 1e-3}}

    def rank(communicator: Communicator) -> list[dict[str, torch.Tensor]]:
        def wrap(module: nn.Module, **arguments: Any) -> MomentumAllReduce:
            groups = [{"params": [p], **options[name]} for name, p in module.named_parameters()]
            return kind(module, params=groups, **arguments)

        return run(communicator, kind=wrap, steps=steps, shapes=shapes, freeze_step=freeze, lr=0.01)

    ours = run_ranks(ranks, rank)[0]
    for name, shape in shapes.items():
        first = parameters(Given(**shapes))[name].numpy().reshape(-1)
        code = CODES[kind](ranks, first.size)
        expected = simulate(code, drawn(steps, ranks, shape, name), first, freeze, **{"lr": 0.01, **options[name]})
        for step in range(steps):
            assert_close(ours[step][name], expected[step], (name, step))


# ------------------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_optimizer_is_adam_until_the_freeze(decay: float) -> None:
    models = Odd(), Odd()
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    ours = FrozenAdam(models[0].parameters(), lr=0.01, weight_decay=decay, freeze_step=20)
    theirs = kind(models[1].parameters(), lr=0.01, weight_decay=decay)
    for step in range(20):
        assert not ours.frozen
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        for a, b in zip(*(m.parameters() for m in models), strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)
    assert ours.frozen


def test_optimizer_takes_adams_state() -> None:
    models = Odd(), Odd()
    theirs = torch.optim.AdamW(models[0].parameters(), lr=0.01, weight_decay=0.0)
    for step in range(3):
        theirs.zero_grad()
        models[0](batch(0, step)).square().mean().backward()
        theirs.step()
    models[1].load_state_dict(models[0].state_dict())
    ours = FrozenAdam(models[1].parameters(), freeze_step=5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step, frozen in ((3, False), (4, True)):
        for model, optimizer in zip(models, (theirs, ours), strict=True):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        assert ours.frozen is frozen
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@every_correction
def test_optimizer_can_be_copied(corrected: dict[str, Any]) -> None:
    model = Given(w=(4, 4))
    optimizer = FrozenAdam(model.parameters(), freeze_step=2, **corrected)
    model(w=torch.ones(4, 4)).backward()
    optimizer.step()
    optimizer.agree = lambda _: pytest.fail("a copy asks nobody")
    other = copy.deepcopy(optimizer)
    p = other.param_groups[0]["params"][0]
    p.grad = torch.ones(4, 4)
    other.step()
    assert other.frozen
    assert not optimizer.frozen
    v = other.state[p]["exp_avg_sq"]
    # The squares of two gradients, of 1 each.
    assert torch.allclose(v, torch.tensor(1.0 if corrected == {"v_correction": "frozen"} else 0.001999))


@every_correction
def test_frozen_v_keeps_its_bits(corrected: dict[str, Any]) -> None:
    model = Given(w=(8, 8))
    optimizer = FrozenAdam(model.parameters(), freeze_step=3, **corrected)
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        model(w=draw(step, 0, (8, 8))).backward()
        optimizer.step()
        seen.append(optimizer.state[model.w]["exp_avg_sq"].clone())
    assert all(torch.equal(seen[2], later) for later in seen[3:])
    gradients = torch.stack([draw(step, 0, (8, 8)).double() for step in range(3)])
    weights = torch.tensor([0.999**2, 0.999, 1.0], dtype=torch.float64)
    weights *= 1 / weights.sum() if corrected == {"v_correction": "frozen"} else 0.001
    expected = (gradients.square() * weights.view(-1, 1, 1)).sum(0)
    assert torch.allclose(seen[-1].double(), expected, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- the freeze


@grid(
    corrected=CORRECTIONS,
    size=[1, 2, 3],
    kind=KINDS,
)
def test_effective_learning_rate(kind: Kind, size: int, corrected: dict[str, str]) -> None:
    """A constant gradient, of one magnitude, which codecs keep: Adam moves every element by the learning rate.

    After the freeze, the bias correction says by how much more; one rank never freezes.
    """

    def rank(communicator: Communicator) -> None:
        model = kind(
            Given(w=(16, 16)),
            communicator=communicator,
            lr=0.01,
            freeze_step=10,
            eps=1e-12,
            betas=(0.9, 0.99),
            **corrected,
        )
        signs = draw(0, 0, (16, 16)).sign()
        for step in range(60):
            before = parameters(model.module)["w"]
            model.optimizer.zero_grad()
            model(w=0.3 * signs).backward()
            model.optimizer.step()
            moved = before - parameters(model.module)["w"]
            now = {"none": 1.0, "frozen": 1 - 0.99**10, "continued": 1 - 0.99 ** (step + 1)}
            longer = 1.0
            if step >= 10 and size > 1:
                longer = (now[corrected.get("v_correction", "continued")] / now["frozen"]) ** 0.5
            assert torch.allclose(moved, 0.01 * longer * signs, rtol=0, atol=6e-6), (step, moved)
        assert model.optimizer.frozen is (size > 1)

    run_ranks(size, rank)


@both
def test_one_rank_is_adam_for_ever(kind: Kind) -> None:
    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Odd(), communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    (ours,) = run_ranks(1, rank)
    plain = Odd()
    optimizer = torch.optim.Adam(plain.parameters())
    for step in range(8):
        optimizer.zero_grad()
        plain(batch(0, step)).square().mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(ours[name], p, rtol=1e-6, atol=1e-6)


@both
def test_bytes_fall_after_the_freeze(kind: Kind) -> None:
    def rank(communicator: Communicator) -> list[int]:
        model = kind(Given(w=(256, 256)), communicator=communicator, freeze_step=2)
        sent = [0]
        for step in range(4):
            model(w=draw(step, communicator.rank, (256, 256))).backward()
            model.optimizer.step()
            sent.append(model.stats().bytes_sent)
        return list(np.diff(sent))

    dense, last_dense, first, second = run_ranks(2, rank)[0]
    assert dense == last_dense
    assert first == second < dense * (0.05 if kind is OneBit else 0.27)


@both
def test_auto_freezes_everywhere_at_once(kind: Kind) -> None:
    """Not before two time constants of v, not while v changes, and as rank 0 says."""

    def rank(communicator: Communicator) -> tuple[int, list[float]]:
        model = kind(Given(w=(32, 32)), communicator=communicator, freeze_step="auto", betas=(0.9, 0.9))
        told = model.optimizer.agree
        # A rank that finds something else still goes by rank 0.
        model.optimizer.agree = lambda stable: told(stable if communicator.rank == 0 else not stable)
        for step in range(200):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (32, 32)) * (1 + 9 * 0.95**step)).backward()
            model.optimizer.step()
            if model.optimizer.frozen:
                break
        return step + 1, parameters(model.module)["w"].tolist()

    everyone = run_ranks(3, rank)
    assert everyone[0] == everyone[1] == everyone[2]
    assert 40 < everyone[0][0] < 150


def test_auto_waits_for_two_time_constants() -> None:
    model = Given(w=(4, 4))
    optimizer = FrozenAdam(model.parameters(), betas=(0.9, 0.98), freeze_step="auto")
    for _ in range(99):
        optimizer.zero_grad()
        model(w=torch.ones(4, 4)).backward()
        optimizer.step()
    assert not optimizer.frozen
    # What a look remembers is part of the state.
    again = FrozenAdam(model.parameters(), betas=(0.9, 0.98), freeze_step="auto")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, again):
        one.step()
        assert one.frozen


# ------------------------------------------------------------------------------------- who may skip, and what else


@both
@pytest.mark.parametrize("synchronous", [True, False])
def test_accumulated_gradients(kind: Kind, synchronous: bool) -> None:
    """Three backward passes a step, of which one or all are exchanged: one update with their sum.

    With all exchanged, momentum is encoded three times; so the gradients are ones that codecs keep.
    """
    shape, steps, freeze, ranks = (16, 16), 8, 4, 2

    def gradient(step: int, micro: int, rank: int) -> torch.Tensor:
        if synchronous:
            return (0.1 + 0.02 * micro + 0.1 * rank + 0.01 * step) * draw(0, 0, shape).sign()
        return draw(3 * step + micro, rank, shape)

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze, betas=BETAS)
        for step in range(steps):
            model.optimizer.zero_grad()
            for micro in range(3):
                with contextlib.nullcontext() if synchronous or micro == 2 else model.no_sync():
                    model(w=gradient(step, micro, communicator.rank)).backward()
            model.optimizer.step()
        assert model.stats().steps == steps * (3 if synchronous else 1)
        return parameters(model.module)["w"]

    first, second = run_ranks(ranks, rank)
    assert torch.equal(first, second)
    start = parameters(Given(w=shape))["w"].numpy().reshape(-1)
    sums = np.stack(
        [
            [sum(gradient(s, k, r).numpy().reshape(-1).astype(np.float64) for k in range(3)) for r in range(ranks)]
            for s in range(steps)
        ]
    )
    expected = simulate(CODES[kind](ranks, start.size), sums, start, freeze, lr=0.01, betas=BETAS)
    assert_close(first, expected[-1], "end")


@both
@pytest.mark.parametrize("infinite", [set(), {1, 6}], ids=["all taken", "some skipped"])
def test_skipped_steps_under_a_scaler_do_not_count(kind: Kind, infinite: set[int]) -> None:
    """The same as without a scaler and without these steps, whatever the scale: powers of two cost no bits."""
    shape, freeze = (32, 16), 4

    def rank(communicator: Communicator, scaled: bool) -> tuple[torch.Tensor, set[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze, betas=BETAS, scaler=scaler)
        taken, scales = 0, set()
        for step in range(11):
            if step in infinite and not scaled:
                continue
            model.optimizer.zero_grad()
            gradient = draw(taken, communicator.rank, shape)
            if step in infinite and communicator.rank == 1:
                gradient = gradient * float("inf")
            scaler.scale(model(w=gradient)).backward()
            assert model.optimizer.frozen is (taken >= freeze)
            scaler.step(model.optimizer)
            scaler.update()
            scales.add(scaler.get_scale())
            taken += step not in infinite
        return parameters(model.module)["w"], scales

    scaled = run_ranks(2, partial(rank, scaled=True))
    plain = run_ranks(2, partial(rank, scaled=False))
    assert torch.equal(scaled[0][0], scaled[1][0])
    assert len(scaled[0][1]) > 1
    if kind is QAdam or not infinite:
        assert torch.equal(scaled[0][0], plain[0][0])
    else:
        # The finite payloads of a skipped step change what their ranks keep.
        assert (scaled[0][0] - plain[0][0]).abs().median() < 0.005


@both
def test_weights(kind: Kind) -> None:
    shape, steps, freeze, ranks = (16, 32), 9, 4, 3

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze)
        for step in range(steps):
            model.optimizer.zero_grad()
            model.weigh(float(communicator.rank))
            model(w=draw(step, communicator.rank, shape)).backward()
            model.optimizer.step()
        return parameters(model.module)["w"]

    start = parameters(Given(w=shape))["w"].numpy().reshape(-1)
    weighted = drawn(steps, ranks, shape) * np.arange(ranks).reshape(1, -1, 1)
    expected = simulate(CODES[kind](ranks, start.size), weighted, start, freeze, lr=0.01)
    for ours in run_ranks(ranks, rank):
        assert_close(ours, expected[-1], "end")


@both
def test_a_scaler_must_be_known(kind: Kind) -> None:
    def rank(communicator: Communicator) -> None:
        model = kind(Given(w=(4, 4)), communicator=communicator)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(w=torch.ones(4, 4))).backward()
        with pytest.raises(RuntimeError, match="pass it to the algorithm's constructor as scaler="):
            scaler.step(model.optimizer)

    run_ranks(2, rank)


@both
def test_clipping(kind: Kind) -> None:
    """Before the freeze the gradient, then the momentum that it leads to."""

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=(32, 16)), communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (32, 16))).backward()
            frozen, unclipped = model.optimizer.frozen, model.module.w.grad.clone()
            assert model.clip_grad_norm_(1e6) > 0
            assert torch.equal(model.module.w.grad, unclipped)
            norm = model.clip_grad_norm_(0.5)
            model.optimizer.step()
            momentum = model.optimizer.state[model.module.w]["exp_avg"]
            assert momentum.norm() <= 0.5 * (1 + 1e-4)
            assert not frozen or norm < unclipped.norm()
        with pytest.raises(ValueError, match="only Euclidean norms"):
            model.clip_grad_norm_(1.0, norm_type=1.0)
        return momentum

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 40)
        self.right = nn.Linear(7, 40)
        self.late = nn.Linear(7, 40)
        fill(self)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(x)


@both
def test_parameters_without_gradient(kind: Kind) -> None:
    """In some steps, on some ranks, or before the freeze: what then comes first stays put."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Branches(), communicator=communicator, freeze_step=4, bucket_bytes=500)
        for step in range(12):
            branch = "late" if step > 8 else "left" if (step + communicator.rank) % 3 else "right"
            model.optimizer.zero_grad()
            model(batch(communicator.rank, step), branch).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    everyone = run_ranks(3, rank)
    start = parameters(Branches())
    for name, value in everyone[0].items():
        assert value.isfinite().all()
        assert torch.equal(value, start[name]) is name.startswith("late")
        assert all(torch.equal(value, other[name]) for other in everyone)


@grid(scaled=[False, True], bucket_bytes=[1, 10 << 20], kind=KINDS)
def test_nothing_is_lost_of_a_parameter_that_no_rank_used(kind: Kind, bucket_bytes: int, scaled: bool) -> None:
    """Adam skips it, so that what its payloads moved is still to come."""
    shapes, freeze, steps, ranks = {"a": (16, 32), "b": (13, 31), "c": (16, 32)}, 3, 12, 2

    def rank(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        more = {"error_feedback": True, "bucket_bytes": bucket_bytes, "limit": float("inf"), "scaler": scaler}
        model = kind(Given(**shapes), communicator=communicator, freeze_step=freeze, **more)
        applied = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for step in range(steps):
            model.optimizer.zero_grad()
            used = [name for name in shapes if step < freeze or name == "a" or step % 3 == 1]
            scaler.scale(model(**{name: draw(step, communicator.rank, shapes[name], name) for name in used})).backward()
            for name, p in model.module.named_parameters():
                assert (p.grad is not None) == (name in used)
                if step >= freeze and p.grad is not None:
                    applied[name] += p.grad / scaler.get_scale()
            scaler.step(model.optimizer)
            scaler.update()
        return applied, model.algorithm_state_dict()["vectors"]

    everyone = run_ranks(ranks, rank)
    for name, shape in shapes.items():
        produced = torch.zeros(shape)
        for step in range(freeze, steps):
            if name == "a" or step % 3 == 1:
                produced += sum(draw(step, r, shape, name) for r in range(ranks)) / ranks
        workers = sum(vectors["worker"][name] for _, vectors in everyone) / ranks
        kept = (workers + everyone[0][1]["owner"][name]).view(shape)
        assert kept.norm() > 0
        # Residuals are of momentum, of which a gradient is a tenth.
        found, expected = 0.1 * everyone[0][0][name] + kept, 0.1 * produced
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_residuals_of_unused_parameters_outlive_the_end_of_compression() -> None:
    """They are handed over to the first step without compression in which a rank uses the parameter."""
    shapes, freeze, ends, steps, ranks = {"a": (16, 32), "b": (13, 31)}, 3, 7, 11, 2

    def rank(communicator: Communicator) -> tuple[torch.Tensor, list[float]]:
        model = MomentumAllReduce(
            Given(**shapes),
            communicator=communicator,
            freeze_step=freeze,
            codec={0: "absmax_int4", ends: None},
            error_feedback=True,
            limit=float("inf"),
        )
        applied, kept = torch.zeros(shapes["b"]), []
        for step in range(steps):
            model.optimizer.zero_grad()
            used = ["a"] if ends <= step < ends + 2 else ["a", "b"]
            model(**{name: draw(step, communicator.rank, shapes[name], name) for name in used}).backward()
            if step >= freeze and model.module.b.grad is not None:
                applied += model.module.b.grad
            vectors = model.algorithm_state_dict()["vectors"]
            kept.append(sum(float(named["b"].norm()) for named in vectors.values() if "b" in named))
            model.optimizer.step()
        return applied, kept

    (applied, kept), _ = run_ranks(ranks, rank)
    assert all(kept[freeze : ends + 2]), kept
    assert not any(kept[ends + 2 :]), kept
    used = [step for step in range(freeze, steps) if not ends <= step < ends + 2]
    expected = sum(draw(step, r, shapes["b"], "b") for step in used for r in range(ranks)) / ranks
    assert (applied - expected).norm() < 1e-5 * expected.norm()


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(kind: Kind, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> tuple[float, float, list[torch.Tensor]]:
        model = kind(Odd().to(dtype), communicator=communicator, lr=0.01, freeze_step=10)
        losses = []
        for step in range(40):
            model.optimizer.zero_grad()
            loss = model(batch(communicator.rank, step % 2).to(dtype)).square().mean()
            loss.backward()
            model.optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0], losses[-2], [p.detach() for p in model.parameters()]

    everyone = run_ranks(2, rank)
    assert everyone[0][1] < 0.5 * everyone[0][0]
    assert all(torch.equal(a, b) for a, b in zip(everyone[0][2], everyone[1][2], strict=True))


@both
def test_pieces_and_memory_formats_change_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are worked on in pieces of some rows, and their memory may be in another order."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        module = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "odd": Odd()})
        fill(module)
        module.to(memory_format=torch.channels_last)
        model = kind(module, communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            x = batch(communicator.rank, step, 3 * 5 * 5).view(4, 3, 5, 5)
            y = batch(communicator.rank, step)
            (module["conv"](x).square().mean() + module["odd"](y).square().mean()).backward()
            assert module["conv"].weight.grad.stride() == module["conv"].weight.stride()
            model.optimizer.step()
        return parameters(module)

    whole = run_ranks(2, rank)
    monkeypatch.setattr(momentum_exchange, "_PIECE", 50)
    cut = run_ranks(2, rank)
    for name, value in whole[0].items():
        assert value.isfinite().all()
        assert all(torch.equal(value, other[name]) for other in (whole[1], *cut))


# --------------------------------------------------------------------------------------------- resuming


@grid(
    corrected=CORRECTIONS,
    bucket_bytes=[1, 1000, 10 << 20],
    at=[2, 9],
    kind=KINDS,
)
def test_resumed_training_has_the_same_bits(kind: Kind, at: int, bucket_bytes: int, corrected: dict[str, Any]) -> None:
    """Checkpoints before and after the freeze, in other objects; and buckets are laid out anew after the first pass.

    What becomes of the bias correction is part of the optimizer's state.
    """
    shapes = {"a": (16, 32), "b": (256,), "c": (13, 31), "d": (5,)}

    def go_on(model: MomentumAllReduce, rank: int, first: int, last: int) -> None:
        for step in range(first, last):
            model.optimizer.zero_grad()
            model(**{name: draw(step, rank, shape, name) for name, shape in shapes.items()}).backward()
            model.optimizer.step()

    def rank(communicator: Communicator) -> None:
        whole, begun, resumed = (
            kind(Given(**shapes), communicator=communicator, freeze_step=5, bucket_bytes=bucket_bytes, **options)
            for options in (corrected, corrected, {})
        )
        go_on(whole, communicator.rank, 0, 14)
        go_on(begun, communicator.rank, 0, at)
        states = copy.deepcopy((begun.module.state_dict(), begun.optimizer.state_dict(), begun.algorithm_state_dict()))
        go_on(begun, communicator.rank, at, 14)
        resumed.module.load_state_dict(states[0])
        resumed.optimizer.load_state_dict(states[1])
        resumed.load_algorithm_state_dict(states[2])
        go_on(resumed, communicator.rank, at, 14)
        for name, value in parameters(whole.module).items():
            assert torch.equal(value, parameters(begun.module)[name])
            assert torch.equal(value, parameters(resumed.module)[name])

    run_ranks(3, rank)


def test_states_of_before_v_correction_was_an_option_go_on() -> None:
    """Their frozen v is corrected; one that is not frozen yet follows the constructor."""
    for frozen in (False, True):
        model = Given(w=(4, 4))
        optimizer = FrozenAdam(model.parameters(), freeze_step=2 if frozen else 5, v_correction="frozen")
        for step in range(3):
            model.w.grad = draw(step, 0, (4, 4))
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        del state["param_groups"][0]["v_correction"]
        other = Given(w=(4, 4))
        other.load_state_dict(model.state_dict())
        resumed = FrozenAdam(other.parameters(), freeze_step=5)
        resumed.load_state_dict(state)
        assert resumed.param_groups[0]["v_correction"] == ("frozen" if frozen else "continued")
        for one, net in ((optimizer, model), (resumed, other)):
            net.w.grad = draw(3, 0, (4, 4))
            one.step()
        assert torch.equal(model.w, other.w)


@both
def test_frozen_state_goes_on_with_one_rank(kind: Kind) -> None:
    def train(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=2)
        for step in range(3):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (16, 16))).backward()
            model.optimizer.step()
        return model.optimizer.state_dict(), model.module.state_dict()

    optimizer, module = run_ranks(2, train)[0]
    assert optimizer["param_groups"][0]["frozen"]
    v = optimizer["state"][0]["exp_avg_sq"].clone()

    def alone(communicator: Communicator) -> None:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=2)
        model.module.load_state_dict(module)
        model.optimizer.load_state_dict(optimizer)
        model(w=draw(3, 0, (16, 16))).backward()
        model.optimizer.step()
        assert model.optimizer.frozen
        assert torch.equal(model.optimizer.state[model.module.w]["exp_avg_sq"], v)

    run_ranks(1, alone)


# ------------------------------------------------------------------------------------------------ masks and limits


def dead(step: int, rank: int, size: float = 0.0) -> torch.Tensor:
    """A gradient with 10 elements of constantly zero or little gradient."""
    gradient = draw(step, rank, (16, 16))
    gradient.view(-1)[:10] = size
    return gradient


@both
def test_elements_without_gradient_stay_exactly_put(kind: Kind) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5)
        for step in range(60):
            model.optimizer.zero_grad()
            # After the freeze they may have one.
            model(w=dead(step, communicator.rank, 1e-3 if step > 40 else 0.0)).backward()
            model.optimizer.step()
        return parameters(model.module)["w"]

    first, second = run_ranks(2, rank)
    start = parameters(Given(w=(16, 16)))["w"]
    assert torch.equal(first, second)
    assert torch.equal(first.view(-1)[:10], start.view(-1)[:10])
    assert (first != start).view(-1)[10:].all()


@both
@pytest.mark.parametrize("mask", [False, {"w": torch.ones(16, 16)}], ids=["none", "given"])
def test_elements_without_gradient_are_caught_without_a_mask(kind: Kind, mask: bool | dict[str, torch.Tensor]) -> None:
    def rank(communicator: Communicator) -> None:
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5, mask=mask)
        for step in range(5):
            model.optimizer.zero_grad()
            model(w=dead(step, communicator.rank)).backward()
            model.optimizer.step()
        with pytest.raises(
            ValueError, match="10 of the 256 elements of parameter 'w' had no gradient up to the freeze"
        ):
            model(w=dead(5, communicator.rank)).backward()

    run_ranks(2, rank)


@both
def test_given_masks(kind: Kind) -> None:
    """They stop elements at the freeze, whatever their v."""

    def rank(communicator: Communicator) -> None:
        mask = torch.ones(16, 16, dtype=torch.bool)
        mask[3] = False
        model = kind(Given(w=(16, 16)), communicator=communicator, freeze_step=5, mask={"w": mask})
        seen = []
        for step in range(9):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (16, 16))).backward()
            model.optimizer.step()
            seen.append(parameters(model.module)["w"])
        assert (seen[4][3] != seen[3][3]).all()
        # Momentum is zero but for the rounding of the gradient that takes it there.
        assert torch.allclose(seen[8][3], seen[4][3], rtol=0, atol=1e-6)
        assert (seen[8] != seen[4])[:3].all()

    run_ranks(2, rank)


@both
def test_no_element_moves_by_more_than_the_limit(kind: Kind) -> None:
    """Where v is tiny, what a codec lacks would be divided by it: steps of 1e5 learning rates."""

    def rank(communicator: Communicator, limit: float) -> float:
        model = kind(Given(w=(16, 16)), communicator=communicator, lr=1e-3, freeze_step=5, limit=limit)
        most = 0.0
        for step in range(30):
            before = parameters(model.module)["w"]
            model.optimizer.zero_grad()
            model(w=dead(step, communicator.rank, 1e-9)).backward()
            model.optimizer.step()
            most = max(most, float((parameters(model.module)["w"] - before).abs().max()))
        return most / 1e-3

    assert run_ranks(2, partial(rank, limit=float("inf")))[0] > 1e4
    # The bias correction of m, 1 / (1 - 0.9^6), is on top.
    assert run_ranks(2, partial(rank, limit=100.0))[0] <= 100 / (1 - 0.9**6) * 1.001


# -------------------------------------------------------------------------------------------------- refusals


def test_refusals() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        with pytest.raises(TypeError, match="QAdam makes its optimizer itself, got SGD"):
            QAdam(module, torch.optim.SGD(module.parameters()), communicator=communicator)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="freeze_step says when"):
            OneBitAdam(module, warmup_steps=3, communicator=communicator)
        with pytest.raises(ValueError, match=r"'second.weight' of shape \(13, 31\) is in no group"):
            OneBitAdam(module, params=[*module.first.parameters(), module.scale], communicator=communicator)
        with pytest.raises(ValueError, match="mask of 'scale' has shape"):
            OneBitAdam(module, mask={"scale": torch.ones(2)}, communicator=communicator)
        with pytest.raises(ValueError, match="mask of 'frozen' has shape"):
            OneBitAdam(module, mask={"frozen": torch.ones(5)}, communicator=communicator)
        with pytest.raises(ValueError, match="limit must be above 0"):
            QAdam(module, limit=0.0, communicator=communicator)
        with pytest.raises(ValueError, match="v_correction must be one of"):
            QAdam(module, v_correction="yes", communicator=communicator)
        with pytest.raises(ValueError, match="freeze_step must be"):
            QAdam(module, freeze_step=0, communicator=communicator)
        with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
            QAdam(module, params=[{"params": module.parameters(), "betas": (0.9, 1.0)}], communicator=communicator)
        model = from_spec("onebit_adam:freeze_step=7,block=64", module, communicator=communicator)
        assert isinstance(model, OneBitAdam)
        assert model.optimizer.freeze_step == 7
        with pytest.raises(ValueError, match="OneBitAdam cannot go on"), model.join():
            pass

    run_ranks(2, rank)


# ------------------------------------------------------------------------------------------------- convergence


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes of 8x8 pixels, of which 3 are always 0 and 3 almost always, as in scikit-learn's digits."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 8000)
    pixels = np.maximum(random.normal(0, 1, (10, 64))[labels] + random.normal(0, 2.5, (8000, 64)), 0)
    pixels[:, :3] = 0
    pixels[:, 3:6] *= random.random((8000, 3)) < 0.01
    return torch.from_numpy(pixels.astype(np.float32)), torch.from_numpy(labels)


def training_loss(communicator: Communicator, steps: int, wrap: Callable[..., tuple[nn.Module, Any]]) -> float:
    pixels, labels = images()
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fill(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(-0.1).mul_(0.3)
    model, optimizer = wrap(module, communicator)
    for step in range(steps):
        generator = torch.Generator().manual_seed(101 * step + communicator.rank)
        chosen = torch.randint(len(pixels), (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(pixels), labels))


def dense(module: nn.Module, communicator: Communicator) -> tuple[nn.Module, Any]:
    return GradientAllReduce(module, communicator=communicator), torch.optim.Adam(module.parameters())


@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_trains_as_well_as_adam(steps: int) -> None:
    expected = run_ranks(4, training_loss, steps, dense)[0]
    assert expected < 1.0
    for kind in KINDS.values():

        def wrap(module: nn.Module, communicator: Communicator, kind: Kind = kind) -> tuple[nn.Module, Any]:
            model = kind(module, communicator=communicator, freeze_step=steps // 5)
            return model, model.optimizer

        losses = run_ranks(4, training_loss, steps, wrap)
        print(losses[0], expected)
        assert len(set(losses)) == 1
        assert losses[0] <= 1.1 * expected + 1e-3

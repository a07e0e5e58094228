"""Random trainings with local steps, and the nets that they train."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.compression import ChunkedTopK

SAMPLES = 4
# Of Adam's and Adagrad's denominator: so large that rounding of a gradient near zero does not become a step.
EPS = 1e-2


@dataclass(frozen=True)
class Segment:
    """Some steps with one algorithm.

    Attributes:
        name: of the algorithm, as `from_spec` has it.
        options: of its constructor.
        steps: taken by each rank; with `join` by that which has most batches.
        begins: "new", "switch" from the segment before, "resume" from a checkpoint of it, or "resize": that on other ranks.
        ranks: their number.
        join: batches of each rank, if they differ; empty if not.
        synchronizes: True if `synchronize` is called in the end.
    """

    name: str
    options: dict[str, Any]
    steps: int
    begins: str
    ranks: int
    join: tuple[int, ...] = ()
    synchronizes: bool = False


@dataclass(frozen=True)
class Training:
    """A training, drawn from a seed.

    Attributes:
        width: features of all layers.
        kinds: of each layer, see `_layer`.
        frozen: for each layer whether it is.
        used: for each try, rank and layer whether it is part of the net; tries beyond the last one begin again.
        dtype: of parameters.
        library: of the optimizer, `torch.optim` or that of this package.
        optimizer: name of its class.
        options: of its groups; biases and other vectors have the second ones.
        rates: factor of the learning rate, for each step; beyond the last one they begin again.
        micro: batches whose gradients are added up for a step.
        clip: largest norm of gradients; None for any.
        scaled: True if losses are scaled.
        overflows: tries of a rank whose gradients overflow, as (rank, try).
        lossy: True if a codec leaves nothing to be compared with the simulation but outer parameters between ranks.
        segments: one after another.
    """

    seed: int
    width: int
    kinds: tuple[str, ...]
    frozen: tuple[bool, ...]
    used: tuple[tuple[tuple[bool, ...], ...], ...]
    dtype: torch.dtype
    library: str
    optimizer: str
    options: tuple[dict[str, Any], dict[str, Any]]
    rates: tuple[float, ...]
    micro: int
    clip: float | None
    scaled: bool
    overflows: frozenset[tuple[int, int]]
    lossy: bool
    segments: tuple[Segment, ...]

    def layers(self, step: int, rank: int) -> tuple[bool, ...]:
        """Which layers a rank uses in a try."""
        everyone = self.used[step % len(self.used)]
        return everyone[rank % len(everyone)]

    def rate(self, step: int) -> float:
        """The factor of the learning rates in a step."""
        return self.rates[step % len(self.rates)]

    def batch(self, step: int, rank: int, part: int) -> torch.Tensor:
        """Inputs of one of the batches of a try."""
        seed = ((self.seed * 1009 + step) * 11 + rank) * 5 + part
        x = torch.randn(SAMPLES, self.width, generator=torch.Generator().manual_seed(seed % 2**63))
        return x.to(self.dtype)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a net, with one or two groups."""
        params = list(net.parameters())
        split = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        groups = [{"params": some, **own} for some, own in zip(split, self.options, strict=True) if some]
        return getattr(optim if self.library == "ours" else torch.optim, self.optimizer)(groups)  # type: ignore[no-any-return]


def draw(seed: int) -> Training:
    """A training from a seed."""
    dice = random.Random(seed)
    ranks = dice.choice((2, 2, 3, 4))
    layers = ("linear", "bare", "norm", "batch", "scale", "picture", "empty", "tied")
    kinds = tuple(dice.choices(layers, (5, 3, 2, 2, 2, 1, 1, 2), k=dice.randint(1, 6)))
    dtype = dice.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    lossy = dice.random() < 0.2
    segments = tuple(_segments(dice, ranks, dtype, lossy))
    alone = all(each.begins != "resize" for each in segments)
    chances = [dice.choice((0.0, 0.5, 0.8, 1.0, 1.0)) for _ in kinds]
    used = []
    for _ in range(dice.randint(1, 5)):
        common = tuple(dice.random() < chance for chance in chances)
        # States of optimizers that only some ranks have are not the same on the ranks that go on.
        used.append(tuple(tuple(dice.random() < c for c in chances) if alone else common for _ in range(ranks)))
    overflows = [(r, t) for r in range(ranks) for t in range(12) if dice.random() < 0.1]
    scaled = dice.random() < 0.4 and all(each.name != "allreduce" and not each.join for each in segments)
    name = dice.choice(("SGD", "SGD", "Adam", "AdamW", "AdamW", "Adagrad"))
    library = "torch" if name == "Adagrad" or dtype == torch.float64 or dice.random() < 0.6 else "ours"
    return Training(
        seed=seed,
        width=dice.choice((3, 8, 11)),
        kinds=kinds,
        frozen=tuple(dice.random() < 0.15 for _ in kinds),
        used=tuple(used),
        dtype=dtype,
        library=library,
        optimizer=name,
        options=(_options(dice, name), _options(dice, name)),
        rates=tuple(dice.choice((1.0, 1.0, 0.5, 0.25)) for _ in range(dice.randint(1, 6))),
        micro=dice.choice((1, 1, 2, 3)),
        clip=dice.choice((None, None, 0.05)),
        scaled=scaled,
        overflows=frozenset(overflows if scaled else ()),
        lossy=lossy,
        segments=segments,
    )


def _segments(dice: random.Random, ranks: int, dtype: torch.dtype, lossy: bool) -> Iterator[Segment]:
    before, begins = "", "new"
    count = dice.choice((1, 1, 2, 3))
    name, options = _algorithm(dice, dtype, lossy)
    for place in range(count):
        last = place == count - 1
        steps = dice.randint(3, 14)
        join = tuple(dice.randint(0, steps) for _ in range(ranks)) if last and dice.random() < 0.15 else ()
        yield Segment(
            name, options, max(join, default=steps), begins, ranks, join, dice.random() < 0.3 and name != "allreduce"
        )
        before = name
        begins = dice.choice(("switch", "switch", "resume", "resize"))
        if before == "allreduce":
            begins = "switch"
        if begins == "switch":
            name, options = _algorithm(dice, dtype, lossy)
            if before != "allreduce" and place < count - 2 and dice.random() < 0.4:
                name, options = "allreduce", {"broadcast_buffers": False}
        elif begins == "resize":
            ranks = dice.choice([n for n in (2, 3, 4) if n != ranks])


def _algorithm(dice: random.Random, dtype: torch.dtype, lossy: bool) -> tuple[str, dict[str, Any]]:
    name = dice.choice(("local_sgd", "post_local_sgd", "slow_mo", "diloco", "diloco", "sparse_loco"))
    fragments = dice.choice((1, 2, 3)) if name == "diloco" else 1
    interval = fragments * dice.choice((1, 2, 3, 4))
    options: dict[str, Any] = {"interval": interval, "bucket_bytes": dice.choice((1, 100, 500, 10 << 20))}
    if interval // fragments > 1 and name != "post_local_sgd" and dice.random() < 0.4:
        options["delay"] = dice.randint(1, interval // fragments - 1)
    if dice.random() < 0.3:
        options["blend"] = dice.choice((0.0, 0.25, 0.5))
    if name == "post_local_sgd":
        options["first_phase"] = dice.randint(0, 5)
    elif name == "slow_mo":
        options |= {"slow_lr": dice.choice((1.0, 0.8)), "slow_momentum": dice.choice((0.0, 0.6))}
    elif name == "diloco":
        options |= {
            "fragments": fragments,
            "outer_lr": dice.choice((1.0, 0.7)),
            "outer_momentum": dice.choice((0.0, 0.5, 0.8)),
        }
    elif name == "sparse_loco":
        options |= {"outer_lr": dice.choice((1.0, 0.7)), "beta": dice.choice((0.0, 0.5, 0.95))}
        options |= {"codec": ChunkedTopK(dice.choice((1, 5, 32)), 32), "reduce": dice.choice(("contributors", "mean"))}
        # The simulation has exact means of what is dense. No further draw, so that seeds keep their trainings.
        options["dense"] = (("absmax_int8:block=32", "sign:block=32") if lossy else (None, "identity"))[interval % 2]
    if lossy and name != "sparse_loco":
        codec = dice.choice(("minmax_uint8", "absmax_int4", "sign", "topk:ratio=0.1", {0: "sign", 2: "minmax_uint8"}))
        options |= {"codec": codec, "exact": dice.choice(((), "1d")), "min_numel": 0, "seed": dice.randint(0, 9)}
    return name, options


def _options(dice: random.Random, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"lr": dice.choice((0.01, 0.03)), "weight_decay": dice.choice((0.0, 0.1))}
    if name in ("Adam", "AdamW"):
        options |= {"betas": (dice.choice((0.5, 0.9)), 0.9), "eps": EPS, "amsgrad": dice.random() < 0.4}
    elif name == "Adagrad":
        options |= {"eps": EPS, "initial_accumulator_value": 0.1}
    else:
        options |= {"momentum": dice.choice((0.0, 0.5, 0.9))}
        options["nesterov"] = options["momentum"] > 0 and dice.random() < 0.5
    return options


class Net(nn.Module):
    """Layers with shortcuts around them, so that any of them may be left out."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        width = training.width
        self.layers = nn.ModuleList(_layer(kind, width) for kind in training.kinds)
        tied = [layer for layer, kind in zip(self.layers, training.kinds, strict=True) if kind == "tied"]
        for layer in tied[1:]:
            layer.weight = tied[0].weight
        self.head = nn.Linear(width, 2)
        generator = torch.Generator().manual_seed(training.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        for layer, frozen in zip(self.layers, training.frozen, strict=True):
            if frozen and layer not in tied:
                layer.requires_grad_(False)
        self.to(training.dtype)

    def forward(self, x: torch.Tensor, used: Sequence[bool]) -> torch.Tensor:
        for layer, there in zip(self.layers, used, strict=True):
            if there:
                x = torch.tanh(x + layer(x))
        return self.head(x).square().mean()


class _Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.sum()


class _Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of equal rows the gradients would be equal, and rounding would choose the largest.
        rows = torch.linspace(0.5, 1.7, 6, dtype=x.dtype).view(1, 2, 3, 1)
        return self.filter(x[:, None, None, :] * rows).mean((1, 2))


def _layer(kind: str, width: int) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(width, width),
        "bare": lambda: nn.Linear(width, width, bias=False),
        "tied": lambda: nn.Linear(width, width, bias=False),
        "norm": lambda: nn.LayerNorm(width),
        "batch": lambda: nn.BatchNorm1d(width),
        "scale": _Scale,
        "empty": lambda: _Scale(0, width),
        "picture": _Picture,
    }[kind]()

"""What the study compares: every algorithm of this package but two, `DistributedDataParallel` and its hooks.

`AutoTune` has these to choose from. `MuLoCo` needs Muon, whose arithmetic takes a hundred times that of a step of this model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from bagua_kernels import algorithms, optim
from bench.convergence.row import Row
from bench.convergence.tasks import Task, fashion, up_and_down

WIDTH, PIXELS, CLASSES = 1024, 784, 10
FIRST = 4 / 400  # of all steps, before PostLocalSGD's local ones
BATCH = 16
Kind = Literal["exact", "synchronous", "neighbours", "local", "asynchronous", "chosen"]
SYNCHRONOUS = ("exact", "synchronous")


def perceptron() -> nn.Module:
    """Three matrices, 1.86 M parameters: 7.5 MB for 180 million operations a rank and step."""
    layers = [nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


TASK = Task("tradeoff", fashion, perceptron, BATCH, 400, 0.2, 0.0, up_and_down, seeds=3)


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: in tables.
        kind: what it changes: "exact" and "synchronous" leave all ranks the same bits in each step. "chosen" is a tuner, which
            takes another way on each network.
        row: the algorithm, its options and its optimizer; for DDP the algorithm whose means are the same.
        ddp: of `DistributedDataParallel`: "ddp", with a hook of PyTorch's behind it, or "hook" and the spec of one of ours.
        curve: name of the way that makes the same steps, whose accuracies are taken; empty for its own.
        interval: steps of which one exchanges parameters; these are timed together.
        exact: part of all steps that exact means come first.
    """

    name: str
    kind: Kind
    row: Row
    ddp: str = ""
    curve: str = ""
    interval: int = 1
    exact: float = 0.0


def _sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return optim.SGD(model.parameters(), lr=rate)


def _way(
    name: str,
    kind: Kind,
    algorithm: type[algorithms.Algorithm],
    options: dict[str, Any] | None = None,
    *,
    optimizer: str | Callable[[nn.Module, float], torch.optim.Optimizer] | None = None,
    rate: float | None = None,
    momentum: float | None = None,
    begins: float | None = None,
    **others: Any,
) -> Way:
    row = Row(name, algorithm, options or {}, rate=rate, momentum=momentum, optimizer=optimizer, begins=begins)
    return Way(name, kind, row, **{"exact": begins or 0.0, **others})


def ways() -> list[Way]:
    """All of them; the first one is what the others are compared with."""
    outer = {"interval": 30, "outer_lr": 0.9, "outer_momentum": 0.7}
    reduced, backward = algorithms.CompressedAllReduce, {"apply_in_backward": True}
    return [
        _way("ddp", "exact", algorithms.GradientAllReduce, ddp="ddp", curve="allreduce"),
        _way("ddp fp16", "synchronous", reduced, {"codec": "cast:dtype=float16"}, ddp="ddp fp16"),
        *(
            _way(
                f"ddp powersgd {rank}",
                "synchronous",
                algorithms.PowerSGD,
                {"rank": rank},
                ddp=f"ddp powersgd {rank}",
                curve=f"powersgd {rank}",
            )
            for rank in (1, 4)
        ),
        _way("hook bytegrad", "synchronous", algorithms.ByteGrad, ddp="hook bytegrad", curve="bytegrad"),
        _way(
            "hook powersgd 4",
            "synchronous",
            algorithms.PowerSGD,
            {"rank": 4},
            ddp="hook powersgd:rank=4",
            curve="powersgd 4",
        ),
        _way("allreduce", "exact", algorithms.GradientAllReduce),
        _way(
            "allreduce in backward", "exact", algorithms.GradientAllReduce, backward, optimizer=_sgd, curve="allreduce"
        ),
        _way("bytegrad", "synchronous", algorithms.ByteGrad),
        _way("qsgd", "synchronous", algorithms.QSGD),
        _way("terngrad", "synchronous", algorithms.TernGrad),
        _way("natural", "synchronous", algorithms.NaturalCompression),
        _way("fp8", "synchronous", algorithms.FP8AllReduce),
        _way("int8", "synchronous", reduced, {"codec": "absmax_int8", "error_feedback": False}),
        _way("int4", "synchronous", reduced, {"codec": "absmax_int4"}),
        _way("sign", "synchronous", algorithms.SignSGD),
        _way("one_bit", "synchronous", algorithms.OneBitSGD, begins=0.2),
        _way("double_squeeze", "synchronous", algorithms.DoubleSqueeze),
        _way("topk", "synchronous", algorithms.TopK, {"ratio": 0.01}),
        _way("randomk", "synchronous", algorithms.RandomK),
        _way("dgc", "synchronous", algorithms.DGC, momentum=0.9),
        *(_way(f"powersgd {rank}", "synchronous", algorithms.PowerSGD, {"rank": rank}) for rank in (1, 2, 4)),
        _way("powersgd 4 in turn", "synchronous", algorithms.PowerSGD, {"rank": 4, "alternate": True}),
        _way(
            "powersgd 4 in backward",
            "synchronous",
            algorithms.PowerSGD,
            {"rank": 4, **backward},
            optimizer=_sgd,
            curve="powersgd 4",
        ),
        _way("qadam", "synchronous", algorithms.QAdam, rate=1e-3, optimizer="adam", begins=0.2),
        _way("onebit_adam", "synchronous", algorithms.OneBitAdam, rate=1e-3, optimizer="adam", begins=0.2),
        _way("decentralized", "neighbours", algorithms.Decentralized, {"peers": "one_peer_exponential"}),
        _way("sgp", "neighbours", algorithms.StochasticGradientPush, {"peers": "one_peer_exponential"}),
        *(
            _way(
                f"lowprec {bits}",
                "neighbours",
                algorithms.LowPrecisionDecentralized,
                {"codec": f"minmax_uint{bits}:stochastic=true"},
            )
            for bits in (8, 2)
        ),
        _way("choco", "neighbours", algorithms.Choco, {"codec": "minmax_uint8"}),
        _way("d2", "neighbours", algorithms.D2, {"peers": "chain"}),
        _way("local_sgd", "local", algorithms.LocalSGD, {"interval": 16}, interval=16),
        _way(
            "post_local_sgd",
            "local",
            algorithms.PostLocalSGD,
            {"first_phase": 4, "interval": 16},
            interval=16,
            exact=FIRST,
        ),
        _way("slow_mo", "local", algorithms.SlowMo, {"interval": 16}, interval=16),
        _way("diloco", "local", algorithms.DiLoCo, outer, interval=30),
        _way("diloco int4", "local", algorithms.DiLoCo, {**outer, "codec": "absmax_int4", "delay": 10}, interval=30),
        _way("sparse_loco", "local", algorithms.SparseLoCo, {"interval": 30, "delay": 29}, interval=30),
        _way("async 8 bits", "asynchronous", algorithms.AsyncModelAverage, {"interval": 32, "codec": "minmax_uint8"}),
        _way("async float32", "asynchronous", algorithms.AsyncModelAverage, {"interval_ms": 0.0}),
        _way("async_decentralized", "asynchronous", algorithms.AsyncDecentralized),
        # All ranks meet once in ten steps, so that it takes as many steps on all of them.
        _way("wagma", "asynchronous", algorithms.Wagma, interval=10),
    ]


# Trained with all seeds; the others with the first one.
PAIRED = (
    "allreduce",
    "bytegrad",
    "topk",
    "powersgd 1",
    "powersgd 2",
    "powersgd 4",
    "powersgd 4 in turn",
    "async 8 bits",
)
SMALL = (
    "ddp",
    "ddp fp16",
    "hook bytegrad",
    "allreduce",
    "bytegrad",
    "topk",
    "powersgd 4",
    "lowprec 2",
    "local_sgd",
    "async 8 bits",
)


def chosen(full: bool) -> list[Way]:
    """All ways, or those of the small study."""
    return [way for way in ways() if full or way.name in SMALL]


@dataclass(frozen=True)
class Cell:
    """A network, and who uses it.

    Attributes:
        rate: of links, Mbit/s.
        delay: ms one way; None for none.
        straggler: True if the last rank sleeps after each step for as long as it took.
        batch: examples of a rank and step.
    """

    rate: float
    delay: float | None = None
    straggler: bool = False
    batch: int = field(default=BATCH)


# A process delays the packets, for which it needs part of a core: faster links have no delay.
NETWORKS: list[tuple[float, float | None]] = [
    *((rate, None) for rate in (100.0, 500.0, 1000.0, 5000.0)),
    *((rate, delay) for rate in (100.0, 500.0) for delay in (5.0, 20.0)),
]
# Steps that take long, beside which there is little to gain.
LONG = 256
FULL = [
    *(Cell(rate, delay, straggler) for rate, delay in NETWORKS for straggler in (False, True)),
    *(Cell(rate, batch=LONG) for rate in (1000.0, 5000.0)),
]
FEW = [Cell(100.0), Cell(1000.0)]

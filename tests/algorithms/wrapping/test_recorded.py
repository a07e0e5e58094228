"""Ranks whose options differ are told so at construction, whatever the option and whoever wrote the class."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from bagua_kernels import compression
from bagua_kernels.algorithms import (
    DGC,
    QSGD,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    FP8AllReduce,
    GradientAllReduce,
    Guard,
    PowerSGD,
    QAdam,
    RandomK,
    TopK,
    from_spec,
)
from bagua_kernels.algorithms.wrapping.recorded import describe, shown
from bagua_kernels.comm import Communicator, Nodes, run_ranks
from tests.algorithms.ranks import Odd, batch, gradients
from tests.grids import grid


def first_policy(name: str) -> float:
    return 1.0


def second_policy(name: str) -> float:
    return 2.0


class Mine(TopK):
    """What a user writes: an option of its own, one that may differ, and one that it makes of others."""

    name = "mine"
    may_differ = frozenset({"log"})

    def __init__(
        self, module: nn.Module, *, policy: Callable[[str], float] = first_policy, log: str = "", **options: object
    ) -> None:
        self.log, self.policy = log, policy
        self.depth = options.pop("depth", 1)
        super().__init__(module, ratio=0.5 if log == "odd ratio" else 0.25, **options)


def refused(size: int, make: Callable[[int], dict[str, object]], kind: type[Algorithm]) -> list[str]:
    """The messages of all ranks, each of which makes the algorithm with options of its own."""

    def rank(communicator: Communicator) -> str:
        with pytest.raises(ValueError, match="differs between ranks") as caught:
            kind(Odd(), communicator=communicator, **make(communicator.rank))
        # What failed may be made anew, with the same options.
        algorithm = kind(Odd(), communicator=communicator, **make(0))
        algorithm.close()
        return str(caught.value)

    return run_ranks(size, rank)


DIFFERENT = [
    (FP8AllReduce, lambda r: {"format": ("e4m3", "e5m2")[r % 2]}, "format"),
    (RandomK, lambda r: {"seed": 7 + r % 2}, "seed"),
    (PowerSGD, lambda r: {"rank": 1 + r % 2}, "rank"),
    (PowerSGD, lambda r: {"seed": r % 2}, "seed"),
    (DGC, lambda r: {"momentum": (0.9, 0.8)[r % 2]}, "momentum"),
    (QSGD, lambda r: {"norm": ("max", "l2")[r % 2]}, "norm"),
    (QAdam, lambda r: {"freeze_step": 5, "lr": (0.1, 0.2)[r % 2]}, "lr"),
    (QAdam, lambda r: {"freeze_step": 5, "mask": {"first.bias": torch.full((31,), 1.0 + r % 2)}}, "mask"),
    (ByteGrad, lambda r: {"guard": Guard(every=10 + r % 2)}, "guard"),
    (ByteGrad, lambda r: {"broadcast_buffers": r % 2 == 0}, "broadcast_buffers"),
    (ByteGrad, lambda r: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** (r % 2))}, "scaler"),
    (CompressedAllReduce, lambda r: {"codec": compression.FP8(format=("e4m3", "e5m2")[r % 2])}, "codec"),
    (CompressedAllReduce, lambda r: {"codec": {0: "sign", 5 + r % 2: None}}, "codec"),
    (CompressedAllReduce, lambda r: {"groups": {"*.weight": ("sign", "qsgd")[r % 2]}}, "groups"),
    (GradientAllReduce, lambda r: {"nodes": Nodes(((0, 1), (2,)) if r % 2 else ((0,), (1, 2)))}, "nodes"),
    (Mine, lambda r: {"policy": (first_policy, second_policy)[r % 2]}, "policy"),
    (Mine, lambda r: {"policy": functools.partial(first_policy, name=str(r % 2))}, "policy"),
    (Mine, lambda r: {"depth": 1 + r % 2}, "depth"),
    (Mine, lambda r: {"log": ("odd ratio", "")[r % 2]}, "ratio"),
    (Mine, lambda r: {"log": str(r), "bucket_bytes": 10 + r % 2}, "bucket_bytes"),
]  # fmt: skip


@grid(kind__make__expected=[pytest.param(*case, id=f"{case[0].__name__}-{case[2]}") for case in DIFFERENT])
def test_any_option_that_differs_is_named(kind: type[Algorithm], make: Callable, expected: str) -> None:
    """On all ranks, with the values and the ranks that have them."""
    messages = refused(3, make, kind)
    assert len(set(messages)) == 1
    message = messages[0].splitlines()[0]
    assert message.startswith(f"{expected} differs between ranks: ")
    assert "on ranks 0 and 2" in message
    assert "on rank 1" in message
    assert kind.__name__ in message


def test_values_are_told_as_they_are_written() -> None:
    message, _ = refused(2, lambda r: {"format": ("e4m3", "e5m2")[r], "block": 128 << r}, FP8AllReduce)
    assert "format differs between ranks: 'e4m3' on rank 0, 'e5m2' on rank 1" in message
    assert "block differs between ranks: 128 on rank 0, 256 on rank 1" in message


def test_classes_and_optimizers_that_differ_are_refused() -> None:
    def rank(communicator: Communicator) -> None:
        r = communicator.rank
        with pytest.raises(
            ValueError, match=r"the algorithm differs between ranks: \S+ByteGrad on rank 0, \S+QSGD on rank 1"
        ):
            (ByteGrad, QSGD)[r](Odd(), communicator=communicator)
        module = Odd()
        optimizer = (torch.optim.SGD, torch.optim.Adam)[r](module.parameters())
        with pytest.raises(ValueError, match=r"optimizer differs between ranks: .*SGD on rank 0, .*Adam on rank 1"):
            ByteGrad(module, optimizer, communicator=communicator)

    run_ranks(2, rank)


def test_options_that_may_differ() -> None:
    """Those that a class says, its bases' too, and parameters, which are rank 0's in a moment."""

    def rank(communicator: Communicator) -> None:
        r = communicator.rank
        Mine(Odd(), communicator=communicator, log=f"rank{r}.txt").close()
        module = Odd(seed=r)
        QAdam(module, freeze_step=3, params=[{"params": list(module.parameters())}], communicator=communicator).close()
        from_spec("bytegrad:block=64", Odd(), communicator=communicator).close()

    run_ranks(2, rank)


@pytest.mark.usefixtures("small_heap")
def test_options_of_a_switch_are_compared() -> None:
    """A switch that is refused leaves the old algorithm as it was."""

    def rank(communicator: Communicator) -> list[torch.Tensor | None]:
        model = GradientAllReduce(Odd(), communicator=communicator)
        with pytest.raises(ValueError, match="seed differs between ranks: 0 on rank 0, 1 on rank 1"):
            model.switch_to(RandomK, seed=communicator.rank)
        model(batch(communicator.rank, 0)).square().mean().backward()
        with pytest.raises(ValueError, match="is exchanged by another GradientAllReduce"):
            ByteGrad(model.module, communicator=communicator)
        return gradients(model)

    first, second = run_ranks(2, rank)
    assert all(a is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_construction_unpickles_nothing_and_costs_no_more_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    gathers: list[int] = []

    def rank(communicator: Communicator) -> None:
        kind = type(communicator)
        if communicator.rank == 0:
            original = kind.all_gather

            def counted(self: Communicator, *args: torch.Tensor) -> object:
                gathers.append(self.rank)
                return original(self, *args)

            monkeypatch.setattr(kind, "all_gather", counted)
        communicator.barrier().wait()
        ByteGrad(Odd(), communicator=communicator)

    run_ranks(2, rank)
    # Lengths and texts: of the places where ranks run, for tiers are made of them first, and then of all that has to be equal.
    # Last, the digests of frozen parameters.
    assert gathers.count(0) == gathers.count(1) <= 5


@dataclass(frozen=True)
class Policy:
    bits: int
    codec: object


class Plain:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._cache = object()


EQUAL = [
    (lambda: None, lambda: None),
    (lambda: 1, lambda: 1.0),
    (lambda: float("nan"), lambda: float("nan")),
    (lambda: compression.FP8(), lambda: compression.FP8(format="e4m3")),
    (lambda: Policy(2, compression.TopK(0.1)), lambda: Policy(2, compression.TopK(0.1))),
    (lambda: Plain(0.5), lambda: Plain(0.5)),
    (lambda: {"a", "b", "c"}, lambda: {"c", "b", "a"}),
    (lambda: torch.arange(5), lambda: torch.arange(5)),
    (lambda: torch.device("cuda:0"), lambda: torch.device("cuda:1")),
    (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3)),
    (lambda: iter([1]), lambda: iter([2])),
    (lambda: [1, (2, 3)], lambda: ([1, [2, 3]])),
]
DIFFERENT = [
    (1, 2),
    ("1", 1),
    (None, 0),
    (float("nan"), float("inf")),
    (compression.FP8(), compression.FP8(format="e5m2")),
    (Policy(2, compression.TopK(0.1)), Policy(2, compression.TopK(0.2))),
    (Plain(0.5), Plain(0.25)),
    (first_policy, second_policy),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # the first pattern that matches counts
    (torch.arange(5), torch.arange(5).float()),
    (torch.arange(5), torch.arange(5).flip(0)),
    (torch.float16, torch.bfloat16),
    (SGD := torch.optim.SGD, torch.optim.Adam),
]


@grid(cover=1, one__other=EQUAL)
def test_equal_values_have_equal_descriptions(one: Callable, other: Callable) -> None:
    assert json.loads(json.dumps(describe(one()))) == describe(other())


@grid(cover=1, one__other=DIFFERENT)
def test_different_values_have_different_descriptions(one: object, other: object) -> None:
    assert json.loads(json.dumps(describe(one))) != describe(other)
    assert shown(describe(one)) != shown(describe(other))


def test_what_contains_itself_has_a_description() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert json.dumps(describe(endless))

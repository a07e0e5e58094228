"""A warning where an Adam is given to an algorithm whose payloads lack most of a gradient, and nowhere else."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels import algorithms, optim
from bagua_kernels.algorithms import FrozenAdam, OptimizerFitWarning, from_spec
from bagua_kernels.algorithms.policy.optimizer_fit import divides_by_second_moment
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.errors import CommunicationError
from tests.algorithms.ranks import Odd
from tests.grids import folded, grid

COARSE = [
    "sign", "sign:majority_vote=true", "onebit", "double_squeeze", "topk", "topk:ratio=0.1", "randomk", "dgc", "powersgd",
    "powersgd:rank=2", "compressed:codec=sign", "compressed:codec=two_magnitudes", "compressed:codec=topk", "terngrad",
]  # fmt: skip
FINE = [
    "allreduce", "bytegrad", "fp8", "natural", "qsgd", "qsgd:bits=8", "compressed", "compressed:codec=absmax_int4",
    "compressed:codec=qsgd,error_feedback=true", "topk:ratio=1.0", "compressed:codec=identity", "compressed:codec=cast",
]  # fmt: skip
Make = Callable[[Any], torch.optim.Optimizer]


class Renamed(torch.optim.AdamW):
    """An Adam that is one by its base only."""


class Stateful(torch.optim.SGD):
    """Says by its state alone that it keeps a second moment."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.state[params[0]]["exp_avg_sq"] = torch.zeros_like(params[0])


class Wrapper(torch.optim.SGD):
    """Keeps the optimizer that does the work as an attribute, as `ZeroRedundancyOptimizer` does."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.optim = torch.optim.Adam(params)


ADAMS: list[Make] = [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.SparseAdam,
    optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.LAMB, FrozenAdam, Renamed, Stateful, Wrapper,
]  # fmt: skip
OTHERS: list[Make] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), optim.SGD, optim.Lion, torch.optim.Rprop,
]  # fmt: skip


def warned(make: Callable[[Odd, Communicator], Any], size: int = 2) -> list[warnings.WarningMessage]:
    """The warnings of constructors that all ranks call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(size, lambda communicator: make(Odd(), communicator).close())
    assert all(one.category is OptimizerFitWarning for one in caught), caught
    return caught


def made(spec: str, kind: Make = torch.optim.AdamW) -> Callable[[Odd, Communicator], Any]:
    return lambda net, communicator: from_spec(spec, net, optimizer=kind(net.parameters()), communicator=communicator)


@folded(make=ADAMS)
def test_adams_are_recognised(make: Make) -> None:
    assert divides_by_second_moment(make(Odd().parameters()))


@pytest.mark.parametrize("make", OTHERS)
def test_other_optimizers_are_not(make: Make) -> None:
    assert not divides_by_second_moment(make(Odd().parameters()))


@grid(cover=1, spec=COARSE)
def test_what_holds_gradients_back_warns_once_of_adam(spec: str) -> None:
    (one,) = warned(made(spec), size=3)
    text = str(one.message)
    assert re.match(r"\w+ sends (payloads|factors) of .*AdamW divides by a second moment", text)
    for cure in ("OneBitAdam", "QAdam", "8 bits", "warmup_steps"):
        assert cure in text
    # Where the user's constructor is, not where this package calls others.
    assert one.filename == __file__


@grid(cover=1, spec=FINE)
def test_what_sends_most_of_a_gradient_goes_with_adam(spec: str) -> None:
    assert not warned(made(spec))


@grid(cover=1, spec=["sign", "topk", "powersgd"])
def test_other_optimizers_go_with_all(spec: str) -> None:
    assert not warned(made(spec, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)))
    assert not warned(lambda net, communicator: from_spec(spec, net, communicator=communicator))


@grid(cover=1, spec=["sign", "topk", "powersgd"])
def test_one_rank_compresses_nothing(spec: str) -> None:
    assert not warned(made(spec), size=1)


@pytest.mark.parametrize("kind", [algorithms.QAdam, algorithms.OneBitAdam])
def test_adams_that_send_momentum_go_with_themselves(kind: Any) -> None:
    assert not warned(lambda net, communicator: kind(net, communicator=communicator))


@pytest.mark.parametrize(
    "options",
    [{"codec": {0: "minmax_uint8", 50: "sign"}}, {"codec": None, "groups": {"first.*": "topk:ratio=0.01"}}],
    ids=["later", "some parameters"],
)
def test_codecs_of_later_steps_and_of_some_parameters_count(options: dict[str, Any]) -> None:
    (one,) = warned(
        lambda net, communicator: algorithms.CompressedAllReduce(
            net, torch.optim.Adam(net.parameters()), communicator=communicator, **options
        )
    )
    assert "payloads of" in str(one.message)


def test_warning_as_an_error_leaves_no_rank_waiting() -> None:
    """Rank 0 raises it; the others, which wait for rank 0, an error too."""

    def rank(communicator: Communicator) -> str:
        net = Odd()
        try:
            algorithms.TopK(net, torch.optim.Adam(net.parameters()), communicator=communicator)
        except (OptimizerFitWarning, CommunicationError) as error:
            return str(error)
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run_ranks(2, rank)
    assert "TopK sends" in first
    assert "rank 0" in second

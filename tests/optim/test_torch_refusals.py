"""What `torch.optim` refuses, ours refuse at the same moment and with the same words; what it takes, they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from tests.grids import folded, grid
from tests.optim import pairs


def integers() -> Parameter:
    return Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)


def on_meta() -> Parameter:
    parameter = Parameter(torch.ones(2, 2, device="meta"))
    parameter.grad = torch.ones(2, 2, device="meta")
    return parameter


def with_sparse_gradient() -> Parameter:
    parameter = Parameter(torch.ones(3, 2))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    parameter.grad = torch.sparse_coo_tensor([[0, 2, 0]], values, (3, 2))
    return parameter


def matrix() -> Parameter:
    return Parameter(torch.ones(2, 2))


# Parameters and arguments; most are refused by all optimizers, some by a few.
QUESTIONABLE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "nothing": lambda: ([], {}),
    "a set": lambda: ([{"params": {matrix()}}], {}),
    "strings": lambda: (["weight"], {}),
    "a result": lambda: ([matrix() * 2], {}),
    "lr<0": lambda: ([matrix()], {"lr": -1.0}),
    "lr in a long tensor": lambda: ([matrix()], {"lr": torch.ones(2)}),
    "weight_decay<0": lambda: ([matrix()], {"weight_decay": -1.0}),
    "eps<0": lambda: ([matrix()], {"eps": -1.0}),
    "momentum<0": lambda: ([matrix()], {"momentum": -1.0}),
    "nesterov": lambda: ([matrix()], {"momentum": 0.0, "nesterov": True}),
    "second beta": lambda: ([matrix()], {"betas": (0.9, 1.0)}),
    "foreach and fused": lambda: ([matrix()], {"foreach": True, "fused": True}),
    "differentiable and fused": lambda: ([matrix()], {"differentiable": True, "fused": True}),
    "fused integers": lambda: ([integers()], {"fused": True}),
    "fused on meta": lambda: ([on_meta()], {"fused": True}),
    "capturable on a CPU": lambda: ([matrix()], {"capturable": True}),
    "sparse": lambda: ([with_sparse_gradient()], {}),
    "sparse, weight_decay": lambda: ([with_sparse_gradient()], {"weight_decay": 0.1}),
    "sparse, foreach": lambda: ([with_sparse_gradient()], {"foreach": True}),
    "sparse, fused": lambda: ([with_sparse_gradient()], {"fused": True}),
    "sparse, maximize": lambda: ([with_sparse_gradient()], {"maximize": True}),
}

every_optimizer = grid(cover=1, name=pairs.NAMES)
not_about_invariants = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@not_about_invariants
@every_optimizer
@folded(question=list(QUESTIONABLE))
def test_same_answer(name: str, question: str) -> None:
    """The same error, at construction or in the first step; or none, and then the same result."""
    expected, answer = [
        (pairs.outcome(kind, parameters, arguments), parameters)
        for kind in (pairs.theirs(name), pairs.ours(name))
        for parameters, arguments in [QUESTIONABLE[question]()]
    ]
    assert answer[0] == expected[0]
    if expected[0] is None:
        torch.testing.assert_close(answer[1], expected[1], rtol=1e-6, atol=1e-6)


@not_about_invariants
@grid(cover=1, name=["SGD", "Adagrad"])
def test_sparse_gradients(name: str) -> None:
    """Rows that come twice in a gradient count twice, and rows that do not come are not touched."""
    arguments = {"lr": 0.1}
    mine, other = with_sparse_gradient(), with_sparse_gradient()
    pair = pairs.Pair(
        pairs.ours(name)([mine], **arguments), pairs.theirs(name)([other], **pairs.plain(name, arguments))
    )
    for step in range(3):
        for optimizer, parameter in zip(pair, (mine, other), strict=True):
            parameter.grad = with_sparse_gradient().grad * (step + 1)
            optimizer.step()
    pair.assert_same()
    assert torch.equal(mine[1], torch.ones(2))
    assert mine[0, 0] < 0.9


GROUPS: dict[str, Callable[[Optimizer], Any]] = {
    "no dict": lambda optimizer: [matrix()],
    "a set": lambda optimizer: {"params": {matrix()}},
    "no tensor": lambda optimizer: {"params": ["weight"]},
    "a result": lambda optimizer: {"params": [matrix() * 2]},
    "one it has": lambda optimizer: {"params": list(pairs.parameters_of(optimizer))},
    "one with a name": lambda optimizer: {"params": [("weight", matrix())]},
    "no params": lambda optimizer: {"lr": 0.1},
}


@every_optimizer
@folded(group=list(GROUPS))
def test_same_refusal_of_a_group(name: str, group: str) -> None:
    answers = []
    for optimizer in pairs.pair(name):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which one, torch says)
            optimizer.add_param_group(GROUPS[group](optimizer))
        answers.append((caught.type, str(caught.value)))
    assert answers[0] == answers[1]

"""An optimizer's scalars are matched with the parameters of its rule by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim


def step(kind: type[optim.SGD], **options: Any) -> torch.Tensor:
    parameter = nn.Parameter(torch.arange(5.0))
    parameter.grad = torch.ones(5)
    kind([parameter], lr=0.1, **options).step()
    return parameter.detach()


def test_the_order_of_scalars_does_not_matter() -> None:
    class Reversed(optim.SGD):
        def _advance(self, group, counters):
            return dict(reversed(super()._advance(group, counters).items()))

    for options in ({"weight_decay": 0.3}, {"momentum": 0.9, "weight_decay": 0.3}):
        assert torch.equal(step(Reversed, **options), step(optim.SGD, **options))


@pytest.mark.parametrize("wrong", ["lacking", "unknown", "by position"])
def test_wrong_scalars_are_named(wrong: str) -> None:
    class Wrong(optim.SGD):
        def _advance(self, group, counters):
            found = super()._advance(group, counters)
            if wrong == "lacking":
                del found["lr"]
            elif wrong == "unknown":
                found["rate"] = 0.1
            return tuple(found.values()) if wrong == "by position" else found

    with pytest.raises(
        TypeError, match=r"rule 'plain_sgd' takes the scalars lr, weight_decay, got .*must return a mapping"
    ):
        step(Wrong)

"""What flags say of parameters with and without a gradient, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.engine.member import Member
from bagua_kernels.algorithms.engine.participation import Participation


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_one_rank_is_enough(ranks: int) -> None:
    members = [Member(name, nn.Parameter(torch.zeros(1)), None, False) for name in ("used", "unused")]
    everyone = [Participation(members, ranks) for _ in range(ranks)]
    for each in everyone:
        each.begin()
    everyone[-1].present.add(0)
    means = torch.tensor([each.flags(takes_part=True) for each in everyone]).mean(0)
    for each in everyone:
        each.read(means, takes_part=True)
        assert each.unused == {1}

"""Which parameters Muon trains, and which AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_kernels import optim

pytestmark = pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has no such class")


class Language(nn.Module):
    """Words, two blocks, and a head that may share the words' matrix."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if shared:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


def names_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


HIDDEN = [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in (0, 2)]


@pytest.mark.parametrize("shared", [False, True])
def test_hidden_matrices_are_muons(shared: bool) -> None:
    module = Language(shared)
    muon, adamw = optim.muon_with_adamw(module).optimizers
    assert isinstance(muon, optim.Muon)
    assert isinstance(adamw, optim.AdamW)
    assert names_of(module, muon) == HIDDEN
    assert sorted([*names_of(module, muon), *names_of(module, adamw)]) == sorted(
        n for n, _ in module.named_parameters()
    )


def test_frozen_ones_and_patterns() -> None:
    module = Language(False)
    module.blocks[0][0].weight.requires_grad_(False)
    muon, adamw = optim.muon_with_adamw(module, adamw=["blocks.1.0.*"]).optimizers
    assert names_of(module, muon) == ["blocks.0.2.weight", "blocks.1.2.weight"]
    assert "blocks.1.0.weight" in names_of(module, adamw)
    assert "blocks.0.0.weight" not in names_of(module, adamw)


def test_options_arrive() -> None:
    chain = optim.muon_with_adamw(Language(True), lr=0.5, momentum=0.7, weight_decay=0.2, adamw_lr=0.03)
    muon, adamw = (each.param_groups[0] for each in chain.optimizers)
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.5, 0.7, 0.2)
    assert (adamw["lr"], adamw["betas"], adamw["weight_decay"]) == (0.03, (0.9, 0.95), 0.1)


def test_it_trains() -> None:
    torch.manual_seed(0)
    module = Language(True)
    optimizer = optim.muon_with_adamw(module)
    x, losses = torch.arange(11).view(1, 11), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x)[0], x[0].roll(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_module_without_hidden_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 matrices and 2 others: use one optimizer"):
        optim.muon_with_adamw(nn.Linear(3, 2))

"""Modules under their former paths: the same objects, with one warning that names the new path."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("before", "now", "defined"),
    [
        ("engine.exchange", "exchanges.exchange", "Exchange Updates"),
        ("engine.vectors", "exchanges.vectors", "Named euclidean_norm gather mean_of scatter"),
        ("tuner.facts", "choosing.facts", "Facts"),
        ("rounds.round_algorithm", "models.model_algorithm", "RoundAlgorithm RoundOptions"),
    ],
)
def test_a_former_module_has_what_the_new_one_has(
    before: str, now: str, defined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, new = f"bagua_kernels.algorithms.{before}", f"bagua_kernels.algorithms.{now}"
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"has moved to {new}") as told:
        module = importlib.import_module(former)
    assert len(told) == 1
    moved = importlib.import_module(new)
    assert all(getattr(module, each) is getattr(moved, each) for each in defined.split())

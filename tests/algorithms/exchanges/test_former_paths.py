"""Exchanges under their former paths: the same objects, with one warning that names the new path."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "defined"),
    [("exchange", "Exchange Updates"), ("vectors", "Named euclidean_norm gather mean_of scatter")],
)
def test_a_former_module_has_what_the_new_one_has(name: str, defined: str, monkeypatch: pytest.MonkeyPatch) -> None:
    former, new = f"bagua_kernels.algorithms.engine.{name}", f"bagua_kernels.algorithms.exchanges.{name}"
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"has moved to {new}") as told:
        module = importlib.import_module(former)
    assert len(told) == 1
    moved = importlib.import_module(new)
    assert all(getattr(module, each) is getattr(moved, each) for each in defined.split())

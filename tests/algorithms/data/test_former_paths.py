"""Modules of samplers under their former paths: the same classes, with one warning that names the new path."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings

import pytest

from bagua_kernels import algorithms, data
from bagua_kernels.algorithms.data import balanced_batches, balanced_sampler, costs, order, shared_epoch
from tests.algorithms.data.common import batch_samplers, heavy_tailed
from tests.grids import folded

LOADING = "bagua_kernels.algorithms.loading"
ROUNDS = "bagua_kernels.algorithms.local_steps.round_sampler"
MODULES = {
    f"{LOADING}.{module.__name__.rpartition('.')[2]}": module
    for module in (balanced_batches, balanced_sampler, costs, order, shared_epoch)
}


@pytest.fixture(autouse=True)
def first_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each test be the first to import the former paths."""
    for name in [name for name in sys.modules if name.startswith((LOADING, ROUNDS))]:
        monkeypatch.delitem(sys.modules, name)


@folded(name=list(MODULES))
def test_a_former_module_is_the_new_one(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = importlib.import_module(name)
        again = importlib.import_module(name)
    assert module is again is MODULES[name]
    assert all(each.category is DeprecationWarning for each in told)
    assert getattr(sys.modules[LOADING], name.rpartition(".")[2]) is module


def test_one_warning_names_the_new_path_and_the_line_that_imports() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"moved to bagua_kernels\.algorithms\.data, .* bagua_kernels\.data"
    ) as told:
        from bagua_kernels.algorithms.loading import balanced_sampler
    from bagua_kernels.algorithms.loading import costs  # without a further warning, which would be an error

    assert [each.filename for each in told] == [__file__]
    assert balanced_sampler.LoadBalancingDistributedSampler is data.LoadBalancingDistributedSampler
    assert costs.LengthCost is data.LengthCost
    with pytest.warns(DeprecationWarning, match=r"moved to bagua_kernels\.algorithms\.data\.round_sampler") as told:
        from bagua_kernels.algorithms.local_steps.round_sampler import RoundSampler
    assert [each.filename for each in told] == [__file__]
    assert RoundSampler is data.RoundSampler


def test_a_pickle_with_former_paths_is_loaded() -> None:
    sampler = batch_samplers(heavy_tailed(60), 2, 90.0)[1]
    before = list(sampler)
    # Protocol 2 writes the names of modules as lines.
    written = pickle.dumps((sampler, data.RoundSampler), protocol=2)
    former = written.replace(b"algorithms.data.round_sampler", b"algorithms.local_steps.round_sampler")
    former = former.replace(b"bagua_kernels.algorithms.data.", LOADING.encode() + b".")
    assert b"algorithms.data." not in former
    assert former.count(LOADING.encode()) >= 3
    with pytest.warns(DeprecationWarning, match="has moved to") as told:
        loaded, rounds = pickle.loads(former)
    assert len(told) == 2
    assert type(loaded) is data.LoadBalancingDistributedBatchSampler
    assert list(loaded) == before
    assert rounds is data.RoundSampler


def test_the_package_exports_them_without_a_warning() -> None:
    assert sorted(name for name in data.__all__ if hasattr(algorithms, name)) == [
        "LengthCost",
        "LoadBalancingDistributedBatchSampler",
        "LoadBalancingDistributedSampler",
        "RoundSampler",
    ]
    assert all(getattr(algorithms, name) is getattr(data, name) for name in data.__all__ if hasattr(algorithms, name))

"""SparseLoCo against a simulation of all ranks in float64, and what its payloads promise."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import LocalSGD, SparseLoCo
from bagua_kernels.algorithms.local_steps.sparse_loco import SparseRound
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests.algorithms import parts
from tests.algorithms.gossip.common import SHAPES, Quadratic, Task, error, falling, flat
from tests.algorithms.local_steps.common import Case, trained
from tests.grids import grid
from tests.oracles import outer
from tests.oracles.chunked import decode, encode, entries
from tests.oracles.gossip import SGD

STEPS = 20
START = flat(Quadratic()).double().numpy()
TASK = Task(len(START))
K, CHUNK = 5, 32


def select(row: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return select_from(row, SHAPES)


def select_from(
    row: np.ndarray[Any, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What a rank sends of its residual: matrices of a chunk or more by chunks, with zeros behind; the rest as it is."""
    indices, values, begin = [], [], 0
    for shape in shapes.values():
        size = int(np.prod(shape))
        part = row[begin : begin + size]
        if len(shape) >= 2 and size >= CHUNK:
            whole = np.zeros(-(-size // CHUNK) * CHUNK, np.float32)
            whole[:size] = part
            payload = encode(whole, K, CHUNK)
            sent = entries(payload, whole.size, K, CHUNK)[:size]
            part = decode(payload, whole.size, K, CHUNK)[:size]
        else:
            sent = np.ones(size, bool)
        indices.append(begin + np.flatnonzero(sent))
        values.append(np.asarray(part, np.float64)[sent])
        begin += size
    return np.concatenate(indices), np.concatenate(values)


def case(**options: Any) -> Case:
    return Case(SparseLoCo, {"codec": ChunkedTopK(K, CHUNK), **options})


@grid(
    size=[2, 3, 4, 5, 8],
    reduce=["contributors", "mean"],
    options=[{}, {"delay": 2}, {"delay": 1, "blend": 0.25}],
    cover=1,
)
def test_follows_the_simulation(size: int, reduce: Any, options: dict[str, Any]) -> None:
    """Within 1e-6 of the largest magnitude after five rounds."""
    found = trained(case(outer_lr=0.8, beta=0.9, reduce=reduce, **options), size, STEPS)
    inner = outer.inner(TASK.gradient, SGD(falling, 0.0, 0.0))
    simulation = outer.sparse_loco(
        START, inner, ranks=size, interval=4, alpha=0.8, beta=0.9, select=select, reduce=reduce, **options
    )
    assert error(found.double().numpy(), simulation.run(STEPS).trajectory) <= 1e-6


@pytest.mark.parametrize("wrong", [{"beta": 0.8}, {"reduce": "mean"}, {"outer_lr": 0.7}])
def test_a_wrong_simulation_is_seen(wrong: dict[str, Any]) -> None:
    found = trained(case(**{"outer_lr": 0.8, "beta": 0.9, **wrong}), 3, STEPS)
    inner = outer.inner(TASK.gradient, SGD(falling, 0.0, 0.0))
    expected = outer.sparse_loco(START, inner, ranks=3, interval=4, alpha=0.8, beta=0.9, select=select)
    assert error(found.double().numpy(), expected.run(STEPS).trajectory) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_lost(dtype: torch.dtype) -> None:
    """On each rank the new residual and what was sent are the decayed residual and what was learned, to one rounding."""

    def rank(communicator: Communicator) -> torch.Tensor:
        torch.manual_seed(3)
        module = nn.Linear(64, 32, bias=False).to(dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        codec = ChunkedTopK(4, 64)
        model = SparseLoCo(module, optimizer, interval=3, beta=0.5, codec=codec, communicator=communicator)
        (part,) = parts.outer_rounds(model).all
        assert isinstance(part, SparseRound)
        take, rounds = part.take_difference, []

        def checked() -> None:
            start, residual = part.kept("start"), part.kept("residual")
            owed = 0.5 * residual + (start.to(dtype).float() - part.bucket.flat.float())
            take()
            payload = part._sparse.payload
            sent = codec.decode(payload, torch.empty_like(residual))
            assert torch.allclose(residual + sent, owed, rtol=2**-23, atol=0)
            assert int((sent != 0).sum()) == 4 * 32
            rounds.append(sent)

        part.take_difference = checked  # type: ignore[method-assign]
        for step in range(9):
            optimizer.zero_grad()
            model(torch.randn(2, 64).to(dtype) * (step + communicator.rank + 1)).square().mean().backward()
            optimizer.step()
        model.wait()
        assert len(rounds) == 3
        model.close()
        return flat(module)

    one, other = run_ranks(2, rank)
    assert torch.equal(one, other)


def test_a_round_without_a_step_changes_nothing_in_bfloat16() -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Linear(64, 32).to(torch.bfloat16)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        model = SparseLoCo(module, optimizer, interval=1, codec=ChunkedTopK(4, 64), communicator=communicator)
        before = flat(module)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        model.wait()
        assert torch.equal(flat(module), before)
        assert model.stats().residual_norm == 0
        model.close()

    run_ranks(2, rank)


def test_the_outer_rate_acts_once() -> None:
    """Without a residual, twice the rate is twice the displacement; on f = x^2 / 2 the first round goes downhill."""

    def rank(communicator: Communicator, rate: float) -> tuple[float, torch.Tensor]:
        module = Quadratic({"only": (8, 8)})
        with torch.no_grad():
            next(module.parameters()).fill_(1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
        options: Any = {"interval": 2, "outer_lr": rate, "beta": 0.0, "codec": ChunkedTopK(16, 64)}
        model = SparseLoCo(module, optimizer, communicator=communicator, **options)
        for _ in range(2):
            optimizer.zero_grad()
            (next(module.parameters()).square().sum() / 2).backward()
            optimizer.step()
        model.wait()
        after = flat(module)
        model.close()
        return float(after.square().sum()), 1.0 - after

    (loss, once), (_, twice) = (run_ranks(2, rank, rate)[0] for rate in (0.25, 0.5))
    assert loss < 64
    assert torch.equal(2 * once, twice)
    assert int((once != 0).sum()) == 16


def test_bytes_of_a_round() -> None:
    """A rank sends 84 bytes of 4,096 elements, and the bias in float32, for it is shorter than one block in 8 bits."""

    def rank(communicator: Communicator) -> int:
        module = nn.Linear(128, 64)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = SparseLoCo(module, optimizer, interval=2, communicator=communicator)
        counts = []
        for _ in range(2):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 128)).sum().backward()
                optimizer.step()
            model.wait()
            counts.append(model.stats().bytes_sent)
        model.close()
        return counts[1] - counts[0]

    size = 3
    sparse, exact = -(-2 * 84 // 16) * 16 * (size - 1), 2 * (size - 1) * 4 * 64 // size
    for sent in run_ranks(size, rank):
        assert sparse + exact <= sent <= sparse + exact + 64


def test_one_rank_is_plain_pytorch() -> None:
    def rank(communicator: Communicator, wrapped: bool) -> torch.Tensor:
        torch.manual_seed(0)
        module = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(module.parameters())
        model: Any = SparseLoCo(module, optimizer, interval=2, communicator=communicator) if wrapped else module
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        return flat(module)

    assert torch.equal(*(run_ranks(1, rank, wrapped)[0] for wrapped in (False, True)))


def test_what_does_not_fit_is_refused() -> None:
    def rank(communicator: Communicator) -> None:
        module = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for options, error_kind, text in [
            ({"codec": "sign"}, TypeError, "expected codec to be a ChunkedTopK"),
            ({"beta": 1.5}, ValueError, "beta from 0 to 1"),
            ({"outer_lr": 0.0}, ValueError, "outer_lr must be above 0"),
            ({"reduce": "sum"}, ValueError, "'contributors' or 'mean'"),
        ]:
            with pytest.raises(error_kind, match=text):
                SparseLoCo(module, optimizer, communicator=communicator, **options)

    run_ranks(1, rank)


def test_residuals_are_resumed_on_another_number_of_ranks() -> None:
    """Their mean, so that what all ranks still owe stays the same."""

    def save(communicator: Communicator) -> Any:
        module = Quadratic()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case().make(module, optimizer, communicator)
        task = Task(flat(module).numel())
        for step in range(4):
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
        model.wait()
        state = copy.deepcopy(model.algorithm_state_dict())
        residual = torch.cat([each.flatten() for each in parts.vectors(model)["residual"].values()])
        model.close()
        return state, residual

    saved = run_ranks(3, save)
    mean = torch.stack([residual for _, residual in saved]).double().mean(0)

    def load(communicator: Communicator) -> torch.Tensor:
        module = Quadratic()
        model = case().make(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator)
        model.load_algorithm_state_dict([state for state, _ in saved])
        found = torch.cat([each.flatten() for each in parts.vectors(model)["residual"].values()])
        model.close()
        return found

    for residual in run_ranks(2, load):
        assert float((residual.double() - mean).abs().max()) <= 1e-6 * float(mean.abs().max())


def test_differs_from_plain_averaging() -> None:
    sparse, plain = (trained(each, 2, STEPS)[-1] for each in (case(), Case(LocalSGD)))
    assert not torch.equal(sparse, plain)

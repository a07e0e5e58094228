"""The size below which vectors are sent plainly, and that they are."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for, choice, measure_plain_below
from bagua_kernels.compression import Codec, MinMaxUInt8, TopK, from_spec


@pytest.mark.parametrize("spec", ["minmax_uint8", "topk", "cast", "terngrad:shared=true"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_plain_below_is_exact(spec: str, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> None:
        def make(n: int) -> Any:
            return all_reduce_for(from_spec(spec), communicator, n, 3, dtype, worker_residual=True, plain_below=1000)

        both = torch.randn(1002, generator=torch.Generator().manual_seed(communicator.rank)).to(dtype)
        expected = both.clone()
        communicator.all_reduce(expected, ReduceOp.AVG).wait()
        # One message where the exact part lies right behind, else two.
        behind, apart = both.clone(), both.clone()
        sent = communicator.bytes_sent
        make(999)(behind[:999], behind[999:])
        assert torch.equal(behind, expected)
        assert communicator.bytes_sent - sent == 1002 * dtype.itemsize
        exact = apart[999:].clone()
        make(999)(apart[:999], exact)
        assert torch.equal(apart[:999], expected[:999])
        assert torch.equal(exact, expected[999:])
        assert make(999).state_dict() == {}
        make(999).load_state_dict({"worker": torch.zeros(5)})
        if spec != "terngrad:shared=true":  # whose shared scales allow no residual
            assert not make(1000).plain

    run_ranks(2, rank)


def fixed_times(monkeypatch: pytest.MonkeyPatch, plain: float, compressed: float, fixed: float) -> list[int]:
    """Lets compression take `fixed` seconds and `compressed` an element."""
    asked: list[int] = []

    def times(
        make: Any, communicator: Communicator, n: int, dtype: torch.dtype, *, repeats: int
    ) -> tuple[float, float]:
        if communicator.rank == 0 and repeats > 1:
            asked.append(n)
        # Ranks differ; the slowest counts.
        late = 1.0 + 0.01 * communicator.rank
        return late * plain * n, late * (fixed + compressed * n)

    monkeypatch.setattr(choice, "_times", times)
    return asked


def measured(codec: Codec, **options: Any) -> int:
    def rank(communicator: Communicator) -> int:
        found = measure_plain_below(codec, communicator, **options)
        before = communicator.bytes_sent
        assert measure_plain_below(codec, communicator, **options) == found
        assert communicator.bytes_sent == before  # kept
        return found

    results = run_ranks(3, rank)
    assert len(set(results)) == 1
    return results[0]


def test_where_compression_begins_to_win(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_times(monkeypatch, plain=4e-9, compressed=1e-9, fixed=1e-3)
    assert measured(MinMaxUInt8(), budget_s=60) == 1 << 19  # 3e-9 n >= 1e-3
    assert asked == [1 << bits for bits in range(12, 21)]


def test_where_it_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_times(monkeypatch, plain=1e-9, compressed=2e-9, fixed=0)
    assert measured(TopK(), budget_s=60, largest=1 << 15) == sys.maxsize
    assert asked == [1 << bits for bits in range(12, 16)]


def test_where_it_always_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, plain=2e-9, compressed=1e-9, fixed=0)
    assert measured(MinMaxUInt8(), budget_s=60) == 1 << 12


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_times(monkeypatch, plain=1e-9, compressed=2e-9, fixed=0)
    assert measured(MinMaxUInt8(), budget_s=0) == sys.maxsize
    assert asked == [1 << 12]


def test_a_real_measurement() -> None:
    found = measured(from_spec("minmax_uint8:stochastic=true"), budget_s=0.05, largest=1 << 14, dtype=torch.float16)
    assert found in {1 << 12, 1 << 13, 1 << 14, sys.maxsize}


def test_one_rank_measures_nothing() -> None:
    assert run_ranks(1, lambda communicator: measure_plain_below(MinMaxUInt8(), communicator)) == [0]

"""The size below which vectors are sent plainly, and that they are."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for, choice, measure_plain_below
from bagua_kernels.compression import Codec, MinMaxUInt8, TopK, from_spec
from tests import limits
from tests.grids import grid


@grid(cover=1, spec=["minmax_uint8", "topk", "cast", "terngrad:shared=true"], dtype=[torch.float32, torch.float16])
def test_plain_below_is_exact(spec: str, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> None:
        def make(n: int) -> Any:
            return all_reduce_for(from_spec(spec), communicator, n, 3, dtype, worker_residual=True, plain_below=1000)

        both = torch.randn(1002, generator=torch.Generator().manual_seed(communicator.rank)).to(dtype)
        expected = both.clone()
        communicator.all_reduce(expected, ReduceOp.AVG).wait()
        # The same two messages wherever a rank has its exact part.
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


def test_where_the_exact_part_lies_is_each_ranks_own_affair() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        both = torch.full((1002,), float(communicator.rank))
        x, exact = both[:999], both[999:]
        if communicator.rank:
            exact = exact.clone()
        all_reduce_for(MinMaxUInt8(), communicator, 999, 3, plain_below=1000)(x, exact)
        return torch.cat([x, exact])

    for result in run_ranks(2, rank, timeout=limits.seconds(10)):
        assert torch.equal(result, torch.full((1002,), 0.5))


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
    assert asked == [1 << 12, 1 << 18]  # the second in any case: the first alone says nothing of bytes


@pytest.mark.parametrize("fixed", [0.05, 0.5e-3, 1e-9])
def test_a_slow_link_uses_up_the_budget_and_still_compresses(fixed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lines cross is found beyond, between and before the sizes tried."""
    asked = fixed_times(monkeypatch, plain=4e-9, compressed=1e-9, fixed=fixed)
    assert measured(MinMaxUInt8(), budget_s=0) == pytest.approx(max(fixed / 3e-9, 1 << 12), rel=1e-3)
    assert asked == [1 << 12, 1 << 18]


def test_nothing_is_tried_beyond_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fixed_times(monkeypatch, plain=4e-9, compressed=1e-9, fixed=3e-3)
    assert measured(MinMaxUInt8(), budget_s=0, largest=1 << 14) == pytest.approx(1e6, rel=1e-3)
    assert asked == [1 << 12, 1 << 14]
    assert measured(MinMaxUInt8(), budget_s=0, largest=1 << 11) == sys.maxsize


def test_the_callers_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    run_ranks(2, lambda communicator: measure_plain_below(MinMaxUInt8(), communicator, budget_s=0, largest=1 << 10))
    assert torch.equal(torch.randn(3), expected)


def test_what_is_no_codec_is_named() -> None:
    def rank(communicator: Communicator) -> None:
        for call in (
            lambda codec: all_reduce_for(codec, communicator, 8),
            lambda c: measure_plain_below(c, communicator),
        ):
            for wrong in ("minmax_uint8", ["minmax_uint8"]):
                with pytest.raises(TypeError, match=r"expected a codec, got .*minmax_uint8.*from_spec makes one"):
                    call(wrong)  # type: ignore[arg-type]

    run_ranks(2, rank)


def test_a_real_measurement() -> None:
    found = measured(from_spec("minmax_uint8:stochastic=true"), budget_s=0.05, largest=1 << 14, dtype=torch.float16)
    assert found >= 1 << 12


def test_one_rank_measures_nothing() -> None:
    assert run_ranks(1, lambda communicator: measure_plain_below(MinMaxUInt8(), communicator)) == [0]

"""The size below which vectors are sent plainly, and that they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for, measure_plain_below
from bagua_kernels.compression import MinMaxUInt8, from_spec
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


def test_what_is_no_codec_is_named() -> None:
    def rank(communicator: Communicator) -> None:
        for wrong in ("minmax_uint8", ["minmax_uint8"]):
            with pytest.raises(TypeError, match=r"expected a codec, got .*minmax_uint8.*from_spec makes one"):
                all_reduce_for(wrong, communicator, 8)  # type: ignore[arg-type]

    run_ranks(2, rank)


def test_the_deprecated_measurement_lets_all_be_compressed() -> None:
    with pytest.warns(DeprecationWarning, match="pass a number of elements as plain_below") as caught:
        found = run_ranks(2, lambda c: measure_plain_below(MinMaxUInt8(), c, budget_s=0.1, largest=1 << 13))
    assert found == [0, 0]
    assert {each.filename for each in caught} == {__file__}

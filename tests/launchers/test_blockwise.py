"""What the codecs' contract does not reach: lengths for which no machine here has the memory."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs
from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.launchers.blockwise.form import form_of
from tests.conftest import Target


@pytest.mark.parametrize("n", [2**31 - 257, 2**31 - 1, 2**31 + 5])
def test_lengths_around_2_to_31(target: Target, n: int) -> None:
    """The first program of a launch that would have millions: nothing in it may be computed in 32 bits."""
    if not (target.backend == "triton" and knobs.TRITON_INTERPRET.get()):
        pytest.skip("only Triton's interpreter can run one program of a grid by itself, on memory for it alone")
    from bagua_kernels.jit._triton import EXACT
    from bagua_kernels.launchers.blockwise import _triton as kernels

    codec = MinMaxUInt8()
    shape = kernels.tile(codec.rule, codec.block)
    elements = shape["ROWS"] * shape["BLOCK"]
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    form = form_of(codec.rule, elements, codec.block)
    expected, payload = codec.encode(x), torch.full((form.size,), 77, dtype=torch.uint8)
    words, codes = form.parts(payload)
    encode = kernels.kernel("encode", codec.rule, torch.float32)
    modes = {"STOCHASTIC": False, "GIVEN": False}
    encode[(1,)](x, words, codes, words, n, 0, 0, **modes, COUNTED=False, **shape, **EXACT)
    assert torch.equal(payload, expected)
    counts = torch.full((form.blocks,), codec.block, dtype=torch.int32)
    encode[(1,)](x, words.fill_(7), codes.fill_(7), counts, n, 0, 0, **modes, COUNTED=True, **shape, **EXACT)
    assert torch.equal(payload, expected)
    out = torch.empty_like(x)
    kernels.kernel("decode", codec.rule, torch.float32)[(1,)](words, codes, out, n, **shape, **EXACT)
    assert torch.equal(out, codec.decode(expected, torch.empty_like(x)))

"""Sums have one order: nothing adds in any order on a GPU, and a tensor's sum depends on nothing beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from bagua_kernels.launchers.multitensor import FACTOR, Table, Variant, launch
from bagua_kernels.rules.optimizers import SQUARED_NORM
from tests.conftest import Target

ROOT = Path(__file__).parents[1]
# On CUDA these use atomic additions.
ANY_ORDER = {
    *(
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "put_",
        "bincount",
    ),
    *("histc", "index_reduce", "index_reduce_", "atomic_add"),
}


def test_no_sum_is_in_any_order() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for floor in ("bagua_kernels", "comm", "algorithms")
        for path in sorted({file.resolve() for file in (ROOT / floor).rglob("*.py")})
        # On a CPU PyTorch and NumPy add one after the other.
        if not path.name.startswith("_numba_cpu")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ANY_ORDER and ast.unparse(node.value) != "np"
    ]
    assert not found, f"expected sums whose order is the same on all ranks, got {found}"


@pytest.mark.parametrize("sizes", [[1], [5000], [0, 3, 0, 9000, 4096], [4097, 1]])
def test_a_sum_depends_on_its_tensor_only(target: Target, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(size, generator=generator).to(target.device) for size in sizes]

    def norms(several: list[torch.Tensor]) -> list[float]:
        variant = Variant(SQUARED_NORM, (torch.float32,), scalars=0)
        rows = np.zeros((len(several), variant.width), np.float32)
        rows[:, FACTOR] = 1.0
        return launch(variant, Table([several]), rows)[:, 0].tolist()

    together = norms(tensors)
    assert together == [norms([tensor])[0] for tensor in tensors]
    assert together == norms(tensors[::-1])[::-1]
    expected = [float((tensor.cpu().double().numpy() ** 2).sum()) for tensor in tensors]
    np.testing.assert_allclose(together, expected, rtol=1e-6)

"""Maps a rule over flat arrays in Triton."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, on_device
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule

BLOCK = 1024


def source(rule: ElementwiseRule, scalars: int) -> str:
    """The text of the kernel for this number of arguments."""
    arguments = [f"a{i}_ptr" for i in range(rule.arrays)] + [f"s{i}" for i in range(scalars)]
    lines = [
        f"def over_range({', '.join(arguments)}, n, BLOCK: tl.constexpr):",
        "    offsets = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    inside = offsets < n",
    ]
    lines += [f"    v{i} = load_{i}(tl.load(a{i}_ptr + offsets, mask=inside, other=0))" for i in range(rule.arrays)]
    lines += [f"    {call_lines(rule, scalars)}"]
    lines += [f"    tl.store(a{i}_ptr + offsets, store_{i}(r{i}), mask=inside)" for i in rule.writes]
    return "\n".join(lines) + "\n"


@functools.cache
def kernel(rule: ElementwiseRule, scalars: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The compiled kernel."""
    bindings: dict[str, Any] = {"rule": rule.function}
    for i, dtype in enumerate(dtypes):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    template = function_from_source(source(rule, scalars), "over_range", {"__name__": __name__, "tl": tl})
    return compile_template(template, bindings, [f"s{i}" for i in range(scalars)])


def apply(rule: ElementwiseRule, arrays: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
    """See `bagua_kernels.launchers.elementwise.apply`."""
    if arrays[0].dtype == torch.float64:
        raise TypeError(
            f"Triton has no correctly rounded float64 rules, got {arrays[0].dtype}; set the backend numba_cuda"
        )
    n = arrays[0].numel()
    with on_device(arrays[0]):
        run = kernel(rule, len(scalars), tuple(a.dtype for a in arrays))
        run[(triton.cdiv(n, BLOCK),)](*map(bits, arrays), *scalars, n, BLOCK=BLOCK, num_warps=4, **EXACT)

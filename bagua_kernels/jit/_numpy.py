"""Rules as NumPy functions of whole arrays, and tensors as NumPy arrays over their own memory; nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit.rule import rebuilt, with_literals
from bagua_kernels.rules import rounding
from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.calls import Rule, called_rules, code_of

# Rules compute all sides of a choice, also the one that is not taken, and integers wrap.
meant = np.errstate(all="ignore")

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


def array(tensor: torch.Tensor) -> Any:
    """The NumPy array over a CPU tensor's memory; float16 and bfloat16 as uint16 bits."""
    tensor = tensor.detach()
    bits = _BITS.get(tensor.dtype)
    return (tensor.view(bits) if bits else tensor).numpy()


@functools.cache
def plain(rule: Rule, literal: type = np.float32) -> Any:
    """The rule as a function of arrays, with every rule that it calls and its float literals of one type.

    Python's own floats would do for most rules. But NumPy computes in float64 where a rule has nothing but literals.
    """
    names: dict[str, Any] = {name: plain(callee, literal) for name, callee in called_rules(rule).items()}
    return rebuilt(rule, {**names, "tl": tl}, code=with_literals(code_of(rule), literal))


def half_float(bits: Any) -> Any:
    """The float32 equal to the float16 with these bits."""
    return tl.cast(tl.cast(bits, tl.float16, bitcast=True), tl.float32)


def float_half(x: Any) -> Any:
    """The bits of the float16 nearest to a float32, ties to even."""
    return tl.cast(tl.cast(x, tl.float16), tl.uint16, bitcast=True)


# The rules that read an element as float32 (float64 stays what it is) and write it back.
LOAD: Mapping[torch.dtype, Rule] = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: half_float,
    torch.bfloat16: rounding.bfloat16_float,
}
STORE: Mapping[torch.dtype, Rule] = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: float_half,
    torch.bfloat16: rounding.float_bfloat16,
}


def load(tensor: torch.Tensor) -> Any:
    """A copy of a tensor's elements as float32; float64 stays what it is."""
    return plain(LOAD[tensor.dtype])(array(tensor).copy())


def store(tensor: torch.Tensor, values: Any, where: Any = True) -> None:
    """Rounds values to the dtype of a tensor, and writes them to the elements for which `where` is True."""
    np.copyto(array(tensor), plain(STORE[tensor.dtype])(values), where=where)


def store_results(
    tensors: Callable[[int], torch.Tensor], places: Sequence[int], results: Any, where: Any = True
) -> None:
    """Stores what a rule returns: the value itself for one place, else a tuple.

    Args:
        tensors: gives the tensor of a place.
        places: the places that the rule writes.
        results: what it has returned.
        where: as for `store`.
    """
    for place, values in zip(places, results if isinstance(results, tuple) else (results,), strict=True):
        store(tensors(place), values, where)

"""Many tensors in NumPy: one tensor after the other."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numpy import LOAD, STORE, array, meant, plain
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS, SKIP, Table, Variant, bindings, in_order_of_memory
from bagua_kernels.rules.random import random_key

HAS_FLOAT64 = True
NEEDS_TENSORS = True


def source(variant: Variant) -> str:
    """The text of a function of whole columns: the lines for one element, which NumPy runs for all of them."""
    columns, scalars = range(len(variant.dtypes)), [f"s{i}" for i in range(variant.scalars)]
    body = variant.body(lambda c: f"a{c}.copy()", lambda c, value: f"a{c}[:] = {value}", "index")
    terms = ", ".join(f"term{i}" for i in range(variant.rule.sums))
    arguments = ", ".join([*(f"a{c}" for c in columns), "factor", *scalars, "rate", "index", "key", "second_key"])
    return "\n".join([f"def over_tensor({arguments}):", *(f"    {line}" for line in body), f"    return [{terms}]", ""])


@functools.cache
def function(variant: Variant) -> Any:
    """The function over one tensor; it returns the terms of the rule's sums."""
    literal = np.float64 if variant.double else np.float32
    names = {name: plain(rule, literal) for name, rule in bindings(variant, LOAD, STORE).items()}
    return function_from_source(source(variant), "over_tensor", {"__name__": __name__, **names})


@meant
def launch(variant: Variant, table: Table, rows: Any, keys: Any) -> torch.Tensor | None:
    """See `bagua_kernels.launchers.multitensor.launch`."""
    sums = np.zeros((len(table), variant.rule.sums))
    for tensor, columns in enumerate(zip(*table.columns, strict=True)):
        row = np.asarray(rows[tensor])
        if row[SKIP] == 0 and table.sizes[tensor]:
            index, pair = np.arange(table.sizes[tensor]), (None, None)
            if variant.stochastic:
                seeds = np.asarray(keys[tensor]).view(np.uint32)
                pair = plain(random_key)(*seeds, (index >> 32).astype(np.uint32))
            numbers = *row[SCALARS : SCALARS + variant.scalars], row[-1], index.astype(np.uint32), *pair
            flat = [array(in_order_of_memory(column)) for column in columns]
            terms = function(variant)(*flat, row[FACTOR], *numbers)
            sums[tensor] = [np.sum(term, dtype=np.float64) for term in terms]
    return torch.from_numpy(sums) if variant.rule.sums else None

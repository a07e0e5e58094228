"""Sees in one sweep whether thousands of tensors still lie where they did, and where new gradients lie."""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_kernels import knobs
from bagua_kernels.jit.op import compiles_for_cpu
from bagua_kernels.optim.watch.offsets import F32, STORAGE_WORDS, Fields, find_fields, words

# About one attempt in a thousand fails: memory may hold the searched value by chance.
_ATTEMPTS = 3

logger = logging.getLogger(__name__)

# A tensor's sizes and strides lie in the object itself up to this many dimensions.
MOST_DIMENSIONS = 5
# Of fewer parameters PyTorch is asked. On a GPU a sweep costs less from these on.
FEWEST = 64
# On a CPU, where updates take longer than looks, steps are more than 5 % faster from these on (bench/results/watch.json).
FEWEST_ON_CPU = 400


class Watch:
    """Parameters with their gradients, and other tensors beside them.

    Args:
        fields: from `fields`.
        params: parameters, each with a gradient, of at most `MOST_DIMENSIONS` dimensions.
        others: further tensors, that must not change either.

    The tensors are not kept alive: before each look the caller makes sure that all of these very objects still are.
    """

    def __init__(self, fields: Fields, params: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        self._look = sweep(fields)
        tensors = [*params, *others]
        self._objects = np.array([id(t) for t in tensors])
        self._undefined = fields.undefined
        self._params = len(params)
        span = slice(fields.first, fields.last + 1)
        self._own = np.array([
            [t._cdata, t.untyped_storage()._cdata, *words(t.untyped_storage()._cdata, STORAGE_WORDS)[fields.data :],
             *words(t._cdata, span.stop)[span]]
            for t in tensors
        ])  # fmt: skip
        gradients = [p.grad for p in params if p.grad is not None]
        self._gradients = np.array([words(g._cdata, span.stop)[span] for g in gradients])
        self._seen = np.zeros((len(params), 3), np.int64)
        self._item = gradients[0].element_size()

    def look(self, addresses: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]) -> bool:
        """Finds this step's gradients.

        Args:
            addresses: shape (params,), int64: where they lie; 0 where there is none.
            missing: shape (params,), bool: where there is none.

        Returns:
            True if nothing else has changed; if False, only some are found.
        """
        found = self._seen, self._item, addresses, missing
        return bool(self._look(self._objects, self._own, self._params, self._gradients, self._undefined, *found))


@functools.cache
def sweep(fields: Fields) -> Any:
    """The compiled check."""
    from bagua_kernels.optim.watch import _numba_cpu_watch

    return _numba_cpu_watch.compiled({
        "IN_OBJECT": fields.tensor, "IN_TENSOR": fields.storage, "IN_AUTOGRAD": fields.autograd,
        "GRADIENT": fields.gradient, "FIRST": fields.first, "SPAN": fields.last + 1 - fields.first,
        "OFFSET": fields.offset, "DATA": fields.data, "MEMORY": STORAGE_WORDS - fields.data,
    })  # fmt: skip


def changes() -> list[Callable[[torch.nn.Parameter, Tensor], Any]]:
    """What a watch must notice: things done to a parameter of shape (4, 4) and to a tensor beside it."""

    def data(make: Callable[[Tensor], Tensor]) -> Callable[[torch.nn.Parameter, Tensor], Any]:
        return lambda p, other: setattr(p, "data", make(p.data))

    def gradient(make: Callable[[Tensor], Any]) -> Callable[[torch.nn.Parameter, Tensor], Any]:
        return lambda p, other: setattr(p, "grad", make(torch.ones(4, 4, dtype=F32)))

    return [
        data(Tensor.clone),
        data(Tensor.t),
        data(lambda t: t[:2]),
        data(lambda t: t.view(16)),
        data(lambda t: t.view(torch.int32).view(torch.float32)[:, :3]),
        data(lambda t: t.half()),
        gradient(Tensor.t),
        gradient(lambda g: torch.ones(4, 8, dtype=F32)[:, ::2]),
        gradient(lambda g: g.to_sparse()),
        gradient(torch._neg_view),
        gradient(lambda g: torch._efficientzerotensor((4, 4), dtype=F32)),
        lambda p, other: other.t_(),
        lambda p, other: other.resize_(2, 4),
        lambda p, other: other.set_(torch.ones(4, 4, dtype=F32)),
        lambda p, other: setattr(other, "data", torch.ones(4, 4, dtype=F32)),
        lambda p, other: other.untyped_storage().resize_(128),
        lambda p, other: torch._lazy_clone(other),
        lambda p, other: torch.utils.swap_tensors(other, torch.ones(4, 4, dtype=F32)),
    ]


@functools.cache
def fields() -> Fields | None:
    """Where the fields are; None where this cannot be found, or a change would be missed."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    for attempt in range(_ATTEMPTS):
        try:
            return _measured_fields()
        except (AttributeError, LookupError, RuntimeError) as error:
            logger.info("attempt %d: tensors are checked one by one: %s", attempt + 1, error)
    return None


def _measured_fields() -> Fields:
    """Finds the fields, and tries every change with them."""
    found = find_fields()
    for number, change in enumerate([None, *changes()]):
        parameter, other = torch.nn.Parameter(torch.ones(4, 4, dtype=F32)), torch.ones(4, 4, dtype=F32)
        parameter.grad = torch.ones(4, 4, dtype=F32)
        watch = Watch(found, [parameter], [other])
        addresses, missing = np.zeros(1, np.int64), np.zeros(1, bool)
        parameter.grad = None
        if not watch.look(addresses, missing) or not missing[0]:
            raise LookupError("the lack of a gradient was not noticed")
        parameter.grad = torch.ones(20, dtype=F32)[4:].view(4, 4)
        if not watch.look(addresses, missing) or missing[0] or addresses[0] != parameter.grad.data_ptr():
            raise LookupError("a new gradient was not found")
        if change is not None:
            with torch.no_grad():
                change(parameter, other)
            if watch.look(addresses, missing):
                raise LookupError(f"change {number} was not noticed")
    return found


def watch(params: Sequence[Tensor], others: Sequence[Tensor]) -> Watch | None:
    """A watch over parameters, each with a gradient, and other tensors; None where PyTorch must be asked for each."""
    least = FEWEST if params and params[0].is_cuda else FEWEST_ON_CPU
    if len(params) < least or not (knobs.WATCH.get() and compiles_for_cpu()):
        return None
    tensors = [*params, *others, *(p.grad for p in params if p.grad is not None)]
    if any(t.dim() > MOST_DIMENSIONS or t.is_complex() for t in tensors):
        return None
    found = fields()
    return None if found is None else Watch(found, params, others)

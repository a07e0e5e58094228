"""Sees in one sweep whether thousands of tensors still lie where they did, and where new gradients lie.

A kernel that works through addresses must check them at each step: parameters get other memory (`.data`), gradients are new
ones. Asking PyTorch costs 0.1 µs for each property of each tensor, together more than the update of small tensors. So the
fields are read from the tensor objects in memory, by compiled code. Where they are is measured on tensors whose fields are
known, and tried on all kinds of changes; where something is not as expected, `watch` says so and the caller asks PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WORD = 8
# What is looked through for a known field: less than the objects' sizes in any release.
OBJECT_WORDS, TENSOR_WORDS, STORAGE_WORDS, AUTOGRAD_WORDS = 5, 22, 7, 8
# A tensor's sizes and strides lie in the object itself up to this many dimensions.
MOST_DIMENSIONS = 5
FEWEST = 64
# Of the tensors that fields are measured on, whatever torch's default is.
F32 = torch.float32


@dataclass(frozen=True)
class Fields:
    """Positions of 8-byte words.

    Attributes:
        tensor: of the tensor's address in a Python object.
        storage: of the storage's address in a tensor.
        autograd: of the address of what autograd keeps of a tensor, in the tensor.
        gradient: of the gradient's address in that.
        first: the first of all words that say how a tensor lies in its storage.
        last: the last of them, which says what kind of tensor it is.
        offset: of the tensor's beginning in its storage, in elements.
        data: of the memory's address in a storage.
        undefined: what stands for the address of a gradient where there is none.
    """

    tensor: int
    storage: int
    autograd: int
    gradient: int
    first: int
    last: int
    offset: int
    data: int
    undefined: int


def words(address: int, count: int) -> list[int]:
    """What lies in memory."""
    return list((ctypes.c_int64 * count).from_address(address))


def only(positions: Sequence[int]) -> int:
    """The one position.

    Raises:
        LookupError: there are none or several.
    """
    if len(positions) != 1:
        raise LookupError(f"a field was found at {list(positions)}")
    return positions[0]


def where(found: Sequence[int], value: int) -> list[int]:
    """The positions of a word."""
    return [i for i, word in enumerate(found) if word == value]


def signed(value: int) -> int:
    """The same 64 bits as `words` gives them."""
    return ctypes.c_int64(value).value


def find_fields() -> Fields:
    """Measures where the fields are.

    Raises:
        LookupError: one is not where it can be told from others.
        AttributeError: PyTorch does not tell the values to look for.
    """
    base = torch.zeros(20_000, dtype=F32)
    tensor = base[1237 : 1237 + 7 * 11 * 13].view(7, 11, 13)
    found = words(tensor._cdata, TENSOR_WORDS)
    storage = tensor.untyped_storage()
    geometry = only([i for i in range(TENSOR_WORDS - 8) if found[i : i + 3] == [7, 11, 13]])
    if found[geometry - 1] != 3 or found[geometry + 5 : geometry + 8] != [143, 13, 1]:
        raise LookupError("sizes and strides are not side by side")
    leaves = [torch.nn.Parameter(torch.zeros(3, dtype=F32)) for _ in range(3)]
    for leaf in leaves:
        leaf.grad = torch.zeros(3, dtype=F32)
    insides = [words(leaf._cdata, TENSOR_WORDS) for leaf in leaves]
    plain = [torch.zeros(3, dtype=F32) for _ in range(3)]
    others = [words(t._cdata, TENSOR_WORDS) for t in plain]
    autograd = only([
        i for i in range(geometry) if all(o[i] == 0 for o in others) and all(w[i] and w[i] % WORD == 0 for w in insides)
    ])  # fmt: skip
    gradients = [
        where(words(w[autograd], AUTOGRAD_WORDS), leaf.grad._cdata)
        for w, leaf in zip(insides, leaves, strict=True)
        if leaf.grad is not None
    ]
    if any(g != gradients[0] for g in gradients):
        raise LookupError(f"gradients were found at {gradients}")
    without = torch.nn.Parameter(torch.zeros(3, dtype=F32))
    keys = signed(torch._C._dispatch_keys(tensor).raw_repr())
    return Fields(
        tensor=only(where(words(id(tensor), OBJECT_WORDS), tensor._cdata)),
        storage=only(where(found, storage._cdata)),
        autograd=autograd,
        gradient=only(gradients[0]),
        first=geometry - 1,
        last=only(where(found, keys)),
        offset=only(where(found, int(tensor.storage_offset()))),
        data=where(words(storage._cdata, STORAGE_WORDS), storage.data_ptr())[0],
        undefined=words(words(without._cdata, TENSOR_WORDS)[autograd], AUTOGRAD_WORDS)[only(gradients[0])],
    )


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
             *words(t._cdata, TENSOR_WORDS)[span]]
            for t in tensors
        ])  # fmt: skip
        gradients = [p.grad for p in params if p.grad is not None]
        self._gradients = np.array([words(g._cdata, TENSOR_WORDS)[span] for g in gradients])
        self._seen = np.zeros((len(params), 3), np.int64)
        self._item = gradients[0].element_size()

    def look(self, addresses: np.ndarray[Any, Any], missing: np.ndarray[Any, Any]) -> bool:
        """Finds this step's gradients.

        Args:
            addresses: shape (params,), int64: where they lie; 0 where there is none.
            missing: shape (params,), bool: where there is none.

        Returns:
            Whether nothing else has changed; if not, only some are found.
        """
        found = self._seen, self._item, addresses, missing
        return bool(self._look(self._objects, self._own, self._params, self._gradients, self._undefined, *found))


@functools.cache
def sweep(fields: Fields) -> Any:
    """The compiled check."""
    from bagua_kernels.optim.step import _numba_cpu_watch

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
    """Where the fields are; None where this cannot be told, or a change would be missed."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
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
    except (AttributeError, LookupError, RuntimeError) as error:
        logger.info("tensors are checked one by one: %s", error)
        return None
    return found


def watch(params: Sequence[Tensor], others: Sequence[Tensor]) -> Watch | None:
    """A watch over parameters, each with a gradient, and other tensors; None where each must be asked."""
    if len(params) < FEWEST:
        return None
    tensors = [*params, *others, *(p.grad for p in params if p.grad is not None)]
    if any(t.dim() > MOST_DIMENSIONS or t.is_complex() for t in tensors):
        return None
    found = fields()
    return None if found is None else Watch(found, params, others)

"""Measures where the fields of PyTorch's objects lie, on tensors whose fields are known."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WORD = 8
# What is looked through for a known field: less than the objects' sizes in any release.
OBJECT_WORDS, STORAGE_WORDS, AUTOGRAD_WORDS = 5, 7, 8
# A tensor is looked through up to the word with its dispatch keys, the last field that is needed. It was word 21 in a CPU build
# of torch 2.13, and word 22 in a CUDA build of 2.11.
FIRST_KEYS, LAST_KEYS = 12, 24
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
        first: the first of all words that describe a tensor's position in its storage.
        last: the last of them, which contains the kind of the tensor.
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
        LookupError: one cannot be distinguished from others.
        AttributeError: PyTorch does not expose the values to look for.
    """
    base = torch.zeros(20_000, dtype=F32)
    tensor = base[1237 : 1237 + 7 * 11 * 13].view(7, 11, 13)
    keys = signed(torch._C._dispatch_keys(tensor).raw_repr())
    size = 1 + next((i for i in range(FIRST_KEYS, LAST_KEYS) if words(tensor._cdata, i + 1)[i] == keys), LAST_KEYS)
    found = words(tensor._cdata, size)
    storage = tensor.untyped_storage()
    geometry = only([i for i in range(size - 8) if found[i : i + 3] == [7, 11, 13]])
    if found[geometry - 1] != 3 or found[geometry + 5 : geometry + 8] != [143, 13, 1]:
        raise LookupError("sizes and strides are not side by side")
    leaves = [torch.nn.Parameter(torch.zeros(3, dtype=F32)) for _ in range(3)]
    for leaf in leaves:
        leaf.grad = torch.zeros(3, dtype=F32)
    insides = [words(leaf._cdata, size) for leaf in leaves]
    plain = [torch.zeros(3, dtype=F32) for _ in range(3)]
    others = [words(t._cdata, size) for t in plain]
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
    return Fields(
        tensor=only(where(words(id(tensor), OBJECT_WORDS), tensor._cdata)),
        storage=only(where(found, storage._cdata)),
        autograd=autograd,
        gradient=only(gradients[0]),
        first=geometry - 1,
        last=only(where(found, keys)),
        offset=only(where(found, int(tensor.storage_offset()))),
        data=where(words(storage._cdata, STORAGE_WORDS), storage.data_ptr())[0],
        undefined=words(words(without._cdata, size)[autograd], AUTOGRAD_WORDS)[only(gradients[0])],
    )

"""Maps a rule over many tensors in one launch, through a table of their addresses, with separate scalars per tensor.

Nothing is flattened or copied. Tensors may be anywhere in memory. The tensors of one row of the table must have their
elements in the same order in memory, without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.rules.optimizers import ElementwiseRule, approached, scaled
from bagua_kernels.rules.random import random_bits, random_key
from bagua_kernels.rules.rounding import float_bfloat16_stochastic, resumed

OP = Op(__name__)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}

# Columns of a table that follow the rule's own, in this order.
MASTER, COMPENSATION, AVERAGE = "master", "compensation", "average"
EXTRAS = (MASTER, COMPENSATION, AVERAGE)

# The column of gradients; a rule of one array has no other.
GRADIENT = 1
# Columns of `rows` before the rule's scalars: a factor of the gradient, and whether to leave everything as it is.
FACTOR, SKIP, SCALARS = 0, 1, 2


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for.

    Attributes:
        rule: what to do with one element; array 0 is the parameter and array 1, or the only one, the gradient.
        dtypes: of each array of the rule, then of the extra columns.
        scalars: number of the rule's scalars.
        extras: columns beside the rule's, of `EXTRAS` in their order. `MASTER`: a float32 copy, which the rule
            updates; the parameter is its rounded value. If it is not, the parameter has been written, and its value is used.
            `COMPENSATION`: what the parameter has lost in rounding, in its own dtype (Kahan). `AVERAGE`: a running mean of
            the parameter, whose rate follows the rule's scalars in `rows`.
        stochastic: True if a bfloat16 parameter is rounded at random without bias, instead of to nearest.
    """

    rule: ElementwiseRule
    dtypes: tuple[torch.dtype, ...]
    scalars: int
    extras: tuple[str, ...] = ()
    stochastic: bool = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise TypeError(
                    f"rule {self.rule.name!r} takes float32, float16, bfloat16 and float64 tensors, got {dtype}"
                )
        if torch.float64 in self.dtypes and set(self.dtypes) != {torch.float64}:
            raise TypeError(f"float64 cannot be mixed with other dtypes in one update, got {list(self.dtypes)}")
        if self.stochastic and self.dtypes[0] != torch.bfloat16:
            raise TypeError(f"stochastic rounding is for bfloat16 parameters, got {self.dtypes[0]}")

    @property
    def double(self) -> bool:
        """True if arithmetic is in float64."""
        return self.dtypes[0] == torch.float64

    @property
    def width(self) -> int:
        """Number of columns of `rows`."""
        return SCALARS + self.scalars + (AVERAGE in self.extras)

    def column(self, extra: str) -> int | None:
        """The position of an extra column; None if there is none."""
        return self.rule.arrays + self.extras.index(extra) if extra in self.extras else None

    def body(self, read: Callable[[int], str], write: Callable[[int, str], str], index: str) -> list[str]:
        """The source lines that update one element.

        Args:
            read: gives the expression that reads a column.
            write: gives the statement that writes an expression to a column.
            index: the expression of the element's number in its tensor, a uint32.
        """
        rule = self.rule
        master, compensation, average = (self.column(extra) for extra in EXTRAS)
        lines = [f"v{i} = load_{i}({read(i)})" for i in range(rule.arrays)]
        gradient = min(1, rule.arrays - 1)
        lines.append(f"v{gradient} = scaled(v{gradient}, factor)")
        if master is not None:
            lines.append(f"wide = load_{master}({read(master)})")
            lines.append("v0 = resumed(v0, load_0(store_0(wide)), wide)")
        if compensation is not None:
            lines.append(f"v0 = v0 + load_{compensation}({read(compensation)})")
        results = [f"r{i}" for i in rule.writes] + [f"term{i}" for i in range(rule.sums)]
        arguments = [f"v{i}" for i in range(rule.arrays)] + [f"s{i}" for i in range(self.scalars)]
        lines.append(f"{', '.join(results)} = rule({', '.join(arguments)})")
        lines += [write(i, f"store_{i}(r{i})") for i in rule.writes if i]
        if 0 in rule.writes:
            rounded = (
                f"store_stochastic(r0, random_bits({index}, key, second_key))" if self.stochastic else "store_0(r0)"
            )
            lines += [f"rounded = {rounded}", write(0, "rounded")]
            if master is not None:
                lines.append(write(master, f"store_{master}(r0)"))
            if compensation is not None:
                lines.append(write(compensation, f"store_{compensation}(r0 - load_0(rounded))"))
            if average is not None:
                lines.append(f"mean = load_{average}({read(average)})")
                lines.append(write(average, f"store_{average}(approached(mean, r0, rate))"))
        return lines


class Table:
    """Where the columns of many tensors lie, and the pieces of work that the tensors are cut into.

    Attributes:
        columns: the tensors of each column, in the order of the rule's arrays and the extra columns; empty where only their
            addresses are needed.
        sizes: elements of each tensor, shape (tensors,), int64; a complex number counts twice.
        addresses: shape (tensors, columns), int64.
        device: where all of them are.
    """

    def __init__(self, columns: Sequence[Sequence[torch.Tensor]]) -> None:
        self.columns = [list(column) for column in columns]
        first = self.columns[0]
        self.device = first[0].device
        self.sizes = np.array([t.numel() * (2 if t.is_complex() else 1) for t in first], np.int64)
        self.addresses = np.zeros((len(first), len(columns)), np.int64)
        self._cache: dict[Any, Any] = {}
        self.fill(self.columns)

    def __len__(self) -> int:
        return len(self.sizes)

    def replace(self, column: int, addresses: Any) -> None:
        """Puts other tensors, of the same sizes and dtypes, into a column of the addresses."""
        before = self.addresses[:, column].copy()
        self.addresses[:, column] = addresses
        if np.array_equal(before, self.addresses[:, column]):
            return
        self._cache = {key: value for key, value in self._cache.items() if "addresses" not in key}

    def fill(self, columns: Sequence[Sequence[torch.Tensor]]) -> None:
        """Puts other tensors, of the same sizes and dtypes, into all columns."""
        self.columns = [list(column) for column in columns]
        for i, column in enumerate(self.columns):
            self.replace(i, [t.data_ptr() for t in column])

    def release(self) -> None:
        """Keeps the tensors alive no longer."""
        self.columns = [[] for _ in self.columns]

    def cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What a backend derives from the table; forgotten as soon as an address changes if "addresses" is in its key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def tasks(self, chunk: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Pieces of at most `chunk` elements: the tensor of each, and which piece of it."""
        counts = -(-self.sizes // chunk)
        tensors = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        firsts = np.cumsum(counts) - counts
        return tensors, (np.arange(len(tensors)) - firsts[tensors]).astype(np.int32)


class TensorUpdate(NamedTuple):
    """One tensor of a table, and what a kernel needs to update it by a gradient that it makes itself.

    Attributes:
        variant: neither stochastic nor with sums; parameter and gradient have float32.
        table: on the CPU; the column of gradients is not read.
        rows: as `launch` takes them.
        tensor: its number in the table; its elements are contiguous.
    """

    variant: Variant
    table: Table
    rows: Any
    tensor: int

    def __repr__(self) -> str:
        return (
            f"{int(self.table.sizes[self.tensor])} elements of {self.variant.dtypes[0]} by {self.variant.rule.name!r}"
        )

    def fits(self, size: int) -> bool:
        """True if it is as above, and of a tensor of so many elements."""
        plain = not self.variant.stochastic and not self.variant.rule.sums and self.table.device.type == "cpu"
        float32 = self.variant.dtypes[:2] == (torch.float32, torch.float32)
        return plain and float32 and int(self.table.sizes[self.tensor]) == size


def load_backend(device: torch.device) -> None:
    """Imports what kernels on the device need.

    Raises:
        BackendUnavailableError: there is no backend for it, or what it needs is not installed.
    """
    OP.backend(device)


def has_float64(device: torch.device) -> bool:
    """True if rules can compute in float64 on the device."""
    return bool(OP.backend(device).HAS_FLOAT64)


def needs_tensors(device: torch.device) -> bool:
    """True if kernels on the device read a table's columns; else they read only its addresses."""
    return bool(OP.backend(device).NEEDS_TENSORS)


def launch(variant: Variant, table: Table, rows: Any, keys: Any = None) -> Any:
    """Runs the rule over all elements of all tensors, in place. Arithmetic is as in `elementwise.apply`.

    Args:
        variant: the rule and the dtypes of the table's columns.
        table: the tensors.
        rows: shape (tensors, variant.width), float32 (float64 if `variant.double`): `FACTOR`, `SKIP`, the rule's scalars
            and the rate of `AVERAGE`. A NumPy array, or a tensor on the table's device.
        keys: shape (tensors, 2): seeds of stochastic rounding; a uint32 array, or an int32 tensor on the table's device.

    Returns:
        The rule's sums over each tensor, shape (tensors, sums), float64, on the table's device; None if it has none.
    """
    if len(table.columns) != len(variant.dtypes) or rows.shape != (len(table), variant.width):
        raise ValueError(
            f"rule {variant.rule.name!r} takes {len(variant.dtypes)} columns and {variant.width} values for each of {len(table)} "
            f"tensors, got {len(table.columns)} columns and shape {tuple(rows.shape)}"
        )
    return OP.backend(table.device).launch(variant, table, rows, keys)


def in_order_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor's elements in the order in which they are in memory; complex numbers as pairs."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.as_strided((tensor.numel(),), (1,))


def bindings(variant: Variant, load: Mapping[torch.dtype, Any], store: Mapping[torch.dtype, Any]) -> dict[str, Any]:
    """What the free names of a kernel's source stand for, with a backend's conversions."""
    found: dict[str, Any] = {"rule": variant.rule.function, "scaled": scaled, "approached": approached}
    for i, dtype in enumerate(variant.dtypes):
        found |= {f"load_{i}": load[dtype], f"store_{i}": store[dtype]}
    if MASTER in variant.extras:
        found["resumed"] = resumed
    if variant.stochastic:
        found |= {"random_key": random_key, "random_bits": random_bits, "store_stochastic": float_bfloat16_stochastic}
    return found

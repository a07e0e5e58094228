"""Vectors of sixteen float32 as Numba's values, for loops that ask for memory ahead of themselves or write past the caches.

LLVM makes no vectors of such loops by itself. On processors with narrower vectors it takes several for one.

All arrays are contiguous float32. Each addition and multiplication is rounded separately, unless noted.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.errors import TypingError

LANES = 16
_BYTES = 4 * LANES
_ELEMENT = ir.FloatType()
_CONTENT = ir.VectorType(_ELEMENT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_INDICES = ir.VectorType(ir.IntType(64), LANES)


class VectorType(types.Type):  # type: ignore[misc]
    """Numba's type of a vector."""


VECTOR = VectorType("Vector")


@extending.register_model(VectorType)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """LLVM's type of a vector."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _CONTENT)


def _operator(of: Any, instruction: str) -> None:
    @extending.intrinsic
    def apply(context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(*arguments)

        return VECTOR(VECTOR, VECTOR), generate

    @extending.overload(of, jit_options={"forceinline": True, "fastmath": False})
    def choose(a, b):
        return (lambda a, b: apply(a, b)) if isinstance(a, VectorType) and isinstance(b, VectorType) else None


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")


def _check(*arrays: Any) -> None:
    for array in arrays:
        if not (isinstance(array, types.Array) and array.layout == "C" and array.dtype == types.float32):
            raise TypingError(f"expected a contiguous array of float32, got {array}")


def _place(context: Any, builder: Any, kind: Any, value: Any, at: Any, row: int = 0) -> Any:
    """The address of an element, of a row if there are such, as that of a vector."""
    array = context.make_array(kind)(context, builder, value)
    if row:
        columns = builder.extract_value(array.shape, kind.ndim - 1)
        at = builder.add(at, builder.mul(columns, ir.Constant(columns.type, row)))
    return builder.bitcast(builder.gep(array.data, [at]), _CONTENT.as_pointer())


def _spread(builder: Any, value: Any, content: Any) -> Any:
    one = builder.insert_element(ir.Constant(content, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _mask(builder: Any, count: Any) -> Any:
    # Of a constant count LLVM makes a constant, and of a full one plain loads and stores.
    return builder.icmp_signed("<", ir.Constant(_INDICES, list(range(LANES))), _spread(builder, count, _INDICES))


def _load(builder: Any, place: Any, count: Any) -> Any:
    kind = ir.FunctionType(_CONTENT, [_CONTENT.as_pointer(), ir.IntType(32), _MASK, _CONTENT])
    load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0v{LANES}f32")
    return builder.call(
        load, [place, ir.Constant(ir.IntType(32), 4), _mask(builder, count), ir.Constant(_CONTENT, None)]
    )


def _store(builder: Any, place: Any, value: Any, count: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_CONTENT, _CONTENT.as_pointer(), ir.IntType(32), _MASK])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0v{LANES}f32")
    builder.call(store, [value, place, ir.Constant(ir.IntType(32), 4), _mask(builder, count)])


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    # Fused where the processor can.
    kind = ir.FunctionType(_CONTENT, [_CONTENT] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32"), [x, y, z])


def _total(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(_ELEMENT, [_ELEMENT, _CONTENT])
    add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f32")
    return builder.call(add, [ir.Constant(_ELEMENT, 0.0), value], fastmath=("reassoc",))


@extending.intrinsic
def nothing(context):
    """A vector of zeros."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_CONTENT, [0.0] * LANES)

    return VECTOR(), generate


@extending.intrinsic
def repeated(context, value):
    """A vector of one number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], _CONTENT)

    return VECTOR(types.float32), generate


@extending.intrinsic
def load(context, array, at, count):
    """Elements from `array[at]` on, the first `count` of a vector; the others are 0."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, count = arguments
        return _load(builder, _place(context, builder, array, values, at), count)

    return VECTOR(array, types.intp, types.intp), generate


@extending.intrinsic
def store(context, array, at, count, value):
    """Writes the first `count` elements of a vector to `array[at]` and on."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, count, value = arguments
        _store(builder, _place(context, builder, array, values, at), value, count)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, VECTOR), generate


@extending.intrinsic
def stream(context, array, at, value):
    """Writes a vector past the caches to `array[at]` and on, whose address is a multiple of 64."""
    _check(array)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, at, value = arguments
        written = builder.store(value, _place(context, builder, array, values, at), align=_BYTES)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@extending.intrinsic
def total_of(context, value):
    """The sum of a vector's elements, in any order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _total(builder, arguments[0])

    return types.float32(VECTOR), generate


@extending.intrinsic
def dot(context, left, right):
    """The sum of the products of two tuples of vectors, from the first on, each rounded by itself."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs = zip(*(cgutils.unpack_tuple(builder, each) for each in arguments), strict=True)
        first, *others = (builder.fmul(x, y) for x, y in pairs)
        for other in others:
            first = builder.fadd(first, other)
        return first

    return VECTOR(left, right), generate


@extending.intrinsic
def add_products(context, sums, factors, value):
    """A tuple of sums and the products of factors and one vector, added in one operation where the processor can."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        many = (cgutils.unpack_tuple(builder, each) for each in arguments[:2])
        added = [_multiply_add(builder, factor, arguments[2], one) for one, factor in zip(*many, strict=True)]
        return context.make_tuple(builder, sums, added)

    return sums(sums, factors, VECTOR), generate


def panels(rank: int) -> dict[str, Any]:
    """What is done with `rank` rows at once, by name: their vectors are a tuple, and so are those of as many elements."""
    several = types.UniTuple(VECTOR, rank)

    def named(function: Any) -> Any:
        # The names of what they call distinguish kernels on disk.
        function.__name__ += f"_{rank}"
        return extending.intrinsic(function)

    @named
    def no_sums(context: Any, array: Any) -> Any:
        """For each element a vector of zeros."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return context.make_tuple(builder, several, [ir.Constant(_CONTENT, [0.0] * LANES)] * rank)

        return several(array), generate

    @named
    def spread(context: Any, array: Any) -> Any:
        """For each element a vector of nothing else."""
        _check(array)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            start = context.make_array(array)(context, builder, arguments[0]).data
            elements = [builder.load(builder.gep(start, [ir.Constant(ir.IntType(64), k)])) for k in range(rank)]
            return context.make_tuple(builder, several, [_spread(builder, one, _CONTENT) for one in elements])

        return several(array), generate

    @named
    def load_rows(context: Any, rows: Any, at: Any, count: Any) -> Any:
        """As `load`, of each row."""
        _check(rows)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, at, count = arguments
            places = [_place(context, builder, rows, values, at, k) for k in range(rank)]
            return context.make_tuple(builder, several, [_load(builder, place, count) for place in places])

        return several(rows, types.intp, types.intp), generate

    @named
    def store_rows(context: Any, rows: Any, at: Any, count: Any, value: Any) -> Any:
        """As `store`, to each row."""
        _check(rows)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values, at, count, value = arguments
            for k, one in enumerate(cgutils.unpack_tuple(builder, value)):
                _store(builder, _place(context, builder, rows, values, at, k), one, count)
            return context.get_dummy_value()

        return types.void(rows, types.intp, types.intp, several), generate

    @named
    def store_totals(context: Any, array: Any, value: Any) -> Any:
        """Writes the sum of each vector to an element."""
        _check(array)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            start = context.make_array(array)(context, builder, arguments[0]).data
            for k, one in enumerate(cgutils.unpack_tuple(builder, arguments[1])):
                builder.store(_total(builder, one), builder.gep(start, [ir.Constant(ir.IntType(64), k)]))
            return context.get_dummy_value()

        return types.void(array, several), generate

    rows = {"spread": spread, "load_rows": load_rows, "store_rows": store_rows, "dot": dot}
    sums = {"no_sums": no_sums, "add_products": add_products, "store_totals": store_totals}
    return rows | sums

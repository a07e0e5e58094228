"""Instructions of the processor that Numba has no words for, as functions for templates: memory, packing, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils, errors
from numba.np import arrayobj


@extending.intrinsic
def borrowed(context, elements):
    """The same array without a share in its memory, so that slices of it cost no atomic reference counting.

    A block of 256 elements is done in 60 ns, of which a dozen counted slices would be more than half. The array itself must
    be used once more after the last use of what is returned, see `keep`.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        same = context.make_array(signature.args[0])(context, builder, arguments[0])
        for owner in ("meminfo", "parent"):
            setattr(same, owner, cgutils.get_null_value(getattr(same, owner).type))
        return same._getvalue()

    return elements(elements), generate


@extending.intrinsic
def keep(context, elements):
    """Keeps an array's memory up to here."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(elements), generate


def _contiguous(context: Any, builder: Any, kind: Any, data: Any, *shape: Any) -> Any:
    """Generates an array whose elements follow one another in memory that it does not own."""
    made = context.make_array(kind)(context, builder)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for length in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], length))
    arrayobj.populate_array(made, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return made._getvalue()


def _check_vector(elements: Any) -> None:
    if not isinstance(elements, types.Array) or (elements.ndim, elements.layout) != (1, "C"):
        raise errors.NumbaTypeError(f"expected a contiguous vector, got {elements}")


@extending.intrinsic
def part(context, elements, begin, end):
    """The elements from `begin` up to `end` of a contiguous vector, which must have them.

    A slice is held to the ends of its array and shares its memory. What that takes is removed again where it is not needed, but
    with a dozen of them it is half of what is compiled.
    """
    _check_vector(elements)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        begin, end = arguments[1:]
        size = builder.sub(end, begin)
        return _contiguous(context, builder, signature.return_type, builder.gep(start, [begin]), size)

    return elements(elements, types.intp, types.intp), generate


@extending.intrinsic
def row(context, elements, number):
    """A row of a matrix whose rows are contiguous, as a contiguous vector; see `part`."""
    if not isinstance(elements, types.Array) or elements.ndim != 2 or elements.layout == "F":
        raise errors.NumbaTypeError(f"expected a matrix with contiguous rows, got {elements}")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        matrix = context.make_array(signature.args[0])(context, builder, arguments[0])
        size = builder.extract_value(matrix.shape, 1)
        begin = builder.mul(builder.extract_value(matrix.strides, 0), arguments[1])
        start = builder.gep(builder.bitcast(matrix.data, ir.IntType(8).as_pointer()), [begin])
        return _contiguous(context, builder, signature.return_type, builder.bitcast(start, matrix.data.type), size)

    return types.Array(elements.dtype, 1, "C")(elements, types.intp), generate


def view_as(element: Any) -> Any:
    """A function of a contiguous vector that returns its memory as elements of another Numba type; see `part`."""

    @extending.intrinsic
    def view(context: Any, elements: Any) -> Any:
        _check_vector(elements)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            whole = context.make_array(signature.args[0])(context, builder, arguments[0])
            own, other = (context.get_abi_sizeof(context.get_data_type(t)) for t in (elements.dtype, element))
            size = builder.mul(whole.nitems, ir.Constant(ir.IntType(64), own))
            size = builder.sdiv(size, ir.Constant(ir.IntType(64), other))
            data = builder.bitcast(whole.data, context.get_data_type(element).as_pointer())
            return _contiguous(context, builder, signature.return_type, data, size)

        return types.Array(element, 1, "C")(elements), generate

    return view


def request_line(builder: Any, address: Any) -> None:
    """Generates the instruction that fetches a cache line for reading."""
    byte, word = ir.IntType(8), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # For reading, to be kept in all caches, data.
    builder.call(function, [address, *(ir.Constant(word, flag) for flag in (0, 3, 1))])


@extending.intrinsic
def prefetch(context, elements, index):
    """Asks for the cache line of `elements[index]`, which may lie beyond the end.

    Two passes over a block, the first waiting for memory and the second for arithmetic, do not overlap by themselves: the
    processor looks a few hundred instructions ahead, and its own prefetcher does not see the next block in time.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        request_line(builder, builder.bitcast(builder.gep(start, [arguments[1]]), ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(elements, types.intp), generate


@extending.intrinsic
def wide_vectors(context):
    """Lets LLVM use the widest vectors of the processor in the calling function.

    LLVM prefers 256 bits where 512 would slow older processors' clocks; integer hashing and packing gain more than that.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        attributes = builder.function.attributes
        # llvmlite knows only attributes without a value; it writes each as it is.
        set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


VECTOR_BYTES = 32
CACHE_LINE = 64


@extending.intrinsic
def stream_vector(context, target, source, at):
    """Copies 32 bytes at byte `at` of two arrays past the caches; the target's must be aligned to as many."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), VECTOR_BYTES).as_pointer()
        places = []
        for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
            start = builder.bitcast(context.make_array(kind)(context, builder, value).data, ir.IntType(8).as_pointer())
            places.append(builder.bitcast(builder.gep(start, [arguments[2]]), vector))
        store = builder.store(builder.load(places[1], align=4), places[0], align=VECTOR_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(target, source, types.intp), generate


def packing(fields: int, stride: int) -> tuple[Any, Any]:
    """Functions that pack codes of a byte each into the bits of fewer bytes, and back, on vectors of bytes.

    Written in Numba they would work on 64-bit lanes, eight times as wide as needed: it widens all small integers.

    Args:
        fields: codes in a byte: 2, 4 or 8.
        stride: packed bytes; code i goes to byte i modulo `stride`, the first `stride` codes to the lowest bits.

    Returns:
        `pack(loose, packed)` and `unpack(packed, loose)`, of uint8 arrays of at least `fields * stride` and `stride` elements.
    """
    width = 8 // fields
    step = min(stride, VECTOR_BYTES)
    vector = ir.VectorType(ir.IntType(8), step)

    def splat(number: int) -> Any:
        return ir.Constant(vector, [number] * step)

    def bytes_of(context: Any, builder: Any, kind: Any, value: Any) -> Callable[[int], Any]:
        start = context.make_array(kind)(context, builder, value).data

        def place(at: int) -> Any:
            address = builder.gep(start, [ir.Constant(ir.IntType(64), at)])
            return builder.bitcast(address, vector.as_pointer())

        return place

    @extending.intrinsic
    def pack(context: Any, loose: Any, packed: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, target = (bytes_of(context, builder, *p) for p in zip(signature.args, arguments, strict=True))
            for at in range(0, stride, step):
                joined = builder.load(source(at), align=1)
                for field in range(1, fields):
                    code = builder.load(source(field * stride + at), align=1)
                    joined = builder.or_(joined, builder.shl(code, splat(field * width)))
                builder.store(joined, target(at), align=1)
            return context.get_dummy_value()

        return types.void(loose, packed), generate

    @extending.intrinsic
    def unpack(context: Any, packed: Any, loose: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, target = (bytes_of(context, builder, *p) for p in zip(signature.args, arguments, strict=True))
            for at in range(0, stride, step):
                joined = builder.load(source(at), align=1)
                for field in range(fields):
                    code = builder.and_(builder.lshr(joined, splat(field * width)), splat((1 << width) - 1))
                    builder.store(code, target(field * stride + at), align=1)
            return context.get_dummy_value()

        return types.void(packed, loose), generate

    return pack, unpack


@extending.intrinsic
def store_fence(context):
    """Makes streamed bytes visible to other threads before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def array_at(element: Any, dimensions: int = 1) -> Any:
    """A function of an address and a shape, a number or a pair, that returns the array which is there."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = builder.inttoptr(arguments[0], context.get_data_type(element).as_pointer())
        return _contiguous(context, builder, signature.return_type, data, *arguments[1:])

    kind = types.Array(element, dimensions, "C")

    @extending.intrinsic
    def vector(context: Any, address: Any, size: Any) -> Any:
        return kind(types.int64, types.intp), made

    @extending.intrinsic
    def matrix(context: Any, address: Any, rows: Any, columns: Any) -> Any:
        return kind(types.int64, types.intp, types.intp), made

    return vector if dimensions == 1 else matrix


@extending.intrinsic
def word_at(context, address):
    """The int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


@extending.intrinsic
def prefetch_address(context, address):
    """Asks for the cache line at an address, which need not be one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        request_line(builder, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@extending.intrinsic(prefer_literal=True)
def prefetch_lines(context, address, size):
    """Asks for the cache lines of a constant number of bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for line in range(0, size.literal_value, CACHE_LINE):
            here = builder.add(arguments[0], ir.Constant(ir.IntType(64), line))
            request_line(builder, builder.inttoptr(here, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, size), generate


MASK_BITS = 64


@extending.intrinsic
def reaching(context, elements, start, threshold):
    """64 bits for 64 float32 from `start` on: 1 where the bits of one without its sign reach an int32 threshold."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), MASK_BITS)

        def splat(value: Any) -> Any:
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            lanes = ir.Constant(vector, [0] * MASK_BITS)
            return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), lanes)

        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer())
        bits = builder.load(address, align=4)
        keys = builder.and_(bits, ir.Constant(vector, [0x7FFFFFFF] * MASK_BITS))
        found = builder.icmp_signed(">=", keys, splat(arguments[2]))
        return builder.bitcast(found, ir.IntType(MASK_BITS))

    return types.uint64(elements, types.intp, types.int32), generate


@extending.intrinsic
def lowest_bit(context, mask):
    """The place of the lowest 1 of a mask that has one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


@extending.intrinsic
def count_bits(context, mask):
    """The number of ones of a mask."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


# Numba has no floats of 16 bits: of these templates read the bits.
_ELEMENT = {
    torch.float64: types.float64,
    torch.float32: types.float32,
    torch.float16: types.uint16,
    torch.bfloat16: types.uint16,
}
# By dtype: vectors of a tensor's memory, and of that of another vector.
VECTOR = {dtype: array_at(element) for dtype, element in _ELEMENT.items()}
VIEW = {dtype: view_as(element) for dtype, element in _ELEMENT.items()}
as_bytes = view_as(types.uint8)
as_int32 = view_as(types.int32)

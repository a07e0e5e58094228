"""Compiles rules and launcher templates with Numba for the CPU, and runs them on as many threads as torch uses."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import extending, types
from numba.core import cgutils

from bagua_kernels.jit import scalar
from bagua_kernels.jit.rule import Rule, called_rules, code_of, digest, rebuilt, with_literals
from bagua_kernels.rules import rounding

logger = logging.getLogger(__name__)

# LLVM contracts nothing on a CPU unless an operation carries the `contract` flag, and Numba sets none here.
IEEE = scalar.Exact(
    divide=numba.njit(lambda x, y: x / y, error_model="numpy"),
    root=numba.njit(lambda x: math.sqrt(x)),
    multiply=numba.njit(lambda x, y: x * y),
)
scalar.install(extending, types, single=IEEE, double=IEEE)

# No `fastmath`: the order of operations is part of the wire format. The numpy error model has no zero-division branches,
# which would keep loops from vectorising.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


# Kernels on disk hold compiled words of the vocabulary, and must not outlive a change of these.
VOCABULARY = digest(inspect.getsource(scalar))


@functools.cache
def compile_rule(rule: Rule, literal: type = np.float32) -> Any:
    """The rule as a Numba function of scalars, with every rule that it calls and its float literals of one type."""
    names: dict[str, Any] = {name: compile_rule(callee, literal) for name, callee in called_rules(rule).items()}
    code = with_literals(code_of(rule), literal)
    return numba.njit(rebuilt(rule, {**names, "tl": scalar}, code=code), **OPTIONS)


def compile_template(
    template: Rule, bindings: Mapping[str, Any], *, parallel: bool = False, literal: type = np.float32
) -> Any:
    """Compiles a launcher's template, cached on disk under the digest of everything it is made of.

    Args:
        template: a function of arrays and scalars whose free names `bindings` supplies.
        bindings: rules (compiled here), numbers, or functions that are compiled already.
        parallel: whether its `numba.prange` loops run on several threads.
        literal: the type of the rules' float literals, float32 or float64.
    """
    names = {
        name: compile_rule(value, literal) if isinstance(value, FunctionType) else value
        for name, value in bindings.items()
    }
    # A Dispatcher among the bindings is another template; its own digest is part of its name.
    described = [
        (name, value.__name__ if isinstance(value, numba.core.dispatcher.Dispatcher) else value)
        for name, value in bindings.items()
    ]
    function = rebuilt(template, names, suffix="_" + digest(template, described, literal, VOCABULARY))
    try:
        return numba.njit(function, cache=True, parallel=parallel, **OPTIONS)
    except RuntimeError as error:
        # Neither the package's folder nor the user's cache can be written, as in some containers.
        logger.warning(
            "kernels are compiled anew in each process (set NUMBA_CACHE_DIR to a writable folder): %s", error
        )
        return numba.njit(function, parallel=parallel, **OPTIONS)


def first_parallel_region():
    """A template that makes Numba start its threads."""
    total = 0
    for _ in numba.prange(2):
        total += 1
    return total


@functools.cache
def _launch_lock() -> Any:
    """What a parallel launch must hold: nothing, unless Numba has only its `workqueue` threads.

    Those abort the process when two threads launch at once, which the training and the communication thread do. TBB and
    OpenMP do not mind; torch's Linux wheels bring an OpenMP that Numba finds, since torch is imported first.
    """
    with _one_at_a_time:
        threads = torch.get_num_threads()
        compile_template(first_parallel_region, {}, parallel=True)()
        # GNU OpenMP keeps one thread count for all its users; Numba's start-up may have changed torch's.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    layer = numba.threading_layer()
    if layer != "workqueue":
        return nullcontext()
    logger.warning("Numba has neither TBB nor OpenMP here; kernels of different threads take turns (pip install tbb)")
    return _one_at_a_time


_one_at_a_time = threading.Lock()


def run_parallel(kernel: Callable[..., Any], *arguments: Any) -> None:
    """Calls a parallel kernel on as many threads as `torch.get_num_threads()` says."""
    with _launch_lock():
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        kernel(*arguments)


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


@extending.intrinsic
def prefetch(context, elements, index):
    """Asks for the cache line of `elements[index]`, which may lie beyond the end.

    Two passes over a block, the first waiting for memory and the second for arithmetic, do not overlap by themselves: the
    processor looks a few hundred instructions ahead, and its own prefetcher does not see the next block in time.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

        byte, word = ir.IntType(8), ir.IntType(32)
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(start, [arguments[1]]), byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # For reading, to be kept in all caches, data.
        builder.call(function, [address, *(ir.Constant(word, flag) for flag in (0, 3, 1))])
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


@extending.intrinsic
def stream_vector(context, target, source, at):
    """Copies 32 bytes at byte `at` of two arrays past the caches; the target's must be aligned to as many."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from llvmlite import ir

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
    from llvmlite import ir

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


def _pointer_to(element: Any) -> Any:
    @extending.intrinsic
    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16}


def array(tensor: torch.Tensor) -> Any:
    """The NumPy array over a CPU tensor's memory; float16 and bfloat16 as uint16 bits, which Numba can handle."""
    tensor = tensor.detach()
    bits = _BITS.get(tensor.dtype)
    return (tensor.view(bits) if bits else tensor).numpy()


def half_float(bits):
    """The float32 equal to the float16 with these bits."""
    return tl.half_float(bits)


def float_half(x):
    """The bits of the float16 nearest to a float32, ties to even."""
    return tl.float_half(x)


tl = scalar

# How a kernel reads an element as float32 (float64 stays what it is) and writes it back.
LOAD = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: half_float,
    torch.bfloat16: rounding.bfloat16_float,
}
STORE = {
    torch.float64: rounding.identity,
    torch.float32: rounding.identity,
    torch.float16: float_half,
    torch.bfloat16: rounding.float_bfloat16,
}

# Turns the address of a tensor's memory into a pointer for `numba.carray`.
POINTER = {
    torch.float32: _pointer_to(types.float32),
    torch.float16: _pointer_to(types.uint16),
    torch.bfloat16: _pointer_to(types.uint16),
}

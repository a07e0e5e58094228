"""The vocabulary of rules for Numba: scalar functions with the names of `triton.language`.

`install` teaches Numba-CUDA how to compile them, and `_numba_cpu_words` Numba on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

float16 = np.float16
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64
uint8 = np.uint8
uint16 = np.uint16
uint32 = np.uint32


def _compiled_only(name: str) -> Any:
    def word(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"tl.{name} of this module exists in compiled code only")

    word.__name__ = word.__qualname__ = name
    return word


cast = _compiled_only("cast")
where = _compiled_only("where")
minimum = _compiled_only("minimum")
maximum = _compiled_only("maximum")
abs = _compiled_only("abs")
div_rn = _compiled_only("div_rn")
sqrt_rn = _compiled_only("sqrt_rn")
fma = _compiled_only("fma")
multiply = _compiled_only("multiply")
half_float = _compiled_only("half_float")
float_half = _compiled_only("float_half")


@dataclass(frozen=True)
class Exact:
    """Correctly rounded operations on one float type, as functions that the target can compile.

    Attributes:
        divide: a quotient.
        root: a square root.
        multiply: a product that the compiler will not contract with an addition.
        fma: a product and a sum, rounded once.
    """

    divide: Any
    root: Any
    multiply: Any
    fma: Any


def install(extending: Any, types: Any, *, single: Exact, double: Exact) -> None:
    """Registers the vocabulary with a Numba target, as functions that are compiled.

    Args:
        extending: the target's `extending` module.
        types: the target's `types` module.
        single: operations on float32.
        double: operations on float64.
    """
    overload = extending.overload
    exact = {types.float32: single, types.float64: double}

    def bitcast_to(destination: Any) -> Any:
        @extending.intrinsic
        def bitcast(context: Any, x: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                return builder.bitcast(arguments[0], context.get_value_type(destination))

            return destination(x), generate

        return bitcast

    bitcasts = {t: bitcast_to(t) for t in (types.float32, types.int32, types.uint32)}

    @overload(cast, prefer_literal=True)
    def overload_cast(x, dtype, bitcast=False):  # type: ignore[no-untyped-def]
        flag = bitcast
        for attribute in ("literal_value", "value"):
            flag = getattr(flag, attribute, flag)
        if flag is True:
            reinterpret = bitcasts[dtype.dtype]
            return lambda x, dtype, bitcast=False: reinterpret(x)
        return lambda x, dtype, bitcast=False: dtype(x)

    @overload(where)
    def overload_where(condition, x, y):  # type: ignore[no-untyped-def]
        return lambda condition, x, y: x if condition else y

    @overload(minimum)
    def overload_minimum(x, y):  # type: ignore[no-untyped-def]
        return lambda x, y: x if x < y else y

    @overload(maximum)
    def overload_maximum(x, y):  # type: ignore[no-untyped-def]
        return lambda x, y: x if x > y else y

    @overload(abs)
    def overload_abs(x):  # type: ignore[no-untyped-def]
        if x in exact:
            zero = (np.float32 if x == types.float32 else np.float64)(0)
            # A difference from zero is +0 for both zeros, as elsewhere.
            return lambda x: x if x > 0 else zero - x
        return lambda x: x if x > 0 else -x

    @overload(div_rn)
    def overload_div_rn(x, y):  # type: ignore[no-untyped-def]
        divide = exact[x].divide
        return lambda x, y: divide(x, y)

    @overload(sqrt_rn)
    def overload_sqrt_rn(x):  # type: ignore[no-untyped-def]
        root = exact[x].root
        return lambda x: root(x)

    @overload(fma)
    def overload_fma(x, y, z):  # type: ignore[no-untyped-def]
        combine = exact[z].fma
        return lambda x, y, z: combine(x, y, z)

    @overload(multiply)
    def overload_multiply(x, y):  # type: ignore[no-untyped-def]
        if x == y and x in exact:
            product = exact[x].multiply
            return lambda x, y: product(x, y)
        return lambda x, y: x * y

    @extending.intrinsic
    def half_to_float(context: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            from llvmlite import ir

            half = builder.bitcast(arguments[0], ir.HalfType())
            return builder.fpext(half, ir.FloatType())

        return types.float32(types.uint16), generate

    @extending.intrinsic
    def float_to_half(context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            from llvmlite import ir

            half = builder.fptrunc(arguments[0], ir.HalfType())
            return builder.bitcast(half, ir.IntType(16))

        return types.uint16(types.float32), generate

    @overload(half_float)
    def overload_half_float(bits):  # type: ignore[no-untyped-def]
        return lambda bits: half_to_float(bits)

    @overload(float_half)
    def overload_float_half(x):  # type: ignore[no-untyped-def]
        return lambda x: float_to_half(x)

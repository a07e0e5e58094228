"""The vocabulary of rules on the CPU: each word is an instruction, where a function would take longer to compile than a rule.

Additions and products are rounded each by itself: LLVM contracts nothing on a CPU unless an operation has the `contract` flag,
which Numba sets nowhere here. Rules are compiled without `fastmath`, whatever their callers are compiled with.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, CallableTemplate, infer_global, signature

from bagua_kernels.jit import scalar


def word(function: Any, arguments: int, *kinds: Any) -> Any:
    """Registers the instructions for a word whose arguments are cast to one type, which is one of `kinds`."""

    def register(lower: Any) -> Any:
        conditions = 1 if function is scalar.where else 0

        class Typing(AbstractTemplate):  # type: ignore[misc]
            key = function

            def generic(self, args: Any, kws: Any) -> Any:
                if len(args) != arguments or kws:
                    return None
                # As Numba unites the two sides of a branch.
                common = self.context.unify_types(*args[conditions:])
                if not isinstance(common, kinds):
                    return None
                if function is scalar.abs and isinstance(common, types.Integer):
                    common = types.int64  # as Numba widens the negative of an integer
                return signature(common, *(types.boolean,) * conditions, *(common,) * (arguments - conditions))

        infer_global(function)(Typing)
        any_of_them = (types.boolean,) * conditions + (types.Any,) * (arguments - conditions)

        @lower_builtin(function, *any_of_them)
        def lowered(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return lower(builder, sig.return_type, *values)

        return lower

    return register


def compared(builder: Any, kind: Any, sign: str, x: Any, y: Any) -> Any:
    """1 where a comparison holds; it does not for NaN."""
    if isinstance(kind, types.Float):
        return builder.fcmp_ordered(sign, x, y)
    return (builder.icmp_signed if kind.signed else builder.icmp_unsigned)(sign, x, y)


def called(builder: Any, kind: Any, name: str, *values: Any) -> Any:
    """The result of an LLVM intrinsic on floats of one type."""
    return builder.call(builder.module.declare_intrinsic(name, [values[0].type]), values)


@word(scalar.where, 3, types.Number, types.Boolean)
def where(builder, kind, condition, x, y):
    return builder.select(condition, x, y)


@word(scalar.minimum, 2, types.Integer, types.Float)
def minimum(builder, kind, x, y):
    return builder.select(compared(builder, kind, "<", x, y), x, y)


@word(scalar.maximum, 2, types.Integer, types.Float)
def maximum(builder, kind, x, y):
    return builder.select(compared(builder, kind, ">", x, y), x, y)


@word(scalar.abs, 1, types.Integer, types.Float)
def abs(builder, kind, x):
    zero = ir.Constant(x.type, 0)
    if isinstance(kind, types.Float):
        # A difference from zero is +0 for both zeros, as elsewhere.
        return builder.select(compared(builder, kind, ">", x, zero), x, builder.fsub(zero, x))
    return builder.select(compared(builder, kind, ">", x, zero), x, builder.neg(x))


@word(scalar.div_rn, 2, types.Float)
def div_rn(builder, kind, x, y):
    return builder.fdiv(x, y)


@word(scalar.sqrt_rn, 1, types.Float)
def sqrt_rn(builder, kind, x):
    return called(builder, kind, "llvm.sqrt", x)


@word(scalar.fma, 3, types.Float)
def fma(builder, kind, x, y, z):
    return builder.fma(x, y, z)


@word(scalar.multiply, 2, types.Float)
def multiply(builder, kind, x, y):
    return builder.fmul(x, y)


@infer_global(scalar.cast)
class Cast(CallableTemplate):  # type: ignore[misc]
    """The type of a converted number: by value, or by its bits if `bitcast` is a literal True."""

    key = scalar.cast
    prefer_literal = True

    def generic(self) -> Any:
        """Returns the function that types a call."""

        def typer(x: Any, dtype: Any, bitcast: Any = False) -> Any:
            given = () if bitcast is False else (bitcast,)
            return signature(dtype.dtype, types.unliteral(x), dtype, *given)

        return typer


@lower_builtin(scalar.cast, types.Any, types.Any)
def by_value(context: Any, builder: Any, sig: Any, values: Any) -> Any:
    """A converted number."""
    return context.cast(builder, values[0], sig.args[0], sig.return_type)


@lower_builtin(scalar.cast, types.Any, types.Any, types.Any)
def by_value_or_bits(context: Any, builder: Any, sig: Any, values: Any) -> Any:
    """A converted number, or the same bits as another type."""
    if sig.args[2].literal_value:
        return builder.bitcast(values[0], context.get_value_type(sig.return_type))
    return context.cast(builder, values[0], sig.args[0], sig.return_type)


@infer_global(scalar.half_float)
class HalfFloat(AbstractTemplate):  # type: ignore[misc]
    """The type of a float16's value."""

    key = scalar.half_float

    def generic(self, args: Any, kws: Any) -> Any:
        """Returns the signature of a call."""
        return signature(types.float32, types.uint16)


@lower_builtin(scalar.half_float, types.uint16)
def half_float(context: Any, builder: Any, sig: Any, values: Any) -> Any:
    """The float32 equal to the float16 with these bits."""
    return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())


@infer_global(scalar.float_half)
class FloatHalf(AbstractTemplate):  # type: ignore[misc]
    """The type of a float16's bits."""

    key = scalar.float_half

    def generic(self, args: Any, kws: Any) -> Any:
        """Returns the signature of a call."""
        return signature(types.uint16, types.float32)


@lower_builtin(scalar.float_half, types.float32)
def float_half(context: Any, builder: Any, sig: Any, values: Any) -> Any:
    """The bits of the float16 nearest to a float32, ties to even."""
    return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

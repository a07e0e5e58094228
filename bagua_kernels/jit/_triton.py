"""Compiles rules and launcher templates with Triton."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bagua_kernels import knobs
from bagua_kernels.jit.rule import rebuilt
from bagua_kernels.rules import rounding, vocabulary
from bagua_kernels.rules.calls import Rule, called_rules, code_of

if knobs.TRITON_INTERPRET.get():
    from triton.runtime import interpreter

    def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """The interpreter's own rounds twice, unlike every device."""
        return interpreter.TensorHandle(np.asarray(vocabulary.fma(x.data, y.data, z.data)), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = _fma

# Contraction of a product and a sum would round once where the other backends round twice.
EXACT = {"enable_fp_fusion": False}


@functools.cache
def compile_rule(rule: Rule) -> Any:
    """The rule as a Triton function of tensors, with every rule that it calls."""
    code_of(rule)
    names: dict[str, Any] = {name: compile_rule(callee) for name, callee in called_rules(rule).items()}
    # The interpreter finds the language by the global's name, so `tl` must be the module itself.
    return triton.jit(rebuilt(rule, {**names, "tl": tl}))


def compile_template(template: Rule, bindings: Mapping[str, Any], unspecialized: Sequence[str] = ()) -> Any:
    """A launcher's template as a Triton kernel.

    Args:
        template: the kernel's body; its free names are rules, which `bindings` supplies.
        bindings: rules (compiled here) or functions that are compiled already.
        unspecialized: arguments whose value must not cause another compilation, such as seeds.
    """
    names = {
        name: compile_rule(value) if isinstance(value, FunctionType) else value for name, value in bindings.items()
    }
    return triton.jit(rebuilt(template, names), do_not_specialize=list(unspecialized))


def constant(value: int) -> Any:
    """A number that a template reads as a global: compiled code wants it marked, the interpreter wants a plain one."""
    return value if knobs.TRITON_INTERPRET.get() else tl.constexpr(value)


@contextlib.contextmanager
def on_device(tensor: torch.Tensor) -> Iterator[None]:
    """Makes the tensor's GPU the current one, where Triton launches; the interpreter's NumPy is kept from warning of NaNs."""
    with torch.cuda.device(tensor.device) if tensor.is_cuda else np.errstate(all="ignore"):
        yield


def signed(word: int) -> int:
    """The int32 with the bits of a uint32: Triton types an integer argument by its value, and must see one type."""
    return word - (1 << 32) if word >= 1 << 31 else word


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 as uint16 bits, any other tensor as it is."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def half_float(x):
    """float16 to float32, exact."""
    return tl.cast(x, tl.float32)


def float_half(x):
    """float32 to the nearest float16, ties to even."""
    return tl.cast(x, tl.float16)


# How a kernel reads an element as float32 and writes it back. bfloat16 travels as bits and is converted by the same rules
# as on the CPU: its NaNs come out alike, and Triton's interpreter has no working bfloat16.
LOAD = {torch.float32: rounding.identity, torch.float16: half_float, torch.bfloat16: rounding.bfloat16_float}
STORE = {torch.float32: rounding.identity, torch.float16: float_half, torch.bfloat16: rounding.float_bfloat16}

"""Compiles rules and launcher templates with Numba for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit import _numba_cpu_cache, _numba_cpu_intrinsics, _numba_cpu_sharing, _numba_cpu_words, scalar
from bagua_kernels.jit._numpy import array as array
from bagua_kernels.jit.rule import code_of_module, digest, rebuilt, with_literals
from bagua_kernels.rules import rounding
from bagua_kernels.rules.calls import Rule, called_rules, code_of, global_names

# No `fastmath`: the order of operations is part of the wire format. And not left out either: what is compiled while its caller
# is inherits the caller's, and keeps it for all others. The numpy error model has no zero-division branches, which would keep
# loops from vectorising.
# Nobody calls these through a C function, which would have to be compiled as well.
OPTIONS: dict[str, Any] = {
    **{"nogil": True, "error_model": "numpy", "fastmath": False, "forceinline": False},
    "no_cfunc_wrapper": True,
}
# For functions that only compiled code calls: what Python would call them through takes as long to compile as they do. Python
# must not call these.
_HELPER: dict[str, Any] = {"no_cpython_wrapper": True}

# Kernels on disk hold compiled words of the vocabulary and instructions, and must not outlive a change of these.
_MODULES = scalar, _numba_cpu_words, _numba_cpu_intrinsics, _numba_cpu_sharing
VOCABULARY = digest(*map(code_of_module, _MODULES), sorted(OPTIONS.items()))


@functools.cache
def compile_rule(rule: Rule, literal: type = np.float32) -> Any:
    """The rule as a Numba function of scalars, with every rule that it calls and its float literals of one type."""
    names: dict[str, Any] = {name: compile_rule(callee, literal) for name, callee in called_rules(rule).items()}
    code = with_literals(code_of(rule), literal)
    return numba.njit(rebuilt(rule, {**names, "tl": scalar}, code=code), **OPTIONS, **_HELPER)


def compile_template(
    template: Rule,
    bindings: Mapping[str, Any],
    *,
    literal: type = np.float32,
    fastmath: Any = False,
    nogil: bool = True,
    inlined: bool = False,
    helper: bool = False,
) -> Any:
    """Compiles a launcher's template, cached on disk under the digest of everything it is made of.

    Args:
        template: a function of arrays and scalars whose free names `bindings` supplies.
        bindings: rules (compiled here), numbers, or functions that are compiled already. What the template does not read makes
            no other kernel of it, unless it is text.
        literal: the type of the rules' float literals, float32 or float64.
        nogil: True if other Python threads may run meanwhile.
        fastmath: what LLVM may do with the template's own arithmetic, though not with that of its rules.
        inlined: True if it becomes part of the templates that call it, because a call would cost as much as its work. It is a
            helper then.
        helper: True if only other templates call it: Python must not.
    """
    # Texts are digests of what kernels are made of beside their bindings.
    reads = {*global_names(template), *(name for name, value in bindings.items() if isinstance(value, str))}
    read = {name: bindings[name] for name in sorted(reads) if name in bindings}
    described = [(name, _described(value)) for name, value in {**_globals_of(template, bindings), **read}.items()]
    options = {**OPTIONS, "fastmath": fastmath, "nogil": nogil, "forceinline": inlined}
    if helper or inlined:
        options |= _HELPER
    name = f"{template.__name__}_{digest(template, described, literal, sorted(options.items()), VOCABULARY)}"
    return _templates.get(name) or _templates.setdefault(name, _compiled(template, name, read, literal, options))


def _globals_of(template: Rule, bindings: Mapping[str, Any]) -> dict[str, Any]:
    """The intrinsics that a template reads from its module. Of what else it reads there, `digest` takes the values.

    Raises:
        TypeError: it reads something there that has no digest.
    """
    names = [name for name in global_names(template) if name in template.__globals__ and name not in bindings]
    read = {name: template.__globals__[name] for name in names}
    for name, value in read.items():
        if not isinstance(value, _DIGESTED):
            raise TypeError(
                f"template {template.__name__!r} reads the global {name!r} of type {type(value).__name__}, whose changes its "
                "entry on disk would outlive; pass it in `bindings`"
            )
    return {name: value for name, value in read.items() if isinstance(value, _Intrinsic)}


def _described(value: object) -> object:
    """By what a bound value differs from others of its kind, in any process."""
    if isinstance(value, numba.core.dispatcher.Dispatcher):
        # A thread that waits for a helper's turn holds the compiler's lock. As nothing else is waited for with it, no two threads
        # wait for each other.
        if not value.targetoptions.get("no_cpython_wrapper"):
            raise TypeError(f"template {value.__name__!r} is part of another one: compile it with helper=True")
        return value.__name__  # of another template, with a digest of its own
    if isinstance(value, _Intrinsic):
        return value._name, _captured(value._defn)
    return value


def _captured(function: FunctionType) -> list[object]:
    """The code of a function that another one has returned, and the values with which it was."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [function.__code__, *(_captured(each) if isinstance(each, FunctionType) else each for each in cells)]


_Intrinsic = numba.core.extending._Intrinsic
_DIGESTED = bool, int, float, str, np.generic, FunctionType, ModuleType, _Intrinsic

# By the names of their functions.
_templates: dict[str, Any] = {}


def _compiled(template: Rule, name: str, bindings: Mapping[str, Any], literal: type, options: dict[str, Any]) -> Any:
    names = {
        key: compile_rule(value, literal) if isinstance(value, FunctionType) else value
        for key, value in bindings.items()
    }
    function = rebuilt(template, names, suffix=name.removeprefix(template.__name__))
    kernel = numba.njit(function, **options)
    _numba_cpu_cache.keep_on_disk(kernel)
    return kernel


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

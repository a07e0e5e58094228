"""Rebuilds plain Python functions for a compiler: the same code object with other globals.

Two kinds of function are rebuilt. A *rule* (`bagua_kernels.rules`) sees only `tl` and other rules. A *template* is the
body of a launcher, written in a backend's own language. Its free names (its rules, the block size, …) are bound to values
when a kernel is made. Both keep their file and line numbers, so tracebacks and debuggers show the real source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from bagua_kernels.rules.calls import Rule, global_names


def with_literals(code: CodeType, literal: type) -> CodeType:
    """The code with its float literals as `literal`; Numba would take them, and all they touch, for float64."""
    return code.replace(co_consts=tuple(literal(c) if isinstance(c, float) else c for c in code.co_consts))


def digest(*parts: object) -> str:
    """A short hash of functions, with the rules they call and the constants they read, and of values; names cached kernels."""
    state = hashlib.sha256()

    def feed(part: object) -> None:
        if isinstance(part, FunctionType):
            code = part.__code__
            feed((code.co_code, code.co_names, code.co_varnames, code.co_consts))
            for name in global_names(part):
                callee = part.__globals__.get(name)
                if isinstance(callee, FunctionType):
                    feed(callee)
                elif isinstance(callee, (bool, int, float, str)):
                    feed((name, callee))
        elif isinstance(part, (tuple, list)):
            for item in part:
                feed(item)
        elif isinstance(part, Mapping):
            for key, value in part.items():
                feed((key, value))
        elif isinstance(part, CodeType):
            feed((part.co_code, part.co_names, part.co_varnames, part.co_consts))
        else:
            state.update(f"{type(part).__name__}:{part!r};".encode())

    feed(parts)
    return state.hexdigest()[:16]


def rebuilt(
    function: Rule, names: Mapping[str, Any], *, suffix: str = "", code: CodeType | None = None
) -> FunctionType:
    """A copy of `function` whose globals are its own, overlaid by `names`.

    Args:
        function: a rule or a template.
        names: the globals to replace or add.
        suffix: appended to the name; Numba names the files of its on-disk cache by it.
        code: a replacement for the function's code object, of the same signature.
    """
    assert isinstance(function, FunctionType)
    space = {**function.__globals__, **names}
    copy = FunctionType(code or function.__code__, space, function.__name__ + suffix, function.__defaults__)
    copy.__qualname__ = function.__qualname__ + suffix
    copy.__module__ = function.__module__
    copy.__doc__ = function.__doc__
    # Triton finds the constexpr arguments of a kernel by their annotations.
    copy.__annotations__ = dict(function.__annotations__)
    return copy

"""Rebuilds plain Python functions for a compiler: the same code object with other globals.

Two kinds of function are rebuilt. A *rule* (`bagua_kernels.rules`) sees only `tl` and other rules. A *template* is the body
of a launcher, written in a backend's own language, whose free names (the rules it applies, the block size, …) are bound
to values when a kernel is made. Both keep their file and line numbers, so tracebacks and debuggers show the real source.
"""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

Rule = Callable[..., Any]


def global_names(function: Rule) -> tuple[str, ...]:
    """The global names that a function's own code reads, in order of first use."""
    reads = (i.argval for i in dis.get_instructions(code_of(function)) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(reads))


def code_of(function: Rule) -> CodeType:
    """The code object of a plain Python function.

    Raises:
        TypeError: `function` is something else, or a closure, whose captured values a rebuilt function would lose.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"a rule must be a plain Python function, got {function!r}; pass the function before decoration"
        )
    if function.__code__.co_freevars:
        captured = ", ".join(function.__code__.co_freevars)
        raise TypeError(f"rule {function.__name__!r} captures {captured}; make these arguments or literals")
    return function.__code__


def called_rules(rule: Rule) -> dict[str, Rule]:
    """The rules that `rule` calls, by name.

    Raises:
        TypeError: `rule` reads a global that is neither `tl` nor a function.
    """
    found: dict[str, Rule] = {}
    for name in global_names(rule):
        value = rule.__globals__.get(name)
        if name == "tl" and isinstance(value, ModuleType):
            continue
        if not isinstance(value, FunctionType):
            raise TypeError(
                f"rule {rule.__name__!r} reads the global {name!r} ({value!r}); a rule may use `tl`, literals, its arguments and "
                "other rules"
            )
        found[name] = value
    return found


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
    return copy

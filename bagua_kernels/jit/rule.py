"""Rebuilds plain Python functions for a compiler: the same code object with other globals.

Two kinds of function are rebuilt. A *rule* (`bagua_kernels.rules`) sees only `tl` and other rules. A *template* is the
body of a launcher, written in a backend's own language. Its free names (its rules, the block size, …) are bound to values
when a kernel is made. Both keep their file and line numbers, so tracebacks and debuggers show the real source.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from importlib.abc import InspectLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from bagua_kernels.rules.calls import Rule, global_names


def with_literals(code: CodeType, literal: type) -> CodeType:
    """The code with its float literals as `literal`; Numba would take them, and all they touch, for float64."""
    return code.replace(co_consts=tuple(literal(c) if isinstance(c, float) else c for c in code.co_consts))


def digest(*parts: object) -> str:
    """A short hash of functions, with the rules they call and the constants they read, and of values; names cached kernels."""
    state = hashlib.sha256()

    def feed(part: object) -> None:
        if isinstance(part, FunctionType):
            feed((part.__code__, part.__defaults__, part.__kwdefaults__))
            for name in global_names(part):
                callee = part.__globals__.get(name)
                if isinstance(callee, FunctionType):
                    feed(callee)
                elif isinstance(callee, (bool, int, float, str, np.generic)):
                    feed((name, callee))
        elif isinstance(part, (tuple, list)):
            for item in part:
                feed(item)
        elif isinstance(part, (set, frozenset)):
            # In an order that does not depend on the hashes of this process.
            feed(sorted(part, key=repr))
        elif isinstance(part, Mapping):
            for key, value in part.items():
                feed((key, value))
        elif isinstance(part, CodeType):
            feed((part.co_code, part.co_names, part.co_varnames, constants(part)))
        elif isinstance(part, ModuleType):
            # Its text has the path of its file.
            feed(("module", part.__name__))
        else:
            state.update(f"{type(part).__name__}:{part!r};".encode())

    feed(parts)
    return state.hexdigest()[:16]


def constants(code: CodeType) -> tuple[object, ...]:
    """The constants of a code object, less the docstring of a function, which changes nothing that it does."""
    first, others = code.co_consts[:1], code.co_consts[1:]
    is_function = code.co_flags & inspect.CO_NEWLOCALS and not code.co_name.startswith("<")
    return others if is_function and any(isinstance(each, str) for each in first) else code.co_consts


def code_of_module(module: ModuleType) -> CodeType:
    """The code of a module's file: what `digest` reads of it is the same when comments or lines change.

    Raises:
        ImportError: the module was not loaded from a file.
    """
    loader = module.__spec__.loader if module.__spec__ else None
    code = loader.get_code(module.__name__) if isinstance(loader, InspectLoader) else None
    if code is None:
        raise ImportError(f"{module.__name__} has no code that can be read again")
    return code


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

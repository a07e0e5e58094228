"""What a rule reads: `tl`, and the other rules that it calls, which may be nothing else."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

Rule = Callable[..., Any]


def global_names(function: Rule) -> tuple[str, ...]:
    """The global names that a function's code reads, with that of comprehensions in it, in order of first use."""
    return _names_of(code_of(function))


@functools.cache
def _names_of(code: CodeType) -> tuple[str, ...]:
    # Reading instructions takes half a millisecond, and each kernel asks for all rules below it.
    parts, reads = [code], dict[str, None]()
    for part in parts:
        parts += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        reads |= dict.fromkeys(i.argval for i in dis.get_instructions(part) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(reads)


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

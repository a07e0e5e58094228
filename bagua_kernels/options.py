"""The numbers and switches among options, checked by the annotations of the constructors that take them.

A comparison such as `interval < 1` lets 2.5, infinity and True pass. What each of them leads to shows up much later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

_INFINITE = "may be infinite"
FloatOrInf = Annotated[float, _INFINITE]  # of options for which infinity means never, or no limit

_Init = TypeVar("_Init", bound=Callable[..., Any])


def checked(init: _Init) -> _Init:
    """Makes a function check the numbers among its arguments before it runs."""
    signature = inspect.signature(init)
    owner = init.__qualname__.removesuffix(".__init__")

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_options(hints_of(init), owner, signature.bind(*args, **kwargs).arguments)
        return init(*args, **kwargs)

    return call  # type: ignore[return-value]


def check_fields(value: Any) -> None:
    """Checks the numbers among the fields of a dataclass; errors as of `check_options`."""
    kind: Any = type(value)
    check_options(hints_of(kind), kind.__name__, vars(value))


def check_options(hints: Mapping[str, Any], owner: str, given: Mapping[str, Any]) -> None:
    """Raises unless numbers are what the annotations ask for: finite ones, and whole ones for `int`.

    Numbers of NumPy count as numbers. A tensor passes where it is one number; truth values are none. For `bool` only truth
    values pass, and 0 and 1.

    Args:
        hints: the annotations, by name.
        owner: what has them, for errors.
        given: the options, by name.

    Raises:
        ValueError: a number does not fit.
        TypeError: something else was given for a number, or for a truth value.
    """
    for name, value in given.items():
        expected = _misfit(hints.get(name), value)
        if expected:
            is_number = isinstance(value, numbers.Number | np.bool_ | torch.Tensor | tuple | list)
            cure = "pass one of these" if expected == "True or False" else "pass such a number"
            raise (ValueError if is_number else TypeError)(
                f"{name} of {owner} must be {expected}, got {name}={value!r}: {cure}"
            )


@functools.cache
def hints_of(of: Any) -> dict[str, Any]:
    """Returns the annotations of a function or a dataclass, without those that only a type checker can read."""
    if isinstance(of, type):
        return get_type_hints(of, include_extras=True)
    found: dict[str, Any] = {}
    for name, text in inspect.get_annotations(of).items():
        alone = types.SimpleNamespace(__annotations__={name: text})
        # An alias of another module may hold the text of an annotation.
        with contextlib.suppress(NameError):
            found |= get_type_hints(alone, of.__globals__, include_extras=True)
    return found


def _misfit(hint: Any, value: Any) -> str:
    """Returns what is expected in place of a value; empty if the value fits, or if no number is expected."""
    kinds = list(_alternatives(hint))
    whole, real = int in kinds, float in kinds or FloatOrInf in kinds
    if isinstance(value, tuple | list):
        parts = [_parts(kind, len(value)) for kind in kinds]
        faults = [[_misfit(*each) for each in zip(hints, value, strict=True)] for hints in parts if hints]
        return next((f"made of numbers, each {fault}" for each in faults for fault in each if fault), "")
    if bool in kinds and all(kind in (bool, type(None)) for kind in kinds) and value is not None:
        # Any text that is not empty counts as true, a misspelled "false" too.
        is_switch = isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1))
        return "" if is_switch else "True or False"
    if not (whole or real) or value is None:
        return ""
    expected = "a finite number" if real else "a whole number"
    if isinstance(value, bool | np.bool_) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return "" if bool in kinds else f"{expected}, not a truth value"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            return ""
        # waits: for nothing, on the CPU.
        return "" if torch.Tensor in kinds and not real else _misfit_of_number(value.item(), real, kinds, expected)
    if isinstance(value, numbers.Number):
        return _misfit_of_number(value, real, kinds, expected)
    return expected if all(kind in (int, float, FloatOrInf, type(None)) for kind in kinds) else ""


def _misfit_of_number(value: Any, real: bool, kinds: Sequence[Any], expected: str) -> str:
    if not real:
        return "" if isinstance(value, numbers.Integral) else expected
    if isinstance(value, complex) or math.isnan(value) or value == -math.inf:
        return expected
    return "" if math.isfinite(value) or FloatOrInf in kinds else expected


def _alternatives(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    else:
        yield hint


def _parts(hint: Any, length: int) -> list[Any]:
    """Returns the annotations of the elements of a tuple or a sequence; none where the annotation is of something else."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and len(arguments) == length and ... not in arguments:
        return list(arguments)
    if origin in (tuple, list, Sequence) and arguments and arguments[0] is not ...:
        return [arguments[0]] * length if origin is not tuple or ... in arguments else []
    return []

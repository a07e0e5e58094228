"""Counts what a rule asks for, by running it on values that only take notes."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

from bagua_kernels.jit.rule import rebuilt
from bagua_kernels.rules.calls import Rule, called_rules
from bagua_kernels.rules.optimizers import ElementwiseRule


class Value:
    """Stands for a number. `varies` is whether it differs between elements: other work is done once for all of them."""

    def __init__(self, counter: Counter[str], varies: bool) -> None:
        self.counter, self.varies = counter, varies

    def note(self, name: str, *others: Any) -> Value:
        varies = self.varies or any(isinstance(o, Value) and o.varies for o in others)
        self.counter[name] += varies
        return Value(self.counter, varies)

    def __mul__(self, other: Any) -> Value:
        return self.note("mul", other)

    def __add__(self, other: Any) -> Value:
        return self.note("add", other)

    def __truediv__(self, other: Any) -> Value:
        raise AssertionError("a rule divides with div_rn")

    def __neg__(self) -> Value:
        return self.note("neg")

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self.note("compare", other)

    __hash__ = None  # type: ignore[assignment]
    __rmul__ = __mul__
    __sub__ = __radd__ = __rsub__ = __add__
    __ne__ = __lt__ = __gt__ = __eq__  # type: ignore[assignment]


def noted(name: str) -> Any:
    def word(*arguments: Any) -> Value:
        first = next(a for a in arguments if isinstance(a, Value))
        return first.note(name, *arguments)

    return word


WORDS = SimpleNamespace(
    **{name: noted(name) for name in ("fma", "where", "abs")}, div_rn=noted("div"), sqrt_rn=noted("sqrt")
)


def _listening(rule: Rule) -> Any:
    names = {name: _listening(callee) for name, callee in called_rules(rule).items()}
    return rebuilt(rule, {**names, "tl": WORDS})


def operations(rule: ElementwiseRule) -> Counter[str]:
    """The operations on each element."""
    counter: Counter[str] = Counter()
    scalars = len(inspect.signature(rule.function).parameters) - rule.arrays
    values = [Value(counter, True) for _ in range(rule.arrays)] + [Value(counter, False) for _ in range(scalars)]
    _listening(rule.function)(*values)
    return counter

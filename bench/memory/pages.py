"""The formula of an algorithm's memory, from its page."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

_PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
_LINE = re.compile(r"^- Memory beyond the plain loop's peak: `([^`]+)` bytes", re.MULTILINE)
_NUMBERS = {ast.Add: float.__add__, ast.Mult: float.__mul__, ast.Div: float.__truediv__, ast.Sub: float.__sub__}


def formula(page: str) -> str:
    """Returns the formula on a page.

    Args:
        page: name of its file, without the suffix.

    Raises:
        ValueError: there is none.
    """
    found = _LINE.search((_PAGES / f"{page}.md").read_text())
    if found is None:
        raise ValueError(f"expected a line that matches {_LINE.pattern!r} in {_PAGES / page}.md")
    return found[1]


def value(text: str, names: Mapping[str, float]) -> float:
    """Returns the value of a formula of sums and products, in which a number may stand right before a name: `8 N + 4 B`.

    Raises:
        ValueError: it has another form, or another name.
    """
    return _value(ast.parse(re.sub(r"(?<=\d) (?=[A-Z(])", " * ", text), mode="eval").body, names)


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in names:
        return float(names[node.id])
    if isinstance(node, ast.BinOp) and type(node.op) in _NUMBERS:
        return _NUMBERS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise ValueError(f"expected sums and products of numbers and {sorted(names)}, got {ast.unparse(node)!r}")

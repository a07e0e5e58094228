"""What doors call on the floors: a change of a signature has their tests run, by `tests/doors/due.py`."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from tests.doors.due import PATHS, is_due
from tests.reach import Change

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "doors" / "uses.txt"


def uses() -> list[str]:
    """Returns a line for each function and class that a door imports, and for each public method of such a class."""
    lines = set()
    files = [*(ROOT / "bagua_kernels" / "integrations").glob("*.py"), ROOT / "bagua_kernels" / "checkpoint.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("bagua_kernels"):
                continue
            if "integrations" in (node.module or ""):
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                parent = importlib.import_module(node.module or "")
                lines |= set(_lines(name, getattr(parent, alias.name, None) or importlib.import_module(name)))
    return sorted(lines)


def _lines(name: str, found: object) -> Iterator[str]:
    if inspect.isclass(found):
        for key, one in inspect.getmembers(found, inspect.isfunction):
            # Not what it has of torch's own modules.
            if one.__module__.startswith("bagua_kernels") and (key == "__init__" or key[0] != "_"):
                yield f"{name}.{key}{_of(one)}"
    elif inspect.ismodule(found):
        for key, one in inspect.getmembers(found, inspect.isfunction):
            if key[0] != "_" and one.__module__.startswith("bagua_kernels"):
                yield f"{name}.{key}{_of(one)}"
    elif callable(found):
        yield f"{name}{_of(found)}"


def _of(function: object) -> str:
    # Without defaults: some are limits of time, which tests make longer.
    signature = inspect.signature(function)  # type: ignore[arg-type]
    bare = [one.replace(default=inspect.Parameter.empty) for one in signature.parameters.values()]
    optional = [one.name for one in signature.parameters.values() if one.default is not inspect.Parameter.empty]
    return f"({', '.join(f'{one} = ...' if one.name in optional else str(one) for one in bare)})"


def test_uses_are_listed() -> None:
    """`python -m tests.test_uses` writes the list."""
    assert FILE.read_text().splitlines() == uses(), "run python -m tests.test_uses"


def test_when_they_are_due() -> None:
    """After a change of a path, and for one hash in ten."""
    heads = [f"{number:x}" for number in range(100)]
    calm = Change(files=frozenset({"README.md"}), head="0")
    assert sum(is_due(Change(files=calm.files, head=head)) for head in heads) == 10
    for path in PATHS:
        assert (ROOT / path).exists(), path
        assert is_due(Change(files=frozenset({path if path.endswith((".py", ".txt")) else f"{path}/x.py"}), head="0"))


if __name__ == "__main__":
    FILE.write_text("\n".join(uses()) + "\n")

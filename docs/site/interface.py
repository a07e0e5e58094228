"""Pages about the public interface: one per module, with the docstrings of its names, and one of environment variables."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Lines of tests/public_names.txt that end with it name former paths.
FORMER = " warns"
PACKAGE = "bagua_kernels."
LONGEST_VALUE = 80  # characters of a value that is shown


class InterfaceError(Exception):
    """A public name has no docstring."""


@dataclass(frozen=True)
class Public:
    """One public name.

    Attributes:
        module: dotted name of the module or package that it is imported from.
        name: the name there; empty for the module itself.
        value: the object.
    """

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}" if self.name else self.module


def public_names(file: Path) -> list[Public]:
    """Returns the public names of a list, without former paths."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [found(line) for line in lines if not line.endswith(FORMER)]


def former_paths(file: Path) -> list[str]:
    """Returns the paths of a list that stay for one release."""
    return [line.removesuffix(FORMER) for line in file.read_text().splitlines() if line.endswith(FORMER)]


def found(path: str) -> Public:
    """Imports a module, or an object of a module, by its dotted name."""
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        value = getattr(importlib.import_module(module), name, None) if module else None
        value = importlib.import_module(path) if value is None else value
    if isinstance(value, ModuleType):
        return Public(value.__name__, "", value)
    return Public(module, name, value)


def undocumented(names: list[Public]) -> list[str]:
    """Returns the modules, classes, functions and public methods of some names that have no docstring of their own."""
    lacking = {each.path for each in names if has_docstring(each.value) is False}
    for each in names:
        if inspect.isclass(each.value):
            lacking |= {f"{each.path}.{name}" for name in methods_without(each.value)}
    return sorted(lacking)


def has_docstring(value: object) -> bool | None:
    """Returns True for a docstring, False for none, and None for a value that cannot have one, such as a number."""
    if not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)):
        return None
    return bool((value.__doc__ or "").strip())


def methods_without(cls: type) -> Iterator[str]:
    """Yields the public methods and properties that a class defines itself, and that neither it nor a base documents."""
    for name, member in vars(cls).items():
        if name.startswith("_") or inspect.isclass(member):
            continue
        is_method = inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod)
        if is_method and not any(
            (getattr(vars(base).get(name), "__doc__", None) or "").strip() for base in cls.__mro__
        ):
            yield name


class Pages:
    """The pages of the public interface.

    An object with several names is described once, at its shortest path. Its other paths are listed there.
    """

    def __init__(self, names: list[Public], former: list[str]) -> None:
        self.names, self.former = names, former
        self.paths: dict[int, list[Public]] = defaultdict(list)
        for each in sorted(names, key=lambda each: (each.path.count("."), each.path)):
            self.paths[id(each.value)].append(each)

    def all(self) -> dict[str, str]:
        """Returns the text of each page in reStructuredText, by its place without suffix."""
        modules = sorted({each.module for each in self.names})
        texts = {module: self.module(module) for module in modules}
        kept = {module: text for module, text in texts.items() if text}
        return {"api/index": self.index(list(kept)), **{f"api/{module}": text for module, text in kept.items()}}

    def index(self, modules: list[str]) -> str:
        """Returns the list of modules."""
        lines = [*title("Interface", "="), "All public names, by the module that they are imported from.", ""]
        lines += ["The most used ones are in these five:", ""]
        lines += [f"- :doc:`{PACKAGE}{name} <{PACKAGE}{name}>`" for name in
                  ("algorithms", "comm", "compression", "data", "optim")]  # fmt: skip
        lines += [
            "",
            ".. toctree::",
            "   :maxdepth: 1",
            "   :caption: Modules",
            "",
            *(f"   {each}" for each in modules),
            "",
        ]
        lines += [
            "All names by the alphabet are in the :ref:`index <genindex>`, all modules in :ref:`another one <modindex>`.",
            "",
        ]
        lines += [*title("Former paths", "-"), "They stay for one release, and warn when they are imported.", ""]
        lines += [f"- ``{path}``" for path in self.former]
        return "\n".join([*lines, ""])

    def module(self, module: str) -> str:
        """Returns the page of one module, or nothing if it has only other names of what other pages describe."""
        own = [each for each in self.names if each.module == module and each.name]
        described = [each for each in own if self.paths[id(each.value)][0] is each or not has_identity(each.value)]
        is_named = any(each.module == module and not each.name for each in self.names)
        if not described and not is_named:
            return ""
        lines = [*title(module, "="), f".. automodule:: {module}", "   :no-members:", ""]
        for head, kinds in (("Classes", ["class", "exception"]), ("Functions", ["function"]), ("Values", ["data"])):
            entries = [each for each in described if kind_of(each.value) in kinds]
            if entries:
                lines += title(head, "-")
            for each in entries:
                lines += self.entry(each)
        others = [each for each in own if each not in described]
        if others:
            lines += [*title("Described elsewhere", "-")]
            lines += [f"- :py:obj:`~{self.paths[id(each.value)][0].path}`" for each in others]
        return "\n".join([*lines, ""])

    def entry(self, each: Public) -> list[str]:
        """Returns the directive of one name."""
        kind = kind_of(each.value)
        lines = [f".. auto{kind}:: {each.path}"]
        if kind in ("class", "exception"):
            lines += ["   :members:", "   :show-inheritance:"]
        if kind == "data":
            lines += ["   :no-value:"] * (len(repr(each.value)) > LONGEST_VALUE)
            lines += ["", *(f"   {line}" for line in escaped(comment_of(each.module, each.name)))]
        others = [other.path for other in self.paths[id(each.value)][1:]] if has_identity(each.value) else []
        if others:
            lines += ["", f"   Also {', '.join(f'``{other}``' for other in others)}."]
        return [*lines, ""]


def kind_of(value: object) -> str:
    """Returns the kind of autodoc's directive for an object."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def has_identity(value: object) -> bool:
    """Returns True for classes and functions, which are one object under all of their names; equal numbers may be, too."""
    return kind_of(value) != "data"


def title(text: str, line: str) -> list[str]:
    """Returns a head in reStructuredText."""
    return [text, line * len(text), ""]


def comment_of(module: str, name: str) -> list[str]:
    """Returns the comment of a value: the lines above its definition, or the end of its line."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return []
    text = Path(spec.origin).read_text()
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and name in [alias.asname or alias.name for alias in node.names]
        ):
            return comment_of(node.module, name)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if name in [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]:
            first = node.lineno - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            beside = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
            return [line.lstrip("# ") for line in lines[first : node.lineno - 1]] or ([beside[1]] if beside else [])
    return []


def escaped(lines: list[str]) -> list[str]:
    """Returns the lines of a docstring with bars as in `|x|` escaped, which would be substitutions in reStructuredText."""
    result, literal, depth = [], False, 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        literal = literal and (not line.strip() or indent > depth)
        parts = [line] if literal else re.split(r"(``[^`]+``|`[^`]+`)", line)
        result.append(
            "".join(part.replace("|", "\\|") if not literal and n % 2 == 0 else part for n, part in enumerate(parts))
        )
        if line.rstrip().endswith("::"):
            literal, depth = True, indent
    return result


def environment() -> str:
    """Returns the page of environment variables, in Markdown, which is made of their definitions."""
    knobs = importlib.import_module("bagua_kernels.knobs")
    rows = [knob for knob in vars(knobs).values() if isinstance(knob, knobs.Knob)]
    lines = ["# Environment variables", "", "All variables that the package reads.", ""]
    lines += ["| variable | default | |", "|---|---|---|"]
    for knob in sorted(rows, key=lambda knob: knob.variable):
        default = "" if knob.default in (None, "") else f"`{knob.default}`"
        lines.append(f"| `{knob.variable}` | {default} | {knob.doc.replace('|', '')} |")
    return "\n".join([*lines, ""])

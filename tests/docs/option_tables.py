"""The tables of options in docstrings of algorithms and on their pages: `python -m tests.docs.option_tables`.

Names and defaults come from the constructors, texts from their "Args". A docstring has all options of its class, each with its
first sentence. A page has those that the class declares itself; the texts on pages are written by hand, and stay.

The command rewrites the tables that are out of date, and adds those that docstrings lack. `--check` only prints which ones.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm, GradientAlgorithm, ModelAlgorithm, MuLoCo, OuterLoop, RoundAlgorithm
from bagua_kernels.algorithms.wrapping.recorded import Recorded, arguments_of
from bagua_kernels.comm import LocalCommunicator

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"
MARK = "Options and their defaults, all by keyword::"
WIDTH = 116  # of a docstring's line, without its indentation
LONGEST = 24  # a longer `name=default` has its text on the next line
_SECTION = re.compile(r"^(Attributes|Raises|Example|Examples|Note):$", re.MULTILINE)
_ROW = re.compile(r"^\| `(\w+)` \|(?: `(.*?)`)? \|(.*)\|$")


@dataclass(frozen=True)
class Option:
    """An option of a constructor.

    Attributes:
        name: its name.
        default: the text of its default.
        text: what it is, without a full stop.
    """

    name: str
    default: str
    text: str


def own(kind: type[Any]) -> dict[str, str]:
    """The options that a class's own constructor declares, and the texts of their defaults."""
    if "__init__" not in vars(kind):
        return {}
    found = inspect.signature(vars(kind)["__init__"]).parameters.values()
    return {p.name: repr(p.default) for p in found if p.kind is p.KEYWORD_ONLY}


@functools.cache
def options_of(kind: type[Algorithm]) -> tuple[Option, ...]:
    """All options of an algorithm: its own first, then those that it passes on to its bases.

    What is still accepted, but declared by no constructor, is on its way out.
    """
    accepted, found = set(arguments_of(kind)), dict[str, str]()
    for each in kind.__mro__:
        if "__init__" in vars(each) and issubclass(each, Algorithm):
            found |= {name: default for name, default in own(each).items() if name in accepted and name not in found}
    given = effective(kind)
    declared = own(kind)
    return tuple(
        Option(name, declared.get(name, given.get(name, default)), text_of(kind, name))
        for name, default in found.items()
    )


def effective(kind: type[Algorithm]) -> dict[str, str]:
    """The values that the bases of a class are given if nothing is passed: a constructor may replace their defaults."""
    calls: list[tuple[Recorded, str, Mapping[str, Any]]] = []

    def add(recorded: Recorded, owner: str, arguments: Mapping[str, Any]) -> None:
        # Constructors of other algorithms, which this one makes, are recorded elsewhere.
        if not calls or recorded is calls[0][0]:
            calls.append((recorded, owner, dict(arguments)))

    module = torch.nn.Linear(2, 2, bias=False)
    optimizer: torch.optim.Optimizer | None = None
    if issubclass(kind, ModelAlgorithm):
        make = torch.optim.Muon if issubclass(kind, MuLoCo) else torch.optim.SGD
        optimizer = make(module.parameters(), lr=0.1)
    with mock.patch.object(Recorded, "add", add):
        algorithm = kind(module, optimizer, communicator=LocalCommunicator.alone())
    algorithm.close()
    found: dict[str, str] = {}
    for _, owner, arguments in calls[1:]:
        declared = next(own(each) for each in kind.__mro__ if each.__qualname__ == owner)
        for name in declared.keys() & arguments.keys():
            found.setdefault(name, repr(arguments[name]))
    return {**found, "communicator": "None"}


@functools.cache
def arguments_text(make: Callable[..., Any]) -> dict[str, str]:
    """The texts of the section "Args" of a constructor, by name."""
    section = (inspect.getdoc(make) or "").partition("Args:\n")[2]
    found: dict[str, str] = {}
    for line in textwrap.dedent(re.split(r"\n(?=\S)", section)[0]).splitlines():
        if match := re.match(r"([*\w]+): (.*)", line):
            name, text = match.groups()
            found[name] = text
        elif found:
            found[name] += f" {line.strip()}"
    return found


def text_of(kind: type[Any], name: str) -> str:
    """The first sentence about an option; "as for `Base`" is replaced by what that says."""
    for each in kind.__mro__:
        if "__init__" in vars(each) and name in (texts := arguments_text(vars(each)["__init__"])):
            text = texts[name]
            match = re.match(r"as for `(\w+)`(.*)", text, re.DOTALL)
            if match is None:
                return first(text)
            other = class_named(each, match[1])
            base = text_of(other, name)
            return f"{base}{first(match[2])}" if match[2].startswith((",", ";")) else base
    raise LookupError(f"{kind.__name__} documents no argument {name}: add it to the Args of its constructor")


def class_named(kind: type[Any], name: str) -> type[Any]:
    """A base of a class, another class that its module imports, or a public algorithm."""
    known = {each.__name__: each for each in kind.__mro__}
    found = known.get(name) or vars(sys.modules[kind.__module__]).get(name) or getattr(algorithms, name, None)
    if not isinstance(found, type):
        raise LookupError(f"{kind.__name__} refers to {name}, which is neither a base nor imported by its module")
    return found


def first(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


def table(options: Iterable[Option]) -> str:
    """The table of a docstring, without indentation."""
    options = list(options)
    heads = {option.name: f"{option.name}={option.default}" for option in options}
    column = max(len(head) for head in heads.values() if len(head) <= LONGEST) + 2
    lines = [MARK, ""]
    for option in options:
        text = textwrap.wrap(option.text, WIDTH - 4 - column, break_on_hyphens=False, break_long_words=False)
        head = heads[option.name]
        if len(head) > LONGEST:
            lines.append(f"    {head}")
            head = ""
        lines += [f"    {start:{column}}{line}" for start, line in zip([head, *[""] * len(text)], text, strict=False)]
    return "\n".join(lines)


def with_new_table(docstring: str, options: Iterable[Option]) -> str:
    """A docstring without indentation, with its table replaced or added: before its sections, else at its end."""
    made = table(options)
    if MARK in docstring:
        before, _, rest = docstring.partition(MARK)
        after = re.sub(r"\A(\n| +.*\n?)*", "", rest)
    elif section := _SECTION.search(docstring):
        before, after = docstring[: section.start()], docstring[section.start() :]
    else:
        before, after = docstring.rstrip("\n") + "\n\n", ""
    return f"{before}{made}\n" + (f"\n{after}" if after else "")


def rewritten_source(kind: type[Algorithm], text: str) -> str:
    """The text of the file of a class, with a new table in its docstring."""
    (node,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == kind.__name__)
    docstring = node.body[0]
    assert isinstance(docstring, ast.Expr), f"{kind.__name__} has no docstring: write one"
    lines = text.splitlines(keepends=True)
    head, tail = lines[: docstring.lineno - 1], lines[docstring.end_lineno :]
    body = with_new_table(inspect.getdoc(kind) or "", options_of(kind))
    indented = textwrap.indent(body.rstrip("\n"), "    ", lambda line: bool(line.strip()))
    prefix = "r" if "\\" in body else ""
    return "".join([*head, f'    {prefix}"""{indented.lstrip()}\n    """\n', *tail])


def rewritten_table(text: str, declared: Mapping[str, str], texts: Callable[[str], str]) -> str:
    """The text of a page, with the rows of its first table of options those of `declared`; hand-written cells stay."""
    lines, kept = text.splitlines(), list[str]()
    try:
        begin = next(i for i, line in enumerate(lines) if re.match(r"^\| option[^|]*\| default \|", line)) + 2
    except StopIteration:
        return text
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
    seen = set()
    for line in lines[begin:end]:
        match = _ROW.match(line)
        assert match is not None, f"a row of another form: {line}"
        name, default, rest = match.groups()
        if name in declared:
            seen.add(name)
            same = default == declared[name] or (default is None and declared[name] == "")
            kept.append(line if same else f"| `{name}` | `{declared[name]}` |{rest}|")
    kept += [f"| `{name}` | `{default}` | {texts(name)} |" for name, default in declared.items() if name not in seen]
    return "\n".join([*lines[:begin], *kept, *lines[end:]]) + "\n"


def rewritten_page(kind: type[Algorithm], text: str) -> str:
    """The text of an algorithm's page with its own options."""
    return rewritten_table(text, own(kind), lambda name: text_of(kind, name))


def rewritten_index(text: str) -> str:
    """The text of the index, whose three tables have the options of the bases."""
    groups: dict[str, list[type[Any]]] = {
        '<a id="options-of-all"></a>': [GradientAlgorithm, Algorithm],
        '<a id="options-on-parameters"></a>': [RoundAlgorithm, ModelAlgorithm],
        '<a id="options-of-local-steps"></a>': [OuterLoop],
    }
    for anchor, kinds in groups.items():
        before, found, after = text.partition(anchor)
        if not found:
            raise LookupError(f"docs/algorithms/README.md has no {anchor}: put it before the table")
        declared = {name: default for kind in kinds for name, default in own(kind).items()}
        if Algorithm in kinds:
            declared = {"optimizer": "None", **declared}
        if RoundAlgorithm in kinds:
            declared = {"optimizer": "", **declared}
        last = kinds[0]
        text = before + found + rewritten_table(after, declared, lambda name, last=last: text_of(last, name))
    return text


def pages() -> dict[Path, str]:
    """The pages as they have to be."""
    index = PAGES / "README.md"
    found = {index: rewritten_index(index.read_text())}
    rows = re.findall(r"^\| \[`(\w+)`\]\(([\w-]+\.md)\)", index.read_text(), re.MULTILINE)
    for name, page in rows:
        found[PAGES / page] = rewritten_page(Algorithm.registered[name], (PAGES / page).read_text())
    return found


def sources() -> dict[Path, str]:
    """The files of algorithms with the tables in docstrings as they have to be."""
    found: dict[Path, str] = {}
    for kind in Algorithm.registered.values():
        if kind.__module__.startswith("bagua_kernels."):
            file = Path(inspect.getfile(kind)).resolve()
            found[file] = rewritten_source(kind, found.get(file) or file.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docs.option_tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="rewrite nothing; 1 if something is out of date")
    options = parser.parse_args()
    changed = {file: text for file, text in {**pages(), **sources()}.items() if file.read_text() != text}
    for file, text in changed.items():
        print(f"{file.relative_to(ROOT)} {'is out of date' if options.check else 'is rewritten'}")
        if not options.check:
            file.write_text(text)
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())

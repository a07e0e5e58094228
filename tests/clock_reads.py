"""Finds assertions that depend on a clock, by the syntax of a file: `tests/test_no_timing.py` says why there are none.

A value depends on a clock if it is computed from a call of `time.monotonic`, or of one of its siblings. The search follows

- names, attributes and containers, whatever the order of the statements,
- functions of the file that return such a value, and calls that are given one of these functions (`run_ranks(2, rank)`),
- keys of dictionaries (`{"at": time.time()}`) and tags of printed lines (`print("ENDED", time.time())`), by which one process
  hands a value to another one,
- what an `if` on such a value assigns or appends.

A loop that waits until a deadline is no assertion. An assertion within such a loop is one: `limits.until` takes its place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CLOCKS = {
    f"{name}{end}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for end in ("", "_ns")
}
# Calls whose result is made of their arguments.
MADE_OF_ARGUMENTS = {
    "abs", "all", "any", "approx", "bool", "dict", "diff", "enumerate", "fmean", "float", "int", "list", "max", "mean", "median",
    "min", "not_", "quantiles", "reversed", "round", "set", "sorted", "sub", "sum", "tuple", "zip",
}  # fmt: skip
GROW = {"add", "append", "appendleft", "extend", "insert", "put", "update"}
CUTS = {"get", "index", "partition", "pop", "removeprefix", "rpartition", "split"}
NODES = (ast.stmt, ast.expr, ast.comprehension)


@dataclass
class Reads:
    """What depends on a clock in one file.

    Attributes:
        modules: names of the module `time`.
        clocks: names of its functions.
        functions: names of functions that return what depends on a clock.
        inner: names of those within functions, by the outermost function.
        attributes: names of attributes.
        tags: keys of dictionaries, and the first words of printed lines.
        names: names of variables, by the outermost function that has them.
    """

    modules: set[str] = field(default_factory=set)
    clocks: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    inner: dict[ast.AST, set[str]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    tags: set[str] = field(default_factory=set)
    names: dict[ast.AST, set[str]] = field(default_factory=dict)

    def size(self) -> int:
        """The number of all of them, which grows until nothing new is found."""
        sets = (self.functions, self.attributes, self.tags, *self.inner.values(), *self.names.values())
        return sum(map(len, sets))


def assertions(source: str) -> list[int]:
    """Returns the lines of assertions that depend on a clock, also within programs that are texts of this one.

    Args:
        source: the text of a file.
    """
    tree = ast.parse(source)
    reads = Reads()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            reads.modules.update(each.asname or each.name for each in node.names if each.name == "time")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            reads.clocks.update(each.asname or each.name for each in node.names if each.name in CLOCKS)
    scopes = list(outermost(tree)) if reads.modules | reads.clocks else []
    before = -1
    while reads.size() != before:
        before = reads.size()
        for scope, nodes in scopes:
            finder = Finder(reads, scope)
            for node in nodes:
                finder.follow(node)
    found: set[int] = set()
    for scope, nodes in scopes:
        finder = Finder(reads, scope)
        found.update(node.lineno for node in nodes if finder.is_assertion(node))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\n" in node.value
            and "time" in node.value
        ):
            found.update(node.lineno + line - 1 for line in within(node.value))
    return sorted(found)


def within(text: str) -> list[int]:
    """Returns the lines of assertions of a text that may be a program."""
    try:
        return assertions(text)
    except SyntaxError:
        return []


def outermost(tree: ast.Module) -> Iterator[tuple[ast.AST, list[Any]]]:
    """Yields each function that is in no other one, and the rest of the file, with the statements and expressions of each."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    rest: list[Any] = []
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        for node in ast.iter_child_nodes(open_nodes.pop()):
            if isinstance(node, functions):
                yield node, [each for each in ast.walk(node) if isinstance(each, NODES)]
                continue
            if isinstance(node, NODES):
                rest.append(node)
            open_nodes.append(node)
    yield tree, rest


class Finder:
    """Looks at the nodes of one outermost function."""

    def __init__(self, reads: Reads, scope: ast.AST) -> None:
        self.reads = reads
        self.scope = scope
        self.names = reads.names.setdefault(scope, set())
        self.inner = reads.inner.setdefault(scope, set())

    def follow(self, node: ast.AST) -> None:
        """Notes what one statement or call hands on."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(self.depends(each) for each in returned(node)):
                (self.reads.functions if node is self.scope else self.inner).add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)) and self.depends(node.iter):
            self._taint(node.target)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and self.depends(value):
                    self.reads.tags.add(key.value)
        elif isinstance(node, ast.If) and self.depends(node.test):
            for each in (*node.body, *node.orelse):
                self._chosen(each)

    def is_assertion(self, node: ast.AST) -> bool:
        """True if a statement or call fails a test because of a clock."""
        if isinstance(node, ast.Assert):
            return self.depends(node.test)
        if isinstance(node, ast.If):
            return self.depends(node.test) and any(fails(each) for each in (*node.body, *node.orelse))
        if isinstance(node, ast.Call) and name_of(node.func).startswith("assert"):
            return any(self.depends(each) for each in arguments(node))
        return False

    def depends(self, node: ast.AST | None) -> bool:
        """True if the value of an expression depends on a clock."""
        if node is None:
            return False
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            return node.attr in self.reads.attributes or self.depends(node.value)
        if isinstance(node, ast.Subscript):
            return self.depends(node.value) or self._is_tag(node.slice)
        if isinstance(node, ast.Call):
            return self._call_depends(node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            for each in node.generators:
                self.follow(each)
            parts = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            return any(map(self.depends, (*parts, *(test for each in node.generators for test in each.ifs))))
        if isinstance(node, (ast.Lambda, ast.Constant, ast.JoinedStr)):
            return False
        return any(self.depends(each) for each in ast.iter_child_nodes(node))

    def _call_depends(self, node: ast.Call) -> bool:
        function, given = node.func, arguments(node)
        name = name_of(function)
        if isinstance(function, ast.Name) and function.id in self.reads.clocks:
            return True
        if isinstance(function, ast.Attribute):
            base = function.value
            if isinstance(base, ast.Name) and base.id in self.reads.modules:
                return name in CLOCKS
            if self.depends(base) or (name in CUTS and any(map(self._is_tag, given))):
                return True
        if any(name_of(each) in self.reads.functions | self.inner for each in (function, *given)):
            return True
        return name in MADE_OF_ARGUMENTS and any(map(self.depends, given))

    def _call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        given = [each for each in arguments(node) if self.depends(each)]
        if name in GROW and isinstance(node.func, ast.Attribute) and given:
            self._taint(node.func.value)
        if name == "print" and given and isinstance(node.args[0], ast.Constant):
            self.reads.tags.add(str(node.args[0].value).strip())
        if name in ("dict", "report", "tell"):
            self.reads.tags.update(each.arg for each in node.keywords if each.arg and self.depends(each.value))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        pairs = (ast.Tuple, ast.List)
        if isinstance(target, pairs) and isinstance(value, pairs) and len(target.elts) == len(value.elts):
            for one, each in zip(target.elts, value.elts, strict=True):
                self._assign(one, each)
        elif isinstance(value, ast.Lambda) and isinstance(target, ast.Name) and self.depends(value.body):
            (self.reads.functions if isinstance(self.scope, ast.Module) else self.inner).add(target.id)
        elif self.depends(value):
            self._taint(target)

    def _chosen(self, node: ast.stmt) -> None:
        """Notes what a statement assigns or appends that runs only if a clock says so."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._taint(target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value.func) in GROW:
            assert isinstance(node.value.func, ast.Attribute)
            self._taint(node.value.func.value)

    def _taint(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names.add(target.id)
        elif isinstance(target, ast.Attribute):
            self.reads.attributes.add(target.attr)
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                self.reads.tags.add(str(target.slice.value))
            else:
                self._taint(target.value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._taint(each)

    def _is_tag(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip() in self.reads.tags


def returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    """Yields what a function returns or yields, without the functions in it."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
            yield node.value
        nodes.extend(ast.iter_child_nodes(node))


def fails(node: ast.stmt) -> bool:
    """True if a statement fails the test: `pytest.fail(...)`, or an AssertionError."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return raised is not None and name_of(raised) == "AssertionError"
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "pytest.fail"
    )


def arguments(node: ast.Call) -> list[ast.expr]:
    """Returns all arguments of a call."""
    return [*node.args, *(each.value for each in node.keywords)]


def name_of(node: ast.AST) -> str:
    """Returns the last name of a dotted one, or an empty text."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

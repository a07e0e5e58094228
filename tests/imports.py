"""Which file of the project depends on which: imports, read from the sources, which are never executed.

`Graph` follows more than import statements:

- Imports inside functions count. Those for types only (`if TYPE_CHECKING:`) do not, but in a package with `__getattr__`.
- A name imported from a package counts as imported from the file that defines it: `from bagua_kernels.algorithms import
  ByteGrad` depends on `bytegrad.py`, not on all other algorithms. The `__init__.py` on the way counts, its imports do not.
- `Op(__name__)` depends on all backends in that package's folder, `_*.py`.
- A file that looks something up in a registry (`from_spec`, `names`, `to_spec`, `registered`) depends on all that is registered.
- A text that is the dotted name of a module, or Python source with imports, counts as an import; so does
  `import_module("name")`. An f-string that begins with a package's name, `f"bench.gpu.stages.{name}"`, stands for all of it.
- Each test depends on the `conftest.py` files of the folders above it.
- A file outside the floors depends on each file whose name is in one of its texts. It also depends on the data in a folder that a
  text names. If it calls `glob` or `rglob`, it depends on all files in and below the folders that it names.
- Tests run the Python that pages contain: a page depends on what its code imports.

Edges from `tests/conftest.py` to the floors do not count. It is the harness of all tests, so that each of them would depend on
nearly everything. A fault of what it imports shows in each item of the default tier.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# Floors beside the package, which it links to.
LINKS = {"comm": "../comm", "algorithms": "../algorithms"}
FLOORS = ("bagua_kernels", *LINKS)
FOLDERS = (*FLOORS, "bench", "docs", "examples", "tests")
# Programs that import each other by their bare names.
PROGRAMS = "examples"
HARNESS = "tests/conftest.py"
# Files that choose the items of a run, with what starts the runs.
CHOOSING = (
    *(HARNESS, "tests/grids.py", "tests/imports.py", "tests/reach.py", "tests/deadline.py", "tests/runs.py"),
    *(".ci/run", "Makefile"),
)
# Attributes of a package that no import of it changes.
OWN_ATTRIBUTES = {"__file__", "__name__", "__path__", "__version__"}
# Names that look something up in a registry, a file that defines `register` and `from_spec`.
LOOKUPS = {"from_spec", "to_spec", "names", "registered"}


def sources(root: Path = ROOT, folders: Iterable[str] = FLOORS) -> list[Path]:
    """Returns every Python file of some folders, once, by its real path."""
    files = {file.resolve() for folder in folders for file in (root / folder).rglob("*.py")}
    return sorted(file for file in files if "__pycache__" not in file.parts)


@functools.cache
def tree(file: Path) -> ast.Module:
    """Returns a file's syntax tree, which nobody changes."""
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line and dotted name of everything that a file imports, also inside functions."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            # `from a import b` may name a module a.b or something in a; the longer name is judged, it begins with a.
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def module_of(file: Path, root: Path = ROOT) -> str:
    """Returns the dotted name of a file's module."""
    parts = file.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("bagua_kernels", *parts) if parts[0] in LINKS else parts)


@dataclass
class Uses:
    """What one file depends on; files are named by their paths below the root.

    Attributes:
        whole: files that it depends on together with what they depend on.
        alone: packages through which a name only passes: their imports do not count.
        texts: words of its texts that may name files or folders.
        walks: True if it lists the files of folders.
    """

    whole: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    walks: bool = False


@dataclass(frozen=True)
class _Contents:
    """What an `__init__.py` or a registry has at its top.

    Attributes:
        origins: names that it imports, with the module and the name there.
        defined: names of its functions and classes.
    """

    origins: Mapping[str, tuple[str, str]]
    defined: frozenset[str]


class Graph:
    """The dependencies between the files of a folder with the project's layout.

    Attributes:
        root: the folder.
        files: names of all Python files, below the root.
        modules: the file of each module, by its dotted name.
        pages: names of all pages in Markdown.
    """

    def __init__(self, root: Path = ROOT, deleted: Iterable[str] = ()) -> None:
        """Lists the files.

        Args:
            root: the folder.
            deleted: names of files that are gone; who still imports them depends on them.
        """
        self.root = root.resolve()
        found = [self.root / "setup.py", *sources(self.root, FOLDERS)]
        here = [file.relative_to(self.root).as_posix() for file in found if file.is_file()]
        self.files = sorted({*here, *(name for name in deleted if name.endswith(".py"))})
        self.modules: dict[str, str] = {}
        for name in self.files:
            module = module_of(self.root / name, self.root)
            self.modules[module] = name
            if module.startswith(f"{PROGRAMS}."):
                self.modules.setdefault(module.removeprefix(f"{PROGRAMS}."), name)
        pages = [*self.root.glob("*.md"), *(self.root / "docs").rglob("*.md")]
        self.pages = sorted(page.relative_to(self.root).as_posix() for page in pages)
        self._contents: dict[str, _Contents] = {}
        self._uses: dict[str, Uses] = {}

    @functools.cached_property
    def registered(self) -> Mapping[str, frozenset[str]]:
        """The files that register something, by the file of the registry."""
        registries = {name for name in self.files if {"register", "from_spec"} <= self._contents_of(name).defined}
        found: dict[str, set[str]] = {name: set() for name in registries}
        for name in self.files:
            if not name.startswith("tests/"):
                for module, imported in self._contents_of(name).origins.values():
                    if imported == "register" and not name.endswith("__init__.py"):
                        registry = self._definition(module, imported)
                        if registry in found:
                            found[registry].add(name)
        return {registry: frozenset(files) for registry, files in found.items()}

    def uses(self, name: str) -> Uses:
        """Returns what a file depends on by itself."""
        if name not in self._uses:
            self._uses[name] = _Reader(self, name).read()
        return self._uses[name]

    def needed(self, name: str) -> set[str]:
        """Returns the file and all Python files and pages that it depends on, be it through others."""
        whole, alone, left = {name}, set[str](), [name]
        while left:
            uses = self.uses(left.pop())
            alone |= uses.alone
            left.extend(uses.whole - whole)
            whole |= uses.whole
        return whole | alone

    def mentions(self, name: str, path: str) -> bool:
        """True if a file's texts name another file, which need not be Python, or a folder whose data it reads."""
        if name.partition("/")[0] in FLOORS or name in CHOOSING:
            return False
        file, texts = PurePosixPath(path), self.uses(name).texts
        if file.suffix and file.name in texts:
            return True
        return file.suffix not in ("", ".py") and file.parent.name in texts

    def lists(self, name: str, path: str) -> bool:
        """True if a file lists the files of a folder that it names, and another file is in that folder or below."""
        if name.partition("/")[0] in FLOORS or name in CHOOSING:
            return False
        uses = self.uses(name)
        return uses.walks and any(folder.name in uses.texts for folder in PurePosixPath(path).parents)

    def _contents_of(self, name: str) -> _Contents:
        if name not in self._contents:
            origins, defined = dict[str, tuple[str, str]](), set[str]()
            for node in self.tree(name).body:
                if isinstance(node, ast.ImportFrom) and not node.level:
                    origins |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    defined.add(node.name)
            self._contents[name] = _Contents(origins, frozenset(defined))
        return self._contents[name]

    def _definition(self, module: str, imported: str) -> str | None:
        """Returns the file that defines a name of a module; None outside the project."""
        file = self.modules.get(module)
        if file is None:
            return None
        origin = self._contents_of(file).origins.get(imported)
        return file if origin is None else self._definition(*origin) or file

    def tree(self, name: str) -> ast.Module:
        """Returns a file's syntax tree; an empty one for a file that is gone."""
        file = self.root / name
        return tree(file) if file.is_file() else ast.Module([], [])


class _Reader:
    """Reads the dependencies of one file."""

    def __init__(self, graph: Graph, name: str) -> None:
        self._graph = graph
        self._name = name
        self._found = Uses()
        module = module_of(graph.root / name, graph.root)
        self._module = module
        self._package = module if name.endswith("__init__.py") else module.rpartition(".")[0]

    def read(self) -> Uses:
        if self._name in self._graph.pages:
            for block in re.findall(r"```python\n(.*?)```", (self._graph.root / self._name).read_text(), re.DOTALL):
                self._imports_of(block)
            return self._found
        nodes = list(ast.walk(self._graph.tree(self._name)))
        self._code(nodes)
        self._texts(nodes)
        if self._name.partition("/")[0] not in FLOORS and self._name not in CHOOSING:
            self._pages()
        folder = PurePosixPath(self._name).parent
        if self._name.startswith("tests/"):
            above = {f"{each}/conftest.py" for each in (folder, *folder.parents)} - {self._name}
            self._found.whole |= above.intersection(self._graph.files)
        if self._name == HARNESS:
            self._found.whole = {each for each in self._found.whole if each.partition("/")[0] not in FLOORS}
            self._found.alone = {each for each in self._found.alone if each.partition("/")[0] not in FLOORS}
        self._found.whole.discard(self._name)
        return self._found

    def _code(self, nodes: Sequence[ast.AST]) -> None:
        """Reads import statements, and calls that import or look up."""
        skipped = set() if _defines(nodes, "__getattr__") else set(_for_types_only(nodes))
        nodes = [node for node in nodes if node not in skipped]
        packages = dict[str, str]()  # the packages that a name stands for
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name
                    if "." not in bound and self._is_package(alias.name):
                        packages[bound] = alias.name
                    else:
                        self._take_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                for alias in node.names:
                    if self._is_package(f"{module}.{alias.name}"):
                        packages[alias.asname or alias.name] = f"{module}.{alias.name}"
                    else:
                        self._take(module, alias.name)
            elif isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Attribute):
                self._found.walks |= node.attr in ("glob", "rglob", "iterdir", "walk")
        self._attributes(nodes, packages)

    def _attributes(self, nodes: Sequence[ast.AST], packages: Mapping[str, str]) -> None:
        """Takes from packages only the attributes that the file reads, if it does nothing else with them."""
        attributes, bare = {name: set[str]() for name in packages}, dict.fromkeys(packages, 0)
        defines_registry = _defines(nodes, "registered")
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in packages:
                bare[node.id] += 1
            elif isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id in packages:
                    bare[node.value.id] -= 1
                    attributes[node.value.id].add(node.attr)
                elif node.attr in ("from_spec", "registered") and not defines_registry:
                    self._look_up(None)
        for name, package in packages.items():
            if bare[name] or not attributes[name]:
                self._take_module(package)
            for attribute in attributes[name]:
                if attribute in OWN_ATTRIBUTES:
                    self._above(f"{package}.{attribute}")
                else:
                    self._take(package, attribute)

    def _call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if called == "import_module" and isinstance(first, ast.Constant):
            self._take_module(str(first.value))
        elif called == "Op" and first is not None:
            package = first.value if isinstance(first, ast.Constant) else self._module
            file = self._graph.modules.get(str(package), "")
            self._whole_of(PurePosixPath(file).parent, "_")

    def _texts(self, nodes: Sequence[ast.AST]) -> None:
        # Docstrings name modules, too.
        inside: set[ast.AST] = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                inside.update(node.values)
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                self._text("".join(map(str, parts)))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
                self._text(node.value)

    def _text(self, text: str) -> None:
        """Reads a text, in which a zero stands for what an f-string puts in."""
        words = re.split(r"[\s/'\"=,;:()\0]+", text)
        alone = not re.search(r"\s", text)
        self._found.texts.update(word for word in words if word and (alone or "." in word))
        start = re.match(r"([A-Za-z_][\w.]*)\.(\w*)\0", text)
        if start and start[1] in self._graph.modules:
            self._above(f"{start[1]}.{start[2]}")
            self._whole_of(PurePosixPath(self._graph.modules[start[1]]).parent, start[2])
        elif re.search(r"\bimport\b", text):
            self._imports_of(text.replace("\0", "_"))
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", text):
            self._dotted(text)

    def _imports_of(self, text: str) -> None:
        """Reads the imports of a text, which may be Python source, or contain some."""
        try:
            tree = ast.parse(textwrap.dedent(text))
        except SyntaxError:
            for module in re.findall(r"\b(?:from|import)\s+([\w.]+)", text):
                self._take_module(module)
        else:
            self._code(list(ast.walk(tree)))

    def _pages(self) -> None:
        """Takes the pages that the file names, or whose folder it lists."""
        texts, walks = self._found.texts, self._found.walks
        for page in map(PurePosixPath, self._graph.pages):
            if page.name in texts or (walks and any(folder.name in texts for folder in page.parents)):
                self._found.whole.add(str(page))

    def _dotted(self, text: str) -> None:
        """Takes a module, or something in it, by its dotted name."""
        if text in self._graph.modules:
            self._take_module(text)
            return
        parts = text.split(".")
        for length in range(len(parts) - 1, 1, -1):
            if ".".join(parts[:length]) in self._graph.modules:
                self._take(".".join(parts[:length]), parts[length])
                return

    def _take(self, module: str, name: str) -> None:
        """Takes what `from module import name` imports."""
        if f"{module}.{name}" in self._graph.modules:
            self._take_module(f"{module}.{name}")
            return
        file = self._graph.modules.get(module)
        if file is None:
            return
        self._above(module)
        origin = self._graph._contents_of(file).origins.get(name) if file.endswith("__init__.py") else None
        if origin is not None and origin[0] in self._graph.modules:
            self._found.alone.add(file)
            self._take(*origin)
            return
        self._found.whole.add(file)
        if name in LOOKUPS:
            self._look_up(file)

    def _take_module(self, module: str) -> None:
        """Takes a module with all that it imports, and the file with which `python -m` starts a package."""
        file = self._graph.modules.get(module)
        if file is not None:
            self._above(module)
            self._found.whole.add(file)
            main = self._graph.modules.get(f"{module}.__main__")
            if main is not None:
                self._found.whole.add(main)

    def _above(self, module: str) -> None:
        """Takes the packages above a module, without what they import."""
        parts = module.split(".")
        packages = (self._graph.modules.get(".".join(parts[:length])) for length in range(1, len(parts)))
        self._found.alone.update(file for file in packages if file is not None)

    def _look_up(self, registry: str | None) -> None:
        """Takes all that is registered: in one registry, or, if it is not known which, in all."""
        known = self._graph.registered
        if self._name in known:
            return
        for each in known if registry is None else [registry]:
            self._found.whole |= known.get(each, frozenset())

    def _whole_of(self, folder: PurePosixPath, prefix: str) -> None:
        """Takes the files of a folder whose names begin with something."""
        for file in self._graph.files:
            path = PurePosixPath(file)
            if path.parent == folder and path.name.startswith(prefix) and path.name != "__init__.py":
                self._found.whole.add(file)

    def _is_package(self, module: str) -> bool:
        return self._graph.modules.get(module, "").endswith("__init__.py")

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        start = self._package.split(".")[: len(self._package.split(".")) - node.level + 1]
        return ".".join([*start, *([node.module] if node.module else [])])


def _for_types_only(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields all nodes below `if TYPE_CHECKING:`."""
    for node in nodes:
        if isinstance(node, ast.If):
            test = node.test
            if (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING":
                for statement in node.body:
                    yield from ast.walk(statement)


def _defines(nodes: Iterable[ast.AST], name: str) -> bool:
    """True if some of the nodes define a function or an annotated attribute of a name."""
    return any(
        (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name)
        for node in nodes
    )

"""The rules of the house: what lives where, and who may import whom.

`python -m tests.test_architecture` prints the ten longest files.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grids import grid
from tests.imports import LINKS, imports, module_of, sources, tree

ROOT = Path(__file__).parents[1]
# From the ground up: a floor imports from itself and from those before it.
FLOORS = ("bagua_kernels", "bagua_kernels.comm", "bagua_kernels.algorithms")
# From the ground up, the rooms of a floor, or of the benchmarks: a file imports from its own room and from those before it. A
# room is a folder or a file at the top of the floor; the longest name that fits counts. Files at the top that are not named may
# import all.
ORDER: dict[str, tuple[str, ...]] = {
    "bagua_kernels": (
        "knobs",
        "errors",
        "rules",
        "jit",
        "launchers/arguments",
        "launchers/elementwise",
        "launchers/blockwise",
        "launchers/multitensor",
        "launchers/select",
        "launchers/chunks",
        "launchers/low_rank",
        "bucket",
        "compression/codec",
        "compression/block",
        "compression/cast",
        "compression/sparse",
        "compression/powersgd",
        "compression",
        "optim/watch",
        "optim/step",
        "optim/fuse",
        "optim",
        "command",
        "checkpoint",
        "integrations",
    ),
    "comm": (
        "reduction",
        "work",
        "joining",
        "collectives",
        "communicator",
        "failures",
        "topology",
        "mailbox",
        "backends/local",
        "backends/nccl",
        "backends/torch_distributed",
        "backends/sockets",
        "backends/mailboxes",
        "backends/selection",
        "membership",
        "faults",
        "compressed",
        "hierarchical",
        "rendezvous",
        "tuning",
        "programs",
        "testing",
        "doctor",
        "tune",
        "chaos",
    ),
    "algorithms": (
        "choosing/turns",
        "policy",
        "stats",
        "wrapping",
        "exchanges",
        "engine",
        "algorithm",
        "registry",
        "gradient_algorithm",
        "allreduce",
        "models",
        "rounds",
        "gossip",
        "asynchronous",
        "compressed",
        "quantized",
        "adam",
        "sparse",
        "local_steps",
        "data",
        "loading",
        "local_steps/round_sampler",
        "ddp",
        "choosing/cost",
        "choosing",
        "tuner",
    ),
    "bench": (
        "adoption",
        "waiting",
        "resume",
        "markdown",
        "workloads",
        "suite_table",
        "speed",
        "optimizers",
        "ratios",
        "compilation",
        "netlab",
        "network",
        "models",
        "convergence",
        "short_runs",
        "training",
        "winners",
        "tradeoff",
        "against",
        "track",
        "gpu",
        "memory",
        "large",
        "many",
        "heartbeats",
        "healing",
        "goodput",
        "cuts",
        "returns",
        "restarts",
    ),
}

# The fourth floor: modules and packages, by name, that may import all floors, and that nothing else imports.
DOORS = (
    "bagua_kernels.checkpoint",
    "bagua_kernels.command",
    "bagua_kernels.data",
    "bagua_kernels.integrations",
    "bagua_kernels.warmup",
)
# It imports its parts, doors among them, when they are first used.
PACKAGE = "bagua_kernels"

BACKENDS = ("_triton", "_numba_cuda", "_numba_cpu", "_numpy")
OPTIONAL_PACKAGES = ("triton", "cupy", "numba.cuda", "numba_cuda")
MAY_IMPORT_OPTIONAL_PACKAGES = (
    "_triton.py",
    "_triton_kernels.py",
    "_numba_cuda.py",
    "_numba_cuda_kernels.py",
    "_numba_cuda_package.py",
    "comm/backends/nccl/binding.py",
)
MAY_READ_THE_ENVIRONMENT = (
    "bagua_kernels/knobs.py",
    "comm/joining/interfaces.py",  # what other tools' variables say, to report it
    "comm/joining/launch.py",  # what launchers say
    "comm/testing/fork_server.py",
    "comm/testing/processes.py",
    "comm/chaos.py",  # passes the environment on to the command that it starts
    "comm/tune.py",  # likewise
    "comm/programs/tuning/launcher.py",
)


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def floor_of_module(module: str) -> int | None:
    """Returns the floor of a module by its dotted name, None outside the project."""
    if module != "bagua_kernels" and not module.startswith("bagua_kernels."):
        return None
    return max(floor for floor, top in enumerate(FLOORS) if module == top or module.startswith(f"{top}."))


def door_of_module(module: str) -> str | None:
    """Returns the door that a module is or belongs to, None for a module of the other floors."""
    return next((door for door in DOORS if module == door or module.startswith(f"{door}.")), None)


def imported_doors(file: Path, own: str) -> list[str]:
    """Returns a text for each import of a door, other than its own, in a file whose module has the dotted name `own`."""
    found = [(line, module, door_of_module(module)) for line, module in imports(file)]
    return [
        f"{file.name}:{line} imports {module}: import what it has from the floors"
        for line, module, door in found
        if door is not None and door != door_of_module(own) and own != PACKAGE
    ]


MODULES = {module_of(file): file for file in sources()}
PROGRAMS = {module_of(file): file for file in sources(folders=["bench"])}
# Nothing on the floors imports a program, which the order of floors sees to.
ALL = MODULES | PROGRAMS


def imported_files(file: Path) -> Iterator[tuple[int, Path]]:
    """Yields line and path of each file of the project that a file imports, also inside functions and for types only."""
    for line, name in imports(file):
        found = ALL.get(name) or ALL.get(name.rpartition(".")[0])
        if found is not None and found != file:
            yield line, found


def circles() -> list[list[str]]:
    """Returns the groups of files of which each imports all others of its group, be it through others (Tarjan, 1972)."""
    edges = {file: sorted({to for _, to in imported_files(file)}) for file in ALL.values()}
    number: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[str]] = []

    def visit(file: Path) -> None:
        number[file] = lowest[file] = len(number)
        stack.append(file)
        for to in edges[file]:
            if to not in number:
                visit(to)
            if to in stack:
                lowest[file] = min(lowest[file], lowest[to])
        if lowest[file] == number[file]:
            group = stack[stack.index(file) :]
            del stack[stack.index(file) :]
            if len(group) > 1:
                found.append(sorted(map(name_of, group)))

    for file in edges:
        if file not in number:
            visit(file)
    return found


def room_of(file: Path, floor: str) -> int | None:
    """Returns the number of a file's room in `ORDER[floor]`, None for a file that stands in none."""
    name = module_of(file).replace(".", "/").removeprefix("bagua_kernels/").removeprefix(f"{floor}/") + "/"
    fitting = [room for room in ORDER[floor] if name.startswith(f"{room}/")]
    return ORDER[floor].index(max(fitting, key=len)) if fitting else None


@grid(cover=1, name=list(LINKS))
def test_floor_is_linked_into_the_package(name: str) -> None:
    link = ROOT / "bagua_kernels" / name
    assert link.is_symlink()
    assert link.readlink().as_posix() == LINKS[name]
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()
    assert (link / "__init__.py").is_file()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {file.parent for file in sources()}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_imports_only_go_down_a_floor() -> None:
    for file in sources():
        top = file.relative_to(ROOT).parts[0]
        own = FLOORS.index(top if top == "bagua_kernels" else f"bagua_kernels.{top}")
        for line, module in imports(file):
            where = f"{name_of(file)}:{line} imports {module}"
            assert not module.startswith("."), f"{where}: write it out as bagua_kernels.…"
            assert module.split(".")[0] not in LINKS, f"{where}: write bagua_kernels.{module}"
            floor, name = floor_of_module(module), module_of(file)
            above = name == PACKAGE or door_of_module(name) is not None
            assert floor is None or floor <= own or above, f"{where}, which is on a floor above"


@pytest.mark.parametrize("door", DOORS)
def test_doors_exist(door: str) -> None:
    assert door in MODULES


def test_nothing_imports_a_door() -> None:
    found = {name: imported_doors(file, name) for name, file in MODULES.items()}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import bagua_kernels.data",
        "from bagua_kernels import data",
        "from bagua_kernels.data import RoundSampler",
        "def later():\n    from bagua_kernels.warmup import warm_up",
    ],
)
def test_an_import_of_a_door_is_found(tmp_path: Path, statement: str) -> None:
    file = tmp_path / "sender.py"
    file.write_text(f"from bagua_kernels import errors\nimport bagua_kernels.database\n{statement}\n")
    for own in ("bagua_kernels.optim.sender", "bagua_kernels.comm.sender", "bagua_kernels.algorithms.sender"):
        assert len(imported_doors(file, own)) == 1
    door = "bagua_kernels.warmup" if "warmup" in statement else "bagua_kernels.data"
    assert imported_doors(file, f"{door}.part") == []


def test_no_files_import_one_another_in_a_circle() -> None:
    assert circles() == []


@pytest.mark.parametrize("floor", ORDER)
def test_rooms_of_a_floor_import_one_way(floor: str) -> None:
    files = [file for file in ALL.values() if file.relative_to(ROOT).parts[0] == floor]
    inside = [file for file in files if file.parent != ROOT / floor and file.name != "__init__.py"]
    assert [name_of(file) for file in inside if room_of(file, floor) is None] == [], "add their folders to ORDER"
    found = {room_of(file, floor) for file in files}
    assert [room for number, room in enumerate(ORDER[floor]) if number not in found] == [], "these rooms do not exist"
    wrong = []
    for file in files:
        own = room_of(file, floor)
        for line, to in imported_files(file):
            other = room_of(to, floor) if to.relative_to(ROOT).parts[0] == floor else None
            if own is not None and other is not None and other > own:
                wrong.append(f"{name_of(file)}:{line} imports {name_of(to)}, whose room comes later in ORDER")
    assert wrong == []


def longest_files(count: int = 10) -> list[str]:
    """Returns the longest files with their numbers of lines, longest first; a reader asks whether each has one noun."""
    files = [*sources(), *(ROOT / "tests").rglob("*.py")]
    lines = sorted(((len(file.read_text().splitlines()), name_of(file)) for file in files), reverse=True)
    return [f"{n:5} {name}" for n, name in lines[:count]]


def test_the_longest_files_are_listed() -> None:
    """Prints them, which `pytest -rP` shows: no length is too long."""
    found = longest_files()
    print("\n".join(found))
    assert len(found) == 10


def test_private_names_stay_in_their_folder() -> None:
    wrong = []
    for file in sources():
        package = module_of(file) if file.name == "__init__.py" else module_of(file).rpartition(".")[0]
        for line, name in imports(file):
            parts = name.split(".")
            private = next((i for i, part in enumerate(parts) if part.startswith("_")), None)
            if private is None or floor_of_module(name) is None:
                continue
            owner = ".".join(parts[:private])
            if owner in MODULES and MODULES[owner].name != "__init__.py":
                owner = owner.rpartition(".")[0]
            # What a backend's files share has the backend's name, in each folder.
            same_backend = any(parts[private].startswith(one) and file.name.startswith(one) for one in BACKENDS)
            if owner != package and not same_backend:
                wrong.append(f"{name_of(file)}:{line} imports {name}, which is private to {owner}")
    assert wrong == []


def test_optional_packages_are_imported_by_their_backends_only() -> None:
    for file in sources():
        if name_of(file).endswith(MAY_IMPORT_OPTIONAL_PACKAGES):
            continue
        for line, module in imports(file):
            for package in OPTIONAL_PACKAGES:
                assert module != package, f"{name_of(file)}:{line}"
                assert not module.startswith(f"{package}."), f"{name_of(file)}:{line}"


def test_environment_is_read_by_the_knobs_only() -> None:
    for file in sources():
        if name_of(file) in MAY_READ_THE_ENVIRONMENT:
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Attribute | ast.Name):
                name, line = (node.attr if isinstance(node, ast.Attribute) else node.id), node.lineno
                assert name not in ("environ", "getenv", "environb"), f"{name_of(file)}:{line} reads the environment"
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & {"environ", "getenv"}, (
                    f"{name_of(file)}:{node.lineno}"
                )


@grid(cover=1, name=list(LINKS))
def test_floor_has_one_name(name: str) -> None:
    """Imported as a top-level package, a floor says how it is called."""
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=rf"bagua_kernels\.{name}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert name not in sys.modules


def test_wheel_holds_the_three_floors_and_nothing_else() -> None:
    setuptools = pytest.importorskip("setuptools")
    found = set(setuptools.find_packages(str(ROOT), include=["bagua_kernels*"]))
    assert set(FLOORS) <= found
    # Every folder with code is reached, also those behind the links.
    below = {name_of(file.parent).replace("/", ".") for file in sources()}
    expected = {name if name.split(".")[0] == "bagua_kernels" else f"bagua_kernels.{name}" for name in below}
    assert found == expected
    assert (ROOT / "bagua_kernels/py.typed").is_file()


if __name__ == "__main__":
    print("\n".join(longest_files()))

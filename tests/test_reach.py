"""What a change reaches, which items begin before the end of a run, and that no run hides the failure of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import deadline, imports, reach, runs
from tests.clocks import VirtualClock
from tests.grids import grid
from tests.imports import Graph
from tests.reach import Change

pytest_plugins = ["pytester"]

HOUR = 3600
INIT = "bagua_kernels/__init__.py"
# A package with two algorithms, of which the second one is also a registered one.
ALGORITHMS = {
    INIT: "",
    "algorithms/__init__.py": "from bagua_kernels.algorithms.first import First as First\n"
    "from bagua_kernels.algorithms.second import Second as Second\n"
    "from bagua_kernels.algorithms.registry import from_spec as from_spec\n"
    "def both(): ...\n",
    "algorithms/first.py": "from bagua_kernels.algorithms import base\nclass First: ...\n",
    "algorithms/second.py": "from bagua_kernels.algorithms.registry import register\n@register\nclass Second: ...\n",
    "algorithms/base.py": "",
    "algorithms/registry.py": "def register(kind): ...\ndef from_spec(spec): ...\n",
}
PACKAGES = {INIT, "algorithms/__init__.py"}
FIRST = {"algorithms/first.py", "algorithms/base.py"}
SECOND = {"algorithms/second.py", "algorithms/registry.py"}
BACKENDS = {
    INIT: "",
    "bagua_kernels/launch/__init__.py": "from bagua_kernels.op import Op\nOP = Op(__name__)\ndef launch(): ...\n",
    "bagua_kernels/launch/_one.py": "import bagua_kernels.rule\n",
    "bagua_kernels/launch/rows.py": "",
    "bagua_kernels/op.py": "class Op: ...\n",
    "bagua_kernels/rule.py": "",
}
LAUNCH = {INIT, *(f"bagua_kernels/{name}" for name in ("launch/__init__.py", "launch/_one.py", "op.py", "rule.py"))}
STAGES = {
    "bench/__init__.py": "",
    "bench/stage.py": "import importlib\ndef run(name): importlib.import_module(f'bench.stages.{name}')\n",
    "bench/stages/__init__.py": "",
    "bench/stages/speed.py": "",
}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


NEEDED: dict[str, tuple[Mapping[str, str], str, Iterable[str]]] = {
    "inside a function": (
        {INIT: "", "bagua_kernels/a.py": ""},
        "def f(): import bagua_kernels.a",
        {INIT, "bagua_kernels/a.py"},
    ),
    "for types only": (
        {INIT: "", "bagua_kernels/a.py": ""},
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import bagua_kernels.a",
        (),
    ),
    "lazy package": (
        {
            INIT: "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bagua_kernels import a as a\n"
            "def __getattr__(name): ...\n",
            "bagua_kernels/a.py": "",
        },
        "import bagua_kernels\nprint(bagua_kernels)",
        {INIT, "bagua_kernels/a.py"},
    ),
    "attributes of a package itself": (ALGORITHMS, "import bagua_kernels.algorithms as x\nx.__path__", PACKAGES),
    "name from another file": (ALGORITHMS, "from bagua_kernels.algorithms import First", PACKAGES | FIRST),
    "name from a package": (ALGORITHMS, "from bagua_kernels.algorithms import both", PACKAGES | FIRST | SECOND),
    "unknown name": (ALGORITHMS, "from bagua_kernels.algorithms import *", PACKAGES | FIRST | SECOND),
    "attribute": (ALGORITHMS, "from bagua_kernels import algorithms as x\nx.First()", PACKAGES | FIRST),
    "package that is passed on": (
        ALGORITHMS,
        "from bagua_kernels import algorithms as x\nx.First()\nprint(x)",
        PACKAGES | FIRST | SECOND,
    ),
    "registry": (ALGORITHMS, "from bagua_kernels.algorithms import from_spec", PACKAGES | SECOND),
    "class that is registered": (ALGORITHMS, "from bagua_kernels.algorithms.second import Second", PACKAGES | SECOND),
    "attribute that looks up": (
        ALGORITHMS,
        "from bagua_kernels.algorithms.base import Base\nBase.from_spec('second')",
        PACKAGES | SECOND | {"algorithms/base.py"},
    ),
    "backends": (BACKENDS, "from bagua_kernels.launch import launch", LAUNCH),
    "folder beside backends": (
        BACKENDS,
        "from bagua_kernels.launch.rows import f",
        {INIT, "bagua_kernels/launch/__init__.py", "bagua_kernels/launch/rows.py"},
    ),
    "modules by parts of their names": (STAGES, "from bench import stage", STAGES),
    "module by its name": (
        STAGES,
        "import importlib\nimportlib.import_module('bench.stages.speed')",
        {*STAGES} - {"bench/stage.py"},
    ),
    "command": (
        {"bench/__init__.py": "", "bench/net/__init__.py": "", "bench/net/__main__.py": ""},
        "COMMAND = ['python', '-m', 'bench.net']",
        {"bench/__init__.py", "bench/net/__init__.py", "bench/net/__main__.py"},
    ),
    "something to replace": (STAGES, "patch('bench.stages.speed.f')", {*STAGES} - {"bench/stage.py"}),
    "source in a text": (
        ALGORITHMS,
        "run(f'''\n  from bagua_kernels.algorithms import First\n  {1}\n''')",
        PACKAGES | FIRST,
    ),
    "docstring": (STAGES, "'''bench.stages.speed'''", ()),
    "program": (
        {"examples/train.py": "import data", "examples/data.py": ""},
        "import train",
        {"examples/train.py", "examples/data.py"},
    ),
    "page": (
        ALGORITHMS
        | {
            "docs/page.md": "Run:\n\n- so\n\n  ```python\n  from bagua_kernels.algorithms import First\n  ```\n",
            "docs/b.md": "",
        },
        "text = open('docs/page.md')",
        PACKAGES | FIRST | {"docs/page.md"},
    ),
    "relative": (
        {"tests/a/b.py": "from . import c", "tests/a/c.py": ""},
        "from tests.a import b",
        {"tests/a/b.py", "tests/a/c.py"},
    ),
    "circle": (
        {"tests/b.py": "import tests.c", "tests/c.py": "import tests.b"},
        "import tests.b",
        {"tests/b.py", "tests/c.py"},
    ),
}


@grid(name=list(NEEDED))
def test_files_that_a_test_needs(name: str, tmp_path: Path) -> None:
    files, source, expected = NEEDED[name]
    graph = Graph(write(tmp_path, {**files, "tests/test_it.py": source}))
    assert graph.needed("tests/test_it.py") == {"tests/test_it.py", *expected}


def test_conftest_files_above_a_test_count(tmp_path: Path) -> None:
    """All of them, but from the topmost one only what is a file of tests."""
    files = {
        "tests/conftest.py": "from bagua_kernels import knobs\nfrom tests import helper\n",
        "tests/helper.py": "",
        "tests/a/conftest.py": "import bagua_kernels.a\n",
        "tests/b/conftest.py": "import bagua_kernels.b\n",
        "tests/a/test_it.py": "",
        **dict.fromkeys((INIT, "bagua_kernels/knobs.py", "bagua_kernels/a.py", "bagua_kernels/b.py"), ""),
    }
    needed = Graph(write(tmp_path, files)).needed("tests/a/test_it.py") - {"tests/a/test_it.py"}
    assert needed == {"tests/conftest.py", "tests/helper.py", "tests/a/conftest.py", "bagua_kernels/a.py", INIT}


def test_links_between_floors_are_followed(tmp_path: Path) -> None:
    write(tmp_path, {"comm/__init__.py": "", INIT: "", "tests/test_it.py": "import bagua_kernels.comm"})
    (tmp_path / "bagua_kernels/comm").symlink_to("../comm")
    graph = Graph(tmp_path)
    assert graph.files == [INIT, "comm/__init__.py", "tests/test_it.py"]
    assert graph.needed("tests/test_it.py") == {*graph.files}


TREE = {
    **ALGORITHMS,
    **STAGES,
    "bench/alone.py": "",
    "bench/results/speed.json": "",
    "docs/page.md": "",
    "LICENSE": "",
    "tests/states/a.json": "",
    "tests/test_first.py": "from bagua_kernels.algorithms import First\nMESSAGE = 'a text with the word states in it'\n",
    "tests/test_second.py": "from bagua_kernels.algorithms import Second\n",
    "tests/test_states.py": "FOLDER = ROOT / 'states'\n",
    "tests/test_result.py": "FILE = ROOT / 'speed.json'\n",
    "tests/test_pages.py": "PAGES = (ROOT / 'docs').glob('*.md')\nFILES = (ROOT / 'bench').rglob('*.py')",
}


@grid(
    changed__expected=[
        ([], {}),
        (["tests/test_second.py"], {"tests/test_second.py": "tests/test_second.py"}),
        (["algorithms/base.py"], {"tests/test_first.py": "algorithms/base.py"}),
        (
            ["algorithms/__init__.py"],
            {f"tests/test_{name}.py": "algorithms/__init__.py" for name in ("first", "second")},
        ),
        (["tests/states/a.json"], {"tests/test_states.py": "tests/states/a.json"}),
        (["docs/page.md"], {"tests/test_pages.py": "docs/page.md"}),
        (["bench/alone.py"], {"tests/test_pages.py": "bench/alone.py"}),
        (
            ["bench/results/speed.json"],
            {f"tests/test_{name}.py": "bench/results/speed.json" for name in ("pages", "result")},
        ),
        (["tests/test_deleted.py", "algorithms/deleted.py"], {}),
    ]
)
def test_files_that_a_change_reaches(changed: Sequence[str], expected: Mapping[str, str], tmp_path: Path) -> None:
    found = reach.reached_by(Change("1", "0", tuple(changed)), write(tmp_path, TREE))
    assert (found.everything, found.files) == ("", expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("Makefile", "Makefile changed"),
        ("constraints-gpu.txt", "constraints-gpu.txt changed"),
        ("tests/grids.py", "tests/grids.py changed"),
        (".ci/run", ".ci/run changed"),
        ("LICENSE", "LICENSE changed, and nothing is known to depend on it"),
        ("algorithms/new.py", "algorithms/new.py changed, and nothing is known to depend on it"),
    ],
)
def test_changes_that_reach_everything(changed: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path, {**TREE, changed: ""})
    found = reach.reached_by(Change("1", "0", ("tests/test_second.py", changed)), tmp_path)
    assert (found.everything, found.files) == (reason, {})
    assert reach.described(found).splitlines()[-1] == f"reached: all files of tests, for {reason}"
    assert found.new_rules == (changed in ("Makefile", "tests/grids.py", ".ci/run"))


def test_a_deleted_backend_reaches_its_launcher(tmp_path: Path) -> None:
    write(tmp_path, {**BACKENDS, "tests/test_it.py": "from bagua_kernels.launch import launch"})
    found = reach.reached_by(Change("1", "0", ("bagua_kernels/launch/_gone.py",)), tmp_path)
    assert found.files == {"tests/test_it.py": "bagua_kernels/launch/_gone.py"}


def test_description_has_the_change_and_what_it_reaches(tmp_path: Path) -> None:
    found = reach.reached_by(Change("1", "0", ("algorithms/base.py",)), write(tmp_path, TREE))
    assert reach.described(found).splitlines() == [
        "base: 0",
        "changed: algorithms/base.py",
        "reached: tests/test_first.py, by algorithms/base.py",
        "1 files of tests are reached",
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, True),
        ((), False),
        (("bench/gpu/a.py",), True),
        (("bench/gpu.py", "benches"), False),
        (("Makefile",), True),
    ],
)
def test_paths_that_a_change_touches(files: tuple[str, ...] | None, expected: bool) -> None:
    assert reach.touches(Change("1", "0", files), ["bench/gpu", "Makefile"]) is expected


# Each real file is parsed, which takes ten seconds.
@pytest.mark.slow
def test_this_project() -> None:
    graph = Graph()
    known = {module.partition(".")[0] for module in graph.modules}
    missing = []
    for name in graph.files:
        for line, module in imports.imports(graph.root / name):
            # Folders without __init__.py are packages, too.
            at_most = {module, module.rpartition(".")[0]}
            folders = {one.replace(".", "/") for one in at_most}
            if module.partition(".")[0] in known and not at_most & {*graph.modules}:
                missing += [f"{name}:{line} {module}"] * (not any((graph.root / one).is_dir() for one in folders))
    assert missing == []
    tests = [name for name in graph.files if reach.is_test(name)]
    # A test without anything to test would be reached by its own file only.
    assert all(len(graph.needed(name)) > 1 for name in tests)
    change = Change("1", "0", ("algorithms/gossip/d2.py",))
    reached = reach.reached_by(change).files
    assert "tests/algorithms/gossip/test_contract.py" in reached
    assert "tests/optim/test_muon.py" not in reached
    assert len(reached) < len(tests) / 2


@pytest.fixture
def commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, str], str]:
    """A new repository in `tmp_path`, and a function that commits a file to it, with an hour as its date."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "a@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    reach.git(tmp_path, "init", "--quiet")

    def make(hour: float, name: str) -> str:
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"{1_700_000_000 + int(hour * HOUR)} +0000")
        (tmp_path / name).write_text(f"{hour}")
        reach.git(tmp_path, "add", "--all")
        reach.git(tmp_path, "commit", "--quiet", "--message", name)
        return reach.git(tmp_path, "rev-parse", "HEAD").strip()

    return make


@pytest.mark.parametrize(
    ("hours", "base"),
    [
        ((1, 2, 8), 1),
        ((1, 2.01, 8), 0),
        # By dates, not by the order of the commits: after a rebase both differ.
        ((1, 0, 8), 0),
    ],
)
def test_base_is_the_newest_ancestor_that_is_six_hours_older(
    hours: Sequence[float], base: int, commit: Callable[[float, str], str], tmp_path: Path
) -> None:
    commits = [commit(hour, f"file{number}") for number, hour in enumerate(hours)]
    change = reach.change_of(tmp_path)
    assert (change.head, change.base, change.reason) == (commits[-1], commits[base], "")
    assert change.files == tuple(f"file{number}" for number in range(base + 1, len(hours)))


def test_files_of_a_change(commit: Callable[[float, str], str], tmp_path: Path) -> None:
    """A file that is moved has both of its names; what is not committed does not count."""
    first = commit(0, "moved")
    commit(0.5, "deleted")
    (tmp_path / "moved").rename(tmp_path / "é b")
    (tmp_path / "deleted").unlink()
    second = commit(8, "new")
    (tmp_path / "not committed").touch()
    assert reach.change_of(tmp_path).files == ("deleted", "moved", "new", "é b")
    assert reach.change_of(tmp_path, first) == Change(second, first, ("moved", "new", "é b"))
    assert reach.change_of(tmp_path, "HEAD").files == ()


def test_without_an_old_ancestor_everything_counts_as_changed(
    commit: Callable[[float, str], str], tmp_path: Path
) -> None:
    commit(0, "a")
    change = Change(commit(5.99, "b"), reason="no ancestor of HEAD is 6 hours older")
    assert reach.change_of(tmp_path) == change
    found = reach.reached_by(change, tmp_path)
    assert found.everything == "everything counts as changed: no ancestor of HEAD is 6 hours older"
    assert found.new_rules


def test_in_a_shallow_clone_everything_counts_as_changed(commit: Callable[[float, str], str], tmp_path: Path) -> None:
    for hour in (0, 8, 16):
        commit(hour, "a")
    clone = tmp_path / "clone"
    reach.git(tmp_path, "clone", "--quiet", "--depth", "2", tmp_path.as_uri(), str(clone))
    change = reach.change_of(clone)
    assert (change.files, change.reason) == (None, "the clone is shallow")
    # Who names the base knows that it is there.
    assert reach.change_of(clone, "HEAD~1").files == ("a",)


def test_where_git_knows_nothing_everything_counts_as_changed(
    commit: Callable[[float, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reach.change_of(tmp_path).files is None  # a repository without a commit
    commit(0, "a")
    (tmp_path / "below").mkdir()
    assert reach.change_of(tmp_path / "below").reason == "the folder is not the top of a repository"
    assert reach.change_of(tmp_path, "no such").reason == "there is no commit 'no such'"
    shutil.rmtree(tmp_path / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "not a git repository" in reach.change_of(tmp_path).reason
    monkeypatch.setenv("PATH", "")
    change = reach.change_of(tmp_path)
    assert (change.files, change.reason) == (None, "there is no git")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    clock.now = 1000.0
    monkeypatch.setattr(deadline, "time", clock)
    monkeypatch.setattr(runs, "time", clock)
    return clock


CONFTEST = """
from tests import deadline

def pytest_addoption(parser):
    deadline.add_options(parser)

def pytest_configure(config):
    deadline.configure(config)
    config.addinivalue_line("markers", "slow: takes long")

def pytest_collection_modifyitems(config, items):
    deadline.order(config, items)
"""
# Each item takes a second of the clock.
ITEMS = """
import pytest
from tests import deadline

@pytest.mark.parametrize("number", range(4))
def test_quick(number):
    deadline.time.now += 1
    assert number < {failing}

def test_other():
    deadline.time.now += 1

@pytest.mark.slow
def test_slow():
    deadline.time.now += 1
"""


@pytest.fixture
def run(pytester: pytest.Pytester, clock: VirtualClock) -> Callable[..., pytest.RunResult]:
    """A function that runs the six items above in this process."""

    def run(*arguments: str, failing: int = 4) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST)
        pytester.makepyfile(test_it=ITEMS.format(failing=failing))
        clock.now = 1000.0
        return pytester.runpytest_inprocess("-v", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments)

    return run


def names_of(result: pytest.RunResult) -> list[str]:
    return [line.split()[0].partition("::")[2] for line in result.outlines if line.startswith("test_it.py::")]


def test_nothing_begins_after_the_deadline(run: Callable[..., pytest.RunResult]) -> None:
    """The exit status is not that of a failure, and what was left out is not reported as such."""
    result = run("--until", "999")
    result.assert_outcomes()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["the time was up: 6 of 6 items were left out", "3 functions had no item that ran*", "    3 test_it.py"]
    )


def test_items_begin_until_the_deadline(run: Callable[..., pytest.RunResult]) -> None:
    result = run("--until", "1003")
    result.assert_outcomes(passed=3)
    assert result.ret == 0
    assert names_of(result) == [f"test_quick[{number}]" for number in range(3)]
    result.stdout.fnmatch_lines(
        ["the time was up: 3 of 6 items were left out", "2 functions had no item that ran*", "    2 test_it.py"]
    )
    result = run("--until", "1005")
    result.stdout.fnmatch_lines(["the time was up: 1 of 6 items were left out", "1 functions had no item that ran*"])


def test_each_function_may_have_run_before_the_deadline(run: Callable[..., pytest.RunResult]) -> None:
    result = run("--until", "1002", "-k", "quick")
    result.assert_outcomes(passed=2, deselected=2)
    result.stdout.fnmatch_lines(["the time was up: 2 of 4 items were left out", "each function had an item that ran"])


@pytest.mark.parametrize("arguments", [(), ("--until", "1006"), ("--end", "1306"), ("--seed", "ab")])
def test_runs_that_end_in_time_leave_nothing_out(
    arguments: Sequence[str], run: Callable[..., pytest.RunResult]
) -> None:
    result = run(*arguments)
    result.assert_outcomes(passed=6)
    result.stdout.no_fnmatch_line("*left out*")


def test_failures_before_the_deadline_count(run: Callable[..., pytest.RunResult]) -> None:
    result = run("--until", "1003", failing=1)
    result.assert_outcomes(passed=1, failed=2)
    assert result.ret == 1


def test_slow_items_do_not_begin_shortly_before_the_end(run: Callable[..., pytest.RunResult]) -> None:
    """The other ones do, until the end."""
    result = run("--end", "1304")
    result.assert_outcomes(passed=5)
    assert "test_slow" not in names_of(result)
    result.stdout.fnmatch_lines(["the time was up: 1 of 6 items were left out"])
    result = run("--end", "1002")
    result.assert_outcomes(passed=2)


def test_what_an_item_shares_with_one_that_is_left_out_is_torn_down(
    pytester: pytest.Pytester, run: Callable[..., pytest.RunResult]
) -> None:
    """Between items of two files, one that does not begin: the next file's items find nothing of the first."""
    pytester.makepyfile(test_next="def test_last():\n    pass\n")
    result = run("--end", "1299", "-k", "slow or last or quick")
    assert "test_next.py::test_last" in " ".join(result.outlines)
    result.assert_outcomes(passed=5, deselected=1)


def test_seed_orders_the_items(run: Callable[..., pytest.RunResult]) -> None:
    first, again, other = (names_of(run("--seed", seed)) for seed in ("a1", "a1", "b2"))
    assert first == again == sorted(first, key=lambda name: deadline.place("a1", f"test_it.py::{name}"))
    assert sorted(first) == sorted(other)
    assert first != other


# Two workers are started twice.
@pytest.mark.slow
def test_workers_stop_at_the_deadline(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(f"import sys\nsys.path.insert(0, {str(reach.ROOT)!r})\n{CONFTEST}")
    source = "import pytest\n@pytest.mark.parametrize('number', range(30))\ndef test_it(number): ...\ndef test_other(): ...\n"
    pytester.makepyfile(test_it=source)
    result = pytester.runpytest_subprocess("-n2", "--dist", "worksteal", "--until", "1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["the time was up: 31 of 31 items were left out", "2 functions*", "    2 test_it.py"])
    result = pytester.runpytest_subprocess("-n2", "--dist", "worksteal", "--until", "1e12", "--seed", "0")
    result.assert_outcomes(passed=31)
    result.stdout.no_fnmatch_line("*left out*")


def test_summary_has_at_most_forty_files() -> None:
    left = {f"tests/test_{number:02}.py::test_{name}" for number in range(50) for name in range(number + 1)}
    first, second, *rows = deadline.summary(left, set())
    assert first == "the time was up: 1275 of 1275 items were left out"
    assert second.startswith("1275 functions had no item that ran")
    assert len(rows) == deadline.MOST_LINES == 40
    assert rows[0] == "   50 tests/test_49.py"
    assert rows[-1] == "   66 in 11 other files"
    assert sum(int(row.split()[0]) for row in rows) == 1275


def test_runs_share_the_time_that_is_left(clock: VirtualClock) -> None:
    """A run that ends early leaves its time to the next ones, and one that takes longer takes theirs."""
    given = []

    def call(run: runs.Run, until: float | None) -> int:
        assert until is not None
        given.append(until - clock.now)
        clock.now += {"early": 100, "late": 700, "last": 0, "none": 0}[run.name]
        return 0

    shares = {"early": 0.5, "late": 0.25, "last": 0.125, "none": 0.125}
    names = [runs.Run(name, (), share=share) for name, share in shares.items()]
    assert runs.worst(names, call, limit=2000) == 0
    assert given == [500, 450, 100, 200]
    given.clear()
    assert runs.worst(names[1:2], call, limit=0) == 0
    assert given == [0]


@pytest.mark.parametrize(
    ("statuses", "expected"), [((0, 0), 0), ((1, 0, 0), 1), ((0, 5, 1), 5), ((2, 143), 143), ((), 0)]
)
def test_worst_status(statuses: Sequence[int], expected: int) -> None:
    """Each run takes place, also after one that failed."""
    left = list(statuses)
    assert runs.worst([runs.Run("", ())] * len(statuses), lambda *_: left.pop(0)) == expected
    assert left == []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock) -> tuple[list[list[str]], list[int]]:
    """The command lines that `runs` starts, and the exit statuses that they return instead of running."""
    lines, statuses = list[list[str]](), list[int]()

    def start(line: list[str], **_: object) -> SimpleNamespace:
        lines.append(line)
        return SimpleNamespace(returncode=statuses.pop(0))

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=start))
    return lines, statuses


@pytest.mark.parametrize(
    ("tier", "statuses", "expected"),
    [
        ("test", [0, 0, 0], 0),
        ("test", [1, 0, 0], 1),
        ("test", [0, 5, 0], 5),
        ("test", [0, -9, 1], 137),
        ("test-all", [0, 1, 0, 0], 1),
        ("test-rest", [0, 0, 0, 2], 2),
        ("test-rest", [0, 5, 0, 0], 5),
        ("test-overlay", [1, 0], 1),
    ],
)
def test_every_run_of_a_tier_takes_place(
    tier: str, statuses: list[int], expected: int, started: tuple[list[list[str]], list[int]]
) -> None:
    started[1].extend(statuses)
    assert runs.main([tier]) == expected
    assert started[1] == []
    assert len(started[0]) == len(statuses)
    for line in started[0]:
        assert "--until" not in line
        assert ("--all" in line) == (tier in ("test-all", "test-rest"))


@pytest.mark.parametrize(
    ("changed", "minutes"),
    [(("algorithms/base.py",), 25), (("tests/grids.py",), 50), (("pyproject.toml",), 25), (None, 50)],
)
def test_sample_of_the_rest(
    changed: tuple[str, ...] | None,
    minutes: int,
    started: tuple[list[list[str]], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: VirtualClock,
) -> None:
    """Only the files that are reached, until a share of the minutes is over, in the order of the commit."""
    found = reach.reached_by(Change("abc", "0", changed), write(tmp_path, TREE))
    monkeypatch.setattr(reach, "of_last_changes", lambda root: found)
    lines, statuses = started
    statuses += [runs.NO_ITEMS] * 4
    status = runs.main(["test-rest", "--sample", "--end", "9000"])
    few = changed == ("algorithms/base.py",)
    # No items in the files that are reached are no failure; the interpreter and the simulator have no file.
    assert (status, len(lines)) == ((0, 2) if few else (runs.NO_ITEMS, 4))
    assert lines[0][3:4] == ["tests/test_first.py" if few else "tests"]
    options = dict(zip(lines[0], lines[0][1:], strict=False))
    assert (options["--seed"], options["--end"]) == ("abc", "9000")
    share = 0.55 / (0.8 if few else 1)
    assert options["--until"] == f"{1000 + 60 * minutes * share:.0f}"


def test_continuous_integration_goes_on_after_a_failure(pytester: pytest.Pytester) -> None:
    """Each step runs, and the exit status is the worst."""
    root = pytester.mkdir("root")
    for name in (".ci", ".venv/bin", "bin"):
        (root / name).mkdir(parents=True)
    shutil.copy(reach.ROOT / ".ci/run", root / ".ci/run")
    for name, text in {
        "bin/make": 'printf "make %s\\n" "$1${2:+ ${2%% *}}"; case $1 in lint) exit 2;; test) exit 3;; esac',
        ".venv/bin/python": 'echo "python $2 $3"; case $2 in tests.versions) exit $(cat late);; esac; exit $(cat touched)',
    }.items():
        (root / name).write_text(f"#!/bin/sh\n{text}\n")
        (root / name).chmod(0o755)
    for touched in (0, 1):
        (root / "touched").write_text(f"{touched}")
        # Other versions, and the tests of doors, are due in the first run only.
        (root / "late").write_text(f"{touched}")
        result = pytester.run("env", f"PATH={root / 'bin'}:{os.environ['PATH']}", str(root / ".ci/run"))
        steps = [
            "lint",
            "overlay",
            "test",
            *["test-overlay" if touched else "test-doors"],
            "test-rest OPTIONS=--sample",
        ]
        steps += [] if touched else ["test-oldest OPTIONS=--end", "test-newest OPTIONS=--end"]
        assert "python tests.versions due" in result.outlines
        printed = [line for line in result.outlines if line.startswith("make ")]
        assert printed == [f"make {step}" for step in steps]
        assert "python tests.reach --untouched" in result.outlines
        assert result.outlines[-2:] == ["failed: make lint: status 2", "failed: make test: status 3"]
        assert result.ret == 3

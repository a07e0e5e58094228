"""docs/architecture.md: its files exist, its pictures are those of the imports, and its walks are what a small run enters."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from bagua_kernels.algorithms import DiLoCo
from tests.docs.walks import WALKS, Recorder, recorded
from tests.grids import only
from tests.imports import sources
from tests.test_architecture import FLOORS, imported_files, name_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TOPS = tuple(floor.rpartition(".")[2] for floor in FLOORS)
FEWEST_CHANGES = 15
# Files that a walk enters, and that the page neither names nor leaves out.
MOST_UNNAMED = 3
# By the words of the page, the names of threads.
THREADS = {
    "training": ("rank 0", "MainThread"),
    "communication": ("bagua_kernels communication",),
    "courier's": ("bagua_kernels wagma courier of rank 0",),
}
# Of a round of DiLoCo, from the wrapper down to the mailbox.
MOST_ENTERED = 22
# From DiLoCo down to the wrapper of a module, the files with its classes.
MOST_OF_ITS_CLASS = 4


def section(heading: str) -> str:
    """What is below a heading, up to the next one of its level or a higher one."""
    level = heading.index(" ")
    (found,) = re.findall(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{level}}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def paths(text: str) -> list[str]:
    """The files and folders of the floors in a text, in code."""
    return [path for path in re.findall(r"`([\w/.]+)`", text) if path.startswith(tuple(f"{top}/" for top in TOPS))]


def left_out(text: str) -> list[str]:
    """The files and folders that a text leaves out."""
    return [path for paragraph in text.split("\n\n") if "Left out" in paragraph for path in paths(paragraph)]


def lists(walk: str) -> list[tuple[str, list[str]]]:
    """The lists of a walk: whose thread it is of, and its files."""
    found = re.findall(r"^On \w+ ([\w']+) thread[^\n]*:\n\n((?:\d+\. [^\n]*\n)+)", walk, re.MULTILINE)
    return [(thread, re.findall(r"^\d+\. `([^`]+)`", items, re.MULTILINE)) for thread, items in found]


def first_entries(named: list[str], entries: list[str]) -> list[str]:
    """The named files in the order in which a thread entered them first, from the first of them on."""
    begins = entries.index(named[0]) if named[0] in entries else len(entries)
    return [file for file in dict.fromkeys(entries[begins:]) if file in named]


def differences(named: list[str], tasks: list[list[str]]) -> list[str]:
    """How a list differs from what threads entered: some task has to have all its files, and each such task in its order."""
    orders = [first_entries(named, entries) for entries in tasks]
    whole = [order for order in orders if len(order) == len(named)]
    if not whole:
        best = max(orders, key=len, default=[])
        return [f"{file} is not entered with the others" for file in named if file not in best]
    return [f"expected the order {', '.join(order)}" for order in whole if order != named]


def unnamed(entered: Iterable[str], named: Iterable[str], out: Iterable[str]) -> list[str]:
    """What was entered, and is neither named nor left out."""
    files, prefixes = set(named), tuple(out)
    return sorted(file for file in entered if file not in files and not file.startswith(prefixes))


run = functools.cache(recorded)


def named_in(walk: str) -> list[str]:
    return [name for _, names in lists(section(f"### {walk}")) for name in names]


def test_files_exist() -> None:
    assert [path for path in paths(PAGE) if not (ROOT / path).exists()] == []


def test_changes_name_files() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", section("## Where would I change X?"), re.MULTILINE)[1:]
    assert len(rows) >= FEWEST_CHANGES
    assert [change for change, place, _ in rows if not any((ROOT / path).is_file() for path in paths(place))] == []


def rooms(floor: str) -> dict[str, int]:
    """The rooms of a picture, with the numbers of their lines."""
    (picture,) = re.findall(r"^```text\n(.*?)^```$", section(f"### {floor}"), re.MULTILINE | re.DOTALL)
    return {
        room: line for line, text in enumerate(picture.splitlines()) for room in re.findall(r"[\w/]+(?:/|\.py)", text)
    }


def room_of(file: Path, floor: str, among: Mapping[str, int]) -> str | None:
    name = name_of(file).removeprefix(f"{floor}/")
    return max(
        (room for room in among if name == room or (name.startswith(room) and room[-1] == "/")), key=len, default=None
    )


@pytest.mark.parametrize("floor", TOPS)
def test_pictures_show_imports(floor: str) -> None:
    """All rooms are there, and each imports from lines below its own."""
    found = rooms(floor)
    files = [file for file in sources(folders=[floor]) if file != ROOT / floor / "__init__.py"]
    assert [name_of(file) for file in files if room_of(file, floor, found) is None] == []
    wrong = []
    for file in files:
        own = room_of(file, floor, found)
        for line, to in imported_files(file):
            other = room_of(to, floor, found) if name_of(to).startswith(f"{floor}/") else None
            if own is not None and other is not None and own != other and found[own] >= found[other]:
                wrong.append(
                    f"{name_of(file)}:{line} imports {name_of(to)}: {own} has to be above {other} in the picture"
                )
    assert wrong == []


@pytest.mark.parametrize("floor", TOPS)
def test_folders_are_described(floor: str) -> None:
    text = section(f"### {floor}").split("```")[2]
    described = set(re.findall(r"`([\w/.]+)`", text))
    assert [room for room in rooms(floor) if room[-1] == "/" and room not in described] == []


def test_all_walks_are_recorded() -> None:
    assert re.findall(r"^### (.*)$", section("## Eight walks"), re.MULTILINE) == list(WALKS)


@pytest.mark.parametrize("walk", only(WALKS, "ByteGrad, a step", "DiLoCo, a round", "WAGMA, a letter", "AdamW, a step"))
def test_walk(walk: str) -> None:
    recorder = run(walk)
    text = section(f"### {walk}")
    found = lists(text)
    assert found
    for thread, names in found:
        assert differences(names, recorder.of(*THREADS[thread])) == [], f"on the {thread} thread"
    out = left_out(section("## Eight walks").split("\n### ")[0]) + left_out(text)
    assert len(missing := unnamed(recorder.entered(), named_in(walk), out)) <= MOST_UNNAMED, missing


def counted(recorder: Recorder) -> list[str]:
    """The files of algorithms that a round enters, with those of messages and of compressed collectives."""
    return sorted(
        file for file in recorder.entered() if file.startswith(("algorithms/", "comm/mailbox/", "comm/compressed/"))
    )


def test_a_round_of_diloco_enters_few_files() -> None:
    found = counted(run("DiLoCo, a round"))
    print(f"{len(found)} files", *found, sep="\n")
    assert 10 < len(found) <= MOST_ENTERED


def test_diloco_is_a_class_of_few_files() -> None:
    classes = [each for each in DiLoCo.__mro__ if each.__module__.startswith("bagua_kernels.")]
    found = {inspect.getsourcefile(each) for each in classes}
    assert 1 < len(found) <= MOST_OF_ITS_CLASS


def test_faults_are_found() -> None:
    assert differences(["b", "c"], [["c", "a", "b", "c"], ["b"]]) == []
    assert differences(["b", "c", "d"], [["b", "d", "c"]]) == ["expected the order b, d, c"]
    assert differences(["b", "c"], [["a", "b"]]) == ["c is not entered with the others"]
    assert len(differences(["b", "c"], [])) == 2
    assert unnamed(["x/a.py", "y/b.py", "z.py"], ["z.py"], ["y/"]) == ["x/a.py"]
    with pytest.raises(ValueError, match="expected 1"):
        section("## Nothing")

"""What docs/tutorials says: all code runs on ranks that are threads, and does what the text says."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm
from bagua_kernels.comm import Communicator, Membership, run_ranks
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.compression import codec
from tests import limits
from tests.comm.membership.over_sockets import ends, with_joiner

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
INDEX = (FOLDER / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}
SECRET = Secret.from_text("known to the ranks of this test alone")


def program(page: str, begin: int = 0, end: int | None = None, **values: str) -> str:
    """The blocks of a page as one file, with smaller numbers at the names of some constants."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)[begin:end]
    text = "\n\n".join(blocks)
    for name, value in values.items():
        text, count = re.subn(rf"^{name} = [\d.]+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def run(source: str, here: threading.local, communicator: Communicator, show: Callable[..., Any]) -> dict[str, Any]:
    here.communicator = communicator
    given: dict[str, Any] = {"__name__": "tutorial", "print": show}
    exec(compile(source, "tutorial", "exec", dont_inherit=True), given)
    return given


def on_two(source: str, here: threading.local) -> list[dict[str, Any]]:
    return run_ranks(2, lambda communicator: run(source, here, communicator, lambda *_, **__: None))


def test_first_slow_link(ranks: threading.local) -> None:
    first, second = on_two(program("first-slow-link", STEPS="20", WARM_UP="1", HIDDEN="128"), ranks)
    found = first["found"]
    exact, eight, local = (found[spec] for spec in ("allreduce", "bytegrad", "diloco:interval=10,codec=absmax_int4"))
    assert exact["bytes"] > 2 * eight["bytes"] > 4 * local["bytes"] > 0
    # That of a guess is 1.0986.
    assert all(row["loss"] < 1.05 for row in found.values())
    assert {spec: row["loss"] for spec, row in found.items()} == {
        spec: row["loss"] for spec, row in second["found"].items()
    }


def test_unequal_machines_draw_each_sample_once(ranks: threading.local) -> None:
    found = on_two(program("unequal-machines", 0, 3, EPOCHS="2", PAUSE="0.0"), ranks)
    drawn = Counter(row for each in found for epoch in each["drawn"] for row in epoch)
    # Behind the last epoch there are the first samples of the next one.
    assert set(drawn) == set(range(960))
    assert min(drawn.values()) >= 2
    assert max(drawn.values()) <= 3
    a, b = (list(each["model"].parameters()) for each in found)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(sum(each["losses"][-20:]) < sum(each["losses"][:20]) for each in found)


def test_samples_of_unequal_cost(ranks: threading.local) -> None:
    first, second = on_two(program("unequal-machines", 3, TEXTS="100"), ranks)
    assert len(first["costs"]) == len(second["costs"])
    assert max(*first["costs"], *second["costs"]) <= 160
    # Ranks of one step have about the same: the difference is what a text more or less costs.
    assert all(abs(a - b) <= 80 for a, b in zip(first["costs"], second["costs"], strict=True))


class EndedError(Exception):
    """The end of a process, in the middle of its program."""


def elastic(monkeypatch: pytest.MonkeyPatch) -> str:
    """The program about members, with a few steps."""
    monkeypatch.setattr(comm, "shutdown", lambda: None)
    return program("losing-a-machine", STEPS="24", PAUSE="0.0")


def test_others_go_on_without_a_lost_machine(ranks: threading.local, monkeypatch: pytest.MonkeyPatch) -> None:
    source = elastic(monkeypatch)
    lines: dict[int, list[str]] = {rank: [] for rank in range(3)}

    def rank(communicator: Communicator) -> None:
        name = communicator.rank

        def show(line: str, **_: Any) -> None:
            lines[name].append(line)
            if name == 0 and len(lines[0]) == 5:
                raise EndedError

        members = Membership(communicator)
        try:
            run(source, ranks, members.communicator, show)
        except EndedError:
            return
        ends(members)

    run_ranks(3, rank, timeout=limits.seconds(10.0))
    for name in (1, 2):
        assert [line.split(",")[0] for line in lines[name]] == [f"step {step}" for step in range(24)]
        assert "of (0, 1, 2)" in lines[name][0]
        assert "of (1, 2)," in lines[name][-1]


def test_a_new_machine_begins_with_the_step_of_the_others(
    ranks: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = elastic(monkeypatch)
    lines: dict[int, list[str]] = {name: [] for name in range(3)}

    def trains(members: Membership, joiner: threading.Thread) -> None:
        def show(line: str, **_: Any) -> None:
            lines[members.name].append(line)
            if len(lines[members.name]) == 6 and members.name < 2:
                if members.name == 0:
                    joiner.start()
                limits.until(lambda: members.is_wanted or len(members.ranks) > 2, "a process asks")

        run(source, ranks, members.communicator, show)
        ends(members)

    with_joiner(2, SECRET, trains, 30.0)
    first = int(re.findall(r"step (\d+)", lines[2][0])[0])
    assert 0 < first < 24
    assert "of (0, 1, 2)" in lines[2][0]
    assert [len(lines[name]) for name in range(3)] == [24, 24, 24 - first]


def test_own_codec_keeps_its_promise_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_codecs", dict(codec._codecs))
    shown: list[str] = []
    found = run(program("own-codec", STEPS="30"), threading.local(), SimpleNamespace(), shown.append)  # type: ignore[arg-type]
    even, roots = found["errors"].values()
    assert roots < even
    kept = [int(re.findall(r"value (\d+) of", line)[0]) for line in shown[:2]]
    assert kept[1] > 3 * kept[0]
    results = found["results"]
    assert results["root_int8"][1] < results["identity"][1] / 2
    assert all(loss < 0.9 for loss, _ in results.values())


def test_own_algorithm_trains_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has its own assertions."""
    monkeypatch.setattr(Algorithm, "registered", dict(Algorithm.registered))
    shown: list[str] = []
    run(program("own-algorithm", STEPS="40"), threading.local(), SimpleNamespace(), shown.append)  # type: ignore[arg-type]
    (exact, all_bytes), (own, few) = (
        (float(loss), int(sent)) for line in shown for loss, sent in re.findall(r"loss ([\d.]+), (\d+) bytes", line)
    )
    assert all_bytes / 5 < few < all_bytes / 3
    assert max(exact, own) < 0.9
    source = program("own-algorithm")
    lines = source[source.index("@register") : source.index("STEPS")].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 32


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_in_the_index_and_say_how_to_run(page: str) -> None:
    assert f"({page}.md)" in INDEX
    assert "```sh\n" in PAGES[page]


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    file = FOLDER / f"{page}.md"
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        path, _, anchor = target.partition("#")
        found = FOLDER / (path or file.name)
        assert found.is_file(), target
        if anchor:
            heads = {re.sub(r"[^\w-]", "", head.lower().replace(" ", "-"))
                     for head in re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)}  # fmt: skip
            assert anchor in heads, target

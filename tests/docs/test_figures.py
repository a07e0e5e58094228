"""README.md is short and begins with the choice; figures of it and of the pages about results are those of committed files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bagua_kernels.algorithms import names
from tests.docs.test_algorithm_pages import ROWS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
EXAMPLES = (ROOT / "docs" / "examples.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorials" / "first-slow-link.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
PAGES = ("README.md", "docs/choosing.md", "docs/results.md", "docs/examples.md", "docs/installing.md", "docs/overview.md",
         "docs/development.md", "docs/README.md")  # fmt: skip
pytestmark = pytest.mark.figures
MOST_WORDS, MOST_BEFORE_INSTALLING = 1100, 300


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def prose(text: str) -> str:
    """A page on one line, without code and without targets of links."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).split())


def rows_of(task: str) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in results("convergence")[task]["rows"]}


def steps(rate: float | None) -> dict[str, list[float]]:
    """Seconds per step of the fully connected model at a rate, by the rival's name, in the order of measurement."""
    found: dict[str, list[float]] = {}
    for row in results("training")["steps"]:
        if row["model"] == "fc" and row["rate_mbit"] == rate:
            for name, seconds in row["seconds"].items():
                found.setdefault(name, []).append(seconds)
    return found


def sooner(rate: float, way: str, delay: float | None = None) -> float:
    """How many times sooner than DDP a way reaches the accuracy, without a straggler."""
    (cell,) = (
        one for one in results("tradeoff")["summary"]
        if (one["rate"], one["delay"], one["straggler"], one["batch"]) == (rate, delay, False, 16)
    )  # fmt: skip
    return float(cell["all"][way])


def sizes() -> set[str]:
    """Payloads per element as the index of algorithms has them, with two digits, or three where two are few."""
    found = {float(cells[1]) for _, cells in ROWS.values() if re.fullmatch(r"[\d.]+", cells[1])}
    return {f"{size:.2f}" if size > 0.05 else f"{size:.3f}" for size in found}


def of_study() -> list[str]:
    at = {one["rate"]: one for one in results("tradeoff")["summary"] if one["delay"] is None and one["batch"] == 16
          and not one["straggler"]}  # fmt: skip
    others = {way for one in results("tradeoff")["cells"] for way in one["seconds"]} - {"ddp"}
    return [
        f"at 5,000 Mbit/s {at[5000.0]['helping']} of {len(others)} ways",
        f"`ByteGrad` takes {1 / sooner(5000.0, 'bytegrad'):.2f} times as long",
    ]


def of_slow_line() -> list[str]:
    found = {one["algorithm"]: one for one in results("train/train_text")["runs"]}
    assert {one["steps"] for one in found.values()} == {450}
    labels = {"ddp": "DistributedDataParallel", "diloco": "DiLoCo", "sparse_loco": "SparseLoCo"}
    return [
        f"| `{labels[name]}` | {450 * one['seconds_per_step']:.0f} | "
        f"{one['bytes_per_step'] / 1000:.{1 if name == 'sparse_loco' else 0}f} | {one['validation_loss']:.2f} |"
        for name, one in found.items()
    ]


def in_readme() -> list[str]:
    text = rows_of("text")
    lost = [text[name]["loss"] - text["all-reduce"]["loss"] for name in ("DiLoCo", "SparseLoCo")]
    return [*of_study(), *of_slow_line(), "450 steps", f"cost {lost[0]:.2f} and {lost[1]:.2f} nats",
            "Python 3.11 or newer", "PyTorch 2.9 or newer", "Apache-2.0"]  # fmt: skip


def in_choosing() -> list[str]:
    slow, middle, fast = steps(100.0), steps(500.0), steps(5000.0)
    digits, fashion, ring, text = rows_of("digits"), rows_of("fashion"), rows_of("ring"), rows_of("text")
    characters = rows_of("characters")
    late = results("tradeoff")["stragglers"]
    (beside,) = results("training")["asynchronous"]
    keeps = [one["all"]["wagma"] for one in late]
    ddp = [one["ddp_keeps"] for one in late]
    line = results("train/train_text")["runs"]
    speed = {
        (row["rate_mbit"], bar["ours"]): bar["share"] for row in results("training")["local"] for bar in row["bars"]
    }
    (bar,) = (one for one in results("wait_avoiding")["bars"] if one["what"] == "conservative / all-reduce")
    (unequal,) = (row for row in results("unequal")["rows"] if row["name"] == "one of four three times as slow")
    (quorum,) = (row for row in results("quorum")["rows"] if row["name"] == "3 of 4, one slow")
    gossip = next(
        row["seconds"]
        for row in results("training")["steps"]
        if (row["model"], row["rate_mbit"]) == ("fc", 100.0) and "decentralized" in row["seconds"]
    )
    choice = results("choice")["choice"][0]
    assert (choice["model"], choice["rate_mbit"], "delay_ms" in choice) == ("tr", 500.0, False)

    def nats(label: str) -> str:
        return f"{characters[label]['loss_difference']:+.2f}"

    def sent(label: str) -> str:
        return f"{characters[label]['bytes_per_step'] / 1000:,.0f}"

    def local(label: str) -> str:
        return f"{text[label]['loss']:.3f} | {text[label]['bytes_per_step'] / 1000:.0f} |"

    return [
        f"takes {fast['allreduce'][0]:.2f} s at 5 Gbit/s, where DDP takes {fast['ddp'][0]:.2f} s",
        f"at 5,000 Mbit/s `ByteGrad` takes {1 / sooner(5000.0, 'bytegrad'):.2f} times as long as DDP",
        f"`apply_in_backward` ({fast['allreduce in backward'][0]:.2f} s)",
        f"by {nats('ByteGrad')} nats, with {sent('ByteGrad')} instead of {sent('all-reduce')} kB per step",
        f"On digits it has {digits['ByteGrad']['loss_ratio']:.2f} of the loss. A step",
        f"takes {slow['bytegrad'][0]:.2f} s instead of {slow['ddp'][0]:.2f} s at 100 Mbit/s",
        f"and {middle['bytegrad'][0]:.2f} s instead of {middle['ddp'][0]:.2f} s at 500 Mbit/s",
        f"without residuals: {nats('QSGD')} nats, with {sent('QSGD')} kB",
        f"the same bytes and {nats('compressed, 4 bits')} nats",
        f"On digits it has {digits['PowerSGD rank 4']['loss_ratio']:.2f} of the loss of exact means; on Fashion-MNIST",
        f"its accuracy is {100 * fashion['PowerSGD rank 4']['accuracy']:.1f} %, where that of exact means is "
        f"{100 * fashion['all-reduce']['accuracy']:.1f} %",
        f"It is there {sooner(100.0, 'powersgd 4'):.1f} times sooner than DDP at 100 Mbit/s, and "
        f"{sooner(1000.0, 'powersgd 4'):.2f} times at 1,000 Mbit/s",
        f"Rank 2 takes {slow['powersgd 2'][0]:.2f} s per step at 100 Mbit/s",
        f"rank 2 loses {characters['PowerSGD rank 2']['loss_difference']:.2f} nats on characters",
        f"{digits['sign']['loss_ratio']:.2f} of the loss on digits, but {nats('sign')} nats with Adam",
        f"{digits['top 1 %']['loss_ratio']:.2f} of the loss on digits, {nats('top 1 %')} nats with Adam",
        f"for SGD with momentum: {digits['DGC 1 %']['loss_ratio']:.2f} of the loss",
        f"losses differ by {nats('QAdam, freeze at 20 %')} and {nats('1-bit Adam, freeze at 20 %')} nats",
        f"they send {sent('QAdam, freeze at 20 %')} and {sent('1-bit Adam, freeze at 20 %')} kB per step",
        f"exact means have {text['all-reduce']['loss']:.3f} nats with {text['all-reduce']['bytes_per_step'] / 1000:,.0f} kB",
        f"{local('SparseLoCo')} {speed[10.0, 'sparse_loco delayed']:.2f} at 10 Mbit/s, "
        f"{speed[1.0, 'sparse_loco delayed']:.2f} at 1 Mbit/s |",
        f"{local('DiLoCo, 4 bits')} {speed[100.0, 'diloco int4']:.2f} at 100 Mbit/s |",
        *(local(label) for label in ("DiLoCo", "MuLoCo", "plain averaging")),
        f"`SparseLoCo` is at {line[2]['validation_loss']:.2f} nats where DDP is at {line[0]['validation_loss']:.2f}",
        f"is there {sooner(100.0, 'diloco int4'):.1f} times sooner than DDP at 100 Mbit/s, and "
        f"{sooner(100.0, 'diloco int4', 20.0):.1f} times with a delay of 20 ms",
        f"`SlowMo` is there first, {sooner(5000.0, 'slow_mo'):.2f} times sooner",
        f"4 bytes: {gossip['decentralized']:.2f} s per step instead of {gossip['ddp']:.2f} s at 100 Mbit/s",
        f"On digits it has {ring['D-PSGD']['loss_ratio']:.2f} of the loss of exact means if all ranks see alike data",
        f"but {ring['D-PSGD, by label']['loss_ratio']:.2f} if each rank has other digits",
        f"`D2` has {ring['D2, by label']['loss_ratio']:.2f} then",
        f"{ring['DCD, 8 bits']['loss_ratio']:.2f} of the loss, {slow['lowprec 8'][0]:.2f} s per step",
        f"{ring['Choco, 2 bits']['bytes_per_step'] / 1000:.1f} kB instead of "
        f"{ring['all-reduce']['bytes_per_step'] / 1000:.1f} kB per step, and has {ring['Choco, 2 bits']['loss_ratio']:.2f}",
        f"it has {bar['figure']:.3f} of the loss of exact means in as many steps",
        f"keeps {min(keeps):.2f} of its throughput or more, where DDP keeps {min(ddp):.2f} to {max(ddp):.2f}",
        f"takes {beside['seconds']['async 8 bits'] / beside['seconds']['alone']:.2f} times as long as one without",
        f"{unequal['by_speed']:.2f} of the summed speed is used, instead of {unequal['equal']:.2f} with equal steps",
        f"it has {quorum['ratio']:.2f} of the loss of all four in step",
        f"took {choice['over_best']:.2f} times as long as the best one, and {choice['over_plain']:.2f} of the exact",
    ]  # fmt: skip


def in_table_of_all() -> list[str]:
    """Those of the last table of docs/choosing.md and its notes."""
    found = rows_of("characters")
    lost = {label: f"{found[label]['loss_difference']:.2f}" for label in found}
    eight = max(found[label]["loss_difference"] for label in ("ByteGrad", "natural", "FP8", "QSGD, 8 bits"))
    four = max(found[label]["loss_difference"] for label in ("QSGD", "compressed, 4 bits"))
    return [
        f"loses at most {eight:.2f} nats per character with 8 bits, and {four:.2f} with 4 bits",
        f"`TernGrad` costs {lost['TernGrad']}, PowerSGD of rank 2 {found['PowerSGD rank 2']['loss_difference']:.2f}",
        f"the largest 1 % {lost['top 1 %']}, and signs {lost['sign']}",
        "0.28 to 1.03",
        "0.06 to 0.2 ",
        "0.14 to 0.16",
    ]


def in_examples() -> list[str]:
    plain, ours = results("train/train")["runs"]
    ddp, *local = results("train/train_text")["runs"]
    losses = [one["validation_loss"] for one in local]
    assert plain["test_accuracy"] == ours["test_accuracy"]
    return [
        f"reaches the same {100 * ours['test_accuracy']:.1f} % with {ours['bytes_per_step'] / 1000:.0f} instead of "
        f"{plain['bytes_per_step'] / 1000:.0f} kB per step and rank",
        f"takes {1000 * ours['seconds_per_step']:.1f} ms instead of {1000 * plain['seconds_per_step']:.1f} ms",
        f"DDP in {450 * ddp['seconds_per_step']:.0f} s, DiLoCo in {450 * local[0]['seconds_per_step']:.0f} s and "
        f"SparseLoCo in {450 * local[1]['seconds_per_step']:.0f} s",
        f"they end at {losses[0]:.2f} and {losses[1]:.2f} nats per character, DDP at {ddp['validation_loss']:.2f}",
        "Python 3.11 or newer",
    ]


EXPECTED: Mapping[str, tuple[str, Callable[[], Iterable[str]]]] = {
    "README.md": (README, in_readme),
    "docs/examples.md": (EXAMPLES, in_examples),
    "docs/tutorials/first-slow-link.md": (TUTORIAL, of_slow_line),
    "docs/choosing.md": (CHOOSING, lambda: [*in_choosing(), *in_table_of_all()]),
}


@pytest.mark.parametrize("page", EXPECTED)
def test_figures_are_those_of_committed_files(page: str) -> None:
    """And there are no others, but for payloads, which the index of algorithms has."""
    text, expected = EXPECTED[page]
    rest = prose(text)
    for one in expected():
        assert one in prose(text), f"{page} lacks {one!r}"
        rest = rest.replace(one, "")
    others = {figure.rstrip(".") for figure in re.findall(r"(?<![\d.,])[+-]?\d+\.\d+", re.sub(r"`[^`]*`", "", rest))}
    assert others <= sizes(), f"{page}: figures of no file: {sorted(others - sizes())}"


def test_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS
    assert len(README.partition("pip install")[0].split()) <= MOST_BEFORE_INSTALLING


def test_readme_begins_with_the_choice() -> None:
    heads = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert heads[:3] == ["Which one?", "At 10 Mbit/s", "Installing"]
    assert README.index("```diff") < README.index("## Which one?")
    rows = re.findall(r"^\| (?!take|---)[^|]*\| `(\w+)`", README.partition("## At")[0], re.MULTILINE)
    assert rows == ["DistributedDataParallel", "ByteGrad", "SparseLoCo", "Wagma"]
    assert f"one of {len(names())} classes" in README


def test_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", README))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    # What PyPI shows.
    assert pages - {"docs/summary.md"} <= linked
    assert {"SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/algorithms/README.md"} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", file.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = file.parent / path if path else file
        assert found.exists(), f"{page}: {target}"
        if anchor:
            text = found.read_text()
            heads = {re.sub(r"[^\w-]", "", head.lower().replace(" ", "-"))
                     for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}  # fmt: skip
            assert anchor in heads or f'id="{anchor}"' in text, f"{page}: {target}"


def test_classes_of_the_page_on_choosing_exist() -> None:
    """Its last table has all of them."""
    table = CHOOSING.partition("## All algorithms")[2]
    classes = {cells[0] for _, cells in ROWS.values()} - {"AutoTune"}
    cells = " ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", cells)) == classes


SECONDS = {
    "no communication": "alone",
    "`DistributedDataParallel`": "ddp",
    "… with its fp16 hook": "ddp fp16",
    "… with its PowerSGD hook, rank 2": "ddp powersgd 2",
    "`GradientAllReduce`": "allreduce",
    "`ByteGrad`": "bytegrad",
    "`SignSGD`": "sign",
    "`PowerSGD(rank=2)`": "powersgd 2",
    "… and `alternate=True`": "powersgd 2 in turn in backward",
    "… with `only_if_faster=True`": "bytegrad if faster",
}


def test_seconds_of_steps_are_those_measured() -> None:
    table = RESULTS.partition("| seconds per step |")[2].partition("\n\n")[0]
    rates = (100.0, 500.0, 1000.0, 5000.0, None)
    above = ""
    rows = 0
    for line in table.splitlines()[2:]:
        label, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        name = SECONDS.get(label, f"{above} in backward")
        above = above if label.startswith("…") else name
        for rate, cell in zip(rates, cells, strict=False):
            assert not cell or cell == f"{steps(rate)[name][0]:.2f}", f"{label} at {rate}"
        rows += 1
    assert rows == 13


def test_times_of_collectives_are_those_measured() -> None:
    rows = re.findall(
        r"^\| ([\w-]+), (\d+) (\w+)(?: float32| a rank)? "
        r"\| (\d+) (\w)bit/s(, 5 ms one way)? \| ([\d.]+) ms \| ([\d.]+) ms",
        RESULTS,
        re.MULTILINE,
    )
    sizes = {"M": 4 * 10**6, "MiB": 1 << 20, "kB": 1000}
    for operation, number, unit, rate, prefix, delay, gloo, ours in rows:
        place = (4, float(rate) * (1000 if prefix == "G" else 1), 5.0 if delay else 0, operation.replace("-", "_"))
        measured = [
            row["seconds"]
            for row in [one for part in ("large", "delayed") for one in results("network")[part]]
            if (row["hosts"], row["rate_mbit"], row["delay_ms"], row["operation"]) == place
            and row["bytes"] == int(number) * sizes[unit]
        ]
        assert len(measured) == 1, (operation, number, rate)
        for text, seconds in [(gloo, measured[0]["gloo"]), (ours, measured[0]["ours"])]:
            assert text == f"{1000 * seconds:.{len(text.partition('.')[2])}f}", (operation, number, rate)
    assert len(rows) == 7

"""Tables of options are those of the constructors: in docstrings, so that `help` answers, and on pages."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from bagua_kernels.algorithms import (
    Algorithm,
    ByteGrad,
    GradientAllReduce,
    MuLoCo,
    OneBitAdam,
    PowerSGD,
    QAdam,
    SignSGD,
    TopK,
)
from bagua_kernels.algorithms.wrapping.recorded import arguments_of
from bagua_kernels.comm import LocalCommunicator
from tests.docs import option_tables
from tests.docs.option_tables import (
    LONGEST,
    MARK,
    WIDTH,
    Option,
    options_of,
    own,
    rewritten_table,
    table,
    with_new_table,
)
from tests.grids import folded

REWRITE = "; run: python -m tests.docs.option_tables"
NAMES = [
    name
    for name, kind in Algorithm.registered.items()
    if kind.__module__.startswith("bagua_kernels.") and (kind is not MuLoCo or hasattr(torch.optim, "Muon"))
]
TWO = (Option("block", "256", "elements that share a range"), Option("seed", "0", "of random numbers"))
PAGE = """# Page

| option | default | |
|---|---|---|
| `block` | `128` | by [hand](else.md) |
| `gone` | `None` | is no option any more |

Text.
"""

every = folded(name=NAMES)


def defaults(kind: type[Algorithm]) -> dict[str, str]:
    return {option.name: option.default for option in options_of(kind)}


@every
def test_docstring_has_all_options(name: str) -> None:
    kind = Algorithm.registered[name]
    docstring = inspect.getdoc(kind) or ""
    assert docstring.count(MARK) == 1, f"expected one table of options in the docstring of {kind.__name__}{REWRITE}"
    assert table(options_of(kind)) in docstring, f"the table of {kind.__name__} is out of date{REWRITE}"


@every
def test_options_are_those_that_are_accepted(name: str) -> None:
    kind = Algorithm.registered[name]
    accepted = set(arguments_of(kind)) - {"module", "optimizer"}
    declared = {each for base in kind.__mro__ if issubclass(base, Algorithm) and "__init__" in vars(base)
                for each in own(base)}  # fmt: skip
    assert defaults(kind).keys() == accepted & declared
    assert all(option.text and "as for" not in option.text for option in options_of(kind))


def test_pages_are_up_to_date() -> None:
    late = [path.name for path, text in option_tables.pages().items() if path.read_text() != text]
    assert not late, f"tables of {late} are out of date{REWRITE}"


def test_defaults_are_those_in_effect() -> None:
    """A constructor may give its base another default."""
    assert defaults(ByteGrad)["error_feedback"] == "False"
    assert defaults(PowerSGD)["bucket_bytes"] == "None"
    assert defaults(GradientAllReduce)["bucket_bytes"] == str(10 << 20)
    for kind in (SignSGD, TopK):
        assert (defaults(kind)["exact"], defaults(kind)["min_numel"]) == ("'1d'", "512")


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_what_a_class_refuses_is_no_option(kind: type[Algorithm]) -> None:
    assert "bucket_bytes" in defaults(kind)
    assert "apply_in_backward" not in defaults(kind)
    with pytest.raises(TypeError, match="leave out apply_in_backward"):
        kind(torch.nn.Linear(2, 2), communicator=LocalCommunicator.alone(), apply_in_backward=True)


@pytest.mark.parametrize("after", ["", "\nAttributes:\n    name: a name.\n"])
def test_table_is_added_and_replaced(after: str) -> None:
    made = with_new_table(f"Averages.\n{after}", TWO)
    assert made == f"Averages.\n\n{table(TWO)}\n{after}"
    assert with_new_table(made, TWO) == made
    fewer = with_new_table(made, TWO[:1])
    assert table(TWO[:1]) in fewer
    assert "seed" not in fewer
    assert fewer.endswith(after)


def test_long_texts_are_divided() -> None:
    lines = table([*TWO, Option("codec", repr("x" * LONGEST), "word " * 60)]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[2] == "    block=256  elements that share a range"
    assert lines[4].strip() == f"codec='{'x' * LONGEST}'"
    assert lines[5] == f"{'':15}{'word ' * 19}word"


def test_rows_of_pages_keep_texts() -> None:
    text = rewritten_table(PAGE, {"block": "256", "seed": "0"}, lambda name: f"text of {name}")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == ["| `block` | `256` | by [hand](else.md) |", "| `seed` | `0` | text of seed |"]
    assert text.endswith("\n\nText.\n")


def test_command_rewrites_what_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, fresh = tmp_path / "late.md", tmp_path / "fresh.md"
    late.write_text("old")
    fresh.write_text("same")
    monkeypatch.setattr(option_tables, "ROOT", tmp_path)
    monkeypatch.setattr(option_tables, "pages", lambda: {late: "new", fresh: "same"})
    monkeypatch.setattr(option_tables, "sources", lambda: {})
    monkeypatch.setattr("sys.argv", ["option_tables", "--check"])
    assert option_tables.main() == 1
    assert late.read_text() == "old"
    monkeypatch.setattr("sys.argv", ["option_tables"])
    assert option_tables.main() == 0
    assert late.read_text() == "new"

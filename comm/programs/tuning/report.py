"""What the search has found: for the user as a table, and for `--reuse` as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from bagua_kernels.comm.programs.tuning.choice import NAMES, OWN, SOCKETS, ProbeError, Search, Variables
from bagua_kernels.comm.programs.tuning.probe import Case


def text(variables: Variables) -> str:
    """Returns a candidate as one would write it before a command."""
    return " ".join(f"{name}={value}" for name, value in variables) or "the defaults"


def show(found: Search) -> None:
    """Prints a table and what was chosen to the standard error."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)
    if found.first is not None and found.runs:
        first, ratios = found.first, found.ratios()
        table = Table(title=f"All-reduce on {first.backend}, {first.world} ranks, {len(first.nodes)} host(s), ms")
        for title in ("variables", *(_title(case) for case in first.cases), "all", "runs"):
            table.add_column(title, justify="left" if title == "variables" else "right")
        for one, runs in found.runs.items():
            times = [f"{1e3 * sum(times) / len(times):.3g}" for times in zip(*runs, strict=True)]
            change = f"{100 * (ratios[one] - 1):+.1f} %" if runs else "failed"
            times = times or ["-"] * len(first.cases)
            table.add_row(Text(text(one)), *times, change if one else "", str(len(runs)))
        console.print(table)
    for note in found.notes:
        console.print(Text(f"tune: {note}"))
    for name, value in found.chosen.items():
        console.print(Text(f"tune: {name}={value if len(value) < 80 else f'{value[:76]} ...'}"))
    if len(found.runs) > 1 and not {*found.chosen} - {OWN, SOCKETS}:
        console.print("tune: no candidate is more than 3 % faster both times: the transport's defaults stay")


def _title(case: Case) -> str:
    name = f"{case.nbytes / (1 << 20):g} MiB" if case.nbytes >= 1 << 20 else f"{case.nbytes / 1024:g} KiB"
    return name if case.in_flight == 1 else f"{case.in_flight} x {name}"


def write(file: Path, found: Search) -> None:
    """Writes what was found as JSON, for --reuse."""
    ratios = found.ratios() if found.runs else {}
    rows = [{"variables": dict(one), "runs": runs, "ratio": ratios[one]} for one, runs in found.runs.items() if runs]
    failed = [dict(one) for one, runs in found.runs.items() if not runs]
    record = {"variables": found.chosen, "candidates": rows, "failed": failed, "defaults": found.first}
    try:
        file.write_text(json.dumps(record, indent=1, default=dataclasses.asdict))
    except OSError as error:
        print(f"tune: --json {file} could not be written: {error}", file=sys.stderr)


def reused(file: Path) -> dict[str, str]:
    """Returns the variables that `write` has written.

    Raises:
        ProbeError: if the file holds none.
    """
    try:
        chosen = json.loads(file.read_text())["variables"]
        return {name: str(value) for name, value in chosen.items() if name in NAMES}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(
            f"--reuse {file}: expected what --json has written, got {type(error).__name__}: {error}; name such a file, or leave "
            "--reuse out"
        ) from error

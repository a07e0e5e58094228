"""Marked lines, by which a stage hands its results to the runner. Everything else that a stage prints goes to the log only.

- `FIGURE {"encode GB/s": 2710.5}`: results by name.
- `ROW encode 2,710 GB/s, 0.91 of a copy`: a line of the last table.
- `HEADLINE 420 of 420 cases equal`: the result in a few words.
- `FAILED 3 cases differ`: why the stage failed.
- `REFUSED no module cupy`: what the machine lacks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

FIGURE, ROW, HEADLINE, FAILED, REFUSED = "FIGURE", "ROW", "HEADLINE", "FAILED", "REFUSED"
KINDS = (FIGURE, ROW, HEADLINE, FAILED, REFUSED)
# The exit status of a stage that the machine refuses.
REFUSED_STATUS = 77
# The longest value; the reader cuts longer lines.
LONGEST = 3500


class Refused(Exception):
    """The machine lacks something that the stage needs; the message names it."""


class Differs(Exception):
    """The stage ran, and its result is not what it must be; the message has the difference."""


def put(kind: str, value: str) -> None:
    """Prints one marked line at once, in one piece."""
    sys.stdout.flush()
    sys.stdout.write(f"{kind} {value.replace(chr(10), ' ')[:LONGEST]}\n")
    sys.stdout.flush()


def figures(values: dict[str, Any]) -> None:
    """Prints figures by name, one line each; a later figure of a name replaces the earlier one."""
    for name, value in values.items():
        text = json.dumps({name: value})
        if len(text) > LONGEST:
            text = json.dumps({name: f"{json.dumps(value)[: LONGEST // 2]} …"})
        put(FIGURE, text)


def row(text: str) -> None:
    """Prints a line for the last table."""
    put(ROW, text)


def headline(text: str) -> None:
    """Prints the result in a few words; a later headline replaces the earlier one."""
    put(HEADLINE, text)


def parsed(line: str) -> tuple[str, Any]:
    """Returns the kind and the value of a marked line; an empty kind for any other line."""
    kind, _, rest = line.partition(" ")
    if kind not in KINDS:
        return "", line
    if kind != FIGURE:
        return kind, rest
    try:
        value = json.loads(rest)
    except ValueError:
        return "", line
    return (kind, value) if isinstance(value, dict) else ("", line)

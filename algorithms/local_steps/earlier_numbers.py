"""Numbers of checkpoints that earlier versions wrote: one level, with what each is in its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(
    r"(?P<step>steps|speed) of rank (?P<rank>\d+)|norm (?P<bucket>\d+) (?P<norm>count|mean|variance|high (?P<place>\d+))"
    r"|lr of group (?P<group>\d+)|merges (?P<part>\d+)"
)


def nested(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers as checkpoints contain them now; those of this version stay as they are.

    Args:
        numbers: of a checkpoint, by name. Ranks, places and so on come in ascending order.
    """
    found: dict[str, Any] = {}
    for name, value in numbers.items():
        match = _NAMES.fullmatch(name)
        if name in ("rounds", "end of round"):
            found.setdefault("pace", {})["end" if "end" in name else name] = int(value)
        elif name == "posts":
            found.setdefault("quorum", {})[name] = int(value)
        elif match is None:
            found[name] = value
        elif match["step"]:
            kept = found.setdefault("pace", {}).setdefault("steps" if match["step"] == "steps" else "speeds", [])
            kept.append(int(value) if match["step"] == "steps" else value)
        elif match["bucket"]:
            norms = found.setdefault("penalty", {}).setdefault(match["bucket"], {"high": []})
            if match["place"]:
                norms["high"].append(value)
            else:
                norms[match["norm"]] = int(value) if match["norm"] == "count" else value
        elif match["group"]:
            found.setdefault("learning_rates", {})[match["group"]] = value
        else:
            found.setdefault("quorum", {}).setdefault("merges", {})[match["part"]] = int(value)
    return found

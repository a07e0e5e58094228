"""What a misspelled name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_ALIKE = 0.6


def did_you_mean(name: object, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """Returns "; did you mean 'bytegrad'?" for a name that resembles a known one, to follow an error; else an empty text.

    Capitals, underscores and hyphens make no difference.

    Args:
        name: what was given.
        known: the names that there are.
        others: by texts that a user may write instead, the names that they stand for.
    """
    if not isinstance(name, str):
        return ""
    plain: dict[str, str] = {}
    for written, meant in [*((each, each) for each in known), *(others or {}).items()]:
        plain.setdefault(_plain(written), meant)
    found = difflib.get_close_matches(_plain(name), plain, 1, _ALIKE)
    return f"; did you mean {plain[found[0]]!r}?" if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")

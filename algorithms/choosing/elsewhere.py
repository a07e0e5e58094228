"""Predictions of algorithms of other classes, against what a search has chosen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bagua_kernels.algorithms.choosing.search import Search

_NEAR = 1.05  # predictions that are as good as equal


def faster(elsewhere: Mapping[str, float], search: Search) -> str:
    """Compares predictions with the choice.

    1. Predictions of one machine are off by one factor: that of what was predicted to be best, among those that were tried.
    2. Of the predictions within 5 % of the least, the first one counts.
    3. It has to be 5 % below the choice.

    Args:
        elsewhere: predicted seconds of a step, by name, in the order of how little they change.
        search: which has chosen.

    Returns:
        The name of the algorithm; empty if none is faster.
    """
    if not elsewhere:
        return ""
    base = min(search.predicted.values())
    tried = {label: statistics.median(times) for label, times in search.tried.items() if times}
    if known := [label for label in tried if label in search.predicted]:
        first = min(known, key=lambda label: search.predicted[label])
        base = search.predicted[first] * min(tried.values()) / tried[first]
    least = min(elsewhere.values())
    found = next(name for name, seconds in elsewhere.items() if seconds <= _NEAR * least)
    return found if _NEAR * elsewhere[found] < base else ""

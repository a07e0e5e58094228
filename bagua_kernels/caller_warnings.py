"""Warnings at the line of user code that leads to them."""

from __future__ import annotations

import sys
import warnings


def warn_caller(text: str, category: type[Warning] = DeprecationWarning) -> None:
    """Warns, at the line outside of this package that led here.

    Args:
        text: what is wrong, or goes with the next release, and what to do instead.
        category: of the warning.
    """
    package, depth = __name__.partition(".")[0], 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, category, stacklevel=depth)

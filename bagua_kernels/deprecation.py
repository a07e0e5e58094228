"""Warnings of what goes with the next release."""

from __future__ import annotations

import sys
import warnings


def warn_deprecated(text: str) -> None:
    """Warns, at the line outside of this package that led here.

    Args:
        text: what goes, and what to do instead.
    """
    package, depth = __name__.partition(".")[0], 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, DeprecationWarning, stacklevel=depth)

"""Warnings at the line of user code that leads to them."""

from __future__ import annotations

import sys
import warnings


def warn_moved(former: str, now: str, advice: str = "import from there") -> None:
    """Warns that a module stays at its former path for one release; called while that is imported, at the line that does so.

    Args:
        former: its path.
        now: where it is.
        advice: what to do instead.
    """
    text = f"{former} has moved to {now}, and this path stays for one release: {advice}"
    # This function, the former module, and who imports it: Python leaves out its own frames between them.
    warnings.warn(text, DeprecationWarning, stacklevel=3)


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

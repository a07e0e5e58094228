"""Ends with 0 if the tests of doors are to be run after the last changes, else with 1: `python -m tests.doors.due`.

That is one commit in ten, by its hash, and each change of a door, of its tests, of what is installed for them, or of a signature
that doors call (`uses.txt`, which tests/test_uses.py compares with the code).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import reach

ROOT = Path(__file__).parents[2]
PATHS = (
    "bagua_kernels/integrations",
    "bagua_kernels/checkpoint.py",
    "comm/joining/launchers.py",
    "tests/doors",
    "examples/launchers",
    "constraints-doors.txt",
)
ONE_OF, AT = 10, 5  # commits; not those that run other versions


def is_due(change: reach.Change) -> bool:
    """Returns True if they are to be run after a change."""
    return reach.touches(change, PATHS) or int(change.head or "0", 16) % ONE_OF == AT


if __name__ == "__main__":
    sys.exit(int(not is_due(reach.change_of(ROOT))))

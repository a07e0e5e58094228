"""The networks and machines on which entrants are compared."""

from __future__ import annotations

from dataclasses import dataclass

HOSTS = 4
SECONDS = 150.0


@dataclass(frozen=True)
class Cell:
    """One network, and how fast its machines are.

    Attributes:
        rate: of each link, Mbit/s in each direction.
        delay: ms one way between two hosts.
        slow: True if the last rank takes twice as long as the others for each step.
    """

    rate: float
    delay: float = 0.0
    slow: bool = False

    @property
    def name(self) -> str:
        """On the command line and in files."""
        return f"{self.rate:g}-{self.delay:g}-{'slow' if self.slow else 'equal'}"

    @property
    def title(self) -> str:
        """In tables."""
        delay = f", {self.delay:g} ms" if self.delay else ""
        return f"{self.rate:g} Mbit/s{delay}, {'one rank half as fast' if self.slow else 'equal machines'}"


CELLS = [
    Cell(rate, delay, slow) for rate in (1.0, 10.0, 100.0, 1000.0) for delay in (0.0, 20.0) for slow in (False, True)
]

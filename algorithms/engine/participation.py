"""Which parameters take part in a backward pass, on this rank and on any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.algorithms.engine.member import Member


class Participation:
    """Finds out which parameters have a gradient on any rank, and which are frozen, by the mean of flags.

    A flag is 1 if this rank has a gradient, 0 if the parameter is frozen here, else a small number. The mean is 0 if all ranks
    have frozen the parameter, and large if any rank has a gradient.

    Attributes:
        ranks: how many take part.
        present: positions of the parameters with a gradient on this rank.
        frozen: of those that are frozen in the pass that is, or was last, under way.
        unused: of those for which no rank had a gradient, once `read` has found out.
    """

    def __init__(self, members: Sequence[Member], ranks: int) -> None:
        """Begins with nothing."""
        self._members = members
        self.ranks = ranks
        self.present: set[int] = set()
        self.frozen: set[int] = set()
        self.unused: set[int] = set()

    def begin(self) -> list[int]:
        """Starts a pass; returns the positions of parameters that were frozen in the last one and still are."""
        before, self.frozen, self.present, self.unused = self.frozen, set(), set(), set()
        return [p for p in sorted(before) if not self._members[p].parameter.requires_grad]

    def flags(self, takes_part: bool) -> list[float]:
        """This rank's flags.

        Args:
            takes_part: False if this rank has no pass of its own, and only takes part in those of others.
        """
        # The mean of flags of parameters without a gradient is below a half of 1 / ranks.
        absent = 0.25 / self.ranks if takes_part else 0.0
        flags = [1.0 if position in self.present else absent for position in range(len(self._members))]
        for position in self.frozen:
            flags[position] = 0.0
        return flags

    def read(self, means: torch.Tensor, takes_part: bool) -> None:
        """Finds out for which parameters no rank had a gradient.

        Args:
            means: of all ranks' flags.
            takes_part: as for `flags`.

        Raises:
            RuntimeError: a parameter is frozen here and not on another rank.
        """
        if len(self.present) == len(self._members):
            return
        # Reading flags waits for the device, so it is done only where one can be below 1.
        # waits: only in a step in which a parameter has no gradient on this rank.
        flags = means.tolist()
        self.unused = {position for position, flag in enumerate(flags) if flag < 0.5 / self.ranks}
        for position in sorted(self.frozen) if takes_part else ():
            if flags[position]:
                raise RuntimeError(frozen_elsewhere(self._members[position].name))


def frozen_elsewhere(name: str) -> str:
    """What is wrong if a parameter is frozen on this rank alone."""
    return (
        f"parameter {name!r} is frozen on this rank (requires_grad=False), and not on another: replicas would drift apart; "
        "freeze it on all ranks before the same step"
    )

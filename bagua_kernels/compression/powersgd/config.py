"""PowerSGD: a matrix is sent as two thin factors, made by one step of subspace iteration; linear, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2; `docs/powersgd.md` has the formulas. Nothing here communicates: the caller averages the factors over
the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bagua_kernels.compression.codec import MASK
from bagua_kernels.compression.powersgd.low_rank import AlternatingLowRank, LowRank
from bagua_kernels.options import check_fields


@dataclass(frozen=True)
class PowerSGD:
    """The configuration of PowerSGD; equal on all ranks.

    Attributes:
        rank: columns of a factor, 1 or more; at most the lesser side of a matrix is used. The paper uses 1 to 4.
        seed: of the first right factors, 0 to 2**64 - 1.
        min_compression: a matrix is compressed if its factors are at least this many times smaller than itself. 0
            compresses every matrix.
        warm_start: begin each step with the right factors of the last (paper, section 3), instead of with new random ones.
        alternate: True: compute only one of the factors per step, in turn, like the library of the paper's authors. That
            halves messages, bytes and passes over matrices, and an iteration takes two steps.

    Raises:
        ValueError: an attribute is out of its range, or steps that alternate begin with random factors.
    """

    rank: int = 1
    seed: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    alternate: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}; 1 compresses most")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")
        if not 0 <= self.min_compression < math.inf:
            raise ValueError(
                f"min_compression must be finite and 0 (compresses all) or more, got {self.min_compression}"
            )
        if self.alternate and not self.warm_start:
            raise ValueError(
                "alternate=True got warm_start=False: a step that makes one factor would project onto random numbers; "
                "leave warm_start on"
            )

    def start(
        self,
        shapes: Iterable[Sequence[int]],
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LowRank | AlternatingLowRank:
        """Makes the state of a list of tensors, with residuals of zero.

        Args:
            shapes: of the tensors, in the same order on all ranks.
            names: of the tensors, all different, and equal on all ranks; random numbers and saved states depend on them.
                "0", "1", … if None.
            dtype: of residuals, factors and arithmetic, float32 or float64.
            device: of the tensors.

        Raises:
            ValueError: the names are too few, too many or not all different, or the dtype is another.
        """
        sizes = [torch.Size(shape) for shape in shapes]
        labels = [str(i) for i in range(len(sizes))] if names is None else list(names)
        return self._kind(self, sizes, labels, dtype, torch.device(device))

    @torch.no_grad()
    def take_over(self, state: LowRank | AlternatingLowRank) -> LowRank | AlternatingLowRank | None:
        """Makes a state that goes on with the residuals of another one.

        Args:
            state: of another configuration, between two steps. Its memory is taken over, so that it cannot be used any more.

        Returns:
            The state, with factors as `start` makes them; None, and nothing is taken, if other tensors are compressed.
        """
        if not state.compresses_as(self):
            return None
        return self._kind(self, state.shapes, state.names, state.dtype, state.device, state)

    @property
    def _kind(self) -> type[LowRank] | type[AlternatingLowRank]:
        return AlternatingLowRank if self.alternate else LowRank

"""PowerSGD: gradients travel as two thin factors."""

from __future__ import annotations

import math
from collections.abc import Hashable
from types import MappingProxyType
from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.low_rank import LowRankExchange
from bagua_kernels.algorithms.gradient_algorithm import BUCKET_BYTES, GradientAlgorithm, PassOptions
from bagua_kernels.algorithms.policy.only_if_faster import OnlyIfFaster
from bagua_kernels.algorithms.policy.schedule import EXACT_DTYPES, Schedule, Scheduled
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator

# Messages are a hundredth of the gradients, so that what a bucket costs is its two rounds of them, not the wire. Nothing hides
# the last one: it is to be the smaller of two, unless gradients are many.
_FIRST_SHARE = 0.7
_LARGE_BUCKET_BYTES = 32 << 20


@register
class PowerSGD(GradientAlgorithm):
    """Low-rank gradient compression with error feedback (Vogels, Karimireddy and Jaggi, NeurIPS 2019, algorithms 1 and 2).

    For each bucket of gradients, in the order in which backward completes them:

    1. In the first `start_step` steps, average it as it is: early gradients are not of low rank.
    2. Add each matrix's residual: M. Multiply by its right factor, P = M Q, and average P over the ranks, and in the same
       message all tensors that are not compressed.
    3. Make P's columns orthonormal. Q = M^T P; average Q.
    4. The gradient is P Q^T, the same on all ranks; the residual is this rank's M less that. With `apply_in_backward` on a CPU
       it updates the parameters in the pass that multiplies.

    Buckets follow one another, so that backward overlaps with all but the last. Each takes two messages. With `alternate`
    steps 2 and 3 take turns, as in the library of the paper's authors (github.com/epfml/powersgd). A step computes P of the
    last Q, made orthonormal, or Q of the last P, in one message.

    Options and their defaults, all by keyword::

        rank=1                   columns of a factor; 1 to 4
        start_step=0             steps without compression at the beginning
        min_compression=2.0      a matrix is compressed if its factors are so many times smaller than itself
        warm_start=True          begin each step with the right factors of the last
        alternate=False          make one factor in each step, in turn
        seed=0                   of the first right factors
        scaler=None              that by which losses are scaled, if any: residuals change their unit with it
        only_if_faster=False     True to measure in 36 steps if compression is faster than none, by turns of four steps
                                 with it and four without
        bucket_bytes=None        gradients are exchanged in buckets of about this size; the first ones may be smaller;
                                 by default seven tenths of the gradients, at most 32 MiB; or with `only_if_faster`,
                                 which may give compression up, 10 MiB
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        hierarchical=None        True to average inside nodes in full precision first, and then between them; False for
                                 never; None where nodes have several ranks
        nodes=None               which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
        verify_every=None        steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'       "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "powersgd"
    # Of PyTorch's hook.
    synonyms = MappingProxyType(
        {
            "matrix_approximation_rank": "rank",
            "start_powerSGD_iter": "start_step",
            "min_compression_rate": "min_compression",
            "random_seed": "seed",
        }
    )

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rank: int = 1,
        start_step: int = 0,
        min_compression: float = 2.0,
        warm_start: bool = True,
        alternate: bool = False,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
        only_if_faster: bool = False,
        bucket_bytes: int | None = None,
        **options: Unpack[PassOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            rank: columns of a factor; 1 to 4.
            start_step: steps without compression at the beginning.
            min_compression: a matrix is compressed if its factors are so many times smaller than itself.
            warm_start: begin each step with the right factors of the last.
            alternate: make one factor in each step, in turn.
            seed: of the first right factors.
            scaler: as for `CompressedAllReduce`.
            only_if_faster: as for `CompressedAllReduce`.
            bucket_bytes: as for `GradientAlgorithm`; by default seven tenths of the gradients, at most 32 MiB; or
                with `only_if_faster`, which may give compression up, 10 MiB.
            **options: as for `GradientAlgorithm`.

        Raises:
            ValueError: a number is out of its range, or as for `GradientAlgorithm`.
        """
        if start_step < 0:
            raise ValueError(f"start_step must be 0 or more, got {start_step}")
        self.config = compression.PowerSGD(rank, seed, min_compression, warm_start, alternate)
        self.holds_back = f"factors of rank {self.config.rank}"
        self.start_step = start_step
        self.scaler = scaler
        self._schedule = Schedule(((0, None), (start_step, self.config)) if start_step else ((0, self.config),))
        self.policy = Scheduled(start_step)
        if only_if_faster:
            self.policy = self.listener = OnlyIfFaster(self.policy)
        self.small_first = only_if_faster
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if only_if_faster else self.default_bucket_bytes(module)
        super().__init__(module, optimizer, bucket_bytes=bucket_bytes, **options)

    @classmethod
    def default_bucket_bytes(cls, module: torch.nn.Module) -> int:
        """See `GradientAlgorithm.default_bucket_bytes`."""
        total = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        return min(max(math.ceil(_FIRST_SHARE * total), 1), _LARGE_BUCKET_BYTES)

    def place(self, name: str, parameter: torch.nn.Parameter) -> tuple[Hashable, bool]:
        """See `GradientAlgorithm.place`: what has fewer than two dimensions is not compressed, nor float64."""
        return self._schedule, parameter.dim() < 2 or not parameter.numel() or parameter.dtype in EXACT_DTYPES

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return LowRankExchange(bucket, communicator, self.policy, self.config)

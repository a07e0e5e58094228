"""Natural compression: gradients rounded to powers of two."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register


@register
class NaturalCompression(CompressedAllReduce):
    """Gradients rounded to powers of two (Horvath et al., 2019, natural compression).

    1. Each rank rounds every element at random to one of the two neighbouring powers of two, without bias. The variance is
       at most an eighth of the square.
    2. Ranks average by `CompressedAllReduce`, which rounds the mean likewise.

    Options and their defaults, all by keyword::

        block=256                elements that share the largest power; see `compression.Natural`
        error_feedback=None      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None      True if the owners of chunks do; by default as `error_feedback`
        warmup_steps=0           steps without compression at the beginning
        groups=None              other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact=()                 patterns of names of parameters to average without compression; "1d" for all biases and
                                 norms
        min_numel=0              parameters with fewer elements are exact too
        seed=0                   of random numbers
        guard=None               measures now and then how much is lost; `stats().errors` has the results
        scaler=None              that by which losses are scaled, if any: residuals change their unit with it
        only_if_faster=False     True to measure in 36 steps if compression is faster than none, by turns of four steps
                                 with it and four without
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
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

    name = "natural"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share the largest power; see `compression.Natural`.
            **options: as for `CompressedAllReduce`.
        """
        super().__init__(module, optimizer, codec=compression.Natural(block), **options)

"""DoubleSqueeze: error feedback on both passes, with any codec."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.compressed import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.policy.schedule import Assignment, Encoding
from bagua_kernels.algorithms.registry import register
from bagua_kernels.compression.sparse.codec import SparseCodec


@register
class DoubleSqueeze(CompressedAllReduce):
    """Compression with memory on workers and servers (Tang et al., "DoubleSqueeze", ICML 2019, algorithm 1).

    1. Each rank adds to its gradient what its earlier payloads lacked, and sends it, encoded, to the owners of chunks.
    2. The owner of a chunk adds to the mean what its own earlier payloads lacked, and sends it, encoded, to everyone.
    3. Both keep what was lacking.

    So all that was applied, the mean of the ranks' residuals and the owners' residuals add up to all gradients.

    Options and their defaults, all by keyword::

        codec='sign'             any but a sparsifier, whose means are not encoded again; unbiased ones are scaled to
                                 contractions
        error_feedback=True      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=True      True if the owners of chunks do; by default as `error_feedback`
        warmup_steps=0           steps without compression at the beginning
        groups=None              other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact='1d'               patterns of names of parameters to average without compression; "1d" for all biases and
                                 norms
        min_numel=512            parameters with fewer elements are exact too
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

    name = "double_squeeze"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        codec: Encoding = "sign",
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            codec: any but a sparsifier, whose means are not encoded again; unbiased ones are scaled to contractions.
            **options: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.

        Raises:
            ValueError: the codec is a sparsifier or linear, feedback is switched off, or as for `CompressedAllReduce`.
        """
        for name in ("error_feedback", "owner_feedback"):
            if options.get(name) is False:
                raise ValueError(
                    f"DoubleSqueeze has error feedback on both passes, got {name}=False: take CompressedAllReduce"
                )
        given = Assignment.make(codec, groups=options.get("groups"))
        for other in given.codecs:
            if other.linear or isinstance(other, SparseCodec):
                raise ValueError(
                    f"DoubleSqueeze encodes means again, which {other!r} does not: take CompressedAllReduce"
                )
        kept: CompressionOptions = {**LARGE_MATRICES, **options, "error_feedback": True, "owner_feedback": True}
        super().__init__(module, optimizer, codec=codec, **kept)

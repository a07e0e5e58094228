"""DoubleSqueeze: error feedback on both passes, with any codec."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.compressed_all_reduce import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
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

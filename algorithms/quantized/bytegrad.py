"""ByteGrad: gradients travel as one byte per element."""

from __future__ import annotations

from typing import Unpack

import torch

from bagua_kernels.algorithms.compressed import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.registry import register
from bagua_kernels.compression import MinMaxUInt8


@register
class ByteGrad(CompressedAllReduce):
    """Synchronous data parallelism with gradients compressed to 8 bits (BAGUA, VLDB 2022; its `bytegrad` algorithm).

    For each bucket of gradients, in the order in which backward completes them:

    1. Encode the bucket, cut into one chunk per rank, with `MinMaxUInt8`: one byte per element, two float32 per block.
    2. All-to-all: each rank receives everyone's payload of its own chunk.
    3. Decode, average and encode the chunk again.
    4. All-gather the averages.
    5. Decode them; the same bytes, and so the same gradients, on every rank.

    A rank sends about a quarter of the bytes of a float32 all-reduce. The mean is rounded twice, to 1/255 of the range of
    256 neighbouring elements of one tensor each time.

    Options and their defaults, all by keyword::

        block=256                elements that share a range, a power of two from 32 to 4096; see `MinMaxUInt8`
        stochastic=False         round at random instead of to nearest, which makes the mean unbiased
        error_feedback=False     True if each rank keeps what its payloads lack; by default if the codec is biased
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

    name = "bytegrad"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        stochastic: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a range, a power of two from 32 to 4096; see `MinMaxUInt8`.
            stochastic: round at random instead of to nearest, which makes the mean unbiased.
            **options: as for `CompressedAllReduce`; error feedback is off unless asked for.
        """
        codec = MinMaxUInt8(block, stochastic)
        given: CompressionOptions = {"error_feedback": False, **options}
        super().__init__(module, optimizer, codec=codec, **given)

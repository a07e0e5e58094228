"""Algorithms whose gradients are rounded without bias: what is lost averages out over ranks and steps."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import CompressedAllReduce
from bagua_kernels.algorithms.engine.vectors import euclidean_norm
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket


@register
class QSGD(CompressedAllReduce):
    """Gradients rounded at random to a few levels (Alistarh et al., NeurIPS 2017, section 3).

    1. Each rank rounds every block of `block` elements to multiples of its norm over the number of levels, at random and
       without bias.
    2. Ranks average by `CompressedAllReduce`, which rounds the mean likewise.

    No error feedback: around a quantizer of so much variance it diverges. The paper scales by the 2-norm; the largest
    element, the default, has less variance.
    """

    name = "qsgd"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        bits: int = 4,
        block: int = 128,
        norm: str = "max",
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            bits: of an element, 2, 4 or 8.
            block: elements that share a norm; see `compression.QSGD`.
            norm: "max" or "l2".
            **arguments: as for `CompressedAllReduce`.
        """
        super().__init__(module, optimizer, codec=compression.QSGD(bits=bits, block=block, norm=norm), **arguments)


@register
class TernGrad(CompressedAllReduce):
    """Gradients of three levels (Wen et al., NeurIPS 2017).

    1. Each rank clips its gradient, tensor by tensor, to `clip` times its root mean square (section 3.2 there, which takes the
       standard deviation). That is biased, and without it the largest element makes all others noise.
    2. Each element becomes -s, 0 or s at random and without bias, s being the largest magnitude of its block.
    3. Ranks average by `CompressedAllReduce`; or, with `shared`, agree on s by a maximum over ranks, so that the network
       itself adds up the levels (the paper's scaler sharing).
    """

    name = "terngrad"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 512,
        shared: bool = False,
        clip: float | None = 2.5,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a scale; see `compression.TernGrad`.
            shared: whether ranks share scales.
            clip: root mean squares of a tensor's gradient to which it is clipped; None does not clip.
            **arguments: as for `CompressedAllReduce`.

        Raises:
            ValueError: `clip` is not above 0, or as for `CompressedAllReduce`.
        """
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be above 0, or None, got {clip}")
        if shared and arguments.get("error_feedback"):
            raise ValueError("shared scales allow no error feedback: they come from outside, not from what is encoded")
        self.clip = clip
        super().__init__(module, optimizer, codec=compression.TernGrad(block, shared), **arguments)

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        if self.clip is not None and self.codec_at(bucket, step) is not None:
            for slot, view in enumerate(bucket.views):
                if view.numel() and bucket.compressed(slot):
                    most = (self.clip / view.numel() ** 0.5 * euclidean_norm(view)).to(view.dtype)
                    # What is not finite stays so, for others to see.
                    view.copy_(torch.where(most.isfinite(), view.clamp(-most, most), view))
        super().exchange(bucket, step)


@register
class NaturalCompression(CompressedAllReduce):
    """Gradients rounded to powers of two (Horvath et al., 2019, natural compression).

    1. Each rank rounds every element at random to one of the two neighbouring powers of two, without bias: the variance is at
       most an eighth of the square.
    2. Ranks average by `CompressedAllReduce`, which rounds the mean likewise.
    """

    name = "natural"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share the largest power; see `compression.Natural`.
            **arguments: as for `CompressedAllReduce`.
        """
        super().__init__(module, optimizer, codec=compression.Natural(block), **arguments)


@register
class FP8AllReduce(CompressedAllReduce):
    """Gradients in 8-bit floats (after FP8-LM, Peng et al., 2023, section 2.2; scales are per block here).

    1. Each rank scales every block to the range of the format and rounds it.
    2. Ranks average by `CompressedAllReduce`: means are accumulated in float32 and rounded once, where a sum in 8 bits would
       round at every rank.
    """

    name = "fp8"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        format: str = "e4m3",
        block: int = 128,
        stochastic: bool = False,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            format: "e4m3" or "e5m2".
            block: elements that share a scale; see `compression.FP8`.
            stochastic: round at random instead of to nearest, which makes the mean unbiased.
            **arguments: as for `CompressedAllReduce`; error feedback is off unless asked for.
        """
        codec = compression.FP8(format=format, block=block, stochastic=stochastic)
        super().__init__(module, optimizer, codec=codec, **{"error_feedback": False, **arguments})

"""TernGrad: -1, 0 or 1 times a scale, which all ranks may share so that the network can add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from bagua_kernels.compression.absmax import level_variance
from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.compression.codec import Unbiased, register
from bagua_kernels.launchers import arguments, blockwise
from bagua_kernels.launchers.blockwise.form import check_payload, form_of
from bagua_kernels.rules.magnitude import absmax
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.quantizers import BlockQuantizer

NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class TernGrad(BlockCodec):
    """Each value becomes 0 or plus or minus a block's greatest magnitude, at random (Wen et al., NeurIPS 2017, section 3).

    1. s = greatest magnitude of the block, or, shared, of that block on all ranks.
    2. Sent is s and sign(v) with probability |v| / s, else 0; decoded is s * code.

    With shared scales codes are bytes that the network may add: `scales` of each rank, their greatest over all ranks
    (an all-reduce of integers), `encode(x, scales=...)`, a SUM all-reduce of `summable(payload)`, `decode`.

    The paper also clips values beyond 2.5 standard deviations. That makes the result biased, and it is left to the
    algorithm, which can clip before it encodes.

    Attributes:
        block: elements a block, a power of two from 32 to 4096. The paper takes a layer; smaller blocks have less variance.
        shared: True if scales are arguments of `encode`. Codes then take 8 bits instead of 2, for sums over up to 127 ranks.
    """

    block: int = 512
    shared: bool = False
    stochastic: bool = field(default=True, init=False, repr=False)
    RULES: ClassVar[dict[bool, BlockQuantizer]] = {False: absmax(2, 1), True: absmax(8, 1)}

    @property
    def rule(self) -> BlockQuantizer:
        """See `BlockCodec`."""
        return self.RULES[self.shared]

    @property
    def bias(self) -> Unbiased:
        """The bound for the worst block; with shared scales, relative to a vector that has the greatest values itself."""
        return Unbiased(level_variance(self.block, 1))

    @property
    def linear(self) -> bool:
        """True if the network may add payloads, in the part that `summable` returns."""
        return self.shared

    def scales(self, x: torch.Tensor) -> torch.Tensor:
        """The greatest magnitude of each block of a vector of shape (n,), as the bits of a float32.

        Returns:
            Shape (blocks,), int32. Bits of magnitudes compare as these do, with NaN above all, so that an all-reduce with MAX
            gives the scales to share.
        """
        arguments.check_vector("x", x, arguments.FLOAT_DTYPES)
        blocks = -(-x.numel() // self.block)
        padded = torch.zeros(blocks * self.block, dtype=torch.float32, device=x.device)
        padded[: x.numel()] = x
        bits = padded.view(torch.int32).bitwise_and_(0x7FFFFFFF).view(blocks, self.block).amax(1)
        return bits.masked_fill_(bits >= 0x7F800000, NAN_BITS)

    def encode(
        self,
        x: torch.Tensor,
        *,
        seed: int = 0,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes a vector; see `BlockCodec.encode`.

        Args:
            x: shape (n,).
            seed: of stochastic rounding; must differ between ranks.
            out: the payload; made if None.
            counts: as for `BlockCodec.encode`.
            scales: shape (blocks,), int32, as `scales` makes them; only with `shared=True`, where None takes the vector's own.
        """
        if not self.shared:
            if scales is not None:
                raise ValueError("scales are for TernGrad(shared=True), got them with shared=False")
            return super().encode(x, seed=seed, out=out, counts=counts)
        arguments.check_vector("x", x, arguments.FLOAT_DTYPES)
        form = form_of(self.rule, x.numel(), self.block)
        if scales is None:
            scales = self.scales(x)
        if scales.shape != (form.blocks,) or scales.dtype != torch.int32 or scales.device != x.device:
            raise ValueError(
                f"scales must be int32 of shape {(form.blocks,)} on {x.device}, got {scales.dtype} of shape "
                f"{tuple(scales.shape)} on {scales.device}"
            )
        out = self._payload(x.numel(), x.device, out)
        check_payload("out", out, form, (form.size,), x.device)
        words, _ = form.parts(out)
        words[form.blocks :] = 0
        words[: form.blocks] = scales
        blockwise.encode(self.rule, x, out, block=self.block, seed=seed, given=True, counts=counts)
        return out

    def encode_pieces(
        self, pieces: Sequence[torch.Tensor], *, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `BlockCodec.encode_pieces`; only with scales of its own."""
        self._check_own("encode_pieces")
        return super().encode_pieces(pieces, seed=seed, out=out)

    def encode_feedback(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        factor: float = 1.0,
        seed: int = 0,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `BlockCodec.encode_feedback`; only with scales of its own."""
        self._check_own("encode_feedback")
        return super().encode_feedback(x, residual, factor=factor, seed=seed, out=out, counts=counts)

    def encode_rule(
        self,
        message: MessageRule,
        arrays: Sequence[torch.Tensor],
        scalars: Sequence[float] = (),
        *,
        seed: int = 0,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        replicas: torch.Tensor | None = None,
        weights: torch.Tensor | Sequence[float] | None = None,
    ) -> torch.Tensor:
        """See `BlockCodec.encode_rule`; only with scales of its own."""
        self._check_own("encode_rule")
        options: dict[str, Any] = {"counts": counts, "replicas": replicas, "weights": weights}
        return super().encode_rule(message, arrays, scalars, seed=seed, out=out, **options)

    def _check_own(self, method: str) -> None:
        if self.shared:
            raise ValueError(
                f"{method} takes each rank's own scales, and with shared=True the network would add codes of different scales; "
                "add the residual and use encode(x, scales=...)"
            )

    def summable(self, payload: torch.Tensor) -> torch.Tensor:
        """The part of a payload that the network may add in place, over payloads with equal scales: int8, a view.

        Raises:
            ValueError: the codec has scales of its own.
        """
        if not self.shared:
            raise ValueError("codes with scales of their own cannot be added; use TernGrad(shared=True)")
        size = payload.numel()
        if not size:
            return payload.view(torch.int8)
        # payload_size grows with n and the codes are its tail, so that their number follows from the size.
        n = max(size - 16 - size * 4 // (self.block + 4), 0)
        while self.payload_size(n) < size:
            n += 16
        if self.payload_size(n) != size:
            raise ValueError(f"no vector has a payload of {size} bytes at block={self.block}")
        return payload[size - arguments.padded(n) :].view(torch.int8)


register("terngrad", TernGrad)

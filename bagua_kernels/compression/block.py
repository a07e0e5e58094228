"""What all codecs made of a block quantizer share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from bagua_kernels.compression.codec import Contractive, Unbiased, check_codec
from bagua_kernels.launchers import arguments, blockwise
from bagua_kernels.launchers.blockwise import fusion
from bagua_kernels.launchers.blockwise.form import checked_block, form_of
from bagua_kernels.launchers.blockwise.rows import Rows
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer


class BlockCodec(ABC):
    """A codec that quantizes blocks of elements with scales of their own.

    A subclass is a frozen dataclass with a field `block`, a `rule`, a `bias` and, if it rounds at random, `stochastic`. It then
    works on every device, with the same bytes. `docs/codecs.md` shows how to write one.

    The payload of n elements has `4 * rule.words` bytes per block and `rule.bits` bits per element; see `docs/wire-format.md`.
    """

    block: int
    stochastic: bool = False

    def __post_init__(self) -> None:
        checked_block(self.block)
        check_codec(self)

    @property
    @abstractmethod
    def rule(self) -> BlockQuantizer:
        """The scalar rules."""

    @property
    @abstractmethod
    def bias(self) -> Unbiased | Contractive:
        """The bound of the squared error, relative to the vector's."""

    @property
    def linear(self) -> bool:
        """False: every payload has scales of its own."""
        return False

    def payload_size(self, n: int) -> int:
        """The number of bytes of `n` encoded elements."""
        if n < 0:
            raise ValueError(f"the number of elements must be 0 or more, got {n=}")
        return form_of(self.rule, n, self.block).size

    def encode(
        self, x: torch.Tensor, *, seed: int = 0, out: torch.Tensor | None = None, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes a vector.

        Args:
            x: shape (n,), contiguous, float32, float16 or bfloat16, on a CPU or CUDA device.
            seed: of stochastic rounding, 0 to 2**64 - 1; see `fold_seed`. Not used by rounding to nearest.
            out: shape (payload_size(n),), uint8, starting at a multiple of 16 bytes; made if None.
            counts: shape (blocks,), int32, on the device of `x`: how many elements at the beginning of each block are its own.
                The others only fill it up: they are not read, count in no scale, and have code 0. None stands for all.

        Returns:
            The payload, shape (payload_size(n),), uint8.

        Raises:
            TypeError: a dtype is not supported.
            ValueError: a shape, size, device, alignment or the seed does not fit.
            BackendUnavailableError: no kernel backend serves the device.
        """
        arguments.check_vector("x", x, arguments.FLOAT_DTYPES)
        out = self._payload(x.numel(), x.device, out)
        blockwise.encode(self.rule, x, out, block=self.block, seed=self._seed(seed), counts=counts)
        return out

    def encode_pieces(
        self, pieces: Sequence[torch.Tensor], *, seed: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encodes many tensors straight into one payload, with no flat copy of them in between.

        Args:
            pieces: contiguous tensors of any shape, of one dtype and device. The payload is that of a vector in which each
                tensor is padded to a multiple of the block, with `counts` for the padding.
            seed: of stochastic rounding.
            out: shape (payload_size(length of that vector),), uint8; made if None.

        Returns:
            The payload. Errors as in `encode`.
        """
        n = sum(arguments.padded(piece.numel(), self.block) for piece in pieces)
        device = pieces[0].device if pieces else torch.device("cpu")
        out = self._payload(n, device, out)
        blockwise.encode_pieces(self.rule, pieces, out, block=self.block, seed=self._seed(seed))
        return out

    def encode_rows(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        rows: Rows,
        *,
        seeds: Sequence[int],
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes chunks of a vector, each into its row, as `encode` would; on a GPU in one launch.

        Args:
            x: shape (`rows.total`,), as for `encode`.
            out: shape (`rows.count`, payload_size(`rows.width`)), uint8; rows may have more behind them. The payload of a shorter
                chunk is at the beginning of its row.
            rows: where the chunks are.
            seeds: of stochastic rounding, one for each chunk; not used by rounding to nearest.
            counts: shape (blocks of `x`,), int32; see `encode`.

        Returns:
            `out`. Errors as in `encode`.
        """
        chosen = list(seeds) if self.stochastic else None
        blockwise.encode_rows(self.rule, x, out, rows, block=self.block, seeds=chosen, counts=counts)
        return out

    def encode_rows_of_pieces(
        self, pieces: Sequence[Sequence[torch.Tensor]], out: torch.Tensor, *, seeds: Sequence[int]
    ) -> torch.Tensor:
        """Encodes many tensors for each row, each row as `encode_pieces` would; on a CPU in one launch.

        Args:
            pieces: for each row contiguous vectors of one dtype, of as many blocks in each row.
            out: shape (rows, payload_size of all blocks of a row), uint8; rows may have more behind them.
            seeds: of stochastic rounding, one for each row; not used by rounding to nearest.

        Returns:
            `out`. Errors as in `encode_pieces`.
        """
        chosen = list(seeds) if self.stochastic else None
        blockwise.encode_rows_of_pieces(self.rule, pieces, out, block=self.block, seeds=chosen)
        return out

    def decode_rows(self, payloads: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Decodes what `encode_rows` gave into `out`, of shape (`rows.total`,), and returns it. Errors as in `encode`."""
        blockwise.decode_rows(self.rule, payloads, out, rows, block=self.block)
        return out

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
        """Encodes `factor * (x + residual)` and updates the residual to what is missing, in one pass over memory.

        Args:
            x: shape (n,), as in `encode`.
            residual: shape (n,), float32; updated to `x + residual` less what the payload decodes to.
            factor: 1, or 1 / (1 + omega) for an unbiased codec; see `ErrorFeedback`.
            seed: of stochastic rounding.
            out: as in `encode`.
            counts: as in `encode`; the residuals of other elements stay as they are.

        Returns:
            The payload. Errors as in `encode`.
        """
        arguments.check_vector("x", x, arguments.FLOAT_DTYPES)
        out = self._payload(x.numel(), x.device, out)
        options: dict[str, Any] = {"factor": factor, "seed": self._seed(seed), "counts": counts}
        blockwise.feedback(self.rule, x, residual, out, block=self.block, **options)
        return out

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
        """Encodes what a rule computes from several arrays, and updates them by what the payload decodes to, in one pass.

        Example: `codec.encode_rule(CHOCO, [x, own], [1.0])` encodes `x - own`, and adds what the payload decodes to to `own`.

        Args:
            message: the rule, for example of `bagua_kernels.rules.gossip`.
            arrays: the rule's arrays, each of shape (n,), as in `encode`; those that the rule writes are updated.
            scalars: the rule's scalars.
            seed: of stochastic rounding.
            out: as in `encode`.
            counts: as in `encode`; other elements of the arrays stay as they are.
            replicas: shape (ranks, n), float32, contiguous: the rule's last array is the sum of the rows, and not among `arrays`.
                An array that the rule only reads may be one of the rows.
            weights: of the rows, as in `decode_sum`.

        Returns:
            The payload. Errors as in `encode`, and ValueError if the number of arrays or scalars is wrong.
        """
        if not arrays:
            raise ValueError(f"rule {message.name!r} takes {message.arrays} arrays, got none")
        out = self._payload(arrays[0].numel(), arrays[0].device, out)
        options: dict[str, Any] = {"seed": self._seed(seed), "counts": counts, "replicas": replicas, "weights": weights}
        fusion.encode_rule(self.rule, message, arrays, scalars, out, block=self.block, **options)
        return out

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a payload of shape (payload_size(n),) into `out`, of shape (n,); errors as in `encode`."""
        blockwise.decode(self.rule, payload, out, block=self.block)
        return out

    def decode_sum(
        self,
        payloads: torch.Tensor,
        out: torch.Tensor,
        scale: float = 1.0,
        *,
        weights: torch.Tensor | Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Writes `scale` times the sum of all decoded payloads, each times its weight, to `out`.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8; each is read once.
            out: shape (n,); sums are taken in float32, from the first payload to the last, and rounded to its dtype at the end.
            scale: factor of the sum.
            weights: one float32 for each payload: numbers, or a tensor on the device of the payloads. Each product is rounded
                to float32 before it is added. None stands for ones. If all are numbers and equal to 1/n, for n payloads, the
                sum is divided by n instead, which has no bias.

        Returns:
            `out`. Errors as in `encode`.
        """
        blockwise.decode_sum(self.rule, payloads, out, scale=scale, block=self.block, weights=weights)
        return out

    def decode_apply(
        self,
        payloads: torch.Tensor,
        update: ElementwiseRule,
        arrays: Sequence[torch.Tensor],
        scalars: Sequence[float] = (),
        *,
        scale: float = 1.0,
        weights: torch.Tensor | Sequence[float] | None = None,
        replicas: torch.Tensor | None = None,
        each: Sequence[int] = (),
        counts: torch.Tensor | None = None,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        """Decodes payloads and applies a rule, such as an optimizer's, to their sum, in one pass, without writing the sum.

        The sum is that of `decode_sum`. Without `weights`, `replicas` and `each` it is an optimizer's gradient. Gossip adds the
        sum to a running total and each payload to the replica of its sender:
        `codec.decode_apply(payloads, ADDED, [total], weights=weights, replicas=replicas)`.

        Args:
            payloads: shape (ranks, payload_size(total)), uint8.
            update: the rule, whose second array is the sum; see `bagua_kernels.rules.optimizers` and `….gossip`.
            arrays: the rule's other arrays (parameters, moments, …), each of shape (n,); updated.
            scalars: the rule's scalars.
            scale: factor of the sum; 1 / ranks for the mean.
            weights: as in `decode_sum`.
            replicas: shape (ranks, n), float32, contiguous: what payload j decodes to is added to row j. None if there are none.
            each: places among the rule's arrays, in ascending order of the payloads: array `each[j]` is what payload j decodes
                to, without a weight. Such arrays are not among `arrays`.
            counts: as in `encode`, for the blocks of the arrays; other elements stay as they are.
            first: the block of the payloads with which the arrays begin.
            total: elements that the payloads are of; n by default.

        Raises:
            TypeError, ValueError: as in `encode`.
        """
        mixed: dict[str, Any] = {
            "scale": scale,
            "weights": weights,
            "replicas": replicas,
            "each": each,
            "counts": counts,
        }
        where: dict[str, Any] = {"block": self.block, "first": first, "total": total}
        fusion.decode_apply(self.rule, payloads, update, arrays, scalars, **mixed, **where)

    def decode_add(
        self, payloads: torch.Tensor, replicas: torch.Tensor, *, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds what each payload decodes to to its own row of `replicas`, in one pass.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8.
            replicas: shape (ranks, n), float32, contiguous; updated.
            counts: as in `encode`; other elements stay as they are.

        Returns:
            `replicas`. Errors as in `encode`.
        """
        fusion.decode_add(self.rule, payloads, replicas, block=self.block, counts=counts)
        return replicas

    def reduce(
        self,
        payloads: torch.Tensor,
        n: int,
        *,
        scale: float = 1.0,
        seed: int = 0,
        out: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes `scale` times the sum of all decoded payloads, without writing anything of float32 size.

        Args:
            payloads: shape (ranks, payload_size(n)), uint8; each is read once.
            n: number of elements.
            scale: factor of the sum.
            seed: of stochastic rounding.
            out: shape (payload_size(n),), uint8; made if None.
            counts: as in `encode`.

        Returns:
            The payload of the result. Errors as in `encode`.
        """
        out = self._payload(n, payloads.device, out)
        options: dict[str, Any] = {"scale": scale, "seed": self._seed(seed), "counts": counts}
        blockwise.reduce(self.rule, payloads, out, n=n, block=self.block, **options)
        return out

    def _payload(self, n: int, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
        return torch.empty(self.payload_size(n), dtype=torch.uint8, device=device) if out is None else out

    def _seed(self, seed: int) -> int | None:
        return seed if self.stochastic else None

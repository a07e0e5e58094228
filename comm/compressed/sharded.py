"""The two halves of the compressed all-reduce by themselves, for training whose optimizer is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import check_configuration, check_seed, check_vector
from bagua_kernels.comm.compressed.counts import Counts
from bagua_kernels.comm.compressed.layout import Layout, length, pipeline
from bagua_kernels.comm.compressed.memory import lent
from bagua_kernels.comm.compressed.phases import Gather, Pass, Scatter
from bagua_kernels.comm.compressed.residuals import restore, save
from bagua_kernels.comm.work import Steps, drive
from bagua_kernels.compression import Codec

P = TypeVar("P", bound=Pass)


class _Half(Generic[P]):
    """One pass over vectors of one size, with a residual if that is asked for."""

    _kind: type[P]
    _side: str  # name of the residual

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        n: int,
        dtype: torch.dtype,
        pieces: int | None,
        residual: bool,
        own: Sequence[slice] | None,
    ) -> None:
        check_configuration(codec, dtype, n=n)
        self.codec, self.communicator, self.n, self.dtype = codec, communicator, n, dtype
        self.layout = Layout.cut(codec, n, communicator.size, pieces)
        self.shard = self.layout.shard(communicator.rank)
        self._pass: P | None = None
        if communicator.size > 1:
            counts = Counts(codec, n, own, communicator.device)
            self._pass = self._kind(codec, communicator, self.layout, residual, counts=counts)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residual, if one is kept, float32, of the shape of what is encoded: "worker" or "owner"."""
        return save({self._side: self._pass.residuals if self._pass else None})

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes the residual of `state_dict`, or starts at zero again; ValueError if it has another size."""
        restore({self._side: self._pass.residuals if self._pass else None}, state)


class CompressedReduceScatter(_Half[Scatter]):
    """Gives each rank the mean, or the sum, of its chunk over all ranks; one pass over the wire, one rounding.

    1. The vector is cut into one chunk a rank, and each chunk is encoded.
    2. All-to-all: rank r receives everyone's payload of chunk r.
    3. Rank r decodes them and adds them up in float32 (`Codec.decode_sum`).

    A rank sends about one payload of the whole vector. Chunks go through these steps in pieces: the next is encoded, and the
    last one added up, while one is on its way. With one rank the result is the vector itself.

    Attributes:
        layout: how vectors are cut.
        shard: the elements of the vector that are this rank's chunk.
    """

    _kind, _side = Scatter, "worker"

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        n: int,
        dtype: torch.dtype = torch.float32,
        *,
        average: bool = True,
        worker_residual: bool = False,
        pieces: int | None = None,
        own: Sequence[slice] | None = None,
    ) -> None:
        """Prepares for vectors of a size.

        Args:
            codec: how chunks are encoded; equal on all ranks.
            communicator: the ranks that take part.
            n: elements of the vector.
            dtype: of the vector, float32, float16 or bfloat16.
            average: True to divide the sum by the number of ranks.
            worker_residual: True if each rank keeps what its payloads lack.
            pieces: number of pieces of a chunk, equal on all ranks; by default as many as pay.
            own: where tensors lie in the vector, as for `CompressedAllReduce`.

        Raises:
            TypeError: `codec` is not a codec, or the dtype cannot be encoded.
            ValueError: a number is too small, or the codec allows no residuals.
        """
        super().__init__(codec, communicator, n, dtype, pieces, worker_residual, own)
        self._scale = 1.0 / communicator.size if average else 1.0

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None, *, seed: int | None = None) -> torch.Tensor:
        """Reduces a vector.

        Args:
            x: shape (n,), contiguous, on the communicator's device; left as it is.
            out: shape (elements of `shard`,), contiguous, float32, float16 or bfloat16, not a part of `x` other than the shard
                itself; made in float32 if None.
            seed: identifies this message, equal on all ranks; may be left out where the codec draws no random
                numbers.

        Returns:
            `out`.

        Raises:
            TypeError, ValueError: a dtype, shape or device does not fit, or a seed is lacking.
            CommunicationError: a rank was lost or did not take part in time.
        """
        communicator, rank = self.communicator, self.communicator.rank
        check_vector("x", x, self.n, self.dtype, communicator)
        if out is None:
            out = torch.empty(length(self.shard), dtype=torch.float32, device=x.device)
        check_configuration(self.codec, out.dtype)
        check_vector("out", out, length(self.shard), out.dtype, communicator)
        number = check_seed(self.codec, seed, communicator.size == 1)
        if self._pass is None:
            return out.copy_(x)
        scatter, shard = self._pass, out

        def add_up(piece: int) -> Steps:
            payloads = yield from scatter.finish(piece)
            begin = piece * self.layout.piece
            part = shard[begin : begin + length(self.layout.part(piece, rank))]
            if part.numel():
                self.codec.decode_sum(payloads, part, self._scale)

        with lent(communicator, scatter.slots):
            drive(pipeline(self.layout.pieces, lambda piece: scatter.start(piece, x, number), add_up))
        return out


class CompressedAllGather(_Half[Gather]):
    """Gives all ranks the vector of which each has a chunk, with the same bits on all of them; one rounding.

    1. Each rank encodes its chunk.
    2. All-gather: everyone receives all payloads.
    3. Everyone decodes the same bytes, each rank its own chunk too.

    A rank sends its chunk's payload to every other. Chunks are those of `CompressedReduceScatter`, and go in pieces as there.
    With one rank the result is the vector itself.

    Attributes:
        layout: how vectors are cut.
        shard: the elements of the vector that are this rank's chunk.
    """

    _kind, _side = Gather, "owner"

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        n: int,
        dtype: torch.dtype = torch.float32,
        *,
        owner_residual: bool = False,
        pieces: int | None = None,
        own: Sequence[slice] | None = None,
    ) -> None:
        """Prepares for vectors of a size.

        Args:
            codec: how chunks are encoded; equal on all ranks.
            communicator: the ranks that take part.
            n: elements of the whole vector.
            dtype: of the chunk, float32, float16 or bfloat16.
            owner_residual: True if each rank keeps what its payloads lack.
            pieces: number of pieces of a chunk, equal on all ranks; by default as many as pay.
            own: where tensors lie in the vector, as for `CompressedAllReduce`.

        Raises:
            TypeError: `codec` is not a codec, or the dtype cannot be encoded.
            ValueError: a number is too small, or the codec allows no residuals.
        """
        super().__init__(codec, communicator, n, dtype, pieces, owner_residual, own)

    @torch.no_grad()
    def __call__(
        self, shard: torch.Tensor, out: torch.Tensor | None = None, *, seed: int | None = None
    ) -> torch.Tensor:
        """Gathers a vector.

        Args:
            shard: this rank's chunk, shape (elements of `self.shard`,), contiguous, on the communicator's device.
            out: shape (n,), contiguous, float32, float16 or bfloat16; made in the dtype of `shard` if None. `shard` may be its
                place in `out`, and is then replaced by what everyone decodes.
            seed: identifies this message, equal on all ranks; may be left out where the codec draws no random
                numbers.

        Returns:
            `out`.

        Raises:
            TypeError, ValueError: a dtype, shape or device does not fit, or a seed is lacking.
            CommunicationError: a rank was lost or did not take part in time.
        """
        check_vector("shard", shard, length(self.shard), self.dtype, self.communicator)
        if out is None:
            out = torch.empty(self.n, dtype=self.dtype, device=shard.device)
        check_configuration(self.codec, out.dtype)
        check_vector("out", out, self.n, out.dtype, self.communicator)
        number = check_seed(self.codec, seed, self.communicator.size == 1)
        if self._pass is None:
            return out if out.data_ptr() == shard.data_ptr() else out.copy_(shard)
        gather, whole = self._pass, out
        with lent(self.communicator, gather.slots):
            drive(
                pipeline(
                    self.layout.pieces,
                    lambda piece: gather.start(piece, shard, number),
                    lambda piece: gather.finish(piece, whole),
                )
            )
        return out

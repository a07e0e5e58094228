"""Exchange of encoded vectors with neighbours, as gossip needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import check_configuration, check_seed, check_vector
from bagua_kernels.comm.compressed.layout import first_seed
from bagua_kernels.compression import Codec


class NeighbourExchange:
    """Sends one vector to some ranks and receives those of some, encoded; ranks without neighbours need not take part.

    1. The vector is encoded, once for all who get it.
    2. The payload goes to the neighbours, and theirs arrive.
    3. What arrived is decoded, or added up with weights.

    Buffers are made when a neighbour is first met, and kept.
    """

    def __init__(
        self, codec: Codec, communicator: Communicator, n: int, dtype: torch.dtype = torch.float32, *, tag: int = 0
    ) -> None:
        """Prepares for vectors of a size.

        Args:
            codec: how vectors are encoded; equal on all ranks.
            communicator: the ranks among which the neighbours are.
            n: elements of the vector.
            dtype: of the vector, float32, float16 or bfloat16.
            tag: identifies an exchange among those under way.

        Raises:
            TypeError: `codec` is not a codec, or the dtype cannot be encoded.
            ValueError: a number is negative.
        """
        check_configuration(codec, dtype, n=n, tag=tag)
        self.codec, self.communicator, self.n, self.dtype, self.tag = codec, communicator, n, dtype, tag
        self._size = codec.payload_size(n)
        self._sent = torch.zeros(self._size, dtype=torch.uint8, device=communicator.device)
        self._received: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, x: torch.Tensor, peers_in: Collection[int], peers_out: Collection[int], *, seed: int | None = None
    ) -> dict[int, torch.Tensor]:
        """Exchanges vectors.

        Args:
            x: shape (n,), contiguous, on the communicator's device; left as it is.
            peers_in: the ranks to hear from, each of which names this rank in its `peers_out`.
            peers_out: the destinations.
            seed: identifies this message, equal on all ranks. The sender's rank is folded in, unless the ranks of
                the codec share seeds (`RandomK`). May be left out where the codec draws no random numbers.

        Returns:
            For each of `peers_in`, in ascending order, its decoded vector, shape (n,), in the dtype of `x`.

        Raises:
            TypeError, ValueError: a dtype, shape, device or rank does not fit, or a seed is lacking.
            CommunicationError: a rank was lost or did not take part in time.
        """
        received = self._exchange(x, peers_in, peers_out, seed)
        return {rank: self.codec.decode(payload, torch.empty_like(x)) for rank, payload in received.items()}

    @torch.no_grad()
    def mix(
        self,
        x: torch.Tensor,
        own_weight: float,
        weights_in: Mapping[int, float],
        peers_out: Collection[int],
        *,
        seed: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Exchanges vectors and gives `own_weight` times `x` plus what arrives, each times its sender's weight.

        The sum is taken in float32, `x` first and then in ascending order of the ranks; `x` itself is not rounded.

        Args:
            x: as above.
            own_weight: weight of `x`.
            weights_in: the ranks to hear from, with their weights.
            peers_out: as above.
            seed: as above.
            out: shape (n,), contiguous, of the dtype of `x`, may be `x`; made if None.

        Returns:
            `out`. Errors as above.
        """
        if out is not None:
            # Before anything is sent, so that no neighbour waits for a rank that then fails.
            check_vector("out", out, self.n, self.dtype, self.communicator)
        received = self._exchange(x, weights_in.keys(), peers_out, seed)
        total = x.float() * own_weight
        decoded = torch.empty_like(total)
        for rank, payload in received.items():
            total.add_(self.codec.decode(payload, decoded), alpha=weights_in[rank])
        return (torch.empty_like(x) if out is None else out).copy_(total)

    def _exchange(
        self, x: torch.Tensor, peers_in: Collection[int], peers_out: Collection[int], seed: int | None
    ) -> dict[int, torch.Tensor]:
        communicator = self.communicator
        check_vector("x", x, self.n, self.dtype, communicator)
        number = check_seed(self.codec, seed, communicator.size == 1)
        if self.n and peers_out:
            self.codec.encode(x, seed=first_seed(self.codec, number, communicator.rank, 0), out=self._sent)
        for rank in peers_in:
            if rank not in self._received:
                self._received[rank] = torch.empty_like(self._sent)
        received = {rank: self._received[rank] for rank in sorted(peers_in)}
        communicator.neighbour_exchange(received, dict.fromkeys(sorted(peers_out), self._sent), self.tag).wait()
        return received
